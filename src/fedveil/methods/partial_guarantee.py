"""What a method under partial encryption guarantees: against the server, key holders, and readers of the models.

========================  ===========================================================================================
party                     what stands between it and one unit's data
========================  ===========================================================================================
the server                encryption for one part; for the other the noise of every single message
one silo or client        it decrypts the sum of all messages: the noise of the others' shares, in both parts if both
                          have noise, else nothing
readers of the models     the noise of all shares, in both parts if both have noise, else nothing
the server with a silo    the key opens every single message: its noise, in both parts if both have noise, else nothing
========================  ===========================================================================================

Two parts that are bounded by C_1 and C_2 and carry noise of multipliers z_1 and z_2 are one Gaussian release: scaled to
noise 1, they move by at most sqrt(1/z_1^2 + 1/z_2^2) together. Under a joint bound C they move by C / min(s_1, s_2).
Noisy votes are a further Gaussian release, and several Gaussian releases in sequence are one with
z = (sum_i z_i^-2)^(-1/2).

The server sees no model, but every message depends on one. If the encrypted part has no noise, a model may tell all of
one unit's data, and so every part in clear may move, from anywhere to anywhere in its ball of radius B: by 2 B sqrt(n)
together, whatever the partition. If it has, the server's view is bounded by what it and a reader see together.
docs/theory/partial-encryption.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedveil.methods.claims import Federation, Guarantee, Published
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.method import Method
from fedveil.methods.protections import PartialEncryption
from fedveil.methods.stages import ClientContribution, GaussianShares, SiloUserContribution, Weights, grid_law
from fedveil.methods.views import View
from fedveil.privacy.bounds import Clip
from fedveil.privacy.closed_form import remark_1_noise
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    NoGuarantee,
)
from fedveil.privacy.sampling import AnySampler, UniformClients, knowing_one

BARE = (
    "the encrypted part carries no noise (he_noise = 0), and whoever holds the key or reads a model sees it"
)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The noise of one message, and what it hides.

    Attributes:
        std: of the clear part, per coordinate; 0 for none.
        count: how many messages are summed, each with its own share.
        moved: how far one unit moves the sum, in l2.
        single: how far it moves all messages together, one by one.
        reach: how far a message can move within its ball, counted once where accountants double what is replaced.
        ballots: how many ballots one unit can change, given the model.
    """

    std: float
    count: int
    moved: float
    single: float
    reach: float
    ballots: int


def shares_of(method: Method, *, n_silos: int, n_users: int, moved: float, single: float) -> Shares:
    """Return the noise of a method's messages, given how far one unit moves their sum, and all of them together."""
    channel = method.channel
    std, count = 0.0, n_silos
    if isinstance(channel, GaussianShares):
        std = channel.share_std(n_silos)
    elif isinstance(channel, ClientMessages):
        std, count = channel.noise_multiplier * (channel.bound or 0.0), channel.senders
    ballots = 1 if isinstance(method.contribution, ClientContribution) else n_silos
    doubled = method.sampler.adjacency is Adjacency.REPLACE_ONE
    reach = message_bound(method, n_silos, n_users) * (1 if doubled else 2)
    return Shares(std=std, count=count, moved=moved, single=single, reach=reach, ballots=ballots)


def message_bound(method: Method, n_silos: int, n_users: int) -> float:
    """Return the largest l2 norm of a message before its noise; 0 where contributions are not bounded."""
    if not isinstance(method.bound, Clip):
        return 0.0
    contributions = n_users if isinstance(method.contribution, SiloUserContribution) else 1
    weight = 1 / n_silos if method.weights is Weights.UNIFORM else 1.0
    return contributions * weight * method.bound.norm


def under_partial_encryption(
    method: Method, protection: PartialEncryption, shares: Shares, federation: Federation
) -> Guarantee:
    """Return what one round guarantees, given what :func:`shares_of` gave."""
    party = "client" if isinstance(method.contribution, ClientContribution) else "silo"
    sampler = method.sampler
    readers = _sampled(sampler, _sum(protection, shares, shares.count))
    views = (
        View(
            party="the server, which holds no key",
            sees=_server_sees(protection, party),
            event=_in_clear(protection, shares),
        ),
        View(
            party=f"one {party}, which holds the key",
            sees="the decrypted sum, the partition, its own data and its own share of the noise",
            event=_sampled(knowing_one(sampler), _sum(protection, shares, shares.count - 1)),
        ),
        View(
            party="whoever reads the models",
            sees="the models, from which the decrypted sums follow",
            event=readers,
        ),
        View(
            party=f"the server with one {party}",
            sees="every message whole, because the key opens each: the protocol excludes it",
            event=_every_message(protection, shares),
        ),
    )
    return Guarantee(
        adjacency=sampler.adjacency,
        event=readers,
        mechanisms=_mechanisms(method, protection, shares),
        views=views,
        uncovered=_uncovered(protection),
        published=_published(method, protection, shares, federation),
        grid_loss=_grid_loss(method, protection, shares),
    )


def _published(
    method: Method, protection: PartialEncryption, shares: Shares, federation: Federation
) -> tuple[Published, ...]:
    """The epsilon that Remark 1 of the paper states for this noise."""
    if protection.clip != "parts" or not federation.silo_records or not isinstance(method.bound, Clip):
        return ()
    sensitivity = 2 * method.bound.norm / max(federation.silo_records)

    def remark_1(rounds: int, delta: float) -> float:
        return remark_1_noise(rounds=rounds, epsilon=shares.std / sensitivity, delta=delta)

    gap = (
        "it takes 2 theta / |D_i| for what one record moves, but a record that is used in several local steps can move "
        "a clipped update by 2 theta; it says nothing of a client, and nothing of the encrypted part"
    )
    return (Published(name="Remark 1 of ParaAegis", gap=gap, epsilon=remark_1),)


def _sampled(sampler: AnySampler, event: Event) -> Event:
    """Return an event over the sample; what guarantees nothing, or is not Gaussian, is not amplified."""
    return sampler.event(event) if isinstance(event, GaussianEvent) else event


def _in_clear(protection: PartialEncryption, shares: Shares) -> Event:
    """Return what the server gets: the part in clear of every message, and the counts of noisy votes."""
    if shares.std == 0 and not protection.whole:
        return NoGuarantee(reason="the part in clear carries no noise")
    if protection.ratio > 0 and protection.he_noise == 0:
        moved = shares.reach * math.sqrt(shares.count)
        clear = 0.0 if protection.whole else (moved / shares.std) ** 2
        return _released(clear, _votes(protection, shares.count, shares.count, shares.count))
    if protection.whole:
        return ComposedEvent(events=())
    summed = shares.moved / (shares.std * math.sqrt(shares.count))
    parts = _together(protection, (shares.single / shares.std) ** 2, summed**2)
    return _released(parts, _votes(protection, shares.count, shares.count, shares.ballots))


def _sum(protection: PartialEncryption, shares: Shares, unknown: int) -> Event:
    """Return the event of the sum for whoever knows all shares of the noise but ``unknown`` ones."""
    if unknown < 1:
        return NoGuarantee(reason="no share of the noise is left")
    return _both_parts(protection, shares, shares.std * math.sqrt(unknown), shares.moved, unknown)


def _every_message(protection: PartialEncryption, shares: Shares) -> Event:
    return _both_parts(protection, shares, shares.std, shares.single, max(1, shares.count - 1))


def _both_parts(
    protection: PartialEncryption, shares: Shares, std: float, moved: float, unknown: int
) -> Event:
    """Return the event of both parts, with noise of this size in the clear one, and of the votes."""
    if protection.ratio > 0 and protection.he_noise == 0:
        return NoGuarantee(reason=BARE)
    if std == 0:
        return NoGuarantee(reason="no noise is added")
    clear = 0.0 if protection.whole else (moved / std) ** 2
    parts = _together(protection, clear, (moved / std) ** 2)
    return _released(parts, _votes(protection, shares.count, unknown, shares.ballots))


def _together(protection: PartialEncryption, clear: float, plain: float) -> float:
    """Return the precision 1/z^2 of both parts, given that of the clear one, and of the other with the same noise."""
    hidden = plain / protection.he_noise**2 if protection.ratio > 0 else 0.0
    return clear + hidden if protection.clip == "parts" else max(clear, hidden)


def _votes(protection: PartialEncryption, count: int, unknown: int, ballots: int) -> float:
    """Return the precision 1/z^2 of the counts of noisy votes, ``unknown`` of whose shares of noise are unknown.

    A ballot has k ones, and any other k ones may take their place: it moves by sqrt(2 k), sqrt(2) ballots' norms. The
    noise of all ``count`` silos together is vote_noise sqrt(k).
    """
    if protection.vote_noise == 0 or not protection.asks:
        return 0.0
    return (math.sqrt(2) * ballots / protection.vote_noise) ** 2 * count / unknown


def _released(parts: float, votes: float) -> Event:
    """Return the release of parts and noisy counts of votes, each with its precision 1/z^2; nothing at 0 and 0.

    Noise on counts has whole steps, so that only its Renyi divergences are known to be a Gaussian's.
    """
    if parts + votes == 0:
        return ComposedEvent(events=())
    multiplier = 1 / math.sqrt(parts + votes)
    if votes:
        return ConcentratedEvent(noise_multiplier=multiplier)
    return GaussianEvent(noise_multiplier=multiplier)


def _server_sees(protection: PartialEncryption, party: str) -> str:
    clear = (
        "ciphertexts" if protection.whole else f"every {party}'s part in clear, and of the rest ciphertexts"
    )
    ballots = {
        "plain": f"every {party}'s ballot in an order that is secret and new in every round",
        "secagg": "how many coordinates have how many votes",
    }
    return f"{clear}; {ballots[protection.votes]}; no model" if protection.asks else f"{clear}; no model"


def _mechanisms(method: Method, protection: PartialEncryption, shares: Shares) -> tuple[str, ...]:
    share = f"{protection.ratio:g}" + (
        f" x {protection.decay:g}^(t-1) in round t" if protection.decay < 1 else ""
    )
    origin = {
        "votes": f"the coordinates with most votes for their {protection.strategy} size",
        "noisy-votes": f"those with most votes, counted with noise of {protection.vote_noise:g} ballots' norms",
        "released": "those that the released models have moved most",
    }[protection.partition]
    if protection.strategy == "random":
        origin = "drawn at random"
    if protection.whole:
        origin = "all"
    bound = method.bound.norm if isinstance(method.bound, Clip) else None
    noise = f"noise of std {shares.std:g} in every message's part in clear" if shares.std else "no noise"
    told = [
        f"partial encryption (CKKS, 128 bits, sums exact): a share of {share} of the coordinates, {origin}; "
        f"{noise}, {protection.he_noise:g} times that in the encrypted part, each in units of its bound"
    ]
    if bound is not None and protection.clip == "parts":
        hidden = "not at all" if protection.he_clip is None else f"to {protection.he_clip:g}"
        told.append(f"every client's part in clear is clipped to {bound:g} (l2), its encrypted part {hidden}")
    elif bound is not None:
        told.append(f"every contribution is clipped to {bound:g} (l2) before it is divided")
    if isinstance(method.sampler, UniformClients):
        drawn = f"{method.sampler.sample} of {method.sampler.population}"
        told.append(f"{drawn} clients take part in a round, drawn uniformly without replacement")
    return tuple(told)


def _uncovered(protection: PartialEncryption) -> tuple[str, ...]:
    found = [
        "ciphertexts hide what is in them from whoever cannot solve ring-LWE at 128 bits; no epsilon covers that"
    ]
    if protection.unpaid:
        seen = (
            "which ballots overlap in how many coordinates"
            if protection.votes == "plain"
            else "how many votes how many coordinates have"
        )
        found.append(
            f"the server learns no coordinate that was voted for, but {seen}: epsilon against it covers the numbers in "
            "clear, whatever the partition, and not the ballots; partition = 'released' or 'noisy-votes', or "
            "strategy = 'random', leaves nothing open"
        )
    return tuple(found)


def _grid_loss(method: Method, protection: PartialEncryption, shares: Shares) -> float:
    """Return the larger of the two parts' losses: a coordinate is in one part alone."""
    if shares.std == 0:
        return 0.0
    grid = method.bound.grid
    losses = [grid_law(shares.std, grid).log_ratio_to_gaussian]
    if protection.he_noise:
        std, hidden = hidden_noise(method, protection, shares.std)
        losses.append(grid_law(std, hidden).log_ratio_to_gaussian)
    return 2 * shares.count * max(losses)


def hidden_noise(method: Method, protection: PartialEncryption, std: float) -> tuple[float, float]:
    """Return the standard deviation of a message's noise in its encrypted part, and the grid of what it hides there."""
    bound = method.bound
    if not isinstance(bound, Clip):
        return 0.0, bound.grid
    hidden = bound if protection.he_clip is None else replace(bound, norm=protection.he_clip)
    return protection.he_noise * std * hidden.norm / bound.norm, hidden.grid

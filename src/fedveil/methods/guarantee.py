"""What a composition guarantees, derived stage by stage from the method itself.

=====================  ===========================================================================================
stage                  what it contributes
=====================  ===========================================================================================
contribution, bound    the l2 sensitivity of the sum to one user
weights                how a user's influence is spread over the silos
sampler                adjacency, and amplification by sub-sampling
channel                the noise law, its share per silo, who knows which share
local (DP-SGD only)    the noise of every local step, and the group conversion from records to users
denoiser               nothing: it reads no record (post-processing)
protection             what the server sees: every silo's own message, or under secure aggregation their sum
=====================  ===========================================================================================

The unit is the user with all her records in all silos, or, where clients contribute, the client. The sampler says
which neighbours are compared: adding or removing one, or replacing one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from fedveil.local.steps import LocalDpSgd
from fedveil.methods.method import Method
from fedveil.methods.protections import NO_PROTECTION, Protection, SecureAggregation
from fedveil.methods.stages import (
    CentralGaussian,
    ClientContribution,
    GaussianShares,
    Identity,
    LayeredShares,
    RecordContribution,
    SiloContribution,
    Weights,
    grid_law,
)
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.privacy.events import Adjacency, Event, GaussianEvent, NoGuarantee, SelfComposedEvent
from fedveil.privacy.fixed_size import published_epsilon
from fedveil.privacy.group import published, worst_split
from fedveil.privacy.sampling import Everyone, PoissonUsers, UniformClients
from fedveil.server.denoise import NoDenoiser


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The public facts of a federation that a guarantee depends on.

    Attributes:
        n_silos: |S|.
        n_users: |U|.
        silo_records: records each silo trains on; only DP-SGD inside the silos depends on it.
    """

    n_silos: int
    n_users: int
    silo_records: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """One party, what it sees, and the privacy event of one round against it."""

    party: str
    sees: str
    event: Event


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure in the literature that the derivation does not support.

    Attributes:
        name: where it stands.
        gap: what its theory misses.
        epsilon: the figure as a function of (rounds, delta).
    """

    name: str
    gap: str
    epsilon: Callable[[int, float], float]


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What one round of a method guarantees, and against whom.

    Attributes:
        adjacency: which neighbouring data the guarantee compares.
        event: the privacy event of one round against whoever reads the models: this is what the ledger is charged.
        unit: who is protected as a whole.
        mechanisms: every mechanism in words, with its parameters.
        views: the parties other than readers of the models.
        uncovered: choices that depend on private data and that the event does not account for.
        published: figures in the literature that the derivation does not support.
        grid_loss: what a round costs in epsilon, per coordinate, because its noise lies on a grid.
    """

    adjacency: Adjacency
    event: Event
    unit: Literal["user", "client"] = "user"
    mechanisms: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    uncovered: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    grid_loss: float = 0.0


def derive(method: Method, federation: Federation) -> Guarantee:
    """Return what one round of the method guarantees in this federation."""
    guarantee = _of_stages(method, federation)
    if isinstance(method.contribution, ClientContribution):
        guarantee = replace(guarantee, unit="client")
    if not isinstance(method.denoiser, NoDenoiser):
        note = f"the server denoises the noisy mean ({method.denoiser.description}): post-processing, free of charge"
        guarantee = replace(guarantee, mechanisms=(*guarantee.mechanisms, note))
    return guarantee


def _of_stages(method: Method, federation: Federation) -> Guarantee:
    """Return what the stages before the denoiser guarantee."""
    if isinstance(method.contribution, RecordContribution):
        return _dp_sgd(method, federation)
    if isinstance(method.bound, Unbounded):
        return _none("contributions are not bounded and no noise is added")
    if isinstance(method.channel, LayeredShares):
        return _layered_shares(method, method.channel, method.bound.norm, federation)
    if isinstance(method.channel, Identity) or method.channel.noise_multiplier == 0:
        return _none("no noise is added to the sums", method.protection)
    if isinstance(method.channel, CentralGaussian):
        return _central(method, method.channel, method.bound, federation)
    return _gaussian_shares(method, method.channel, method.bound.norm, federation)


def sensitivity(method: Method, clip: float, federation: Federation) -> float:
    """Return the l2 sensitivity of the sum over all silos to adding or removing one user.

    Pairs: the user's weighted, clipped updates come or go; their weights sum to at most 1: C.
    Clients: one clipped update comes or goes: C. (Replacing it moves the sum by 2 C, which accountants count.)
    Silos: every silo's update may move from anywhere to anywhere in the ball of radius C: 2 C |S|. (Theorem 1 of the
    paper counts C |S|, as if a silo's update were absent without the user.)
    """
    if isinstance(method.contribution, SiloContribution):
        return 2.0 * clip * federation.n_silos
    return clip


def _none(reason: str, protection: Protection = NO_PROTECTION) -> Guarantee:
    event = NoGuarantee(reason=reason)
    masked = isinstance(protection, SecureAggregation)
    sees = "masked messages, and of them only the sum" if masked else "every silo's message"
    server = View(party="the server", sees=f"{sees}, without noise", event=event)
    return Guarantee(adjacency=Adjacency.ADD_OR_REMOVE_ONE, event=event, views=(server,))


def _gaussian_shares(
    method: Method,
    channel: GaussianShares,
    clip: float,
    federation: Federation,
    law: str = "discrete Gaussian shares",
) -> Guarantee:
    n_silos = federation.n_silos
    moved = sensitivity(method, clip, federation)
    share = channel.share_std(n_silos)
    nominal = channel.noise_multiplier * channel.scale / moved

    def against(silos_known: int) -> Event:
        """The sum's event against silos that know their shares of the noise, and which of their users take part."""
        unknown = n_silos - silos_known
        if unknown == 0:
            return NoGuarantee(reason="no share of the noise is left")
        return GaussianEvent(noise_multiplier=share * math.sqrt(unknown) / moved)

    whole_sum = f"the sum over {n_silos} silos moves by at most {moved:g} (l2) with one user"
    noise = f"{law} of std {share:g} per silo, noise multiplier {nominal:g} of the sum"
    mechanisms = [f"every round: {whole_sum}; {noise}"]
    mechanisms.extend(_sampling(method, "user"))
    masked = isinstance(method.protection, SecureAggregation)
    if masked:
        mechanisms.append("secure aggregation: pairwise masks hide every silo's message in the sum")
    coalition = max(1, channel.colluding_silos)
    views = _views_of_shares(
        method,
        n_silos,
        coalition,
        to_server=GaussianEvent(
            noise_multiplier=nominal if masked else share / _single_message_move(method, clip, n_silos)
        ),
        to_coalition=against(coalition),
    )
    uncovered: tuple[str, ...] = ()
    if masked and method.weights is Weights.BY_RECORDS:
        uncovered = (
            "the weights need every user's number of records over all silos; secure aggregation does not hide how the "
            "silos learn it",
        )
    return Guarantee(
        adjacency=method.sampler.adjacency,
        event=method.sampler.event(GaussianEvent(noise_multiplier=nominal)),
        mechanisms=tuple(mechanisms),
        views=views,
        uncovered=uncovered,
        published=_published(method, channel),
        grid_loss=2 * n_silos * grid_law(share, method.bound.grid).log_ratio_to_gaussian,
    )


def _views_of_shares(
    method: Method, n_silos: int, coalition: int, *, to_server: Event, to_coalition: Event
) -> tuple[View, ...]:
    """Return who sees what where every silo adds its share of the noise.

    Under secure aggregation a server that knows some silos' messages learns the sum of the others, with the others'
    shares. Without it, a silo's message is no secret to begin with.
    """
    drawn = ", and who was sampled" if isinstance(method.sampler, PoissonUsers) else ""
    silo = View(
        party="one silo",
        sees="the models, its own records and its own share of the noise",
        event=to_coalition,
    )
    if not isinstance(method.protection, SecureAggregation):
        sees = f"every silo's own noisy sum (no protocol hides it in this run){drawn}"
        return View(party="the server", sees=sees, event=to_server), silo
    sees = f"masked messages, and of them only the sum over all silos{drawn}"
    others = f"the noisy sum over the {n_silos - coalition} other silos{drawn}"
    return (
        View(party="the server", sees=sees, event=to_server),
        silo,
        View(
            party="the server with one silo" if coalition == 1 else f"the server with {coalition} silos",
            sees=f"{others}; guaranteed to what a user holds there",
            event=to_coalition,
        ),
    )


def _layered_shares(method: Method, channel: LayeredShares, clip: float, federation: Federation) -> Guarantee:
    """The noise of :func:`_gaussian_shares`, against whoever sees decoded sums and holds no key of a message.

    Who holds the key knows the latent of every sub-vector, hence a ball in which the sum lies: there is no noise of
    unbounded support left, and no epsilon. The spreads of blocks, how they were sent, and the length of the message
    depend on the sum as well.
    """
    law = "Gaussian shares, each the compression error of a silo's message (LRSUQ),"
    shares = _gaussian_shares(method, channel.shares, clip, federation, law)
    reason = "the key of a message bounds the error of every parameter, and blocks' spreads depend on the sum"
    server = View(
        party="the server, and whoever holds the key of a message",
        sees=f"every silo's message and the latents and dithers of its key: it is trusted, because {reason}",
        event=NoGuarantee(reason=reason),
    )
    return replace(
        shares,
        views=(server, *shares.views[1:]),
        uncovered=(
            *shares.uncovered,
            "messages must travel encrypted: their length and the spreads in them depend on private sums, and so "
            "do the message sizes and information limits in metrics.jsonl",
            "the channel's noise is exactly Gaussian in real numbers; it is computed in float64 from 52-bit uniforms "
            "of a ChaCha20 stream under a fresh key, and epsilon covers neither the rounding nor a broken cipher",
        ),
        grid_loss=0.0,
    )


def _central(method: Method, channel: CentralGaussian, bound: Clip, federation: Federation) -> Guarantee:
    """A server that is trusted with the sum and adds the noise; readers of the models see only what it releases."""
    unit = "client" if isinstance(method.contribution, ClientContribution) else "user"
    replaced = method.sampler.adjacency is Adjacency.REPLACE_ONE
    moved = sensitivity(method, bound.norm, federation)
    neighbours = f"replacing one {unit}" if replaced else f"one {unit} more or less"
    base = GaussianEvent(noise_multiplier=channel.std / moved)
    uncovered: tuple[str, ...] = ()
    if method.denominator == "actual" and isinstance(method.sampler, PoissonUsers):
        uncovered = (
            "the sum is divided by the number of clients drawn in the round (method.denominator = 'actual'), which "
            "is private under Poisson sampling: epsilon does not cover dividing by it",
        )
    return Guarantee(
        adjacency=method.sampler.adjacency,
        event=method.sampler.event(base),
        mechanisms=(
            f"every round: {neighbours} moves the sum by at most {2 * moved if replaced else moved:g} (l2); the "
            f"server adds discrete Gaussian noise of std {channel.std:g}, {channel.std / moved:g} times the bound "
            "of one contribution",
            *_sampling(method, unit),
        ),
        views=(
            View(
                party="the server",
                sees=f"every {unit}'s own update, before the noise: it is trusted",
                event=NoGuarantee(reason="the server adds the noise itself"),
            ),
            View(
                party=f"one {unit}",
                sees=f"the models it is sent, and whether it was drawn; guaranteed to every other {unit}",
                event=_knowing_one(method.sampler).event(base),
            ),
        ),
        uncovered=uncovered,
        published=_published_sampling(method, channel, bound.norm),
        grid_loss=2 * grid_law(channel.std, bound.grid).log_ratio_to_gaussian,
    )


def _sampling(method: Method, unit: str) -> tuple[str, ...]:
    """Say who takes part in a round, where not everyone does."""
    sampler = method.sampler
    if isinstance(sampler, PoissonUsers):
        return (f"each {unit} takes part in a round with probability {sampler.rate:g} (Poisson)",)
    if isinstance(sampler, UniformClients):
        drawn = f"{sampler.sample} of {sampler.population} {unit}s"
        return (f"{drawn} take part in a round, drawn uniformly without replacement",)
    return ()


def _knowing_one(
    sampler: Everyone | PoissonUsers | UniformClients,
) -> Everyone | PoissonUsers | UniformClients:
    """Return the sampler of the others, as one who knows of its own draw sees it.

    Poisson draws are independent. Of a sample of fixed size m out of n, m or m - 1 of the other n - 1 are drawn: the
    amplification of m of n - 1 covers both.
    """
    if isinstance(sampler, UniformClients) and sampler.sample < sampler.population:
        return UniformClients(population=sampler.population - 1, sample=sampler.sample)
    return sampler


def _published_sampling(method: Method, channel: CentralGaussian, clip: float) -> tuple[Published, ...]:
    """The budget that Tables 3 and 6 of DP-Fed-LS print for this noise, if clients are sampled as they were."""
    sampler = method.sampler
    if not isinstance(sampler, UniformClients) or not isinstance(method.contribution, ClientContribution):
        return ()

    def tables(rounds: int, delta: float) -> float:
        return published_epsilon(sampler.rate, channel.std / clip, rounds, delta)

    gap = "replacing a client moves the sum by 2L, as Theorem 1 says, but the tables take L"
    return (Published(name="Tables 3 and 6 of DP-Fed-LS (sensitivity L)", gap=gap, epsilon=tables),)


def _published(method: Method, channel: GaussianShares) -> tuple[Published, ...]:
    if not isinstance(method.contribution, SiloContribution):
        return ()

    def theorem_1(rounds: int, delta: float) -> float:
        event = GaussianEvent(noise_multiplier=channel.noise_multiplier)
        return make_accountant("rdp").epsilon(SelfComposedEvent(event=event, count=rounds), delta)

    gap = "it counts C|S| as the sensitivity, but a silo's clipped update can move by 2C"
    return (Published(name="Theorem 1 of ULDP-FL", gap=gap, epsilon=theorem_1),)


def _single_message_move(method: Method, clip: float, n_silos: int) -> float:
    """Return the l2 move of all silos' messages together (not of their sum) with one user."""
    if isinstance(method.contribution, SiloContribution):
        return 2.0 * clip * math.sqrt(n_silos)
    if method.weights is Weights.UNIFORM:
        return clip / math.sqrt(n_silos)
    return clip


def _dp_sgd(method: Method, federation: Federation) -> Guarantee:
    local = method.local
    assert isinstance(local, LocalDpSgd)
    assert isinstance(method.contribution, RecordContribution)
    assert isinstance(method.bound, Clip)
    per_user = method.contribution.per_user
    if local.noise_multiplier == 0:
        return _none("DP-SGD runs without noise")
    if federation.silo_records is None:
        return _none("the number of records in each silo is not known")
    plans = tuple(local.plan(records) for records in federation.silo_records)
    sigma, silos = local.noise_multiplier, tuple((plan.rate, plan.steps) for plan in plans)
    law = grid_law(sigma * method.bound.norm, method.bound.grid)
    event, split = worst_split(group_size=per_user, noise_multiplier=sigma, silos=silos)

    def theorem_2(rounds: int, delta: float) -> float:
        whole_run = tuple((rate, steps * rounds) for rate, steps in silos)
        return published(group_size=per_user, noise_multiplier=sigma, silos=whole_run, delta=delta)

    gap = "it uses Renyi orders that the lemma excludes, and rounds the group size down to a power of two"
    return Guarantee(
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        event=event,
        mechanisms=(
            f"DP-SGD in every silo: noise multiplier {sigma:g}, "
            + "; ".join(f"rate {p.rate:g} for {p.steps} steps a round" for p in plans),
            f"a user keeps at most {per_user} records over all silos; every split over the silos is covered "
            f"(the nearest: {split})",
        ),
        views=(
            View(party="the server", sees="every silo's own noisy model", event=event),
            View(party="one silo", sees="the models, its own records and its own noise", event=event),
        ),
        uncovered=("the number of records each silo keeps sets its batch rate and counts as public",),
        grid_loss=2 * sum(plan.steps for plan in plans) * law.log_ratio_to_gaussian,
        published=(
            Published(name="Theorem 2 of ULDP-FL, as its program computes it", gap=gap, epsilon=theorem_2),
        ),
    )

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
protection             what the server sees: every silo's own message, or their sum alone; private weighting also rounds
                       the sum, which adds to its sensitivity
=====================  ===========================================================================================

The unit is the user with all her records in all silos, or, where clients contribute, the client. The sampler says
which neighbours are compared: adding or removing one, or replacing one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fedveil.errors import PrivacyError
from fedveil.local.steps import LocalDpSgd
from fedveil.methods.claims import Federation, Guarantee, Published
from fedveil.methods.client_guarantee import KEY_REASON, OF_LAYERS, of_client_messages
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.method import Method
from fedveil.methods.partial_guarantee import shares_of, under_partial_encryption
from fedveil.methods.protections import (
    NO_PROTECTION,
    NoProtection,
    PartialEncryption,
    PrivateWeighting,
    Protection,
)
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
from fedveil.methods.views import View, hiding, views_of_shares
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.privacy.events import Adjacency, Event, GaussianEvent, NoGuarantee, SelfComposedEvent
from fedveil.privacy.fixed_size import published_epsilon
from fedveil.privacy.group import published, worst_split
from fedveil.privacy.sampling import PoissonUsers, UniformClients, knowing_one
from fedveil.protection.weighting_plan import rounded_sensitivity
from fedveil.server.denoise import NoDenoiser

__all__ = ["Federation", "Guarantee", "Published", "View", "derive", "sensitivity"]


def derive(method: Method, federation: Federation) -> Guarantee:
    """Return what one round of the method guarantees in this federation."""
    guarantee = _of_stages(method, federation)
    if isinstance(method.contribution, ClientContribution):
        guarantee = replace(guarantee, unit="client")
    guarantee = replace(guarantee, noise_decay=method.noise_decay)
    if not isinstance(method.denoiser, NoDenoiser):
        note = f"the server denoises the noisy mean ({method.denoiser.description}): post-processing, free of charge"
        guarantee = replace(guarantee, mechanisms=(*guarantee.mechanisms, note))
    return guarantee


def _of_stages(method: Method, federation: Federation) -> Guarantee:
    """Return what the stages before the denoiser guarantee."""
    if isinstance(method.contribution, RecordContribution):
        return _dp_sgd(method, federation)
    if isinstance(method.protection, PartialEncryption):
        return _partly_encrypted(method, method.protection, federation)
    if isinstance(method.channel, ClientMessages):
        return of_client_messages(method, method.channel, federation)
    if isinstance(method.bound, Unbounded):
        return _none("contributions are not bounded and no noise is added")
    if isinstance(method.channel, LayeredShares):
        return _layered_shares(method, method.channel, method.bound.norm, federation)
    if isinstance(method.channel, Identity) or method.channel.noise_multiplier == 0:
        return _none("no noise is added to the sums", method.protection)
    if isinstance(method.channel, CentralGaussian):
        assert isinstance(method.bound, Clip)
        return _central(method, method.channel, method.bound, federation)
    return _gaussian_shares(method, method.channel, method.bound.norm, federation)


def sensitivity(method: Method, clip: float, federation: Federation) -> float:
    """Return the l2 sensitivity of the sum over all silos to adding or removing one user.

    Pairs: the user's weighted, clipped updates come or go; their weights sum to at most 1: C.
    Clients: one clipped update comes or goes: C. (Replacing it moves the sum by 2 C, which accountants count.)
    Silos: every silo's update may move from anywhere to anywhere in the ball of radius C: 2 C |S|. (Theorem 1 of the
    paper counts C |S|, as if a silo's update were absent without the user.)
    Under private weighting the sum is rounded to the grid g of the messages: C + sqrt(d) g.
    """
    if isinstance(method.contribution, SiloContribution):
        return 2.0 * clip * federation.n_silos
    if isinstance(method.protection, PrivateWeighting):
        if federation.dimension is None:
            raise PrivacyError(
                "the guarantee of private weighting depends on the number of parameters: give it"
            )
        assert isinstance(method.channel, GaussianShares)
        grid = method.channel.message_grid(method.bound.grid, federation.n_silos)
        return rounded_sensitivity(clip, federation.dimension, grid)
    return clip


def _partly_encrypted(method: Method, protection: PartialEncryption, federation: Federation) -> Guarantee:
    clip, n_silos = (method.bound.norm if isinstance(method.bound, Clip) else 0.0), federation.n_silos
    moved, single = sensitivity(method, clip, federation), _single_message_move(method, clip, n_silos)
    shares = shares_of(method, n_silos=n_silos, n_users=federation.n_users, moved=moved, single=single)
    return under_partial_encryption(method, protection, shares, federation)


def _none(reason: str, protection: Protection = NO_PROTECTION) -> Guarantee:
    event = NoGuarantee(reason=reason)
    masked = not isinstance(protection, NoProtection)
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
        unknown = n_silos - channel.missing_silos - silos_known
        if unknown <= 0:
            return NoGuarantee(reason="no share of the noise is left")
        return GaussianEvent(noise_multiplier=share * math.sqrt(unknown) / moved)

    whole_sum = f"the sum over {n_silos} silos moves by at most {moved:g} (l2) with one user"
    noise = f"{law} of std {share:g} per silo, noise multiplier {nominal:g} of the sum"
    mechanisms = [f"every round: {whole_sum}; {noise}"]
    mechanisms.extend(_sampling(method, "user"))
    masked = not isinstance(method.protection, NoProtection)
    mechanisms.extend(hiding(method.protection))
    coalition = max(1, channel.colluding_silos)
    views = views_of_shares(
        method,
        n_silos,
        coalition,
        to_server=GaussianEvent(
            noise_multiplier=nominal if masked else share / _single_message_move(method, clip, n_silos)
        ),
        to_coalition=against(coalition),
    )
    uncovered: tuple[str, ...] = ()
    if isinstance(method.protection, PrivateWeighting):
        uncovered = (
            "under private weighting the server learns which users have a record in any silo: epsilon against it "
            "covers what a user's records say, not that there are any",
        )
    elif masked and method.weights is Weights.BY_RECORDS:
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


def _layered_shares(method: Method, channel: LayeredShares, clip: float, federation: Federation) -> Guarantee:
    """The noise of :func:`_gaussian_shares`, against whoever sees decoded sums and holds no key of a message.

    Who holds the key knows the latent of every sub-vector, hence a ball in which the sum lies: there is no noise of
    unbounded support left, and no epsilon. The spreads of blocks, how they were sent, and the length of the message
    depend on the sum as well.
    """
    law = "Gaussian shares, each the compression error of a silo's message (LRSUQ),"
    shares = _gaussian_shares(method, channel.shares, clip, federation, law)
    server = View(
        party="the server, and whoever holds the key of a message",
        sees=f"every silo's message and the latents and dithers of its key: it is trusted, because {KEY_REASON}",
        event=NoGuarantee(reason=KEY_REASON),
    )
    return replace(
        shares,
        views=(server, *shares.views[1:]),
        uncovered=(*shares.uncovered, *OF_LAYERS),
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
                event=knowing_one(method.sampler).event(base),
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

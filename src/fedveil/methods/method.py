"""A method is a value: the stages of one round, from who takes part to what the server does with the sum.

What cannot combine is refused when the value is built, with the reason. What the composition guarantees is derived from
it by :func:`fedveil.methods.derive.derive`, never stated beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fedveil.errors import CompositionError
from fedveil.local.steps import LocalDpSgd, LocalGradient, LocalSgd
from fedveil.methods.channels import CentralGaussian, GaussianShares, Identity
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.contributions import (
    ClientContribution,
    Contribution,
    RecordContribution,
    SiloUserContribution,
)
from fedveil.methods.layered_shares import LayeredShares
from fedveil.methods.protections import (
    NO_PROTECTION,
    NoProtection,
    PartialEncryption,
    PrivateWeighting,
    Protection,
    SecureAggregation,
)
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Bound, Clip, ClipL1, Unbounded
from fedveil.privacy.claims import Role, Sent
from fedveil.privacy.sampling import Everyone, PoissonUsers, UniformClients
from fedveil.protection.parts import Joined, Lost, Refused, Terms
from fedveil.server.denoise import NO_DENOISER, DenoiserValue
from fedveil.server.optimizers import ServerSgd

Channel = Identity | GaussianShares | LayeredShares | CentralGaussian | ClientMessages


@dataclass(frozen=True, kw_only=True)
class Method:
    """One round, stage by stage; a frozen value that can be compared, printed and recombined.

    With Delta_i the update of contribution i (``local``), w_i its weight and clip the ``bound``, silo s sends
    ``channel( sum_{i in s} w_i clip(Delta_i) )`` and the server adds the silos' messages up, divides by
    :meth:`divisor`, estimates what lies under the noise (``denoiser``) and applies ``server``.

    Attributes:
        name: what reports call it.
        contribution: what is trained and bounded: a silo, a (silo, user) pair, a client, a record.
        sampler: which users (or clients) take part in a round.
        local: what one contribution computes.
        bound: the l2 bound of one contribution's update (l1 for clients that send Laplace noise).
        weights: how contributions enter their silo's sum.
        channel: what a silo does to its sum before it leaves, or the server to the sum of all.
        protection: what hides a single silo's message from the server.
        denoiser: the server's estimate of the mean under its noise: post-processing, free of charge.
        server: what happens to the mean of the sums.
        denominator: "expected" divides by how many take part in expectation; "actual" by how many did, which is
            private and not covered by the guarantee: for reproduction only.
        noise_decay: the factor by which the noise falls from round to round.
        calibrated_to: whom a target epsilon is about: readers of the models, or the server, which sees every message.
    """

    name: str
    contribution: Contribution
    sampler: Everyone | PoissonUsers | UniformClients
    local: LocalSgd | LocalGradient | LocalDpSgd
    bound: Bound
    weights: Weights
    channel: Channel
    server: ServerSgd
    protection: Protection = NO_PROTECTION
    denoiser: DenoiserValue = NO_DENOISER
    denominator: Literal["expected", "actual"] = "expected"
    noise_decay: float = 1.0
    calibrated_to: Literal["readers", "server"] = "readers"

    @property
    def parties(self) -> tuple[Role, ...]:
        """The lines of a statement besides its readers': the server, one sender, and coalitions of a protocol."""
        return Role.SERVER, Role.SILO, *self.protection.parties

    @property
    def shows_counts(self) -> bool:
        """Whether silos and server are sent how many records each user has: weights by records in the open."""
        return bool(self.weights.sends()) and not self.protection.weighs

    def sends(self) -> tuple[Sent, ...]:
        """Return every message of the setup and of a round, and who reads it."""
        setup = (
            Sent(Terms, Role.SILO),
            Sent(Joined, Role.SERVER),
            Sent(Refused, Role.SERVER),
            Sent(Lost, Role.SERVER),
        )
        return (*setup, *(self.weights.sends() if self.shows_counts else ()), *self.protection.sends(self))

    @property
    def kinds(self) -> frozenset[type]:
        """What may be sent at all: the classes of :meth:`sends`."""
        return frozenset(one.kind for one in self.sends())

    def uncovered(self, method: Method) -> tuple[str, ...]:
        """Return what of the composition itself depends on private data although no event accounts for it."""
        if self.denominator == "expected" or not isinstance(self.sampler, PoissonUsers):
            return ()
        return (
            "the sum is divided by the number of clients drawn in the round (method.denominator = 'actual'), which "
            "is private under Poisson sampling: epsilon does not cover dividing by it",
        )

    def __post_init__(self) -> None:
        pairs = isinstance(self.contribution, SiloUserContribution)
        clients = isinstance(self.contribution, ClientContribution)
        noisy = isinstance(self.channel, GaussianShares | LayeredShares | CentralGaussian)
        if noisy and isinstance(self.bound, Unbounded):
            raise CompositionError(
                f"{self.name}: noise on unbounded contributions guarantees nothing; give the method a clip bound"
            )
        if not isinstance(self.sampler, Everyone) and not (pairs or clients):
            raise CompositionError(
                f"{self.name}: users are sampled, but a contribution is not one user's; "
                "sampling of users needs (silo, user) or client contributions"
            )
        if (
            clients
            and isinstance(self.channel, GaussianShares | LayeredShares)
            and not self._masked_clients()
        ):
            raise CompositionError(
                f"{self.name}: clients have no silo to add a share of the noise; use CentralGaussian, ClientMessages "
                "with noise of their own, or, if all of them take part, shares under secure aggregation"
            )
        if self.noise_decay != 1:
            self._check_decay()
        if isinstance(self.channel, ClientMessages):
            self._check_messages(self.channel)
        elif isinstance(self.bound, ClipL1):
            raise CompositionError(
                f"{self.name}: an l1 bound is what Laplace noise on a client's message needs; the noise here is "
                "Gaussian, which needs an l2 bound (Clip)"
            )
        if isinstance(self.protection, SecureAggregation) and not isinstance(self.channel, GaussianShares):
            raise CompositionError(f"{self.name} cannot run under secure aggregation: {self._unmaskable()}")
        if isinstance(self.protection, SecureAggregation):
            self._check_missing(self.protection)
        if isinstance(self.protection, PrivateWeighting):
            self._check_private_weighting(self.protection)
        if isinstance(self.protection, PartialEncryption):
            self._check_partial_encryption(self.protection)
        if self.denominator == "actual" and not clients:
            raise CompositionError(
                f"{self.name}: only a mean over clients can be divided by how many took part"
            )
        if self.denoiser.needs_noise_std and self.noise_std(1) is None:
            raise CompositionError(
                f"{self.name}: {self.denoiser.description} needs the size of the noise, which DP-SGD inside the "
                "silos leaves unknown; use the Laplacian denoiser"
            )
        if pairs and self.weights is Weights.ONE:
            raise CompositionError(
                f"{self.name}: with weight 1 a user's influence grows with the number of silos she appears in; "
                "weights of a user must sum to at most 1 over the silos (uniform or by records)"
            )
        if not pairs and self.weights is not Weights.ONE:
            raise CompositionError(
                f"{self.name}: weights {self.weights.value} are those of (silo, user) pairs"
            )
        if isinstance(self.contribution, RecordContribution) and isinstance(self.channel, LayeredShares):
            raise CompositionError(
                f"{self.name}: DP-SGD has its noise inside the silos; the noise of a channel would come on top of it"
            )
        if isinstance(self.contribution, RecordContribution) != isinstance(self.local, LocalDpSgd):
            raise CompositionError(
                f"{self.name}: records are contributions of DP-SGD, and of DP-SGD only (LocalDpSgd)"
            )

    def _masked_clients(self) -> bool:
        """Return whether clients stand for silos: all of them in every round, their shares summed under masks."""
        return (
            isinstance(self.channel, GaussianShares)
            and isinstance(self.sampler, Everyone)
            and isinstance(self.protection, SecureAggregation)
        )

    @property
    def local_bound(self) -> Bound:
        """The bound that is enforced in local training: none where parts are bounded once the partition is known."""
        parts = isinstance(self.protection, PartialEncryption) and self.protection.clip == "parts"
        return Unbounded() if parts else self.bound

    def at_round(self, number: int) -> Method:
        """Return the method with the noise of a round."""
        if self.noise_decay == 1:
            return self
        assert isinstance(self.channel, GaussianShares | ClientMessages)
        multiplier = self.channel.noise_multiplier * self.noise_decay ** (number - 1)
        return replace(self, channel=replace(self.channel, noise_multiplier=multiplier))

    def _check_decay(self) -> None:
        """Refuse falling noise where it is not accounted for, or where a grid was agreed on for the first round's."""
        channel = self.channel
        gaussian = isinstance(channel, GaussianShares) or (
            isinstance(channel, ClientMessages) and channel.noise == "gaussian"
        )
        if not (0 < self.noise_decay < 1 and gaussian and isinstance(self.sampler, Everyone)):
            raise CompositionError(
                f"{self.name}: noise_decay = {self.noise_decay:g}: noise that falls by a factor between 0 and 1 a "
                "round is Gaussian noise on the messages of everybody"
            )
        if not isinstance(self.protection, NoProtection):
            raise CompositionError(
                f"{self.name}: its noise falls, and under {type(self.protection).__name__} the grid of the messages is "
                "agreed before the run; take noise_decay = 1, or no protection"
            )

    def _check_messages(self, channel: ClientMessages) -> None:
        """Refuse messages from anyone but a fixed number of clients, and noise measured in another bound."""
        if not isinstance(self.contribution, ClientContribution):
            raise CompositionError(
                f"{self.name}: only clients send messages of their own (ClientContribution); silos send sums"
            )
        if isinstance(self.sampler, PoissonUsers):
            raise CompositionError(
                f"{self.name}: clients who send messages share one noise, so their number must be fixed, but Poisson "
                "sampling draws a random one; sample uniformly without replacement"
            )
        if isinstance(self.sampler, UniformClients) and self.sampler.sample != channel.senders:
            raise CompositionError(
                f"{self.name}: {self.sampler.sample} clients are drawn, but the noise is that of {channel.senders}"
            )
        wanted = ClipL1 if channel.noise == "laplace" else Clip
        own_norm = channel.bound is None and isinstance(self.bound, Unbounded)
        if not own_norm and not (isinstance(self.bound, wanted) and self.bound.norm == channel.bound):
            raise CompositionError(
                f"{self.name}: the messages' noise is measured in {channel.bound or 'the norm of each update'}, the "
                f"bound is {self.bound}: {channel.noise or 'no'} noise needs {wanted.__name__} with that norm, or "
                "Unbounded where updates are measured in their own norm"
            )

    def _check_private_weighting(self, protection: PrivateWeighting) -> None:
        """Refuse what Protocol 1 does not compute: sums of pairs weighted by records, with shares of noise."""
        if self.weights is not Weights.BY_RECORDS:
            raise CompositionError(
                f"{self.name} cannot run under private weighting: it computes the weights n_su / N_u, and this method "
                "has none; use uldp-avg-w, or secure aggregation"
            )
        if not isinstance(self.channel, GaussianShares):
            raise CompositionError(f"{self.name} cannot run under private weighting: {self._unmaskable()}")
        protection.places(self.sampler.rate)
        if protection.private_sampling and isinstance(self.sampler, UniformClients):
            raise CompositionError(
                f"{self.name} cannot run under private weighting with private_sampling: oblivious transfer draws every "
                "user by herself (PoissonUsers), not a fixed number of them"
            )

    def _check_missing(self, protection: SecureAggregation) -> None:
        """Refuse sums over fewer silos than the noise is sized for, or whose weights cannot do without a silo."""
        assert isinstance(self.channel, GaussianShares)
        if protection.missing_silos != self.channel.missing_silos:
            raise CompositionError(
                f"{self.name}: sums may lack {protection.missing_silos} silos, and the shares of the noise are sized "
                f"for {self.channel.missing_silos}; give GaussianShares the same missing_silos"
            )
        if protection.on_missing == "end" and protection.missing_silos:
            raise CompositionError(
                f"{self.name}: missing_silos = {protection.missing_silos}, but a missing silo ends the run; "
                'on_missing = "retry" or "recover" goes on without it'
            )
        if self.weights is Weights.BY_RECORDS and protection.missing_silos:
            raise CompositionError(
                f"{self.name}: without a silo the weights n_su / N_u of its users no longer sum to 1, and nobody can "
                'renormalise them without its counts; missing_silos must be 0: on_missing = "retry" waits for the silo'
            )
        if protection.on_missing == "recover" and not protection.missing_silos:
            raise CompositionError(
                f"{self.name}: recovery has nothing to recover from with missing_silos = 0; say how many may be missing"
            )

    def _check_partial_encryption(self, protection: PartialEncryption) -> None:
        """Refuse what nobody could add up partly encrypted."""
        refused = f"{self.name} cannot run under partial encryption: "
        if isinstance(self.local, LocalDpSgd):
            raise CompositionError(refused + "DP-SGD has its noise inside the silos, in no part by itself")
        if isinstance(self.channel, CentralGaussian):
            raise CompositionError(
                refused
                + "its noise is added by a server that sees the sum; the senders must add GaussianShares"
            )
        if isinstance(self.channel, LayeredShares) or (
            isinstance(self.channel, ClientMessages) and not self.channel.addable
        ):
            raise CompositionError(
                refused + "messages that the server decodes one by one are no sums of two parts"
            )
        if protection.clip == "parts" and isinstance(self.contribution, SiloUserContribution):
            raise CompositionError(
                refused + "parts can be bounded by themselves only where a message holds one contribution"
            )
        if self.denoiser.needs_noise_std:
            raise CompositionError(
                refused
                + f"{self.denoiser.description} needs one size of noise, and the two parts have their own"
            )

    def _unmaskable(self) -> str:
        """Say why messages without shares of noise have no place under secure aggregation."""
        if isinstance(self.bound, Unbounded):
            return "unbounded updates lie on no grid and in no range; give the method a clip bound and GaussianShares"
        if isinstance(self.local, LocalDpSgd):
            return "DP-SGD inside the silos ends in floating-point models, which masks over whole numbers do not fit"
        if isinstance(self.channel, CentralGaussian):
            return "its noise is added by a server that is trusted with every update; silos must add GaussianShares"
        return (
            "silos must send whole numbers on one grid with their share of the noise (GaussianShares), not messages "
            "that the server decodes one by one"
        )

    def divisor(self, n_silos: int, n_users: int) -> float:
        """Return what the sum is divided by; public numbers only, so that it reveals nothing.

        |S| where every silo contributes once; q |U| |S| for (silo, user) pairs and q |U| for clients: the expected
        number of users who take part, never the number who did.
        """
        if isinstance(self.contribution, ClientContribution):
            return self.sampler.rate * n_users
        if isinstance(self.contribution, SiloUserContribution):
            return self.sampler.rate * n_users * n_silos
        return float(n_silos)

    def noise_std(self, n_silos: int, summed: int | None = None) -> float | None:
        """Return the standard deviation, per coordinate, of the noise on the sum; None if unknown.

        Args:
            n_silos: |S|.
            summed: how many silos the sum is over; None: all.
        """
        shares = self.channel.shares if isinstance(self.channel, LayeredShares) else self.channel
        if isinstance(shares, GaussianShares):
            return shares.share_std(n_silos) * math.sqrt(n_silos if summed is None else summed)
        if isinstance(self.channel, CentralGaussian):
            return self.channel.std
        if isinstance(self.channel, ClientMessages):
            return self.channel.noise_std
        return None if isinstance(self.local, LocalDpSgd) else 0.0

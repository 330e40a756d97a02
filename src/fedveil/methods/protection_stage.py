"""What a protection answers for as a stage of a method: whom a statement names, what is sent, what it claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

from fedveil.data.records import Groups
from fedveil.errors import CompositionError
from fedveil.methods.guarantee import PublicFacts
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Claim, Role, Sent
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.session_messages import GlobalModel, RoundTask, SampledFlag, SampledUsers
from fedveil.stage import Sensitivity, Stage, duty

Sends: TypeAlias = tuple[Sent, ...]
UP: Final = Role.SERVER
"""Who reads what a sender sends."""
DOWN: Final = Role.SILO
"""Who reads what the server sends."""
OF_KEYS: Final = "a break of X25519, ChaCha20 or SHA-256, on which masks and sealed messages rely"
"""What masks promise, which no epsilon covers."""
OF_SUMS: Final = (
    "departures of the server from its protocol: where it sends senders another sum than that of their messages to "
    "decrypt, it learns who accepts it"
)
"""What a server can try where senders decrypt what it has added up."""


class ProtectionStage(Stage):
    """What hides a sender's message, with the defaults of one that hides nothing.

    Attributes:
        parties: coalitions that a statement names, besides the server alone and one sender alone.
        weighs: whether weights by records are computed without showing counts.
        agrees: whether senders agree on public numbers before the run, the grid of their messages among them.
        masks: whether the server learns the sum of whole numbers alone, whoever sends them.
        divides: whether messages travel in two parts, one of them encrypted under a key that the senders share.
        protects: whether it stands for more than messages as they are, so that no other may take its place.
        on_dropout: what happens when a sender vanishes in a round: the run ends, the round is repeated, or recovered.
        max_dropouts: how many senders may be missing from a sum.
        dropout_rate: in a simulation, the probability that a sender vanishes in an attempt at a round.
    """

    parties: ClassVar[tuple[Role, ...]] = ()
    weighs: ClassVar[bool] = False
    agrees: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    protects: ClassVar[bool] = True

    @property
    def on_dropout(self) -> Literal["end", "retry", "recover"]:
        """End, unless the protection has another answer."""
        return "end"

    @property
    def max_dropouts(self) -> int:
        """None."""
        return 0

    @property
    def dropout_rate(self) -> float:
        """None vanishes."""
        return 0.0

    def apply_to(self, method: Any, n_users: int) -> Any:
        """Return a method under this protection, with its noise where and as large as that needs it.

        Args:
            method: the composition without it, or with the protection that it brings.
            n_users: |U|.

        Raises:
            CompositionError: the method brings another one.
        """
        own = method.protection
        if own.protects and own != self:
            raise CompositionError(
                f"{method.name} brings its own protection ({type(own).__name__}); remove protection.name, or take the "
                "method that it is a variant of"
            )
        return replace(method, channel=method.channel.sized_for_dropouts(self.max_dropouts), protection=self)

    def with_vote_noise(self, multiplier: float, ballots: int) -> ProtectionStage:
        """Return the protection whose votes are a release of this noise multiplier in every round.

        Args:
            multiplier: of the votes of one round.
            ballots: how many of them one unit can change.

        Raises:
            CompositionError: nobody votes.
        """
        raise CompositionError(
            f"budget.votes: under {type(self).__name__} nobody votes; partial encryption counts votes with noise by "
            "partition = 'noisy-votes'"
        )

    @duty
    def make_protocol_spec(
        self, method: Any, public: PublicFacts, own: Groups, rounds: int
    ) -> ProtocolSpec[Any, Any]:
        """Return what the parties of a run agree on before any training: the protocol that they play.

        Args:
            method: the composition.
            public: the public facts, and how many numbers a message has.
            own: the (silo, user) pairs that whoever asks knows of: all, a silo's own, or none.
            rounds: how many there are.
        """
        raise NotImplementedError

    @property
    def tolerates_dropout(self) -> bool:
        """Whether a round goes on without senders that vanish; not unless the protection says so."""
        return False

    @property
    def draws_blindly(self) -> bool:
        """Whether users are drawn without the server knowing whom; nowhere but by oblivious transfer."""
        return False

    def local_bound(self, bound: Bound) -> Bound:
        """Return the bound that is enforced in local training, given that of the method."""
        return bound

    def largest_bound(self, bound: Bound) -> float:
        """Return the largest bound of any part of a contribution, given that of the method."""
        return bound.largest

    def adjust_sensitivity(self, sensitivity: Sensitivity, method: Any, public: Any) -> Sensitivity:
        """Return how far one unit moves what is summed under the protection."""
        return sensitivity

    def claims(self, claims: Iterable[Claim], sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Return what a round claims under the protection, given what the noise of its messages claims."""
        return tuple(claims)

    def grid_loss(self, loss: float, sensitivity: Sensitivity) -> float:
        """Return what the grid of the noise costs a coordinate, given what it costs without the protection."""
        return loss

    @duty
    def sends(self, method: Any) -> Sends:
        """Return every message of the setup and of a round, and who reads it."""
        raise NotImplementedError


def masking_obstacle(method: Any) -> str:
    """Return why messages that are no whole numbers with their share of the noise have no place under masks."""
    if not method.bound.bounded:
        return "unbounded updates lie on no grid and in no range; give the method a clip bound and GaussianShares"
    if method.local.own_noise:
        return (
            "DP-SGD inside the silos ends in floating-point models, which masks over whole numbers do not fit"
        )
    if method.channel.by_server:
        return (
            "its noise is added by a server that is trusted with every update; silos must add GaussianShares"
        )
    return (
        "silos must send whole numbers on one grid with their share of the noise (GaussianShares), not messages that "
        "the server decodes one by one"
    )


def plain_round(method: Any) -> Sends:
    """Return the model and the task of a round, and who takes part where some are drawn, as silos are told."""
    found = [Sent(GlobalModel, Role.SILO), Sent(RoundTask, Role.SILO)]
    if method.draws:
        found.append(Sent(SampledFlag if method.contribution.drawn_alone else SampledUsers, Role.SILO))
    return tuple(found)

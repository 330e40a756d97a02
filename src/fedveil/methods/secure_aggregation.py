"""Mask every message, so that the server learns only the sum of the messages.

The protocols are in :mod:`fedveil.protocols.secure_aggregation` and
:mod:`fedveil.protocols.recoverable_aggregation`; docs/theory/secure-aggregation.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fedveil.data.records import Groups
from fedveil.methods.capabilities import GridShares, count_colluding, count_dropouts, gain_of
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.protection_stage import (
    DOWN,
    OF_KEYS,
    UP,
    ProtectionStage,
    Sends,
    masking_obstacle,
    plain_round,
)
from fedveil.privacy.claims import Role, Sent
from fedveil.privacy.noise import NOISE_REACH
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.messages import (
    Announcement,
    Directory,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protocols.recoverable_aggregation import (
    AgreedSurvivors,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
    check_threshold,
)
from fedveil.protocols.session_messages import ProtocolMessage
from fedveil.stage import Sensitivity


@dataclass(frozen=True, kw_only=True)
class SecureAggregation(ProtectionStage):
    """Secure aggregation: the server gets masked messages, learns only their sum (Bonawitz et al. 2017).

    Masks are whole numbers modulo a power of two. So messages must lie on a grid, in a range known in advance, and be
    useful when only their sum is seen: bounded sums that carry their silo's share of the noise.

    Attributes:
        on_dropout: reaction to a silo that drops out of a round: "end" ends the run; "retry" repeats the round with
            the rest under fresh keys (or with all, if the weights depend on the missing silo); "recover" lets the
            others open the masks of the missing silo, so that the round survives (Shamir shares).
        max_dropouts: most silos that may be missing from a sum; the shares of the noise are sized for that.
        dropout_rate: simulation: probability that a silo drops out of an attempt at a round.
    """

    parties: ClassVar[tuple[Role, ...]] = (UP | DOWN,)
    masks: ClassVar[bool] = True

    on_dropout: Literal["end", "retry", "recover"] = "end"
    max_dropouts: Annotated[int, Field(ge=0)] = 0
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] = field(default=0.0, compare=False)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse messages that cannot be masked, noise sized for other sums, and weights that need every silo."""
        if not isinstance(method.channel, GridShares) or method.local.own_noise:
            yield f"cannot run under secure aggregation: {masking_obstacle(method)}"
        if self.max_dropouts != count_dropouts(method.channel):
            yield (
                f"sums may lack {self.max_dropouts} silos, and the shares of the noise are sized for "
                f"{count_dropouts(method.channel)}; give GaussianShares the same max_dropouts"
            )
        if self.on_dropout == "end" and self.max_dropouts:
            yield (
                f"max_dropouts = {self.max_dropouts}, but a missing silo ends the run; "
                'on_dropout = "retry" or "recover" goes on without it'
            )
        if method.weights.by_records and not method.weights.main and self.max_dropouts:
            yield (
                "without a silo the weights n_su / N_u of its users no longer sum to 1, and nobody can renormalise "
                'them without its counts; max_dropouts must be 0: on_dropout = "retry" waits for the silo'
            )
        if self.on_dropout == "recover" and not self.max_dropouts:
            yield "recovery has nothing to recover from with max_dropouts = 0; say how many may be missing"

    def make_protocol_spec(
        self, method: Any, public: PublicFacts, known_groups: Groups, rounds: int
    ) -> MaskedSumSpec:
        """Return the range of the silos' messages, and the number of silos that a sum needs.

        The sum of a silo is at most C times the largest total weight of |U| users in one silo. Its share of the noise
        adds at most 40 standard deviations. Larger noise, with a probability below 1e-340 per coordinate, would end
        the round with an error. Words of rounded messages have room for sums with 12 standard deviations of their noise
        (:data:`~fedveil.privacy.rounding.SUM_REACH`). The sum alone decides whether one wraps around, so that
        nothing more is learnt.

        Raises:
            ProtocolError: fewer than two silos, or a sum that does not fit into 64 bits.
        """
        channel, bound, silos = method.channel, method.bound, public.n_silos
        contributions = public.n_users if method.contribution.per == "pair" else 1
        weight = 1.0 / silos if method.weights.uniform else 1.0
        # ||sum of a silo|| <= |U| w C (one contribution per silo or client: C), times the channel's gain.
        largest = contributions * weight * bound.norm * gain_of(channel)
        grid = channel.message_grid(bound.grid, silos)
        # A rounded message is at most half a step longer than its sum with its noise.
        rounding = 0.0 if channel.largest_sum(silos, bound) is None else 0.5
        # Shamir threshold: the silos that remain after max_dropouts must be enough to open the missing masks.
        threshold = silos - count_dropouts(channel) if self.on_dropout == "recover" else None
        if threshold is not None:
            check_threshold(threshold, silos, count_colluding(channel))
        return MaskedSumSpec(
            clients=silos,
            length=public.length,
            grid=grid,
            limit=math.ceil((largest + NOISE_REACH * channel.message_std(silos)) / grid + rounding),
            sum_limit=channel.largest_sum(silos, bound),
            threshold=threshold,
        )

    def sends(self, method: Any) -> Sends:
        """Return the messages of a round: masked vectors, and the keys or shares that remove the sum's masks."""
        if self.on_dropout != "recover":
            kinds: Sends = (
                Sent(Announcement, UP),
                Sent(Directory, DOWN),
                Sent(RoundStart, DOWN),
                Sent(RevealRequest, DOWN),
                Sent(OwnMask, UP),
            )
        else:
            up = (RecoveryKeys, ShareBundle, SignedSurvivors, RevealedShares)
            down = (RoundStart, RecoveryDirectory, RelayedShares, Survivors, AgreedSurvivors)
            kinds = (*(Sent(kind, UP) for kind in up), *(Sent(kind, DOWN) for kind in down))
        return (*plain_round(method), Sent(ProtocolMessage, UP | DOWN), Sent(MaskedVector, UP), *kinds)

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the assumption behind masks, which no epsilon covers."""
        return (OF_KEYS,)

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        lacking = (
            f", from which at most {self.max_dropouts} of them may be missing" if self.max_dropouts else ""
        )
        return (
            f"secure aggregation: pairwise masks show the server only the sum of the silos' messages{lacking}",
        )

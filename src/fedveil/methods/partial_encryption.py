"""Partial encryption as a stage: what it encrypts, and what a method guarantees under it.

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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from fedveil.errors import CompositionError
from fedveil.keys import Count, Fraction, NonNegative, Positive, Share, filled
from fedveil.methods.client_messages import Numbers
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.named_channels import through_messages
from fedveil.methods.partial_agreement import hidden_log_ratio, partial_sums
from fedveil.methods.precision import check_ratio, precision, released
from fedveil.methods.protection_stage import DOWN, OF_KEYS, OF_SUMS, UP, ProtectionStage, Sends, plain_round
from fedveil.population.records import Groups
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.privacy.claims import Claim, Role, Sent, Tells, covering
from fedveil.privacy.closed_form import remark_1_noise
from fedveil.privacy.events import ComposedEvent, Event, NoGuarantee
from fedveil.privacy.noise.on_grid import grid_law
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.protection.letter_parts import Learned, Relay
from fedveil.protection.messages import (
    Announcement,
    Directory,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protection.partial.messages import Ballot, PartialSum, PartialUpdate, Partition, SealedKeys
from fedveil.protection.partial.sums import PartialSums
from fedveil.stage import Moves, Published, redefined

BARE: Final = (
    "the encrypted part carries no noise (he_noise = 0), and all who hold the key or read a model see it"
)


@dataclass(frozen=True, kw_only=True)
class PartialEncryption(ProtectionStage):
    """The coordinates that matter travel encrypted under a key that the silos share; the others in clear (ParaAegis).

    In round t the partition has r_t d coordinates, r_t = ratio decay^(t-1). docs/theory/partial-encryption.md.

    Attributes:
        ratio: r_0, the encrypted share in the first round.
        decay: lambda, the factor by which the encrypted share falls from round to round.
        strategy: silos vote for their values of largest ("max") or smallest ("min") size; "random" asks nobody.
        partition: where the partition comes from: "votes", which are private and not paid for; "noisy-votes";
            "released", the coordinates in which the models released so far have moved most, which costs nothing.
        votes: "plain" shows the server each ballot in a secret order, "secagg" only the sum of all ballots.
        vote_noise: noise on the counts of "noisy-votes", in units of one ballot's l2 norm.
        he_noise: noise of the encrypted part over that of the clear part, each in units of its own bound; 0: none.
        clip: "whole" bounds a contribution before the partition is known; "parts" bounds each part of a client's update
            by itself: the clear part by the method's bound, the encrypted one by ``he_clip``. Paraaegis brings it.
        he_clip: l2 bound of the encrypted part, where each part is bounded separately; None: not bounded.
        processes: worker processes in which silos encrypt; 1: in the process itself. It changes no result.
    """

    parties: ClassVar[tuple[Role, ...]] = (Role.READER, UP | DOWN)
    divides: ClassVar[bool] = True

    ratio: Share = 0.1
    decay: Fraction = 1.0
    strategy: Literal["max", "min", "random"] = "max"
    partition: Literal["votes", "noisy-votes", "released"] = "votes"
    votes: Literal["plain", "secagg"] = "plain"
    vote_noise: NonNegative = 0.0
    he_noise: NonNegative = 0.0
    clip: Annotated[Literal["whole", "parts"], filled()] = "whole"
    he_clip: Positive | None = None
    processes: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.he_clip is not None:
            object.__setattr__(self, "clip", "parts")
        if self.vote_noise > 0 and self.partition != "noisy-votes":
            raise CompositionError(
                f"vote_noise = {self.vote_noise:g} with partition = {self.partition!r}: noise on votes and "
                "partition = 'noisy-votes' belong together"
            )
        if self.partition == "noisy-votes" and self.votes != "secagg":
            raise CompositionError(
                "votes = 'plain' shows every ballot without its noise; noisy votes need votes = 'secagg'"
            )
        if self.strategy == "random" and self.partition != "votes":
            raise CompositionError(f"strategy = 'random' takes no partition from {self.partition}; remove it")
        if self.strategy == "min" and self.partition == "released":
            raise CompositionError("strategy = 'min' belongs to votes; what was released is taken by 'max'")
        if self.he_noise and self.unpaid:
            raise CompositionError(
                "he_noise buys no guarantee while the partition shows votes that are not paid for; take partition = "
                "'released' or 'noisy-votes', strategy = 'random' or ratio = 1"
            )
        if self.he_noise and self.clip == "parts" and self.he_clip is None and self.ratio > 0:
            raise CompositionError("he_noise needs he_clip: noise on an unbounded part guarantees nothing")

    @property
    def whole(self) -> bool:
        """Whether everything is encrypted in every round."""
        return self.ratio == 1 and self.decay == 1

    @property
    def asks(self) -> bool:
        """Whether silos vote."""
        return (
            self.strategy != "random" and self.partition != "released" and self.ratio > 0 and not self.whole
        )

    @property
    def unpaid(self) -> bool:
        """Whether the partition tells of votes that no noise hides."""
        return self.asks and self.partition == "votes"

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse what nobody could add up partly encrypted."""
        for reason in self._unaddable(method):
            yield f"cannot run under partial encryption: {reason}"
        if self.partition == "noisy-votes" and self.vote_noise == 0:
            yield "partition = 'noisy-votes': give vote_noise, or a share of the budget for it (budget.votes)"

    def _unaddable(self, method: Any) -> Iterable[str]:
        if method.local.own_noise:
            yield "DP-SGD has its noise inside the silos, in no part by itself"
        if method.channel.by_server:
            yield "its noise is added by a server that sees the sum; the senders must add GaussianShares"
        if not method.channel.addable:
            yield "messages that the server decodes one by one are no sums of two parts"
        if self.clip == "parts" and not method.contribution.alone:
            yield "parts can be bounded by themselves only where a message holds one contribution"
        if redefined(method.channel, "send"):
            yield (
                f"{type(method.channel).__name__} defines send(), and each part of a message has its noise from the "
                "protection"
            )
        if method.denoiser.needs_noise_std:
            yield f"{method.denoiser.description} needs one size of noise, and the two parts have their own"

    def paying(self, multiplier: float, ballots: int) -> PartialEncryption:
        """Return the protection whose noisy votes (:meth:`_votes`) are a release of this noise multiplier a round.

        Raises:
            CompositionError: nobody votes, votes have no noise, or have one that was given.
        """
        if not self.asks or self.partition != "noisy-votes":
            super().paying(multiplier, ballots)
        if self.vote_noise:
            raise CompositionError("budget.votes: finds protection.vote_noise; remove one of the two")
        return replace(self, vote_noise=math.sqrt(2) * ballots * multiplier)

    def over(self, method: Any, n_users: int) -> Any:
        """Return a method under partial encryption, its noise moved to where it can be added.

        The noise of a trusted server on the sum of m clients becomes theirs: each message carries 1/m of its variance.
        A method that bounds its two parts by themselves, or encrypts everything, keeps doing so.

        Raises:
            CompositionError: a combination that cannot work.
        """
        own, channel = method.protection, method.channel
        if isinstance(own, PartialEncryption):
            if own.whole and not self.whole:
                raise CompositionError(
                    f"{method.name} encrypts everything; a part of it is what paraaegis encrypts"
                )
            if own.clip == "whole" and self.he_clip is not None:
                raise CompositionError(
                    f"{method.name}: he_clip bounds the encrypted part of a method that bounds its parts by themselves"
                )
            he_noise = own.he_noise if own.whole else self.he_noise
            return replace(method, protection=replace(self, clip=own.clip, he_noise=he_noise))
        if channel.by_server:
            channel = through_messages(channel, method.sampler, n_users, Numbers())
        return replace(method, channel=channel, protection=self)

    def local_bound(self, bound: Bound) -> Bound:
        """Return no bound where parts are bounded once the partition is known."""
        return Unbounded() if self.clip == "parts" else bound

    def largest_bound(self, bound: Bound) -> float:
        """Return the larger of both parts' bounds; an encrypted part without one has none to count."""
        return max(bound.largest, self.he_clip or 0.0)

    def agree(self, method: Any, public: PublicFacts, own: Groups, rounds: int) -> PartialSums:
        """Return the ranges of both halves of a message, and the rule of the partition.

        Raises:
            ProtocolError: fewer than two silos, or values that the sums do not hold.
        """
        return partial_sums(self, method, public)

    # --- what is sent, and what it claims ----------------------------------------------------------------------

    def sends(self, method: Any) -> Sends:
        """Return the messages of the setup and of a round; the coordinator gives no model, silos keep their own.

        Where clients are drawn, the cohort that a round starts with is who was drawn.
        """
        drawn = {Tells.NOTHING: Tells.DRAWN} if method.draws and method.channel.by_clients else {}
        found = [*plain_round(method)[1:], Sent(Relay, UP | DOWN), Sent(Learned, UP), Sent(Announcement, UP)]
        found += [Sent(Directory, DOWN), Sent(SealedKeys, UP | DOWN), Sent(RoundStart, DOWN, drawn)]
        if self.asks:
            found.append(Sent(Partition, DOWN))
            if self.votes == "plain":
                found.append(Sent(Ballot, UP))
            else:
                ballots = {Tells.SUM: Tells.BALLOT, Tells.CONTENT: Tells.BALLOT}
                found += [Sent(kind, UP, ballots) for kind in (MaskedVector, OwnMask)] + [
                    Sent(RevealRequest, DOWN)
                ]
        return (*found, Sent(PartialUpdate, UP), Sent(PartialSum, DOWN))

    def claims(self, claims: Iterable[Claim], moves: Moves) -> tuple[Claim, ...]:
        """Claim the noise of both parts and of the votes; ``claims`` speak of messages that are not divided."""
        n, (by_server, by_sender, by_both) = moves.n_senders, self._unpaid_votes()
        whole = (Tells.SUM, Tells.OWN, Tells.CLEAR, Tells.HIDDEN, Tells.BALLOT, Tells.VOTES)
        pooled = self._pooled(moves)
        return (
            Claim(frozenset({Tells.CLEAR, Tells.BALLOT}), self._in_clear(moves), by_server),
            Claim(covering(Tells.SUM), self._both_parts(moves, moves.total / math.sqrt(n), n)),
            Claim(covering(Tells.SUM, Tells.OWN), pooled),
            Claim(covering(Tells.SUM, Tells.OWN, Tells.VOTES), pooled, by_sender),
            Claim(covering(*whole), self._pooled(moves, moves.messages), by_both),
        )

    def _in_clear(self, moves: Moves) -> Event:
        """Return what the server gets: the part in clear of every message, and the counts of noisy votes."""
        std, n = moves.noise, moves.n_senders
        if std == 0 and not self.whole:
            return NoGuarantee(reason="the unencrypted part carries no noise")
        if self.ratio > 0 and self.he_noise == 0:
            moved = moves.reach * math.sqrt(n)
            clear = 0.0 if self.whole else precision(moved, std)
            return released(clear, self._votes(n, n, n))
        if self.whole:
            return ComposedEvent(events=())
        summed = precision(moves.total, std * math.sqrt(n))
        parts = self._together(precision(moves.messages, std), summed)
        return released(parts, self._votes(n, n, moves.ballots))

    def _pooled(self, moves: Moves, messages: float = 0.0) -> Event:
        """Return the event of the sum, or of messages that move so far, for senders who pool what they know.

        They know their own noise, in both parts and on the votes: the others' shares are left.
        """
        n, known = moves.n_senders, moves.together
        if n <= known:
            return NoGuarantee(reason="no share of the noise is left")
        return self._both_parts(moves, max(messages, moves.pooled(n - known, known, n)), n - known)

    def _both_parts(self, moves: Moves, moved: float, unknown: int) -> Event:
        """Return the event of both parts, whose messages' noise covers moves of this length, and of the votes.

        ``unknown`` shares of the noise on votes are unknown.
        """
        if self.ratio > 0 and self.he_noise == 0:
            return NoGuarantee(reason=BARE)
        if moves.noise == 0:
            return NoGuarantee(reason="no noise is added")
        plain = precision(moved, moves.noise)
        parts = self._together(0.0 if self.whole else plain, plain)
        return released(parts, self._votes(moves.n_senders, unknown, moves.ballots))

    def _together(self, clear: float, plain: float) -> float:
        """Return the precision 1/z^2 of both parts, given the clear one's, and the other's with the same noise."""
        hidden = 0.0
        if self.ratio > 0:
            check_ratio(math.sqrt(plain), self.he_noise)
            hidden = plain / self.he_noise / self.he_noise
        return clear + hidden if self.clip == "parts" else max(clear, hidden)

    def _votes(self, count: int, unknown: int, ballots: int) -> float:
        """Return the precision 1/z^2 of the counts of noisy votes, ``unknown`` of whose shares of noise are unknown.

        A ballot has k ones, and any other k ones may take their place: it moves by sqrt(2 k), sqrt(2) ballots' norms.
        The noise of all ``count`` silos together is vote_noise sqrt(k).
        """
        if self.vote_noise == 0 or not self.asks:
            return 0.0
        return precision(math.sqrt(2) * ballots, self.vote_noise) * count / unknown

    def grid_loss(self, loss: float, moves: Moves) -> float:
        """Return the larger of the two parts' losses: a coordinate is in one part alone."""
        if moves.noise == 0:
            return 0.0
        losses = [grid_law(moves.noise, moves.bound.grid).log_ratio_to_gaussian]
        if self.he_noise:
            losses.append(hidden_log_ratio(self, moves))
        return 2 * moves.n_senders * max(losses)

    def hidden_noise(self, bound: Bound, std: float) -> tuple[float, float]:
        """Return the standard deviation of a message's noise in its encrypted part, and the grid of that part."""
        if not bound.bounded:
            return 0.0, bound.grid
        hidden = bound if self.he_clip is None else Clip(norm=self.he_clip)
        return self.he_noise * std * hidden.norm / bound.norm, hidden.grid

    # --- in words ----------------------------------------------------------------------------------------------

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        """Return the share, where it comes from, and the noise of both parts."""
        share = f"{self.ratio:g}" + (f" x {self.decay:g}^(t-1) (in round t)" if self.decay < 1 else "")
        origin = {
            "votes": f"those with most votes ({self.strategy} absolute value)",
            "noisy-votes": f"those with most votes ({self.strategy} absolute value), counted with noise of "
            f"{show_at_least(self.vote_noise)} times the l2 norm of a ballot",
            "released": "those in which the released models have changed most",
        }[self.partition]
        origin = "all of them" if self.whole else "drawn at random" if self.strategy == "random" else origin
        noise = (
            f"Gaussian noise of standard deviation {show_at_least(moves.noise)} in the unencrypted part of each message"
            if moves.noise
            else "no noise in the unencrypted part of a message"
        )
        hidden = (
            f"and, relative to each part's bound, {show_at_least(self.he_noise)} times as much"
            if self.he_noise
            else "none"
        )
        told = [
            f"partial encryption (CKKS, 128-bit security, exact sums) of a fraction {share} of the coordinates: "
            f"{origin}; {noise}, {hidden} in the encrypted part"
        ]
        if moves.bound.bounded and self.clip == "parts":
            bound = "is not clipped" if self.he_clip is None else f"to {show_at_most(self.he_clip)}"
            told.append(
                f"the unencrypted part of each client's update is clipped to l2 norm {show_at_most(moves.norm)}, its "
                f"encrypted part {bound}"
            )
        elif moves.bound.bounded:
            told.append(
                f"each contribution is clipped to l2 norm {show_at_most(moves.norm)} before it is divided"
            )
        return tuple(told)

    def uncovered(self, method: Any) -> tuple[str, ...]:
        """Return what ciphers promise, and what a server learns that departs, which no epsilon covers."""
        return OF_KEYS, "a break of the encryption, which relies on ring-LWE at 128 bits", OF_SUMS

    def _unpaid_votes(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return what votes show the server, a sender, who knows their order, and both, although nobody paid for it."""
        if not self.unpaid:
            return (), (), ()
        seen, told = (
            ("in how many coordinates any two ballots overlap", "which coordinates each sender votes for")
            if self.votes == "plain"
            else ("how many coordinates have how many votes", "how many votes each coordinate has")
        )
        return (
            (
                f"{seen}, though not which coordinates these are: epsilon covers the unencrypted numbers, whatever the "
                "partition, but not the ballots (partition = 'released' or 'noisy-votes', or strategy = 'random', "
                "avoids this)",
            ),
            ("which coordinates have most votes",),
            (told,),
        )

    def published(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the epsilon that Remark 1 of the paper states for this noise: infinite without any."""
        std = method.channel.message_std(method.channel.n_senders(public.n_silos))
        if self.clip != "parts" or not public.silo_records or not method.bound.bounded:
            return ()
        sensitivity = 2 * method.bound.norm / max(public.silo_records)

        def remark_1(rounds: int, delta: float) -> float:
            return remark_1_noise(rounds=rounds, epsilon=std / sensitivity, delta=delta)

        gap = (
            "it takes 2 theta / |D_i| for what one record moves, but a record that is used in several local steps can "
            "move a clipped update by 2 theta; it says nothing of a client, and nothing of the encrypted part"
        )
        return (Published(name="Remark 1 of ParaAegis", gap=gap, epsilon=remark_1),)

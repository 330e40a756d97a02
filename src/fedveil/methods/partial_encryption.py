"""Encrypt one part of every message, and derive the guarantee of a method under partial encryption.

========================  ===========================================================================================
party                     protection of one unit's data against the party
========================  ===========================================================================================
the server                encryption for one part; for the other the noise of every single message
one silo or client        it decrypts the sum of all messages: the noise of the others' shares, in both parts if both
                          have noise, else nothing
readers of the models     the noise of all shares, in both parts if both have noise, else nothing
the server with a silo    the key opens every single message: its noise, in both parts if both have noise, else nothing
========================  ===========================================================================================

Two parts with bounds C_1 and C_2 and noise of multipliers z_1 and z_2 are one Gaussian release. Scaled to noise 1,
they change by at most sqrt(1/z_1^2 + 1/z_2^2) together. Under a joint bound C they change by C / min(s_1, s_2). Noisy
votes are a further Gaussian release. Several Gaussian releases in sequence are one with z = (sum_i z_i^-2)^(-1/2).

The server sees no model, but every message depends on one. If the encrypted part has no noise, a model may reveal all
of one unit's data. Every clear part may then change from any point of its ball of radius B to any other: by 2 B
sqrt(n) together, whatever the partition. If the encrypted part has noise, the joint view of server and reader bounds
the server's view. docs/theory/partial-encryption.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from fedveil.config_keys import Count, Fraction, NonNegative, Positive, Share, composed_field
from fedveil.crypto.ckks import CkksParameters
from fedveil.data.records import Groups
from fedveil.errors import CompositionError, PrivacyError
from fedveil.methods.capabilities import ClientSender, ServerNoise, count_senders
from fedveil.methods.client_messages import Numbers
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.named_channels import through_messages
from fedveil.methods.protection_stage import DOWN, OF_KEYS, OF_SUMS, UP, ProtectionStage, Sends, plain_round
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.privacy.claims import Claim, Reveals, Role, Sent, covered_knowledge
from fedveil.privacy.events import ComposedEvent, ConcentratedEvent, Event, GaussianEvent, NoGuarantee
from fedveil.privacy.noise import LEAST_STEPS, NOISE_REACH, grid_law, log_ratio_to_gaussian
from fedveil.privacy.published_bounds import remark_1_noise
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.protocols.messages import (
    Announcement,
    Directory,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protocols.partial_encryption.plan import (
    Ballot,
    PartEncoding,
    PartialPlan,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
    finest_grid_step,
)
from fedveil.protocols.partial_encryption.protocol_spec import PartialEncryptionSpec, vote_std
from fedveil.protocols.session_messages import ModelStored, ProtocolMessage
from fedveil.stage import Published, Sensitivity, redefined

# --- precision ----------------------------------------------------------------------------------------------
# Compute precisions of Gaussian releases: (sensitivity / noise)^2, which add up in sequence.


_LARGEST_RATIO: Final = 1e100


def precision(moved: float, noise: float) -> float:
    """Return (moved / noise)^2 = 1 / z^2, which adds up over releases."""
    check_ratio(moved, noise)
    return (moved / noise) ** 2


def check_ratio(moved: float, noise: float) -> None:
    """Check that the squared ratio of a sensitivity to its noise is a finite number.

    Raises:
        PrivacyError: the noise is too small for the sensitivity.
    """
    if math.isfinite(moved) and moved / _LARGEST_RATIO > noise:
        raise PrivacyError(
            f"noise of standard deviation {noise:g} hides nothing of what moves by {moved:g}: take a noise multiplier "
            "that guarantees something, or 0 for no noise"
        )


def released_event(parts: float, votes: float) -> Event:
    """Return the event of encrypted or clear parts and noisy votes, from their precisions 1/z^2.

    z = (sum_i z_i^-2)^(-1/2); no event at 0 and 0. Noise on vote counts has whole steps, so only its Renyi
    divergences are known to be at most a Gaussian's. With votes the event is therefore a concentrated (zCDP) one.
    """
    if parts + votes == 0:
        return ComposedEvent(events=())
    multiplier = 1 / math.sqrt(parts + votes)
    if votes:
        return ConcentratedEvent(noise_multiplier=multiplier)
    return GaussianEvent(noise_multiplier=multiplier)


# --- the protocol's specification ---------------------------------------------------------------------------
# Ranges of both halves of a message and the rule of the partition, from a method and public facts.


_REACH_UNBOUNDED: Final = 64.0
"""Largest coordinate of a half without a bound, in the unit of the update."""


def partial_sums(protection: Any, method: Any, public: PublicFacts) -> PartialEncryptionSpec:
    """Return the protocol spec: the ranges of both halves of a message, and the rule of the partition.

    Raises:
        ProtocolError: fewer than two silos, or values beyond the range of the sums.
    """
    senders = count_senders(method.channel, public.n_silos)
    clear, hidden = _halves(protection, method, public, senders)
    plan = PartialPlan(
        silos=public.n_silos,
        length=public.length,
        ratio=protection.ratio,
        decay=protection.decay,
        ballots=protection.votes if protection.asks else "none",
        pick="smallest" if protection.strategy == "min" else "largest",
        clear_limit=clear.limit,
        hidden_limit=hidden.limit,
    )
    # Each silo adds 1/n of the counts' variance.
    vote_noise = protection.vote_noise / math.sqrt(senders)
    if vote_noise and protection.asks:
        most = math.ceil(NOISE_REACH * vote_std(vote_noise, plan.n_encrypted(1)))
        plan = replace(plan, ballot_limit=most)
    return PartialEncryptionSpec(
        plan=plan,
        clear=clear,
        hidden=hidden,
        vote_noise=vote_noise,
        released=protection.partition == "released",
        processes=protection.processes,
    )


def _halves(
    protection: Any, method: Any, public: PublicFacts, senders: int
) -> tuple[PartEncoding, PartEncoding]:
    """Return the encoding of the clear half, and that of the encrypted half."""
    bound, std = method.bound, method.channel.message_std(senders)
    # The finest power of two on which a coordinate of that size still fits the range of CKKS sums over all silos.
    steps = _REACH_UNBOUNDED / CkksParameters(silos=public.n_silos).limit
    loose = PartEncoding(noise_grid=2.0 ** math.ceil(math.log2(steps)), largest=_REACH_UNBOUNDED)
    if not bound.bounded:
        return loose, loose
    whole = protection.clip == "whole"
    largest = method.contribution.largest_message(bound.norm, senders, public.n_users, method.weights)
    clear = PartEncoding(
        bound=None if whole else bound, noise_std=std, noise_grid=bound.grid, largest=largest
    )
    if not whole and protection.he_clip is None:
        return clear, loose
    return clear, _hidden(protection, bound, std, largest, public.n_silos)


def _hidden(protection: Any, bound: Bound, std: float, largest: float, n_silos: int) -> PartEncoding:
    """Return the encoding of an encrypted half with a bound."""
    hidden_std, hidden_grid = protection.hidden_noise(bound, std)
    own = None if protection.clip == "whole" else Clip(norm=protection.he_clip)
    longest = largest if own is None else own.norm
    return PartEncoding(
        bound=own,
        noise_std=hidden_std,
        noise_grid=hidden_grid,
        finest=2.0 ** math.ceil(math.log2(finest_grid_step(hidden_std, longest, n_silos))),
        largest=longest,
    )


def hidden_log_ratio(protection: Any, moves: Sensitivity) -> float:
    """Bound the log-likelihood ratio between the encrypted half's noise and the Gaussian, per coordinate.

    The step of the grid is the smallest power of two that the range of the sums allows, so it jumps as the noise grows.
    The bound uses twice the smallest step that is possible: the power of two lies below it. Unlike the exact step,
    this bound falls monotonically as the noise grows, as the search for the least noise requires.

    Raises:
        PrivacyError: the range of the silos' sums is too small for these numbers, or holds them only on a grid that
            is too coarse for the noise.
    """
    half = _hidden(protection, moves.bound, moves.noise, moves.largest, moves.n_silos)
    noise_description = f"noise of {half.noise_std:g} under encryption, on numbers up to {half.largest:g}"
    if half.finest > half.noise_grid:
        raise PrivacyError(
            f"encrypted sums of {moves.n_silos} silos have no room for {noise_description}; fewer silos, a smaller "
            "bound of what a silo sends, other noise, or secure aggregation"
        )
    law = half.law
    assert law is not None, "noise under encryption is above 0"
    room = finest_grid_step(half.noise_std, half.largest, moves.n_silos)
    step = max(law.grid, min(2 * room, half.noise_grid))
    if half.noise_std < LEAST_STEPS * step:
        raise PrivacyError(
            f"protection.he_noise: {noise_description} is less than {LEAST_STEPS:g} steps of the grid on which "
            f"encrypted sums of {moves.n_silos} silos have room; take more noise there, or fewer silos"
        )
    return log_ratio_to_gaussian(half.noise_std / step)


# --- partial encryption -------------------------------------------------------------------------------------

BARE: Final = (
    "the encrypted part carries no noise (he_noise = 0), and all who hold the key or read a model see it"
)


@dataclass(frozen=True, kw_only=True)
class PartialEncryption(ProtectionStage):
    """Partial encryption (ParaAegis): the silos' key encrypts some coordinates; the others stay in clear.

    In round t the partition has r_t d coordinates, r_t = ratio decay^(t-1). docs/theory/partial-encryption.md.

    Attributes:
        ratio: r_0, the encrypted share in the first round.
        decay: lambda, the factor by which the encrypted share falls from round to round.
        strategy: silos vote for their values of largest ("max") or smallest ("min") size; "random" needs no votes.
        partition: origin of the partition: "votes", which are private and not charged; "noisy-votes"; "released", the
            coordinates in which the models released so far have changed most, at no cost.
        votes: "plain" shows the server each ballot in a secret order, "secagg" only the sum of all ballots.
        vote_noise: noise on the counts of "noisy-votes", in units of one ballot's l2 norm.
        he_noise: noise of the encrypted part over that of the clear part, each in units of its own bound; 0: none.
        clip: "whole" bounds a contribution before the partition is known; "parts" bounds each part of a client's
            update by itself: the clear part by the method's bound, the encrypted one by ``he_clip``. The method
            paraaegis sets it.
        he_clip: l2 bound of the encrypted part, if each part is bounded separately; None: not bounded.
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
    clip: Annotated[Literal["whole", "parts"], composed_field()] = "whole"
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
    def encrypts_everything(self) -> bool:
        """Return whether every coordinate is encrypted in every round."""
        return self.ratio == 1 and self.decay == 1

    @property
    def asks(self) -> bool:
        """Return whether silos vote on the partition."""
        return (
            self.strategy != "random"
            and self.partition != "released"
            and self.ratio > 0
            and not self.encrypts_everything
        )

    @property
    def unpaid(self) -> bool:
        """Return whether the partition depends on votes without noise, for which no event accounts."""
        return self.asks and self.partition == "votes"

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse methods whose messages cannot be added when one part is encrypted."""
        for reason in self._unaddable(method):
            yield f"cannot run under partial encryption: {reason}"
        if self.partition == "noisy-votes" and self.vote_noise == 0:
            yield "partition = 'noisy-votes': give vote_noise, or a share of the budget for it (budget.votes)"

    def _unaddable(self, method: Any) -> Iterable[str]:
        if method.local.own_noise:
            yield "DP-SGD has its noise inside the silos, in no part by itself"
        if isinstance(method.channel, ServerNoise):
            yield "its noise is added by a server that sees the sum; the senders must add GaussianShares"
        if not method.channel.is_additive:
            yield "messages that the server decodes one by one are no sums of two parts"
        if self.clip == "parts" and not method.contribution.has_single_contribution:
            yield "parts can be bounded by themselves only where a message holds one contribution"
        if redefined(method.channel, "send"):
            yield (
                f"{type(method.channel).__name__} defines send(), and each part of a message has its noise from the "
                "protection"
            )
        if method.denoiser.needs_noise_std:
            yield f"{method.denoiser.description} needs one size of noise, and the two parts have their own"

    @property
    def noisy_votes(self) -> bool:
        """Return whether senders vote and the counts of their votes have noise."""
        return self.asks and self.partition == "noisy-votes"

    def with_vote_noise(self, multiplier: float, ballots: int) -> PartialEncryption:
        """Return the protection whose noisy votes (:meth:`_votes`) have this noise multiplier in every round.

        Raises:
            CompositionError: the votes' noise is already set.
        """
        if self.vote_noise:
            raise CompositionError("budget.votes: finds protection.vote_noise; remove one of the two")
        # The inverse of _votes: sensitivity sqrt(2) ballots, in units of one ballot's norm.
        return replace(self, vote_noise=math.sqrt(2) * ballots * multiplier)

    def apply_to(self, method: Any, n_users: int) -> Any:
        """Return a method under partial encryption, with its noise moved to the messages.

        The noise of a trusted server on the sum of m clients becomes theirs: each message carries 1/m of its
        variance. A method that bounds its two parts separately, or encrypts everything, keeps doing so.

        Raises:
            CompositionError: a combination that cannot work.
        """
        own, channel = method.protection, method.channel
        if isinstance(own, PartialEncryption):
            if own.encrypts_everything and not self.encrypts_everything:
                raise CompositionError(
                    f"{method.name} encrypts everything; a part of it is what paraaegis encrypts"
                )
            if own.clip == "whole" and self.he_clip is not None:
                raise CompositionError(
                    f"{method.name}: he_clip bounds the encrypted part of a method that bounds its parts by themselves"
                )
            he_noise = own.he_noise if own.encrypts_everything else self.he_noise
            return replace(method, protection=replace(self, clip=own.clip, he_noise=he_noise))
        if isinstance(channel, ServerNoise):
            channel = through_messages(channel, method.sampler, n_users, Numbers())
        return replace(method, channel=channel, protection=self)

    def local_bound(self, bound: Bound) -> Bound:
        """Return no bound if the parts are clipped once the partition is known."""
        return Unbounded() if self.clip == "parts" else bound

    def largest_bound(self, bound: Bound) -> float:
        """Return the larger bound of the two parts; an encrypted part without a bound does not count."""
        return max(bound.largest, self.he_clip or 0.0)

    def make_protocol_spec(
        self, method: Any, public: PublicFacts, known_groups: Groups, rounds: int
    ) -> PartialEncryptionSpec:
        """Return the protocol spec: the ranges of both halves of a message, and the rule of the partition.

        Raises:
            ProtocolError: fewer than two silos, or values beyond the range of the sums.
        """
        return partial_sums(self, method, public)

    # --- messages and claims --------------------------------------------------------------------------------

    def sends(self, method: Any) -> Sends:
        """Return the messages of the setup and of a round.

        The coordinator sends no model: silos decrypt the sum and keep their own models. If clients are sampled, the
        cohort at the start of a round shows the sample.
        """
        drawn = (
            {Reveals.NOTHING: Reveals.DRAWN}
            if method.draws and isinstance(method.channel, ClientSender)
            else {}
        )
        messages = [
            *plain_round(method)[1:],
            Sent(ProtocolMessage, UP | DOWN),
            Sent(ModelStored, UP),
            Sent(Announcement, UP),
        ]
        messages += [Sent(Directory, DOWN), Sent(SealedKeys, UP | DOWN), Sent(RoundStart, DOWN, drawn)]
        if self.asks:
            messages.append(Sent(Partition, DOWN))
            if self.votes == "plain":
                messages.append(Sent(Ballot, UP))
            else:
                # These message classes usually sum updates; here they sum ballots.
                ballots = {Reveals.SUM: Reveals.BALLOT, Reveals.CONTENT: Reveals.BALLOT}
                messages += [Sent(kind, UP, ballots) for kind in (MaskedVector, OwnMask)] + [
                    Sent(RevealRequest, DOWN)
                ]
        return (*messages, Sent(PartialUpdate, UP), Sent(PartialSum, DOWN))

    def claims(self, claims: Iterable[Claim], sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim the noise of both parts and of the votes.

        ``claims`` refer to undivided messages, so they are not used.
        """
        n, (by_server, by_sender, by_both) = sensitivity.n_senders, self._unpaid_votes()
        whole = (Reveals.SUM, Reveals.OWN, Reveals.CLEAR, Reveals.HIDDEN, Reveals.BALLOT, Reveals.VOTES)
        pooled = self._pooled(sensitivity)
        return (
            Claim(frozenset({Reveals.CLEAR, Reveals.BALLOT}), self._in_clear(sensitivity), by_server),
            Claim(
                covered_knowledge(Reveals.SUM),
                # The sum carries n shares: total / (sqrt(n) std) is the ratio for one share's std.
                self._both_parts(sensitivity, sensitivity.total / math.sqrt(n), n),
            ),
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN), pooled),
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN, Reveals.VOTES), pooled, by_sender),
            Claim(covered_knowledge(*whole), self._pooled(sensitivity, sensitivity.messages), by_both),
        )

    def _in_clear(self, moves: Sensitivity) -> Event:
        """Return the event of the server's view: the clear part of every message, and noisy vote counts."""
        std, n = moves.noise, moves.n_senders
        if std == 0 and not self.encrypts_everything:
            return NoGuarantee(reason="the unencrypted part carries no noise")
        if self.ratio > 0 and self.he_noise == 0:
            # Without noise in the encrypted part, the model may reveal everything about the unit. Each of the n clear
            # parts may then move by its reach, which is 2 B for updates clipped to B: together by reach * sqrt(n) in
            # the l2 norm. Likewise all n ballots may change.
            moved = moves.reach * math.sqrt(n)
            clear = 0.0 if self.encrypts_everything else precision(moved, std)
            return released_event(clear, self._votes(n, n, n))
        if self.encrypts_everything:
            return ComposedEvent(events=())
        # With noise in every part, this bounds the joint view of server and reader: the clear parts of all messages,
        # and the sum of the hidden parts with n shares of noise.
        summed = precision(moves.total, std * math.sqrt(n))
        parts = self._together(precision(moves.messages, std), summed)
        return released_event(parts, self._votes(n, n, moves.ballots))

    def _pooled(self, moves: Sensitivity, messages: float = 0.0) -> Event:
        """Return the event of the sum, or of messages of this sensitivity, against a coalition of senders.

        The coalition knows its own noise, in both parts and on the votes. The shares of the others remain.
        """
        n, coalition = moves.n_senders, moves.together
        if n <= coalition:
            return NoGuarantee(reason="no share of the noise is left")
        return self._both_parts(
            moves, max(messages, moves.pooled_sensitivity(n - coalition, coalition, n)), n - coalition
        )

    def _both_parts(self, moves: Sensitivity, moved: float, unknown: int) -> Event:
        """Return the event of both parts and of the votes; ``moved`` is the sensitivity per share of noise.

        ``unknown`` shares of the noise on votes are unknown to the party.
        """
        if self.ratio > 0 and self.he_noise == 0:
            return NoGuarantee(reason=BARE)
        if moves.noise == 0:
            return NoGuarantee(reason="no noise is added")
        plain = precision(moved, moves.noise)
        parts = self._together(0.0 if self.encrypts_everything else plain, plain)
        return released_event(parts, self._votes(moves.n_senders, unknown, moves.ballots))

    def _together(self, clear: float, plain: float) -> float:
        """Return the precision 1/z^2 of both parts.

        Args:
            clear: precision of the clear part.
            plain: precision that the encrypted part would have with the noise of the clear part.
        """
        hidden = 0.0
        if self.ratio > 0:
            check_ratio(math.sqrt(plain), self.he_noise)
            hidden = plain / self.he_noise / self.he_noise
        # Separate bounds: both parts may change fully, so precisions add. Joint bound: changes a and b of the two
        # parts have a^2 + b^2 <= C^2, so a^2 / s_1^2 + b^2 / s_2^2 <= C^2 / min(s_1, s_2)^2.
        return clear + hidden if self.clip == "parts" else max(clear, hidden)

    def _votes(self, count: int, unknown: int, ballots: int) -> float:
        """Return the precision 1/z^2 of noisy vote counts, of which ``unknown`` shares of noise are unknown.

        A ballot has k ones, and any other k ones may replace it. So it changes by sqrt(2 k), which is sqrt(2) ballot
        norms. The noise of all ``count`` silos together is vote_noise sqrt(k).
        """
        if self.vote_noise == 0 or not self.asks:
            return 0.0
        return precision(math.sqrt(2) * ballots, self.vote_noise) * count / unknown

    def grid_loss(self, loss: float, sensitivity: Sensitivity) -> float:
        """Return the larger loss of the two parts: a coordinate is in one part only."""
        if sensitivity.noise == 0:
            return 0.0
        losses = [grid_law(sensitivity.noise, sensitivity.bound.grid).log_ratio_to_gaussian]
        if self.he_noise:
            losses.append(hidden_log_ratio(self, sensitivity))
        return 2 * sensitivity.n_senders * max(losses)

    def hidden_noise(self, bound: Bound, std: float) -> tuple[float, float]:
        """Return the standard deviation of the encrypted part's noise in a message, and the grid of that part."""
        if not bound.bounded:
            return 0.0, bound.grid
        hidden = bound if self.he_clip is None else Clip(norm=self.he_clip)
        return self.he_noise * std * hidden.norm / bound.norm, hidden.grid

    # --- in words -------------------------------------------------------------------------------------------

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return sentences on the encrypted share, the partition's origin, and the noise of both parts."""
        share = f"{self.ratio:g}" + (f" x {self.decay:g}^(t-1) (in round t)" if self.decay < 1 else "")
        origin = {
            "votes": f"those with most votes ({self.strategy} absolute value)",
            "noisy-votes": f"those with most votes ({self.strategy} absolute value), counted with noise of "
            f"{show_at_least(self.vote_noise)} times the l2 norm of a ballot",
            "released": "those in which the released models have changed most",
        }[self.partition]
        origin = (
            "all of them"
            if self.encrypts_everything
            else "drawn at random"
            if self.strategy == "random"
            else origin
        )
        noise = (
            f"Gaussian noise of standard deviation {show_at_least(sensitivity.noise)} in the unencrypted part "
            "of each message"
            if sensitivity.noise
            else "no noise in the unencrypted part of a message"
        )
        hidden = (
            f"and, relative to each part's bound, {show_at_least(self.he_noise)} times as much"
            if self.he_noise
            else "none"
        )
        sentences = [
            f"partial encryption (CKKS, 128-bit security, exact sums) of a fraction {share} of the coordinates: "
            f"{origin}; {noise}, {hidden} in the encrypted part"
        ]
        if sensitivity.bound.bounded and self.clip == "parts":
            bound = "is not clipped" if self.he_clip is None else f"to {show_at_most(self.he_clip)}"
            sentences.append(
                "the unencrypted part of each client's update is clipped to l2 norm "
                f"{show_at_most(sensitivity.norm)}, its "
                f"encrypted part {bound}"
            )
        elif sensitivity.bound.bounded:
            sentences.append(
                f"each contribution is clipped to l2 norm {show_at_most(sensitivity.norm)} before it is divided"
            )
        return tuple(sentences)

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the ciphers' assumptions and the server's possible departures, which no epsilon covers."""
        return OF_KEYS, "a break of the encryption, which relies on ring-LWE at 128 bits", OF_SUMS

    def _unpaid_votes(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return facts that uncharged votes reveal to the server, to a sender (who knows the order), and to both."""
        if not self.unpaid:
            return (), (), ()
        by_server, by_sender = (
            ("in how many coordinates any two ballots overlap", "which coordinates each sender votes for")
            if self.votes == "plain"
            else ("how many coordinates have how many votes", "how many votes each coordinate has")
        )
        return (
            (
                f"{by_server}, though not which coordinates these are: epsilon covers the unencrypted numbers, "
                "whatever the partition, but not the ballots (partition = 'released' or 'noisy-votes', or "
                "strategy = 'random', avoids this)",
            ),
            ("which coordinates have most votes",),
            (by_sender,),
        )

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the epsilon that Remark 1 of the paper states for this noise; infinite without noise."""
        std = method.channel.message_std(count_senders(method.channel, public.n_silos))
        if self.clip != "parts" or not public.silo_records or not method.bound.bounded:
            return ()
        sensitivity = 2 * method.bound.norm / max(public.silo_records)

        def remark_1(rounds: int, delta: float) -> float:
            rate = method.sampler.rate
            return remark_1_noise(rounds=rounds, epsilon=std / sensitivity, delta=delta, rate=rate)

        gap = (
            "it takes 2 theta / |D_i| for what one record moves, but a record that is used in several local steps can "
            "move a clipped update by 2 theta; it says nothing of a client, and nothing of the encrypted part"
        )
        return (Published(name="Remark 1 of ParaAegis", gap=gap, epsilon=remark_1),)

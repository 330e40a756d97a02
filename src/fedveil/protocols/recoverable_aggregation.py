"""Secure aggregation that survives vanished silos (Bonawitz et al. 2017, semi-honest protocol).

For every attempt each silo makes two fresh agreement keys, one for its masks and one for sealing, and a fresh seed of
its own mask. It sends every other silo one Shamir share of the seed and one of the mask key, sealed under the sealing
keys of the two silos. After the vectors have arrived, each silo signs the first list of survivors that it receives,
and no other. Once it has ``threshold`` signatures over that list, it sends one share per silo: a share of the seed if
that silo survived, a share of the mask key if it vanished, and never both. From ``threshold`` answers the server
rebuilds the masks that it must remove. It checks a rebuilt mask key against the announced public key. It checks a
rebuilt seed against a key that is derived from the seed and arrives with the sealed shares.

    start -> fresh signed keys -> directory -> sealed shares -> relayed shares -> masked vectors ->
    survivors -> signatures -> all signatures -> shares

Claim: whatever messages the server sends to each silo, in one attempt it opens the sum over a single list of at least
``threshold`` silos, or nothing. Condition: silos follow the protocol. If c silos do not, 2 threshold > |S| + c is
needed (:func:`check_threshold`).

Argument: any two lists that both have ``threshold`` signatures share an honest silo, and an honest silo signs only
one list. Hence all silos send their shares for one list L, and of each silo only one kind of share. Every silo that
sends shares holds shares of all silos in L. Its vector is therefore masked with all of L, and a smaller sum that
includes this vector stays masked. The other silos of L, at most |L| - threshold, have vectors that are masked with at
least threshold - 1 silos. The removable masks are those with these other silos and with the |S| - |L| vanished silos,
which are fewer. (Bonawitz et al. 2017 also sign the list, against a server that does not follow the protocol.)

The server relays all sealed shares, so the private half of a sealing key is never shared. If one key served both
uses, the server could decrypt the shares of a vanished silo's seed with the mask key that it rebuilds (Bonawitz et
al. 2017, c_u and s_u).

The sum is over the survivors only. The noise must suffice with ``threshold`` shares, because the noise share of a
vanished silo is missing. A late vector of a silo that was declared vanished stays hidden by its own mask: no silo
sends a share of its seed, and the server cannot decrypt the shares that it relayed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum, auto

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.key_agreement import KEY_BYTES, AgreementKey, RoundId, SignedKey, derive, seal, unseal
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.crypto.masks import apply_masks_
from fedveil.crypto.shamir import SHARE_BYTES, Share, combine, consistent, odd_one_out, split
from fedveil.errors import CryptoError, ProtocolError
from fedveil.privacy.claims import Reveals
from fedveil.protocols.field_codecs import BLOCK, fixed_bytes, message_codec, wire_field
from fedveil.protocols.messages import (
    SERVER,
    SIGNED_KEY,
    SILOS,
    Envelope,
    MaskedVector,
    Message,
    RoundStart,
    by_silo,
    message,
)
from fedveil.protocols.parties import PairwiseKeys, Party, SiloParty, check_cohort
from fedveil.protocols.protocol import ClientContext, Drawn, Outgoing
from fedveil.protocols.secure_aggregation import MASK_PURPOSE, AggregationPlan, Units

KEY_PURPOSE = "recoverable aggregation: mask key"
SEAL_PURPOSE = "recoverable aggregation: sealing key"
SHARE_PURPOSE = "recoverable aggregation: shares"
SEED_PURPOSE = "recoverable aggregation: what shows a seed"
SIGN_PURPOSE = "recoverable aggregation: survivors"


class Phase(Enum):
    """Step of an attempt: the message that a party awaits."""

    IDLE = auto()
    KEYS = auto()
    SHARES = auto()
    VECTORS = auto()
    SIGN = auto()
    REVEAL = auto()
    DONE = auto()


def check_threshold(threshold: int, silos: int, colluding: int = 0) -> None:
    """Check that any two groups of ``threshold`` silos share a silo that does not collude.

    Two groups of t among n silos share at least 2t - n silos, so 2t > n + c is needed.

    Args:
        threshold: t, number of silos in a group.
        silos: n, number of silos in the run.
        colluding: c, number of silos that may pool their knowledge.

    Raises:
        ProtocolError: the threshold is too low, or above the number of silos.
    """
    if not silos + colluding < 2 * threshold <= 2 * silos:
        collusion = f", {colluding} of which may pool what they know" if colluding else ""
        raise ProtocolError(
            f"threshold {threshold} of {silos} silos{collusion}; it must lie above half of {silos + colluding} and at "
            "most at all silos"
        )


def list_of(round_id: RoundId, survivors: tuple[int, ...]) -> bytes:
    """Return the bytes that silos sign for a list of survivors: purpose, attempt and list."""
    return SIGN_PURPOSE.encode() + round_id.encode() + Survivors(silos=survivors).encode()


# --- messages -----------------------------------------------------------------------------------------------
# Define the messages of secure aggregation with recovery.


@message(11, "two signed public keys")
class RecoveryKeys(Message):
    """Two signed agreement keys of a silo for one attempt: for masks, and for sealed shares."""

    mask: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)
    seal: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)


@message(12, "the silos' signed public keys, two each")
class RecoveryDirectory(Message):
    """Both signed agreement keys of all silos of a cohort, relayed by the server."""

    keys: tuple[tuple[int, RecoveryKeys], ...] = wire_field(
        by_silo(message_codec(RecoveryKeys)), Reveals.NOTHING
    )


@message(15, "sealed shares for the other silos")
class ShareBundle(Message):
    """Sealed shares of a silo's two secrets, one pair per other silo, with a check value of its seed.

    The server checks a rebuilt mask key against the public half that the silo announced. It checks a rebuilt seed of
    the silo's own mask against ``shown``, a key derived from the seed. The seed cannot be computed from ``shown``.
    """

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)
    shown: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.NOTHING)


@message(8, "the other silos' sealed shares")
class RelayedShares(Message):
    """Shares that the other silos sealed for the recipient, relayed by the server."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)


@message(9, "the silos whose vectors arrived")
class Survivors(Message):
    """Numbers of the silos whose masked vectors arrived, ascending."""

    silos: tuple[int, ...] = wire_field(SILOS, Reveals.NOTHING)


@message(13, "a signature over the survivors")
class SignedSurvivors(Message):
    """Signature of a silo over the only list of survivors that it accepts in an attempt."""

    signature: bytes = wire_field(fixed_bytes(SIGNATURE_BYTES), Reveals.NOTHING)


@message(14, "the silos' signatures over the survivors")
class AgreedSurvivors(Message):
    """Survivors' signatures over the list of survivors; they show which silos received the same list."""

    signatures: tuple[tuple[int, bytes], ...] = wire_field(
        by_silo(fixed_bytes(SIGNATURE_BYTES)), Reveals.NOTHING
    )


@message(10, "one share per silo")
class RevealedShares(Message):
    """One share for each silo: of the seed of its own mask if it survived, of its mask key if it vanished."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(fixed_bytes(SHARE_BYTES)), Reveals.SUM)


# --- the parties ---


# --- silo ---


class RecoverableSilo(SiloParty[Units, Units]):
    """Silo's end of a session.

    Args:
        plan: public specification of the sum.
        place: context of the silo in the session.
        threshold: fewest silos that must survive.
    """

    def __init__(self, plan: AggregationPlan, place: ClientContext, *, threshold: int) -> None:
        check_threshold(threshold, plan.clients)
        super().__init__(place)
        self._plan, self._threshold = plan, threshold
        self._new_peers()
        self._phase = Phase.IDLE
        self._seed = b""
        self._own: tuple[bytes, bytes] = (b"", b"")
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._survivors: tuple[int, ...] = ()

    @property
    def awaits_input(self) -> bool:
        """Return whether the protocol awaits :meth:`contribute` now."""
        return self._phase is Phase.VECTORS

    @property
    def survivors(self) -> tuple[int, ...]:
        """Silos that the server named as survivors, until this silo sends its shares; empty at other times."""
        return self._survivors if self._phase is Phase.REVEAL else ()

    def announce(self) -> None:
        """Return None: every attempt has fresh keys, so the protocol has no setup."""

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server; return the answers to it.

        Raises:
            ProtocolError: a message that must not be accepted; the silo reveals nothing.
        """
        envelope = Envelope.from_server(data)
        content = envelope.message
        if isinstance(content, RoundStart):
            return self._start(envelope, content)
        awaited: dict[Phase, type[Message]] = {
            Phase.KEYS: RecoveryDirectory,
            Phase.SHARES: RelayedShares,
            Phase.SIGN: Survivors,
            Phase.REVEAL: AgreedSurvivors,
        }
        if self._phase not in awaited:
            raise ProtocolError("the server sent a message when none was awaited")
        self._inbox.accept(envelope, awaited[self._phase])
        if isinstance(content, RecoveryDirectory):
            return self._share(content)
        if isinstance(content, RelayedShares):
            return self._hold(content)
        if isinstance(content, Survivors):
            return self._sign(content)
        assert isinstance(content, AgreedSurvivors)
        return self._reveal(content)

    def mask_vector(self, units: Units) -> bytes:
        """Return the masked vector for the round that has begun; see ``AggregationSilo.mask_vector``."""
        if self._phase is not Phase.VECTORS:
            raise ProtocolError("no round awaits this silo's vector", silo=self.index)
        words = self._plan.encode(units, self.index)
        # Masks only with silos whose shares this silo holds: the mask of any other silo could never be removed.
        pairwise = self._masking.mask_keys(tuple(sorted(self._held)), MASK_PURPOSE, self._round_id)
        apply_masks_(words, [(self._seed, True), *pairwise])
        self._phase = Phase.SIGN
        return self._envelope(MaskedVector(words=words, word_bytes=self._plan.word_bytes))

    def _send(self, units: Units, round_id: RoundId) -> list[bytes]:
        return [self.mask_vector(units)]

    def _new_peers(self) -> None:
        self._masking, self._sealing = (
            PairwiseKeys(self._place, purpose) for purpose in (KEY_PURPOSE, SEAL_PURPOSE)
        )

    def _start(self, envelope: Envelope, start: RoundStart) -> list[bytes]:
        if envelope.round_id.run != self._place.run:
            raise ProtocolError("a round of another run begins")
        check_cohort(start.cohort, self._plan.clients, index=self.index)
        self._inbox.open(envelope.round_id)
        self._inbox.accept(envelope, RoundStart)
        self._round_id, self._cohort = self._bound(envelope.round_id, start.cohort), start.cohort
        # Fresh keys and seed for every attempt: shares of the last attempt may have opened the old ones.
        self._new_peers()
        self._seed, self._held = os.urandom(32), {}
        self._phase = Phase.KEYS
        mask, seal = self._masking.sign(self._round_id), self._sealing.sign(self._round_id)
        return [self._envelope(RecoveryKeys(mask=mask, seal=seal))]

    def _share(self, directory: RecoveryDirectory) -> list[bytes]:
        members = tuple(silo for silo, _ in directory.keys)
        if not set(members) <= set(self._cohort) or len(members) < self._threshold:
            raise ProtocolError(f"the directory names {len(members)} silos; {self._threshold} are needed")
        self._masking.meet(tuple((silo, keys.mask) for silo, keys in directory.keys), self._round_id)
        self._sealing.meet(tuple((silo, keys.seal) for silo, keys in directory.keys), self._round_id)
        seeds = split(self._seed, holders=self._plan.clients, threshold=self._threshold)
        private = self._masking.agreement_key.private_bytes()
        keys = split(private, holders=self._plan.clients, threshold=self._threshold)
        # The silo keeps its own share of each secret, so that `threshold` counts all survivors, itself included.
        self._own = seeds[self.index].value, keys[self.index].value
        sealed = []
        for silo in members:
            if silo != self.index:
                key = self._sealing.key(silo, SHARE_PURPOSE, self._round_id)
                content = seeds[silo].value + keys[silo].value
                sealed.append((silo, seal(key, content, self._associated(self.index, silo))))
        self._cohort, self._phase = members, Phase.SHARES
        shown = derive(self._seed, SEED_PURPOSE, self._round_id)
        return [self._envelope(ShareBundle(shares=tuple(sealed), shown=shown))]

    def _hold(self, relayed: RelayedShares) -> list[bytes]:
        if len(relayed.shares) + 1 < self._threshold:
            raise ProtocolError(f"shares of {len(relayed.shares) + 1} silos; {self._threshold} are needed")
        shares = {self.index: self._own}
        for silo, sealed in relayed.shares:
            if silo not in self._cohort or silo == self.index:
                raise ProtocolError("shares come from a silo that is not in the directory", silo=silo)
            key = self._sealing.key(silo, SHARE_PURPOSE, self._round_id)
            try:
                content = unseal(key, sealed, self._associated(silo, self.index))
            except CryptoError as error:
                raise ProtocolError(f"its shares were refused: {error}", silo=silo) from error
            if len(content) != 2 * SHARE_BYTES:
                raise ProtocolError("its shares have a wrong length", silo=silo)
            shares[silo] = content[:SHARE_BYTES], content[SHARE_BYTES:]
        self._held, self._phase = shares, Phase.VECTORS
        return []

    def _sign(self, survivors: Survivors) -> list[bytes]:
        # Every survivor must be one whose shares this silo holds; the threshold keeps the server from small sums.
        alive = set(survivors.silos)
        if not alive <= set(self._held) or self.index not in alive or len(alive) < self._threshold:
            raise ProtocolError(
                f"the server names {len(alive)} survivors; at least {self._threshold} of the silos that "
                "shared, this one among them, are needed"
            )
        # The phase changes here, so the silo signs one list per attempt: the argument for one opened sum rests on it.
        self._survivors, self._phase = survivors.silos, Phase.REVEAL
        signature = self._place.identity.sign(list_of(self._round_id, self._survivors))
        return [self._envelope(SignedSurvivors(signature=signature))]

    def _reveal(self, survivors: AgreedSurvivors) -> list[bytes]:
        for silo, signature in survivors.signatures:
            if silo not in self._survivors:
                raise ProtocolError("signs a list of survivors that it is not in", silo=silo)
            try:
                self._place.roster[silo].verify(list_of(self._round_id, self._survivors), signature)
            except CryptoError as error:
                raise ProtocolError(f"signed other survivors: {error}", silo=silo) from error
        if len(survivors.signatures) < self._threshold:
            raise ProtocolError(
                f"{len(survivors.signatures)} silos signed these survivors; {self._threshold} are needed"
            )
        alive = self._survivors
        # Never both shares of one silo: seed and mask key together would open its vector.
        shares = tuple((silo, self._held[silo][0 if silo in alive else 1]) for silo in sorted(self._held))
        # Forget the shares before the answer leaves, so that no later list can be answered.
        self._phase, self._held = Phase.DONE, {}
        return [self._envelope(RevealedShares(shares=shares))]

    def _associated(self, sender: int, recipient: int) -> bytes:
        return self._round_id.encode() + sender.to_bytes(2, "big") + recipient.to_bytes(2, "big")


# --- server ---


class RecoverableServer(Party):
    """Server's end of a session; the caller ends the wait for silos by :meth:`proceed`.

    Args:
        plan: public specification of the sum.
        run: 16 bytes that name the session.
        threshold: fewest silos that must survive.
    """

    ready = True  # every attempt has keys of its own

    def __init__(self, plan: AggregationPlan, run: bytes, *, threshold: int) -> None:
        check_threshold(threshold, plan.clients)
        super().__init__(run, SERVER)
        self._plan, self._threshold = plan, threshold
        self._phase = Phase.IDLE
        self._cohort: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._arrived: dict[int, Message] = {}
        self._keys: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}
        self._sharers: tuple[int, ...] = ()
        self._sum = np.zeros(0, dtype=plan.word)

    @property
    def missing(self) -> tuple[int, ...]:
        """Silos whose message for the current step has not arrived."""
        if self._phase is Phase.DONE:
            return ()
        return tuple(silo for silo in self._asked if silo not in self._arrived)

    @property
    def has_quorum(self) -> bool:
        """Return whether at least ``threshold`` silos have answered, so that :meth:`proceed` can continue."""
        return len(self._arrived) >= self._threshold

    @property
    def n_summed(self) -> int:
        """Number of silos whose vectors are in the sum; final once :attr:`may_have_released` is True."""
        return len(self._cohort)

    @property
    def may_have_released(self) -> bool:
        """Return whether the server has requested shares of this attempt; from then on its privacy event is charged."""
        return self._phase in (Phase.REVEAL, Phase.DONE)

    def begin(
        self, round_id: RoundId, cohort: tuple[int, ...], sampled_users: Drawn | None = None
    ) -> Outgoing:
        """Begin a round, or another attempt at it; return the messages to the cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: numbers of the silos that begin the attempt, ascending.
            sampled_users: ignored, because the silos' vectors are over the sampled users already.

        Raises:
            ProtocolError: an attempt that was played before, or fewer silos than the threshold.
        """
        check_cohort(cohort, self._plan.clients)
        self._check_enough(len(cohort))
        if round_id.run != self._round_id.run:
            raise ProtocolError("a round of another run cannot be played")
        self._inbox.open(round_id)
        # Keys and signatures are bound to the cohort that begins, not to the survivors, which are not known yet.
        self._round_id, self._phase = self._bound(round_id, cohort), Phase.KEYS
        self._cohort, self._asked, self._arrived, self._keys = cohort, cohort, {}, {}
        self._sum = np.zeros(self._plan.length, dtype=self._plan.word)
        return self._to_each(self._cohort, RoundStart(cohort=cohort))

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a silo's message; return the messages of the next step once the step is complete.

        Raises:
            ProtocolError: a message that must not be accepted; the error names the silo.
        """
        try:
            envelope = Envelope.decode(data)
            awaited: dict[Phase, type[Message]] = {
                Phase.KEYS: RecoveryKeys,
                Phase.SHARES: ShareBundle,
                Phase.VECTORS: MaskedVector,
                Phase.SIGN: SignedSurvivors,
                Phase.REVEAL: RevealedShares,
            }
            if envelope.sender != sender or sender not in self._asked or self._phase not in awaited:
                raise ProtocolError(
                    "sent a message under another party's name, too late, or when none was awaited"
                )
            self._inbox.accept(envelope, awaited[self._phase])
            self._check(envelope.message)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        self._arrived[sender] = envelope.message
        return [] if self.missing else self.proceed()

    def proceed(self) -> list[tuple[int, bytes]]:
        """Proceed with the silos that have answered; the other silos count as vanished.

        Raises:
            ProtocolError: fewer than the threshold answered; the attempt is over and nothing was revealed.
        """
        self._check_enough(len(self._arrived))
        answers, self._arrived = self._arrived, {}
        self._asked = tuple(sorted(answers))
        # From SIGN on the sum is fixed: a silo that vanishes later stays in it, and the others' shares open its mask.
        if self._phase not in (Phase.SIGN, Phase.REVEAL):
            self._cohort = self._asked
        if self._phase is Phase.KEYS:
            self._phase = Phase.SHARES
            keys = [(silo, m) for silo, m in sorted(answers.items()) if isinstance(m, RecoveryKeys)]
            self._keys = {silo: pair.mask.public for silo, pair in keys}
            return self._to_each(self._cohort, RecoveryDirectory(keys=tuple(keys)))
        if self._phase is Phase.SHARES:
            self._phase, self._sharers = Phase.VECTORS, self._cohort
            bundles = {silo: m for silo, m in answers.items() if isinstance(m, ShareBundle)}
            self._shown = {silo: bundle.shown for silo, bundle in bundles.items()}
            return self._relay({silo: dict(bundle.shares) for silo, bundle in bundles.items()})
        if self._phase is Phase.VECTORS:
            self._phase = Phase.SIGN
            for content in answers.values():
                if isinstance(content, MaskedVector):
                    self._sum += content.words
            return self._to_each(self._cohort, Survivors(silos=self._cohort))
        if self._phase is Phase.SIGN:
            self._phase = Phase.REVEAL
            signed = [(s, m.signature) for s, m in sorted(answers.items()) if isinstance(m, SignedSurvivors)]
            return self._to_each(self._asked, AgreedSurvivors(signatures=tuple(signed)))
        self._phase = Phase.DONE
        self._unmask({s: dict(m.shares) for s, m in answers.items() if isinstance(m, RevealedShares)})
        return []

    def result(self) -> Int64[np.ndarray, " d"]:
        """Return the sum of the survivors' vectors in grid units.

        Raises:
            ProtocolError: the attempt is not complete, or the sum is out of range.
        """
        if self._phase is not Phase.DONE:
            raise ProtocolError(f"the sum is not complete; silos {list(self.missing)} are missing")
        return self._plan.decode(self._sum)

    def _check_enough(self, silos: int) -> None:
        if silos < self._threshold:
            raise ProtocolError(
                f"{silos} silos are left and {self._threshold} are needed; the attempt is over"
            )

    def _check(self, content: Message) -> None:
        if isinstance(content, MaskedVector):
            self._plan.check(content)
        # Checked at arrival, where the error still names the silo: `_unmask` needs a share for every silo that
        # shared.
        if isinstance(content, RevealedShares) and tuple(s for s, _ in content.shares) != self._sharers:
            raise ProtocolError("did not give one share for every silo")

    def _relay(self, bundles: dict[int, dict[int, bytes]]) -> list[tuple[int, bytes]]:
        messages: list[tuple[int, bytes]] = []
        for recipient in self._cohort:
            shares = []
            for sender in self._cohort:
                if sender != recipient:
                    if recipient not in bundles[sender]:
                        raise ProtocolError(f"sealed no shares for silo {recipient}", silo=sender)
                    shares.append((sender, bundles[sender][recipient]))
            messages += self._to_each([recipient], RelayedShares(shares=tuple(shares)))
        return messages

    def _unmask(self, revealed: dict[int, dict[int, bytes]]) -> None:
        """Remove the survivors' own masks, and their pairwise masks with the silos that vanished.

        The server adds sum_{s in L} x_s + b_s + sum_{t vanished} +-m_{s,t}; the pairwise masks within L cancel.
        """
        masks: list[tuple[bytes, bool]] = []
        for silo in self._sharers:
            shares = [
                Share(point=holder + 1, value=by_dealer[silo]) for holder, by_dealer in revealed.items()
            ]
            if silo in self._cohort:
                masks.append((self._secret(silo, "own mask", shares, self._seed_of), False))
                continue
            vanished = AgreementKey.from_bytes(self._secret(silo, "mask key", shares, self._key_of))
            for survivor in self._cohort:
                key = vanished.agree(self._keys[survivor]).derive(MASK_PURPOSE, self._round_id)
                # The lower number of a pair adds the mask: a survivor above the vanished silo has subtracted it.
                masks.append((key, survivor > silo))
        apply_masks_(self._sum, masks)

    def _seed_of(self, silo: int, secret: bytes) -> bool:
        """Return whether ``secret`` is the seed that a silo has shared."""
        return derive(secret, SEED_PURPOSE, self._round_id) == self._shown[silo]

    def _key_of(self, silo: int, secret: bytes) -> bool:
        """Return whether ``secret`` is the private half of the mask key that a silo has signed."""
        return AgreementKey.from_bytes(secret).public == self._keys[silo]

    def _secret(
        self, silo: int, purpose: str, shares: list[Share], is_announced: Callable[[int, bytes], bool]
    ) -> bytes:
        """Rebuild a silo's secret from shares and check it against the silo's announcement.

        Raises:
            ProtocolError: the shares do not give the announced secret. If the other shares identify the wrong one,
                the error names the silo that sent or dealt it.
        """

        def fit(subset: list[Share]) -> bool:
            if len(subset) < self._threshold or not consistent(subset, threshold=self._threshold):
                return False
            try:
                return is_announced(silo, combine(subset, threshold=self._threshold))
            except CryptoError:
                return False

        # Verified before use: a wrong secret would leave a uniform sum, which `decode` does not always refuse.
        if not fit(shares):
            raise self._wrong(silo, purpose, shares, fit)
        return combine(shares, threshold=self._threshold)

    def _wrong(
        self, silo: int, purpose: str, shares: list[Share], fit: Callable[[list[Share]], bool]
    ) -> ProtocolError:
        """Return the error that names the silos that can have caused a wrong share.

        It names them as far as the other shares show. Let n silos have sent shares, with threshold t. The error is
        right unless n - t + 1 of them collude. With fewer colluding silos, either t honest shares, or t - 1 honest
        shares and the announced secret, determine the polynomial that was dealt.
        """
        odd = odd_one_out(shares, fit)
        if odd is not None and odd.point - 1 == silo:
            return ProtocolError(f"gave a wrong share of its {purpose}", silo=silo)
        if odd is not None:  # shares travel sealed, so no third party knows which share the dealer sent
            return ProtocolError(
                f"silo {odd.point - 1} gave a wrong share of silo {silo}'s {purpose}, or was dealt it by silo {silo}"
            )
        if len(shares) > self._threshold and consistent(shares, threshold=self._threshold):
            return ProtocolError(f"dealt shares of another {purpose} than its own", silo=silo)
        holders, threshold = [share.point - 1 for share in shares], self._threshold
        return ProtocolError(
            f"the shares of silo {silo}'s {purpose} do not give the one that it announced: silo {silo} dealt wrong "
            f"ones, or one of the silos {holders} gave a wrong one; {len(shares)} shares at a threshold of {threshold} "
            "do not show who"
        )

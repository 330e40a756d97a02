"""Secure aggregation that survives vanished silos (Bonawitz et al. 2017, the protocol for parties that follow it).

For every attempt each silo makes two fresh agreement keys, one for its masks and one for sealing, and a fresh seed of
its own mask. It gives each other silo one Shamir share of the seed and of the mask key, sealed under the sealing keys
of the two. When the vectors are in, each silo signs the one list of survivors that it is told of. With ``threshold``
signatures over that list it answers with one share per silo: of the seed if that silo survived, of the mask key if
it vanished, never both. From ``threshold`` answers the server rebuilds what it has to take off.

    start -> fresh signed keys -> directory -> sealed shares -> relayed shares -> masked vectors ->
    survivors -> signatures -> all signatures -> shares

Claim: whatever the server says to whom, of an attempt it opens the sum over one list of at least ``threshold`` silos,
or nothing; silos follow the protocol. With c silos that do not, 2 threshold > |S| + c is needed (``check_threshold``).
Why: two lists that both have ``threshold`` signatures share an honest silo, which signs once. So all shares are given
for one list L, and of each silo only one kind. Every silo that gives shares holds shares of all of L, so it is masked
with all of L, and a smaller sum that has its vector stays masked. A vector of the others, at most |L| - threshold, is
masked with at least threshold - 1 silos; masks come off with those others and with the |S| - |L| that vanished, which
are fewer. (Bonawitz et al. 2017 sign the list too, against a server that does not follow the protocol.)

The server relays all sealed shares, so the private half of a sealing key is never shared: with one key for both uses it
could open the shares of a vanished silo's seed with the key that it rebuilds (Bonawitz et al. 2017, c_u and s_u).

The sum is then over the survivors alone. Noise must be enough with ``threshold`` shares of it: a vanished silo's
share is missing. A late vector of a silo that was declared vanished stays hidden by its own mask: no silo gives its
share of the seed, and the server cannot open those that it relayed.
"""

from __future__ import annotations

import os
from enum import Enum, auto

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.aead import seal, unseal
from fedveil.crypto.agreement import AgreementKey, RoundId
from fedveil.crypto.errors import CryptoError
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.masks import apply_masks_
from fedveil.crypto.shamir import SHARE_BYTES, Share, combine, split
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import SERVER, Envelope, MaskedVector, Message, RoundStart
from fedveil.protection.parties import Party, check_same_round
from fedveil.protection.peers import Peers, Roster, check_cohort
from fedveil.protection.recovery_messages import (
    AgreedSurvivors,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
)
from fedveil.protection.secure_aggregation import MASK_PURPOSE, AggregationPlan

KEY_PURPOSE = "recoverable aggregation: mask key"
SEAL_PURPOSE = "recoverable aggregation: sealing key"
SHARE_PURPOSE = "recoverable aggregation: shares"
SIGN_PURPOSE = "recoverable aggregation: survivors"


class _Step(Enum):
    IDLE = auto()
    KEYS = auto()
    SHARES = auto()
    VECTORS = auto()
    SIGN = auto()
    REVEAL = auto()
    DONE = auto()


def check_threshold(threshold: int, silos: int, colluding: int = 0) -> None:
    """Return if any two groups of so many silos have one in common that does not pool what it knows.

    Raises:
        ProtocolError: the threshold is too low or above the number of silos.
    """
    if not silos + colluding < 2 * threshold <= 2 * silos:
        besides = f", {colluding} of which may pool what they know" if colluding else ""
        raise ProtocolError(
            f"threshold {threshold} of {silos} silos{besides}; it must lie above half of {silos + colluding} and at "
            "most at all silos"
        )


def _list_of(round_id: RoundId, survivors: tuple[int, ...]) -> bytes:
    """Return what silos sign of a list of survivors."""
    return SIGN_PURPOSE.encode() + round_id.encode() + Survivors(silos=survivors).encode()


class RecoverableSilo(Party):
    """One silo of a run.

    Args:
        plan: what all parties agreed on.
        threshold: how many silos must survive.
        index: the silo's number.
        identity: its long-term key.
        roster: all silos' public identities.
    """

    def __init__(
        self, plan: AggregationPlan, *, threshold: int, index: int, identity: IdentityKey, roster: Roster
    ) -> None:
        check_threshold(threshold, plan.silos)
        super().__init__(plan, index)
        self.index = index
        self._plan, self._threshold, self._identity, self._roster = plan, threshold, identity, roster
        self._new_peers()
        self._step = _Step.IDLE
        self._cohort: tuple[int, ...] = ()
        self._seed = b""
        self._own: tuple[bytes, bytes] = (b"", b"")
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._survivors: tuple[int, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether an attempt is under way that this silo's vector is not yet in."""
        return self._step in (_Step.KEYS, _Step.SHARES, _Step.VECTORS)

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""
        return self._step is _Step.VECTORS

    def announce(self) -> None:
        """Nothing is to be set up: every attempt has keys of its own."""

    def check_round(self, round_id: RoundId) -> None:
        """Return if this is the round and attempt that has begun here; else raise a ProtocolError."""
        check_same_round(round_id, self._round_id, self.index)

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server; return the answers to it.

        Raises:
            ProtocolError: a message that must not be accepted; nothing was revealed.
        """
        envelope = Envelope.decode(data)
        content = envelope.message
        if isinstance(content, RoundStart):
            return self._start(envelope, content)
        awaited: dict[_Step, type[Message]] = {
            _Step.KEYS: RecoveryDirectory,
            _Step.SHARES: RelayedShares,
            _Step.SIGN: Survivors,
            _Step.REVEAL: AgreedSurvivors,
        }
        if self._step not in awaited:
            raise ProtocolError("the server sent a message when none was awaited")
        self._inbox.accept(envelope, awaited[self._step])
        if isinstance(content, RecoveryDirectory):
            return self._share(content)
        if isinstance(content, RelayedShares):
            return self._hold(content)
        if isinstance(content, Survivors):
            return self._sign(content)
        assert isinstance(content, AgreedSurvivors)
        return self._reveal(content)

    def contribute(self, units: Int64[np.ndarray, " d"]) -> bytes:
        """Return the masked vector for the round that has begun; see ``AggregationSilo.contribute``."""
        if self._step is not _Step.VECTORS:
            raise ProtocolError("no round awaits this silo's vector", silo=self.index)
        words = self._plan.encode(units, self.index)
        pairwise = self._masking.mask_keys(tuple(sorted(self._held)), MASK_PURPOSE, self._round_id)
        apply_masks_(words, [(self._seed, True), *pairwise])
        self._step = _Step.SIGN
        return self._envelope(MaskedVector(words=words))

    def _new_peers(self) -> None:
        self._masking, self._sealing = (
            Peers(index=self.index, identity=self._identity, roster=self._roster, purpose=purpose)
            for purpose in (KEY_PURPOSE, SEAL_PURPOSE)
        )

    def _start(self, envelope: Envelope, start: RoundStart) -> list[bytes]:
        if envelope.round_id.run != self._plan.run:
            raise ProtocolError("a round of another run begins")
        check_cohort(start.cohort, self._plan.silos, index=self.index)
        self._inbox.open(envelope.round_id)
        self._inbox.accept(envelope, RoundStart)
        self._round_id, self._cohort = self._bound(envelope.round_id, start.cohort), start.cohort
        self._new_peers()
        self._seed, self._held = os.urandom(32), {}
        self._step = _Step.KEYS
        mask, seal = self._masking.sign(self._round_id), self._sealing.sign(self._round_id)
        return [self._envelope(RecoveryKeys(mask=mask, seal=seal))]

    def _share(self, directory: RecoveryDirectory) -> list[bytes]:
        members = tuple(silo for silo, _ in directory.keys)
        if not set(members) <= set(self._cohort) or len(members) < self._threshold:
            raise ProtocolError(f"the directory names {len(members)} silos; {self._threshold} are needed")
        self._masking.meet(tuple((silo, keys.mask) for silo, keys in directory.keys), self._round_id)
        self._sealing.meet(tuple((silo, keys.seal) for silo, keys in directory.keys), self._round_id)
        seeds = split(self._seed, holders=self._plan.silos, threshold=self._threshold)
        private = self._masking.agreement_key.private_bytes()
        keys = split(private, holders=self._plan.silos, threshold=self._threshold)
        self._own = seeds[self.index].value, keys[self.index].value
        sealed = []
        for silo in members:
            if silo != self.index:
                key = self._sealing.key(silo, SHARE_PURPOSE, self._round_id)
                content = seeds[silo].value + keys[silo].value
                sealed.append((silo, seal(key, content, self._associated(self.index, silo))))
        self._cohort, self._step = members, _Step.SHARES
        return [self._envelope(ShareBundle(shares=tuple(sealed)))]

    def _hold(self, relayed: RelayedShares) -> list[bytes]:
        if len(relayed.shares) + 1 < self._threshold:
            raise ProtocolError(f"shares of {len(relayed.shares) + 1} silos; {self._threshold} are needed")
        held = {self.index: self._own}
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
            held[silo] = content[:SHARE_BYTES], content[SHARE_BYTES:]
        self._held, self._step = held, _Step.VECTORS
        return []

    def _sign(self, survivors: Survivors) -> list[bytes]:
        alive = set(survivors.silos)
        if not alive <= set(self._held) or self.index not in alive or len(alive) < self._threshold:
            raise ProtocolError(
                f"the server names {len(alive)} survivors; at least {self._threshold} of the silos that "
                "shared, this one among them, are needed"
            )
        self._survivors, self._step = survivors.silos, _Step.REVEAL
        signature = self._identity.sign(_list_of(self._round_id, self._survivors))
        return [self._envelope(SignedSurvivors(signature=signature))]

    def _reveal(self, agreed: AgreedSurvivors) -> list[bytes]:
        for silo, signature in agreed.signatures:
            if silo not in self._survivors:
                raise ProtocolError("signs a list of survivors that it is not in", silo=silo)
            try:
                self._roster[silo].verify(_list_of(self._round_id, self._survivors), signature)
            except CryptoError as error:
                raise ProtocolError(f"was told of other survivors: {error}", silo=silo) from error
        if len(agreed.signatures) < self._threshold:
            raise ProtocolError(
                f"{len(agreed.signatures)} silos were told of these survivors; {self._threshold} are needed"
            )
        alive = self._survivors
        shares = tuple((silo, self._held[silo][0 if silo in alive else 1]) for silo in sorted(self._held))
        self._step, self._held = _Step.DONE, {}
        return [self._envelope(RevealedShares(shares=shares))]

    def _associated(self, sender: int, recipient: int) -> bytes:
        return self._round_id.encode() + sender.to_bytes(2, "big") + recipient.to_bytes(2, "big")


class RecoverableServer(Party):
    """The server of a run. The caller decides with :meth:`proceed` when it has waited long enough.

    Args:
        plan: what all parties agreed on.
        threshold: how many silos must survive.
    """

    ready = True  # every attempt has keys of its own

    def __init__(self, plan: AggregationPlan, *, threshold: int) -> None:
        check_threshold(threshold, plan.silos)
        super().__init__(plan, SERVER)
        self._plan, self._threshold = plan, threshold
        self._step = _Step.IDLE
        self._cohort: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._arrived: dict[int, Message] = {}
        self._keys: dict[int, bytes] = {}
        self._sharers: tuple[int, ...] = ()
        self._sum = np.zeros(0, dtype=plan.word)

    @property
    def missing(self) -> tuple[int, ...]:
        """Silos whose message for the present step has not arrived."""
        if self._step is _Step.DONE:
            return ()
        return tuple(silo for silo in self._asked if silo not in self._arrived)

    @property
    def enough(self) -> bool:
        """Whether so many silos have answered that :meth:`proceed` goes on."""
        return len(self._arrived) >= self._threshold

    @property
    def survivors(self) -> tuple[int, ...]:
        """The silos whose vectors the sum is over, once :attr:`may_have_released`."""
        return self._cohort

    @property
    def may_have_released(self) -> bool:
        """Whether shares of this attempt were asked for: from then on its privacy event counts."""
        return self._step in (_Step.REVEAL, _Step.DONE)

    def begin(self, round_id: RoundId, cohort: tuple[int, ...]) -> list[tuple[int, bytes]]:
        """Begin a round, or another attempt of it; return the messages to the cohort.

        Raises:
            ProtocolError: a moment that was played before, or fewer silos than the threshold.
        """
        check_cohort(cohort, self._plan.silos)
        self._check_enough(len(cohort))
        if round_id.run != self._plan.run:
            raise ProtocolError("a round of another run cannot be played")
        self._inbox.open(round_id)
        self._round_id, self._step = self._bound(round_id, cohort), _Step.KEYS
        self._cohort, self._asked, self._arrived, self._keys = cohort, cohort, {}, {}
        self._sum = np.zeros(self._plan.length, dtype=self._plan.word)
        return self._to_each(self._cohort, RoundStart(cohort=cohort))

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a message of a silo; return the messages that follow when all of a step are in.

        Raises:
            ProtocolError: a message that must not be accepted, naming the silo.
        """
        try:
            envelope = Envelope.decode(data)
            awaited: dict[_Step, type[Message]] = {
                _Step.KEYS: RecoveryKeys,
                _Step.SHARES: ShareBundle,
                _Step.VECTORS: MaskedVector,
                _Step.SIGN: SignedSurvivors,
                _Step.REVEAL: RevealedShares,
            }
            if envelope.sender != sender or sender not in self._asked or self._step not in awaited:
                raise ProtocolError("sent a message as somebody else, too late, or when none was awaited")
            self._inbox.accept(envelope, awaited[self._step])
            self._check(envelope.message)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        self._arrived[sender] = envelope.message
        return [] if self.missing else self.proceed()

    def proceed(self) -> list[tuple[int, bytes]]:
        """Go on with the silos that have answered; the others have vanished.

        Raises:
            ProtocolError: fewer than the threshold answered: the attempt is over and nothing was revealed.
        """
        self._check_enough(len(self._arrived))
        answers, self._arrived = self._arrived, {}
        self._asked = tuple(sorted(answers))
        if self._step not in (_Step.SIGN, _Step.REVEAL):
            self._cohort = self._asked
        if self._step is _Step.KEYS:
            self._step = _Step.SHARES
            keys = [(silo, m) for silo, m in sorted(answers.items()) if isinstance(m, RecoveryKeys)]
            self._keys = {silo: pair.mask.public for silo, pair in keys}
            return self._to_each(self._cohort, RecoveryDirectory(keys=tuple(keys)))
        if self._step is _Step.SHARES:
            self._step, self._sharers = _Step.VECTORS, self._cohort
            return self._relay(
                {silo: dict(m.shares) for silo, m in answers.items() if isinstance(m, ShareBundle)}
            )
        if self._step is _Step.VECTORS:
            self._step = _Step.SIGN
            for content in answers.values():
                if isinstance(content, MaskedVector):
                    self._sum += content.words
            return self._to_each(self._cohort, Survivors(silos=self._cohort))
        if self._step is _Step.SIGN:
            self._step = _Step.REVEAL
            signed = [(s, m.signature) for s, m in sorted(answers.items()) if isinstance(m, SignedSurvivors)]
            return self._to_each(self._asked, AgreedSurvivors(signatures=tuple(signed)))
        self._step = _Step.DONE
        self._unmask({s: dict(m.shares) for s, m in answers.items() if isinstance(m, RevealedShares)})
        return []

    def result(self) -> Int64[np.ndarray, " d"]:
        """Return the sum of the survivors' vectors in grid units.

        Raises:
            ProtocolError: the attempt is not complete, or the sum is out of range.
        """
        if self._step is not _Step.DONE:
            raise ProtocolError(f"the sum is not complete; silos {list(self.missing)} are missing")
        return self._plan.decode(self._sum)

    def _check_enough(self, silos: int) -> None:
        if silos < self._threshold:
            raise ProtocolError(
                f"{silos} silos are left and {self._threshold} are needed; the attempt is over"
            )

    def _check(self, content: Message) -> None:
        if isinstance(content, MaskedVector):
            words = content.words
            if words.dtype != self._plan.word or words.shape != (self._plan.length,):
                raise ProtocolError(f"sent {len(words)} words of {words.dtype.itemsize} bytes")
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
        """Take the survivors' own masks off, and the pairwise masks that vanished silos left behind."""
        masks: list[tuple[bytes, bool]] = []
        for silo in self._sharers:
            shares = [Share(point=holder + 1, value=given[silo]) for holder, given in revealed.items()]
            try:
                secret = combine(shares, threshold=self._threshold)
            except CryptoError as error:
                raise ProtocolError(f"its shares do not fit together: {error}", silo=silo) from error
            if silo in self._cohort:
                masks.append((secret, False))
                continue
            vanished = AgreementKey.from_bytes(secret)
            if vanished.public != self._keys[silo]:
                raise ProtocolError("the shares of its key give another key", silo=silo)
            for survivor in self._cohort:
                key = vanished.agree(self._keys[survivor]).derive(MASK_PURPOSE, self._round_id)
                masks.append((key, survivor > silo))
        apply_masks_(self._sum, masks)

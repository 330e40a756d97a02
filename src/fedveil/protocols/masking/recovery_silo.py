"""Silo's end of secure aggregation with recovery: shares secrets, sends shares for one list.

start -> keys -> shares -> vector -> signed survivors -> one share of every silo that shared
"""

from __future__ import annotations

import os

from fedveil.crypto.aead import seal, unseal
from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_agreement import RoundId, derive
from fedveil.crypto.masks import apply_masks_
from fedveil.crypto.shamir import SHARE_BYTES, split
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.masking.recoverable_aggregation import (
    KEY_PURPOSE,
    SEAL_PURPOSE,
    SEED_PURPOSE,
    SHARE_PURPOSE,
    AgreedSurvivors,
    Phase,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
    check_threshold,
    list_of,
)
from fedveil.protocols.masking.secure_aggregation import MASK_PURPOSE, AggregationPlan, Units
from fedveil.protocols.messages import Envelope, MaskedVector, Message, RoundStart
from fedveil.protocols.pairwise_keys import PairwiseKeys, check_cohort
from fedveil.protocols.parties import SiloParty
from fedveil.protocols.protocol import ClientContext


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
        """Whether the protocol awaits :meth:`contribute` now."""
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

    def _send(self, given: Units, round_id: RoundId) -> list[bytes]:
        return [self.mask_vector(given)]

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
        self._held, self._phase = held, Phase.VECTORS
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

    def _reveal(self, agreed: AgreedSurvivors) -> list[bytes]:
        for silo, signature in agreed.signatures:
            if silo not in self._survivors:
                raise ProtocolError("signs a list of survivors that it is not in", silo=silo)
            try:
                self._place.roster[silo].verify(list_of(self._round_id, self._survivors), signature)
            except CryptoError as error:
                raise ProtocolError(f"was told of other survivors: {error}", silo=silo) from error
        if len(agreed.signatures) < self._threshold:
            raise ProtocolError(
                f"{len(agreed.signatures)} silos were told of these survivors; {self._threshold} are needed"
            )
        alive = self._survivors
        # Never both shares of one silo: seed and mask key together would open its vector.
        shares = tuple((silo, self._held[silo][0 if silo in alive else 1]) for silo in sorted(self._held))
        # Forget the shares before the answer leaves, so that no later list can be answered.
        self._phase, self._held = Phase.DONE, {}
        return [self._envelope(RevealedShares(shares=shares))]

    def _associated(self, sender: int, recipient: int) -> bytes:
        return self._round_id.encode() + sender.to_bytes(2, "big") + recipient.to_bytes(2, "big")

"""Silo's end of partial encryption (ParaAegis): votes, one part in the clear, and one part encrypted.

    setup   silos announce signed keys; the server relays them
            silo 0 makes a CKKS key and a secret, and seals both for every other silo; the server relays them
    round   the server starts it; every silo votes for coordinates, in an order derived from the secret
            the server returns the coordinates with most votes (the partition), in the same secret order
            every silo sends the partition's coordinates encrypted and the others in the clear, ascending
            the server adds both parts and sends the sums to every silo, which decrypts

The server never learns which coordinate a vote is for, because orders are fresh for every round and attempt. If silo
0 stores the secret of the orders for another session, a repeated round has the same order, and a silo must send the
same ballot again. The server sees how ballots overlap (``ballots = "plain"``), or how many coordinates have how many
votes (``"secagg"``).

Not claimed: protection of a silo's encrypted part against other silos. Every silo can decrypt every silo's part, so
the transport must protect the channels between silo and server.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Executor
from dataclasses import replace
from enum import Enum, auto

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.ckks import CkksKey
from fedveil.crypto.key_agreement import CONTEXT_BYTES, RUN_BYTES, derive, seal, unseal
from fedveil.crypto.masks import apply_masks_
from fedveil.errors import CryptoError, ProtocolError, RefusedSumError
from fedveil.protocols.messages import SERVER, Directory, Envelope, MaskedVector, Message, RoundStart
from fedveil.protocols.partial_encryption.plan import (
    Ballot,
    Order,
    PartialInputs,
    PartialPlan,
    PartialResult,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
    decode_bitmap,
    encode_bitmap,
    largest,
    secret_order,
)
from fedveil.protocols.parties import KeyedSilo
from fedveil.protocols.protocol import SECRET_BYTES, ClientContext

KEY_PURPOSE = "partial encryption"
_SEAL, _MASK = "partial encryption: common keys", "partial encryption: ballot mask"
_ORDER, _TAG = "partial encryption: order", "partial encryption: key check"
_TIES = "partial encryption: equal values of"
_RESULT = "partial encryption: result check"


class Phase(Enum):
    """Step of the protocol that a party has reached."""

    SETUP = auto()
    IDLE = auto()
    VOTES = auto()
    PARTITION = auto()
    INPUTS = auto()
    SUM = auto()
    DONE = auto()


class PartialSilo(KeyedSilo[PartialInputs, PartialResult]):
    """Silo's end of a session.

    Args:
        plan: public plan of the protocol.
        place: context of the silo in the session. ``secret`` of silo 0's context is the secret of the orders. It
            stays the same for a run, so that a round that is repeated in another session has the same order.
        workers: pool of processes that share the encryption and receive the common key; None encrypts in this
            process.
    """

    def __init__(self, plan: PartialPlan, place: ClientContext, *, workers: Executor | None = None) -> None:
        super().__init__(plan.silos, place, purpose=KEY_PURPOSE)
        self._plan = plan
        self._phase = Phase.SETUP
        self._directory_known = False
        self._key: CkksKey | None = None
        self._secret = b""
        self._workers = workers
        self._order: Order = np.zeros(0, dtype=np.int64)
        self._partition = np.zeros(0, dtype=np.bool_)
        self._sums = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @property
    def order_secret(self) -> bytes:
        """Secret of the orders; empty until the common keys are known."""
        return self._secret[:SECRET_BYTES]

    @property
    def binding(self) -> bytes:
        """SHA-256 of the secret of the orders.

        A persisted ballot is bound to it: the same votes in another order would disclose more about them.
        """
        return hashlib.sha256(self.order_secret).digest()

    @property
    def awaits_input(self) -> bool:
        """Return whether a round has begun that awaits :meth:`propose`."""
        return self._phase is Phase.VOTES

    @property
    def awaits_encryption(self) -> bool:
        """Return whether the partition is known, so that :meth:`encrypt_update` is the next step."""
        return self._phase is Phase.INPUTS

    @property
    def has_result(self) -> bool:
        """Return whether the sum has arrived."""
        return self._phase is Phase.DONE

    def tag(self, content: bytes) -> bytes:
        """Return a 32-byte tag, equal for silos with equal content and random without the common secret."""
        return derive(self._secret, _RESULT, self._round_id, salt=hashlib.sha256(content).digest())

    @property
    def partition(self) -> Bool[np.ndarray, " d"]:
        """Encrypted coordinates as a (d,) bool array; available while :attr:`awaits_encryption` is True."""
        if self._phase is not Phase.INPUTS:
            raise ProtocolError("the partition of the round is not known", silo=self.index)
        return self._partition

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message; return the answers to it.

        Raises:
            ProtocolError: a message that must not be accepted.
        """
        envelope = Envelope.decode(data)
        content = envelope.message
        if envelope.sender != (0 if isinstance(content, SealedKeys) else SERVER):
            raise ProtocolError("a message comes from a party that does not send this kind")
        if isinstance(content, RoundStart):
            return self._start(envelope, content)
        awaited: dict[Phase, tuple[type[Message], ...]] = {
            Phase.SETUP: (Directory, SealedKeys),
            Phase.PARTITION: (Partition,),
            Phase.SUM: (PartialSum,),
        }
        self._inbox.accept(envelope, *awaited.get(self._phase, ()))
        if isinstance(content, Directory):
            return self._meet(content)
        if isinstance(content, SealedKeys):
            self._unseal(content)
        elif isinstance(content, Partition):
            count = self._plan.n_encrypted(self._round_id.round)
            self._divide(decode_bitmap(content.bitmap, self._plan.length, count))
        elif isinstance(content, PartialSum):
            self._open(content)
        return []

    def propose(
        self, values: Float64[np.ndarray, " d"], noise: Int64[np.ndarray, " d"] | None = None
    ) -> list[bytes]:
        """Vote for coordinates, or compute the partition from public values; return the ballot, if any.

        Args:
            values: (d,) the silo's update; if no silo votes, the public values from which the partition follows.
            noise: (d,) int64, the silo's share of the noise on the counts; None if votes have no noise.

        Raises:
            ProtocolError: no round awaits votes, values of another length or not finite, or noise that does not fit
                the plan.
        """
        plan = self._plan
        if self._phase is not Phase.VOTES:
            raise ProtocolError("no round awaits this silo's votes", silo=self.index)
        if values.shape != (plan.length,) or not np.isfinite(values).all():
            raise ProtocolError(f"its update is not {plan.length} finite numbers", silo=self.index)
        count = plan.n_encrypted(self._round_id.round)
        # The order depends on secret, round and attempt only: another session's run id and context must not change
        # it.
        round_id = replace(self._round_id, run=bytes(RUN_BYTES), context=bytes(CONTEXT_BYTES))
        self._order = secret_order(derive(self.order_secret, _ORDER, round_id), plan.length)
        if count in (0, plan.length):
            self._divide(np.full(plan.length, count > 0))
            return []
        sizes = np.abs(values)[self._order]
        votes = plan.votes(self._round_id.round)
        own = derive(self.order_secret, f"{_TIES} {self.index}", round_id) if votes else None
        chosen = largest(sizes if plan.pick == "largest" else -sizes, count, own)
        if not votes:
            self._divide(chosen)
            return []
        self._phase = Phase.PARTITION
        if plan.ballots == "plain":
            return [self._envelope(Ballot(bitmap=encode_bitmap(chosen)))]
        return [self._envelope(MaskedVector(words=self._masked(chosen, noise), word_bytes=4))]

    def encrypt_update(self, clear: Int64[np.ndarray, " c"], hidden: Int64[np.ndarray, " h"]) -> bytes:
        """Return the message with the silo's update: one part in the clear, one part encrypted.

        Args:
            clear: (d - k,) int64, coordinates outside the partition with their noise, ascending, in grid units.
            hidden: (k,) int64, coordinates of the partition, ascending, in grid units.

        Raises:
            ProtocolError: the partition is not known, or the plan does not allow the parts.
        """
        plan, count = self._plan, int(self.partition.sum())
        # A value above its limit could wrap around in the sum and would spoil the sum of all silos.
        for part, length, limit in (
            (clear, plan.length - count, plan.clear_limit),
            (hidden, count, plan.hidden_limit),
        ):
            if part.shape != (length,) or part.dtype != np.int64:
                raise ProtocolError(f"a part of its update is not {length} int64 grid units", silo=self.index)
            if length and (part.max() > limit or part.min() < -limit):
                raise ProtocolError(
                    f"a value of its update is above the limit of {limit} grid units; a larger one must be agreed "
                    "before the run",
                    silo=self.index,
                )
        assert self._key is not None
        self._phase = Phase.SUM
        return self._envelope(
            PartialUpdate(
                tag=self._tag(),
                fingerprint=plan.ckks.fingerprint,
                size=plan.clear_bytes,
                clear=clear,
                hidden=self._key.encrypt(hidden, self._workers),
            )
        )

    def result(self) -> PartialResult:
        """Return partition and sums over the cohort; raise a ProtocolError until they have arrived."""
        if self._phase is not Phase.DONE:
            raise ProtocolError("the sum has not arrived", silo=self.index)
        clear, hidden = self._sums
        return PartialResult(partition=self._partition, clear=clear, hidden=hidden)

    def _meet(self, directory: Directory) -> list[bytes]:
        self._agree(directory)
        self._directory_known = True
        if self.index:
            return []
        # Silo 0 makes the common keys: the server, which only relays them sealed, must not have them.
        key = CkksKey(self._plan.ckks)
        common = self._place.secret() + key.private_bytes()
        self._take(common)
        sealed = []
        for silo in range(1, self._plan.silos):
            seal_key = self._peers.key(silo, _SEAL, self._round_id)
            content = SealedKeys(sealed=seal(seal_key, common, self._associated(silo)))
            sealed.append(self._envelope(content, silo))
        return sealed

    def _unseal(self, content: SealedKeys) -> None:
        if not self._directory_known:
            raise ProtocolError("the common keys came before the silos' keys", silo=0)
        key = self._peers.key(0, _SEAL, self._round_id)
        try:
            self._take(unseal(key, content.sealed, self._associated(self.index)))
        except CryptoError as error:
            raise ProtocolError(f"its common keys were refused: {error}", silo=0) from error

    def _take(self, common: bytes) -> None:
        self._key = CkksKey(self._plan.ckks, common[SECRET_BYTES:])
        self._secret = common
        self._phase = Phase.IDLE

    def _associated(self, recipient: int) -> bytes:
        return self._round_id.encode() + recipient.to_bytes(2, "big")

    def _start(self, envelope: Envelope, start: RoundStart) -> list[bytes]:
        if self._phase is Phase.SETUP:
            raise ProtocolError("a round begins before the silos' common keys are known")
        self._join(envelope, start)
        self._phase = Phase.VOTES
        return []

    def _masked(self, chosen: Bool[np.ndarray, " d"], noise: Int64[np.ndarray, " d"] | None) -> np.ndarray:
        """Return votes with their noise as 32-bit words, under pairwise masks that cancel in the sum."""
        plan, counts = self._plan, chosen.astype(np.int64)
        if (noise is None) == (plan.ballot_limit > 0):
            raise ProtocolError("noise on votes is given where the plan has none, or lacks", silo=self.index)
        if noise is not None:
            if noise.shape != (plan.length,) or np.abs(noise).max() > plan.ballot_limit:
                raise ProtocolError(
                    f"noise on votes exceeds {plan.ballot_limit} or has another length", silo=self.index
                )
            counts += noise[self._order]
        words = plan.pack_counts(counts)
        apply_masks_(words, self._peers.mask_keys(self._cohort, _MASK, self._round_id))
        return words

    def _divide(self, chosen: Bool[np.ndarray, " d"]) -> None:
        """Set the partition from a bitmap in the secret order."""
        self._partition = np.zeros(self._plan.length, dtype=np.bool_)
        self._partition[self._order[chosen]] = True
        self._phase = Phase.INPUTS

    def _open(self, content: PartialSum) -> None:
        plan, count = self._plan, int(self._partition.sum())
        assert self._key is not None
        if content.size != plan.sum_bytes or len(content.clear) != plan.length - count:
            raise ProtocolError("the sum in clear has another length or word size than this silo's part")
        try:
            hidden = self._key.decrypt(content.hidden, count)
        except CryptoError as error:
            raise RefusedSumError(f"the encrypted sum was refused: {error}") from error
        silos = len(self._cohort)
        clear = content.clear
        for part, limit in ((clear, plan.clear_limit), (hidden, plan.hidden_limit)):
            most = silos * limit
            # No np.abs: in int64 the absolute value of -2^63 is -2^63.
            if part.max(initial=0) > most or part.min(initial=0) < -most:
                raise RefusedSumError("the sum is out of range: a silo used another key or broke its limit")
        self._sums = clear, hidden
        self._phase = Phase.DONE

    def _tag(self) -> bytes:
        # Derived from CKKS key and secret together, so equal tags mean equal keys; the server learns only equality.
        return derive(self._secret, _TAG, self._round_id)

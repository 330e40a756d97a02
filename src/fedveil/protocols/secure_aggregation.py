"""Secure aggregation without recovery: the server learns only the silos' sum (Bonawitz et al. 2017).

A silo sends y_s = x_s + b_s + sum_{t > s} m_{s,t} - sum_{t < s} m_{t,s} modulo 2^16, 2^24, 2^32 or 2^64. The pairwise
masks m come from a key that silos s and t share, and they cancel in the sum. The silo's own mask b_s comes from a seed
that the silo sends only after every vector of the attempt has arrived.

    setup:  announce -> directory
    round:  start -> masked vectors -> reveal request -> own masks -> sum

A silo that vanishes before the reveal ends the attempt. No silo has sent the seed of its own mask, so every vector
that the server holds, and every vector that arrives late, stays uniform. The attempt may be repeated with other
silos, under new keys. An attempt that reached the reveal may have released its sum, so it is charged
(:attr:`AggregationServer.may_have_released`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.masks import Words, apply_masks_
from fedveil.errors import ProtocolError
from fedveil.protocols.messages import (
    WORD_BYTES,
    Announcement,
    Directory,
    Envelope,
    MaskedVector,
    Message,
    OwnMask,
    RevealRequest,
    RoundStart,
    word_dtype,
)
from fedveil.protocols.parties import CohortServer, KeyedSilo
from fedveil.protocols.protocol import ClientContext, Drawn, Outgoing

Units: TypeAlias = Int64[np.ndarray, " d"]

MASK_PURPOSE = "secure aggregation: vector mask"
KEY_PURPOSE = "secure aggregation"


@dataclass(frozen=True, kw_only=True)
class AggregationPlan:
    """Public sizes of the vectors of a sum, on which all parties of a run agree beforehand.

    Attributes:
        clients: number of silos.
        length: d, number of coordinates of a vector.
        limit: largest absolute value of one coordinate of one silo, noise included, in grid units.
        sum_limit: largest absolute value of one coordinate of a sum; None for ``clients * limit``. Words have room
            for sums within it. A larger sum wraps around, whatever the silos sent, so that the server learns no more
            of it; it raises an error or is wrong.

    Raises:
        ProtocolError: fewer than two silos, no coordinate, a limit below 1, or a sum that does not fit 64 bits.
    """

    clients: int
    length: int
    limit: int
    sum_limit: int | None = None

    def __post_init__(self) -> None:
        """Check, before any training, that no sum within the limits can wrap around modulo 2^64."""
        if self.clients < 2 or self.length < 1 or self.limit < 1:
            raise ProtocolError(
                f"secure aggregation needs 2 silos, 1 coordinate and a limit of 1, not {self.clients} silos, "
                f"{self.length} coordinates and a limit of {self.limit}"
            )
        if self.largest_sum >= 2**63:
            raise ProtocolError(
                f"{self.clients} silos with values up to {self.limit} grid units need "
                f"{self.largest_sum.bit_length() + 1} bits, more than 64; take fewer silos or a lower noise multiplier"
            )

    @property
    def largest_sum(self) -> int:
        """Largest absolute value of a coordinate of the sum, in grid units."""
        return self.clients * self.limit if self.sum_limit is None else self.sum_limit

    @property
    def word_bytes(self) -> int:
        """Bytes of a masked word on the wire: the fewest that hold the signed sum."""
        return next(size for size in WORD_BYTES if self.largest_sum < 2 ** (8 * size - 1))

    @property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """Dtype of a masked word in memory."""
        return word_dtype(self.word_bytes)

    def encode(self, units: Int64[np.ndarray, " d"], silo: int) -> Words:
        """Return a copy of a silo's vector modulo the size of a word.

        Args:
            units: (d,) int64, in grid units.
            silo: number of the silo, for the error.

        Raises:
            ProtocolError: another length or dtype, or a value above the limit.
        """
        if units.shape != (self.length,) or units.dtype != np.int64:
            raise ProtocolError(f"its vector is not {self.length} int64 grid units", silo=silo)
        # Not np.abs(units).max(): in int64 the absolute value of -2^63 is -2^63.
        if units.max() > self.limit or units.min() < -self.limit:
            raise ProtocolError(
                f"a value of its vector is above the limit of {self.limit} grid units; "
                "a larger limit must be agreed before the run",
                silo=silo,
            )
        return units.astype(self.word)

    def check(self, vector: MaskedVector) -> None:
        """Check that a silo's masked words have the agreed size and number.

        Raises:
            ProtocolError: another size or number of words.
        """
        if vector.word_bytes != self.word_bytes or vector.words.shape != (self.length,):
            raise ProtocolError(
                f"sent {len(vector.words)} words of {vector.word_bytes} bytes instead of {self.length} "
                f"of {self.word_bytes}"
            )

    def decode(self, words: Words) -> Int64[np.ndarray, " d"]:
        """Return the signed (d,) sum in grid units.

        Raises:
            ProtocolError: a value that no sum within the limits can have, for example because masks did not cancel.
        """
        bits = 8 * self.word.itemsize
        # The low bytes go to the top of a signed word; the arithmetic shift back extends the sign.
        unused = bits - 8 * self.word_bytes
        signed = ((words << unused).view(f"<i{bits // 8}") >> unused).astype(np.int64)
        if signed.max() > self.largest_sum or signed.min() < -self.largest_sum:
            raise ProtocolError(
                "the sum is out of range: the masks did not cancel, or a silo broke its limit"
            )
        return signed


class _Phase(Enum):
    SETUP = auto()
    IDLE = auto()
    INPUTS = auto()
    REVEAL = auto()
    DONE = auto()


class AggregationSilo(KeyedSilo[Units, Units]):
    """Silo's end of a session.

    Args:
        plan: public sizes of the sum.
        place: context of the silo in the session.
    """

    def __init__(self, plan: AggregationPlan, place: ClientContext) -> None:
        super().__init__(plan.clients, place, purpose=KEY_PURPOSE)
        self._plan = plan
        self._phase = _Phase.SETUP
        self._seed = b""

    @property
    def awaits_input(self) -> bool:
        """Return whether a round has begun that awaits :meth:`contribute`."""
        return self._phase is _Phase.INPUTS

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server; return the answers to it.

        Raises:
            ProtocolError: a message that must not be accepted; the silo reveals nothing and its phase is unchanged.
        """
        envelope = Envelope.from_server(data)
        if isinstance(envelope.message, RoundStart):
            return self._start(envelope)
        if self._phase is _Phase.SETUP:
            self._inbox.accept(envelope, Directory)
            return self._meet(envelope.message)
        # A seed that is revealed before its mask is used would leave the vector under pairwise masks only. Checked
        # before the inbox marks the request as seen: a premature request must not block the right one.
        if isinstance(envelope.message, RevealRequest) and self._phase in (_Phase.IDLE, _Phase.INPUTS):
            raise ProtocolError("the server asks for a self-mask before it was used")
        self._inbox.accept(envelope, RevealRequest)
        self._phase = _Phase.DONE
        return [self._envelope(OwnMask(seed=self._seed))]

    def mask_vector(self, units: Units) -> bytes:
        """Return the masked vector for the round that has begun.

        Args:
            units: (d,) int64, the silo's sum with its share of the noise, in grid units.

        Raises:
            ProtocolError: no round awaits input, or the plan does not allow the vector.
        """
        if self._phase is not _Phase.INPUTS:
            raise ProtocolError("no round awaits this silo's vector", silo=self.index)
        words = self._plan.encode(units, self.index)
        # y_s = x_s + b_s + sum_{t > s} m_{s,t} - sum_{t < s} m_{t,s}, with a fresh seed of b_s for every attempt
        self._seed = os.urandom(32)
        pairwise = self._peers.mask_keys(self._cohort, MASK_PURPOSE, self._round_id)
        apply_masks_(words, [(self._seed, True), *pairwise])
        self._phase = _Phase.REVEAL
        return self._envelope(MaskedVector(words=words, word_bytes=self._plan.word_bytes))

    def _send(self, units: Units, round_id: RoundId) -> list[bytes]:
        return [self.mask_vector(units)]

    def _meet(self, directory: Message) -> list[bytes]:
        assert isinstance(directory, Directory)
        self._agree(directory)
        self._phase = _Phase.IDLE
        return []

    def _start(self, envelope: Envelope) -> list[bytes]:
        start = envelope.message
        assert isinstance(start, RoundStart)
        if self._phase is _Phase.SETUP:
            raise ProtocolError("a round begins before the silos' keys are known")
        self._join(envelope, start)
        self._seed, self._phase = b"", _Phase.INPUTS
        return []


class AggregationServer(CohortServer):
    """Server's end of a session: relays signed keys, adds masked vectors, removes the own masks.

    Args:
        plan: public sizes of the sum.
        run: 16 bytes that name the session.
    """

    def __init__(self, plan: AggregationPlan, run: bytes) -> None:
        super().__init__(plan.clients, run)
        self._plan = plan
        self._phase = _Phase.SETUP
        self._sum = np.zeros(0, dtype=plan.word)

    @property
    def ready(self) -> bool:
        """Return whether every silo's key has arrived, so that a round can begin."""
        return self._phase is not _Phase.SETUP

    @property
    def may_have_released(self) -> bool:
        """Return whether own masks of this attempt were requested; from then on its privacy event is charged."""
        return self._phase in (_Phase.REVEAL, _Phase.DONE)

    def begin(
        self, round_id: RoundId, cohort: tuple[int, ...], sampled_users: Drawn | None = None
    ) -> Outgoing:
        """Begin a round, or another attempt at it; return the messages to the cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: numbers of the silos that begin the attempt, ascending.
            sampled_users: ignored, because the silos' vectors are over the sampled users already.

        Raises:
            ProtocolError: keys are not known yet, an attempt that was played before, or fewer than two silos.
        """
        if self._phase is _Phase.SETUP:
            raise ProtocolError("a round cannot begin before every silo's key is known")
        self._start(round_id, cohort)
        self._phase = _Phase.INPUTS
        self._sum = np.zeros(self._plan.length, dtype=self._plan.word)
        return self._to_cohort(RoundStart(cohort=cohort))

    def result(self) -> Int64[np.ndarray, " d"]:
        """Return the sum of the cohort's vectors in grid units.

        Raises:
            ProtocolError: the attempt is not complete, or the sum is out of range.
        """
        if self._phase is not _Phase.DONE:
            raise ProtocolError(f"the sum is not complete; silos {list(self.missing)} are missing")
        return self._plan.decode(self._sum)

    def _awaited(self, sender: int) -> type[Message] | None:
        return {_Phase.SETUP: Announcement, _Phase.INPUTS: MaskedVector, _Phase.REVEAL: OwnMask}.get(
            self._phase
        )

    def _take(self, sender: int, content: Message) -> list[tuple[int, bytes]]:
        if isinstance(content, Announcement):
            self._keys[sender] = content.key
        elif isinstance(content, MaskedVector):
            self._plan.check(content)
            self._sum += content.words  # wraps around modulo the words' size, as the masks do
        elif isinstance(content, OwnMask):
            apply_masks_(self._sum, [(content.seed, False)])
        return []

    def _next_phase(self) -> list[tuple[int, bytes]]:
        if self._phase is _Phase.REVEAL:
            self._phase = _Phase.DONE
            return []
        self._arrived = set()
        if self._phase is _Phase.SETUP:
            self._phase = _Phase.IDLE
            return self._to_cohort(self._directory())
        self._phase = _Phase.REVEAL
        return self._to_cohort(RevealRequest())

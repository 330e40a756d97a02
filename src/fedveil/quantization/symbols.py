"""Write and read one range-coded stream of symbols, in the same order.

This is a thin, vectorised layer over ``constriction``'s range coder. It codes integers under the contexts of
:mod:`fedveil.quantization.models`, numbers of rejected attempts under their geometric law, and plain uniform
fields. Symbols of one call are grouped by context, so each table is used once per call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache

import constriction
import numpy as np
from jaxtyping import Int32, Int64, UInt64

from fedveil.quantization.errors import MessageError
from fedveil.quantization.models import Contexts, tables

_PIECE = 16
_WORD = np.dtype("<u4")
_ATTEMPT_UNITS = 2**22
_DAMAGED = "the message's symbols are damaged: no sender writes such a code word"


@cache
def _reaches() -> Int64[np.ndarray, " contexts"]:
    return np.array([table.reach for table in tables()], dtype=np.int64)


@lru_cache(maxsize=64)
def _attempt_model(acceptance: float) -> tuple[int, object]:
    """Return the geometric law of rejected attempts from quantised probabilities; the tail is one escape."""
    # Quantised, so that a last-bit difference of the acceptance between platforms cannot change the model.
    accepted = round(acceptance * 2**20) / 2**20
    size = math.ceil(14 / accepted)
    probability = np.empty(size + 1)
    left = 1.0
    for attempt in range(size):
        probability[attempt] = left * accepted
        left *= 1 - accepted
    probability[size] = left
    units = np.maximum(np.rint(probability * _ATTEMPT_UNITS), 1.0)
    return size, constriction.stream.model.Categorical(units, perfect=False)


def _groups(
    context: Int64[np.ndarray, " m"],
) -> tuple[Int64[np.ndarray, " m"], Iterator[tuple[int, int, int]]]:
    """Order integers by context; return the order, and (context, start, end) of every context in use."""
    narrow = context.astype(np.uint16)
    # Both ends must code the symbols of a context in the same order: the sort is stable.
    order = np.argsort(narrow, kind="stable")
    counts = np.bincount(narrow)
    used = np.flatnonzero(counts)
    ends = np.cumsum(counts[used])
    starts = ends - counts[used]
    return order, zip(used.tolist(), starts.tolist(), ends.tolist(), strict=True)


def _fold(value: Int64[np.ndarray, " m"]) -> UInt64[np.ndarray, " m"]:
    """Interleave signs: 0, -1, 1, -2, ... become 0, 1, 2, 3, ... (unsigned)."""
    return ((value << 1) ^ (value >> 63)).view(np.uint64)


def _unfold(value: UInt64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
    signed = (value >> np.uint64(1)).view(np.int64)
    return signed ^ -(value & np.uint64(1)).view(np.int64)


class SymbolWriter:
    """Writer of symbols into one range-coded byte string."""

    def __init__(self) -> None:
        self._coder = constriction.stream.queue.RangeEncoder()

    def field(self, value: int, bits: int) -> None:
        """Write one number of 1 to 16 bits under a uniform model."""
        self._coder.encode(np.array([value], dtype=np.int32), constriction.stream.model.Uniform(1 << bits))

    def fields(self, values: Int64[np.ndarray, " m"], bits: int) -> None:
        """Write numbers of 1 to 16 bits each under a uniform model."""
        if len(values):
            self._coder.encode(values.astype(np.int32), constriction.stream.model.Uniform(1 << bits))

    def categories(self, values: Int64[np.ndarray, " m"], model: object) -> None:
        """Write symbols under one categorical model of ``constriction``."""
        if len(values):
            self._coder.encode(values.astype(np.int32), model)

    def attempts(self, attempts: Int64[np.ndarray, " m"], acceptance: float) -> None:
        """Write numbers of rejected attempts under their geometric law."""
        size, model = _attempt_model(acceptance)
        self.categories(np.minimum(attempts, size), model)
        self._long(attempts[attempts >= size])

    def integers(self, distances: Int64[np.ndarray, " m"], contexts: Contexts) -> None:
        """Write integers minus their centres; an integer beyond its table follows as 64 bits."""
        symbols = contexts.flip_mirrored(distances)
        high = symbols if contexts.shift is None else symbols >> contexts.shift
        reach = _reaches()[contexts.context]
        index = high + reach
        # As an unsigned number, a negative index is huge: one comparison tests both ends of the table.
        far = np.flatnonzero(index.view(np.uint64) > (2 * reach).view(np.uint64))
        index[far] = 2 * reach[far] + 1
        order, groups = _groups(contexts.context)
        ordered = index.astype(np.int32)[order]
        encode, all_tables = self._coder.encode, tables()
        for context, start, end in groups:
            encode(ordered[start:end], all_tables[context].model)
        self._long(high[far])
        if contexts.shift is not None:
            self._low_bits(symbols, contexts.shift)

    def _long(self, values: Int64[np.ndarray, " m"]) -> None:
        folded = _fold(values)
        for piece in range(4):
            self.fields(((folded >> np.uint64(_PIECE * piece)) & np.uint64(0xFFFF)).view(np.int64), _PIECE)

    def _low_bits(self, symbols: Int64[np.ndarray, " m"], shift: Int64[np.ndarray, " m"]) -> None:
        for start in range(0, int(shift.max(initial=0)), _PIECE):
            with_bits = np.flatnonzero(shift > start)
            bits = np.minimum(shift[with_bits] - start, _PIECE)
            values = (symbols[with_bits] >> start) & ((1 << bits) - 1)
            self._coder.encode(
                values.astype(np.int32), constriction.stream.model.Uniform(), (1 << bits).astype(np.int32)
            )

    def finish(self) -> bytes:
        """Return the coded symbols as little-endian 32-bit words, without the zero bytes at the end."""
        words: np.ndarray = self._coder.get_compressed()
        return words.astype(_WORD).tobytes().rstrip(b"\0")


class SymbolReader:
    """Reader of the symbols that :class:`SymbolWriter` wrote.

    Hostile bytes give symbols or a :class:`MessageError`, never another error.
    """

    def __init__(self, data: bytes) -> None:
        padded = data + bytes(-len(data) % _WORD.itemsize)
        self._coder = constriction.stream.queue.RangeDecoder(
            np.frombuffer(padded, dtype=_WORD).astype(np.uint32)
        )

    def _decode(self, model: object, *arguments: object) -> Int32[np.ndarray, " m"]:
        try:
            decoded: Int32[np.ndarray, " m"] = self._coder.decode(model, *arguments)
        except AssertionError as error:
            raise MessageError(
                "the message's symbols are damaged: no sender writes such a code word"
            ) from error
        return decoded

    def field(self, bits: int) -> int:
        """Read one number of 1 to 16 bits."""
        return int(self._decode(constriction.stream.model.Uniform(1 << bits), 1)[0])

    def fields(self, count: int, bits: int) -> Int64[np.ndarray, " count"]:
        """Read numbers of 1 to 16 bits each."""
        return self.categories(count, constriction.stream.model.Uniform(1 << bits))

    def categories(self, count: int, model: object) -> Int64[np.ndarray, " count"]:
        """Read symbols under one categorical model of ``constriction``."""
        return self._decode(model, count).astype(np.int64) if count else np.empty(0, dtype=np.int64)

    def attempts(self, count: int, acceptance: float, limit: int) -> Int64[np.ndarray, " count"]:
        """Read numbers of rejected attempts.

        Raises:
            MessageError: the numbers are negative or add up to more than ``limit``.
        """
        size, model = _attempt_model(acceptance)
        attempts = self.categories(count, model)
        far = np.flatnonzero(attempts == size)
        attempts[far] = self._long(len(far))
        if len(far) and not (attempts[far] >= size).all():
            raise MessageError("the message counts rejected attempts in a way no sender does")
        # The maximum is tested first, so that the sum of hostile numbers cannot overflow int64.
        if attempts.max(initial=0) > limit or int(attempts.sum()) > limit:
            raise MessageError(f"the message claims more than {limit} rejected attempts in one block")
        return attempts

    def integers(self, contexts: Contexts) -> Int64[np.ndarray, " m"]:
        """Read integers minus their centres.

        Raises:
            MessageError: an integer does not fit 60 bits, or uses the long form although the short form would do.
        """
        order, groups = _groups(contexts.context)
        ordered = np.empty(len(order), dtype=np.int32)
        decode, all_tables = self._coder.decode, tables()
        try:
            for context, start, end in groups:
                ordered[start:end] = decode(all_tables[context].model, end - start)
        except AssertionError as error:
            raise MessageError(_DAMAGED) from error
        high = np.empty(len(order), dtype=np.int64)
        high[order] = ordered
        reach = _reaches()[contexts.context]
        high -= reach
        far = np.flatnonzero(high > reach)
        high[far] = self._long(len(far))
        # Refuse the long form for values inside the table, and values that the shift below would overflow.
        bound = np.int64(1) << (60 - (0 if contexts.shift is None else contexts.shift[far]))
        if len(far) and ((np.abs(high[far]) <= reach[far]).any() or (np.abs(high[far]) >= bound).any()):
            raise MessageError("the message holds a lattice point that no sender writes")
        if contexts.shift is not None:
            high <<= contexts.shift
            high |= self._low_bits(contexts.shift)
        return contexts.flip_mirrored(high)

    def _long(self, count: int) -> Int64[np.ndarray, " count"]:
        folded = np.zeros(count, dtype=np.uint64)
        for piece in range(4):
            folded |= self.fields(count, _PIECE).view(np.uint64) << np.uint64(_PIECE * piece)
        return _unfold(folded)

    def _low_bits(self, shift: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        low = np.zeros(len(shift), dtype=np.int64)
        for start in range(0, int(shift.max(initial=0)), _PIECE):
            with_bits = np.flatnonzero(shift > start)
            bits = np.minimum(shift[with_bits] - start, _PIECE)
            values = self._decode(constriction.stream.model.Uniform(), (1 << bits).astype(np.int32))
            low[with_bits] |= values.astype(np.int64) << start
        return low

"""Write and read one range-coded stream of symbols, in the same order.

This is a thin, vectorised layer over ``constriction``'s range coder. It codes integers under the contexts of
the entropy models below, numbers of rejected attempts under their geometric law, and plain uniform
fields. Symbols of one call are grouped by context, so each table is used once per call.

Tabulate entropy models of integers under a rounded Gaussian with known mean and standard deviation.

For every integer that they exchange, sender and receiver know the mean and the standard deviation of the Gaussian
that was rounded to it (from the latent, the dither and the block's spread). A model per integer would be slow to
evaluate, and a float that differs in its last bit would break the decoder. So both parameters are quantised to one of
about 1,100 contexts. Each context has a table of probabilities in units of 2^-22, built once and verified by a
checksum.

With centre c = round(mean), v = |c - mean| in [0, 1/2], and tau the standard deviation:

===============  ==========================================================================================
tau              context
===============  ==========================================================================================
below 1/16       distance of the mean from the nearer border of its bin in units of tau, in steps of 1/8
1/16 to 16       eighth of an octave of tau, and v in 4 to 64 steps
16 and above     eighth of an octave; the low bits of the integer are sent uncompressed
===============  ==========================================================================================
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import constriction
import numpy as np
from jaxtyping import Float64, Int32, Int64, UInt64
from scipy.special import ndtr

from fedveil.errors import ChannelError, MessageError

# --- entropy models ---

_UNITS = 2**22
_EIGHTHS = 8
_LOW, _HIGH = -4 * _EIGHTHS, 4 * _EIGHTHS
_MARGIN_STEPS = 64
_TABLE_CHECKSUM = 0x0A1D79F1


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Model of one context: symbols -reach .. reach, and the escape as the last index."""

    reach: int
    model: object


def _offset_steps(eighth: int) -> int:
    """Return the number of steps of v at an eighth of an octave of tau; they cost less than 0.001 bit."""
    octave = eighth // _EIGHTHS
    return {-4: 64, -3: 32, -2: 16}.get(octave, 8 if octave < 1 else 4)


def _first_contexts() -> Int64[np.ndarray, " eighths"]:
    """Return the first context number of each eighth of an octave, from _LOW to _HIGH."""
    steps = [_offset_steps(eighth) for eighth in range(_LOW, _HIGH)]
    return np.cumsum([_MARGIN_STEPS + 1, *steps]).astype(np.int64)


_FIRST = _first_contexts()
_STEPS = [_offset_steps(eighth) for eighth in range(_LOW, _HIGH)]
# The factor 1 - 2^-40 keeps v = 1/2 in the last step.
_DOUBLE_STEPS = 2.0 * (1.0 - 2.0**-40) * np.array(_STEPS)


def _deviations(eighth: int) -> Float64[np.ndarray, " 4"]:
    """Return four standard deviations that are spread over one eighth of an octave."""
    octave, part = divmod(eighth, _EIGHTHS)
    return (1 + (part + (np.arange(4) + 0.5) / 4) / _EIGHTHS) * 2.0**octave


def _units(mass: Float64[np.ndarray, " symbols"]) -> Int64[np.ndarray, " symbols_and_escape"]:
    """Round probabilities to positive multiples of 2^-22 that sum to 1, with an entry for the escape."""
    units: Int64[np.ndarray, " symbols_and_escape"]
    units = np.maximum(np.rint(np.append(mass, 0.0) * _UNITS), 4).astype(np.int64)
    # The largest entry absorbs the rounding, so the sum is exact and no entry becomes 0.
    units[np.argmax(units)] += _UNITS - units.sum()
    return units


def _small_deviation(step: int) -> Float64[np.ndarray, " 3"]:
    if step == _MARGIN_STEPS:
        return np.array([0.0, 1.0, 0.0])
    margins = (step + (np.arange(4) + 0.5) / 4) / 8
    below = float(ndtr(-margins).mean())
    return np.array([below, 1.0 - below, 0.0])


def _gaussian_mass(
    offset: Float64[np.ndarray, "k 1 1"], deviation: Float64[np.ndarray, "1 l 1"], reach: int
) -> Float64[np.ndarray, " symbols"]:
    edges = np.arange(-reach, reach + 2) - 0.5
    cumulative = ndtr((edges + offset) / deviation)
    return np.asarray(np.diff(cumulative, axis=-1).mean(axis=(0, 1)))


def _masses() -> list[Int64[np.ndarray, " _"]]:
    """Return the tables of all contexts, in units of 2^-22."""
    tables = [_units(_small_deviation(step)) for step in range(_MARGIN_STEPS + 1)]
    for eighth in range(_LOW, _HIGH):
        deviation = _deviations(eighth)[None, :, None]
        reach = int(np.ceil(6 * deviation.max())) + 1
        steps = _offset_steps(eighth)
        for step in range(steps):
            offset = (step + (np.arange(4) + 0.5) / 4)[:, None, None] / (2 * steps)
            tables.append(_units(_gaussian_mass(offset, deviation, reach)))
    for part in range(_EIGHTHS):
        deviation = _deviations(_HIGH - _EIGHTHS + part)[None, :, None]
        reach = int(np.ceil(6 * deviation.max())) + 1
        tables.append(_units(_gaussian_mass(np.full((1, 1, 1), 0.5), deviation, reach)))
    return tables


@cache
def tables() -> tuple[Table, ...]:
    """Build the tables once and verify their checksum.

    Raises:
        ChannelError: this platform's error function gives other tables than other platforms.
    """
    masses = _masses()
    checksum = zlib.crc32(b"".join(mass.astype("<i8").tobytes() for mass in masses))
    if checksum != _TABLE_CHECKSUM:
        raise ChannelError(
            f"the coder's tables have checksum {checksum:#010x} on this platform instead of {_TABLE_CHECKSUM:#010x}: "
            "messages could not be exchanged with others"
        )
    categorical = constriction.stream.model.Categorical
    return tuple(
        Table(reach=len(mass) // 2 - 1, model=categorical(mass.astype(np.float64), perfect=False))
        for mass in masses
    )


@dataclass(frozen=True, kw_only=True)
class Contexts:
    """Coding contexts of m integers, each relative to its centre (the integer nearest to its mean).

    Attributes:
        context: (m,) table of each integer.
        mirror: (m,) -1 if the sign is flipped, so that the mean is never above its centre, else 0.
        shift: (m,) number of low bits that are sent uncompressed; None if all are 0.
    """

    context: Int64[np.ndarray, " m"]
    mirror: Int64[np.ndarray, " m"]
    shift: Int64[np.ndarray, " m"] | None

    @classmethod
    def choose(cls, offset: Float64[np.ndarray, " m"], deviation: Float64[np.ndarray, " m"]) -> Contexts:
        """Choose the contexts of rounded Gaussians.

        Args:
            offset: (m,) centre minus mean, in [-1/2, 1/2].
            deviation: (m,) positive standard deviations.
        """
        distance = np.abs(offset)
        # The exponent and the top 3 bits of the mantissa are the eighth of an octave. Bit operations give the same
        # result on every processor; a library's logarithm may not.
        eighth = deviation.view(np.int64) >> 49
        eighth -= (1023 * _EIGHTHS) + _LOW
        lowest, highest = int(eighth.min(initial=0)), int(eighth.max(initial=0))
        row = eighth if lowest >= 0 and highest < len(_STEPS) else np.clip(eighth, 0, len(_STEPS) - 1)
        steps = _DOUBLE_STEPS[row]
        steps *= distance
        context = _FIRST[row]
        context += steps.astype(np.int64)
        mirror = offset.view(np.int64) >> 63
        if lowest < 0:
            small = np.flatnonzero(eighth < 0)
            margin = (0.5 - distance[small]) / deviation[small]
            context[small] = np.minimum(margin * 8, _MARGIN_STEPS).astype(np.int64)
        if highest < len(_STEPS):
            return cls(context=context, mirror=mirror, shift=None)
        large = np.flatnonzero(eighth >= len(_STEPS))
        shift = np.zeros(len(offset), dtype=np.int64)
        context[large] = _FIRST[-1] + (eighth[large] & 7)
        shift[large] = (eighth[large] >> 3) - (_HIGH - _LOW) // _EIGHTHS + 1
        mirror[large] = 0
        return cls(context=context, mirror=mirror, shift=shift)

    def flip_mirrored(self, symbols: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        """Flip the sign of the mirrored integers; its own inverse."""
        # Two's complement: x ^ -1 = -x - 1, and subtracting -1 gives -x; a mirror of 0 leaves x unchanged.
        turned: Int64[np.ndarray, " m"] = symbols ^ self.mirror
        turned -= self.mirror
        return turned


# --- streams of symbols ---

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
    remaining = 1.0
    for attempt in range(size):
        probability[attempt] = remaining * accepted
        remaining *= 1 - accepted
    probability[size] = remaining
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

"""Tabulate entropy models of integers under a rounded Gaussian with known mean and standard deviation.

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

import zlib
from dataclasses import dataclass
from functools import cache

import constriction
import numpy as np
from jaxtyping import Float64, Int64
from scipy.special import ndtr

from fedveil.quantization.errors import ChannelError

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

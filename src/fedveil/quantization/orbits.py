"""Simulate the Gaussian channel exactly at low rates: select among the cyclic shifts of shared noise.

A quantiser uses about 1.03 r bits for a parameter of standard deviation r sigma if r is small; the channel x + N(0,
sigma^2) carries r^2 / 2 nats. The gap is the price of layers: their borders reveal the latent. This module uses no
layers. Both ends draw Z ~ N(0, sigma^2 I_D), and the sender selects one of the D cyclic shifts of Z by its
likelihood.

Let w(y) be the density of N(x, sigma^2 I) over that of N(0, sigma^2 I) at y, W(y) the mean of w over the shifts of y,
and M a ceiling. A Gaussian vector and its shifts have one law, so W is the density ratio of orbits.

1. Trial: y ~ N(x, sigma^2 I) by the scalar LRSUQ. With probability 1 - min(W(y), M) / W(y) the trial is sent.
2. Otherwise: draw shared Z until one is accepted, with probability min(W(Z), M) / M each. Then select a shift with
   probability proportional to its w.

Step 2 is reached with probability A = E min(W, M), and its output has the density N(0, sigma^2 I)(y) w(y) min(W, M) /
(W A); step 1 leaves N(x, sigma^2 I)(y) (1 - min(W, M) / W). The two add up to N(x, sigma^2 I) for EVERY x: the error
is exactly Gaussian and independent of x. D and M change only the number of bits and the sender's work (M draws a
row). D parameters cost log2 D bits for the shift and about log2 M + 1.4 bits for the number of draws. One convolution
(FFT) scores all shifts, so a draw costs O(log D) per parameter.

Selection among shared candidates is channel simulation by rejection and importance sampling (Harsha et al., "The
communication complexity of correlation"; Havasi et al., "Minimal random code learning"). An orbit as one candidate
makes the search D times shorter, and the trial makes the truncated search exact.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache

import constriction
import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.errors import MessageError
from fedveil.quantization.lattices import read_points, write_points
from fedveil.quantization.portable import normals, uniforms
from fedveil.quantization.quantizers import LayeredQuantizer, Quantized
from fedveil.quantization.streams import SharedStreams
from fedveil.quantization.symbols import SymbolReader, SymbolWriter

MAX_SEARCH = 7
"""Largest log2 M."""
TARGET_ENERGY = 10.0
"""Target of |x|^2 / sigma^2 of a row, for which log2 D is chosen."""
MIN_ORDER, MAX_ORDER = 5, 16
_FRACTION_BITS = 6
_SEARCH_BITS = 3
_MOST_TRIALS_SENT = 48
_MAX_ENERGY = 36.0


def choose_order(ratio: float, length: int) -> int | None:
    """Choose log2 D for a block; None if a quantiser is cheaper.

    Args:
        ratio: root mean square of the block over the noise's standard deviation.
        length: number of parameters of the block.
    """
    order = round(math.log2(TARGET_ENERGY / max(ratio, 2.0**-20) ** 2))
    order = min(order, MAX_ORDER, math.ceil(math.log2(length)) if length > 1 else 0)
    if order < MIN_ORDER:
        return None
    rows = -(-length >> order)
    return order if rows * (order + 4) < length * ratio else None


@lru_cache(maxsize=1 << _FRACTION_BITS)
def _trial_model(code: int) -> object:
    sent = (code + 0.5) / 2**_FRACTION_BITS
    return constriction.stream.model.Categorical(np.array([1.0 - sent, sent]), perfect=False)


def _acceptance(code: int, search: int) -> float:
    """Return the probability that a draw is accepted: (1 - fraction of trials sent) / M."""
    return float((1.0 - (code + 0.5) / 2**_FRACTION_BITS) / 2.0**search)


def _signs(streams: SharedStreams, block: int, shape: tuple[int, int]) -> Float64[np.ndarray, "rows d"]:
    """Return shared random signs, so that a constant update does not look the same in every shift."""
    words = streams.source("sign", block).uint64(-(-shape[0] * shape[1] // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=shape[0] * shape[1])
    return (2.0 * bits - 1.0).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Likelihood ratios of every shift of candidates against rows of the update.

    Attributes:
        shares: (rows, d) w of every shift, relative to the largest of its row.
        mean: (rows,) W, the mean of w over the shifts.
    """

    shares: Float64[np.ndarray, "rows d"]
    mean: Float64[np.ndarray, " rows"]

    @classmethod
    def of(cls, rows: _Rows, which: Int64[np.ndarray, " rows"], y: Float64[np.ndarray, "rows d"]) -> _Scores:
        # ln w of shift k is <x, shifted y> / sigma^2 - |x|^2 / (2 sigma^2). One circular correlation gives all inner
        # products.
        scores = np.fft.irfft(np.fft.rfft(y) * rows.spectrum[which], n=y.shape[1])
        # The largest exponent is taken out, so that exp cannot overflow; `mean` puts it back.
        top = scores.max(axis=1)
        scores -= top[:, None]
        shares = np.exp(scores, out=scores)
        with np.errstate(over="ignore"):
            mean = shares.mean(axis=1) * np.exp(top - 0.5 * rows.energy[which])
        return cls(shares=shares, mean=mean)

    def pick(self, u: Float64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        """Choose a shift per row with probability proportional to its share."""
        cumulative = np.cumsum(self.shares, axis=1)
        picked = (cumulative < (u * cumulative[:, -1])[:, None]).sum(axis=1)
        return np.asarray(np.minimum(picked, self.shares.shape[1] - 1))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of the update in units of sigma, multiplied by the shared signs.

    Attributes:
        spectrum: complex conjugate of each row's real FFT.
        energy: |x|^2 / sigma^2 of each row.
    """

    spectrum: np.ndarray
    energy: Float64[np.ndarray, " rows"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Coding of one block by the sender.

    Attributes:
        order: log2 D.
        search: log2 M.
        draws: (rows,) rejected draws before the accepted one; 0 if the trial is sent.
        shifts: (rows,) the selected shift; 0 if the trial is sent.
        sent: (rows,) whether the trial itself is sent.
        trial: the scalar quantiser's trial of the block's parameters, without the padding of the last row.
    """

    order: int
    search: int
    draws: Int64[np.ndarray, " rows"]
    shifts: Int64[np.ndarray, " rows"]
    sent: Bool[np.ndarray, " rows"]
    trial: Quantized

    @property
    def code(self) -> int:
        """Fraction of rows whose trial is sent, as coded in the message (in units of 1/64)."""
        return int(min(self.sent.mean() * 2**_FRACTION_BITS, 2**_FRACTION_BITS - 1))

    @property
    def worthwhile(self) -> bool:
        """Return whether enough rows are sent without their trial; otherwise the block is sent as :attr:`trial`.

        It must be this trial and no other: it decided which rows are sent, so a second trial has another law.
        """
        return self.code <= _MOST_TRIALS_SENT


def _padded(x: Float64[np.ndarray, " m"], order: int) -> Float64[np.ndarray, "rows d"]:
    return np.append(x, np.zeros(-len(x) % (1 << order))).reshape(-1, 1 << order)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Block of an update: its quantiser, and the streams, in which the number selects the block's own."""

    number: int
    quantizer: LayeredQuantizer
    streams: SharedStreams

    def with_quantizer(self, quantizer: LayeredQuantizer) -> Block:
        """Return the block with another quantiser."""
        return replace(self, quantizer=quantizer)


def select(x: Float64[np.ndarray, " m"], place: Block, order: int, search: int) -> Selection:
    """Choose draws and shifts for a block.

    Args:
        x: (m,) the block's parameters.
        place: the block under the Gaussian law on Z1.
        order: log2 D.
        search: log2 M, 0 to 7; an increase by 1 doubles the draws and saves about a fourteenth of the bits.
    """
    scalar, streams, block = place.quantizer, place.streams, place.number
    padded = _padded(x, order)
    signs = _signs(streams, block, padded.shape)
    z = padded * signs / scalar.law.scale
    rows = _Rows(spectrum=np.conj(np.fft.rfft(z)), energy=np.einsum("ij,ij->i", z, z))
    trial = scalar.quantize(x.reshape(-1, 1), streams, block)
    # The padding's trial is its noise alone. It has a stream of its own, so that the trial of the parameters draws the
    # same latents as the scalar quantiser of the unpadded block, whose receiver does not know D.
    # `normals` makes pairs: an odd number of them leaves the last normal unused.
    lacking = padded.size - len(x)
    words = streams.source("padding", block).uint64(lacking + lacking % 2)
    beyond = normals(words)[:lacking] * scalar.law.scale
    y = np.append(scalar.reconstruct(trial.points, trial.dithers, trial.scales), beyond).reshape(padded.shape)
    count, ceiling = len(padded), 2.0**search
    choice = streams.source("choice", block)
    score = _Scores.of(rows, np.arange(count), y * signs / scalar.law.scale)
    # Step 1: u W > M has probability 1 - min(W, M) / W. The second rule depends on x alone, so the noise law stays
    # exact.
    sent = (uniforms(choice, count) * score.mean > ceiling) | (rows.energy > _MAX_ENERGY)
    draws, shifts = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    pending = np.flatnonzero(~sent)
    source = streams.source("candidate", block)
    draw = 0
    while len(pending):
        candidates = normals(source.uint64(len(pending) << order)).reshape(-1, 1 << order)
        score = _Scores.of(rows, pending, candidates)
        # Step 2: u M < W has probability min(W, M) / M.
        accepted = uniforms(choice, len(pending)) * ceiling < score.mean
        shifts[pending] = score.pick(uniforms(choice, len(pending)))
        draws[pending] = draw
        pending = pending[~accepted]
        draw += 1
    return Selection(order=order, search=search, draws=draws, shifts=shifts, sent=sent, trial=trial)


def write_selection(
    writer: SymbolWriter, selection: Selection, scalar: LayeredQuantizer, spread: float, checksum: int
) -> int:
    """Write a block's selection and return the checksum of its symbols."""
    code = selection.code
    writer.field(selection.search, _SEARCH_BITS)
    writer.field(code, _FRACTION_BITS)
    sent, named = selection.sent, np.flatnonzero(~selection.sent)
    writer.categories(sent.astype(np.int64), _trial_model(code))
    writer.attempts(selection.draws[named], _acceptance(code, selection.search))
    writer.fields(selection.shifts[named], selection.order)
    trials = np.repeat(sent, 1 << selection.order)[: len(selection.trial.points)]
    points = selection.trial.points[trials]
    ratio = spread * scalar.law.scale / selection.trial.scales[trials]
    write_points(writer, points, selection.trial.dithers[trials], ratio, scalar.lattice)
    return _checksum(selection.draws[named], selection.shifts[named], points, checksum)


def read_selection(
    reader: SymbolReader, length: int, place: Block, order: int, spread: float, checksum: int
) -> tuple[Float64[np.ndarray, " m"], int]:
    """Read the selection that :func:`write_selection` wrote.

    Returns:
        The block's values and the checksum of its symbols.

    Raises:
        MessageError: a number that no sender writes.
    """
    scalar, streams, block = place.quantizer, place.streams, place.number
    rows, size = -(-length >> order), 1 << order
    search, code = reader.field(_SEARCH_BITS), reader.field(_FRACTION_BITS)
    if code > _MOST_TRIALS_SENT:
        raise MessageError("the message sends more trials than any sender does")
    sent = reader.categories(rows, _trial_model(code)).astype(np.bool_)
    named = np.flatnonzero(~sent)
    acceptance = _acceptance(code, search)
    draws = reader.attempts(len(named), acceptance, math.ceil((4 * rows + 64) / acceptance))
    shifts = reader.fields(len(named), order)
    values = np.zeros((rows, size))
    values[named] = _shifted(_candidates(draws, streams, block, order), shifts)
    values *= _signs(streams, block, (rows, size)) * scalar.law.scale
    points = np.empty((0, 1))
    if sent.any():
        trials = np.flatnonzero(np.repeat(sent, size)[:length])
        scales = scalar.scales(streams, block, length)[trials]
        dithers = scalar.replay_dithers(np.zeros(length, dtype=np.int64), streams, block)[trials]
        points = read_points(reader, dithers, spread * scalar.law.scale / scales, scalar.lattice)
        values.reshape(-1)[trials] = scalar.reconstruct(points, dithers, scales).ravel()
    return values.reshape(-1)[:length], _checksum(draws, shifts, points, checksum)


def _candidates(
    draws: Int64[np.ndarray, " named"], streams: SharedStreams, block: int, order: int
) -> Float64[np.ndarray, "named d"]:
    """Repeat the sender's draws and return the accepted candidates."""
    source = streams.source("candidate", block)
    # Only accepted words become normals: rejected draws are read from the stream and dropped, to stay in step.
    words = np.empty((len(draws), 1 << order), dtype=np.uint64)
    pending = np.arange(len(draws))
    for draw in range(int(draws.max(initial=-1)) + 1):
        drawn = source.uint64(len(pending) << order).reshape(-1, 1 << order)
        accepted = draws[pending] == draw
        words[pending[accepted]] = drawn[accepted]
        pending = pending[~accepted]
    return normals(words.reshape(-1)).reshape(words.shape)


def _shifted(
    candidates: Float64[np.ndarray, "named d"], shifts: Int64[np.ndarray, " named"]
) -> Float64[np.ndarray, "named d"]:
    size = candidates.shape[1]
    places = (np.arange(size) + shifts[:, None]) & (size - 1)
    return np.take_along_axis(candidates, places, axis=1)


def _checksum(
    draws: Int64[np.ndarray, " named"],
    shifts: Int64[np.ndarray, " named"],
    points: Float64[np.ndarray, "k 1"],
    checksum: int,
) -> int:
    for part in (draws, shifts, points):
        checksum = zlib.crc32(part.astype("<i8").tobytes(), checksum)
    return checksum

"""Encode an update as one byte string, and decode it to update + noise, block by block.

An update is cut into blocks of at most 65,536 parameters. Each block is quantised and coded on its own streams.
In addition to the update and its message, memory therefore holds one block, for every length of the update.

Messages that are rounded after their noise are encoded by a range coder without a key: block by block, the root mean
square of the block's whole numbers, and the numbers as a rounded Gaussian of that size. The model determines the number
of bits, never the decoded numbers.
"""

from __future__ import annotations

import hmac
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from fedveil.errors import ChannelError, ForeignStreamError, MessageError, UpdateError
from fedveil.quantization.lattices import E8, Z1, Lattice, lattice, read_points, write_points
from fedveil.quantization.laws import BallLaw, CellLaw, GaussianLaw, LaplaceLaw, Law, StudentLaw
from fedveil.quantization.orbits import (
    MAX_ORDER,
    MAX_SEARCH,
    MIN_ORDER,
    Block,
    choose_order,
    read_selection,
    select,
    write_selection,
)
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import FINGERPRINT_BYTES, TAG_BYTES, SharedStreams
from fedveil.quantization.symbols import Contexts, SymbolReader, SymbolWriter

# --- the message of one update (docs/reference/wire-format.md) ---

MAGIC = b"\xf5LQ"
VERSION = 2
_FIXED = struct.Struct("<3sBBBBBd")
_CHECKSUM_BYTES = 4
_LAW_CODES = {"gaussian": 1, "laplace": 2, "student": 3, "ball": 4, "cell": 5}
_DENSE_CODES = {130: "A2", 131: "D3", 132: "D4", 136: "E8"}
_INSECURE = 1


@dataclass(frozen=True, kw_only=True)
class Header:
    """Header of a message.

    Attributes:
        quantizer: law and lattice.
        length: number of parameters of the update.
        secure: whether the shared streams were cryptographic.
    """

    quantizer: LayeredQuantizer
    length: int
    secure: bool


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """Authenticated message, split into header, payload and checksum."""

    header: Header
    payload: bytes
    checksum: int


def _lattice_code(lattice: Lattice) -> int:
    dense = {name: code for code, name in _DENSE_CODES.items()}
    return dense.get(lattice.name, lattice.dimension)


def _law(code: int, shape: int, scale: float) -> Law:
    match code:
        case 1:
            return GaussianLaw(std=scale)
        case 2:
            return LaplaceLaw(b=scale)
        case 3:
            return StudentLaw(t_scale=scale, degrees=shape)
        case 4:
            return BallLaw(ball_radius=scale)
        case 5:
            return CellLaw(inner_radius=scale)
    raise MessageError(f"the message names a noise law with code {code}; this version knows 1 to 5")


def _length_bytes(length: int) -> bytes:
    """Return the LEB128 encoding: seven bits a byte, lowest first."""
    encoded = bytearray()
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def _read_length(message: bytes, position: int) -> tuple[int, int]:
    length = 0
    for i, byte in enumerate(message[position : position + 6]):
        length |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            # One value, one encoding: a padded last byte of zero is refused.
            if i and not byte:
                break
            return length, position + i + 1
    raise MessageError("the message's length field is damaged")


def seal(header: Header, payload: bytes, checksum: int, streams: SharedStreams) -> bytes:
    """Assemble and authenticate a message.

    Args:
        header: law, lattice, length and kind of streams.
        payload: range-coded symbols.
        checksum: CRC-32 of the symbols, not of the payload.
        streams: give fingerprint and tag.
    """
    law, grid = header.quantizer.law, header.quantizer.lattice
    flags = 0 if header.secure else _INSECURE
    fixed = _FIXED.pack(
        MAGIC, VERSION, _LAW_CODES[law.name], law.shape, _lattice_code(grid), flags, law.scale
    )
    body = b"".join(
        (
            fixed,
            _length_bytes(header.length),
            streams.fingerprint(),
            payload,
            checksum.to_bytes(_CHECKSUM_BYTES, "little"),
        )
    )
    return body + streams.tag(body)


def _parse_header(message: bytes) -> tuple[Header, int]:
    if message[: len(MAGIC)] != MAGIC[: len(message)] or not message:
        raise MessageError("these bytes are no channel message: they do not begin as one")
    if len(message) > len(MAGIC) and message[len(MAGIC)] != VERSION:
        raise MessageError(
            f"the message has format version {message[len(MAGIC)]}; this program reads version {VERSION}"
        )
    if len(message) < _FIXED.size + 1:
        raise MessageError(f"the message is truncated: {len(message)} bytes do not hold a header")
    _, _, law_code, shape, lattice_code, flags, scale = _FIXED.unpack_from(message)
    if flags & ~_INSECURE:
        raise MessageError(f"the message has unknown flags {flags:#04x}")
    try:
        law = _law(law_code, shape, scale)
        grid = lattice(_DENSE_CODES.get(lattice_code, f"Z{lattice_code}"))
        quantizer = LayeredQuantizer(law=law, lattice=grid)
    except MessageError:
        raise
    except ChannelError as error:
        raise MessageError(f"the message's header names no possible channel: {error}") from error
    if law.shape != shape:
        raise MessageError(f"the message's header gives a shape {shape} to a law that has none")
    length, at = _read_length(message, _FIXED.size)
    return Header(quantizer=quantizer, length=length, secure=not flags & _INSECURE), at


def unseal(message: bytes, streams: SharedStreams) -> Envelope:
    """Check that a message is complete and was made under these streams, and split it.

    Raises:
        ForeignStreamError: the message was made under another key, run, client, round or attempt.
        MessageError: the message is no message of this version, truncated or altered.
    """
    header, at = _parse_header(message)
    end = len(message) - TAG_BYTES - _CHECKSUM_BYTES
    if end < at + FINGERPRINT_BYTES:
        raise MessageError(
            f"the message is truncated: {len(message)} bytes do not hold a header, checksum and tag"
        )
    if header.secure != streams.secure:
        kind = "cryptographic" if header.secure else "insecure simulation"
        raise ForeignStreamError(
            f"the message was made under {kind} streams, the receiver holds the other kind"
        )
    if message[at : at + FINGERPRINT_BYTES] != streams.fingerprint():
        raise ForeignStreamError(
            "the message was made under another shared stream: compare key, run, client, round and attempt"
        )
    # The fingerprint is compared first, so that a message of another round is reported as that, not as altered.
    if not hmac.compare_digest(message[-TAG_BYTES:], streams.tag(memoryview(message)[:-TAG_BYTES])):
        raise MessageError("the message was altered or truncated on its way: its tag does not fit")
    return Envelope(
        header=header,
        payload=message[at + FINGERPRINT_BYTES : end],
        checksum=int.from_bytes(message[end : end + _CHECKSUM_BYTES], "little"),
    )


# --- blocks ---

BLOCK = 1 << 16
"""Largest number of parameters in a block."""
MAX_LENGTH = 1 << 36
"""Largest number of parameters in an update."""
DENSE_FROM = 1.0
"""Spread, in units of the noise's scale, from which a dense lattice costs fewer bits than Z1."""
MAX_RATIO = 2.0**30
"""Largest parameter, in units of the noise's scale, that 64-bit lattice points hold with certainty."""

_LATTICE, _SCALAR = 0, 1
_PLAN_BITS = 5


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Message, with the number of random draws that its quantisation took.

    Attributes:
        message: the bytes to send.
        draws: number of dithers drawn, one per sub-vector and attempt; shared candidates if a block is a selection.
        accepted: number of accepted draws.
    """

    message: bytes
    draws: int
    accepted: int


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Noisy channel over bytes: it decodes an update to update + noise of exactly the quantiser's law.

    Attributes:
        quantizer: law and lattice.
        adaptive: lets the sender choose the cheapest exact coding of Gaussian noise for each block: selection among
            shared noise at low rates (:mod:`fedveil.quantization.orbits`), ``quantizer``'s lattice from a spread
            equal to the noise's scale, and Z1 in between. The noise law is the same for each coding. Other laws
            always use the lattice.
        search: effort of the selection, log2 of the ceiling M in :mod:`fedveil.quantization.orbits`. An increase by 1
            doubles the sender's work at low rates and saves about a fourteenth of the bits.

    Example:
        >>> from fedveil.quantization.lattices import E8, Z1
        >>> from fedveil.quantization.laws import GaussianLaw
        >>> from fedveil.quantization.streams import InsecureSimulationStreams
        >>> channel = Codec(quantizer=LayeredQuantizer(law=GaussianLaw(std=0.1), lattice=Z1))
        >>> message = channel.encode(np.zeros(10_000), InsecureSimulationStreams(0, "client", 3))
        >>> received = channel.decode(message, InsecureSimulationStreams(0, "client", 3), length=10_000)
        >>> bool(abs(received.std() - 0.1) < 0.005)
        True
    """

    quantizer: LayeredQuantizer
    adaptive: bool = False
    search: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.search <= MAX_SEARCH:
            raise ChannelError(f"search must be an integer from 0 to {MAX_SEARCH}, got {self.search}")

    def encode(self, update: Float[np.ndarray, " m"], streams: SharedStreams) -> bytes:
        """Return the message of :meth:`send` alone."""
        return self.send(update, streams).message

    def send(self, update: Float[np.ndarray, " m"], streams: SharedStreams) -> Sent:
        """Quantise and encode an update.

        Args:
            update: (m,) float32 or float64, finite, no parameter above 2^30 times the noise's scale.
            streams: this update's streams, never used before.

        Raises:
            UpdateError: the update is empty, not finite or too large for the noise; nothing was sent.
            StreamReuseError: the streams have carried another update.
        """
        _check(update, self.quantizer.law.scale)
        # Claimed before the first draw: even a failed encoding uses up the streams, so a second update cannot share
        # them.
        streams.claim()
        writer = SymbolWriter()
        checksum = drawn = accepted = 0
        for number, (start, end) in enumerate(_blocks(len(update), self.quantizer.lattice.dimension)):
            x = update[start:end].astype(np.float64)
            plan = _plan(x, self.quantizer) if self.adaptive else _LATTICE
            block = Block(number=number, quantizer=self.quantizer, streams=streams)
            checksum, rejected, n_accepted = _encode_block(writer, x, block, plan, self.search, checksum)
            drawn, accepted = drawn + rejected + n_accepted, accepted + n_accepted
        header = Header(quantizer=self.quantizer, length=len(update), secure=streams.secure)
        message = seal(header, writer.finish(), checksum, streams)
        return Sent(message=message, draws=drawn, accepted=accepted)

    def decode(self, message: bytes, streams: SharedStreams, *, length: int) -> Float64[np.ndarray, " m"]:
        """Decode a message of this channel to (length,) float64; see :meth:`decode_blocks`."""
        received = np.empty(self._open(message, streams, length).header.length)
        at = 0
        for values in self.decode_blocks(message, streams, length=length):
            received[at : at + len(values)] = values
            at += len(values)
        return received

    def decode_blocks(
        self, message: bytes, streams: SharedStreams, *, length: int
    ) -> Iterator[Float64[np.ndarray, " _"]]:
        """Decode a message block by block, as float64 values.

        The message is authenticated before its first symbol is read. The checksum of the symbols is checked after the
        last block; it fails if the two ends derived different latents, dithers or tables.

        Args:
            message: bytes from :meth:`encode` of the same channel.
            streams: the sender's streams.
            length: number of parameters that the receiver expects; nothing larger is ever allocated.

        Raises:
            ForeignStreamError: the message was made under another stream.
            MessageError: the message is damaged, of another version, law, lattice or length.
        """
        envelope = self._open(message, streams, length)
        reader = SymbolReader(envelope.payload)
        checksum = 0
        for number, (start, end) in enumerate(_blocks(length, self.quantizer.lattice.dimension)):
            block = Block(number=number, quantizer=self.quantizer, streams=streams)
            values, checksum = _decode_block(reader, end - start, block, checksum)
            yield values
        if checksum != envelope.checksum:
            raise MessageError(
                "the message decodes to other symbols than were sent: the two ends do not derive the same "
                "latents, dithers or tables"
            )

    def _open(self, message: bytes, streams: SharedStreams, length: int) -> Envelope:
        envelope = unseal(message, streams)
        header = envelope.header
        if header.length != length:
            raise MessageError(f"the message holds {header.length} parameters where {length} are expected")
        expected, received = self.quantizer, header.quantizer
        if (received.law, received.lattice.name) != (expected.law, expected.lattice.name):
            raise MessageError(
                f"the message was quantised with {received.law} on {received.lattice.name}; this channel expects "
                f"{expected.law} on {expected.lattice.name}"
            )
        return envelope


def gaussian_channel(std: float) -> Codec:
    """Return the default channel of Gaussian noise: the fewest bits at every rate at an acceptable speed.

    The channel uses selection among shared noise if it is cheaper, otherwise Z1 up to a spread equal to the noise's,
    and E8 for larger spreads. The table in docs/theory/lrsuq.md gives the measurements.
    """
    return Codec(quantizer=LayeredQuantizer(law=GaussianLaw(std=std), lattice=E8), adaptive=True)


def _check(update: Float[np.ndarray, " m"], scale: float) -> None:
    if update.ndim != 1 or update.dtype.kind != "f":
        raise UpdateError(f"an update is one vector of floats, got shape {update.shape} of {update.dtype}")
    if not 1 <= len(update) <= MAX_LENGTH:
        raise UpdateError(f"an update has 1 to {MAX_LENGTH} parameters, got {len(update)}")
    for start in range(0, len(update), BLOCK):
        largest = float(np.abs(update[start : start + BLOCK]).max())
        if not math.isfinite(largest):
            raise UpdateError(
                f"the update is not finite within parameters {start} to {start + BLOCK}; nothing was sent"
            )
        if largest > MAX_RATIO * scale:
            raise UpdateError(
                f"a parameter within {start} to {start + BLOCK} is above 2^30 times the noise's scale {scale}: "
                "noise of this scale would not hide it; clip the update or raise the scale"
            )


def _blocks(length: int, dimension: int) -> Iterator[tuple[int, int]]:
    size = BLOCK // dimension * dimension
    return ((start, min(start + size, length)) for start in range(0, length, size))


def _rows(x: Float64[np.ndarray, " m"], dimension: int) -> Float64[np.ndarray, "rows n"]:
    """Cut a block into sub-vectors, padded with zeros."""
    missing = -len(x) % dimension
    return (np.append(x, np.zeros(missing)) if missing else x).reshape(-1, dimension)


def spread_code(x: Float64[np.ndarray, " m"], scale: float) -> int:
    """Return the root mean square in units of the noise's scale, as the upper half of a float32.

    The mantissa then has 8 significant bits.
    """
    spread = np.float32(min(max(math.sqrt(float(np.mean((x / scale) ** 2))), 2.0**-20), 2.0**31))
    return int((spread.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16))


def read_spread(code: int) -> float:
    """Return the root mean square that :func:`spread_code` encoded.

    Raises:
        MessageError: a code that no sender writes.
    """
    spread = float(np.array([code << 16], dtype=np.uint32).view(np.float32)[0])
    if not 2.0**-21 <= spread <= 2.0**32:
        raise MessageError("the message gives a block a spread that no sender writes")
    return spread


def _symbols_checksum(points: Float64[np.ndarray, "rows n"], checksum: int) -> int:
    """Return the checksum of lattice points: twice each coordinate, to 16 bits."""
    # E8 has half-integer coordinates; doubled, they are whole numbers.
    return zlib.crc32((2.0 * points).astype(np.int64).astype("<i2").tobytes(), checksum)


def _scalar(quantizer: LayeredQuantizer) -> LayeredQuantizer:
    return LayeredQuantizer(law=quantizer.law, lattice=Z1)


def _plan(x: Float64[np.ndarray, " m"], quantizer: LayeredQuantizer) -> int:
    """Choose the coding of a block: the lattice, the scalar quantiser, or log2 D of the orbits."""
    if not isinstance(quantizer.law, GaussianLaw):
        return _LATTICE
    ratio = read_spread(spread_code(x, quantizer.law.scale))
    order = choose_order(ratio, len(x))
    if order is not None:
        return order
    return _LATTICE if ratio >= DENSE_FROM else _SCALAR


def _encode_block(
    writer: SymbolWriter, x: Float64[np.ndarray, " m"], block: Block, plan: int, search: int, checksum: int
) -> tuple[int, int, int]:
    """Write a block; return the checksum so far, and the numbers of rejected and accepted draws."""
    quantizer, scalar = block.quantizer, _scalar(block.quantizer)
    code = spread_code(x, quantizer.law.scale)
    if plan >= MIN_ORDER:
        selection = select(x, block.with_quantizer(scalar), plan, search)
        if selection.worthwhile:
            writer.field(plan, _PLAN_BITS)
            writer.field(code, 16)
            checksum = write_selection(writer, selection, scalar, read_spread(code), checksum)
            return checksum, int(selection.draws.sum()), len(selection.draws)
        # Most rows send their trial anyway. A trial that is not sent has the law of the accepted candidate (docstring
        # of `orbits`), so a block of these trials alone has the same noise law. A second trial would not have it.
        plan, quantizer, quantized = _SCALAR, scalar, selection.trial
    else:
        quantizer = scalar if plan == _SCALAR else quantizer
        rows = _rows(x, quantizer.lattice.dimension)
        quantized = quantizer.quantize(rows, block.streams, block.number)
    writer.field(plan, _PLAN_BITS)
    writer.field(code, 16)
    grid = quantizer.lattice
    if quantizer.rejects:
        writer.attempts(quantized.attempts, grid.acceptance)
    ratio = read_spread(code) * quantizer.law.scale / quantized.scales
    write_points(writer, quantized.points, quantized.dithers, ratio, grid)
    rejected = int(quantized.attempts.sum())
    return _symbols_checksum(quantized.points, checksum), rejected, len(quantized.attempts)


def _decode_block(
    reader: SymbolReader, length: int, block: Block, checksum: int
) -> tuple[Float64[np.ndarray, " m"], int]:
    quantizer, streams, number = block.quantizer, block.streams, block.number
    plan = reader.field(_PLAN_BITS)
    spread = read_spread(reader.field(16))
    if plan > _LATTICE and not isinstance(quantizer.law, GaussianLaw):
        raise MessageError("the message sends a block in a way that its noise law does not allow")
    if plan >= MIN_ORDER:
        # Checked before any row is allocated: the plan comes from the message.
        if plan > MAX_ORDER or 1 << (plan - 1) >= max(length, 2):
            raise MessageError(f"the message sends {length} parameters in rows of 2^{plan}")
        return read_selection(
            reader, length, block.with_quantizer(_scalar(quantizer)), plan, spread, checksum
        )
    if plan > _SCALAR:
        raise MessageError(f"the message sends a block in an unknown way ({plan})")
    if plan == _SCALAR:
        quantizer = _scalar(quantizer)
    grid = quantizer.lattice
    rows = -(-length // grid.dimension)
    attempts = np.zeros(rows, dtype=np.int64)
    if quantizer.rejects:
        limit = math.ceil((4 * rows + 64) / grid.acceptance)
        attempts = reader.attempts(rows, grid.acceptance, limit)
    scales = quantizer.scales(streams, number, rows)
    dithers = quantizer.replay_dithers(attempts, streams, number)
    points = read_points(reader, dithers, spread * quantizer.law.scale / scales, grid)
    values = quantizer.reconstruct(points, dithers, scales).reshape(-1)[:length]
    return values, _symbols_checksum(points, checksum)


# --- whole numbers, without a key ---

_SPREAD_BITS = 16


def encode_integers(values: Int64[np.ndarray, " m"]) -> bytes:
    """Return the code of numbers below 2^59.

    >>> decode_integers(encode_integers(np.array([3, -5, 0])), 3).tolist()
    [3, -5, 0]
    """
    writer = SymbolWriter()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        code = spread_code(block.astype(np.float64), 1.0)
        writer.field(code, _SPREAD_BITS)
        writer.integers(block, _contexts(code, len(block)))
    return writer.finish()


def decode_integers(message: bytes, length: int) -> Int64[np.ndarray, " m"]:
    """Return the ``length`` numbers of a code.

    Raises:
        MessageError: bytes that no sender writes, or the code of other numbers.
    """
    reader, numbers = SymbolReader(message), np.empty(length, dtype=np.int64)
    for start in range(0, length, BLOCK):
        block = numbers[start : start + BLOCK]
        block[:] = reader.integers(_contexts(reader.field(_SPREAD_BITS), len(block)))
    if encode_integers(numbers) != message:
        raise MessageError("the message is the code of no numbers of this length")
    return numbers


def _contexts(code: int, count: int) -> Contexts:
    """Return the models of a block's numbers, given the code of their root mean square."""
    return Contexts.choose(np.zeros(count), np.full(count, read_spread(code)))

"""Assemble and parse the message of one update: header, range-coded payload, checksum and tag.

Format: docs/reference/wire-format.md.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from fedveil.errors import ChannelError, ForeignStreamError, MessageError
from fedveil.quantization.lattices import Lattice, lattice
from fedveil.quantization.laws import BallLaw, CellLaw, GaussianLaw, LaplaceLaw, Law, StudentLaw
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import FINGERPRINT_BYTES, TAG_BYTES, SharedStreams

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


def _lattice_code(of: Lattice) -> int:
    dense = {name: code for code, name in _DENSE_CODES.items()}
    return dense.get(of.name, of.dimension)


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


def _read_length(message: bytes, at: int) -> tuple[int, int]:
    length = 0
    for i, byte in enumerate(message[at : at + 6]):
        length |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            # One value, one encoding: a padded last byte of zero is refused.
            if i and not byte:
                break
            return length, at + i + 1
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

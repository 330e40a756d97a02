"""Convert ciphertexts and plaintexts of Microsoft SEAL to numpy arrays and back.

Only this module knows SEAL's file format. ``tenseal.sealapi`` reads and writes files and does not expose
coefficients. Adding noise to a ciphertext, and sharing a transformed plaintext between plaintext moduli, need the
coefficients. This module therefore reads and writes the serialised form of SEAL 4.1 to 4.3:

    header      magic A15E | 16 | major | minor | compression | 0 (2) | total bytes (8)
    ciphertext  parameter id (32) | NTT form (1) | polynomials, degree, primes (8 each) | scale, correction (8 each)
    plaintext   parameter id (32) | coefficients (8) | scale (8)
    array       header | length (8) | uint64 words
    generator   header | kind (1) | seed (64): follows the array of a seeded ciphertext, whose second half is not sent

Files are in anonymous memory (memfd), so no private data reaches a disk; systems without memfd use a temporary
folder. :func:`check_format` writes, reads and compares a ciphertext before first use, and refuses other versions.
"""

from __future__ import annotations

import os
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import UInt64

from fedveil.errors import CryptoError
from fedveil.files import reading

ParametersId = tuple[int, int, int, int]

_HEADER: Final = struct.Struct("<HBBBBHQ")
_MAGIC: Final = 0xA15E
_VERSIONS: Final = ((4, 1), (4, 2), (4, 3))
_PLAIN, _ZSTD = 0, 2
_CIPHERTEXT: Final = struct.Struct("<4QBQQQdQ")
_PLAINTEXT: Final = struct.Struct("<4QQd")
SEED_BYTES: Final = 64
_GENERATOR: Final = struct.Struct(f"<B{SEED_BYTES}s")
_BLAKE2XB: Final = 1
_LARGEST: Final = 1 << 28
_PART: Final = 1 << 20  # bytes; larger than any ciphertext here


class MemoryFile:
    """Anonymous memory file (or temporary file) through which SEAL objects are read and written."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("fedveil", os.MFD_CLOEXEC)
            self.path = f"/proc/self/fd/{self._descriptor}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="fedveil-")
            self.path = str(Path(self._folder.name) / "exchange")
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def __del__(self) -> None:
        """Free the memory, or delete the temporary folder."""
        os.close(self._descriptor)
        if self._folder is not None:
            self._folder.cleanup()

    def load(self, target: Any, context: Any, data: bytes) -> None:
        """Load a SEAL object from bytes, which SEAL validates against a context.

        Raises:
            CryptoError: SEAL refuses the bytes.
        """
        os.pwrite(self._descriptor, data, 0)
        # Truncated after the write, not before: objects of equal size then reuse the memory pages.
        os.ftruncate(self._descriptor, len(data))
        try:
            target.load(context, self.path)
        except (RuntimeError, ValueError) as error:
            raise CryptoError(f"SEAL refuses an object: {error}") from error

    def save(self, source: Any) -> bytes:
        """Return the bytes that a SEAL object writes."""
        os.ftruncate(self._descriptor, 0)
        source.save(self.path)
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)


def ciphertext_bytes(
    identifier: ParametersId, words: UInt64[np.ndarray, "2 primes n"], *, ntt: bool
) -> bytes:
    """Return SEAL's uncompressed form of a ciphertext of two polynomials."""
    polynomials, primes, degree = words.shape
    prefix = _CIPHERTEXT.pack(*identifier, int(ntt), polynomials, degree, primes, 1.0, 1)
    return _framed(prefix, words)


def seeded_ciphertext_bytes(identifier: ParametersId, words: UInt64[np.ndarray, " n"], seed: bytes) -> bytes:
    """Return SEAL's form of a ciphertext modulo one prime, with a seed for its second polynomial."""
    prefix = _CIPHERTEXT.pack(*identifier, 0, 2, words.size, 1, 1.0, 1)
    total = _HEADER.size + _GENERATOR.size
    return _framed(prefix, words, _header(total) + _GENERATOR.pack(_BLAKE2XB, seed))


def plaintext_bytes(coefficients: UInt64[np.ndarray, " n"], identifier: ParametersId = (0, 0, 0, 0)) -> bytes:
    """Return SEAL's uncompressed form of a plaintext (identifier 0: coefficients; else transformed)."""
    return _framed(_PLAINTEXT.pack(*identifier, coefficients.size, 1.0), coefficients)


def parse_ciphertext(data: bytes) -> UInt64[np.ndarray, "2 primes n"]:
    """Return the (2, primes, N) words of a ciphertext that SEAL wrote.

    Raises:
        CryptoError: the bytes do not have the expected form.
    """
    with reading("SEAL's ciphertext", CryptoError):
        body = _body(data)
        _, _, _, _, _, polynomials, degree, primes, _, _ = _CIPHERTEXT.unpack_from(body)
        return _words(body, _CIPHERTEXT.size).reshape(polynomials, primes, degree)


def parse_seeded_ciphertext(data: bytes) -> tuple[UInt64[np.ndarray, " n"], bytes]:
    """Return the first polynomial, and the second one's seed, of a one-prime ciphertext from SEAL.

    Raises:
        CryptoError: the bytes do not have the expected form.
    """
    with reading("SEAL's seeded ciphertext", CryptoError):
        body = _body(data)
        split = max(0, len(body) - _GENERATOR.size)
        kind, seed = _GENERATOR.unpack_from(body, split)
        if kind != _BLAKE2XB:
            raise CryptoError(f"SEAL seeded a ciphertext with generator {kind}; Blake2xb is expected")
        return _words(body[: split - _HEADER.size], _CIPHERTEXT.size), seed


def parse_plaintext(data: bytes) -> UInt64[np.ndarray, " n"]:
    """Return the coefficients of a plaintext that SEAL wrote.

    Raises:
        CryptoError: the bytes do not have the expected form.
    """
    with reading("SEAL's plaintext", CryptoError):
        return _words(_body(data), _PLAINTEXT.size)


def check_format(context: Any, fresh: Any, empty: Any) -> None:
    """Check that SEAL's format is understood: read, rewrite, load and compare a fresh ciphertext.

    Args:
        context: SEAL context.
        fresh: ciphertext in coefficient form.
        empty: empty ciphertext, into which the rewritten ciphertext is loaded.

    Raises:
        CryptoError: another version of SEAL, or another layout.
    """
    file = MemoryFile()
    words = parse_ciphertext(file.save(fresh))
    identifier = tuple(fresh.parms_id())
    file.load(empty, context, ciphertext_bytes(identifier, words, ntt=False))
    if not np.array_equal(parse_ciphertext(file.save(empty)), words):
        raise CryptoError("SEAL's serialised ciphertexts have a layout that this version does not know")


def _header(total: int) -> bytes:
    return _HEADER.pack(_MAGIC, _HEADER.size, *_VERSIONS[-1], _PLAIN, 0, total)


def _framed(prefix: bytes, words: UInt64[np.ndarray, "..."], suffix: bytes = b"") -> bytes:
    array_bytes = _HEADER.size + 8 + words.nbytes
    total = _HEADER.size + len(prefix) + array_bytes + len(suffix)
    parts = (_header(total), prefix, _header(array_bytes), struct.pack("<Q", words.size), words.tobytes())
    return b"".join((*parts, suffix))


def _body(data: bytes) -> memoryview:
    from zstandard import ZstdError

    if len(data) < _HEADER.size:
        raise CryptoError("SEAL wrote fewer bytes than a header")
    magic, size, major, minor, compression, _, _ = _HEADER.unpack_from(data)
    if magic != _MAGIC or size != _HEADER.size or (major, minor) not in _VERSIONS:
        raise CryptoError(
            f"SEAL {major}.{minor} writes a format that is not known here; known are "
            f"{', '.join(f'{a}.{b}' for a, b in _VERSIONS)}"
        )
    if compression == _PLAIN:
        return memoryview(data)[_HEADER.size :]
    if compression != _ZSTD:
        raise CryptoError(f"SEAL wrote with compression mode {compression}; zstd is expected")
    try:
        stream = _decompressor().stream_reader(memoryview(data)[_HEADER.size :])
        # In parts: each call allocates what it may return, which takes longer than the decompression if that is all.
        parts, length = [], 0
        while part := stream.read(_PART):
            parts.append(part)
            length += len(part)
            if length > _LARGEST:  # a small compressed object cannot fill the memory
                raise CryptoError(f"SEAL's compressed object has more than {_LARGEST} bytes")
    except ZstdError as error:
        raise CryptoError("SEAL's compressed object cannot be read") from error
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


@cache
def _decompressor() -> Any:
    from zstandard import ZstdDecompressor

    return ZstdDecompressor()


def _words(body: memoryview, offset: int) -> UInt64[np.ndarray, " n"]:
    (count,) = struct.unpack_from("<Q", body, offset + _HEADER.size)
    first = offset + _HEADER.size + 8
    if len(body) != first + 8 * count:
        raise CryptoError("SEAL's array has another length than it announces")
    return np.frombuffer(body, dtype="<u8", offset=first)

"""Run 1-out-of-P oblivious transfer (Naor and Pinkas 2001, protocol 3.1) in RFC 3526 group 15.

The sender has P messages, the receiver an index. The receiver learns only the message at its index, and the sender
learns nothing about the index. Conditions: both parties follow the protocol; the Diffie-Hellman problem with 256-bit
exponents in this group is hard (about 128 bits of security); the hash is a random oracle.

    sender:   C_1 .. C_{P-1}, g^r                       (once; serves many transfers)
    receiver: k random; PK_0 = g^k if index = 0, else C_index / g^k
    sender:   PK_i^r = C_i^r / PK_0^r; message i is encrypted under H(PK_i^r, transfer, i)
    receiver: (g^r)^k = PK_index^r opens message index
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Final

from gmpy2 import invert, jacobi, mpz, powmod

from fedveil.crypto.key_agreement import seal, unseal
from fedveil.crypto.paillier import FixedPowers
from fedveil.errors import CryptoError

POINT_BYTES: Final = 384
"""Bytes of a group element in a message."""

EXPONENT_BITS: Final = 256


@cache
def group_modulus() -> mpz:
    """Return the 3072-bit safe prime 2^3072 - 2^3008 - 1 + 2^64 (floor(2^2942 pi) + 1690314) of RFC 3526."""
    pi = _pi_shifted(2942)
    return mpz(2) ** 3072 - mpz(2) ** 3008 - 1 + mpz(2) ** 64 * (pi + 1690314)


def _pi_shifted(bits: int) -> mpz:
    """Return floor(2^bits pi) by Machin's formula pi = 16 arctan(1/5) - 4 arctan(1/239)."""
    guard = 64
    unit = mpz(1) << (bits + guard)

    def arctan_inverse(x: int) -> mpz:
        total, term, k = mpz(0), unit // x, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term //= x * x
            k += 2
        return total

    return (16 * arctan_inverse(5) - 4 * arctan_inverse(239)) >> guard


_GENERATOR: Final = mpz(4)  # a square, so it generates the subgroup of prime order (p - 1) / 2


@cache
def _generator_powers() -> FixedPowers:
    return FixedPowers(_GENERATOR, group_modulus(), bits=EXPONENT_BITS, window=6)


def check_point(point: mpz) -> None:
    """Check that a number is a quadratic residue other than 1, which has order (p - 1) / 2.

    Raises:
        CryptoError: the number lies outside the group.
    """
    if not 1 < point < group_modulus() or jacobi(point, group_modulus()) != 1:
        raise CryptoError("a point lies outside the group of the oblivious transfer")


class TransferSender:
    """Sender of P messages; one object serves any number of transfers.

    Args:
        places: P, number of messages, at least 2.

    Raises:
        CryptoError: fewer than two places.
    """

    def __init__(self, places: int) -> None:
        if places < 2:
            raise CryptoError(f"a transfer needs at least 2 places to hide an index in, not {places}")
        modulus, power = group_modulus(), _generator_powers()
        self._exponent = _random_exponent()
        self.public = power.raise_to(self._exponent)
        self.constants = tuple(power.raise_to(_random_exponent()) for _ in range(places - 1))
        self._raised = tuple(powmod(constant, self._exponent, modulus) for constant in self.constants)

    def answer(self, request: mpz, messages: list[bytes], context: bytes) -> list[bytes]:
        """Return the P messages, sealed so that the receiver can open only the message at its index.

        Args:
            request: ``request`` of the :class:`TransferReceiver`.
            messages: P messages of the same length.
            context: unique name of the transfer; both sides use the same bytes.

        Raises:
            CryptoError: the request lies outside the group, or the messages are not P messages of the same length.
        """
        if len(messages) != len(self.constants) + 1 or len({len(message) for message in messages}) != 1:
            raise CryptoError(f"a transfer needs {len(self.constants) + 1} messages of one length")
        check_point(request)
        modulus = group_modulus()
        # PK_0^r, and PK_i^r = C_i^r / PK_0^r: one power and one inverse per transfer.
        first = powmod(request, self._exponent, modulus)
        inverse = invert(first, modulus)
        points = [first, *(raised * inverse % modulus for raised in self._raised)]
        return [
            seal(_key(point, context, index), message, context)
            for index, (point, message) in enumerate(zip(points, messages, strict=True))
        ]


@dataclass(frozen=True)
class TransferReceiver:
    """Receiver of one message; one object serves one transfer.

    Attributes:
        request: PK_0, the group element for the sender.
    """

    request: mpz
    _exponent: int
    _index: int

    @classmethod
    def choose(cls, index: int, constants: tuple[mpz, ...]) -> TransferReceiver:
        """Return a receiver with a fresh request for one index in 0 .. P - 1.

        Args:
            index: index of the message.
            constants: C_1 .. C_{P-1} of the sender; the caller has checked them with :func:`check_point`.

        Raises:
            CryptoError: an index out of range.
        """
        if not 0 <= index <= len(constants):
            raise CryptoError(f"place {index} of {len(constants) + 1} does not exist")
        exponent = _random_exponent()
        point = _generator_powers().raise_to(exponent)
        if index:
            point = constants[index - 1] * invert(point, group_modulus()) % group_modulus()
        return cls(point, exponent, index)

    def open(self, public: mpz, sealed: list[bytes], context: bytes) -> bytes:
        """Decrypt the message at the chosen index.

        Args:
            public: g^r of the sender.
            sealed: the P sealed messages.
            context: unique name of the transfer; both sides use the same bytes.

        Raises:
            CryptoError: the message does not authenticate.
        """
        point = powmod(public, self._exponent, group_modulus())
        return unseal(_key(point, context, self._index), sealed[self._index], context)


def _random_exponent() -> int:
    return secrets.randbits(EXPONENT_BITS - 1) | 1


def _key(point: mpz, context: bytes, index: int) -> bytes:
    # H(PK_i^r, transfer, i): context and index are hashed too, so equal points of two transfers give different keys.
    name = len(context).to_bytes(4, "big") + context + index.to_bytes(4, "big")
    return sha256(b"fedveil/1/transfer" + name + int(point).to_bytes(POINT_BYTES, "big")).digest()

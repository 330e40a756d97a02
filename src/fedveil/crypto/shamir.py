"""Share 32-byte secrets by Shamir's secret sharing (1979) over the prime field of 2^256 + 297."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fedveil.errors import CryptoError

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
"""Bytes of a share's value."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Value of the secret polynomial at the point of one holder; the point is public and never 0."""

    point: int
    value: bytes


def split(secret: bytes, *, holders: int, threshold: int) -> tuple[Share, ...]:
    """Split a secret into shares: any ``threshold`` shares determine it, fewer disclose nothing about it.

    Args:
        secret: 32 bytes.
        holders: number of shares; holder i (from 0) has the point i + 1.
        threshold: number of shares that determine the secret, 1 .. holders.

    Raises:
        CryptoError: not 32 bytes, or a threshold outside its range.
    """
    if len(secret) != SECRET_BYTES:
        raise CryptoError(f"a shared secret has {SECRET_BYTES} bytes, this one has {len(secret)}")
    if not 1 <= threshold <= holders:
        raise CryptoError(f"threshold {threshold} of {holders} holders: it must lie between 1 and {holders}")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    # Horner's rule: the secret is the last coefficient, so it is the value at 0.
    shares = []
    for point in range(1, holders + 1):
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares.append(Share(point=point, value=value.to_bytes(SHARE_BYTES, "big")))
    return tuple(shares)


def combine(shares: list[Share], *, threshold: int) -> bytes:
    """Recover the secret from the first ``threshold`` of the given shares (Lagrange interpolation at 0).

    Raises:
        CryptoError: too few shares, two shares of one point, a value outside the field, or a result that has more
            than 32 bytes. Not claimed: detection of all wrong shares; :func:`consistent` tests them.
    """
    points = {share.point for share in shares}
    if len(points) != len(shares) or len(shares) < threshold:
        raise CryptoError(f"{len(points)} distinct shares of {len(shares)} given; {threshold} are needed")
    chosen = shares[:threshold]
    total = 0
    for share in chosen:
        value = int.from_bytes(share.value, "big")
        if value >= PRIME or not 0 < share.point < PRIME:
            raise CryptoError(f"the share of point {share.point} lies outside the field")
        numerator = denominator = 1
        for other in chosen:
            if other.point != share.point:
                numerator = numerator * other.point % PRIME
                denominator = denominator * (other.point - share.point) % PRIME
        total = (total + value * numerator * pow(denominator, -1, PRIME)) % PRIME
    if total >= 2 ** (8 * SECRET_BYTES):
        raise CryptoError("the shares do not belong to one secret")
    return total.to_bytes(SECRET_BYTES, "big")


def consistent(shares: Sequence[Share], *, threshold: int) -> bool:
    """Test whether shares lie on one polynomial of degree below the threshold.

    ``threshold`` or fewer shares always do. n shares (x_i, v_i) lie on one polynomial of degree below t iff sum_i v_i
    f(x_i) / prod_{j != i} (x_i - x_j) = 0 for every polynomial f of degree below n - t. The function tests one random
    f, so inconsistent shares pass with probability 1 / PRIME.
    """
    spare = len(shares) - threshold
    if spare <= 0:
        return True
    test = [secrets.randbelow(PRIME) for _ in range(spare)]
    total = 0
    for share in shares:
        between = (
            math.prod(share.point - other.point for other in shares if other.point != share.point) % PRIME
        )
        value = 0
        for coefficient in test:
            value = (value * share.point + coefficient) % PRIME
        total += int.from_bytes(share.value, "big") * value * pow(between, -1, PRIME)
    return total % PRIME == 0


def odd_one_out(shares: Sequence[Share], fit: Callable[[list[Share]], bool]) -> Share | None:
    """Return the only share without which the others fit; None if no or several shares qualify.

    Args:
        shares: shares of one secret, at least one of them wrong.
        fit: returns whether a list of shares is verifiably right.
    """
    candidates = [share for share in shares if fit([other for other in shares if other is not share])]
    return candidates[0] if len(candidates) == 1 else None

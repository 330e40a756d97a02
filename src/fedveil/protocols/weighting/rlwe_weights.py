"""Private weighting of deep models under ring-LWE: what the key holder and a silo compute.

The plaintext modulus is a product of primes t_1 .. t_k. Enc(B_u) is one constant per prime; a silo
multiplies it by (r_u C mod t_i), which encrypts C / N_u mod t_i, and then by polynomials of N short numbers
n_{s,u} y_{s,u,j}. One transformed polynomial serves all primes.

What a silo sends is independent of how it was computed, towards the key holder too:

* c_1 hides behind a fresh public-key encryption (of noise and masks), an RLWE sample whose secret the key
  holder lacks;
* the noise that decryption shows hides behind a flood, large enough for a statistical distance of 2^-48 over
  all coefficients of a message together (:func:`shown_distance`).

Noise of a weighted sum: fresh noise per coefficient times a constant up to t/2, times polynomials n y, summed over
|U| users. All blocks of a user's n y together have an l2 norm of at most L (the largest contribution times the
largest count). Fresh noise is sub-Gaussian with a parameter below 3.8 (SEAL's: 42 bits less their mean, 3.25, or
rounded normal numbers of deviation 3.2). Ten of that, and the rounding of the constant, make at most
B = t/2 · L · (38 sqrt(|U|) + |U|) in a coefficient, and at most E = t/2 · L · sqrt(k) · (38 sqrt(|U| N) + |U|) in l2
over all coefficients, primes and blocks: the number of blocks does not matter, because L is shared among them. The
flood is the sum of three uniform numbers of F >= 1.1 · 2^48 E values each (:meth:`fedveil.crypto.rlwe.Ring.flood`).
Decryption is right iff |S| (3F/2 + B) < q / 2t. :func:`choose_parameters` takes the cheapest ring for which that holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.residues import (
    Residues,
    from_limbs,
    keyed_residues,
    mixed_radix,
    quotients,
    random_below,
    times,
)
from fedveil.crypto.rlwe import Ciphertext, Ring, RingEngine, RlweKey, RlwePublicKey
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.weighting.paillier_weights import MaskKeys
from fedveil.protocols.weighting.plan import WeightingPlan
from fedveil.protocols.weighting.private_weighting import Contributions
from fedveil.randomness import KeyedStream

STATISTICAL_BITS: Final = 48
_TAIL_BITS: Final = 68
_DEVIATIONS: Final = 38.0  # ten times 3.8

_RINGS: Final = ((8192, 3), (16384, 4), (16384, 5), (16384, 6))
_MOST_PRIMES: Final = 16
_PLAIN_BITS: Final = range(30, 59)
_TRANSFORM, _MULTIPLY = 0.47, 0.20  # milliseconds for N = 8192 and 3 primes


@dataclass(frozen=True, kw_only=True)
class RlweParameters:
    """A ring and plaintext primes for one plan.

    Attributes:
        ring: the ring.
        plain_bits: bits of each plaintext prime.
        plain_count: k, how many there are.
        noise_bits: log2 of B, the noise of one silo's weighted sum in a coefficient.
        norm_bits: log2 of E, its l2 norm over a whole message.
        flood_bits: log2 of F, the values of each of the flood's three parts.
        spare_bits: how far the sum of all silos stays below the limit of right decryption.
        milliseconds: estimated cost per user and 8192 coordinates.
    """

    ring: Ring
    plain_bits: int
    plain_count: int
    noise_bits: float
    norm_bits: float
    flood_bits: int
    spare_bits: float
    milliseconds: float

    @property
    def plain_primes(self) -> tuple[int, ...]:
        """t_1 .. t_k."""
        return self.ring.plain_primes(self.plain_bits, self.plain_count)

    @property
    def modulus(self) -> int:
        """Their product, the plaintext modulus."""
        return math.prod(self.plain_primes)


def shown_distance(messages: int) -> float:
    """Return how far what so many messages show of ciphertexts' noise is from floods alone, in statistical distance.

    For m messages sqrt(m) 2^-48 + m 2^-68, of one run together and whatever was released between them. The square roots
    of a flood's law and of the law shifted by noise of length E differ by at most h = 2^-48 in l2 (``Ring.flood``); for
    one message after another the squares h^2 add up, because what the square roots have in common, 1 - h^2 / 2,
    multiplies; and the distance is at most the root of the sum. To that come noises longer than E. With A the linear
    map from fresh noise to that of a message, ||A||_F^2 <= E^2 / 10^2 in units of the sub-Gaussian parameter, and
    P(||A e||^2 > 100 ||A||_F^2) <= min_x e^(-100 x) (1 - 2 x)^(-1/2) = 10 e^(-99/2) < 2^-68.
    """
    return math.sqrt(messages) * 2.0**-STATISTICAL_BITS + messages * 2.0**-_TAIL_BITS


def choose_parameters(plan: WeightingPlan) -> RlweParameters:
    """Return the cheapest ring and primes that hold the plan's sums at 128-bit security.

    Raises:
        ProtocolError: none does, with what to change.
    """
    found = []
    for degree, primes in _RINGS:
        for count in range(1, _MOST_PRIMES + 1):
            bits = max(_PLAIN_BITS[0], plan.exponent_bits + 2, math.ceil(plan.slot_bits / count) + 1)
            if bits in _PLAIN_BITS:
                found.append(_parameters(plan, Ring(degree=degree, primes=primes), bits, count))
    fitting = [parameters for parameters in found if parameters.spare_bits >= 0]
    if not fitting:
        raise ProtocolError(
            f"the sum needs {plan.slot_bits} bits (lcm(1..{plan.largest_count}) alone has {plan.common.bit_length()}), "
            "more than any ring here holds; cap the records per user, for instance at 100, or use Paillier"
        )
    return min(fitting, key=lambda parameters: parameters.milliseconds)


def _parameters(plan: WeightingPlan, ring: Ring, bits: int, count: int) -> RlweParameters:
    longest = (plan.norm_limit + 1) * plan.count_limit  # one more for the check coordinate
    scale = bits - 1 + math.log2(longest)
    noise = scale + math.log2(_DEVIATIONS * math.sqrt(plan.users) + plan.users)
    wide = _DEVIATIONS * math.sqrt(plan.users * ring.degree) + plan.users
    norm = scale + math.log2(math.sqrt(count) * wide)
    flood = math.ceil(norm + STATISTICAL_BITS + math.log2(1.1))
    shown = math.log2(plan.silos) + flood + math.log2(1.5 + 2.0 ** (noise - flood))
    return RlweParameters(
        ring=ring,
        plain_bits=bits,
        plain_count=count,
        noise_bits=noise,
        flood_bits=flood,
        norm_bits=norm,
        spare_bits=ring.bits - 1 - bits - shown,
        milliseconds=(_TRANSFORM + _MULTIPLY * count) * ring.primes / 3,
    )


class RlweKeyHolder:
    """The server's side: encrypts weights, adds the silos' ciphertexts up, opens the sum.

    Args:
        plan: what all parties agreed on.

    Raises:
        ProtocolError: no parameters hold the plan's sums.
    """

    def __init__(self, plan: WeightingPlan) -> None:
        self._plan = plan
        self.parameters = choose_parameters(plan)
        self._primes = self.parameters.plain_primes
        self._modulus = self.parameters.modulus
        plan.require(self._modulus, "the product of the plaintext primes")
        self._keys = [RlweKey(self.parameters.ring, prime) for prime in self._primes]
        self._sums: list[Ciphertext] = []

    @property
    def modulus(self) -> int:
        """The plaintext modulus t_1 ... t_k."""
        return self._modulus

    @property
    def public(self) -> bytes:
        """The public keys, one per plaintext prime."""
        return b"".join(key.public for key in self._keys)

    def encrypt(self, weights: Sequence[int]) -> list[bytes]:
        """Return fresh ciphertexts of every number modulo each plaintext prime."""
        keys = list(zip(self._keys, self._primes, strict=True))
        return [b"".join(key.encrypt(weight % prime).tobytes() for key, prime in keys) for weight in weights]

    def begin(self) -> None:
        """Forget the sum of an earlier attempt."""
        self._sums = []

    def add(self, blocks: Sequence[bytes]) -> None:
        """Add one silo's ciphertexts to the sum.

        Raises:
            ProtocolError: a wrong number of ciphertexts, or one outside the ring.
        """
        ring = self.parameters.ring
        expected = _block_count(self._plan, ring) * len(self._primes)
        if len(blocks) != expected:
            raise ProtocolError(f"sent {len(blocks)} ciphertexts instead of {expected}")
        received = _ciphertexts(ring, blocks)
        if self._sums:
            received = [ring.add(a, b) for a, b in zip(self._sums, received, strict=True)]
        self._sums = received

    def open(self, own_masks: Sequence[bytes]) -> tuple[Float64[np.ndarray, " d"], int]:
        """Return the weighted noisy sum in grid units, and the integer of the check coordinate.

        Args:
            own_masks: the seeds of all silos' own masks.

        Raises:
            ProtocolError: a decrypted value that no honest sum can have.
        """
        plan, count = self._plan, len(self._primes)
        length = _block_count(plan, self.parameters.ring) * self.parameters.ring.degree
        streams = [KeyedStream(seed) for seed in own_masks]
        residues: list[Residues] = []
        for index, (key, prime) in enumerate(zip(self._keys, self._primes, strict=True)):
            values = np.concatenate([key.decrypt(block) for block in self._sums[index::count]])
            for stream in streams:
                values = (values - keyed_residues(stream, prime, length)) % prime
            residues.append(values[: plan.coordinates])
        offset = plan.value_limit * plan.common
        shifted = [(r[:-1] + offset % prime) % prime for r, prime in zip(residues, self._primes, strict=True)]
        values = quotients(mixed_radix(shifted, self._primes), self._primes, plan.common)
        if values.max() > 2 * plan.value_limit * (1 + 1e-9):
            raise ProtocolError(
                "a decrypted coordinate is out of range: a user has more than "
                f"N_max = {plan.largest_count} records, or a silo broke its limits"
            )
        return values - plan.value_limit, self._check([int(r[-1]) for r in residues])

    def _check(self, residues: list[int]) -> int:
        value = sum(
            residue * (self._modulus // prime) * pow(self._modulus // prime, -1, prime)
            for residue, prime in zip(residues, self._primes, strict=True)
        )
        value %= self._modulus
        return value - self._modulus if 2 * value > self._modulus else value


class RlweEvaluator:
    """A silo's side: computes its encrypted weighted sum without learning a weight.

    Args:
        plan: what all parties agreed on; ring and primes follow from it.
        public: the public keys as the server sent them.

    Raises:
        ProtocolError: no keys of this ring.
    """

    def __init__(self, plan: WeightingPlan, public: bytes) -> None:
        self._plan = plan
        self.parameters = choose_parameters(plan)
        ring = self.parameters.ring
        self._primes = self.parameters.plain_primes
        self._modulus = self.parameters.modulus
        if len(public) % len(self._primes):
            raise ProtocolError("the server's public keys do not fit the plan's ring")
        size = len(public) // len(self._primes)
        try:
            self._keys = [
                RlwePublicKey(ring, prime, public[index * size : (index + 1) * size])
                for index, prime in enumerate(self._primes)
            ]
        except CryptoError as error:
            raise ProtocolError(f"the server's public key was refused: {error}") from error
        self._engine = RingEngine(ring, self._primes[0])
        self._bases: list[list[Any]] = []

    @property
    def modulus(self) -> int:
        """The plaintext modulus t_1 ... t_k."""
        return self._modulus

    def load(self, weights: Sequence[bytes], multipliers: Sequence[int]) -> None:
        """Take the encrypted weights of this silo's users; they serve until the next call.

        Args:
            weights: Enc(B_u) per user, one ciphertext per plaintext prime.
            multipliers: r_u C modulo the plaintext modulus per user.

        Raises:
            ProtocolError: a ciphertext outside the ring.
        """
        ring = self.parameters.ring
        size = ring.ciphertext_bytes
        self._bases = [[] for _ in self._primes]
        for weight, multiplier in zip(weights, multipliers, strict=True):
            if len(weight) != size * len(self._primes):
                raise ProtocolError("the server sent an encrypted weight of another size")
            parts = _ciphertexts(
                ring, [weight[first : first + size] for first in range(0, len(weight), size)]
            )
            for series, part, prime in zip(self._bases, parts, self._primes, strict=True):
                factor = multiplier % prime
                factor -= prime if 2 * factor > prime else 0
                series.append(self._engine.prepare(ring.scale(part, factor)))

    def encrypt_sum(
        self,
        contributions: Contributions,
        counts: Int64[np.ndarray, " m"],
        noise: Int64[np.ndarray, " c"],
        mask_keys: MaskKeys,
        own_mask: bytes,
        dither: bytes,
    ) -> list[bytes]:
        """Return the silo's ciphertexts, flooded; see :mod:`fedveil.protocols.weighting.private_weighting`."""
        ring, plan = self.parameters.ring, self._plan
        plaintexts = self._plaintexts(noise, mask_keys, own_mask, dither)
        blocks = []
        for first in range(0, _block_count(plan, ring) * ring.degree, ring.degree):
            last = min(first + ring.degree, plan.coordinates)
            polynomials = contributions[:, first : min(last, plan.length)] * counts[:, None]
            if last == plan.coordinates:
                polynomials = np.concatenate([polynomials, counts[:, None]], axis=1)
            sums = self._engine.weighted_sums(self._bases, polynomials)
            for total, key, plaintext in zip(sums, self._keys, plaintexts, strict=True):
                added = ring.add(total, key.encrypt(plaintext[first : first + ring.degree]))
                blocks.append(ring.flood(added, self.parameters.flood_bits).tobytes())
        return blocks

    def _plaintexts(
        self, noise: Int64[np.ndarray, " c"], mask_keys: MaskKeys, own_mask: bytes, dither: bytes
    ) -> list[Residues]:
        """Return, for each prime, C z + v + masks on all coordinates and on the padding of the last block."""
        plan, ring = self._plan, self.parameters.ring
        length = _block_count(plan, ring) * ring.degree
        dithers = random_below(plan.common, plan.length, KeyedStream(dither).bytes)
        own = KeyedStream(own_mask)
        pairwise = [(KeyedStream(key), adds) for key, adds in mask_keys]
        plaintexts = []
        for prime in self._primes:
            values = np.zeros(length, dtype=np.int64)
            values[: plan.coordinates] = times(noise % prime, plan.common, prime)
            values[: plan.length] += from_limbs(dithers, prime) - plan.common // 2 % prime
            values += keyed_residues(own, prime, length)
            for stream, adds in pairwise:
                mask = keyed_residues(stream, prime, length)
                values += mask if adds else -mask
            plaintexts.append(values % prime)
        return plaintexts


def _block_count(plan: WeightingPlan, ring: Ring) -> int:
    return math.ceil(plan.coordinates / ring.degree)


def _ciphertexts(ring: Ring, blocks: Sequence[bytes]) -> list[Ciphertext]:
    try:
        return [ring.decode(block) for block in blocks]
    except CryptoError as error:
        raise ProtocolError(f"sent a ciphertext that was refused: {error}") from error

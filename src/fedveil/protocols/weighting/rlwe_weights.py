"""Compute private weighting of deep models under ring-LWE: key holder and evaluator.

The plaintext modulus is a product of primes t_1 .. t_k. Enc(B_u) is one constant polynomial per prime. A silo
multiplies it by (r_u C mod t_i), which encrypts C / N_u mod t_i, and then by polynomials whose N coefficients are the
short numbers n_{s,u} y_{s,u,j}. One transformed polynomial serves all primes.

Claim: the ciphertexts of a silo do not disclose how they were computed, not even to the key holder. The claim rests
on the RLWE assumption and holds up to a statistical distance:

* c_1 is hidden by a fresh public-key encryption (of noise and masks), an RLWE sample whose secret the key holder does
  not know.
* The noise that decryption shows is hidden by a flood. It is large enough for a statistical distance of 2^-48,
  jointly over all coefficients of a message (:func:`shown_distance`).

Noise of a weighted sum: fresh noise per coefficient, times a constant of at most t/2, times polynomials n y, summed
over |U| users. All blocks of one user's n y together have an l2 norm of at most L, the largest contribution times the
largest count. Fresh noise is sub-Gaussian with a parameter below 3.8. (In SEAL it is the sum of 42 bits less its
mean, with parameter 3.25, or rounded normal numbers of deviation 3.2.) Ten times this parameter, and the rounding of
the constant, give at most

    B = t/2 · L · (38 sqrt(|U|) + |U|)                    in one coefficient, and at most
    E = t/2 · L · sqrt(k) · (38 sqrt(|U| N) + |U|)        in l2 over all coefficients, primes and blocks.

The number of blocks does not enter E, because the blocks share L. The flood is the sum of three uniform numbers of
F >= 1.1 · 2^48 E values each (:meth:`fedveil.crypto.rlwe.Ring.flood`). Decryption is right iff
|S| (3F/2 + B) < q / 2t. :func:`choose_parameters` takes the cheapest ring for which this inequality holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.crypto.rlwe import (
    Ciphertext,
    Residues,
    Ring,
    RingEngine,
    RlweKey,
    RlwePublicKey,
    from_limbs,
    keyed_residues,
    mixed_radix,
    quotients,
    random_below,
    times,
)
from fedveil.errors import CryptoError, ProtocolError
from fedveil.protocols.weighting.paillier_weights import MaskKeys
from fedveil.protocols.weighting.plan import Contributions, WeightingPlan
from fedveil.randomness import KeyedStream

STATISTICAL_BITS: Final = 48
_TAIL_BITS: Final = 68
_DEVIATIONS: Final = 38.0  # ten times 3.8, the sub-Gaussian parameter of fresh noise

_RINGS: Final = ((8192, 3), (16384, 4), (16384, 5), (16384, 6))
_MOST_PRIMES: Final = 16
_PLAIN_BITS: Final = range(30, 59)
_TRANSFORM, _MULTIPLY = 0.47, 0.20  # measured milliseconds of one operation for N = 8192 and 3 primes


@dataclass(frozen=True, kw_only=True)
class RlweParameters:
    """Ring and plaintext primes for one plan.

    Attributes:
        ring: ring of the ciphertexts.
        plain_bits: number of bits of each plaintext prime.
        plain_count: k, number of plaintext primes.
        noise_bits: log2 of B, the bound of the noise of one silo's weighted sum in one coefficient.
        norm_bits: log2 of E, the bound of the l2 norm of this noise over a whole message.
        flood_bits: log2 of F, the number of values of each of the flood's three uniform numbers.
        spare_bits: margin, in bits, between the noise of the sum over all silos and the limit of right decryption.
        milliseconds: estimated time per user and 8192 coordinates.
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
        """Plaintext primes t_1 .. t_k."""
        return self.ring.plain_primes(self.plain_bits, self.plain_count)

    @property
    def modulus(self) -> int:
        """Plaintext modulus, the product of the plaintext primes."""
        return math.prod(self.plain_primes)


def shown_distance(messages: int) -> float:
    """Bound the statistical distance between the decryption noise of m messages and pure floods.

    The distance is at most sqrt(m) 2^-48 + m 2^-68 for m messages of one run, whatever is released between them.

    First term: let p be the distribution of a flood and p' the distribution shifted by noise of length E. Their
    square roots differ by at most h = 2^-48 in l2 (``Ring.flood``), so their inner product is 1 - h^2/2. Inner
    products multiply over successive messages, so the squares h^2 add up. The statistical distance is at most the
    square root of their sum.

    Second term: the noise of a message is longer than E. Let A be the linear map from fresh noise to the noise of a
    message, with ||A||_F^2 <= E^2 / 10^2 in units of the sub-Gaussian parameter. Then
    P(||A e||^2 > 100 ||A||_F^2) <= min_x e^(-100 x) (1 - 2 x)^(-1/2) = 10 e^(-99/2) < 2^-68.
    """
    return math.sqrt(messages) * 2.0**-STATISTICAL_BITS + messages * 2.0**-_TAIL_BITS


def choose_parameters(plan: WeightingPlan) -> RlweParameters:
    """Return the cheapest ring and primes that hold the plan's sums at 128-bit security.

    Raises:
        ProtocolError: no ring holds the sums; the message names the settings to change.
    """
    candidates = []
    for degree, primes in _RINGS:
        for count in range(1, _MOST_PRIMES + 1):
            bits = max(_PLAIN_BITS[0], plan.exponent_bits + 2, math.ceil(plan.slot_bits / count) + 1)
            if bits in _PLAIN_BITS:
                candidates.append(_parameters(plan, Ring(degree=degree, primes=primes), bits, count))
    fitting = [parameters for parameters in candidates if parameters.spare_bits >= 0]
    if not fitting:
        raise ProtocolError(
            f"the sum needs {plan.slot_bits} bits (C alone, for N_max = {plan.largest_count}, has "
            f"{plan.common.bit_length()}), "
            "more than any ring here holds; cap the records per user, for instance at 100, or use Paillier"
        )
    return min(fitting, key=lambda parameters: parameters.milliseconds)


def _parameters(plan: WeightingPlan, ring: Ring, bits: int, count: int) -> RlweParameters:
    longest = (plan.norm_limit + 1) * plan.count_limit  # L; 1 more for the check coordinate
    scale = bits - 1 + math.log2(longest)
    # log2 of B = t/2 L (38 sqrt(|U|) + |U|), E = t/2 L sqrt(k) (38 sqrt(|U| N) + |U|), F = 1.1 2^48 E, and the noise
    # of the sum |S| (3F/2 + B) = |S| F (1.5 + B/F); it must stay below q / 2t.
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
    """Server's side: it encrypts weights, adds the silos' ciphertexts and decrypts the sum.

    Args:
        plan: public numbers of the run.

    Raises:
        ProtocolError: no ring holds the plan's sums.
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
        """Plaintext modulus, the product t_1 ... t_k."""
        return self._modulus

    @property
    def public(self) -> bytes:
        """Public keys for the silos, one per plaintext prime."""
        return b"".join(key.public for key in self._keys)

    def encrypt(self, weights: Sequence[int]) -> list[bytes]:
        """Return fresh ciphertexts of every number, one per plaintext prime, concatenated."""
        keys = list(zip(self._keys, self._primes, strict=True))
        return [b"".join(key.encrypt(weight % prime).tobytes() for key, prime in keys) for weight in weights]

    def begin(self) -> None:
        """Discard the sum of an earlier attempt."""
        self._sums = []

    def add(self, blocks: Sequence[bytes]) -> None:
        """Add one silo's ciphertexts to the sum.

        Raises:
            ProtocolError: a wrong number of ciphertexts, or a ciphertext outside the ring.
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
        """Decrypt the weighted noisy sum in grid units, and the integer of the check coordinate.

        Args:
            own_masks: seeds of all silos' own masks.

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
        # T_j + C value_limit >= 0: its quotient by C in mixed radix needs no sign and no big integers.
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
        # Chinese remainder theorem, then the representative between -t/2 and t/2
        value = sum(
            residue * (self._modulus // prime) * pow(self._modulus // prime, -1, prime)
            for residue, prime in zip(residues, self._primes, strict=True)
        )
        value %= self._modulus
        return value - self._modulus if 2 * value > self._modulus else value


class RlweEvaluator:
    """Silo's side: it computes its encrypted weighted sum without learning a weight.

    Args:
        plan: public numbers of the run; ring and primes follow from them.
        public: public keys as the server sent them.

    Raises:
        ProtocolError: the bytes are not public keys of this ring.
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
        """Plaintext modulus, the product t_1 ... t_k."""
        return self._modulus

    def load(self, weights: Sequence[bytes], multipliers: Sequence[int]) -> None:
        """Load the encrypted weights of this silo's users; they serve until the next call.

        Args:
            weights: Enc(B_u) for each user, one ciphertext per plaintext prime.
            multipliers: r_u C modulo the plaintext modulus for each user.

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
                # The centred representative, at most t/2 in absolute value, is the factor in the noise bounds B and
                # E.
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
        """Return the silo's flooded ciphertexts; see :meth:`private_weighting.Evaluator.encrypt_sum`."""
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
                # The fresh public-key encryption hides c_1, the flood hides the noise of c_0 from the key holder.
                added = ring.add(total, key.encrypt(plaintext[first : first + ring.degree]))
                blocks.append(ring.flood(added, self.parameters.flood_bits).tobytes())
        return blocks

    def _plaintexts(
        self, noise: Int64[np.ndarray, " c"], mask_keys: MaskKeys, own_mask: bytes, dither: bytes
    ) -> list[Residues]:
        """Return C z + v + masks modulo each prime, for all coordinates and for the padding of the last block.

        The masks cover the padding as well, so that the server sees no number that is not uniform there.
        """
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

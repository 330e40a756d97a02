"""The ciphers of private weighting: each makes the server's side and a silo's for the numbers that all agreed on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator, PaillierKeyHolder, choose_layout
from fedveil.protocols.weighting.plan import CipherSizes, WeightingPlan
from fedveil.protocols.weighting.private_weighting import Evaluator, KeyHolder
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder, choose_parameters


class Cipher(Protocol):
    """An additively homomorphic cipher."""

    def sizes(self, plan: WeightingPlan) -> CipherSizes:
        """Return how many bytes its messages have.

        Raises:
            ProtocolError: sums that it does not hold.
        """
        ...

    def holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return a server's side, with new keys."""
        ...

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's side for the server's public key."""
        ...


@dataclass(frozen=True)
class Paillier:
    """Paillier's cipher.

    Attributes:
        bits: of the modulus.
    """

    bits: int

    def sizes(self, plan: WeightingPlan) -> CipherSizes:
        """Return what numbers modulo n and n^2 take."""
        number, slots = self.bits // 8, choose_layout(plan, self.bits).slots
        blocks = math.ceil(plan.coordinates / slots)
        return CipherSizes(
            key=number, number=number, weight=2 * number, ciphertext=2 * number, ciphertexts=blocks
        )

    def holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return a server's side, with a new modulus."""
        return PaillierKeyHolder(plan, PaillierPrivateKey.generate(self.bits))

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's side for the server's modulus."""
        return PaillierEvaluator(plan, public, bits=self.bits)


@dataclass(frozen=True)
class Rlwe:
    """Ring-LWE at 128 bits; ring and primes follow from the plan."""

    def sizes(self, plan: WeightingPlan) -> CipherSizes:
        """Return what polynomials of the ring take."""
        parameters = choose_parameters(plan)
        size, primes = parameters.ring.ciphertext_bytes, parameters.plain_count
        return CipherSizes(
            key=size * primes,
            number=(parameters.plain_bits * primes + 7) // 8,
            weight=size * primes,
            ciphertext=size,
            ciphertexts=math.ceil(plan.coordinates / parameters.ring.degree) * primes,
        )

    def holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return a server's side, with new keys."""
        return RlweKeyHolder(plan)

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's side for the server's public keys."""
        return RlweEvaluator(plan, public)

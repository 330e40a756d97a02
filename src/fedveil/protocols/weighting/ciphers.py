"""Ciphers of private weighting: each creates the key holder and the evaluators of a public plan."""

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
        """Return the sizes of the cipher's messages.

        Raises:
            ProtocolError: the cipher cannot hold the sums of the plan.
        """
        ...

    def holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return the server's key holder, with fresh keys."""
        ...

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's evaluator for the server's public key."""
        ...


@dataclass(frozen=True)
class Paillier:
    """Paillier's cipher.

    Attributes:
        bits: number of bits of the modulus n.
    """

    bits: int

    def sizes(self, plan: WeightingPlan) -> CipherSizes:
        """Return the sizes of the messages: numbers modulo n, and ciphertexts modulo n^2."""
        number, slots = self.bits // 8, choose_layout(plan, self.bits).slots
        blocks = math.ceil(plan.coordinates / slots)
        return CipherSizes(
            key=number, number=number, weight=2 * number, ciphertext=2 * number, ciphertexts=blocks
        )

    def holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return the server's key holder, with a fresh modulus."""
        return PaillierKeyHolder(plan, PaillierPrivateKey.generate(self.bits))

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's evaluator for the server's modulus."""
        return PaillierEvaluator(plan, public, bits=self.bits)


@dataclass(frozen=True)
class Rlwe:
    """Ring-LWE cipher at 128-bit security; ring and primes follow from the plan."""

    def sizes(self, plan: WeightingPlan) -> CipherSizes:
        """Return the sizes of the messages: polynomials of the ring, for each plaintext prime."""
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
        """Return the server's key holder, with fresh keys."""
        return RlweKeyHolder(plan)

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's evaluator for the server's public keys."""
        return RlweEvaluator(plan, public)

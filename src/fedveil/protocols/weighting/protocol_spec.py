"""Specify private weighting as a protocol: contributions in, the server's weighted sum out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Final, Protocol

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.crypto.oblivious_transfer import POINT_BYTES
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.protocols.messages import Announcement, Directory, OwnMask, RevealRequest
from fedveil.protocols.protocol import (
    ClientContext,
    ClientInputs,
    ClientProtocol,
    Exchanges,
    ExchangeStep,
    ServerProtocol,
    Shape,
)
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator, PaillierKeyHolder, choose_layout
from fedveil.protocols.weighting.plan import (
    BlindedHistogram,
    CipherSizes,
    EncryptedSum,
    EncryptedWeights,
    Evaluator,
    KeyHolder,
    Participants,
    SealedSeed,
    TransferAnswers,
    TransferOffer,
    TransferRequests,
    WeightedInputs,
    WeightingKey,
    WeightingPlan,
)
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder, choose_parameters
from fedveil.protocols.weighting.server import WeightingServer
from fedveil.protocols.weighting.silo import WeightingSilo

# --- ciphers ---


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


# --- the protocol ---

Units = Float64[np.ndarray, " d"]

_FRAME_BYTES: Final = 512
"""Upper bound of the overhead of one message, in bytes: envelope, counts, and the seeds and keys of the setup."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateWeightingSpec:
    """Public specification of private weighting, together with the private counts of each client.

    Attributes:
        plan: public numbers of the run.
        counts: (|S|, |U|) int64, n_{s,u}; row s is passed only to client s. In a federation a silo knows only its own
            row, and the coordinator knows none: the other rows have no meaning there.
        cipher: additively homomorphic cipher of the run.
        grid: step of contributions and noise, a power of two, in the unit of the update.

    Raises:
        ProtocolError: sums that the cipher cannot hold.
    """

    plan: WeightingPlan
    counts: Int64[np.ndarray, "silos users"] = field(repr=False)
    cipher: Cipher
    grid: float = 1.0
    result_at_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check, before any training, that the cipher can hold the sums."""
        _ = self.sizes

    @cached_property
    def sizes(self) -> CipherSizes:
        """Sizes of the cipher's messages in bytes."""
        return self.cipher.sizes(self.plan)

    @property
    def clients(self) -> int:
        """Number of silos."""
        return self.plan.silos

    @property
    def quorum(self) -> int:
        """Number of all silos: the weights depend on the records of every silo."""
        return self.plan.silos

    @property
    def repeatable(self) -> bool:
        """Return whether a repeated round has the same users; oblivious transfer samples users per session."""
        return not self.plan.places

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Most bytes of one exchange: from a client (sum, counts, requests), to a client (weights, key)."""
        plan, size = self.plan, self.sizes
        counts = plan.users * (size.number + 8)
        requests = plan.users * POINT_BYTES * bool(plan.places)
        up = max(size.ciphertexts * (size.ciphertext + 8), counts, requests)
        weights = plan.users * max(1, plan.places) * (size.weight + 64)
        frames = _FRAME_BYTES * (plan.silos + 2)
        return up + frames, max(weights, size.key) + frames

    def exchanges(self, client: int) -> Exchanges:
        """Return the exchanges of a session; client 0 seals the blinding seed, the other clients receive it."""
        plan = self.plan
        keys: Shape = (WeightingKey, Directory)
        setup: tuple[ExchangeStep, ...] = (
            ExchangeStep(keys, ()),
            ExchangeStep((SealedSeed,), (BlindedHistogram,)),
        )
        if client == 0:
            setup = (ExchangeStep(keys, (SealedSeed,) * (plan.silos - 1) + (BlindedHistogram,)),)
        reveal = ExchangeStep((RevealRequest,), (OwnMask,))
        following = (ExchangeStep((TransferAnswers,), (EncryptedSum,)), reveal) if plan.places else (reveal,)
        return Exchanges(
            on_join=(Announcement,),
            setup=setup,
            session_start=(Participants,),
            round_start=(TransferOffer if plan.places else EncryptedWeights,),
            answers=lambda _: ((TransferRequests if plan.places else EncryptedSum,), following),
        )

    def client_input(self, inputs: ClientInputs, client: int) -> WeightedInputs:
        """Return a client's contributions and noise in grid units, exact as multiples of the grid."""
        # int32 halves the memory of m x d contributions; norm_limit bounds every coordinate.
        dtype = np.int32 if self.plan.norm_limit < 2**31 else np.int64
        return WeightedInputs(
            contributions=(inputs.contributions(client) / self.grid).astype(dtype),
            noise=(inputs.noise_share(client) / self.grid).astype(np.int64),
            dither=inputs.dither_key(client),
        )

    def decode_sum(self, result: Units) -> Units:
        """Convert the weighted sum from grid units to the unit of the update."""
        return np.asarray(result * self.grid)

    def pack(self, client_input: WeightedInputs) -> bytes:
        """Return a client's input as bytes."""
        return client_input.encode()

    def unpack(self, data: bytes) -> WeightedInputs:
        """Return the input that :meth:`pack` encoded."""
        return WeightedInputs.decode(data)

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end of a session, with a fresh key of the cipher."""
        return WeightingServer(self.plan, run, self.cipher.holder(self.plan))

    def client(self, context: ClientContext) -> ClientProtocol[WeightedInputs, Units]:
        """Return a client's end of a session.

        Raises:
            ProtocolError: the plan does not allow the client's counts; the error names the silo.
        """
        return WeightingSilo(
            self.plan, context, counts=self.counts[context.number], evaluator=self.cipher.evaluator
        )

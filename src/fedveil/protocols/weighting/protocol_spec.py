"""Private weighting as a protocol: contributions of weight 1 in, the server's weighted sum out, in grid units."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.crypto.oblivious_transfer import POINT_BYTES
from fedveil.protocols.exchanges import Exchanges, ExchangeStep, Shape
from fedveil.protocols.messages import Announcement, Directory, OwnMask, RevealRequest
from fedveil.protocols.protocol import ClientContext, ClientInputs, ClientProtocol, ServerProtocol
from fedveil.protocols.weighting.ciphers import Cipher
from fedveil.protocols.weighting.inputs import WeightedInputs
from fedveil.protocols.weighting.messages import (
    BlindedHistogram,
    EncryptedSum,
    EncryptedWeights,
    Participants,
    SealedSeed,
    TransferAnswers,
    TransferOffer,
    TransferRequests,
    WeightingKey,
)
from fedveil.protocols.weighting.plan import CipherSizes, WeightingPlan
from fedveil.protocols.weighting.server import WeightingServer
from fedveil.protocols.weighting.silo import WeightingSilo

Units = Float64[np.ndarray, " d"]

_FRAME_BYTES: Final = 512  # of one message: its envelope, counts, and the seeds and keys of the setup


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateWeightingSpec:
    """What the parties of a run under private weighting agree on, and what each client alone knows: its counts.

    Attributes:
        plan: the public numbers.
        counts: (|S|, |U|) n_{s,u}; row s is given to client s alone. A silo of a federation has its own row, and the
            coordinator none: what it has means nothing.
        cipher: which one.
        grid: the step of contributions and noise, a power of two, in the unit of the update.

    Raises:
        ProtocolError: sums that the cipher does not hold.
    """

    plan: WeightingPlan
    counts: Int64[np.ndarray, "silos users"] = field(repr=False)
    cipher: Cipher
    grid: float = 1.0
    result_at_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse before any training what the cipher would refuse."""
        _ = self.sizes

    @cached_property
    def sizes(self) -> CipherSizes:
        """How many bytes the cipher's messages have."""
        return self.cipher.sizes(self.plan)

    @property
    def clients(self) -> int:
        """All silos."""
        return self.plan.silos

    @property
    def quorum(self) -> int:
        """All silos: the weights of the others depend on the records of who is missing."""
        return self.plan.silos

    @property
    def repeatable(self) -> bool:
        """Whether the same users are drawn again: by oblivious transfer they are drawn anew in every session."""
        return not self.plan.places

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Ciphertexts of a sum, blinded counts or requests; encrypted weights, or the public key."""
        plan, size = self.plan, self.sizes
        counts = plan.users * (size.number + 8)
        requests = plan.users * POINT_BYTES * bool(plan.places)
        up = max(size.ciphertexts * (size.ciphertext + 8), counts, requests)
        weights = plan.users * max(1, plan.places) * (size.weight + 64)
        frames = _FRAME_BYTES * (plan.silos + 2)
        return up + frames, max(weights, size.key) + frames

    def exchanges(self, client: int) -> Exchanges:
        """Return the messages: client 0 seals seeds, which the others are sent."""
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
            joined=(Announcement,),
            setup=setup,
            first=(Participants,),
            begin=(TransferOffer if plan.places else EncryptedWeights,),
            played=lambda _: ((TransferRequests if plan.places else EncryptedSum,), following),
        )

    def client_input(self, inputs: ClientInputs, client: int) -> WeightedInputs:
        """Return a client's contributions and noise in grid units; exact, because they are multiples of the grid."""
        dtype = np.int32 if self.plan.norm_limit < 2**31 else np.int64
        return WeightedInputs(
            contributions=(inputs.contributions(client) / self.grid).astype(dtype),
            noise=(inputs.noise_share(client) / self.grid).astype(np.int64),
            dither=inputs.dither_key(client),
        )

    def decode_sum(self, result: Units) -> Units:
        """Return the weighted sum from units of the grid."""
        return np.asarray(result * self.grid)

    def pack(self, given: WeightedInputs) -> bytes:
        """Return what a client gives as bytes."""
        return given.encode()

    def unpack(self, data: bytes) -> WeightedInputs:
        """Return what :meth:`pack` was given."""
        return WeightedInputs.decode(data)

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end, with a new key of the cipher."""
        return WeightingServer(self.plan, run, self.cipher.holder(self.plan))

    def client(self, context: ClientContext) -> ClientProtocol[WeightedInputs, Units]:
        """Return a client's end.

        Raises:
            ProtocolError: counts that the plan does not allow, naming the silo.
        """
        return WeightingSilo(
            self.plan, context, counts=self.counts[context.number], evaluator=self.cipher.evaluator
        )

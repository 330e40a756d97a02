"""Private weighting as a protocol: contributions of weight 1 in, the server's weighted sum out, in grid units."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.crypto.agreement import RUN_BYTES, RoundId
from fedveil.crypto.transfer import POINT_BYTES
from fedveil.protection.ends import ClientEnd
from fedveil.protection.errors import ProtocolError
from fedveil.protection.exchanges import Exchanges, Shape, Step
from fedveil.protection.messages import Announcement, Directory, OwnMask, RevealRequest
from fedveil.protection.protocol import ClientProtocol, Place, ServerProtocol
from fedveil.protection.weighting.ciphers import Cipher
from fedveil.protection.weighting.messages import (
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
from fedveil.protection.weighting.plan import CipherSizes, WeightingPlan
from fedveil.protection.weighting.private_weighting import Contributions
from fedveil.protection.weighting.server import WeightingServer
from fedveil.protection.weighting.silo import SEED_BYTES, WeightingSilo
from fedveil.protection.wire import Reader, Writer
from fedveil.protection.work import Work

Units = Float64[np.ndarray, " d"]

_FRAME_BYTES: Final = 512  # of one message: its envelope, counts, and the seeds and keys of the setup


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedGiven:
    """What a client puts into a round.

    Attributes:
        contributions: (m, d) clipped contributions of weight 1 of the users it has records of, ascending; grid units.
        noise: (d,) its exact integer share of the noise, in grid units.
        dither: 32-byte key of its share of the remainders modulo C; None: a new one.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes | None = None

    def encode(self) -> bytes:
        """Return the bytes to keep: the same contributions, noise and remainders for the same round."""
        users, length = self.contributions.shape
        size = self.contributions.dtype.itemsize
        assert (
            self.dither is not None
        )  # two remainders of one sum would tell more of it than the noise covers
        head = Writer().number(users, 4).number(length, 4).number(size, 1)
        numbers = self.contributions.astype(f"<i{size}").tobytes() + self.noise.astype("<i8").tobytes()
        return head.bytes() + numbers + self.dither

    @classmethod
    def decode(cls, data: bytes) -> WeightedGiven:
        """Return what :meth:`encode` kept.

        Raises:
            ProtocolError: the bytes are none that it made.
        """
        reader = Reader(data)
        users, length, size = reader.number(4), reader.number(4), reader.number(1)
        if size not in (4, 8):
            raise ProtocolError(f"contributions are numbers of 4 or 8 bytes, not of {size}")
        rows = np.frombuffer(reader.fixed(users * length * size), dtype=f"<i{size}").reshape(users, length)
        noise = np.frombuffer(reader.fixed(8 * length), dtype="<i8")
        dither = reader.fixed(SEED_BYTES)
        reader.finish()
        return cls(contributions=rows, noise=noise, dither=dither)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedSums:
    """What the parties of a run under private weighting agree on, and what each client alone knows: its counts.

    Attributes:
        plan: the public numbers; every session gives it a run of its own.
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
    def least(self) -> int:
        """All silos: the weights of the others depend on the records of who is missing."""
        return self.plan.silos

    @property
    def repeats(self) -> bool:
        """Whether the same users are drawn again: by oblivious transfer they are drawn anew in every session."""
        return not self.plan.places

    @property
    def largest(self) -> tuple[int, int]:
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
        setup: tuple[Step, ...] = (Step(keys, ()), Step((SealedSeed,), (BlindedHistogram,)))
        if client == 0:
            setup = (Step(keys, (SealedSeed,) * (plan.silos - 1) + (BlindedHistogram,)),)
        reveal = Step((RevealRequest,), (OwnMask,))
        following = (Step((TransferAnswers,), (EncryptedSum,)), reveal) if plan.places else (reveal,)
        return Exchanges(
            joined=(Announcement,),
            setup=setup,
            first=(Participants,),
            begin=(TransferOffer if plan.places else EncryptedWeights,),
            played=lambda _: ((TransferRequests if plan.places else EncryptedSum,), following),
        )

    def given(self, work: Work, client: int) -> WeightedGiven:
        """Return a client's contributions and noise in grid units; exact, because they are multiples of the grid."""
        dtype = np.int32 if self.plan.norm_limit < 2**31 else np.int64
        return WeightedGiven(
            contributions=(work.contributions(client) / self.grid).astype(dtype),
            noise=(work.share(client) / self.grid).astype(np.int64),
            dither=work.dither(client),
        )

    def vector(self, result: Units) -> Units:
        """Return the weighted sum from units of the grid."""
        return np.asarray(result * self.grid)

    def pack(self, given: WeightedGiven) -> bytes:
        """Return what a client gives as bytes."""
        return given.encode()

    def unpack(self, data: bytes) -> WeightedGiven:
        """Return what :meth:`pack` was given."""
        return WeightedGiven.decode(data)

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end, with a new key of the cipher."""
        plan = replace(self.plan, run=run)
        return WeightingServer(plan, self.cipher.holder(plan))

    def client(self, place: Place) -> ClientProtocol[WeightedGiven, Units]:
        """Return a client's end.

        Raises:
            ProtocolError: counts that the plan does not allow, naming the silo.
        """
        counts = self.counts[place.number]
        silo = WeightingSilo(
            replace(self.plan, run=place.run),
            index=place.number,
            identity=place.identity,
            roster=place.roster,
            counts=counts,
            evaluator=self.cipher.evaluator,
        )
        public = repr(replace(self.plan, run=bytes(RUN_BYTES))).encode()
        return WeightedClient(place, silo, sha256(public + counts.astype("<i8").tobytes()).digest())


class WeightedClient(ClientEnd[WeightedGiven, Units]):
    """A client's end.

    Args:
        place: the client's in the session.
        silo: the state machine.
        binding: of the public numbers and the client's own counts.
    """

    def __init__(self, place: Place, silo: WeightingSilo, binding: bytes) -> None:
        super().__init__(place, silo)
        self._binding = binding

    @property
    def binding(self) -> bytes:
        """A digest of the public numbers and of the client's own counts, by which contributions are weighted."""
        return self._binding

    def _send(self, given: WeightedGiven, round_id: RoundId) -> list[bytes]:
        return [self._silo.contribute(given.contributions, given.noise, given.dither)]

"""Private weighting as silo and coordinator of a federation use it: one session each, contributions in, their sum out.

    session:  Announcement -> key of the cipher, directory -> (silo 0: sealed seeds) -> blinded counts -> participants
    round:    encrypted weights, task -> encrypted sum -> reveal -> own mask
              or, with oblivious transfer: offer, task -> requests -> answers -> encrypted sum -> reveal -> own mask

Keys and blinds belong to one session. What a silo puts into a round does not: contributions, share of the noise and
the key of the remainders are stored before anything leaves, and given again for the same round, so that every session
in which the round is asked for decrypts the same number (docs/theory/federation.md says why that is needed). Users
drawn by oblivious transfer are drawn anew in every session; there, everything is drawn and charged again.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.crypto.agreement import RUN_BYTES, RoundId
from fedveil.crypto.transfer import POINT_BYTES
from fedveil.engine.setup import Prepared, privacy_randomness
from fedveil.engine.silo_side import WeightedTraining
from fedveil.engine.weighting import WeightingRange
from fedveil.errors import RunFolderError
from fedveil.federation.hidden_sums import HiddenShare, HiddenSum, Outgoing, Place
from fedveil.federation.limits import LARGEST_LETTER
from fedveil.federation.own_round import Asked, OwnRound
from fedveil.federation.shapes import Exchanges, Shape, Step
from fedveil.federation.store import Answered
from fedveil.files import reading
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import Announcement, Directory, OwnMask, RevealRequest
from fedveil.protection.parts import Drawn
from fedveil.protection.private_weighting import Contributions
from fedveil.protection.weighting_messages import (
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
from fedveil.protection.weighting_server import WeightingServer
from fedveil.protection.weighting_silo import SEED_BYTES, WeightingSilo
from fedveil.randomness import ExperimentRandomness

_HEADER: Final = struct.Struct(">IIB")
_FRAME_BYTES: Final = 512  # of one message: its envelope, counts, and the seeds and keys of the setup


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedInput:
    """What a silo puts into a round, in grid units; the same whenever the round is asked for.

    Attributes:
        contributions: (m, d) clipped contributions of weight 1 of the silo's users, ascending.
        noise: (d,) its share of the noise.
        dither: 32-byte key of its share of the remainders modulo C.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes

    def encode(self) -> bytes:
        """Return bytes for the silo's own disk."""
        users, length = self.contributions.shape
        size = self.contributions.dtype.itemsize
        return b"".join(
            (
                _HEADER.pack(users, length, size),
                self.contributions.astype(f"<i{size}").tobytes(),
                self.noise.astype("<i8").tobytes(),
                self.dither,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> WeightedInput:
        """Return the input of bytes that :meth:`encode` made.

        Raises:
            RunFolderError: they are none.
        """
        with reading("the kept answer of this run", RunFolderError):
            users, length, size = _HEADER.unpack_from(data)
            noise_at = _HEADER.size + users * length * size
            contributions = np.frombuffer(data[_HEADER.size : noise_at], dtype=f"<i{size}")
            noise = np.frombuffer(data[noise_at:-SEED_BYTES], dtype="<i8")
            rows, dither = contributions.reshape(users, length), data[-SEED_BYTES:]
            return cls(contributions=rows, noise=noise, dither=dither)


def weighted_input(
    prepared: Prepared, model: Float32[Tensor, " d"], *, silo: int, round_number: int
) -> WeightedInput:
    """Train a silo's users from the global model and draw its share of the noise.

    Args:
        prepared: the experiment as the silo holds it.
        model: (d,) the global model.
        silo: its number.
        round_number: counts from 1.
    """
    agreed, experiment = prepared.agreed, prepared.experiment
    assert isinstance(agreed, WeightingRange)
    training = WeightedTraining(
        prepared.setting,
        model,
        round_number,
        ExperimentRandomness(experiment.seed),
        privacy_randomness(experiment),
    )
    contributions, noise = agreed.units(training.contributions(silo), training.share(silo))
    return WeightedInput(contributions=contributions, noise=noise, dither=training.dither(silo))


def weighted_exchanges(agreed: WeightingRange, silo: int) -> Exchanges:
    """Return the letters of private weighting with a silo: silo 0 seals seeds, which the others are sent."""
    plan = agreed.plan
    keys: Shape = (WeightingKey, Directory)
    if silo:
        setup: tuple[Step, ...] = (Step(keys, ()), Step((SealedSeed,), (BlindedHistogram,)))
    else:
        setup = (Step(keys, (SealedSeed,) * (plan.silos - 1) + (BlindedHistogram,)),)
    reveal = Step((RevealRequest,), (OwnMask,))
    following = (Step((TransferAnswers,), (EncryptedSum,)), reveal) if plan.places else (reveal,)
    return Exchanges(
        joined=(Announcement,),
        setup=setup,
        first=(Participants,),
        begin=(TransferOffer,) if plan.places else (EncryptedWeights, *((Drawn,) if plan.renewed else ())),
        played=lambda _: ((TransferRequests,) if plan.places else (EncryptedSum,), following),
    )


class BlindSum(HiddenSum):
    """Private weighting, the coordinator's side; its keys are those of one session.

    Args:
        agreed: what the parties agree on.
        run: 16 bytes that name the session.

    Raises:
        ProtocolError: a letter of the protocol would be longer than any party reads.
    """

    def __init__(self, agreed: WeightingRange, run: bytes) -> None:
        self._largest, down = letter_bytes(agreed)
        if max(self._largest, down) > LARGEST_LETTER:
            raise ProtocolError(
                f"a letter of this protocol would have {max(self._largest, down)} bytes, above the limit of "
                f"{LARGEST_LETTER}: fewer users or parameters, another cipher, or no private sampling"
            )
        self._plan, self._grid = replace(agreed.plan, run=run), agreed.grid
        self._server = WeightingServer(self._plan, agreed.key_holder(self._plan))
        self.least = self._plan.silos

    @property
    def largest(self) -> int:
        """How long a silo's letter may be."""
        return self._largest

    @property
    def ready(self) -> bool:
        """Whether every silo's blinded counts have arrived."""
        return self._server.ready

    @property
    def repeats(self) -> bool:
        """Whether a round that is asked for in another session has the same sum."""
        return not self._plan.places

    @property
    def summed(self) -> int:
        """All silos."""
        return self._plan.silos

    def begin(
        self, round_number: int, drawn: Bool[np.ndarray, " users"] | None, silos: tuple[int, ...]
    ) -> Outgoing:
        """Begin a round with fresh encrypted weights where users are drawn, or with an offer to draw them."""
        round_id = RoundId(run=self._plan.run, round=round_number, attempt=0)
        return self._server.begin(round_id, drawn)

    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message; return those that follow."""
        return self._server.receive(silo, message)

    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the weighted noisy sum, rounded to the grid under the silos' remainders.

        Raises:
            ProtocolError: a sum that fails its check.
        """
        return np.asarray(self._server.result() * self._grid)


class BlindShare(HiddenShare):
    """Private weighting, a silo's side; its keys are those of one session.

    Args:
        agreed: what the parties agree on, and this silo's record counts.
        place: the silo's in the session.

    Raises:
        ProtocolError: a count above N_max / |S|.
    """

    def __init__(self, agreed: WeightingRange, place: Place) -> None:
        self._plan, counts = replace(agreed.plan, run=place.run), agreed.counts[place.number]
        self._silo = WeightingSilo(
            self._plan,
            index=place.number,
            identity=place.identity,
            roster=place.roster,
            counts=counts,
            evaluator=agreed.evaluator,
        )
        super().__init__(self._silo, place.run)
        public = replace(agreed.plan, run=bytes(RUN_BYTES))
        bound = f"{public!r} {agreed.grid!r} ".encode() + counts.astype("<i8").tobytes()
        self._binding = hashlib.sha256(bound).digest()

    @property
    def binding(self) -> bytes:
        """What a stored answer belongs to, besides the request: the plan's numbers and the silo's own counts."""
        return self._binding

    @property
    def repeats(self) -> bool:
        """Whether a round that is asked for again gets the same contributions and noise."""
        return not self._plan.places

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""
        return self._silo.awaits_input

    def announce(self) -> bytes:
        """Return the first message."""
        return self._silo.announce()

    def receive(self, message: bytes) -> list[bytes]:
        """Read a message of the coordinator, or what it relays of silo 0; return the answers.

        Raises:
            ProtocolError: a message that must not be accepted.
        """
        return self._silo.receive(message)

    def new_answer(self, own: OwnRound, task: Asked, request: bytes) -> Answered:
        """Train all users of the silo, draw its noise; return what is kept."""
        start = torch.from_numpy(task.model)
        content = weighted_input(own.prepared, start, silo=own.silo, round_number=task.round)
        return Answered(round=task.round, request=request, coded=content.encode())

    def contribute(self, answered: Answered) -> list[bytes]:
        """Return the silo's weighted noisy sum under the coordinator's key and fresh masks."""
        content = WeightedInput.decode(answered.coded)
        return [self._silo.contribute(content.contributions, content.noise, content.dither)]


def letter_bytes(agreed: WeightingRange) -> tuple[int, int]:
    """Return how long the longest letters of the protocol may be: a silo's, and the coordinator's."""
    plan, size = agreed.plan, agreed.sizes()
    counts = plan.users * (size.number + 8)
    requests = plan.users * POINT_BYTES * bool(plan.places)
    frames = _FRAME_BYTES * (plan.silos + 2)
    up = max(size.ciphertexts * (size.ciphertext + 8), counts, requests)
    weights = plan.users * max(1, plan.places) * (size.weight + 64)
    return up + frames, max(weights, size.key) + frames + 4 * plan.length

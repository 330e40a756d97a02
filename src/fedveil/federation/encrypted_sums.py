"""Partial encryption between institutions: the silos have the models, and the coordinator, which has no key, none.

What a silo does of a round is on its disk before it leaves, in three steps: its message and the noise on its votes; the
partition and both parts with their noise; the next model. Asked for the round again, in whatever session, it repeats
ballot and parts, and refuses another partition. Ballots are in the same order again, because silo 0 keeps the secret of
the orders for the run; the encryption's key is new in every session. A round counts as released once every silo has the
next model, and the coordinator sees that all have the same by a tag that tells nothing of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedveil.crypto.agreement import RoundId
from fedveil.engine.coordinator_side import coordinate
from fedveil.engine.partial import PartialRange
from fedveil.engine.setup import Prepared, privacy_randomness
from fedveil.engine.turn import Turn
from fedveil.errors import RunFolderError
from fedveil.federation.errors import RefusalError
from fedveil.federation.hidden_sums import HiddenShare, HiddenSum, Outgoing, Place
from fedveil.federation.own_round import Asked, OwnRound
from fedveil.federation.shapes import Exchanges, Shape, Step
from fedveil.federation.store import Answered
from fedveil.files import reading
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import Announcement, Directory, Envelope, MaskedVector, RoundStart
from fedveil.protection.partial_encryption import PartialSilo
from fedveil.protection.partial_messages import Ballot, PartialSum, PartialUpdate, Partition, SealedKeys
from fedveil.protection.partial_server import PartialServer
from fedveil.protection.parts import Learned, Part, only
from fedveil.protection.wire import Reader, Writer
from fedveil.randomness import ExperimentRandomness
from fedveil.server.optimizers import State, matching

_ENVELOPE_BYTES = 1 << 13
"""More than a message has around what it carries, and than the key that it seals."""


def encrypted_exchanges(agreed: PartialRange, silo: int) -> Exchanges:
    """Return the letters of partial encryption with a silo: silo 0 seals the common keys, which the others are sent."""
    plan = agreed.plan
    ballot: Shape = (Ballot if plan.ballots == "plain" else MaskedVector,)
    learn = Step((PartialSum,), (Learned,))

    def played(number: int) -> tuple[Shape, tuple[Step, ...]]:
        if plan.votes(number):
            return ballot, (Step((Partition,), (PartialUpdate,)), learn)
        return (PartialUpdate,), (learn,)

    return Exchanges(
        joined=(Announcement,),
        setup=(Step((Directory,), () if silo else (SealedKeys,) * (plan.silos - 1)),),
        first=(SealedKeys,) if silo else (),
        begin=(RoundStart,),
        played=played,
    )


class EncryptedSum(HiddenSum):
    """The coordinator's side, for one session.

    Args:
        agreed: the range of the messages.
        run: 16 bytes that name the session.
    """

    def __init__(self, agreed: PartialRange, run: bytes) -> None:
        self._plan = replace(agreed.plan, run=run)
        self._server = PartialServer(self._plan)
        self.least = self._plan.silos

    @property
    def ready(self) -> bool:
        """Whether the silos' common keys have passed, so that a round may begin."""
        return self._server.ready

    @property
    def shows_model(self) -> bool:
        """The coordinator has no key, so no sum and no model."""
        return False

    @property
    def summed(self) -> int:
        """All silos."""
        return self._plan.silos

    @property
    def largest(self) -> int:
        """How long a silo's letter may be: numbers, ciphertexts, or the sealed keys for all others."""
        plan = self._plan
        ciphertexts = (-(-plan.length // plan.ckks.degree) + 1) * 8 * plan.ckks.degree
        return 8 * plan.length + ciphertexts + (plan.silos + 8) * _ENVELOPE_BYTES

    def begin(
        self, round_number: int, drawn: Bool[np.ndarray, " users"] | None, silos: tuple[int, ...]
    ) -> Outgoing:
        """Begin a round with all silos; who is drawn, the silos are told by the coordinator."""
        return self._server.begin(RoundId(run=self._plan.run, round=round_number, attempt=0), silos)

    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message; return those that follow."""
        return self._server.receive(silo, message)

    def result(self) -> Float64[np.ndarray, " d"]:
        """Refuse: the sum is the silos' alone."""
        raise ProtocolError("the coordinator learns no sum under partial encryption")


def check_learned(answers: Mapping[int, Sequence[Part]]) -> None:
    """Return if every silo has the same next model, and the same state of the optimiser.

    Raises:
        ProtocolError: names the first silo that has another than silo 0, or says nothing of it.
    """
    tags = {silo: only(parts, Learned, silo).tag for silo, parts in answers.items()}
    for silo, tag in tags.items():
        if tag != tags[min(tags)]:
            raise ProtocolError(
                "ends the round with another model or optimiser's state than silo 0", silo=silo
            )


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What a silo keeps of a round, so that it can repeat it.

    Attributes:
        orders: the secret of the orders of the run's ballots.
        before: (d,) the model before the round.
        state: of the optimiser before the round, as safetensors.
        message: (d,) the silo's bounded sum, without noise.
        votes: (d,) its share of the noise on the counts of votes; empty where they have none.
        partition: (d,) which coordinates are encrypted; None until it is known.
        clear: (d - k,) the others with their noise, ascending, in grid units.
        hidden: (k,) those, with theirs.
        after: (d,) the model after the round; None until the sum has arrived.
        next_state: of the optimiser after the round, as safetensors.
    """

    orders: bytes
    before: Float32[np.ndarray, " d"]
    state: bytes
    message: Float64[np.ndarray, " d"]
    votes: Int64[np.ndarray, " n"] = field(default_factory=_none)
    partition: Bool[np.ndarray, " d"] | None = None
    clear: Int64[np.ndarray, " c"] = field(default_factory=_none)
    hidden: Int64[np.ndarray, " h"] = field(default_factory=_none)
    after: Float32[np.ndarray, " d"] | None = None
    next_state: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes to keep."""
        writer = Writer().block(self.orders)
        bits = b"" if self.partition is None else np.packbits(self.partition).tobytes()
        after = b"" if self.after is None else self.after.astype("<f4").tobytes()
        writer.block(self.before.astype("<f4").tobytes()).block(self.message.astype("<f8").tobytes())
        for whole in (self.votes, self.clear, self.hidden):
            writer.block(whole.astype("<i8").tobytes())
        return writer.block(bits).block(after).block(self.state).block(self.next_state).bytes()

    @classmethod
    def decode(cls, data: bytes) -> Kept:
        """Return what was kept.

        Raises:
            RunFolderError: the bytes are none that :meth:`encode` made.
        """
        with reading("the kept answer of this run", RunFolderError):
            reader = Reader(data)
            orders = reader.block()
            before = np.frombuffer(reader.block(), dtype="<f4").astype(np.float32)
            message = np.frombuffer(reader.block(), dtype="<f8").astype(np.float64)
            votes, clear, hidden = (
                np.frombuffer(reader.block(), dtype="<i8").astype(np.int64) for _ in range(3)
            )
            bits, after, state, next_state = (reader.block() for _ in range(4))
            partition = None
            if bits:
                partition = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(before)).view(
                    np.bool_
                )
            return cls(
                orders=orders,
                before=before,
                state=state,
                message=message,
                votes=votes,
                partition=partition,
                clear=clear,
                hidden=hidden,
                after=np.frombuffer(after, dtype="<f4").astype(np.float32) if after else None,
                next_state=next_state,
            )


def _remembered(kept: bytes) -> State:
    """Return the state of the optimiser that was kept.

    Raises:
        RunFolderError: the bytes are no tensors.
    """
    with reading("the optimiser's state kept of this run", RunFolderError):
        try:
            state: State = load(kept)
            return state
        except SafetensorError as error:
            raise ValueError from error


class EncryptedShare(HiddenShare):
    """A silo's side, for one session.

    Args:
        prepared: the run as the silo knows it.
        place: the silo's in the session.
        orders: at silo 0, the secret of the orders of this run's ballots; None at the others, which are told it.
        keep: puts an answer on the disk, durably.
        publish: puts a released model on the disk.
    """

    def __init__(
        self,
        prepared: Prepared,
        place: Place,
        *,
        orders: bytes | None,
        keep: Callable[[Answered], None],
        publish: Callable[[dict[str, Tensor]], None],
    ) -> None:
        assert isinstance(prepared.agreed, PartialRange)
        self._prepared, self._agreed, self._number = prepared, prepared.agreed, place.number
        self._privacy = privacy_randomness(prepared.experiment)
        self._initial: Float32[np.ndarray, " d"] = prepared.task.initial().cpu().numpy()
        self._silo = PartialSilo(
            replace(self._agreed.plan, run=place.run),
            index=place.number,
            identity=place.identity,
            roster=place.roster,
            order_secret=orders,
            workers=self._agreed.workers(owner=self),
        )
        super().__init__(self._silo, place.run)
        self._keep_answer, self._publish = keep, publish
        self._answered: Answered | None = None
        self._before = self._initial
        self._server = prepared.method.server
        self._state = save(dict(self._server.init(prepared.task.initial().cpu())))
        self._told = True

    def announce(self) -> bytes:
        """Return the first message."""
        return self._silo.announce()

    @property
    def shown_model(self) -> bool:
        """The silos have the models, the coordinator none."""
        return False

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""
        return self._silo.proposes

    def follow(self, last: Answered | None, round_number: int) -> None:
        """Take the model from the last round that was answered: the initial one, or where that round has ended.

        Raises:
            RefusalError: its sum has not arrived here, so it is still the round to play.
        """
        super().follow(last, round_number)
        if last is None:
            return
        kept = Kept.decode(last.coded)
        after = kept.after
        if after is None:
            raise RefusalError("state", f"round {last.round} has not ended here; it must be asked for again")
        if len(after) != len(self._initial):
            raise RefusalError(
                "replay",
                f"round {last.round} ended with a model of {len(after)} parameters, not {len(self._initial)}",
            )
        self._before, self._state = after, kept.next_state
        if not matching(self._server, torch.from_numpy(after), _remembered(self._state)):
            raise RefusalError("replay", f"round {last.round} ended with the state of another optimiser")

    def new_answer(self, own: OwnRound, task: Asked, request: bytes) -> Answered:
        """Train, and draw the noise on the votes; return what is kept of the round before anything of it leaves."""
        message, votes = own.total(replace(task, model=self._before)), _none()
        if self._agreed.noisy_votes(task.round):
            votes = self._agreed.noise_on_votes(self._privacy, round_number=task.round, silo=self._number)
        orders = self._silo.order_secret
        kept = Kept(orders=orders, before=self._before, state=self._state, message=message, votes=votes)
        return Answered(round=task.round, request=request, coded=kept.encode())

    def contribute(self, answered: Answered) -> list[bytes]:
        """Play a round from what is kept of it; return what is to be sent.

        Raises:
            RefusalError: silo 0 lost what it kept of this run.
            ProtocolError: the round has not begun in this session, or has been played in it.
        """
        kept = Kept.decode(answered.coded)
        if kept.orders != self._silo.order_secret:
            raise RefusalError("state", "silo 0 lost the secret of this run's orders; begin another run")
        self._answered, self._told = answered, False
        values = self._agreed.proposal(kept.message, kept.before.astype(np.float64), self._initial)
        noise = kept.votes if len(kept.votes) else None
        return self._silo.propose(values, noise) + self._divide()

    def receive(self, message: bytes) -> list[bytes]:
        """Read a message of the protocol; return what is to be sent.

        Raises:
            RefusalError: a round with fewer silos, or with another partition than before: two partitions of one message
                would show in the open what the first one hid.
            ProtocolError: a message that must not be accepted.
        """
        content = Envelope.decode(message).message
        silos = self._agreed.plan.silos
        if isinstance(content, RoundStart) and len(content.cohort) != silos:
            raise RefusalError(
                "request", f"a sum over {len(content.cohort)} of {silos} silos is asked for; all must be in"
            )
        return self._silo.receive(message) + self._divide()

    def _divide(self) -> list[bytes]:
        """Return the two parts of the message, once the partition is known."""
        if not self._silo.divided:
            return []
        answered, kept = self._current()
        partition = self._silo.partition
        if kept.partition is None:
            clear, hidden = self._agreed.split(
                kept.message, partition, self._privacy, round_number=answered.round, silo=self._number
            )
            kept = replace(kept, partition=partition, clear=clear, hidden=hidden)
            self._keep(kept)
        elif not np.array_equal(kept.partition, partition):
            raise RefusalError("replay", f"round {answered.round} was answered for another partition")
        return [self._silo.contribute(kept.clear, kept.hidden)]

    def learn(self) -> list[Part]:
        """Compute the next model from the sum, once it has arrived, keep it, and say so."""
        if self._told or not self._silo.summed:
            return []
        answered, kept = self._current()
        assert kept.partition is not None
        clear, hidden = self._silo.result()
        setting, n_silos = self._prepared.setting, self._agreed.plan.silos
        turn = Turn(
            setting=setting,
            model=torch.from_numpy(kept.before),
            state=_remembered(kept.state),
            round_number=answered.round,
            experiment=ExperimentRandomness(self._prepared.experiment.seed),
            privacy=self._privacy,
        )
        total = self._agreed.join(kept.partition, clear, hidden)
        model, remembered = coordinate(turn, total, n_silos=n_silos, summed=n_silos, drawn=setting.n_users)
        after, state = model.cpu().numpy(), save(dict(remembered))
        if kept.after is None:
            self._keep(replace(kept, after=after, next_state=state))
        elif not np.array_equal(kept.after, after) or kept.next_state != state:
            raise RefusalError("state", f"round {answered.round} ended here with another sum before")
        self._publish(self._prepared.task.state(torch.from_numpy(after)))
        self._told = True
        round_bytes = struct.pack(">I", answered.round)
        return [Learned(tag=self._silo.tag(round_bytes + after.astype("<f4").tobytes() + state))]

    def _current(self) -> tuple[Answered, Kept]:
        if self._answered is None:
            raise ProtocolError("a round goes on that this silo has not begun")
        return self._answered, Kept.decode(self._answered.coded)

    def _keep(self, kept: Kept) -> None:
        assert self._answered is not None
        answered = replace(self._answered, coded=kept.encode())
        self._keep_answer(answered)
        self._answered = answered

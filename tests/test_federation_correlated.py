"""Correlated noise between institutions: what a silo keeps and charges, and lies about rounds and weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.silo_session.statement_check import _consists_of_charges
from fedveil.federation.store import RecordStore
from fedveil.methods.correlated import squared_sensitivity
from fedveil.privacy.claims import Role
from fedveil.privacy.events import ComposedEvent, Event, GaussianEvent, atoms, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import (
    Attestation,
    Declined,
    GlobalModel,
    ProtocolMessage,
    RoundTask,
    SessionMessage,
    UserTotals,
)
from fedveil.run.config.experiment import Experiment
from fedveil.run.populations import FixedPopulation
from fedveil.run.rounds.round_context import RoundContext, SumHistory
from fedveil.run.setup import prepare
from tests.federation_world import RUN, Killed, Moments, World, asked, population

PERIOD, ROUNDS = 3, 7


def correlated(**changes: Any) -> Experiment:
    method = {"correlated": {"period": PERIOD}} | changes.pop("method", {})
    return asked(rounds=ROUNDS, method=method, **changes)


def world_of(folder: Path, **changes: Any) -> World:
    return World(folder, correlated(**changes), population())


def task(number: int, value: float = 0.0) -> tuple[SessionMessage, ...]:
    return GlobalModel(values=np.full(4, value, dtype=np.float32)), RoundTask(round=number)


def played(world: World, last: int, *before: SessionMessage) -> None:
    """Have silo 0 play rounds up to this one in session 1."""
    world.tell(world.terms())
    for number in range(1, last + 1):
        first = before if number == 1 else ()
        answer, signed = world.tell(*first, *task(number, number / 8), number=number)
        assert isinstance(answer, ProtocolMessage)
        assert isinstance(signed, Attestation)


def multiplier(events: list[Event]) -> float:
    """Of Gaussian releases together; those without any noise beside them tell nothing."""
    single = [one for one in events if isinstance(one, GaussianEvent)]
    assert all(one in single or one == ComposedEvent(events=()) for one in events)
    return 1 / math.sqrt(math.fsum(one.noise_multiplier**-2 for one in single))


def charges(world: World) -> list[Event]:
    """What a silo's ledger is charged with, but for the grids of the noise."""
    return [split_grid_loss(entry.event)[0] for entry in read_entries(world.folder / "state-0" / LEDGER)]


def test_a_silo_s_ledger_composes_to_the_stream_at_every_stop(tmp_path: Path) -> None:
    """Against the coordinator, who sees its messages in the open: one share of the noise, all of a user's weight."""
    world = world_of(tmp_path)
    played(world, ROUNDS)
    prepared = prepare(world.experiment, FixedPopulation(world.held))
    channel: Any = prepared.method.channel
    alone = prepared.guarantee.event_for(Role.SERVER)
    assert isinstance(alone, GaussianEvent)
    charged = charges(world)
    for stop in range(1, ROUNDS + 1):
        moved = squared_sensitivity(channel.coefficients, PERIOD, stop)
        assert multiplier(charged[:stop]) == pytest.approx(
            alone.noise_multiplier / math.sqrt(moved), rel=1e-12
        )
    world.close()


def test_a_round_whose_answer_was_lost_in_a_crash_is_paid_as_another_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some user's first part is in round 2: another draw of its noise costs what a whole round does, not c_1^2."""
    world = world_of(tmp_path)
    played(world, 1)
    moments = Moments(monkeypatch)
    with pytest.raises(Killed):  # after the charge was written and flushed
        moments.during(2, lambda: world.tell(*task(2, 0.25), number=2))
    world.restart()
    world.tell(world.terms(), session=2)
    answer, _ = world.tell(*task(2, 0.25), session=2, number=1)
    assert isinstance(answer, ProtocolMessage)
    first, second, again = charges(world)
    assert multiplier([again]) == multiplier([first]) < multiplier([second])
    world.close()


def test_what_a_silo_sent_before_is_trained_again_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the rounds before are exact; what is kept of a round is how it began, which was released."""
    sums: list[tuple[int, np.ndarray]] = []
    keep = SumHistory.keep

    def watched(self: SumHistory, turn: RoundContext, total: torch.Tensor) -> None:
        sums.append((turn.round_number, total[0].numpy().copy()))
        keep(self, turn, total)

    sent = []
    for cut in (False, True):
        (tmp_path / str(cut)).mkdir()
        world = world_of(tmp_path / str(cut))
        with monkeypatch.context() as patch:
            patch.setattr(SumHistory, "keep", watched)
            played(world, 4)
            if cut:
                world.restart()
                world.tell(world.terms(), session=2)
            answer, _ = world.tell(*task(5, 0.625), session=1 + cut, number=5)
        assert isinstance(answer, ProtocolMessage)
        record = RecordStore(world.folder / "state-0" / "answers").read(RUN)
        assert record is not None
        sent.append(record.contribution)
        written = b"".join(
            path.read_bytes() for path in (world.folder / "state-0").rglob("*") if path.is_file()
        )
        for _, total in sums:
            largest = np.float64(total[np.argmax(np.abs(total))])
            assert largest
            assert largest.tobytes() not in written
        world.close()
    assert sent[0] == sent[1]
    assert [number for number, _ in sums] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


def test_a_silo_plays_no_stream_in_which_a_user_weighs_otherwise_than_before(tmp_path: Path) -> None:
    """Another total in a later session would let a user be whole in every round, each at the silo whose turn it is."""
    world = world_of(tmp_path, method={"name": "uldp-avg-w"})
    played(world, 2, UserTotals(counts=np.full(6, 50)))
    charged = len(charges(world))
    for session, totals, allowed in ((2, np.full(6, 40), False), (3, np.full(6, 50), True)):
        world.tell(world.terms(), session=session)
        answer = world.tell(UserTotals(counts=totals), *task(3, 0.375), session=session, number=1)[0]
        assert isinstance(answer, ProtocolMessage if allowed else Declined)
        if isinstance(answer, Declined):
            assert answer.why.code is Code.WEIGHTS
        assert len(charges(world)) == charged + allowed
    world.close()


@pytest.mark.parametrize("changed", ["ids", "records"])
def test_a_silo_plays_no_stream_over_other_records_or_under_other_ids(tmp_path: Path, changed: str) -> None:
    """Under another id, as a new export may give one, a user's turn moves, into two rounds of a period."""
    world = world_of(tmp_path)
    played(world, 2)
    held, charged = world.held, len(charges(world))
    train = held.train
    other = {
        "ids": replace(train, key=train.user.astype(np.int64) + 1),
        "records": replace(train, features=train.features[::-1].copy()),
    }[changed]
    for session, table, allowed in ((2, other, False), (3, train, True)):
        world.held = replace(held, train=table)
        world.restart()
        world.tell(world.terms(), session=session)
        answer = world.tell(*task(3, 0.375), session=session, number=1)[0]
        assert isinstance(answer, ProtocolMessage if allowed else Declined)
        if isinstance(answer, Declined):
            assert answer.why.code is Code.RECORDS
        assert len(charges(world)) == charged + allowed
    world.close()


@pytest.mark.parametrize("missing", ["weights", "records", "unit"])
def test_a_silo_whose_kept_round_lacks_something_says_so_and_charges_nothing(
    tmp_path: Path, missing: str
) -> None:
    """As one that another version wrote: it is no refusal about its records, and no error without a type."""
    world = world_of(tmp_path)
    played(world, 1)
    store, charged = RecordStore(world.folder / "state-0" / "answers"), len(charges(world))
    record = store.read(RUN)
    assert record is not None
    store.write(
        RUN, replace(record, before={key: record.before[key] for key in record.before if key != missing})
    )
    world.restart()
    world.tell(world.terms(), session=2)
    (answer,) = world.tell(*task(2, 0.25), session=2, number=1)
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.STORAGE
    assert len(charges(world)) == charged
    world.close()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (
            {"period": ROUNDS, "bands": 1},
            {"period": 2, "bands": 1},
        ),  # round 2 would be "paid in advance" twice over
        ({"period": 3}, None),
        (None, {"period": 3}),
    ],
    ids=["another period", "to noise of its own", "from noise of its own"],
)
def test_the_rounds_of_a_stream_are_of_one_experiment(
    tmp_path: Path, first: dict[str, int] | None, then: dict[str, int] | None
) -> None:
    """Another schedule under the same numbers of rounds would charge users for other rounds than the expensive ones."""
    before, after = (asked(rounds=ROUNDS, method={"correlated": one} if one else {}) for one in (first, then))
    world = World(tmp_path, before, population())
    played(world, 1)
    (answer,) = world.tell(world.terms(after), session=2)
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.OTHER_EXPERIMENT
    assert len(charges(world)) == 1
    world.close()


def test_no_round_of_a_stream_is_left_out_or_comes_twice(tmp_path: Path) -> None:
    """A coordinator that chose the rounds would choose the cheap ones: those of strength 0 are paid for in advance."""
    world = world_of(tmp_path)
    played(world, 1)
    for session, number, code in ((2, 3, Code.ROUND_AHEAD), (3, 1, Code.ASKED_OTHERWISE)):
        world.tell(world.terms(), session=session)
        (answer,) = world.tell(*task(number, 0.5), session=session, number=1)
        assert isinstance(answer, Declined)
        assert answer.why.code is code
    assert len(charges(world)) == 1
    world.close()


def test_a_statement_may_have_the_round_that_was_begun_and_no_cheaper_one() -> None:
    """Of two bands round 2 costs the second part, round 3 nothing, and one that is repeated a whole round."""
    method = {"correlated": {"period": PERIOD, "bands": 2}}
    guarantee = prepare(correlated(method=method), FixedPopulation(population())).guarantee
    first, last, free, again = (
        guarantee.event_at_round(guarantee.event, number, again=number == 6) for number in (1, 2, 3, 6)
    )
    for event, charges, least, right in (
        ((first, last), 2, {1: 1, 2: 1}, True),
        ((first, last, free), 3, {1: 1, 2: 1}, True),  # round 3 was begun, and costs nothing
        ((first, last, free, again), 4, {1: 1, 2: 1}, True),  # and was begun again
        ((first, last, free, free), 4, {1: 1, 2: 1}, False),
        ((first, last, free, free, free), 4, {1: 1, 2: 1}, False),  # two losses of a grid are no round
        ((first, last, again), 3, {1: 1, 2: 2}, True),
        ((first, last, last), 3, {1: 1, 2: 2}, False),
        ((first, free), 2, {1: 1, 2: 1}, False),
    ):
        counts = 3, charges
        left = Counter(atoms(ComposedEvent(events=event)))
        assert _consists_of_charges(guarantee, Counter(least), counts, left) is right

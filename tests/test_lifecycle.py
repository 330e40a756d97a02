"""The lifecycle of a run: killed at every durable write, it loses nothing, and releases nothing that is not charged.

A kill is an exception of the process at a write, an fsync or a rename; a write that is cut leaves half of its bytes.
Of every step of a run, whatever kind it is, the folder then shows whether it was charged and whether it was released.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.audit.recorded_run import verify_run
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.submission import due_parts
from fedveil.privacy.events import GaussianEvent
from fedveil.privacy.ledger import Ledger, read_entries
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.config.release_document import InferenceDocument, read_releases
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import StopTraining
from fedveil.run.releases.evaluation import read_evaluation
from fedveil.run.releases.inference import prepare_inference
from fedveil.run.releases.preprocessing import read_preprocessed
from fedveil.run.setup import prepare
from fedveil.run.simulation import make_releases, resume_releases
from fedveil.run.training_run import resume, run
from tests import test_inference_runs as regressions
from tests.federation_world import Killed, Moments, World, asked, population
from tests.runs import Silent, json_lines
from tests.test_federation_run_parts import ASKED, Study, alone
from tests.test_preprocessing import tables

ALL: dict[str, Any] = merge(
    ASKED,
    {
        "preprocessing": {"clip": "quantile"},
        "privacy": {"epsilon": 200.0},
        "protection": {"name": "none"},
    },
)
"""An experiment with every kind of step: two releases before training, two rounds, two releases of the model."""

Steps = dict[tuple[str, int], int]
"""What the ledger has: charges by name and number."""


class Doomed:
    """A process that is killed at one of its writes, and those that come after it, which are not.

    Args:
        moments: counts the writes.
        after: the writes before the fatal one.
    """

    def __init__(self, moments: Moments, after: int) -> None:
        self.moments, self.left = moments, after
        self.killed = False

    def do(self, work: Callable[[], Any]) -> Any:
        """Do some work of the process; None if it is killed in it."""
        if self.killed:
            return work()
        self.moments.left, self.moments.logs = self.left, []
        try:
            return work()
        except Killed:
            self.killed = True
            self.moments.release_locks()
            return None
        finally:
            self.left, self.moments.left = self.moments.left or 0, None


def charged(folder: Path) -> Steps:
    """The charges of a folder; none where no ledger is."""
    path = folder / "ledger.jsonl"
    return Counter((entry.run, entry.round) for entry in read_entries(path)) if path.exists() else Counter()


def released(folder: Path, name: str) -> set[tuple[str, int]]:
    """The steps of an experiment whose artefact is on the disk."""
    prep, there = read_preprocessed(folder), RunFolder(folder)
    rounds = there.read_checkpoint()
    return {
        *((f"{name}/prep/{one + 1}", 0) for one in range(0 if prep is None else len(prep.sums))),
        *((name, one + 1) for one in range(0 if rounds is None else rounds.round)),
        *((f"{name}/eval/{one + 1}", 0) for one in range(len(read_evaluation(there)))),
    }


def every_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stride: int, play: Callable[[Doomed, Path], bool]
) -> int:
    """Play in a new folder for every kill point (or each of a stride); return how many there were."""
    moments = Moments(monkeypatch)
    for points, after in enumerate(range(0, 10_000, stride)):
        folder = tmp_path / str(after)
        folder.mkdir()
        if not play(Doomed(moments, after), folder):
            return points
        shutil.rmtree(folder)
    raise AssertionError("a process that never ends")


# --- one process ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Tables of an experiment with every kind of step, and the folder of its run, which nobody disturbed."""
    folder = tmp_path_factory.mktemp("kinds")
    tables(folder, people=60)
    return folder, alone(folder, ALL)


def experiment_of(folder: Path, seed: int | None) -> Experiment:
    return parse(merge(ALL, {"privacy": {"insecure_seed": seed}}), "test").resolve_paths(folder)


KEPT = ("model.safetensors", "preprocessing.json", "schema.toml", "evaluation.json", "privacy.json")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, None])
def test_a_run_of_every_kind_of_step_survives_a_kill_at_every_write(
    seed: int | None,
    every_kind: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Charges as the rule says: noise of a seed costs nothing again; fresh noise, what was charged and not released."""
    kill_everywhere(1, seed, every_kind, tmp_path, monkeypatch)


def test_a_run_of_every_kind_of_step_survives_a_kill_at_some_writes(
    every_kind: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_everywhere(17, None, every_kind, tmp_path, monkeypatch)


def kill_everywhere(
    stride: int,
    seed: int | None,
    every_kind: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, whole = every_kind
    prepared, once = prepare(experiment_of(place, seed)), charged(whole)

    def play(process: Doomed, folder: Path) -> bool:
        process.do(lambda: run(prepared, folder, Silent()))
        if not process.killed:
            return False
        made = folder / "hospitals"
        if not (made / "experiment.toml").exists():  # nothing was begun
            assert charged(made) == {}
            return True
        before, known = charged(made), released(made, "hospitals")
        assert known <= set(before)  # nothing is released that is not charged
        resume(made, Silent())
        again = {key for key in before if key not in known} if seed is None else set()
        assert charged(made) == {key: 1 + (key in again) for key in once}
        assert released(made, "hospitals") == set(once)
        if seed is not None:
            for name in KEPT:
                assert (made / name).read_bytes() == (whole / name).read_bytes(), name
        return True

    assert every_point(monkeypatch, tmp_path, stride, play) > 60 / stride


def test_a_kill_between_two_releases_of_an_evaluation_costs_the_second_alone(
    every_kind: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is on the disk when the second is charged: a resumed run does not make it again."""
    charge = Ledger.charge

    def mortal(self: Ledger, **named: Any) -> Any:
        made = charge(self, **named)
        if named["run"].endswith("eval/2"):
            raise Killed
        return made

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "charge", mortal)
        with pytest.raises(Killed):
            run(prepare(experiment_of(every_kind[0], None)), tmp_path, Silent())
    folder = tmp_path / "hospitals"
    (first,) = read_evaluation(RunFolder(folder))
    assert resume(folder, Silent()).evaluated is not None
    assert {key: times for key, times in charged(folder).items() if times > 1} == {("hospitals/eval/2", 0): 2}
    assert (read_evaluation(RunFolder(folder))[0].vector == first.vector).all()
    assert not (folder / "checkpoint" / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        ("eval/1, 0", ["privacy.json"]),
        (
            "prep/1, 0",
            [
                "privacy.json",
                "checkpoint/state.safetensors",
                "metrics.jsonl",
                "evaluation.json",
                "model.safetensors",
            ],
        ),
    ],
)
def test_a_release_whose_charge_was_lost_is_never_stated(
    every_kind: tuple[Path, Path], tmp_path: Path, kept: str, gone: list[str]
) -> None:
    """What is left in the folder shows that it was released; a statement without it would be too small."""
    _, whole = every_kind
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    names = [f"{entry.run}, {entry.round}" for entry in read_entries(ledger)]
    lost = next(place for place, name in enumerate(names) if name.endswith(kept))
    before = len(lines) - len(names)  # the head of the file
    ledger.write_bytes(b"".join(lines[: before + lost]))
    for name in gone:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with pytest.raises(
        IntegrityError, match=f"result of .*{kept} is there, and ledger.jsonl has no charge for it"
    ):
        resume(folder, Silent())
    assert not (folder / "privacy.json").exists()


def test_a_model_that_was_evaluated_in_part_is_not_trained_on(
    every_kind: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bins were placed for the scores of this model: another one's would be counted in them."""

    class Once(Silent):
        def on_round_end(self, row: dict[str, Any]) -> None:
            raise StopTraining("enough")

    write = RunFolder.write

    def killed(self: RunFolder, name: str, content: bytes) -> None:
        if name == "evaluation.json":
            raise Killed
        write(self, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write", killed)
        with pytest.raises(Killed):
            run(prepare(experiment_of(every_kind[0], 1)), tmp_path, Once())
    outcome = resume(tmp_path / "hospitals", Silent())
    assert outcome.rounds == 1
    assert "evaluated in part" in (outcome.stopped or "")
    assert outcome.evaluated is not None
    assert any("a callback stopped it" in line for line in outcome.statement.uncovered)


@pytest.mark.parametrize("seed", [1, None])
def test_a_regression_survives_a_kill_at_every_write(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three releases of one document, each of which follows from those before it."""
    regressions.tables(tmp_path, people=80)
    privacy = "epsilon = 8.0" + ("" if seed is None else f"\ninsecure_seed = {seed}")
    prepared = prepare_inference(
        read_releases(regressions.written(tmp_path, privacy=privacy), InferenceDocument)
    )
    whole = make_releases(prepared, tmp_path / "whole")

    def play(process: Doomed, folder: Path) -> bool:
        process.do(lambda: make_releases(prepared, folder))
        if not process.killed:
            return False
        made = folder / "odds"
        if not (made / prepared.document.file).exists():
            assert charged(made) == {}
            return True
        before, known = charged(made), len(prepared.read(RunFolder(made)))
        assert known <= len(before)
        resume_releases(prepared, made)
        again = {number for _, number in before if number > known} if seed is None else set()
        assert charged(made) == {("odds", number): 1 + (number in again) for number in (1, 2, 3)}
        if seed is not None:
            for name in ("inference.json", "privacy.json"):
                assert (made / name).read_bytes() == (whole / name).read_bytes()
        return True

    # Which writes there are is the same with a seed: every third shows that bits are repeated.
    assert every_point(monkeypatch, tmp_path, 1 if seed is None else 3, play) > (20 if seed is None else 6)


def test_a_whole_document_whose_charge_was_lost_is_never_stated(tmp_path: Path) -> None:
    """Nothing is left to release; the statement alone would be too small."""
    regressions.tables(tmp_path, people=80)
    prepared = prepare_inference(
        read_releases(regressions.written(tmp_path, privacy="epsilon = 8.0"), InferenceDocument)
    )
    folder = make_releases(prepared, tmp_path / "whole")
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    (folder / "privacy.json").unlink()
    with pytest.raises(IntegrityError, match=r"result of odds, 3 is there, and ledger.jsonl has no charge"):
        resume_releases(prepared, folder)
    assert not (folder / "privacy.json").exists()


# --- between institutions ---------------------------------------------------------------------------------------


def carry_on(party: CoordinatorParty[Any], silos: list[Any], process: Doomed) -> bool:
    """Carry every message of a part, until it ends or the coordinator is killed; return whether it ended."""
    while not party.is_finished:
        for number, data in party.messages():
            reply = silos[number].receive(data)
            read = [party]
            if process.do(lambda: [read[0].receive(number, reply)]) is None:  # noqa: B023
                return False
    for number, data in party.farewells:
        answer = silos[number].receive(data)
        if process.do(lambda: [party.receive(number, answer)]) is None:  # noqa: B023
            return False
    return True


@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow), pytest.param(17)], ids=["every", "some"]
)
@pytest.mark.parametrize("recovers", [False, True])
def test_training_between_institutions_survives_a_kill_of_its_coordinator_at_every_write(
    recovers: bool, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silos repeat their answers: one charge a round, and the model of one process. With recovery a repeated round is
    another release: the one under way is charged again, by the coordinator and by the silos that had given to it."""
    protection: dict[str, Any] = {"name": "secure-aggregation"}
    changes: dict[str, Any] = {"protection": protection}
    if recovers:
        protection |= {"on_dropout": "recover", "max_dropouts": 1}
        changes["privacy"] = {"insecure_seed": None}

    def play(process: Doomed, folder: Path) -> bool:
        world = World(folder, asked(rounds=2, **changes), population(users=3, records=12))
        for _ in range(3):
            party = process.do(world.coordinate)
            if party is None:
                continue
            world.coordinator = party
            ended = carry_on(party, world.silos, process)
            party.close()
            if ended:
                break
        assert world.outcome.rounds == 2
        paid, times = Counter(world.paid), 2 if recovers and process.killed else 1
        assert paid.keys() == {1, 2}
        assert sum(paid.values()) <= 1 + times
        for number in range(3):
            given = Counter(world.charged(number))
            assert given.keys() == {1, 2}
            assert all(given[one] <= paid[one] for one in given)  # a silo charges what the coordinator did
        if not recovers:
            world.assert_as_in_one_process()
        world.close()
        return process.killed

    assert every_point(monkeypatch, tmp_path, stride, play) > 40 / stride


@pytest.mark.slow
def test_a_run_of_every_kind_of_step_between_institutions_survives_a_kill_of_its_coordinator_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is opened from the folder alone: the files of the simulation, one charge of every step everywhere."""
    masked = merge(ALL, {"protection": {"name": "secure-aggregation"}})
    tables(tmp_path, people=60)
    whole = alone(tmp_path, masked)
    once = charged(whole)

    def play(process: Doomed, folder: Path) -> bool:
        for name in ("schema.toml", "north.csv", "south.csv", "west.csv"):
            if (tmp_path / name).exists():
                shutil.copy(tmp_path / name, folder / name)
        study = Study(folder, base=masked)
        silos = [open_silo(SiloFolder(path)) for path in study.paths]

        def next_part(parts: Iterator[CoordinatorParty[Any]]) -> Callable[[], list[Any]]:
            return lambda: [next(parts, None)]

        for _ in range(3):
            parts, found = due_parts(study.home, study.run.path), None
            while (found := process.do(next_part(parts))) is not None and found[0] is not None:
                ended = carry_on(found[0], silos, process)
                found[0].close()
                if not ended:
                    found = None
                    break
                assert found[0].outcome.stopped is None
            parts.close()
            if found is not None:
                break
        for silo in silos:
            silo.close()
        assert charged(study.run.path) == once
        assert released(study.run.path, "hospitals") == set(once)
        for number in range(3):
            assert len(set(study.charges(number))) == len(study.charges(number)) == len(once)
        for name in ("model.safetensors", "preprocessing.json", "schema.toml", "evaluation.json"):
            assert (study.run.path / name).read_bytes() == (whole / name).read_bytes(), name
        assert [one for one in verify_run(study.run.path).checks if one.outcome == "fails"] == []
        return process.killed

    assert every_point(monkeypatch, tmp_path, 1, play) > 60


def test_a_coordinator_begins_no_round_on_the_ledger_of_another_experiment(tmp_path: Path) -> None:
    """Its charges would be stated as this experiment's."""
    world = World(tmp_path, asked(rounds=2), population())
    with Ledger(world.run_folder / "ledger.jsonl", unit="user") as ledger:
        ledger.charge(run="try", round=1, attempt=0, event=GaussianEvent(noise_multiplier=50.0))
    with pytest.raises(RunFolderError, match="charged for other releases than those of the document"):
        world.coordinate()
    assert world.paid == [1]
    with Ledger(world.run_folder / "ledger.jsonl", unit="user"):  # it was closed
        pass
    world.close()


def test_a_coordinator_makes_no_release_on_the_ledger_of_another_experiment(tmp_path: Path) -> None:
    tables(tmp_path, people=60)
    study = Study(tmp_path, base=ALL)
    with Ledger(study.run / "ledger.jsonl", unit="user") as ledger:
        ledger.charge(run="hospitals/prep/1", round=0, attempt=0, event=GaussianEvent(noise_multiplier=50.0))
    with pytest.raises(RunFolderError, match="charged for other releases than those of the document"):
        next(due_parts(study.home, study.run.path))
    assert [entry.run for entry in read_entries(study.run / "ledger.jsonl")] == ["hospitals/prep/1"]


def test_an_observer_stops_a_coordinator_as_it_stops_one_process(tmp_path: Path) -> None:
    """The run ends after the complete round, is stated with what the observer looked at, and may go on."""

    class Once(Silent):
        def on_round_end(self, row: dict[str, Any]) -> None:
            super().on_round_end(row)
            if row["round"] == 1:
                raise StopTraining("enough")

    world = World(tmp_path, asked(rounds=3), population())
    world.coordinator = coordinator = world.coordinate(Once())
    while not coordinator.is_finished:
        world.exchange(coordinator)
    assert (world.outcome.rounds, world.outcome.stopped) == (1, "enough")
    assert any("a callback stopped it" in line for line in world.outcome.statement.uncovered)
    assert (world.run_folder / "stopped.json").exists()
    assert not coordinator._closing  # nobody signs the end of a run that may go on
    coordinator.close()
    world.play()
    assert (world.outcome.rounds, world.outcome.stopped) == (3, None)
    assert world.paid == [1, 2, 3]
    world.close()


def test_the_time_of_a_round_counts_from_its_first_attempt_at_a_coordinator_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in one process: a round that was begun twice has taken the time of both."""
    now = [100.0]
    monkeypatch.setattr("fedveil.run.journal.time.perf_counter", lambda: now[0])
    world = World(tmp_path, asked(rounds=1), population())
    world.coordinator = coordinator = world.coordinate()
    step = coordinator._part.step
    assert step is not None
    step.begin()
    now[0] += 7
    while not coordinator.is_finished:
        world.exchange(coordinator)
    assert json_lines(world.run_folder / "metrics.jsonl")[1]["seconds"] == 7
    assert world.paid == [1]
    world.close()

"""A sweep runs every point of its grid once, goes on after a kill, and shows what a key buys."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.data.table_file import LackingColumnsError
from fedveil.errors import ConfigError, FedveilError, ProtocolError, RunFolderError, SiloVanished
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.report.tradeoff import Traded, front, page, write_tradeoff
from fedveil.run.config.study import Selection
from fedveil.run.executors import local_workers
from fedveil.run.setup import Prepared, prepare
from fedveil.run.sweep import ROWS, Axis, Point, joint_cost_of_points, play_point, points, sweep
from fedveil.run.training_run import run
from tests.commands import as_json, ended
from tests.executors import Interrupted, workers
from tests.runs import Silent, experiment, json_lines


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "try.toml"
    path.write_text(experiment(rounds=2).to_toml())
    return str(path)


AXES = [Axis.read("method.clip=0.5,1.0"), Axis.read("rounds=1,2")]


def test_a_grid_has_every_combination_under_a_name_of_its_own(source: str) -> None:
    found = points(source, Selection(), AXES)
    assert [(one.experiment.method.get("clip"), one.experiment.rounds) for one in found] == [
        (0.5, 1),
        (0.5, 2),
        (1.0, 1),
        (1.0, 2),
    ]
    assert len({one.experiment.name for one in found}) == 4
    assert found[0].experiment.name == "try-clip_0.5_rounds_1"


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("method.clip", "expected"),
        ("=1", "expected"),
        ("rounds=1,,2", "expected"),
        ("rounds=1,1", "expected"),
    ],
)
def test_axes_say_how_they_are_written(over: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Axis.read(over)


def test_points_whose_folders_would_have_one_name_are_refused(source: str) -> None:
    """One would go on with the other's run, and what both spent be counted once."""
    with pytest.raises(ConfigError, match=r"both be the run try-folder_a_b\b"):
        points(source, Selection(), [Axis.read("data.folder=a/b,a_b")])
    assert len(points(source, Selection(), [Axis.read("data.folder=a,b")])) == 2


@pytest.mark.parametrize(
    "over",
    [
        *(
            [],
            ["rounds=1", "rounds=2"],
            ["name=a,b"],
            ["method.clip=-1"],
            ["no.key=1"],
            ["seed=a,b"],
            ["seed=0.5"],
        ),
        ["privacy.accountant=pld,rdp"],
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_any_run(source: str, over: list[str]) -> None:
    with pytest.raises(ConfigError):
        points(source, Selection(), [Axis.read(text) for text in over])


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_runs_nothing_twice(source: str, tmp_path: Path) -> None:
    found, folder = points(source, Selection(), AXES), tmp_path / "runs"
    with pytest.raises(KeyboardInterrupt):
        run(prepare(found[3].experiment), folder, Silent(interrupt_after=1))
    rows = list(sweep(found, folder, workers=local_workers(2)))
    written = json_lines(folder / ROWS)
    assert [row["run"] for row in written] == [point.experiment.name for point in found]
    assert {row["run"] for row in rows} == {row["run"] for row in written}
    assert [row["rounds"] for row in written] == [1, 2, 1, 2]
    assert all(0 < row["test"]["accuracy"] <= 1 and row["seconds"] > 0 for row in written)
    ledgers = [len((folder / row["run"] / "ledger.jsonl").read_text().splitlines()) for row in written]
    assert ledgers == [1, 2, 1, 2]
    again = [row["seconds"] for row in sweep(found, folder)]
    assert sorted(again) == sorted(row["seconds"] for row in written)  # read, not run
    other = points(source, Selection(overrides=({"seed": 5},)), AXES)
    with pytest.raises(ConfigError, match="another experiment"):
        next(sweep(other, folder))


@pytest.mark.slow
@pytest.mark.parametrize("left", [(), ("checkpoint",), ("checkpoint", ".experiment.toml.tmp")], ids=len)
def test_a_folder_that_a_killed_sweep_left_without_its_experiment_is_taken_over(
    left: tuple[str, ...], source: str, tmp_path: Path
) -> None:
    """The point was played beside it, in NAME-2, where no later sweep looked: none of them could end."""
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"
    path = folder / point.experiment.name
    path.mkdir(parents=True)
    for name in left:
        path.joinpath(name).touch() if "." in name else path.joinpath(name).mkdir()
    (row,) = sweep([point], folder, workers=workers())
    assert row["run"] == point.experiment.name
    assert sorted(one.name for one in folder.iterdir()) == [ROWS, point.experiment.name]
    assert joint_cost_of_points([point], folder)["runs"] == 1


def test_an_interruption_begins_no_other_point_and_says_how_to_go_on(source: str, tmp_path: Path) -> None:
    """The points that waited were played first, unseen."""
    options = ("--over", "seed=1,2,3,4,5", "--runs", tmp_path / "runs")
    found = ended("sweep", source, *options, "--executor", "tests.executors:Interrupted")
    assert found.code == 130
    assert found.err.endswith("interrupted; the same command goes on where it was\n")
    assert 1 <= len(Interrupted.begun) <= 2


def test_futures_that_cannot_be_cancelled_end_a_sweep_as_others_do(source: str, tmp_path: Path) -> None:
    """The command ended in a traceback after its last run."""
    options = ("--over", "rounds=1,2", "--runs", tmp_path / "runs", "--json")
    found = ended("sweep", source, *options, "--executor", "tests.executors:Uncancellable")
    assert (found.code, len(json.loads(found.out)["rows"])) == (0, 2)


def test_rows_of_an_earlier_sweep_stay(source: str, tmp_path: Path) -> None:
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"

    def play(one: Point, *_: object) -> dict[str, object]:
        return {"schema_version": 1, "run": one.experiment.name}

    folder.mkdir()
    stale = {"schema_version": 1, "run": point.experiment.name, "seconds": 1}
    before = [{"schema_version": 1, "run": "earlier", "seconds": 2}, stale]
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in before))
    rows = list(sweep([point], folder, workers=workers(play)))
    assert json_lines(folder / ROWS) == [before[0], *rows]
    (folder / ROWS).write_text("{")
    with pytest.raises(RunFolderError, match=r"sweep\.jsonl, line 1"):
        next(sweep([point], folder))


def test_a_folder_that_is_no_runs_is_left_alone(source: str, tmp_path: Path) -> None:
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"
    path = folder / point.experiment.name
    (path / "checkpoint").mkdir(parents=True)
    (path / "ledger.jsonl").touch()
    with pytest.raises(RunFolderError, match=r"has no experiment\.toml.*move it away"):
        next(sweep([point], folder))
    assert {one.name for one in path.iterdir()} == {"checkpoint", "ledger.jsonl"}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"prepare_point": lambda point: prepare(point.experiment)}, id="here"),
        pytest.param({}, marks=pytest.mark.slow, id="in a worker"),
    ],
)
def test_a_failed_run_is_named_and_the_others_are_complete(
    given: dict[str, Any], source: str, tmp_path: Path
) -> None:
    found = points(source, Selection(), [Axis.read("model.name=linear,no_such:model")])
    rows, folder = [], tmp_path / "runs"
    with pytest.raises(FedveilError, match="try-name_no_such_model"):
        rows.extend(sweep(found, folder, **given))
    assert len((folder / ROWS).read_text().splitlines()) == 1


VANISHES: dict[str, Any] = {
    "protection": {"name": "secure-aggregation", "dropout_rate": 0.999},
    "method": {"name": "uldp-avg"},
}


def test_a_run_whose_silos_vanish_is_named_and_the_others_are_complete(tmp_path: Path) -> None:
    """Its error takes more than a message: it was turned into a TypeError, and no other point was played."""
    found = [
        Point(experiment=experiment(name=name, rounds=1, **more), settings={"rounds": "1"})
        for name, more in (("gone", VANISHES), ("there", {}))
    ]
    with pytest.raises(SiloVanished, match=r"^gone: silos [0-2, ]+ vanished ") as raised:
        list(sweep(found, tmp_path))
    assert set(raised.value.silos) <= {0, 1, 2}
    assert [row["run"] for row in json_lines(tmp_path / ROWS)] == ["there"]


def all_errors(kind: type[FedveilError] = FedveilError) -> Iterator[type[FedveilError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from all_errors(one)


OF_MORE = (
    SiloVanished((1, 2), may_have_released=True),
    ProtocolError("no message", silo=3),
    LackingColumnsError("t.csv has no column 'age'", ["age"]),
    RefusalError(Code.ROUNDS, 5, 4),
)
"""An error of each class that is made of more than a message."""


def test_errors_pass_between_processes_as_they_are() -> None:
    """An error that a process cannot read back breaks its whole pool, and with it the runs of other points."""
    own = [kind for kind in all_errors() if "__init__" in vars(kind)]
    assert {type(one) for one in OF_MORE} >= {kind for kind in own if kind.__module__.startswith("fedveil.")}
    for one in (*OF_MORE, ConfigError("rounds: must be above 0")):
        for back in (pickle.loads(pickle.dumps(one)), one.with_place("first")):
            assert type(back) is type(one)
            assert vars(back) == vars(one)
        assert str(pickle.loads(pickle.dumps(one))) == str(one)
        assert str(one.with_place("first")) == f"first: {one}"


@pytest.mark.slow
def test_commands_sweep_and_compare_against_the_key(source: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    options = ("--over", "method.clip=0.5,1.0", "--runs", folder, "--set", "rounds=1")
    document = as_json("sweep", source, *options)
    assert [row["settings"] for row in document["rows"]] == [{"method.clip": "0.5"}, {"method.clip": "1.0"}]
    text = (folder / "method.clip.html").read_text()
    assert "What method.clip buys and costs" in text
    with pytest.raises(RunFolderError, match=r"no key method\.smoothing"):
        write_tradeoff(sorted(folder.glob("try*")), "method.smoothing", tmp_path / "page.html")


def trade(run: str, accuracy: float, seconds: float, mebibytes: float | None = None) -> Traded:
    metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
    return Traded(run=run, value=run, metrics=metrics, seconds=seconds, mebibytes=mebibytes)


def test_the_front_has_the_runs_that_no_other_beats() -> None:
    runs = [trade("a", 0.5, 1, 9), trade("b", 0.7, 2), trade("c", 0.6, 3, 8), trade("d", 0.7, 2, 10)]
    assert [run.run for run in front(runs, "accuracy", "seconds")] == ["a", "b", "d"]
    assert [run.run for run in front(runs, "loss", "seconds")] == ["a", "b", "d"]
    assert [run.run for run in front(runs, "accuracy", "mebibytes")] == ["c", "d"]
    text = page(runs, "protection.ratio")
    assert "Runs that no other beats" in text
    assert "Not beaten: a (protection.ratio = a)" in text


def test_runs_of_workers_that_died_are_named_and_the_command_resumes_them(
    source: str, tmp_path: Path
) -> None:
    options = ("--over", "rounds=1,2", "--runs", tmp_path / "runs")
    found = ended("sweep", source, *options, "--executor", "tests.executors:Lost")
    assert found.code == 74
    assert ": its worker ended before it did (BrokenExecutor); the same command resumes" in found.err


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        ("dusk:tcp://here:1", "dusk:tcp://here:1"),
        ("dask", "expected dask:ADDRESS"),
        ("slurm", "a name among dask, parsl, ray (of fedveil), or package.module:function"),
        ("tests.executors:no_executor", "returned a str, not a concurrent.futures.Executor"),
    ],
)
def test_what_is_no_executor_is_refused(executor: str, words: str, source: str, tmp_path: Path) -> None:
    options = ("--over", "rounds=1", "--runs", tmp_path / "runs", "--executor", executor)
    assert words in ended("sweep", source, *options).mistake


def test_a_worker_of_another_version_or_without_the_folder_is_refused(source: str, tmp_path: Path) -> None:
    (point,) = points(source, Selection(), [Axis.read("rounds=1")])

    def of_another_version(one: Point, folder: Path, _: str) -> object:
        return play_point(one, folder, "0.0.1")

    def elsewhere(one: Point, folder: Path, version: str) -> object:
        return play_point(one, folder / "not-shared", version)

    with pytest.raises(ConfigError, match=r"and the command 0\.0\.1; install the same"):
        next(sweep([point], tmp_path / "runs", workers=workers(of_another_version)))
    with pytest.raises(RunFolderError, match="all machines must share"):
        next(sweep([point], tmp_path / "runs", workers=workers(elsewhere)))
    assert not list((tmp_path / "runs").glob("*/*"))


def test_a_task_that_an_engine_gives_to_two_workers_is_not_played_beside_itself(
    source: str, tmp_path: Path
) -> None:
    """Where a slow worker is taken for a dead one, both may make the run's folder; each run would spend all of it."""
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"

    def prepare_beside_another(one: Point) -> Prepared:
        (folder / one.experiment.name).mkdir()  # the other worker was faster
        return prepare(one.experiment)

    with pytest.raises(RunFolderError, match="another process has made this run folder meanwhile"):
        next(sweep([point], folder, prepare_point=prepare_beside_another))
    assert [one.name for one in folder.iterdir()] == [point.experiment.name]
    (row,) = sweep([point], folder, prepare_point=lambda one: prepare(one.experiment))
    assert row["run"] == point.experiment.name

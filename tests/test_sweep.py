"""A sweep runs every point of its grid once, goes on after a kill, and shows what a key buys."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedveil.cli.app import main
from fedveil.errors import ConfigError, FedveilError, RunFolderError
from fedveil.report.tradeoff import Traded, front, page, write_tradeoff
from fedveil.run import sweep as engine
from fedveil.run.config.study import Selection
from fedveil.run.setup import prepare
from fedveil.run.sweep import ROWS, Axis, Point, joint_cost_of_points, points, sweep
from fedveil.run.training_run import run
from tests.commands import ended
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
    rows = list(sweep(found, folder, processes=2))
    written = json_lines(folder / ROWS)
    assert [row["run"] for row in written] == [point.experiment.name for point in found]
    assert {row["run"] for row in rows} == {row["run"] for row in written}
    assert [row["rounds"] for row in written] == [1, 2, 1, 2]
    assert all(0 < row["test"]["accuracy"] <= 1 and row["seconds"] > 0 for row in written)
    ledgers = [len((folder / row["run"] / "ledger.jsonl").read_text().splitlines()) for row in written]
    assert ledgers == [1, 2, 1, 2]
    again = [row["seconds"] for row in sweep(found, folder, processes=1)]
    assert sorted(again) == sorted(row["seconds"] for row in written)  # read, not run
    other = points(source, Selection(overrides=({"seed": 5},)), AXES)
    with pytest.raises(ConfigError, match="another experiment"):
        next(sweep(other, folder, processes=1))


@pytest.mark.slow
@pytest.mark.parametrize("left", [(), ("checkpoint",), ("checkpoint", ".experiment.toml.tmp")], ids=len)
def test_a_folder_that_a_killed_sweep_left_without_its_experiment_is_taken_over(
    left: tuple[str, ...], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The point was played beside it, in NAME-2, where no later sweep looked: none of them could end."""
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"
    monkeypatch.setattr(engine, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    path = folder / point.experiment.name
    path.mkdir(parents=True)
    for name in left:
        path.joinpath(name).touch() if "." in name else path.joinpath(name).mkdir()
    (row,) = sweep([point], folder, processes=1)
    assert row["run"] == point.experiment.name
    assert sorted(one.name for one in folder.iterdir()) == [ROWS, point.experiment.name]
    assert joint_cost_of_points([point], folder)["runs"] == 1


def test_an_interruption_begins_no_other_point_and_says_how_to_go_on(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The points that waited were played first, unseen."""
    begun = list[str]()

    def played(point: Point, _: Path) -> None:
        begun.append(point.experiment.name)
        time.sleep(0.1 * (len(begun) > 1))  # the pool may begin the second before it is told
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(engine, "_play", played)
    found = ended("sweep", source, "--over", "seed=1,2,3,4,5", "--runs", tmp_path / "runs")
    assert found.code == 130
    assert found.err.endswith("interrupted; the same command goes on where it was\n")
    assert len(begun) <= 2


def test_rows_of_an_earlier_sweep_stay(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"
    monkeypatch.setattr(engine, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(engine, "_play", lambda one, _: {"schema_version": 1, "run": one.experiment.name})
    folder.mkdir()
    stale = {"schema_version": 1, "run": point.experiment.name, "seconds": 1}
    before = [{"schema_version": 1, "run": "earlier", "seconds": 2}, stale]
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in before))
    rows = list(sweep([point], folder, processes=1))
    assert json_lines(folder / ROWS) == [before[0], *rows]
    (folder / ROWS).write_text("{")
    with pytest.raises(RunFolderError, match=r"sweep\.jsonl, line 1"):
        next(sweep([point], folder, processes=1))


def test_a_folder_that_is_no_runs_is_left_alone(source: str, tmp_path: Path) -> None:
    (point,), folder = points(source, Selection(), [Axis.read("rounds=1")]), tmp_path / "runs"
    path = folder / point.experiment.name
    (path / "checkpoint").mkdir(parents=True)
    (path / "ledger.jsonl").touch()
    with pytest.raises(RunFolderError, match=r"has no experiment\.toml.*move it away"):
        next(sweep([point], folder, processes=1))
    assert {one.name for one in path.iterdir()} == {"checkpoint", "ledger.jsonl"}


@pytest.mark.parametrize(
    "played",
    [
        pytest.param({"prepare_point": lambda point: prepare(point.experiment)}, id="here"),
        pytest.param({"processes": 1}, marks=pytest.mark.slow, id="in a worker"),
    ],
)
def test_a_failed_run_is_named_and_the_others_are_complete(
    played: dict[str, Any], source: str, tmp_path: Path
) -> None:
    found = points(source, Selection(), [Axis.read("model.name=linear,no_such:model")])
    rows, folder = [], tmp_path / "runs"
    with pytest.raises(FedveilError, match="try-name_no_such_model"):
        rows.extend(sweep(found, folder, **played))
    assert len((folder / ROWS).read_text().splitlines()) == 1


@pytest.mark.slow
def test_commands_sweep_and_compare_against_the_key(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    command = ["fedveil", "sweep", source, "--over", "method.clip=0.5,1.0", "--runs", str(folder), "--json"]
    monkeypatch.setattr("sys.argv", [*command, "--set", "rounds=1"])
    with pytest.raises(SystemExit):
        main()
    document = json.loads(capsys.readouterr().out)
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

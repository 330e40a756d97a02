"""What the console shows: epsilons rounded up, names and paths whole, how to go on after an interruption."""

from __future__ import annotations

import ast
import io
import json
import tomllib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from fedveil.cli import federation as federation_commands
from fedveil.console import Terminal, observer, rows_table, spinner, transposed_table
from fedveil.errors import RefusedRunError, SilentSiloError
from fedveil.federation.hosts.sockets import RunOutcome
from fedveil.privacy.statement import show_noise
from fedveil.reference import summary
from fedveil.registry import members, names
from fedveil.report.plan import _table
from fedveil.run.config.choice import own_keys
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.folder.run_folder import RunFolder
from tests.commands import ended, output
from tests.source import parsed, walked

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedveil"


@pytest.mark.parametrize("noise", [9.834499, 26.385, 5.0, 1.00004, 12345.6, 0.123456])
def test_a_plan_shows_noise_that_is_enough_for_the_epsilon_beside_it(noise: float) -> None:
    """Who copies the noise multiplier from the table would spend more than it says, were it rounded down."""
    console = Console(file=io.StringIO(), width=200)
    console.print(rows_table([{"method": "a", "noise_multiplier": noise}]))
    assert isinstance(console.file, io.StringIO)
    shown = float(console.file.getvalue().splitlines()[-2].split("│")[2])
    assert noise <= shown <= noise * 1.001
    page = _table([{"method": "a", "noise_multiplier": noise, "epsilon": 1.0}])
    assert show_noise(noise) in page


@given(st.floats(0, 1e12))
@example(2.5000000000001)
def test_tables_show_epsilon_rounded_up(epsilon: float) -> None:
    rows = [{"method": "a", "epsilon": epsilon}]
    for table in (rows_table(rows), transposed_table(rows)):
        console = Console(file=io.StringIO(), width=200)
        console.print(table)
        (row,) = cells(console, "a" if table.show_header else "epsilon")
        assert 0 <= Fraction(row[-1]) - Fraction(epsilon) < Fraction(1, 100)


def cells(console: Console, word: str) -> list[list[str]]:
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return [row for row in rows if word in row]


def test_no_epsilon_is_rounded_by_a_format() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in walked(parsed(path)):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                value, style = ast.unparse(node.value), ast.unparse(node.format_spec)
                if "epsilon" in value and "." in style:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {value} by {style}")
    assert found == []


WIDTHS = ("20", "40", "80")
EXPERIMENT = """
name = "a-name-that-is-longer-than-a-narrow-terminal"
rounds = 1
data = { name = "digits", n_users = 20, n_silos = 3 }
model = { name = "linear" }
local = { learning_rate = 0.1, batch_size = 8 }
method = { name = "uldp-avg-w", clip = 0.5, noise_multiplier = 5.0 }
"""
NAME = "a-name-that-is-longer-than-a-narrow-terminal"


@pytest.fixture(params=WIDTHS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of a long name where nobody has a terminal, and COLUMNS has a say all the same."""
    monkeypatch.setenv("COLUMNS", request.param)
    folder = tmp_path / "a folder [of] a name with words" / "that-nobody-would-want-to-see-broken-over-lines"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "long.toml").write_text(EXPERIMENT)
    return folder


def test_paths_and_names_are_whole_in_what_training_commands_print(place: Path) -> None:
    runs = place / "runs"
    text = output("run", "long.toml", "--runs", runs)
    assert f"{NAME}: from round 0 of 1, kept in {runs / NAME}\n" in text
    assert f"│ {NAME} │" in text
    assert f"report: {runs / NAME / 'report.html'}\n" in text
    statement = json.loads((runs / NAME / "privacy.json").read_text())["sentences"]
    assert all(f"{sentence}\n" in text for sentence in statement)
    assert f"report: {runs / NAME / 'report.html'}\n" in output("resume", runs / NAME)
    assert f"report: {runs / NAME / 'report.html'}\n" in output("report", runs / NAME)
    assert f"report: {runs / NAME / 'report.html'}\n" in output("audit", runs / NAME, "--canaries", 0)
    assert NAME in output("check", "long.toml")
    assert NAME in output("check", "long.toml", "--seeds", 2)
    page = place / "compared.html"
    assert f"comparison: {page}\n" in output("compare", runs, "--page", page)
    against = ("--against", "method.clip")
    assert f"comparison: {page}\n" in output("compare", runs, "--page", page, *against)


def test_paths_and_names_are_whole_in_what_the_other_commands_print(place: Path) -> None:
    page, schema = place / "plan.html", place / "schema.toml"
    text = output("plan", "--rounds", 5, "--group", 2, "--page", page)
    assert f"table and plot over the rounds: {page}\n" in text
    assert "│ uldp-sgd, uldp-avg, uldp-avg-w │" in text
    text = output("methods")
    assert all(f"│ {name} " in text for name in names("methods"))
    assert all(summary(one.load()) in text for one in members("methods"))
    assert "│ figure-9-subsampling-creditcard " in output("presets")
    assert tomllib.loads(output("presets", "digits"))["title"]
    assert "│ imagenette_subset " in output("data")
    (place / "sample.csv").write_text("patient,age,label\na,40,0\nb,51,1\n")
    assert f"drafted {schema}: read it" in output("schema", "sample.csv", "--output", schema)
    assert tomllib.loads(output("schema", "sample.csv"))["user"] == "patient"
    founder, silo = place / "founder", place / "north"
    text = output("federation", "create", founder, "--host", "h", "--schema", schema, "--no-passphrase")
    charter = founder / "charter.toml"
    assert f"hand out: {charter}\n" in text
    text = output("silo", "join", silo, "--name", "north", "--charter", charter, "--no-passphrase")
    assert f"send to the founder: {silo / 'north.request'}\n" in text


def test_an_error_is_one_line_with_its_path_whole(place: Path) -> None:
    schema = place / "a long name of a schema.toml"
    schema.write_text("")
    (place / "sample.csv").write_text("patient,age,label\na,40,0\nb,51,1\n")
    code, _, err = ended("schema", "sample.csv", "--output", schema)
    assert (code, err) == (2, f"fedveil: {schema}: exists already; choose another name\n")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_cuts_no_name_in_a_table(width: int) -> None:
    rows = [
        {
            "method": one.name,
            "keys": ", ".join(key.name for key in own_keys(one.load())),
            "does": summary(one.load()),
        }
        for one in members("methods")
    ]
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, soft_wrap=True)
    for table in (rows_table(rows, title="methods"), transposed_table(rows[:3])):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    words = {word for row in rows for value in row.values() for word in value.split()}
    assert [word for word in words if f" {word}" not in text] == []


def test_what_looks_like_markup_is_printed_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().print("kept in [/x] :smile: [bold]a[/bold]")
    assert capsys.readouterr().out == "kept in [/x] :smile: [bold]a[/bold]\n"


INTERRUPTED = """
from pathlib import Path

import torch


class Model(torch.nn.Linear):
    def forward(self, features):
        for path in Path("runs").rglob("metrics.jsonl"):
            if path.read_text().count("\\n") == 2 and not Path("continued").exists():
                raise KeyboardInterrupt
        return super().forward(features)


def model(shape, outputs):
    return Model(torch.Size(shape).numel(), outputs)
"""
"""A model during whose second round somebody presses Ctrl-C."""


@pytest.mark.parametrize("place", ["20"], indirect=True)
def test_an_interrupted_run_says_how_to_go_on_and_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "interrupted.py").write_text(INTERRUPTED)
    monkeypatch.syspath_prepend(place)
    own = ("--set", "model.name=interrupted:model")
    code, _, err = ended("run", "long.toml", *own, "--set", "rounds=2", "--runs", place / "runs")
    assert code == 130
    assert f"`fedveil resume '{place / 'runs' / NAME}'` goes on from the last complete round" in err
    assert "Traceback" not in err
    (place / "continued").touch()
    assert "round 2/2" in output("resume", place / "runs" / NAME, "--code", "interrupted:model")


@pytest.mark.parametrize("place", ["80"], indirect=True)
def test_an_interruption_before_any_run_names_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "never_built.py").write_text("def model(*_):\n    raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(place)
    assert ended("check", "long.toml", "--set", "model.name=never_built:model") == (
        130,
        "",
        "fedveil: interrupted\n",
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_every_observer_leaves_the_command_that_goes_on(terminal: bool, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    watching = observer(console, quiet=False, resume="fedveil federation run --home here --resume")

    def interrupted() -> None:
        with watching:
            watching.on_run_start(tmp_path / "run", experiment(), 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop:
        interrupted()
    (note,) = stop.value.__notes__
    assert note.startswith(f"`fedveil federation run --home here --resume {tmp_path / 'run'}` goes on")


def experiment() -> Experiment:
    return parse(tomllib.loads(EXPERIMENT), "test")


def test_a_run_refused_before_its_first_round_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.toml").write_text(EXPERIMENT)
    budget = ("--set", "privacy.budget=0.01", "--json")
    code, out, err = ended("run", "long.toml", *budget)
    assert (code, json.loads(out)["runs"][0]["rounds"]) == (4, 0)
    assert f"refused before the first round: runs/{NAME}: round 1 would bring epsilon to" in err
    code, out, err = ended("resume", f"runs/{NAME}")
    assert code == 4
    assert "refused before the first round" in err


def test_a_run_between_institutions_refused_before_its_first_round_fails(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, experiment())
    home: Any = SimpleNamespace(path=tmp_path)
    for silent, error, told in (
        (("north",), SilentSiloError, "north did not answer; go on once it does: `fedveil"),
        ((), RefusedRunError, "refused before the first round: silo north refuses: budget"),
    ):
        end = RunOutcome(error=None, stopped="silo north refuses: budget", silent=silent)
        with pytest.raises(error, match=told):
            federation_commands.check_end(home, folder, end)


@pytest.mark.parametrize(
    ("budget", "seed", "said"),
    [
        ("9", "", "yes"),
        ("0.01", "", "no"),
        ("", "", "no privacy.budget is set"),
        ("9", "1", "nothing is guaranteed"),
        ("0.01", "1", "no"),
        ("", "1", "no privacy.budget is set"),
    ],
)
def test_check_says_whether_a_run_is_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, seed: str, said: str
) -> None:
    """Under a known seed the run stops where it would, and nothing that it stays within is guaranteed."""
    monkeypatch.chdir(tmp_path)
    Path("long.toml").write_text(EXPERIMENT)
    given = ("privacy.budget=1", f"privacy.budget={budget}", f"privacy.insecure_seed={seed}")
    text = output("check", "long.toml", *(word for one in given for word in ("--set", one)))
    (row,) = [line for line in text.splitlines() if "within budget" in line]
    assert row.split("│")[2].strip() == said


@pytest.mark.parametrize("terminal", [True, False])
def test_work_without_rounds_is_shown_on_a_terminal_alone(terminal: bool) -> None:
    out = io.StringIO()
    with spinner("counts: making the releases", Console(file=out, force_terminal=terminal, width=80)):
        pass
    assert all((part in out.getvalue()) == terminal for part in ("counts: making the releases", "0:00:00"))
    assert terminal or not out.getvalue()

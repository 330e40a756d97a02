"""The command line as a person and a program use it; a mistake ends in one paragraph and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.cli import app, main

EXPERIMENT = """
name = "tiny"
rounds = 2
[data]
name = "digits"
n_users = 20
n_silos = 3
[model]
name = "linear"
[local]
learning_rate = 0.1
batch_size = 8
[method]
name = "uldp-avg-w"
clip = 0.5
noise_multiplier = 5.0
"""


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(EXPERIMENT)
    return path


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def as_json(*arguments: str) -> Any:
    return json.loads(output(*arguments, "--json"))


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["fedveil", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_run_report_resume_compare_one_after_the_other(toml: Path) -> None:
    text = output("run", str(toml))
    assert "tiny round 2/2" in text
    assert "Adding or removing one user" in text
    folder = toml.parent / "runs" / "tiny"
    assert (folder / "report.html").stat().st_size > 100_000
    (folder / "report.html").unlink()
    assert as_json("report", str(folder))["report"].endswith("report.html")
    resumed = as_json("resume", str(folder))
    assert resumed["runs"][0]["rounds"] == 2
    compared = as_json("compare", str(folder.parent))
    assert len(compared["rows"]) == 1


def test_run_prints_one_json_object(toml: Path) -> None:
    document = as_json("run", str(toml), "--set", "rounds=1", "--set", "method.user_sampling_rate=0.5")
    (run,) = document["runs"]
    assert run["rounds"] == 1
    assert run["statement"]["epsilon"] > 0
    assert run["statement"]["unit"] == "user"


def test_a_preset_runs_all_variants_and_compares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = as_json("run", "digits", "--quick", "--set", "rounds=1", "--set", "local.epochs=1")
    assert [Path(run["folder"]).name for run in document["runs"]] == ["fedavg", "uldp-naive", "uldp-avg-w"]
    assert Path(document["report"]).name == "comparison.html"
    epsilons = [run["statement"]["epsilon"] for run in document["runs"]]
    assert epsilons[0] is None
    assert epsilons[1] == pytest.approx(1.555, abs=1e-3)


def test_check_finds_the_budget_before_training(toml: Path) -> None:
    (row,) = as_json("check", str(toml), "--set", "privacy.budget=0.5")["experiments"]
    assert row["within budget"] is False
    assert row["epsilon"] == pytest.approx(1.0607, abs=1e-3)
    assert "tiny" in output("check", str(toml))


def test_plan_needs_no_data_and_meets_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = (
        "plan",
        "--users",
        "50",
        "--rounds",
        "50",
        "--epsilon",
        "3",
        "--group",
        "2",
        "--records",
        "200",
    )
    rows = as_json(*planned)["rows"]
    last = {row["method"]: row for row in rows if row["rounds"] == 50}
    assert set(last) == {"uldp-sgd, uldp-avg, uldp-avg-w", "uldp-naive", "uldp-group-2"}
    assert all(2.9 < row["epsilon"] <= 3 for row in last.values())
    assert last["uldp-naive"]["noise_multiplier"] == pytest.approx(
        2 * last["uldp-sgd, uldp-avg, uldp-avg-w"]["noise_multiplier"], rel=3e-3
    )
    assert "plan.html" in output("plan", "--rounds", "5", "--group", "2")
    assert as_json("plan", "--accountant", "rdp", "--group", "2")["left_out"] == ["uldp-group-2"]


@pytest.mark.parametrize("command", ["presets", "methods", "data"])
def test_lists(command: str) -> None:
    assert as_json(command)
    assert output(command)


def test_a_preset_is_printed_as_toml() -> None:
    assert "[variants.uldp-avg-w]" in output("presets", "digits")


def test_schema_is_drafted_from_a_public_sample(tmp_path: Path) -> None:
    sample = tmp_path / "sample.csv"
    sample.write_text("patient,age,label\na,40,0\nb,51,1\n")
    target = tmp_path / "schema.toml"
    output("schema", str(sample), "-o", str(target))
    assert "[features.age]" in target.read_text()


def test_a_mistake_is_one_paragraph_and_exit_code_2(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        return failure(monkeypatch, capsys, *arguments)

    assert "method.clip" in error("run", str(toml), "--set", "method.clip=0")
    assert "no such key" in error("run", str(toml), "--set", "method.clipping=1")
    assert "neither a preset nor" in error("run", "nonsense")
    assert "not a run folder" in error("resume", str(toml.parent))
    assert "no benchmark 'nonsense'" in error("bench", "nonsense")
    assert "no data set 'nonsense'" in error("data", "nonsense")
    assert not (toml.parent / "runs").exists()


def test_the_installed_command_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.strip()

"""The command line as a person and a program use it; a mistake ends in one paragraph and exit code 2."""

from __future__ import annotations

import errno
import io
import logging
import re
import shlex
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import COMMANDS, EXAMPLES, app
from fedveil.run import populations
from tests.commands import as_json, ended, output

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


def test_run_report_resume_compare_one_after_the_other(toml: Path) -> None:
    text = output("run", str(toml))
    assert "tiny round 2/2" in text
    assert "Adding or removing one user" in text
    folder = toml.parent / "runs" / "tiny"
    assert "Adding or removing one user" in (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert as_json("report", str(folder))["report"].endswith("report.html")
    again = output("resume", str(folder))
    assert "tiny: all 2 rounds were made before; nothing was trained or charged" in again
    assert "test accuracy" in again
    assert "Adding or removing one user" not in again  # the statement is not repeated
    resumed = as_json("resume", str(folder))
    assert resumed["runs"][0]["rounds"] == 2
    compared = as_json("compare", str(folder.parent))
    assert len(compared["rows"]) == 1
    shown = output("compare", str(folder.parent))
    assert all(
        word in shown for word in ("tiny", "to server", "test accuracy", "comparison: comparison.html")
    )


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
    assert [Path(run["folder"]).name for run in document["runs"]] == ["fedavg", "uldp-naive", "recommended"]
    assert Path(document["report"]).name == "comparison.html"
    epsilons = [run["statement"]["epsilon"] for run in document["runs"]]
    assert epsilons[0] is None
    assert epsilons[1] == pytest.approx(1.555, abs=1e-3)


def test_check_finds_the_budget_before_training(toml: Path) -> None:
    (row,) = as_json("check", str(toml), "--set", "privacy.budget=0.5")["experiments"]
    assert row["within budget"] is False
    assert row["epsilon"] == pytest.approx(1.0607, abs=1e-3)
    shown = output("check", str(toml)).split("to server")[1]
    assert "none" in shown.split("within budget")[0]  # counts are sent in the open


def test_check_promises_nothing_of_noise_from_a_known_seed(toml: Path) -> None:
    """The run's statement would say that nothing is guaranteed."""
    known = ("check", str(toml), "--set", "privacy.insecure_seed=1")
    for budget, within in (("", None), ("9", None), ("0.5", False)):
        (row,) = as_json(*known, "--set", f"privacy.budget={budget}")["experiments"]
        assert (row["epsilon"], row["to server"], row["within budget"]) == (None, None, within)


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
    for wrong in (("--rate", "50"), ("--rate", "nan"), ("--client-rate", "0")):  # of 50 all were planned for
        assert "a probability above 0 and at most 1" in ended("plan", *wrong).mistake
    assert "sigma = nan: a finite number >= 0" in ended("plan", "--sigma", "nan").mistake
    assert "Invalid value for '--group': 0" in ended("plan", "--group", "0").mistake


@pytest.mark.parametrize("command", ["presets", "methods", "data"])
def test_lists(command: str) -> None:
    assert as_json(command)
    assert output(command)


def test_a_preset_is_printed_as_toml() -> None:
    assert "[variants.recommended]" in output("presets", "digits")


def test_schema_is_drafted_from_a_public_sample(tmp_path: Path) -> None:
    sample = tmp_path / "sample.csv"
    sample.write_text("patient,age,label\na,40,0\nb,51,1\n")
    target = tmp_path / "schema.toml"
    output("schema", str(sample), "-o", str(target))
    assert "[features]\nage = " in target.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "No such command 'nonsense'; `fedveil --help`"),
        (["federation", "nonsense"], "No such command 'nonsense'; `fedveil federation --help`"),
        (["run"], "Missing argument 'PRESET_OR_TOML'; `fedveil run --help`"),
        (["plan", "--users", "0"], "Invalid value for '--users': 0 is not in the range 1<=x<="),
        (["plan", "--usrs", "3"], "No such option: --usrs"),
        (["--log-level", "loud", "presets"], "Invalid value for '--log-level': 'loud' is not one of"),
    ],
)
def test_a_command_that_is_called_otherwise_says_so_in_one_line(words: list[str], said: str) -> None:
    found = ended(*words)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(f"fedveil: {said}")
    assert found.err.count("\n") == 1


def test_a_group_alone_shows_its_help() -> None:
    found = ended("federation")
    assert found.code == 2
    assert "Founder" in found.out or "founder" in found.out
    assert found.err == ""


@pytest.mark.parametrize("file", ["statistics.toml", "inference.toml"])
def test_a_release_has_its_report_from_resume(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("")
    for command in (("report", tmp_path), ("compare", tmp_path)):
        assert f"`fedveil resume {tmp_path}` writes its report again" in ended(*command).mistake


def test_a_data_set_is_told_with_the_digests_that_its_files_are_known_by(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(data_folder))
    found = as_json("data", "heart_disease")
    assert [one["file"] for one in found["files"]] == [
        f"heart_disease/processed.{place}.data" for place in ("cleveland", "hungarian", "switzerland", "va")
    ]
    for one in found["files"]:
        content = (Path(found["folder"]) / one["file"]).read_bytes()
        assert one["digest"] == f"sha256:{sha256(content).hexdigest()}"
        assert one["from"].startswith("https://")
    assert "the records come with an installed package" in output("data", "digits")


def test_a_mistake_is_one_paragraph_and_exit_code_2(toml: Path) -> None:
    assert "method.clip" in ended("run", str(toml), "--set", "method.clip=0").mistake
    assert "no such key" in ended("run", str(toml), "--set", "method.clipping=1").mistake
    assert "neither a preset nor" in ended("run", "nonsense").mistake
    assert "not a run folder" in ended("resume", str(toml.parent)).mistake
    assert "no benchmark 'nonsense'" in ended("bench", "nonsense").mistake
    assert "no data set 'nonsense'" in ended("data", "nonsense").mistake
    assert "did you mean 'digits'?" in ended("data", "digit").mistake
    assert not (toml.parent / "runs").exists()


STUDY = """
title = "two, of which the second is wrong"
[experiment]
rounds = 1
data = { name = "digits", n_users = 20, n_silos = 3 }
model = { name = "linear" }
local = { batch_size = 8 }
method = { name = "uldp-avg", clip = 0.5, noise_multiplier = 5.0 }
[variants.right]
[variants.wrong]
"""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ('data = { name = "digitz" }', "no data set 'digitz'"),
        ('model = { name = "svhn_cnn" }', "svhn_cnn takes images"),
        ('channel = { name = "lrsuq", lattice = "Z9" }', "channel.lattice: must be"),
        ('method = { noise_multiplier = "calibrated" }', "privacy.epsilon"),
        (
            "method = { clip = 1e-40 }",
            "method.clip: clip norm is 1e-40; float32 updates need one between",
        ),
    ],
)
def test_every_experiment_of_a_study_is_checked_before_the_first_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(f"{STUDY}{wrong}\n")
    for command in ("run", "check"):
        said = ended(command, "two.toml").mistake
        assert message in said
        assert "(wrong): " in said
    assert not (tmp_path / "runs").exists()


def test_of_one_experiment_no_other_name_is_told(toml: Path) -> None:
    said = ended("check", str(toml), "--set", "model.name=svhn_cnn").mistake
    assert said.startswith("fedveil: model svhn_cnn takes images")


def test_more_seeds_than_anybody_runs_are_refused_by_name() -> None:
    """A command that was asked for 10^20 of them made documents without end."""
    said = ended("check", "digits", "--seeds", str(10**20)).mistake
    assert "--seeds" in said
    assert "1<=x<=10000" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError("shape (4711,)"), 74, "more memory is needed than there is"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/media/usb/model"),
            74,
            "/media/usb/model cannot be written: No space left on device",
        ),
    ],
    ids=["memory", "disk"],
)
def test_a_full_memory_or_disk_is_one_line_wherever_it_is_met(
    toml: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    monkeypatch.setattr("fedveil.run.setup.prepare", mock.Mock(side_effect=error))
    found = ended("check", str(toml))
    assert found.code == code
    assert said in found.err
    assert "4711" not in found.err
    assert found.err.count("\n") == 1


def test_check_shows_every_seed_and_a_study_loads_each_population_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(STUDY)
    loaded: list[int] = []
    load = populations.load_population
    monkeypatch.setattr(
        populations, "load_population", lambda data, seed: (loaded.append(seed), load(data, seed))[1]
    )
    rows = as_json("check", "two.toml", "--seeds", "3")["experiments"]
    assert [row["experiment"] for row in rows] == [
        f"{variant}-seed{seed}" for variant in ("right", "wrong") for seed in range(3)
    ]
    assert loaded == [0, 1, 2]


def test_a_key_is_taken_away_by_an_empty_value(toml: Path) -> None:
    (row,) = as_json("check", str(toml), "--set", "method.name=uldp-sgd", "--set", "local=")["experiments"]
    assert row["experiment"] == "tiny"
    (row,) = as_json("check", str(toml), "--set", "privacy.budget=1", "--set", "privacy.budget=")[
        "experiments"
    ]
    assert row["within budget"] is None
    assert "no such key 'clp'; known here: " in ended("check", str(toml), "--set", "method.clp=").mistake
    assert "method.clip: is required" in ended("check", str(toml), "--set", "method.clip=").mistake


def test_an_option_of_a_denoiser_that_was_not_asked_for_is_refused_with_the_right_key(toml: Path) -> None:
    def error(*assignments: str) -> str:
        options = [word for one in assignments for word in ("--set", one)]
        return ended("check", str(toml), *options).mistake

    client = ("method.name=dp-fed-ls", "method.smoothing=1", "data.n_silos=", "data.allocation.law=clients")
    assert "server.smoothing: no such key; known here: average, denoiser" in error("server.smoothing=2")
    assert "server.denoiser.scope: no such key; known here: name; it belongs to name = 'laplacian'" in error(
        "server.denoiser.name=james-stein", "server.denoiser.scope=vector"
    )
    assert "server.denoiser.name: is required" in error("server.denoiser.smoothing=2")
    assert "server.denoiser: dp-fed-ls brings its own" in error(*client, "server.denoiser.name=laplacian")
    order = ("--set", "server.denoiser.name=laplacian", "--set", "server.denoiser.scope=vector")
    assert as_json("check", str(toml), *order)


def test_a_schema_that_does_not_fit_is_named_by_file_and_key(toml: Path) -> None:
    schema = toml.parent / "schema.toml"
    schema.write_text(
        'n_users = "40"\nuser = "who"\n[target]\nkind = "label"\ncolumn = "y"\nclasses = ["a"]\n'
        '[features.age]\nkind = "amount"\n[features.sex]\nkind = "category"\n'
    )
    table = f'data.table={{ schema_file = "{schema}", files = ["a.csv"] }}'
    options = ("--set", "data.name=", "--set", "data.n_users=", "--set", "data.n_silos=", "--set", table)
    message = ended("check", str(toml), *options).mistake
    assert "toml does not fit: n_users: must be a whole number, not '40';" in message
    assert "target.classes: needs 2 or more entries, not 1" in message
    assert "features.age.kind: must be one of 'number', 'date', 'category', not 'amount'" in message
    assert "features.sex.categories: is required" in message
    assert "Input should" not in message
    assert "Field required" not in message


def test_no_help_imports_a_numerical_library(tmp_path: Path) -> None:
    """Of fedveil and of every command: 0.2 s instead of 3."""
    slow = "{'torch', 'scipy', 'numpy', 'dp_accounting', 'pyarrow', 'pydantic'}"
    code = (
        "import sys; from fedveil.cli import app as cli; from typer.testing import CliRunner; "
        "shown = CliRunner().invoke(cli.app, ['--help']).output; "
        "codes = {CliRunner().invoke(cli.app, [name, '--help']).exit_code for name in cli.COMMANDS}; "
        f"print(all(name in shown for name in cli.COMMANDS), codes, sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == "True {0} []"


@pytest.mark.slow
def test_what_a_run_imports_leaves_out_what_only_some_accounting_needs(tmp_path: Path) -> None:
    slow = "{'scipy.stats', 'scipy.signal', 'dp_accounting', 'pandas', 'sklearn'}"
    code = (
        f"import sys, fedveil.run.training_run, fedveil.report.page; print(sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_of_a_command_what_the_command_says_of_itself(name: str) -> None:
    said = (COMMANDS[name].load(name).help or "").split("\n\n")[0]
    assert " ".join(said.split()) == COMMANDS[name].summary


def test_every_example_is_a_command_with_options_that_it_has() -> None:
    """Parsed as it would be, and nothing is run."""
    for words, examples in EXAMPLES.items():
        for example in examples:
            program, *given = shlex.split(example.partition(" > ")[0])
            assert (program, given[: len(words.split())]) == ("fedveil", words.split())
            command = COMMANDS[given[0]].load(given[0])
            given, shown = given[1:], str(command.epilog)
            while inner := getattr(command, "commands", {}):
                command, given = inner[given[0]], given[1:]
                shown += str(command.epilog)
            assert example in shown
            command.make_context("example", given)


def test_every_command_that_stands_alone_has_an_example() -> None:
    groups = {"federation", "coordinator", "silo", "deploy", "link"}
    assert set(COMMANDS) - groups <= set(EXAMPLES)
    assert "Examples:" in output("stats", "--help")
    assert "fedveil silo join north --name north" in " ".join(output("silo", "join", "--help").split())


def test_no_help_is_taken_for_markup() -> None:
    """What stands in square brackets is a style to the library that prints it, and is not shown."""
    waiting, hidden = [COMMANDS[name].load(name) for name in COMMANDS], list[str]()
    for command in waiting:
        waiting += getattr(command, "commands", {}).values()
        texts = [command.help, *(getattr(one, "help", None) for one in command.params)]
        hidden += [text for text in texts if re.search(r"\[[a-z]", text or "")]
    assert hidden == []


def test_an_unknown_command_is_named_with_its_neighbour() -> None:
    result = CliRunner().invoke(app, ["chek"])
    assert result.exit_code == 2
    assert "'chek'" in result.output
    assert "'check'" in result.output


def test_the_installed_command_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.strip()


def test_words_are_completed() -> None:
    result = CliRunner().invoke(
        app,
        [],
        env={"_FEDVEIL_COMPLETE": "complete_bash", "COMP_WORDS": "fedveil pre", "COMP_CWORD": "1"},
        prog_name="fedveil",
    )
    assert result.output.split() == ["predict", "presets"]


def test_the_log_is_shown_from_the_level_asked_for() -> None:
    log, shown = logging.getLogger("fedveil"), io.StringIO()
    kept, level = list(log.handlers), log.level
    log.handlers.clear()
    try:
        output("--log-level", "info", "--version")
        (handler,) = log.handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(shown)
        logging.getLogger("fedveil.coordinator").info("two of \x1b[31mthree")
        logging.getLogger("fedveil.coordinator").debug("unheard")
        output("--log-level", "error", "--version")
        assert log.handlers == [handler]
        logging.getLogger("fedveil.silo").warning("unheard")
        assert shown.getvalue().endswith(
            " INFO fedveil.coordinator: two of \N{REPLACEMENT CHARACTER}[31mthree\n"
        )
        assert "unheard" not in shown.getvalue()
    finally:
        log.handlers[:], log.level = kept, level


def test_a_document_of_another_kind_is_sent_to_its_command(tmp_path: Path) -> None:
    counted, trained = tmp_path / "counted.toml", tmp_path / "trained.toml"
    counted.write_text('name = "c"\n[statistics]\n')
    trained.write_text('name = "t"\n[method]\nname = "fedavg"\n')
    assert f"trains nothing: `fedveil stats {counted}`" in ended("run", counted).mistake
    assert f"`fedveil stats {counted}` reads it" in ended("infer", counted).mistake
    assert f"`fedveil run {trained}` reads it" in ended("stats", trained).mistake


def test_a_folder_of_run_folders_is_answered_with_those_in_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("experiment.toml", "privacy.json"):
            (tmp_path / name / file).touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "inference.toml").touch()
    for command in ("spent", "report", "resume"):
        assert "folders in it that have one: a, b" in ended(command, tmp_path).mistake
    assert "a run of `fedveil infer`, which trained no model" in ended("audit", tmp_path / "c").mistake


def test_a_sweep_ends_with_one_table(toml: Path) -> None:
    text = output("sweep", toml, "--over", "rounds=1,2", "--runs", toml.parent / "swept")
    assert "{'" not in text
    header = next(line for line in text.splitlines() if "rounds" in line and "accuracy" in line)
    assert all(column in header for column in ("run", "epsilon", "seconds"))
    assert "together, 2 runs on the same people" in text


def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "t.csv").write_text("patient,sick\n1,no\n2,yes\n")
    nowhere = tmp_path / "file" / "inside"
    assert "cannot be written" in ended("schema", tmp_path / "t.csv", "-o", nowhere).mistake
    over = ("sweep", "digits", "--variant", "fedavg", "--over", "rounds=1,2")
    assert "cannot be made" in ended(*over, "--runs", nowhere).mistake
    assert "there is no such folder or file" in ended("verify", nowhere).mistake


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("check", "digit"), "did you mean 'digits'?"),
        (("check", "digits", "--variant", "uldp-navie"), "did you mean 'uldp-naive'?"),
        (("check", "digits", "--set", "method.name=uldp-agv"), "did you mean 'uldp-avg'?"),
        (
            ("check", "digits", "--variant", "uldp-naive", "--set", "method.noise=1"),
            "did you mean 'noise_multiplier'?",
        ),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(words: tuple[str, ...], told: str) -> None:
    assert ended(*words).mistake.endswith(told)

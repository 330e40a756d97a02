"""A run folder from somebody else: nothing that it names by an import path runs until its reader names it too."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.bundle.writing import bundle_run
from fedveil.errors import ConfigError, RunFolderError
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.submission import create_run, due_parts, read_document
from fedveil.run.audit import audit
from fedveil.run.config.experiment import merge, parse
from fedveil.run.config.task_choice import find_named_code
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from tests.commands import as_json, ended
from tests.runs import Silent, experiment

MODULE = "code_of_somebody_else"
CODE = """
from pathlib import Path
from fedveil.training.models import linear
from fedveil.training.metrics import accuracy as share
Path(__file__).with_name("ran").touch()
"""
NET, SHARE = f"{MODULE}:linear", f"{MODULE}:share"
NAMES = {"name": NET, "metrics": [SHARE, "loss"]}
READERS: dict[str, Callable[[Path, tuple[str, ...]], Any]] = {
    "resume": lambda folder, code: resume(folder, Silent(), code),
    "audit": lambda folder, code: audit(folder, canaries=0, code=code),
    "bundle": lambda folder, code: bundle_run(folder, folder.with_name("model.zip"), code=code),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose experiment names code; that it was run leaves no trace."""
    place = tmp_path_factory.mktemp("theirs")
    (place / f"{MODULE}.py").write_text(CODE)
    small = {"rounds": 1, "model": NAMES, "local": {"epochs": 1}}
    document = merge(experiment().model_dump(mode="json", exclude_none=True), small)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(place)
        return run(prepare(parse(document, "test")), place / "runs", Silent()).folder


@pytest.fixture
def foreign(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, on a machine that has the code and has not imported it yet."""
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return Path(shutil.copytree(begun, tmp_path / "foreign"))


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_runs_no_code_that_its_reader_does_not_name(reader: str, foreign: Path) -> None:
    for trusted, left in (((), (NET, SHARE)), ((NET,), (SHARE,)), ((SHARE, "os:system"), (NET,))):
        with pytest.raises(ConfigError) as refused:
            READERS[reader](foreign, trusted)
        said = str(refused.value)
        assert all(f"'{path}'" in said and f"--code {path}" in said for path in left)
        assert not any(path in said for path in {NET, SHARE} - set(left))
        assert MODULE not in sys.modules
        assert not foreign.with_name("ran").exists()
    READERS[reader](foreign, (NET, SHARE))
    assert foreign.with_name("ran").exists()


def test_commands_say_what_would_run_and_take_it_as_an_option(foreign: Path) -> None:
    for words in (
        ["resume"],
        ["audit", "--canaries", "0"],
        ["bundle", "-o", str(foreign.with_name("b.zip"))],
    ):
        command, *options = words
        refused = ended(command, str(foreign), *options)
        assert refused.code == 2
        assert f"model.name = '{NET}'" in refused.mistake
        assert not foreign.with_name("ran").exists()
    for words in (["verify"], ["report"]):
        ended(*words, str(foreign))
        assert not foreign.with_name("ran").exists(), words
    assert as_json(
        "bundle", str(foreign), "-o", str(foreign.with_name("b.zip")), "--code", NET, "--code", SHARE
    )


def test_what_is_named_is_what_an_import_path_names() -> None:
    document = experiment().model_dump(mode="json", exclude_none=True)
    assert find_named_code(parse(document, "test")) == {}
    asked = {
        "model": {"name": "session:Net", "loss": "a.b:c", "metrics": ["session:f", "d:e", "a.b:c", "loss"]}
    }
    assert find_named_code(parse(merge(document, asked), "test")) == {
        "a.b:c": "model.loss",
        "d:e": "model.metrics",
    }


def test_a_coordinator_goes_on_with_runs_of_its_own_alone(tmp_path: Path) -> None:
    made = write_demonstration(tmp_path / "demo", rounds=1, hospitals={"north": 60, "south": 50})
    home = CoordinatorFolder(made.provisioned.coordinator)
    own = create_run(home, read_document(made.experiment, home)).path
    for other in (shutil.copytree(own, tmp_path / "elsewhere"), shutil.copytree(own, own / "inside")):
        with pytest.raises(RunFolderError, match="goes on with runs of its own folder"):
            next(due_parts(home, Path(other)))
    (tmp_path / "link").symlink_to(own)
    next(due_parts(home, tmp_path / "link")).close()

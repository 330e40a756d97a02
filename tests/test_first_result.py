"""The handbook's path from tables to the first result, played: how many commands it takes, and that they suffice."""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.coordinator_service import CoordinatorService
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.silo_service import SiloService
from fedveil.federation.hosts.sockets import free_port
from fedveil.privacy.ledger import read_entries
from tests.commands import ended
from tests.doc_examples import ROOT

PAGE = ROOT / "docs" / "deployment.md"
MOST_COMMANDS = 12
"""For three silos: two for each silo beyond the ones that every federation needs."""


def commands(heading: str = "## From tables to the first result") -> list[str]:
    """The commands of a section, one for each that a person types."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    return re.findall(r"^ *\$ (fedveil .*)$", re.split(r"\n##+ ", text)[0], re.MULTILINE)


def test_twelve_commands_take_three_silos_to_their_first_result() -> None:
    typed = [shlex.split(line) for line in commands()]
    of_a_silo = [words for words in typed if words[1] == "silo"]
    assert len(of_a_silo) == 4  # of two silos
    assert len(typed) + len(of_a_silo) // 2 <= MOST_COMMANDS


class Played:
    """Hosts of all parties in one folder: what is served is served in this process."""

    def __init__(self, folder: Path, serving: ExitStack) -> None:
        self.folder, self._serving = folder, serving
        self.port = free_port()
        self._read_out: dict[str, str] = {}
        self.served: dict[str, CoordinatorService | SiloService] = {}

    def type(self, line: str) -> str:
        """Type a command as its page has it, with an address of this host; return what it prints."""
        words = shlex.split(line)[1:]
        local = {"learn.example.org": "127.0.0.1", "0.0.0.0:9443": f"127.0.0.1:{self.port}"}
        words = [local.get(word, word) for word in words]
        if words[1] in ("create", "join"):
            words.append("--no-passphrase")
        if words[1] == "create":
            words += ["--port", str(self.port)]
        if words[1] == "serve":
            return self._serve(words)
        asked = words[3:] if words[1] in ("admit", "accept") else []
        typed = "".join(self._read_out[file] + "\n" for file in asked)
        told = CliRunner().invoke(app.app, words, input=typed, catch_exceptions=False)
        assert told.exit_code == 0, told.output
        self._hand_out(words, told.output.strip().rpartition(": ")[2])
        return told.output

    def _hand_out(self, words: list[str], last: str) -> None:
        """Bring what a command made to everybody, and note what its operator reads out."""
        made = self.folder / words[2]
        if words[1] == "create":
            shutil.copy(made / "charter.toml", self.folder)
        elif words[1] == "join":
            shutil.copy(made / f"{words[2]}.request", self.folder)
            self._read_out[f"{words[2]}.request"] = last
        elif words[1] == "seal":
            shutil.copytree(made / "sealed", self.folder / "sealed", dirs_exist_ok=True)
            self._read_out["sealed/membership.toml"] = last

    def _serve(self, words: list[str]) -> str:
        group, _, folder, option, sealed = words
        assert option == "--accept"
        fingerprint = self._read_out[sealed]
        # The command serves until a signal, so that its two steps are taken apart here.
        accepted = CliRunner().invoke(app.app, [group, "accept", folder, sealed], input=f"{fingerprint}\n")
        assert accepted.exit_code == 0, accepted.output
        self.serve(group, folder)
        return accepted.output

    def serve(self, group: str, name: str) -> None:
        folder = self.folder / name
        if group == "coordinator":
            self.served[name] = CoordinatorService(CoordinatorFolder(folder))
        else:
            self.served[name] = SiloService(SiloFolder(folder))
        self._serving.callback(self.served[name].stop)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, whose name has a space, with what institutions have before: tables, schema, experiment."""
    made = write_demonstration(tmp_path / "demo", rounds=2, hospitals={"north": 40, "south": 40})
    folder = tmp_path / "all hosts"
    shutil.copytree(made.experiment.parent, folder)
    experiment = folder / "experiment.toml"
    # Noise that the drafted policy's epsilon of 1 pays for, so that no policy is edited.
    experiment.write_text(experiment.read_text().replace("noise_multiplier = 5.0", "noise_multiplier = 20.0"))
    monkeypatch.chdir(folder)
    return folder


def test_the_commands_of_the_short_path_suffice(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what helps beside them: a question that charges nothing, and the command that goes on, as it is printed."""
    with ExitStack() as serving:
        played = Played(tables, serving)
        *before, run = commands()
        for line in before:
            played.type(line)
        asked = ended(*shlex.split(f"{run} --dry-run")[1:])
        assert (asked.code, asked.out.strip()) == (
            0,
            "would take part: north, south; nothing was run or charged",
        )
        for silo in ("north", "south"):
            with (tables / silo / "policy.toml").open("a") as policy:
                policy.write("max_rounds = 1\n")
        refused = ended(*shlex.split(f"{run} --dry-run")[1:])
        said = " ".join(refused.err.split())
        assert refused.code == 3
        for silo in ("north", "south"):
            assert said.count(f"silo {silo} refuses (policy): rounds = 2: this silo allows at most 1") == 1
            assert not read_entries(tables / silo / "state" / "ledger.jsonl")
        assert not (tables / "coordinator" / "runs").exists()
        assert not list((tables / "coordinator" / "run").glob("question-*"))
        again = ended(*shlex.split(run)[1:])
        assert (again.code, again.out.count("refuses"), again.err.count("refuses")) == (3, 0, 1)
        for silo in ("north", "south"):
            policy_file = tables / silo / "policy.toml"
            policy_file.write_text(policy_file.read_text().replace("max_rounds = 1\n", ""))
        assert "epsilon" in played.type(run)
        for silo in ("north", "south"):
            assert len(read_entries(tables / silo / "state" / "ledger.jsonl")) == 2
        _go_on_as_printed(played, run, monkeypatch)
        _add_a_silo(played, run)
        serving.close()
        stopped = ended(*shlex.split(run)[1:])
        assert (stopped.code, "start `fedveil coordinator serve '" in stopped.err) == (75, True)


def test_a_silo_is_added_by_few_commands() -> None:
    """Three at the new silo at most, two at the founder, one at each other party, and nothing is restarted."""
    typed = [shlex.split(line) for line in commands("### Adding a silo")]
    at = {place: sum(words[3] == place for words in typed) for place in ("west", "founder")}
    assert (at["west"] <= 3, at["founder"]) == (True, 2)
    others = [words for words in typed if words[3] not in at]
    assert [words[2:4] for words in others] == [
        ["accept", "coordinator"],
        ["accept", "north"],
        ["accept", "south"],
    ]


def _add_a_silo(played: Played, run: str) -> None:
    shutil.copy(played.folder / "north.csv", played.folder / "west.csv")
    processes = {name: played.served[name] for name in ("coordinator", "north", "south")}
    for line in commands("### Adding a silo"):
        played.type(line)
    assert "epsilon" in played.type(run)
    assert {name: played.served[name] for name in processes} == processes
    assert CoordinatorFolder(played.folder / "coordinator").membership.silos == ("north", "south", "west")
    assert len(read_entries(played.folder / "west" / "state" / "ledger.jsonl")) == 2


def _go_on_as_printed(played: Played, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type the command that goes on with a run as it is printed, in another folder."""
    home = played.folder / "coordinator"
    settings = CoordinatorFolder(home).settings
    settings.model_copy(update={"patience": 0.5}).write(home / "coordinator.toml")
    for silo in ("north", "south"):
        played.served[silo].stop()
    silent = ended(*shlex.split(run)[1:])
    command = re.search(r"`fedveil (federation run [^`]*)`", " ".join(silent.err.split()))
    assert (silent.code, command is not None) == (5, True)
    settings.write(home / "coordinator.toml")
    for silo in ("north", "south"):
        played.serve("silo", silo)
    monkeypatch.chdir("/")
    assert command is not None
    gone_on = ended(*shlex.split(command[1]))
    monkeypatch.chdir(played.folder)
    assert (gone_on.code, "epsilon" in gone_on.out) == (0, True), gone_on.err

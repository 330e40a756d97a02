"""A run of several parts between institutions: prepared, trained, evaluated; each part a session of its own."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedveil.errors import DataError
from fedveil.federation.audit.recorded_run import verify_run
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.enrollment.demonstration import provision
from fedveil.federation.enrollment.joining import DraftedPolicy
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.silo_checks import inspect_silo
from fedveil.federation.hosts.submission import create_run, due_parts, read_document
from fedveil.federation.silo import SiloParty
from fedveil.federation.silo_ledger import LEDGER
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.ledger import Ledger, read_entries
from fedveil.protocols.refusals import Code
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.steps.experiment import ExperimentParts
from fedveil.run.training_run import run
from tests import test_evaluation_targets
from tests.hospitals import table_in
from tests.list_of_users import listed, write_list
from tests.runs import Silent
from tests.test_preprocessing import tables

ASKED: dict[str, Any] = {
    "name": "hospitals",
    "rounds": 2,
    "data": table_in(Path(), test_share=0.5),
    "model": {"name": "linear", "loss": "binary_cross_entropy"},
    "local": {"learning_rate": 0.5},
    "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": "calibrated"},
    "server": {"learning_rate": 20.0},
    "privacy": {"epsilon": 20.0, "accountant": "rdp", "insecure_seed": 1},
    "protection": {"name": "secure-aggregation"},
    "preprocessing": {"bounds": ["age", "code"], "impute": ["age"], "pool": {"ward": 60}},
    "evaluation": {},
    "budget": {"preprocessing": 0.2},
}
POLICY = "without_guarantee = true\nreleases = [{releases}]\n"
PEOPLE = 300
BOTH = '"preprocessing", "evaluation"'


class Study:
    """Three hospitals with their folders, and the run folder of the coordinator's experiment.

    Args:
        folder: where everything is; it has the tables.
        releases: those that every policy allows.
        base: the experiment, whose tables are the hospitals'.
        changes: to it.
    """

    def __init__(
        self, folder: Path, releases: str = BOTH, base: dict[str, Any] = ASKED, **changes: Any
    ) -> None:
        asked = parse(merge(base, changes), "test")
        assert asked.data.table is not None
        files = [path.stem for path in asked.data.table.files]
        (folder / "experiment.toml").write_text(asked.to_toml())
        users = listed(folder / "schema.toml")
        made = provision(
            folder / "federation",
            files,
            schema=folder / "schema.toml",
            host="127.0.0.1",
            port=9443,
            policy=DraftedPolicy(epsilon=1e6),
        )
        self.paths = list(made.silos)
        for path in made.silos:
            settings = SiloFolder(path).settings
            table = folder / f"{settings.name}.csv"
            settings.model_copy(update={"table": table, "users": users}).write(path / "silo.toml")
            policy = path / "policy.toml"
            policy.write_text(POLICY.format(releases=releases) + policy.read_text())
        self.home = CoordinatorFolder(made.coordinator)
        self.run = create_run(self.home, read_document(folder / "experiment.toml", self.home))

    def play(self, parts: int = 9, *, signs: bool = True) -> list[str | None]:
        """Play so many parts by parties that are opened anew; return why each ended early.

        Args:
            parts: at most.
            signs: whether the silos' signatures of the end arrive.
        """
        with ExitStack() as opened:
            silos = [opened.enter_context(open_silo(SiloFolder(path))) for path in self.paths]
            ended = list[str | None]()
            for party in due_parts(self.home, self.run.path):
                opened.callback(party.close)
                ended.append(carried(party, silos, signs=signs))
                if ended[-1] is not None or len(ended) == parts:
                    break
            return ended

    def charges(self, silo: int) -> list[tuple[str, int]]:
        """What a silo's ledger was charged with."""
        entries = read_entries(self.paths[silo] / "state" / LEDGER)
        return [(entry.run[32:], entry.round) for entry in entries]


def carried(party: CoordinatorParty[Any], silos: list[SiloParty], *, signs: bool = True) -> str | None:
    """Carry every message of a part, and the silos' signatures of the end; return why it ended early."""
    while party.outcome is None:
        for number, data in party.messages():
            party.receive(number, silos[number].receive(data))
    for number, data in party.farewells:
        answer = silos[number].receive(data)
        if signs:
            party.receive(number, answer)
    stopped: str | None = party.outcome.stopped
    return stopped


def alone(folder: Path, base: dict[str, Any] = ASKED) -> Path:
    """The run folder of the same experiment with all tables in this process."""
    listed(folder / "schema.toml")
    experiment: Experiment = parse(base, "test").resolve_paths(folder)
    return run(prepare(experiment), folder / "alone", Silent()).folder


def test_a_silo_without_the_file_of_main_silos_takes_no_part_and_is_charged_for_none(tmp_path: Path) -> None:
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, method={"name": "uldp-avg-w", "power": {"main_silos": "ab" * 32}})
    assert [Code.MAIN_SILOS.template in (ended or "") for ended in study.play(parts=1)] == [True]
    assert [study.charges(silo) for silo in range(3)] == [[], [], []]


def test_a_silo_with_another_list_of_users_takes_no_part_and_nobody_is_charged(tmp_path: Path) -> None:
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path)
    other = write_list(tmp_path / "other.txt", (f"p{number}" for number in reversed(range(PEOPLE))))
    silo = SiloFolder(study.paths[1])
    assert (
        inspect_silo(silo)["list of users"].removeprefix("sha256 ") in (tmp_path / "schema.toml").read_text()
    )
    silo.settings.model_copy(update={"users": tmp_path / "other.txt"}).write(silo / "silo.toml")
    with pytest.raises(DataError, match=f"a list of users with the sha256 {other}"):
        study.play(parts=1)
    assert study.charges(0) == []
    assert not any((path / "state" / LEDGER).exists() for path in study.paths[1:])


def test_a_run_of_all_parts_is_the_simulations_and_survives_restarts(tmp_path: Path) -> None:
    """Every part by parties that were opened again: the same files, the same statement, every charge at every silo."""
    tables(tmp_path, people=PEOPLE)
    asked = merge(ASKED, {"preprocessing": {"clip": "quantile"}})
    simulated = alone(tmp_path, asked)
    study = Study(tmp_path, base=asked)
    for _ in range(5):
        assert study.play(parts=1) == [None]
    assert study.play() == []
    for name in ("preprocessing.json", "schema.toml", "evaluation.json", "model.safetensors"):
        assert (study.run.path / name).read_bytes() == (simulated / name).read_bytes(), name
    said, known = (json.loads((path / "privacy.json").read_text()) for path in (study.run.path, simulated))
    assert said["epsilon"] is known["epsilon"] is None  # its noise came from a known seed
    for key in ("event", "unit", "mechanisms", "trust"):
        assert said[key] == known[key], key
    for silo in range(3):
        charged = [("", 1), ("", 2), ("/eval/1", 1), ("/eval/2", 1)]
        assert study.charges(silo) == [("/prep/1", 1), ("/prep/2", 1), *charged]
    assert [one for one in verify_run(study.run.path).checks if one.outcome == "fails"] == []
    assert [entry.run for entry in read_entries(study.run / "ledger.jsonl")] == [
        "hospitals/prep/1",
        "hospitals/prep/2",
        *["hospitals"] * 2,
        "hospitals/eval/1",
        "hospitals/eval/2",
    ]


@pytest.mark.parametrize(
    ("allowed", "words"),
    [('"evaluation"', "one of the requested releases"), ('"preprocessing"', "one of the requested releases")],
)
def test_parts_that_a_policy_does_not_name_stop_the_run_before_its_first_charge(
    tmp_path: Path, allowed: str, words: str
) -> None:
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, allowed)
    (stopped,) = study.play()
    assert words in (stopped or "")
    assert not any(study.charges(silo) for silo in range(3))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ('columns = ["age", "code", "sick"]', "one of the columns"),  # without the ward, which is pooled
        ('columns = ["age", "code", "ward"]', "one of the columns"),  # without the target
        ("max_release_length = 12", "this silo allows at most 12"),
    ],
)
def test_columns_and_lengths_that_a_policy_does_not_allow_stop_the_run_before_anything_is_charged(
    key: str, words: str, tmp_path: Path
) -> None:
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path)
    for path in study.paths:
        policy = path / "policy.toml"
        policy.write_text(f"{key}\n{policy.read_text()}")
    (stopped,) = study.play()
    assert words in (stopped or "")
    assert not any(study.charges(silo) for silo in range(3))


def test_the_whole_run_is_held_against_the_budget_before_its_first_release(tmp_path: Path) -> None:
    """The release that refines the schema would fit by itself; what the whole run costs does not."""
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, privacy={"insecure_seed": None})
    for path in study.paths:
        policy = (path / "policy.toml").read_text().replace("without_guarantee = true\n", "")
        (path / "policy.toml").write_text(re.sub(r"(?m)^epsilon = .*$", "epsilon = 15.0", policy))
    (stopped,) = study.play()
    assert "5 rounds would exceed" in (stopped or "")
    assert RunFolder(study.run.path).read_checkpoint() is None
    assert not any(study.charges(silo) for silo in range(3))


LOSSES = {"classes": "cross_entropy", "amounts": "squared_error", "lifetimes": "cox"}


@pytest.mark.parametrize("case", test_evaluation_targets.TARGETS)
def test_metrics_of_every_target_between_institutions_are_the_simulations(case: str, tmp_path: Path) -> None:
    """Several classes, numbers and survival: the same released numbers, byte for byte, and the same statement."""
    test_evaluation_targets.tables(tmp_path, case)
    base = merge(
        ASKED,
        {
            "data": {"table": {"files": ["north.csv", "south.csv"]}},
            "model": {"loss": LOSSES[case]},
            "privacy": {"epsilon": 30.0},
            "preprocessing": None,
            "evaluation": test_evaluation_targets.SECTIONS[case],
            "budget": None,
        },
    ) | {"budget": {"evaluation": 0.5}}
    simulated = alone(tmp_path, base)
    study = Study(tmp_path, '"evaluation"', base)
    for path in study.paths:
        policy = path / "policy.toml"
        policy.write_text("by_silo = true\n" + policy.read_text())
    parts = 3 if case == "lifetimes" else 2
    assert study.play() == [None] * parts
    for name in ("evaluation.json", "model.safetensors"):
        assert (study.run.path / name).read_bytes() == (simulated / name).read_bytes(), name
    said, known = (json.loads((path / "privacy.json").read_text()) for path in (study.run.path, simulated))
    for key in ("event", "mechanisms", "trust"):
        assert said[key] == known[key], key


def test_scoring_beyond_the_deadline_of_a_round_ends_the_release_and_stays_charged(tmp_path: Path) -> None:
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, preprocessing=None, budget=None)
    assert study.play(parts=1) == [None]
    for path in study.paths:
        policy = path / "policy.toml"
        policy.write_text("round_seconds = 1e-6\n" + policy.read_text())
    (stopped,) = study.play()
    assert "the round took longer than" in (stopped or "")
    assert study.charges(0)[-1] == ("/eval/1", 1)


@pytest.mark.parametrize(("repeats", "asked"), [(True, [3]), (False, [5, 6])])
def test_whether_training_has_ended_by_its_budget_is_asked_of_every_charge(
    repeats: bool, asked: list[int], tmp_path: Path
) -> None:
    """As a coordinator asks it before a round: else it would open training for ever, and never evaluate.

    After two rounds: masks that are recovered cost another charge an attempt (two rounds, each of them twice). Where
    an attempt repeats what was released, the third round needs a charge, or none once it has one.
    """
    event, given = GaussianEvent(noise_multiplier=2.0), list[int]()
    prepared = SimpleNamespace(
        over_budget=lambda rounds, beside, again: given.append(rounds + again),
        releases_before_training=(),
        releases_after_training=(),
        side_releases=(),
        experiment=SimpleNamespace(rounds=10, name="run", privacy=SimpleNamespace(budget=1.0)),
        guarantee=SimpleNamespace(unit="user", adjacency=Adjacency.ADD_OR_REMOVE_ONE, event=event),
        protocol_spec=SimpleNamespace(repeatable=repeats),
        preprocessing=None,
        evaluation=None,
    )
    witness = cast(Any, SimpleNamespace())  # between institutions
    charged = [(1, 0), (2, 0)] if repeats else [(1, 0), (1, 1), (2, 0), (2, 1)]
    for more in ([], [(3, 0)]):
        folder = RunFolder(tmp_path)
        with ExperimentParts(
            cast(Any, prepared), folder, NullObserver(), prepare=prepare, witness=witness
        ) as run:
            ledger = run.journal.ledger
            for number, attempt in [*charged, *more][len(ledger.entries) :]:
                ledger.charge(run="run", round=number, attempt=attempt, event=event)
            assert run._round_step(3).refusal() is None
    assert given == asked


@pytest.mark.parametrize("room", [True, False])
def test_a_release_is_asked_for_only_where_what_the_coordinators_ledger_has_leaves_room(
    tmp_path: Path, room: bool
) -> None:
    """Two rounds are charged and nothing is on disk: the release must fit beside them (round 1 is repeated)."""
    tables(tmp_path, people=PEOPLE)
    listed(tmp_path / "schema.toml")
    plain = prepare(parse(ASKED, "test").resolve_paths(tmp_path))
    assert plain.protocol_spec.repeatable
    needed = plain.epsilon_with(Role.READER, 1, plain.side_releases, 1)
    study = Study(tmp_path, privacy={"budget": needed * (1.001 if room else 0.999)})
    event = plain.guarantee.event_at_round(plain.guarantee.event, 1)
    with Ledger(study.run.path / "ledger.jsonl", unit="user") as ledger:
        for number in (1, 2):
            ledger.charge(run="hospitals", round=number, attempt=0, event=event)
    (stopped,) = study.play(parts=1)
    if room:
        assert stopped is None
    else:
        assert "prep/1, what is due after it and one more round would bring epsilon to" in (stopped or "")
    charged = [entry.run for entry in read_entries(study.run.path / "ledger.jsonl")]
    assert charged == ["hospitals", "hospitals", *(["hospitals/prep/1"] if room else [])]
    assert all(study.charges(silo) == ([("/prep/1", 1)] if room else []) for silo in range(3))

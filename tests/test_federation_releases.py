"""Statistics and regressions between institutions: the simulation's bytes, policies, ledgers, and lies."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

from fedveil.crypto.keys import IdentityKey
from fedveil.data.schema import read_schema
from fedveil.errors import ConfigError
from fedveil.federation.audit.recorded_run import verify_run
from fedveil.federation.audit.released_files import DECLARED
from fedveil.federation.audit.run_record import ROUNDS, RunRecord, signed_end
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.ledger_heads import HEADS, SeenHeads
from fedveil.federation.membership import Membership
from fedveil.federation.policy import RELEASES, Policy
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo import SiloParty, Standing
from fedveil.federation.silo_data import SiloFiles, load_silo_population
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.statement import Statement
from fedveil.protocols.messages import SERVER
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.session_messages import Finalize, RunPart, SessionMessage
from fedveil.run.config.release_document import (
    DeclaredTables,
    InferenceDocument,
    ReleaseDocument,
    TableDocument,
    declared_tables,
    read_releases,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases import series
from fedveil.run.releases.inference import prepare_inference
from fedveil.run.releases.requests import request_scope
from fedveil.run.releases.series import PreparedReleases
from fedveil.run.releases.statistics import prepare_release
from fedveil.run.simulation import make_releases
from fedveil.run.steps.document import DocumentParts
from fedveil.statistics import strategy
from tests import test_inference_runs, test_releases
from tests.commands import as_json
from tests.federation_world import next_session, small_keys
from tests.list_of_users import listed
from tests.test_run_audit import unnoticed_values

SILOS = ("north", "south", "west")
SEEDED = 'epsilon = 8.0\naccountant = "rdp"\ninsecure_seed = 1'
POLICY = Policy(
    epsilon=1e6,
    clip=1.0,
    protections=("none", "secure-aggregation", "private-weighting"),
    without_guarantee=True,
    releases=RELEASES,
)
PREPARE: dict[str, Callable[[TableDocument, DeclaredTables], PreparedReleases]] = {
    "statistics.toml": prepare_release,  # type: ignore[dict-item]
    "inference.toml": prepare_inference,  # type: ignore[dict-item]
}


class Hospitals:
    """The parties of releases, each with its folder, over the tables of a document.

    Args:
        folder: where their files are.
        document: what the coordinator asks for.
        policy: of every silo.
    """

    def __init__(self, folder: Path, document: TableDocument, policy: Policy = POLICY) -> None:
        assert document.data.table is not None
        table = document.data.table
        self.folder, self.document, self.policy = folder, document, policy
        self.users = listed(table.schema_file)
        self.schema = read_schema(table.schema_file)
        self.files = {path.stem: path for path in table.files}
        self.keys = [IdentityKey.generate() for _ in self.files]
        self.key = IdentityKey.generate()
        self.membership = Membership(
            silos=tuple(self.files),
            roster=tuple(key.public for key in self.keys),
            coordinator=self.key.public,
            schema_digest=hashlib.sha256(table.schema_file.read_bytes()).digest(),
        )
        self.run = RunFolder.create(folder / "federated", document)
        self.run.write(DECLARED, table.schema_file.read_bytes())
        self.silos = [self.silo(number) for number in range(len(self.keys))]
        self.lie = self.told

    def silo(self, number: int) -> SiloParty:
        """Open a silo."""
        name = self.membership.silos[number]
        state = self.folder / f"state-{name}"
        state.mkdir(exist_ok=True)
        return SiloParty(
            standing=lambda: Standing(membership=self.membership, policy=self.policy),
            number=number,
            identity=self.keys[number],
            share=load_silo_population(
                self.schema, SiloFiles(self.files[name], self.users), self.membership, number
            ),
            state=state,
        )

    def coordinator(self, *, again: bool = False) -> CoordinatorParty[Any]:
        """Open the coordinator of the next release, or of the last one again."""
        declared = DeclaredTables(schema=self.schema, silos=self.membership.silos)
        record = RunRecord(self.run, self.membership, self.key)
        run = DocumentParts(PREPARE[self.document.file](self.document, declared), self.run, witness=record)
        return next_session(run, record, SeenHeads(self.folder / HEADS, bytes(32)), again=again)

    def play(self) -> str | None:
        """Play the next release; return why it ended early."""
        return self.carry(self.coordinator())

    def carry(self, party: CoordinatorParty[Any], most: int = 50) -> str | None:
        """Carry every message of a release, in order; return why it ended early."""
        for _ in range(most):
            if party.outcome is not None:
                for number, data in party.farewells:
                    party.receive(number, self.silos[number].receive(self._told(number, data)))
                stopped: str | None = party.outcome.stopped
                return stopped
            for number, data in party.messages():
                party.receive(number, self.silos[number].receive(self._told(number, data)))
        raise AssertionError("the release does not end")

    @staticmethod
    def told(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        """What an honest coordinator tells."""
        return parts

    def _told(self, number: int, data: bytes) -> bytes:
        """A message, or what a coordinator that lies makes of it."""
        signed_message = SignedMessage.open(
            data, sender=SERVER, identity=self.key.public, recipient=number, largest=LARGEST_MESSAGE
        )
        return replace(signed_message, parts=self.lie(number, signed_message.parts)).seal(self.key)

    def close(self) -> None:
        """Close all silos."""
        for silo in self.silos:
            silo.close()

    def charges(self, silo: str) -> list[Any]:
        """What a silo's own ledger was charged with."""
        return list(read_entries(self.folder / f"state-{silo}" / LEDGER))


def statistics(folder: Path, **changes: Any) -> TableDocument:
    """A request for statistics over three hospitals' tables, which training could read too."""
    test_releases.tables(folder, people=60, odd=False)
    asked: dict[str, Any] = {
        "people": 60,
        "privacy": SEEDED,
        "statistics": 'silos = "uniform"\nmax_standard_error = 1e6',
    }
    path = test_releases.written(folder, **asked | changes)
    listed(folder / "schema.toml")
    return read_releases(path, ReleaseDocument)


WEIGHTED = {
    "protection": 'name = "private-weighting"\nn_max = 6',
    "statistics": 'silos = "records"\nmax_standard_error = 1e6',
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"protection": 'name = "none"'}, WEIGHTED],
    ids=["masked", "open", "weighted"],
)
def test_statistics_between_institutions_are_the_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """The same bytes, the same statement, and every silo's ledger has the charge of it."""
    small_keys(monkeypatch)
    document = statistics(tmp_path, **changes)
    alone = make_releases(prepare_release(document), tmp_path / "alone")  # type: ignore[arg-type]
    world = Hospitals(tmp_path, document)
    assert world.play() is None
    world.close()
    for name in ("statistics.json", "privacy.json"):
        assert (world.run.path / name).read_bytes() == (alone / name).read_bytes(), name
    run = json.loads((world.run.path / "federation.json").read_text())["run"]
    for silo in SILOS:
        (charge,) = world.charges(silo)
        assert (charge.run, charge.round, charge.attempt) == (f"{run}/1", 1, 0)


def test_a_regression_between_institutions_is_the_simulations_and_survives_restarts(tmp_path: Path) -> None:
    """Every release by parties that were opened again: the bytes of the simulation, and three charges at every silo."""
    test_inference_runs.tables(tmp_path, odd=False)
    document = read_releases(test_inference_runs.written(tmp_path, privacy=SEEDED), InferenceDocument)
    listed(tmp_path / "schema.toml")
    alone = make_releases(prepare_inference(document), tmp_path / "alone")
    world = Hospitals(tmp_path, document)
    for _ in range(3):
        assert world.play() is None
        world.close()
        world.silos = [world.silo(number) for number in range(len(world.keys))]
    world.close()
    for name in ("inference.json", "privacy.json"):
        assert (world.run.path / name).read_bytes() == (alone / name).read_bytes(), name
    for silo in world.membership.silos:
        assert [charge.run[32:] for charge in world.charges(silo)] == ["/1", "/2", "/3"]


def test_a_release_that_was_begun_is_not_begun_again_where_that_is_another_release(tmp_path: Path) -> None:
    """Under "recover" silos that are asked again draw noise anew, which nobody declared: the charge stands."""
    recovering = 'name = "secure-aggregation"\non_dropout = "recover"\nmax_dropouts = 1'
    world = Hospitals(tmp_path, statistics(tmp_path, protection=recovering))
    party = world.coordinator()
    while not world.charges("north"):
        for number, data in party.messages():
            party.receive(number, world.silos[number].receive(data))
    party.close()  # killed: silos have given their sums, and the coordinator has none
    assert "begun before and is charged" in (world.play() or "")
    assert [len(world.charges(silo)) for silo in SILOS] == [1, 1, 1]
    assert not (world.run.path / "statistics.json").exists()
    world.close()


# --- what a silo does not take part in ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "changes", "words"),
    [
        (
            {"releases": ("count", "missing", "quantiles", "mean", "cross")},
            {},
            "one of the requested releases",
        ),
        ({"max_release_length": 10}, {}, "this silo allows at most 10"),
        ({"columns": ("age", "days", "died", "sick")}, {}, "one of the columns"),
        ({"columns": ()}, {}, "one of the columns"),
        ({"min_standard_error": 50.0}, {}, "requires at least 50"),
        ({"protections": ("private-weighting",)}, {}, "protection.name"),
        ({"without_guarantee": False}, {}, "insecure_seed"),
        ({"without_guarantee": False, "epsilon": 2.0}, {"privacy": "epsilon = 3.0"}, "1 rounds would exceed"),
        (
            {},
            {"statistics": 'silos = "uniform"\nmax_standard_error = 1e6\nby = ["silo"]'},
            "does not allow figures by silo",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_silo_refuses_what_its_policy_does_not_allow(
    tmp_path: Path, limits: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    """Before anything is charged there, or asked of its records."""
    world = Hospitals(tmp_path, statistics(tmp_path, **changes), POLICY.model_copy(update=limits))
    assert words in (world.play() or "")
    world.close()
    assert not any(world.charges(silo) for silo in SILOS)
    assert not (world.run.path / "statistics.json").exists()


def test_what_a_silo_refuses_costs_it_no_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are factorised, and noise is looked for, only where figures, columns and length are allowed."""
    planned: list[str] = []

    def counted(name: str, does: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            planned.append(name)
            return does(*given, **named)

        return call

    release = 'age = { show = ["quantiles"], bins = 128 }'
    refused = (
        {"max_release_length": 100},
        {"columns": ("days",)},
        {"releases": ("count",)},
        {"without_guarantee": False},
    )
    for place, limits in enumerate((*refused, {})):
        (folder := tmp_path / str(place)).mkdir()
        document = statistics(folder, release=release, privacy=SEEDED.replace("8.0", "1000.0"))
        world = Hospitals(folder, document, POLICY.model_copy(update=limits))
        party = world.coordinator()  # it plans what it asks for
        with monkeypatch.context() as patched:
            patched.setattr(series, "least_noise", counted("noise", series.least_noise))
            patched.setattr(strategy, "solve_triangular", counted("code", strategy.solve_triangular))
            assert (world.carry(party) is None) is (not limits)
        world.close()
        assert set(planned) == (set() if limits else {"noise", "code"}), limits


def test_a_regression_reads_its_target_and_features_and_no_other_column(tmp_path: Path) -> None:
    test_inference_runs.tables(tmp_path, odd=False)
    document = read_releases(test_inference_runs.written(tmp_path, privacy=SEEDED), InferenceDocument)
    listed(tmp_path / "schema.toml")
    read = request_scope(document, declared_tables(document.data.table)).columns  # type: ignore[arg-type]
    assert {"sick"} < read < set(read_schema(tmp_path / "schema.toml").columns)
    for column in sorted(read):
        world = Hospitals(tmp_path, document, POLICY.model_copy(update={"columns": tuple(read - {column})}))
        assert "one of the columns" in (world.play() or ""), column
        world.close()
    world = Hospitals(tmp_path, document, POLICY.model_copy(update={"columns": tuple(read)}))
    assert world.play() is None
    world.close()


@pytest.mark.parametrize("changes", [{}, WEIGHTED], ids=["masked", "weighted"])
def test_counting_beyond_the_deadline_of_a_round_ends_the_release_and_stays_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    small_keys(monkeypatch)
    hurried = POLICY.model_copy(update={"round_seconds": 1e-9})
    world = Hospitals(tmp_path, statistics(tmp_path, **changes), hurried)
    assert "the round took longer than" in (world.play() or "")
    world.close()
    assert len(world.charges(SILOS[0])) == 1
    assert not (world.run.path / "statistics.json").exists()


def test_a_policy_allows_no_release_unless_it_names_it(tmp_path: Path) -> None:
    assert Policy(epsilon=1.0, clip=1.0).releases == ()
    path = tmp_path / "policy.toml"
    path.write_text('epsilon = 1.0\nclip = 1.0\nreleases = ["histograms"]\n')
    with pytest.raises(ConfigError, match=r"releases.*no figure 'histograms'; there are: count"):
        Policy.read(path)


# --- coordinators that lie ----------------------------------------------------------------------------------


def lied(
    change: Callable[[RunPart], RunPart],
) -> Callable[[int, tuple[SessionMessage, ...]], tuple[SessionMessage, ...]]:
    """A coordinator that tells silo 0 something else of what was released before."""
    return lambda silo, parts: tuple(
        change(part) if silo == 0 and isinstance(part, RunPart) else part for part in parts
    )


def moved(phase: RunPart, std: float = 1.0, number: float = 0.0, length: int = 0) -> RunPart:
    """What was released, with another noise, number or length."""
    ((own, vector),) = phase.released
    changed = np.concatenate([vector[: len(vector) - length], np.zeros(0)])
    changed[0] += number
    return replace(phase, released=((own * std, changed),))


LIES: tuple[tuple[Callable[[RunPart], RunPart], str], ...] = (
    (lambda phase: replace(phase, name="3"), "do not fit"),
    (lambda phase: replace(phase, name="eval/1"), "do not fit"),
    (lambda phase: replace(phase, released=()), "do not fit"),
    (lambda phase: replace(phase, released=phase.released * 4), "do not fit"),
    (lambda phase: moved(phase, std=0.5), "do not fit"),
    (lambda phase: moved(phase, length=1), "do not fit"),
    (lambda phase: moved(phase, number=np.nan), "do not fit"),
    (lambda phase: moved(phase, number=1e308), "do not fit"),
    (lambda phase: moved(phase, number=1.0), "belongs to another run"),
)


def test_what_was_released_before_cannot_be_told_otherwise(tmp_path: Path) -> None:
    """The last lie is a sum that could have been released: told to one silo alone, no masks of its session cancel."""
    test_inference_runs.tables(tmp_path, odd=False)
    document = read_releases(test_inference_runs.written(tmp_path, privacy=SEEDED), InferenceDocument)
    world, honest = Hospitals(tmp_path, document), Hospitals.told
    assert world.play() is None
    for change, words in LIES:
        world.lie = lied(change)
        assert words in (world.play() or "")
        assert all(len(world.charges(silo)) == 1 for silo in world.membership.silos)
    world.lie = honest
    assert world.play() is None
    world.close()


def place_of(world: Hospitals) -> bytes:
    """Where a silo keeps what it gave to the first release."""
    run = bytes.fromhex(json.loads((world.run.path / "federation.json").read_text())["run"])
    return hashlib.sha256(run + b"1").digest()[:16]


def test_a_release_is_asked_for_again_after_a_crash_and_answered_alike(tmp_path: Path) -> None:
    """The coordinator dies between the silos' vectors and its file: one charge everywhere, and the same vectors."""
    world = Hospitals(tmp_path, statistics(tmp_path, protection='name = "none"'))
    party = world.coordinator()
    answers: list[bytes] = []
    for exchange in range(3):  # nonces, terms, and the task, whose answers are lost
        for number, data in party.messages():
            answers.append(world.silos[number].receive(data))
            if exchange < 2:
                party.receive(number, answers[-1])
    given = [world.silos[number]._store.read(place_of(world)) for number in range(3)]
    party.close()
    assert world.play() is None
    world.close()
    again = [world.silos[number]._store.read(place_of(world)) for number in range(3)]
    assert [one.contribution for one in again if one] == [one.contribution for one in given if one] != []
    assert len(read_entries(world.run.path / "ledger.jsonl")) == 1
    assert all(len(world.charges(silo)) == 1 for silo in SILOS)


def test_a_release_is_not_drawn_again_without_its_answer(tmp_path: Path) -> None:
    world = Hospitals(tmp_path, statistics(tmp_path, protection='name = "none"'))
    party = world.coordinator()
    for exchange in range(3):  # nonces, terms, and the task, whose answers are lost
        for number, data in party.messages():
            reply = world.silos[number].receive(data)
            if exchange < 2:
                party.receive(number, reply)
    party.close()
    shutil.rmtree(world.silos[0]._store.folder)
    assert Refusal(Code.REPLACED).sentence in (world.play() or "")
    assert len(world.charges(SILOS[0])) == 1
    world.close()


# --- what a silo tells beside its message -------------------------------------------------------------------


@pytest.mark.parametrize("protection", ["none", "secure-aggregation"])
def test_neighbours_are_answered_in_messages_of_the_same_shape(tmp_path: Path, protection: str) -> None:
    """With and without a person who has records in all silos: as many messages, of the same lengths, both ways."""
    found = []
    for without in (None, 0):
        folder = tmp_path / str(without)
        folder.mkdir()
        document = statistics(folder, protection=f'name = "{protection}"')
        test_releases.tables(folder, people=60, odd=False, without=without)
        world, shapes = Hospitals(folder, document), []
        party = world.coordinator()
        while party.outcome is None:
            for number, data in party.messages():
                answer = world.silos[number].receive(data)
                shapes.append((number, len(data), len(answer)))
                party.receive(number, answer)
        world.close()
        found.append(shapes)
    assert found[0] == found[1]


def test_the_folder_of_a_release_is_checked_as_that_of_a_run(tmp_path: Path) -> None:
    """Ledger, statement, epsilon, and what its parties have signed: the document, its round, its end."""
    world = Hospitals(tmp_path, statistics(tmp_path))
    assert world.play() is None
    world.close()
    folder = world.run.path
    found = {one["name"]: one for one in as_json("verify", folder)["checks"]}
    names = ("experiment", "ledger", "statement", "rounds", "end")
    assert [found[name]["outcome"] for name in names] == ["holds"] * 5
    assert "model" not in found
    assert found["end"]["detail"].startswith("statement signed by the coordinator")
    counted = folder / "statistics.json"
    document = json.loads(counted.read_text())
    (one,) = document["releases"]
    forged = one | {"vector": [1234.0] * len(one["vector"])}
    for changed, outcome in (
        (document, "holds"),
        (document | {"releases": [forged]}, "fails"),
        (document | {"releases": [one | {"noise_std": 1e-3}]}, "fails"),
        (document | {"releases": [one, forged]}, "fails"),
        (
            document | {"releases": [forged], "vector": one["vector"]},
            "fails",
        ),  # signed numbers beside forged ones
        (document | {"more": 1}, "fails"),
    ):
        counted.write_text(json.dumps(changed))
        (said,) = [one for one in verify_run(folder).checks if one.name == "releases"]
        assert said.outcome == outcome
    counted.write_text(json.dumps(document))
    tried, unnoticed = unnoticed_values(folder, "statistics.json")
    assert tried > 20
    assert unnoticed == []
    (name, feature) = next(
        one for one in document["schema"]["features"].items() if one[1]["kind"] == "number"
    )
    declared = tomlkit.parse((folder / DECLARED).read_text())
    for one in (feature, declared["features"][name]):  # type: ignore[index]
        one["upper"] *= 100
    counted.write_text(json.dumps(document))
    (folder / DECLARED).write_text(tomlkit.dumps(declared))
    (said,) = [one for one in verify_run(folder).checks if one.name == "releases"]
    assert "not the schema on which the members agreed" in said.detail
    (folder / "ledger.jsonl").write_bytes(b"")
    assert not verify_run(folder).holds


def test_every_release_of_a_document_is_signed_and_its_end_with_the_last(tmp_path: Path) -> None:
    test_inference_runs.tables(tmp_path, odd=False)
    document = read_releases(
        test_inference_runs.written(tmp_path, privacy="epsilon = 8.0"), InferenceDocument
    )
    world, flatters = Hospitals(tmp_path, document), list[int]()

    def flattering(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        """A coordinator that shows one silo of two a smaller epsilon."""
        if silo or not isinstance(parts[0], Finalize):
            return parts
        flatters.append(silo)
        stated = Statement.from_json(json.loads(parts[0].statement))
        assert stated.epsilon is not None
        less = replace(stated, epsilon=stated.epsilon * 0.99)
        return replace(parts[0], statement=json.dumps(less.to_json())), *parts[1:]

    for made in range(3):
        assert not made or ends(world.run.path) == "unchecked"
        world.lie = flattering
        assert world.play() is None
    assert flatters == [0]
    assert [one["silo"] for one in signed_end(world.run.path)] == [1]
    world.lie = Hospitals.told
    party = world.coordinator(again=True)
    assert world.carry(party) is None
    assert ends(world.run.path) == "holds"
    fitted = world.run / "inference.json"
    document = json.loads(fitted.read_text())
    for more, outcome in (({}, "holds"), (document["releases"][0], "fails")):  # a key that no reader reads
        fitted.write_text(json.dumps(document | more))
        assert [one.outcome for one in verify_run(world.run.path).checks if one.name == "releases"] == [
            outcome
        ]
    fitted.write_text(json.dumps(document))
    tried, unnoticed = unnoticed_values(world.run.path, "inference.json")
    assert tried > 10
    assert unnoticed == []
    assert [json.loads(line)["part"] for line in (world.run / ROUNDS).read_text().splitlines()] == [
        "1",
        "2",
        "3",
    ]
    assert all(len(world.charges(silo)) == 3 for silo in world.membership.silos)
    world.close()


def ends(folder: Path) -> str:
    """What `fedveil verify` says of the end of a run."""
    (found,) = [one.outcome for one in verify_run(folder).checks if one.name == "end"]
    return found

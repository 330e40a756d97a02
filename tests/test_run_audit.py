"""`fedveil verify RUN`: the signatures of a run's parties, and every way in which somebody changes what they signed."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from safetensors.torch import load_file

from fedveil.api.predictor import Predictor
from fedveil.bundle.manifest import read_files
from fedveil.bundle.verification import verify_bundle
from fedveil.bundle.writing import Source, write_bundle
from fedveil.checks import Verification, run_check
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import FedveilError, IntegrityError
from fedveil.federation.audit import released_files
from fedveil.federation.audit.ledger_audit import export_ledger, verify_ledger
from fedveil.federation.audit.recorded_run import NOT_CHECKABLE, RecordedRun, verify_run
from fedveil.federation.audit.released_files import check_releases, check_schema
from fedveil.federation.audit.run_record import (
    AGREED,
    CONTENTS,
    MADE_LATER,
    ROUNDS,
    TERMS,
    canonical,
    coordinator_attestation,
    files_of,
    read_terms,
)
from fedveil.federation.membership import Charter
from fedveil.federation.terms import RunRules
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.ledger import Entry, Ledger, now
from fedveil.privacy.statement import Statement
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Declined, Finalize, SessionMessage
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from tests.commands import as_json, ended
from tests.federation_world import ADAPTIVE, World, asked, population, small_keys
from tests.runs import Silent
from tests.test_federation_grammar import ALL

MASKED: dict[str, Any] = {"protection": {"name": "secure-aggregation"}, "privacy": {"insecure_seed": None}}


def played(folder: Path, **changes: Any) -> World:
    """A run that has ended, and whose silos have signed."""
    world = World(folder, asked(rounds=2, **changes), population())
    world.play()
    world.close()
    return world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return played(tmp_path_factory.mktemp("signed"), **MASKED)


@pytest.fixture
def copied(world: World, tmp_path: Path) -> Path:
    return shutil.copytree(world.run_folder.path, tmp_path / "run")


def outcomes(found: Verification) -> dict[str, str]:
    return {one.name: one.outcome for one in found.checks if one.name not in NOT_CHECKABLE}


def first_fault(folder: Path) -> str:
    failed = [one for one in verify_run(folder).checks if one.outcome == "fails"]
    assert failed, "nothing was noticed"
    return failed[0].detail


def resigned(world: World, folder: Path, change: Callable[[dict[str, Any]], None], number: int = 1) -> None:
    """Have the coordinator itself change a line, and sign it and all that follows anew."""
    lines = [json.loads(line) for line in (folder / ROUNDS).read_bytes().splitlines()]
    change(lines[number - 1])
    resigned_lines(world.key, folder, lines)
    (folder / AGREED).unlink()


def resigned_lines(key: IdentityKey, folder: Path, lines: list[dict[str, Any]]) -> None:
    """Have a coordinator sign a record of other lines, and the end of it anew."""
    previous = bytes(32).hex()
    for line in lines:
        line["previous"] = previous
        line["signature"] = key.sign(coordinator_attestation(line)).hex()
        previous = hashlib.sha256(canonical(line)).hexdigest()
    (folder / ROUNDS).write_bytes(b"".join(canonical(line) + b"\n" for line in lines))
    end = json.loads((folder / AGREED).read_text()) | {"line": previous}
    (folder / AGREED).write_bytes(
        canonical(end | {"signature": key.sign(coordinator_attestation(end)).hex()})
    )


def test_a_run_is_signed_by_all_its_parties(world: World) -> None:
    found = verify_run(world.run_folder.path)
    assert found.holds
    assert {name for name, outcome in outcomes(found).items() if outcome == "unchecked"} == {"membership"}
    lines = (world.run_folder / ROUNDS).read_bytes().splitlines()
    assert [len(json.loads(line)["silos"]) for line in lines] == [3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"protection": {"name": "none"}},
        {"protection": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1}},
        {"method": {"name": "uldp-avg-w"}, "protection": {"name": "none"}},
        {"method": {"user_sampling_rate": 0.5}, "protection": {"name": "none"}},
        ADAPTIVE | {"protection": {"name": "none"}},
    ],
    ids=["open", "recover", "weights", "sampled", "adaptive"],
)
def test_every_way_to_run_is_signed(tmp_path: Path, changes: dict[str, Any]) -> None:
    world = played(tmp_path, **changes)
    assert world.outcome.rounds == 2
    found = outcomes(verify_run(world.run_folder.path))
    assert found["rounds"] == found["end"] == found["model"] == found["statement"] == "holds"


BLIND: dict[str, Any] = {"protection": {"name": "private-weighting", "n_max": 30}}
ENCRYPTED: dict[str, Any] = {"protection": {"name": "partial-encryption", "ratio": 0.5}}


@pytest.mark.parametrize(
    ("changes", "models"),
    [
        (BLIND, True),
        (BLIND | {"method": {"user_sampling_rate": 0.5}}, True),
        pytest.param(
            ENCRYPTED,
            False,
            marks=pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe"),
        ),
    ],
    ids=["blind", "blind, sampled", "encrypted"],
)
def test_a_run_under_a_cipher_is_signed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], models: bool
) -> None:
    """Where the silos alone have the models, there is none in the folder to check."""
    small_keys(monkeypatch)
    method = {"name": "uldp-avg-w"} | changes.get("method", {})
    world = World(tmp_path, asked(rounds=2, **changes | {"method": method}), population(), ALL)
    world.play()
    world.close()
    found = verify_run(world.run_folder.path)
    assert found.holds
    said = outcomes(found)
    assert said["rounds"] == said["end"] == said["statement"] == "holds"
    assert (said.get("model") == "holds") == models
    assert (world.run_folder / "model.safetensors").exists() == models


def places(content: bytes, some: int) -> list[int]:
    """Where to flip: first, last, and some between."""
    chosen = random.Random(len(content)).sample(range(len(content)), min(some, len(content)))
    return sorted({0, len(content) - 1, *chosen})


def flipped(folder: Path, some: int) -> tuple[int, list[str]]:
    """Flip a bit at some places of every file; return how often, and what was not noticed."""
    tried, unnoticed = 0, []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        whole = path.read_bytes()
        for at in places(whole, some):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            tried += 1
            if verify_run(folder).holds:
                unnoticed.append(f"{path.name} at {at}")
        path.write_bytes(whole)
    return tried, unnoticed


def changed_values(
    document: Any, numbers: frozenset[str] = frozenset({"vector"})
) -> Iterator[tuple[str, Any]]:
    """Return copies of a document, in each of which one value is another; of a list, its first and its order.

    Args:
        document: of JSON, or TOML.
        numbers: keys of what is left as it is.
    """
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in numbers:
                yield from (
                    (f"{key}.{at}", document | {key: one}) for at, one in changed_values(value, numbers)
                )
        yield "+", document | {"more": 1}
    elif isinstance(document, list):
        if len(document) > 1 and document != document[::-1]:
            yield "reversed", document[::-1]
        if document:
            yield from ((f"0.{at}", [one, *document[1:]]) for at, one in changed_values(document[0], numbers))
    elif isinstance(document, str):
        yield "", f"{document}1"
    else:
        yield "", 1.05 * document + 1 if document else 1


def unnoticed_values(folder: Path, name: str) -> tuple[int, list[str]]:
    """Change every value of a file of releases but the numbers that were released; return how often, and what holds."""
    files = files_of(folder)
    run, text = RecordedRun(files), files[name].decode()
    assert {one.name: one.outcome for one in run.check_signatures(None, has_all_files=True)}[
        "releases"
    ] == "holds"
    record, toml = [run._record_line(line.data) for line in run._lines], name.endswith("toml")
    tried, unnoticed, meant = 0, [], released_files._expected_content
    known = cache(lambda: meant(*given))
    given: tuple[Any, ...] = ()

    def once(*arguments: Any) -> dict[str, Any]:
        """What follows from numbers that stay as they are is computed once."""
        nonlocal given
        given = given or arguments
        return known()

    for nothing in ({}, [], {"releases": []}, {"releases": 7}):
        with pytest.raises(FedveilError):
            check_releases({**files, name: json.dumps(nothing).encode()}, record, has_all_files=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(released_files, "_expected_content", once)
        for place, changed in changed_values(tomllib.loads(text) if toml else json.loads(text)):
            content = tomlkit.dumps(changed) if toml else json.dumps(changed)
            tried += 1
            with suppress(FedveilError):
                check_releases({**files, name: content.encode()}, record, has_all_files=True)
                unnoticed.append(place)
    return tried, unnoticed


def test_a_flipped_bit_of_any_file_is_noticed(copied: Path) -> None:
    tried, unnoticed = flipped(copied, 1)
    assert tried > 25
    assert unnoticed == []


@pytest.mark.slow
def test_flipped_bits_all_over_are_noticed(copied: Path) -> None:
    tried, unnoticed = flipped(copied, 120)
    assert tried > 1000
    assert unnoticed == []


def test_a_signature_has_one_way_to_be_written(copied: Path) -> None:
    """Digits of another case are the same number, and another file."""
    whole = (copied / AGREED).read_text()
    for one in (json.loads(whole)["signature"], json.loads(whole)["silos"][2]["signature"]):
        (copied / AGREED).write_text(whole.replace(one, one.upper()))
        assert "not as it was written" in first_fault(copied)


def test_an_experiment_is_read_once_however_many_lines_a_record_has(
    world: World,
) -> None:
    """Who hands a run over writes both: a long experiment times as many lines would keep its reader for hours."""
    RunRules.from_terms.cache_clear()
    assert verify_run(world.run_folder.path).holds
    assert 1 <= RunRules.from_terms.cache_info().misses <= 3


def test_a_models_columns_are_read_by_the_schema_of_the_membership(world: World) -> None:
    schema, files = b"columns", files_of(world.run_folder.path)
    for written, outcome in ((schema, "holds"), (schema + b" ", "fails")):
        terms = [
            (replace(membership, schema_digest=hashlib.sha256(schema).digest()), experiment)
            for membership, experiment in read_terms(files[TERMS]).values()
        ]
        assert run_check("schema", lambda: check_schema(written, terms)).outcome == outcome  # noqa: B023


def test_what_is_made_later_is_named_as_unsigned(copied: Path) -> None:
    for name in MADE_LATER - {AGREED, CONTENTS}:
        (copied / name).write_text("{}")
    found = verify_run(copied)
    assert found.holds
    (end,) = [one for one in found.checks if one.name == "end"]
    assert all(name in end.detail for name in MADE_LATER - {AGREED, CONTENTS})
    (copied / "privacy-2.json").write_text("{}")
    assert "was not there when the run was signed" in first_fault(copied)


def test_files_that_are_gone_are_noticed(copied: Path) -> None:
    for path in sorted(one for one in copied.rglob("*") if one.is_file() and one.name != AGREED):
        content = path.read_bytes()
        path.unlink()
        assert "missing" in first_fault(copied) or path.name == ROUNDS, path
        path.write_bytes(content)


def changing(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update({key: value})


def other_head(line: dict[str, Any]) -> None:
    line["silos"][1]["head"] = "00" * 32


def one_silo(line: dict[str, Any]) -> None:
    line["silos"] = line["silos"][:1]


def one_silo_twice(line: dict[str, Any]) -> None:
    line["silos"] = [line["silos"][0] | {"silo": -3}, *line["silos"]]


def another_silo(line: dict[str, Any]) -> None:
    line["silos"][1]["signature"] = line["silos"][0]["signature"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (changing("model", "11" * 32), "silo silo0 did not sign this"),
        (changing("asked", "11" * 32), "silo silo0 did not sign this"),
        (changing("round", 2), "not as it was written"),
        (changing("next", "11" * 32), "begins with another model"),
        (changing("ledger", "11" * 32), "does not charge round 1"),
        (changing("silos", []), "signed by no silo"),
        (one_silo, "signed by 1 silos, and a round needs 3"),
        (one_silo_twice, "or by none of the 3"),
        (other_head, "silo silo1 did not sign this"),
        (another_silo, "silo silo1 did not sign this"),
    ],
)
def test_a_coordinator_cannot_change_what_a_silo_signed(
    world: World, copied: Path, change: Callable[[dict[str, Any]], None], fault: str
) -> None:
    """It has its own key, and signs the changed record anew: the silos' signatures and the ledger tell."""
    resigned(world, copied, change)
    assert fault in first_fault(copied)


@pytest.mark.parametrize("said", ["not hex" * 9, "11" * 31, "A1" * 32, " 1" * 32, "", None, 7])
def test_what_a_round_ended_with_is_a_digest(world: World, copied: Path, said: Any) -> None:
    """The coordinator signs it, and no silo has seen it: the last line has nobody after it who would notice."""
    resigned(world, copied, changing("next", said), number=2)
    assert "line 2: the field next, which the coordinator signed, is no digest" in first_fault(copied)


def test_rounds_taken_out_or_swapped_are_noticed(world: World, copied: Path) -> None:
    lines = (copied / ROUNDS).read_bytes().splitlines(keepends=True)
    for kept in (lines[:1], lines[1:], lines[::-1], []):
        (copied / ROUNDS).write_bytes(b"".join(kept))
        first_fault(copied)


def test_a_run_that_goes_on_is_signed_as_far_as_it_got(copied: Path) -> None:
    for name in (AGREED, "privacy.json"):
        (copied / name).unlink()
    found = outcomes(verify_run(copied))
    assert (found["rounds"], found["end"], found["statement"]) == ("holds", "unchecked", "unchecked")


def test_silos_do_not_sign_a_statement_that_promises_more(tmp_path: Path) -> None:
    """A coordinator that states half the epsilon: its own signature stands, and no silo's."""
    world = World(tmp_path, asked(rounds=1, **MASKED), population())
    told: list[tuple[SessionMessage, ...]] = []

    def flatter(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        if not isinstance(parts[0], Finalize):
            return parts
        stated = Statement.from_json(json.loads(parts[0].statement))
        assert stated.epsilon is not None
        less = replace(stated, epsilon=stated.epsilon / 2)
        return replace(parts[0], statement=json.dumps(less.to_json())), *parts[1:]

    world.play()
    assert world.coordinator is not None
    for number, data in world.coordinator.farewells:
        world.lie = flatter
        message = world.altered(number, data)
        told.append(world.answer(number, world.party(number).receive(message)).parts)
    assert all(isinstance(parts[0], Declined) and parts[0].why.code is Code.STATEMENT for parts in told)
    world.close()


def test_a_line_without_its_round_is_left_out_when_the_run_goes_on(world: World, copied: Path) -> None:
    """A crash between the line of a round and its checkpoint: the round is played and signed again."""
    before = replace_folder(world, copied)
    line = (copied / ROUNDS).read_bytes().splitlines(keepends=True)[-1]
    (copied / ROUNDS).write_bytes((copied / ROUNDS).read_bytes() + line)
    coordinator = before.coordinate()
    coordinator.close()
    assert (copied / ROUNDS).read_bytes().count(b"\n") == 2


def replace_folder(world: World, folder: Path) -> World:
    other = object.__new__(World)
    other.__dict__ |= world.__dict__ | {"run_folder": type(world.run_folder)(folder), "folder": folder}
    return other


def test_a_silos_ledger_has_the_rounds_that_it_signed(world: World, tmp_path: Path) -> None:
    exports = []
    for number in range(2):
        target = tmp_path / f"{number}.json"
        state = world.folder / f"state-{number}"
        export_ledger(
            state, target, identity=world.keys[number], membership=world.membership, number=number, delta=1e-5
        )
        exports.append(target)
    assert verify_run(world.run_folder.path, ledgers=exports).holds
    other = tmp_path / "other"
    other.mkdir()
    stranger = played(other, **MASKED)
    found = verify_run(stranger.run_folder.path, ledgers=exports[:1])
    assert "signed no round of this run" in next(one.detail for one in found.checks if one.outcome == "fails")


@pytest.mark.parametrize(("rounds", "fits"), [((), True), ((2,), True), ((3,), False)])
def test_a_silos_ledger_shows_a_round_that_the_run_hides(
    world: World, tmp_path: Path, rounds: tuple[int, ...], fits: bool
) -> None:
    """The same round once more is the silo's own crash, where rounds are repeated; another round is hidden."""
    state, target = tmp_path / "state", tmp_path / "0.json"
    shutil.copytree(world.folder / "state-0", state)
    unsigned(state / "ledger.jsonl")
    with Ledger(state / "ledger.jsonl", unit="user") as ledger:
        entry = ledger.entries[0]
        for number in rounds:
            ledger.charge(run=entry.run, round=number, attempt=1, event=entry.event, origin=entry.origin)
    export_ledger(state, target, identity=world.keys[0], membership=world.membership, number=0, delta=1e-5)
    found = verify_run(world.run_folder.path, ledgers=[target])
    assert found.holds is fits
    assert fits or "more often than ledger.jsonl" in found.checks[-1 - len(NOT_CHECKABLE)].detail


def unsigned(ledger: Path) -> None:
    """Take out the last line of a silo's ledger, by which it knows that it has signed the end of a run."""
    lines = ledger.read_text().splitlines(keepends=True)
    assert '"ended"' in lines[-1]
    ledger.write_text("".join(lines[:-1]))


def test_a_silos_ledger_shows_a_round_under_terms_that_the_run_hides(world: World, tmp_path: Path) -> None:
    """A coordinator asks for a round once more under less noise, and keeps that proposal out of the run's folder."""
    state, target = tmp_path / "state", tmp_path / "silo.json"
    shutil.copytree(world.folder / "state-0", state)
    unsigned(state / "ledger.jsonl")
    with Ledger(state / "ledger.jsonl", unit="user") as ledger:
        entry = ledger.entries[0]
        assert entry.origin is not None
        hidden = replace(entry.origin, terms="ab" * 32)
        ledger.charge(run=entry.run, round=1, attempt=1, event=entry.event, origin=hidden)
    (state / "terms" / f"{hidden.terms}.message").write_bytes(b"of these")
    export_ledger(state, target, identity=world.keys[0], membership=world.membership, number=0, delta=1e-5)
    found = verify_run(world.run_folder.path, ledgers=[target])
    assert [one.detail for one in found.checks if one.outcome == "fails"] == [
        f"{target}: has charges of this run under terms that terms.jsonl does not have"
    ]


def test_a_silos_ledger_shows_what_it_gave_after_the_end(world: World, tmp_path: Path) -> None:
    """No honest silo does; one that did has it in its ledger, behind the line of the end."""
    state, target = tmp_path / "state", tmp_path / "0.json"
    shutil.copytree(world.folder / "state-0", state)
    with Ledger(state / "ledger.jsonl", unit="user") as ledger:
        entry = ledger.entries[0]
        ledger.charge(run=entry.run, round=2, attempt=1, event=entry.event, origin=entry.origin)
    export_ledger(state, target, identity=world.keys[0], membership=world.membership, number=0, delta=1e-5)
    (found,) = [
        one for one in verify_run(world.run_folder.path, ledgers=[target]).checks if one.outcome == "fails"
    ]
    assert "charges round 2 after the end of this run was signed" in found.detail


def test_who_must_be_there_follows_from_the_terms() -> None:
    def of(protection: dict[str, Any]) -> RunRules:
        return RunRules.from_terms(json.dumps({"name": "try", "rounds": 2, "protection": protection}), 5)

    repeated = RunRules(name="try", quorum=5, repeats=True, trains=True, averages=False)
    assert of({"name": "none"}) == of(MASKED["protection"]) == repeated
    recover = of({"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 2})
    assert recover == replace(repeated, quorum=3, repeats=False)
    assert of({"name": "private-weighting", "private_sampling": True}) == replace(repeated, repeats=False)
    first, second = ("", 1), ("", 2)
    assert recover.required_charges([first, first, second]) == {first: 2, second: 1}
    assert repeated.required_charges([first, first, second]) == {first: 1, second: 1}


def test_a_charge_is_of_a_round_or_of_a_release() -> None:
    event, unit = (
        GaussianEvent(noise_multiplier=1.0),
        {"unit": "user", "adjacency": Adjacency.ADD_OR_REMOVE_ONE},
    )
    trains = RunRules(name="try", quorum=1, repeats=True, trains=True, averages=False)

    def entry(run: str, number: int) -> Entry:
        return Entry(index=0, time=now(), run=run, round=number, attempt=0, event=event, **unit)

    assert trains.place(entry("try", 3)) == ("", 3)
    assert trains.place(entry("try/eval/1", 0)) == ("eval/1", 1)
    assert replace(trains, trains=False).place(entry("try", 3)) == ("3", 1)
    with pytest.raises(IntegrityError, match="charge 1 is of another run than 'try'"):
        trains.place(entry("other/eval/1", 0))


def test_an_export_is_of_the_members_that_a_membership_names(world: World, tmp_path: Path) -> None:
    state, target, known = world.folder / "state-0", tmp_path / "0.json", tmp_path / "membership.toml"
    membership = world.membership
    export_ledger(state, target, identity=world.keys[0], membership=membership, number=0, delta=1e-5)
    assert outcomes(verify_ledger(target))["membership"] == "unchecked"
    for wrong, right in (
        (membership, True),
        (replace(membership, coordinator=IdentityKey.generate().public), False),
        (replace(membership, roster=(IdentityKey.generate().public, *membership.roster[1:])), False),
    ):
        known.write_text(wrong.to_toml())
        assert verify_ledger(target, membership=known).holds is right


def test_the_founders_seal_is_asked_of_the_charter_one_was_handed(tmp_path: Path) -> None:
    founder, schema = IdentityKey.generate(), "n_users = 6\n"
    charter = Charter(name="f", host="h", port=9443, founder=founder.public, authority="", data_schema=schema)
    forged = replace(charter, founder=IdentityKey.generate().public)
    for name, one in (("charter.toml", charter), ("forged.toml", forged)):
        (tmp_path / name).write_text(one.to_toml())
    world = World(tmp_path, asked(rounds=1), population())
    world.membership = replace(
        world.membership, serial=3, charter=charter.digest, schema_digest=charter.schema_digest
    ).with_signature(founder)
    for party in world.silos:
        assert party is not None
        party.close()
    world.silos = [world.silo(number) for number in range(3)]
    world.play()
    world.close()
    path = world.run_folder.path
    assert outcomes(verify_run(path, tmp_path / "charter.toml"))["membership"] == "holds"
    assert outcomes(verify_run(path, tmp_path / "forged.toml"))["membership"] == "fails"


def test_a_run_in_one_process_is_checked_without_signatures(tmp_path: Path) -> None:
    made = run(prepare(asked(rounds=1), FixedPopulation(population())), tmp_path, Silent()).folder
    assert outcomes(verify_run(made)) | {"epsilon": ""} == {
        "experiment": "unchecked",
        "ledger": "holds",
        "statement": "holds",
        "epsilon": "",
        "charges": "holds",
        "signatures": "unchecked",
        "model": "unchecked",
    }
    path = made / "privacy.json"
    path.write_text(
        path.read_text()
        .replace('"sigma"', '"sigmas"')
        .replace('"noise_multiplier": 5', '"noise_multiplier": 6')
    )
    assert not verify_run(made).holds


def test_a_round_that_ledger_and_statement_both_lack_is_noticed(tmp_path: Path) -> None:
    """Two rounds made the model; a ledger of one, sealed again, and its statement agree with each other."""
    made = run(prepare(asked(rounds=2), FixedPopulation(population())), tmp_path / "2", Silent()).folder
    less = run(prepare(asked(rounds=1), FixedPopulation(population())), tmp_path / "1", Silent()).folder
    assert outcomes(verify_run(made))["charges"] == "holds"
    for name in ("ledger.jsonl", "privacy.json"):
        (made / name).write_bytes((less / name).read_bytes())
    assert outcomes(verify_run(made))["statement"] == "holds"
    for name in ("metrics.jsonl", "checkpoint/state.safetensors"):
        (check,) = [one for one in verify_run(made).checks if one.name == "charges"]
        assert check.detail == "ledger.jsonl: does not charge round or release 2, whose result is there"
        (made / name).unlink()


def test_a_statement_for_other_users_than_declared_is_noticed(tmp_path: Path) -> None:
    made = run(prepare(asked(rounds=1), FixedPopulation(population())), tmp_path, Silent()).folder
    path = made / "privacy.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"units": said["units"] + 1}))
    (check,) = [one for one in verify_run(made).checks if one.name == "experiment"]
    assert (check.outcome, "users, and" in check.detail) == ("fails", True)


def test_a_bundle_carries_the_signatures_of_its_run(world: World, copied: Path, tmp_path: Path) -> None:
    prepared = prepare(world.experiment, FixedPopulation(population()))
    predictor = Predictor(model=prepared.task.model.eval(), task="classification", classes=(0, 1), shape=(3,))
    predictor.model.load_state_dict(load_file(copied / "model.safetensors"), strict=False)
    made = write_bundle(tmp_path / "made", Source(folder=copied, predictor=predictor, model_name="linear"))
    found = outcomes(verify_bundle(made))
    assert found["rounds"] == found["end"] == "holds"
    path = made / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    sums = made / "SHA256SUMS"
    from fedveil.bundle.manifest import sums as listed

    files = {one.name: one.read_bytes() for one in made.iterdir() if one.is_file()}
    sums.write_bytes(listed(files))
    assert read_files(made)
    (end,) = [one for one in verify_bundle(made).checks if one.name == "end"]
    assert end.outcome == "fails"
    assert "is not the one that was signed" in end.detail


def test_the_command_names_the_first_fault_and_ends_with_7(world: World, copied: Path) -> None:
    assert as_json("verify", copied)["holds"] is True
    (copied / "metrics.jsonl").write_bytes(b"")
    code, _, said = ended("verify", copied)
    assert "metrics.jsonl: was changed after the run was signed" in said
    assert code == 7
    assert "takes --charter and --ledger" in ended("verify", copied, "--trust", "00").err


def test_a_run_that_nobody_signed_does_not_hold_under_a_charter(tmp_path: Path) -> None:
    """Whoever takes all that the parties signed out of a folder must not have it pass for theirs."""
    made = run(prepare(asked(rounds=1), FixedPopulation(population())), tmp_path, Silent()).folder
    found = verify_run(made, tmp_path / "charter.toml")
    assert outcomes(found)["signatures"] == "fails"
    assert not found.holds

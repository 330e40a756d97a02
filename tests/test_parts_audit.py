"""What the parties sign of a run with releases beside its rounds: every part, and one end over all of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomlkit

from fedveil.checks import equal_up_to_rounding
from fedveil.errors import FedveilError
from fedveil.federation.audit.recorded_run import RecordedRun, verify_run
from fedveil.federation.audit.released_files import check_releases
from fedveil.federation.audit.run_record import (
    AGREED,
    CONTENTS,
    ROUNDS,
    canonical,
    coordinator_attestation,
    files_of,
    signed_end,
)
from fedveil.federation.hosts import submission
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.submission import due_parts
from fedveil.federation.silo_session.session import SiloSession
from fedveil.federation.silo_session.statement_check import SiloCharges
from fedveil.federation.silo_session.tasks import SiloReleaseTask
from fedveil.privacy.events import atoms, compose
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.statement import Statement
from fedveil.protocols.refusals import RefusalError
from fedveil.protocols.session_messages import Attestation, Finalize
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.steps.experiment import ExperimentParts
from fedveil.statistics.evaluation.result import ReleasedEvaluation
from fedveil.statistics.result import digest_of_release
from tests.commands import as_json, output
from tests.runs import json_lines
from tests.test_federation_run_parts import PEOPLE, Study, carried
from tests.test_preprocessing import tables
from tests.test_run_audit import flipped, outcomes, resigned_lines, unnoticed_values

PARTS = ["prep/1", "", "", "eval/1", "eval/2"]
SECURE: dict[str, Any] = {"privacy": {"insecure_seed": None}}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A run of all parts, whose signatures of the end were lost once."""
    folder = tmp_path_factory.mktemp("parts")
    tables(folder, people=PEOPLE)
    study = Study(folder, **SECURE)
    assert study.play(parts=3) == [None] * 3
    assert outcomes(verify_run(study.run.path))["end"] == "unchecked"
    assert study.play(signs=False) == [None]
    assert signed_end(study.run.path) == []
    before = study.charges(0)
    assert study.play() == [None]
    assert study.charges(0) == before
    assert study.play() == []
    return study


@pytest.fixture
def copied(study: Study, tmp_path: Path) -> Path:
    return shutil.copytree(study.run.path, tmp_path / "run")


def test_every_part_is_signed_and_one_end_covers_all(study: Study) -> None:
    lines = json_lines(study.run / ROUNDS)
    assert [(line["part"], len(line["silos"])) for line in lines] == [(part, 3) for part in PARTS]
    found = outcomes(verify_run(study.run.path))
    assert {name for name, outcome in found.items() if outcome != "holds"} == {"membership"}
    assert {"experiment", "rounds", "end", "model", "statement"} <= found.keys()


def test_who_joined_the_federation_since_is_not_asked_for_a_signature(study: Study) -> None:
    """Another session would be under other terms, of which the older signatures are none."""
    members = study.home.membership.silos
    for now, due in ((members, False), ((*members, "later"), False), (members[:2], False)):
        home: Any = SimpleNamespace(membership=SimpleNamespace(silos=now))
        assert submission._unsigned(home, study.run) is due
    home = SimpleNamespace(membership=SimpleNamespace(silos=members))
    assert submission._unsigned(home, RunFolder(study.run.path / "checkpoint"))  # there is no end in it


def test_a_flipped_bit_of_any_file_of_a_run_of_parts_is_noticed(copied: Path) -> None:
    tried, unnoticed = flipped(copied, 1)
    assert tried > 30
    assert unnoticed == []


@pytest.mark.parametrize("number", [1, 4, 5])
def test_what_a_release_ended_with_is_a_digest(study: Study, copied: Path, number: int) -> None:
    lines = json_lines(copied / ROUNDS)
    lines[number - 1]["next"] = "no digits"
    resigned_lines(study.home.identity, copied, lines)
    failed = [one.detail for one in verify_run(copied).checks if one.outcome == "fails"]
    assert f"line {number}: the field next, which the coordinator signed, is no digest" in failed[0]


@pytest.mark.parametrize("part", ["prep/1", "eval/1"])
def test_a_release_that_the_record_leaves_out_is_missed(study: Study, copied: Path, part: str) -> None:
    """The coordinator signs a record without its line, and the end anew: silos signed that they were told of it."""
    lines = json_lines(copied / ROUNDS)
    resigned_lines(study.home.identity, copied, [line for line in lines if line["part"] != part])
    failed = [one.detail for one in verify_run(copied).checks if one.outcome == "fails"]
    assert "the silos received other releases than the lines before it have" in failed[0]


def test_the_last_release_that_the_record_leaves_out_is_missed(study: Study, copied: Path) -> None:
    """Nobody was told of it: the ledger charged it."""
    lines = json_lines(copied / ROUNDS)
    resigned_lines(study.home.identity, copied, lines[:-1])
    failed = [one.detail for one in verify_run(copied).checks if one.outcome == "fails"]
    assert "no line for release eval/2, which was charged" in failed[0]


def resigned_file(study: Study, folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """Have a coordinator change a file, and sign the files of the run anew."""
    text, toml = (folder / name).read_text(), name.endswith("toml")
    document = tomlkit.parse(text) if toml else json.loads(text)
    change(document)
    (folder / name).write_text(tomlkit.dumps(document) if toml else json.dumps(document))
    contents = json.loads((folder / CONTENTS).read_text())
    contents["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / CONTENTS).write_bytes(canonical(contents))
    end = json.loads((folder / AGREED).read_text())
    end["contents"] = hashlib.sha256((folder / CONTENTS).read_bytes()).hexdigest()
    (folder / AGREED).write_bytes(
        canonical(end | {"signature": study.home.identity.sign(coordinator_attestation(end)).hex()})
    )


@pytest.mark.parametrize(("release", "resign"), [(0, "rounds"), (1, "end")])
def test_released_numbers_are_those_that_silos_signed(
    study: Study, copied: Path, release: int, resign: str
) -> None:
    """The coordinator changes a number once the run has ended, and signs all that it can sign itself anew.

    The figures are made from the changed number, so that the file says nothing against it. What silos were told they
    signed with their rounds; the last release, with the digest of the record's last line.
    """

    def change(document: Any) -> None:
        document["releases"][release]["vector"][0] += 1.0
        document |= ReleasedEvaluation.from_json(document, "evaluation.json").to_json()

    (held,) = [one for one in verify_run(copied).checks if one.name == "releases"]
    assert held.outcome == "holds"
    assert held.detail.endswith(
        "received and signed prep/1, eval/1; the coordinator alone signed eval/2: no silo sees a sum"
    )
    resigned_file(study, copied, "evaluation.json", change)
    found = {one.name: one for one in verify_run(copied).checks}
    assert found["end"].outcome == "holds"
    assert found["releases"].outcome == "fails"
    assert found["releases"].detail.endswith(
        f"not the numbers of release eval/{release + 1} that the record has"
    )
    lines = json_lines(copied / ROUNDS)
    one = json.loads((copied / "evaluation.json").read_text())["releases"][release]
    made = one["noise_std"], np.array(one["vector"])
    lines[3 + release]["next"] = digest_of_release(made).hex()
    resigned_lines(study.home.identity, copied, lines)
    assert outcomes(verify_run(copied))[resign] == "fails"


def fewer(document: Any) -> None:
    """People counted once for every silo become people."""
    document["request"]["silos"] = "equal"


def turned(document: Any) -> None:
    document["request"]["schema_"]["target"]["classes"].reverse()


def wider(document: Any) -> None:
    document["request"]["schema_"]["features"]["age"]["upper"] *= 100


def refined_wider(document: Any) -> None:
    document["features"]["age"]["upper"] *= 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("evaluation.json", fewer),
        ("evaluation.json", turned),
        ("preprocessing.json", wider),
        ("schema.toml", refined_wider),
        ("declared_schema.toml", refined_wider),
    ],
)
def test_what_released_numbers_are_of_is_what_silos_were_asked_for(
    study: Study, copied: Path, name: str, change: Callable[[Any], None]
) -> None:
    """The coordinator signs the files of the run anew: the numbers are those of the record, and mean another thing."""
    resigned_file(study, copied, name, change)
    found = outcomes(verify_run(copied))
    assert found["rounds"] == found["end"] == "holds"
    assert found["releases"] == "fails"


@pytest.mark.parametrize("name", ["evaluation.json", "preprocessing.json", "schema.toml"])
def test_every_value_beside_released_numbers_follows_from_what_was_signed(study: Study, name: str) -> None:
    tried, unnoticed = unnoticed_values(study.run.path, name)
    assert tried > 20
    assert unnoticed == []


def more(document: Any) -> None:
    document["figures"] = [{"name": "auc", "value": 0.99}]


def moved(document: Any) -> None:
    document["releases"][0]["vector"][0] += 1.0


def twice(document: Any) -> None:
    document["releases"] *= 2


@pytest.mark.parametrize("change", [more, moved, twice])
def test_an_evaluation_that_was_not_whole_yet_says_nothing_else_than_the_whole_one(
    study: Study, copied: Path, change: Callable[[Any], None]
) -> None:
    """It stays beside the whole one, and in the files that the end lists."""
    resigned_file(study, copied, "checkpoint/evaluation.json", change)
    (found,) = [one for one in verify_run(copied).checks if one.name == "releases"]
    assert found.outcome == "fails"
    assert found.detail.startswith("checkpoint/evaluation.json: does not follow")


@pytest.mark.parametrize(
    ("found", "made", "same"),
    [
        (3.0e-12, 3.0000001e-12, True),
        (9e-10, 1e-300, False),
        (0.0, 1e-301, True),
        (0.0, 1e-12, False),
        (0.12345678, 0.12345679, True),
        (0.5, 0.500001, False),
        ([1.0, {"a": 2.0}], (1.0, {"a": 2.0}), True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ([1], [1, 1], False),
        ("a", "b", False),
    ],
)
def test_figures_are_the_same_only_but_for_rounding(found: Any, made: Any, same: bool) -> None:
    assert equal_up_to_rounding(found, made) is same


def test_numbers_of_one_part_are_not_those_of_another(study: Study) -> None:
    """A record that calls the first release another part's, in terms that asked for no such release or for nothing."""
    files = files_of(study.run.path)
    run = RecordedRun(files)
    run.check_signatures(None, has_all_files=True)
    record = [run._record_line(line.data) for line in run._lines]
    check_releases(files, record, has_all_files=True)
    asked = json.loads(record[0].experiment)
    of_another = [replace(record[0], part="eval/1"), *record[1:]]
    unasked = [
        replace(
            one, experiment=json.dumps(asked | {"preprocessing": None}, sort_keys=True, separators=(",", ":"))
        )
        for one in record
    ]
    senseless = [replace(one, experiment="{}") for one in record]
    for changed in (of_another, unasked, senseless):
        with pytest.raises(FedveilError):
            check_releases(files, changed, has_all_files=True)


def test_releases_that_silos_were_not_asked_for_are_none(study: Study, copied: Path) -> None:
    """A file of releases in a run that has none, or of none."""
    lines = json_lines(copied / ROUNDS)
    resigned_lines(study.home.identity, copied, lines[1:3])
    (found,) = [one for one in verify_run(copied).checks if one.name == "releases"]
    assert found.outcome == "fails"
    assert "the record has no release" in found.detail


def test_an_evaluation_is_of_the_model_that_training_ended_with(study: Study, copied: Path) -> None:
    """The coordinator signs that the last round ended with another one than it had evaluated."""
    lines = json_lines(copied / ROUNDS)
    assert lines[3]["model"] == lines[4]["model"] == lines[2]["next"]
    lines[2]["next"] = "1" * 64
    resigned_lines(study.home.identity, copied, lines)
    (found,) = [one for one in verify_run(copied).checks if one.name == "rounds"]
    assert found.outcome == "fails"
    assert "line 4: evaluates another model than the last round ended with" in found.detail


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((1, 0, 2, 3, 4), "received other releases"),
        ((0, 1, 3, 2, 4), "evaluates another model"),
        ((0, 3, 1, 2, 4), "no round of training stands before it"),
        ((0, 1, 2, 4), "received other releases"),
        ((1, 2, 3, 4, 0), "received other releases"),
        ((0, 1, 2, 4, 3), "received other releases"),
    ],
)
def test_the_parts_of_a_run_stand_in_their_order(
    study: Study, copied: Path, order: tuple[int, ...], words: str
) -> None:
    lines = json_lines(copied / ROUNDS)
    resigned_lines(study.home.identity, copied, [lines[number] for number in order])
    (found,) = [one for one in verify_run(copied).checks if one.name == "rounds"]
    assert found.outcome == "fails"
    assert words in found.detail


def test_rounds_behind_the_evaluation_of_an_average_are_missed(tmp_path: Path) -> None:
    """An average is in no line: what is evaluated is held against none, and its place still is."""
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, preprocessing=None, server={"average": {"name": "ema", "beta": 0.5}})
    assert set(study.play()) == {None}
    lines = json_lines(study.run / ROUNDS)
    assert lines[2]["model"] not in {line["next"] for line in lines}
    assert outcomes(verify_run(study.run.path))["rounds"] == "holds"
    resigned_lines(study.home.identity, study.run.path, [lines[number] for number in (0, 2, 1, 3)])
    (found,) = [one for one in verify_run(study.run.path).checks if one.name == "rounds"]
    assert "line 3: a round of training stands behind what comes after it" in found.detail


def test_exported_ledgers_charge_every_part(study: Study, tmp_path: Path) -> None:
    target = tmp_path / "silo.json"
    output("silo", "ledger", "export", str(study.paths[0]), "--output", str(target))
    found = verify_run(study.run.path, ledgers=[target])
    assert found.holds
    assert any("charges the 5 rounds that this silo signed" in one.detail for one in found.checks)


def test_a_federations_run_is_bundled_by_command_and_carries_its_signatures(
    study: Study, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    output("bundle", str(study.run.path), "-o", str(made))
    shown = as_json("verify", str(made))
    found = {one["name"]: one["outcome"] for one in shown["checks"]}
    assert found["rounds"] == found["end"] == found["statement"] == "holds"
    assert found["schema"] == "unchecked"  # it was refined


# --- what a silo signs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(study: Study) -> tuple[SiloReleaseTask, Finalize, Counter[Any]]:
    """A silo's work in the last part, the end that it was asked to sign, and what its ledger shows."""
    signed = {name: (study.run / name).read_bytes() for name in (AGREED, CONTENTS)}
    (study.run / AGREED).unlink()
    silos, sessions, sign = (
        [open_silo(SiloFolder(path)) for path in study.paths],
        list[SiloSession](),
        SiloSession.sign_statement,
    )

    def signing(session: SiloSession, closing: Finalize) -> Attestation:
        sessions.append(session)
        return sign(session, closing)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SiloSession, "sign_statement", signing)
        (party,) = due_parts(study.home, study.run.path)
        carried(party, silos)
    (closing,) = party._closing
    assert isinstance(closing, Finalize)
    assert len(sessions) == 3
    assert all(silo._session is None for silo in silos)  # nobody joins where there is nothing left to play
    session = sessions[0]
    for silo in silos:
        silo.close()
    for name, content in signed.items():
        (study.run / name).write_bytes(content)
    work = session.work
    assert isinstance(work, SiloReleaseTask)
    return work, closing, Counter(session._books.charged_places())


def silent(stated: Statement) -> Statement:
    """As if the first release of the evaluation had not been."""
    return replace(stated, mechanisms=tuple(line for line in stated.mechanisms if "eval/1" not in line))


def flattering(stated: Statement) -> Statement:
    assert stated.epsilon is not None
    return replace(stated, epsilon=stated.epsilon * 0.99)


def cheaper(stated: Statement) -> Statement:
    """What the last release cost is left out."""
    spent = Counter(atoms(stated.event))
    return replace(stated, event=compose(spent - Counter([list(spent)[-1]])))


@pytest.mark.parametrize("change", [flattering, cheaper, silent])
def test_an_end_that_states_less_than_all_parts_is_signed_by_no_silo(
    ended: tuple[SiloReleaseTask, Finalize, Counter[Any]], change: Callable[[Statement], Statement]
) -> None:
    work, closing, times = ended
    own, stated = (
        SiloCharges(times=times, needs_all_silos=True),
        Statement.from_json(json.loads(closing.statement)),
    )

    def saying(one: Statement) -> Finalize:
        return replace(closing, statement=json.dumps(one.to_json()))

    work.check_statement(saying(stated), own)
    with pytest.raises(RefusalError, match="differs from the one that this silo computes"):
        work.check_statement(saying(change(stated)), own)


def test_an_end_is_held_against_a_silos_own_charges_of_every_part(
    ended: tuple[SiloReleaseTask, Finalize, Counter[Any]],
) -> None:
    """It gave nothing to a part that needs it; it was asked for a part twice; or for one that the terms lack."""
    work, closing, times = ended
    wrong = [times - Counter([place]) for place in times]
    wrong += [times + Counter([("eval/1", 1)]), times + Counter([("eval/3", 1)]), times + Counter([("", 4)])]
    for one in wrong:
        with pytest.raises(RefusalError, match="differs from the one that this silo computes"):
            work.check_statement(closing, SiloCharges(times=one, needs_all_silos=True))
    absent = times - Counter([("eval/1", 1)])
    work.check_statement(
        closing, SiloCharges(times=absent, needs_all_silos=False)
    )  # a part that does not need all
    with pytest.raises(RefusalError):
        work.check_statement(closing, SiloCharges(times=Counter(), needs_all_silos=False))


def test_a_crash_before_the_statement_of_the_last_part_leaves_no_charge_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last sum is on the disk, the statement is still that of the part before: the next session writes it."""
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, preprocessing=None, budget=None)
    assert study.play(parts=2) == [None] * 2

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ExperimentParts, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            study.play()
    assert len(read_entries(study.run / "ledger.jsonl")) == 4
    assert outcomes(verify_run(study.run.path))["statement"] == "fails"
    assert study.play() == [None]
    found = outcomes(verify_run(study.run.path))
    assert found["statement"] == found["end"] == "holds"

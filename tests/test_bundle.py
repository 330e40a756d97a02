"""A bundle predicts like the run it came of, hides no change of a bit, and is believed no further than it can be
checked."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.bundle.bundle import write_table
from fedveil.bundle.card import CARD, model_card
from fedveil.bundle.export import export_onnx, export_torch
from fedveil.bundle.manifest import SUMS, BundleError, Manifest, read_files, sign, sums, write_files
from fedveil.bundle.verification import NOT_CHECKABLE, verify_bundle
from fedveil.checks import Verification
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ConfigError, DataError
from fedveil.federation.audit.ledger_audit import verify_ledger
from fedveil.federation.audit.recorded_run import verify_run
from fedveil.privacy.accounting import PldAccountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent, LaplaceEvent, PoissonSampledEvent, SelfComposedEvent
from fedveil.privacy.ledger import GENESIS, read_entries, write_line
from fedveil.privacy.statement import Disclosure, Statement
from fedveil.run.folder.shown import FIELDS, FILES, Kind
from fedveil.training.models import build_model
from tests.commands import as_json, ended
from tests.test_python import FRAME, PUBLIC_FRAME, PUBLIC_Y, X, network, people, train

SCHEMA = """
n_users = 12
user = "patient"
silo = "hospital"
silos = ["north", "south"]

[target]
kind = "label"
column = "sick"
classes = ["no", "yes"]

[features.age]
kind = "number"
lower = 0
upper = 100

[features.ward]
kind = "category"
categories = ["surgery", "heart"]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fv.Result:
    held = people(features=FRAME, test=(PUBLIC_FRAME[:20], PUBLIC_Y[:20]))
    return train(tmp_path_factory.mktemp("runs"), "mlp", held)


@pytest.fixture(scope="module")
def made(trained: fv.Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.save(tmp_path_factory.mktemp("bundles") / "model", about="Tells who is ill, for nurses.")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def failures(found: Verification) -> dict[str, str]:
    return {one.name: one.detail for one in found.checks if one.outcome == "fails"}


def rewritten(made: Path, folder: Path, changes: dict[str, bytes]) -> Path:
    """A bundle whose files were changed by somebody who can compute digests."""
    files = {**read_files(made), **changes}
    if CARD not in changes:
        statement = Statement.from_json(json.loads(files["privacy.json"]))
        files[CARD] = model_card(Manifest.from_bytes(files["bundle.json"]), statement).encode()
    write_files(folder, {**files, SUMS: sums(files)})
    return folder


# --- use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "model.zip"])
def test_a_bundle_predicts_what_the_run_did(name: str, trained: fv.Result, tmp_path: Path) -> None:
    read = fv.load(trained.save(tmp_path / name))
    assert np.array_equal(read.predict(FRAME), trained.predict(FRAME))
    with pytest.warns(UserWarning, match="no column names; .* in this order, for: age, pulse, dose"):
        assert np.array_equal(read.predict(X), trained.predict(FRAME))
    assert np.array_equal(read.predict_proba(FRAME), trained.predict_proba(FRAME))
    assert read.statement == trained.statement
    assert read.manifest.classes == (0, 1)
    with pytest.raises(BundleError, match="exists already"):
        trained.save(tmp_path / name)


def test_a_zip_that_lists_many_files_is_refused_before_a_list_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of 19 MB took 165 MB; one of 4 GiB, the longest file that is read, would take as many times that."""
    entry = (
        b"PK\1\2" + struct.pack("<4B4H3L5H2L", 20, 3, 20, 0, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1101, 1101, len(entry) * 1101, 0, 0)
    path = tmp_path / "many.zip"
    path.write_bytes(entry * 1101 + end)
    monkeypatch.delattr(zipfile, "ZipFile")
    with pytest.raises(BundleError, match="more than 1100 files"):
        read_files(path)


def test_a_zip_and_a_folder_hold_the_same(trained: fv.Result, made: Path, tmp_path: Path) -> None:
    packed = trained.save(tmp_path / "model.zip", about="Tells who is ill, for nurses.")
    assert read_files(packed) == read_files(made)
    shutil.unpack_archive(packed, tmp_path / "unpacked")
    assert read_files(tmp_path / "unpacked") == read_files(made)
    again = trained.save(tmp_path / "again.zip", about="Tells who is ill, for nurses.")
    assert again.read_bytes() == packed.read_bytes()


def test_what_is_private_stays_in_the_run_folder(trained: fv.Result, made: Path) -> None:
    files = read_files(made)
    assert set(files) == {
        SUMS,
        "bundle.json",
        "card.html",
        "ledger.jsonl",
        "model.safetensors",
        "privacy.json",
    }
    own = {SUMS, "bundle.json", "card.html"}
    assert all(FILES.get(name, Kind.COVERED) is Kind.COVERED for name in set(files) - own)
    assert all(
        kind is Kind.COVERED for name in ("privacy.json", "ledger.jsonl") for kind in FIELDS[name].values()
    )
    diagnostics = json.loads((trained.folder / "diagnostics.json").read_text())
    said = b"".join(files.values()).decode(errors="ignore")
    assert diagnostics["records_sha256"] not in said
    assert str(trained.folder) not in said
    manifest = json.loads(files["bundle.json"])
    assert set(manifest) - {"schema_version", "fedveil", "run", "about", "model", "input"} == {
        *("task", "classes", "targets", "rounds", "test", "metrics", "ledger", "experiment")
    }


def test_metrics_of_a_public_table_are_handed_on_and_those_of_people_are_not(
    trained: fv.Result, made: Path, tmp_path: Path
) -> None:
    public = fv.load(made).manifest
    assert public.test == "public"
    assert {name: one.estimate for name, one in public.metrics.items()} == trained.metrics
    held_out = train(tmp_path / "runs", "mlp", people(features=FRAME, test=None), rounds=1)
    saved = held_out.save(tmp_path / "model")
    assert (fv.load(saved).manifest.test, fv.load(saved).manifest.metrics) == ("private", {})
    assert any(held_out.metrics.values())
    assert "No test metrics are shown" in (saved / CARD).read_text()


def test_the_card_says_what_the_model_is_for_and_what_is_not_covered(made: Path, trained: fv.Result) -> None:
    card = (made / "card.html").read_text()
    assert "Tells who is ill, for nurses." in card
    assert "<script" not in card
    assert len(card) < 100_000
    for sentence in (trained.statement.sentences()[0], *trained.statement.uncovered):
        assert sentence.rstrip(".").replace("'", "&#39;").replace('"', "&#34;")[:60] in card


def test_a_model_that_was_handed_over_is_asked_for_again(tmp_path: Path) -> None:
    result = train(tmp_path / "runs", rounds=1)
    saved = result.save(tmp_path / "model")
    with pytest.raises(
        BundleError, match=r"was handed over in a Python session.*fedveil.load\(bundle, model\)"
    ):
        fv.load(saved).predict(X)
    assert np.array_equal(fv.load(saved, network()).predict(X), result.predict(X))
    with pytest.raises(BundleError, match=r"tensor '0.weight' is \(4, 3\) in the bundle and \(2, 3\)"):
        fv.load(saved, nn.Sequential(nn.Linear(3, 2))).predict(X)


def three_wide(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    CALLS.append(input_shape)
    return nn.Linear(3, n_outputs)


CALLS: list[tuple[int, ...]] = []


def test_code_that_a_bundle_names_runs_only_if_asked(tmp_path: Path) -> None:
    path = f"{__name__}:three_wide"
    saved = train(tmp_path / "runs", path, rounds=1).save(tmp_path / "model")
    CALLS.clear()
    with pytest.raises(BundleError, match=f"code of your installation.*--model {path}"):
        fv.load(saved).predict(X)
    with pytest.raises(BundleError, match="was trained as model"):
        fv.load(saved, model="os:getcwd").predict(X)
    assert CALLS == []
    assert len(fv.load(saved, model=path).predict(X)) == len(X)


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospital")
    (folder / "schema.toml").write_text(SCHEMA)
    columns = {
        "patient": [f"P{row % 9}" for row in range(40)],
        "hospital": [("north", "south")[row % 2] for row in range(40)],
        "sick": [("no", "yes")[row % 3 == 0] for row in range(40)],
        "age": [20 + row for row in range(40)],
        "ward": [("surgery", "heart")[row % 2] for row in range(40)],
    }
    pyarrow.csv.write_csv(pa.table(columns), folder / "table.csv")
    (folder / "run.toml").write_text(
        'name = "ward"\nrounds = 1\n[data.table]\nschema_file = "schema.toml"\nfiles = ["table.csv"]\n'
        '[local]\n[method]\nname = "uldp-avg"\nclip = 0.5\nnoise_multiplier = 2.0\n'
    )
    return folder


def test_tables_are_encoded_as_they_were_for_training(hospital: Path, tmp_path: Path) -> None:
    """By the commands alone: train, bundle, predict; and the same from Python gives the same numbers."""
    (run,) = as_json("run", hospital / "run.toml", "--runs", tmp_path / "runs")["runs"]
    as_json("bundle", run["folder"], "-o", tmp_path / "ward.zip", "--about", "x")
    new = pa.table({"ward": ["heart", "surgery"], "id": [7, 8], "age": ["30", "200"], "more": ["?", "?"]})
    pyarrow.csv.write_csv(new, tmp_path / "new.csv")
    told = as_json(
        "predict", tmp_path / "ward.zip", tmp_path / "new.csv", "-o", tmp_path / "out.parquet", "--keep", "id"
    )
    assert (told["records"], told["columns"]) == (
        2,
        ["id", "prediction", "probability_no", "probability_yes"],
    )
    out = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    encoded = np.array([[2 * 30 / 100 - 1, 0, 1], [1, 1, 0]], dtype=np.float32)  # 200 is clipped to its bound
    read = fv.load(tmp_path / "ward.zip")
    assert out.column("prediction").to_pylist() == list(read.predict(encoded))
    assert set(out.column("prediction").to_pylist()) <= {"no", "yes"}
    assert np.allclose(out.column("probability_yes"), read.predict_proba(encoded)[:, 1])
    assert str(hospital) not in b"".join(read_files(tmp_path / "ward.zip").values()).decode(errors="ignore")

    # Another hospital's table, written in its own way.
    lines = "ward;id;age;more\nheart;7;30,0;?\nsurgery;8;200,0;?\n"
    (tmp_path / "own.csv").write_text(lines, encoding="utf-8")
    command = ("predict", tmp_path / "ward.zip", tmp_path / "own.csv", "-o", tmp_path / "own.parquet")
    assert "a prediction, by --format" in ended(*command).mistake
    as_json(*command, "--keep", "id", "--format", "delimiter=;", "--format", "decimal=,")
    own = pyarrow.parquet.read_table(tmp_path / "own.parquet")
    assert own.column("probability_yes").equals(out.column("probability_yes"))
    assert "delimitr: no such key" in ended(*command, "--format", "delimitr=;").mistake
    assert "expected KEY=VALUE" in ended(*command, "--format", ";").mistake

    held = fv.tables(hospital / "schema.toml", [hospital / "table.csv"])
    result = fv.train(
        "linear", held, method=fv.uldp_avg(clip=0.5, noise_multiplier=2.0), rounds=1, folder=tmp_path
    )
    again = fv.load(result.save(tmp_path / "python"))
    with pytest.raises(DataError, match=r"its schema encodes; .*predict_table\('new.csv'\)"):
        result.predict(pa.table({"age": [30], "ward": [1], "more": [2]}))
    assert again.predict_table(tmp_path / "new.csv").column("prediction").to_pylist() == list(
        result.predict(encoded)
    )


def test_kept_ids_are_written_as_they_are_and_labels_of_a_bundle_as_no_formula(
    made: Path, tmp_path: Path
) -> None:
    """Ids are the reader's own and go back to the reader's tables; labels come from whoever made the bundle."""
    ids = ["=1+1", "-12/3", "+49 30 1", "@x", "'quoted", '"', "007", "1e5", "NA", "", "a,b", " b ", "ä;\\"]
    read = fv.load(made)
    columns = {name: np.ones(len(ids)) for name in read.manifest.input.columns}
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    pyarrow.csv.write_csv(pa.table({"=id": ids} | columns), new)
    foreign = replace(read, manifest=read.manifest.model_copy(update={"classes": ("=cmd()", "-1")}))
    write_table(foreign.predict_table(new, ("=id",)), out, ("=id",))
    header, *rows = csv.reader(out.read_text(encoding="utf-8").splitlines())
    assert header == ["=id", "prediction", "probability_=cmd()", "probability_-1"]
    assert [row[0] for row in rows] == ids
    assert {row[1] for row in rows} <= {"'=cmd()", "-1"}
    write_table(foreign.predict_table(new, ("=id",)), out.with_suffix(".parquet"), ("=id",))
    exact = pyarrow.parquet.read_table(out.with_suffix(".parquet"))
    assert exact.column("=id").to_pylist() == ids
    assert set(exact.column("prediction").to_pylist()) <= {"=cmd()", "-1"}
    pyarrow.csv.write_csv(pa.table({"prediction": ids} | columns), new)
    with pytest.raises(DataError, match="column 'prediction' cannot be kept"):
        read.predict_table(new, ("prediction",))
    with pytest.raises(ConfigError, match="trained on arrays, and a format belongs to a schema"):
        read.predict_table(new, file_format={"delimiter": ";"})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"age": [1.0]}, "no columns 'pulse', 'dose'"),
        ({"age": ["x"], "pulse": [1.0], "dose": [1.0]}, "record 1 .* column 'age': the value is no number"),
        ({"age": [None], "pulse": [1.0], "dose": [1.0]}, "column 'age': the value is missing"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    columns: dict[str, Any], said: str, made: Path, tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "new.parquet")
    with pytest.raises(fv.FedveilError, match=said):
        fv.load(made).predict_table(tmp_path / "new.parquet")


def test_exports_give_the_same_outputs(made: Path, tmp_path: Path) -> None:
    read = fv.load(made)
    stored = torch.load(export_torch(read, tmp_path / "model.pt"), weights_only=True)
    assert all(torch.equal(stored[name], value) for name, value in read.model.state_dict().items())
    told = as_json("export", made, "--torch", tmp_path / "again.pt")
    assert told["written"] == [str(tmp_path / "again.pt")]


def test_a_run_folder_is_told_from_a_bundle(trained: fv.Result) -> None:
    with pytest.raises(BundleError, match=r"is a run folder; `fedveil bundle .* makes a bundle of it"):
        fv.load(trained.folder)


def test_an_export_that_cannot_be_written_says_so(made: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"absent/model.pt cannot be written: No such file or directory"):
        export_torch(fv.load(made), tmp_path / "absent" / "model.pt")


@pytest.mark.slow
def test_onnx_gives_the_same_outputs(made: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    read = fv.load(made)
    session = runtime.InferenceSession(str(export_onnx(read, tmp_path / "model.onnx")))
    for count in (1, 7, len(X)):
        (outputs,) = session.run(None, {"features": X[:count]})
        assert np.allclose(outputs, read.predictor.by_place.outputs(X[:count]), atol=1e-5)
    # Tracing notes the files and lines of code by which it came to every operator.
    for word in (b".py", b"torch/", b"forward", str(Path(torch.__file__).parents[2]).encode()):
        assert word not in (tmp_path / "model.onnx").read_bytes()
    with pytest.raises(BundleError, match=r"absent/model.onnx cannot be written: No such file or directory"):
        export_onnx(read, tmp_path / "absent" / "model.onnx")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"outputs": 10**10}}, "classes: 2 of them, and the model has 10000000000 outputs"),
        ({"input": {"shape": [10**10], "columns": None}}, "is larger than any model reads"),
        (
            {"input": {"shape": [10**7], "columns": None}},
            r"tensor '.*' is .* in the bundle and .* in the model",
        ),
        ({"classes": []}, "classes: 0 of them, and the model has 2 outputs"),
        ({"task": "survival"}, "classes: a survival has none"),
        (
            {"task": "survival", "classes": [], "model": {"outputs": 2**63}},
            "no .* has records of shape .* and 9223372036854775808 outputs",
        ),
        ({"input": {"factor": 1e38}}, "row 0: the model's outputs are not finite"),
    ],
)
def test_a_bundle_that_asks_for_another_model_than_its_weights_is_refused_before_it_is_built(
    made: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """Records of 10^10 features, or as many outputs, would take hundreds of gigabytes."""
    document = json.loads((made / "bundle.json").read_bytes())
    for key, value in changes.items():
        document[key] = {**document[key], **value} if isinstance(value, dict) else value
    files = read_files(made) | {"bundle.json": json.dumps(document).encode()}
    write_files(tmp_path / "asks", {**files, SUMS: sums(files)})
    with (
        mock.patch("fedveil.bundle.bundle.build_model", wraps=build_model) as built,
        pytest.raises((BundleError, DataError), match=told),
    ):
        fv.load(tmp_path / "asks").predict(FRAME * 1e5)
    assert built.called == ("outputs are not finite" in told)


# --- trust ----------------------------------------------------------------------------------------------------------


def test_one_bit_of_any_file_is_noticed(copy: Path) -> None:
    key = IdentityKey.generate()
    sign(copy, key)
    assert fv.verify(copy, [key.public.raw.hex()]).holds
    random = np.random.default_rng(1)
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) == 7
    for path in files:
        content = path.read_bytes()
        places = {0, len(content) // 2, len(content) - 1, *random.integers(0, len(content), 12).tolist()}
        for place in places:
            changed = bytearray(content)
            changed[place] ^= 1 << int(random.integers(8))
            path.write_bytes(changed)
            found = fv.verify(copy)
            assert str(found).splitlines()[0].startswith("fails ")
            assert not found.holds, f"{path.name}, byte {place}"
        path.write_bytes(content)
    assert fv.verify(copy).holds


def test_files_that_lie_in_one_another_are_not_read(tmp_path: Path) -> None:
    """An archive of 1 MB, each of whose 1000 files goes to its end: they are 1 GB."""
    body, entries = bytes(50_000), list[tuple[bytes, int, int]]()
    for number in range(1000):
        name, crc, size = b"file%04d" % number, zlib.crc32(body), len(body)
        body = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 33, crc, size, size, 8, 0) + name + body
        entries.append((name, crc, size))
    path, directory = tmp_path / "model.zip", b""
    for name, crc, size in entries:
        place = len(body) - size - 38
        fields = (20, 20, 0, 0, 0, 33, crc, size, size, 8, 0, 0, 0, 0, 0, place)
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + name
    many = len(entries)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, many, many, len(directory), len(body), 0)
    path.write_bytes(body + directory + end)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.read("file0999")) == len(body) - 38  # a reader takes each for a file
    with pytest.raises(BundleError, match="more bytes than it has"):
        read_files(path)
    failed = fv.verify(path)
    assert not failed.holds


def test_one_bit_of_an_archive_is_noticed(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    write_files(path, read_files(made))
    content = path.read_bytes()
    random = np.random.default_rng(2)
    headers = range(len(content) - 700, len(content))  # the archive's directory, every byte of it
    for place in (*range(60), *headers, *random.integers(0, len(content), 60).tolist()):
        changed = bytearray(content)
        changed[place] ^= 1 << int(random.integers(8))
        path.write_bytes(changed)
        with pytest.raises(BundleError):
            read_files(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: (path / "card.html").unlink(), "card.html is listed .* but missing"),
        (lambda path: (path / "more.txt").write_text("x"), "more.txt is not listed"),
        (lambda path: (path / ".hidden").write_text("x"), "'.hidden' is no file of a bundle"),
        (lambda path: (path / SUMS).unlink(), "no bundle: it has no SHA256SUMS"),
        (lambda path: (path / SUMS).write_text("x"), "SHA256SUMS, line 1"),
    ],
)
def test_files_that_are_not_as_listed_are_named(
    change: Callable[[Path], object], said: str, copy: Path
) -> None:
    change(copy)
    with pytest.raises(BundleError, match=said):
        fv.load(copy)


def test_a_bundle_made_again_is_not_what_was_signed(copy: Path, made: Path, tmp_path: Path) -> None:
    """Whoever can write files and digests cannot write the signature; and an unknown key vouches for nothing."""
    mine, other = IdentityKey.generate(), IdentityKey.generate()
    sign(copy, mine)
    sign(copy, other)
    trusted = [mine.public.raw.hex()]
    assert fv.verify(copy, trusted).holds
    changed = read_files(copy)["bundle.json"].replace(b"nurses", b"banker")
    forged = rewritten(copy, tmp_path / "forged", {"bundle.json": changed})
    assert "changed after it was signed" in failures(fv.verify(forged))["signatures"]
    unsigned = rewritten(made, tmp_path / "unsigned", {"bundle.json": changed})
    assert failures(fv.verify(unsigned)) == {}
    (said,) = [one for one in fv.verify(unsigned).checks if one.name == "signatures"]
    assert said.outcome == "unchecked"
    assert "not signed by the trusted key" in failures(fv.verify(unsigned, trusted))["signatures"]
    with pytest.raises(BundleError, match="already"):
        sign(copy, mine)


def understated(statement: Statement, share: float) -> bytes:
    assert statement.epsilon is not None
    less = tuple((name, None if value is None else value * share) for name, value in statement.epsilons)
    return json.dumps(replace(statement, epsilon=statement.epsilon * share, epsilons=less).to_json()).encode()


@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (1.02, True), (0.98, False)])
def test_a_statement_below_what_its_events_cost_is_refuted(
    share: float, holds: bool, made: Path, tmp_path: Path, trained: fv.Result
) -> None:
    changed = rewritten(made, tmp_path / "changed", {"privacy.json": understated(trained.statement, share)})
    found = failures(fv.verify(changed))
    assert (found == {}) == holds
    assert holds or "more than the" in found["epsilon by pld"]


def test_a_statement_of_another_delta_or_of_noise_from_a_known_seed_is_refuted(
    tmp_path: Path, made: Path, trained: fv.Result
) -> None:
    """The seed stands in the bundle's own experiment, so everybody can subtract the noise."""
    larger = replace(trained.statement, delta=trained.statement.delta * 2)
    changed = rewritten(made, tmp_path / "larger", {"privacy.json": _bytes(larger)})
    assert "another was requested" in failures(fv.verify(changed))["experiment"]
    fewer = {"privacy.json": _bytes(replace(trained.statement, units=1))}  # so that no delta is too large
    fewer_said = failures(fv.verify(rewritten(made, tmp_path / "fewer", fewer)))["experiment"]
    assert fewer_said == "the statement counts 1 users, and 20 are declared"

    seeded = {"privacy": {"insecure_seed": 7}}
    method = fv.uldp_avg(clip=0.5, noise_multiplier=5.0)
    bare = train(tmp_path / "runs", "linear", method=method, rounds=1, settings=seeded, epsilon=None)
    bundle = bare.save(tmp_path / "bare")
    assert fv.verify(bundle).holds
    said, event = bare.statement, bare.statement.event
    assert said.epsilon is None
    epsilon = PldAccountant().epsilon(event, said.delta) * 1.01
    promised = replace(said, epsilon=epsilon, reasons=(), secure_randomness=True)
    forged = rewritten(bundle, tmp_path / "forged", {"privacy.json": _bytes(promised)})
    assert "known seed" in failures(fv.verify(forged))["experiment"]
    (bare.folder / "privacy.json").write_bytes(_bytes(promised))
    assert "known seed" in failures(verify_run(bare.folder))["experiment"]


def test_a_statement_of_one_accountant_alone_is_recomputed_by_it(
    made: Path, tmp_path: Path, trained: fv.Result
) -> None:
    statement = trained.statement
    assert statement.epsilon is not None
    lower = replace(statement, epsilon=statement.epsilon * 0.98)  # the table of accountants is left as it is
    changed = {"privacy.json": json.dumps(lower.to_json()).encode()}
    assert "epsilon by pld" in failures(fv.verify(rewritten(made, tmp_path / "changed", changed)))


def test_a_statement_of_more_than_can_be_counted_fails_and_neither_hangs_nor_crashes(
    made: Path, tmp_path: Path, trained: fv.Result
) -> None:
    """10^9 sampled rounds took gigabytes; noise whose square is no number cost an epsilon of .10 by 'rdp'."""
    sampled = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=1.0))
    endless = replace(trained.statement, event=SelfComposedEvent(event=sampled, count=10**9))
    changed = rewritten(made, tmp_path / "endless", {"privacy.json": _bytes(endless)})
    assert "composes at most" in failures(fv.verify(changed))["epsilon by pld"]
    little = replace(trained.statement, event=LaplaceEvent(noise_multiplier=1e-99))
    changed = rewritten(made, tmp_path / "little", {"privacy.json": _bytes(little)})
    assert "no number for their cost" in failures(fv.verify(changed))["epsilon by pld"]
    none = _bytes(little).replace(b"1e-99", b"1e-199")
    files = {**read_files(made), "privacy.json": none}
    write_files(tmp_path / "none", {**files, SUMS: sums(files)})
    assert "must lie between" in failures(fv.verify(tmp_path / "none"))["files"]


def test_a_ledger_that_lost_a_charge_or_is_anothers_is_refused(
    made: Path, tmp_path: Path, trained: fv.Result
) -> None:
    lines = read_files(made)["ledger.jsonl"].splitlines(keepends=True)
    assert len(lines) == 2
    short = failures(fv.verify(rewritten(made, tmp_path / "short", {"ledger.jsonl": lines[0]})))
    assert set(short) == {"ledger", "statement"}
    more = read_files(made)["bundle.json"].replace(b'"rounds": 2', b'"rounds": 3')
    uncharged = failures(fv.verify(rewritten(made, tmp_path / "more", {"bundle.json": more})))
    assert "3 rounds made the model, and round 3 was not charged" in uncharged["ledger"]
    most = read_files(made)["bundle.json"].replace(b'"rounds": 2', b'"rounds": 9000000000000000000')
    endless = failures(fv.verify(rewritten(made, tmp_path / "endless", {"bundle.json": most})))
    assert "round 3 was not charged" in endless["ledger"]  # and nobody counts so far
    renamed, previous, entries = b"", GENESIS, read_entries(trained.folder / "ledger.jsonl")
    for (
        entry
    ) in entries:  # another run's charges of the same cost, in a chain that ends where the manifest says
        line, previous = write_line(replace(entry, run="another"), previous)
        renamed += line + b"\n"
    ends = json.loads(read_files(made)["bundle.json"]) | {
        "ledger": {"count": len(entries), "digest": previous}
    }
    changes = {"ledger.jsonl": renamed, "bundle.json": json.dumps(ends).encode()}
    anothers = failures(fv.verify(rewritten(made, tmp_path / "anothers", changes)))
    assert "2 rounds made the model, and round 1 was not charged" in anothers["ledger"]
    other = train(tmp_path / "runs", "mlp", rounds=3).folder / "ledger.jsonl"
    strange = failures(fv.verify(rewritten(made, tmp_path / "other", {"ledger.jsonl": other.read_bytes()})))
    assert set(strange) == {"ledger", "statement"}


def test_a_bundle_whose_parts_tell_of_different_promises_is_refused(
    made: Path, tmp_path: Path, trained: fv.Result
) -> None:
    said = trained.statement
    assert said.epsilon is not None

    def found(number: int, **changes: bytes) -> dict[str, str]:
        named = {name.replace("_", "."): content for name, content in changes.items()}
        return failures(fv.verify(rewritten(made, tmp_path / str(number), named)))

    files = read_files(made)
    assert set(found(1, card_html=files["card.html"].replace(b"</h1>", b"!</h1>"))) == {"card"}
    twice = files["privacy.json"].replace(b'"epsilon"', b'"epsilon": 0.001, "epsilon"', 1)
    again = {**files, "privacy.json": twice}
    write_files(tmp_path / "again", {**again, SUMS: sums(again)})
    assert "twice" in failures(fv.verify(tmp_path / "again"))["files"]
    lower = tuple((name, 0.001) for name, _ in said.epsilons)
    assert "epsilon by pld" in found(2, privacy_json=_bytes(replace(said, epsilons=lower)))
    line = Disclosure(
        role=Role.READER, party="readers", sees="the models", epsilon=said.epsilon / 2, event=said.event
    )
    assert "epsilon" in found(3, privacy_json=_bytes(replace(said, trust=(*said.trust, line))))


def _bytes(statement: Statement) -> bytes:
    return json.dumps(statement.to_json()).encode()


def test_what_cannot_be_checked_is_said(made: Path, tmp_path: Path) -> None:
    found = fv.verify(made)
    assert found.holds
    assert {one.detail for one in found.checks if one.outcome == "unchecked"} >= set(NOT_CHECKABLE.values())
    bare = train(tmp_path / "runs", "linear", method=fv.fedavg(), rounds=1).save(tmp_path / "bare")
    (epsilon,) = [one for one in fv.verify(bare).checks if one.name == "epsilon"]
    assert epsilon.outcome == "unchecked"
    assert "nothing is guaranteed" in epsilon.detail


def test_the_commands_sign_and_verify(copy: Path, tmp_path: Path) -> None:
    key = as_json("sign", copy, "--key", tmp_path / "key.pem", "--new-key")["key"]
    assert as_json("verify", copy, "--trust", key)["holds"] is True
    assert "checks hold. What is unchecked cannot be shown by these files." in ended("verify", copy).out
    (copy / "card.html").write_text("x")
    refused = ended("verify", copy)
    assert refused.code == 7
    assert "checks fail." in refused.out


@pytest.mark.parametrize("key", ["xyz", "00", "g" * 64, ""])
def test_what_is_no_key_is_a_mistake_in_what_was_asked_and_no_failed_check(copy: Path, key: str) -> None:
    assert (
        "64 hexadecimal digits, as `fedveil sign` prints it" in ended("verify", copy, "--trust", key).mistake
    )
    with pytest.raises(ConfigError, match="a public key is 64 hexadecimal digits"):
        verify_ledger(copy / "no.json", [key])


@pytest.mark.parametrize("option", ["--charter", "--membership", "--ledger"])
def test_a_file_to_check_against_that_is_not_there_is_a_mistake_in_what_was_asked(
    copy: Path, option: str
) -> None:
    assert (
        f"{option} nowhere.toml: there is no such file"
        in ended("verify", copy, option, "nowhere.toml").mistake
    )


def test_nothing_is_written_over_what_is_read(made: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("age,pulse,dose\n1,2,3\n")
    before = table.read_bytes(), made.stat().st_mtime_ns
    said = ended("predict", made, table, "-o", tmp_path / ".." / tmp_path.name / "new.csv").mistake
    assert "is what the command reads; give another name" in said
    assert "is what the command reads" in ended("export", made, "--torch", made).mistake
    assert (table.read_bytes(), made.stat().st_mtime_ns) == before


def test_a_column_to_keep_may_be_named_twice(made: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("age,pulse,dose,id\n1,2,3,007\n")
    asked = ("predict", made, table, "-o", tmp_path / "out.csv", "--keep", "id", "--keep", "id")
    assert as_json(*asked)["columns"][0] == "id"


def test_a_charter_needs_a_membership_that_its_founder_sealed(made: Path, tmp_path: Path) -> None:
    found = verify_bundle(made, charter=tmp_path / "charter.toml")
    assert [one.name for one in found.checks if one.outcome == "fails"] == ["signatures"]

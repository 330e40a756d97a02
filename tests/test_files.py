"""Malformed files: whatever is done to a file that is read, there is a value or one error of this project."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import stat
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from safetensors.torch import save_file

from fedveil.bundle.bundle import load_bundle
from fedveil.bundle.card import model_card
from fedveil.bundle.manifest import SUMS, BundleError, sums
from fedveil.bundle.writing import bundle_run
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.data.draft import draft_schema
from fedveil.data.schema import read_schema
from fedveil.errors import DataError, FedveilError, RunFolderError
from fedveil.federation.audit.ledger_audit import LedgerExport, _signed, export_ledger, verify_ledger
from fedveil.federation.audit.run_record import STATE, identify
from fedveil.federation.coordinator import draw_sample
from fedveil.federation.enrollment.founder import Request
from fedveil.federation.ledger_heads import HEADS, SeenHeads
from fedveil.federation.membership import Charter, Membership
from fedveil.federation.policy import CpuQuota, Policy
from fedveil.federation.silo_data import SiloFiles, load_silo_population
from fedveil.federation.silo_session.tasks import training_plan
from fedveil.federation.store import RecordStore, RoundRecord
from fedveil.files import (
    DEEPEST,
    LARGEST_FILE,
    parse_json,
    parse_toml,
    read_content,
    read_text,
    replace_file,
)
from fedveil.privacy.ledger import Ledger, read_entries
from fedveil.privacy.statement import Statement
from fedveil.protocols.weighting.plan import WeightedInputs
from fedveil.report.run_data import load_run
from fedveil.run.config.release_document import InferenceDocument, read_releases
from fedveil.run.folder.diagnostics import require_same_records
from fedveil.run.folder.documents import read_rows
from fedveil.run.folder.run_folder import RunFolder, stored_tensors
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.evaluation import read_evaluation
from fedveil.run.releases.inference import prepare_inference
from fedveil.run.releases.preprocessing import read_preprocessed
from fedveil.run.setup import prepare
from fedveil.run.simulation import make_releases
from fedveil.run.training_run import run
from fedveil.statistics.evaluation.result import read_evaluated
from fedveil.statistics.inference.result import read_fitted
from fedveil.training.pretrained import PublicModel, take_parameters
from tests import test_inference_runs as odds
from tests import test_preprocessing as refined
from tests.federation_world import RUN, World, asked, population
from tests.list_of_users import write_list
from tests.runs import Silent

SCHEMA = """n_users = 4
user = "patient"
silos = ["north", "south"]
[target]
kind = "label"
column = "ill"
classes = ["0", "1"]
[features.age]
kind = "number"
lower = 0.0
upper = 100.0
[features.place]
kind = "category"
categories = ["a", "b"]
unknown = "zero"
"""
CSV = "patient,age,place,ill\n0,33,a,1\n1,47.5,b,0\n2,60,a,1\n3,12,ä,0\n"
POLICY = 'epsilon = 2.0\nclip = 1.0\nmethods = ["uldp-avg"]\ntrust_silos = false\n'


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file: where one stands, and what reads it.

    Attributes:
        path: of a good one.
        read: reads what stands there.
        sealed: whether the file has a digest of its own, so that what is read of it is right or refused.
        seal: makes a mutated body whole again, as somebody would who knows the format.
    """

    path: Path
    read: Callable[[Path], Any]
    sealed: bool = False
    seal: Callable[[bytes], bytes] = bytes


def federation(folder: Path) -> dict[str, FileKind]:
    """The files of a federation's parties, and of a run."""
    folder.mkdir()
    experiment = asked(rounds=2, method={"user_sampling_rate": 0.5})
    world = World(folder, experiment, population())
    world.play()
    world.close()
    path = world.run_folder.path
    (folder / "membership.toml").write_text(world.membership.to_toml())
    (folder / "policy.toml").write_text(POLICY)
    (folder / "cpu.json").write_text('{"481234": 1.5}')
    prepared = prepare(experiment, FixedPopulation(population()))

    plan = training_plan(prepared)

    def ledger(at: Path) -> Any:
        entries = read_entries(at)
        with Ledger(at, unit="user") as opened:
            assert opened.entries == entries
        return entries

    def answer(at: Path) -> Any:
        kept = RecordStore(at.parent).read(RUN)
        return None if kept is None else kept.encode()

    def metrics(at: Path) -> Any:
        checkpoint = run_folder.read_checkpoint()
        assert checkpoint is not None
        rows = read_rows(at)
        run_folder.mend_metrics(checkpoint)
        return rows

    def statement(at: Path) -> Any:
        return Statement.from_json(parse_json(read_content(at, RunFolderError), at, RunFolderError))

    run_folder = RunFolder(run(prepared, folder / "here", Silent()).folder)
    (folder / "answers").mkdir()
    record = RoundRecord(
        round=3,
        request=bytes(32),
        binding=bytes(32),
        contribution=bytes(40),
        before={"model": np.arange(5.0, dtype=np.float32)},
    )
    RecordStore(folder / "answers").write(RUN, record)
    kept = folder / "answers" / f"{RUN.hex()}.answer"
    weighted = folder / "weighted.bin"
    weighted.write_bytes(
        WeightedInputs(
            contributions=np.arange(6).reshape(2, 3), noise=np.arange(3), dither=bytes(32)
        ).encode()
    )

    def answer_of(body: bytes) -> bytes:
        return body[:-32] + hashlib.sha256(body[:-32]).digest()

    def lines_of(content: bytes) -> bytes:
        sealed = b""
        for line in content.split(b"\n")[:-1]:
            body = line[:-79] + b"}"
            sealed += body[:-1] + f', "digest": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
        return sealed

    def audited(at: Path) -> Any:
        LedgerExport.read(at)
        return [(one.name, one.outcome) for one in verify_ledger(at).checks]

    def export_of(content: bytes) -> bytes:
        try:
            document = json.loads(content)
            document["signature"] = world.keys[0].sign(_signed(document)).hex()
        except (ValueError, TypeError, RecursionError):
            return content
        return json.dumps(document).encode()

    export = folder / "audit.json"
    export_ledger(
        folder / "state-0",
        export,
        identity=world.keys[0],
        membership=world.membership,
        number=0,
        delta=1e-5,
    )
    here = run_folder.path
    silo_ledger = folder / "state-0" / "ledger.jsonl"
    return {
        "membership.toml": FileKind(path=folder / "membership.toml", read=Membership.read),
        "policy.toml": FileKind(path=folder / "policy.toml", read=Policy.read),
        "ledger.jsonl": FileKind(path=silo_ledger, read=ledger, sealed=True),
        "ledger.jsonl, sealed": FileKind(path=silo_ledger, read=ledger, seal=lines_of),
        "audit.json": FileKind(path=export, read=audited, sealed=True),
        "audit.json, signed": FileKind(path=export, read=audited, seal=export_of),
        "uncharged_cpu.json": FileKind(path=folder / "cpu.json", read=CpuQuota),
        "heads.jsonl": FileKind(path=folder / HEADS, read=lambda at: SeenHeads(at, bytes(32)).last("silo-0")),
        "answer": FileKind(path=kept, read=answer, sealed=True),
        "answer, sealed": FileKind(path=kept, read=answer, seal=answer_of),
        "weighted input": FileKind(path=weighted, read=lambda at: WeightedInputs.decode(at.read_bytes())),
        "federation.json": FileKind(path=path / STATE, read=lambda at: identify(RunFolder(at.parent))),
        "participants.json": FileKind(
            path=path / "checkpoint" / "participants.json",
            read=lambda _: draw_sample(world.run_folder, plan, 2, 0),
        ),
        "experiment.toml": FileKind(path=here / "experiment.toml", read=lambda at: RunFolder.open(at.parent)),
        "metrics.jsonl": FileKind(path=here / "metrics.jsonl", read=metrics),
        "privacy.json": FileKind(path=here / "privacy.json", read=statement),
        "privacy.json, reported": FileKind(path=here / "privacy.json", read=lambda at: load_run(at.parent)),
        "metrics.jsonl, reported": FileKind(path=here / "metrics.jsonl", read=lambda at: load_run(at.parent)),
        "experiment.toml, reported": FileKind(
            path=here / "experiment.toml", read=lambda at: load_run(at.parent)
        ),
        "environment.json": FileKind(path=here / "environment.json", read=lambda at: load_run(at.parent)),
        "diagnostics.json": FileKind(path=here / "diagnostics.json", read=lambda at: load_run(at.parent)),
        "diagnostics.json, audited": FileKind(
            path=here / "diagnostics.json", read=lambda _: require_same_records(run_folder, prepared)
        ),
        "checkpoint": FileKind(
            path=here / "checkpoint" / "state.safetensors", read=lambda _: run_folder.read_checkpoint()
        ),
    }


def alone(folder: Path) -> dict[str, FileKind]:
    """Keys, schema and tables."""
    folder.mkdir()
    IdentityKey.generate().save(folder / "identity.key")
    PaillierPrivateKey.generate_insecure(512).save(folder / "paillier.key")
    (folder / "schema.toml").write_text(SCHEMA)
    (folder / "table.csv").write_text(CSV)
    columns = {"patient": [0, 1, 2], "age": [1.0, 2.0, 3.0], "place": ["a", "b", "a"], "ill": [0, 1, 1]}
    pa_parquet.write_table(pa.table(columns), folder / "table.parquet")
    digest = write_list(folder / "users.txt", "0123")
    save_file({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, folder / "model.safetensors")
    schema = read_schema(folder / "schema.toml")
    founder, identity = IdentityKey.generate(), IdentityKey.generate()
    node = ec.generate_private_key(ec.SECP384R1())
    charter = Charter(
        name="five", host="h", port=9443, founder=founder.public, authority="", data_schema=SCHEMA
    )
    (folder / "charter.toml").write_text(charter.to_toml())
    request = Request(
        role="silo",
        name="north",
        charter=charter.digest,
        identity=identity.public,
        transport=node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
    )
    request.with_signatures(identity, node).write(folder / "north.request")

    def asked_for(at: Path) -> Any:
        Request.read(at).check(charter.digest)

    listing = schema.model_copy(update={"users": digest})
    membership = Membership(
        silos=("north", "south"),
        roster=tuple(IdentityKey.generate().public for _ in range(2)),
        coordinator=IdentityKey.generate().public,
        schema_digest=bytes(32),
    )

    def share(table: Path) -> Any:
        return load_silo_population(schema, SiloFiles(table), membership, 0)

    def tensors(at: Path) -> Any:
        with stored_tensors(at) as stored:
            return [stored.get_tensor(name) for name in stored.keys()]  # noqa: SIM118 - no mapping

    return {
        "charter.toml": FileKind(path=folder / "charter.toml", read=Charter.read),
        "north.request": FileKind(path=folder / "north.request", read=asked_for, sealed=True),
        "identity.key": FileKind(path=folder / "identity.key", read=IdentityKey.load),
        "paillier.key": FileKind(path=folder / "paillier.key", read=PaillierPrivateKey.load),
        "schema.toml": FileKind(path=folder / "schema.toml", read=read_schema),
        "table.csv": FileKind(path=folder / "table.csv", read=share),
        "table.csv, drafted": FileKind(path=folder / "table.csv", read=draft_schema),
        "table.parquet": FileKind(path=folder / "table.parquet", read=share),
        "table.parquet, drafted": FileKind(path=folder / "table.parquet", read=draft_schema),
        "users.txt": FileKind(
            path=folder / "users.txt",
            read=lambda at: load_silo_population(
                listing, SiloFiles(folder / "table.csv", at), membership, 0
            ).train.user.tolist(),
            sealed=True,
        ),
        "model.safetensors": FileKind(path=folder / "model.safetensors", read=tensors),
        "model.initial": FileKind(
            path=folder / "model.safetensors",
            read=lambda at: take_parameters(torch.nn.Linear(3, 1), PublicModel.read(at)),
        ),
    }


def of_releases(folder: Path) -> dict[str, FileKind]:
    """What releases leave beside and without rounds, and the bundle of such a run: read, and all that follows of it.

    The manifest of a bundle and its statement are tried under a list of digests that fits.
    """
    folder.mkdir()
    refined.tables(folder, people=400)
    prepared = refined.prepared_in(folder, evaluation={}, data={"table": {"test_share": 0.5}})
    here = run(prepared, folder / "runs", Silent()).folder
    begun = here / "begun" / "checkpoint" / "evaluation.json"
    begun.parent.mkdir(parents=True)
    begun.write_bytes((here / "evaluation.json").read_bytes())
    (folder / "odds").mkdir()
    odds.tables(folder / "odds", people=60)
    document = read_releases(
        odds.written(folder / "odds", people=60, privacy="epsilon = 200.0"), InferenceDocument
    )
    fitted = make_releases(prepare_inference(document), folder / "runs")
    packed, unpacked = (bundle_run(here, folder / name) for name in ("bundle.zip", "bundle"))

    def listed(at: Path) -> Any:
        names = [path for path in at.parent.iterdir() if path.name != SUMS]
        files = {path.name: read_content(path, BundleError) for path in names}
        (at.parent / SUMS).write_bytes(sums(files))
        bundle = load_bundle(at.parent)
        return model_card(bundle.manifest, bundle.statement), bundle.model.state_dict()

    def told(found: Any) -> Any:
        return None if found is None else found.to_json()

    return {
        "evaluation.json": FileKind(
            path=here / "evaluation.json", read=lambda at: told(read_evaluated(at.parent))
        ),
        "evaluation.json, begun": FileKind(
            path=begun, read=lambda _: read_evaluation(RunFolder(here / "begun"))
        ),
        "preprocessing.json": FileKind(
            path=here / "preprocessing.json", read=lambda at: told(read_preprocessed(at.parent))
        ),
        "inference.json": FileKind(
            path=fitted / "inference.json", read=lambda at: told(read_fitted(at.parent))
        ),
        "bundle.zip": FileKind(path=packed, read=load_bundle, sealed=True),
        "bundle.json, listed": FileKind(path=unpacked / "bundle.json", read=listed),
        "privacy.json, listed": FileKind(path=unpacked / "privacy.json", read=listed),
        "model, listed": FileKind(path=unpacked / "model.safetensors", read=listed),
    }


NAMES = (
    *(
        "uncharged_cpu.json",
        "evaluation.json",
        "evaluation.json, begun",
        "preprocessing.json",
        "inference.json",
        "bundle.zip",
    ),
    *("bundle.json, listed", "privacy.json, listed", "model, listed"),
    *("charter.toml", "north.request", "heads.jsonl", "audit.json", "audit.json, signed"),
    *("membership.toml", "policy.toml", "ledger.jsonl", "ledger.jsonl, sealed", "answer", "answer, sealed"),
    *("weighted input", "federation.json", "participants.json", "experiment.toml", "metrics.jsonl"),
    *("privacy.json", "privacy.json, reported", "metrics.jsonl, reported", "experiment.toml, reported"),
    *("environment.json", "diagnostics.json", "diagnostics.json, audited", "checkpoint", "identity.key"),
    *("paillier.key", "schema.toml", "table.csv", "table.csv, drafted", "table.parquet"),
    *("table.parquet, drafted", "users.txt", "model.safetensors", "model.initial"),
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileKind]:
    folder = tmp_path_factory.mktemp("files")
    return federation(folder / "federation") | alone(folder / "alone") | of_releases(folder / "releases")


# --- mutations -----------------------------------------------------------------------------------------------

VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e999", "-1e308", "NaN", "Infinity", "9" * 30, "9" * 5000),
    *(
        '""',
        '"x"',
        '"\\ud800"',
        '"' + "y" * 5000 + '"',
        "[]",
        "{}",
        "[1]",
        '{"a": 1}',
        "[" * 3000 + "]" * 3000,
    ),
)
TOML_VALUES = (
    *("true", "-1", "1.5", "nan", "inf", "1e999", "9" * 30, "9" * 5000, '""', '"x"', "[]", "{}", "[[1], 2]"),
    *("1979-05-27", '"' + "y" * 5000 + '"', "[" * 3000 + "]" * 3000, "{a = " * 500 + "1" + "}" * 500),
)


def bytewise(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Cut, flipped, lengthened, doubled and swapped bytes."""
    size = len(content)
    for place in {0, 1, size // 2, size - 1, *(rng.randrange(size) for _ in range(25))}:
        yield content[:place]
    for _ in range(60):
        place = rng.randrange(size)
        yield content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
    for _ in range(20):
        place, some = rng.randrange(size), rng.randbytes(rng.randrange(1, 9))
        yield content[:place] + some + content[place:]
        yield content[:place] + some + content[place + len(some) :]
    for _ in range(10):
        first, last = sorted((rng.randrange(size), rng.randrange(size)))
        yield content[:last] + content[first:]
        yield content[:first] + content[last:]


def wholesale(content: bytes) -> Iterator[bytes]:
    """Another encoding, another kind of file, and what is nested or written without end."""
    text = content.decode("utf-8", errors="replace")
    yield from (b"", b"\n", b"\0" * 100, b"\xff" * 100, content + b"\0", b"\xef\xbb\xbf" + content)
    for encoding in ("utf-16", "utf-32", "latin-1", "utf-7"):
        yield text.encode(encoding, errors="replace")
    yield from (b"\x89PNG\r\n\x1a\n" + content, b"\x28\xb5\x2f\xfd" + content, b"PAR1" + content)
    yield from (b"[" * 100_000, b'{"a":' * 100_000, b"a = " + b"[" * 100_000, b"a." * 3000 + b"a = 1")
    yield from (b"[a" + b".a" * 3000 + b"]", b"a = " + b"{a=" * 3000, b"9" * 100_000, b"a = " + b"9" * 5000)
    yield from (b"NaN", b"[NaN]", b"null", b"true", b'"text"', b"[]", b"{}", b"1e999", b"a = nan")
    yield from (content.replace(b"1", b"2"), content.replace(b"\n", b"\r\n"), content.replace(b"\n", b"\n\n"))
    yield struct.pack("<Q", 1 << 62) + content
    yield struct.pack("<Q", 10) + b'{"a": [1]}'


def typed(content: bytes) -> Iterator[Callable[[], bytes]]:
    """Every value of a JSON document or of a line of TOML in another type; what is called makes the bytes."""
    text = content.decode("utf-8", errors="replace")
    first = text.split("\n")[0] if text.startswith("{") else ""
    if first:
        whole = text if first in ("{", "") else first
        try:
            document = json.loads(whole)
        except ValueError:
            return
        tail = "" if whole is text else text[len(first) :]
        for place in places(document):
            for value in VALUES:
                yield partial(swapped, document, place, value, tail)
    elif re.search(r"^[\w.\"-]+ *= ", text, flags=re.MULTILINE):
        lines = text.split("\n")
        for number, line in enumerate(lines):
            key, equals, _ = line.partition("=")
            for value in TOML_VALUES if equals else ():
                yield partial(rewritten, lines, number, f"{key}= {value}")


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = document.items() if isinstance(document, dict) else enumerate(document[:2])
    found = []
    for key, value in inner:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def rewritten(lines: list[str], number: int, line: str) -> bytes:
    """The lines with another one in place of one."""
    return "\n".join((*lines[:number], line, *lines[number + 1 :])).encode()


def swapped(document: Any, path: tuple[Any, ...], value: str, tail: str) -> bytes:
    """The document with one value written as it stands in ``value``, and what follows the document."""
    copied = json.loads(json.dumps(document))
    target = copied
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = "@here@"
    text = json.dumps(copied).replace('"@here@"', value) + tail
    return text.encode("utf-8", errors="surrogatepass")


def mutations(content: bytes, rng: random.Random, most: int) -> list[bytes]:
    types = list(typed(content))
    chosen = rng.sample(types, min(most, len(types)))
    return [*wholesale(content), *bytewise(content, rng), *(make() for make in chosen)]


def outcome(kind: FileKind, content: bytes | None = None) -> tuple[bool, Any]:
    """What reading gives: a value, or an error of this project; any other error fails the test."""
    if content is not None:
        kind.path.write_bytes(content)
    try:
        return True, kind.read(kind.path)
    except FedveilError:
        return False, None


def test_every_name_has_its_kind(kinds: dict[str, FileKind]) -> None:
    assert set(NAMES) == set(kinds)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name.endswith("listed") else name for name in NAMES],
)
def test_a_malformed_file_is_a_value_or_an_error_of_ours(name: str, kinds: dict[str, FileKind]) -> None:
    kind = kinds[name]
    content, mode = kind.path.read_bytes(), kind.path.stat().st_mode
    good, value = outcome(kind)
    assert good
    refused = 0
    tried = mutations(content, random.Random(name), 120)
    try:
        for mutated in tried:
            taken, found = outcome(kind, kind.seal(mutated) if len(mutated) > 100 else mutated)
            refused += not taken
            assert (
                not (kind.sealed and taken)
                or found in (value, None)
                or not len(mutated)
                or _shorter(found, value)
            )
    finally:
        kind.path.write_bytes(content)
        kind.path.chmod(mode)
    assert len(tried) >= 150
    assert refused > 30
    assert outcome(kind)[0]


def _shorter(found: Any, value: Any) -> bool:
    """Whether a ledger is the beginning of another: a last line that a crash tore off."""
    return isinstance(found, tuple) and found == value[: len(found)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "weighted input"])
@pytest.mark.parametrize("instead", ["queue", "folder", "loop", "nowhere", "device", "queue behind a link"])
def test_what_is_no_file_is_not_waited_for(
    name: str, instead: str, kinds: dict[str, FileKind], tmp_path: Path
) -> None:
    kind = kinds[name]
    aside = tmp_path / "aside"
    os.rename(kind.path, aside)
    try:
        if instead == "queue":
            os.mkfifo(kind.path, 0o600)
        elif instead == "folder":
            kind.path.mkdir()
        elif instead == "queue behind a link":
            os.mkfifo(tmp_path / "queue", 0o600)
            kind.path.symlink_to(tmp_path / "queue")
        else:
            kind.path.symlink_to(
                {"loop": kind.path, "nowhere": tmp_path / "no", "device": "/dev/zero"}[instead]
            )
        outcome(kind)
    finally:
        kind.path.rmdir() if instead == "folder" else kind.path.unlink(missing_ok=True)
        os.rename(aside, kind.path)
    assert outcome(kind)[0]


COLUMNS: dict[str, pa.Array] = {
    "list": pa.array([[1], [2], None]),
    "struct": pa.array([{"a": 1}, None, {"a": 2}]),
    "binary": pa.array([b"\xff", b"1", None]),
    "decimal": pa.array([1, 2, None], pa.decimal128(10, 2)),
    "date": pa.array([1, 2, None], pa.date32()),
    "time": pa.array([1, 2, None], pa.timestamp("ns", "UTC")),
    "duration": pa.array([1, 2, None], pa.duration("s")),
    "null": pa.nulls(3),
    "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int8())),
    "half": pa.array(np.array([1, 2, 3], np.float16)),
    "words": pa.array(["a", "b", None]).dictionary_encode(),
    "long words": pa.array(["a", "b", None], pa.large_string()),
    "dictionary of numbers": pa.array([1, 2, None]).dictionary_encode(),
    "flags": pa.array([True, False, None]),
    "unsigned": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "not numbers": pa.array([float("nan"), float("inf"), None]),
}


@pytest.mark.parametrize("place", ["patient", "age", "place", "ill"])
@pytest.mark.parametrize("name", COLUMNS)
def test_odd_columns_of_a_parquet_file(
    name: str, place: str, kinds: dict[str, FileKind], tmp_path: Path
) -> None:
    good: dict[str, Any] = {"patient": [0, 1, 2], "age": [1.0, 2.0, 3.0], "place": ["a", "b", "a"]}
    table = pa.table(good | {"ill": [0, 1, 1]} | {place: COLUMNS[name]})
    path = tmp_path / "table.parquet"
    pa_parquet.write_table(table, path)
    for reader in ("table.parquet", "table.parquet, drafted"):
        outcome(FileKind(path=path, read=kinds[reader].read))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-32", "utf-8-sig"])
def test_a_table_in_another_encoding_is_named(
    encoding: str, kinds: dict[str, FileKind], tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(CSV.encode(encoding))
    taken, _ = outcome(FileKind(path=path, read=kinds["table.csv"].read))
    assert taken == (encoding == "utf-8-sig")
    with pytest.raises(DataError, match=r"table\.csv") if not taken else _nothing():
        kinds["table.csv"].read(path)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


# --- the readers themselves ----------------------------------------------------------------------------------


def test_a_document_within_the_limits_is_its_value(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    document = {"a": [1, 2.5, None, True, "é"], "b": {"c": -(10**18)}}
    path.write_text(json.dumps(document))
    assert parse_json(read_content(path, DataError), path, DataError) == document
    assert parse_toml('a = [1, "é"]\n[b]\nc = inf', "here", DataError) == {
        "a": [1, "é"],
        "b": {"c": float("inf")},
    }
    deep: Any = 1
    for _ in range(DEEPEST - 1):
        deep = [deep]
    assert parse_json(json.dumps(deep), "here", DataError) == deep
    with pytest.raises(DataError, match="nested more than"):
        parse_json(json.dumps([deep]), "here", DataError)


@pytest.mark.parametrize("key", ["a" + ".a" * 20_000, ".".join(['"a b"', " 'a.b' "] * 5_000)])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "[[{}]]", "a = {{ {} = 1 }}"])
def test_a_key_of_many_parts_takes_no_longer_than_its_length(key: str, line: str) -> None:
    """Python's reader takes the square of it: hours for one megabyte."""
    began = time.process_time()
    with pytest.raises(DataError, match="nested more than"):
        parse_toml("b = 1\n" + line.format(key) + "\n", "here", DataError)
    assert time.process_time() - began < 0.2


def test_a_key_of_as_many_parts_as_a_document_may_be_deep_is_read() -> None:
    parts = ["a"] * (DEEPEST - 1)
    found: Any = parse_toml(f"{'.'.join(parts)} = 1", "here", DataError)
    for part in parts:
        found = found[part]
    assert found == 1
    text = "... ".join(["No key"] * 200) + "1.2.3"
    assert parse_toml(f'a = "{text}"\nb = [{"1.5, " * 200}]', "here", DataError)["a"] == text


@pytest.mark.parametrize("text", VALUES[5:9] + VALUES[10:11] + ('"\\ud800"', "[" * 100_000, "{", ""))
def test_what_no_document_of_ours_holds_is_refused(text: str) -> None:
    if text == "-1e308":
        assert parse_json(text, "here", DataError) == -1e308
        return
    with pytest.raises(DataError, match="here"):
        parse_json(text, "here", DataError)


def test_reading_a_short_file_takes_no_room_for_the_longest(tmp_path: Path) -> None:
    """A silo may be served with less memory than the longest file that it would read has bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    tracemalloc.start()
    try:
        assert read_content(path, DataError, largest=LARGEST_FILE) == b"x" * 100
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_has_more_than_it_says_is_read_to_its_end_or_refused() -> None:
    """One that grows meanwhile, or of a file system that says less: a cut ledger would be taken for a whole one."""
    environment = {name: name * 100_000 for name in "ab"}  # more than one read takes of a file that says 0
    with subprocess.Popen(
        "/bin/cat", env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdout.read(1)  # the program runs: before, its environment may be empty
        path = Path(f"/proc/{process.pid}/environ")
        content = path.read_bytes()
        assert path.stat().st_size == 0 < 200_000 < len(content)
        for largest in (LARGEST_FILE, len(content)):
            assert read_content(path, DataError, largest=largest) == content
        with pytest.raises(DataError, match=f"more than {len(content) - 1} bytes"):
            read_content(path, DataError, largest=len(content) - 1)


def test_a_file_is_read_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_text(path, DataError, largest=100) == "x" * 100
    with pytest.raises(DataError, match="more than 99 bytes"):
        read_content(path, DataError, largest=99)
    path.chmod(0o640)
    with pytest.raises(DataError, match="mode 0640"):
        read_content(path, DataError, private=True)


# --- replaced ------------------------------------------------------------------------------------------------------


def test_what_is_written_goes_into_no_file_that_lies_in_its_way(tmp_path: Path) -> None:
    """In a folder that users share another one may have put a link there, or a file held open."""
    target, neighbour, other = tmp_path / "answer", tmp_path / ".answer.tmp", tmp_path / "another's"
    other.write_bytes(b"theirs")
    neighbour.symlink_to(other)
    replace_file(target, b"first", mode=0o600)
    assert other.read_bytes() == b"theirs"
    neighbour.write_bytes(b"")
    neighbour.chmod(0o666)
    with neighbour.open("rb") as held:
        replace_file(target, b"second", mode=0o600)
        assert held.read() == b""
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"second", 0o600)
    assert not target.is_symlink()

"""Every documented value of every key of an experiment or a release is played to the end, before a user does so.

The values are read off the types and registries behind the reference (:mod:`tests.documented_values`), the experiments
that play them are in :mod:`tests.documented_cases`. A new key, member or word without a case fails the first test.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import tomlkit
from PIL import Image
from scipy.io import savemat

from fedveil.data.catalogue.data_set import DataFile, digest_of
from fedveil.errors import FedveilError
from fedveil.registry import names
from fedveil.run.config.release_document import kind_in
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from tests.commands import ended
from tests.documented_cases import ELSEWHERE, PUBLIC_MODEL, Case, cases
from tests.documented_values import Value, documented
from tests.federation_world import small_keys
from tests.processes import FEDVEIL, SECONDS
from tests.runs import Silent
from tests.slow_cases import fast_every, slow_only
from tests.synthetic import serve, write_hospitals, write_images, write_patients, write_play

ROOT = Path(__file__).parents[1]
SCHEMA = """
n_users = 120
user = "who"
[features]
age = { kind = "number", lower = 0, upper = 120, missing = "middle" }
ward = { kind = "category", categories = ["a", "b", "c"] }
visit = { kind = "number", lower = 0, upper = 9 }
[target]
"""
TARGETS = {
    "label": 'kind = "label"\ncolumn = "sick"\nclasses = ["0", "1"]\n',
    "labels": 'kind = "labels"\ncolumns = ["sick", "tired"]\n',
    "number": 'kind = "number"\ncolumn = "cost"\nlower = 0\nupper = 100\n',
    "count": 'kind = "number"\ncolumn = "falls"\nlower = 0\nupper = 9\n',
    "survival": 'kind = "survival"\ntime = "years"\nevent = "sick"\n',
}


def _write_tables(folder: Path) -> None:
    """Write a test table and those of three hospitals, one record a person, with three schemas."""
    random = np.random.default_rng(0)
    for number, name in enumerate(("north", "south", "west", "test")):
        lines = ["who,age,ward,sick,cost,years,visit,falls,tired"]
        for who in range(40 * number, 40 * number + 40):
            age, ward = random.uniform(20, 90), "abc"[random.integers(3)]
            sick, cost, years = random.integers(2), random.uniform(0, 100), random.uniform(0.1, 6)
            lines.append(
                f"{who},{'' if who % 9 == 0 else round(age)},{ward},{sick},{cost:.1f},{years:.2f},{who % 10},"
                f"{who % 4},{who // 3 % 2}"
            )
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    for name, target in TARGETS.items():
        (folder / f"{name}.toml").write_text(SCHEMA + target)


def _file(folder: Path, path: str, content: bytes) -> DataFile:
    """Write a file of a data set."""
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_bytes(content)
    return DataFile(path=path, sha256=digest_of(folder / path))


def _write_pictures(folder: Path) -> dict[str, tuple[DataFile, ...]]:
    """Write made-up digits in colour, and pictures of ten classes, each in both of its forms."""
    random, found = np.random.default_rng(24), dict[str, tuple[DataFile, ...]]()
    labels = np.arange(30) % 10

    def packed(**arrays: np.ndarray) -> bytes:
        stream = BytesIO()
        np.savez(stream, **arrays)
        return stream.getvalue()

    def digits(count: int) -> bytes:
        stream = BytesIO()
        images = random.integers(0, 256, (32, 32, 3, count)).astype(np.uint8)
        savemat(stream, {"X": images, "y": labels[:count, None] + 1})
        return stream.getvalue()

    found["svhn"] = tuple(
        _file(folder, f"svhn/{part}.mat", digits(20)) for part in ("train", "extra", "test")
    )
    pixels = np.zeros((8030, 32, 32, 3), dtype=np.uint8)
    subset = packed(X=pixels, y=np.arange(8030) % 10)
    found["svhn_subset"] = (_file(folder, "svhn_subset/some.npz", subset),)
    pixels = random.integers(0, 256, (30, 64, 64, 3)).astype(np.uint8)
    split = {"X_train": pixels, "X_val": pixels[:10], "y_train": labels, "y_val": labels[:10]}
    found["imagenette_subset"] = (_file(folder, "imagenette_subset/some.npz", packed(**split)),)
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for number, label in enumerate(labels):
            picture = BytesIO()
            Image.fromarray(pixels[number]).save(picture, "JPEG")
            name = f"imagenette2-64/{'train' if number < 20 else 'val'}/n{label}/{number}.JPEG"
            member = tarfile.TarInfo(name)
            member.size = len(picture.getvalue())
            archive.addfile(member, BytesIO(picture.getvalue()))
    found["imagenette"] = (_file(folder, "imagenette_subset/all.tgz", stream.getvalue()),)
    return found


def _write_payments(folder: Path) -> tuple[DataFile, ...]:
    """Write a table of payments of the size that the data set's split needs."""
    random = np.random.default_rng(25)
    rows = np.zeros((26_000, 31))
    rows[:, :30] = random.integers(0, 9, (len(rows), 30))
    rows[:492, 30] = 1
    header = ",".join((*(f'"V{column}"' for column in range(30)), '"Class"'))
    content = header + "\n" + "\n".join(",".join(map(str, row)) for row in rows.astype(int).tolist()) + "\n"
    return (_file(folder, "creditcard/creditcard.csv", content.encode()),)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[DataFile, ...]]]:
    """Return a folder with made-up tables, data sets and a public model, and the files of each data set."""
    folder = tmp_path_factory.mktemp("values")
    (folder / "public.safetensors").write_bytes(PUBLIC_MODEL)
    _write_tables(folder)
    images = write_images(folder)
    files = {name: images for name in names("data_sets") if name.startswith("mnist")} | _write_pictures(
        folder
    )
    files |= {"heart_disease": write_hospitals(folder), "tcga_brca": write_patients(folder)}
    return folder, files | {"shakespeare": write_play(folder), "creditcard": _write_payments(folder)}


def test_every_documented_value_has_a_case() -> None:
    found = set[Value](ELSEWHERE).union(*(case.values for case in cases()))
    assert sorted(documented() - found) == []
    assert sorted(value for case in cases() for value in case.only if value not in documented()) == []
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


PLAYED = [one for one in cases() if not one.alone]


@pytest.mark.parametrize(
    "case",
    [
        *fast_every((one for one in PLAYED if not one.slow), 3),
        *slow_only(one for one in PLAYED if one.slow),
    ],
    ids=lambda case: case.name,
)
def test_a_documented_value_is_played_to_the_end(
    case: Case,
    world: tuple[Path, dict[str, tuple[DataFile, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder, files = world
    if not case.slow:
        small_keys(monkeypatch)
    if case.release is not None:
        asked = folder / "asked.toml"
        asked.write_text(tomlkit.dumps(case.release))
        kind = kind_in(case.release)
        assert kind is not None
        found = ended(kind.command, asked, "--runs", tmp_path)
        assert (found.code, case.refused in found.err) == (2 if case.refused else 0, True), found.err
        assert len(list(tmp_path.glob("*/ledger.jsonl"))) == (0 if case.refused else 1)
        return
    if case.refused:
        with pytest.raises(FedveilError, match=case.refused):
            run(prepare(case.experiment.resolve_paths(folder)), tmp_path, Silent())
        assert not list(tmp_path.glob("*/ledger.jsonl"))
        return
    asked = case.experiment.resolve_paths(folder)
    if asked.data.name in files:
        serve(asked.data.name, files[asked.data.name], monkeypatch)
        monkeypatch.setenv("FEDVEIL_DATA", str(folder))
    outcome = run(prepare(asked), tmp_path, Silent())
    assert outcome.stopped is None
    assert outcome.rounds == asked.rounds


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in cases() if one.alone], ids=lambda case: case.name)
def test_a_documented_value_is_played_by_a_process_of_its_own(case: Case, tmp_path: Path) -> None:
    """PyTorch's compiler cannot read functions whose shapes are checked, as they are in a process that runs tests."""
    (tmp_path / "asked.toml").write_text(case.experiment.to_toml())
    done = subprocess.run(
        [*FEDVEIL, "run", "asked.toml", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (played,) = json.loads(done.stdout)["runs"]
    assert (played["rounds"], played["stopped"]) == (case.experiment.rounds, None)

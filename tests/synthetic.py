"""Tables that nobody's data went into, in the files and formats of the public data sets.

A newcomer's clone has no data: what is tested on records, and not on the published counts of a data set, runs on these.
"""

import gzip
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fedveil.data.catalogue import DataSet, data_set
from fedveil.data.catalogue.data_set import DataFile, digest_of
from fedveil.data.catalogue.heart_disease import HOSPITALS
from fedveil.data.catalogue.tcga_brca import REGIONS
from fedveil.registry import BUILTINS

ROWS = (60, 45, 12, 30)
PATIENTS = (24, 16, 15, 12, 12, 9)


def write_hospitals(folder: Path) -> tuple[DataFile, ...]:
    """Write four hospitals' tables as UCI's are written, missing values included; return the files."""
    random = np.random.default_rng(20)
    files = []
    for hospital, rows in zip(HOSPITALS, ROWS, strict=True):
        label = random.integers(0, 2, rows)
        cells = random.normal(label[:, None], 1.0, (rows, 14)).round(2).astype(str)
        cells[:, 2], cells[:, 6] = (
            random.integers(1, 5, rows).astype(str),
            random.integers(0, 3, rows).astype(str),
        )
        cells[:, 10:13] = "?"  # slope, ca and thal: mostly missing there too
        cells[:2, 3] = "?"  # rows that are left out
        cells[:, 13] = np.where(label == 1, random.integers(1, 5, rows), 0).astype(str)
        path = folder / "heart_disease" / f"processed.{hospital}.data"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(",".join(row) for row in cells) + "\n")
        files.append(DataFile(path=f"heart_disease/{path.name}", sha256=digest_of(path)))
    return tuple(files)


def write_patients(folder: Path) -> tuple[DataFile, ...]:
    """Write patients of six regions and their split as FLamby's are written, a third of them for testing."""
    random = np.random.default_rng(21)
    count = sum(PATIENTS)
    region = np.repeat(np.arange(len(REGIONS)), PATIENTS)
    tested = np.concatenate([np.arange(rows) % 3 == 0 for rows in PATIENTS])
    features = random.integers(0, 2, (count, 39))
    days = random.exponential(1000 / (1 + features[:, 0])).round() + 1
    names = ["pid", *(f"feature {number}" for number in range(39)), "E", "T"]
    table = [
        [f"P{i}", *map(str, features[i]), str(int(random.random() < 0.6)), str(days[i])] for i in range(count)
    ]
    split = [[f"P{i}", f"{'test' if tested[i] else 'train'}_{region[i]}"] for i in range(count)]
    files = []
    for name, header, rows in (("brca.csv", names, table), ("train_test_split.csv", ["pid", "fold2"], split)):
        path = folder / "tcga_brca" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")
        files.append(DataFile(path=f"tcga_brca/{name}", sha256=digest_of(path)))
    return tuple(files)


def serve(name: str, files: tuple[DataFile, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a data set of the catalogue be read from these files."""
    register(replace(data_set(name), variants=(files,)), monkeypatch)


def register(one: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a data set in the place of the built-in one of its name."""
    module, _, attribute = BUILTINS["data_sets"][one.name].partition(":")
    monkeypatch.setattr(import_module(module), attribute, one)


def serve_hospitals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``heart_disease`` be four made-up hospitals, here and wherever nothing else is said."""
    serve("heart_disease", write_hospitals(folder), monkeypatch)
    monkeypatch.setenv("FEDVEIL_DATA", str(folder))


def write_play(folder: Path) -> tuple[DataFile, ...]:
    """Write a play of three roles with much to say and one with little, in the form of Project Gutenberg's text."""
    random = np.random.default_rng(22)
    letters = np.array(list("abcdefghij klmnop"))
    said = {"ANNA": 12, "BERT": 9, "CLARA": 15, "DAN": 3}
    lines = ["first line", "THE SONNETS", "by William Shakespeare", *[""] * 8, "THE PLAY", ""]
    lines += ["by William Shakespeare", ""]
    for role in said:
        for _ in range(said[role]):
            lines.append(f"  {role}. {''.join(random.choice(letters, 40))}.")
    path = folder / "shakespeare" / "pg100.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return (DataFile(path="shakespeare/pg100.txt", sha256=digest_of(path)),)


def write_images(folder: Path, train: int = 60, test: int = 20) -> tuple[DataFile, ...]:
    """Write images of digits and their labels as MNIST's four files are written."""
    random = np.random.default_rng(23)
    files = []
    for kind, rows in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (rows, 28, 28)).astype(np.uint8)
        labels = (np.arange(rows) % 10).astype(np.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / "mnist" / f"{kind}-{name}-ubyte.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
            path.write_bytes(gzip.compress(header + values.tobytes()))
            files.append(DataFile(path=f"mnist/{path.name}", sha256=digest_of(path)))
    return tuple(files)

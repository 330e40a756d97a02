"""What people get wrong, command by command: one line that says so, and nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.files import parse_toml
from tests.commands import ended, output
from tests.test_python import train

SCHEMA = """
n_users = 5
user = "patient"
silo = "ward"
silos = ["a", "b"]
[target]
kind = "label"
column = "ill"
classes = ["0", "1"]
[features.age]
kind = "number"
lower = 0
upper = 100
"""
HEADER = "patient,ward,ill,age\n"
EXPERIMENT = """
name = "e"
rounds = 1
[data.table]
schema_file = "s.toml"
files = ["t.csv"]
[local]
learning_rate = 0.1
[method]
name = "uldp-avg"
clip = 1.0
noise_multiplier = 1.0
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "s.toml").write_text(SCHEMA)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    (tmp_path / "t.csv").write_text(
        HEADER + "".join(f"{i % 5},{'ab'[i % 2]},{i % 2},{i}\n" for i in range(40))
    )
    return tmp_path


def test_a_document_may_begin_with_a_byte_order_mark() -> None:
    assert parse_toml("\ufeffrounds = 3\n", "here", ConfigError) == {"rounds": 3}


def test_a_table_that_is_named_twice_is_refused_also_under_another_path(place: Path) -> None:
    asked = f"data.table.files=['t.csv', '../{place.name}/t.csv']"
    assert "the table is named twice" in ended("check", place / "e.toml", "--set", asked).mistake


@pytest.mark.parametrize("key", ["learning_rate", "weight_decay"])
def test_a_rate_that_float32_does_not_hold_is_refused_by_its_key(place: Path, key: str) -> None:
    said = ended("check", place / "e.toml", "--set", f"local.{key}=1e308").mistake
    assert f"local: {key} = 1e+308: training is in float32; at most 3e+38" in said


@pytest.mark.parametrize(
    ("key", "most"), [("server.learning_rate", "1e+30"), ("method.noise_multiplier", "1e+12")]
)
def test_a_number_that_overflows_in_a_run_is_refused_by_its_key(place: Path, key: str, most: str) -> None:
    said = ended("check", place / "e.toml", "--set", f"{key}=1e308").mistake
    assert "e.toml" in said
    assert f"{key}" in said
    assert f"<= {most}" in said


def test_a_batch_that_no_machine_holds_is_refused_by_its_key(place: Path) -> None:
    said = ended("check", place / "e.toml", "--set", f"local.batch_size={2**63}").mistake
    assert "e.toml" in said
    assert "local.batch_size: must be <= 1e+09, not" in said


def test_a_metric_that_takes_other_arguments_is_refused_before_the_run(tmp_path: Path) -> None:
    def two(outputs: object, targets: object) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"metric .*two: it is called with \(outputs, targets, weights\)"):
        train(tmp_path, method=fv.fedavg(), metrics=[two])


def test_a_table_without_records_has_no_share_of_wrong_cells(place: Path) -> None:
    (place / "h.csv").write_text(HEADER)
    assert "nan" not in output("check-data", place / "s.toml", place / "h.csv")


@pytest.mark.parametrize(("option", "value"), [("--host", "a b"), ("--name", "../x")])
def test_a_federation_that_cannot_be_named_so_leaves_nothing_behind(
    place: Path, option: str, value: str
) -> None:
    given = {"--host": "localhost", "--schema": str(place / "s.toml"), option: value}
    words = [word for pair in given.items() for word in pair]
    said = ended("federation", "create", place / "new", *words, "--no-passphrase").mistake
    assert f"{option[2:]}: must match" in said
    assert not (place / "new").exists()

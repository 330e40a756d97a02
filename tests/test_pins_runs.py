"""What seeded runs come to, bit for bit: models, messages, attempts and charges (tests/pins/cases.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pins.cases import CASES, SLOW, TRAINED, TWINS, UNEQUAL, WHOLE, fingerprint, play
from tests.pins.record import PINS

RECORDED: dict[str, Any] = json.loads(PINS.read_text())
BYTES_UP = 3
PROTECTED = ("shares as bytes", "masked retry sampled", "recovering", "partial parts")
"""What happens after training is that of the runs over whole updates, which are all played."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def needed(name: str) -> None:
    if name.startswith(("partial", "serial")):
        pytest.importorskip("tenseal")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WHOLE]
)
def test_a_run_over_whole_updates_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    needed(name)
    assert play(name, tmp_path, whole=True) == RECORDED["whole"][name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in PROTECTED)) for name in TRAINED]
)
def test_a_trained_run_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    """On another kind of processor training rounds otherwise; who took part, failed and was charged is the same."""
    needed(name)
    found, recorded = play(name, tmp_path, whole=False), dict(RECORDED["trained"][name])
    if fingerprint() != RECORDED["trained_on"]:
        for pin in (found, recorded):
            del pin["model"], pin["messages"]
            pin["rows"] = [row[:BYTES_UP] + row[BYTES_UP + 1 :] for row in pin["rows"]]
    assert found == recorded


def test_the_way_to_a_sum_changes_no_bit_of_the_model() -> None:
    models = {name: pin["model"] for name, pin in RECORDED["whole"].items()}
    for one, other in TWINS:
        assert models[one] == models[other]


def test_pins_are_of_these_cases() -> None:
    assert len(CASES) >= 19
    assert tuple(RECORDED["whole"]) == WHOLE
    assert tuple(RECORDED["trained"]) == TRAINED
    assert set(UNEQUAL) <= set(TRAINED)


def test_pins_hold_attempts_that_failed_before_and_after_their_sum_may_have_been_released() -> None:
    for name in ("masked retry", "masked retry sampled", "masked retry with fewer", "weighted retry"):
        assert {True, False} <= {row[3] for row in RECORDED["whole"][name]["failed"]}
    assert any(row[-1] < 5 for row in RECORDED["whole"]["recovering"]["rows"])
    assert RECORDED["whole"]["recovering"]["failed"]

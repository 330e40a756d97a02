"""What every composition guarantees, held against a record: a line changes on purpose, by name and with a reason."""

from __future__ import annotations

from functools import cache

import pytest

from fedveil.methods.method import Method
from tests.pins.compositions import compositions
from tests.pins.guarantees import INTENDED, Record, change_of, found, read, same


@cache
def now() -> Record:
    return found()


@cache
def methods() -> dict[str, Method]:
    return dict(compositions())


def test_the_same_compositions_are_allowed_as_were_recorded() -> None:
    assert set(now()) == set(read())
    assert len(now()) >= 240


def test_every_composition_guarantees_what_was_recorded() -> None:
    recorded = read()
    wrong = [
        (name, line, recorded[name].get(line), facts.get(line))
        for name, facts in now().items()
        for line in facts.keys() | recorded[name].keys() - {"was"}
        if not same(recorded[name].get(line), facts.get(line))
    ]
    assert not wrong, wrong[:3]


def test_every_difference_from_the_first_record_is_intended_and_says_why() -> None:
    used = set()
    for name, facts in read().items():
        for line, was in facts.get("was", {}).items():
            assert was["change"] == change_of(methods()[name], line, was["event"], facts[line]), (name, line)
            used.add(was["change"])
    assert used == set(INTENDED)
    assert all(change.why for change in INTENDED.values())


def test_no_change_touched_what_readers_of_the_models_are_told() -> None:
    for facts in read().values():
        assert not facts.get("was", {}).keys() & {"reader", "adjacency", "grid_loss", "unit", "noise_decay"}


def test_a_change_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no intended change"):
        change_of(methods()["uldp-avg"], "server", {"type": "gaussian"}, {"type": "gaussian"})

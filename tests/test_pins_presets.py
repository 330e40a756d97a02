"""Every preset states what was recorded: ``python -m tests.pins.presets`` records a change that is meant."""

from __future__ import annotations

import pytest

from tests.pins.guarantees import same
from tests.pins.presets import PRESETS, read, stated


def test_every_preset_has_a_record() -> None:
    assert sorted(read()) == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_states_what_was_recorded(preset: str) -> None:
    now, recorded = stated(preset), read()[preset]
    assert [one["experiments"] for one in now] == [one["experiments"] for one in recorded]
    for one, was in zip(now, recorded, strict=True):
        assert same(one, was), one["experiments"][0]


def test_a_statement_that_became_stronger_is_noticed() -> None:
    recorded = next(one for one in read()["digits"] if one["reader"]["type"] == "gaussian")
    more_noise = {**recorded["reader"], "noise_multiplier": 1.02 * recorded["reader"]["noise_multiplier"]}
    stronger = {**recorded, "reader": more_noise}
    assert not same(stronger, recorded)
    assert not same({**recorded, "uncovered": recorded["uncovered"] + 1}, recorded)

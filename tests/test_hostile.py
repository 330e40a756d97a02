"""Hostile bytes for every decoder, and kills under every protection, by the tens of thousands and the hundred.

``python -m tests.fuzz`` and ``python -m tests.kills`` play as many as are asked for.
"""

from pathlib import Path

import pytest

from tests.fuzz import GROWTH, SECONDS, decoders
from tests.fuzz import play as read
from tests.kills import kills


@pytest.mark.slow
def test_every_decoder_returns_a_value_or_refuses(tmp_path: Path) -> None:
    pytest.importorskip("tenseal")
    count = 50_000
    found = read(decoders(tmp_path), count)
    assert found.inputs == count
    assert count // 2 < found.refused < count
    assert found.slowest[0] < SECONDS
    assert found.grown < GROWTH


@pytest.mark.slow
def test_a_hundred_kills_under_every_protection_change_nothing() -> None:
    pytest.importorskip("tenseal")
    assert sum(died for _, _, died in kills(100)) >= 100

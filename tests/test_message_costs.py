"""No lie costs its reader more than a second of a processor and 64 MiB, or a few copies of the message."""

from pathlib import Path

import pytest

from tests.message_costs import COPIES, MIB, NAMES, SECONDS, costs, most_expensive


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_message_costs_its_reader_much(name: str, tmp_path: Path) -> None:
    if name in ("encrypted", "blind, ring"):
        pytest.importorskip("tenseal")
    best = most_expensive(costs((name,), tmp_path))
    assert len(best) > 15
    longest = max(cost.message for cost in best.values())
    for cost in best.values():
        assert not cost.lie or cost.seconds <= SECONDS, cost
        assert not cost.lie or cost.mib <= max(MIB, COPIES * longest), cost

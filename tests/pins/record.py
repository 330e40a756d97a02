"""Record what every composition guarantees: ``python -m tests.pins.record [WHY]`` from the root of a checkout.

A line that differs from the record is refused unless WHY names an intended change of ``tests/test_pins.py``; the record
then keeps the old event beside the new one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedveil.methods.guarantee import derive
from tests.pins.compositions import compositions, public

FILE = Path(__file__).with_name("guarantees.json")
Record = dict[str, dict[str, Any]]


def found() -> Record:
    """Return what the house claims now: per composition its facts, and the event of every line by role."""
    record: Record = {}
    for name, method in compositions():
        guarantee = derive(method, public(method))
        record[name] = {
            "adjacency": guarantee.adjacency.value,
            "unit": guarantee.unit,
            "grid_loss": guarantee.grid_loss,
            "noise_decay": guarantee.noise_decay,
            "reader": guarantee.event.to_json(),
        } | {_role(view): view.event.to_json() for view in guarantee.views}
    return record


def _role(view: Any) -> str:
    party = view.party
    if party.startswith("the server with"):
        return "server with silo"
    if party.startswith("the server"):
        return "server"
    return "every reader" if party.startswith("whoever reads") else "silo"


def read() -> Record:
    """Return what was recorded."""
    return json.loads(FILE.read_text())


def write(record: Record) -> None:
    """Write a record, one line a composition, so that a change is read as one."""
    lines = [f"{json.dumps(name)}: {json.dumps(facts, sort_keys=True)}" for name, facts in sorted(record.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(found())

"""Record what every composition guarantees: ``python -m tests.pins.guarantees`` from the root of a checkout.

A line that differs from the record is refused unless it falls under one of the :data:`INTENDED` changes; the record
then keeps the event that was stated before beside the new one, with the name of the change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.methods.capabilities import ClientSender, count_colluding
from fedveil.methods.derive import derive
from fedveil.methods.method import Method, shows_counts
from fedveil.methods.weights import Weights
from fedveil.privacy.claims import Role
from tests.pins.compositions import compositions, public

FILE = Path(__file__).with_name("guarantees.json")
ROLES = {
    "server": Role.SERVER,
    "silo": Role.SILO,
    "every reader": Role.READER,
    "server with silo": Role.SERVER | Role.SILO,
}
Record = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Intended:
    """A change of what is stated, on purpose: why, and which lines of which methods it may touch."""

    why: str
    lines: frozenset[str]
    methods: Callable[[Method], bool]


SENDERS = frozenset({"silo", "server with silo"})
INTENDED = {
    "silos that pool know several shares of the votes' noise": Intended(
        why="a line about c silos counted one share as known where noise lies in two parts or on votes, and c are",
        lines=SENDERS,
        methods=lambda method: (
            method.protection.divides
            and method.protection.vote_noise > 0
            and count_colluding(method.channel) > 1
        ),
    ),
    "ciphertexts are seen at a statistical distance": Intended(
        why="ring-LWE's floods and the blinded number of drawn users hide up to a distance, which delta did not count",
        lines=frozenset({"server"}),
        methods=lambda method: method.protection.weighs and method.protection.draws_blindly,
    ),
    "records elsewhere take weight from those here": Intended(
        why="weights n_su / N_u move by what a user holds elsewhere: the sum moves by 2 C against a silo, unamplified",
        lines=frozenset({"silo"}),
        methods=lambda method: method.weights == Weights.BY_RECORDS and method.protection.weighs,
    ),
    "counts are shown": Intended(
        why="weights by records in the open send counts up and totals down, which no noise covers",
        lines=SENDERS | {"server"},
        methods=lambda method: shows_counts(method),
    ),
    "a silo is told who was drawn": Intended(
        why="under partial encryption silos train the users that were drawn, so sampling does not amplify against them",
        lines=frozenset({"silo"}),
        methods=lambda method: method.sampler.rate < 1 and not method.contribution.drawn_alone,
    ),
    "a client is told who else is in its round": Intended(
        why="under partial encryption drawn clients play the protocol, whose start names all of them to each",
        lines=frozenset({"silo"}),
        methods=lambda method: (
            method.draws and isinstance(method.channel, ClientSender) and method.protection.agrees
        ),
    ),
    "what a user holds elsewhere": Intended(
        why="a silo that knows its share of the noise carries its share of the weight too: the rest moves less",
        lines=SENDERS,
        methods=lambda method: method.contribution.spread_evenly(method.weights),
    ),
    "who knows more is not promised more": Intended(
        why="noise that is sized for silos which collude hid single messages better than the sum is stated to be",
        lines=frozenset({"server"}),
        methods=lambda method: count_colluding(method.channel) > 0,
    ),
    "every line is printed": Intended(
        why="a method without a guarantee names the silo too, where it named the server alone",
        lines=SENDERS,
        methods=lambda method: True,
    ),
}


def found() -> Record:
    """Return what fedveil claims now: per composition its facts, and the event of every line by role."""
    names = {role: name for name, role in ROLES.items()}
    record: Record = {}
    for name, method in compositions():
        guarantee = derive(method, public(method))
        record[name] = {
            "adjacency": guarantee.adjacency.value,
            "unit": guarantee.unit,
            "grid_loss": guarantee.grid_loss,
            "noise_decay": guarantee.noise_decay,
            "reader": guarantee.event.to_json(),
        } | {names[view.role]: view.event.to_json() for view in guarantee.views}
    return record


def same(a: Any, b: Any) -> bool:
    """Return whether two facts are equal, numbers to 12 digits; reasons for no guarantee are words, and free."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.get("type") == b.get("type") == "no_guarantee":
            return True
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


def change_of(method: Method, line: str, before: Any, now: Any) -> str:
    """Return the name of the intended change that explains a line.

    Raises:
        ValueError: none does.
    """
    nothing = now is not None and now.get("type") == "no_guarantee"
    for name, change in INTENDED.items():
        fits = line in change.lines and change.methods(method)
        if name == "every line is printed":
            fits = fits and before is None and nothing
        elif name == "counts are shown":
            fits = fits and before is not None and nothing
        else:
            fits = fits and before is not None and not nothing
        if fits:
            return name
    raise ValueError(f"{line}: {before} became {now}, and no intended change explains it")


def read() -> Record:
    """Return what was recorded."""
    return json.loads(FILE.read_text())


def write(record: Record) -> None:
    """Write a record, one line a composition, so that a change is read as one."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(facts, sort_keys=True)}" for name, facts in sorted(record.items())
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def updated() -> Record:
    """Return the record with what fedveil claims now, each difference under the name of its change."""
    recorded, now, methods = read(), found(), dict(compositions())
    for name, facts in now.items():
        if name not in recorded:
            recorded[name] = dict(facts)
            continue
        old = recorded[name]
        for line in sorted(facts.keys() | old.keys() - {"was"}):
            if not same(old.get(line), facts.get(line)):
                change = change_of(methods[name], line, old.get(line), facts.get(line))
                old.setdefault("was", {})[line] = {"event": old.get(line), "change": change}
                old[line] = facts[line]
        recorded[name] = old
    return recorded


if __name__ == "__main__":
    write(updated())

"""Bound every epsilon of a run folder, a bundle or a ledger a second time: python verify.py PATH. See README.md."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epsilon import RefusedError, epsilon_of, expand

_SEAL = len(', "digest": ""}') + 64
TOLERANCE = 1.01
NAMES = ("ledger.jsonl", "privacy.json")
KINDS = ["charge", "opened", "policy", "membership", "adopted", "ended"]  # only the first is a charge


class DisagreementError(Exception):
    """A file is damaged or contradicts another one."""


def read(path: Path) -> tuple[list[str], dict[str, Any] | None]:
    """Return the lines of the ledger, and the statement of a run or bundle (None: a ledger alone)."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            if any(archive.namelist().count(name) != 1 for name in NAMES):  # fedveil might read another
                raise RefusedError(f"the archive has not one {' and one '.join(NAMES)}")
            files = {name: archive.read(name) for name in NAMES}
    elif path.is_dir():
        files = {name: (path / name).read_bytes() for name in NAMES}
    else:
        text = path.read_text()
        return list(json.loads(text)["lines"]) if path.suffix == ".json" else text.splitlines(), None
    return files["ledger.jsonl"].decode().splitlines(), json.loads(files["privacy.json"])


def charges(lines: list[str]) -> list[dict[str, Any]]:
    """Return the charges of a ledger whose lines form one chain of SHA-256 digests."""
    before, found = "0" * 64, []
    for index, line in enumerate(lines):
        body = line[:-_SEAL] + "}"
        digest = hashlib.sha256(body.encode()).hexdigest()
        whole = line[-_SEAL:] == f', "digest": "{digest}"}}'
        content = json.loads(body) if whole else {}
        if (content.get("previous"), content.get("index")) != (before, index):
            raise DisagreementError(f"ledger, line {index + 1} is damaged or continues another one")
        before = digest
        if (kind := content.get("kind", "charge")) not in KINDS:
            raise RefusedError(f"ledger, line {index + 1} is of an unknown kind")
        found += [content] if kind == "charge" else []
    return found


def bounds(
    lines: list[str], statement: Mapping[str, Any] | None, delta: float | None
) -> list[tuple[str, Any, float]]:
    """Return (role, stated epsilon, bound) of every line of a statement, or of the ledger alone (nothing stated)."""
    made = charges(lines)
    event = {"type": "composed", "events": [one["event"] for one in made]}
    kinds = {(one["unit"], one["adjacency"]) for one in made}
    if statement is None:
        if len(kinds) != 1 or delta is None:
            raise RefusedError("a ledger alone needs --delta, and charges of one unit and adjacency")
        return [("ledger", None, epsilon_of(event, delta, kinds.pop()[1]))]
    adjacency, at = statement["adjacency"], statement["delta"] if delta is None else delta
    if kinds - {(statement["unit"], adjacency)} or expand(event) != expand(statement["event"]):
        raise DisagreementError("the statement's event is not the composition of the ledger's charges")
    lines_of = [
        ("reader", statement["epsilon"], event),
        *((f"{a['role']} (by stated events)", a["epsilon"], a["event"]) for a in statement["trust"]),
    ]
    return [(role, stated, epsilon_of(seen, at, adjacency)) for role, stated, seen in lines_of]


def main() -> int:
    """Print one line for every role; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="run, bundle, exported ledger (.json), or .jsonl")
    parser.add_argument("--delta", type=float, help="of the bound (default: the statement's)")
    given = parser.parse_args()
    try:
        agree = True
        for role, stated, bound in bounds(*read(given.path), given.delta):
            claim = math.inf if stated is None else 1.0 * stated
            told = "agrees" if bound <= claim * TOLERANCE + 1e-9 else "DISAGREES"
            told = told if given.delta is None else "not compared"
            agree &= told != "DISAGREES"  # below, repr: a line break in a name would print another line
            print(f"{repr(role)[1:-1]:34} stated {claim:<12.6g} bound {bound:<12.6g} {told}")
        return int(not agree)
    except DisagreementError as error:
        print(f"disagrees: {error}")
        return 1
    except Exception as error:  # a hostile file: nested too deeply, numbers out of range, no archive
        print(f"no bound: {error!r}"[:1000])
        return 2


if __name__ == "__main__":
    sys.exit(main())

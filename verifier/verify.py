"""Verify every epsilon of a run folder, a bundle or an exported ledger by a second program: python verify.py PATH.

Exit code 0: every stated epsilon is at most 1 % below an upper bound of this program. 1: one is not, or a file is
damaged. 2: no bound is possible.
"""

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

from epsilon import ADD_OR_REMOVE, Refused, epsilon_of, expand

_SEAL = len(', "digest": ""}') + 64
TOLERANCE = 1.01


class DisagreementError(Exception):
    """A file is damaged or contradicts another one."""


def read(path: Path) -> tuple[list[str], dict[str, Any] | None]:
    """Return the lines of the ledger, and the statement of a run or bundle (None: a ledger alone)."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            files = {name.rsplit("/", 1)[-1]: archive.read(name) for name in archive.namelist()}
    elif path.is_dir():
        files = {name: (path / name).read_bytes() for name in ("ledger.jsonl", "privacy.json")}
    elif path.suffix == ".json":
        return list(json.loads(path.read_text())["lines"]), None
    else:
        return path.read_text().splitlines(), None
    return files["ledger.jsonl"].decode().splitlines(), json.loads(files["privacy.json"])


def charges(lines: list[str]) -> list[dict[str, Any]]:
    """Return the charges of a ledger whose lines form one chain of SHA-256 digests."""
    before, found = "0" * 64, []
    for index, line in enumerate(lines):
        body = line[:-_SEAL] + "}"
        digest = hashlib.sha256(body.encode()).hexdigest()
        content = json.loads(body)
        if (
            line[-_SEAL:] != f', "digest": "{digest}"}}'
            or content["previous"] != before
            or content["index"] != index
        ):
            raise DisagreementError(
                f"ledger, line {index + 1}: it is damaged or does not continue the line before"
            )
        before = digest
        if content.get("kind", "charge") == "charge":
            found.append(content)
    return found


def bounds(
    lines: list[str], statement: Mapping[str, Any] | None, delta: float | None
) -> list[tuple[str, Any, float]]:
    """Return (role, stated epsilon, bound) of every line of a statement, or of the ledger alone (nothing stated)."""
    made = charges(lines)
    event = {"type": "composed", "events": [one["event"] for one in made]}
    kinds = {(one["unit"], one["adjacency"]) for one in made}
    if statement is None:
        adjacency = kinds.pop()[1] if len(kinds) == 1 else ADD_OR_REMOVE
        if kinds or delta is None:
            raise Refused("a ledger alone needs --delta, and charges of one unit and adjacency")
        return [("ledger", None, epsilon_of(event, delta, adjacency))]
    adjacency, at = statement["adjacency"], statement["delta"] if delta is None else delta
    if kinds - {(statement["unit"], adjacency)} or expand(event) != expand(statement["event"]):
        raise DisagreementError("the statement's event is not the composition of the ledger's charges")
    grid = [{"type": "grid", "loss": statement["grid_loss"]}] if statement["grid_loss"] else []
    known = {"type": "composed", "events": [event, *grid]}
    rows = [("reader", statement["epsilon"], epsilon_of(known, at, adjacency))]
    for line in statement["trust"]:
        rows.append((line["role"], line["epsilon"], epsilon_of(line["event"], at, adjacency)))
    return rows


def main() -> int:
    """Print one line for every role; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "path", type=Path, help="run folder, bundle (folder or .zip), exported ledger (.json), .jsonl"
    )
    parser.add_argument("--delta", type=float, help="of the bound (default: the statement's)")
    given = parser.parse_args()
    try:
        rows = bounds(*read(given.path), given.delta)
    except DisagreementError as error:
        print(f"disagrees: {error}")
        return 1
    except (Refused, KeyError, TypeError, ValueError, OSError) as error:
        print(f"no bound: {error!r}")
        return 2
    agree = True
    for role, stated, bound in rows:
        claim = math.inf if stated is None else stated
        fits = given.delta is not None or bound <= claim * TOLERANCE + 1e-9
        agree &= fits
        print(f"{role:14} stated {claim:<12.6g} bound {bound:<12.6g} {'agrees' if fits else 'DISAGREES'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

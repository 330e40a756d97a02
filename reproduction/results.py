"""Result files: every measured value of a table with what it takes to measure it again.

``results/NAME.json`` holds one entry a run and ends with the SHA-256 of all that stands before it. A file whose digest
does not fit is refused: it was edited, merged or torn. The digest is a guard against slips and not a signature:
whoever means to forge a result can compute it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from fedveil.errors import FedveilError
from fedveil.files import parse_json, read_content, reading, replace_file, writing
from fedveil.validation import DocumentTable

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Values = dict[str, float | None]
Curves = dict[str, tuple[tuple[int, float | None], ...]]
_DIGITS: Final = 9


class ResultError(FedveilError):
    """A result file that is missing, damaged or edited; names it."""


class _Strict(DocumentTable):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(_Strict):
    """One run of one cell of a table.

    Attributes:
        cell: which cell.
        seed: of the experiment; None where a value has no chance in it.
        settings: digest of what was run (:func:`digest` of its document), the seed left out.
        version: of fedveil.
        cpu_seconds: of this process in the run; None where an interrupted run went on, and the first part is unknown.
        values: by name; None where a value is not defined or infinite.
        curve: by name, (round, value) at all evaluated rounds, where the table shows curves.
    """

    cell: str
    seed: int | None
    settings: Digest
    version: str
    cpu_seconds: float | None
    values: Values
    curve: Curves = Field(default_factory=dict)


class Results(_Strict):
    """All runs of one table."""

    schema_version: Literal[1] = 1
    table: str
    command: str
    runs: tuple[Run, ...] = ()

    def has(self, cell: str, seed: int | None, settings: str) -> bool:
        """Return whether this run is there."""
        return any((run.cell, run.seed, run.settings) == (cell, seed, settings) for run in self.runs)

    def runs_of(self, cell: str) -> tuple[Run, ...]:
        """Return the runs of a cell, by seed."""
        return tuple(sorted((run for run in self.runs if run.cell == cell), key=lambda run: run.seed or 0))

    def adding(self, runs: Sequence[Run]) -> Results:
        """Return these results and new runs; a run of the same cell and seed under other settings gives way."""
        new = {(run.cell, run.seed) for run in runs}
        kept = (run for run in self.runs if (run.cell, run.seed) not in new)
        return self.model_copy(update={"runs": (*kept, *runs)})


@dataclass(frozen=True)
class ResultFolder:
    """Where result files are."""

    path: Path

    def read(self, table: str) -> Results:
        """Return the results of a table; without a run where there is no file.

        Raises:
            ResultError: the file is damaged, of another table, or was edited.
        """
        path = self.path / f"{table}.json"
        if not path.exists():
            return Results(table=table, command=f"fedveil reproduce {table}")
        document = parse_json(read_content(path, ResultError), path, ResultError)
        with reading(path, ResultError):
            claimed = document.pop("digest")
            if claimed != digest(document):
                raise ResultError(
                    f"{path} was edited since it was written: its digest does not fit. Take the file back from the "
                    f"version control, or delete it and run `fedveil reproduce {table}` again"
                )
            results = Results.model_validate(document)
        if results.table != table:
            raise ResultError(f"{path} holds the results of '{results.table}', not of '{table}'")
        return results

    def write(self, results: Results) -> None:
        """Replace the file of a table, whole and durably.

        Raises:
            ResultError: the disk refuses the folder or the file; the old one is as it was.
        """
        document, path = results.model_dump(mode="json"), self.path / f"{results.table}.json"
        text = _lines(document | {"digest": digest(document)})
        with writing(path, ResultError):
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())


def digest(document: Any) -> str:
    """Return the SHA-256 of a document's JSON, keys in order and without blanks."""
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def rounded(value: float | None) -> float | None:
    """Return a value to nine significant digits, which is how results are kept."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _lines(document: dict[str, Any]) -> str:
    """Return JSON with one line a run, so that a version control shows which runs are new."""
    runs = ",\n  ".join(json.dumps(run) for run in document["runs"])
    head = {key: value for key, value in document.items() if key not in ("runs", "digest")}
    inner = json.dumps(head, indent=1)[:-2]
    return f'{inner},\n "runs": [\n  {runs}\n ],\n "digest": "{document["digest"]}"\n}}\n'

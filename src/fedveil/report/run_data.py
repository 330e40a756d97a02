"""Reader of run folders: the only source of a report about a run.

This module prepares no experiment, so a report can be made later and on another machine, from the files alone. The
documents are described in :mod:`fedveil.run.folder.documents`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedveil.errors import RunFolderError
from fedveil.files import LARGEST_FILE, check_schema_version, folders_with, parse_toml, read_text
from fedveil.privacy.statement import Statement
from fedveil.run.folder.documents import (
    EXPERIMENT_VERSION,
    AuditRecord,
    Diagnostics,
    Document,
    JsonObject,
    PublicTest,
    RoundRow,
    Spectrum,
    read_document,
    read_lines,
    read_object,
    read_statement,
)
from fedveil.statistics.evaluation.result import ReleasedEvaluation, read_evaluated

_SEED_SUFFIX = re.compile(r"[-_. ]+seed[-_.= ]*\d+$", re.IGNORECASE)
EVEN = 0.7
"""Accuracy of the majority-class baseline above which accuracy is not shown first."""

_LARGE = (
    *("accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "f1_macro", "precision", "recall"),
    *("specificity", "mcc", "top_2_accuracy", "top_3_accuracy", "top_5_accuracy", "c_index", "r2"),
)
DIRECTION = {**dict.fromkeys(_LARGE, 1), **dict.fromkeys(("brier", "mae", "rmse", "loss"), -1)}
"""1 for a metric that should be large, -1 for a metric that should be small."""

NOT_COVERED = "exact, not covered by the guarantee"
"""Mark of a metric of private records that was not released with noise."""

_RELEASES = ("statistics.toml", "inference.toml")

_KindT = TypeVar("_KindT", bound=Document)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data of one run for a report.

    Attributes:
        folder: the run folder.
        experiment: the resolved experiment.
        experiment_toml: text of experiment.toml.
        statement: the privacy statement.
        rounds: one row per round, in order.
        diagnostics: private diagnostics; None if absent.
        environment: machine and versions; None if absent.
        spectrum: spectrum of the change of the model; None if absent.
        audit: results of an audit; None if absent.
        evaluated: released test metrics; None if absent.
        public_test: the released model on public test records; None unless the run recorded that they are public.
        interrupted_line: whether metrics.jsonl ends in the middle of a line: the run was still writing, or was
            killed.
    """

    folder: Path
    experiment: JsonObject
    experiment_toml: str
    statement: Statement
    rounds: tuple[RoundRow, ...]
    diagnostics: Diagnostics | None
    environment: JsonObject | None
    spectrum: Spectrum | None
    audit: AuditRecord | None
    evaluated: ReleasedEvaluation | None
    public_test: PublicTest | None
    interrupted_line: bool

    @property
    def name(self) -> str:
        """Name of the experiment, or of the folder if the experiment has none."""
        name = self.experiment.get("name")
        return name if isinstance(name, str) and name else self.folder.resolve().name

    @property
    def variant(self) -> str:
        """Name without its seed suffix, shared by runs that differ only in the seed.

        For `digits-seed3` it is `digits`.
        """
        return _SEED_SUFFIX.sub("", self.name) or self.name

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the test metrics, in the order of the first row with metrics.

        If the majority-class baseline has a high accuracy (:data:`EVEN`), a metric that weights classes equally comes
        first, because accuracy would mislead.
        """
        names = next((tuple(row.test) for row in self.rounds if row.test), ())
        fair = [name for name in ("auc", "balanced_accuracy") if name in names]
        if self.baseline.get("accuracy", 0.0) <= EVEN or names[:1] != ("accuracy",) or not fair:
            return names
        return (fair[0], *(name for name in names if name != fair[0]))

    @property
    def baseline(self) -> dict[str, float]:
        """Metrics of the best constant answer; empty if the folder has no diagnostics."""
        return {} if self.diagnostics is None else dict(self.diagnostics.baseline)

    @property
    def tested_on(self) -> str:
        """Describe the test records of exact metrics, with what covers them."""
        if self.public_test is not None:
            return "public test records"
        return f"private records that were held out ({NOT_COVERED})"

    def last(self, metric: str) -> float | None:
        """Return the metric of the last model that was evaluated; None without one, or if it is not defined."""
        value = next((row.test[metric] for row in reversed(self.rounds) if metric in row.test), math.nan)
        return value if math.isfinite(value) else None

    def beats_baseline(self, metric: str) -> bool | None:
        """Return whether the last evaluated model beats the best constant answer; None if unknown."""
        last = next((row.test[metric] for row in reversed(self.rounds) if metric in row.test), math.nan)
        constant = self.baseline.get(metric, math.nan)
        if metric not in DIRECTION or math.isnan(last) or math.isnan(constant):
            return None
        return DIRECTION[metric] * (last - constant) > 0


def load_run(folder: Path) -> RunData:
    """Read a run folder.

    A run in progress is read up to its last complete line of metrics.jsonl.

    Raises:
        RunFolderError: a file is missing, damaged or of another schema version; the error names the file and the key.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a run folder: there is no such folder.")
    toml = folder / "experiment.toml"
    if any((folder / name).is_file() for name in _RELEASES):
        raise RunFolderError(
            f"{folder} is a release, which trained no model: `fedveil resume {folder}` writes its report again, and "
            f"`fedveil show {folder}` prints it"
        )
    for path in (toml, folder / "metrics.jsonl"):
        if not path.exists():
            raise RunFolderError(
                f"{path} is missing: a run folder holds experiment.toml, metrics.jsonl and privacy.json"
                f"{folders_with(folder, path.name)}."
            )
    text = read_text(toml, RunFolderError, largest=LARGEST_FILE)
    rounds, interrupted = _rounds(folder / "metrics.jsonl")
    environment = folder / "environment.json"
    return RunData(
        folder=folder,
        experiment=check_schema_version(parse_toml(text, toml, RunFolderError), toml, EXPERIMENT_VERSION),
        experiment_toml=text,
        statement=_statement(folder / "privacy.json"),
        rounds=rounds,
        diagnostics=_if_there(folder / "diagnostics.json", Diagnostics),
        environment=read_object(environment) if environment.exists() else None,
        spectrum=_if_there(folder / "spectrum.json", Spectrum),
        audit=_if_there(folder / "audit.json", AuditRecord),
        evaluated=read_evaluated(folder),
        public_test=_if_there(folder / "public_test.json", PublicTest),
        interrupted_line=interrupted,
    )


def _if_there(path: Path, kind: type[_KindT]) -> _KindT | None:
    return read_document(path, kind) if path.exists() else None


def _rounds(path: Path) -> tuple[tuple[RoundRow, ...], bool]:
    """Return the rows of metrics.jsonl in order, and whether an incomplete last line was left out."""
    rows, interrupted = read_lines(path, RoundRow)
    for number in range(1, len(rows)):
        if rows[number].round <= rows[number - 1].round:
            raise RunFolderError(
                f"{path}, line {number + 1}, is damaged: round {rows[number].round} follows round "
                f"{rows[number - 1].round}."
            )
    return rows, interrupted


def _statement(path: Path) -> Statement:
    if not path.exists():
        raise RunFolderError(
            f"{path} is missing: a run writes its privacy statement when it ends, and there is no report "
            f"without one; end the run with `fedveil resume {path.parent}`."
        )
    return read_statement(path)

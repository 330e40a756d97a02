"""Functions over finished runs: compare them, calculate what they cost together, attack one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedveil.api.frame import Frame, Row
from fedveil.api.result import Result
from fedveil.arguments import explain_arguments, list_argument, text_argument
from fedveil.config_keys import is_number, plain, whole_argument
from fedveil.console import epsilon_text
from fedveil.errors import ConfigError, show_argument
from fedveil.files import as_path
from fedveil.privacy.audit import EpsilonBound, Membership, unlike_records
from fedveil.privacy.joint_cost import JointCost, joint_cost
from fedveil.privacy.statement import show_epsilon, show_lower_bound
from fedveil.report.compare import Comparison
from fedveil.report.compare import compare as compare_folders
from fedveil.report.figure_files import write_figures
from fedveil.report.page import write_report
from fedveil.report.tradeoff import tradeoff_plots, write_tradeoff
from fedveil.run.audit import Audit
from fedveil.run.audit import audit as attack

Run = Result | str | Path
"""A result, its run folder, or a folder of run folders."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ComparisonFrame(Frame):
    """One row per variant: test metrics over its seeds, and the guarantee of one of its runs.

    Attributes:
        comparison: the comparison with its runs.
        folders: the run folders.
    """

    comparison: Comparison
    folders: tuple[Path, ...]

    @property
    def shown(self) -> Sequence[Row]:
        """The same rows; each metric is its mean and standard deviation over seeds."""
        rows = self.comparison.rows
        metrics = dict.fromkeys(name for row in rows for name in row.metrics)
        return [
            {"variant": row.variant, "seeds": row.seeds}
            | {f"test {name}": str(row.metrics.get(name, "-")) for name in metrics}
            | {"epsilon": _epsilon(row.epsilon), "to server": _epsilon(row.to_server), "delta": row.delta}
            | {"unit": row.unit, "rounds": row.round}
            for row in rows
        ]

    def to_json(self) -> dict[str, Any]:
        return dict(self.comparison.to_json())

    def write(self, path: str | Path, *, against: str | None = None) -> Path:
        """Write the comparison as a page; with ``against``, draw results and costs against a key of the experiments.

        Raises:
            RunFolderError: the file cannot be written.
            ConfigError: the runs do not differ in the key.
        """
        page = as_path(path, "write")
        return self.comparison.write(page) if against is None else write_tradeoff(self.folders, against, page)

    def figures(
        self,
        folder: str | Path,
        *,
        against: str | None = None,
        formats: Sequence[str] = ("svg", "pdf", "csv"),
    ) -> list[Path]:
        """Write the plots of :meth:`write` into a folder; arguments and errors as those of ``Result.figures``."""
        plots = self.comparison.plots if against is None else tradeoff_plots(self.folders, against)
        return write_figures(plots, as_path(folder, "figures"), formats)


@explain_arguments
def compare(*runs: Run) -> ComparisonFrame:
    """Compare runs: one row per variant; runs that differ only in their seeds form one variant.

    The test metrics are exact unless the runs evaluated with noise; no epsilon covers exact ones.

    Args:
        runs: results, run folders, or folders of run folders.

    Raises:
        RunFolderError: no run is given; a folder is missing or damaged, or has no round yet.
    """
    folders = tuple(_folders(runs, "compare"))
    comparison = compare_folders(folders)
    document: Any = comparison.to_json()
    rows = tuple(map(_variant_row, document["rows"]))
    notes = (*comparison.warnings, *filter(None, [comparison.coverage]))
    return ComparisonFrame(rows=rows, notes=notes, comparison=comparison, folders=folders)


def _variant_row(row: Mapping[str, Any]) -> Row:
    """Return the row of a variant with one column per number."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key == "metrics":
            for name, spread in value.items():
                flat |= {name: spread["mean"], f"{name} std": spread["std"]}
        elif isinstance(value, dict):
            flat |= {key: value["mean"], f"{key} std": value["std"]}
        else:
            flat[key] = value
    return flat


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SpentFrame(Frame):
    """One row per run: its charges, and its epsilon alone.

    Attributes:
        cost: the joint cost of all runs.
    """

    cost: JointCost

    @property
    def epsilon(self) -> float | None:
        """Epsilon of all runs together; None if nothing is guaranteed."""
        return self.cost.epsilon

    @property
    def delta(self) -> float:
        """Delta of :attr:`epsilon`."""
        return self.cost.delta

    def to_json(self) -> dict[str, Any]:
        return asdict(self.cost) | super().to_json()


@explain_arguments
def spent(*runs: Run, delta: float | None = None, accountant: str = "pld") -> SpentFrame:
    """Calculate what several runs over the same people cost together.

    Args:
        runs: results, or run folders; a run that is given twice counts once.
        delta: delta of the sum; None: that of the runs, if it is the same in all.
        accountant: ``"pld"``, ``"rdp"`` or ``"rdp-2017"``.

    Raises:
        ConfigError: no run, or runs that no single epsilon covers.
        RunFolderError: a folder without a ledger and a statement of the same charges.
    """
    at = plain(delta)
    if at is not None and not (is_number(at) and 0 < at < 1):
        raise ConfigError(f"spent: delta must be a number between 0 and 1, not {show_argument(delta)}")
    folders = [_folder(run, "spent") for run in runs]
    cost = joint_cost(folders, at, text_argument("spent: accountant", accountant))
    sentence = "one of these runs guarantees nothing, so all together guarantee nothing"
    if cost.promise is not None:
        sentence = f"together: {cost.promise}, against whoever reads all that these runs released"
    rows = tuple(
        {"run": path.name, "charges": charges, "epsilon": epsilon} for path, charges, epsilon in cost.runs
    )
    return SpentFrame(rows=rows, notes=(sentence,), cost=cost)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AuditFrame(Frame):
    """Results of attacks on a run. They are computed from its training records, and no guarantee covers them.

    Attributes:
        found: the results.
        report: page of the run, with a section on the audit.
    """

    found: Audit
    report: Path

    @property
    def inference(self) -> Membership:
        """Membership inference on the last model."""
        return self.found.inference

    @property
    def bound(self) -> EpsilonBound | None:
        """Lower bound on epsilon; None if no unit was inserted."""
        return self.found.bound

    @property
    def is_refuted(self) -> bool:
        """Return whether the claimed epsilon lies below the lower bound."""
        return self.found.is_refuted

    @property
    def unlike(self) -> str | None:
        """Warning that the training and test records differ, so that the attack shows no leak; None otherwise."""
        return unlike_records(self.inference.high)

    @property
    def refutation(self) -> str | None:
        """Explanation of a refuted claim; None if the claim stands."""
        if not self.is_refuted:
            return None
        return (
            "ERROR: the claim is below what an attack shows; of a true claim as few audits say so as the confidence "
            "leaves: repeat it"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """The results in sentences."""
        inference = self.inference
        sentences = [
            f"membership inference: AUC {inference.auc:.4f} ({inference.low:.4f} to {inference.high:.4f})"
        ]
        if self.unlike is not None:
            sentences.append(f"WARNING: {self.unlike}")
        if self.found.accuracy_bound is not None and self.found.membership_bound is not None:
            sentences.append(
                f"by the claim, an attacker is right about one {self.found.unit}, in or out by a fair coin, with "
                f"probability {_upward(self.found.accuracy_bound)} at most, by the privacy curve of all charges (a "
                f"simpler bound from epsilon and delta alone, 1/2 + epsilon / 4 + delta, would be "
                f"{_upward(self.found.membership_bound)})"
            )
        if self.bound is not None:
            least = show_lower_bound(self.bound.epsilon)
            claimed = (
                "nothing" if self.found.claimed is None else f"epsilon {show_epsilon(self.found.claimed)}"
            )
            sure = f"{self.bound.confidence:.0%} confidence"
            sentences.append(
                f"epsilon for one {self.found.unit} is at least {least} ({sure}); the run claims {claimed}"
            )
        return (*sentences, *(() if self.refutation is None else (self.refutation,)))

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.found),
            "refuted": self.is_refuted,
            "unlike_records": self.unlike,
            "report": self.report,
        }


@explain_arguments
def audit(run: Result | str | Path, *, canaries: int = 200, code: Sequence[str] = ()) -> AuditFrame:
    """Attack a run that has ended: membership inference, and a lower bound on its epsilon.

    A result has the objects with which its run began. A folder must name them: a catalogue data set or tables, and a
    model, loss and metrics that have names. What is found is written to ``audit.json`` and the report of the folder.

    Args:
        run: the result, or its folder.
        canaries: number of units inserted in the one-run audit, which trains once more; 0 skips it.
        code: import paths, ``package.module:name``, that the run folder names and whose code may run.

    Raises:
        RunFolderError: no run that has ended, other records than those trained on, or records that were handed over
            in Python.
        ConfigError: more canaries than users; an import path that is missing from ``code``.
    """
    folder = _folder(run, "audit")
    outcome = attack(
        folder,
        canaries=whole_argument("audit: canaries", canaries, 0),
        code=list_argument("audit: code", code),
        prepared=run.prepare_again() if isinstance(run, Result) else None,
    )
    rows: list[Row] = [
        {"attack": "membership inference", "figure": "AUC"}
        | {"value": outcome.inference.auc, "low": outcome.inference.low, "high": outcome.inference.high}
    ]
    if outcome.bound is not None:
        rows.append(
            {"attack": "one-run audit", "figure": "epsilon at least"}
            | {"value": outcome.bound.epsilon, "low": None, "high": None}
        )
    return AuditFrame(rows=tuple(rows), private=True, found=outcome, report=write_report(folder))


def _folder(run: Run, function: str) -> Path:
    if isinstance(run, Result):
        return run.folder
    if not isinstance(run, str | Path):
        raise ConfigError(f"{function}: a result or a run folder is needed, not {type(run).__name__}")
    return as_path(run, function)


def _folders(runs: Sequence[Run], function: str) -> Iterator[Path]:
    """Yield run folders; a folder of run folders stands for all in it."""
    for folder in (_folder(run, function) for run in runs):
        inner = sorted(path.parent for path in folder.glob("*/experiment.toml"))
        yield from [folder] if (folder / "experiment.toml").exists() or not inner else inner


def _upward(probability: float) -> str:
    """Return an upper bound on a probability in three decimals, rounded up."""
    return f"{min(1.0, math.ceil(1000 * probability) / 1000):.3f}"


def _epsilon(value: float) -> str:
    return epsilon_text(value if math.isfinite(value) else None)

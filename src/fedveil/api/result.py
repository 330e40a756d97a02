"""Result of a run: its privacy statement, model, metrics and report."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Shaped
from safetensors.torch import load_file
from torch import nn

from fedveil.api.frame import Frame
from fedveil.api.objective import Objective
from fedveil.api.predictor import Predictor
from fedveil.arguments import explain_arguments, explain_arguments_as, flag_argument, text_argument
from fedveil.bundle.writing import Source, write_bundle
from fedveil.data.records import Population
from fedveil.files import as_path
from fedveil.privacy.statement import Statement, show_epsilon
from fedveil.report.document import check_page_suffix, write_document
from fedveil.report.figure_files import write_figures
from fedveil.report.page import run_plots, write_report
from fedveil.report.run_data import load_run
from fedveil.report.summary import RunSummary, summarise
from fedveil.run.advice import advice_of
from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.diagnostics import baseline_of
from fedveil.run.folder.documents import NORM_LEVELS, read_rows
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.folder.shown import METRICS, Kind
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.statistics.evaluation.result import ReleasedEvaluation

# --- history ------------------------------------------------------------------------------------------------
# One flat row per round, with the public figures alone or with all figures.


_OMITTED: Final = frozenset({"schema_version", "remarks"})
"""Fields of ``metrics.jsonl`` that are no column of the history."""

_MOVEMENT_COLUMNS: Final[Mapping[str, str]] = {
    "movement.model": "model_moved",
    "movement.noise": "moved_by_noise_alone",
    "movement.most": "moved_at_most",
}
"""Column names for the fields of the table ``movement`` in ``metrics.jsonl``."""


def round_rows(
    folder: Path, *, private: bool = False, public_test: bool = False
) -> tuple[dict[str, Any], ...]:
    """Return one flat row per round of a run folder; every row has the same columns.

    Args:
        folder: the run folder.
        private: whether to include exact figures of private records, which no guarantee covers.
        public_test: whether the test records are public, so that metrics on them are public.

    Raises:
        RunFolderError: ``metrics.jsonl`` is damaged.
    """
    rows = [
        columns_of(row, private=private, public_test=public_test)
        for row in read_rows(folder / "metrics.jsonl")
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return tuple({name: row.get(name) for name in names} for row in rows)


def columns_of(row: Mapping[str, Any], *, private: bool = False, public_test: bool = False) -> dict[str, Any]:
    """Return the columns of one row of ``metrics.jsonl``.

    :data:`~fedveil.run.folder.shown.METRICS` classifies every field: covered by the guarantee, computed on the test
    records, or private. A field that it lacks counts as private.

    Args:
        row: the row.
        private: as for :func:`round_rows`.
        public_test: as for :func:`round_rows`.
    """
    kinds = {Kind.COVERED, *({Kind.TESTED} if public_test or private else ())}
    kinds |= {Kind.PRIVATE} if private else set()
    return dict(
        _columns({key: value for key, value in row.items() if METRICS.get(key, Kind.PRIVATE) in kinds})
    )


def _columns(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row; a table or a list inside the row becomes one column per element."""
    for key, value in row.items():
        if key in _OMITTED:
            continue
        if key == "test":
            yield from (value or {}).items()
        elif key == "norms":
            if value is not None:
                yield from ((f"norm_{level:g}", norm) for level, norm in zip(NORM_LEVELS, value, strict=True))
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                path = f"{key}.{name}"
                if key != "movement":
                    yield f"{key}_{name}", inner
                elif path in _MOVEMENT_COLUMNS:
                    yield _MOVEMENT_COLUMNS[path], inner
        elif key not in (
            "movement",
            "communication_cost",
        ):  # these tables are None if they are not known in a round
            yield key, value


# --- result -------------------------------------------------------------------------------------------------


@explain_arguments_as("Result", "fedveil.train returns one")
@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """The result of a run.

    Attributes:
        statement: the privacy statement: the protected unit, the adversaries, the strength of the guarantee, and its
            exceptions; ``statement.sentences()`` returns it in plain English.
        metrics: metrics on the test records after the last round; None for an undefined metric. With
            ``[evaluation]`` they are the released, noisy metrics. Without it they are exact, and epsilon does not
            cover them.
        rounds: number of completed rounds.
        stopped: reason why the run ended before its last round; None if it did not.
        folder: the run folder, which contains the whole result.
        evaluated: the released test metrics with their intervals; None without ``[evaluation]``.
    """

    statement: Statement
    metrics: Mapping[str, float | None]
    rounds: int
    stopped: str | None
    folder: Path
    evaluated: ReleasedEvaluation | None
    _experiment: Experiment = field(repr=False)
    _learned: Objective = field(repr=False)
    _people: Population = field(repr=False)

    @classmethod
    def from_outcome(
        cls, outcome: Outcome, experiment: Experiment, objective: Objective, people: Population
    ) -> Result:
        """Return the result of a run.

        Args:
            outcome: outcome of the training run.
            experiment: the experiment that ran.
            objective: the initial model, with its loss and metrics.
            people: the population on which the model was trained.
        """
        released, metrics = outcome.evaluated, outcome.row["test"] or {}
        if released is not None:
            metrics = {
                name: None if interval is None else interval.estimate
                for name, interval in released.headline.items()
            }
        return cls(
            statement=outcome.statement,
            metrics=metrics,
            rounds=outcome.rounds,
            stopped=outcome.stopped,
            folder=outcome.folder,
            evaluated=released,
            _experiment=experiment,
            _learned=objective,
            _people=people,
        )

    def __repr__(self) -> str:
        metrics = ", ".join(
            f"{name}={'none' if value is None else f'{value:.4g}'}" for name, value in self.metrics.items()
        )
        bound = f"epsilon={show_epsilon(self.statement.epsilon)} for one {self.statement.unit}"
        if self.statement.has_large_delta:
            bound += f", delta={self.statement.delta:g} not below 1/{self.statement.units}"
        return f"Result({bound}, {metrics}, rounds={self.rounds}, folder='{self.folder}')"

    def __str__(self) -> str:
        return str(self.summary)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook, above the whole statement."""
        return f"{self.summary._repr_html_()}{self.statement._repr_html_()}"

    @cached_property
    def summary(self) -> RunSummary:
        """Return the guarantee, the main metric, whether a guarantee covers that metric, and caveats for quoting it."""
        return summarise(load_run(self.folder))

    @cached_property
    def history(self) -> Frame:
        """Public figures of every round: epsilon, the clip, the movement of the model, metrics on public test records.

        Round 0 is the initial model. An epsilon of None means that the run has no guarantee.
        """
        return Frame(rows=round_rows(self.folder, public_test=self._people.public_test), title="rounds")

    def history_private(self) -> Frame:
        """Return all figures of every round, also exact figures of private records, which no guarantee covers.

        Protect them as you protect the records: norms, counts and times depend on the users who take part.
        """
        return Frame(
            rows=round_rows(self.folder, private=True), title="all figures of the rounds", private=True
        )

    @cached_property
    def settings(self) -> str:
        """The complete experiment as TOML, with all defaults."""
        return self._experiment.to_toml()

    def prepare_again(self) -> Prepared:
        """Return the experiment with its population and initial model, ready for another run or a privacy attack."""
        return prepare(self._experiment, FixedPopulation(self._people, "this"), self._learned.task)

    @cached_property
    def baseline(self) -> Mapping[str, float | None]:
        """Metrics of the best constant answer on the test records; a useful model must exceed them."""
        return baseline_of(self.folder)

    @cached_property
    def advice(self) -> str | None:
        """A suggestion that is computed only from released models and public numbers; None if there is none."""
        return advice_of(self.folder)

    @cached_property
    def model(self) -> nn.Module:
        """The trained model in evaluation mode: a copy of the initial model with the trained values."""
        # The file has the trained parameters only; buffers and frozen parameters are those of the initial model.
        model = copy.deepcopy(self._learned.module)
        model.load_state_dict(load_file(self.folder / "model.safetensors"), strict=False)
        return model.eval()

    @cached_property
    def predictor(self) -> Predictor:
        """The trained model with the facts that are needed to predict new records."""
        people = self._people
        classes = people.classes or tuple(range(people.n_classes or 0))
        return Predictor(
            model=self.model,
            task=people.task,
            classes=classes,
            targets=people.target_names,
            shape=people.feature_shape,
            feature_names=people.feature_names,
            by_schema=people.schema is not None,
            scale=people.scale,
        )

    @explain_arguments
    def predict(self, features: Any) -> Shaped[np.ndarray, "n"]:
        """Return a label (classification), number (regression) or log hazard (survival) per record."""
        return self.predictor.predict(features)

    @explain_arguments
    def predict_proba(self, features: Any) -> Float32[np.ndarray, "n classes"]:
        """Return the (n, classes) probabilities for new records."""
        return self.predictor.probabilities(features)

    @explain_arguments
    def save(self, path: str | Path, *, about: str = "") -> Path:
        """Write a bundle for use elsewhere: the model with its statement, its ledger and its model card.

        Args:
            path: a new folder, or a new ``.zip``.
            about: purpose and intended users of the model; the card shows this text.

        Raises:
            BundleError: the path exists, or cannot be written.
        """
        text_argument("save: about", about)
        _, experiment = RunFolder.open(self.folder)
        read_from = self._people.source
        assert experiment.model.name is not None
        source = Source(
            folder=self.folder,
            predictor=self.predictor,
            model_name=experiment.model.name,
            public_test=self._people.public_test,
            schema=None if read_from is None else read_from.schema,
            about=about,
        )
        return write_bundle(as_path(path, "save"), source)

    @explain_arguments
    def figures(self, folder: str | Path, *, formats: Sequence[str] = ("svg", "pdf", "csv")) -> list[Path]:
        """Write the plots of the report into a folder, without those of private diagnostics.

        Args:
            folder: is created if it is missing.
            formats: some of "svg", "pdf" (needs Matplotlib: ``fedveil[figures]``) and "csv".

        Raises:
            ConfigError: an unknown format, no plot, or no Matplotlib.
            RunFolderError: a file cannot be written.
        """
        return write_figures(run_plots(load_run(self.folder)), as_path(folder, "figures"), formats)

    @explain_arguments
    def report(
        self,
        path: str | Path | None = None,
        *,
        without_privacy: Result | str | Path | None = None,
        with_spectrum: bool = False,
    ) -> Path:
        """Write the self-contained report into the run folder, and a copy to ``path`` if one is given.

        Args:
            path: where a copy goes.
            without_privacy: a run without a guarantee on the same data, whose result stands beside this one's.
            with_spectrum: whether to show how far the model moved, by frequency.

        Raises:
            ConfigError: the path does not end in .html or .htm; the run ``without_privacy`` has a guarantee, or other
                data.
            RunFolderError: the report or its copy cannot be written.
        """
        copied = None if path is None else as_path(path, "report")
        if copied is not None:
            check_page_suffix(copied)
        other = without_privacy.folder if isinstance(without_privacy, Result) else without_privacy
        written = write_report(
            self.folder,
            without_privacy=None if other is None else as_path(other, "report"),
            with_spectrum=flag_argument("report: with_spectrum", with_spectrum),
        )
        if copied is None:
            return written
        return write_document(copied, written.read_text(encoding="utf-8"))

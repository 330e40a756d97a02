"""Writer of bundles: the public files of a run folder, with the whole model and its card."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from safetensors.torch import save

import fedveil
from fedveil.api.predictor import Predictor
from fedveil.bundle import manifest
from fedveil.bundle.card import CARD, model_card
from fedveil.bundle.manifest import (
    SUMS,
    InputPart,
    LedgerPart,
    Manifest,
    ModelPart,
    Reached,
    sums,
    write_files,
)
from fedveil.data.records import Population
from fedveil.data.schema import Label, read_schema
from fedveil.errors import ConfigError, RunFolderError
from fedveil.federation.audit.run_record import AGREED, ROUNDS, STATE, TERMS, read_terms
from fedveil.federation.silo_data import load_public_test_table
from fedveil.files import LARGEST_FILE, parse_json, read_content, reading
from fedveil.privacy.ledger import read_head
from fedveil.privacy.statement import Statement
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.task_choice import check_code, defaults_of, task_of
from fedveil.run.environment import is_schema_of_run
from fedveil.run.folder.run_folder import Row, RunFolder, stored_tensors
from fedveil.run.populations import load_population
from fedveil.statistics.evaluation.result import read_evaluated

_LEDGER: Final = "ledger.jsonl"
_STATEMENT: Final = "privacy.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Input of :func:`write_bundle`.

    Attributes:
        folder: the folder of a completed run.
        predictor: the trained model with its input description.
        model_name: name of the model's builder: a shipped name, an import path, or ``session:NAME``.
        public_test: whether the run's test table is public.
        schema: the schema document if the run was on tables, else None.
        about: purpose and intended users of the model, for its card.
    """

    folder: Path
    predictor: Predictor
    model_name: str
    public_test: bool = False
    schema: bytes | None = None
    about: str = ""


def write_bundle(path: Path, source: Source) -> Path:
    """Write a bundle into a new folder, or a new ``.zip``.

    A bundle contains public files only: the released model, statement, ledger, settings without the locations of
    data, and test metrics that were released or belong to a public table. Exact metrics of private records,
    diagnostics, transcripts and checkpoints are left out.

    Args:
        path: a new folder, or a new ``.zip``.
        source: run folder and model.

    Returns:
        The path of the bundle.

    Raises:
        RunFolderError: the run has not ended, or its folder is damaged.
        BundleError: the path exists, or cannot be written.
    """
    folder, experiment = RunFolder.open(source.folder)
    checkpoint = folder.read_checkpoint()
    if checkpoint is None or not (folder / _STATEMENT).exists():
        raise RunFolderError(f"{folder.path}: the run has not ended; `fedveil resume {folder.path}` ends it")
    copied = {
        name: read_content(folder / name, RunFolderError, largest=LARGEST_FILE)
        for name in (_STATEMENT, _LEDGER)
    }
    described = _manifest(folder, experiment, source, checkpoint.row)
    copied |= {
        name: read_content(folder / name, RunFolderError, largest=LARGEST_FILE)
        for name in (TERMS, ROUNDS, AGREED)
        if (folder / name).exists()
    }
    state = {name: value.contiguous() for name, value in source.predictor.model.state_dict().items()}
    files = {
        manifest.NAME: described.to_bytes(),
        "model.safetensors": save(state),
        **copied,
        **({} if source.schema is None else {"schema.toml": source.schema}),
    }
    # The card follows from the manifest and the statement; SHA256SUMS is made last, because it covers the card.
    statement = Statement.from_json(parse_json(files[_STATEMENT], folder / _STATEMENT, RunFolderError))
    files[CARD] = model_card(described, statement).encode()
    files[SUMS] = sums(files)
    write_files(path, files)
    return path


def bundle_run(run: Path, path: Path, *, about: str = "", code: Collection[str] = ()) -> Path:
    """Write a bundle of a run folder whose data and model are named in its experiment.

    Args:
        run: the run folder.
        path: a new folder, or a new ``.zip``.
        about: purpose and intended users of the model, for its card.
        code: import paths of models, losses and metrics of the experiment that the caller allows to run.

    Raises:
        ConfigError: data or model were passed as Python objects (``Result.save`` writes that bundle), or the
            experiment names code that ``code`` does not list.
        RunFolderError: the run has not ended, or its folder is damaged.
        DataError: the data are not at the location in the experiment; they are needed for their public facts (shape,
            classes).
    """
    folder, experiment = RunFolder.open(run)
    check_code(experiment, code, run)
    table = experiment.data.table
    if table is not None and not is_schema_of_run(folder.path, table.schema_file):
        raise ConfigError(
            f"{table.schema_file}: another schema than that of the run, whose model reads its features by it; put the "
            "file of the run back"
        )
    population = _population(folder, experiment)
    task = task_of(experiment, population)
    with reading(run, RunFolderError), stored_tensors(folder / "model.safetensors") as stored:
        trained = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        task.model.load_state_dict(trained, strict=False)
    target = None if table is None else read_schema(table.schema_file).target
    predictor = Predictor(
        model=task.model.eval(),
        task=population.task,
        classes=target.classes if isinstance(target, Label) else tuple(range(population.n_classes or 0)),
        targets=population.target_names,
        shape=population.feature_shape,
        scale=population.scale,
    )
    source = Source(
        folder=run,
        predictor=predictor,
        model_name=experiment.model.name or defaults_of(experiment.data.name, population).model,
        public_test=population.public_test,
        schema=None if table is None else read_content(table.schema_file, RunFolderError),
        about=about,
    )
    return write_bundle(path, source)


def _population(folder: RunFolder, experiment: Experiment) -> Population:
    """Return the population of a run; for a run of a federation, only its public part.

    The tables of a federation's run are stored at the silos.
    """
    table = experiment.data.table
    if table is None or not (folder / STATE).exists():
        return load_population(experiment.data, experiment.seed)
    terms = read_terms(read_content(folder / TERMS, RunFolderError, largest=LARGEST_FILE))
    if not terms:
        raise RunFolderError(f"{folder / TERMS}: the terms of the run are missing")
    membership, _ = list(terms.values())[-1]
    return load_public_test_table(
        read_schema(table.schema_file), table.test_file, membership
    ).load_population()


def _manifest(folder: RunFolder, experiment: Experiment, source: Source, row: Row) -> Manifest:
    """Return the manifest of a bundle; ``row`` has the metrics of the last round."""
    predictor = source.predictor
    head = read_head(folder / _LEDGER)
    test, metrics = _reached(folder, row, source.public_test)
    return Manifest(
        fedveil=fedveil.__version__,
        run=experiment.name,
        about=source.about,
        model=ModelPart(
            name=source.model_name,
            seed=experiment.seed,
            outputs=predictor.by_place.outputs(np.zeros((1, *predictor.shape), dtype=np.float32)).shape[1],
            parameters=sum(value.numel() for value in predictor.model.parameters()),
        ),
        input=InputPart(
            shape=predictor.shape,
            columns=predictor.feature_names,
            factor=predictor.scale.factor,
            shift=predictor.scale.shift,
            schema_file=None if source.schema is None else "schema.toml",
        ),
        task=predictor.task,
        classes=predictor.classes,
        targets=predictor.targets,
        rounds=row["round"],
        test=test,
        metrics=metrics,
        ledger=LedgerPart(count=head.count, digest=head.digest),
        experiment=_public(experiment),
    )


def _reached(
    folder: RunFolder, row: Row, public_test: bool
) -> tuple[Literal["public", "released", "private"], dict[str, Reached]]:
    """Return the reason why test metrics may be published, and the metrics (none if "private")."""
    released = read_evaluated(folder.path)
    if released is not None:
        metrics = {name: metric for name, metric in released.headline.items() if metric is not None}
        return "released", {
            name: Reached(estimate=metric.estimate, low=metric.low, high=metric.high)
            for name, metric in metrics.items()
        }
    if public_test:
        return "public", {name: Reached(estimate=value) for name, value in (row["test"] or {}).items()}
    return "private", {}


def _public(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment without the locations of its data: paths of a silo's machine are private."""
    document = experiment.model_dump(mode="json", exclude_none=True)
    document["data"] = {
        key: value for key, value in document["data"].items() if key not in ("table", "folder")
    }
    document["model"].pop("initial", None)
    return document

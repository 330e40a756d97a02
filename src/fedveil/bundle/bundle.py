"""Reader of bundles: the model, ready to predict from arrays or tables, and its privacy statement."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import torch
from jaxtyping import Float32, Shaped
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedveil.api.predictor import Predictor, warn_of_positions
from fedveil.arguments import explain_arguments, explain_arguments_as
from fedveil.bundle import manifest
from fedveil.bundle.manifest import BundleError, Manifest, read_files
from fedveil.data.records import Affine
from fedveil.data.schema import FileFormat, Format, Schema
from fedveil.data.table_file import open_table, without_days
from fedveil.data.tables import read_features_by_schema, read_number_columns
from fedveil.errors import ConfigError, DataError
from fedveil.files import as_path, as_text, parse_json, parse_toml, writing
from fedveil.privacy.statement import Statement
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.in_memory_method import SESSION
from fedveil.sanitize import sanitize
from fedveil.training.models import MODELS, build_model
from fedveil.training.trees import BoostedTrees
from fedveil.validation import validate_document

_WEIGHTS: Final = "model.safetensors"
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_LARGEST_RECORD: Final = 1 << 24
"""Largest number of values in a record (2^24): the four float32 records of a model check then take 256 MiB."""


@explain_arguments_as("Bundle", "fedveil.load reads one")
@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """A bundle whose bytes match its digests. Not claimed: the signers, which ``fedveil verify`` checks.

    Attributes:
        path: the folder or archive.
        manifest: description of the model, its input and its output.
        statement: privacy statement of the training.
    """

    path: Path
    manifest: Manifest
    statement: Statement
    _files: Mapping[str, bytes]
    _given: nn.Module | str | None

    def __repr__(self) -> str:
        name, task = self.manifest.model.name, self.manifest.task
        return f"Bundle(path='{self.path}', model='{name}', task='{task}', {self.statement.short})"

    @cached_property
    def model(self) -> nn.Module:
        """The model with the bundle's weights, in evaluation mode.

        Raises:
            BundleError: the caller must pass the model or its import path, because it is no shipped model (the error
                says what to pass); or the weights do not fit the model.
        """
        stored = self.tensors()
        # The order matters: the size is checked before the model is built, and the shapes before weights are loaded.
        self._check_size(stored)
        module = self._module()
        self._compare(stored, module)
        module.load_state_dict(stored)
        # Python would raise at such an index, or count a negative one from the end; readers of an exported file read
        # whatever lies there in memory.
        if isinstance(module, BoostedTrees) and (name := module.wrong_index()) is not None:
            raise BundleError(
                f"{self.path}: tensor '{name}' names a feature or a cut that the model does not have"
            )
        return module.eval()

    @cached_property
    def predictor(self) -> Predictor:
        """The model with its input description."""
        inputs = self.manifest.input
        return Predictor(
            model=self.model,
            task=self.manifest.task,
            classes=self.manifest.classes,
            targets=self.manifest.targets,
            shape=inputs.shape,
            feature_names=inputs.columns,
            by_schema=inputs.schema_file is not None,
            scale=Affine(factor=inputs.factor, shift=inputs.shift),
        )

    @cached_property
    def schema(self) -> Schema | None:
        """The schema that encodes the columns of a table; None if the run was not on tables."""
        if self.manifest.input.schema_file is None:
            return None
        text = as_text(self._files["schema.toml"], "schema.toml", BundleError)
        document = parse_toml(text, "schema.toml", BundleError)
        return validate_document(Schema, document, f"{self.path}: schema.toml is no schema", BundleError)

    def _check_size(self, stored: Mapping[str, Tensor]) -> None:
        """Compare the shapes of a shipped model with the weights before memory is allocated for the model.

        A malicious manifest may request any size. The model is planned on the device "meta", which allocates nothing.

        Raises:
            BundleError: the weights do not fit the model, or no model reads records of this shape.
        """
        recorded, shape = self.manifest.model, self.manifest.input.shape
        if math.prod(shape) > _LARGEST_RECORD:
            raise BundleError(f"{self.path}: a record of shape {shape} is larger than any model reads")
        if self._given is None and recorded.name in MODELS:
            try:
                with torch.device("meta"):
                    planned = MODELS[recorded.name](shape, recorded.outputs)
            except (RuntimeError, TypeError, ValueError) as error:  # TypeError: sizes of 2^63 and more
                raise BundleError(
                    f"{self.path}: no {recorded.name} has records of shape {shape} and {recorded.outputs} outputs "
                    f"({sanitize(str(error))})"
                ) from None
            self._compare(stored, planned)

    def _compare(self, stored: Mapping[str, Tensor], module: nn.Module) -> None:
        expected = module.state_dict()
        for name in (*expected, *stored):
            if name not in stored or name not in expected or stored[name].shape != expected[name].shape:
                shapes = [
                    tuple(tensors[name].shape) if name in tensors else "missing"
                    for tensors in (stored, expected)
                ]
                raise BundleError(
                    f"{self.path}: tensor '{sanitize(name)}' is {shapes[0]} in the bundle and {shapes[1]} in the "
                    "model; hand over a model that was built as the trained one was"
                )
            if stored[name].is_floating_point() != expected[name].is_floating_point():
                raise BundleError(
                    f"{self.path}: tensor '{sanitize(name)}' holds {stored[name].dtype} in the bundle and "
                    f"{expected[name].dtype} in the model"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, including buffers and frozen parameters.

        Raises:
            BundleError: the weights are not in the safetensors format.
        """
        try:
            return dict(load(self._files[_WEIGHTS]))
        except (SafetensorError, ValueError, KeyError) as error:
            raise BundleError(
                f"{self.path}: {_WEIGHTS} is no safetensors file ({sanitize(str(error))})"
            ) from None

    @explain_arguments
    def predict(self, features: Any) -> Shaped[np.ndarray, "n"]:
        """Return a label (classification), number (regression) or log hazard (survival) per record.

        Of several targets, k labels of 0 and 1 or k numbers per record.
        """
        return self.predictor.predict(features)

    @explain_arguments
    def predict_proba(self, features: Any) -> Float32[np.ndarray, "n classes"]:
        """Return the (n, classes) probabilities, or those of each of several labels."""
        return self.predictor.probabilities(features)

    @explain_arguments
    def predict_table(
        self, path: str | Path, keep: Sequence[str] = (), file_format: Mapping[str, str] | None = None
    ) -> pa.Table:
        """Return the predictions for a table, one row per record in the order of the table.

        Args:
            path: a table with the columns that the model was trained on. Of the other columns, only ``keep`` is read.
            keep: columns to copy into the result, such as an id.
            file_format: keys of the table's own ``[format]`` in a schema, such as ``{"delimiter": ";"}``; None: the
                format that the schema declares for a file of this name, or for all.

        Returns:
            The kept columns, ``prediction``, and for classification ``probability_LABEL`` for each class. Of several
            targets ``prediction_NAME`` for each, and ``probability_NAME`` if they are labels.

        Raises:
            ConfigError: ``path`` is no path, ``keep`` is a text instead of a list, a key of ``file_format`` is unknown
                or its value wrong, or the model was trained without a schema, which a format belongs to.
            DataError: a column is missing, a kept column has the name of a result column, or a value does not fit the
                schema; the error names file, column and record.
        """
        path = as_path(path, "predict_table")
        if isinstance(keep, str):
            raise ConfigError(f"predict_table: keep is a list of columns, [{keep!r}]")
        schema = self._schema_for(path, file_format)
        features = self._features(path, schema)
        written = Format() if schema is None else schema.format_of(path)
        kept_columns = open_table(path, tuple(keep), written) if keep else pa.table({})
        predictor = self.predictor.by_place
        if self.manifest.task == "classification":
            chances = predictor.probabilities(features)
            best = np.array(self.manifest.classes)[chances.argmax(axis=1)]
            columns = {"prediction": pa.array(best)} | {
                f"probability_{label}": pa.array(chances[:, index])
                for index, label in enumerate(self.manifest.classes)
            }
        elif self.manifest.targets:
            columns = self._predictions_by_target(predictor, features)
        else:
            columns = {"prediction": pa.array(predictor.predict(features))}
        for name in keep:
            if name in columns:
                raise DataError(
                    f"{path}: column '{name}' cannot be kept: one of that name is written; rename it there"
                )
        return pa.table({name: without_days(kept_columns.column(name)) for name in keep} | columns)

    def _predictions_by_target(self, predictor: Predictor, features: np.ndarray) -> dict[str, pa.Array]:
        predictions = predictor.predict(features)
        columns = {
            f"prediction_{name}": predictions[:, index] for index, name in enumerate(self.manifest.targets)
        }
        if self.manifest.task == "multi-label":
            chances = predictor.probabilities(features)
            columns |= {
                f"probability_{name}": chances[:, index] for index, name in enumerate(self.manifest.targets)
            }
        return {name: pa.array(values) for name, values in columns.items()}

    def _schema_for(self, path: Path, file_format: Mapping[str, str] | None) -> Schema | None:
        """Return the schema that reads a table; None if the model was trained on arrays."""
        if file_format is None:
            return self.schema
        if self.schema is None:
            raise ConfigError(
                "predict_table: the model was trained on arrays, and a format belongs to a schema; read the table with "
                "pandas, and call predict with its columns"
            )
        declared = validate_document(FileFormat, dict(file_format), "predict_table: file_format", ConfigError)
        return self.schema.with_file_format(path, declared)

    def _features(self, path: Path, schema: Schema | None) -> np.ndarray:
        inputs = self.manifest.input
        if schema is not None:
            return read_features_by_schema(schema, path)
        if len(inputs.shape) != 1:
            raise DataError(
                f"{path}: a record of this model has shape {inputs.shape}, which no table has; predict from arrays in "
                "Python: fedveil.load(bundle).predict(features)"
            )
        values = read_number_columns(path, inputs.columns)
        if inputs.columns is None:
            warn_of_positions(None, open_table(path, None).column_names)
        if values.shape[1] != inputs.shape[0]:
            raise DataError(
                f"{path}: {values.shape[1]} columns, but the model was trained on {inputs.shape[0]} without names; "
                "leave out the others"
            )
        return values

    def _module(self) -> nn.Module:
        recorded, supplied = self.manifest.model, self._given
        if isinstance(supplied, nn.Module):
            return supplied
        if supplied is not None and supplied != recorded.name:
            raise BundleError(
                f"{self.path}: was trained as model '{sanitize(recorded.name)}', not '{sanitize(supplied)}'"
            )
        if recorded.name.startswith(SESSION):
            raise BundleError(
                f"{self.path}: the model was handed over in a Python session ('{sanitize(recorded.name)}'); build it "
                "as it was, and load the bundle with it: fedveil.load(bundle, model)"
            )
        # An import path in a bundle names code of the reader's installation: run it only if the reader allows it.
        if recorded.name not in MODELS and supplied is None:
            raise BundleError(
                f"{self.path}: its model is built by '{sanitize(recorded.name)}', which is code of your installation; "
                f"if you trust it, say so: --model {sanitize(recorded.name)}, or fedveil.load(bundle, "
                f"model='{sanitize(recorded.name)}')"
            )
        return build_model(
            recorded.name,
            input_shape=self.manifest.input.shape,
            n_outputs=recorded.outputs,
            randomness=ExperimentRandomness(recorded.seed),
        )


@explain_arguments_as("load")
def load_bundle(path: str | Path, model: nn.Module | str | None = None) -> Bundle:
    """Read a bundle, and check every byte against its digests.

    Args:
        path: the folder, or the ``.zip``.
        model: None for a shipped model. If the trained model was a Python object: a model of the same architecture.
            If an import path builds the model: that path; the caller thereby allows the code to run.

    Raises:
        ConfigError: ``path`` is no path.
        BundleError: the bundle is missing, damaged or changed; the error names the file.
    """
    path = as_path(path, "load")
    if (path / "experiment.toml").is_file():
        raise BundleError(f"{path} is a run folder; `fedveil bundle {path} -o NEW.zip` makes a bundle of it")
    files = read_files(path)
    for name in (manifest.NAME, _WEIGHTS, "privacy.json"):
        if name not in files:
            raise BundleError(f"{path}: no bundle: it has no {name}")
    return Bundle(
        path=path,
        manifest=Manifest.from_bytes(files[manifest.NAME]),
        statement=Statement.from_json(parse_json(files["privacy.json"], "privacy.json", BundleError)),
        _files=files,
        _given=model,
    )


def write_table(table: pa.Table, path: str | Path, keep: Collection[str] = ()) -> None:
    """Write predictions as ``.parquet`` or ``.csv``.

    In a ``.csv``, a text from the bundle that begins like a spreadsheet formula gets a leading apostrophe: the names
    of classes come from the maker of the model, who may be an attacker. Kept columns belong to the reader and are
    written unchanged, because a changed id could not be matched any more.

    Args:
        table: the result of :meth:`Bundle.predict_table`.
        path: path of the new file.
        keep: columns that were kept.

    Raises:
        DataError: the path has another suffix, or the file cannot be written.
    """
    path = as_path(path, "write_table")
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".csv"):
        raise DataError(f"{path}: a table is written as .parquet or .csv")
    with writing(path, DataError):
        if suffix == ".parquet":
            pa_parquet.write_table(table, path)
        else:
            pa_csv.write_csv(_without_formulas(table, keep), path)


def _without_formulas(table: pa.Table, keep: Collection[str]) -> pa.Table:
    """Return the table with an apostrophe before every name and text that looks like a formula.

    Columns in ``keep`` are unchanged.
    """
    named = table.rename_columns([name if name in keep else _plain(name) for name in table.column_names])
    for position, (name, column) in enumerate(zip(table.column_names, named.columns, strict=True)):
        if name in keep:
            continue
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            texts = [None if text is None else _plain(text) for text in column.to_pylist()]
            named = named.set_column(position, named.field(position), pa.array(texts, type=column.type))
    return named


def _plain(text: str) -> str:
    """Return a text with a leading apostrophe if a spreadsheet could evaluate it.

    Numbers such as -1 are unchanged.
    """
    return f"'{text}" if text.startswith(_FORMULA) and _NUMBER.fullmatch(text) is None else text

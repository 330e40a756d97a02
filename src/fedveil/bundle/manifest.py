"""Manifest of a bundle, ``bundle.json``: input and output of the model, and its origin."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedveil.bundle.archive import BundleError
from fedveil.data.column_checks import SEVERAL_TARGETS
from fedveil.data.records import Label, Task
from fedveil.files import parse_json
from fedveil.validation import DocumentTable, validate_document

NAME: Final = "bundle.json"
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class ModelPart(DocumentTable):
    """The network: a shipped name, an import path, or ``session:NAME`` for a Python object."""

    name: str
    seed: int
    outputs: Annotated[int, Field(ge=1)]
    parameters: Annotated[int, Field(ge=1)]


class InputPart(DocumentTable):
    """Form of a record: shape, column names (None if none), and the affine map to the model's input.

    With ``schema_file``, the columns are encoded by that schema.
    """

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    columns: tuple[str, ...] | None
    factor: _Finite
    shift: _Finite
    schema_file: Literal["schema.toml"] | None


class LedgerPart(DocumentTable):
    """End of the run's ledger: number of charges, and digest of the last line."""

    count: Annotated[int, Field(ge=0)]
    digest: _Digest


class Reached(DocumentTable):
    """A test metric.

    A released metric has its 95 % interval for the population, with None for an open end.
    """

    estimate: _Finite | None
    low: _Finite | None = None
    high: _Finite | None = None


class Manifest(DocumentTable):
    """The manifest document.

    Attributes:
        fedveil: version of fedveil that wrote the bundle.
        run: name of the run.
        about: purpose and intended users of the model, in its maker's words.
        model: the network.
        input: form of a record.
        task: task of the model.
        classes: labels in the order of their numbers.
        targets: names of k labels or numbers to predict, in the order of the outputs; empty for any other task.
        rounds: number of completed rounds.
        test: origin of the metrics. "public": exact metrics of a public table, which no guarantee covers. "released":
            metrics of private records, released with noise within the stated epsilon. "private": the test records are
            private and nothing was released, so the bundle has no metrics.
        metrics: metrics after the last round.
        ledger: end of the run's ledger.
        experiment: the resolved experiment without the locations of its data.
    """

    schema_version: Literal[2] = 2
    fedveil: str
    run: str
    about: Annotated[str, Field(max_length=10_000)]
    model: ModelPart
    input: InputPart
    task: Task
    classes: tuple[Label, ...]
    targets: tuple[str, ...] = ()
    rounds: Annotated[int, Field(ge=0)]
    test: Literal["public", "released", "private"]
    metrics: dict[str, Reached]
    ledger: LedgerPart
    experiment: dict[str, Any]

    @field_validator("experiment")
    @classmethod
    def _data_are_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("data", {}), dict):
            raise ValueError("data: not a table of keys")
        return value

    @model_validator(mode="after")
    def _classes_fit(self) -> Self:
        labels, outputs = len(self.classes), self.model.outputs
        several = outputs if self.task in SEVERAL_TARGETS else 0
        if len(self.targets) != several or len(set(self.targets)) != several:
            raise ValueError(
                f"targets: {several} different names are needed, for {outputs} outputs of a {self.task}"
            )
        if self.task != "classification" and labels:
            raise ValueError(f"classes: a {self.task} has none")
        if self.task == "classification" and (
            labels < 2 or outputs not in ((1, 2) if labels == 2 else (labels,))
        ):
            raise ValueError(f"classes: {labels} of them, and the model has {outputs} outputs")
        return self

    def __repr__(self) -> str:
        return (
            f"Manifest(run='{self.run}', model='{self.model.name}', task='{self.task}', rounds={self.rounds})"
        )

    __str__ = __repr__

    def to_bytes(self) -> bytes:
        """Return the content of ``bundle.json``."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the content of ``bundle.json``.

        Raises:
            BundleError: the document has another version or is no manifest; the error names the key.
        """
        document = parse_json(content, NAME, BundleError)
        if isinstance(document, dict) and document.get("schema_version") != 2:
            raise BundleError(
                f"{NAME}: schema version {document.get('schema_version')!r}; this fedveil reads version 2"
            )
        return validate_document(cls, document, NAME, BundleError)

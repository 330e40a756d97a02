"""``bundle.json``: what a bundle's model reads and gives, and how it came to be."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedveil.bundle.archive import BundleError
from fedveil.data.records import Label, Task
from fedveil.files import parse_json
from fedveil.validation import DocumentTable, validate_document

NAME: Final = "bundle.json"
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class ModelPart(DocumentTable):
    """The network: a shipped name, an import path, or ``session:NAME`` for one that was handed over."""

    name: str
    seed: int
    outputs: Annotated[int, Field(ge=1)]
    parameters: Annotated[int, Field(ge=1)]


class InputPart(DocumentTable):
    """What a record is: a shape, names of columns where they had any, and the map to the model's float32.

    With ``schema_file`` the columns are encoded as that schema says.
    """

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    columns: tuple[str, ...] | None
    factor: _Finite
    shift: _Finite
    schema_file: Literal["schema.toml"] | None


class LedgerPart(DocumentTable):
    """Where the run's ledger ended."""

    count: Annotated[int, Field(ge=0)]
    digest: _Digest


class Reached(DocumentTable):
    """A test metric; with its 95 % interval for the population, whose open ends are None, where it was released."""

    estimate: _Finite | None
    low: _Finite | None = None
    high: _Finite | None = None


class Manifest(DocumentTable):
    """The whole document.

    Attributes:
        run: name of the run.
        about: what the model is for, and for whom, in its maker's words.
        task: what is predicted.
        classes: labels in the order of their numbers.
        rounds: complete rounds.
        test: whose records the metrics are of, and why they may be handed on: a public table's, exact and covered by
            no guarantee; people's, released with noise inside of epsilon; or people's without that: there are none.
        metrics: after the last round.
        experiment: the resolved experiment without where its data lay.
    """

    schema_version: Literal[2] = 2
    fedveil: str
    run: str
    about: Annotated[str, Field(max_length=10_000)]
    model: ModelPart
    input: InputPart
    task: Task
    classes: tuple[Label, ...]
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
        """Return the document; there is one way to write it."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the document.

        Raises:
            BundleError: another version, or no manifest; names the key.
        """
        document = parse_json(content, NAME, BundleError)
        if isinstance(document, dict) and document.get("schema_version") != 2:
            raise BundleError(
                f"{NAME}: schema version {document.get('schema_version')!r}; this fedveil reads version 2"
            )
        return validate_document(cls, document, NAME, BundleError)

"""The documents of a run folder as they are read: models that know what each file holds.

A report reads them long after the run, on another machine; a resumed run reads the same ones. An error names the file,
the line and the key, and what would be right there. What is read here imports neither torch nor an experiment.

====================  =====================================================
file                  read as
====================  =====================================================
metrics.jsonl         :class:`RoundRow`, line by line
attempts.jsonl        :class:`FailedAttempt`, line by line
privacy.json          :class:`~fedveil.privacy.statement.Statement`
ledger.jsonl          :class:`~fedveil.privacy.ledger.Entry`, line by line
diagnostics.json      :class:`Diagnostics`
spectrum.json         :class:`Spectrum`
audit.json            :class:`AuditRecord`
====================  =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, Strict, model_validator

from fedveil.errors import RunFolderError
from fedveil.files import LARGEST_FILE, check_schema_version, parse_json, read_content
from fedveil.privacy.statement import Statement
from fedveil.validation import DocumentTable, validate_document

SCHEMA_VERSION: Final = 1
NORM_LEVELS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Levels of the quantiles of contribution norms in a row of metrics.jsonl."""

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject: TypeAlias = Mapping[str, JsonValue]

_Number = Annotated[float, Strict()]
_Count = Annotated[int, Strict(), Field(ge=0)]
_Text = Annotated[str, Strict()]
_Flag = Annotated[bool, Strict()]
_Epsilon = Annotated[
    float, BeforeValidator(lambda value: math.inf if value is None else value), Strict(), Field(ge=0)
]
"""A bound, for which null stands for infinity."""
_Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value), Strict()]
"""A measured number, for which null stands for one that is not finite."""


class Document(DocumentTable):
    """A document or line of a run folder; keys that a reader does not know are left out."""

    model_config = ConfigDict(extra="ignore")


class CommunicationCost(Document):
    """What a channel's messages cost.

    Attributes:
        float32_bytes: what the same numbers would take as float32.
        bits_per_parameter: of all messages.
        limit: the information limit, bits a parameter; None where messages are not compressed to their noise.
        acceptance: share of the quantiser's draws that were accepted; None where nothing is drawn.
    """

    float32_bytes: _Count
    bits_per_parameter: _Number
    limit: _Number | None
    acceptance: _Number | None


class Movement(Document):
    """How far a run has come, in the unit of an update; released models and public numbers alone.

    Attributes:
        parameters: d.
        model: how far the global model is from the initial one.
        noise: how far noise alone moves it, in expectation.
        most: how far people could have moved it; None where that is not bounded.
    """

    parameters: _Count
    model: _Number
    noise: _Number
    most: _Number | None


class RoundRow(Document):
    """One line of metrics.jsonl; round 0 is the initial model.

    Attributes:
        round: its number.
        seconds: what it took.
        test: by metric; empty where the round's model was not evaluated, NaN for a metric that is not defined there.
        epsilon: spent up to and including this round, infinite where nothing is guaranteed.
        contributions: how many there were.
        nonfinite: how many of them were not finite numbers.
        norms: quantiles, at ``NORM_LEVELS``, of their l2 norms before clipping, in the unit of an update.
        clip: the bound that they met.
        movement: up to this round; None where nobody knows what is noise.
        remarks: of round 0: what public facts say against the model and its features.
        clipped: the fraction that was cut down to it.
        bytes_up: what all silos or clients sent to the server; None where nobody counted.
        communication_cost: a channel's messages beside float32.
    """

    round: _Count
    seconds: _Number
    test: Annotated[dict[_Text, _Measured], BeforeValidator(lambda value: {} if value is None else value)]
    epsilon: _Epsilon
    contributions: _Count = 0
    nonfinite: _Count = 0
    norms: Annotated[tuple[_Measured, ...], Field(min_length=7, max_length=7)] | None = None
    clip: _Number | None = None
    movement: Movement | None = None
    remarks: tuple[_Text, ...] = ()
    clipped: _Number | None = None
    bytes_up: _Count | None = None
    communication_cost: CommunicationCost | None = None


class FailedAttempt(Document):
    """One line of attempts.jsonl: an attempt at a round that silos left.

    Attributes:
        round: of the run.
        attempt: at it, from 0.
        silos: who vanished.
        may_have_released: whether its sum may have shown, so that its event is paid for.
    """

    round: _Count
    attempt: _Count
    silos: tuple[_Count, ...]
    may_have_released: _Flag


class Deciles(Document):
    """How many records users have: the deciles 0, 0.1, ..., 1 over those who have any."""

    quantiles: Annotated[tuple[_Measured, ...], Field(min_length=11, max_length=11)]
    users_with_records: _Count
    users: _Count


class Diagnostics(Document):
    """diagnostics.json: how records spread over users and silos (from private records: simulation only)."""

    records_per_user: Deciles
    records_per_silo: tuple[_Count, ...]
    silo_names: tuple[_Text, ...]
    records_sha256: _Text | None = None
    baseline: dict[_Text, _Measured] = Field(default_factory=dict)
    """Every metric of the best constant answer to the test records."""

    @model_validator(mode="after")
    def _one_name_a_silo(self) -> Diagnostics:
        if len(self.silo_names) != len(self.records_per_silo):
            raise ValueError(
                f"silo_names: must have {len(self.records_per_silo)} names, one for each of records_per_silo"
            )
        return self


class Spectrum(Document):
    """spectrum.json: magnitude by frequency of how far the model moved; computed from released models alone."""

    frequencies: tuple[_Measured, ...]
    magnitudes: tuple[_Measured, ...]

    @model_validator(mode="after")
    def _pairs(self) -> Spectrum:
        if len(self.frequencies) != len(self.magnitudes):
            raise ValueError(f"magnitudes: must have {len(self.frequencies)} numbers, one for each frequency")
        return self


class Inference(Document):
    """How well membership inference does: area under the curve, its interval, pairs of false and true positives."""

    auc: _Number
    low: _Number
    high: _Number
    confidence: _Number
    true_positive_rates: tuple[tuple[_Number, _Number], ...]


class LowerBound(Document):
    """A lower bound on epsilon, and the guesses about canaries that it comes from."""

    epsilon: _Number
    confidence: _Number
    canaries: _Count
    guesses: _Count
    right: _Count


class AuditRecord(Document):
    """audit.json: what attacks on the run showed.

    Attributes:
        inference: membership inference on the last model.
        bound: on epsilon; None where it was not asked for.
        refuted: whether the run claims less than the bound.
    """

    inference: Inference
    bound: LowerBound | None
    refuted: _Flag


DocumentT = TypeVar("DocumentT", bound=Document)


def read_document(path: Path, kind: type[DocumentT]) -> DocumentT:
    """Read a JSON document of a run folder.

    Raises:
        RunFolderError: missing, damaged, or of another schema version; names file and key.
    """
    return validate_as(read_object(path), path, kind)


def read_statement(path: Path) -> Statement:
    """Read privacy.json, whose words must be those of its values.

    Raises:
        RunFolderError: missing, damaged, of another version, or it contradicts itself.
    """
    return Statement.from_json(parse_json(read_content(path, RunFolderError), path, RunFolderError), path)


def read_object(path: Path) -> JsonObject:
    """Read a JSON object of this schema version, whatever its keys.

    Raises:
        RunFolderError: missing, damaged, or of another schema version.
    """
    content = read_content(path, RunFolderError, largest=LARGEST_FILE)
    return check_schema_version(parse_json(content, path, RunFolderError), path, SCHEMA_VERSION)


def read_lines(path: Path, kind: type[DocumentT]) -> tuple[tuple[DocumentT, ...], bool]:
    """Read a file of lines, and whether an incomplete last line was left out; no line if there is no file.

    Raises:
        RunFolderError: a line is damaged or of another schema version; names file, line and key.
    """
    lines, torn = _lines(path)
    return tuple(read_line(line, place, kind)[0] for place, line in lines), torn


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as they are written; each of them is a :class:`RoundRow`.

    Raises:
        RunFolderError: as :func:`read_lines`.
    """
    return [read_line(line, place, RoundRow)[1] for place, line in _lines(path)[0]]


def read_line(line: bytes, place: object, kind: type[DocumentT]) -> tuple[DocumentT, dict[str, Any]]:
    """Read one line; return it with what is written there.

    Raises:
        RunFolderError: it is damaged or of another schema version; names place and key.
    """
    value = check_schema_version(parse_json(line, place, RunFolderError), place, SCHEMA_VERSION)
    return validate_as(value, place, kind), value


def _lines(path: Path) -> tuple[list[tuple[str, bytes]], bool]:
    """Return the complete lines of a file with their places, and whether something follows the last newline."""
    if not path.exists():
        return [], False
    *lines, rest = read_content(path, RunFolderError, largest=LARGEST_FILE).split(b"\n")
    return [(f"{path}, line {number},", line) for number, line in enumerate(lines, start=1)], rest != b""


def validate_as(value: JsonObject, place: object, kind: type[DocumentT]) -> DocumentT:
    """Return an object as a document of its kind.

    Raises:
        RunFolderError: a key is missing or has another form; names place and key, and what would be right.
    """
    return validate_document(kind, value, f"{place} is damaged", RunFolderError)

"""Read the documents of a run folder into validated models.

A report reads them long after the run, on another machine; a resumed run reads the same ones. An error names the
file, the line and the key, and gives the expected value. This module imports neither torch nor an experiment.

====================  =====================================================
file                  read as
====================  =====================================================
metrics.jsonl         :class:`RoundRow`, line by line
attempts.jsonl        :class:`FailedAttempt`, line by line
privacy.json          :class:`~fedveil.privacy.statement.Statement`
ledger.jsonl          :class:`~fedveil.privacy.ledger.Entry`, line by line
diagnostics.json      :class:`Diagnostics`
spectrum.json         :class:`Spectrum`
public_test.json      :class:`PublicTest`
audit.json            :class:`AuditRecord`
====================  =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, Strict, model_validator

from fedveil.errors import RunFolderError
from fedveil.files import LARGEST_FILE, check_schema_version, parse_json, read_content
from fedveil.line_log import LineLog
from fedveil.privacy.accountant import load_event_types
from fedveil.privacy.statement import Statement
from fedveil.validation import DocumentTable, validate_document

SCHEMA_VERSION: Final = 1
EXPERIMENT_VERSION: Final = 2
"""Version of ``experiment.toml``."""
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
"""A bound; null in JSON stands for infinity."""
_Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value), Strict()]
"""A measured number; null in JSON stands for a number that is not finite."""


class Document(DocumentTable):
    """A document or line of a run folder; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


class CommunicationCost(Document):
    """Cost of a channel's messages.

    Attributes:
        float32_bytes: bytes of the same numbers in float32.
        bits_per_parameter: mean over all messages.
        limit: information limit in bits per parameter; None if messages are not compressed to their noise.
        acceptance: fraction of the quantiser's draws that were accepted; None if the quantiser draws nothing.
    """

    float32_bytes: _Count
    bits_per_parameter: _Number
    limit: _Number | None
    acceptance: _Number | None


class Movement(Document):
    """Displacement of a run's model in the unit of an update, from public numbers.

    Attributes:
        parameters: d.
        model: distance of the released global model from the initial one.
        noise: expected displacement by noise alone.
        most: largest displacement that the users could cause; None if it is not bounded.
    """

    parameters: _Count
    model: _Number
    noise: _Number
    most: _Number | None


class RoundRow(Document):
    """One line of metrics.jsonl; round 0 is the initial model.

    Attributes:
        round: number of the round.
        seconds: wall-clock seconds of the round.
        test: test metrics by name; empty if the round's model was not evaluated, NaN for a metric that is not
            defined.
        epsilon: spent up to and including this round; infinite if nothing is guaranteed.
        contributions: number of contributions.
        nonfinite: number of contributions that were not finite numbers.
        norms: quantiles at ``NORM_LEVELS`` of the l2 norms before clipping, in the unit of an update.
        clip: the bound of an update.
        movement: displacement up to this round; None if the noise on the model is unknown.
        remarks: for round 0: remarks on the model and its features from public facts.
        clipped: fraction of the updates that the bound shortened.
        bytes_up: bytes that all silos or clients sent to the server; None if not counted.
        communication_cost: cost of a channel's messages against float32; None if not counted.
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
    """One line of attempts.jsonl: an attempt at a round during which silos vanished.

    Attributes:
        round: number of the round.
        attempt: number of the attempt at the round, from 0.
        silos: numbers of the silos that vanished.
        may_have_released: whether the sum may have been opened, so that the attempt's charge is spent.
    """

    round: _Count
    attempt: _Count
    silos: tuple[_Count, ...]
    may_have_released: _Flag


class Deciles(Document):
    """Deciles 0, 0.1, ..., 1 of the records per user, with 0 for users without any; numbers of users."""

    quantiles: Annotated[tuple[_Measured, ...], Field(min_length=11, max_length=11)]
    users_with_records: _Count
    users: _Count


class Diagnostics(Document):
    """diagnostics.json: distribution of private records over users and silos; simulation only."""

    records_per_user: Deciles
    records_per_silo: tuple[_Count, ...]
    silo_names: tuple[_Text, ...]
    records_sha256: _Text | None = None
    baseline: dict[_Text, _Measured] = Field(default_factory=dict)
    """Every metric of the best constant prediction on the test records."""

    @model_validator(mode="after")
    def _one_name_a_silo(self) -> Diagnostics:
        """Check that every silo has a name."""
        if len(self.silo_names) != len(self.records_per_silo):
            raise ValueError(
                f"silo_names: must have {len(self.records_per_silo)} names, one for each of records_per_silo"
            )
        return self


class Spectrum(Document):
    """spectrum.json: magnitude of the model's displacement by frequency; from released models only."""

    frequencies: tuple[_Measured, ...]
    magnitudes: tuple[_Measured, ...]

    @model_validator(mode="after")
    def _pairs(self) -> Spectrum:
        """Check that every frequency has a magnitude."""
        if len(self.frequencies) != len(self.magnitudes):
            raise ValueError(f"magnitudes: must have {len(self.frequencies)} numbers, one for each frequency")
        return self


class CalibrationBin(Document):
    """Mean predicted probability, observed fraction, and weight of the records of one bin."""

    predicted: _Number
    observed: _Number
    weight: _Number


class PublicTest(Document):
    """public_test.json: the released model on a public test table.

    The file exists only if the test records are public. Without it, exact metrics are those of private records.

    Attributes:
        records: number of test records.
        classes: names of the classes.
        confusion: weight of the records of each class (row) that were predicted as each class (column).
        roc: (false, true) positive rates of the second of two classes.
        calibration: bins of the predicted probability of the second of two classes.
    """

    records: _Count
    classes: tuple[_Text, ...] = ()
    confusion: tuple[tuple[_Number, ...], ...] = ()
    roc: tuple[tuple[_Number, _Number], ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()

    @model_validator(mode="after")
    def _square(self) -> PublicTest:
        """Check that the confusion counts have a row and a column for every class."""
        if {len(self.confusion), *map(len, self.confusion)} - {len(self.classes)}:
            raise ValueError(f"confusion: must have {len(self.classes)} rows and columns, one for each class")
        return self


class Inference(Document):
    """Result of membership inference: area under the curve, interval, (false, true) positive rates."""

    auc: _Number
    low: _Number
    high: _Number
    confidence: _Number
    true_positive_rates: tuple[tuple[_Number, _Number], ...]


class LowerBound(Document):
    """A lower bound on epsilon, with the guesses about canaries from which it follows."""

    epsilon: _Number
    confidence: _Number
    canaries: _Count
    guesses: _Count
    right: _Count


class AuditRecord(Document):
    """audit.json: results of the attacks on the run.

    Attributes:
        inference: membership inference on the last model.
        bound: lower bound on epsilon; None if it was not requested.
        refuted: whether the claimed epsilon is below the bound.
        accuracy_bound: largest probability, by the claim, that an attacker is right about one unit.
        membership_bound: the same by 1/2 + epsilon / 4 + delta.
    """

    inference: Inference
    bound: LowerBound | None
    refuted: _Flag
    accuracy_bound: _Number | None = None
    membership_bound: _Number | None = None


DocumentT = TypeVar("DocumentT", bound=Document)


def read_document(path: Path, kind: type[DocumentT]) -> DocumentT:
    """Read a JSON document of a run folder.

    Raises:
        RunFolderError: missing, damaged, or of another schema version; the message names file and key.
    """
    return validate_as(read_object(path), path, kind)


def read_statement(path: Path) -> Statement:
    """Read privacy.json, and check that its sentences follow from its values.

    Raises:
        RunFolderError: missing, damaged, of another version, or contradictory.
    """
    document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
    load_event_types(document)
    return Statement.from_json(document, path)


def read_object(path: Path) -> JsonObject:
    """Read a JSON object of this schema version with any keys.

    Raises:
        RunFolderError: missing, damaged, or of another schema version.
    """
    content = read_content(path, RunFolderError, largest=LARGEST_FILE)
    return check_schema_version(parse_json(content, path, RunFolderError), path, SCHEMA_VERSION)


def read_lines(path: Path, kind: type[DocumentT]) -> tuple[tuple[DocumentT, ...], bool]:
    """Read a file of lines; return the documents and whether an incomplete last line was left out.

    A missing file has no lines. A crash during an append can leave an incomplete last line.

    Raises:
        RunFolderError: a line is damaged or of another schema version; the message names file, line and key.
    """
    lines, torn = LineLog(path).read()
    return tuple(document for document, _ in _read_each(path, lines, kind)), torn != b""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the raw lines of metrics.jsonl; each is a valid :class:`RoundRow`.

    Raises:
        RunFolderError: as :func:`read_lines`.
    """
    return [row for _, row in _read_each(path, LineLog(path).read().complete, RoundRow)]


def _read_each(
    path: Path, lines: Sequence[bytes], kind: type[DocumentT]
) -> Iterator[tuple[DocumentT, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        yield read_line(line, f"{path}, line {number},", kind)


def read_line(line: bytes, place: object, kind: type[DocumentT]) -> tuple[DocumentT, dict[str, Any]]:
    """Read one line; return it as a document and as raw JSON.

    Raises:
        RunFolderError: the line is damaged or of another schema version; the message names place and key.
    """
    value = check_schema_version(parse_json(line, place, RunFolderError), place, SCHEMA_VERSION)
    return validate_as(value, place, kind), value


def validate_as(value: JsonObject, place: object, kind: type[DocumentT]) -> DocumentT:
    """Validate a JSON object as a document of a kind.

    Raises:
        RunFolderError: a key is missing or has another form; the message names place, key and the expected value.
    """
    return validate_document(kind, value, f"{place} is damaged", RunFolderError)

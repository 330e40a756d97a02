"""A run folder, read back: the only way a report learns anything about a run.

Nothing here imports the engine: a report can be made on another machine, long after the run, from the files
alone.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fedveil.errors import RunFolderError
from fedveil.files import LARGEST_FILE, parse_json, parse_toml, read_text

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject: TypeAlias = Mapping[str, JsonValue]

SCHEMA_VERSION = 1
STATEMENT_VERSION = 2  # of privacy.json, whose lines name a role
NORM_LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Levels of the quantiles of contribution norms in a row of metrics.jsonl."""

_SEED_SUFFIX = re.compile(r"[-_. ]+seed[-_.= ]*\d+$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class CommunicationData:
    """What a channel's messages cost; `limit` in bits a parameter, `acceptance` the share of draws accepted.

    Both are None where messages are not compressed to their noise.
    """

    float32_bytes: int
    bits_per_parameter: float
    limit: float | None
    acceptance: float | None


@dataclass(frozen=True, kw_only=True)
class RoundRow:
    """One line of metrics.jsonl; round 0 is the initial model.

    `test` is empty where the round's model was not evaluated; a metric that is not defined there is NaN.
    `epsilon` is the privacy spent up to and including this round, `math.inf` where nothing is guaranteed.
    `norms` are the quantiles, at `NORM_LEVELS`, of the contributions' l2 norms before clipping, in the unit
    of an update; `clipped` is the fraction of contributions that met the bound `clip`. `bytes_up` is what all
    silos or clients sent to the server, None where nobody counted; `uplink` compares a channel's messages
    with float32.
    """

    round: int
    seconds: float
    test: Mapping[str, float]
    epsilon: float
    contributions: int
    nonfinite: int
    norms: tuple[float, ...] | None
    clip: float | None
    clipped: float | None
    bytes_up: int | None
    communication_cost: CommunicationData | None


@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """A party or coalition, what it sees, and the epsilon against it (`math.inf`: nothing is guaranteed)."""

    role: str
    party: str
    sees: str
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A published figure that was reproduced, its value (`math.inf` for infinity), and its theory's gap."""

    name: str
    value: float
    gap: str


@dataclass(frozen=True, kw_only=True)
class StatementData:
    """privacy.json: the statement's own words and what it is made of.

    `epsilon` and the values of `epsilons` (by accountant) are `math.inf` where nothing is guaranteed.
    `others` are the fields that have no place of their own here, so that a report never hides one.
    """

    sentences: tuple[str, ...]
    unit: str
    adjacency: str
    epsilon: float
    delta: float
    accountant: str
    epsilons: tuple[tuple[str, float], ...]
    mechanisms: tuple[str, ...]
    trust: tuple[Disclosure, ...]
    randomness: str
    uncovered: tuple[str, ...]
    as_published: tuple[PublishedFigure, ...]
    reasons: tuple[str, ...]
    others: JsonObject

    @property
    def guaranteed(self) -> bool:
        """Whether the statement claims a finite epsilon."""
        return math.isfinite(self.epsilon)

    @property
    def to_server(self) -> float:
        """The epsilon against the server; `math.inf` where no line speaks of it."""
        return next((line.epsilon for line in self.trust if line.role == "server"), math.inf)


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """diagnostics.json: how records spread over users and silos (from private records: simulation only).

    `records_per_user` holds the deciles 0, 0.1, ..., 1 of records per user, over users who have any.
    """

    records_per_user: tuple[float, ...]
    users_with_records: int
    users: int
    records_per_silo: tuple[int, ...]
    silo_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SpectrumData:
    """spectrum.json: magnitude by frequency of how far the model moved; computed from released models alone."""

    frequencies: tuple[float, ...]
    magnitudes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AuditData:
    """audit.json: what attacks on the run showed.

    `rates` are pairs of a false and a true positive rate. `epsilon` is the lower bound, None where it was not asked
    for; `refuted` tells that the run claims less than the bound.
    """

    auc: float
    low: float
    high: float
    confidence: float
    rates: tuple[tuple[float, float], ...]
    epsilon: float | None
    canaries: int
    guesses: int
    right: int
    refuted: bool


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything a report shows of one run.

    `interrupted_line` tells that metrics.jsonl ended in the middle of a line: the run was still writing, or
    was killed.
    """

    folder: Path
    experiment: JsonObject
    experiment_toml: str
    statement: StatementData
    rounds: tuple[RoundRow, ...]
    diagnostics: Diagnostics | None
    environment: JsonObject | None
    spectrum: SpectrumData | None
    audit: AuditData | None
    interrupted_line: bool

    @property
    def name(self) -> str:
        """The experiment's name, or the folder's where the experiment has none."""
        name = self.experiment.get("name")
        return name if isinstance(name, str) and name else self.folder.resolve().name

    @property
    def variant(self) -> str:
        """The name without its seed (`digits` of `digits-seed3`), shared by runs that differ only by seed."""
        return _SEED_SUFFIX.sub("", self.name) or self.name

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the test metrics, in the order of the first row that has any."""
        return next((tuple(row.test) for row in self.rounds if row.test), ())


def load_run(folder: Path) -> RunData:
    """Read a run folder.

    A run in progress is read as far as it is written: an incomplete last line of metrics.jsonl is left out.

    Raises:
        RunFolderError: a file is missing, damaged or of another schema version; the message names it.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a run folder: there is no such folder.")
    toml = _text(folder / "experiment.toml")
    experiment = _experiment(toml, folder / "experiment.toml")
    rounds, interrupted = _rounds(folder / "metrics.jsonl")
    diagnostics = folder / "diagnostics.json"
    environment = folder / "environment.json"
    spectrum, audit = folder / "spectrum.json", folder / "audit.json"
    return RunData(
        folder=folder,
        experiment=experiment,
        experiment_toml=toml,
        statement=_statement(folder / "privacy.json"),
        rounds=rounds,
        diagnostics=_diagnostics(diagnostics) if diagnostics.exists() else None,
        environment=_document(environment).fields if environment.exists() else None,
        spectrum=_spectrum(spectrum) if spectrum.exists() else None,
        audit=_audit(audit) if audit.exists() else None,
        interrupted_line=interrupted,
    )


@dataclass(frozen=True)
class _Object:
    """A JSON object that knows where it stands, so that every complaint names the place."""

    where: str
    fields: JsonObject

    def fail(self, key: str, wanted: str) -> RunFolderError:
        found = "is missing" if key not in self.fields else "has another form"
        return RunFolderError(f"{self.where} is damaged: {key!r} {found}; it should be {wanted}.")

    def number(self, key: str) -> float:
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.fields.get(key) is None else self.number(key)

    def bound(self, key: str) -> float:
        """A non-negative number for which null stands for infinity."""
        if key in self.fields and self.fields[key] is None:
            return math.inf
        number = self.number(key)
        if not number >= 0:
            raise self.fail(key, "a non-negative number, or null for infinity")
        return number

    def count(self, key: str) -> int:
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(key, "a non-negative whole number")
        return value

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "a text")
        return value

    def child(self, key: str) -> "_Object":
        value = self.fields.get(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return _Object(f"{self.where}, {key}", value)

    def children(self, key: str) -> list["_Object"]:
        items = self.items(key)
        objects = [_Object(f"{self.where}, {key},", item) for item in items if isinstance(item, Mapping)]
        if len(objects) != len(items):
            raise self.fail(key, "a list of objects")
        return objects

    def items(self, key: str) -> Sequence[JsonValue]:
        value = self.fields.get(key)
        if not isinstance(value, list):
            raise self.fail(key, "a list")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Exactly `length` numbers, null standing for a number that is not finite."""
        values = self.items(key)
        numbers = tuple(
            math.nan if value is None else float(value)
            for value in values
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        )
        if not len(numbers) == len(values) == length:
            raise self.fail(key, f"a list of {length} numbers")
        return numbers

    def counts(self, key: str) -> tuple[int, ...]:
        values = self.items(key)
        counts = tuple(value for value in values if isinstance(value, int) and value >= 0)
        if len(counts) != len(values):
            raise self.fail(key, "a list of non-negative whole numbers")
        return counts

    def texts(self, key: str) -> tuple[str, ...]:
        texts = tuple(value for value in self.items(key) if isinstance(value, str))
        if len(texts) != len(self.items(key)):
            raise self.fail(key, "a list of texts")
        return texts


def _text(path: Path) -> str:
    if not path.exists():
        raise RunFolderError(
            f"{path} is missing: a run folder holds experiment.toml, metrics.jsonl and privacy.json."
        )
    return read_text(path, RunFolderError, largest=LARGEST_FILE)


def _parse(text: str, where: str, version: int = SCHEMA_VERSION) -> _Object:
    """One JSON object of a schema version."""
    value = parse_json(text, where, RunFolderError)
    if not isinstance(value, dict):
        raise RunFolderError(f"{where} is damaged: it should hold a JSON object.")
    _check_version(value, where, version)
    return _Object(where, value)


def _check_version(fields: JsonObject, where: str, wanted: int = SCHEMA_VERSION) -> None:
    version = fields.get("schema_version")
    if version != wanted:
        raise RunFolderError(
            f"{where} has schema_version {version!r}, but this version of fedveil reads {wanted}: "
            "read it with the version of fedveil that wrote it (environment.json names it)."
        )


def _experiment(toml: str, path: Path) -> JsonObject:
    experiment = parse_toml(toml, path, RunFolderError)
    _check_version(experiment, str(path))
    return experiment


def _document(path: Path, version: int = SCHEMA_VERSION) -> _Object:
    return _parse(_text(path), str(path), version)


def _rounds(path: Path) -> tuple[tuple[RoundRow, ...], bool]:
    """The rows of metrics.jsonl, and whether an incomplete last line was left out."""
    text = _text(path)
    lines = text.split("\n")
    interrupted = lines.pop() != ""  # what follows the last newline is unfinished
    rows: list[RoundRow] = []
    for number, line in enumerate(lines, start=1):
        row = _round(_parse(line, f"{path}, line {number},"))
        if rows and row.round <= rows[-1].round:
            raise RunFolderError(
                f"{path}, line {number}, is damaged: round {row.round} follows round {rows[-1].round}."
            )
        rows.append(row)
    return tuple(rows), interrupted


def _round(row: _Object) -> RoundRow:
    """One row; round 0 has no contributions, and a round that was not evaluated has null for `test`."""
    test = _Object("", {}) if row.fields.get("test") is None else row.child("test")
    return RoundRow(
        round=row.count("round"),
        seconds=row.number("seconds"),
        test={name: math.nan if test.fields[name] is None else test.number(name) for name in test.fields},
        epsilon=row.bound("epsilon"),
        contributions=row.count("contributions") if "contributions" in row.fields else 0,
        nonfinite=row.count("nonfinite") if "nonfinite" in row.fields else 0,
        norms=None if row.fields.get("norms") is None else row.numbers("norms", len(NORM_LEVELS)),
        clip=row.optional_number("clip"),
        clipped=row.optional_number("clipped"),
        bytes_up=row.count("bytes_up") if row.fields.get("bytes_up") is not None else None,
        communication_cost=None
        if row.fields.get("communication_cost") is None
        else _communication_cost(row.child("communication_cost")),
    )


def _communication_cost(communication_cost: _Object) -> CommunicationData:
    return CommunicationData(
        float32_bytes=communication_cost.count("float32_bytes"),
        bits_per_parameter=communication_cost.number("bits_per_parameter"),
        limit=communication_cost.optional_number("limit"),
        acceptance=communication_cost.optional_number("acceptance"),
    )


def _statement(path: Path) -> StatementData:
    if not path.exists():
        raise RunFolderError(
            f"{path} is missing: a run writes its privacy statement when it ends, and there is no report "
            f"without one; end the run with `fedveil resume {path.parent}`."
        )
    document = _document(path, STATEMENT_VERSION)
    epsilons = document.child("epsilons")
    known = {field.name for field in dataclasses.fields(StatementData)} | {"schema_version"}
    return StatementData(
        sentences=document.texts("sentences"),
        unit=document.text("unit"),
        adjacency=document.text("adjacency"),
        epsilon=document.bound("epsilon"),
        delta=document.number("delta"),
        accountant=document.text("accountant"),
        epsilons=tuple((name, epsilons.bound(name)) for name in epsilons.fields),
        mechanisms=document.texts("mechanisms"),
        trust=tuple(
            Disclosure(
                role=item.text("role"),
                party=item.text("party"),
                sees=item.text("sees"),
                epsilon=item.bound("epsilon"),
            )
            for item in document.children("trust")
        ),
        randomness=document.text("randomness"),
        uncovered=document.texts("uncovered"),
        as_published=tuple(
            PublishedFigure(name=item.text("name"), value=item.bound("value"), gap=item.text("gap"))
            for item in document.children("as_published")
        ),
        reasons=document.texts("reasons"),
        others={key: value for key, value in document.fields.items() if key not in known},
    )


def _diagnostics(path: Path) -> Diagnostics:
    document = _document(path)
    users = document.child("records_per_user")
    silos = document.counts("records_per_silo")
    names = document.texts("silo_names")
    if len(names) != len(silos):
        raise document.fail("silo_names", f"a list of {len(silos)} names, one for each of records_per_silo")
    return Diagnostics(
        records_per_user=users.numbers("quantiles", 11),
        users_with_records=users.count("users_with_records"),
        users=users.count("users"),
        records_per_silo=silos,
        silo_names=names,
    )


def _spectrum(path: Path) -> SpectrumData:
    document = _document(path)
    count = len(document.items("frequencies"))
    return SpectrumData(
        frequencies=document.numbers("frequencies", count), magnitudes=document.numbers("magnitudes", count)
    )


def _audit(path: Path) -> AuditData:
    document = _document(path)
    inference = document.child("inference")
    rates = [pair for pair in inference.items("true_positive_rates") if isinstance(pair, list)]
    bound = None if document.fields.get("bound") is None else document.child("bound")
    return AuditData(
        auc=inference.number("auc"),
        low=inference.number("low"),
        high=inference.number("high"),
        confidence=inference.number("confidence"),
        rates=tuple((float(rate[0]), float(rate[1])) for rate in rates),
        epsilon=None if bound is None else bound.number("epsilon"),
        canaries=0 if bound is None else bound.count("canaries"),
        guesses=0 if bound is None else bound.count("guesses"),
        right=0 if bound is None else bound.count("right"),
        refuted=document.fields.get("refuted") is True,
    )

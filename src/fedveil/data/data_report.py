"""Report about tables for their owner ONLY: exact figures of private records.

Not claimed: privacy. The figures carry no noise, no guarantee covers them, and they are as private as the tables. The
report repeats no value of a cell: rows are compared by hashes, and an id that is written in two ways is counted, not
shown. A report over the tables of one silo covers that silo only. The silos must check before a run that no person has
different ids at two silos.

Findings are sentences about what weakens a guarantee, harms a model, or prevents a run. They too contain counts alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float64, Int64, UInt64

from fedveil.data.columns import Column, Numbers, Places, State, concatenate_columns, numbers_of, places_of
from fedveil.data.identities import identifies_user, index_names, near_duplicate_ids, rounded
from fedveil.data.memory_tables import TableFile
from fedveil.data.schema import Amount, Category, Date, Feature, Label, Labels, Number, Schema, Survival
from fedveil.data.table_reader import EVENTS, TableReader
from fedveil.data.tables import check_files
from fedveil.data.target_leakage import (
    BY_CHANCE,
    determines_class,
    has_outcome_name,
    is_linear_copy,
    leakage_reason,
)

# --- all records, without refusing a cell ---


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeTable:
    """All records of several files, one file after the other.

    Attributes:
        schema: declaration of the columns.
        user: (n,) user ids as they are written; None for a record without an id.
        silo: (n,) silo ids as they are written; None for a record without a silo.
        columns: feature and target columns by name.
        rows: (n,) hash of all columns of a record, including silo and user.
        contents: (n,) hash of the features and the target of a record.
        otherwise: number of invalid cells, by column, that differ from a declared value only in case.
    """

    schema: Schema
    user: list[str | None]
    silo: list[str | None]
    columns: dict[str, Column]
    rows: UInt64[np.ndarray, "n"]
    contents: UInt64[np.ndarray, "n"]
    otherwise: Mapping[str, int]

    def __len__(self) -> int:
        """Return n, the number of records."""
        return len(self.user)


def read_whole(schema: Schema, files: Sequence[TableFile]) -> WholeTable:
    """Read all columns of a schema without refusing a cell.

    Raises:
        ConfigError: two files would be one silo, which a run refuses.
        DataError: a file cannot be read or lacks a column.
    """
    check_files(schema, files)
    user: list[str | None] = []
    silo: list[str | None] = []
    parts: dict[str, list[Column]] = {name: [] for name in (*schema.target_columns, *schema.features)}
    texts: dict[str, list[pa.Array]] = {name: [] for name in schema.columns}
    otherwise: Counter[str] = Counter()
    for path in files:
        reader = TableReader.by_schema(schema, path, schema.columns, tolerant=schema.bins_invalid)
        for name in schema.columns:
            text, missing = reader.text(name)
            texts[name].append(pc.if_else(pa.array(missing), None, text))
        user += reader.ids(schema.user)
        silo += [path.stem] * reader.n_records if schema.silo is None else reader.ids(schema.silo)
        for name, pieces in parts.items():
            column = _column(schema, reader, name)
            if declared := _declared(schema, name):
                otherwise[name] += _other_case(column, texts[name][-1], declared)
            pieces.append(column)
    hashes = {
        name: _hashed(pa.concat_arrays(cells), position)
        for position, (name, cells) in enumerate(texts.items(), 1)
    }
    contents = [hashes[name] for name in schema.read_columns(parts)]
    return WholeTable(
        schema=schema,
        user=user,
        silo=silo,
        columns={name: concatenate_columns(pieces) for name, pieces in parts.items()},
        rows=_summed(list(hashes.values())),
        contents=_summed(contents),
        otherwise=otherwise,
    )


def _column(schema: Schema, reader: TableReader, name: str) -> Column:
    """Read one column as categories, numbers or days, without refusing a cell."""
    feature: Feature | None = schema.features.get(name)
    if declared := _declared(schema, name):
        return places_of(reader, name, declared)
    if not isinstance(feature, Date):
        return _as_runs_read(schema, name, numbers_of(reader, name))
    days, missing = reader.dates(name, feature.format)
    state = np.where(missing, State.MISSING, np.where(np.isnan(days), State.INVALID, State.VALID))
    return Numbers(values=np.where(state == State.VALID, days, 0.0), state=state.astype(np.int8))


def _as_runs_read(schema: Schema, name: str, numbers: Numbers) -> Numbers:
    """Mark as invalid the numbers that a run refuses: infinities, and times and entries below 0."""
    values, target = numbers.values, schema.target
    wrong = ~np.isfinite(values)
    if isinstance(target, Survival) and name in (target.time, target.entry):
        wrong |= values < 0
    state = np.where((numbers.state == State.VALID) & wrong, State.INVALID, numbers.state).astype(np.int8)
    return Numbers(values=np.where(state == State.VALID, values, 0.0), state=state)


def _declared(schema: Schema, name: str) -> tuple[str, ...]:
    """Return the declared values of a column; empty for a number or a date."""
    feature = schema.features.get(name)
    if isinstance(feature, Category):
        return feature.categories
    target = schema.target
    labels = isinstance(target, Labels) and name in target.columns
    if labels or (isinstance(target, Survival) and name == target.event):
        return EVENTS
    return target.classes if isinstance(target, Label) and name == target.column else ()


def _other_case(column: Column, cells: pa.Array, declared: Sequence[str]) -> int:
    """Return the number of invalid cells that equal a declared value except for case."""
    lowered = pa.array([value.lower() for value in declared], pa.string())
    same = np.asarray(pc.fill_null(pc.is_in(pc.utf8_lower(cells), lowered), False), dtype=np.bool_)
    return int((same & (column.state == State.INVALID)).sum())


def _hashed(cells: pa.Array, position: int) -> UInt64[np.ndarray, "n"]:
    """Return a 64-bit hash of each cell: a uniform random word per distinct text of the column.

    The hash of a row is the sum of its cells' hashes modulo 2^64 (:func:`_summed`). Two unequal rows have equal sums
    with probability 2^-64.
    """
    # `position` seeds each column separately. With one seed for all columns, two rows that exchange the values of two
    # columns could have equal sums.
    coded = cells.dictionary_encode(null_encoding="encode")
    random = np.random.default_rng((7, position)).integers(
        0, 1 << 64, max(1, len(coded.dictionary)), dtype=np.uint64
    )
    chosen: UInt64[np.ndarray, "n"] = random[coded.indices.to_numpy(zero_copy_only=False)]
    return chosen


def _summed(hashes: list[UInt64[np.ndarray, "n"]]) -> UInt64[np.ndarray, "n"]:
    """Return the sum of the hashes of every row, modulo 2^64."""
    total: UInt64[np.ndarray, "n"] = np.stack(hashes).sum(axis=0, dtype=np.uint64)
    return total


# --- figures ---

# --- findings ---

Bears = Literal["guarantee", "model", "run"]
MOSTLY_MISSING: Final = 0.5
RARE: Final = 0.4
"""Share of the rarest class, as a multiple of an equal share, below which accuracy is not informative."""

FEWEST_COLUMNS: Final = 5
"""Smallest number of columns for which equal records of two people are not plausible as a coincidence."""

_MENDED: Final = {
    "number": "marks in numbers (format.decimal, .thousands), a missing value (missing_values), or an infinity",
    "survival": "marks in numbers (format.decimal, .thousands), a time below 0, an event that is not 0 or 1",
    "date": "its format",
    "category": "a category that is not declared, or another spelling of one (also)",
    "label": "a class that is not declared, or another spelling of one (also)",
}
"""Usual causes of invalid cells, by the kind of a column."""

OFTEN_CLIPPED: Final = 0.05
LARGE_SHARE: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class DataFinding:
    """A fact that the owner of the tables should know before a run.

    Attributes:
        bears_on: "guarantee", "model", or "run" (the run would be refused).
        where: the column, or another subject such as "records".
        found: the observation, with its count.
        effect: its consequence and the remedy.
    """

    bears_on: Bears
    where: str
    found: str
    effect: str


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """Statistics of a column; shares are of all records, and 0 without records.

    Attributes:
        name: name of the column.
        kind: "number", "date", "category", or the kind of the target.
        missing: share of missing cells.
        invalid: share of cells that are no number, no date or undeclared.
        outside: share of valid cells beyond the declared bounds.
        distinct: number of distinct valid values.
    """

    name: str
    kind: str
    missing: float
    invalid: float
    outside: float
    distinct: int


def user_findings(tables: WholeTable, people: set[str]) -> Iterator[DataFinding]:
    """Yield findings about ids and silos, on which the guarantee for one person rests."""
    user = tables.schema.user
    nameless = sum(user_id is None for user_id in tables.user)
    if nameless:
        yield DataFinding(
            bears_on="run",
            where=user,
            found=f"records without an id: {nameless}",
            effect="a run refuses them, because it bounds all records of a person together; leave them out",
        )
    nowhere = sum(silo is None for silo in tables.silo)
    if nowhere:
        yield DataFinding(
            bears_on="run",
            where=str(tables.schema.silo),
            found=f"records that name no silo: {nowhere}",
            effect="a run refuses them; fill the column in, or leave the records out",
        )
    forms = near_duplicate_ids(people)
    if forms:
        yield DataFinding(
            bears_on="guarantee",
            where=user,
            found=f"{sum(map(len, forms))} ids differ only in how they are written (leading zeros, case, blanks, "
            f"marks, exponents) and may belong to {len(forms)}",
            effect="each spelling counts as a person of its own, so someone with k spellings is protected only as a "
            "group of k people is; write every id in one way, at every silo",
        )
    if several := rounded(people):
        yield DataFinding(
            bears_on="guarantee",
            where=user,
            found=f"ids in exponent notation, as 1E+12, in which programs round large numbers: {len(several)}",
            effect="several people may have been written as one of them, and one person elsewhere as a whole number: "
            "export the ids again, as text",
        )
    if len(people) > tables.schema.n_users:
        yield DataFinding(
            bears_on="run",
            where="n_users",
            found=f"{len(people)} people have records, and {tables.schema.n_users} are declared",
            effect="a run refuses this: declare the public number of all people, with or without records",
        )
    counts = np.unique([user_id for user_id in tables.user if user_id is not None], return_counts=True)[1]
    if len(counts) > 1 and counts.max() > LARGE_SHARE * len(tables):
        yield DataFinding(
            bears_on="model",
            where=user,
            found=f"one person has {counts.max() / len(tables):.0%} of the records",
            effect="that contribution is bounded like anybody's, so most of these records hardly count; if the id "
            "stands for many people (unknown, a ward), the guarantee is for all of them together",
        )


def record_findings(tables: WholeTable) -> Iterator[DataFinding]:
    """Yield findings about repeated records, of the same person or of several."""
    again = len(tables) - len(np.unique(tables.rows))
    if again:
        yield DataFinding(
            bears_on="model",
            where="records",
            found=f"records that repeat another one, including its person and silo: {again}",
            effect="a record that occurs k times counts k times, and may be both trained and tested on; the guarantee "
            "still holds. Remove the copies unless each is a measurement of its own",
        )
    # Distinct (contents, user) pairs minus distinct contents: the records that also occur under another id.
    _, user = index_names([user_id or "" for user_id in tables.user])
    distinct = np.unique(np.stack((tables.contents, user.astype(np.uint64)), axis=1), axis=0)
    shared = len(distinct) - len(np.unique(distinct[:, 0]))
    if shared and len(tables.columns) >= FEWEST_COLUMNS:
        yield DataFinding(
            bears_on="guarantee",
            where=tables.schema.user,
            found=f"records that agree with one of another id in every feature and the target: {shared}",
            effect="if they are one person under two ids, each id is protected on its own rather than the person; if "
            "not, nothing is wrong",
        )


def column_findings(tables: WholeTable, facts: Sequence[ColumnFacts]) -> Iterator[DataFinding]:
    """Yield findings about the cells of each column: missing, invalid, outside, constant, leaking."""
    names, person = index_names([user_id or "" for user_id in tables.user])
    for column in facts:
        yield from _missing(tables.schema, column)
        yield from _invalid(tables, column)
        yield from _outside(tables.schema, column)
        is_feature = column.name in tables.schema.features
        if len(tables) > 1 and column.distinct == 1 and not column.missing and not column.invalid:
            yield DataFinding(
                bears_on="model",
                where=column.name,
                found="the same value in every record",
                effect="nothing can be learned from it here"
                + ("" if is_feature else ": a model that always gives this answer is always right"),
            )
        if is_feature:
            yield from _outcome(tables, column.name)
        if is_feature and identifies_user(_values(tables.columns[column.name]), person, names):
            yield DataFinding(
                bears_on="model",
                where=column.name,
                found="one value in all records of a person, and another one for everybody else",
                effect="if it is an id, the model learns who somebody is, which helps with nobody new: remove it; "
                "the guarantee still holds",
            )


def _missing(schema: Schema, facts: ColumnFacts) -> Iterator[DataFinding]:
    """Yield a finding if missing cells stop the run, or are the majority."""
    feature = schema.features.get(facts.name)
    if facts.missing and (feature is None or feature.missing == "error"):
        remedy = (
            "the target must be present: leave these records out"
            if feature is None
            else "the schema does not say how to treat missing values: declare `missing`, or leave the records out"
        )
        yield _stops(schema, facts.name, f"{facts.missing:.1%} of the cells are missing", remedy)
    elif facts.missing > MOSTLY_MISSING:
        yield DataFinding(
            bears_on="model",
            where=facts.name,
            found=f"{facts.missing:.0%} of the cells are missing",
            effect="the feature is constant for most records; missing = 'indicator' shows the model where it is "
            "missing",
        )


def _invalid(tables: WholeTable, facts: ColumnFacts) -> Iterator[DataFinding]:
    """Yield a finding if cells do not fit the declaration; unknown = "zero" allows undeclared categories."""
    feature = tables.schema.features.get(facts.name)
    if not facts.invalid or (isinstance(feature, Category) and feature.unknown == "zero"):
        return
    again = tables.otherwise[facts.name]
    problem = f"{facts.invalid:.1%} of the cells do not fit the declaration ({facts.kind})"
    problem += f"; {again} differ from a declared value only in case" if again else ""
    yield _stops(
        tables.schema, facts.name, problem, f"correct the cells or the declaration: {_MENDED[facts.kind]}"
    )


def _stops(schema: Schema, column: str, problem: str, effect: str) -> DataFinding:
    """Return the finding about cells that a run refuses, or counts as invalid if the schema bins them."""
    if not schema.bins_invalid:
        return DataFinding(bears_on="run", where=column, found=problem, effect=effect)
    counted = "a run counts them as invalid and goes on (without the record, in a target); to do better, "
    return DataFinding(bears_on="model", where=column, found=problem, effect=counted + effect)


def _outside(schema: Schema, facts: ColumnFacts) -> Iterator[DataFinding]:
    """Yield a finding if values lie beyond the declared bounds."""
    amount = schema.amounts.get(facts.name)
    refused = amount is not None and amount.outside == "error"
    if facts.name not in schema.features and facts.outside and refused:
        yield DataFinding(
            bears_on="run",
            where=facts.name,
            found=f"{facts.outside:.1%} of the targets lie outside the declared bounds",
            effect="a run refuses them: correct the cells or the bounds, or declare outside = 'clip'",
        )
    elif facts.outside > OFTEN_CLIPPED:
        yield DataFinding(
            bears_on="model",
            where=facts.name,
            found=f"{facts.outside:.0%} of the values lie outside the declared bounds",
            effect="they are clipped to the bounds; wider bounds, from domain knowledge, would tell them apart",
        )


def _outcome(tables: WholeTable, name: str) -> Iterator[DataFinding]:
    """Yield a finding if a feature may be the outcome, by its name or because it reveals the target."""
    effect = "if it becomes known only after what is predicted, the model will look excellent and be useless: remove it"
    if has_outcome_name(name):
        yield DataFinding(
            bears_on="model", where=name, found="the name sounds like an outcome", effect=effect
        )
    column = tables.columns[name]
    values, category = _values(column), isinstance(column, Places)
    reasons = [
        leakage_reason(values[valid], positive[valid], category=category)
        for positive, valid in _binary_targets(tables)
    ]
    if reason := next(filter(None, (*reasons, _told_of_more(tables, values))), None):
        yield DataFinding(bears_on="model", where=name, found=reason, effect=effect)


def _values(column: Column) -> Float64[np.ndarray, "n"]:
    """Return the valid values of a column (indices of categories as floats), NaN for all other cells."""
    return np.where(column.state == State.VALID, column.values, np.nan).astype(np.float64)


def _told_of_more(tables: WholeTable, values: Float64[np.ndarray, "n"]) -> str:
    """Return the reason for which a feature reveals a numeric or multi-class target; empty if it does not."""
    target = tables.schema.target
    if any(is_linear_copy(values, _values(tables.columns[name])) for name in tables.schema.amounts):
        return "it is a linear function of what is predicted"
    if isinstance(target, Label) and len(target.classes) > 2:
        column = tables.columns[target.column]
        valid = column.state == State.VALID
        if determines_class(values[valid], column.values[valid].astype(np.int64)):
            return "each of its values is found with one class alone"
    return ""


def _binary_targets(tables: WholeTable) -> Iterator[tuple[Int64[np.ndarray, "n"], Bool[np.ndarray, "n"]]]:
    """Yield each binary target as 0/1, with the mask of records for which it is valid.

    1 is the second of two classes, the event, or one of several labels.
    """
    target = tables.schema.target
    names: tuple[str, ...] = target.columns if isinstance(target, Labels) else ()
    if isinstance(target, Label) and len(target.classes) == 2:
        names = (target.column,)
    elif isinstance(target, Survival):
        names = (target.event,)
    for column in (tables.columns[name] for name in names):
        yield (column.values == 1).astype(np.int64), column.state == State.VALID


def target_findings(tables: WholeTable) -> Iterator[DataFinding]:
    """Yield findings about the balance of the classes, over all records and by silo."""
    classes, target = classes_of(tables), tables.schema.target
    total = sum(classes.values())
    if not isinstance(target, Label) or not total:
        return
    absent = sum(not count for count in classes.values())
    if absent:
        yield DataFinding(
            bears_on="model",
            where=target.column,
            found=f"{absent} of {len(classes)} declared classes have no record here",
            effect="other silos may have them; a class that nobody has is never predicted",
        )
    column = tables.columns[target.column]
    valid = column.state == State.VALID
    names, silo = np.unique(np.array([name or "" for name in tables.silo])[valid], return_inverse=True)
    silo_records = np.bincount(silo)
    partial = set[str]()
    for class_number, count in enumerate(classes.values()):
        # A silo with h records has no record of a class of share p with probability (1 - p)^h, if the class is as
        # frequent in this silo as in all.
        lacks = np.bincount(silo, weights=column.values[valid] == class_number) == 0
        partial |= set(names[lacks & ((1 - count / total) ** silo_records < BY_CHANCE)].tolist())
    if partial:
        yield DataFinding(
            bears_on="model",
            where=target.column,
            found=f"silos without any record of some class: {', '.join(sorted(partial))}",
            effect="if the class is not recorded there, their records teach the model that it does not occur: leave "
            "them out; if it really does not occur there, nothing is wrong",
        )
    least, most = min(classes.values()) / total, max(classes.values()) / total
    if 0 < least < RARE / len(classes):
        yield DataFinding(
            bears_on="model",
            where=target.column,
            found=f"the rarest class has {least:.1%} of the records, the most frequent {most:.1%}",
            effect=f"always answering with the most frequent one has accuracy {most:.3f}: judge by auc or "
            "balanced_accuracy, and try model.class_weights (declared, not counted) or the focal loss",
        )


def classes_of(tables: WholeTable) -> dict[str, int]:
    """Return the number of valid records of each declared class; empty unless the target is a label."""
    target = tables.schema.target
    if not isinstance(target, Label):
        return {}
    column = tables.columns[target.column]
    counts = np.bincount(
        column.values[column.state == State.VALID].astype(np.int64), minlength=len(target.classes)
    )
    return dict(zip(target.classes, counts.tolist(), strict=True))


def facts_of(schema: Schema, name: str, column: Column) -> ColumnFacts:
    """Return the statistics of one column."""
    feature = schema.features.get(name)
    valid = column.values[column.state == State.VALID]
    declared = schema.amounts.get(name, schema.target) if feature is None else feature
    bounds = declared.bounds if isinstance(declared, Number | Date | Amount) else None
    lower, upper = bounds or (-np.inf, np.inf)
    return ColumnFacts(
        name=name,
        kind=schema.target.kind if feature is None else feature.kind,
        missing=_share(column.state == State.MISSING),
        invalid=_share(column.state == State.INVALID),
        outside=_share((column.state == State.VALID) & ((column.values < lower) | (column.values > upper))),
        distinct=len(np.unique(valid)),
    )


def _share(mask: Bool[np.ndarray, "n"]) -> float:
    return float(mask.mean()) if len(mask) else 0.0


# --- the report ---


@dataclass(frozen=True, kw_only=True)
class SiloFacts:
    """Number of records and people of one silo."""

    name: str
    records: int
    people: int


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Exact figures and findings of tables, for the owner of the tables only.

    Attributes:
        records: number of records.
        people: number of distinct ids, as they are written.
        n_users: the declared public number of people.
        in_several_silos: number of people with records in more than one silo.
        silos: silos that are declared, have a file, or have records; some may have no record.
        columns: statistics of features and target, in the order of the schema.
        classes: number of records of each declared class; empty without a label.
        findings: facts to know before a run; those about the guarantee come first.
    """

    records: int
    people: int
    n_users: int
    in_several_silos: int
    silos: tuple[SiloFacts, ...]
    columns: tuple[ColumnFacts, ...]
    classes: dict[str, int]
    findings: tuple[DataFinding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; NaN becomes null."""
        document = asdict(self)
        for column in document["columns"]:
            column |= {
                key: None for key, value in column.items() if isinstance(value, float) and math.isnan(value)
            }
        return document


def data_report(schema: Schema, files: Sequence[TableFile]) -> DataReport:
    """Report on tables that a run would read, without refusing a cell.

    Args:
        schema: declaration of the columns.
        files: the tables; without a silo column, each file is a silo, named by the file's stem.

    Raises:
        ConfigError: two files would be one silo.
        DataError: a file cannot be read or lacks a column.
    """
    tables = read_whole(schema, files)
    facts = tuple(facts_of(schema, name, column) for name, column in tables.columns.items())
    people = {user_id for user_id in tables.user if user_id is not None}
    order: dict[Bears, int] = {"guarantee": 0, "run": 1, "model": 2}
    findings = [
        *user_findings(tables, people),
        *record_findings(tables),
        *column_findings(tables, facts),
        *target_findings(tables),
    ]
    return DataReport(
        records=len(tables),
        people=len(people),
        n_users=schema.n_users,
        in_several_silos=sum(len(silos) > 1 for silos in _silos_of_people(tables).values()),
        silos=tuple(_silos(tables, files)),
        columns=facts,
        classes=classes_of(tables),
        findings=tuple(sorted(findings, key=lambda finding: order[finding.bears_on])),
    )


def _silos_of_people(tables: WholeTable) -> dict[str, set[str]]:
    silos: dict[str, set[str]] = {}
    for user_id, silo in zip(tables.user, tables.silo, strict=True):
        if user_id is not None and silo is not None:
            silos.setdefault(user_id, set()).add(silo)
    return silos


def _silos(tables: WholeTable, files: Sequence[TableFile]) -> Iterator[SiloFacts]:
    schema = tables.schema
    names = {*(schema.silos or ()), *(path.stem for path in files if schema.silo is None)}
    records = Counter(silo for silo in tables.silo if silo is not None)
    people = Counter(silo for silos in _silos_of_people(tables).values() for silo in silos)
    for name in sorted(names | records.keys()):
        yield SiloFacts(name=name, records=records[name], people=people[name])

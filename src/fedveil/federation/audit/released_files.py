"""Verify the release files of a run against the data that its parties signed.

    numbers     the digests of the record (:mod:`fedveil.statistics.result`)
    all else    computed again, as the silos do: from the document and the membership of the terms, which silos sign
                with every round, and from the schema whose digest the membership has

Claim: columns, bounds, groups, silos, order, noise, refined schema and clip are those that the silos' own plan gives
for these numbers. A file with other or further content fails. So every displayed figure follows from signed data.
``tests/test_parts_audit.py`` and ``tests/test_federation_releases.py`` change each of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from fedveil.checks import Unchecked, equal_up_to_rounding
from fedveil.data.schema import Schema
from fedveil.errors import IntegrityError
from fedveil.federation.errors import RefusalError
from fedveil.federation.membership import Membership
from fedveil.federation.silo_session.tasks import earlier_sums
from fedveil.federation.terms import parse_terms
from fedveil.files import as_text, parse_json, parse_toml, reading
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.config.release_document import DeclaredTables, kind_in
from fedveil.run.folder.documents import SCHEMA_VERSION
from fedveil.run.folder.run_folder import PREPROCESSED, SCHEMA
from fedveil.run.releases.evaluation import plan_evaluation
from fedveil.run.releases.preprocessing import ReleasedPreprocessing, plan_preprocessing
from fedveil.run.releases.release import Release
from fedveil.run.releases.requests import prepare_document
from fedveil.sanitize import sanitize
from fedveil.statistics.evaluation.result import EVALUATING
from fedveil.statistics.evaluation.result import FILE as EVALUATED
from fedveil.statistics.inference.result import FILE as FITTED
from fedveil.statistics.result import FILE as COUNTED
from fedveil.statistics.result import NoisySum, NoisySums, Numbers, digest_of_release
from fedveil.validation import validate_document

_TERMS: Final = "the experiment of the terms"
DECLARED: Final = "declared_schema.toml"
"""File in the run folder: the agreed schema, byte for byte; the membership holds its digest."""

FILES: Final = {PREPROCESSED: "prep/", EVALUATED: "eval/", EVALUATING: "eval/", COUNTED: "", FITTED: ""}
"""Files with releases, in order, and the prefix of their release names.

An evaluation has a separate file until it is complete.
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A line of the record.

    Attributes:
        part: name of the part; empty for a training round.
        digest: digest of the result, in hexadecimal.
        membership: membership of the line's terms.
        experiment: document of the line's terms.
    """

    part: str
    digest: str
    membership: Membership
    experiment: str


def check_releases(files: Mapping[str, bytes], record: Sequence[Ended], *, whole: bool) -> str:
    """Check a run's release files against its record; return a sentence about the signers of the numbers.

    Args:
        files: files of the run, by name.
        record: lines of the record.
        whole: whether all files of the run are present.

    Raises:
        IntegrityError: the files differ from the record, or a file is damaged.
        Unchecked: the file of some releases is absent.
    """
    released, found = [one for one in record if one.part], _read(files)
    if not released:
        raise IntegrityError(f"{next(iter(found))}: the record has no release")
    # A complete evaluation repeats the numbers of its intermediate file: count them once.
    numbers = {
        name: made for name, (_, made) in found.items() if name != EVALUATING or EVALUATED not in found
    }
    digests = [(name, digest_of_release(one)) for name, made in numbers.items() for one in made]
    for line, (name, digest) in zip(released, digests, strict=False):
        if line.digest != digest.hex() or not line.part.startswith(FILES[name]):
            raise IntegrityError(
                f"{name}: not the numbers of release {sanitize(line.part)} that the record has"
            )
    if len(digests) > len(released) or (whole and len(digests) < len(released)):
        raise IntegrityError(
            f"there are numbers of {len(digests)} releases, and the record has {len(released)}"
        )
    if len(digests) < len(released):
        raise Unchecked(
            f"numbers of {len(digests)} releases are here, as the record has them, of {len(released)}"
        )
    _check_meaning(files, {name: data for name, (data, _) in found.items()}, numbers, record)
    told = ", ".join(sanitize(one.part) for one in record[:-1] if one.part)
    words = f"the numbers of {len(released)} releases are those of the record; what they are of follows from the terms"
    if told:
        words += f"; the silos of the next round were told, and signed, {told}"
    if record[-1].part:
        words += f"; the coordinator alone signed {sanitize(record[-1].part)}: no silo sees a sum"
    return words


def check_schema(schema: bytes, terms: Iterable[tuple[Membership, str]]) -> str:
    """Check that the schema of a model's columns is the one on which the members agreed.

    Raises:
        IntegrityError: the schema differs.
        Unchecked: releases refined the schema, and their numbers are absent.
    """
    for membership, experiment in terms:
        if "preprocessing" in parse_terms(experiment)[0]:
            raise Unchecked("refined by releases, whose numbers are in the run folder")
        if hashlib.sha256(schema).digest() != membership.schema_digest:
            raise IntegrityError(f"{SCHEMA}: not the schema on which the members agreed")
    return "the one on which the members agreed"


_Found = Mapping[str, tuple[Any, Sequence[Numbers]]]
"""Content of every release file, and the numbers in it."""


def _read(files: Mapping[str, bytes]) -> _Found:
    found = {}
    for name in FILES:
        if name not in files:
            continue
        with reading(name, IntegrityError):
            data = parse_json(files[name], name, IntegrityError)
            sums = [NoisySum.from_json(one, len(one["vector"]), name) for one in data["releases"]]
            if not sums:
                raise ValueError
        found[name] = data, [(one.std, one.vector) for one in sums]
    return found


def _check_meaning(
    files: Mapping[str, bytes],
    said: Mapping[str, Any],
    numbers: Mapping[str, Sequence[Numbers]],
    record: Sequence[Ended],
) -> None:
    """Compute the content of every release file again from its numbers, and compare.

    Raises:
        IntegrityError: a file has other content.
    """
    if PREPROCESSED in said:
        text = as_text(_file(files, SCHEMA), SCHEMA, IntegrityError)
        said = {**said, SCHEMA: parse_toml(text, SCHEMA, IntegrityError)}
    # The terms are signed, yet a hostile coordinator may have composed them: every failure is a finding, not a crash.
    with reading(_TERMS, IntegrityError):
        meant = _meant(numbers, record, _file(files, DECLARED))
    for name in sorted(said.keys() | meant.keys() - {EVALUATING}):
        if not equal_up_to_rounding(said.get(name), meant.get(name)):
            raise IntegrityError(
                f"{name}: does not follow from its released numbers and the request to the silos"
            )


def _meant(
    numbers: Mapping[str, Sequence[Numbers]], record: Sequence[Ended], document: bytes
) -> dict[str, Any]:
    """Return the content that files with these numbers must have, from the silos' plans.

    One of the files may belong to an unfinished evaluation.

    Args:
        numbers: released numbers, by file.
        record: lines of the run; some are releases.
        document: file of the schema on which the members agreed.
    """
    last, (experiment, _) = record[-1], parse_terms(record[-1].experiment)
    of = DeclaredTables(schema=_agreed(document, last.membership), silos=last.membership.silos)
    kind = kind_in(experiment)
    if kind is not None:
        prepared = prepare_document(validate_document(kind, experiment, _TERMS), of)
        made = _sums(prepared.file, numbers, prepared.release)
        return {prepared.file: prepared.to_json(made)}
    asked, meant = parse(experiment, _TERMS), dict[str, Any]()
    if PREPROCESSED in numbers:
        # The membership may be renewed during a run: preprocessing is judged by the one of its own last line.
        (*_, line) = (one for one in record if one.part.startswith("prep/"))
        refined = _preprocessed(asked, replace(of, silos=line.membership.silos), numbers)
        schema = refined.schema.model_dump(mode="json", exclude_none=True)
        meant = {PREPROCESSED: refined.to_json(), SCHEMA: schema}
        of = of.with_refined_schema(refined.schema, refined.clip)
    for name in numbers.keys() & {EVALUATED, EVALUATING}:
        planned = _asked_for(name, plan_evaluation(asked, of))
        made = _sums(name, numbers, planned.release)
        if name == EVALUATED:
            trained = sum(not one.part for one in record)
            meant[EVALUATED] = planned.combine_releases(asked.name, trained, made).to_json()
            made = made[:-1]  # the file of the unfinished evaluation stays
        releases = [one.to_json() for one in made]
        meant[EVALUATING] = {"schema_version": SCHEMA_VERSION, "releases": releases}
    return meant


def _preprocessed(
    asked: Experiment, of: DeclaredTables, numbers: Mapping[str, Sequence[Numbers]]
) -> ReleasedPreprocessing:
    planned = _asked_for(PREPROCESSED, plan_preprocessing(asked, of))
    return planned.combine_releases(asked, _sums(PREPROCESSED, numbers, planned.release))


_T = TypeVar("_T")


def _asked_for(name: str, planned: _T | None) -> _T:
    if planned is None:
        raise IntegrityError(f"{name}: no such release was requested from the silos")
    return planned


def _sums(
    name: str, numbers: Mapping[str, Sequence[Numbers]], release: Callable[[NoisySums], Release]
) -> NoisySums:
    """Return the numbers of a file as noisy sums, if the planned releases can have produced them."""
    try:
        return earlier_sums(numbers.get(name, ()), release)
    except RefusalError:
        raise IntegrityError(
            f"{name}: numbers of another length, or with other noise, than requested"
        ) from None


def _agreed(document: bytes, membership: Membership) -> Schema:
    """Return the schema on which the members agreed."""
    if hashlib.sha256(document).digest() != membership.schema_digest:
        raise IntegrityError(f"{DECLARED}: not the schema on which the members agreed")
    tables = parse_toml(as_text(document, DECLARED, IntegrityError), DECLARED, IntegrityError)
    return validate_document(Schema, tables, f"{DECLARED}: no schema", IntegrityError)


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise IntegrityError(f"{name}: is missing")
    return files[name]

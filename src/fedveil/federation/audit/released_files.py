"""Verify the release files of a run against the data that its parties signed.

A release file has released numbers (noisy sums) and other content that says what each number measures.

    numbers         compared with their digests in the record of the run (:mod:`fedveil.statistics.result`)
    other content   computed again from the numbers, as the silos compute it: from the experiment and the membership of
                    the terms, which silos sign with every round, and from the schema whose digest the membership has

Claim: columns, bounds, groups, silos, order, noise, refined schema and clip are those that the silos' own plan gives
for these numbers. A file with changed or additional content fails. So every displayed figure follows from signed data.
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
from fedveil.federation.membership import Membership
from fedveil.federation.silo_session.tasks import earlier_sums
from fedveil.federation.terms import parse_terms
from fedveil.files import as_text, parse_json, parse_toml, reading
from fedveil.protocols.refusals import RefusalError
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
"""Files with releases, in order, each with the prefix of the names of its releases in the record.

An evaluation has a separate file, ``EVALUATING``, until it is complete.
"""


@dataclass(frozen=True, kw_only=True)
class RecordLine:
    """The facts of one line of the record: one release, or one round of training.

    Attributes:
        part: name of the release; empty for a training round.
        digest: digest of the released numbers or of the next model, in hexadecimal.
        membership: membership of the line's terms.
        experiment: text of the experiment, or of the document of releases, in the line's terms.
    """

    part: str
    digest: str
    membership: Membership
    experiment: str


def check_releases(files: Mapping[str, bytes], record: Sequence[RecordLine], *, has_all_files: bool) -> str:
    """Check a run's release files against its record; return a sentence that names who signed the numbers.

    Args:
        files: files of the run, by name.
        record: lines of the record.
        has_all_files: whether the caller has all files of the run; if not, missing numbers are no error.

    Raises:
        IntegrityError: the files differ from the record, or a file is damaged.
        Unchecked: all numbers that are present agree with the record, but the numbers of some releases are absent.
    """
    released, contents = [line for line in record if line.part], _read(files)
    if not released:
        raise IntegrityError(f"{next(iter(contents))}: the record has no release")
    # A complete evaluation repeats the numbers of its intermediate file: count them once.
    numbers = {
        name: releases
        for name, (_, releases) in contents.items()
        if name != EVALUATING or EVALUATED not in contents
    }
    digests = [
        (name, digest_of_release(release)) for name, releases in numbers.items() for release in releases
    ]
    # Not strict: the two lengths are compared below, with an error or a result of their own.
    for line, (name, digest) in zip(released, digests, strict=False):
        if line.digest != digest.hex() or not line.part.startswith(FILES[name]):
            raise IntegrityError(
                f"{name}: not the numbers of release {sanitize(line.part)} that the record has"
            )
    if len(digests) > len(released) or (has_all_files and len(digests) < len(released)):
        raise IntegrityError(
            f"there are numbers of {len(digests)} releases, and the record has {len(released)}"
        )
    if len(digests) < len(released):
        raise Unchecked(
            f"numbers of {len(digests)} of {len(released)} releases are present, and agree with the record"
        )
    _check_content(files, {name: data for name, (data, _) in contents.items()}, numbers, record)
    # The silos of a round sign the digest of all earlier releases, so the last line's release has no silo's signature.
    signed_by_silos = ", ".join(sanitize(line.part) for line in record[:-1] if line.part)
    sentence = (
        f"the numbers of {len(released)} releases are those of the record; the rest follows from the terms"
    )
    if signed_by_silos:
        sentence += f"; the silos of the next round received and signed {signed_by_silos}"
    if record[-1].part:
        sentence += f"; the coordinator alone signed {sanitize(record[-1].part)}: no silo sees a sum"
    return sentence


def check_schema(schema: bytes, terms: Iterable[tuple[Membership, str]]) -> str:
    """Check that the schema of a model's columns is the one on which the members agreed; return that as words.

    Args:
        schema: content of the file ``schema.toml``.
        terms: membership and text of the experiment, for all terms of the run.

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


_Contents = Mapping[str, tuple[Any, Sequence[Numbers]]]
"""For every release file, by name: its JSON content, and the numbers in it."""


def _read(files: Mapping[str, bytes]) -> _Contents:
    """Parse the release files that are present.

    Raises:
        IntegrityError: a file is damaged, or has no release.
    """
    contents = {}
    for name in FILES:
        if name not in files:
            continue
        with reading(name, IntegrityError):
            data = parse_json(files[name], name, IntegrityError)
            sums = [NoisySum.from_json(release, len(release["vector"]), name) for release in data["releases"]]
            if not sums:
                raise ValueError
        contents[name] = data, [(noisy_sum.std, noisy_sum.vector) for noisy_sum in sums]
    return contents


def _check_content(
    files: Mapping[str, bytes],
    actual: Mapping[str, Any],
    numbers: Mapping[str, Sequence[Numbers]],
    record: Sequence[RecordLine],
) -> None:
    """Compute the content of every release file again from its numbers, and compare.

    Args:
        files: files of the run, by name.
        actual: JSON content of the release files, by name.
        numbers: released numbers, by file.
        record: lines of the record.

    Raises:
        IntegrityError: a file has other content.
    """
    if PREPROCESSED in actual:
        text = as_text(_file(files, SCHEMA), SCHEMA, IntegrityError)
        actual = {**actual, SCHEMA: parse_toml(text, SCHEMA, IntegrityError)}
    # The terms are signed, yet a hostile coordinator may have composed them: every failure is a finding, not a crash.
    with reading(_TERMS, IntegrityError):
        expected = _expected_content(numbers, record, _file(files, DECLARED))
    # The file of an unfinished evaluation may be absent once the evaluation is complete. If present, it is checked.
    for name in sorted(actual.keys() | expected.keys() - {EVALUATING}):
        if not equal_up_to_rounding(actual.get(name), expected.get(name)):
            raise IntegrityError(
                f"{name}: does not follow from its released numbers and the request to the silos"
            )


def _expected_content(
    numbers: Mapping[str, Sequence[Numbers]], record: Sequence[RecordLine], document: bytes
) -> dict[str, Any]:
    """Return the content that files with these numbers must have, from the silos' plans, by file name.

    Args:
        numbers: released numbers, by file.
        record: lines of the record; some are releases.
        document: file of the schema on which the members agreed.
    """
    last, (tables, _) = record[-1], parse_terms(record[-1].experiment)
    declared = DeclaredTables(schema=_agreed_schema(document, last.membership), silos=last.membership.silos)
    kind = kind_in(tables)
    if kind is not None:
        prepared = prepare_document(validate_document(kind, tables, _TERMS), declared)
        sums = _sums(prepared.file, numbers, prepared.release)
        return {prepared.file: prepared.to_json(sums)}
    experiment, expected = parse(tables, _TERMS), dict[str, Any]()
    if PREPROCESSED in numbers:
        # The membership may be renewed during a run: preprocessing is checked with the one of its own last line.
        (*_, line) = (line for line in record if line.part.startswith("prep/"))
        refined = _preprocessed(experiment, replace(declared, silos=line.membership.silos), numbers)
        schema = refined.schema.model_dump(mode="json", exclude_none=True)
        expected = {PREPROCESSED: refined.to_json(), SCHEMA: schema}
        declared = declared.with_refined_schema(refined.schema, refined.clip)
    for name in numbers.keys() & {EVALUATED, EVALUATING}:
        planned = _require_planned(name, plan_evaluation(experiment, declared))
        sums = _sums(name, numbers, planned.release)
        if name == EVALUATED:
            rounds = sum(not line.part for line in record)
            expected[EVALUATED] = planned.combine_releases(experiment.name, rounds, sums).to_json()
            # The file of the unfinished evaluation, where it was kept, has all releases but the last.
            sums = sums[:-1]
        releases = [noisy_sum.to_json() for noisy_sum in sums]
        expected[EVALUATING] = {"schema_version": SCHEMA_VERSION, "releases": releases}
    return expected


def _preprocessed(
    experiment: Experiment, declared: DeclaredTables, numbers: Mapping[str, Sequence[Numbers]]
) -> ReleasedPreprocessing:
    """Return the preprocessing that follows from its released numbers."""
    planned = _require_planned(PREPROCESSED, plan_preprocessing(experiment, declared))
    return planned.combine_releases(experiment, _sums(PREPROCESSED, numbers, planned.release))


_T = TypeVar("_T")


def _require_planned(name: str, planned: _T | None) -> _T:
    """Return the plan of a file's releases; raise an IntegrityError if the experiment requests none."""
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


def _agreed_schema(document: bytes, membership: Membership) -> Schema:
    """Return the schema on which the members agreed; raise an IntegrityError if the digest is another one."""
    if hashlib.sha256(document).digest() != membership.schema_digest:
        raise IntegrityError(f"{DECLARED}: not the schema on which the members agreed")
    tables = parse_toml(as_text(document, DECLARED, IntegrityError), DECLARED, IntegrityError)
    return validate_document(Schema, tables, f"{DECLARED}: no schema", IntegrityError)


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    """Return the content of a file; raise an IntegrityError if it is missing."""
    if name not in files:
        raise IntegrityError(f"{name}: is missing")
    return files[name]

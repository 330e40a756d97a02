"""Canonical JSON text of an experiment: one experiment has one text and one digest.

    keys sorted, no blanks, ASCII, the shortest digits of every number that read back to it; no NaN and no infinity

If the document uses third-party packages, the text also states their versions (key ``packages``). A stage of another
version is a different stage, and a silo with another version refuses to join.

Claim: the time and memory to read a document are bounded by its limit of 64 KiB, regardless of the signer. Enforced
by :func:`read_canonical`. It checks the length first. The JSON grammar has no anchors, no dates and no sections that
can be reopened. It then checks depth and number of values, all before validation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from fedveil.errors import ConfigError
from fedveil.federation.errors import RefusalError
from fedveil.federation.transport.interface import LARGEST_EXPERIMENT
from fedveil.files import parse_json
from fedveil.protocols.refusals import Code
from fedveil.registry import Member
from fedveil.run.config.experiment import Experiment, TableSection, parse
from fedveil.run.config.release_document import KINDS, TableDocument
from fedveil.run.environment import third_party_members
from fedveil.validation import validate_document

EXPERIMENT: Final = "experiment.toml"
DOCUMENTS: Final[Mapping[str, Callable[[dict[str, Any], str], Experiment | TableDocument]]] = {
    EXPERIMENT: parse,
    **{kind.file: partial(validate_document, kind) for kind in KINDS},
}
"""Parsers of the document kinds, by file name. The folder of a run holds exactly one of these files."""

_PACKAGES: Final = "packages"
_PLACE: Final = "the coordinator's experiment"
_DEEPEST: Final = 8
_MOST_VALUES: Final = 2000
_LARGEST_INTEGER: Final = 2**53


def canonical(experiment: Experiment | TableDocument, packages: Mapping[str, str] | None = None) -> str:
    """Return the canonical text of a document.

    Args:
        document: the experiment or the request for releases.
        packages: versions of the third-party packages that the document needs, by name.

    Raises:
        ConfigError: a number in the document is infinite. Documents between institutions are finite.
    """
    document = experiment.model_dump(mode="json", exclude_none=True)
    try:
        return _text(document | ({_PACKAGES: packages} if packages else {}))
    except ValueError:
        raise ConfigError(
            f"{experiment.name}: a number is infinite; between institutions all are finite"
        ) from None


def public_text(
    document: Experiment | TableDocument, silos: tuple[str, ...], packages: Mapping[str, str] | None = None
) -> str:
    """Return the document's text for the silos, without local paths of the coordinator.

    The text replaces an initial model by its digest (``model.sha256``). Every silo states the digest and signs it
    with the rest.

    Args:
        document: the coordinator's document.
        silos: names of the silos.
        packages: versions of the packages that the document needs; None: the installed versions.
    """
    table = document.data.table
    if table is not None:
        table = TableSection(
            schema_file=Path("schema.toml"),
            files=tuple(Path(f"{name}.csv") for name in silos),
            test_share=table.test_share,
        )
    changes: dict[str, Any] = {"data": document.data.model_copy(update={"table": table, "folder": None})}
    if "model" in type(document).model_fields:
        model = cast(Experiment, document).model
        changes["model"] = model.model_copy(update={"initial": None, "initial_layers": None})
    return canonical(
        document.model_copy(update=changes),
        versions(third_party_members(document)) if packages is None else packages,
    )


def versions(members: Iterable[Member]) -> dict[str, str]:
    """Return the installed versions of the packages that provide these members, by package name."""
    return {one.package: one.version for one in members}


def parse_terms(text: str) -> tuple[dict[str, Any], Any]:
    """Return the tables of a document, and the package versions in its text ({} if it has none).

    Raises:
        FedveilError: as :func:`read_canonical`.
    """
    document = read_canonical(text)
    return document, document.pop(_PACKAGES, {})


def read_canonical(text: str) -> dict[str, Any]:
    """Parse a canonical text and return the tables of the document.

    Raises:
        RefusalError: the text exceeds the limit of length, depth or number of values.
        ConfigError: the text is not JSON, not canonical, or not an object.
    """
    if len(text) > LARGEST_EXPERIMENT:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    document = parse_json(text, _PLACE, ConfigError)
    # Breadth first, one level per pass: at most _DEEPEST + 1 levels are expanded, so no recursion on hostile nesting.
    level, values = [document], 0
    for _ in range(_DEEPEST + 1):
        values += len(level)
        level = [inner for value in level for inner in _within(value)]
    if level or values > _MOST_VALUES:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    # Equality with the re-encoded text rejects duplicate keys, blanks and alternative spellings of numbers: two texts
    # of one experiment would have two digests.
    if not isinstance(document, dict) or _text(document) != text:
        raise ConfigError(f"{_PLACE}: not canonical JSON")
    return document


def _within(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list):
        return value
    # 2^53: larger integers have no exact float64 value, so parties could read different numbers from one text.
    if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
        raise ConfigError(f"{_PLACE}: a whole number of 2^53 or more")
    return []


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)

"""An experiment as it travels: canonical JSON, so that one experiment has one text and one digest.

    keys sorted, no blanks, ASCII, the shortest digits of every number that read back to it; no NaN and no infinity

Where it asks for what other packages bring, the text has their versions too (``packages``): a stage of another version
is another stage, and a silo that has another refuses to join.

Claim: reading a document takes time and memory that its 64 KiB bound, whoever signed it. Enforced by
:func:`read_canonical`: length first, then a grammar without anchors, dates or sections that open again, then depth and
number of values, before any of it is validated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from fedveil.errors import ConfigError
from fedveil.federation.errors import RefusalError
from fedveil.federation.limits import LARGEST_EXPERIMENT
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
"""What a run is of, by the one file of these that its folder has."""

_PACKAGES: Final = "packages"
_PLACE: Final = "the coordinator's experiment"
_DEEPEST: Final = 8
_MOST_VALUES: Final = 2000
_LARGEST_INTEGER: Final = 2**53


def canonical(experiment: Experiment | TableDocument, packages: Mapping[str, str] | None = None) -> str:
    """Return the one text of a document.

    Args:
        experiment: the document.
        packages: versions of those that it needs.

    Raises:
        ConfigError: a number in it is infinite, which no silo is asked for.
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
    """Return the text that silos are sent: without the coordinator's own paths.

    Of an initial model they are told the digest (``model.sha256``), which every silo states, and signs with the rest.

    Args:
        document: the coordinator's.
        silos: names of the silos.
        packages: versions of packages that it needs; None: those that are installed here.
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
    """Return the versions of the packages that bring these members, as they are installed."""
    return {one.package: one.version for one in members}


def parse_terms(text: str) -> tuple[dict[str, Any], Any]:
    """Return the tables of a document, and the versions of packages that its text has; {} for none.

    Raises:
        FedveilError: as :func:`read_canonical`.
    """
    document = read_canonical(text)
    return document, document.pop(_PACKAGES, {})


def read_canonical(text: str) -> dict[str, Any]:
    """Return the tables of a document.

    Raises:
        RefusalError: longer, deeper or of more values than a silo reads.
        ConfigError: no JSON, another text than the canonical one, or no tables.
    """
    if len(text) > LARGEST_EXPERIMENT:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    document = parse_json(text, _PLACE, ConfigError)
    level, values = [document], 0
    for _ in range(_DEEPEST + 1):
        values += len(level)
        level = [inner for value in level for inner in _within(value)]
    if level or values > _MOST_VALUES:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    if not isinstance(document, dict) or _text(document) != text:
        raise ConfigError(f"{_PLACE}: not canonical JSON")
    return document


def _within(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list):
        return value
    if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
        raise ConfigError(f"{_PLACE}: a whole number of 2^53 or more")
    return []


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)

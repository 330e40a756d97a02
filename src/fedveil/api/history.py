"""Rows of a run's rounds as flat tables: public figures alone, or all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fedveil.run.folder.documents import NORM_LEVELS, read_rows
from fedveil.run.folder.shown import METRICS, Kind

_LEFT_OUT: Final = frozenset({"schema_version", "remarks"})
_NAMES: Final[Mapping[str, str]] = {
    "movement.model": "model_moved",
    "movement.noise": "moved_by_noise_alone",
    "movement.most": "moved_at_most",
}
"""Columns of figures that stand in a table of their own in ``metrics.jsonl``."""


def round_rows(
    folder: Path, *, private: bool = False, public_test: bool = False
) -> tuple[dict[str, Any], ...]:
    """Return one flat row per round of a run folder; every row has the same columns.

    Args:
        folder: the run folder.
        private: whether exact figures of private records are included.
        public_test: whether the test records are public, so that metrics on them may be shown.

    Raises:
        RunFolderError: ``metrics.jsonl`` is damaged.
    """
    found = [
        columns_of(row, private=private, public_test=public_test)
        for row in read_rows(folder / "metrics.jsonl")
    ]
    names = dict.fromkeys(name for row in found for name in row)
    return tuple({name: row.get(name) for name in names} for row in found)


def columns_of(row: Mapping[str, Any], *, private: bool = False, public_test: bool = False) -> dict[str, Any]:
    """Return the columns of one row of ``metrics.jsonl``; a field that is not classified counts as private.

    Args are those of :func:`round_rows`.
    """
    kinds = {Kind.COVERED, *({Kind.TESTED} if public_test or private else ())}
    kinds |= {Kind.PRIVATE} if private else set()
    return dict(
        _columns({key: value for key, value in row.items() if METRICS.get(key, Kind.PRIVATE) in kinds})
    )


def _columns(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row, those of inner tables and lists one by one."""
    for key, value in row.items():
        if key in _LEFT_OUT:
            continue
        if key == "test":
            yield from (value or {}).items()
        elif key == "norms":
            if value is not None:
                yield from ((f"norm_{level:g}", one) for level, one in zip(NORM_LEVELS, value, strict=True))
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                place = f"{key}.{name}"
                if key != "movement":
                    yield f"{key}_{name}", inner
                elif place in _NAMES:
                    yield _NAMES[place], inner
        elif key not in ("movement", "communication_cost"):  # None: not known in this round
            yield key, value

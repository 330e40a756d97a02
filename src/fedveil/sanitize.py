"""Make text from outside safe to show: messages, files, host names, other parties' texts.

Claim: a string that passed :func:`sanitize` shows as one line of at most 200 characters. It moves no cursor, opens no
link, changes no colour, and neither hides nor reverses other text. To enforce this, every character that Unicode does
not count as printable is replaced (controls, escapes, bidi marks, surrogates, private use), except the space. The
terminal (:class:`fedveil.console.Terminal`), pages (``report.document.escape``) and logs (:func:`quiet_log`) apply
the same filter. So a caller that forgets :func:`sanitize` shows a long text and not a hostile one.
``tests/test_sanitize.py``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from fedveil.errors import did_you_mean

LONGEST: Final = 200
"""Most characters of a foreign text that are shown."""

LONGEST_SENTENCE: Final = 600
"""Characters of a sentence of our own that has a foreign text in it."""

_CUT: Final = "..."
_UNSEEN: Final = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str) -> str:
    """Return a text from outside as one printable line of at most 200 characters."""
    # Cutting first bounds the work for a text of any length.
    shown = one_line(text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - len(_CUT)] + _CUT


def one_line(text: str) -> str:
    """Return a text of any length as one printable line, so that no part of it passes for another line."""
    return strip_control_characters(text).replace("\n", " ").replace("\t", " ")


def as_spreadsheet_text(text: str) -> str:
    """Return a text as one line that a spreadsheet does not run as a formula: an apostrophe comes first if needed."""
    text = one_line(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def describe_columns(present: Sequence[str], names: Iterable[str], lacking: str = "") -> str:
    """Return the names of a table's columns for an error about columns that it lacks.

    A file without a header has its first record there. So names are shown only if one of them is a wanted name,
    whatever its case; otherwise their number is.

    Args:
        present: the names.
        names: names of all columns that are read.
        lacking: the one that is lacking, for a suggestion; empty: none is made.
    """
    lowered = {name.strip().lower() for name in names}
    if not any(column.strip().lower() in lowered for column in present):
        return f"{len(present)} columns, none of them wanted; write a header if the first line is a record"
    return sanitize(", ".join(present)) + (sanitize(did_you_mean(lacking, present)) if lacking else "")


def strip_control_characters(text: str) -> str:
    """Replace the non-printable characters of a text of any length; line breaks and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else _UNSEEN for character in text
    )


class _Quiet(logging.Filter):
    """Filter that sanitizes a log record's message and error before any handler formats them."""

    _formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Sanitize the record in place, and let it pass."""
        record.msg, record.args = strip_control_characters(record.getMessage()).replace("\n", " "), None
        if record.exc_info:
            record.exc_text = strip_control_characters(self._formatter.formatException(record.exc_info))
            # A formatter may format exc_info itself, which would bypass this filter.
            record.exc_info = None
        return True


class LogLevel(StrEnum):
    """Lowest level of the records that a log shows."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of a log's lines."""

    TEXT = "text"
    JSON = "json"


class _JsonLines(logging.Formatter):
    """Formatter of one ASCII JSON object per line, so that no text passes for another record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "log": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(line | ({"error": record.exc_text} if record.exc_text else {}))


_shown: list[tuple[LogLevel, LogFormat]] = []


def log_choice() -> tuple[LogLevel, LogFormat]:
    """Return level and format of the log, as :func:`show_log` set them last."""
    return _shown[-1] if _shown else (LogLevel.WARNING, LogFormat.TEXT)


def show_log(level: LogLevel, layout: LogFormat = LogFormat.TEXT) -> None:
    """Show this program's log on standard error, sanitized; a second call changes level and format."""
    _shown[:] = [(level, layout)]
    log = logging.getLogger("fedveil")
    log.setLevel(level.upper())
    shown = [handler for handler in log.handlers if isinstance(handler, logging.StreamHandler)]
    if not shown:
        shown = [logging.StreamHandler()]
        shown[0].addFilter(_Quiet())
        log.addHandler(shown[0])
    lines = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    shown[0].setFormatter(_JsonLines() if layout is LogFormat.JSON else lines)


def quiet_log(name: str) -> logging.Logger:
    """Return a logger whose records move no cursor and forge no line, whatever is logged."""
    log = logging.getLogger(name)
    if not any(isinstance(log_filter, _Quiet) for log_filter in log.filters):
        log.addFilter(_Quiet())
    return log


# --- log of repeated faults ---------------------------------------------------------------------------------

INTERVAL_SECONDS: Final = 60.0
_MOST_CAUSES: Final = 100


class FaultLog:
    """Logs faults; a fault of the same cause within a minute is counted and not written.

    Args:
        log: where lines go.
        clock: seconds; never goes back.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._next: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warn(self, cause: str, sentence: str) -> None:
        """Log a fault.

        Args:
            cause: short name; faults of one name count as the same.
            sentence: what happened and what to do; may hold text from outside.
        """
        now = self._clock()
        if now < self._next.get(cause, now):
            self._suppressed[cause] = self._suppressed.get(cause, 0) + 1
            return
        if len(self._next) >= _MOST_CAUSES:
            self.forget()
        count = self._suppressed.pop(cause, 0)
        self._next[cause] = now + INTERVAL_SECONDS
        more = f" ({count} more like it since the last such line)" if count else ""
        self._log.warning("%s: %s%s", cause, one_line(sentence[:LONGEST_SENTENCE]), more)

    def forget(self) -> None:
        """Start anew: the next fault of every cause is written."""
        self._next.clear()
        self._suppressed.clear()

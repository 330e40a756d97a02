"""Text from outside: a letter, a file, a host name, another party. It is data, wherever it is shown.

Claim: a string that passed :func:`sanitize` shows as one line of at most 200 characters and moves no cursor, opens no
link, changes no colour, and hides or turns round no other text. Enforced by leaving out every character that Unicode
does not count as printable (controls, escapes, bidi marks, surrogates, private use) but the space. The terminal
(:class:`fedveil.console.Terminal`), pages (``report.document.escape``) and logs (:func:`quiet_log`) let nothing else
through either, so that a place that forgets shows a long text and not a hostile one. ``tests/test_sanitize.py``.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

LONGEST: Final = 200
"""Characters of a foreign text that are shown."""

_CUT: Final = "..."
_UNSEEN: Final = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str) -> str:
    """Return a text from outside as it may be shown: one line, printable, at most 200 characters."""
    shown = one_line(text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - len(_CUT)] + _CUT


def one_line(text: str) -> str:
    """Return a text of any length as one printable line, so that none of it passes for a line beside it."""
    return strip_control_characters(text).replace("\n", " ").replace("\t", " ")


def strip_control_characters(text: str) -> str:
    """Return a text of any length without characters that do something; lines stay lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else _UNSEEN for character in text
    )


class _Quiet(logging.Filter):
    """Makes what a record says, and the error that it tells of, inert before any handler has it."""

    _formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a record through, inert."""
        record.msg, record.args = strip_control_characters(record.getMessage()).replace("\n", " "), None
        if record.exc_info:
            record.exc_text = strip_control_characters(self._formatter.formatException(record.exc_info))
            record.exc_info = None
        return True


class LogLevel(StrEnum):
    """From which level on a log is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """What a line of a log is."""

    TEXT = "text"
    JSON = "json"


class _JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII, so that no text of a record is read as another record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "log": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(line | ({"error": record.exc_text} if record.exc_text else {}))


def show_log(level: LogLevel, layout: LogFormat = LogFormat.TEXT) -> None:
    """Show this program's log on standard error, inert, from a level on; asked again, it changes level and layout."""
    log = logging.getLogger("fedveil")
    log.setLevel(level.upper())
    shown = [one for one in log.handlers if isinstance(one, logging.StreamHandler)]
    if not shown:
        shown = [logging.StreamHandler()]
        shown[0].addFilter(_Quiet())
        log.addHandler(shown[0])
    lines = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    shown[0].setFormatter(_JsonLines() if layout is LogFormat.JSON else lines)


def quiet_log(name: str) -> logging.Logger:
    """Return a log whose records move no cursor and forge no line, whatever is logged."""
    log = logging.getLogger(name)
    if not any(isinstance(one, _Quiet) for one in log.filters):
        log.addFilter(_Quiet())
    return log

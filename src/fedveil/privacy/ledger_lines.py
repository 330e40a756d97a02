"""The lines of a ledger: charges, and notes about who keeps it and for whom; each chained to the one before by digests.

A line is JSON. It has its index, the digest of the line before it, and ends with the digest of all that stands before
its own. Lines of schema version 1 are charges without time and origin, as fedveil 0.1 wrote them; they are read, and
the first line of version 2 continues their chain.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Strict, TypeAdapter, ValidationError, with_config

from fedveil.errors import IntegrityError, PrivacyError, RunFolderError
from fedveil.files import parse_json
from fedveil.privacy.events import Adjacency, AnEvent
from fedveil.validation import explained

SCHEMA_VERSION: Final = 2
GENESIS: Final = "0" * 64
"""What stands for the digest before the first line."""

_READ: Final = (1, SCHEMA_VERSION)
_SEAL: Final = len(', "digest": ""}') + 64

_Count = Annotated[int, Strict(), Field(ge=0)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]

NoteKind = Literal["opened", "policy", "membership", "adopted", "ended"]
"""What a note tells: a process began to use the ledger (``text``: its random number); charges from here on are made
under another policy (``text``: the policy), or under a later membership (``text``: the charter's digest and the serial
number); somebody answers for charges that are missing (``text``: the reason); a silo signs the end of a run (``text``:
its 16 bytes, and the digest of the record's last line)."""


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who asked for what was charged, and under what, where institutions work together.

    Attributes:
        terms: SHA-256 of the terms that the coordinator proposed and signed.
        coordinator: SHA-256 of the coordinator's public identity key.
        membership: serial number of the sealed membership; 0: a membership that nobody sealed.
        policy: SHA-256 of the silo's own policy.
    """

    terms: _Digest
    coordinator: _Digest
    membership: _Count
    policy: _Digest


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One charge: the event of one attempt at one round of one run.

    Attributes:
        index: of the line, from 0.
        time: of the charge by this machine's clock, in UTC: to the second where it has an origin, else its day. A
            silo's ledger stays with the silo; a run's goes with its model, and how long a round took is private. None
            in lines of version 1.
        run: name of the run.
        round: within the run.
        attempt: at the round.
        unit: of privacy.
        adjacency: of the event.
        event: what is paid for.
        origin: who asked for it, between institutions.
    """

    index: _Count
    time: _Time | None = None
    run: str
    round: _Count
    attempt: _Count
    unit: str
    adjacency: Adjacency
    event: AnEvent
    origin: Origin | None = None


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Note:
    """A line that charges nothing.

    Attributes:
        index: of the line, from 0.
        time: by this machine's clock, in UTC.
        kind: what it tells.
        text: see :data:`NoteKind`.
        missing: digests of lines that are known to have been in this ledger and are not: an adoption names them.
    """

    index: _Count
    time: _Time
    kind: NoteKind
    text: Annotated[str, Field(max_length=1 << 16)]
    missing: tuple[_Digest, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Head:
    """Where a ledger ended at some moment: number of lines, and the last one's digest."""

    count: int
    digest: str


Line = Entry | Note
_ENTRY: Final = TypeAdapter(Entry)
_NOTE: Final = TypeAdapter(Note)
_CHARGE: Final = "charge"


def now() -> str:
    """Return the time by this machine's clock, as lines have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def today() -> str:
    """Return the midnight before now: all that a line says which goes with a model; see :class:`Entry`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT00:00:00Z")


def write_line(line: Line, previous: str) -> tuple[bytes, str]:
    """Return a line's bytes, sealed with the digest of everything before the seal, and that digest.

    Raises:
        RunFolderError: a note that no reader would accept: its text is too long, or not Unicode.
    """
    place: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "index": line.index, "previous": previous}
    if isinstance(line, Entry):
        place["kind"] = _CHARGE
        dumped = _ENTRY.dump_python(line, mode="json")
        content = {key: value for key, value in dumped.items() if value is not None}
    else:
        content = _NOTE.dump_python(line, mode="json")
        try:
            _NOTE.validate_python(content)
        except ValidationError as error:
            raise RunFolderError(f"a ledger cannot have this note: {explained(error, Note)}") from None
    body = json.dumps(place | content, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + f', "digest": "{digest}"}}\n'.encode(), digest


def _sealed(line: bytes) -> bool:
    """Whether a line (without its newline) is complete and carries its own digest."""
    body, seal = line[:-_SEAL] + b"}", line[-_SEAL:]
    return seal == f', "digest": "{hashlib.sha256(body).hexdigest()}"}}'.encode()


def parse_lines(path: Path, content: bytes) -> tuple[tuple[Line, ...], list[str], int]:
    """Return the lines, their digests, and how many bytes of the content are complete lines.

    Without its last newline the last line still counts if it is sealed. If it is not, and one byte less is
    not sealed either, it is a torn write and is left out.

    Raises:
        RunFolderError: a line is damaged, lost, doubled, or of another version; names it.
    """
    *lines, tail = content.split(b"\n")
    complete = len(content) - len(tail)
    if _sealed(tail):
        lines.append(tail)
        complete = len(content)
    elif _sealed(tail[:-1]):
        raise _damaged(path, len(lines), "its newline was replaced")
    entries: list[Line] = []
    digests: list[str] = []
    for index, line in enumerate(lines):
        if not _sealed(line):
            raise _damaged(path, index, "its content does not match its digest")
        entry, previous = _read_line(path, index, line)
        if entry.index != index or previous != (digests[-1] if digests else GENESIS):
            raise _damaged(path, index, "it does not continue the line before it")
        entries.append(entry)
        digests.append(hashlib.sha256(line[:-_SEAL] + b"}").hexdigest())
    return tuple(entries), digests, complete


def _read_line(path: Path, index: int, line: bytes) -> tuple[Line, str]:
    """Read a line whose digest is right, so that what is wrong in it was written by another version."""
    place = f"{path}, line {index + 1}:"
    data = parse_json(line, place, RunFolderError)
    version = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
    if not isinstance(version, int) or version not in _READ:
        raise RunFolderError(f"{place} schema version {version!r}; this fedveil reads versions 1 and 2")
    previous, kind = data.get("previous"), data.get("kind", _CHARGE)
    charge = version == 1 or kind == _CHARGE
    aside = {"schema_version", "previous", "digest"} | ({"kind"} if charge and version != 1 else set())
    try:
        values = {key: data[key] for key in data if key not in aside}
        if version == 1 and not {"time", "origin"}.isdisjoint(values):
            raise PrivacyError("it has keys that version 1 does not have")
        return (_ENTRY if charge else _NOTE).validate_python(values), str(previous)
    except ValidationError as error:
        told = explained(error, Entry if charge else Note)
        raise _damaged(path, index, f"it is no ledger line ({told})") from None
    except PrivacyError as error:
        raise _damaged(path, index, f"it is no ledger line ({error})") from error


def _damaged(path: Path, index: int, what: str) -> IntegrityError:
    return IntegrityError(
        f"{path}, line {index + 1}: the ledger is damaged: {what}. What was spent is unknown, so nothing "
        "may be released from this run; restore the file from a copy"
    )

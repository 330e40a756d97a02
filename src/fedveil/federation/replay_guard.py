"""Marks of the answers that a silo persisted and so may have sent, stored apart from the answers.

Claim: a silo computes no second contribution to a round because its persisted answer is missing. If the folder
``answers`` was lost or restored from an old copy, a new contribution would put the other silos' vectors of that round
into a second sum, uncharged to their users. So the silo refuses the run. A round that was charged without a persisted
answer (a crash between the two) was never sent: it is computed and charged again.

Conditions: the disk keeps what was fsynced, and ``kept`` is not restored together with ``answers``. Restoring both
and the ledger to one moment makes the silo forget. The ledger heads that other parties know detect that
(:mod:`~fedveil.federation.ledger_heads`). Rounds answered by an earlier release of fedveil have no mark until they
are repeated.

Enforced by :meth:`ReplayMarks.append`, with one line and one fsync after an answer is persisted and before any of it
leaves, and by :meth:`ReplayMark.fits`, before anything is charged. A mark holds the digest of the answer's ledger
line and the answer's length. An answer is sent :data:`~fedveil.protocols.protocol.MOST_REPEATS` times at most. Masks
and ciphertexts of a repeat reveal something besides the sum, and a line of the statement covers that many repeats
(:meth:`~fedveil.methods.private_weighting.PrivateWeighting.distance`). Tests:
``tests/test_federation_replay_guard.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.store import RoundRecord
from fedveil.files import sync_folder, writing
from fedveil.line_log import LineLog
from fedveil.privacy.ledger import Ledger

KEPT: Final = "kept"
"""Folder in the state folder: one file per part of a run, one line per permission to send an answer."""

_LINE: Final = re.compile(rb"([0-9a-f]{64}) (0|[1-9][0-9]{0,14})")


@dataclass(frozen=True)
class ReplayMark:
    """Mark of a persisted answer.

    Attributes:
        head: digest of the ledger line that charged the answer, in hexadecimal.
        length: length of the answer in bytes; it grows if a contribution is made in two steps.
    """

    head: str
    length: int

    @classmethod
    def from_record(cls, record: RoundRecord) -> ReplayMark:
        """Return the mark of a round's record."""
        return cls(record.head.hex(), len(record.given))

    @property
    def line(self) -> bytes:
        """The mark as a line of the file."""
        return f"{self.head} {self.length}".encode()

    def fits(self, record: RoundRecord | None, ledger: Ledger) -> bool:
        """Return whether a record is the answer of this mark, or was charged or completed later.

        A later answer has no mark yet if the silo was killed between persisting and marking. If the ledger lacks the
        line of this mark, the ledger was restored too; then no answer counts as later.

        Args:
            record: the persisted record; None: no record.
            ledger: the ledger that charged both.
        """
        if record is None:
            return False
        found = ReplayMark.from_record(record)
        if found.head == self.head:
            return found.length >= self.length
        # position() is -1 for a head that the ledger lacks.
        return 0 <= ledger.position(self.head) < ledger.position(found.head)


@dataclass(frozen=True)
class ReplayMarks:
    """Marks of a silo: one file per part of a run, in a folder that only the silo reads.

    Attributes:
        folder: the folder; created on first use.
    """

    folder: Path

    def last(self, place: bytes) -> ReplayMark | None:
        """Return the last mark of a part of a run; None before the first.

        Args:
            place: 16 bytes, the part of the run.

        Raises:
            IntegrityError: the file is damaged.
            RunFolderError: the file cannot be read.
        """
        return _last(*self._read(place))

    def append(self, place: bytes, mark: ReplayMark, *, most: int) -> bool:
        """Append a mark and fsync it: one line for each time that the answer may be sent.

        Args:
            place: 16 bytes, the part of the run.
            mark: mark of a persisted answer.
            most: limit on the number of times.

        Returns:
            Whether the answer may be sent. False, with nothing written, after ``most`` marks.

        Raises:
            IntegrityError: the file is damaged.
            RunFolderError: the file cannot be written, for example because the disk is full; nothing may be sent.
        """
        log, lines = self._read(place)
        _last(log, lines)
        if lines.count(mark.line) >= most:
            return False
        with writing(log.path, RunFolderError, "; nothing was sent"):
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700)
                sync_folder(self.folder.parent)
            log.append(mark.line)
        return True

    def _read(self, place: bytes) -> tuple[LineLog, list[bytes]]:
        log = LineLog(self.folder / place.hex(), mode=0o600)
        return log, log.read().complete


def _last(log: LineLog, lines: Sequence[bytes]) -> ReplayMark | None:
    if not lines:
        return None
    found = _LINE.fullmatch(lines[-1])
    if found is None:
        raise IntegrityError(
            f"{log.path}, line {len(lines)}: damaged; what was answered is unknown, so this run cannot go on here; "
            "restore the file as it was last"
        )
    return ReplayMark(found[1].decode(), int(found[2]))

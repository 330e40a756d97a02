"""Which answers a silo had kept, and so may have sent: beside its ledger, and not where the answers themselves are.

Claim: a silo draws no second sum of a round for want of the answer that it had kept of it. Where ``answers`` was lost
or put back from an old copy, what others gave to that round would be summed a second time, uncharged to their users;
so the run is refused. A round that was charged and of which nothing was kept (a crash between the two) was never sent:
it is drawn again, and charged again.

Conditions: the disk keeps what was fsynced, and ``kept`` is not put back together with ``answers``: who restores both
and the ledger to one moment makes the silo forget; that, other parties' words on the ledger show
(:mod:`~fedveil.federation.ledger_heads`). Rounds that an earlier release answered have no mark until they are repeated.

Enforced by :meth:`ReplayMarks.append`, one line and one fsync after an answer is kept and before any of it leaves,
and by :meth:`ReplayMark.fits`, before anything is charged. A mark tells of an answer its ledger line and its length.
An answer is given :data:`~fedveil.protocols.protocol.MOST_REPEATS` times at most: what masks and ciphertexts show
beside the sum, a line of the statement counts for so many
(:meth:`~fedveil.methods.private_weighting.PrivateWeighting.distance`). Tests:
``tests/test_federation_replay_guard.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.store import RoundRecord
from fedveil.files import LARGEST_FILE, append_file, read_content, replace_file, sync_folder, writing
from fedveil.privacy.ledger import Ledger

KEPT: Final = "kept"
"""In a silo's state folder: a file for every part of a run, with a line for every time that an answer may be sent."""

_LINE: Final = re.compile(rb"([0-9a-f]{64}) (0|[1-9][0-9]{0,14})")


@dataclass(frozen=True)
class ReplayMark:
    """An answer that was kept.

    Attributes:
        head: the digest of the ledger's line that charged it, in hexadecimal.
        length: of the answer, in bytes: it grows where an answer is given in two steps.
    """

    head: str
    length: int

    @classmethod
    def from_record(cls, record: RoundRecord) -> ReplayMark:
        """Return the mark of what is kept of a round."""
        return cls(record.head.hex(), len(record.given))

    @property
    def line(self) -> bytes:
        """The mark as it is written."""
        return f"{self.head} {self.length}\n".encode()

    def fits(self, record: RoundRecord | None, ledger: Ledger) -> bool:
        """Whether what is kept now is the answer of this mark, or one that was charged, or completed, later.

        A later one has no mark yet where the silo was killed between keeping an answer and marking it. Of a mark that
        the ledger does not have, which went back too, no answer is later.

        Args:
            record: what is kept; None: nothing.
            ledger: that charged both.
        """
        if record is None:
            return False
        found = ReplayMark.from_record(record)
        if found.head == self.head:
            return found.length >= self.length
        return 0 <= ledger.position(self.head) < ledger.position(found.head)


@dataclass(frozen=True)
class ReplayMarks:
    """One file per part of a run, in a folder that only the silo reads.

    Attributes:
        folder: the folder; made when it is first needed.
    """

    folder: Path

    def last(self, place: bytes) -> ReplayMark | None:
        """Return the last mark of a part of a run; None before the first.

        A last line without its end was not yet durable, so nothing had been sent.

        Args:
            place: 16 bytes, the part of the run.

        Raises:
            IntegrityError: the file is damaged.
            RunFolderError: it cannot be read.
        """
        return _last(self._path(place), self._content(place))

    def append(self, place: bytes, mark: ReplayMark, *, most: int) -> bool:
        """Write a mark, and return once it is on disk: a line for every time that the answer may be sent.

        Args:
            place: 16 bytes, the part of the run.
            mark: of an answer that is on disk.
            most: how often it may be sent.

        Returns:
            Whether it may be sent: False, and nothing is written, where it was marked ``most`` times.

        Raises:
            IntegrityError: the file is damaged.
            RunFolderError: the disk is full, say; nothing may be sent.
        """
        path, content = self._path(place), self._content(place)
        _last(path, content)
        line = mark.line
        if content.count(line) >= most:
            return False
        with writing(path, RunFolderError, "; nothing was sent"):
            if content.endswith(b"\n"):
                append_file(path, line)
                return True
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700)
                sync_folder(self.folder.parent)
            replace_file(path, content[: content.rfind(b"\n") + 1] + line, mode=0o600)
        return True

    def _content(self, place: bytes) -> bytes:
        path = self._path(place)
        return read_content(path, RunFolderError, largest=LARGEST_FILE) if path.exists() else b""

    def _path(self, place: bytes) -> Path:
        return self.folder / place.hex()


def _last(path: Path, content: bytes) -> ReplayMark | None:
    lines = content.split(b"\n")[:-1]
    if not lines:
        return None
    found = _LINE.fullmatch(lines[-1])
    if found is None:
        raise IntegrityError(
            f"{path}, line {len(lines)}: damaged; what was answered is unknown, so this run cannot go on here; restore "
            "the file as it was last"
        )
    return ReplayMark(found[1].decode(), int(found[2]))

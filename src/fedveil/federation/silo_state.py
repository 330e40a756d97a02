"""Persisted state of a silo in one run: ledger, contributions, replay marks, and peers' ledger heads.

Replay marks name the answers that a silo persisted and so may have sent. They are stored apart from the answers.

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

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.audit.run_record import RoundPlace
from fedveil.federation.ledger_heads import SeenHeads, check_heads, sign_heads
from fedveil.federation.silo_ledger import SiloLedger
from fedveil.federation.store import ModelStore, RecordStore, RoundRecord
from fedveil.files import sync_folder, writing
from fedveil.line_log import LineLog
from fedveil.privacy.ledger import Budget, Ledger, Origin
from fedveil.protocols.protocol import MOST_REPEATS, ClientContext
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import LedgerHeads, SignedHead

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
        return cls(record.head.hex(), len(record.contribution))

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
        mark = ReplayMark.from_record(record)
        if mark.head == self.head:
            return mark.length >= self.length
        # position() is -1 for a head that the ledger lacks.
        return 0 <= ledger.position(self.head) < ledger.position(mark.head)


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
    match = _LINE.fullmatch(lines[-1])
    if match is None:
        raise IntegrityError(
            f"{log.path}, line {len(lines)}: damaged; the stored answer is unknown, so this silo cannot continue the "
            "run; restore the file as it was last"
        )
    return ReplayMark(match[1].decode(), int(match[2]))


@dataclass(frozen=True, kw_only=True)
class SiloState:
    """State of a silo for one part of a run.

    Attributes:
        run: 16 bytes, the run.
        part: name of the part that the session plays; empty for rounds of training.
        silos: names of all silos.
        ledger: the silo's ledger over all runs.
        origin: the terms of the run and the coordinator that proposed them, for the ledger.
        budget: limit of the ledger; None: unlimited.
        heads: last known ledger heads of the other silos.
        records: the silo's contribution to the last round of each run.
        marks: marks of the persisted contributions.
        models: the last model of the run, if only the silos have it.
    """

    run: bytes
    part: str
    silos: tuple[str, ...]
    ledger: SiloLedger
    origin: Origin
    budget: Budget | None
    heads: SeenHeads
    records: RecordStore
    marks: ReplayMarks
    models: ModelStore

    @property
    def name(self) -> str:
        """Name of the part in the ledger, from the run's 16 bytes: the coordinator's own name may repeat."""
        return f"{self.run.hex()}/{self.part}" if self.part else self.run.hex()

    @property
    def place(self) -> bytes:
        """16 bytes that identify the part of the run among the persisted contributions."""
        return hashlib.sha256(self.run + self.part.encode()).digest()[:RUN_BYTES] if self.part else self.run

    @property
    def has_earlier_charges(self) -> bool:
        """Return whether any part of the run was charged before."""
        return bool(self.charged_places())

    def charged_places(self) -> list[RoundPlace]:
        """Return the charged rounds of all parts of the run, with repetitions."""
        named = [(*entry.run.partition("/"), entry.round) for entry in self.ledger.ledger.entries]
        return [(part, number) for run, _, part, number in named if run == self.run.hex()]

    def charged_rounds(self) -> list[int]:
        """Return the charged rounds of the part, with repetitions."""
        return [entry.round for entry in self.ledger.ledger.entries if entry.run == self.name]

    def last(self) -> RoundRecord | None:
        """Return the record of the last round of the part; None before the first.

        Raises:
            RefusalError: a later answer was persisted, and so may have been sent, but is missing.
            RunFolderError: the files are damaged, or cannot be read.
        """
        last, mark = self.records.read(self.place), self.marks.last(self.place)
        if mark is not None and not mark.fits(last, self.ledger.ledger):
            raise RefusalError(
                Code.REPLACED,
                detail=f"{self.records.folder}: lacks the last answer that this silo stored for run {self.name}, and "
                "may have sent: it was lost, or restored from an old copy. A second answer would put the other silos' "
                "vectors into two sums: restore the folder as it was last, or begin another run",
            )
        return last

    def mark(self, record: RoundRecord) -> None:
        """Write the mark of a persisted contribution; only then may any of it leave.

        Raises:
            RefusalError: the contribution was sent as often as one charge allows.
            RunFolderError: the mark cannot be written, for example because the disk is full; nothing may be sent.
        """
        if not self.marks.append(self.place, ReplayMark.from_record(record), most=MOST_REPEATS):
            raise RefusalError(Code.REPEATED, record.round, MOST_REPEATS)

    def sign_heads(self, session: bytes, place: ClientContext) -> tuple[SignedHead, ...]:
        """Return the last known ledger heads of all silos, and the silo's own, signed for a session.

        Args:
            session: name of the session.
            place: the silo's identity and number.
        """
        heads = [self.heads.last(name) for name in self.silos]
        heads[place.number] = self.ledger.head
        return sign_heads(place.identity, session, heads)

    def check_heads(self, relayed: LedgerHeads, session: bytes, place: ClientContext, *, least: int) -> None:
        """Check the heads that other silos know of this ledger, and note the heads of their ledgers.

        Args:
            relayed: heads relayed by the coordinator.
            session: name of the session.
            place: the silo's identity and number.
            least: fewest other silos whose heads must be present.

        Raises:
            IntegrityError: another silo's ledger went back to an earlier state.
            RefusalError: this silo's own ledger went back; names the first silo that knows a later head. Or a
                signature does not hold, or too few silos are present.
        """
        own, peers = check_heads(
            relayed, session=session, reader=place.number, roster=place.roster, least=least
        )
        for silo, head in own.items():
            try:
                self.ledger.require(head)
            except IntegrityError as error:
                detail = f"{error}. Silo {self.silos[silo]} has signed that it heard of it"
                raise RefusalError(Code.LATER_HEAD, silo, detail=detail) from error
        self.note(peers)

    def note(self, peers: Mapping[int, bytes]) -> None:
        """Note other silos' ledger heads, by silo number.

        Raises:
            IntegrityError: a ledger went back to an earlier state.
        """
        self.heads.hear({self.silos[silo]: head for silo, head in peers.items()})
        self.heads.keep()

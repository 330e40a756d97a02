"""Where a silo writes down what it spends and gives, and what it has heard of others' ledgers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.errors import IntegrityError
from fedveil.federation.audit.run_record import RoundPlace
from fedveil.federation.errors import RefusalError
from fedveil.federation.ledger_heads import SeenHeads, check_heads, sign_heads
from fedveil.federation.replay_guard import ReplayMark, ReplayMarks
from fedveil.federation.silo_ledger import SiloLedger
from fedveil.federation.store import ModelStore, RecordStore, RoundRecord
from fedveil.privacy.ledger import Budget, Origin
from fedveil.protocols.protocol import MOST_REPEATS, ClientContext
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import LedgerHeads, SignedHead


@dataclass(frozen=True, kw_only=True)
class SiloState:
    """Where a silo writes down what it spends and gives in one run.

    Attributes:
        run: 16 bytes, the run.
        part: the part of it that the session plays; empty for rounds of training.
        silos: names of all silos.
        ledger: the silo's over all runs.
        origin: who asks for the run, and under what.
        budget: what the ledger may hold; None: anything.
        heads: what it has heard of the other silos' ledgers.
        records: what it gave to the last round of each run.
        marks: which answers it had kept.
        models: the last model of the run, where the silos alone have it.
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
        """What the ledger calls the run: what the coordinator calls it may repeat."""
        return f"{self.run.hex()}/{self.part}" if self.part else self.run.hex()

    @property
    def place(self) -> bytes:
        """16 bytes that name the part of the run, where a silo keeps what it gave to it."""
        return hashlib.sha256(self.run + self.part.encode()).digest()[:RUN_BYTES] if self.part else self.run

    @property
    def has_earlier_charges(self) -> bool:
        """Whether a round of any part of the run was charged before."""
        return bool(self.charged_places())

    def charged_places(self) -> list[RoundPlace]:
        """Return the rounds of all parts of the run that were charged; one that was charged twice is there twice."""
        named = [(*entry.run.partition("/"), entry.round) for entry in self.ledger.ledger.entries]
        return [(part, number) for run, _, part, number in named if run == self.run.hex()]

    def charged_rounds(self) -> list[int]:
        """Return the rounds of the part that were charged; one that was charged twice is there twice."""
        return [entry.round for entry in self.ledger.ledger.entries if entry.run == self.name]

    def last(self) -> RoundRecord | None:
        """Return what the silo keeps of the last round of the part; None before the first.

        Raises:
            RefusalError: it had kept, and so may have sent, a later answer, which is not there any more.
            RunFolderError: the files are damaged, or cannot be read.
        """
        last, mark = self.records.read(self.place), self.marks.last(self.place)
        if mark is not None and not mark.fits(last, self.ledger.ledger):
            raise RefusalError(
                Code.REPLACED,
                detail=f"{self.records.folder}: lacks the last answer that this silo had kept of run {self.name}, "
                "and may have sent: it was lost, or put back from an old copy. Drawn again, the round would show the "
                "other silos' vectors in two sums: put back the folder as it was last, or begin another run",
            )
        return last

    def mark(self, record: RoundRecord) -> None:
        """Note that what the silo gives to a round is on its disk; only then may any of it leave.

        Raises:
            RefusalError: it was given as often as one charge allows.
            RunFolderError: the disk is full, say; nothing may be sent.
        """
        if not self.marks.append(self.place, ReplayMark.from_record(record), most=MOST_REPEATS):
            raise RefusalError(Code.REPEATED, record.round, MOST_REPEATS)

    def sign_heads(self, session: bytes, place: ClientContext) -> tuple[SignedHead, ...]:
        """Return the heads of all silos' ledgers as they were heard, and this one's own, signed for a session.

        Args:
            session: its name.
            place: the silo's.
        """
        heads = [self.heads.last(name) for name in self.silos]
        heads[place.number] = self.ledger.head
        return sign_heads(place.identity, session, heads)

    def check_heads(self, told: LedgerHeads, session: bytes, place: ClientContext, *, least: int) -> None:
        """Hold what other silos have heard of this silo's ledger against it, and note the heads of theirs.

        Args:
            told: by the coordinator.
            session: its name.
            place: the silo's.
            least: how many others must speak.

        Raises:
            IntegrityError: another silo's ledger has gone back.
            RefusalError: this silo's has, and which says so first; or one did not sign what is said, or too few speak.
        """
        own, peers = check_heads(told, session=session, reader=place.number, roster=place.roster, least=least)
        for silo, head in own.items():
            try:
                self.ledger.require(head)
            except IntegrityError as error:
                detail = f"{error}. Silo {self.silos[silo]} has signed that it heard of it"
                raise RefusalError(Code.LATER_HEAD, silo, detail=detail) from error
        self.note(peers)

    def note(self, peers: Mapping[int, bytes]) -> None:
        """Note where other silos' ledgers end, by their numbers.

        Raises:
            IntegrityError: one has gone back.
        """
        self.heads.hear({self.silos[silo]: head for silo, head in peers.items()})
        self.heads.keep()

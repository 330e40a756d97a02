"""Persisted state of a silo in one run: ledger, contributions, replay marks, and peers' ledger heads."""

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
                detail=f"{self.records.folder}: lacks the last answer that this silo had kept of run {self.name}, "
                "and may have sent: it was lost, or put back from an old copy. Drawn again, the round would show the "
                "other silos' vectors in two sums: put back the folder as it was last, or begin another run",
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

    def check_heads(self, told: LedgerHeads, session: bytes, place: ClientContext, *, least: int) -> None:
        """Check the heads that other silos know of this ledger, and note the heads of their ledgers.

        Args:
            told: heads relayed by the coordinator.
            session: name of the session.
            place: the silo's identity and number.
            least: fewest other silos whose heads must be present.

        Raises:
            IntegrityError: another silo's ledger went back to an earlier state.
            RefusalError: this silo's own ledger went back; names the first silo that knows a later head. Or a
                signature does not hold, or too few silos are present.
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
        """Note other silos' ledger heads, by silo number.

        Raises:
            IntegrityError: a ledger went back to an earlier state.
        """
        self.heads.hear({self.silos[silo]: head for silo, head in peers.items()})
        self.heads.keep()

"""Charge the steps of a run: the only place of the releasing side that writes charges to a ledger.

    refusal? ─► charge on disk ─► attempt ─► signed line, if parties sign ─► artefact on disk: the release

A step is whatever is charged and released once: a round of training, or a release of statistics. A crash between
two of these stages loses nothing that was released, and leaves nothing released that is not charged.

Charging rule. An attempt is charged before it begins if every earlier charge may have released something:

    spent before = 0 if repeatable, else charges on disk when this process opened the step
    due          = charges on disk <= spent before + releasing failures

where the releasing failures are the failed attempts that may have released something: of this process, or of all
processes if the step is repeatable. A failure that released nothing leaves its charge to the next attempt of the same
process.

A step is *repeatable* if an attempt made again is the same release, and so costs nothing more. In one process this
holds for noise from a seed. Between institutions it holds if silos repeat their answers. Otherwise a charge without
an artefact is spent, because nothing shows that nobody saw its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from fedveil.checks import equal_up_to_rounding
from fedveil.errors import IntegrityError, PrivacyError, RunFolderError, SiloVanished
from fedveil.files import read_json, reading
from fedveil.methods.guarantee import Guarantee
from fedveil.privacy.accountant import load_event_types
from fedveil.privacy.events import Event, event_from_json
from fedveil.privacy.ledger import Entry, Ledger
from fedveil.run.folder.documents import SCHEMA_VERSION, FailedAttempt, read_lines
from fedveil.run.folder.run_folder import STATEMENT, RunFolder

_ATTEMPTS: Final = "attempts.jsonl"


@dataclass(frozen=True)
class StepKey:
    """Name of a step in the ledger.

    Attributes:
        run: name of the run, or of one of its side releases.
        round: number of the round, or of the release.
    """

    run: str
    round: int


@dataclass(frozen=True)
class Attempt:
    """An attempt at a step, which is paid for.

    Attributes:
        number: number of attempts at the step that failed before this one.
        charge: number of charges of the step before the one that pays for this attempt.
    """

    number: int
    charge: int


class Witness(Protocol):
    """Record of the steps that the parties sign."""

    def mend(self, done: int) -> None:
        """Remove the line of a step that was not released; ``done`` steps were."""

    def add(self, after: bytes, ledger: str) -> None:
        """Append the line of a step, durably: digest of its result, and head of the ledger."""


class Journal:
    """Open ledger of a run folder.

    Args:
        folder: the run folder.
        guarantee: names the protected unit and the adjacency.
        witness: record of the steps that the parties sign; None if all parties are in this process.

    Raises:
        RunFolderError: the ledger is damaged, or another process works in the folder.
        IntegrityError: the ledger lacks a charge that the folder's statement counts.
    """

    def __init__(self, folder: RunFolder, guarantee: Guarantee, witness: Witness | None = None) -> None:
        self.folder, self._witness = folder, witness
        path = folder / "ledger.jsonl"
        self.ledger = Ledger(path, unit=guarantee.unit, adjacency=guarantee.adjacency)
        try:
            self._require_stated()
        except BaseException:
            self.close()
            raise

    @property
    def is_signed(self) -> bool:
        """Return whether the parties sign every step, each in a process of its own."""
        return self._witness is not None

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        self.ledger.close()

    def _require_stated(self) -> None:
        """Check that the ledger has every charge that a statement in the folder counts.

        A statement may be in readers' hands. A ledger that was put back from before it would give a smaller one: no
        checkpoint holds the head of a ledger after the last round, where releases of the last model are charged.

        Raises:
            RunFolderError: the statement is damaged.
            IntegrityError: charges are missing.
        """
        path = self.folder / STATEMENT
        if not path.exists():
            return
        with reading(path, RunFolderError):
            document = read_json(path, RunFolderError)
            load_event_types(document)
            try:
                stated = event_from_json(document["event"])
            except PrivacyError as error:
                raise RunFolderError(f"{path} is damaged: {error}") from error
        self.ledger.require_stated(stated, path)

    def check_charged(self, event_of: Callable[[Entry], Event | None], remedy: str) -> None:
        """Check that every charge is for the event that the document requests.

        A charge of another event belongs to another document: its cost would be stated under a wrong guarantee.

        Args:
            event_of: returns the event of an entry; None if the document has no step of its name.
            remedy: what the user should do, for the error.

        Raises:
            RunFolderError: a charge is for another event, or differs by the rounding of another machine.
        """
        pairs = [(entry.event, event_of(entry)) for entry in self.ledger.entries]
        others = [(charged, event) for charged, event in pairs if charged != event]
        if not others:
            return
        if all(
            event is not None and equal_up_to_rounding(charged.to_json(), event.to_json())
            for charged, event in others
        ):
            raise RunFolderError(
                f"{self.folder.path}: the ledger was charged for this document with noise whose last digits differ "
                "from those computed here: another machine, or another version of NumPy or SciPy, calibrated it; go on "
                "where it was begun"
            )
        raise RunFolderError(
            f"{self.folder.path}: the ledger was charged for other releases than those of the document; {remedy}"
        )

    def count_charges(self, key: StepKey) -> int:
        """Return the number of charges of a step."""
        return sum((entry.run, entry.round) == (key.run, key.round) for entry in self.ledger.entries)

    def require_charges(self, released: Iterable[StepKey]) -> None:
        """Check that the ledger has a charge for every released step.

        A release is written after its charge. A ledger without the charge has lost lines, and a statement of it would
        understate what was spent.

        Args:
            released: names of the steps whose artefacts the folder has.

        Raises:
            IntegrityError: a released step has no charge.
        """
        for key in released:
            if not self.count_charges(key):
                raise IntegrityError(
                    f"{self.folder.path}: the result of {key.run}, {key.round} is there, and ledger.jsonl has no "
                    "charge for it; charges were lost or replaced, so what was spent is unknown"
                )

    def read_failures(self, key: StepKey) -> list[FailedAttempt]:
        """Return the recorded failed attempts at a round."""
        rows = read_lines(self.folder / _ATTEMPTS, FailedAttempt)[0]
        return [row for row in rows if row.round == key.round]

    def record_failure(self, key: StepKey, attempt: int, vanished: SiloVanished) -> None:
        """Record a failed attempt at a round, durably."""
        row = {
            "round": key.round,
            "attempt": attempt,
            "silos": list(vanished.silos),
            "may_have_released": vanished.may_have_released,
        }
        self.folder.append(_ATTEMPTS, {"schema_version": SCHEMA_VERSION, **row})

    def mend(self, done: int) -> None:
        """Remove the signed line of a step that was not released; ``done`` steps were.

        Raises:
            RunFolderError: lines of released steps are missing.
        """
        if self._witness is not None:
            self._witness.mend(done)

    def release(self, digest: Callable[[], bytes], write: Callable[[], None]) -> None:
        """Write the artefact of a step, which is its release.

        Args:
            digest: computes the digest of the artefact for the parties' record.
            write: writes the artefact durably.
        """
        # A crash between the two leaves a line without an artefact, which `mend` removes. The other order could
        # leave a release without signatures.
        if self._witness is not None:
            self._witness.add(digest(), self.ledger.head.digest)
        write()


class Step:
    """A step of a run: charged before each attempt that is due, and released once.

    Attributes:
        key: name of the step in the ledger.
        tries: number of attempts of this process.

    Args:
        journal: journal of the run.
        key: name of the step in the ledger.
        event: returns the event of a charge; receives whether the step was charged before.
        refusal: returns why the step may not be charged once more; None if it may.
        repeatable: whether an attempt made again, after a crash, is the same release.
    """

    def __init__(
        self,
        journal: Journal,
        key: StepKey,
        *,
        event: Callable[[bool], Event],
        refusal: Callable[[], str | None],
        repeatable: bool,
    ) -> None:
        self._journal, self.key, self._event, self._refusal = journal, key, event, refusal
        self._repeatable, self.tries, self._began = repeatable, 0, 0.0
        before = journal.read_failures(key)
        self._failed, self._released = len(before), sum(row.may_have_released for row in before)
        # Fresh noise is another release: a charge from before this process is spent. `is_due` adds all releasing
        # failures; those from before are among these charges already.
        self._spent_before = 0 if repeatable else self.charges - self._released
        self._unfinished = False

    @property
    def charges(self) -> int:
        """Number of charges of the step."""
        return self._journal.count_charges(self.key)

    @property
    def is_due(self) -> bool:
        """Return whether the next attempt needs a charge."""
        return self.charges <= self._spent_before + self._released + self._lost_sight_of()

    def _lost_sight_of(self) -> int:
        """Return 1 if the last attempt neither failed nor ended, so that it may have released; else 0."""
        return int(self._unfinished and not self._repeatable)

    @property
    def seconds(self) -> float:
        """Seconds since the first attempt of this process began."""
        return time.perf_counter() - self._began

    def refusal(self) -> str | None:
        """Return why the next attempt may not begin; None if it may. Nothing is written."""
        return self._refusal() if self.is_due else None

    def begin(self) -> Attempt:
        """Begin the next attempt, after its charge is on disk if one is due."""
        due, charged = self.is_due, self.charges
        self._released += self._lost_sight_of()
        # Charge before compute: a crash after the release must not leave the release uncharged.
        if due:
            self._journal.ledger.charge(
                run=self.key.run, round=self.key.round, attempt=charged, event=self._event(charged > 0)
            )
        if not self.tries:
            self._began = time.perf_counter()
        self.tries, self._unfinished = self.tries + 1, True
        return Attempt(number=self._failed, charge=self.charges - 1)

    def fail(self, vanished: SiloVanished) -> None:
        """Record that the attempt failed, before anything else happens."""
        # On disk before the next charge: a crash between the two cannot hide a release.
        self._journal.record_failure(self.key, self._failed, vanished)
        self._failed, self._unfinished = self._failed + 1, False
        self._released += vanished.may_have_released

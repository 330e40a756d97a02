"""Charge the steps of a run: the only module of the releasing side that writes charges to a ledger.

    refusal? ─► charge on disk ─► attempt ─► signed line, if parties sign ─► artefact on disk: the release

A step is charged and released once: it is a round of training, or a release of statistics. A crash between two of these
stages loses nothing that was released, and every release has its charge.

A step is *repeatable* if a repeated attempt gives the same release, and so costs nothing more. In one process this
holds for noise from a seed. Between institutions it holds if silos repeat their answers. A step with fresh noise is not
repeatable: a charge without an artefact counts as spent, because its result may have been seen.

Charging rule. A charge is used if its attempt may have released something. The next attempt needs a new charge if all
charges on disk are used:

    charge is due  =  number of charges on disk <= charges used before + releasing failures

    charges used before    repeatable: 0; else: charges on disk when this process opened the step
    releasing failures     failed attempts that may have released something; repeatable: of all processes, else: of this
                           process, because earlier ones are among the charges used before

A failed attempt that released nothing leaves its charge to the next attempt of the same process.
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
        number: number of attempts at the step that failed before this one, in any process.
        charge: index, among the charges of the step, of the charge that pays for this attempt; from 0.
    """

    number: int
    charge: int


class Witness(Protocol):
    """Record of the steps that the parties sign; the coordinator's record of a run implements it."""

    def mend(self, done: int) -> None:
        """Remove the line of a step that was not released.

        Args:
            done: number of released steps.
        """

    def add(self, after: bytes, ledger: str) -> None:
        """Append the signed line of a step, durably.

        Args:
            after: digest of the step's result.
            ledger: head of the ledger.
        """


class Journal:
    """The open ledger of a run folder, with the record of failed attempts and the record that the parties sign.

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
        """Return whether the parties are separate processes that sign every step."""
        return self._witness is not None

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        self.ledger.close()

    def _require_stated(self) -> None:
        """Check that the ledger has every charge that a statement in the folder counts.

        The statement may have been published. An older ledger, restored from a backup, would lead to a statement with a
        smaller epsilon. The checkpoint cannot show this: it has the ledger head of the last round, and releases of the
        last model are charged after that.

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

        A charge for another event belongs to another document, and the statement would give its cost wrongly.

        Args:
            event_of: returns the event that the document requests for the step of a ledger entry; None if the document
                has no such step.
            remedy: what the user should do, for the error.

        Raises:
            RunFolderError: a charge is for another event; or it differs in the last digits, which another machine
                rounded.
        """
        pairs = [(entry.event, event_of(entry)) for entry in self.ledger.entries]
        differing = [(charged, event) for charged, event in pairs if charged != event]
        if not differing:
            return
        if all(
            event is not None and equal_up_to_rounding(charged.to_json(), event.to_json())
            for charged, event in differing
        ):
            raise RunFolderError(
                f"{self.folder.path}: the ledger was charged for this document with noise whose last digits differ "
                "from those computed here: another machine, or another version of NumPy or SciPy, "
                "calibrated it; resume it where it was begun"
            )
        raise RunFolderError(
            f"{self.folder.path}: the ledger was charged for other releases than those of the document; {remedy}"
        )

    def count_charges(self, key: StepKey) -> int:
        """Return the number of charges of a step."""
        return sum((entry.run, entry.round) == (key.run, key.round) for entry in self.ledger.entries)

    def require_charges(self, released: Iterable[StepKey]) -> None:
        """Check that the ledger has a charge for every released step.

        A charge is written before its release. A ledger without the charge has lost lines, so a statement computed from
        it would be too small.

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
        """Remove the signed line of a step that was not released.

        Args:
            done: number of released steps.

        Raises:
            RunFolderError: lines of released steps are missing.
        """
        if self._witness is not None:
            self._witness.mend(done)

    def release(self, digest: Callable[[], bytes], write: Callable[[], None]) -> None:
        """Write the artefact of a step; the step counts as released from then on.

        Args:
            digest: computes the digest of the artefact for the parties' record.
            write: writes the artefact durably.
        """
        # A crash between the two writes leaves a signed line without an artefact, which `mend` removes. The opposite
        # order could leave a release without signatures.
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
        event: returns the event of a charge; its argument says whether the step was charged before.
        refusal: returns why the step may not be charged once more; None if it may.
        repeatable: whether a repeated attempt, after a crash, gives the same release.
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
        self._failed, self._releasing_failures = len(before), sum(row.may_have_released for row in before)
        # `is_due` adds the releasing failures of all processes. If the step is not repeatable, every charge of an
        # earlier process is used; those of its releasing failures are subtracted here, so that they count once.
        self._used_before = 0 if repeatable else self.charges - self._releasing_failures
        self._unfinished = False  # whether an attempt has begun, and has neither failed nor been released

    @property
    def charges(self) -> int:
        """Number of charges of the step."""
        return self._journal.count_charges(self.key)

    @property
    def is_due(self) -> bool:
        """Return whether the next attempt needs a charge."""
        return self.charges <= self._used_before + self._releasing_failures + self._unknown_outcomes()

    def _unknown_outcomes(self) -> int:
        """Return 1 if the last attempt neither failed nor was released, so that its result may be known; else 0."""
        return int(self._unfinished and not self._repeatable)

    @property
    def seconds(self) -> float:
        """Seconds since the first attempt of this process began."""
        return time.perf_counter() - self._began

    def refusal(self) -> str | None:
        """Return why the next attempt may not begin; None if it may. This writes nothing."""
        return self._refusal() if self.is_due else None

    def begin(self) -> Attempt:
        """Begin the next attempt; if a charge is due, write it to disk first."""
        due, charged = self.is_due, self.charges
        self._releasing_failures += self._unknown_outcomes()
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
        """Record durably that the attempt failed."""
        # On disk before the next charge: a crash between the two cannot hide a release.
        self._journal.record_failure(self.key, self._failed, vanished)
        self._failed, self._unfinished = self._failed + 1, False
        self._releasing_failures += vanished.may_have_released

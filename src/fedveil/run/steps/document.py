"""The releases of a document (statistics, or a regression) as parts of a run, and their statement.

    release 1 ─► release 2 ─► ... ─► statement

Each release is one part of the run with one step. Its query may depend on the results of the releases before it, which
the run folder holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

from fedveil.data.columns import ColumnTable
from fedveil.data.records import empty_groups
from fedveil.errors import RunFolderError
from fedveil.files import read_json
from fedveil.methods.guarantee import Guarantee
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import Entry
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import STATEMENT, RunFolder
from fedveil.run.journal import Step, StepKey, Witness
from fedveil.run.loop import RunParts
from fedveil.run.releases.release import ReleasePart, no_model, refuse_repeat
from fedveil.run.releases.series import PreparedReleases, read_records
from fedveil.run.steps.experiment import PartEnding
from fedveil.statistics.result import NoisySums


class DocumentParts(RunParts[PartEnding]):
    """The releases of a document.

    The document's ``privacy.epsilon`` is the cost of all releases together, each charged once. In one process a release
    with fresh noise may be charged again after a crash; the statement then names it and its higher cost.

    Args:
        prepared: the releases of the document.
        folder: the run folder, new or of an interrupted run.
        records: reads the records of all silos; None: from the document's tables, when the first release needs them.
        witness: record of the releases that the parties sign; None if all parties are in this process.
    """

    def __init__(
        self,
        prepared: PreparedReleases,
        folder: RunFolder,
        *,
        records: Callable[[], ColumnTable] | None = None,
        witness: Witness | None = None,
    ) -> None:
        super().__init__(folder, witness)
        self.prepared = prepared
        self._records = cache(records or (lambda: read_records(prepared)))
        self._was_whole = self.is_whole  # every release was made before this process

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of the first release; the others have the same unit and adjacency."""
        return self.prepared.series.releases[0].guarantee

    @property
    def document(self) -> TableDocument:
        """The document."""
        return self.prepared.document

    def parts(self, *, again: bool = False) -> Iterator[ReleasePart]:
        """Yield each release that the folder lacks, once the release before it is made.

        The caller makes a yielded release before it asks for the next one. If the caller leaves its step in place, the
        release was refused, and none follows.

        Args:
            again: whether to yield the last release even if it is made, so that the silos can sign the end of the run.

        Raises:
            RunFolderError: a damaged folder, or a ledger of another document.
            IntegrityError: a result without a charge.
        """
        self._check_charged()
        while again or not self.is_whole:
            releases = self.prepared.read(self.folder)
            self.journal.mend(len(releases))
            part = self._part(
                releases[: self.prepared.count - 1], is_made=len(releases) == self.prepared.count
            )
            yield part
            if part.step is not None:  # the release was refused: making it sets the step to None
                return
            again = False

    def _part(self, sums: NoisySums, *, is_made: bool) -> ReleasePart:
        """Return the next release as a part of the run.

        Args:
            sums: the sums of all earlier releases.
            is_made: whether this release is made already; it then has no step left.
        """
        prepared, journal, release = self.prepared, self.journal, self.prepared.release(sums)
        key, name = StepKey(prepared.document.name, release.number), prepared.part(len(sums))
        one_process = self.witness is None
        step = Step(
            journal,
            key,
            event=lambda _: prepared.series.releases[len(sums)].event,
            refusal=lambda: refuse_repeat(journal, key, name),
            repeatable=not prepared.series.secure
            if one_process
            else release.protocol_spec(empty_groups()).repeatable,
        )
        return ReleasePart(
            name=name,
            journal=journal,
            planned=release,
            step=None if is_made else step,
            before=sums,
            keep=lambda noisy_sum: prepared.write(self.folder, (*sums, noisy_sum)),
            records=self._records,
            privacy=prepared.series.privacy.randomness(),
            model=no_model(),
        )

    @property
    def is_whole(self) -> bool:
        """Return whether every release is made."""
        return len(self.prepared.read(self.folder)) == self.prepared.count

    @property
    def counts(self) -> tuple[int, int]:
        """A document has no training rounds."""
        return 0, 0

    def conclude(self, reason: str | None) -> PartEnding:
        """Write the statement of the charges in the ledger, if there are any.

        Raises:
            RunFolderError: the document or the declared facts differ from those that were charged and stated. Numbers
                that are released keep their first statement.
        """
        self._check_charged()
        entries = self.journal.ledger.entries
        if entries:
            times = Counter(entry.round for entry in entries)
            charged = [times[number] for number in range(1, self.prepared.count + 1)]
            statement = self.prepared.series.statement(
                self.prepared.document.name, charged, self.prepared.notes
            ).to_json()
            path = self.folder / STATEMENT
            # Compare before writing: released numbers must not get another statement from a changed document.
            if self._was_whole and path.exists() and read_json(path, RunFolderError) != statement:
                raise RunFolderError(
                    f"{self.folder.path}: the statement would differ from the one in {STATEMENT}; {self._remedy}"
                )
            self.folder.write_json(STATEMENT, statement)
        return PartEnding(folder=self.folder.path, stopped=reason)

    def _check_charged(self) -> None:
        """Check that the document requests every charge, and that every result in the folder is charged."""
        releases, name = self.prepared.read(self.folder), self.prepared.document.name
        events = {release.number: release.event for release in self.prepared.series.releases}

        def event_of(entry: Entry) -> Event | None:
            return events.get(entry.round) if entry.run == name else None

        self.journal.check_charged(event_of, self._remedy)
        self.journal.require_charges(StepKey(name, number) for number in range(1, len(releases) + 1))

    @property
    def _remedy(self) -> str:
        return (
            f"{self.prepared.document.file} or the schema was changed since, or fedveil is of another version; put "
            "back what the releases were made with, or ask for others in a document of its own"
        )

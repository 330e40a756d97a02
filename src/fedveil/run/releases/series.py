"""The releases of one document: their joint guarantee (one budget, one ledger, one statement), ready to be made."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from fedveil.data.columns import ColumnTable, read_columns
from fedveil.data.memory_tables import TableFile
from fedveil.privacy.accountant import Accountant, cached_epsilon
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import epsilon_of, least_noise
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, GaussianEvent, all_of
from fedveil.privacy.ledger import Budget, Ledger
from fedveil.privacy.statement import Statement, StatementBuilder
from fedveil.run.config.experiment import PrivacySection
from fedveil.run.config.release_document import DeclaredTables, TableDocument
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release
from fedveil.run.releases.side_releases import other_documents
from fedveil.statistics.result import NoisySums


@dataclass(frozen=True, kw_only=True)
class Series:
    """Releases of one document in order, made under one protection by the same silos.

    Attributes:
        privacy: the budget.
        accountant: bounds epsilon.
        releases: the releases in order; their guarantees have the same unit, adjacency and parties.
    """

    privacy: PrivacySection
    accountant: Accountant
    releases: tuple[Release, ...]

    @property
    def secure(self) -> bool:
        """Return whether the noise is unpredictable."""
        return self.privacy.insecure_seed is None

    @property
    def event(self) -> Event:
        """The composed event of all releases against readers."""
        return self.event_for(Role.READER)

    def event_for(self, role: Role) -> Event:
        """Return the composed event of all releases against a party or coalition."""
        return all_of([release.event_for(role) for release in self.releases])

    def epsilon_of(self, event: Event) -> float:
        """Return the epsilon of an event of all releases."""
        return cached_epsilon(self.accountant, event, self.privacy.delta)

    def ledger(self, folder: RunFolder) -> Ledger:
        """Return the ledger of a run folder."""
        first = self.releases[0].guarantee
        return Ledger(folder / "ledger.jsonl", unit=first.unit, adjacency=first.adjacency)

    def declared_for(self, multiplier: float) -> float:
        """Return the privacy.epsilon whose share for this document pays for releases of this multiplier."""
        # The document may spend share * mu^2, with mu = 1 / z of the one release that spends the whole epsilon.
        whole = GaussianEvent(noise_multiplier=multiplier * math.sqrt(self.privacy.share))
        return self.accountant.epsilon(whole, self.privacy.delta)

    def with_charges(self, counts: Sequence[int]) -> Series:
        """Return the series with every release repeated as often as it was charged.

        A release that was made again is a further release.
        """
        repeated = (release for release, many in zip(self.releases, counts, strict=True) for _ in range(many))
        return replace(self, releases=tuple(repeated))

    def statement(self, name: str, times: Sequence[int], notes: tuple[str, ...]) -> Statement:
        """Return the privacy statement of the releases, with the charges of the ledger.

        Args:
            name: name of the run.
            times: number of ledger charges of each release.
            notes: further sentences for the reader.
        """
        repeated, guarantees = self.with_charges(times), [release.guarantee for release in self.releases]
        first = guarantees[0]
        source = "the operating system's cryptographic random number generator"
        builder = StatementBuilder(
            unit=first.unit,
            adjacency=first.adjacency,
            delta=self.privacy.delta,
            accountant=self.accountant,
            units=self.releases[0].public.n_users,
            secure=self.secure,
        )
        return builder.build(
            repeated.event,
            repeated.event_for,
            first.views,
            mechanisms=(
                *(
                    release.statement_sentence(name, charged)
                    for release, charged in zip(self.releases, times, strict=True)
                ),
                *dict.fromkeys(text for guarantee in guarantees for text in guarantee.mechanisms),
            ),
            randomness=f"noise was drawn, by exact samplers, from {source}"
            if self.secure
            else "noise was derived from a known seed, for reproduction only",
            uncovered=(*(text for guarantee in guarantees for text in guarantee.uncovered), *_UNCOVERED),
            notes=notes,
            released="statistics",
        )


def calibrate_releases(
    privacy: PrivacySection, n_users: int, releases: Callable[[float], tuple[Release, ...]]
) -> tuple[float, Series]:
    """Find the least noise multiplier whose releases fit the budget; return it and their series.

    Args:
        privacy: the budget.
        n_users: |U|, the public number of users.
        releases: all releases as a function of the multiplier.

    Raises:
        ConfigError: a delta of 1 / n_users or more without ``allow_large_delta``.
        BudgetError: no multiplier fits.
    """
    assert privacy.epsilon is not None
    privacy.check_delta(n_users)
    accountant = make_accountant(privacy.accountant)

    budget = Budget(epsilon=privacy.epsilon, delta=privacy.delta, accountant=accountant)
    # The share of other documents is reserved as one Gaussian release; the noise is calibrated to the rest.
    reserved = other_documents(privacy)

    def series(multiplier: float) -> Series:
        return Series(privacy=privacy, accountant=accountant, releases=releases(multiplier))

    def spent(multiplier: float) -> float:
        return epsilon_of(all_of([series(multiplier).event, *reserved]), budget)

    multiplier = least_noise(spent, budget)
    return multiplier, series(multiplier)


_UNCOVERED: Final = (
    "declared bounds, bins, grids and categories, if somebody chose them by looking at the records",
    "other releases and runs on the same records, including those made with --repeat: they add to epsilon (fedveil "
    "spent composes their ledgers)",
    "how long the release takes: this depends on how many records there are, and anybody who waits for it can see it",
)


# --- releases that are ready to be made ---


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedReleases(ABC):
    """The releases of a document, ready to be made; public numbers only.

    Attributes:
        file: name of the releases' file in the run folder.
        document: the request.
        declared: declared facts about the tables.
        series: the joint guarantee of the releases.
        notes: further sentences for the reader of the statement.
    """

    file: ClassVar[str]

    document: TableDocument
    declared: DeclaredTables
    series: Series
    notes: tuple[str, ...]

    @abstractmethod
    def release(self, before: NoisySums) -> Release:
        """Return the release after ``before``; its length and norm do not depend on ``before``."""

    @abstractmethod
    def read(self, folder: RunFolder) -> NoisySums:
        """Return the released sums that a folder holds.

        Raises:
            RunFolderError: the file is damaged or belongs to another document.
        """

    @abstractmethod
    def to_json(self, sums: NoisySums) -> dict[str, Any]:
        """Return the content of :attr:`file` with these releases."""

    def write(self, folder: RunFolder, sums: NoisySums) -> None:
        """Write the released sums to disk; from then on, and not before, they count as released."""
        folder.write_json(self.file, self.to_json(sums))

    def part(self, n_released: int) -> str:
        """Return the name of the release after ``n_released`` others."""
        return str(n_released + 1)

    @property
    def count(self) -> int:
        """Number of releases."""
        return len(self.series.releases)


def read_records(prepared: PreparedReleases, files: Sequence[TableFile] | None = None) -> ColumnTable:
    """Return the records of all silos, in the columns that the releases read.

    Args:
        prepared: the releases.
        files: the tables; None: the files that the document names.

    Raises:
        DataError: the tables are missing or do not fit the schema.
    """
    table = prepared.document.data.table
    assert table is not None, "TableDocument asks for it"
    return read_columns(prepared.declared.schema, files or table.files, prepared.release(()).step.columns)

"""One release of statistics as its parties play it: what they agree on, what a silo gives, and the sum of all.

A simulation plays all silos in one process (:func:`noisy_sum`); between institutions a silo gives by itself what
:class:`ReleaseInputs` gives for it here, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from fedveil.data.columns import ColumnTable
from fedveil.data.records import Groups
from fedveil.methods.derive import derive, sensitivity
from fedveil.methods.guarantee import Guarantee, PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import Method
from fedveil.privacy.bounds import FixedVector
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, NoGuarantee
from fedveil.privacy.statement import show_at_most
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.randomness import PrivacyRandomness
from fedveil.run.rounds.client_inputs import ChannelInputs
from fedveil.statistics.local_vectors import PersonVector, Progress, silo_sums
from fedveil.statistics.stored import NoisySum


@dataclass(frozen=True, kw_only=True, eq=False)
class Release:
    """One release of a document or inside of a run; public before anything is released.

    Attributes:
        method: the composition of the statistic.
        step: its local step. Where it depends on an earlier release, one of the same length and norm stands here until
            that one is made.
        public: how many silos and people there are, and how many numbers it has.
        number: which release this is, so that repeatable noise is not that of another one.
        name: within the run, such as "eval/1"; releases of a document have numbers alone.
        purpose: what it is for, in words, where no document says it.
        of_model: whether what it is of follows from a model, which silos are sent.
    """

    method: Method
    step: PersonVector
    public: PublicFacts
    number: int = 1
    name: str = ""
    purpose: str = ""
    of_model: bool = False

    def __post_init__(self) -> None:
        assert self.public.length == self.step.length, (
            "what is agreed on is about the vectors that are summed"
        )

    @property
    def bound(self) -> FixedVector:
        """What every vector is held to."""
        assert isinstance(self.method.bound, FixedVector), "methods of statistics have this one"
        return self.method.bound

    @cached_property
    def guarantee(self) -> Guarantee:
        """What it guarantees among these people and silos."""
        return derive(self.method, self.public)

    @property
    def grid_loss(self) -> float:
        """What the grid of its noise may change of a log-likelihood ratio."""
        return self.guarantee.grid_loss_after(1, self.step.length)

    def std(self, summed: int | None = None) -> float:
        """Return the standard deviation of the noise on every number of a sum of so many silos; None: of all."""
        found = self.method.noise_std(self.public.n_silos, summed)
        assert found is not None, "the noise of statistics is public"
        return found

    def event_for(self, role: Role) -> Event:
        """Return the event against a party; a party that has no line is promised nothing."""
        lines = {view.role: view.event for view in self.guarantee.views} | {Role.READER: self.guarantee.event}
        return lines.get(role, NoGuarantee(reason=f"what this party learns from {self.name} is not declared"))

    def of_run(self, run: str) -> str:
        """Return what the ledger calls it, where it is a release of a run."""
        return f"{run}/{self.name}"

    def statement_sentence(self, run: str, times: int) -> str:
        """Return, for a statement, what was released in a run, charged so many times."""
        name, what = self.name or str(self.number), f", {self.purpose}" if self.purpose else ""
        again = f"; charged {times} times, because it was made again" if times > 1 else ""
        at_most = show_at_most(sensitivity(self.method, self.public))
        return (
            f"release {run}/{name}: {self.step.length} numbers{what}; one person changes their sum over "
            f"{self.public.n_silos} silos by at most {at_most} (l2){again}"
        )

    def protocol_spec(self, groups: Groups) -> ProtocolSpec[Any, Any]:
        """Return what the parties agree on; under private weighting with the counts of these (silo, user) pairs."""
        return self.method.protection.make_protocol_spec(self.method, self.public, groups, 1)


class ReleaseInputs(ChannelInputs):
    """What silos give to a release, of the records in a table: those of all silos, or a silo's own.

    Args:
        release: the release.
        table: the records.
        privacy: where noise comes from.
        progress: is told between chunks how far the sums are.
    """

    def __init__(
        self,
        release: Release,
        table: ColumnTable,
        privacy: PrivacyRandomness,
        progress: Progress | None = None,
    ) -> None:
        self._groups = table.pairs()
        super().__init__(release.protocol_spec(self._groups), release.method.channel, release.step.length)
        self._release, self._table, self._privacy, self._progress = release, table, privacy, progress

    def unprotected_sum(self, client: int) -> Float64[np.ndarray, " d"]:
        found: np.ndarray = self._sums[client]
        return found

    def _sender(self, client: int) -> Sender:
        release = self._release
        return Sender(
            number=client,
            senders=release.public.n_silos,
            round=release.number,
            attempt=self._attempt,
            grid=release.bound.grid,
            privacy=self._privacy,
        )

    @cached_property
    def _sums(self) -> Float64[np.ndarray, "silos d"]:
        release = self._release
        public = release.public
        weights = release.method.weights.for_groups(self._groups, public.n_silos, public.n_users)
        return silo_sums(release.step, self._table, weights, release.bound, self._progress)

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return a silo's people's vectors of weight 1, on the grid: a person's counts stay with the person's silos."""
        step, bound = self._release.step, self._release.bound
        condensed, _, mixed = step.pairs(self._table)
        found = [np.zeros((0, step.length))]
        own = mixed[np.flatnonzero(self._groups.silo == client)]
        for some, vectors in step.vectors(condensed, own):
            if self._progress is not None:
                self._progress(some.start, own.shape[0])
            weights = torch.ones(len(vectors), dtype=torch.float64)
            found.append(bound.quantize_(vectors, bound.norms(vectors), weights).numpy() * bound.grid)
        return np.concatenate(found)


def noisy_sum(release: Release, table: ColumnTable, privacy: PrivacyRandomness) -> NoisySum:
    """Return the sum of all silos' messages, as the server learns it under the method's protection.

    Args:
        release: the release.
        table: the records of all silos.
        privacy: where noise and keys come from.
    """
    work = ReleaseInputs(release, table, privacy)
    driver: LocalDriver[Any, Any] = LocalDriver(work.agreed, kinds=release.method.kinds, privacy=privacy)
    result, summed = driver.play((1, 0), tuple(range(release.public.n_silos)), None, work.client_input)
    return NoisySum(work.agreed.decode_sum(result), release.std(summed))

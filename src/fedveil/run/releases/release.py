"""Play one release of statistics: the public parameters, a silo's input, the sum of all silos, and its step in a run.

A simulation plays all silos in one process (:func:`noisy_sum`). In a federation a silo computes the same input as
:class:`ReleaseInputs` computes for it here, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float32, Float64

from fedveil.data.columns import ColumnTable
from fedveil.data.records import Groups
from fedveil.errors import ConfigError
from fedveil.methods.derive import derive, sensitivity
from fedveil.methods.guarantee import Guarantee, PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import Method, message_kinds, sum_noise_std
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.methods.statistic import statistic
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, NoGuarantee
from fedveil.privacy.statement import show_at_most
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import DeclaredTables, TableDocument
from fedveil.run.journal import Journal, Step, StepKey
from fedveil.run.loop import Played
from fedveil.run.rounds.client_inputs import ChannelInputs
from fedveil.statistics.local_vectors import PersonVector, Progress, silo_sums
from fedveil.statistics.request import SiloWeights
from fedveil.statistics.result import NoisySum, NoisySums, digest_of_release

# --- releases ---


@dataclass(frozen=True, kw_only=True, eq=False)
class Release:
    """One release of a document or within a run; public before anything is released.

    Attributes:
        method: the composition of the statistic.
        step: its local step. If it depends on an earlier release, this is a placeholder of the same length and norm
            until that release is made.
        public: numbers of silos and users, and the length of the release.
        number: number of the release; repeatable noise derives from it, so releases must have different numbers.
        name: name within the run, such as "eval/1"; empty for releases of a document.
        purpose: purpose in words, for statements of runs; empty for releases of a document.
        of_model: whether the released data follows from a model, which must then be sent to the silos.
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
        """The bound of every user's vector."""
        assert isinstance(self.method.bound, FixedVector), "methods of statistics have this one"
        return self.method.bound

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of the release among these users and silos."""
        return derive(self.method, self.public)

    @property
    def event(self) -> Event:
        """The event of the release against readers; the run's ledger is charged with it."""
        return self.event_for(Role.READER)

    def with_grid(self, event: Event) -> Event:
        """Return the event of the release's noise against a party, with the loss of the noise's grid."""
        return self.guarantee.event_at_round(event, 1)

    def std(self, summed: int | None = None) -> float:
        """Return the standard deviation of the noise on every number of a sum.

        Args:
            summed: number of silos in the sum; None: all.
        """
        std = sum_noise_std(self.method, self.public.n_silos, summed)
        assert std is not None, "the noise of statistics is public"
        return std

    def event_for(self, role: Role) -> Event:
        """Return the event that a role observes; a role without a view has no guarantee."""
        lines = {view.role: view.event for view in self.guarantee.views} | {Role.READER: self.guarantee.event}
        missing = NoGuarantee(reason=f"what this party learns from {self.name} is not declared")
        return self.with_grid(lines.get(role, missing))

    def of_run(self, run: str) -> str:
        """Return the name of the release in the ledger of a run."""
        return f"{run}/{self.name}"

    def statement_sentence(self, run: str, times: int) -> str:
        """Return the sentence of a statement about this release, which was charged ``times`` times."""
        name, purpose = self.name or str(self.number), f", {self.purpose}" if self.purpose else ""
        again = f"; charged {times} times, because it was made again" if times > 1 else ""
        at_most = show_at_most(sensitivity(self.method, self.public))
        return (
            f"release {run}/{name}: {self.step.length} numbers{purpose}; one person changes their sum over "
            f"{self.public.n_silos} silos by at most {at_most} (l2){again}"
        )

    def protocol_spec(self, groups: Groups) -> ProtocolSpec[Any, Any]:
        """Return the protocol's public parameters.

        Private weighting includes the counts of these (silo, user) pairs.
        """
        return self.method.protection.make_protocol_spec(self.method, self.public, groups, 1)


class ReleaseInputs(ChannelInputs):
    """Inputs of the silos to a release, from a table with the records of all silos or of one silo.

    Args:
        release: the release.
        table: the records.
        privacy: source of noise.
        progress: called between chunks of the sums.
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
        total: np.ndarray = self._sums[client]
        return total

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
        """Bounded, weighted sums of all silos: (|S|, d) float64."""
        release = self._release
        public = release.public
        weights = release.method.weights.for_groups(self._groups, public.n_silos, public.n_users)
        return silo_sums(release.step, self._table, weights, release.bound, self._progress)

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return the vectors of a silo's users, each with weight 1, on the grid of the bound.

        A user's record counts stay with the user's silos.
        """
        step, bound = self._release.step, self._release.bound
        condensed, _, mixed = step.pairs(self._table)
        blocks = [np.zeros((0, step.length))]
        own = mixed[np.flatnonzero(self._groups.silo == client)]
        for chunk, vectors in step.vectors(condensed, own):
            if self._progress is not None:
                self._progress(chunk.start, own.shape[0])
            weights = torch.ones(len(vectors), dtype=torch.float64)
            blocks.append(bound.quantize_(vectors, bound.norms(vectors), weights).numpy() * bound.grid)
        return np.concatenate(blocks)


def noisy_sum(release: Release, table: ColumnTable, privacy: PrivacyRandomness) -> NoisySum:
    """Return the noisy sum of all silos' messages, as the server learns it under the method's protection.

    Args:
        release: the release.
        table: the records of all silos.
        privacy: source of noise and keys.
    """
    work = ReleaseInputs(release, table, privacy)
    driver: LocalDriver[Any, Any] = LocalDriver(
        work.agreed, kinds=message_kinds(release.method), privacy=privacy
    )
    result, summed = driver.play((1, 0), tuple(range(release.public.n_silos)), None, work.client_input)
    return NoisySum(work.agreed.decode_sum(result), release.std(summed))


# --- method of a release ---

_WEIGHTS: Final[Mapping[str, Weights]] = MappingProxyType(
    {"records": Weights.BY_RECORDS, "equal": Weights.EQUAL, "uniform": Weights.UNIFORM}
)


def default_silo_weights(document: Experiment) -> SiloWeights:
    """Return an experiment's default weights of a user over silos.

    They are "equal", which counts users, if the protection weighs by hidden counts; else "uniform".
    """
    return "equal" if document.protection.build().weighs else "uniform"


@dataclass(frozen=True, kw_only=True)
class UncalibratedRelease:
    """A release with everything fixed except its noise.

    Attributes:
        step: the local step.
        public: numbers of silos and users, and the length of the release.
        weights: weights of a user over silos.
        protection: protection of the requesting document.
        colluding_silos: number of silos that may pool their knowledge.
    """

    step: PersonVector
    public: PublicFacts
    weights: Weights
    protection: ProtectionStage
    colluding_silos: int

    def with_noise(self, noise_multiplier: float) -> Release:
        """Return the release with this noise multiplier."""
        method = statistic(
            local=self.step,
            public=self.public,
            weights=self.weights,
            noise_multiplier=noise_multiplier,
            protection=self.protection,
            colluding_silos=self.colluding_silos,
        )
        return Release(method=method, step=self.step, public=self.public)


def design_release(
    document: Experiment | TableDocument,
    silos: SiloWeights,
    step: PersonVector,
    declared: DeclaredTables,
    *,
    key: str,
) -> UncalibratedRelease:
    """Compose a release that a document requests.

    Args:
        document: the request, with its protection.
        silos: weights of a user over silos.
        step: the local step.
        declared: declared facts about the tables.
        key: key of the weights in the document, for errors.

    Raises:
        ConfigError: weights that would reveal counts, or a protection that works on models only.
    """
    section, facts = document.protection, declared.facts(step.length)
    protection, weights = section.build(), _WEIGHTS[silos]
    if silos == "equal" and protection.weighs:
        # Under equal weights each silo counts one record per user, so a user has at most |S| in all.
        protection = section.build(n_max=facts.n_silos)
    if weights.by_records and not protection.weighs:
        raise ConfigError(
            f"{key}: '{silos}' counts people, for which silos must weigh a person by what the "
            "others hold, and these counts are hidden under protection.name = 'private-weighting' alone. Give that, or "
            "silos = 'uniform', which counts person-silo pairs (and needs no weights)"
        )
    if not (protection.masks or protection.weighs or not protection.agrees):
        raise ConfigError(
            f"protection.name: '{section.name}' is for models; statistics run under none, "
            "secure-aggregation or private-weighting"
        )
    return UncalibratedRelease(
        step=step,
        public=facts,
        weights=weights,
        protection=protection,
        colluding_silos=document.privacy.colluding_silos,
    )


# --- its step in a run ---


def no_model() -> Float32[np.ndarray, " d"]:
    """Return the model that silos receive for a release without a model: (0,) float32."""
    return np.zeros(0, dtype=np.float32)


def refuse_repeat(journal: Journal, key: StepKey, name: str) -> str | None:
    """Return why a release that is due may not be charged once more; None if it may.

    Silos that are asked again would make another release. They refuse a statement in which one of their releases is
    charged twice. In one process a further charge is allowed, and the statement names it.
    """
    if not journal.is_signed or not journal.count_charges(key):
        return None
    return (
        f"release {name} was begun before and is charged; under this protection silos that are asked again release "
        "again, which would spend more than was declared"
    )


@dataclass(kw_only=True, eq=False)
class ReleasePart:
    """One release.

    Attributes:
        name: name of the part.
        journal: journal of the run.
        planned: the release.
        step: the charge of the release; None once the release is made.
        before: sums of all earlier releases of the run.
        keep: persists the sum.
        records: reads the records of all silos; called only if all silos are in this process.
        privacy: source of noise and keys.
        model: (d,) float32 model that the release evaluates; d = 0 for a release without a model.
        number: always 1: the part has one step.
        stopped: always None: a release that is refused keeps its step.
    """

    name: str
    journal: Journal
    planned: Release
    step: Step | None
    before: NoisySums
    keep: Callable[[NoisySum], None]
    records: Callable[[], ColumnTable]
    privacy: PrivacyRandomness
    model: Float32[np.ndarray, " d"]
    number: int = 1
    stopped: str | None = None

    def start(self) -> tuple[Float32[np.ndarray, " d"], float | None]:
        """Return the model that the release evaluates, and no clip."""
        return self.model, None

    def release(self, result: Played) -> None:
        """Persist the sum."""
        assert result.total is not None, "statistics are released to the coordinator"
        noisy_sum = NoisySum(result.total, self.planned.std(result.summed))
        self.journal.release(
            lambda: digest_of_release((noisy_sum.std, noisy_sum.vector)), lambda: self.keep(noisy_sum)
        )
        self.step = None

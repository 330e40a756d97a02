"""Compose a release of statistics before its noise is known, under the protection of its document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fedveil.errors import ConfigError
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.methods.statistic import statistic
from fedveil.methods.weights import Weights
from fedveil.run.config.declared_tables import DeclaredTables
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import TableDocument
from fedveil.run.releases.release import Release
from fedveil.statistics.local_vectors import PersonVector
from fedveil.statistics.request import SiloWeights

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
    of: DeclaredTables,
    *,
    key: str,
) -> UncalibratedRelease:
    """Compose a release that a document requests.

    Args:
        document: the request, with its protection.
        silos: weights of a user over silos.
        step: the local step.
        of: declared facts about the tables.
        key: key of the weights in the document, for errors.

    Raises:
        ConfigError: weights that would reveal counts, or a protection that works on models only.
    """
    section, facts = document.protection, of.facts(step.length)
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

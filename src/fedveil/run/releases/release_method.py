"""A release of statistics before its noise is known, under the protection of the document that asks."""

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
from fedveil.statistics.limits import SiloWeights
from fedveil.statistics.local_vectors import PersonVector

_WEIGHTS: Final[Mapping[str, Weights]] = MappingProxyType(
    {"records": Weights.BY_RECORDS, "equal": Weights.EQUAL, "uniform": Weights.UNIFORM}
)


def default_silo_weights(document: Experiment) -> SiloWeights:
    """Return a person's weights over silos where an experiment does not say them: people, where they can be counted."""
    return "equal" if document.protection.build().weighs else "uniform"


@dataclass(frozen=True, kw_only=True)
class UncalibratedRelease:
    """A release of which all but the noise is fixed.

    Attributes:
        step: the local step.
        public: how many silos and people there are, and how many numbers it has.
        weights: of a person's silos.
        protection: of the document that asks.
        colluding_silos: that may pool what they know.
    """

    step: PersonVector
    public: PublicFacts
    weights: Weights
    protection: ProtectionStage
    colluding_silos: int

    def with_noise(self, noise_multiplier: float) -> Release:
        """Return the release with this noise."""
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
    """Return a release of what a document asks for.

    Args:
        document: what asks for it, under which protection.
        silos: the weights.
        step: the local step.
        of: what is declared of the tables.
        key: where the weights are asked for, for errors.

    Raises:
        ConfigError: weights that would show counts, or a protection of models.
    """
    section, facts = document.protection, of.facts(step.length)
    protection, weights = section.build(), _WEIGHTS[silos]
    if silos == "equal" and protection.weighs:
        protection = section.build(n_max=facts.n_silos)  # every silo counts one record of a person
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

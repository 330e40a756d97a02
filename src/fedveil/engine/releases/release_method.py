"""A release of statistics as a function of its noise, under the protection of the document that asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fedveil.engine.experiments.declared import Declared
from fedveil.engine.experiments.experiment import Experiment
from fedveil.engine.experiments.release_document import TableDocument
from fedveil.engine.releases.release import Release
from fedveil.errors import ConfigError
from fedveil.methods.statistic import statistic
from fedveil.methods.weights import Weights
from fedveil.statistics.limits import SiloWeights
from fedveil.statistics.local import PersonVector

_WEIGHTS: Final[Mapping[str, Weights]] = MappingProxyType(
    {"records": Weights.BY_RECORDS, "equal": Weights.EQUAL, "uniform": Weights.UNIFORM}
)


def usual_silos(document: Experiment) -> SiloWeights:
    """Return a person's weights over silos where an experiment does not say them: people, where they can be counted."""
    return "equal" if document.protection.build().weighs else "uniform"


def release_builder(
    document: Experiment | TableDocument, silos: SiloWeights, step: PersonVector, of: Declared, *, key: str
) -> Callable[[float], Release]:
    """Return a release as a function of its noise multiplier.

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

    def build(noise_multiplier: float) -> Release:
        method = statistic(
            local=step,
            public=facts,
            weights=weights,
            noise_multiplier=noise_multiplier,
            protection=protection,
            colluding_silos=document.privacy.colluding_silos,
        )
        return Release(method=method, step=step, public=facts)

    return build

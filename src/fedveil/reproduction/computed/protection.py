"""What the protection of Table 1 of ParaAegis costs: rounds of its network with hardly any training in them.

Ten clients take one step on one image each, so that a round is encoding, encryption, transport and aggregation of the
11,181,642 parameters; what plain FedAvg takes for the same is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.engine.experiments.experiment import parse, parse_assignment
from fedveil.engine.experiments.study import Selection, study_documents
from fedveil.engine.populations import Populations
from fedveil.engine.setup import prepare
from fedveil.reproduction.computed.clock import Clock
from fedveil.reproduction.results import Values

_PUBLISHED_ROUND = 3571 / 50
"""Seconds of a published round of FedAvg, IID."""
_VARIANTS = ("fedavg", "dp-fedavg", "ckks-fedavg", "serial", "stevens", "static-1", "static-10", "static-20")
_LAID_OVER = (
    "model.name=resnet18_groupnorm",
    "local.epochs=",
    "local.steps=1",
    "local.batch_size=1",
    "rounds=2",
    "evaluate_every=2",
    "data.name=imagenette_subset",
)


def paraaegis_overhead(seed: int) -> Iterator[tuple[str, Values]]:
    """CPU seconds that protection adds to a round, and the round of FedAvg over the published one with it."""
    populations = Populations()
    laid_over = (*map(parse_assignment, _LAID_OVER), {"seed": seed})
    chosen = Selection(scenarios=("iid",), variants=_VARIANTS, overrides=laid_over)
    documents = study_documents("table-1-imagenette", chosen)
    plain = None
    for document in documents:
        name = str(document["name"])
        seconds = Clock.of(prepare(parse(document, name), populations)).later
        plain = seconds if plain is None else plain  # fedavg is the first variant
        added = seconds - plain
        yield (
            name,
            {
                "overhead": 1 + added / _PUBLISHED_ROUND,
                "seconds added a round": added,
                "seconds a round": seconds,
            },
        )

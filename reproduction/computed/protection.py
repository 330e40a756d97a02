"""What the protection of Table 1 of ParaAegis costs: rounds of its network with hardly any training in them.

Ten clients take one step on one image each, so that a round is encoding, encryption, transport and aggregation of the
11,181,642 parameters; what plain FedAvg takes for the same is subtracted. A published round of FedAvg with the rest
added to it is what the paper's round takes with our protection, from which its efficiency ratio follows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Final

from fedveil.run.config.experiment import parse, parse_assignment
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import prepare
from reproduction.computed.clock import Clock
from reproduction.results import Values

_PUBLISHED: Final = {
    "iid-fedavg": (80.93, 3571),
    "iid-dp-fedavg": (20.28, 3007),
    "iid-ckks-fedavg": (81.14, 18527),
    "iid-serial": (10.54, 19956),
    "iid-varying-dp": (24.21, 2494),
    "iid-stevens": (18.78, 3635),
    "iid-static-1": (67.85, 6149),
    "iid-static-5": (73.03, 6888),
    "iid-static-10": (75.63, 7776),
    "iid-static-20": (77.53, 9530),
    "iid-dynamic-5x0_99": (72.09, 5561),
    "iid-dynamic-10x0_99": (74.50, 6238),
    "iid-dynamic-10x0_95": (68.82, 5619),
    "iid-dynamic-10x0_9": (70.87, 8762),
}
"""Accuracy in percent and seconds of 50 rounds, Table 1, IID."""
_ROUNDS: Final = 50
_LAID_OVER: Final = (
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
    populations = PopulationCache()
    laid_over = (*map(parse_assignment, _LAID_OVER), {"seed": seed})
    documents = study_documents("table-1-imagenette", Selection(scenarios=("iid",), overrides=laid_over))
    plain = None
    for document in documents:
        name = str(document["name"])
        seconds = Clock.measure(prepare(parse(_at_mean_share(document), name), populations)).later
        plain = seconds if plain is None else plain  # fedavg is the first variant
        added = seconds - plain
        accuracy, published = _PUBLISHED[name]
        total = _PUBLISHED["iid-fedavg"][1] + _ROUNDS * added
        yield (
            name,
            {
                "overhead": total / _PUBLISHED["iid-fedavg"][1],
                "seconds added a round": added,
                "seconds a round": seconds,
                "efficiency ratio": 100 * accuracy / total,
                "published efficiency ratio": 100 * accuracy / published,
            },
        )


def _at_mean_share(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with a share that falls replaced by its mean over the published rounds."""
    protection = document.get("protection", {})
    if "decay" not in protection:
        return document
    shares = (protection["ratio"] * protection["decay"] ** done for done in range(_ROUNDS))
    return document | {"protection": {"name": protection["name"], "ratio": statistics.fmean(shares)}}

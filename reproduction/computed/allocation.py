"""How records are handed out to users and silos: Figure 12 of ULDP-FL."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.setup import prepare
from reproduction.results import Values


def figure_12(seed: int) -> Iterator[tuple[str, Values]]:
    """Records of a user and of a silo on Creditcard, over their means, so that the number of rows does not matter."""
    for document in study_documents(
        "figure-4-creditcard", Selection(variants=("uldp-sgd",), overrides=({"seed": seed},))
    ):
        scenario = str(document["name"]).removesuffix("-uldp-sgd")
        population = prepare(parse(document, scenario)).population
        for what, counts in (
            ("user", population.records_per_user()),
            ("silo", population.records_per_silo()),
        ):
            shares = counts / counts.mean()
            yield f"{scenario}: most records of a {what}", {"over the mean": float(shares.max())}
            yield f"{scenario}: median {what}", {"over the mean": float(np.median(shares))}
            yield f"{scenario}: fewest records of a {what}", {"over the mean": float(shares.min())}

"""What the cells cost that are not played at published scale: two rounds of each, the second of them timed.

A cell whose round takes longer than minutes is played with less local work, and its seconds are scaled up by how many
times the published round trains on as many records, pixels or steps: an extrapolation, and told as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedveil.run.config.experiment import parse, parse_assignment
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import prepare
from reproduction.computed.clock import Clock
from reproduction.results import Values

_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One cell of a figure at published settings.

    Attributes:
        name: of the cell on the page.
        preset: its settings.
        scenario: of the preset; empty: it has none.
        variant: of the preset.
        settings: ``KEY=VALUE`` each: what is played of a published round.
        times: how many times the published round trains on what is played of it.
        rounds: published.
    """

    name: str
    preset: str
    scenario: str = ""
    variant: str
    settings: tuple[str, ...] = ()
    times: float = 1.0
    rounds: int


_ONE_PASS = ("local.epochs=1",)
_SVHN = 100 * 604_388 / 2_000 * 10 / (10 * 40)
"""Images of a published round (100 of 2,000 clients that share 604,388, ten passes) over 10 clients' 40 here."""
_SHAKESPEARE = 600_000 * 5 / 50 / (2 * 20)
"""Steps of a published round (about 600,000 windows, five passes, batches of 50) over two roles' 20 here."""
_RESIDUAL = 3 * 9_469 / 32 / (10 * 2) * (224 / 64) ** 2
"""Steps of a published round over two of each client's here, and pixels of an image over those here."""

_CELLS = (
    LeftOut(
        name="ULDP-FL Figure 4, 100 users, zipf: uldp-avg-w",
        preset="figure-4-creditcard",
        scenario="users100-zipf",
        variant="uldp-avg-w",
        rounds=100,
    ),
    LeftOut(
        name="ULDP-FL Figure 4, 100 users, zipf: uldp-group-max",
        preset="figure-4-creditcard",
        scenario="users100-zipf",
        variant="uldp-group-max",
        settings=_ONE_PASS,
        times=50,
        rounds=100,
    ),
    LeftOut(
        name="ULDP-FL Figure 5, 100 users, zipf: uldp-avg-w",
        preset="figure-5-mnist",
        scenario="users100-zipf",
        variant="uldp-avg-w",
        settings=_ONE_PASS,
        times=50,
        rounds=200,
    ),
    LeftOut(
        name="ULDP-FL Figure 5, 10,000 users, zipf: uldp-avg-w",
        preset="figure-5-mnist",
        scenario="users10000-zipf",
        variant="uldp-avg-w",
        settings=_ONE_PASS,
        times=50,
        rounds=200,
    ),
    LeftOut(
        name="ULDP-FL Figure 8, 50 silos, zipf: uldp-avg-w",
        preset="figure-8-weighting-creditcard",
        scenario="silos50-zipf",
        variant="uldp-avg-w",
        rounds=100,
    ),
    LeftOut(
        name="ULDP-FL Figure 9a: half of the users drawn",
        preset="figure-9-subsampling-creditcard",
        variant="uldp-avg-w-q0.5",
        rounds=100,
    ),
    LeftOut(
        name="DP-Fed-LS Table 3, z = 1.5: sigma 1",
        preset="table-3-svhn-subset",
        scenario="uniform",
        variant="sigma1",
        settings=_ONE_PASS,
        times=_SVHN,
        rounds=200,
    ),
    LeftOut(
        name="DP-Fed-LS Table 6, z = 1.6: sigma 1",
        preset="table-6-shakespeare",
        scenario="uniform-z16",
        variant="sigma1",
        settings=("data.n_users=8", "method.client_sampling_rate=0.25", "local.epochs=", "local.steps=20"),
        times=_SHAKESPEARE,
        rounds=100,
    ),
    LeftOut(
        name="ParaAegis Table 1, iid: fedavg",
        preset="table-1-imagenette",
        scenario="iid",
        variant="fedavg",
        settings=("model.name=resnet18_groupnorm", "local.epochs=", "local.steps=2"),
        times=_RESIDUAL,
        rounds=50,
    ),
)


def left_out(seed: int) -> Iterator[tuple[str, Values]]:
    """CPU seconds of a published round of every cell, and hours of a run."""
    populations = PopulationCache()
    for cell in _CELLS:
        played = _seconds_of_a_round(cell, seed, populations)
        seconds = played * cell.times
        yield (
            cell.name,
            {
                "hours a run": seconds * cell.rounds / _HOUR,
                "seconds a round": seconds,
                "rounds": float(cell.rounds),
                "seconds played": played,
                "scaled up": cell.times,
                "cells of the preset": float(len(study_documents(cell.preset, Selection()))),
            },
        )


def _seconds_of_a_round(cell: LeftOut, seed: int, populations: PopulationCache) -> float:
    laid_over = (*map(parse_assignment, cell.settings), {"seed": seed, "rounds": 2, "evaluate_every": 2})
    chosen = Selection(
        scenarios=(cell.scenario,) if cell.scenario else None, variants=(cell.variant,), overrides=laid_over
    )
    (document,) = study_documents(cell.preset, chosen)
    return Clock.measure(prepare(parse(document, cell.name), populations)).later

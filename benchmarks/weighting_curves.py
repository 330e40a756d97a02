"""How a silo's step of private weighting grows with parameters and with users: measured points and fitted slopes.

Paillier has the paper's setting (3072 bits, N_max 2000, precision 1e-10), ring-LWE that of deep models (N_max 64, our
grid). "First round" includes what a silo computes from fresh encrypted weights, "later round" does not. Every point is
measured; nothing is extrapolated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.curves import Place, Point, fit
from benchmarks.harness import Row
from benchmarks.weighting_silo import GRID, KEY_BITS, UNIT, Silo, key, paillier_evaluator, plan_of, timed
from fedveil.protocols.weighting.paillier_weights import PaillierKeyHolder
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder

_SHORT = 5.0  # CPU seconds below which the median of three steps is taken


def curves(
    lengths: Sequence[int] = (16, 160, 1600, 16_000, 100_000),
    users: Sequence[int] = (10, 30, 100, 300, 1000),
) -> Iterator[Row]:
    """Measure 20 users over these numbers of parameters, and 16 parameters over these numbers of users."""
    yield from _curve("parameters", [(20, length, length) for length in lengths])
    yield from _curve("users", [(number, 16, number) for number in users])


def _curve(over: str, points: Sequence[tuple[int, int, int]]) -> Iterator[Row]:
    fixed = "20 users" if over == "parameters" else "16 parameters"
    axis = f"{over} ({fixed})"
    ciphers: list[tuple[str, Callable[[int, int], Silo]]] = [
        (f"Paillier {KEY_BITS} bits, N_max 2000", _paillier),
        ("ring-LWE, N_max 64", _ring),
    ]
    for cipher, make in ciphers:
        measured: dict[str, list[Point]] = {"first round": [], "later round": []}
        for number, length, x in points:
            silo = make(number, length)
            loading, step = timed(silo.load)[1], timed(silo.step)[1]
            if step < _SHORT:
                step = statistics.median([step, timed(silo.step)[1], timed(silo.step)[1]])
            for name, seconds in (("first round", loading + step), ("later round", step)):
                measured[name].append(Point(x=x, y=seconds))
                yield Row(
                    case=f"{cipher}, {number:,} users, {length:,} parameters: a silo's {name}",
                    unit="CPU s",
                    ours=seconds,
                    place=Place(plot=axis, curve=f"{cipher}: {name}", x=x),
                )
            del silo
        for name, found in measured.items():
            line = fit(found)
            case = f"{cipher}, {fixed}: slope of the {name}, fitted over {found[0].x:,} to {found[-1].x:,} {over}"
            yield Row(case=case, unit=f"ms per {over[:-1]}", ours=line.slope * 1e3)


def _paillier(users: int, length: int) -> Silo:
    plan = plan_of(users=users, length=length, largest_count=2000, unit=UNIT)
    return Silo.of(plan, PaillierKeyHolder(plan, key()), paillier_evaluator)


def _ring(users: int, length: int) -> Silo:
    plan = plan_of(users=users, length=length, largest_count=64, unit=GRID)
    return Silo.of(plan, RlweKeyHolder(plan), RlweEvaluator)

"""Late entry: terms as a loop over intervals has them, no larger than claimed, unbiased, and refused elsewhere."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.data.columns import read_columns
from fedveil.data.schema import Schema, parse_schema
from fedveil.data.tables import read_tables
from fedveil.errors import ConfigError, DataError
from fedveil.statistics.inference.families import PiecewiseExponential

FAMILY = PiecewiseExponential("t", "y", (0.0, 1.0, 3.0), 0.4, 0.6, entry="e")
PLAIN = PiecewiseExponential("t", "y", (0.0, 1.0, 3.0), 0.4, 0.6)
SCHEMA = """
n_users = 300
user = "p"

[target]
kind = "survival"
time = "t"
event = "y"
entry = "e"

[features.x]
kind = "number"
lower = -3
upper = 3
"""


def drawn(n: int, seed: int, beta: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Return covariates and (time, event, entry) of people who had no event before their entry."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1))
    time = rng.exponential(size=n) / (0.4 * np.exp(beta * x[:, 0]))
    entry = np.where(rng.random(n) < 0.3, 0.0, 2 * rng.random(n))
    kept = time > entry
    end = entry + 3 * rng.random(n)
    target = np.stack((np.minimum(time, end), (time <= end).astype(float), entry), axis=1)
    return x[kept], target[kept]


def looped(x: np.ndarray, target: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Return the scores, interval by interval: the oracle."""
    grid, scores = FAMILY.grid, []
    for z, (time, event, entry) in zip(x, target, strict=True):
        followed, martingale, stopped = 0.0, [0.0] * (len(grid) - 1), False
        for j, (low, high) in enumerate(itertools.pairwise(grid)):
            begin, end = max(low, entry), min(high, time)
            hazard = max(end - begin, 0.0) * math.exp(theta[j] + float(z @ theta[2:]))
            if followed + hazard > FAMILY.hazard and not stopped:
                martingale[j] -= FAMILY.hazard - followed
                stopped = True
            elif not stopped:
                martingale[j] -= hazard
            followed += hazard
            if event and not stopped and begin < time <= high and time > low:
                martingale[j] += 1
        scores.append([*martingale, *(z * sum(martingale))])
    return np.array(scores)


def test_terms_are_those_of_a_loop_over_intervals() -> None:
    x, target = drawn(500, 1)
    edges = np.array(
        [[1.0, 1, 0.5], [1.0, 1, 0.0], [1.5, 1, 1.0], [3.0, 1, 2.9], [9.0, 1, 4.0], [2.0, 0, 1.999]]
    )
    x, target = np.concatenate((x, np.zeros((6, 1)))), np.concatenate((target, edges))
    for theta in (np.array([-0.9, -0.9, 0.6]), np.array([0.5, -2.0, -0.3])):
        score, curvature = FAMILY.terms(x, target, theta)
        assert np.allclose(score, looped(x, target, theta), atol=1e-12)
        followed = -(looped(x, target * [1, 0, 1], theta))[:, :2]
        assert np.allclose(curvature[:, [0, 1], [0, 1]], followed, atol=1e-12)
        assert np.allclose(curvature[:, 2, 2], followed.sum(axis=1) * x[:, 0] ** 2, atol=1e-12)


def test_an_entry_at_the_beginning_changes_no_bit() -> None:
    x, target = drawn(500, 2)
    target[:, 2] = 0
    theta = np.array([-0.9, -0.7, 0.6])
    for late, plain in zip(FAMILY.terms(x, target, theta), PLAIN.terms(x, target[:, :2], theta), strict=True):
        assert np.array_equal(late, plain)


def test_no_entry_makes_a_record_weigh_more_than_claimed() -> None:
    """An attack: any entry, time, event and theta, far beyond what data have; and the bound is reached."""
    rng = np.random.default_rng(3)
    n, largest, bend = 20_000, 0.0, 0.0
    for scale in (0.1, 1.0, 30.0):
        x = rng.normal(size=(n, 1)) * scale
        entry = rng.choice([0.0, 0.5, 1.0, 2.999, 1e9], n)
        time = entry + rng.choice([1e-12, 0.5, 1.0, 1e9], n)
        target = np.stack((time, rng.integers(0, 2, n).astype(float), entry), axis=1)
        score, curvature = FAMILY.terms(x, target, rng.normal(size=3) * scale)
        size = np.sqrt(1 + (x**2).sum(axis=1))  # of (1, x), which the design bounds by B
        bound = np.maximum(np.sqrt(2), size)
        largest = max(largest, float((np.linalg.norm(score, axis=1) / bound).max()))
        norm = np.linalg.norm(curvature, axis=(1, 2)) / (FAMILY.hazard * size**2)
        bend = max(bend, float(norm.max()))
    assert FAMILY.score_norm(3.0) == 3.0
    assert 0.99 < largest <= 1 + 1e-12
    assert 0.5 < bend <= 1 + 1e-12


def test_stopped_martingales_have_mean_zero_from_the_entry_on() -> None:
    """Within 5 standard errors at the truth; without the entry the same records are far off."""
    x, target = drawn(200_000, 4)
    truth = np.array([math.log(0.4), math.log(0.4), 0.6])

    def z(family: PiecewiseExponential, columns: int) -> np.ndarray:
        score, _ = family.terms(x, target[:, :columns], truth)
        found: np.ndarray = score.mean(axis=0) / (score.std(axis=0) / math.sqrt(len(x)))
        return found

    assert np.abs(z(FAMILY, 3)).max() < 5
    assert np.abs(z(PLAIN, 2)).max() > 50


def write(folder: Path, rows: list[str]) -> Path:
    (folder / "schema.toml").write_text(SCHEMA)
    path = folder / "north.csv"
    path.write_text("\n".join(["p,t,y,e,x", *rows]) + "\n")
    return path


def test_a_regression_reads_the_entry_of_a_schema(tmp_path: Path) -> None:
    x, target = drawn(500, 5)
    rows = [f"p{at},{t},{y:.0f},{e},{z[0]}" for at, (z, (t, y, e)) in enumerate(zip(x, target, strict=True))][
        :300
    ]
    path = write(tmp_path, rows)
    people = fv.tables(tmp_path / "schema.toml", [path], test_share=1e-12)
    options: dict[str, object] = {"family": "survival", "silos": "uniform", "epsilon": 200.0}
    settings = {"privacy": {"insecure_seed": 1}}
    found = fv.infer(people, grid=[0, 3], rate=0.4, folder=tmp_path, settings=settings, **options)  # type: ignore[arg-type]
    assert found.fitted.family.columns == ("t", "y", "e")
    schema = people.schema
    assert schema is not None
    table = read_columns(schema, [path], ["t", "y", "e"])
    wrong = write(tmp_path, ["p1,2,1,2,0", "p2,2,1,3,0", "p3,2,1,,0", "p4,2,1,-1,0", "p5,2,1,1,0"])
    known = FAMILY.target(read_columns(schema, [wrong], ["t", "y", "e"]))[1]
    assert known.tolist() == [False, False, False, False, True]
    assert FAMILY.target(table)[1].all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("p1,2,1,2,0", r"record 1 .*column 'e': the entry must be before the time \('t'\)"),
        ("p1,2,1,-1,0", "record 1 .*column 'e': the entry must not be negative"),
        ("p1,2,1,,0", "record 1 .*column 'e': the target is missing"),
    ],
)
def test_an_entry_that_cannot_be_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path, [row])
    with pytest.raises(DataError, match=message):
        read_tables(parse_schema(SCHEMA.encode(), "schema"), [path], test_share=0.5)


def test_late_entry_is_refused_where_nothing_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path, [f"p{at},{at + 2},{at % 2},1,0.5" for at in range(20)])
    people = fv.tables(tmp_path / "schema.toml", [path], test_share=0.5)
    with pytest.raises(
        ConfigError, match=r"target\.entry: training takes all records as observed from time 0"
    ):
        fv.train(
            torch.nn.Linear(1, 1),
            people,
            method=fv.uldp_avg_w(clip=0.5),
            rounds=2,
            epsilon=5,
            folder=tmp_path / "runs",
        )
    assert not (tmp_path / "runs").exists()  # nothing was charged
    asked = {"silos": "uniform", "release": {"s": {"kind": "survival", "grid": [1, 2]}}}
    with pytest.raises(ConfigError, match=r"target\.entry: a survival curve takes all"):
        fv.stats(people, asked, epsilon=5, folder=tmp_path / "runs")


def test_a_column_of_entries_has_no_other_role() -> None:
    fields = {"n_users": 3, "user": "p", "features": {"e": {"kind": "number", "lower": 0, "upper": 1}}}
    target = {"kind": "survival", "time": "t", "event": "y", "entry": "e"}
    with pytest.raises(ValueError, match="column 'e' has two roles"):
        Schema.model_validate(fields | {"target": target})

"""Late entry: terms as a loop over intervals has them, no larger than claimed, unbiased, and refused elsewhere."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow.csv import read_csv

import fedveil as fv
from fedveil.data.columns import read_columns
from fedveil.data.schema import Schema, parse_schema
from fedveil.data.tables import read_tables
from fedveil.errors import ConfigError, DataError
from fedveil.statistics.inference.families import PiecewiseExponential
from fedveil.training.losses import load_loss
from fedveil.training.metrics import c_index
from tests.slow_cases import slow_only

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


def looped_cox(scores: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the term of every record: the risk set as a plain condition on every other record."""
    terms = []
    for i, (event, time, _) in enumerate(targets.tolist()):
        at_risk = [scores[i]]
        for j, (_, other, entry) in enumerate(targets.tolist()):
            before = other > time or (other == time and j < i)
            if j != i and before and entry < time:
                at_risk.append(scores[j])
        terms.append(event * (torch.logsumexp(torch.stack(at_risk), 0) - scores[i]))
    return terms


def entered(n: int, seed: int, tied: bool = True) -> torch.Tensor:
    """Return (event, time, entry) of n records, with ties between times and between entries and times."""
    rng = np.random.default_rng(seed)
    time = rng.integers(1, 6, n) if tied else rng.random(n) + 0.1
    entry = rng.integers(0, time) if tied else rng.random(n) * time
    return torch.from_numpy(np.stack((rng.integers(0, 2, n), time, entry), axis=1).astype(np.float64))


@pytest.mark.parametrize("tied", [True, False])
def test_cox_takes_nobody_into_a_risk_set_before_the_entry(tied: bool) -> None:
    loss = load_loss("cox")
    targets = torch.stack([entered(9, seed, tied) for seed in range(4)])
    scores = torch.randn((4, 9), generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    scores.requires_grad_()
    present = torch.ones((4, 9), dtype=torch.bool)
    present[1, 6:] = False  # rows that pad a batch
    wanted = [
        looped_cox(scores[g, : int(m.sum())], targets[g, : int(m.sum())]) for g, m in enumerate(present)
    ]
    found = [loss.records(scores[g, :, None], targets[g], present[g]) for g in range(4)]
    for terms, oracle in zip(found, wanted, strict=True):
        torch.testing.assert_close(terms[: len(oracle)], torch.stack(oracle))
        assert not terms[len(oracle) :].any()
    (slopes,) = torch.autograd.grad(sum(torch.stack(one).sum() for one in wanted), scores)
    torch.testing.assert_close(loss.slopes(scores.detach()[:, None], targets, present)[:, 0], slopes)


def test_cox_with_entries_at_zero_is_cox_without_entries() -> None:
    loss, targets, mask = load_loss("cox"), entered(12, 3), torch.ones(12)
    targets[:, 2] = 0
    scores = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        loss.records(scores, targets, mask), loss.records(scores, targets[:, :2], mask)
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_concordance_index_compares_with_those_who_had_entered(seed: int) -> None:
    targets, rng = entered(25, seed, tied=seed % 2 == 0), np.random.default_rng(seed)
    scores, weights = rng.integers(0, 5, 25).astype(float), rng.integers(0, 3, 25).astype(float)
    pairs = agreed = 0.0
    for (i, (event, time, _)), (j, (other, later, entry)) in itertools.product(
        enumerate(targets.tolist()), repeat=2
    ):
        if i != j and event and entry < time and (later > time or (later == time and not other)):
            both = weights[i] * weights[j]
            pairs, agreed = (
                pairs + both,
                agreed + both * (1.0, 0.5, 0.0)[1 - int(np.sign(scores[i] - scores[j]))],
            )
    found = c_index(torch.from_numpy(scores)[:, None], targets, torch.from_numpy(weights))
    assert found == pytest.approx(agreed / pairs, abs=1e-12)


def late_population(n: int = 400) -> fv.Population:
    x, target = drawn(n, 5, beta=1.0)
    return fv.population(
        np.clip(x, -3, 3) / 3,
        targets=target[:, [1, 0, 2]],
        task="survival",
        user=np.arange(len(x)) % 60,
        silo=[("north", "south")[at % 2] for at in range(len(x))],
        n_users=60,
    )


@pytest.mark.filterwarnings("ignore:the loss cox compares records")
@pytest.mark.parametrize("model", ["whitened-hazards", *slow_only(["linear"])])
def test_a_model_is_trained_from_records_that_entered_late(model: str, tmp_path: Path) -> None:
    people = late_population()
    assert people.train.targets.shape[1] == 3
    how = {} if model == "linear" else {"method": fv.newton(horizon=3.0), "rounds": 12}
    result = fv.train(model, people, epsilon=50, metrics=["c_index"], folder=tmp_path, **how)
    assert result.metrics["c_index"] > 0.6


def test_a_survival_target_has_no_entry_after_its_time() -> None:
    late = [[1, 2, 0], [1, 2, 2]]
    with pytest.raises(DataError, match="the entry from 0 to below the time"):
        fv.population([[0.0], [1.0]], targets=late, task="survival", user=[0, 1], silo=[0, 0], n_users=2)


def test_an_entry_is_refused_where_nothing_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path, [f"p{at},{at + 2},{at % 2},1,0.5" for at in range(20)])
    people = fv.tables(tmp_path / "schema.toml", [path], test_share=0.5)
    evaluation = {"evaluation": {"horizons": [3.0]}}
    with pytest.raises(
        ConfigError, match=r"target\.entry: the noisy evaluation .* takes all records as observed"
    ):
        fv.train("linear", people, epsilon=5, folder=tmp_path / "runs", settings=evaluation)
    in_memory = fv.tables(tmp_path / "schema.toml", {"north": read_csv(path)}, test_share=0.5)
    with pytest.raises(ConfigError, match=r"target\.entry: the noisy evaluation"):
        fv.train("linear", in_memory, epsilon=5, folder=tmp_path / "runs", settings=evaluation)
    assert not (tmp_path / "runs").exists()  # nothing was charged
    asked = {"silos": "uniform", "release": {"s": {"kind": "survival", "grid": [1, 2]}}}
    with pytest.raises(ConfigError, match=r"target\.entry: a survival curve takes all"):
        fv.stats(people, asked, epsilon=5, folder=tmp_path / "runs")


def test_a_column_of_entries_has_no_other_role() -> None:
    fields = {"n_users": 3, "user": "p", "features": {"e": {"kind": "number", "lower": 0, "upper": 1}}}
    target = {"kind": "survival", "time": "t", "event": "y", "entry": "e"}
    with pytest.raises(ValueError, match="column 'e' has two roles"):
        Schema.model_validate(fields | {"target": target})

"""A plan for sampled clients: closed forms beside the accountants, as in Figure S9 of DP-Fed-LS."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError, PrivacyError
from fedveil.report.plan import write_plan
from fedveil.run.planning import Plan, PlanTable, plan_rows


def plan(
    sigma: float | None, epsilon: float | None = None, accountant: str = "rdp", rounds: int | None = 30
) -> list[dict[str, object]]:
    table = plan_rows(
        Plan(
            n_users=1000,
            n_silos=1000,
            rounds=rounds,
            noise_multipliers=() if sigma is None else (sigma,),
            sampling_rates=(),
            delta=1000**-1.1,
            epsilon=epsilon,
            group_sizes=(),
            records_per_silo=50,
            batch_size=10,
            epochs=5,
            colluding_silos=0,
            accountant=accountant,
            client_sampling_rates=(0.05,),
        )
    )
    return [row for row in table.rows if "dp-fed" in str(row["method"])]


@pytest.mark.parametrize(("sampling", "theorem"), [("uniform", "theorem 1"), ("poisson", "theorem 2")])
def test_closed_forms_stand_beside_and_above_the_accountant(sampling: str, theorem: str) -> None:
    rows = {(row["rounds"], row["accountant"]): row for row in plan(3.0) if sampling in str(row["method"])}
    for rounds in {rounds for rounds, _ in rows}:
        closed, numerical = rows[rounds, theorem]["epsilon"], rows[rounds, "rdp"]["epsilon"]
        assert closed is None or closed > numerical
    assert rows[30, theorem]["epsilon"] is not None


def test_the_mnist_noise_has_its_epsilon() -> None:
    (row,) = [r for r in plan(0.8081 / 0.3) if (r["rounds"], r["accountant"]) == (30, "theorem 1")]
    assert row["epsilon"] == pytest.approx(6.0, abs=0.01)


def test_too_little_noise_for_a_theorem_is_infinite_not_small() -> None:
    assert all(row["epsilon"] is None for row in plan(0.5) if row["accountant"] == "theorem 1")


def test_a_target_is_met_by_the_samplers_own_adjacency(tmp_path: Path) -> None:
    rows = plan(None, epsilon=6.0)
    last = [row["epsilon"] for row in rows if (row["rounds"], row["accountant"]) == (30, "rdp")]
    assert len(last) == 2
    assert all(5.9 < epsilon <= 6.0 for epsilon in last)
    page = write_plan(rows, tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "theorem 1" in page
    assert "theorem 2" in page


def test_the_rounds_of_a_budget_fit_it_and_one_more_does_not() -> None:
    rows = plan(2.0, epsilon=1.0, rounds=None)
    most = max(int(str(row["rounds"])) for row in rows if "poisson" in str(row["method"]))
    (fits,) = [
        r for r in rows if (r["rounds"], r["accountant"]) == (most, "rdp") and "poisson" in str(r["method"])
    ]
    one_more = [
        r for r in plan(2.0, rounds=most + 1) if "poisson" in str(r["method"]) and r["accountant"] == "rdp"
    ]
    assert fits["epsilon"] <= 1.0 < one_more[-1]["epsilon"]


def test_a_theorem_allows_its_own_most_rounds() -> None:
    """Equation 6 of DP-Fed-LS, beside the accountant's most rounds: the theorem allows fewer."""
    rows = plan(0.8081 / 0.3, epsilon=6.0, rounds=None)
    most = {row["accountant"]: row for row in rows if "uniform" in str(row["method"])}  # the last of each
    assert most["theorem 1"]["rounds"] == 30
    assert 5.9 < most["theorem 1"]["epsilon"] <= 6.0
    assert most["rdp"]["rounds"] > 100
    assert {
        row["rounds"] for row in plan(0.5, epsilon=6.0, rounds=None) if row["accountant"] == "theorem 1"
    } == {0}


def test_a_round_beyond_the_budget_leaves_none() -> None:
    rows = plan(0.3, epsilon=0.01, rounds=None)
    assert {(row["rounds"], row["epsilon"]) for row in rows} == {(0, 0.0)}


@pytest.mark.parametrize(
    ("sigma", "epsilon", "rounds"), [(1.0, 1.0, 30), (None, None, 30), (1.0, None, None)]
)
def test_a_plan_finds_one_of_three(sigma: float | None, epsilon: float | None, rounds: int | None) -> None:
    with pytest.raises(ConfigError, match="two of epsilon, rounds and sigma"):
        plan(sigma, epsilon=epsilon, rounds=rounds)


def planned(**changes: Any) -> PlanTable:
    """A plan of the methods of pairs, uldp-naive and uldp-group."""
    keys: dict[str, Any] = {
        "n_users": 100,
        "n_silos": 5,
        "rounds": 50,
        "noise_multipliers": (),
        "sampling_rates": (1.0,),
        "delta": 1e-5,
        "epsilon": 1.0,
        "group_sizes": (),
        "records_per_silo": 1000,
        "batch_size": 64,
        "epochs": 1,
        "colluding_silos": 0,
        "accountant": "pld",
    }
    return plan_rows(Plan(**keys | changes))


@pytest.mark.parametrize(
    ("rounds", "epsilon", "needed"),
    [(1000, 0.1, 972.4), (300, 0.05, 1000.7), (5000, 0.5, 497.2), (100_000, 1.0, 1179.8)],
)
def test_a_feasible_budget_is_planned_though_more_noise_could_not_be_drawn(
    rounds: int, epsilon: float, needed: float
) -> None:
    found = planned(rounds=rounds, epsilon=epsilon)
    row = [one for one in found.rows if "uldp-avg" in one["method"]][-1]
    assert row["rounds"] == rounds
    assert epsilon * 0.99 < row["epsilon"] <= epsilon
    assert row["noise_multiplier"] == pytest.approx(needed, rel=2e-3)


def test_every_row_of_a_plan_stands_alone() -> None:
    """uldp-naive needs twice the noise that pairs need, which is more than can be drawn: only its row is refused."""
    found = planned(rounds=1000, epsilon=0.1)
    assert {row["method"] for row in found.rows} == {"uldp-sgd, uldp-avg, uldp-avg-w"}
    (refused,) = found.refused
    assert (refused["method"], refused["rounds"]) == ("uldp-naive", 1000)
    assert "needs a noise multiplier of about 194" in refused["reason"]
    beside = planned(
        noise_multipliers=(5.0, 1e9), epsilon=None, rounds=10, colluding_silos=0, group_sizes=(2, 10**8)
    )
    assert {(row["method"], row["noise_multiplier"]) for row in beside.rows} == {
        (method, 5.0) for method in ("uldp-sgd, uldp-avg, uldp-avg-w", "uldp-naive", "uldp-group-2")
    }
    assert any("group size k = 100000000" in row["reason"] for row in beside.refused)
    few = planned(noise_multipliers=(50.0,), epsilon=None, rounds=3_000_000, sampling_rates=(0.001,))
    assert {row["rounds"] for row in few.refused} == {3_000_000}
    assert len({row["rounds"] for row in few.rows if "uldp-avg" in row["method"]}) == 11


def test_a_plan_without_any_row_is_refused_for_the_reasons_of_all() -> None:
    with pytest.raises(PrivacyError, match=r"no row can be planned: uldp-sgd.*uldp-naive: "):
        planned(noise_multipliers=(1e9,), epsilon=None)
    with pytest.raises(ConfigError, match="epsilon = inf: a target must be above 0 and finite"):
        planned(epsilon=math.inf)
    with pytest.raises(ConfigError, match="delta = nan: must be above 0 and below 1"):
        planned(delta=math.nan)


def test_the_page_of_a_plan_has_the_refused_rows(tmp_path: Path) -> None:
    found = planned(rounds=1000, epsilon=0.1)
    page = write_plan(found.rows, tmp_path / "plan.html", found.refused).read_text(encoding="utf-8")
    assert "Rows that cannot be planned" in page
    assert "more than the 1832 that can be drawn exactly" in page

"""A plan for sampled clients: closed forms beside the accountants, as in Figure S9 of DP-Fed-LS."""

from pathlib import Path

import pytest

from fedveil.engine.planning import Plan, plan_rows
from fedveil.errors import ConfigError
from fedveil.report.plan import write_plan


def plan(
    sigma: float | None, epsilon: float | None = None, accountant: str = "rdp", rounds: int | None = 30
) -> list[dict[str, object]]:
    rows = plan_rows(
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
    return [row for row in rows if "dp-fed" in str(row["method"])]


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


def test_a_round_beyond_the_budget_leaves_none() -> None:
    rows = plan(0.3, epsilon=0.01, rounds=None)
    assert {(row["rounds"], row["epsilon"]) for row in rows} == {(0, 0.0)}


@pytest.mark.parametrize(
    ("sigma", "epsilon", "rounds"), [(1.0, 1.0, 30), (None, None, 30), (1.0, None, None)]
)
def test_a_plan_finds_one_of_three(sigma: float | None, epsilon: float | None, rounds: int | None) -> None:
    with pytest.raises(ConfigError, match="two of epsilon, rounds and sigma"):
        plan(sigma, epsilon=epsilon, rounds=rounds)

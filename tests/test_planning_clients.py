"""A plan for sampled clients: closed forms beside the accountants, as in Figure S9 of DP-Fed-LS."""

from pathlib import Path

import pytest

from fedveil.engine.planning import Plan, plan_rows
from fedveil.report.plan import write_plan


def plan(sigma: float, epsilon: float | None = None, accountant: str = "rdp") -> list[dict[str, object]]:
    rows = plan_rows(
        Plan(
            n_users=1000,
            n_silos=1000,
            rounds=30,
            noise_multipliers=(sigma,),
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
    rows = plan(1.0, epsilon=6.0)
    last = [row["epsilon"] for row in rows if (row["rounds"], row["accountant"]) == (30, "rdp")]
    assert len(last) == 2
    assert all(5.9 < epsilon <= 6.0 for epsilon in last)
    page = write_plan(rows, tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "theorem 1" in page
    assert "theorem 2" in page

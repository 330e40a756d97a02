"""Vectors of statistics: strategies, norms over all neighbours, and what one person moves in the stored integers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from fedveil.data.columns import ColumnTable, Numbers, Places
from fedveil.data.schema import Category, Schema
from fedveil.errors import ConfigError, PrivacyError
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.statistics.blocks import MOST_NUMBERS, Block, Layout, Powers
from fedveil.statistics.compose import compose, predict_errors
from fedveil.statistics.local_vectors import LocalStatistic, silo_sums
from fedveil.statistics.request import Request
from fedveil.statistics.strategy import Strategy, prefix_coefficients, prefix_norm

GRID = 2.0**-29
SCHEMA = Schema.model_validate(
    {
        "n_users": 10,
        "user": "who",
        "silos": ["a", "b", "c"],
        "target": {"kind": "survival", "time": "days", "event": "died"},
        "features": {
            "age": {"kind": "number", "lower": 0, "upper": 100},
            "dose": {"kind": "number", "lower": -1, "upper": 1},
            "sick": {"kind": "category", "categories": ["0", "1"]},
            "ward": {"kind": "category", "categories": ["x", "y", "z"]},
        },
    }
)
EVERYTHING = {
    "age": {"show": ["count", "missing", "histogram", "quantiles", "mean"], "bins": 8},
    "dose": {"show": ["quantiles"], "bins": 4},
    "sick": {"show": ["categories"]},
    "follow_up": {"kind": "survival", "grid": [0, 1, 10, 100]},
    "table": {"kind": "cross", "columns": ["sick", "ward"]},
    "moments": {"kind": "correlation", "columns": ["age", "dose"]},
}


def step_of(**request: object) -> LocalStatistic:
    """Return the local step of a request over all kinds of releases."""
    return compose(
        Request.model_validate({"silos": "records", "release": EVERYTHING} | request), SCHEMA, ("a", "b", "c")
    )


def table_of(records: list[tuple[int, int, dict[str, float | None]]]) -> ColumnTable:
    """Return the table of (user, silo, cells); a cell that is not given is missing, None is unreadable."""

    def column(name: str) -> Numbers | Places:
        cells = [cells.get(name, "missing") for _, _, cells in records]
        state = np.array([1 if c == "missing" else 2 if c is None else 0 for c in cells], dtype=np.int8)
        values = np.array([0.0 if s else float(c) for c, s in zip(cells, state, strict=True)])
        if name in ("sick", "ward", "died"):
            return Places(values=values.astype(np.int64), state=state)
        return Numbers(values=values, state=state)

    return ColumnTable(
        columns={name: column(name) for name in ("age", "dose", "sick", "ward", "days", "died")},
        silo=np.array([silo for _, silo, _ in records], dtype=np.int32),
        user=np.array([user for user, _, _ in records], dtype=np.int32),
        n_users=10,
        silo_names=("a", "b", "c"),
    )


def sums_of(step: LocalStatistic, table: ColumnTable, weights: Weights = Weights.BY_RECORDS) -> np.ndarray:
    """Return the sum over all silos, in units of the grid."""
    bound = FixedVector(norm=1.0, step=GRID)
    of_pairs = weights.for_groups(table.pairs(), 3, table.n_users)
    found: np.ndarray = silo_sums(step, table, of_pairs, bound).sum(axis=0) / GRID
    return found


# --- strategies ---------------------------------------------------------------------------------------------


def test_the_prefix_matrix_is_the_square_root_of_sums() -> None:
    strategy = Strategy("prefix", 12)
    root = strategy.matrix * prefix_norm(12)
    assert np.allclose(root @ root, np.tril(np.ones((12, 12))))
    assert prefix_coefficients(5).tolist() == [math.comb(2 * k, k) / 4**k for k in range(5)]


@pytest.mark.parametrize("kind", ["flat", "prefix", "stacked"])
@pytest.mark.parametrize(("ordered", "free"), [(1, 0), (2, 1), (9, 2)])
def test_every_strategy_has_norm_one_and_an_inverse(kind: str, ordered: int, free: int) -> None:
    strategy = Strategy(kind, ordered, free)  # type: ignore[arg-type]
    columns = np.linalg.norm(strategy.matrix, axis=0)
    assert columns.max() == pytest.approx(strategy.sensitivity, abs=1e-12)
    assert np.allclose(strategy.decoder @ strategy.matrix, np.eye(strategy.width))
    assert strategy.matrix.shape == (strategy.n_sent, strategy.width)
    inverse = np.linalg.inv(strategy.matrix.T @ strategy.matrix)
    assert np.allclose(strategy.covariance, inverse)


@pytest.mark.parametrize(
    ("kind", "size", "leading", "worst", "single"),
    [
        ("flat", 64, 5.70, 8.0, 1.00),
        ("prefix", 64, 2.2, 2.4, 1.74),
        ("prefix", 256, 2.7, 2.8, 1.90),
        ("stacked", 64, 2.5, 3.0, 1.18),
        ("stacked", 256, 3.1, 3.6, 1.20),
    ],
)
def test_noise_of_bins_and_of_leading_sums(
    kind: str, size: int, leading: float, worst: float, single: float
) -> None:
    """The measured table of the strategies, in standard deviations, to a percent beyond its rounding."""
    strategy = Strategy(kind, size)  # type: ignore[arg-type]
    sums = np.tril(np.ones((size, size)))
    of_sums = np.sqrt(np.diag(sums @ strategy.covariance @ sums.T))
    of_bins = np.sqrt(np.diag(strategy.covariance))

    def rms(values: np.ndarray) -> float:
        return float(np.sqrt((values**2).mean()))

    assert rms(of_sums) == pytest.approx(leading, rel=0.01, abs=0.05)
    assert of_sums.max() == pytest.approx(worst, rel=0.01, abs=0.05)
    assert rms(of_bins) == pytest.approx(single, rel=0.01)


def test_no_person_is_longer_than_the_closed_form_says() -> None:
    """Brute force over persons of up to three records in up to two silos, cell by cell: convexity, and its corner."""
    for strategy in (Strategy("prefix", 4, 1), Strategy("stacked", 4, 1), Strategy("flat", 4, 1)):
        found = []
        for cells in itertools.product(range(strategy.width), repeat=3):
            for split in (1, 2):
                first = np.mean([strategy.matrix[:, cell] for cell in cells[:split]], axis=0)
                second = np.mean([strategy.matrix[:, cell] for cell in cells[split:]], axis=0)
                for weight in (0.0, 1 / 3, 2 / 3, 1.0):
                    found.append(float(np.linalg.norm(weight * first + (1 - weight) * second)))
        assert max(found) == pytest.approx(strategy.sensitivity, abs=1e-12)
        assert (
            max(found) > 0.97 * strategy.sensitivity
        )  # a bound that is a few percent larger is not the closed form


def test_powers_reach_their_norm_at_the_corners_and_no_further() -> None:
    encoder = Powers((("age", 0.0, 100.0), ("dose", -1.0, 1.0)), (0, 1, 2))
    corners = [
        {"age": age, "dose": dose} for age in (-5.0, 0.0, 50.0, 100.0, 1e9) for dose in (-1.0, 0.0, 1.0)
    ]
    rows = encoder.rows(table_of([(0, 0, corner) for corner in corners])).toarray()
    norms = np.linalg.norm(rows, axis=1)
    assert norms.max() == pytest.approx(encoder.norm)
    assert encoder.width == 6


def test_codes_of_vectors_that_are_not_one_hot_are_refused() -> None:
    powers = Powers((("age", 0.0, 1.0),), (0, 1, 2))
    with pytest.raises(ConfigError, match="only one-hot"):
        Block(release="r", part="p", encoder=powers, kind="prefix")


# --- the vector as a whole ----------------------------------------------------------------------------------


def test_shares_minimise_the_weighted_error() -> None:
    layout = step_of().layout

    def error(shares: np.ndarray) -> float:
        return sum(
            one.block.weight * one.block.length * one.block.norm**2 / share
            for one, share in zip(layout.slots, shares, strict=True)
        )

    shares = np.array([slot.share for slot in layout.slots])
    assert shares.sum() == pytest.approx(1.0)
    assert layout.norm == pytest.approx(1.0)
    for place in range(len(shares)):
        moved = shares.copy()
        moved[place] *= 1.05
        assert error(moved / moved.sum()) > error(shares)


_CELLS = st.fixed_dictionaries(
    {},
    optional={
        "age": st.none() | st.floats(allow_nan=False) | st.integers(0, 100).map(float),
        "dose": st.none() | st.floats(-2, 2),
        "sick": st.none() | st.integers(0, 1),
        "ward": st.none() | st.integers(0, 2),
        "days": st.none() | st.floats(-5, 200),
        "died": st.none() | st.integers(0, 1),
    },
)
_RECORDS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), _CELLS), min_size=1, max_size=12)


@pytest.mark.parametrize(
    "request_of",
    [
        {},
        {"by": ["ward"]},
        {"by": ["silo", "ward"]},
        {"combine": "first", "order": "days"},
        {"combine": "last", "order": "days"},
    ],
)
@settings(max_examples=8, deadline=None)
@given(records=_RECORDS)
def test_removing_a_person_moves_the_stored_integers_by_one_norm(
    request_of: dict[str, object], records: list[tuple[int, int, dict[str, float | None]]]
) -> None:
    """In rational arithmetic, over all blocks at once; every block by itself moves by its share."""
    step = step_of(**request_of)
    for weights in (Weights.BY_RECORDS, Weights.EQUAL, Weights.UNIFORM):
        with_her = sums_of(step, table_of(records), weights)
        others = [one for one in records if one[0] != records[0][0]]
        without = sums_of(step, table_of(others), weights) if others else np.zeros_like(with_her)
        moved = [int(value) for value in (with_her - without)]
        assert all(value == moved[place] for place, value in enumerate(with_her - without))
        assert Fraction(sum(value**2 for value in moved)) <= Fraction(1 / GRID) ** 2
        for slot in step.layout.slots:
            own = sum(value**2 for value in moved[slot.place])
            assert own <= slot.share * (1 + 1e-12) / GRID**2


def test_the_bound_is_reached_and_a_larger_vector_is_cut() -> None:
    """A person with extreme cells moves the sum by almost 1; a layout scaled up by 5 % still moves it by 1 at most."""
    cells = {"age": 100.0, "dose": 1.0, "sick": 0.0, "ward": 0.0, "days": 200.0, "died": 0.0}
    step = step_of()
    moved = np.linalg.norm(sums_of(step, table_of([(0, 0, cells)]))) * GRID
    assert 0.6 < moved <= 1.0
    bound = FixedVector(norm=1.0, step=GRID)
    rows = torch.tensor([[0.6 * 1.05, 0.8 * 1.05], [0.6, 0.8]], dtype=torch.float64)
    units = bound.quantize_(rows, bound.norms(rows), torch.ones(2, dtype=torch.float64))
    for row in units.tolist():
        assert sum(Fraction(value) ** 2 for value in row) <= Fraction(1 / GRID) ** 2
        assert math.hypot(*row) * GRID > 1 - 2**-28


@pytest.mark.parametrize("weights", [Weights.BY_RECORDS, Weights.EQUAL])
def test_one_person_over_three_silos_counts_one(weights: Weights) -> None:
    """For every one-hot block: cells add up to 1 within 2^-20, whatever a user's records hold."""
    cells: list[dict[str, float | None]] = [
        {"age": 30.0, "sick": 1.0, "ward": 2.0, "days": 5.0, "died": 1.0},
        {"age": None, "dose": 0.5, "sick": None},
        {},
        {"age": 1e30, "days": 1000.0, "died": 0.0},
    ]
    step = step_of()
    table = table_of([(7, 0, cells[0]), (7, 1, cells[1]), (7, 1, cells[2]), (7, 2, cells[3])])
    total = sums_of(step, table, weights) * GRID
    for slot in step.layout.slots:
        if slot.block.encoder.covers:
            decoded = slot.block.strategy.decoder @ (total[slot.place] / slot.scale)
            assert decoded.sum() == pytest.approx(1.0, abs=2.0**-20)


def test_under_uniform_weights_she_counts_a_third_in_each_silo() -> None:
    step = step_of()
    table = table_of([(7, 0, {"age": 30.0}), (7, 1, {"age": 30.0})])
    slot = step.layout.slots[0]
    total = sums_of(step, table, Weights.UNIFORM)[slot.place] * GRID
    decoded = slot.block.strategy.decoder @ (total / slot.scale)
    assert decoded.sum() == pytest.approx(2 / 3, abs=2.0**-20)


# --- records of one person ----------------------------------------------------------------------------------


def naive_cells(step: LocalStatistic, table: ColumnTable) -> dict[tuple[int, int], np.ndarray]:
    """Return a pair's mean row of the first block, record by record: the readable oracle."""
    rows = step.layout.slots[0].block.cells(table).toarray()
    found: dict[tuple[int, int], list[np.ndarray]] = {}
    for place, row in enumerate(rows):
        found.setdefault((int(table.silo[place]), int(table.user[place])), []).append(row)
    return {pair: np.mean(vectors, axis=0) for pair, vectors in found.items()}


def test_records_of_a_pair_are_averaged_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    records = [
        (int(rng.integers(4)), int(rng.integers(3)), {"age": float(rng.integers(-5, 110))}) for _ in range(40)
    ]
    step, table = step_of(), table_of(records)
    _, groups, mixed = step.pairs(table)
    found = (mixed @ step.layout.slots[0].block.cells(table)).toarray()
    oracle = naive_cells(step, table)
    for place in range(len(groups)):
        expected = oracle[int(groups.silo[place]), int(groups.user[place])]
        assert np.allclose(found[place], expected)


@pytest.mark.parametrize(("combine", "expected"), [("first", 20.0), ("last", 60.0)])
def test_first_and_last_go_by_their_column_and_average_ties(combine: str, expected: float) -> None:
    step = step_of(combine=combine, order="days")
    ages = [(3.0, 20.0), (9.0, 50.0), (9.0, 70.0), (3.0, 20.0), (None, 99.0)]
    table = table_of([(0, 0, {"days": days, "age": age}) for days, age in ages])
    _, _, mixed = step.pairs(table)
    assert float((mixed.toarray() @ table.numbers("age").values)[0]) == pytest.approx(expected)
    assert mixed.toarray().sum() == pytest.approx(1.0)


def test_any_takes_a_one_where_any_record_has_one() -> None:
    request = Request.model_validate(
        {"silos": "records", "combine": "any", "release": {"sick": {"show": ["categories"]}}}
    )
    step = compose(request, SCHEMA, ("a", "b", "c"))
    cells: list[dict[str, float | None]] = [{"sick": 0.0}, {"sick": 1.0}, {}, {}, {"sick": None}]
    whole = table_of(
        [
            (0, 0, cells[0]),
            (0, 0, cells[1]),
            (1, 0, cells[2]),
            (1, 0, cells[0]),
            (2, 0, cells[2]),
            (2, 0, cells[4]),
        ]
    )
    table = ColumnTable(
        columns={"sick": whole.columns["sick"]},
        silo=whole.silo,
        user=whole.user,
        n_users=10,
        silo_names=whole.silo_names,
    )
    total = sums_of(step, table) * GRID
    assert total == pytest.approx([1.0, 1.0, 1.0, 0.0], abs=2.0**-20)  # 0, 1, missing, undeclared


def test_no_cell_stops_a_release() -> None:
    """Missing, unreadable, infinite and out of range: every record lies in one cell of every partition."""
    table = table_of(
        [(0, 0, {"age": math.inf}), (1, 0, {"age": -math.inf, "days": -1.0}), (2, 0, {"age": None})]
    )
    step = step_of()
    for slot in step.layout.slots:
        rows = slot.block.cells(table)
        assert np.isfinite(rows.data).all()
        if slot.block.encoder.covers:
            assert rows.sum(axis=1).tolist() == [1.0, 1.0, 1.0]


def test_a_time_on_a_grid_point_belongs_to_the_interval_that_it_ends() -> None:
    exits, events = (slot.block for slot in step_of().layout.slots_of("follow_up"))
    times = [0.0, 1.0, 1.5, 10.0, 100.0, 100.5]
    table = table_of([(who, 0, {"days": time, "died": 1.0}) for who, time in enumerate(times)])
    # exits: last interval first; beyond, (10, 100], (1, 10], [0, 1], unreadable
    assert exits.cells(table).toarray().argmax(axis=1).tolist() == [3, 3, 2, 2, 1, 0]
    assert events.cells(table).toarray().sum(axis=0).tolist() == [2.0, 2.0, 1.0]


def test_the_fixed_vector_keeps_its_edges() -> None:
    bound = FixedVector(norm=1.0, step=GRID)
    rows = torch.tensor([[math.nan, 0.5], [math.inf, 0.0], [0.0, 0.0]], dtype=torch.float64)
    units = bound.quantize_(rows, bound.norms(rows), torch.ones(3, dtype=torch.float64))
    assert units.abs().sum() == 0
    with pytest.raises(PrivacyError, match="power of two"):
        FixedVector(norm=1.0, step=0.3)
    with pytest.raises(PrivacyError, match="weight"):
        bound.quantize_(rows, bound.norms(rows), torch.full((3,), 1.1, dtype=torch.float64))
    with pytest.raises(PrivacyError, match="2\\^20"):
        bound.norms(torch.zeros((1, 2**20 + 1), dtype=torch.float64))


def test_a_million_people_are_not_truncated_away() -> None:
    """The shift of a count by truncation stays below a tenth of a person, where the grid of a clip takes four."""
    rows = torch.full((1, 2), math.sqrt(0.5) * 0.3, dtype=torch.float64)
    bound = FixedVector(norm=1.0, step=GRID)
    units = bound.quantize_(rows.clone(), bound.norms(rows), torch.tensor([1 / 3], dtype=torch.float64))
    lost = float((rows / 3 - units * GRID).abs().max())
    assert lost * 1e6 < 0.1


def test_an_empty_request_and_a_weight_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="no release is requested"):
        Layout(())


@pytest.mark.parametrize(("categories", "numbers"), [(89, 8190), (90, 8281)])
def test_a_cross_table_is_planned_without_a_matrix_or_refused_for_its_length(
    categories: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of 1 KB asks for tables whose matrices would take gigabytes."""
    wards = {"kind": "category", "categories": [str(number) for number in range(categories)]}
    sick = {"kind": "category", "categories": [str(number) for number in range(90)]}
    schema = SCHEMA.model_copy(
        update={
            "features": {
                name: Category.model_validate(one) for name, one in {"sick": sick, "ward": wards}.items()
            }
        }
    )
    request = Request.model_validate(
        {
            "silos": "uniform",
            "release": {"table": {"kind": "cross", "columns": ["sick", "ward"]}},
            "max_standard_error": 100.0,
        }
    )
    for name in ("matrix", "decoder", "covariance"):
        monkeypatch.setattr(Strategy, name, property(lambda _: pytest.fail("a matrix was made")))
    if numbers > MOST_NUMBERS:
        with pytest.raises(
            ConfigError, match=f"release.table: {numbers} of {numbers} numbers; .* at most 8192"
        ):
            compose(request, schema, ("a", "b"))
        return
    layout = compose(request, schema, ("a", "b")).layout
    (plan,) = predict_errors(request, layout, n_users=1000, noise_std=3.0, unit=0.5)
    assert (plan.numbers, plan.noise) == (numbers, 6.0)
    (block,) = layout.blocks
    cells = sparse.csr_array(([0.25, 1.0], [7, 8000], [0, 1, 2]), shape=(2, numbers))
    assert np.array_equal(block.encode(cells), cells.toarray())


class Dense(LocalStatistic):
    """The same vectors, every number of them."""

    def few(self, table: ColumnTable, mixed: sparse.csr_array) -> None:
        """Return nothing, so that they are summed in full."""


def test_vectors_of_few_numbers_are_summed_as_if_all_were_there() -> None:
    """Bit for bit, also of people with many records, and of nobody."""
    rng, n = np.random.default_rng(3), 400
    cells = [
        {"age": float(rng.integers(-9, 120)), "dose": float(rng.normal())} if rng.random() < 0.8 else {}
        for _ in range(n)
    ]
    user = np.where(rng.random(n) < 0.3, 0, rng.integers(0, 10, n))  # one of them has a third of all records
    table = table_of(list(zip(user.tolist(), rng.integers(0, 3, n).tolist(), cells, strict=True)))
    release = {name: {"show": ["histogram"], "bins": 200} for name in ("age", "dose")}
    layout = step_of(release=release).layout
    assert LocalStatistic(layout=layout).few(table, LocalStatistic(layout=layout).pairs(table)[2]) is not None
    assert step_of().few(table, step_of().pairs(table)[2]) is None, "codes have no zeros"
    for one in (table, table.take(np.zeros(0, dtype=np.int64))):
        whole, few = (sums_of(step, one) for step in (Dense(layout=layout), LocalStatistic(layout=layout)))
        assert np.array_equal(whole, few)

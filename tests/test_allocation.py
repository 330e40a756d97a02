"""Allocations follow their laws: they fit the right exponent, reject a wrong one, give published counts."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from fedveil.data.allocation import (
    Allocation,
    FixedZipf,
    Law,
    deal_evenly,
    draw_zipf,
    fixed_uniform,
    limit_labels,
    pair_up,
    share_classes,
    spread_over_silos,
    zipf_law,
)
from fedveil.data.splits import holdout_by_user, local_tests, stratified_holdout
from fedveil.errors import ConfigError, DataError
from fedveil.randomness import ExperimentRandomness

FALSE_ALARM = 1e-6
HEART = np.repeat(np.arange(4, dtype=np.int32), [199, 172, 30, 85])
TCGA = np.repeat(np.arange(6, dtype=np.int32), [248, 156, 164, 129, 129, 40])


def generator(seed: int = 0) -> np.random.Generator:
    return ExperimentRandomness(seed).numpy("test allocation")


def chi_square_fits(counts: np.ndarray, law: np.ndarray) -> bool:
    """Whether counts pass Pearson's test of a multinomial law at the false-alarm level."""
    expected = counts.sum() * law
    assert expected.min() >= 5
    return bool(((counts - expected) ** 2 / expected).sum() < chi2.isf(FALSE_ALARM, len(law) - 1))


@given(st.integers(0, 500), st.integers(1, 40), st.integers(0, 3))
def test_dealing_gives_everyone_equally_many_up_to_one(n: int, hands: int, seed: int) -> None:
    counts = np.bincount(deal_evenly(n, hands, generator(seed)), minlength=hands)
    assert counts.sum() == n
    assert counts.max() - counts.min() <= 1


def test_dealing_is_a_random_permutation() -> None:
    first = [int(deal_evenly(4, 4, generator(seed))[0]) for seed in range(4000)]
    assert chi_square_fits(np.bincount(first, minlength=4), np.full(4, 0.25))


@pytest.mark.parametrize(("exponent", "wrong"), [(0.5, 0.47), (0.5, 0.53), (2.0, 1.94), (2.0, 2.06)])
def test_zipf_draws_fit_their_exponent_and_no_other(exponent: float, wrong: float) -> None:
    counts = np.bincount(draw_zipf(200_000, 20, exponent, generator()), minlength=20)
    assert chi_square_fits(counts, zipf_law(20, exponent))
    assert not chi_square_fits(counts, zipf_law(20, wrong))


def test_a_users_silos_follow_zipf_over_her_own_random_order() -> None:
    n_users, per_user, n_silos = 2000, 100, 5
    user = np.repeat(np.arange(n_users, dtype=np.int32), per_user)
    silo = spread_over_silos(user, n_users, n_silos, 2.0, generator())
    pairs = np.bincount(user.astype(np.int64) * n_silos + silo, minlength=n_users * n_silos).reshape(
        n_users, -1
    )
    ranked = np.sort(pairs, axis=1)[:, ::-1].sum(axis=0) / user.size
    # sorting by count takes the larger of two near ties: 3rd to 5th place lie a little off the law
    np.testing.assert_allclose(ranked, zipf_law(n_silos, 2.0), atol=0.012)
    assert chi_square_fits(
        np.bincount(pairs.argmax(axis=1), minlength=n_silos), np.full(n_silos, 1 / n_silos)
    )


@pytest.mark.parametrize(("exponent", "fits"), [(2.0, True), (1.9, False), (2.1, False)])
def test_the_share_of_the_first_silo_rejects_a_wrong_silo_exponent(exponent: float, fits: bool) -> None:
    user = np.repeat(np.arange(100, dtype=np.int32), 2000)
    silo = spread_over_silos(user, 100, 5, exponent, generator())
    largest = max_per_user(user, silo, 100, 5).sum()
    assert chi_square_fits(np.array([largest, user.size - largest]), first_and_rest(2.0)) == fits


def max_per_user(user: np.ndarray, silo: np.ndarray, n_users: int, n_silos: int) -> np.ndarray:
    pairs = np.bincount(user.astype(np.int64) * n_silos + silo, minlength=n_users * n_silos)
    return pairs.reshape(n_users, n_silos).max(axis=1)


def first_and_rest(exponent: float) -> np.ndarray:
    first = zipf_law(5, exponent)[0]
    return np.array([first, 1 - first])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    st.lists(st.integers(0, 30), min_size=2, max_size=20),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_no_user_but_the_first_has_more_labels_than_allowed(
    labels: list[int], counts: list[int], k: int, seed: int
) -> None:
    column = np.array(labels, dtype=np.int64)
    user = limit_labels(np.array(counts), column, k, generator(seed))
    assert user.shape == column.shape
    for who in range(1, len(counts)):
        held = np.unique(column[user == who])
        assert len(held) <= k
        assert (user == who).sum() <= counts[who] + k / 2  # the shares of k labels are rounded


def test_leftover_records_go_to_user_0() -> None:
    labels = np.repeat(np.arange(2, dtype=np.int64), [10, 90])
    user = limit_labels(np.array([0, 10, 10]), labels, 1, generator())
    assert np.bincount(user).tolist() == [80, 10, 10]


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("law", ["uniform", "zipf"])
def test_fixed_silos_keep_their_sizes_and_users_their_least(law: Law, least: int) -> None:
    user = Allocation(law=law).allocate_within_silos(
        TCGA, n_users=50, n_silos=6, least=least, randomness=ExperimentRandomness(3)
    )
    counts = np.bincount(user, minlength=50)
    assert counts.sum() == len(TCGA)
    if law == "zipf":
        assert counts.min() >= least


def test_fixed_uniform_users_are_uniform_with_replacement() -> None:
    drawn = np.concatenate([fixed_uniform(HEART, 10, 4, 1, generator(seed)) for seed in range(100)])
    counts = np.bincount(drawn, minlength=10)
    assert chi_square_fits(counts, np.full(10, 0.1))
    assert not chi_square_fits(counts, zipf_law(10, 0.1))


def test_fixed_uniform_hands_records_out_in_pairs() -> None:
    for seed in range(20):
        user = fixed_uniform(TCGA, 200, 6, 2, generator(seed))
        odd = np.unique(TCGA.astype(np.int64) * 200 + user, return_counts=True)[1] % 2
        assert odd.sum() == 2  # the silos of 129 records
    assert fixed_uniform(np.zeros(1, dtype=np.int32), 5, 1, 2, generator()).shape == (1,)


def test_fixed_zipf_counts_fit_their_exponent_and_no_other() -> None:
    silo = np.repeat(np.arange(4, dtype=np.int32), 5000)
    law = FixedZipf(exponent=0.5, main_share=0.8, least=1)
    counts = sum(np.bincount(law.users(silo, 20, 4, generator(seed)), minlength=20) - 1 for seed in range(5))
    assert chi_square_fits(np.asarray(counts), zipf_law(20, 0.5))
    assert not chi_square_fits(np.asarray(counts), zipf_law(20, 0.47))


@pytest.mark.parametrize(("share", "fits"), [(0.8, True), (0.77, False), (0.83, False)])
def test_the_main_silo_of_a_user_has_its_share_while_no_silo_is_full(share: float, fits: bool) -> None:
    silo = np.repeat(np.arange(4, dtype=np.int32), 10_000)
    user = FixedZipf(exponent=0.0, main_share=share, least=1).users(silo, 2000, 4, generator())
    early = user < 1000  # silos fill up only towards the last users
    main = int(max_per_user(user[early], silo[early], 2000, 4).sum())
    counts = np.array([main, int(early.sum()) - main])
    assert chi_square_fits(counts, np.array([0.8, 0.2])) == fits


def test_too_few_records_for_everyone_is_refused() -> None:
    with pytest.raises(DataError, match="at most 433 users fit"):
        FixedZipf(exponent=0.5, main_share=0.8, least=2).users(TCGA[:866], 434, 6, generator())


def test_a_full_silo_passes_records_on() -> None:
    silo = np.repeat(np.arange(3, dtype=np.int32), [1, 1, 98])
    user = FixedZipf(exponent=0.5, main_share=0.8, least=1).users(silo, 5, 3, generator())
    assert np.bincount(user, minlength=5).sum() == 100


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_one_silo_holds_everything_whatever_the_main_share(share: float) -> None:
    user = FixedZipf(exponent=0.5, main_share=share, least=1).users(
        np.zeros(30, dtype=np.int32), 3, 1, generator()
    )
    assert np.bincount(user, minlength=3).sum() == 30


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.integers(0, 5))
def test_paired_records_keep_at_most_one_alone(silos: list[int], seed: int) -> None:
    wished = np.array(silos, dtype=np.int64)
    paired = pair_up(wished, generator(seed))
    assert paired.shape == wished.shape
    assert set(paired.tolist()) <= set(silos)
    had_two = np.bincount(wished).max() >= 2
    alone = (np.unique(paired, return_counts=True)[1] == 1).sum()
    assert alone == 0 if had_two else alone == (2 if len(silos) == 2 else 1)


# Silos, records that belong together, users, law; published pairs, least, most records, users present.
# They come from one seed; the range over many of ours must hold them.
MEASURED = [
    (HEART, 1, 50, "uniform", (168, 4, 17, 50)),
    (HEART, 1, 50, "zipf", (93, 2, 38, 50)),
    (HEART, 1, 200, "uniform", (347, 1, 6, 192)),
    (HEART, 1, 200, "zipf", (251, 1, 14, 200)),
    (TCGA, 2, 50, "uniform", (223, 6, 32, 50)),
    (TCGA, 2, 50, "zipf", (88, 5, 66, 50)),
    (TCGA, 2, 200, "uniform", (362, 2, 12, 184)),
    (TCGA, 2, 200, "zipf", (235, 2, 22, 200)),
]


@pytest.mark.parametrize(("silo", "least", "n_users", "law", "published"), MEASURED)
def test_the_measured_allocation_of_fixed_silos_lies_in_our_range(
    silo: np.ndarray, least: int, n_users: int, law: Law, published: tuple[int, ...]
) -> None:
    n_silos = int(silo.max()) + 1
    seen = []
    for seed in range(30):
        user = Allocation(law=law).allocate_within_silos(
            silo, n_users=n_users, n_silos=n_silos, least=least, randomness=ExperimentRandomness(seed)
        )
        counts = np.bincount(user, minlength=n_users)
        present = counts[counts > 0]
        pairs = len(np.unique(silo.astype(np.int64) * n_users + user))
        seen.append((pairs, present.min(), present.max(), len(present)))
    center, spread = np.mean(seen, axis=0), np.std(seen, axis=0)
    assert (np.abs(np.array(published) - center) <= 3.5 * spread + 0.5).all()


def test_few_contributions_of_one_record_remain_with_tcga_zipf() -> None:
    alone = []
    for seed in range(12):
        user = FixedZipf(exponent=0.5, main_share=0.8, least=2).users(TCGA, 200, 6, generator(seed))
        alone.append((np.unique(TCGA.astype(np.int64) * 200 + user, return_counts=True)[1] == 1).sum())
    assert abs(32 - np.mean(alone)) <= 3.5 * np.std(alone)  # 32 is what the authors' program leaves


@pytest.mark.parametrize(
    ("law", "n_users", "pairs", "least", "median", "most"),
    [
        ("uniform", 100, (499, 501), (505, 530), (538, 541), (550, 575)),
        ("zipf", 100, (494, 501), (245, 300), (395, 420), (2800, 3020)),
        ("limited-labels", 100, (485, 501), (120, 290), (385, 425), (2800, 6500)),
        ("uniform", 10_000, (34_500, 35_100), (1, 4), (5, 6), (6, 6)),
        ("zipf", 10_000, (20_500, 21_200), (1, 1), (4, 4), (235, 300)),
    ],
)
def test_the_measured_allocation_of_free_silos_lies_in_our_range(
    law: Law,
    n_users: int,
    pairs: tuple[int, int],
    least: tuple[int, int],
    median: tuple[int, int],
    most: tuple[int, int],
) -> None:
    labels = np.arange(60_000, dtype=np.int64) % 10
    for seed in range(3):
        randomness = ExperimentRandomness(seed)
        user, silo = Allocation(law=law).allocate(
            labels, len(labels), n_users=n_users, n_silos=5, randomness=randomness
        )
        kept = ~local_tests(silo, labels, randomness.numpy("local test"))
        assert 53_990 <= kept.sum() <= 54_000
        counts = np.bincount(user[kept], minlength=n_users)
        present = counts[counts > 0]
        seen = (
            len(np.unique(user[kept].astype(np.int64) * 5 + silo[kept])),
            present.min(),
            np.median(present),
            present.max(),
        )
        for value, (low, high) in zip(seen, (pairs, least, median, most), strict=True):
            assert low <= value <= high


def test_clients_are_silos_of_one_user() -> None:
    user, silo = Allocation(law="clients").allocate(
        None, 1000, n_users=20, n_silos=20, randomness=ExperimentRandomness(0)
    )
    assert user.tolist() == silo.tolist()
    assert np.bincount(user).tolist() == [50] * 20


def test_an_allocation_depends_on_its_seed_alone() -> None:
    def drawn(seed: int) -> list[int]:
        return (
            Allocation()
            .allocate(None, 100, n_users=9, n_silos=3, randomness=ExperimentRandomness(seed))[0]
            .tolist()
        )

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def refused(match: str, action: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=match):
        action()


def test_impossible_allocations_are_refused() -> None:
    randomness = ExperimentRandomness(0)
    refused("user_exponent", lambda: Allocation(user_exponent=-0.1))
    refused("silo_exponent", lambda: Allocation(silo_exponent=float("nan")))
    refused("main_share", lambda: Allocation(main_share=1.5))
    refused("labels_per_user", lambda: Allocation(labels_per_user=0))
    refused(
        "as many silos",
        lambda: Allocation(law="clients").allocate(None, 9, n_users=3, n_silos=2, randomness=randomness),
    )
    refused(
        "needs class labels",
        lambda: Allocation(law="limited-labels").allocate(
            None, 9, n_users=3, n_silos=2, randomness=randomness
        ),
    )
    refused(
        "at least one user",
        lambda: Allocation().allocate(None, 9, n_users=0, n_silos=2, randomness=randomness),
    )
    refused(
        "needs free silos",
        lambda: Allocation(law="clients").allocate_within_silos(
            HEART, n_users=3, n_silos=4, least=1, randomness=randomness
        ),
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data())
def test_a_stratified_holdout_has_its_count_and_every_class_its_share(
    labels: list[int], data: st.DataObject
) -> None:
    column = np.array(labels, dtype=np.int64)
    count = data.draw(st.integers(0, len(labels)))
    chosen = stratified_holdout(column, count, generator())
    assert chosen.sum() == count
    for label in set(labels):
        exact = count * (column == label).sum() / len(labels)
        assert abs((chosen & (column == label)).sum() - exact) < 1


def test_every_record_is_held_out_alike_often() -> None:
    labels = np.array([0] * 5 + [1] * 10, dtype=np.int64)
    stratified = sum(stratified_holdout(labels, 3, generator(seed)).astype(int) for seed in range(1000))
    assert chi_square_fits(np.asarray(stratified), np.full(15, 1 / 15))


def test_a_record_is_held_out_with_its_probability_whoever_else_is_there() -> None:
    user = np.repeat(np.arange(5, dtype=np.int32), 200)
    key = user.astype(np.int64) * 10**12 + 7
    held = sum(holdout_by_user(user, key, 0.2, seed).astype(int) for seed in range(500))
    assert chi_square_fits(np.asarray(held), np.full(1000, 1 / 1000))
    assert abs(int(np.sum(held)) - 100_000) < 6 * np.sqrt(500_000 * 0.2 * 0.8)
    rest = user != 2
    for seed in range(5):
        alone = holdout_by_user(user[rest], key[rest], 0.2, seed)
        np.testing.assert_array_equal(alone, holdout_by_user(user, key, 0.2, seed)[rest])


def test_only_silos_above_five_hundred_set_records_aside() -> None:
    silo = np.repeat(np.arange(3, dtype=np.int32), [500, 501, 1000])
    aside = local_tests(silo, np.zeros(1501 + 500, dtype=np.int64), generator())
    assert np.bincount(silo[aside], minlength=3).tolist() == [0, 51, 100]


@pytest.mark.parametrize("concentration", [0.5, 1.0])
def test_shares_of_a_class_are_dirichlet_and_reject_another_concentration(concentration: float) -> None:
    """One user's share of a class is Beta(a, 9 a): variance 0.09 / (10 a + 1); 1,500 independent classes."""
    labels = np.repeat(np.arange(1_500), 200)
    user = share_classes(labels, 10, concentration, generator())
    shares = np.bincount(1_500 * user + labels, minlength=15_000).reshape(10, 1_500)[0] / 200
    variances = {a: 0.09 / (10 * a + 1) for a in (concentration, 0.5 * concentration)}
    spread = np.square(shares - 0.1).mean()
    error = np.square(shares - 0.1).std() / np.sqrt(1_500)
    assert abs(shares.mean() - 0.1) < 5 * np.sqrt(variances[concentration] / 1_500)
    assert abs(spread - variances[concentration]) < 5 * error
    assert abs(spread - variances[0.5 * concentration]) > 5 * error


def test_dirichlet_gives_every_record_to_a_client_who_is_a_silo() -> None:
    labels = np.tile(np.arange(3), 50)
    law = Allocation(law="dirichlet", concentration=0.1)
    user, silo = law.allocate(labels, 150, n_users=4, n_silos=4, randomness=ExperimentRandomness(0))
    assert np.array_equal(user, silo)
    assert user.min() >= 0
    assert user.max() < 4
    with pytest.raises(ConfigError, match="class labels"):
        law.allocate(None, 150, n_users=4, n_silos=4, randomness=ExperimentRandomness(0))
    with pytest.raises(ConfigError, match="as many silos"):
        law.allocate(labels, 150, n_users=4, n_silos=3, randomness=ExperimentRandomness(0))
    with pytest.raises(ConfigError, match="concentration"):
        Allocation(law="dirichlet", concentration=0.0)


def test_a_users_choice_is_the_same_alone_and_among_many_blocks_of_records() -> None:
    """Records of three users lie in each of three blocks of 2^16."""
    random = np.random.default_rng(0)
    user = random.integers(0, 40_000, 150_000)
    key = user * 7 + 1
    held = holdout_by_user(user, key, 0.3, 5)
    assert 0.29 < held.mean() < 0.31
    for one in (0, 20_000, 39_999, int(np.bincount(user).argmax())):
        own = user == one
        assert np.array_equal(held[own], holdout_by_user(user[own], key[own], 0.3, 5))

"""What every method must keep: add one line to METHOD_CASES for a new one."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.data.records import Affine, Groups, Records, limit_records_per_user
from fedveil.errors import CompositionError
from fedveil.methods.boosted_trees import boosted_trees
from fedveil.methods.cepam import (
    cepam_gaussian,
    cepam_laplace,
    fl,
    fl_gaussian,
    fl_gaussian_sdq,
    fl_laplace,
    fl_laplace_sdq,
    fl_sdq,
)
from fedveil.methods.contributions import ClientContribution, SiloUserContribution
from fedveil.methods.derive import derive, sensitivity
from fedveil.methods.dp_fed_ls import dp_fed, dp_fed_ls
from fedveil.methods.fedavg import fedavg
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.newton import newton
from fedveil.methods.paraaegis import ckks_fedavg, dp_fedavg, paraaegis, serial, stevens, varying_dp
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg, uldp_avg_w, uldp_group, uldp_naive, uldp_sgd, uldp_sgd_w
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent, NoGuarantee, PoissonSampledEvent
from fedveil.privacy.noise import grid_law
from fedveil.privacy.sampling import Everyone, PoissonUsers
from fedveil.protocols.session_messages import UserTotals
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.registry import names
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.steps import LocalDpSgd, LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from tests.messages import sender

SILOS, USERS, CLIP, SIGMA = 3, 6, 0.7, 5.0
LOCAL = LocalSgd(learning_rate=0.5, epochs=2, batch_size=2)
METHOD_CASES = {
    "fedavg": lambda sigma: fedavg(local=LOCAL),
    "uldp-naive": lambda sigma: uldp_naive(local=LOCAL, n_silos=SILOS, clip=CLIP, noise_multiplier=sigma),
    "uldp-group": lambda sigma: uldp_group(local=LOCAL, clip=CLIP, noise_multiplier=sigma, group_size=2),
    "uldp-sgd": lambda sigma: uldp_sgd(clip=CLIP, noise_multiplier=sigma),
    "uldp-sgd-w": lambda sigma: uldp_sgd_w(clip=CLIP, noise_multiplier=sigma, power="main"),
    "uldp-avg": lambda sigma: uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=sigma),
    "uldp-avg-w": lambda sigma: uldp_avg_w(local=LOCAL, clip=CLIP, noise_multiplier=sigma),
    "dp-fed": lambda sigma: dp_fed(local=LOCAL, n_users=USERS, clip=CLIP, noise_multiplier=sigma),
    "dp-fed-ls": lambda sigma: dp_fed_ls(
        local=LOCAL, n_users=USERS, clip=CLIP, noise_multiplier=sigma, smoothing=1.0
    ),
}
PUBLISHED = {"local": LOCAL, "n_users": USERS, "largest_silo": 10, "clip": CLIP}
METHOD_CASES |= {
    "dp-fedavg": lambda sigma: dp_fedavg(**PUBLISHED, noise_multiplier=sigma),
    "ckks-fedavg": lambda sigma: ckks_fedavg(local=LOCAL),
    "serial": lambda sigma: serial(**PUBLISHED, noise_multiplier=sigma),
    "varying-dp": lambda sigma: varying_dp(**PUBLISHED, noise_multiplier=sigma),
    "stevens": lambda sigma: stevens(local=LOCAL, largest_silo=10, clip=CLIP, noise_multiplier=sigma),
    "paraaegis": lambda sigma: paraaegis(**PUBLISHED, noise_multiplier=sigma),
}


def messages(sigma: float) -> dict[str, Any]:
    """What CEPAM and its baselines take."""
    return {"local": LOCAL, "n_users": USERS, "clip": CLIP, "noise_multiplier": sigma}


METHOD_CASES |= {
    "cepam-gaussian": lambda sigma: cepam_gaussian(**messages(sigma)),
    "cepam-laplace": lambda sigma: cepam_laplace(**messages(sigma)),
    "fl": lambda sigma: fl(local=LOCAL, n_users=USERS),
    "fl-sdq": lambda sigma: fl_sdq(local=LOCAL, n_users=USERS, clip=CLIP, step=1.0),
    "fl-gaussian": lambda sigma: fl_gaussian(**messages(sigma)),
    "fl-laplace": lambda sigma: fl_laplace(**messages(sigma)),
    "fl-gaussian-sdq": lambda sigma: fl_gaussian_sdq(**messages(sigma), step=1.0),
    "fl-laplace-sdq": lambda sigma: fl_laplace_sdq(**messages(sigma), step=1.0),
}
METHOD_CASES["newton"] = lambda sigma: newton(
    inputs=3, classes=2, task="classification", schema=None, target_range=None, noise_multiplier=sigma
)
METHOD_CASES["boosted-trees"] = lambda sigma: boosted_trees(
    inputs=3, classes=2, target_range=None, noise_multiplier=sigma
)
NOISE_BY_COMPRESSION = ("cepam-gaussian", "cepam-laplace")
every_method = pytest.mark.parametrize("name", METHOD_CASES)
bounded_sum = pytest.mark.parametrize(
    "name", ["uldp-naive", "uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w"]
)


def test_every_method_has_a_case() -> None:
    assert set(METHOD_CASES) == set(names("methods"))


@every_method
def test_method_is_a_frozen_value(name: str) -> None:
    method = METHOD_CASES[name](SIGMA)
    assert method == METHOD_CASES[name](SIGMA)
    assert len({method, METHOD_CASES[name](SIGMA)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.name = "other"


@every_method
def test_without_noise_there_is_no_guarantee_and_a_reason(name: str) -> None:
    federation = PublicFacts(n_silos=SILOS, n_users=USERS, silo_records=(10, 10, 10))
    if name in NOISE_BY_COMPRESSION:
        with pytest.raises(CompositionError, match="leaves it nothing to compress with"):
            METHOD_CASES[name](0.0)
        return
    event = derive(METHOD_CASES[name](0.0), federation).event
    assert isinstance(event, NoGuarantee)
    assert event.reason


# --- the bound on the sum -------------------------------------------------------------------------------------


@cache
def linear() -> Task:
    """Return a task over two features, which training leaves as it was."""
    model = build_model("linear", input_shape=(2,), n_outputs=2, randomness=ExperimentRandomness(0))
    return Task(model=model, loss=load_loss("cross_entropy"))


def totals(method: Method, records: Records) -> np.ndarray:
    """Return the sum over all silos of a round's clipped, weighted contributions."""
    task = linear()
    pairs = isinstance(method.contribution, SiloUserContribution | ClientContribution)
    groups = records.by_silo_user() if pairs else records.by_silo(SILOS)
    cohort = Cohort.from_records(
        records, groups=groups, n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )
    sums = LoopTrainer(task=task, local=method.local).sums(
        TrainJob(
            task.initial(),
            cohort,
            torch.arange(len(groups)),
            method.weights.for_groups(groups, SILOS, USERS),
            method.bound,
            ExperimentRandomness(1),
            ("round", 1),
        ),
    )
    return sums.total.sum(0).numpy()


@st.composite
def tables(draw: st.DrawFn) -> Records:
    n = draw(st.integers(4, 24))
    seed = draw(st.integers(0, 2**32 - 1))
    size = draw(st.sampled_from([1e-3, 1.0, 1e4, 1e18, 3e38]))
    random = np.random.default_rng(seed)
    return Records(
        features=(random.uniform(-1, 1, (n, 2)) * size).astype(np.float32),
        targets=random.integers(0, 2, n),
        silo=random.integers(0, SILOS, n).astype(np.int32),
        user=np.sort(random.integers(0, USERS, n)).astype(np.int32),
    )


@bounded_sum
@settings(max_examples=15)
@given(records=tables(), user=st.integers(0, USERS - 1))
def test_one_user_moves_the_sum_by_at_most_the_sensitivity(name: str, records: Records, user: int) -> None:
    method = METHOD_CASES[name](SIGMA)
    others = np.flatnonzero(records.user != user)
    if len(others) == 0:
        return
    moved = np.linalg.norm(totals(method, records) - totals(method, records.select(others)))
    federation = PublicFacts(n_silos=SILOS, n_users=USERS)
    assert moved <= sensitivity(method, federation)


@pytest.mark.parametrize(
    "name", ["dp-fed", "cepam-gaussian", "cepam-laplace", "fl-gaussian", "fl-laplace", "fl-laplace-sdq"]
)
@settings(max_examples=15)
@given(records=tables(), user=st.integers(0, USERS - 1))
def test_one_client_moves_the_sum_by_at_most_her_bound_in_its_norm(
    name: str, records: Records, user: int
) -> None:
    """l2 where the noise is Gaussian, l1 where it is Laplace; each user is a client with all their records."""
    method = METHOD_CASES[name](SIGMA)
    clients = dataclasses.replace(records, silo=np.zeros_like(records.silo))
    others = np.flatnonzero(records.user != user)
    if len(others) == 0:
        return
    moved = totals(method, clients) - totals(method, clients.select(others))
    order = 1 if isinstance(method.bound, ClipL1) else 2
    assert np.linalg.norm(moved, ord=order) <= CLIP


def test_a_user_can_move_a_clipped_silo_by_twice_the_bound() -> None:
    """Why ULDP-NAIVE's sensitivity is 2 C |S|: a user's records turn every silo's clipped update around."""
    random = np.random.default_rng(0)
    silo = np.tile(np.arange(SILOS, dtype=np.int32), 20)
    user = np.repeat(np.arange(2, dtype=np.int32), 30)
    features = random.normal(0, 1, (60, 2)).astype(np.float32)
    features[user == 1] = 1e3
    features[user == 0] = 1.0
    targets = np.where(user == 1, 0, 1)
    records = Records(features=features, targets=targets, silo=silo, user=user)
    method = METHOD_CASES["uldp-naive"](SIGMA)
    alone = totals(method, records.select(np.flatnonzero(user == 0)))
    moved = np.linalg.norm(totals(method, records) - alone)
    assert moved > 1.5 * CLIP * SILOS
    assert moved <= sensitivity(method, PublicFacts(n_silos=SILOS, n_users=USERS))


WEIGHTS = {
    "uniform": Weights.UNIFORM,
    "equal": Weights.EQUAL,
    "records": Weights.BY_RECORDS,
    "squares": Weights.by_power(2.0),
    "main": Weights.MAIN,
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@settings(max_examples=40)
@given(records=tables())
def test_weights_of_a_user_sum_to_at_most_one(weights: Weights, records: Records) -> None:
    groups = records.by_silo_user()
    of_user = np.bincount(groups.user, weights=weights.for_groups(groups, SILOS, USERS).numpy())
    assert of_user.max() <= 1 + 1e-15
    if weights.by_records:
        present = of_user[np.unique(groups.user)]
        np.testing.assert_allclose(present, 1, rtol=1e-12)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, 7.0, "main"])
def test_weights_are_those_of_exact_fractions(power: Any) -> None:
    """Users in 1 to 60 silos, with ties; and taking a user away leaves the weights of all others as they are."""
    random = np.random.default_rng(3)
    silos, users = 60, 25
    pairs = [
        (silo, user) for user in range(users) for silo in random.choice(silos, 1 + user * 59 // 24, False)
    ]
    sizes = random.choice([1, 2, 2, 9, 9, 1000], len(pairs))
    held = dict(zip(pairs, sizes.tolist(), strict=True))

    def groups(pairs: list[tuple[int, int]]) -> Groups:
        number = np.arange(len(pairs))
        silo, user = np.array(pairs, np.int32).T
        size = np.array([held[pair] for pair in pairs])
        return Groups(order=number, start=number, size=size, silo=silo, user=user)

    def exact(silo: int, user: int) -> float:
        own = {other: count for (other, whose), count in held.items() if whose == user}
        if power == "main":
            return float(silo == min(other for other, count in own.items() if count == max(own.values())))
        if power == 0.5:
            return own[silo] ** 0.5 / math.fsum(count**0.5 for count in own.values())
        whole = int(power)
        return float(Fraction(own[silo] ** whole, sum(count**whole for count in own.values())))

    weights = Weights.by_power(power)
    found = weights.for_groups(groups(pairs), silos, users)
    np.testing.assert_allclose(found, [exact(*pair) for pair in pairs], rtol=4e-15)
    others = [pair for pair in pairs if pair[1] != 7]
    kept = torch.tensor([user != 7 for _, user in pairs])
    assert torch.equal(weights.for_groups(groups(others), silos, users), found[kept])
    if weights.supports_user_totals and weights.power <= 2:
        scores = weights.scores(groups(pairs).size, silos)
        totals = np.bincount([user for _, user in pairs], weights=scores)
        np.testing.assert_allclose(scores / totals[[user for _, user in pairs]], found, rtol=4e-15)


@pytest.mark.parametrize("power", [0, 1, 2, 3, 64])
@pytest.mark.parametrize("silos", [1, 3, 50, 65_535])
def test_scores_of_every_user_fit_the_totals_that_travel(power: int, silos: int) -> None:
    """One with 65,536 records in each silo, or any number of them, ends no run; smaller counts are exact."""
    sizes = np.array([0, 1, 5, 65_536, 3_000_000, 2**40])
    scores = Weights.by_power(float(power)).scores(sizes, silos)
    assert (np.diff(scores) >= 0).all()
    assert UserTotals.decode(UserTotals(counts=silos * scores).encode()).counts.tolist() == [
        silos * one for one in scores.tolist()
    ]
    exact = [size**power if size else 0 for size in sizes.tolist()]
    assert all(one == true for one, true in zip(scores.tolist(), exact, strict=True) if silos * true < 2**32)
    most = round(int(scores[-1]) ** (1 / max(1, power)))
    assert power == 0 or silos * (most + 1) ** power >= 2**32


def test_weights_by_records_are_those_of_the_paper_bit_for_bit() -> None:
    sizes = np.array([3, 4, 1, 7, 7])
    user, silo = np.array([0, 0, 0, 1, 1], np.int32), np.array([0, 1, 2, 0, 2], np.int32)
    number = np.arange(5)
    groups = Groups(order=number, start=number, size=sizes, silo=silo, user=user)
    totals = np.bincount(user, weights=sizes)
    assert Weights.BY_RECORDS.for_groups(groups, 3, 2).tolist() == (sizes / totals[user]).tolist()
    assert Weights.EQUAL.for_groups(groups, 3, 2).tolist() == [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]
    assert Weights.MAIN.for_groups(groups, 3, 2).tolist() == [0, 1, 0, 1, 0]


def test_one_gradient_by_weight_is_one_step_of_local_training_by_weight() -> None:
    """uldp-sgd-w is uldp-avg-w with one epoch over all records at local rate 1, up to float32 rounding."""
    random = np.random.default_rng(4)
    records = Records(
        features=random.normal(size=(30, 2)).astype(np.float32),
        targets=random.integers(0, 2, 30),
        silo=random.integers(0, SILOS, 30).astype(np.int32),
        user=random.integers(0, USERS, 30).astype(np.int32),
    )
    for power in (1.0, "main"):
        gradient = uldp_sgd_w(clip=CLIP, noise_multiplier=SIGMA, power=power)
        step = uldp_avg_w(
            local=LocalSgd(learning_rate=1.0, epochs=1), clip=CLIP, noise_multiplier=SIGMA, power=power
        )
        assert gradient.weights == step.weights
        np.testing.assert_allclose(totals(gradient, records), totals(step, records), atol=3 * CLIP * 2**-18)


def test_the_main_silo_may_be_missing_and_is_refused_where_nobody_can_compare() -> None:
    method = uldp_avg_w(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, power="main")
    lacking = SecureAggregation(on_dropout="recover", max_dropouts=1)
    assert lacking.apply_to(method, USERS).channel.max_dropouts == 1
    with pytest.raises(CompositionError, match=r"max_dropouts must be 0"):
        lacking.apply_to(dataclasses.replace(method, weights=Weights.by_power(2.0)), USERS)
    with pytest.raises(CompositionError, match=r"needs a comparison.*take power = 2"):
        PrivateWeighting(n_max=100).apply_to(method, USERS)
    with pytest.raises(CompositionError, match=r"the power must be 0, 1, 2"):
        PrivateWeighting(n_max=100).apply_to(
            dataclasses.replace(method, weights=Weights.by_power(0.5)), USERS
        )
    assert Weights.by_power(10.0).scores(np.array([10**6, 3, 0]), 1).tolist() == [9**10, 3**10, 0]


@settings(max_examples=40)
@given(records=tables(), per_user=st.integers(1, 5))
def test_flags_keep_at_most_k_records_and_lose_no_more(records: Records, per_user: int) -> None:
    kept = limit_records_per_user(records, per_user)
    before = np.bincount(records.user, minlength=USERS)
    after = np.bincount(records.user[kept], minlength=USERS)
    np.testing.assert_array_equal(after, np.minimum(before, per_user))


def test_flags_spread_over_silos_before_they_repeat_one() -> None:
    records = Records(
        features=np.zeros((7, 1), np.float32),
        targets=np.zeros(7, np.int64),
        silo=np.array([0, 0, 0, 0, 1, 1, 2], np.int32),
        user=np.zeros(7, np.int32),
    )
    assert records.silo[limit_records_per_user(records, 5)].tolist() == [0, 0, 1, 1, 2]


# --- the noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colluding", [0, 1])
@bounded_sum
def test_shares_add_up_to_the_stated_noise_against_the_honest_silos(name: str, colluding: int) -> None:
    method = METHOD_CASES[name](SIGMA)
    channel = dataclasses.replace(method.channel, colluding_silos=colluding)
    d = 30_000
    privacy, grid = PrivacyRandomness.insecure(7), method.bound.grid
    honest = sum(
        channel.send(np.zeros(d), sender(privacy, silo, senders=SILOS, grid=grid)).numbers
        for silo in range(SILOS - colluding)
    )
    scale = CLIP * SILOS if name == "uldp-naive" else CLIP
    assert stats.kstest(honest, "norm", args=(0, SIGMA * scale)).pvalue > 1e-6
    for wrong in (0.96, 1.04):
        variance_ratio = np.mean(honest**2) / (wrong * SIGMA * scale) ** 2
        assert abs(variance_ratio - 1) > 5.5 * math.sqrt(2 / d)


def test_noisy_sums_lie_on_a_grid_that_divides_the_contributions() -> None:
    method = METHOD_CASES["uldp-avg"](SIGMA)
    grid = method.bound.grid
    fine = grid_law(method.channel.share_std(SILOS), grid).grid
    assert (grid / fine).is_integer()
    at = sender(PrivacyRandomness.system(), senders=SILOS, grid=grid)
    noisy = method.channel.send(np.arange(100) * grid, at).numbers
    assert (noisy / fine == np.round(noisy / fine)).all()


# --- what is derived ------------------------------------------------------------------------------------------


def test_pairs_are_accounted_at_sensitivity_c() -> None:
    federation = PublicFacts(n_silos=SILOS, n_users=USERS)
    for name in ("uldp-sgd", "uldp-avg", "uldp-avg-w"):
        event = derive(METHOD_CASES[name](SIGMA), federation).event
        assert isinstance(event, GaussianEvent)
        assert event.noise_multiplier == pytest.approx(SIGMA)


def test_sampled_users_are_accounted_as_sampled_and_divided_by_the_expectation() -> None:
    method = uldp_avg_w(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, user_sampling_rate=0.25)
    event = derive(method, PublicFacts(n_silos=SILOS, n_users=USERS)).event
    assert isinstance(event, PoissonSampledEvent)
    assert event.rate == 0.25
    assert method.divisor(USERS, SILOS) == 0.25 * USERS


def test_naive_is_accounted_at_twice_the_published_sensitivity_and_names_the_publication() -> None:
    guarantee = derive(METHOD_CASES["uldp-naive"](SIGMA), PublicFacts(n_silos=SILOS, n_users=USERS))
    assert guarantee.event == GaussianEvent(noise_multiplier=SIGMA / 2)
    (claim,) = guarantee.published
    assert claim.epsilon(10, 1e-5) == pytest.approx(2.813653, abs=1e-4)


def test_colluding_silos_keep_the_stated_event_and_add_noise() -> None:
    federation = PublicFacts(n_silos=SILOS, n_users=USERS)
    plain = uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA)
    guarded = uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, colluding_silos=1)
    one_silo = derive(guarded, federation).event_for(Role.SILO)
    assert one_silo.noise_multiplier == pytest.approx(SIGMA)
    assert guarded.channel.share_std(SILOS) == pytest.approx(
        plain.channel.share_std(SILOS) * math.sqrt(3 / 2)
    )


def test_sampling_amplifies_nothing_against_silos_that_collude() -> None:
    sampled = uldp_avg(
        local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, user_sampling_rate=0.1, colluding_silos=2
    )
    guarantee = derive(sampled, PublicFacts(n_silos=SILOS, n_users=USERS))
    pooled = guarantee.event_for(Role.SILO)
    assert "2 silos that pool what they know" in {view.party for view in guarantee.views}
    assert pooled.noise_multiplier == pytest.approx(SIGMA)
    assert guarantee.event == PoissonSampledEvent(rate=0.1, event=GaussianEvent(noise_multiplier=SIGMA))


def test_the_server_that_sees_single_messages_gets_its_own_event() -> None:
    federation = PublicFacts(n_silos=SILOS, n_users=USERS)
    naive = derive(METHOD_CASES["uldp-naive"](SIGMA), federation).event_for(Role.SERVER)
    assert naive.noise_multiplier == pytest.approx(SIGMA / 2)
    weighted = derive(METHOD_CASES["uldp-avg-w"](SIGMA), federation).event_for(Role.SERVER)
    assert isinstance(weighted, NoGuarantee)


# --- what is refused ------------------------------------------------------------------------------------------


def base() -> Method:
    return uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bound": Unbounded()}, "clip bound"),
        ({"weights": Weights.ONE}, "sum to at most 1"),
        ({"local": LocalDpSgd(learning_rate=0.1, epochs=1, batch_size=2, noise_multiplier=1.0)}, "DP-SGD"),
    ],
)
def test_what_cannot_combine_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        dataclasses.replace(base(), **changes)


def test_sampled_users_need_contributions_of_users() -> None:
    with pytest.raises(CompositionError, match="users are sampled"):
        dataclasses.replace(METHOD_CASES["uldp-naive"](SIGMA), sampler=PoissonUsers(rate=0.5))


def test_all_silos_colluding_is_refused() -> None:
    with pytest.raises(CompositionError, match="at least one silo must be honest"):
        GaussianShares(noise_multiplier=1.0, scale=1.0, colluding_silos=SILOS).share_std(SILOS)


def test_everyone_is_the_default_sampler() -> None:
    assert base().sampler == Everyone()
    assert base().bound == Clip(norm=CLIP)

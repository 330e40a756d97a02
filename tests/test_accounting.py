"""Accountants against published figures, Opacus, dp_accounting and closed forms."""

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant as ReferencePldAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedveil.errors import PrivacyError
from fedveil.privacy.accountant import Accountant, gaussian_delta, gaussian_epsilon
from fedveil.privacy.accounting import (
    ACCOUNTANTS,
    OPACUS_ORDERS,
    Conversion,
    PldAccountant,
    RdpAccountant,
    _interval,
    epsilon,
    laplace_rdp,
    make_accountant,
    sampled_gaussian_rdp,
)
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
)
from tests.dp_events import dp_event_of, gaussian_rounds
from tests.slow_cases import slow_only

DELTA = 1e-5
PLD = PldAccountant()
RDP = RdpAccountant()


# --- published and measured figures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "published"),
    [
        (1, 0.794522),
        (2, 1.158151),
        (3, 1.445622),
        (10, 2.813653),
        (50, 7.077392),
        (100, 10.725510),
        (200, 16.512876),
    ],
)
def test_rdp_reproduces_the_round_table_of_uldp_fl(rounds: int, published: float) -> None:
    assert epsilon(gaussian_rounds(rounds), DELTA, "rdp") == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize(
    ("rounds", "rate", "published"),
    [
        (100, 0.1, 0.834863),
        (100, 0.3, 2.759123),
        (100, 0.5, 4.862241),
        (100, 0.7, 7.110011),
        (100, 1.0, 10.725510),
        (200, 0.1, 1.203454),
        (200, 0.3, 4.039943),
        (200, 0.5, 7.230995),
        (200, 1.0, 16.512876),
    ],
)
def test_rdp_reproduces_the_sampling_table_of_uldp_fl(rounds: int, rate: float, published: float) -> None:
    assert epsilon(gaussian_rounds(rounds, rate=rate), DELTA, "rdp") == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize(
    ("rounds", "sigma", "rate", "published"),
    [(5, 1.0, 1.0, 12.3017), (5, 1.0, 0.1, 2.9021)],
)
def test_rdp_reproduces_the_authors_own_tests(
    rounds: int, sigma: float, rate: float, published: float
) -> None:
    assert epsilon(gaussian_rounds(rounds, sigma, rate), DELTA, "rdp") == pytest.approx(published, abs=1e-4)


SVHN = [(1.5, 2.565, 2.078, 1.819, 3.355), (1.3, 3.192, 2.624, 2.289, 4.027)]
SVHN += [(1.1, 4.241, 3.551, 3.076, 5.053), (1.0, 5.066, 4.292, 3.701, 5.812)]


@pytest.mark.parametrize(("sigma", "old", "new", "tight", "replace"), SVHN)
def test_four_accountants_on_the_svhn_budgets(
    sigma: float, old: float, new: float, tight: float, replace: float
) -> None:
    event = gaussian_rounds(200, sigma, 0.05)
    delta = 2000**-1.1
    assert epsilon(event, delta, "rdp-2017") == pytest.approx(old, abs=1e-3)
    assert epsilon(event, delta, "rdp") == pytest.approx(new, abs=1e-3)
    assert epsilon(event, delta, "pld") == pytest.approx(tight, abs=2e-3)
    assert epsilon(event, delta, "pld", Adjacency.REPLACE_ONE) == pytest.approx(replace, abs=2e-3)


@pytest.mark.parametrize(("sigma", "old"), [(1.6, 6.782), (1.4, 8.222), (1.2, 10.408), (1.0, 14.043)])
def test_old_conversion_on_the_lstm_budgets(sigma: float, old: float) -> None:
    assert epsilon(gaussian_rounds(100, sigma, 0.2), 975**-1.1, "rdp-2017") == pytest.approx(old, abs=1e-3)


# --- the closed form of full Gaussian releases ------------------------------------------------------------


@given(st.floats(0.05, 30.0), st.floats(0.0, 50.0))
@settings(max_examples=60)
def test_gaussian_delta_is_the_integral_of_its_definition(mu: float, eps: float) -> None:
    start = eps / mu + mu / 2  # where the density ratio passes e^eps
    value, _ = quad(lambda x: norm.pdf(x - mu) - math.exp(eps) * norm.pdf(x), start, start + 40, epsabs=1e-13)
    assert gaussian_delta(mu, eps) == pytest.approx(value, rel=1e-6, abs=1e-11)


@given(st.floats(1e-3, 300.0), st.floats(-14.0, -0.5))
def test_gaussian_epsilon_is_the_smallest_valid_one(mu: float, log_delta: float) -> None:
    delta = 10**log_delta
    eps = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, eps) <= delta
    assert eps == 0 or gaussian_delta(mu, max(0.0, eps - 1e-6 * (1 + eps))) > delta


def test_full_gaussian_rounds_use_the_closed_form_and_agree_with_dp_accounting() -> None:
    event = gaussian_rounds(200)
    reference = ReferencePldAccountant().compose(dp_event_of(event))
    assert epsilon(event, DELTA) == gaussian_epsilon(math.sqrt(200) / 5, DELTA)
    assert epsilon(event, DELTA) == pytest.approx(reference.get_epsilon(DELTA), abs=1e-4)


# --- Renyi divergences ------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.floats(1e-4, 0.999), st.floats(0.4, 20.0))
@settings(max_examples=40)
def test_rdp_agrees_with_opacus(rate: float, sigma: float) -> None:
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = (1.1, 1.5, 2.0, 3.7, 5.5, 8.0, 10.9, 12.0, 32.0, 63.0)
    theirs = np.array(compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(orders)))
    np.testing.assert_allclose(sampled_gaussian_rdp(rate, sigma, orders), theirs, rtol=1e-6, atol=1e-11)


@given(st.floats(0.01, 0.99), st.floats(0.3, 10.0), st.integers(2, 12))
@settings(max_examples=40)
def test_quadrature_meets_the_binomial_sum_at_integer_orders(rate: float, sigma: float, order: int) -> None:
    exact, near = sampled_gaussian_rdp(rate, sigma, (float(order), order + 1e-9))
    assert near == pytest.approx(exact, rel=1e-7, abs=1e-13)


def test_fractional_orders_are_left_out_below_the_quadrature_limit() -> None:
    fractional, integer = sampled_gaussian_rdp(0.5, 0.005, (1.5, 2.0))
    assert fractional == math.inf
    assert math.isfinite(integer)


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("order", [1.5, 2.0, 7.0])
def test_laplace_rdp_is_the_integral_of_its_definition(scale: float, order: float) -> None:
    def integrand(x: float) -> float:
        return math.exp(-order * abs(x - 1) / scale + (order - 1) * abs(x) / scale) / (2 * scale)

    round_id, _ = quad(integrand, -60 * scale, 60 * scale, points=[0, 1], limit=400)
    assert laplace_rdp(scale, (order,))[0] == pytest.approx(math.log(round_id) / (order - 1), rel=1e-6)


@pytest.mark.parametrize("conversion", list(Conversion))
def test_conversions_of_epsilon_and_delta_are_inverse(conversion: Conversion) -> None:
    accountant = RdpAccountant(conversion=conversion)
    event = gaussian_rounds(100, rate=0.3)
    assert accountant.delta(event, accountant.epsilon(event, DELTA)) == pytest.approx(DELTA, rel=1e-9)


# --- privacy loss distributions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        gaussian_rounds(100, rate=0.1),
        gaussian_rounds(20, 0.8, 0.01),
        SelfComposedEvent(event=LaplaceEvent(noise_multiplier=3.0), count=10),
        PoissonSampledEvent(rate=0.2, event=LaplaceEvent(noise_multiplier=1.0)),
        ComposedEvent(
            events=(gaussian_rounds(50, rate=0.2), gaussian_rounds(5), LaplaceEvent(noise_multiplier=9.0))
        ),
        MixtureOfGaussiansEvent(
            noise_multiplier=9.0, sensitivities=(0.0, 1.0, 2.0), probabilities=(0.5, 0.3, 0.2)
        ),
    ],
)
def test_pld_agrees_with_dp_accounting_and_lies_below_rdp(event: Event) -> None:
    reference = (
        ReferencePldAccountant(value_discretization_interval=1e-3)
        .compose(dp_event_of(event))
        .get_epsilon(DELTA)
    )
    ours = PLD.epsilon(event, DELTA)
    assert ours == pytest.approx(reference, rel=2e-3, abs=1e-3)
    assert ours <= RDP.epsilon(event, DELTA) if RDP.supports(event) else True
    assert PLD.delta(event, ours) <= DELTA * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9, 1e-11])
def test_a_discretised_bound_is_never_below_the_exact_one(delta: float) -> None:
    """A mixture that always moves the mean by 1 is a full Gaussian release of known epsilon."""
    always = MixtureOfGaussiansEvent(noise_multiplier=5.0, sensitivities=(1.0,), probabilities=(1.0,))
    discretised = PLD.epsilon(SelfComposedEvent(event=always, count=200), delta)
    exact = gaussian_epsilon(math.sqrt(200) / 5, delta)
    assert exact <= discretised <= exact * 1.05


@pytest.mark.parametrize(
    "mu",
    [34.4, *slow_only([30.0, 31.0, 33.0, 33.7, 34.0, 35.0, 50.0])],
)
def test_an_epsilon_whose_exponential_is_no_normal_number_is_exact_too(mu: float) -> None:
    """exp(-epsilon) is the last normal number, the last subnormal one, and zero."""
    always = MixtureOfGaussiansEvent(noise_multiplier=1.0, sensitivities=(1.0,), probabilities=(1.0,))
    exact = gaussian_epsilon(math.sqrt(round(mu**2)), DELTA)
    assert exact <= PLD.epsilon(SelfComposedEvent(event=always, count=round(mu**2)), DELTA) <= exact * 1.001


@pytest.mark.parametrize("noise", [GaussianEvent(noise_multiplier=0.5), LaplaceEvent(noise_multiplier=0.5)])
def test_a_rate_of_no_normal_number_costs_what_one_above_it_costs(
    noise: GaussianEvent | LaplaceEvent,
) -> None:
    costs = [
        PLD.epsilon(PoissonSampledEvent(rate=rate, event=noise), DELTA) for rate in (5e-324, 1e-300, 1e-20)
    ]
    assert costs == sorted(costs)
    assert costs[-1] < 1e-3


@pytest.mark.parametrize("noise", [1e9, 1e17, 1e100])
def test_noise_beyond_all_rounding_costs_what_less_noise_costs(noise: float) -> None:
    """Of 1e17 and more the library raised TypeError, or divided by zero."""

    def releases(much: float) -> list[tuple[PldAccountant, Event]]:
        gaussian = GaussianEvent(noise_multiplier=much)
        sampled: list[Event] = [
            PoissonSampledEvent(rate=0.5, event=gaussian),
            PoissonSampledEvent(rate=0.5, event=LaplaceEvent(noise_multiplier=much)),
            LaplaceEvent(noise_multiplier=much),
            MixtureOfGaussiansEvent(
                noise_multiplier=much, sensitivities=(0.0, 1.0), probabilities=(0.5, 0.5)
            ),
        ]
        drawn = SampledWithoutReplacementEvent(population=10, sample=9, event=gaussian)
        return [(PLD, event) for event in sampled] + [(PldAccountant(adjacency=Adjacency.REPLACE_ONE), drawn)]

    for (judge, event), (_, stronger) in zip(releases(noise), releases(1e6), strict=True):
        assert judge.epsilon(event, DELTA) == judge.epsilon(stronger, DELTA) < 1e-3


def test_pld_refuses_a_delta_below_its_numerical_error() -> None:
    with pytest.raises(PrivacyError, match="use accountant 'rdp'"):
        PLD.epsilon(gaussian_rounds(100, rate=0.5), 1e-12)


def test_one_sampled_round_is_the_analytic_mixture() -> None:
    """delta(eps) of q N(1, s^2) + (1-q) N(0, s^2) against N(0, s^2), both directions, by quadrature."""
    rate, sigma, eps = 0.3, 1.2, 0.4
    grid = np.linspace(-14, 14, 400_001)
    base = norm.pdf(grid, scale=sigma)
    mixture = rate * norm.pdf(grid - 1, scale=sigma) + (1 - rate) * base
    step = grid[1] - grid[0]
    remove = np.maximum(mixture - math.exp(eps) * base, 0).sum() * step
    add = np.maximum(base - math.exp(eps) * mixture, 0).sum() * step
    ours = PLD.delta(gaussian_rounds(1, sigma, rate), eps)
    assert ours == pytest.approx(max(remove, add), rel=1e-4)
    assert ours >= max(remove, add) * (1 - 1e-7)


def test_laplace_is_pure_differential_privacy() -> None:
    event = LaplaceEvent(noise_multiplier=2.0)
    assert PLD.epsilon(event, 1e-9) == pytest.approx(0.5, abs=1e-3)
    assert PldAccountant(adjacency=Adjacency.REPLACE_ONE).epsilon(event, 1e-9) == pytest.approx(1.0, abs=1e-3)


# --- what every accountant promises -----------------------------------------------------------------------


@pytest.fixture(params=ACCOUNTANTS)
def accountant(request: pytest.FixtureRequest) -> Accountant:
    return make_accountant(request.param)


def test_nothing_released_costs_nothing(accountant: Accountant) -> None:
    assert accountant.epsilon(ComposedEvent(events=()), DELTA) == 0
    assert accountant.delta(ComposedEvent(events=()), 0.0) == 0


def test_no_guarantee_costs_everything(accountant: Accountant) -> None:
    event = ComposedEvent(events=(GaussianEvent(noise_multiplier=1.0), NoGuarantee(reason="no noise")))
    assert accountant.supports(event)
    assert accountant.epsilon(event, DELTA) == math.inf
    assert accountant.delta(event, 10.0) == 1


def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise(accountant: Accountant) -> None:
    base = accountant.epsilon(gaussian_rounds(50, 2.0, 0.2), DELTA)
    assert accountant.epsilon(gaussian_rounds(51, 2.0, 0.2), DELTA) > base
    assert accountant.epsilon(gaussian_rounds(50, 2.0, 0.21), DELTA) > base
    assert accountant.epsilon(gaussian_rounds(50, 2.1, 0.2), DELTA) < base


def test_grouping_of_equal_rounds_does_not_matter(accountant: Accountant) -> None:
    release = PoissonSampledEvent(rate=0.2, event=GaussianEvent(noise_multiplier=3.0))
    listed = ComposedEvent(events=(release,) * 30)
    assert accountant.epsilon(listed, DELTA) == accountant.epsilon(gaussian_rounds(30, 3.0, 0.2), DELTA)


def test_replacing_is_adding_and_removing(accountant: Accountant) -> None:
    replace = make_accountant(accountant.name, Adjacency.REPLACE_ONE)
    for kind in (GaussianEvent, LaplaceEvent):
        twice = accountant.epsilon(kind(noise_multiplier=2.0), DELTA)
        assert replace.epsilon(kind(noise_multiplier=4.0), DELTA) == pytest.approx(twice, rel=1e-12)


def test_unsupported_events_are_refused_by_name(accountant: Accountant) -> None:
    doubly = PoissonSampledEvent(rate=0.5, event=gaussian_rounds(3, rate=0.5))
    assert not accountant.supports(ComposedEvent(events=(GaussianEvent(noise_multiplier=1.0), doubly)))
    with pytest.raises(PrivacyError, match=f"'{accountant.name}' has no bound for PoissonSampledEvent"):
        accountant.epsilon(doubly, DELTA)
    mixture = MixtureOfGaussiansEvent(noise_multiplier=1.0, sensitivities=(1.0,), probabilities=(1.0,))
    assert not make_accountant(accountant.name, Adjacency.REPLACE_ONE).supports(mixture)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_must_be_a_probability(accountant: Accountant, delta: float) -> None:
    with pytest.raises(PrivacyError, match="delta = "):
        accountant.epsilon(gaussian_rounds(1), delta)


@pytest.mark.parametrize("eps", [-1.0, math.nan])
def test_epsilon_must_not_be_negative(accountant: Accountant, eps: float) -> None:
    with pytest.raises(PrivacyError, match="epsilon = "):
        accountant.delta(gaussian_rounds(1), eps)


def test_an_unknown_accountant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PrivacyError, match="pld, rdp, rdp-2017"):
        make_accountant("prv")


def test_default_orders_are_those_of_opacus() -> None:
    assert len(OPACUS_ORDERS) == 151
    assert OPACUS_ORDERS[0] == 1.1
    assert OPACUS_ORDERS[98:100] == (10.9, 12.0)


# --- numbers that no run has, and a file from outside may -----------------------------------------------------


@pytest.mark.parametrize("noise", [1e-200, 1e-160, 1e160])
def test_noise_whose_square_is_no_number_is_refused(noise: float) -> None:
    """What is divided by a square of 0 is no number, and the greater of 0 and no number was 0: an epsilon of .10."""
    with pytest.raises(PrivacyError, match=r"must lie between 1e-100 and 1e\+100"):
        GaussianEvent(noise_multiplier=noise)


@pytest.mark.parametrize("noise", [1e-99, 1e-30, 1e-6, 1e-3])
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_next_to_no_noise_costs_much_or_is_refused(noise: float, adjacency: Adjacency) -> None:
    event: Event = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=noise))
    if adjacency is Adjacency.REPLACE_ONE:
        event = SampledWithoutReplacementEvent(
            population=2, sample=1, event=GaussianEvent(noise_multiplier=noise)
        )
    for name in ACCOUNTANTS:
        judge = make_accountant(name, adjacency)
        try:
            assert judge.epsilon(event, DELTA) > 0.2 / noise**2
        except PrivacyError:
            assert name == "pld"


@pytest.mark.parametrize("delta", [0.9, 1e-5, 1e-300])
@pytest.mark.parametrize("mu", [1e8, 1.1e8, 1e10, 1e13, 1e17, 1e100, 3.3e154, 1e300])
def test_a_gaussian_epsilon_holds_for_the_strongest_release(mu: float, delta: float) -> None:
    """From 1e10 on the root was that of rounding, and beyond 1e17 there was none: no error of this project."""
    found = gaussian_epsilon(mu, delta)
    assert found >= mu * mu / 2 + mu * (norm.isf(delta) - 0.01)
    assert found <= mu * mu / 2 * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-5, 1e-20, 1e-100, 1e-300])
@pytest.mark.parametrize("mu", [1e-20, 1e-16, 3e-14, 1e-7, 1e-5])
def test_a_gaussian_epsilon_holds_for_the_weakest_release(mu: float, delta: float) -> None:
    """Of a strength of 1e-16 delta was rounded to 0, and so was epsilon, at every delta.

    With x = epsilon / mu, delta = mu (phi(x) - x Phi(-x)) (1 + O(mu)).
    """
    x = gaussian_epsilon(mu, delta) / mu
    assert mu * (norm.pdf(x) - x * norm.sf(x)) <= delta * (1 + 1e-3)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_a_delta_below_all_that_can_be_counted_is_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match="must be at least 1e-300"):
        make_accountant(name).epsilon(GaussianEvent(noise_multiplier=1.0), 5e-324)


def test_as_many_releases_as_a_file_may_tell_of_take_no_gigabytes() -> None:
    sampled = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=1.0))
    coarse = _interval(0.0, Counter({sampled: 1 << 20}), PLD.adjacency)
    assert _interval(0.0, Counter({sampled: 1000}), PLD.adjacency) == 1e-3
    assert 16 * math.sqrt(1 << 20) * 0.65 / coarse < 1 << 21
    assert _interval(1e4, Counter({sampled: 1}), PLD.adjacency) > 5e7 / (1 << 21)
    with pytest.raises(PrivacyError, match="composes at most 1048576; use accountant 'rdp'"):
        PLD.epsilon(SelfComposedEvent(event=sampled, count=10**7), DELTA)
    shifts = tuple(map(float, range(20_001)))
    mixture = MixtureOfGaussiansEvent(
        noise_multiplier=1.0, sensitivities=shifts, probabilities=(1 / 20_001,) * 20_001
    )
    with pytest.raises(PrivacyError, match="1 different releases are more"):
        PLD.epsilon(mixture, DELTA)


def test_a_coarse_grid_costs_more_and_little() -> None:
    sampled = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=1.0))
    rounds = SelfComposedEvent(event=sampled, count=1000)
    fine, coarse = PLD.epsilon(rounds, DELTA), PldAccountant(interval=1e-2).epsilon(rounds, DELTA)
    assert fine < coarse < 1.001 * fine


TOO_SMALL = LaplaceEvent(noise_multiplier=1 / 746)


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (TOO_SMALL, Adjacency.ADD_OR_REMOVE_ONE),
        (PoissonSampledEvent(rate=0.1, event=TOO_SMALL), Adjacency.ADD_OR_REMOVE_ONE),
        (LaplaceEvent(noise_multiplier=2 / 746), Adjacency.REPLACE_ONE),
    ],
)
def test_laplace_noise_too_small_for_float64_is_refused(event, adjacency):
    with pytest.raises(PrivacyError, match="use more noise"):
        PldAccountant(adjacency=adjacency).epsilon(event, 1e-6)


def test_gaussian_releases_alone_load_no_library_of_distributions() -> None:
    """It takes 0.8 s of the processor, and most runs need none: their releases merge into one."""
    code = (
        "import sys\n"
        "from fedveil.privacy.accounting import make_accountant\n"
        "from fedveil.privacy.events import ComposedEvent, GaussianEvent\n"
        "event = ComposedEvent(events=(GaussianEvent(noise_multiplier=4.0), GaussianEvent(noise_multiplier=5.0)))\n"
        "made = make_accountant('pld', 'add-or-remove-one')\n"
        "print(made.supports(event), made.epsilon(event, 1e-5) > 0, 'dp_accounting' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]

"""Sampling without replacement: the sampler's law, and what accountants say of it."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant as ReferenceRdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.errors import PrivacyError
from fedveil.privacy.accountant import gaussian_delta
from fedveil.privacy.accounting import PldAccountant, RdpAccountant, make_accountant
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, least_covering_claim
from fedveil.privacy.events import (
    Adjacency,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
    atoms,
    event_from_json,
)
from fedveil.privacy.sampling import (
    Everyone,
    PoissonUsers,
    UniformClients,
    _log_moment,
    fixed_size_deltas,
    fixed_size_distribution,
    fixed_size_rdp,
    published_epsilon,
)
from fedveil.randomness import PrivacyRandomness
from tests.dp_events import dp_event_of

BASE = GaussianEvent(noise_multiplier=1.5)
SVHN = (2000, 0.05, 200)
SHAKESPEARE = (975, 0.2, 100)


def rounds_of(clients: int, rate: float, rounds: int, sigma: float) -> SelfComposedEvent:
    base = GaussianEvent(noise_multiplier=sigma)
    release = UniformClients(population=clients, sample=round(rate * clients)).event(base)
    return SelfComposedEvent(event=release, count=rounds)


# --- the sampler ----------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(population=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_every_draw_has_the_size(population: int, share: float, seed: int) -> None:
    sample = max(1, round(share * population))
    source = PrivacyRandomness.insecure(seed).stream("participants")
    drawn = UniformClients(population=population, sample=sample).draw(population, source)
    assert drawn.sum() == sample


@pytest.mark.parametrize(("population", "sample"), [(10, 3), (2, 1), (975, 195)])
def test_who_knows_of_her_own_draw_sees_a_larger_share_of_the_others(population: int, sample: int) -> None:
    """Of the n - 1 others m are drawn if this one is not, m - 1 if it is: the share m / (n - 1) covers both."""
    one, own = GaussianEvent(noise_multiplier=2.0), covered_knowledge(Reveals.OWN)

    def knowing_own(sampler: Everyone | PoissonUsers | UniformClients) -> Event:
        return least_covering_claim(own | {Reveals.OWN_DRAW}, sampler.amplify([Claim(own, one)])).event

    others = UniformClients(population=population - 1, sample=sample)
    assert knowing_own(UniformClients(population=population, sample=sample)) == others.event(one)
    assert others.rate == max(sample, sample - 1) / (population - 1) > sample / population
    assert knowing_own(UniformClients(population=population, sample=population)) == one
    assert knowing_own(PoissonUsers(rate=0.2)) == PoissonUsers(rate=0.2).event(one)


def test_every_pair_is_equally_likely() -> None:
    source = PrivacyRandomness.insecure(3).stream("participants")
    sampler = UniformClients(population=7, sample=2)
    rounds = 40_000
    pairs = np.array([np.flatnonzero(sampler.draw(7, source)) for _ in range(rounds)])
    counts = np.bincount(pairs @ [7, 1], minlength=49)
    counts = counts[counts > 0]
    assert len(counts) == 21
    assert stats.chisquare(counts).pvalue > 1e-7
    tilted = counts.copy()
    tilted[:10] = tilted[:10] * 1.05  # a law wrong by 5% must be seen
    tilted[10:] = tilted[10:] * 0.955
    assert stats.chisquare(tilted, tilted.sum() / 21 * np.ones(21)).pvalue < 1e-7


class Words:
    """A source of prepared words."""

    def __init__(self, *draws: list[int]) -> None:
        self.draws = list(draws)

    def uint64(self, count: int) -> np.ndarray:
        words = np.array(self.draws.pop(0), dtype=np.uint64)
        assert len(words) == count
        return words


def test_a_tie_at_the_edge_is_drawn_again() -> None:
    source = Words([5, 5, 1, 9], [4, 4, 9, 8])
    drawn = UniformClients(population=4, sample=2).draw(4, source)
    assert drawn.tolist() == [True, True, False, False]
    assert source.draws == []


@pytest.mark.parametrize("sample", [0, -1, 11])
def test_a_cohort_that_cannot_be_drawn_is_refused(sample: int) -> None:
    with pytest.raises(PrivacyError, match="at most 10"):
        UniformClients(population=10, sample=sample)
    with pytest.raises(PrivacyError, match="at most the population"):
        SampledWithoutReplacementEvent(population=10, sample=sample, event=BASE)


def test_another_number_of_clients_is_refused() -> None:
    source = PrivacyRandomness.system().stream("participants")
    with pytest.raises(PrivacyError, match="3 of 10"):
        UniformClients(population=10, sample=3).draw(11, source)


def test_samplers_bring_their_own_event_and_adjacency() -> None:
    uniform = UniformClients(population=10, sample=3)
    assert uniform.adjacency is Adjacency.REPLACE_ONE
    assert uniform.event(BASE) == SampledWithoutReplacementEvent(population=10, sample=3, event=BASE)
    assert UniformClients(population=10, sample=10).event(BASE) == BASE
    assert PoissonUsers(rate=0.3).adjacency is Everyone().adjacency is Adjacency.ADD_OR_REMOVE_ONE
    assert uniform.rate == 0.3


# --- the accountants ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pld", "rdp", "rdp-2017"])
def test_a_scheme_that_did_not_run_is_refused(name: str) -> None:
    """Fixed-size samples only under replace-one; no accountant takes them for Poisson samples."""
    event = SampledWithoutReplacementEvent(population=10, sample=3, event=BASE)
    assert make_accountant(name, Adjacency.REPLACE_ONE).supports(event)
    assert not make_accountant(name, Adjacency.ADD_OR_REMOVE_ONE).supports(event)
    with pytest.raises(PrivacyError, match="SampledWithoutReplacementEvent"):
        make_accountant(name, Adjacency.ADD_OR_REMOVE_ONE).epsilon(event, 1e-5)


def test_a_whole_sample_is_the_release_itself() -> None:
    event = SampledWithoutReplacementEvent(population=10, sample=10, event=BASE)
    assert atoms(event) == {BASE: 1}
    assert event_from_json(event.to_json()) == event


@settings(max_examples=40)
@given(rate=st.floats(0.001, 0.99), sigma=st.floats(0.3, 6), order=st.floats(1.1, 40))
def test_divergences_are_those_of_dp_accounting(rate: float, sigma: float, order: float) -> None:
    event = SampledWithoutReplacementEvent(
        population=1000, sample=max(1, round(1000 * rate)), event=GaussianEvent(noise_multiplier=sigma)
    )
    reference = ReferenceRdpAccountant([order], NeighboringRelation.REPLACE_ONE)
    expected = reference.compose(dp_event_of(event))._rdp[0]
    np.testing.assert_allclose(fixed_size_rdp(event.rate, sigma, (order,))[0], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("setting", "sigma", "as_published", "correct"),
    [
        (SVHN, 1.5, 5.245, 14.19),
        (SVHN, 1.3, 6.341, 18.75),
        (SVHN, 1.1, 7.839, 33.93),
        (SVHN, 1.0, 8.658, 56.64),
        (SHAKESPEARE, 1.6, 14.939, 39.90),
        (SHAKESPEARE, 1.4, 17.691, 55.55),
        (SHAKESPEARE, 1.2, 22.431, 90.28),
        (SHAKESPEARE, 1.0, 27.248, 175.61),
    ],
)
def test_budgets_of_the_tables_as_published_and_with_the_sensitivity_of_replace_one(
    setting: tuple[int, float, int], sigma: float, as_published: float, correct: float
) -> None:
    clients, rate, rounds = setting
    delta = clients**-1.1
    assert published_epsilon(rate, sigma, rounds, delta) == pytest.approx(as_published, abs=1e-3)
    assert published_epsilon(rate, sigma / 2, rounds, delta) == pytest.approx(correct, abs=1e-2)
    rdp = RdpAccountant(adjacency=Adjacency.REPLACE_ONE).epsilon(rounds_of(*setting, sigma), delta)
    assert as_published < rdp < correct


def test_loss_distributions_are_tighter_than_renyi_bounds() -> None:
    spent, delta = rounds_of(*SVHN, 1.5), 2000**-1.1
    tight = PldAccountant(adjacency=Adjacency.REPLACE_ONE).epsilon(spent, delta)
    assert tight == pytest.approx(8.06, abs=0.02)
    assert tight < RdpAccountant(adjacency=Adjacency.REPLACE_ONE).epsilon(spent, delta)


@settings(max_examples=30)
@given(rate=st.floats(0.01, 1), mu=st.floats(0.1, 4), epsilon=st.floats(-3, 6))
def test_the_distribution_dominates_the_curve_and_hardly_more(rate: float, mu: float, epsilon: float) -> None:
    exact = float(fixed_size_deltas(rate, mu, np.array([epsilon]))[0])
    grid = fixed_size_distribution(rate, mu, 1e-3).get_delta_for_epsilon(epsilon)
    assert exact - 1e-12 <= grid <= exact + 1e-3 * rate + 1e-9


@settings(max_examples=40)
@given(rate=st.floats(0.01, 1), mu=st.floats(0.1, 4), epsilon=st.floats(0, 6))
def test_the_curve_is_the_amplified_gaussian(rate: float, mu: float, epsilon: float) -> None:
    """Balle, Barthe and Gaboardi 2018, Theorem 9: delta'(ln(1 + q (e^eps - 1))) = q delta(eps)."""
    amplified = math.log1p(rate * math.expm1(epsilon))
    expected = rate * gaussian_delta(mu, epsilon)
    assert fixed_size_deltas(rate, mu, np.array([amplified]))[0] == pytest.approx(
        expected, rel=1e-6, abs=1e-13
    )


def test_no_neighbours_of_a_tiny_federation_exceed_the_curve() -> None:
    """Two clients of three, sums of +-1: the mixtures themselves, integrated, stay below the stated curve."""
    sigma, grid = 1.3, np.linspace(-15, 15, 60_001)
    step = grid[1] - grid[0]

    def density(values: list[float]) -> np.ndarray:
        sums = [values[i] + values[j] for i, j in ((0, 1), (0, 2), (1, 2))]
        return np.mean([stats.norm.pdf(grid, total, sigma) for total in sums], axis=0)

    for others in ((1.0, 1.0), (1.0, -1.0), (-1.0, 0.2)):
        one, other = density([1.0, *others]), density([-1.0, *others])
        epsilons = np.array([0.0, 0.2, 0.5, 1.0])
        for epsilon, stated in zip(epsilons, fixed_size_deltas(2 / 3, 2 / sigma, epsilons), strict=True):
            assert np.maximum(one - math.exp(epsilon) * other, 0).sum() * step <= stated + 1e-9


def test_unsampled_distribution_is_the_gaussian_one() -> None:
    ours = fixed_size_distribution(1.0, 0.8, 1e-3).self_compose(10).get_epsilon_for_delta(1e-5)
    reference = pld.from_gaussian_mechanism(1 / 0.8, value_discretization_interval=1e-3).self_compose(10)
    assert ours == pytest.approx(reference.get_epsilon_for_delta(1e-5), rel=1e-6)


def test_poisson_and_fixed_size_do_not_cost_the_same() -> None:
    poisson = SelfComposedEvent(event=PoissonSampledEvent(rate=0.05, event=BASE), count=200)
    assert make_accountant("pld").epsilon(poisson, 2000**-1.1) == pytest.approx(1.819, abs=0.01)


@pytest.mark.parametrize("noise", [0.11, 0.15, 0.3])
def test_what_is_special_to_gaussians_is_no_help_where_there_is_little_noise(noise: float) -> None:
    """So that it is left out below .1, where its integral has points without end."""
    for rate, order in itertools.product((0.001, 0.05, 0.5), (2, 3, 8, 33)):
        special, general = (_log_moment(rate, noise, order, general=one) for one in (False, True))
        assert special == general


def test_little_noise_is_counted_at_once() -> None:
    (found,) = fixed_size_rdp(0.05, 1e-4, (63.0,))
    assert found == pytest.approx((63 * 62 / 2e-8 + 63 * math.log(0.05)) / 62, rel=1e-6)

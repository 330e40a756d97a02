"""The contract of every sampler of participants. A new sampler joins with one line in SAMPLERS.

Seeds are fixed; a right sampler fails a test with probability below 1e-7, and one whose rate is wrong by 5%
must fail it.
"""

import math

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import PrivacyError
from fedveil.privacy.claims import Claim, covered_knowledge
from fedveil.privacy.events import Adjacency, GaussianEvent, PoissonSampledEvent
from fedveil.privacy.sampling import Everyone, PoissonUsers, Sampler
from fedveil.randomness import PrivacyRandomness

FALSE_ALARM = 1e-7
ROUNDS, USERS = 8_000, 250
SAMPLERS: dict[str, Sampler] = {
    "everyone": Everyone(),
    "poisson 0.01": PoissonUsers(rate=0.01),
    "poisson 0.3": PoissonUsers(rate=0.3),
    "poisson 0.9": PoissonUsers(rate=0.9),
    "poisson 1": PoissonUsers(rate=1.0),
}
samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
base = GaussianEvent(noise_multiplier=5.0)

_drawn: dict[Sampler, np.ndarray] = {}


def drawn(sampler: Sampler) -> np.ndarray:
    """Masks of many rounds, (rounds, users), drawn once for all tests."""
    if sampler not in _drawn:
        source = PrivacyRandomness.insecure(77).stream(repr(sampler))
        _drawn[sampler] = np.stack([sampler.draw(USERS, source) for _ in range(ROUNDS)])
    return _drawn[sampler]


def binomial_p_value(count: int, trials: int, rate: float) -> float:
    below, above = stats.binom.cdf(count, trials, rate), stats.binom.sf(count - 1, trials, rate)
    return float(min(1.0, 2.0 * min(below, above)))


@samplers
def test_rate_of_all_draws(sampler: Sampler) -> None:
    count = int(drawn(sampler).sum())
    assert binomial_p_value(count, ROUNDS * USERS, sampler.rate) > FALSE_ALARM
    if sampler.rate < 1.0:
        for wrong in (0.95, 1.05):
            assert binomial_p_value(count, ROUNDS * USERS, min(1.0, sampler.rate * wrong)) < FALSE_ALARM


@samplers
def test_every_user_has_the_same_rate(sampler: Sampler) -> None:
    counts = drawn(sampler).sum(axis=0)
    if sampler.rate == 1.0:
        assert counts.tolist() == [ROUNDS] * USERS
        return
    variance = ROUNDS * sampler.rate * (1.0 - sampler.rate)
    statistic = float(((counts - ROUNDS * sampler.rate) ** 2).sum() / variance)
    assert stats.chi2.sf(statistic, USERS) > FALSE_ALARM
    assert stats.chi2.cdf(statistic, USERS) > FALSE_ALARM


@samplers
def test_number_of_participants_is_binomial(sampler: Sampler) -> None:
    """Independence among users: samples of fixed size, or users drawn together, give other counts."""
    sizes = np.bincount(drawn(sampler).sum(axis=1), minlength=USERS + 1)
    expected = ROUNDS * stats.binom.pmf(np.arange(USERS + 1), USERS, sampler.rate)
    kept = expected >= 20
    observed = np.append(sizes[kept], ROUNDS - sizes[kept].sum())
    expected = np.append(expected[kept], ROUNDS - expected[kept].sum())
    if expected[-1] < 20:
        observed, expected = (
            np.append(observed[:-2], observed[-2:].sum()),
            np.append(expected[:-2], expected[-2:].sum()),
        )
    if observed.size == 1:
        assert sampler.rate == 1.0
        return
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, observed.size - 1) > FALSE_ALARM


@samplers
def test_rounds_are_independent(sampler: Sampler) -> None:
    if sampler.rate == 1.0:
        assert drawn(sampler).all()
        return
    centred = drawn(sampler) - sampler.rate
    products = (centred[1:] * centred[:-1]).sum(axis=1)
    limit = float(stats.norm.isf(FALSE_ALARM / 2))
    assert abs(products.mean()) < limit * products.std() / math.sqrt(products.size)


@samplers
def test_masks_seeds_and_sizes(sampler: Sampler) -> None:
    def draw(randomness: PrivacyRandomness) -> list[bool]:
        return sampler.draw(3000, randomness.stream("participants", 1)).tolist()

    assert draw(PrivacyRandomness.insecure(1)) == draw(PrivacyRandomness.insecure(1))
    if sampler.rate < 1.0:
        assert draw(PrivacyRandomness.system()) != draw(PrivacyRandomness.system())
    empty = sampler.draw(0, PrivacyRandomness.system().stream("participants"))
    assert empty.shape == (0,)
    assert empty.dtype == np.bool_
    with pytest.raises(PrivacyError, match="-1 users"):
        sampler.draw(-1, PrivacyRandomness.system().stream("participants"))


@samplers
def test_event_says_what_the_draw_does(sampler: Sampler) -> None:
    assert sampler.adjacency is Adjacency.ADD_OR_REMOVE_ONE
    said, *_ = sampler.amplify((Claim(covered_knowledge(), base),))
    assert said.event == (base if sampler.rate == 1.0 else PoissonSampledEvent(rate=sampler.rate, event=base))


class FixedWords:
    """A source that repeats one word."""

    def __init__(self, word: int) -> None:
        self._word = word

    def uint64(self, count: int) -> np.ndarray:
        return np.full(count, self._word, dtype=np.uint64)


@pytest.mark.parametrize("rate", [0.5, 0.3, 2.0**-12, 1e-9, math.nextafter(1.0, 0.0)])
def test_threshold_is_exactly_the_rate_rounded_down(rate: float) -> None:
    threshold = math.floor(rate * 2**64)
    sampler = PoissonUsers(rate=rate)
    assert sampler.draw(1, FixedWords(threshold - 1)).tolist() == [True]
    assert sampler.draw(1, FixedWords(threshold)).tolist() == [False]


def test_a_rate_below_the_resolution_draws_nobody_rather_than_more() -> None:
    assert not PoissonUsers(rate=2.0**-65).draw(1, FixedWords(0)).any()


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(PrivacyError, match="above 0 and at most 1"):
        PoissonUsers(rate=rate)

"""The contract of every sampler of participants. A new sampler joins with one line in SAMPLERS.

Seeds are fixed; a right sampler fails a test with probability below 1e-7, and one whose rate is wrong by 5%
must fail it. The law of the draws is compared with the event that is claimed for it, and with the bounds of every
accountant on this event: a new accounting rule is tested by its sampler.
"""

import importlib.util
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import FedveilError, PrivacyError
from fedveil.privacy.accountant import AccountingRule, rule_of
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, least_covering_claim
from fedveil.privacy.events import Adjacency, Event, GaussianEvent, PoissonSampledEvent
from fedveil.privacy.sampling import Everyone, PoissonUsers, Sampler, UniformClients
from fedveil.randomness import BitSource, PrivacyRandomness
from fedveil.run.config.experiment import merge, parse
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from tests.contract.plugin_members import plugin_members
from tests.plugins import installing

FALSE_ALARM = 1e-7
ROUNDS, USERS = 8_000, 250
_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin" / "src" / "fedveil_example"


def load_example(name: str) -> Any:
    """Return a module of the example package, which is not installed."""
    spec = importlib.util.spec_from_file_location(f"fedveil_example.{name}", _EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OneOfTwo = load_example("sampler").OneOfTwo
SAMPLERS: dict[str, Sampler] = {
    "everyone": Everyone(),
    "poisson 0.01": PoissonUsers(rate=0.01),
    "poisson 0.3": PoissonUsers(rate=0.3),
    "poisson 0.9": PoissonUsers(rate=0.9),
    "poisson 1": PoissonUsers(rate=1.0),
    "uniform 60 of 250": UniformClients(population=USERS, sample=60),
    "one of two": OneOfTwo(),
    **plugin_members("samplers"),
}
FEW = 4
AMONG_FEW: dict[str, Sampler] = {
    "everyone": Everyone(),
    "poisson 0.3": PoissonUsers(rate=0.3),
    "poisson 0.9": PoissonUsers(rate=0.9),
    "uniform 1 of 4": UniformClients(population=FEW, sample=1),
    "uniform 3 of 4": UniformClients(population=FEW, sample=3),
    "one of two": OneOfTwo(),
    **plugin_members("samplers"),
}
"""Samplers whose claims are compared with their law among a few users."""

INDEPENDENT = ("everyone", "poisson 0.01", "poisson 0.3", "poisson 0.9", "poisson 1")
"""Samplers that draw each user independently."""

samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
independent = pytest.mark.parametrize("sampler", [SAMPLERS[one] for one in INDEPENDENT], ids=INDEPENDENT)
among_few = pytest.mark.parametrize("sampler", AMONG_FEW.values(), ids=AMONG_FEW.keys())
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
    # Dependent draws of users make the sum vary more: here, each term counts up to twice (one of two).
    assert stats.chi2.sf(statistic / 2, USERS / 2) > FALSE_ALARM
    assert stats.chi2.cdf(statistic / 2, USERS / 2) > FALSE_ALARM


@independent
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
def test_a_number_of_participants_that_counts_as_fixed_is_fixed(sampler: Sampler) -> None:
    source = PrivacyRandomness.insecure(78).stream(repr(sampler))
    for users in range(USERS - 3, USERS + 1):
        try:
            sizes = {int(sampler.draw(users, source).sum()) for _ in range(40)}
        except PrivacyError:  # the sampler is for another number of users
            continue
        assert len(sizes) == 1 or not sampler.fixed_size


@samplers
def test_rounds_are_independent(sampler: Sampler) -> None:
    if sampler.rate == 1.0:
        assert drawn(sampler).all()
        return
    centred = drawn(sampler) - sampler.rate
    products = (centred[1:] * centred[:-1])[:, ::2].sum(axis=1)
    limit = float(stats.norm.isf(FALSE_ALARM / 2))
    assert abs(products.mean()) < limit * products.std() / math.sqrt(products.size)


@samplers
def test_masks_seeds_and_sizes(sampler: Sampler) -> None:
    def draw(randomness: PrivacyRandomness) -> list[bool]:
        return sampler.draw(USERS, randomness.stream("participants", 1)).tolist()

    assert draw(PrivacyRandomness.insecure(1)) == draw(PrivacyRandomness.insecure(1))
    if sampler.rate < 1.0:
        drawn_twice = [[draw(PrivacyRandomness.system()) for _ in range(20)] for _ in range(2)]
        assert drawn_twice[0] != drawn_twice[1]
    if isinstance(sampler, UniformClients):
        return
    empty = sampler.draw(0, PrivacyRandomness.system().stream("participants"))
    assert empty.shape == (0,)
    assert empty.dtype == np.bool_
    with pytest.raises(PrivacyError, match="-1 users"):
        sampler.draw(-1, PrivacyRandomness.system().stream("participants"))


@independent
def test_event_says_what_the_draw_does(sampler: Sampler) -> None:
    assert sampler.adjacency is Adjacency.ADD_OR_REMOVE_ONE
    said, *_ = sampler.amplify((Claim(covered_knowledge(), base),))
    assert said.event == (base if sampler.rate == 1.0 else PoissonSampledEvent(rate=sampler.rate, event=base))


# --- the law of the draws, against the claims -----------------------------------------------------------------------

DRAWS = 20_000
STD = 1.0
TOLERANCE = 0.012
"""Of a delta: 6 standard deviations of a probability that DRAWS draws estimate, times the largest difference of two
Gaussians one contribution apart (.38), for every sampler here."""

EPSILONS = (0.0, 0.1, 0.3, 0.7, 1.5)


def law(sampler: Sampler) -> dict[tuple[bool, ...], float]:
    """The frequencies of the masks of a few users."""
    source = PrivacyRandomness.insecure(78).stream(repr(sampler))
    counts = Counter(tuple(sampler.draw(FEW, source).tolist()) for _ in range(DRAWS))
    return {mask: count / DRAWS for mask, count in counts.items()}


def deltas(sampler: Sampler, masks: dict[tuple[bool, ...], float]) -> np.ndarray:
    """The largest delta at each epsilon between two neighbours, over all contributions of the others.

    A contribution is -1, 0 or 1, and the noise is N(0, STD^2): densities on a grid, in both directions.
    """
    x = np.linspace(-FEW - 7.0, FEW + 7.0, 700)
    other = 0.0 if sampler.adjacency is Adjacency.ADD_OR_REMOVE_ONE else -1.0
    found = np.zeros(len(EPSILONS))
    taken, chance = np.array(list(masks), dtype=float), np.array(list(masks.values()))
    for user in (0, 1):
        for others in itertools.product((-1.0, 0.0, 1.0), repeat=FEW - 1):
            sides = []
            for own in (1.0, other):
                sums = taken @ np.insert(np.array(others), user, own)
                sides.append(
                    chance @ stats.norm.pdf(x[None, :], loc=sums[:, None], scale=STD) * (x[1] - x[0])
                )
            for one, two in (sides, sides[::-1]):
                moved = [np.maximum(one - math.exp(epsilon) * two, 0.0).sum() for epsilon in EPSILONS]
                found = np.maximum(found, moved)
    return found


def claimed(event: Event, adjacency: Adjacency) -> dict[str, np.ndarray]:
    """The deltas of every accountant that supports an event."""
    accountants = (make_accountant(name, adjacency) for name in ("pld", "rdp"))
    return {
        one.name: np.array([one.delta(event, epsilon) for epsilon in EPSILONS])
        for one in accountants
        if one.supports(event)
    }


def view(sampler: Sampler, *known: Reveals) -> Event:
    """The event of a round for a party that knows something of the sample."""
    base = (Claim(covered_knowledge(), GaussianEvent(noise_multiplier=STD)),)
    return least_covering_claim(frozenset(known), sampler.amplify(base)).event


@among_few
def test_no_neighbours_differ_by_more_than_accountants_say_of_the_claimed_event(sampler: Sampler) -> None:
    found = deltas(sampler, law(sampler))
    bounds = claimed(view(sampler), sampler.adjacency)
    assert bounds
    for bound in bounds.values():
        assert (found <= bound + TOLERANCE).all()


@among_few
def test_whoever_knows_their_own_draw_has_no_better_bound_than_is_claimed(sampler: Sampler) -> None:
    """User 3 knows its flag; the law of the others is the law given this flag."""
    masks = law(sampler)
    bounds = claimed(view(sampler, Reveals.OWN_DRAW), sampler.adjacency)
    for flag in (False, True):
        given = {mask: chance for mask, chance in masks.items() if mask[FEW - 1] is flag}
        if not given:
            continue
        whole = sum(given.values())
        # User 2 is the partner of user 3, the worst case for samplers that pair users: it is moved to the front.
        moved = {(mask[2], *mask[:2], mask[3]): chance / whole for mask, chance in given.items()}
        found = deltas(sampler, moved)
        for bound in bounds.values():
            assert (found <= bound + TOLERANCE / math.sqrt(whole)).all()


def test_an_event_that_costs_too_little_is_found() -> None:
    """The comparison rejects claims of wrong laws, and a smaller rate."""
    paired, poisson, uniform = (AMONG_FEW[one] for one in ("one of two", "poisson 0.3", "uniform 3 of 4"))
    half = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=STD))
    less = PoissonSampledEvent(rate=0.24, event=GaussianEvent(noise_multiplier=STD))
    fewer = UniformClients(population=FEW, sample=2).event(GaussianEvent(noise_multiplier=STD))
    for sampler, event in ((paired, half), (poisson, less), (uniform, fewer)):
        found = deltas(sampler, law(sampler))
        assert (found > claimed(event, sampler.adjacency)["pld"] + TOLERANCE).any(), sampler


@among_few
def test_whoever_knows_the_sample_has_the_unamplified_claim(sampler: Sampler) -> None:
    assert view(sampler, Reveals.OWN_DRAW, Reveals.DRAWN) == GaussianEvent(noise_multiplier=STD)


# --- the table [sampler] --------------------------------------------------------------------------------------------

EXPERIMENT: dict[str, Any] = {
    "name": "sampled",
    "rounds": 2,
    "data": {"name": "digits", "n_users": 40, "n_silos": 2},
    "model": {"name": "linear"},
    "local": {"learning_rate": 0.1, "batch_size": 512},
    "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 5.0},
    "privacy": {"insecure_seed": 5},
}


def test_a_table_and_a_key_of_the_method_give_the_same_guarantee_and_the_same_model(tmp_path: Path) -> None:
    table = parse(merge(EXPERIMENT, {"sampler": {"name": "poisson", "rate": 0.5}}), "t")
    key = parse(merge(EXPERIMENT, {"method": {"user_sampling_rate": 0.5}}), "t")
    found = [prepare(one) for one in (table, key)]
    assert found[0].guarantee == found[1].guarantee
    assert isinstance(found[0].guarantee.event, PoissonSampledEvent)
    models = [run(one, tmp_path / str(at), NullObserver()).folder for at, one in enumerate(found)]
    assert len({(folder / "model.safetensors").read_bytes() for folder in models}) == 1


def test_a_uniform_sample_counts_as_one_of_its_size() -> None:
    found = prepare(parse(merge(EXPERIMENT, {"sampler": {"name": "uniform", "sample": 8}}), "t")).guarantee
    sampled = UniformClients(population=40, sample=8).event(GaussianEvent(noise_multiplier=5.0))
    assert found.event == sampled
    assert found.adjacency is Adjacency.REPLACE_ONE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"user_sampling_rate": 0.5}}, r"sampler: uldp-avg samples by itself \(PoissonUsers\)"),
        ({"sampler": {"name": "poisson", "rate": 0}}, r"^t: sampler\.rate: must be > 0, not 0$"),
        ({"sampler": {"name": "poison", "rate": 0.5}}, r"no sampler 'poison'; .*did you mean 'poisson'"),
        ({"sampler": {"name": "uniform", "sample": 41, "rate": None}}, "a cohort of 41 out of 40 clients"),
        ({"method": {"name": "uldp-naive"}}, "users are sampled, but a contribution is not one user's"),
        (
            {
                "method": {"name": "dp-fed", "noise_multiplier": "closed-form"},
                "data": {"allocation": {"law": "clients"}, "n_silos": None},
                "privacy": {"epsilon": 2.0},
            },
            r"for their own sampling; dp-fed has none$",
        ),
    ],
)
def test_a_sampler_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    document = merge(EXPERIMENT, {"sampler": {"name": "poisson", "rate": 0.5}})
    with pytest.raises(FedveilError, match=message):
        prepare(parse(merge(document, changes), "t"))


# --- accounting rules -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnruledEvent(Event, type="without a rule, for tests"):
    """An event that no rule bounds."""


WRONG_DRAWS: dict[str, Callable[[np.ndarray], Any]] = {
    "nothing": lambda mask: None,
    "indices": np.flatnonzero,
    "counts": lambda mask: 2 * mask,
    "floats": lambda mask: mask.astype(float),
    "a list": lambda mask: mask.tolist(),
    "a column": lambda mask: mask[:, None],
    "one user more": lambda mask: np.append(mask, True),
}


@pytest.mark.parametrize("wrong", WRONG_DRAWS)
def test_what_is_no_mask_is_refused(wrong: str) -> None:
    """A forgotten return took all users, under the epsilon of a sample of them."""

    @dataclass(frozen=True, kw_only=True)
    class Liar(PoissonUsers):
        def draw(self, n: int, source: BitSource) -> Any:
            return WRONG_DRAWS[wrong](super().draw(n, source))

    with pytest.raises(PrivacyError, match=r"Liar, given as sampler: draw\(\) is .* booleans is needed"):
        Liar(rate=0.5).checked_draw(60, PrivacyRandomness.insecure(1).stream("a"))


def test_a_sampler_is_tried_before_anything_is_charged(tmp_path: Path) -> None:
    code = """
from dataclasses import dataclass
from fedveil.privacy.sampling import PoissonUsers

@dataclass(frozen=True, kw_only=True)
class Forgets(PoissonUsers):
    def draw(self, n, source):
        super().draw(n, source)
"""
    with installing(tmp_path) as install:
        install("liars", {"samplers": {"forgets": "liars:Forgets"}}, {"liars": code})
        wanted = parse(merge(EXPERIMENT, {"sampler": {"name": "forgets", "rate": 0.5}}), "test")
        with pytest.raises(PrivacyError, match=r"Forgets, given as sampler: draw\(\) is NoneType"):
            prepare(wanted)


def test_a_mask_that_the_sampler_keeps_is_copied() -> None:
    kept = np.zeros(4, dtype=np.bool_)

    @dataclass(frozen=True, kw_only=True)
    class Keeps(PoissonUsers):
        def draw(self, n: int, source: BitSource) -> Any:
            return kept

    found = Keeps(rate=0.5).checked_draw(4, PrivacyRandomness.insecure(1).stream("a"))
    kept[:] = True
    assert not found.any()


def test_a_draw_of_another_size_than_declared_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Fewer(UniformClients):
        def draw(self, n: int, source: BitSource) -> Any:
            found = super().draw(n, source)
            found[np.flatnonzero(found)[0]] = False
            return found

    with pytest.raises(PrivacyError, match="another number of users than its size, 3"):
        Fewer(population=9, sample=3).checked_draw(9, PrivacyRandomness.insecure(1).stream("a"))


def test_an_event_without_a_rule_has_no_epsilon() -> None:
    for name in ("pld", "rdp"):
        with pytest.raises(PrivacyError, match=f"accountant '{name}' has no bound for UnruledEvent"):
            make_accountant(name).epsilon(UnruledEvent(), 1e-5)


def test_a_second_rule_for_an_event_is_refused() -> None:
    assert rule_of(base).losses(base, Adjacency.ADD_OR_REMOVE_ONE) is not None
    with pytest.raises(PrivacyError, match="events of type 'gaussian' have a rule already"):

        class Cheaper(AccountingRule, event=GaussianEvent):
            """A rule that would replace another one."""


def test_a_second_event_of_a_type_is_refused() -> None:
    with pytest.raises(PrivacyError, match="type 'gaussian' exists already: GaussianEvent"):

        class Other(Event, type="gaussian"):
            """An event that would be read in place of another one."""


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

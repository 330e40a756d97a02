"""Events survive JSON, refuse what is no event, and agree with dp_accounting's own events."""

import json
import math
from collections import Counter
from functools import cache

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from fedveil.errors import PrivacyError
from fedveil.privacy.accounting import PldAccountant, covers, dominating_event, make_accountant
from fedveil.privacy.events import (
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    GridEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SelfComposedEvent,
    atoms,
    compose,
    event_from_json,
    split_grid_loss,
)
from tests.dp_events import dp_event_of

multipliers = st.floats(1e-3, 1e3)
rates = st.floats(1e-6, 1.0)
releases = st.one_of(
    multipliers.map(lambda s: {"type": "gaussian", "noise_multiplier": s}),
    multipliers.map(lambda s: {"type": "laplace", "noise_multiplier": s}),
    multipliers.map(lambda s: {"type": "concentrated", "noise_multiplier": s}),
    st.text(min_size=1).filter(str.strip).map(lambda text: {"type": "no_guarantee", "reason": text}),
    st.tuples(multipliers, st.floats(0.01, 0.99)).map(
        lambda pair: {
            "type": "mixture_of_gaussians",
            "noise_multiplier": pair[0],
            "sensitivities": [0.0, 1.0],
            "probabilities": [1 - pair[1], pair[1]],
        }
    ),
)


@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_losses_of_grids_add_up_and_shift_every_figure(name: str) -> None:
    """What is (epsilon, delta) with continuous noise is (epsilon + loss, e^loss delta) on the grid."""
    release, accountant = GaussianEvent(noise_multiplier=2.0), make_accountant(name)
    charged = SelfComposedEvent(event=ComposedEvent(events=(release, GridEvent(loss=0.01))), count=5)
    bare, loss = split_grid_loss(charged)
    assert (bare, loss) == (SelfComposedEvent(event=release, count=5), pytest.approx(0.05, rel=1e-14))
    found = accountant.epsilon(charged, 1e-5)
    assert found == accountant.epsilon(bare, 1e-5 * math.exp(-loss)) + loss
    assert accountant.delta(charged, found) == pytest.approx(1e-5, rel=1e-6)
    assert accountant.delta(ComposedEvent(events=(release, GridEvent(loss=800.0))), 1.0) == 1.0
    assert accountant.epsilon(ComposedEvent(events=(release, GridEvent(loss=800.0))), 1e-5) == math.inf
    assert accountant.supports(charged)
    assert event_from_json(charged.to_json()) == charged


@pytest.mark.parametrize(("multiplier", "loss"), [(1.0, 1e-9), (1.0, 0.05), (100.0, 0.05), (100.0, 1.0)])
def test_no_law_on_a_grid_exceeds_delta_at_an_epsilon_below_the_loss(multiplier: float, loss: float) -> None:
    """Tilt cells of two normal laws by half the loss each, and compare the exact delta of the result."""
    random, edges, accountant = np.random.default_rng(8), np.linspace(-6.0, 7.0, 40), make_accountant("pld")
    event = ComposedEvent(events=(GaussianEvent(noise_multiplier=multiplier), GridEvent(loss=loss)))
    cells = [np.diff(ndtr(edges - mean), prepend=0.0, append=1.0) for mean in (0.0, 1 / multiplier)]
    tilts = [np.where(edges < 0.5, 1, -1), *random.choice([-1, 1], size=(20, len(edges)))]
    for epsilon in (0.0, loss / 2, loss * 0.999):
        bound = accountant.delta(event, epsilon)
        for tilt in tilts:
            # Tilts of a quarter of the loss and a normaliser between them: no ratio moves by more than half the loss.
            signs = np.append(tilt, -1)
            p, q = (one * np.exp(sign * signs * loss / 4) for one, sign in zip(cells, (1, -1), strict=True))
            reached = np.maximum(p / p.sum() - math.exp(epsilon) * q / q.sum(), 0.0).sum()
            assert reached <= bound
    if loss < 1e-6:
        assert accountant.delta(event, 0.0) == pytest.approx(2 * ndtr(0.5) - 1, abs=1e-6)


def test_a_loss_of_a_grid_is_positive_and_finite() -> None:
    for loss in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="loss"):
            GridEvent(loss=loss)


forms = st.recursive(
    releases,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("poisson_sampled"), "rate": rates, "event": inner}),
        st.fixed_dictionaries(
            {"type": st.just("self_composed"), "count": st.integers(1, 1000), "event": inner}
        ),
        st.fixed_dictionaries({"type": st.just("composed"), "events": st.lists(inner, max_size=4)}),
    ),
    max_leaves=6,
)


@given(forms)
def test_json_round_trip_is_exact(form: object) -> None:
    event = event_from_json(form)
    assert event.to_json() == form
    text = json.dumps(event.to_json(), allow_nan=False)
    assert event_from_json(json.loads(text)) == event


@given(forms)
def test_compose_inverts_atoms(form: object) -> None:
    event = event_from_json(form)
    assert atoms(compose(atoms(event))) == atoms(event)


@given(forms)
def test_every_event_has_a_dp_event(form: object) -> None:
    assert isinstance(dp_event_of(event_from_json(form)), dp_accounting.DpEvent)


def test_atoms_adds_up_equal_releases_and_opens_a_full_sample() -> None:
    step = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=2.0))
    full = PoissonSampledEvent(rate=1.0, event=GaussianEvent(noise_multiplier=2.0))
    rounds = SelfComposedEvent(event=ComposedEvent(events=(step, full, step)), count=10)
    assert atoms(rounds) == {step: 20, GaussianEvent(noise_multiplier=2.0): 10}
    assert atoms(ComposedEvent(events=())) == {}


@pytest.mark.parametrize("kind", [GaussianEvent, LaplaceEvent, ConcentratedEvent])
@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.inf, math.nan])
def test_noise_multiplier_must_be_positive_and_finite(kind: type[Event], multiplier: float) -> None:
    with pytest.raises(PrivacyError, match="NoGuarantee"):
        kind(noise_multiplier=multiplier)  # type: ignore[call-arg]


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_sampling_rate_must_be_a_positive_probability(rate: float) -> None:
    with pytest.raises(PrivacyError, match=r"rate = .*above 0"):
        PoissonSampledEvent(rate=rate, event=GaussianEvent(noise_multiplier=1.0))


@pytest.mark.parametrize(
    ("sensitivities", "probabilities", "message"),
    [
        ((), (), "one probability"),
        ((1.0,), (0.5, 0.5), "one probability"),
        ((-1.0,), (1.0,), "not negative"),
        ((math.inf,), (1.0,), "finite"),
        ((0.0, 1.0), (0.0, 1.0), "positive"),
        ((0.0, 1.0), (0.5, 0.4), "sum to 0.9"),
        ((0.0, 1.0), (0.5, math.nan), "positive"),
    ],
)
def test_mixture_refuses_what_is_no_distribution(
    sensitivities: tuple[float, ...], probabilities: tuple[float, ...], message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        MixtureOfGaussiansEvent(
            noise_multiplier=1.0, sensitivities=sensitivities, probabilities=probabilities
        )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "JSON object"),
        ([], "JSON object"),
        ({}, "unknown event type None"),
        ({"type": "exponential"}, "unknown event type 'exponential'"),
        ({"type": "gaussian"}, "noise_multiplier"),
        ({"type": "gaussian", "noise_multiplier": 1.0, "clip": 2}, "clip"),
        ({"type": "gaussian", "noise_multiplier": "1"}, "must be a number"),
        ({"type": "gaussian", "noise_multiplier": True}, "must be a number"),
        ({"type": "self_composed", "count": 2.5, "event": {}}, "integer"),
        (
            {"type": "self_composed", "count": 0, "event": {"type": "no_guarantee", "reason": "x"}},
            "at least 1",
        ),
        ({"type": "composed", "events": {}}, "must be a list"),
        ({"type": "no_guarantee", "reason": ""}, "must say why"),
        ({"type": "no_guarantee", "reason": 3}, "must be a string"),
        ({"type": "poisson_sampled", "rate": 0.5, "event": {"type": "tree"}}, "unknown event type 'tree'"),
    ],
)
def test_reading_refuses_what_is_no_event(data: object, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        event_from_json(data)


def _kinds(multiplier: float) -> list[Event]:
    gaussian, laplace = GaussianEvent(noise_multiplier=multiplier), LaplaceEvent(noise_multiplier=multiplier)
    sampled = [
        PoissonSampledEvent(rate=rate, event=one) for rate in (0.1, 0.5) for one in (gaussian, laplace)
    ]
    return [gaussian, laplace, ConcentratedEvent(noise_multiplier=multiplier), *sampled]


EVENTS = [*_kinds(0.7), *_kinds(2.0), ComposedEvent(events=()), NoGuarantee(reason="none")]


def test_an_event_that_covers_another_costs_as_much_by_every_accountant_that_knows_both() -> None:
    """And the costliest of two covers both: alone, or as their composition where neither covers the other."""
    compared = 0
    for one in EVENTS:
        assert covers(one, one)
        for other in EVENTS:
            most = dominating_event([one, other])
            if not covers(one, other) and not covers(other, one):
                assert most == ComposedEvent(events=(one, other))
            for name in ("pld", "rdp"):
                accountant = make_accountant(name)
                if not (accountant.supports(one) and accountant.supports(other)):
                    continue
                costs = [_twenty(name, frozenset(atoms(event).items())) for event in (one, other, most)]
                if covers(one, other):
                    assert costs[0] >= costs[1] * (1 - 1e-9)
                assert costs[2] >= max(costs[:2]) * (1 - 1e-9)
                compared += 1
    assert compared > 150


@cache
def _twenty(accountant: str, counted: frozenset[tuple[Event, int]]) -> float:
    """What a release costs twenty times, at delta 1e-5; accountants count atoms, in whatever order."""
    event = SelfComposedEvent(event=compose(Counter(dict(counted))), count=20)
    by = PldAccountant(interval=3e-3) if accountant == "pld" else make_accountant(accountant)
    return by.epsilon(event, 1e-5)

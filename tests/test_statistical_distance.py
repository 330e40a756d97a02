"""What is seen at a statistical distance: delta counts it, in every accountant, claim and statement."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from fedveil.errors import PrivacyError
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import Guarantee, PublicFacts
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.uldp import uldp_avg_w
from fedveil.privacy.accounting import dominating_event, make_accountant
from fedveil.privacy.claims import Claim, Reveals, Role, covered_knowledge
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    ConcentratedEvent,
    GaussianEvent,
    NearbyEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SelfComposedEvent,
    at_distance,
    atoms,
    event_from_json,
    split_distance,
)
from fedveil.privacy.sampling import PoissonUsers
from fedveil.protocols.protocol import MOST_REPEATS
from fedveil.protocols.weighting.plan import CHECK_DISTANCE
from fedveil.protocols.weighting.rlwe_weights import shown_distance
from fedveil.training.steps import LocalSgd

NOISE = GaussianEvent(noise_multiplier=2.0)
DELTA = 1e-5


def facts(silos: int = 5) -> PublicFacts:
    return PublicFacts(n_silos=silos, n_users=50, dimension=10)


def weighted(protection: PrivateWeighting, silos: int = 5) -> Guarantee:
    local = LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
    method = uldp_avg_w(local=local, clip=1.0, noise_multiplier=5.0)
    if protection.private_sampling:
        method = replace(method, sampler=PoissonUsers(rate=0.5))
    return derive(replace(method, protection=protection), facts(silos))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("distance", [1e-3, 1e-2])
def test_two_laws_that_use_their_whole_distance_are_within_the_delta(epsilon: float, distance: float) -> None:
    """An attacker's best set A: the law of one neighbour gains the distance there, that of the other loses it."""
    edges = np.linspace(-12, 12, 4001)
    p, q = (np.diff(norm.cdf(edges, loc=mean, scale=2.0)) for mean in (1.0, 0.0))
    inside = p > math.exp(epsilon) * q
    moved = (p + distance * ~inside * -p / p[~inside].sum(), q.copy())
    moved[0][inside] += distance * p[inside] / p[inside].sum()
    moved[1][inside] -= distance * q[inside] / q[inside].sum()
    moved[1][~inside] += distance * q[~inside] / q[~inside].sum()
    for true, seen in zip((p, q), moved, strict=True):
        assert seen.min() >= 0
        assert abs(seen - true).sum() / 2 == pytest.approx(distance)
    attained = float((moved[0] - math.exp(epsilon) * moved[1])[inside].sum())
    accountant = make_accountant("pld")
    without = accountant.delta(NOISE, epsilon)
    stated = accountant.delta(at_distance(NOISE, distance), epsilon)
    assert attained > without + 0.99 * (1 + math.exp(epsilon)) * distance
    assert attained <= stated * (1 + 1e-9)
    assert stated == pytest.approx(without + (1 + math.exp(epsilon)) * distance)


@pytest.mark.parametrize("name", ["pld", "rdp", "rdp-2017"])
@pytest.mark.parametrize(
    "event", [NOISE, SelfComposedEvent(count=20, event=PoissonSampledEvent(rate=0.1, event=NOISE))]
)
def test_epsilon_is_the_least_that_leaves_room_for_the_distance(name: str, event: GaussianEvent) -> None:
    accountant, distance = make_accountant(name), 1e-7
    found = accountant.epsilon(at_distance(event, distance), DELTA)
    assert found > accountant.epsilon(event, DELTA)
    left = DELTA - (1 + math.exp(found)) * distance
    assert found == pytest.approx(accountant.epsilon(event, left), rel=1e-8)
    assert accountant.delta(at_distance(event, distance), found) <= DELTA * (1 + 1e-6)
    assert accountant.delta(at_distance(event, distance), found * 0.999) > DELTA * (1 - 1e-6)


@pytest.mark.parametrize("slack", [1e-3, 1e-5, 1e-7])
def test_an_epsilon_is_found_where_the_distance_takes_about_all_that_delta_can_spare(slack: float) -> None:
    """The least of delta_event(e) + (1 + e^e) d is just below delta, and fixed-point iteration takes for ever there."""
    mu, distance = 5.0, 1e-12
    release = GaussianEvent(noise_multiplier=1 / mu)

    def needed(epsilon: float) -> float:
        upper, lower = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
        return float(upper - math.exp(epsilon) * lower + (1 + math.exp(epsilon)) * distance)

    least = minimize_scalar(needed, bounds=(5, 28), method="bounded", options={"xatol": 1e-12})
    delta = float(least.fun) * (1 + slack)
    exact = brentq(lambda epsilon: needed(epsilon) - delta, 5, least.x, xtol=1e-13)
    found = make_accountant("pld").epsilon(at_distance(release, distance), delta)
    assert exact * (1 - 1e-8) <= found <= exact * (1 + 1e-6)
    assert make_accountant("pld").epsilon(at_distance(release, distance), least.fun * (1 - slack)) == math.inf


def test_where_the_distance_takes_all_of_delta_nothing_is_guaranteed() -> None:
    accountant = make_accountant("pld")
    assert accountant.epsilon(at_distance(NOISE, DELTA), DELTA) == math.inf
    large = GaussianEvent(noise_multiplier=0.1)  # of an epsilon near 90
    assert accountant.epsilon(large, DELTA) < 100
    assert accountant.epsilon(at_distance(large, 1e-20), DELTA) == math.inf
    assert accountant.delta(at_distance(NOISE, 1.0), 800.0) == 1.0
    least, larger = (
        1e-310,
        GaussianEvent(noise_multiplier=0.02),
    )  # of an epsilon near 1450: e^1450 1e-310 is above 1
    assert accountant.delta(at_distance(NOISE, least), 1000.0) == 1.0
    assert accountant.epsilon(at_distance(larger, least), DELTA) == math.inf
    sampled = SelfComposedEvent(count=3, event=PoissonSampledEvent(rate=0.5, event=NOISE))
    with pytest.raises(PrivacyError, match="numerical error"):
        accountant.epsilon(at_distance(sampled, 1e-20), 1e-13)
    assert accountant.epsilon(at_distance(NoGuarantee(reason="none"), 0.1), DELTA) == math.inf


@pytest.mark.parametrize("distance", [0.0, -1e-9, 1.1, math.nan, math.inf])
def test_a_distance_that_is_none_is_refused(distance: float) -> None:
    with pytest.raises(PrivacyError, match=r"NearbyEvent\.distance"):
        NearbyEvent(distance=distance)


def test_distances_of_charges_add_up_and_stay_apart_from_releases() -> None:
    charge = at_distance(NOISE, 1e-9)
    run = ComposedEvent(events=(SelfComposedEvent(count=30, event=charge), NOISE, at_distance(NOISE, 2e-9)))
    release, distance = split_distance(run)
    assert atoms(release) == {NOISE: 32}
    assert distance == pytest.approx(3.2e-8, rel=1e-14)
    assert distance >= 3.2e-8
    assert event_from_json(run.to_json()) == run
    assert at_distance(NOISE, 0.0) is NOISE
    assert split_distance(NOISE) == (NOISE, 0.0)


def test_the_costliest_of_some_has_the_largest_distance() -> None:
    """A silo is charged the costliest party that it does not trust: a server who decrypts stands for readers too."""
    server, other = at_distance(NOISE, 1e-9), GaussianEvent(noise_multiplier=3.0)
    assert dominating_event([NOISE, server, other]) == server
    release, distance = split_distance(dominating_event([server, at_distance(other, 1e-8)]))
    assert release == NOISE
    assert 1e-8 <= distance < 1.0001e-8
    assert dominating_event([]) == ComposedEvent(events=())
    assert isinstance(dominating_event([server, NoGuarantee(reason="none")]), NoGuarantee)


def test_a_silo_pays_once_for_a_round_that_the_server_sees_at_a_distance_and_silos_with_less_noise() -> None:
    """Charged as two releases, five silos' round would cost a tenth more in noise than it does against the silos."""
    guarantee = weighted(PrivateWeighting(cipher="rlwe", n_max=60))
    server, silos = guarantee.event_for(Role.SERVER), guarantee.event_for(Role.SILO)
    release, distance = split_distance(dominating_event([server, silos]))
    assert release == silos
    assert distance == pytest.approx(split_distance(server)[1], rel=1e-12)
    assert distance >= split_distance(server)[1]


def test_sampling_makes_no_distance_smaller() -> None:
    claim = Claim(covered_knowledge(), NOISE, distance=1e-9)
    amplified, *_ = PoissonUsers(rate=0.5).amplify([claim])
    assert amplified.charged_event == at_distance(PoissonSampledEvent(rate=0.5, event=NOISE), 1e-9)


def test_the_line_of_the_server_alone_has_the_distance_of_what_it_decrypts() -> None:
    flooded, blinded = shown_distance(5 * MOST_REPEATS), CHECK_DISTANCE
    for protection, distance in (
        (PrivateWeighting(), 0.0),
        (PrivateWeighting(cipher="rlwe", n_max=60), flooded),
        (PrivateWeighting(private_sampling=True), blinded),
        (PrivateWeighting(private_sampling=True, cipher="rlwe", n_max=60), flooded + blinded),
    ):
        guarantee = weighted(protection)
        assert [split_distance(guarantee.event_for(role))[1] for role in (Role.READER, Role.SILO)] == [
            0.0,
            0.0,
        ]
        assert split_distance(guarantee.event_for(Role.SERVER))[1] == pytest.approx(distance, rel=1e-12)
        whole = guarantee.after_rounds(guarantee.event_for(Role.SERVER), 100, 7)
        assert split_distance(whole)[1] == pytest.approx(107 * distance, rel=1e-12)
        told = any("delta counts 1 + e^epsilon times" in line for line in guarantee.mechanisms)
        assert told == (distance > 0)
        readers, server = (
            make_accountant("pld").epsilon(guarantee.after_rounds(guarantee.event_for(role), 100), DELTA)
            for role in (Role.READER, Role.SERVER)
        )
        assert (server > readers) == (distance > 0)


def test_a_claim_without_the_distance_leaves_whoever_decrypts_without_a_guarantee() -> None:
    """Fail closed: ciphertexts are something that a server learns, and the claim of noise alone does not cover them."""

    class Forgetful(PrivateWeighting):
        def claims(self, claims, sensitivity):  # type: ignore[no-untyped-def]
            return tuple(
                one for one in super().claims(claims, sensitivity) if Reveals.CIPHERTEXTS not in one.covers
            )

    assert isinstance(weighted(Forgetful()).event_for(Role.SERVER), NoGuarantee)


def test_messages_of_one_charge_are_as_far_from_floods_as_their_roots_add_up_to() -> None:
    """Every outcome of m floods of few values, beside those of floods that all are shifted: at most sqrt(m) 1.1 / F."""
    values = 16
    law = np.convolve(np.convolve(np.ones(values), np.ones(values)), np.ones(values)) / values**3
    here, shifted = np.append(law, 0.0), np.insert(law, 0, 0.0)
    for messages in (1, 2, 3):
        one, other = np.ones(1), np.ones(1)
        for _ in range(messages):
            one, other = np.multiply.outer(one, here).ravel(), np.multiply.outer(other, shifted).ravel()
        attained = abs(one - other).sum() / 2
        assert 0.5 * math.sqrt(messages) * 1.1 / values < attained <= math.sqrt(messages) * 1.1 / values
    assert 10 * math.exp(-99 / 2) < 2.0**-68
    assert shown_distance(4) == pytest.approx(2 * 2.0**-48, rel=1e-5)


def test_noise_longer_than_the_flood_allows_for_is_as_rare_as_is_counted() -> None:
    """Noise of three directions of any lengths: squares above c times their sum, with c small enough to be met."""
    generator = np.random.default_rng(1)
    fresh = generator.binomial(42, 0.5, size=(100_000, 3)) - 21.0  # SEAL's noise
    for lengths in ((1, 0, 0), (1, 1, 0), (3, 2, 1)):
        scale = np.array(lengths) / math.hypot(*lengths)
        for times in (4, 9):
            met = float(((fresh * scale) ** 2 @ np.ones(3) > times * 3.8**2).mean())
            assert met <= math.sqrt(times) * math.exp(-(times - 1) / 2)


def test_replaced_units_and_noisy_votes_are_counted_with_a_distance_too() -> None:
    replaced = make_accountant("pld", Adjacency.REPLACE_ONE)
    assert replaced.epsilon(at_distance(NOISE, 1e-8), DELTA) > replaced.epsilon(NOISE, DELTA)
    votes = ConcentratedEvent(noise_multiplier=2.0)
    rdp = make_accountant("rdp")
    assert rdp.epsilon(at_distance(votes, 1e-8), DELTA) > rdp.epsilon(votes, DELTA)

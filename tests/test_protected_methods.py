"""Secure aggregation as a stage: what goes with it, what it changes in the guarantee, and that it changes no sum."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedveil.errors import CompositionError
from fedveil.methods.channels import Identity
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import Guarantee, PublicFacts
from fedveil.methods.named_channels import LayeredShares
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.protection_stage import NoProtection, ProtectionStage
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg
from fedveil.methods.weights import DeclaredMain, Weights
from fedveil.privacy.claims import Reveals, Role
from fedveil.privacy.events import ConcentratedEvent, GaussianEvent, NoGuarantee
from fedveil.privacy.sampling import PoissonUsers
from tests.contract.test_methods import CLIP, LOCAL, METHOD_CASES, SIGMA, SILOS, USERS

FEDERATION = PublicFacts(n_silos=SILOS, n_users=USERS)


def protected(name: str, **changes: object) -> Guarantee:
    return derive(replace(METHOD_CASES[name](SIGMA), protection=SecureAggregation(), **changes), FEDERATION)


unweighted = pytest.mark.parametrize("name", ["uldp-naive", "uldp-sgd", "uldp-avg"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fedavg", "unbounded updates lie on no grid"),
        ("uldp-group", "floating-point models"),
        ("dp-fed", "a server that is trusted"),
        ("dp-fed-ls", "a server that is trusted"),
    ],
)
def test_methods_without_shares_of_noise_are_refused_with_the_reason(name: str, reason: str) -> None:
    method = METHOD_CASES[name](SIGMA)
    assert method.protection == NoProtection()
    with pytest.raises(CompositionError, match=f"{name}.*cannot run under secure aggregation.*{reason}"):
        replace(method, protection=SecureAggregation())


def test_a_bounded_sum_without_shares_of_noise_is_refused() -> None:
    plain = replace(METHOD_CASES["uldp-avg"](SIGMA), channel=Identity())
    with pytest.raises(CompositionError, match="GaussianShares"):
        replace(plain, protection=SecureAggregation())


def test_a_channel_that_is_decoded_message_by_message_is_refused() -> None:
    method = METHOD_CASES["uldp-avg"](SIGMA)
    decoded = replace(method, channel=LayeredShares(shares=method.channel))
    with pytest.raises(CompositionError, match="decodes one by one"):
        replace(decoded, protection=SecureAggregation())


@unweighted
def test_the_server_learns_the_sum_alone_and_the_event_of_the_models_stays(name: str) -> None:
    plain, hidden = derive(METHOD_CASES[name](SIGMA), FEDERATION), protected(name)
    assert hidden.event_for(Role.SERVER) == plain.event
    sees = next(view.sees for view in hidden.views if view.role is Role.SERVER)
    assert Reveals.SUM.value in sees
    assert Reveals.MESSAGE.value not in sees
    assert hidden.event == plain.event
    assert hidden.grid_loss == plain.grid_loss


def test_a_sampled_run_is_not_amplified_against_the_server() -> None:
    method = uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, user_sampling_rate=0.25)
    guarantee = derive(replace(method, protection=SecureAggregation()), FEDERATION)
    assert guarantee.event_for(Role.SERVER) == GaussianEvent(noise_multiplier=SIGMA)
    assert guarantee.event_for(Role.SERVER) != guarantee.event
    assert Reveals.DRAWN.value in guarantee.views[0].sees


def test_masks_do_not_hide_the_counts_that_weights_by_records_need() -> None:
    guarantee = protected("uldp-avg-w")
    for view in guarantee.views:
        assert isinstance(view.event, NoGuarantee)
        assert Reveals.COUNTS.value in view.event.reason
    assert guarantee.event == GaussianEvent(noise_multiplier=SIGMA)


@unweighted
def test_a_server_with_one_silo_is_not_promised_more_than_without(name: str) -> None:
    """The others' shares are fewer, and what a user holds there moves less: (n - 1) / n over sqrt(n - 1) shares."""
    guarantee = protected(name)
    pooled = guarantee.event_for(Role.SERVER | Role.SILO)
    assert isinstance(pooled, GaussianEvent)
    nominal = guarantee.event_for(Role.SERVER).noise_multiplier
    elsewhere = nominal * SILOS / math.sqrt(SILOS) / math.sqrt(SILOS - 1)
    assert pooled.noise_multiplier == pytest.approx(min(nominal, elsewhere))


def test_shares_sized_for_a_coalition_keep_the_nominal_noise_against_it() -> None:
    channel = replace(METHOD_CASES["uldp-avg"](SIGMA).channel, colluding_silos=2)
    view = protected("uldp-avg", channel=channel).views[2]
    assert view.role == Role.SERVER | Role.SILO
    assert "2 silos" in view.party
    assert view.event.noise_multiplier == pytest.approx(SIGMA)


HIDDEN = PartialEncryption(partition="released", he_noise=1.0)
VOTED = PartialEncryption(partition="noisy-votes", votes="secagg", vote_noise=30.0, he_noise=1.0)


@pytest.mark.parametrize("protection", [NoProtection(), SecureAggregation(), HIDDEN, VOTED])
@pytest.mark.parametrize("together", range(SILOS))
@pytest.mark.parametrize("weights", [Weights.UNIFORM, Weights.by_power(DeclaredMain(main_silos="0" * 64))])
def test_no_line_about_silos_that_pool_counts_the_noise_that_they_know(
    weights: Weights, together: int, protection: ProtectionStage
) -> None:
    """Of |S| shares c are theirs: what a user holds elsewhere is under those of the others alone."""
    own = METHOD_CASES["uldp-avg"](SIGMA)
    shares = replace(own.channel, colluding_silos=together)
    method = protection.apply_to(replace(own, weights=weights, channel=shares), USERS)
    line = derive(method, FEDERATION).event_for(Role.SILO)
    pooled = max(1, together)
    unknown = SILOS - pooled
    if not unknown:
        assert isinstance(line, NoGuarantee)
        return
    assert isinstance(line, GaussianEvent | ConcentratedEvent)
    moved = CLIP * (unknown / SILOS if weights.uniform else 1.0)  # the sum, by all that is elsewhere
    assert line.noise_multiplier <= shares.share_std(SILOS) * math.sqrt(unknown) / moved * (1 + 1e-12)
    if protection == VOTED:
        ballots = math.sqrt(2) * unknown / (VOTED.vote_noise * math.sqrt(unknown / SILOS))
        assert line.noise_multiplier <= 1 / ballots


def test_a_statement_names_what_ciphers_leave_open() -> None:
    """A line about the server is of the noise alone: it says nothing to whoever breaks what hides single messages."""
    own = METHOD_CASES["uldp-avg-w"](SIGMA)
    sampled = replace(own, sampler=PoissonUsers(rate=0.5))
    facts = replace(FEDERATION, dimension=10)
    masked = derive(replace(own, protection=SecureAggregation()), facts).uncovered
    assert any("X25519" in line for line in masked)
    for protection, words in (
        (PrivateWeighting(key_bits=2048), "short discrete logarithms modulo primes of 1024 bits"),
        (PrivateWeighting(cipher="rlwe"), "ring-LWE at 128 bits"),
        (PrivateWeighting(private_sampling=True), "discrete logarithms of 256 bits"),
        (PartialEncryption(), "ring-LWE at 128 bits"),
        (PartialEncryption(), "another sum than that of their messages"),
    ):
        method = replace(sampled if protection.draws_blindly else own, protection=protection)
        named = derive(method, facts).uncovered
        assert {line for line in masked if "X25519" in line} <= set(named)
        assert any(words in line for line in named)


@pytest.mark.parametrize("votes", ["plain", "secagg"])
def test_who_knows_the_order_of_ballots_is_not_said_to_learn_no_coordinate(votes: str) -> None:
    """Silos draw the order themselves, and train on the partition: a ballot or a partition is no secret to them."""
    method = PartialEncryption(votes=votes).apply_to(METHOD_CASES["uldp-avg"](SIGMA), USERS)
    guarantee = derive(method, FEDERATION)
    of_server, of_silo, of_both = (
        next(line for line in guarantee.uncovered if line.startswith(f"{who} learns "))
        for who in ("the server", "one silo", "the server with one silo")
    )
    assert "not which coordinates these are" in of_server
    assert not [line for line in (of_silo, of_both) if "not which coordinates" in line]
    assert "which coordinates have most votes" in of_silo
    assert of_both.count("each sender votes for" if votes == "plain" else "each coordinate has") == 1
    sees = {view.role: view.sees for view in guarantee.views}
    assert Reveals.VOTES.value not in sees[Role.SERVER]
    assert Reveals.BALLOT.value not in sees[Role.SILO]
    assert all(Reveals.VOTES.value in sees[role] for role in (Role.SILO, Role.SERVER | Role.SILO))


def test_a_server_is_not_said_to_see_updates_of_dp_sgd_without_noise() -> None:
    """The noise is that of the steps: a statement that gives an epsilon says nothing of sums without any."""
    facts = replace(FEDERATION, silo_records=(20,) * SILOS)
    seen = {
        sigma: next(
            view.sees
            for view in derive(METHOD_CASES["uldp-group"](sigma), facts).views
            if view.role is Role.SERVER
        )
        for sigma in (SIGMA, 0.0)
    }
    assert Reveals.MESSAGE.value in seen[SIGMA]
    assert Reveals.EXACT.value not in seen[SIGMA]
    assert Reveals.EXACT.value in seen[0.0]


def test_without_noise_the_sum_itself_is_seen_and_nothing_is_guaranteed() -> None:
    method = replace(METHOD_CASES["uldp-avg"](0.0), protection=SecureAggregation())
    for view in derive(method, FEDERATION).views:
        assert isinstance(view.event, NoGuarantee)
        assert view.event.reason == "no noise is added to the sums"

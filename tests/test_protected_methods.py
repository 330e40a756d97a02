"""Secure aggregation as a stage: what goes with it, what it changes in the guarantee, and that it changes no sum."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedveil.errors import CompositionError
from fedveil.methods.guarantee import Federation, View, derive
from fedveil.methods.protections import NoProtection, SecureAggregation
from fedveil.methods.stages import Identity, LayeredShares
from fedveil.methods.uldp import uldp_avg_w
from fedveil.privacy.events import GaussianEvent, NoGuarantee
from tests.contract.test_methods import CLIP, LOCAL, METHOD_CASES, SIGMA, SILOS, USERS, bounded_sum

FEDERATION = Federation(n_silos=SILOS, n_users=USERS)


def views(name: str, **changes: object) -> dict[str, View]:
    method = replace(METHOD_CASES[name](SIGMA), protection=SecureAggregation(), **changes)
    return {view.party: view for view in derive(method, FEDERATION).views}


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


@bounded_sum
def test_the_server_sees_the_sum_and_the_event_of_the_models_stays(name: str) -> None:
    plain = derive(METHOD_CASES[name](SIGMA), FEDERATION)
    server = views(name)["the server"]
    assert server.event == plain.event
    assert "only the sum" in server.sees
    protected = derive(replace(METHOD_CASES[name](SIGMA), protection=SecureAggregation()), FEDERATION)
    assert protected.event == plain.event
    assert protected.grid_loss == plain.grid_loss


def test_a_sampled_run_is_not_amplified_against_the_server() -> None:
    method = uldp_avg_w(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, user_sampling_rate=0.25)
    guarantee = derive(replace(method, protection=SecureAggregation()), FEDERATION)
    server = guarantee.views[0]
    assert server.event == GaussianEvent(noise_multiplier=SIGMA)
    assert server.event != guarantee.event
    assert server.sees.endswith("who was sampled")
    assert "number of records over all silos" in guarantee.uncovered[0]


@bounded_sum
def test_a_server_with_one_silo_lacks_the_other_silos_shares(name: str) -> None:
    nominal = views(name)["the server"].event.noise_multiplier
    known = views(name)["the server with one silo"].event.noise_multiplier
    assert known == pytest.approx(nominal * math.sqrt((SILOS - 1) / SILOS))


def test_shares_sized_for_a_coalition_keep_the_nominal_noise_against_it() -> None:
    channel = replace(METHOD_CASES["uldp-avg"](SIGMA).channel, colluding_silos=2)
    view = views("uldp-avg", channel=channel)["the server with 2 silos"]
    assert view.event.noise_multiplier == pytest.approx(SIGMA)


def test_without_noise_the_sum_itself_is_seen_and_nothing_is_guaranteed() -> None:
    method = replace(METHOD_CASES["uldp-avg"](0.0), protection=SecureAggregation())
    (server,) = derive(method, FEDERATION).views
    assert isinstance(server.event, NoGuarantee)
    assert server.sees == "masked messages, and of them only the sum, without noise"

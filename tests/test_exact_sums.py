"""Sums of contributions and shares of noise are exact: the noise has its law, however many users there are."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fedveil.errors import CompositionError
from fedveil.methods.capabilities import gain_of
from fedveil.methods.client_messages import ClientMessages, Dithered, Numbers
from fedveil.methods.correlated import CorrelatedShares
from fedveil.methods.derive import derive
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.uldp import uldp_avg
from fedveil.privacy.bounds import Clip
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.setup import prepare
from fedveil.training.steps import LocalSgd

CLIP = Clip(norm=0.75)
USERS, SILOS, NOISE = 10_000_000, 100, 0.5
"""|U| sqrt(|S|) / z = 2e8: on the finest grid of the noise a sum has 2^57 steps, and float64 holds 2^53."""

PLAIN = Numbers()
SHARES = {
    "independent": GaussianShares(noise_multiplier=NOISE, scale=CLIP.norm),
    "correlated": CorrelatedShares(
        noise_multiplier=NOISE, scale=CLIP.norm, coefficients=(1.0, 0.5), period=2
    ),
}


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sum_of_a_silo_and_its_share_are_added_exactly(shares: str, sign: int) -> None:
    channel = SHARES[shares].sized_for_users(USERS)
    at = Sender(
        round=1, attempt=0, number=0, senders=SILOS, grid=CLIP.grid, privacy=PrivacyRandomness.insecure(3)
    )
    longest = sign * (USERS * CLIP.norm * gain_of(channel) - CLIP.grid / 64 * 64 ** (shares == "independent"))
    together, alone = (channel.send(np.full(300, bare), at).values for bare in (longest, 0.0))
    assert together is not None
    assert alone is not None
    for noisy, share in zip(together.tolist(), alone.tolist(), strict=True):
        assert Fraction(noisy) == Fraction(longest) + Fraction(share)


def test_a_coarser_grid_of_the_noise_is_paid_for_and_a_federation_of_usual_size_keeps_the_finest() -> None:
    def losses(users: int, silos: int, noise: float) -> tuple[float, float]:
        method = uldp_avg(local=LocalSgd(learning_rate=0.1), clip=CLIP.norm, noise_multiplier=noise)
        exact = replace(method, channel=method.channel.sized_for_users(users))
        public = PublicFacts(n_silos=silos, n_users=users)
        return derive(method, public).grid_loss, derive(exact, public).grid_loss

    finest, paid = losses(USERS, SILOS, NOISE)
    assert paid == pytest.approx(finest * 4**6, rel=0.01)
    finest, paid = losses(10_000, 20, 1.0)
    assert paid == finest


def test_noise_that_falls_ends_before_its_grid_costs_more_than_is_stated() -> None:
    noise = SHARES["independent"].sized_for_users(1000)
    noise.check_fine(SILOS, CLIP.grid)
    with pytest.raises(
        CompositionError, match=r"noise_decay: .* too small beside exact sums over 1000 users"
    ):
        noise.scaled_noise(1e-4).check_fine(SILOS, CLIP.grid)


def clients(noise: float = 0.05, form: Numbers | Dithered = PLAIN) -> ClientMessages:
    return ClientMessages(senders=USERS, noise="gaussian", noise_multiplier=noise, bound=CLIP.norm, form=form)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sum_of_clients_and_a_message_are_added_exactly(sign: int) -> None:
    """What readers are promised counts the noise of all messages: their sum is exact, or has another noise."""
    at = Sender(
        round=1, attempt=0, number=0, senders=USERS, grid=CLIP.grid, privacy=PrivacyRandomness.insecure(3)
    )
    others = sign * ((USERS - 1) * CLIP.norm - CLIP.grid)
    for message in clients().send(np.full(300, CLIP.norm - CLIP.grid), at).numbers.tolist():
        assert Fraction(others + message) == Fraction(others) + Fraction(message)


def test_a_statement_says_that_the_error_of_dithered_messages_is_rounded() -> None:
    """One message's noise is counted whole against the server; of a sum, what is added to it must not depend on it."""
    said, every_client = clients(form=Dithered(step=1.0)).uncovered_facts(None)
    assert "numerical error in the dithered quantisers" in said
    assert clients().uncovered_facts(None) == (every_client,)
    assert replace(clients(form=Dithered(step=1.0)), noise="laplace").uncovered_facts(None) == (every_client,)


def test_clients_whose_noise_falls_end_before_its_grid_costs_more_than_is_stated() -> None:
    clients(10.0).check_fine(USERS, CLIP.grid)
    with pytest.raises(
        CompositionError, match=r"noise_decay: .* too small beside an exact sum over 10000000"
    ):
        clients(10.0).scaled_noise(1e-3).check_fine(USERS, CLIP.grid)


def test_a_run_has_its_noise_on_a_grid_for_its_users() -> None:
    asked = parse(
        {
            "name": "one",
            "rounds": 1,
            "data": {"name": "digits", "n_users": 30, "n_silos": 3},
            "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 1.0},
            "local": {"learning_rate": 0.1},
        },
        "here",
    )
    assert prepare(asked).method.channel.users == 30

"""Every stage that adds noise adds as much as the account counts: 2 % less is noticed, and so is 2 % more."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedveil.local.steps import LocalSgd
from fedveil.methods.central_gaussian import CentralGaussian
from fedveil.methods.channels import Channel
from fedveil.methods.client_messages import ClientMessages, Numbers
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.uldp import uldp_avg
from fedveil.randomness import PrivacyRandomness
from tests.messages import received, sender

GRID = 2.0**-20
SHARES = GaussianShares(noise_multiplier=2.0, scale=0.5, colluding_silos=1, missing_silos=1)
SERVER = CentralGaussian(noise_multiplier=2.0, scale=0.5)


def of_a_client(law: str) -> ClientMessages:
    return ClientMessages(senders=3, noise=law, noise_multiplier=2.0, bound=0.5, form=Numbers())


def noise_of(channel: Channel, d: int, senders: int) -> np.ndarray:
    """Return what a message of zeros is, and what a trusted server adds to it."""
    at = sender(PrivacyRandomness.insecure(4), senders=senders, grid=GRID)
    return channel.release(received(channel, np.zeros(d), at), GRID, at.source("noise"))


@pytest.mark.parametrize(
    ("channel", "senders", "std"),
    [
        (SHARES, 6, 2.0 * 0.5 / math.sqrt(6 - 1 - 1)),
        (SERVER, 1, 2.0 * 0.5),
        (of_a_client("gaussian"), 3, 2.0 * 0.5),
    ],
    ids=["a silo's share", "a trusted server", "a client"],
)
def test_gaussian_noise_has_its_standard_deviation(channel: Channel, senders: int, std: float) -> None:
    """Of 150,000 values, 5.4 standard errors are 1 %: a false alarm below 1e-7."""
    noise = noise_of(channel, 150_000, senders)
    assert noise.std() == pytest.approx(std, rel=5.4 / math.sqrt(2 * len(noise)))
    assert abs(noise.mean()) < 5.4 * std / math.sqrt(len(noise))


def test_laplace_noise_has_its_scale() -> None:
    """The mean absolute value is b, with a standard error of b over the square root of their number."""
    noise = noise_of(of_a_client("laplace"), 300_000, 3)
    assert np.abs(noise).mean() == pytest.approx(2.0 * 0.5, rel=5.4 / math.sqrt(len(noise)))


@pytest.mark.parametrize(("total", "shown"), [(1.00000003, "1.99999"), (1.0, "2"), (0.1 * 0.7 / 0.07, "2")])
def test_a_statement_rounds_noise_down(total: float, shown: str) -> None:
    """To the nearest of six digits 1.99999994 is 2; what double precision alone takes off does not show."""
    method = uldp_avg(
        local=LocalSgd(learning_rate=1.0, epochs=1), clip=1.0, noise_multiplier=2.0, user_sampling_rate=1 / 3
    )
    moves = method.contribution.moves(method, PublicFacts(n_silos=5, n_users=10))
    (told,) = method.channel.mechanisms(replace(moves, total=total))
    assert f"which gives the total a noise multiplier of {shown}" in told
    assert "standard deviation 0.894427 " in told  # 2 / sqrt(5) = 0.8944271...
    assert "probability 0.333334 " in method.sampler.mechanisms(moves)[0]

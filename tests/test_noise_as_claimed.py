"""Every stage that adds noise adds as much as the account counts: 2 % less is noticed, and so is 2 % more."""

import math

import numpy as np
import pytest

from fedveil.methods.central_gaussian import CentralGaussian
from fedveil.methods.channels import Channel
from fedveil.methods.client_messages import ClientMessages, Numbers
from fedveil.methods.gaussian_shares import GaussianShares
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

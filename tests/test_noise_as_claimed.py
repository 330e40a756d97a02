"""Every stage that adds noise adds as much as the account counts: 2 % less is noticed, and so is 2 % more."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedveil.methods.central_gaussian import CentralGaussian
from fedveil.methods.channels import GaussianShares
from fedveil.methods.client_messages import ClientMessages, Numbers
from fedveil.randomness import BitSource, PrivacyRandomness

GRID = 2.0**-20
SHARES = GaussianShares(noise_multiplier=2.0, scale=0.5, colluding_silos=1, missing_silos=1)
SERVER = CentralGaussian(noise_multiplier=2.0, scale=0.5)


def of_a_client(law: str) -> Callable[[np.ndarray, BitSource], np.ndarray]:
    channel = ClientMessages(senders=3, noise=law, noise_multiplier=2.0, bound=0.5, form=Numbers())
    return lambda zeros, source: (
        channel.transmit(zeros, grid=GRID, client=0, round_number=1, source=source).received
    )


@pytest.mark.parametrize(
    ("sent", "std"),
    [
        (lambda zeros, source: SHARES.transmit(zeros, GRID, 6, source), 2.0 * 0.5 / math.sqrt(6 - 1 - 1)),
        (lambda zeros, source: SERVER.release(zeros, GRID, source), 2.0 * 0.5),
        (of_a_client("gaussian"), 2.0 * 0.5),
    ],
    ids=["a silo's share", "a trusted server", "a client"],
)
def test_gaussian_noise_has_its_standard_deviation(
    sent: Callable[[np.ndarray, BitSource], np.ndarray], std: float
) -> None:
    """Of 150,000 values, 5.4 standard errors are 1 %: a false alarm below 1e-7."""
    noise = sent(np.zeros(150_000), PrivacyRandomness.insecure(4).stream("noise"))
    assert noise.std() == pytest.approx(std, rel=5.4 / math.sqrt(2 * len(noise)))
    assert abs(noise.mean()) < 5.4 * std / math.sqrt(len(noise))


def test_laplace_noise_has_its_scale() -> None:
    """The mean absolute value is b, with a standard error of b over the square root of their number."""
    noise = of_a_client("laplace")(np.zeros(300_000), PrivacyRandomness.insecure(4).stream("noise"))
    assert np.abs(noise).mean() == pytest.approx(2.0 * 0.5, rel=5.4 / math.sqrt(len(noise)))

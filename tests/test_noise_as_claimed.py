"""Every stage that adds noise adds as much as the account counts: 2 % less is noticed, and so is 2 % more."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import CompositionError, PrivacyError
from fedveil.methods.capabilities import ServerNoise
from fedveil.methods.cepam import cepam_gaussian, fl_gaussian
from fedveil.methods.channels import Channel
from fedveil.methods.client_messages import ClientMessages, Numbers
from fedveil.methods.derive import derive
from fedveil.methods.dp_fed_ls import CentralGaussian, dp_fed
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.paraaegis import dp_fedavg, serial
from fedveil.methods.uldp import uldp_avg
from fedveil.randomness import PrivacyRandomness
from fedveil.training.steps import LocalSgd
from tests.messages import received, sender

GRID = 2.0**-20
LOCAL = LocalSgd(learning_rate=0.1)
SHARES = GaussianShares(noise_multiplier=2.0, scale=0.5, colluding_silos=1, max_dropouts=1)
SERVER = CentralGaussian(noise_multiplier=2.0, scale=0.5)


def of_a_client(law: str) -> ClientMessages:
    return ClientMessages(senders=3, noise=law, noise_multiplier=2.0, bound=0.5, form=Numbers())


def noise_of(channel: Channel, d: int, senders: int) -> np.ndarray:
    """Return what a message of zeros is, and what a trusted server adds to it."""
    at = sender(PrivacyRandomness.insecure(4), senders=senders, grid=GRID)
    message = received(channel, np.zeros(d), at)
    return channel.release(message, GRID, at.source("noise")) if isinstance(channel, ServerNoise) else message


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


NOISE = {"local": LOCAL, "clip": 1.0, "noise_multiplier": 1.0}
OF_CLIENTS = {
    "fl-gaussian": lambda n: fl_gaussian(n_users=n, **NOISE),
    "cepam-gaussian": lambda n: cepam_gaussian(n_users=n, **NOISE),
    "dp-fedavg": lambda n: dp_fedavg(n_users=n, largest_silo=100, **NOISE),
    "serial": lambda n: serial(n_users=n, largest_silo=100, **NOISE),
}


@pytest.mark.parametrize("composed", OF_CLIENTS.values(), ids=OF_CLIENTS)
def test_a_method_for_more_clients_than_there_are_claims_none_of_their_noise(
    composed: Callable[[int], Method],
) -> None:
    """Ten clients add sqrt(10) where a thousand would add sqrt(1000): the sum would be promised ten times the noise."""
    public = PublicFacts(n_silos=10, n_users=10, dimension=100)
    assert derive(composed(10), public).unit == "client"
    drawn = dp_fed(
        n_users=1000, client_sampling="uniform", client_sampling_rate=0.01, **NOISE
    )  # would be amplified as 10 of 1000
    with pytest.raises(PrivacyError, match="draws 10 of 1000 clients; it cannot draw among 10"):
        derive(drawn, public)
    for other in (9, 1000):
        with pytest.raises(CompositionError, match=f"counts the noise of {other} clients, and 10 send"):
            derive(composed(other), public)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_dropouts", -95),
        ("colluding_silos", -1),
        ("scale", -1.0),
        ("scale", 0.0),
    ],
)
def test_shares_cannot_be_sized_for_more_silos_than_send(field: str, value: float) -> None:
    with pytest.raises(
        CompositionError, match=rf"^{field} = {value}: a (whole|finite) number >=? 0 is needed"
    ):
        replace(SHARES, **{field: value})


@pytest.mark.parametrize(("total", "shown"), [(1.00000003, "1.99999"), (1.0, "2"), (0.1 * 0.7 / 0.07, "2")])
def test_a_statement_rounds_noise_down(total: float, shown: str) -> None:
    """To the nearest of six digits 1.99999994 is 2; what double precision alone takes off does not show."""
    method = uldp_avg(
        local=LocalSgd(learning_rate=1.0, epochs=1), clip=1.0, noise_multiplier=2.0, user_sampling_rate=1 / 3
    )
    moves = method.contribution.sensitivity(method, PublicFacts(n_silos=5, n_users=10))
    (told,) = method.channel.mechanisms(replace(moves, total=total))
    assert f"which gives the total a noise multiplier of {shown}" in told
    assert "standard deviation 0.894427 " in told  # 2 / sqrt(5) = 0.8944271...
    assert "probability 0.333334 " in method.sampler.mechanisms(moves)[0]

"""Compose ParaAegis and its baselines: encryption (CKKS) for some coordinates, noise for the rest.

The names are those of the ParaAegis paper (Algorithm 1, Table 1). A client is a silo that holds one user. N: number
of clients; q: share of them in a round; u_i: update of client i; v: the partition, r d coordinates; theta: clip
bound; z: noise multiplier. In a round

    u_i  <- w_i - w after local training of client i
    v    <- the r d coordinates that most clients vote for, each for its largest |u_i|        (protection, Section 3)
    send <- u_i outside v, clipped to theta, plus N(0, (z s)^2); u_i inside v under CKKS      (Equation 1)
    w    <- w + eta_g / (q N) ( sum in clear, decrypted sum )

s is the unit of the noise. With ``calibration = "client"`` it is theta, and z refers to whole clients. With
"as-published" it is min_i 2 theta / |D_i| (Remark 1), which refers to one record. That is no bound for a client,
whose clipped update changes the sum by theta. Equation 1 prints the clipping as u / max{1, |u|^2 / theta}; the
intended divisor uses |u| / theta. The noise is calibrated against the server. The encrypted part carries no noise, so
readers of the models have no guarantee unless ``protection.he_noise`` is set. docs/theory/partial-encryption.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedveil.methods.client_messages import ClientMessages, Numbers
from fedveil.methods.contributions import ClientContribution
from fedveil.methods.dp_fed_ls import client_sampler
from fedveil.methods.fedavg import fedavg
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.keys import (
    Calibration,
    ClientRate,
    ClipNorm,
    LargestSilo,
    Local,
    Noise,
    NoiseDecay,
    Users,
)
from fedveil.methods.method import Method, variant_of
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.published_bounds import remark_1_noise
from fedveil.privacy.sampling import Everyone
from fedveil.training.server.optimizers import ServerSgd


@dataclass(frozen=True)
class RemarkOne:
    """Noise of Remark 1, relative to its sensitivity of an update to one record: no bound for a client.

    Attributes:
        rate: q, the share of clients in a round.
    """

    rate: float = 1.0
    name: str = "remark 1"

    def noise_multiplier(self, rounds: int, epsilon: float, delta: float) -> float:
        """Return z."""
        return remark_1_noise(rounds=rounds, epsilon=epsilon, delta=delta, rate=self.rate)

    def epsilon(self, rounds: int, noise_multiplier: float, delta: float) -> float:
        """Return the epsilon that the remark states for z.

        The remark fixes the product of z and epsilon, so the same formula serves both directions.
        """
        return self.noise_multiplier(rounds, noise_multiplier, delta)

    def rounds(self, noise_multiplier: float, epsilon: float, delta: float) -> int:
        """Return the most rounds for which the remark asks for at most z."""
        return math.floor((noise_multiplier / self.noise_multiplier(1, epsilon, delta)) ** 2 * (1 + 1e-12))


_LARGEST_COUNTED = "the noise is measured in the records of the largest client, which count as public"


def _with_calibration(method: Method, calibration: Calibration) -> Method:
    """Return the method with the calibration of its noise; no accountant can calibrate it as published."""
    if calibration == "client":
        return method
    closed_form = RemarkOne(rate=method.sampler.rate)
    return replace(method, calibrated_to="nobody", closed_form=closed_form, public_counts=(_LARGEST_COUNTED,))


def dp_fedavg(
    *,
    local: Local,
    n_users: Users,
    largest_silo: LargestSilo,
    clip: ClipNorm,
    noise_multiplier: Noise,
    calibration: Calibration = "client",
    client_sampling_rate: ClientRate = 1.0,
) -> Method:
    """DP-FedAvg: every drawn client clips its update and adds enough noise against the server by itself.

    Each round draws round(q N) clients uniformly, q = ``client_sampling_rate`` (Algorithm 1, line 3).
    """
    # s = theta, or Remark 1's sensitivity min_i 2 theta / |D_i|, attained by the client with the most records.
    scale = clip if calibration == "client" else 2 * clip / largest_silo
    sampler = client_sampler("uniform", client_sampling_rate, n_users)
    method = Method(
        name="dp-fedavg",
        contribution=ClientContribution(),
        sampler=sampler,
        local=local,
        bound=Clip(norm=clip),
        weights=Weights.ONE,
        channel=ClientMessages(
            senders=n_users if sampler.size is None else sampler.size,
            noise="gaussian",
            # ClientMessages measures noise in its bound theta, so z s = (z s / theta) theta.
            noise_multiplier=noise_multiplier * scale / clip,
            bound=clip,
            form=Numbers(),
        ),
        server=ServerSgd(),
        calibrated_to="server",
    )
    return _with_calibration(method, calibration)


def ckks_fedavg(*, local: Local) -> Method:
    """CKKS-FedAvg: federated averaging, every update encrypted as a whole. No guarantee for readers."""
    return replace(
        fedavg(local=local),
        name="ckks-fedavg",
        protection=PartialEncryption(ratio=1.0),
    )


@variant_of(dp_fedavg)
def serial(noisy: Method) -> Method:
    """Serial: the noise of dp-fedavg, then everything encrypted; calibrated against readers of the models."""
    return replace(
        noisy,
        name="serial",
        protection=PartialEncryption(ratio=1.0, he_noise=1.0),
        calibrated_to="nobody" if noisy.calibrated_to == "nobody" else "readers",
    )


@variant_of(dp_fedavg, client_sampling_rate=1.0)
def varying_dp(noisy: Method, *, noise_decay: NoiseDecay = 0.9) -> Method:
    """Varying-DP: dp-fedavg with noise that decays by a factor every round, from noise_multiplier on."""
    return replace(noisy, name="varying-dp", noise_decay=noise_decay)


def stevens(
    *,
    local: Local,
    largest_silo: LargestSilo,
    clip: ClipNorm,
    noise_multiplier: Noise,
    calibration: Calibration = "client",
) -> Method:
    """Stevens et al.: shares of one noise under masked aggregation; the server sees the noisy sum."""
    method = Method(
        name="stevens",
        contribution=ClientContribution(),
        sampler=Everyone(),
        local=local,
        bound=Clip(norm=clip),
        weights=Weights.ONE,
        channel=GaussianShares(
            noise_multiplier=noise_multiplier,
            scale=clip if calibration == "client" else 2 * clip / largest_silo,
        ),
        protection=SecureAggregation(),
        server=ServerSgd(),
        calibrated_to="server",
    )
    return _with_calibration(method, calibration)


@variant_of(dp_fedavg)
def paraaegis(noisy: Method) -> Method:
    """ParaAegis: voted coordinates are sent encrypted, the others clipped and with noise (Algorithm 1).

    The noise is calibrated against the server. Readers of the models and holders of the key have a guarantee only
    with noise in the encrypted part too (``protection.he_noise``); docs/theory/partial-encryption.md.
    """
    return replace(noisy, name="paraaegis", protection=PartialEncryption(clip="parts"))

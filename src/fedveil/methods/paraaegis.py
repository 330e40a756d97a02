"""ParaAegis and its baselines: homomorphic encryption for the part that matters, noise for the rest.

The names are those of the ParaAegis paper (Algorithm 1, Table 1). N clients (a client is a silo that holds one user),
u_i: the update of client i, v: the partition, r d coordinates; theta: clip bound; z: noise multiplier. In a round

    u_i  <- w_i - w after local training of client i
    v    <- the r d coordinates that most clients vote for, each for its largest |u_i|        (protection, Section III)
    send <- u_i outside v, clipped to theta, plus N(0, (z s)^2); u_i inside v under CKKS      (Equation 1)
    w    <- w + eta_g / N ( sum in clear, decrypted sum )

s is what noise is measured in: theta, with which z speaks of whole clients ("client"); or min_i 2 theta / |D_i|
("as-published", Remark 1), which speaks of one record and is no bound for a client, whose clipped update moves by
theta. Equation 1 prints the clipping as u / max{1, |u|^2 / theta}; what is meant divides by |u| / theta. The noise is
calibrated against the server: the encrypted part has none, so readers of the models are guaranteed nothing, unless
``protection.he_noise`` is given. docs/theory/partial-encryption.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from fedveil.errors import CompositionError
from fedveil.local.steps import LocalSgd
from fedveil.methods.channels import CentralGaussian, GaussianShares
from fedveil.methods.client_messages import ClientMessages, Numbers, through_messages
from fedveil.methods.contributions import ClientContribution
from fedveil.methods.fedavg import fedavg
from fedveil.methods.method import Method
from fedveil.methods.protections import PartialEncryption, SecureAggregation
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.sampling import Everyone
from fedveil.server.optimizers import ServerSgd

Calibration: TypeAlias = Literal["client", "as-published"]


def dp_fedavg(
    *,
    local: LocalSgd,
    n_users: int,
    largest_silo: int,
    clip: float,
    noise_multiplier: float,
    calibration: Calibration = "client",
    learning_rate: float = 1.0,
) -> Method:
    """DP-FedAvg: every client clips its whole update and adds noise that protects it from the server by itself."""
    scale = clip if calibration == "client" else 2 * clip / largest_silo
    return Method(
        name="dp-fedavg",
        contribution=ClientContribution(),
        sampler=Everyone(),
        local=local,
        bound=Clip(norm=clip),
        weights=Weights.ONE,
        channel=ClientMessages(
            senders=n_users,
            noise="gaussian",
            noise_multiplier=noise_multiplier * scale / clip,
            bound=clip,
            form=Numbers(),
        ),
        server=ServerSgd(learning_rate),
        calibrated_to="server",
    )


def ckks_fedavg(*, local: LocalSgd, learning_rate: float = 1.0) -> Method:
    """CKKS-FedAvg: federated averaging, every update encrypted as a whole. Readers are guaranteed nothing."""
    return replace(
        fedavg(local=local, learning_rate=learning_rate),
        name="ckks-fedavg",
        protection=PartialEncryption(ratio=1.0),
    )


def serial(
    *,
    local: LocalSgd,
    n_users: int,
    largest_silo: int,
    clip: float,
    noise_multiplier: float,
    calibration: Calibration = "client",
    learning_rate: float = 1.0,
) -> Method:
    """Serial: the noise of dp-fedavg, and then everything is encrypted; calibrated against readers of the models."""
    noisy = dp_fedavg(
        local=local,
        n_users=n_users,
        largest_silo=largest_silo,
        clip=clip,
        noise_multiplier=noise_multiplier,
        calibration=calibration,
        learning_rate=learning_rate,
    )
    return replace(
        noisy,
        name="serial",
        protection=PartialEncryption(ratio=1.0, he_noise=1.0),
        calibrated_to="readers",
    )


def varying_dp(
    *,
    local: LocalSgd,
    n_users: int,
    largest_silo: int,
    clip: float,
    noise_multiplier: float,
    noise_decay: float = 0.9,
    calibration: Calibration = "client",
    learning_rate: float = 1.0,
) -> Method:
    """Varying-DP: dp-fedavg whose noise falls by a factor every round, from noise_multiplier in the first."""
    noisy = dp_fedavg(
        local=local,
        n_users=n_users,
        largest_silo=largest_silo,
        clip=clip,
        noise_multiplier=noise_multiplier,
        calibration=calibration,
        learning_rate=learning_rate,
    )
    return replace(noisy, name="varying-dp", noise_decay=noise_decay)


def stevens(
    *,
    local: LocalSgd,
    n_users: int,
    largest_silo: int,
    clip: float,
    noise_multiplier: float,
    calibration: Calibration = "client",
    learning_rate: float = 1.0,
) -> Method:
    """Stevens et al.: shares of one noise on the sum, under masked aggregation; the server sees the noisy sum."""
    return Method(
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
        server=ServerSgd(learning_rate),
        calibrated_to="server",
    )


def paraaegis(
    *,
    local: LocalSgd,
    n_users: int,
    largest_silo: int,
    clip: float,
    noise_multiplier: float,
    calibration: Calibration = "client",
    learning_rate: float = 1.0,
) -> Method:
    """ParaAegis: the coordinates voted for travel encrypted, the others clipped and noisy (Algorithm 1)."""
    noisy = dp_fedavg(
        local=local,
        n_users=n_users,
        largest_silo=largest_silo,
        clip=clip,
        noise_multiplier=noise_multiplier,
        calibration=calibration,
        learning_rate=learning_rate,
    )
    return replace(noisy, name="paraaegis", protection=PartialEncryption(clip="parts"))


def partly_encrypted(method: Method, protection: PartialEncryption, n_users: int) -> Method:
    """Return a method of the house under partial encryption, its noise moved to where it can be added.

    The noise of a trusted server on the sum of m clients (DP-Fed, DP-Fed-LS) becomes theirs: each message carries 1/m
    of its variance. A method that bounds its two parts by themselves, or encrypts everything, keeps doing so.

    Raises:
        CompositionError: a combination that cannot work.
    """
    own, channel = method.protection, method.channel
    if isinstance(own, PartialEncryption):
        if own.whole and not protection.whole:
            raise CompositionError(
                f"{method.name} encrypts everything; a part of it is what paraaegis encrypts"
            )
        he_noise = own.he_noise if own.whole else protection.he_noise
        return replace(method, protection=replace(protection, clip=own.clip, he_noise=he_noise))
    if isinstance(channel, CentralGaussian):
        messages = through_messages(channel, method.sampler, n_users, lattice=None)
        channel = replace(messages, form=Numbers())
    return replace(method, channel=channel, protection=protection)

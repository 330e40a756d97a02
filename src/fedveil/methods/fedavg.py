"""Compose federated averaging with two learning rates (DEFAULT of ULDP-FL), without privacy.

McMahan et al., AISTATS 2017; the server's learning rate after Yang et al., ICLR 2021.
"""

from __future__ import annotations

from fedveil.methods.channels import Identity
from fedveil.methods.contributions import SiloContribution
from fedveil.methods.keys import Local
from fedveil.methods.method import Method
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.sampling import Everyone
from fedveil.training.server.optimizers import ServerSgd


def fedavg(*, local: Local) -> Method:
    """FedAvg: each silo trains on its whole table, and the server steps by the mean. No privacy guarantee.

    x <- x + eta_g (1/|S|) sum_s Delta_s.
    """
    return Method(
        name="fedavg",
        contribution=SiloContribution(),
        sampler=Everyone(),
        local=local,
        bound=Unbounded(),
        weights=Weights.ONE,
        channel=Identity(),
        server=ServerSgd(),
    )

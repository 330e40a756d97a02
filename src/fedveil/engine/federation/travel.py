"""Which methods run between institutions: those whose silos send one vector that carries its own noise."""

from __future__ import annotations

from fedveil.errors import CompositionError
from fedveil.methods.method import Method
from fedveil.methods.protections import NoProtection, SecureAggregation
from fedveil.methods.stages import GaussianShares, Identity, SiloContribution, SiloUserContribution


def check_travels(method: Method) -> None:
    """Return if silos and coordinator of a federation know how to play a method.

    Raises:
        CompositionError: clients, DP-SGD inside the silos, a trusted server's noise, a channel of bytes, or a
            protection that is played in one process only.
    """
    if not isinstance(method.contribution, SiloContribution | SiloUserContribution):
        raise CompositionError(
            f"{method.name}: contributions of silos, or of users in silos, run between institutions; "
            "use fedavg, uldp-naive, uldp-sgd, uldp-avg or uldp-avg-w"
        )
    if not isinstance(method.channel, Identity | GaussianShares):
        raise CompositionError(
            f'{method.name}: between institutions silos add their own noise: channel.name = "additive"'
        )
    if not isinstance(method.protection, NoProtection | SecureAggregation):
        raise CompositionError(
            f'{method.name}: between institutions protection.name is "none" or "secure-aggregation"'
        )

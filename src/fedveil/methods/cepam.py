"""CEPAM and its baselines: federated averaging whose compression error is its privacy noise.

Ling, Wu, Sun, Li, Song and Xu: "Communication-Efficient and Privacy-Adaptable Mechanism for Federated Learning",
Algorithms 2 to 4. K clients (a client is a silo that holds one user), W: model, tau: local steps, s: what an update is
measured in, gamma: how far it is stretched. In a round

    X_k  <- W_k - W after tau local steps of client k                             (local)
    X~_k <- X_k gamma / s                                                         (Algorithm 2, line 2)
    M_k  <- the code words of LRSUQ(X~_k), its error of law sigma (or b)          (lines 3 to 9, docs/theory/lrsuq.md)
    Y_k  <- decode(M_k) s / gamma = X_k + Z_k                                     (Algorithm 3)
    W    <- W + eta_g sum_k p_k Y_k,   p_k = 1/K                                  (Algorithm 4)

``noise_multiplier`` is sigma / gamma for Gaussian noise, b / gamma for Laplace: one client's noise, in units of s.
With ``scale = "clip"`` s is a constant C, to which every update is clipped (l2 for Gaussian, l1 for Laplace), and the
rounds compose to a guarantee for clients. With ``scale = "norm"`` s = ||X_k||_2, as published, and nothing is
guaranteed. The baselines add the same noise as numbers, and may quantise what comes of it (SDQ). docs/theory/cepam.md.
"""

from __future__ import annotations

from fedveil.errors import CompositionError
from fedveil.local.steps import LocalSgd
from fedveil.methods.client_messages import (
    ClientMessages,
    Dithered,
    Form,
    Layered,
    NoiseName,
    Numbers,
    Scale,
)
from fedveil.methods.contributions import ClientContribution
from fedveil.methods.method import Method
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Bound, Clip, ClipL1, Unbounded
from fedveil.privacy.sampling import Everyone
from fedveil.server.optimizers import ServerSgd


def cepam_gaussian(
    *,
    local: LocalSgd,
    n_users: int,
    noise_multiplier: float,
    scale: Scale = "clip",
    clip: float | None = None,
    lattice: str | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """CEPAM-Gaussian: the error of each client's quantiser is N(0, (noise_multiplier s)^2 I), on any lattice."""
    form = Layered(lattice=lattice)
    return _clients(
        "cepam-gaussian", local, n_users, "gaussian", noise_multiplier, scale, clip, form, learning_rate
    )


def cepam_laplace(
    *,
    local: LocalSgd,
    n_users: int,
    noise_multiplier: float,
    scale: Scale = "clip",
    clip: float | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """CEPAM-Laplace: the error of each client's quantiser is Laplace(noise_multiplier s) on every coordinate."""
    return _clients(
        "cepam-laplace", local, n_users, "laplace", noise_multiplier, scale, clip, Layered(), learning_rate
    )


def fl(*, local: LocalSgd, n_users: int, learning_rate: float = 1.0) -> Method:
    """FL: updates as they are, at 32 bits a parameter."""
    return _clients("fl", local, n_users, None, 0.0, "norm", None, Numbers(), learning_rate)


def fl_sdq(
    *,
    local: LocalSgd,
    n_users: int,
    step: float,
    scale: Scale = "clip",
    clip: float | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """FL+SDQ: updates quantised with subtractive dither, step in units of s. No noise, no guarantee."""
    form = Dithered(step=step)
    return _clients("fl-sdq", local, n_users, None, 0.0, scale, clip, form, learning_rate)


def fl_gaussian(
    *,
    local: LocalSgd,
    n_users: int,
    noise_multiplier: float,
    scale: Scale = "clip",
    clip: float | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """FL+Gaussian: the noise of cepam-gaussian as numbers."""
    return _clients(
        "fl-gaussian", local, n_users, "gaussian", noise_multiplier, scale, clip, Numbers(), learning_rate
    )


def fl_laplace(
    *,
    local: LocalSgd,
    n_users: int,
    noise_multiplier: float,
    scale: Scale = "clip",
    clip: float | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """FL+Laplace: the noise of cepam-laplace as numbers."""
    return _clients(
        "fl-laplace", local, n_users, "laplace", noise_multiplier, scale, clip, Numbers(), learning_rate
    )


def fl_gaussian_sdq(
    *,
    local: LocalSgd,
    n_users: int,
    noise_multiplier: float,
    step: float,
    scale: Scale = "clip",
    clip: float | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """FL+Gaussian+SDQ: noise, then a quantiser whose error comes on top; step in units of the noise's std."""
    form = Dithered(step=step)
    return _clients(
        "fl-gaussian-sdq", local, n_users, "gaussian", noise_multiplier, scale, clip, form, learning_rate
    )


def fl_laplace_sdq(
    *,
    local: LocalSgd,
    n_users: int,
    noise_multiplier: float,
    step: float,
    scale: Scale = "clip",
    clip: float | None = None,
    learning_rate: float = 1.0,
) -> Method:
    """FL+Laplace+SDQ: noise, then a quantiser whose error comes on top; step in units of the noise's b."""
    form = Dithered(step=step)
    return _clients(
        "fl-laplace-sdq", local, n_users, "laplace", noise_multiplier, scale, clip, form, learning_rate
    )


def _clients(
    name: str,
    local: LocalSgd,
    n_users: int,
    noise: NoiseName | None,
    noise_multiplier: float,
    scale: Scale,
    clip: float | None,
    form: Form,
    learning_rate: float,
) -> Method:
    """Compose K = n_users clients that send messages of one kind in every round."""
    bound = _bound(name, noise, scale, clip)
    return Method(
        name=name,
        contribution=ClientContribution(),
        sampler=Everyone(),
        local=local,
        bound=bound,
        weights=Weights.ONE,
        channel=ClientMessages(
            senders=n_users,
            noise=noise,
            noise_multiplier=noise_multiplier,
            bound=None if isinstance(bound, Unbounded) else bound.norm,
            form=form,
        ),
        server=ServerSgd(learning_rate),
    )


def _bound(name: str, noise: NoiseName | None, scale: Scale, clip: float | None) -> Bound:
    """Return the bound of an update: l1 for Laplace noise, l2 else, none where its own norm is the scale."""
    if scale == "norm":
        if clip is not None:
            raise CompositionError(
                f"{name}: scale = 'norm' clips nothing; remove clip, or take scale = 'clip'"
            )
        return Unbounded()
    if clip is None:
        raise CompositionError(
            f"{name}: scale = 'clip' measures the noise in clip; give method.clip, or take scale = 'norm', which "
            "guarantees nothing"
        )
    return ClipL1(norm=clip) if noise == "laplace" else Clip(norm=clip)

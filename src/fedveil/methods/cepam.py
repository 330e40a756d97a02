"""Compose CEPAM and its baselines: federated averaging whose compression error is its privacy noise.

Ling, Wu, Sun, Li, Song and Xu: "Communication-Efficient and Privacy-Adaptable Mechanism for Federated Learning",
Algorithms 1 to 3. A client is a silo that holds one user. K: number of clients, W: model, tau: local steps, s: scale
of an update, gamma: stretching factor. In a round

    X_k  <- W_k - W after tau local steps of client k                             (Algorithm 1, lines 7 to 11)
    X~_k <- X_k gamma / s                                                         (Algorithm 2, line 3)
    M_k  <- the code words of LRSUQ(X~_k), its error of law sigma (or b)          (lines 4 to 18, docs/theory/lrsuq.md)
    Y_k  <- decode(M_k) s / gamma = X_k + Z_k                                     (Algorithm 3)
    W    <- W + eta_g sum_k p_k Y_k,   p_k = 1/K                                  (Algorithm 1, line 20; its eta_g is 1)

Other p_k are public numbers (``weights``): client k sends (p_k / max p) X_k as above, and the server divides the sum by
sum_k p_k / max p. No message moves by more than C, so every claim of equal weights holds.

``noise_multiplier`` is sigma / gamma for Gaussian noise and b / gamma for Laplace noise: the noise of one client, in
units of s. With ``scale = "clip"``, s is a constant C, to which every update is clipped (l2 for Gaussian, l1 for
Laplace), and the rounds compose to a guarantee for clients. With ``scale = "norm"``, s = ||X_k||_2 as published, and
nothing is guaranteed. The baselines add the same noise as numbers, and some quantise the result (SDQ).
docs/theory/cepam.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.errors import CompositionError
from fedveil.methods.client_messages import (
    ClientMessages,
    Dithered,
    Form,
    Layered,
    NoiseName,
    Numbers,
    Rounded,
)
from fedveil.methods.contributions import ClientContribution
from fedveil.methods.keys import (
    ClientWeights,
    ClipNorm,
    Lattice,
    Local,
    Noise,
    RoundingStep,
    Scale,
    Step,
    Users,
)
from fedveil.methods.method import Method, variant_of
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Bound, Clip, ClipL1, Unbounded
from fedveil.privacy.sampling import Everyone
from fedveil.training.server.optimizers import ServerSgd
from fedveil.training.steps import LocalSgd

_SMALLEST_COUNTED = (
    "published figures are computed from the records of the smallest client, which count as public"
)


def fl(*, local: Local, n_users: Users, weights: ClientWeights = "equal") -> Method:
    """FL: clients send their updates unchanged, at 32 bits per parameter. No privacy guarantee."""
    sent = _messages(n_users, None, 0.0, Unbounded(), Numbers())
    return _clients("fl", local, Unbounded(), sent, weights)


def fl_sdq(
    *,
    local: Local,
    n_users: Users,
    step: Step,
    scale: Scale = "clip",
    clip: ClipNorm | None = None,
    weights: ClientWeights = "equal",
) -> Method:
    """FL+SDQ: updates are quantised with subtractive dither, step in units of s. No noise, no guarantee."""
    bound = _bound(scale, clip, None)
    sent = _messages(n_users, None, 0.0, bound, Dithered(step=step))
    return _clients("fl-sdq", local, bound, sent, weights)


@dataclass(frozen=True, kw_only=True)
class _Noisy:
    """Clients whose messages carry noise: the keys that the builders below share."""

    local: Local
    n_users: Users
    noise_multiplier: Noise
    scale: Scale = "clip"
    clip: ClipNorm | None = None
    weights: ClientWeights = "equal"

    def sending(self, name: str, noise: NoiseName, form: Form) -> Method:
        """Return the method in which the clients send noise of one law in one form."""
        bound = _bound(self.scale, self.clip, noise)
        sent = _messages(self.n_users, noise, self.noise_multiplier, bound, form)
        return _clients(name, self.local, bound, sent, self.weights)


@variant_of(_Noisy)
def fl_gaussian(clients: _Noisy, *, step: RoundingStep = None) -> Method:
    """FL+Gaussian: updates of l2 norm at most C with noise N(0, (noise_multiplier s)^2 I), as numbers or rounded.

    Rounded after their noise and range-coded, messages have about 3 bits a parameter at ``step`` 1/2, and neither
    dithers nor keys. The server's guarantee is that of the noise of one message.
    """
    return clients.sending("fl-gaussian", "gaussian", Numbers() if step is None else Rounded(step=step))


@variant_of(_Noisy)
def fl_laplace(clients: _Noisy) -> Method:
    """FL+Laplace: updates of l1 norm at most C with Laplace(noise_multiplier s) noise per coordinate."""
    return clients.sending("fl-laplace", "laplace", Numbers())


@variant_of(_Noisy)
def cepam_gaussian(clients: _Noisy, *, lattice: Lattice | None = None) -> Method:
    """CEPAM-Gaussian: each client's quantiser has the error N(0, (noise_multiplier s)^2 I), any lattice.

    Guarantee with scale = "clip": in each round, readers of the models see one client through a Gaussian mechanism of
    multiplier sqrt(K) ``noise_multiplier``. Not claimed: any guarantee against the server, which has the keys of the
    messages.
    """
    return clients.sending("cepam-gaussian", "gaussian", Layered(lattice=lattice))


@variant_of(_Noisy)
def cepam_laplace(clients: _Noisy) -> Method:
    """CEPAM-Laplace: each client's quantiser has the error Laplace(noise_multiplier s) per coordinate.

    Guarantee with scale = "clip": in each round, readers of the models see one client through a Laplace mechanism of
    multiplier ``noise_multiplier``. Not claimed: any guarantee against the server, which has the keys of the
    messages.
    """
    return clients.sending("cepam-laplace", "laplace", Layered())


@variant_of(_Noisy)
def fl_gaussian_sdq(clients: _Noisy, *, step: Step) -> Method:
    """FL+Gaussian+SDQ: Gaussian noise, then a dithered quantiser; step in units of the noise's std."""
    return clients.sending("fl-gaussian-sdq", "gaussian", Dithered(step=step))


@variant_of(_Noisy)
def fl_laplace_sdq(clients: _Noisy, *, step: Step) -> Method:
    """FL+Laplace+SDQ: Laplace noise, then a dithered quantiser; step in units of the noise's b."""
    return clients.sending("fl-laplace-sdq", "laplace", Dithered(step=step))


def _messages(
    n_users: int, noise: NoiseName | None, noise_multiplier: float, bound: Bound, form: Form
) -> ClientMessages:
    """Return the channel of K = n_users clients that all send; noise is in units of the bound."""
    return ClientMessages(
        senders=n_users,
        noise=noise,
        noise_multiplier=noise_multiplier,
        bound=bound.norm if bound.bounded else None,
        form=form,
    )


def _clients(
    name: str, local: LocalSgd, bound: Bound, sent: ClientMessages, weights: ClientWeights
) -> Method:
    """Compose the method of clients that all send a message in every round."""
    # With s = ||X_k||, the statement cites the theorems of CEPAM, which depend on the smallest client's records.
    by_norm = not bound.bounded and (sent.noise is not None or sent.sends_bytes)
    return Method(
        name=name,
        contribution=ClientContribution(),
        sampler=Everyone(),
        local=local,
        bound=bound,
        weights=Weights.ONE if weights == "equal" else Weights.of_clients(weights),
        channel=sent,
        server=ServerSgd(),
        public_counts=(_SMALLEST_COUNTED,) if by_norm else (),
    )


def _bound(scale: Scale, clip: float | None, noise: NoiseName | None) -> Bound:
    """Return ||X_k||_1 <= C for Laplace noise, else ||X_k||_2 <= C; Unbounded for scale = "norm"."""
    if scale == "norm":
        if clip is not None:
            raise CompositionError("method.scale = 'norm' clips nothing; remove clip, or take scale = 'clip'")
        return Unbounded()
    if clip is None:
        raise CompositionError(
            "method.scale = 'clip' measures the noise in clip; give method.clip, or take scale = 'norm', which "
            "guarantees nothing"
        )
    return ClipL1(norm=clip) if noise == "laplace" else Clip(norm=clip)

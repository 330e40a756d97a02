"""Compose DP-Fed and DP-Fed-LS: client-level private averaging, plain and Laplacian-smoothed.

Liang, Wang, Gu, Osher and Yao: "Exploring Private Federated Learning with Laplacian Smoothing", Algorithm 1. A client
is a silo that holds one user. tau: sampling rate, L: clip bound, nu: standard deviation of the noise on the sum,
sigma: smoothing. In a round (the paper's server loop)

    S_t      <- tau N clients, uniformly without replacement; or each client with probability tau (Poisson)
    Delta_j  <- K local steps of client j, the model pulled back into the ball of radius L around w_t after each
    w_{t+1}  <- w_t + (eta_g / (tau N)) A_sigma^{-1} ( sum_j Delta_j + N(0, nu^2 I) )

Two choices differ from the authors' program:

- The divisor is the expected tau N. Under Poisson sampling |S_t| is random and private, and dividing by it breaks the
  sensitivity argument. ``denominator = "actual"`` does so for reproduction, and the statement names it.
- Replacing a client changes the sum by 2 L. The paper's Theorem 1 says so; its Tables 3 and 6 use L.

docs/theory/dp-fed-ls.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from fedveil.config_keys import NonNegative, Positive
from fedveil.methods.channels import NO_NOISE, Channel, refuses_unbounded
from fedveil.methods.contributions import ClientContribution
from fedveil.methods.keys import (
    ClientRate,
    ClientSampling,
    ClipNorm,
    Denominator,
    Local,
    Noise,
    Smoothing,
    Users,
)
from fedveil.methods.method import Method, variant_of
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, no_guarantee
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.noise import grid_gaussian, grid_law
from fedveil.privacy.published_bounds import theorem_epsilon, theorem_noise, theorem_rounds
from fedveil.privacy.sampling import Everyone, PoissonUsers, Sampler, UniformClients, published_epsilon
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.randomness import BitSource
from fedveil.stage import Published, Sensitivity
from fedveil.training.server.denoise import Laplacian
from fedveil.training.server.optimizers import ServerSgd

# --- the server's noise: added once to the sum, by a server that is trusted with every update ---


@dataclass(frozen=True, kw_only=True)
class CentralGaussian(Channel):
    """Noise that a trusted server adds once to the sum of all updates: std = noise_multiplier * scale.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: unit of the noise, same unit as the update: the bound of one contribution.
    """

    content: ClassVar[Reveals] = Reveals.EXACT
    noise_known: ClassVar[bool] = True

    noise_multiplier: NonNegative
    scale: Positive

    def refuses(self, method: Any) -> Iterable[str]:
        yield from refuses_unbounded(method)
        yield from super().refuses(method)

    def noise_std(self, n: int, summed: int) -> float:
        return self.std

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the sum, per coordinate."""
        return self.noise_multiplier * self.scale

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim the noise against readers of the noisy sum, and nothing against the server, which adds it."""
        if self.noise_multiplier == 0:
            return (no_guarantee(NO_NOISE),)
        # Multiplier of the Gaussian mechanism: standard deviation over l2 sensitivity, z = sigma * scale / Delta_2.
        event = GaussianEvent(noise_multiplier=self.std / sensitivity.total)
        return (
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN), event),
            no_guarantee("the server is trusted: it sees every update and adds the noise itself"),
        )

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        return (
            # Factor 2: the grid distorts the density in the numerator and in the denominator of the likelihood ratio.
            2 * grid_law(self.std, sensitivity.bound.grid).log_ratio_to_gaussian
            if self.noise_multiplier
            else 0.0
        )

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        if self.noise_multiplier == 0:
            return ()
        return (
            f"adding or removing one {sensitivity.unit} changes the sum by at most "
            f"{show_at_most(sensitivity.total)} (l2 norm), "
            "and replacing one by at most twice that; the server adds discrete Gaussian noise of standard deviation "
            f"{show_at_least(self.std)} to the sum, a noise multiplier of "
            f"{show_at_least(self.std / sensitivity.total)}",
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the trust in the server on which the guarantee rests."""
        if self.noise_multiplier == 0:
            return ()
        return (
            "departures from the method: epsilon relies on the server, which receives every update and alone adds the "
            "noise; no other party can check that it does, or that it shows no update to anybody",
        )

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the budget of Tables 3 and 6 of DP-Fed-LS, if clients are sampled as in the paper."""
        if self.noise_multiplier == 0 or method.sampler.adjacency is not Adjacency.REPLACE_ONE:
            return ()
        # The tables take z = nu / L, although replacing a client moves the sum by 2 L (Theorem 1).
        rate, multiplier = method.sampler.rate, self.std / method.bound.norm

        def tables(rounds: int, delta: float) -> float:
            return published_epsilon(rate, multiplier, rounds, delta)

        gap = "replacing a client moves the sum by 2L, as Theorem 1 says, but the tables take L"
        return (Published(name="Tables 3 and 6 of DP-Fed-LS (sensitivity L)", gap=gap, epsilon=tables),)

    def release(
        self, total: Float64[np.ndarray, " d"], grid: float, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Return the sum with exact discrete Gaussian noise on the grid of the contributions."""
        if self.noise_multiplier == 0:
            return total
        noisy = grid_gaussian(len(total), self.std, grid, source)
        noisy += total
        return noisy


# --- the methods ---


@dataclass(frozen=True)
class Theorem:
    """Noise required by Theorem 1 (uniform sampling) or 2 (Poisson sampling) of the paper.

    Attributes:
        sampling: sampling of clients.
        rate: tau, the share of clients in a round; a whole number of clients if sampling is uniform.
        clip: L.
    """

    sampling: ClientSampling
    rate: float
    clip: float

    @property
    def name(self) -> str:
        """Name of the theorem."""
        return "theorem 1" if self.sampling == "uniform" else "theorem 2"

    def noise_multiplier(self, rounds: int, epsilon: float, delta: float) -> float:
        """Return nu / L that suffices for so many rounds."""
        noise = theorem_noise(
            self.sampling, rate=self.rate, clip=self.clip, rounds=rounds, epsilon=epsilon, delta=delta
        )
        return noise.noise_std / self.clip

    def epsilon(self, rounds: int, noise_multiplier: float, delta: float) -> float:
        """Return the epsilon that the theorem shows for a noise multiplier; infinite outside its domain."""
        return theorem_epsilon(
            self.sampling,
            rate=self.rate,
            clip=self.clip,
            rounds=rounds,
            noise_std=noise_multiplier * self.clip,
            delta=delta,
        )

    def rounds(self, noise_multiplier: float, epsilon: float, delta: float) -> int:
        """Return the most rounds that the theorem allows (equation 6 for uniform sampling); 0 if none."""
        return theorem_rounds(
            self.sampling,
            rate=self.rate,
            clip=self.clip,
            noise_std=noise_multiplier * self.clip,
            epsilon=epsilon,
            delta=delta,
        )


def dp_fed(
    *,
    local: Local,
    n_users: Users,
    clip: ClipNorm,
    noise_multiplier: Noise,
    client_sampling: ClientSampling = "poisson",
    client_sampling_rate: ClientRate = 1.0,
    denominator: Denominator = "expected",
) -> Method:
    """DP-Fed: projected local steps, sampled clients, Gaussian noise on the sum (Algorithm 1, sigma = 0).

    Guarantee: in each round, readers of the models see one client through a subsampled Gaussian mechanism of
    multiplier ``noise_multiplier`` = nu / L. Not claimed: any guarantee against the server. It sees every client's
    update and adds the noise, so it is trusted.
    """
    sampler = client_sampler(client_sampling, client_sampling_rate, n_users)
    return Method(
        name="dp-fed",
        contribution=ClientContribution(),
        sampler=sampler,
        # Algorithm 1 projects the local model into the ball of radius L around w_t after every step, so ||Delta_j||
        # <= L.
        local=replace(local, projection=clip),
        bound=Clip(norm=clip),
        weights=Weights.ONE,
        channel=CentralGaussian(noise_multiplier=noise_multiplier, scale=clip),
        server=ServerSgd(),
        denominator=denominator,
        closed_form=Theorem(client_sampling, sampler.rate, clip),
    )


@variant_of(dp_fed)
def dp_fed_ls(plain: Method, *, smoothing: Smoothing) -> Method:
    """DP-Fed-LS: DP-Fed whose noisy mean is smoothed, tensor by tensor, by A_sigma^{-1} (Algorithm 1).

    Smoothing is post-processing, so the guarantee is that of dp-fed.
    """
    return replace(plain, name="dp-fed-ls", denoiser=Laplacian(smoothing=smoothing))


def client_sampler(sampling: ClientSampling, rate: float, n_users: int) -> Sampler:
    """Return the sampler: round(tau N) clients without replacement, or each with probability tau."""
    if rate == 1:
        return Everyone()
    if sampling == "poisson":
        return PoissonUsers(rate=rate)
    # The paper draws tau N clients; a fixed number must be whole, so the rate becomes round(tau N) / N.
    return UniformClients(population=n_users, sample=round(rate * n_users))

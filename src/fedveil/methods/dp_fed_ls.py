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

from dataclasses import dataclass, replace

from fedveil.methods.central_gaussian import CentralGaussian
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
from fedveil.privacy.published_bounds import theorem_epsilon, theorem_noise, theorem_rounds
from fedveil.privacy.sampling import Everyone, PoissonUsers, Sampler, UniformClients
from fedveil.training.server.denoise import Laplacian
from fedveil.training.server.optimizers import ServerSgd


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
        asked = theorem_noise(
            self.sampling, rate=self.rate, clip=self.clip, rounds=rounds, epsilon=epsilon, delta=delta
        )
        return asked.noise_std / self.clip

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

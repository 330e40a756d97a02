"""Published epsilons and the inequalities behind them: no chance in any of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedveil.privacy.accounting import make_accountant, sampled_gaussian_rdp
from fedveil.privacy.events import (
    Adjacency,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
)
from fedveil.privacy.group import lemma5, lemma6, published_group_epsilon, worst_split
from fedveil.privacy.published_bounds import gaussian_profile, laplace_profile, round_rdp, theorem_noise
from fedveil.privacy.sampling import published_epsilon
from reproduction.results import Values

_SILOS = ((0.01, 100_000),)


def figure_2(seed: int) -> Iterator[tuple[str, Values]]:
    """Figure 2 of ULDP-FL: sigma 5, rate 0.01, 100,000 steps, delta 1e-5, by group size and conversion."""
    noise, delta = 5.0, 1e-5
    for size in (1, 2, 4, 8, 16, 32, 64):
        event, _ = worst_split(group_size=size, noise_multiplier=noise, silos=_SILOS)
        ways = {
            "RDP, the authors' orders": published_group_epsilon(
                group_size=size, noise_multiplier=noise, silos=_SILOS, delta=delta
            ),
            "RDP, orders that Lemma 6 admits": lemma6(
                group_size=size, noise_multiplier=noise, silos=_SILOS, delta=delta
            ),
            "normal DP (Lemma 5)": lemma5(group_size=size, noise_multiplier=noise, silos=_SILOS, delta=delta),
            "mixture of Gaussians, what we report": make_accountant("pld").epsilon(event, delta),
        }
        for way, epsilon in ways.items():
            yield f"k={size}: {way}", {"epsilon": epsilon if math.isfinite(epsilon) else None}


def uldp_epsilon(seed: int) -> Iterator[tuple[str, Values]]:
    """The right-hand panels of Figures 4 to 9 of ULDP-FL: sigma 5, delta 1e-5, T rounds, users sampled with rate q."""
    cases = [(rounds, 1.0) for rounds in (1, 2, 3, 10, 50, 100, 200)]
    cases += [(100, rate) for rate in (0.1, 0.3, 0.5, 0.7)] + [(200, rate) for rate in (0.1, 0.3, 0.5)]
    for rounds, rate in cases:
        release: Event = GaussianEvent(noise_multiplier=5.0)
        if rate < 1:
            release = PoissonSampledEvent(rate=rate, event=release)
        event = SelfComposedEvent(event=release, count=rounds)
        yield (
            f"T={rounds}, q={rate:g}",
            {f"epsilon ({name})": make_accountant(name).epsilon(event, 1e-5) for name in ("rdp", "pld")},
        )


def ls_budgets(seed: int) -> Iterator[tuple[str, Values]]:
    """The budgets at the heads of Tables 3, 4 and 6 of DP-Fed-LS, as published and as guarantees."""
    for name, clients, rate, rounds, noises in (
        ("SVHN", 2000, 0.05, 200, (1.5, 1.3, 1.1, 1.0)),
        ("Shakespeare", 975, 0.2, 100, (1.6, 1.4, 1.2, 1.0)),
    ):
        delta = clients**-1.1
        for z in noises:
            as_published = published_epsilon(rate, z, rounds, delta)
            base = GaussianEvent(noise_multiplier=z)  # an event of replacing one counts 2 L
            event = SelfComposedEvent(
                event=SampledWithoutReplacementEvent(
                    population=clients, sample=round(rate * clients), event=base
                ),
                count=rounds,
            )
            yield (
                f"{name}, uniform, z={z:g}",
                {
                    "as published": as_published,
                    "guarantee (rdp)": make_accountant("rdp", Adjacency.REPLACE_ONE).epsilon(event, delta),
                    "guarantee (pld)": make_accountant("pld", Adjacency.REPLACE_ONE).epsilon(event, delta),
                },
            )
            event = SelfComposedEvent(
                event=PoissonSampledEvent(rate=rate, event=GaussianEvent(noise_multiplier=z)), count=rounds
            )
            yield (
                f"{name}, Poisson, z={z:g}",
                {
                    "as published": make_accountant("rdp-2017").epsilon(event, delta),
                    "guarantee (rdp)": make_accountant("rdp").epsilon(event, delta),
                    "guarantee (pld)": make_accountant("pld").epsilon(event, delta),
                },
            )


def ls_inequalities(seed: int) -> Iterator[tuple[str, Values]]:
    """Inequalities (16) and (21) of DP-Fed-LS (Figures S7 and S8): the largest left side over its right side.

    On a grid of nu^2 from the least that the paper admits to 100; and, where the inequality fails, Lemma 3 itself,
    whose conclusion it is used for: the exact divergence of a Poisson-sampled Gaussian over 2 tau^2 alpha / nu^2.
    """
    square = np.geomspace(2 / 3, 100, 20_001)
    left = np.minimum(4 * np.expm1(1 / square), 2 * np.exp(1 / square))
    yield (
        "(16): min{4 (e^x - 1), 2 e^x} <= 6 x, x = 1 / nu^2",
        {"ratio": float((left * square / 6).max()), "one": 1.0},
    )
    for low, high in ((5 / 9, 2.0), (5 / 9, 100.0)):
        square = np.geomspace(low, high, 20_001)
        ratio = np.exp(1 / square) * square / 3.5
        yield f"(21): e^x <= 3.5 x, nu^2 from 5/9 to {high:g}", {"ratio": float(ratio.max()), "one": 1.0}
    worst = 0.0
    for rate in (0.01, 0.05, 0.2):
        for noise in np.sqrt(np.geomspace(5 / 9, 100, 40)):
            for order in range(2, 65):
                if order - 1 > -2 / 3 * noise**2 * math.log(order * rate * (1 + noise**2)):
                    break
                bound = round_rdp("poisson", rate=rate, noise_multiplier=float(noise), order=float(order))
                exact = float(sampled_gaussian_rdp(rate, float(noise), (float(order),))[0])
                worst = max(worst, exact / bound)
    yield "Lemma 3, nu^2 from 5/9 to 100, tau 0.01, 0.05, 0.2", {"ratio": worst, "one": 1.0}


def figure_s9(seed: int) -> Iterator[tuple[str, Values]]:
    """Figure S9 of DP-Fed-LS: noise by Theorems 1 and 2 over the noise by the accountants that the paper compares."""
    for rounds, clients, epsilons in ((30, 500, (6, 9)), (200, 2000, (8, 10)), (1000, 2000, (20, 40))):
        delta = clients**-1.1
        for epsilon in epsilons:
            theorem = theorem_noise(
                "poisson", rate=0.05, clip=1.0, rounds=rounds, epsilon=epsilon, delta=delta
            ).noise_std

            def spent(noise: float, rounds: int = rounds, delta: float = delta) -> float:
                release = PoissonSampledEvent(rate=0.05, event=GaussianEvent(noise_multiplier=noise))
                event = SelfComposedEvent(event=release, count=rounds)
                return make_accountant("rdp-2017").epsilon(event, delta)

            low, high = 0.3, theorem
            while high - low > 1e-3:
                middle = (low + high) / 2
                low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
            yield (
                f"Theorem 2, T={rounds}, N={clients}, epsilon {epsilon:g}",
                {"noise of the theorem": theorem, "noise of the accountant": high, "ratio": theorem / high},
            )


def cepam_claims(seed: int) -> Iterator[tuple[str, Values]]:
    """Section V-B of CEPAM: what its Theorems 12 and 13 give for 30 clients of 1666 images and 15 steps."""
    for gamma in (1.0, 0.3, 0.1, 0.05):
        found = gaussian_profile(clients=30, steps=15, records=1666, std=0.1, gamma=gamma, base_epsilon=5.9)
        yield f"Gaussian, gamma {gamma:g}: epsilon", {"value": found.epsilon}
        yield f"Gaussian, gamma {gamma:g}: delta", {"value": found.delta}
    laplace = laplace_profile(steps=15, records=1666, b=0.1, gamma=1.0, base_epsilon=5000.0)
    yield "Laplace: epsilon", {"value": laplace.epsilon}
    yield "probability that a record is sampled", {"value": 1 - (1 - 1 / 1666) ** 15}

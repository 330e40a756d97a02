"""State the one-round privacy profiles of the CEPAM paper, as figures that fedveil does not support."""

from __future__ import annotations

from typing import Any, Final, Literal

from fedveil.privacy.published_bounds import OneRoundProfile, gaussian_profile, laplace_profile
from fedveil.stage import Published

_GAUSSIAN_BASE, _LAPLACE_BASE = 5.9, 5000.0  # epsilon~ with which the paper states its figures
_GAP: Final = (
    "it covers one round and one record of a client, and scales its noise by the norm of a private update that "
    "travels in clear"
)


def one_round(
    *,
    noise: Literal["gaussian", "laplace"],
    noise_multiplier: float,
    clients: int,
    local: Any,
    records: tuple[int, ...] | None,
) -> tuple[Published, ...]:
    """Return Theorem 12 or 13 of CEPAM, if local steps take one record each as its analysis assumes.

    Args:
        noise: law of a message's noise.
        noise_multiplier: sigma / gamma, or b / gamma.
        clients: K.
        local: the local steps.
        records: number of records of every client.
    """
    if getattr(local, "batch_size", None) != 1 or not records or min(records) < 2:
        return ()
    # The client with the fewest records has the largest sampling rate per step, hence the weakest profile.
    steps, fewest = local.count(min(records)), min(records)
    if noise == "laplace":
        # Theorem 13 gives delta = 0 only if epsilon~ >= 2 tau gamma / b.
        base = max(_LAPLACE_BASE, 2 * steps / noise_multiplier)
        profile = laplace_profile(
            steps=steps, records=fewest, b=noise_multiplier, gamma=1.0, base_epsilon=base
        )
        theorem = "Theorem 13"
    else:
        profile = gaussian_profile(
            clients=clients,
            steps=steps,
            records=fewest,
            std=noise_multiplier,
            gamma=1.0,
            base_epsilon=_GAUSSIAN_BASE,
        )
        theorem = "Theorem 12"
    return (_as_published(theorem, profile),)


def _as_published(theorem: str, profile: OneRoundProfile) -> Published:
    gap = _GAP
    if profile.meaningless:
        gap += (
            f"; delta = {profile.delta:.3g} is not below 1 / {profile.records}, so that publishing one of the client's "
            "records outright can satisfy it"
        )

    def of_one_round(rounds: int, delta: float) -> float:
        return profile.epsilon

    return Published(
        name=f"{theorem} of CEPAM, one round, delta = {profile.delta:.3g}", gap=gap, epsilon=of_one_round
    )

"""What the parties of a run under partial encryption agree on, as a method and the public facts have it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from fedveil.crypto.ckks import CkksParameters
from fedveil.errors import PrivacyError
from fedveil.methods.guarantee import PublicFacts
from fedveil.privacy.bounds import Bound, Clip
from fedveil.privacy.noise.discrete_gaussian import LEAST_STEPS, log_ratio_to_gaussian
from fedveil.privacy.noise.on_grid import NOISE_REACH
from fedveil.protection.partial.half import Half, step_with_room
from fedveil.protection.partial.plan import PartialPlan
from fedveil.protection.partial.sums import PartialSums, vote_std
from fedveil.stage import Moves

_REACH_UNBOUNDED: Final = 64.0
"""Largest coordinate of a half without a bound, in the unit of the update."""


def partial_sums(protection: Any, method: Any, public: PublicFacts) -> PartialSums:
    """Return the ranges of both halves of a message, and the rule of the partition.

    Raises:
        ProtocolError: fewer than two silos, or values that the sums do not hold.
    """
    senders = method.channel.n_senders(public.n_silos)
    clear, hidden = _halves(protection, method, public, senders)
    plan = PartialPlan(
        silos=public.n_silos,
        length=public.length,
        ratio=protection.ratio,
        decay=protection.decay,
        ballots=protection.votes if protection.asks else "none",
        pick="smallest" if protection.strategy == "min" else "largest",
        clear_limit=clear.limit,
        hidden_limit=hidden.limit,
    )
    vote_noise = protection.vote_noise / math.sqrt(senders)
    if vote_noise and protection.asks:
        most = math.ceil(NOISE_REACH * vote_std(vote_noise, plan.hidden(1)))
        plan = replace(plan, ballot_limit=most)
    return PartialSums(
        plan=plan,
        clear=clear,
        hidden=hidden,
        vote_noise=vote_noise,
        released=protection.partition == "released",
        processes=protection.processes,
    )


def _halves(protection: Any, method: Any, public: PublicFacts, senders: int) -> tuple[Half, Half]:
    """Return what is done to the half in clear, and to the encrypted one."""
    bound, std = method.bound, method.channel.message_std(senders)
    steps = _REACH_UNBOUNDED / CkksParameters(silos=public.n_silos).limit
    loose = Half(noise_grid=2.0 ** math.ceil(math.log2(steps)), largest=_REACH_UNBOUNDED)
    if not bound.bounded:
        return loose, loose
    whole = protection.clip == "whole"
    largest = method.contribution.largest_message(bound.norm, senders, public.n_users, method.weights)
    clear = Half(bound=None if whole else bound, noise_std=std, noise_grid=bound.grid, largest=largest)
    if not whole and protection.he_clip is None:
        return clear, loose
    return clear, _hidden(protection, bound, std, largest, public.n_silos)


def _hidden(protection: Any, bound: Bound, std: float, largest: float, n_silos: int) -> Half:
    """Return what is done to an encrypted half that is bounded."""
    hidden_std, hidden_grid = protection.hidden_noise(bound, std)
    own = None if protection.clip == "whole" else Clip(norm=protection.he_clip)
    longest = largest if own is None else own.norm
    return Half(
        bound=own,
        noise_std=hidden_std,
        noise_grid=hidden_grid,
        finest=2.0 ** math.ceil(math.log2(step_with_room(hidden_std, longest, n_silos))),
        largest=longest,
    )


def hidden_log_ratio(protection: Any, moves: Moves) -> float:
    """Bound how far the law of the encrypted half's noise is from the Gaussian, for a number (a log-likelihood ratio).

    The grid is a power of two, so it jumps where noise grows. The bound is that of twice the finest step, above which
    no such grid lies; it falls as noise grows, as a search for the least noise needs it.

    Raises:
        PrivacyError: sums of all silos have no room for such numbers, or only on a grid too coarse for the noise.
    """
    half = _hidden(protection, moves.bound, moves.noise, moves.largest, moves.n_silos)
    told = f"noise of {half.noise_std:g} under encryption, on numbers up to {half.largest:g}"
    if half.finest > half.noise_grid:
        raise PrivacyError(
            f"encrypted sums of {moves.n_silos} silos have no room for {told}; fewer silos, a smaller bound of what a "
            "silo sends, other noise, or secure aggregation"
        )
    law = half.law
    assert law is not None, "noise under encryption is above 0"
    room = step_with_room(half.noise_std, half.largest, moves.n_silos)
    step = max(law.grid, min(2 * room, half.noise_grid))
    if half.noise_std < LEAST_STEPS * step:
        raise PrivacyError(
            f"protection.he_noise: {told} is less than {LEAST_STEPS:g} steps of the grid on which encrypted sums of "
            f"{moves.n_silos} silos have room; take more noise there, or fewer silos"
        )
    return log_ratio_to_gaussian(half.noise_std / step)

"""What the parties of a run under partial encryption agree on, as a method and the public facts have it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from fedveil.crypto.ckks import CkksParameters
from fedveil.methods.guarantee import PublicFacts
from fedveil.privacy.bounds import Clip
from fedveil.privacy.noise.on_grid import NOISE_REACH
from fedveil.protection.partial.half import Half, finest_encrypted
from fedveil.protection.partial.plan import PartialPlan
from fedveil.protection.partial.sums import PartialSums, vote_std

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
    hidden_std, hidden_grid = protection.hidden_noise(bound, std)
    if whole:
        hidden = replace(clear, noise_std=hidden_std)
    elif protection.he_clip is None:
        return clear, loose
    else:
        own = Clip(norm=protection.he_clip)
        hidden = Half(bound=own, noise_std=hidden_std, noise_grid=hidden_grid, largest=own.norm)
    return clear, replace(hidden, finest=finest_encrypted(hidden_std, hidden.largest, public.n_silos))

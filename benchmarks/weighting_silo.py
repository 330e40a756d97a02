"""One silo of the private weighting protocol with stand-ins for all others, and the plans it is measured at."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, TypeVar

import numpy as np

from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator
from fedveil.protocols.weighting.plan import Evaluator, KeyHolder, WeightingPlan

_T = TypeVar("_T")
UNIT: Final = 10**10
"""Contributions up to 1 in units of the paper's P = 1e-10."""
GRID: Final = 2**18
"""Contributions up to the clip bound in units of fedveil's grid."""
KEY_BITS: Final = 3072
paillier_evaluator = partial(PaillierEvaluator, bits=KEY_BITS)


@cache
def key() -> PaillierPrivateKey:
    """Return the one key that all cases use."""
    return PaillierPrivateKey.generate(KEY_BITS)


def plan_of(
    *,
    users: int,
    length: int,
    largest_count: int,
    silos: int = 3,
    rounds: int = 10,
    unit: int = UNIT,
    powers_of_ten: bool = False,
) -> WeightingPlan:
    """Return a plan whose silos add noise of multiplier 5."""
    return WeightingPlan(
        silos=silos,
        users=users,
        length=length,
        largest_count=largest_count,
        norm_limit=unit,
        noise_limit=40 * 5 * unit,
        rounds=rounds,
        powers_of_ten=powers_of_ten,
    )


@dataclass(frozen=True, kw_only=True)
class Silo:
    """One silo with all it needs for a round; the others are stood in for by keys."""

    plan: WeightingPlan
    evaluator: Evaluator
    weights: list[bytes]
    contributions: np.ndarray
    counts: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(
        cls, plan: WeightingPlan, holder: KeyHolder, make: Callable[[WeightingPlan, bytes], Evaluator]
    ) -> Silo:
        """Return a silo with random contributions, counts and noise, and encrypted weights of a key holder."""
        rng = np.random.default_rng(0)
        limit = plan.norm_limit
        return cls(
            plan=plan,
            evaluator=make(plan, holder.public),
            weights=holder.encrypt([secrets.randbelow(holder.modulus) for _ in range(plan.users)]),
            contributions=contributions(rng, plan),
            counts=plan.limit_counts(rng.integers(1, plan.count_limit + 1, plan.users)),
            noise=np.append(rng.integers(-limit, limit, plan.length), 0),
        )

    def load(self) -> None:
        """Take fresh weights, whatever they are."""
        multipliers = [secrets.randbelow(self.evaluator.modulus) for _ in self.weights]
        self.evaluator.load(self.weights, multipliers)

    def first(self) -> list[bytes]:
        """Play a first round: take fresh weights and send."""
        self.load()
        return self.step()

    def step(self) -> list[bytes]:
        """Play a later round: the weights of the first still hold."""
        keys = [(os.urandom(32), True) for _ in range(self.plan.silos - 1)]
        return self.evaluator.encrypt_sum(
            self.contributions, self.counts, self.noise, keys, os.urandom(32), os.urandom(32)
        )


def contributions(rng: np.random.Generator, plan: WeightingPlan) -> np.ndarray:
    """Return (m, d) contributions within the plan's norm."""
    limit = plan.norm_limit // math.ceil(math.sqrt(plan.length)) - 1
    dtype = np.int64 if plan.norm_limit >= 2**31 else np.int32
    return rng.integers(-limit, limit + 1, (plan.users, plan.length), dtype=dtype)


def timed(call: Callable[[], _T]) -> tuple[_T, float]:
    """Return what a call returns and its CPU seconds."""
    before = time.process_time()
    result = call()
    return result, time.process_time() - before

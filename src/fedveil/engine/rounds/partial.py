"""Partial encryption of a round's messages, in one process: vectors in, the sum that every silo ends with out.

A message is divided once the partition is known. Its clear part is bounded and carries its noise; the encrypted part
is bounded and carries noise where the method says so. Both parts travel as whole numbers of a grid, so both sums are
exact; only an encrypted part without a bound is rounded to its grid, by less than 1e-7.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import weakref
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.crypto.agreement import RUN_BYTES
from fedveil.crypto.ckks import CkksParameters
from fedveil.engine.rounds.aggregation import NOISE_REACH
from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import SiloSums
from fedveil.methods.channels import grid_gaussian, grid_law
from fedveil.methods.method import Method
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.privacy.bounds import Bound, Clip
from fedveil.privacy.noise import DiscreteGaussian
from fedveil.protection.errors import ProtocolError
from fedveil.protection.partial.plan import PartialPlan
from fedveil.protection.partial.sums import PartialGiven, PartialResult, PartialSums, Parts
from fedveil.randomness import PrivacyRandomness

_REACH_UNBOUNDED: Final = 64.0
"""Largest coordinate of an encrypted part without a bound, in the unit of the update."""
_LEAST_VOTE_STD: Final = 4.0
"""From here on sums of whole-numbered noise have the Renyi divergences of Gaussian noise (to 1e-60): accountant rdp."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a message: its bound, its noise and its grid.

    Attributes:
        bound: l2 bound that is enforced on the part by itself; None where nothing is to be done.
        noise_std: standard deviation of its noise; 0 for none.
        noise_grid: the grid of what the noise is added to.
        grid: the step of its whole numbers, a power of two, in the unit of the update.
        limit: the largest absolute value of one of them.
    """

    bound: Bound | None
    noise_std: float
    noise_grid: float
    grid: float
    limit: int

    @classmethod
    def of(cls, *, bound: Bound | None, std: float, grid: float, largest: float) -> Part:
        """Return the part for values up to ``largest`` on a grid, with noise."""
        fine = grid_law(std, grid).grid if std else grid
        limit = math.ceil((largest + NOISE_REACH * std) / fine)
        return cls(bound=bound, noise_std=std, noise_grid=grid, grid=fine, limit=limit)

    def units(
        self, values: Float64[np.ndarray, " n"], privacy: PrivacyRandomness, *path: str | int
    ) -> Int64[np.ndarray, " n"]:
        """Return the part's whole numbers: bounded, with noise."""
        if len(values) == 0:
            return np.zeros(0, dtype=np.int64)
        if self.bound is not None:
            row = torch.from_numpy(values.astype(np.float32))[None]
            weight = torch.ones(1, dtype=torch.float64)
            values = self.bound.quantize_(row, self.bound.norms(row), weight)[0].double().numpy()
            values = values * self.bound.grid
        if self.noise_std:
            source = privacy.stream(*path)
            values = values + grid_gaussian(len(values), self.noise_std, self.noise_grid, source)
        return np.rint(values / self.grid).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class PartialRange:
    """What the parties of a run under partial encryption agree on; public numbers alone.

    Attributes:
        plan: of the protocol; every session gives it a run of its own.
        protection: what is asked for.
        clear: the part in clear.
        hidden: the encrypted part.
        vote_noise: noise on the counts, over the square root of the number of votes of a ballot; 0 for none.
    """

    plan: PartialPlan
    protection: PartialEncryption
    clear: Part
    hidden: Part
    vote_noise: float

    @classmethod
    def of(cls, method: Method, *, n_silos: int, n_users: int, length: int) -> PartialRange:
        """Return the range of the messages of a method under partial encryption.

        Raises:
            ProtocolError: fewer than two silos, or values that the sums do not hold.
        """
        protection: Any = method.protection
        bound = method.bound
        assert protection.divides
        senders, largest = method.channel.n_senders(n_silos), 0.0
        std = method.channel.message_std(senders)
        hidden_std, hidden_grid = protection.hidden_noise(bound, std)
        ckks = CkksParameters(silos=n_silos)
        loose = Part.of(
            bound=None,
            std=0.0,
            grid=2.0 ** math.ceil(math.log2(_REACH_UNBOUNDED / ckks.limit)),
            largest=_REACH_UNBOUNDED,
        )
        if bound.bounded:
            largest = method.contribution.largest_message(bound.norm, senders, n_users, method.weights)
        if not bound.bounded:
            clear = hidden = loose
        elif protection.clip == "whole":
            clear = Part.of(bound=None, std=std, grid=bound.grid, largest=largest)
            hidden = Part.of(bound=None, std=hidden_std, grid=bound.grid, largest=largest)
        else:
            clear = Part.of(bound=bound, std=std, grid=bound.grid, largest=largest)
            hidden = loose
            if protection.he_clip is not None:
                own = Clip(norm=protection.he_clip)
                hidden = Part.of(bound=own, std=hidden_std, grid=hidden_grid, largest=own.norm)
        vote_noise = protection.vote_noise / math.sqrt(senders)
        plan = PartialPlan(
            run=bytes(RUN_BYTES),
            silos=n_silos,
            length=length,
            ratio=protection.ratio,
            decay=protection.decay,
            ballots=protection.votes if protection.asks else "none",
            pick="smallest" if protection.strategy == "min" else "largest",
            clear_limit=clear.limit,
            hidden_limit=hidden.limit,
        )
        if vote_noise and protection.asks:
            most = math.ceil(NOISE_REACH * _vote_std(vote_noise, plan.hidden(1)))
            plan = replace(plan, ballot_limit=most)
        return cls(plan=plan, protection=protection, clear=clear, hidden=hidden, vote_noise=vote_noise)

    def proposal(
        self,
        message: Float64[np.ndarray, " d"],
        model: Float64[np.ndarray, " d"],
        initial: Float64[np.ndarray, " d"],
    ) -> Float64[np.ndarray, " d"]:
        """Return what a silo proposes the partition by: its message, or what every silo has where nobody votes.

        Args:
            message: (d,) the silo's bounded sum, or its update where parts are bounded by themselves.
            model: (d,) the global model.
            initial: (d,) the model before the first round.
        """
        if self.protection.asks:
            return message
        return model - initial if self.protection.partition == "released" else np.zeros(len(message))

    def workers(self, *, owner: object) -> Executor | None:
        """Return the processes that silos encrypt in, which end with their owner; None where it is this one alone.

        There are never more than the machine has cores: a silo's machine is not the coordinator's.
        """
        count = min(self.protection.processes, os.cpu_count() or 1)
        if count == 1:
            return None
        spawned = multiprocessing.get_context("spawn")
        workers = ProcessPoolExecutor(count, mp_context=spawned, initializer=_end_with_parent)
        weakref.finalize(owner, workers.shutdown)
        return workers

    def noisy_votes(self, round_number: int) -> bool:
        """Return whether the counts of votes of a round carry noise."""
        return self.plan.ballot_limit > 0 and self.plan.votes(round_number)

    def noise_on_votes(
        self, privacy: PrivacyRandomness, *, round_number: int, silo: int
    ) -> Int64[np.ndarray, " d"]:
        """Return one silo's share of the noise on the counts of votes."""
        law = DiscreteGaussian(std=_vote_std(self.vote_noise, self.plan.hidden(round_number)), grid=1.0)
        source = privacy.stream("vote noise", round_number, silo)
        noise: np.ndarray = np.rint(law.sample((self.plan.length,), source)).astype(np.int64)
        return noise

    def split(
        self,
        message: Float64[np.ndarray, " d"],
        partition: Bool[np.ndarray, " d"],
        privacy: PrivacyRandomness,
        round_number: int,
        silo: int,
    ) -> Parts:
        """Return a silo's message outside and inside the partition in grid units, each bounded and with its noise.

        Raises:
            ProtocolError: a number that is not finite, in either part.
        """
        if not np.isfinite(message).all():
            raise ProtocolError(f"its update is not {len(message)} finite numbers", silo=silo)
        clear = self.clear.units(message[~partition], privacy, "noise", round_number, silo)
        return clear, self.hidden.units(message[partition], privacy, "encrypted noise", round_number, silo)

    def join(
        self,
        partition: Bool[np.ndarray, " d"],
        clear: Int64[np.ndarray, " c"],
        hidden: Int64[np.ndarray, " h"],
    ) -> Float64[np.ndarray, " d"]:
        """Return the vector of two parts, in the unit of the update."""
        total = np.empty(len(partition))
        total[~partition] = clear * self.clear.grid
        total[partition] = hidden * self.hidden.grid
        return total

    def protocol(self, privacy: PrivacyRandomness) -> PartialSums:
        """Return the protocol of these numbers, in which parts are given their noise once they are divided."""

        def divide(
            message: Float64[np.ndarray, " d"], partition: Bool[np.ndarray, " d"], number: int, silo: int
        ) -> Parts:
            return self.split(message, partition, privacy, number, silo)

        return PartialSums(self.plan, divide, lambda owner: self.workers(owner=owner))

    def workload(self, turn: Turn, initial: Float32[Tensor, " d"]) -> DividedSums:
        """Return the silos' messages of a round, to be divided.

        Args:
            turn: what the round begins with.
            initial: (d,) the model before the first round, from which released models are told to have moved.
        """
        return DividedSums(turn, self, initial)

    def given(
        self, message: Float64[np.ndarray, " d"], turn: Turn, *, silo: int, initial: Float32[Tensor, " d"]
    ) -> PartialGiven:
        """Return what a silo puts into a round.

        Args:
            message: (d,) its bounded sum or, where parts are bounded by themselves, its update.
            turn: what the round begins with.
            silo: its number.
            initial: (d,) the model before the first round.
        """
        number, privacy = turn.round_number, turn.privacy
        now, first = turn.model.cpu().double().numpy(), initial.cpu().double().numpy()
        noisy = self.noisy_votes(number)
        return PartialGiven(
            values=self.proposal(message, now, first),
            message=message,
            votes=self.noise_on_votes(privacy, round_number=number, silo=silo) if noisy else None,
        )

    def vector(self, result: PartialResult) -> Float64[np.ndarray, " d"]:
        """Return the sum that every silo ends with, in the unit of the update."""
        return self.join(result.partition, result.clear, result.hidden)


class DividedSums(SiloSums):
    """Every silo's bounded sum, or a drawn client's update, to be divided once the partition is known.

    Args:
        turn: what the round begins with.
        agreed: the range of the messages.
        initial: (d,) the model before the first round.
    """

    def __init__(self, turn: Turn, agreed: PartialRange, initial: Float32[Tensor, " d"]) -> None:
        super().__init__(turn, vector=agreed.vector)
        self._agreed, self._initial = agreed, initial

    def senders(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """Return all silos, or the drawn clients."""
        if self.drawn is not None and self.turn.setting.method.contribution.drawn_alone:
            return tuple(np.flatnonzero(self.drawn).tolist())
        return cohort

    def give(self, sender: int) -> PartialGiven:
        """Return what a silo or client puts into the round."""
        return self._agreed.given(self.sum_of(sender), self.turn, silo=sender, initial=self._initial)


def _vote_std(vote_noise: float, votes: int) -> float:
    """Return the standard deviation of one silo's noise on a count, for ballots of so many votes."""
    return max(_LEAST_VOTE_STD, vote_noise * math.sqrt(votes))


def _end_with_parent() -> None:
    """Have this process end when the one that started it does, however that ends: by itself it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()

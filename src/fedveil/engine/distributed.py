"""Runs over several processes: under ``torchrun``, or over workers that a run starts itself.

    torchrun --nproc-per-node 4 -m fedveil.torchrun PRESET_OR_TOML --runs runs

Every process loads the same experiment; process 0 runs it and keeps the run folder, the others train shares of every
round (:mod:`fedveil.local.distributed`). docs/how-to/several-processes.md.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

from fedveil.engine.experiment import Experiment, parse
from fedveil.engine.run import Observer, Outcome, run
from fedveil.engine.setup import Prepared, prepare
from fedveil.errors import ConfigError
from fedveil.local.distributed import DistributedTrainer, SplitTrainer, serve
from fedveil.local.loop import LoopTrainer
from fedveil.local.span import SpanTrainer
from fedveil.local.vectorized import VmapTrainer
from fedveil.randomness import ExperimentRandomness


def run_together(prepared: Prepared, parent: Path, observer: Observer) -> Outcome | None:
    """Run a prepared experiment over the processes of the default group; the outcome, or None but in process 0.

    Raises:
        ConfigError: a method whose training is not made of contributions that train by themselves (DP-SGD in silos).
    """
    trainer = _split(prepared)
    seat = prepared.seat
    if distributed.get_rank() > 0:
        serve(trainer, seat.cohort, seat.method.bound, ExperimentRandomness(prepared.experiment.seed))
        return None
    spread = DistributedTrainer(inner=trainer)
    try:
        return run(replace(prepared, seat=replace(seat, trainer=spread)), parent, observer)
    finally:
        spread.stop(seat.cohort)


@contextmanager
def workers(experiment: Experiment, count: int) -> Iterator[None]:
    """Start ``count`` - 1 processes beside this one, which becomes process 0 of the default group.

    Each loads the experiment and trains shares on one thread; together they use ``count`` cores.
    """
    if count < 1:
        raise ConfigError(f"{count} processes: at least one is needed")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        started = multiprocessing.get_context("spawn")
        others = [
            started.Process(target=_work, args=(experiment.to_toml(), store, rank, count), daemon=True)
            for rank in range(1, count)
        ]
        for process in others:
            process.start()
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=count)
        try:
            yield
        finally:
            distributed.destroy_process_group()
            for process in others:
                process.join()


def _work(document: str, store: str, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    prepared = prepare(parse(tomllib.loads(document), "the experiment of process 0"))
    serve(
        _split(prepared),
        prepared.seat.cohort,
        prepared.method.bound,
        ExperimentRandomness(prepared.experiment.seed),
    )
    distributed.destroy_process_group()


def _split(prepared: Prepared) -> SplitTrainer:
    trainer = prepared.seat.trainer
    if not isinstance(trainer, LoopTrainer | VmapTrainer | SpanTrainer):
        raise ConfigError(
            f"{prepared.method.name}: DP-SGD inside the silos draws noise in every step and runs in one process"
        )
    return trainer

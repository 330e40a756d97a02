"""Processes that a run starts itself to share its local training: ``trainer.processes``.

They are a gloo group of :mod:`torch.distributed`, as under ``torchrun``. Process 0 is the run; each of the others loads
the experiment again and trains its share of every round on one core (:mod:`fedveil.training.distributed`).
docs/how-to/several-processes.md.
"""

from __future__ import annotations

import signal
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.setup import Prepared, check_dealt_out, prepare
from fedveil.training.distributed import DistributedTrainer, serve
from fedveil.training.trainer import PartitionedTrainer


@contextmanager
def share_training(prepared: Prepared) -> Iterator[Prepared]:
    """Yield the prepared run with its training shared by ``trainer.processes`` processes; itself where that is 1.

    Raises:
        ConfigError: a method whose training is not made of contributions that train by themselves (DP-SGD in silos).
    """
    count = prepared.experiment.trainer.processes
    if count == 1:
        yield prepared
        return
    trainer = DistributedTrainer(inner=split_trainer(prepared), alike=True)
    setting, threads = prepared.setting, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _workers(prepared.experiment, count):
            yield replace(prepared, setting=replace(setting, trainer=trainer))
            trainer.stop(setting.cohort)
    finally:
        torch.set_num_threads(threads)


def split_trainer(prepared: Prepared) -> PartitionedTrainer:
    """Return the run's trainer if its members can be dealt out.

    Raises:
        ConfigError: as :func:`check_dealt_out`.
    """
    check_dealt_out(prepared.method)
    trainer = prepared.setting.trainer
    assert isinstance(trainer, PartitionedTrainer), "all but DP-SGD in silos"
    return trainer


def serve_shares(prepared: Prepared) -> None:
    """Train shares for process 0 until it stops; for all other processes."""
    serve(
        split_trainer(prepared),
        prepared.setting.cohort,
        prepared.method.bound,
        ExperimentRandomness(prepared.experiment.seed),
    )


@contextmanager
def _workers(experiment: Experiment, count: int) -> Iterator[None]:
    """Start ``count`` - 1 processes beside this one, which becomes process 0 of the default group."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        started = multiprocessing.get_context("spawn")
        others = [
            started.Process(target=_work, args=(experiment.to_toml(), store, rank, count), daemon=True)
            for rank in range(1, count)
        ]
        for process in others:
            process.start()
        try:
            distributed.init_process_group("gloo", init_method=store, rank=0, world_size=count)
            yield
        except BaseException:
            for process in others:
                process.terminate()  # they may wait for a share that will never be asked for
            raise
        finally:
            for process in others:
                process.join()
            if distributed.is_initialized():
                distributed.destroy_process_group()


def _work(document: str, store: str, rank: int, count: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 is interrupted for all
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    serve_shares(prepare(parse(tomllib.loads(document), "the experiment of process 0")))
    distributed.destroy_process_group()

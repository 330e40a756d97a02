"""Start worker processes that share a run's local training (``trainer.processes``).

The processes form a gloo group of :mod:`torch.distributed`, as under ``torchrun``. Process 0 is the run. Each other
process loads the experiment again and trains its part of every round on one core
(:mod:`fedveil.training.distributed`). See docs/how-to/several-processes.md.
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
    """Yield the prepared run with its training shared by ``trainer.processes`` processes.

    The run is unchanged if that number is 1.

    Raises:
        ConfigError: the method's contributions do not train independently (see :func:`check_dealt_out`).
    """
    count = prepared.experiment.trainer.processes
    if count == 1:
        yield prepared
        return
    trainer = DistributedTrainer(inner=split_trainer(prepared), alike=True)
    # One thread in every process: with equal thread counts all processes round alike, as `alike` states.
    setting, threads = prepared.setting, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _workers(prepared.experiment, count):
            yield replace(prepared, setting=replace(setting, trainer=trainer))
            trainer.stop(setting.cohort)
    finally:
        torch.set_num_threads(threads)


def split_trainer(prepared: Prepared) -> PartitionedTrainer:
    """Return the run's trainer if its contributions can be split between processes.

    Raises:
        ConfigError: as :func:`check_dealt_out`.
    """
    check_dealt_out(prepared.method)
    trainer = prepared.setting.trainer
    assert isinstance(trainer, PartitionedTrainer), "all but DP-SGD in silos"
    return trainer


def serve_shares(prepared: Prepared) -> None:
    """Train parts of every round for process 0 until it stops; runs in every other process."""
    serve(
        split_trainer(prepared),
        prepared.setting.cohort,
        prepared.method.bound,
        ExperimentRandomness(prepared.experiment.seed),
    )


@contextmanager
def _workers(experiment: Experiment, count: int) -> Iterator[None]:
    """Start ``count`` - 1 worker processes; this process becomes process 0 of the default group."""
    with tempfile.TemporaryDirectory() as folder:
        # A file needs no free port, and the folder is private to this user.
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
                process.terminate()  # it may wait for work that process 0 will never send
            raise
        finally:
            for process in others:
                process.join()
            if distributed.is_initialized():
                distributed.destroy_process_group()


def _work(document: str, store: str, rank: int, count: int) -> None:
    """Run a worker process: join the group, prepare the experiment, and train parts until process 0 stops."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; process 0 ends the others
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    serve_shares(prepare(parse(tomllib.loads(document), "the experiment of process 0")))
    distributed.destroy_process_group()

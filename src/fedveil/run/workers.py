"""Start worker processes that share a run's local training (``trainer.processes``).

The processes form a gloo group of :mod:`torch.distributed`, as under ``torchrun``. Process 0 is the run. Each other
process receives the trainer and the records from it, through a pipe and never through a file, and trains its part of
every round on one core (:mod:`fedveil.training.distributed`). Records are sent from where they lie, without a copy in
process 0; each other process holds them once. See docs/how-to/several-processes.md.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any, Final

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.randomness import ExperimentRandomness
from fedveil.run.folder.run_folder import STARTED_BY
from fedveil.run.setup import Prepared, check_dealt_out
from fedveil.sanitize import sanitize
from fedveil.training.distributed import DistributedTrainer, serve
from fedveil.training.trainer import PartitionedTrainer

_LARGE: Final = 1 << 20
"""Least size of a tensor that is sent from where it lies, in bytes."""
_CHUNK: Final = 1 << 24
"""Bytes of a message through a pipe: a receiver holds one message beside what it has received."""


@contextmanager
def share_training(prepared: Prepared) -> Iterator[Prepared]:
    """Yield the prepared run with its training shared by ``trainer.processes`` processes.

    The run is unchanged if that number is 1.

    Raises:
        ConfigError: the method's contributions do not train independently (see :func:`check_dealt_out`); the model,
            loss or local algorithm cannot be carried to another process; or a process did not begin.
    """
    count = prepared.experiment.trainer.processes
    if count == 1:
        yield prepared
        return
    inner = split_trainer(prepared)
    seed = prepared.experiment.seed
    payload = pickle_for_workers((inner, prepared.setting.cohort, prepared.method.bound, seed))
    trainer = DistributedTrainer(inner=inner, alike=True)
    # One thread in every process: with equal thread counts all processes round alike, as `alike` states.
    setting, threads = prepared.setting, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _workers(payload, count):
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


class _Carrier(pickle.Pickler):
    """Pickler that refuses code of a session without a file, which no other process can import."""

    def reducer_override(self, one: Any) -> Any:
        """Refuse a class or a function of such a session; carry a large tensor as an array."""
        if (
            type(one) is Tensor
            and one.device.type == "cpu"
            and one.nbytes >= _LARGE
            and not one.requires_grad
        ):
            with suppress(TypeError):  # a type of numbers that NumPy lacks
                return torch.from_numpy, (one.numpy(),)
        session = sys.modules["__main__"]
        is_code = isinstance(one, type | FunctionType)
        if is_code and one.__module__ == "__main__" and not hasattr(session, "__file__"):
            raise ConfigError(
                f"trainer.processes: {one.__qualname__} is defined in this session (a notebook, an interpreter), which "
                "other processes cannot import; put it into a module, or leave processes at 1"
            )
        return NotImplemented


def check_carried(prepared: Prepared) -> None:
    """Check before a run that its trainer can be carried to other processes; the records always can.

    Raises:
        ConfigError: as :func:`share_training`.
    """
    if prepared.experiment.trainer.processes > 1:
        pickle_for_workers(split_trainer(prepared))


def pickle_for_workers(value: object) -> list[memoryview]:
    """Return a value in the form that other processes of this program read, and the memory of its large arrays.

    The arrays are not copied: :func:`send_parts` reads them where they lie.

    Raises:
        ConfigError: names what cannot be carried: an object without an importable class or function, an open file.
    """
    stream, arrays = BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Carrier(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=arrays.append).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"trainer.processes: the model, the loss or the local algorithm cannot be carried to other processes "
            f"({sanitize(str(error))}); define it at the top of a module, without lambdas, or leave processes at 1"
        ) from None
    return [stream.getbuffer(), *(one.raw() for one in arrays)]


def send_parts(pipe: Connection, parts: Sequence[memoryview]) -> None:
    """Send what :func:`pickle_for_workers` returned."""
    pipe.send([part.nbytes for part in parts])
    for part in parts:
        for start in range(0, part.nbytes, _CHUNK):
            pipe.send_bytes(part[start : start + _CHUNK])


def receive_parts(pipe: Connection) -> Any:
    """Receive a value that :func:`send_parts` sent; its arrays are filled in place."""
    parts = [bytearray(size) for size in pipe.recv()]
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            pipe.recv_bytes_into(part, start)
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - from the process that started this one


@contextmanager
def _workers(payload: Sequence[memoryview], count: int) -> Iterator[None]:
    """Start ``count`` - 1 worker processes; this process becomes process 0 of the default group.

    Raises:
        ConfigError: a worker ended, or could not import what was carried, before it began.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A file needs no free port, and the folder is private to this user.
        store = f"file://{folder}/store"
        started = multiprocessing.get_context("spawn")
        others = list[tuple[BaseProcess, Connection]]()
        try:
            for rank in range(1, count):
                mine, theirs = started.Pipe()
                process: BaseProcess = started.Process(
                    target=_work, args=(theirs, store, rank, count), daemon=True
                )
                with _marked():
                    process.start()
                theirs.close()  # so that a dead worker is the end of the pipe
                others.append((process, mine))
            for _, pipe in others:
                with suppress(OSError):  # a dead worker; its answer below says so
                    send_parts(pipe, payload)
            for process, pipe in others:
                _check_begun(process, pipe)
            distributed.init_process_group("gloo", init_method=store, rank=0, world_size=count)
            yield
        except BaseException:
            for process, _ in others:
                process.terminate()  # it may wait for work that process 0 will never send
            raise
        finally:
            for process, pipe in others:
                process.join()
                pipe.close()
            if distributed.is_initialized():
                distributed.destroy_process_group()


@contextmanager
def _marked() -> Iterator[None]:
    """Let a process that is started here refuse new runs until it has imported the script: they would charge again."""
    os.environ[STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[STARTED_BY]


def _check_begun(process: BaseProcess, pipe: Connection) -> None:
    try:
        wrong = pipe.recv_bytes().decode()
    except (EOFError, OSError):
        process.join()
        raise ConfigError(
            f"trainer.processes: a worker process ended (exit code {process.exitcode}) before it began. Each one "
            'imports the script that was started: call fedveil.train under `if __name__ == "__main__":` there'
        ) from None
    if wrong:
        raise ConfigError(
            f"trainer.processes: a worker process cannot read the model, the loss or the local algorithm "
            f"({sanitize(wrong)}); define them in a module that every process imports, or leave processes at 1"
        )


def _work(pipe: Connection, store: str, rank: int, count: int) -> None:
    """Run a worker process: receive the trainer and the records, join the group, and train until process 0 stops."""
    os.environ.pop(STARTED_BY, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; process 0 ends the others
    torch.set_num_threads(1)
    try:
        trainer, cohort, bound, seed = receive_parts(pipe)
    except (ImportError, AttributeError) as error:
        pipe.send_bytes(str(error).encode())
        return
    except Exception as error:  # the words of other errors are the user's own, and may quote records
        pipe.send_bytes(type(error).__name__.encode())
        return
    pipe.send_bytes(b"")
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    serve(trainer, cohort, bound, ExperimentRandomness(seed))
    distributed.destroy_process_group()

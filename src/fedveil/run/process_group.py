"""Share one run between processes: those that ``torchrun`` started, or workers that the run starts itself.

    torchrun --nproc-per-node 4 -m fedveil run table-2-mnist

Every process (rank) executes the same command or script. Rank 0 plays the run: it charges, draws who takes part and
the noise, and writes the run folder. The other ranks train their share of every round
(:mod:`fedveil.training.distributed`) and receive the outcome. docs/how-to/several-processes.md.

Before the run folder exists, the ranks compare experiment, records, versions and device. A rank that differs ends the
run before its first charge. A rank that ends, or is silent for ``FEDVEIL_RANK_TIMEOUT`` seconds, ends the run with an
error in every other rank; the run folder is as after a crash, and ``fedveil resume`` goes on from it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from torch import Tensor

from fedveil import __version__
from fedveil.errors import ConfigError, HostError
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.statement import Statement
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import Experiment
from fedveil.run.executors import check_processes
from fedveil.run.folder.run_folder import STARTED_BY, RunFolder
from fedveil.run.setup import Prepared, check_dealt_out
from fedveil.run.steps.experiment import Outcome
from fedveil.sanitize import sanitize
from fedveil.statistics.evaluation.result import ReleasedEvaluation
from fedveil.training.distributed import (
    DistributedTrainer,
    broadcast_json,
    gather_json,
    receive_json,
    serve,
)
from fedveil.training.trainer import Cohort, PartitionedTrainer, TrainJob, partition_by_key

# --- processes that torchrun started ---


TIMEOUT: Final = "FEDVEIL_RANK_TIMEOUT"
_TIMEOUT_S: Final = 1800


def rank() -> int:
    """Return this process's number under ``torchrun``, and join the others; 0 without ``torchrun``."""
    return distributed.get_rank() if _joined() else 0


def require_one_process(command: str) -> None:
    """Refuse what every rank of ``torchrun`` would do for itself, with a charge, a release or files of its own.

    Raises:
        ConfigError: torchrun started several processes.
    """
    if _is_one_of_several():
        raise ConfigError(
            f"{command}: torchrun started several processes, which share the training of one run and nothing else; "
            "each would do this for itself. Start one process"
        )


def _is_one_of_several() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def _joined() -> bool:
    """Join the processes of ``torchrun`` if it started several; return whether it did."""
    if not _is_one_of_several():
        return False
    if not distributed.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # gloo carries CPU tensors, nccl carries GPU tensors.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=_timeout()))
        atexit.register(_leave)
        # torchrun terminates the other ranks as soon as one fails; unhandled, that would end them without a message.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _say_terminated)
    return True


def _say_terminated(*_: object) -> None:
    raise HostError(f"process {os.environ['RANK']}: terminated, because another process of this run ended")


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, str(_TIMEOUT_S))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{TIMEOUT}: a whole number of seconds, at least 1, not {text!r}")
    return float(text)


def agree(prepared: Prepared) -> None:
    """Check that all ranks are about to play the same run; nothing happens without ``torchrun``.

    Raises:
        ConfigError: the experiment would start processes of its own, its training cannot be shared, or a rank has
            another experiment, other records, other versions or another kind of device.
        HostError: a rank ended or is silent.
    """
    if not _joined():
        return
    facts, mistake = _facts(prepared), None
    try:
        if prepared.experiment.trainer.processes > 1:
            raise ConfigError("trainer.processes: torchrun starts the processes here; leave the key out")
        split_trainer(prepared)
    except ConfigError as error:  # raised after the exchange, so that no rank waits for this one
        mistake = error
    all_facts = gather_json(facts, torch.device("cpu"))
    if mistake is not None:
        raise mistake
    check_same(all_facts)


def check_same(facts: Sequence[Mapping[str, str]]) -> None:
    """Check that the facts of all ranks, by rank, are equal.

    Raises:
        ConfigError: a rank differs from rank 0; names the rank and the facts, without their values.
    """
    for number, other in enumerate(facts):
        unlike = [name for name, value in facts[0].items() if other[name] != value]
        if unlike:
            raise ConfigError(
                f"rank {number} differs from rank 0 in: {', '.join(unlike)}; start every rank with the same command, "
                "data and versions. Nothing was charged"
            )


def _facts(prepared: Prepared) -> dict[str, str]:
    """Return the facts that all ranks must share; of private records a digest, which stays within the group."""
    return {
        "experiment": _digest(prepared.experiment),
        "records": prepared.population.train.sha256,
        "version of fedveil": __version__,
        "version of torch": torch.__version__,
        "device": prepared.setting.cohort.device.type,
    }


def _digest(experiment: Experiment) -> str:
    return hashlib.sha256(experiment.to_toml().encode()).hexdigest()


# --- rank 0 --------------------------------------------------------------------------------------------------


@contextmanager
def lead(folder: RunFolder) -> Iterator[Callable[[Outcome], Outcome]]:
    """Tell the other ranks how a run of this process ends; nothing happens without ``torchrun``.

    Yields a function that sends the outcome to the other ranks and returns it. If the run ends by an error, the other
    ranks end with an error, too.

    Raises:
        HostError: a rank ended or is silent; the message says how to resume.
    """
    if not _joined():
        yield lambda outcome: outcome
        return
    try:
        yield _send
    except HostError as error:
        raise HostError(
            f"{error}; `fedveil resume {folder.path}` goes on from the last complete round"
        ) from None
    except BaseException:
        _leave()  # the others wait: closed connections end them, also if a script catches this error
        raise


@contextmanager
def share_with_ranks(prepared: Prepared, folder: RunFolder) -> Iterator[Prepared]:
    """Yield the run with its training shared by all ranks; unchanged without ``torchrun``."""
    if not _joined():
        yield prepared
        return
    _broadcast({"folder": str(folder.path.absolute()), "experiment": _digest(prepared.experiment)})
    setting = prepared.setting
    trainer = DistributedTrainer(inner=split_trainer(prepared))
    yield replace(prepared, setting=replace(setting, trainer=trainer))
    trainer.stop(setting.cohort)


def _send(outcome: Outcome) -> Outcome:
    evaluated = outcome.evaluated
    _broadcast(
        {
            "folder": str(outcome.folder.absolute()),
            "rounds": outcome.rounds,
            "stopped": outcome.stopped,
            "row": outcome.row,
            "statement": outcome.statement.to_json(),
            "seconds": outcome.seconds,
            "evaluated": None if evaluated is None else evaluated.to_json(),
        }
    )
    return outcome


def _broadcast(message: dict[str, Any]) -> None:
    broadcast_json(message, torch.device("cpu"))


# --- the other ranks -----------------------------------------------------------------------------------------


def follow(prepared: Prepared, prepare_again: Callable[[Experiment], Prepared]) -> Outcome:
    """Train this rank's share of a run that rank 0 plays, and return the outcome.

    Only the records of this rank's share stay in memory.

    Args:
        prepared: the experiment; :func:`agree` compared it.
        prepare_again: prepares the experiment again, after a release before training refined its schema.

    Raises:
        HostError: rank 0 or another rank ended, is silent, or the run folder is needed and not visible here.
    """
    begun = _receive()
    if begun["experiment"] != _digest(prepared.experiment):
        refined = RunFolder(Path(begun["folder"])).with_refined_schema(prepared.experiment)
        if _digest(refined) != begun["experiment"]:
            raise HostError(
                f"{begun['folder']}: the refined schema is not visible to rank {distributed.get_rank()}; put the run "
                "folder on a file system that all ranks share"
            )
        prepared = prepare_again(refined)
    randomness = ExperimentRandomness(prepared.experiment.seed)
    trainer, bound = split_trainer(prepared), prepared.method.bound
    cohort = keep_share(
        prepared.setting.cohort, randomness, distributed.get_rank(), distributed.get_world_size()
    )
    del prepared
    serve(trainer, cohort, bound, randomness)
    ended = _receive()
    evaluated = ended["evaluated"]
    return Outcome(
        folder=Path(ended["folder"]),
        rounds=ended["rounds"],
        stopped=ended["stopped"],
        row=ended["row"],
        statement=Statement.from_json(ended["statement"]),
        seconds=ended["seconds"],
        evaluated=None if evaluated is None else ReleasedEvaluation.from_json(evaluated, "rank 0"),
    )


def _receive() -> dict[str, Any]:
    return receive_json(torch.device("cpu"))


def keep_share(cohort: Cohort, randomness: ExperimentRandomness, rank: int, world: int) -> Cohort:
    """Return the cohort with the records of one rank's contributions alone, renumbered.

    Numbers, silos, users and sizes of all contributions stay: they decide who takes part and how members are divided.
    """
    groups = cohort.groups
    everybody, weights = torch.arange(len(groups)), torch.zeros(len(groups), dtype=torch.float64)
    job = TrainJob(torch.zeros(0), cohort, everybody, weights, Unbounded(), randomness, ())
    own = partition_by_key(job, rank, world).numpy()
    records = np.concatenate([np.zeros(0, np.int64), *(groups.members(number) for number in own.tolist())])
    start = np.zeros_like(groups.start)
    start[own] = np.cumsum(groups.size[own]) - groups.size[own]
    # Shapes are read from the first record, so a rank without contributions keeps one record.
    rows = torch.from_numpy(records if len(records) else np.zeros(1, np.int64)).to(cohort.features.device)
    return replace(
        cohort,
        features=cohort.features.index_select(0, rows),
        targets=cohort.targets.index_select(0, rows),
        groups=replace(groups, order=np.arange(len(records)), start=start),
    )


# --- worker processes that a run starts (trainer.processes) ---
# They form a gloo group as under torchrun. Process 0 is the run. Each other process receives the trainer and the
# records from it, through a pipe and never through a file, and trains its part of every round on one core. Records are
# sent from where they lie, without a copy in process 0; each other process holds them once.


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
    trainer = DistributedTrainer(inner=inner, rounds_alike=True)
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
        ConfigError: as :func:`check_dealt_out`, or :func:`~fedveil.run.executors.check_processes`.
    """
    check_dealt_out(prepared.method)
    check_processes("trainer.processes", prepared.experiment.trainer.processes)
    trainer = prepared.setting.trainer
    assert isinstance(trainer, PartitionedTrainer), "all but DP-SGD in silos"
    return trainer


class _Carrier(pickle.Pickler):
    """Pickler that refuses code of a session without a file, which no other process can import."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse a class or a function of such a session; carry a large tensor as an array."""
        if (
            type(obj) is Tensor
            and obj.device.type == "cpu"
            and obj.nbytes >= _LARGE
            and not obj.requires_grad
        ):
            with suppress(TypeError):  # a type of numbers that NumPy lacks
                return torch.from_numpy, (obj.numpy(),)
        session = sys.modules["__main__"]
        is_code = isinstance(obj, type | FunctionType)
        if is_code and obj.__module__ == "__main__" and not hasattr(session, "__file__"):
            raise ConfigError(
                f"trainer.processes: {obj.__qualname__} is defined in this session (a notebook, an interpreter), which "
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
    return [stream.getbuffer(), *(array.raw() for array in arrays)]


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
        workers = list[tuple[BaseProcess, Connection]]()
        try:
            for rank in range(1, count):
                parent_end, worker_end = started.Pipe()
                process: BaseProcess = started.Process(
                    target=_work, args=(worker_end, store, rank, count), daemon=True
                )
                with _marked():
                    process.start()
                worker_end.close()  # so that a dead worker is the end of the pipe
                workers.append((process, parent_end))
            for _, pipe in workers:
                with suppress(OSError):  # a dead worker; its answer below says so
                    send_parts(pipe, payload)
            for process, pipe in workers:
                _check_begun(process, pipe)
            distributed.init_process_group("gloo", init_method=store, rank=0, world_size=count)
            yield
        except BaseException:
            for process, _ in workers:
                process.terminate()  # it may wait for work that process 0 will never send
            raise
        finally:
            for process, pipe in workers:
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

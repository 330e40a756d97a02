"""Executors of many runs: worker processes of this machine, or of a cluster whose machines share the run folders.

A sweep, ``fedveil reproduce`` and ``fedveil bench price`` submit one task per run to any
:class:`concurrent.futures.Executor`. Engines for clusters have such an executor; a member of the registry kind
``executors`` opens it. A worker opens its run folder itself. If the worker dies, the engine gives the task to another
worker, which resumes the run from its last complete round. What the dead worker charged stays in the run's ledger, and
so in the joint cost. The lock of the ledger keeps two workers out of one folder, even if an engine takes a slow worker
for a dead one.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import torch

from fedveil import __version__
from fedveil.errors import ConfigError, FedveilError, HostError, ModelError, RunFolderError
from fedveil.protocols.partial_encryption.protocol_spec import end_with_parent
from fedveil.registry import describe_names, find, members
from fedveil.run.config.experiment import Device
from fedveil.training.dpsgd import DpSgdTrainer
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.trainer import Cohort, PartitionedTrainer
from fedveil.training.trainer_choice import is_batch_independent
from fedveil.user_code import import_object

# --- executors ---

_CONNECT_SECONDS: Final = 20
_PROCESSES_A_CPU: Final = 4


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Workers that play runs, one at a time each.

    Attributes:
        executor: takes one task per run.
        lost: errors of a task whose worker, or the whole engine, ended before the task did.
    """

    executor: Executor
    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)


def check_processes(key: str, processes: int) -> None:
    """Check that this machine can run so many processes: at most four for each CPU that this process may use.

    More take memory and gain nothing, and thousands end the machine's other programs.

    Args:
        key: option or key that asks for them.
        processes: number of processes.

    Raises:
        ConfigError: there are more.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processes > (most := _PROCESSES_A_CPU * usable):
        raise ConfigError(
            f"{key} = {processes}: this machine has {usable} usable CPUs, for which at most {most} processes start; "
            f"{usable} are fastest"
        )


@contextmanager
def local_workers(processes: int) -> Iterator[Workers]:
    """Start worker processes on this machine.

    Raises:
        ConfigError: as :func:`check_processes`.
    """
    check_processes("--processes", processes)
    # "fork" would copy the threads' locks of torch into the workers, which can deadlock there.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin_worker) as pool:
        yield Workers(executor=pool)


def _begin_worker() -> None:
    """Prepare a worker process: one thread, its parent's end as its own, and the default handling of Ctrl-C.

    Without the last a worker would turn Ctrl-C into an exception and then begin the next task of the pool.
    """
    end_with_parent()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def open_workers(text: str) -> AbstractContextManager[Workers]:
    """Open the workers that ``--executor NAME:ADDRESS`` names, or the executor that ``package.module:function`` makes.

    Raises:
        ConfigError: no such executor, its package is not installed, or its scheduler does not answer.
    """
    name, colon, address = text.partition(":")
    if any(member.name == name for member in members("executors")):
        if not address:
            raise ConfigError(f"--executor {text}: expected {name}:ADDRESS; see `fedveil stages executors`")
        workers: AbstractContextManager[Workers] = find("executors", name).load()(address)
        return workers
    if not colon:
        raise ConfigError(
            f"--executor {text}: expected NAME:ADDRESS with a name among {describe_names('executors')}, or "
            "package.module:function, which returns a concurrent.futures.Executor"
        )
    return _own_workers(text)


@contextmanager
def _own_workers(path: str) -> Iterator[Workers]:
    returned = cast(Callable[[], object], import_object(path, "--executor"))()
    if not isinstance(returned, Executor):
        raise ConfigError(
            f"--executor {path}: returned a {type(returned).__name__}, not a concurrent.futures.Executor"
        )
    with returned as executor:
        yield Workers(executor=executor)


@contextmanager
def dask_workers(address: str) -> Iterator[Workers]:
    """Workers of a Dask scheduler: `dask:tcp://host:8786`.

    Each worker must have one thread (``dask worker --nthreads 1``): a run sets PyTorch's state for its process. A
    task whose worker dies is given to other workers, by Dask's setting ``distributed.scheduler.allowed-failures``.
    """
    distributed = import_engine("distributed", "dask")
    try:
        client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--executor dask:{address}: no scheduler answers there ({type(error).__name__}); start one with "
            "`dask scheduler`, and workers with `dask worker --nthreads 1 ADDRESS`"
        ) from None
    with client:
        check_threads(client.nthreads())
        lost = (
            distributed.KilledWorker,
            distributed.client.FutureCancelledError,
            distributed.comm.CommClosedError,
            *Workers.lost,
        )
        yield Workers(executor=client.get_executor(pure=False), lost=lost)


def check_threads(threads: Mapping[str, int]) -> None:
    """Check that the scheduler has workers, and that each plays one run at a time.

    Raises:
        ConfigError: no worker, or one with several threads.
    """
    if not threads:
        raise ConfigError(
            "--executor dask: the scheduler has no workers; start some: `dask worker --nthreads 1`"
        )
    for worker, count in threads.items():
        if count != 1:
            raise ConfigError(
                f"--executor dask: worker {worker} has {count} threads, and a run needs a process of its own; start "
                "it with `dask worker --nthreads 1`"
            )


@contextmanager
def parsl_workers(path: str) -> Iterator[Workers]:
    """Workers of Parsl, such as jobs of Slurm: `parsl:FILE.py`, which sets `config` to a `parsl.Config`.

    The file runs in this process. ``retries`` of the configuration says how often a task whose worker died is
    played again.
    """
    concurrent = import_engine("parsl.concurrent", "parsl")
    try:
        config = runpy.run_path(path)["config"]
    except OSError as error:
        raise ConfigError(f"--executor parsl:{path}: cannot be read: {error.strerror}") from None
    except KeyError:
        raise ConfigError(f"--executor parsl:{path}: sets no `config`, a parsl.Config") from None
    failures = import_module("parsl.executors.high_throughput.errors")
    try:
        opened = concurrent.ParslPoolExecutor(config)
    except FileNotFoundError as missing:
        raise ConfigError(
            f"--executor parsl:{path}: {missing.filename}, a program of Parsl, is not on the PATH; add the folder of "
            f"this environment's programs ({Path(sys.executable).parent})"
        ) from None
    with opened as executor:
        yield Workers(executor=executor, lost=(failures.WorkerLost, failures.ManagerLost, *Workers.lost))


@contextmanager
def ray_workers(address: str) -> Iterator[Workers]:
    """Workers of a Ray cluster: `ray:auto`, `ray:HOST:PORT`, or `ray:local` for one of its own on this machine."""
    ray = import_engine("ray", "ray")
    try:
        if ":" in address:  # Ray itself tries for minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"--executor ray:{address}: no cluster answers there ({type(error).__name__}); start one with "
            "`ray start --head`"
        ) from None
    try:
        errors = ray.exceptions
        # Not RayError itself, which errors of the task are, too.
        lost = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.RaySystemError,
        )
        # Ray prints the death of a worker on the standard output, where a program expects the answer (`--json`) alone.
        with redirect_stdout(sys.stderr):
            yield Workers(executor=_RayExecutor(ray), lost=(*lost, *Workers.lost))
    finally:
        ray.shutdown()


class _RayExecutor(Executor):
    """Ray's tasks as an executor; a task whose worker dies is played again three times, by Ray's default."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        task = self._ray.remote(num_cpus=1)(fn)
        future: Future[Any] = Future()
        task.remote(*args, **kwargs).future().add_done_callback(lambda finished: _pass_on(finished, future))
        return future


def _pass_on(ray_future: Future[Any], future: Future[Any]) -> None:
    """Pass the end of Ray's future on, with the error of the task itself instead of Ray's wrapping of it."""
    if not future.set_running_or_notify_cancel():
        return
    error = ray_future.exception()
    if error is None:
        future.set_result(ray_future.result())
    else:
        future.set_exception(getattr(error, "cause", None) or error)


def import_engine(module: str, extra: str) -> Any:
    """Return a module of an engine.

    Raises:
        ConfigError: the package is not installed; names the extra that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"--executor {extra}: needs {missing.name}, which is not installed: pip install 'fedveil[{extra}]'"
        ) from None


Task = tuple[Any, ...]
"""A function of a module that the workers can import, and its arguments."""


def play_tasks(tasks: Sequence[Task], opened: AbstractContextManager[Workers]) -> Iterator[tuple[int, Any]]:
    """Yield the number of every task with its result, or with its :class:`FedveilError`, as soon as it ends.

    If the caller stops early, for instance by Ctrl-C, the workers finish what they have begun, and begin nothing else.
    """
    with opened as workers:
        waiting = {workers.executor.submit(*task): number for number, task in enumerate(tasks)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], _result_or_error(future, workers)
        finally:
            for future in waiting:
                with suppress(NotImplementedError):  # Parsl cancels nothing, not even what has ended
                    future.cancel()


def _result_or_error(future: Future[Any], workers: Workers) -> Any:
    try:
        return future.result()
    except workers.lost as error:
        return HostError(
            f"its worker ended before it did ({type(error).__name__}); the same command resumes it, and what it was "
            "charged is counted"
        )
    except FedveilError as error:
        return error


def check_worker(version: str, folder: Path) -> None:
    """Check that a worker has the version, and sees the folder, of the process that submitted its task.

    Raises:
        ConfigError: the worker has another version of fedveil.
        RunFolderError: the worker does not see the folder.
    """
    if version != __version__:
        raise ConfigError(
            f"the worker has fedveil {__version__}, and the command {version}; install the same"
        )
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder}: the worker does not see it; all machines must share the folder of runs"
        )
    torch.set_num_threads(1)


def task_of_checkout(checkout: Path, function: Callable[..., Any], *arguments: Any) -> Task:
    """Return a task whose function and arguments come from packages of a checkout, such as ``reproduction``.

    The workers' path lacks the checkout, so the function and its arguments are packed until it is.
    """
    packed = pickle.dumps((function, arguments))
    return _call_in_checkout, checkout, packed, __version__


def _call_in_checkout(checkout: Path, packed: bytes, version: str) -> Any:
    check_worker(version, checkout)
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    function, arguments = pickle.loads(packed)  # noqa: S301 - the engine unpickles the task itself, too
    return function(*arguments)


# --- device of local training ---

AnyTrainer: TypeAlias = PartitionedTrainer | DpSgdTrainer | RecordSumsTrainer
Machines: TypeAlias = Literal["this", "several"]


def place_on_device(
    device_setting: Device,
    cohort_on: Callable[[torch.device], Cohort],
    trainer_of: Callable[[Cohort], AnyTrainer],
    has_cuda: bool | None = None,
) -> tuple[Cohort, AnyTrainer]:
    """Return the records on the chosen device, and their trainer.

    ``auto`` takes a CUDA device if one is available, with one exception. For some models the CPU trains
    contributions in one batch and the CUDA device cannot, because its kernels round one contribution by the others.
    Trained one by one, a small model is many times slower on CUDA, so the CPU is used. Models that train one by one
    on both devices use CUDA.

    Args:
        device_setting: the experiment's ``trainer.device``.
        cohort_on: puts the records on a device.
        trainer_of: chooses the trainer of these records, from public facts only.
        has_cuda: whether this machine has a CUDA device; None: ask PyTorch.

    Raises:
        ConfigError: a CUDA device is requested and none is available.
        ModelError: no trainer of the requested name can train the model on any candidate device.
    """
    available = torch.cuda.is_available() if has_cuda is None else has_cuda
    if device_setting == "cuda" and not available:
        raise ConfigError("trainer.device = cuda: no CUDA device is available here; use auto or cpu")
    devices = (
        ["cuda", "cpu"] if device_setting == "auto" and available else [device_setting.replace("auto", "cpu")]
    )
    candidates: list[tuple[Cohort, AnyTrainer]] = []
    for device in devices:
        cohort = cohort_on(torch.device(device))
        try:
            trainer = trainer_of(cohort)
        except ModelError:
            # Another device may still work, or already did; raise only if no device is left.
            if device != devices[-1] or candidates:
                continue
            raise
        if trainer.side_by_side:
            return cohort, trainer
        candidates.append((cohort, trainer))
    return candidates[0]


def batching_caveats(
    name: str, machines: Machines, trainer: AnyTrainer, device: torch.device
) -> tuple[str, ...]:
    """Return sentences about rounding in batches, for the statement's list of uncovered conditions.

    The batch-independence of a contribution is not tested on every device and kernel. Several parties sign one
    text, so with several machines the sentence depends on no single machine.

    Args:
        name: requested name of the trainer.
        machines: where the run trains.
        trainer: the trainer that was chosen here.
        device: the device of the trainer.
    """
    if machines == "several":
        if is_batch_independent(name):
            return ()
        party, where = "a silo's ", "on a CUDA device or by compiled kernels, where it has them"
    elif not trainer.side_by_side or (device.type == "cpu" and not trainer.has_generated_kernels):
        return ()
    else:
        party, where = "", "by compiled kernels" if trainer.has_generated_kernels else "on a CUDA device"
    return (
        f"rounding in {party}training in batches {where}: the last digits of one contribution may depend on the "
        "contributions computed in the same batch, and training can amplify such a difference to any size; no bound "
        "covers it (trainer.name = 'loop' computes each contribution by itself)",
    )

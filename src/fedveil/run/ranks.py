"""Share one run between the processes that ``torchrun`` started, on one machine or several.

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
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as distributed

from fedveil import __version__
from fedveil.errors import ConfigError, HostError
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.statement import Statement
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.setup import Prepared
from fedveil.run.steps.experiment import Outcome
from fedveil.run.workers import split_trainer
from fedveil.statistics.evaluation.result import ReleasedEvaluation
from fedveil.training.distributed import (
    DistributedTrainer,
    broadcast_json,
    gather_json,
    receive_json,
    serve,
)
from fedveil.training.trainer import Cohort, TrainJob, partition_by_key

TIMEOUT: Final = "FEDVEIL_RANK_TIMEOUT"
_TIMEOUT_S: Final = 1800


def rank() -> int:
    """Return this process's number under ``torchrun``, and join the others; 0 without ``torchrun``."""
    return distributed.get_rank() if _joined() else 0


def require_one_process(what: str) -> None:
    """Refuse what every rank of ``torchrun`` would do for itself, with a charge, a release or files of its own.

    Raises:
        ConfigError: torchrun started several processes.
    """
    if _is_one_of_several():
        raise ConfigError(
            f"{what}: torchrun started several processes, which share the training of one run and nothing else; each "
            "would do this for itself. Start one process"
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
    given = os.environ.get(TIMEOUT, str(_TIMEOUT_S))
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{TIMEOUT}: a whole number of seconds, at least 1, not {given!r}")
    return float(given)


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
    found = gather_json(facts, torch.device("cpu"))
    if mistake is not None:
        raise mistake
    check_same(found)


def check_same(found: Sequence[Mapping[str, str]]) -> None:
    """Check that the facts of all ranks, by rank, are equal.

    Raises:
        ConfigError: a rank differs from rank 0; names the rank and the facts, without their values.
    """
    for number, other in enumerate(found):
        unlike = [name for name, value in found[0].items() if other[name] != value]
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
    held = np.concatenate([np.zeros(0, np.int64), *(groups.members(number) for number in own.tolist())])
    start = np.zeros_like(groups.start)
    start[own] = np.cumsum(groups.size[own]) - groups.size[own]
    # Shapes are read from the first record, so a rank without contributions keeps one record.
    rows = torch.from_numpy(held if len(held) else np.zeros(1, np.int64)).to(cohort.features.device)
    return replace(
        cohort,
        features=cohort.features.index_select(0, rows),
        targets=cohort.targets.index_select(0, rows),
        groups=replace(groups, order=np.arange(len(held)), start=start),
    )

"""Run experiments over several processes that ``torchrun`` starts, on one machine or several.

    torchrun --nproc-per-node 4 -m fedveil.torchrun PRESET_OR_TOML --runs runs

Every process loads the same experiment. Process 0 runs it and writes the run folder; the others train shares of every
round (:mod:`fedveil.training.distributed`). docs/how-to/several-processes.md.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as distributed

from fedveil.console import LineObserver, Terminal
from fedveil.errors import ConfigError, FedveilError
from fedveil.run.config.study import load_study
from fedveil.run.observer import Observer
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import run
from fedveil.run.workers import serve_shares, split_trainer
from fedveil.training.distributed import DistributedTrainer


def run_together(prepared: Prepared, parent: Path, observer: Observer) -> Outcome | None:
    """Run a prepared experiment over the processes of the default group.

    Returns:
        The outcome in process 0; None in the others.

    Raises:
        ConfigError: the experiment would start processes of its own, or its training cannot be partitioned (DP-SGD in
            silos).
    """
    if prepared.experiment.trainer.processes > 1:
        raise ConfigError("trainer.processes: torchrun starts the processes here; leave the key out")
    spread = DistributedTrainer(inner=split_trainer(prepared))
    if distributed.get_rank() > 0:
        serve_shares(prepared)
        return None
    setting = prepared.setting
    try:
        return run(replace(prepared, setting=replace(setting, trainer=spread)), parent, observer)
    finally:
        # Also after an error: the other processes wait for a broadcast and would hang otherwise.
        spread.stop(setting.cohort)


def main() -> None:
    """Run every experiment of a preset or TOML file in the processes that torchrun started."""
    parser = argparse.ArgumentParser(
        prog="fedveil.torchrun", description="Run a preset or TOML file over several processes."
    )
    parser.add_argument("source", metavar="PRESET_OR_TOML")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 4 -m fedveil.torchrun ...")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo carries CPU tensors, nccl carries GPU tensors.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    # Only process 0 prints; otherwise every line would appear once per process.
    first = distributed.get_rank() == 0
    try:
        study = load_study(arguments.source)
        for experiment in study.experiments:
            with study.naming(experiment):
                prepared = prepare(experiment)
            outcome = run_together(prepared, arguments.runs, LineObserver(Terminal(), quiet=not first))
            if outcome is not None:
                Terminal().print(f"{outcome.folder}: {outcome.row['test']}")
    except FedveilError as error:
        raise SystemExit(f"fedveil: {error}") from None
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

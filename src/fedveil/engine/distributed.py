"""Runs in processes that ``torchrun`` started, on one machine or several.

    torchrun --nproc-per-node 4 -m fedveil.torchrun PRESET_OR_TOML --runs runs

Every process loads the same experiment; process 0 runs it and keeps the run folder, the others train shares of every
round (:mod:`fedveil.local.distributed`). docs/how-to/several-processes.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as distributed

from fedveil.engine.observer import Observer
from fedveil.engine.run import Outcome, run
from fedveil.engine.setup import Prepared
from fedveil.engine.workers import serve_shares, split_trainer
from fedveil.errors import ConfigError
from fedveil.local.distributed import DistributedTrainer


def run_together(prepared: Prepared, parent: Path, observer: Observer) -> Outcome | None:
    """Run a prepared experiment over the processes of the default group; the outcome, or None but in process 0.

    Raises:
        ConfigError: an experiment that would start processes of its own, or whose training cannot be dealt out (DP-SGD
            in silos).
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
        spread.stop(setting.cohort)

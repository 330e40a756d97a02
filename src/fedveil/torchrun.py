"""The command of a run over several processes: ``torchrun --nproc-per-node 4 -m fedveil.torchrun PRESET_OR_TOML``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as distributed

from fedveil.console import LineObserver, Terminal
from fedveil.engine.distributed import run_together
from fedveil.engine.experiments.study import load_study
from fedveil.engine.setup import prepare
from fedveil.errors import FedveilError


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
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    first = distributed.get_rank() == 0
    try:
        for experiment in load_study(arguments.source).experiments:
            outcome = run_together(
                prepare(experiment), arguments.runs, LineObserver(Terminal(), quiet=not first)
            )
            if outcome is not None:
                Terminal().print(f"{outcome.folder}: {outcome.row['test']}")
    except FedveilError as error:
        raise SystemExit(f"fedveil: {error}") from None
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

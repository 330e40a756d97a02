"""A round of client-level private federated averaging: CPU seconds and memory, against pfl 0.6.

Clients of 50 records, a cohort of 50, 5 epochs in batches of 10, one thread, noise on the sum. ``FEDVEIL_PFL_PYTHON``
names an interpreter with ``pip install pfl==0.6.0 torch``. "Convolutions and poolings alone" is the time of one
client's kernels for a round's batches.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, at_most, cpu_seconds
from benchmarks.pfl_alone.networks import network
from fedveil.data.records import Affine, Records
from fedveil.methods.dp_fed_ls import dp_fed_ls
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.rounds.round_context import RoundContext, TrainingSetup
from fedveil.run.simulation import play_round
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort
from fedveil.training.trainer_choice import choose_trainer

RECORDS, COHORT, EPOCHS, BATCH = 50, 50, 5, 10
TARGETS = {"linear": 10.0, "cnn": 2.0}


def rows(quick: bool) -> Iterator[Row]:
    """Compare rounds of a logistic regression and of an 18k-parameter CNN; then 100,000 clients, memory."""
    rounds = 4 if quick else 12
    for model, target in TARGETS.items():
        ours, peer = _ours(model, 1000, rounds), _pfl(model, 1000, rounds)
        seconds = statistics.median(ours["rounds"][1:])
        theirs = None if peer is None else statistics.median(peer["rounds"][1:])
        ratio = None if theirs is None else theirs / seconds
        yield Row(
            case=f"{model}, {ours['parameters']:,} parameters, 1,000 clients: a round",
            unit="CPU s",
            ours=seconds,
            peer=theirs,
            ratio=ratio,
            target=target,
            met=None if ratio is None else ratio >= target,
        )
        if model == "cnn":
            floor = ours["kernels"]
            yield Row(
                case="cnn: convolutions and poolings alone",
                unit="CPU s",
                ours=floor,
                peer=theirs,
                ratio=None if theirs is None else theirs / floor,
            )
        if model == "linear":
            yield at_most("linear: the first round", "CPU s", ours["rounds"][0], 2.0)
    few, many = (_ours("linear", clients, 3) for clients in (1000, 10_000 if quick else 100_000))
    growth = (many["peak"] - many["table"]) - (few["peak"] - few["table"])
    yield at_most(
        f"linear, {many['clients']:,} clients: more memory than 1,000, records aside", "MB", growth / 1e6, 100
    )


def smallest() -> Iterator[Row]:
    """Play two rounds of three clients in this process, and the kernels of one batch."""
    found = played("linear", 3, 2, cohort=2)
    yield Row(case="linear, 3 clients: a round", unit="CPU s", ours=found["rounds"][-1])
    yield Row(case="cnn: a batch's convolutions and poolings", unit="CPU s", ours=kernel_seconds(1))


def _ours(model: str, clients: int, rounds: int) -> dict[str, Any]:
    """Run in a fresh process, like the peer."""
    return _run([sys.executable, "-m", "benchmarks.simulation", model, str(clients), str(rounds)])


def _pfl(model: str, clients: int, rounds: int) -> dict[str, Any] | None:
    python = os.environ.get("FEDVEIL_PFL_PYTHON")
    if python is None:
        return None
    return _run(
        [python, str(Path(__file__).parent / "pfl_alone" / "peer.py"), model, str(clients), str(rounds)]
    )


def _run(command: list[str]) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def kernel_seconds(repeats: int = 200) -> float:
    """Return the median CPU seconds of the convolutions and poolings of one batch of the CNN, forward and backward.

    Kernels with channels innermost, the fastest layout; no loss, no autograd, no step; the first convolution's slope
    with respect to the images is not computed, as in training.
    """
    convolution, pooling = torch.ops.aten.convolution, torch.ops.aten.max_pool2d_with_indices
    images = torch.randn(BATCH, 1, 28, 28)
    kernels = [
        layer.weight.detach().contiguous(memory_format=torch.channels_last)
        for layer in network("cnn")
        if isinstance(layer, torch.nn.Conv2d)
    ]
    window, none, one = [2, 2], [0, 0], [1, 1]

    def batch() -> None:
        passed, value = [], images
        for kernel in kernels:
            made = convolution(value, kernel, kernel[:, 0, 0, 0], one, none, one, False, none, 1)
            pooled, places = pooling(made, window, window, none, one, False)
            passed.append((value, made, places))
            value = pooled
        slope = value
        for number, kernel in reversed(list(enumerate(kernels))):
            value, made, places = passed[number]
            slope = torch.ops.aten.max_pool2d_with_indices_backward(
                slope, made, window, window, none, one, False, places
            )
            slope = torch.ops.aten.convolution_backward(
                slope, value, kernel, [len(kernel)], one, none, one, False, none, 1, [number > 0, True, True]
            )[0]

    return cpu_seconds(batch, repeats=repeats)[0]


def played(name: str, clients: int, rounds: int, cohort: int = COHORT) -> dict[str, Any]:
    """Play rounds of DP-Fed-LS; return their CPU seconds, and memory."""
    random = np.random.default_rng(0)
    user = np.repeat(np.arange(clients, dtype=np.int32), RECORDS)
    records = Records(
        features=random.integers(0, 256, (clients * RECORDS, 1, 28, 28), dtype=np.uint8),
        targets=random.integers(0, 10, clients * RECORDS),
        silo=np.zeros_like(user),
        user=user,
    )
    groups = records.by_silo_user()
    held = Cohort.from_records(
        records, groups=groups, n_silos=1, scale=Affine(factor=1 / 255), device=torch.device("cpu")
    )
    task = Task(model=network(name), loss=load_loss("cross_entropy"))
    local = LocalSgd(learning_rate=0.1, epochs=EPOCHS, batch_size=BATCH)
    method = dp_fed_ls(
        local=local,
        n_users=clients,
        clip=0.3,
        noise_multiplier=1.0,
        smoothing=1.0,
        client_sampling="uniform",
        client_sampling_rate=cohort / clients,
    )
    setting = TrainingSetup(
        method=method,
        trainer=choose_trainer(task, local, cohort=held),
        cohort=held,
        weights=method.weights.for_groups(groups, 1, clients),
        n_users=clients,
        shapes=tuple(tuple(shape) for shape in task.layout.shapes),
    )
    model, privacy = task.initial(), PrivacyRandomness.system()
    seconds = []
    for number in range(1, rounds + 1):
        before = time.process_time()
        turn = RoundContext(
            setting=setting,
            model=model,
            round_number=number,
            experiment=ExperimentRandomness(0),
            privacy=privacy,
        )
        model, *_ = play_round(turn)
        seconds.append(time.process_time() - before)
    table = records.features.nbytes + records.targets.nbytes + 2 * user.nbytes
    return {
        "rounds": seconds,
        "steps": cohort * local.count(RECORDS),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "table": table,
        "clients": clients,
        "parameters": task.dimension,
    }


def main() -> None:
    """Print what the rounds that are asked for cost, as JSON."""
    torch.set_num_threads(1)
    found = played(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    kernels = found["steps"] * kernel_seconds() if sys.argv[1] == "cnn" else None
    print(json.dumps(found | {"kernels": kernels}))


if __name__ == "__main__":
    main()

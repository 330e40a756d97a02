"""Small seeded runs, one for each way in which a round becomes a sum, and what a pin keeps of them.

A pin keeps the model's bytes, the list of all messages, and the whole numbers of the rows. Local training in float32
rounds as the processor likes, so the models of ordinary runs are compared only where they were recorded on the same
kind of processor (:func:`fingerprint`). :class:`WholeTrainer` gives updates whose bounds and sums are exact in any
order, on any processor: with it all of a case is compared everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

from fedveil.crypto.key_agreement import RUN_BYTES, RoundId, derive
from fedveil.run.config.experiment import merge, parse
from fedveil.run.loop import NullObserver
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import run
from fedveil.training.trainer import Progress, Sums, TrainJob
from tests.runs import json_lines

BASE: dict[str, Any] = {
    "name": "pin",
    "seed": 7,
    "rounds": 3,
    "evaluate_every": 3,
    "data": {"name": "digits", "n_users": 20, "n_silos": 3},
    "model": {"name": "linear"},
    "local": {"learning_rate": 0.1, "epochs": 1, "batch_size": 16},
    "trainer": {"name": "loop", "device": "cpu"},
    "method": {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 2.0},
    "privacy": {"insecure_seed": 3},
}
FIVE = {"name": "digits", "n_users": 20, "n_silos": 5}
CLIENTS = {"name": "digits", "n_users": 8, "n_silos": 8, "allocation": {"law": "clients"}}


def method(name: str, **parameters: Any) -> dict[str, Any]:
    """Return the section of a method, in place of the base's."""
    return {"name": name, "clip": 0.5, "noise_multiplier": 2.0} | parameters


def of_clients(name: str, **parameters: Any) -> dict[str, Any]:
    """Return the sections of a method over clients."""
    return {"data": CLIENTS, "method": method(name, **parameters)}


def weighted(protection: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """Return the sections of a run under private weighting."""
    return {"data": EVEN, "method": method("uldp-avg-w", **parameters), "protection": protection}


MASKED = {"name": "secure-aggregation"}
RETRY = MASKED | {"on_dropout": "retry", "dropout_rate": 0.2}
WEIGHTED = {"name": "private-weighting", "n_max": 150}
ONE_ROUND = {"rounds": 1, "evaluate_every": 1}
EVEN = {"name": "digits", "n_users": 20, "n_silos": 3, "allocation": {"law": "uniform"}}
RLWE = WEIGHTED | {"cipher": "rlwe"}
PAILLIER = WEIGHTED | {"cipher": "paillier", "key_bits": 2048}
PARTIAL = {"name": "partial-encryption", "ratio": 0.25}

CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"method": {"name": "fedavg"}},
    "naive": {"method": method("uldp-naive")},
    "group": {"method": method("uldp-group", group_size=2)},
    "sgd": {"method": method("uldp-sgd"), "local": None},
    "avg": {},
    "avg-w": {"method": method("uldp-avg-w")},
    "avg-w sampled": {"method": method("uldp-avg-w", user_sampling_rate=0.5)},
    "avg without noise": {"method": method("uldp-avg", noise_multiplier=0.0)},
    "shares as bytes": {"channel": {"name": "lrsuq"}},
    "shares as bytes of a lattice": {"channel": {"name": "lrsuq", "lattice": "A2"}},
    "cepam-gaussian": of_clients("cepam-gaussian"),
    "cepam-laplace": of_clients("cepam-laplace") | ONE_ROUND,
    "cepam-gaussian by norm": of_clients("cepam-gaussian", clip=None, scale="norm"),
    "fl-sdq": of_clients("fl-sdq", noise_multiplier=None, step=0.5),
    "ldp-gaussian": of_clients("fl-gaussian"),
    "dp-fed": of_clients("dp-fed", client_sampling="uniform", client_sampling_rate=0.5),
    "dp-fed poisson actual": of_clients("dp-fed", client_sampling_rate=0.5, denominator="actual"),
    "dp-fed-ls": of_clients("dp-fed-ls", client_sampling_rate=0.5, smoothing=1.0),
    "dp-fed as bytes": of_clients("dp-fed", client_sampling="uniform", client_sampling_rate=0.5)
    | {"channel": {"name": "lrsuq"}},
    "avg rounded": {"channel": {"name": "additive", "word_bits": 16}},
    "avg-w sampled rounded": {
        "method": method("uldp-avg-w", user_sampling_rate=0.5),
        "channel": {"name": "additive", "word_bits": 16},
    },
    "masked": {"protection": MASKED},
    "masked avg-w sampled": {"method": method("uldp-avg-w", user_sampling_rate=0.5), "protection": MASKED},
    "masked retry": {"protection": RETRY},
    "masked retry sampled": {"method": method("uldp-avg-w", user_sampling_rate=0.5), "protection": RETRY},
    "masked retry with fewer": {
        "data": FIVE,
        "protection": RETRY | {"max_dropouts": 2, "dropout_rate": 0.1},
    },
    "recovering": {
        "data": FIVE,
        "protection": MASKED | {"on_dropout": "recover", "max_dropouts": 2, "dropout_rate": 0.25},
    },
    "weighted rlwe": weighted(RLWE) | ONE_ROUND,
    "weighted paillier": weighted(PAILLIER) | ONE_ROUND,
    "weighted sampled": weighted(RLWE, user_sampling_rate=0.5),
    "weighted retry": weighted(RLWE | {"on_dropout": "retry", "dropout_rate": 0.2}, user_sampling_rate=0.5),
    "weighted sampled in private": weighted(RLWE | {"private_sampling": True}, user_sampling_rate=0.5)
    | ONE_ROUND,
    "partial votes": {"protection": PARTIAL},
    "partial summed votes": {"protection": PARTIAL | {"votes": "secagg", "strategy": "min", "decay": 0.5}},
    "partial noisy votes": {
        "protection": PARTIAL
        | {"partition": "noisy-votes", "votes": "secagg", "vote_noise": 2.0, "he_noise": 1.0},
        "privacy": {"accountant": "rdp"},
    },
    "partial released": {"protection": PARTIAL | {"partition": "released", "he_noise": 1.0}},
    "partial whole": {"protection": PARTIAL | {"ratio": 1.0, "he_noise": 1.0}},
    "partial clients": of_clients("dp-fed", client_sampling="uniform", client_sampling_rate=0.5)
    | {"protection": PARTIAL},
    "partial parts": of_clients("paraaegis") | {"protection": PARTIAL},
    "partial noisy parts": of_clients("paraaegis")
    | {"protection": PARTIAL | {"partition": "released", "he_clip": 0.5, "he_noise": 1.0}},
    "serial": of_clients("serial"),
}

TRAINED = (
    "fedavg",
    "naive",
    "group",
    "sgd",
    "avg-w sampled",
    "shares as bytes",
    "cepam-gaussian",
    "dp-fed",
    "dp-fed-ls",
    "masked retry sampled",
    "recovering",
    "partial parts",
)
"""Cases that are played with their own training too."""
UNEQUAL = ("group", "dp-fed-ls")
"""Cases that no trainer makes the same everywhere: DP-SGD trains by itself, a Fourier transform rounds."""
WHOLE = tuple(name for name in CASES if name not in UNEQUAL)
SLOW = (
    "weighted paillier",
    "weighted rlwe",
    "weighted sampled",
    "weighted retry",
    "weighted sampled in private",
)
TWINS = (("avg rounded", "masked"), ("avg-w sampled rounded", "masked avg-w sampled"))
"""Cases whose models are equal, because only the way to the sum differs."""


@dataclass(frozen=True)
class WholeTrainer:
    """Stands for local training: updates that are small multiples of 1/64, so squares and sums are exact everywhere.

    An update depends on its silo, its user, the round and the model it starts from.
    """

    name = "whole"

    def at_round(self, number: int) -> WholeTrainer:
        """Return itself."""
        return self

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return the bounded sums, one row a silo (or a member, where the cohort is apart)."""
        start, cohort, members, bound = job.start, job.cohort, job.members, job.bound
        moved = torch.clamp((start.double() * 64).round(), -4, 4)
        total = torch.zeros(cohort.n_silos, len(start), dtype=torch.float64)
        norms = torch.empty(len(members), dtype=torch.float64)
        for place, member in enumerate(members.tolist()):
            silo, user = int(cohort.groups.silo[member]), int(cohort.groups.user[member])
            drawn = job.randomness.numpy("pin", *job.path, silo, user).integers(-8, 9, len(start))
            row = ((torch.from_numpy(drawn) - moved) / 64).float()[None]
            norms[place] = bound.norms(row)[0]
            units = bound.quantize_(row, norms[place : place + 1], job.weights[place : place + 1])
            total[int(cohort.sum_rows[member])] += units[0].double() * bound.grid
        if progress is not None:
            progress(len(members), len(members))
        return Sums(total=total, norms=norms, nonfinite=0, steps=len(members))


def prepared(name: str, *, whole: bool) -> Prepared:
    """Return a case, ready to run, with whole updates or with its own training."""
    document = merge(BASE, CASES[name])
    for section in ("data", "method"):  # a section of a case is the whole section
        if section in CASES[name]:
            document[section] = {
                key: value for key, value in CASES[name][section].items() if value is not None
            }
    # The models were pinned while sums of pairs were divided by q |U| |S|, at the rate of 5.
    of_pairs = document["method"]["name"].startswith(("uldp-sgd", "uldp-avg"))
    divided = document["data"]["n_silos"] if of_pairs else 1
    document["server"] = {"learning_rate": 1.0 if name == "fedavg" else 5 / divided}
    found = prepare(parse(document, name))
    if whole:
        return replace(found, setting=replace(found.setting, trainer=WholeTrainer()))
    return found


def play(name: str, folder: Path, *, whole: bool) -> dict[str, Any]:
    """Run a case; return its pin."""
    with (
        mock.patch(
            "fedveil.protocols.partial_encryption.silo.secret_order", _natural
        ),  # equal votes: the first
        mock.patch(
            "fedveil.protocols.partial_encryption.plan.secret_order", _natural
        ),  # equal values: the first
        mock.patch("fedveil.protocols.weighting.silo.derive", _known),  # whom the silos draw in private ...
        mock.patch("fedveil.protocols.weighting.server.drawn_places", _first),  # ... and the server hides
    ):
        found = run(prepared(name, whole=whole), folder, NullObserver(), transcript=True).folder
    model = load_file(found / "model.safetensors")
    content = b"".join(key.encode() + model[key].numpy().tobytes() for key in sorted(model))
    rows = json_lines(found / "metrics.jsonl")[1:]
    listed = found / "transcript.jsonl"
    return {
        "model": hashlib.sha256(content).hexdigest(),
        "messages": hashlib.sha256(listed.read_bytes()).hexdigest() if listed.exists() else None,
        "rows": [[row[key] for key in _WHOLE] for row in rows],
        "failed": [
            [row[key] for key in ("round", "attempt", "silos", "may_have_released")]
            for row in _lines(found / "attempts.jsonl")
        ],
        "charges": len(_lines(found / "ledger.jsonl")),
    }


def _known(secret: bytes, purpose: str, round_id: RoundId) -> bytes:
    """Whom a silo draws follows from a key of it: recorded anew when keys were bound to the context of a round."""
    return derive(bytes(32), purpose, replace(round_id, run=bytes(RUN_BYTES)))


def _first(places: int, chosen: int) -> np.ndarray:
    return np.arange(places) < chosen


def _natural(_: bytes, length: int) -> np.ndarray:
    return np.arange(length)


_WHOLE = ("participants", "contributions", "nonfinite", "bytes_up", "attempts", "summed")


def _lines(path: Path) -> list[dict[str, Any]]:
    return json_lines(path) if path.exists() else []


def fingerprint() -> str:
    """Return what float32 training depends on besides the code: the processor, the libraries, the mode of oneMKL."""
    models = [line for line in _cpu_lines() if line.startswith(("model name", "flags"))]
    parts = (
        platform.machine(),
        *sorted(set(models)),
        torch.backends.cpu.get_cpu_capability(),
        *(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy")),
        f"{torch.get_num_threads()} threads",
        f"MKL_CBWR {os.environ.get('MKL_CBWR')}",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else [platform.processor()]

"""Small experiments and releases that play, together, every documented value of every key."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

from fedveil.run.config.experiment import Experiment, merge, parse, parse_assignment
from fedveil.run.config.release_document import kind_in
from fedveil.validation import validate_document
from tests.documented_values import TEXT, Value, played

BASE: Final[dict[str, Any]] = {
    "name": "values",
    "rounds": 1,
    "data": {"name": "digits", "n_users": 3, "n_silos": 2},
    "model": {"name": "linear"},
    "local": {"learning_rate": 0.1, "batch_size": 512},
    "trainer": {"name": "loop"},
    "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 5.0},
}
RELEASE: Final[dict[str, Any]] = {
    "name": "values",
    "data": {
        "table": {
            "schema_file": "label.toml",
            "files": ["north.csv", "south.csv", "west.csv"],
        },
    },
    "privacy": {"epsilon": 300.0},
}
CLIENTS: Final = {"n_silos": None, "allocation": {"law": "clients"}}
SUMS = {
    "newton": {"record_length": 1.5, "residual": 0.5, "ridge": 2.0},
    "boosted-trees": {"residual": 0.5, "rate": 1.0},
}
"""Methods of sums of record statistics, with their own keys."""
NOISY: Final = {"clip": 1.0, "noise_multiplier": 5.0}
FOUND: Final = {"clip": 1.0, "noise_multiplier": "calibrated"}
PUBLIC_MODEL: Final = save({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)})
"""The file public.safetensors of the cases."""
ELSEWHERE: Final = {
    ("DeclaredMain.main_silos", "text"): "tests/test_main_silos.py",
    ("model.loss_sha256", TEXT): "tests/test_in_memory_objects.py",  # which only the program writes
    ("privacy.allow_large_delta", "false"): "tests/test_large_delta.py",  # as a document without the key
}
"""Values that no experiment here has, and where they are tested."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One experiment or release.

    Attributes:
        name: of the case.
        changes: laid over :data:`BASE`, or :data:`RELEASE`; a method or data of another name take the place of the
            base's.
        refused: what the refusal of a documented value says that does not go with the others; "" plays to the end.
        only: the values that a refused case stands for.
        slow: whether it takes seconds.
        alone: whether it needs a process of its own.
    """

    name: str
    changes: dict[str, Any]
    refused: str = ""
    only: tuple[Value, ...] = ()
    slow: bool = False
    alone: bool = False

    @property
    def release(self) -> dict[str, Any] | None:
        """The document of a release; None for an experiment."""
        return None if kind_in(self.changes) is None else merge(RELEASE, self.changes)

    @property
    def experiment(self) -> Experiment:
        """The experiment, its paths relative to the folder of the made-up files."""
        base = dict(BASE)
        for table, key in (("method", "name"), ("data", "name"), ("data", "table")):
            if key in (self.changes.get(table) or {}):
                base[table] = {}
        return parse(merge(base, self.changes), self.name)

    @property
    def values(self) -> set[Value]:
        """The documented values that it plays."""
        if self.refused:
            return set(self.only)
        kind = kind_in(self.changes)
        return played(self.experiment if kind is None else validate_document(kind, self.release, self.name))


@cache
def cases() -> tuple[Case, ...]:
    """Return all cases."""
    there = "" if torch.cuda.is_available() else "no CUDA device"
    cuda = Case(
        name="on CUDA",
        changes={"trainer": {"device": "cuda"}},
        refused=there,
        only=(("trainer.device", "cuda"),),
    )
    return (*_written(), cuda, *_of_methods())


def _written() -> list[Case]:
    """Return the cases of documented_cases.toml."""
    written = tomllib.loads(Path(__file__).with_name("documented_cases.toml").read_text(encoding="utf-8"))
    found = []
    for name, changes in written.items():
        slow, alone = changes.pop("slow", False), changes.pop("alone", False)
        refused = changes.pop("refused", "")
        only = tuple((key, value) for key, value in changes.pop("only", ()))
        for key in changes.pop("without", ()):
            changes = _without(changes, parse_assignment(f"{key}="))
        found.append(Case(name=name, changes=changes, refused=refused, only=only, slow=slow, alone=alone))
    return found


def _without(changes: dict[str, Any], gone: dict[str, Any]) -> dict[str, Any]:
    """Return changes that also take a key away: None stands for that."""
    for key, value in gone.items():
        inner = changes.get(key)
        changes[key] = (
            _without(inner if isinstance(inner, dict) else {}, value) if isinstance(value, dict) else None
        )
    return changes


def _of_methods() -> list[Case]:
    """Every method with its numbers, then with what each key of its own may be besides."""
    pairs, clients = ("uldp-avg", "uldp-avg-w", "uldp-sgd", "uldp-sgd-w"), {"data": CLIENTS}
    cepam = (
        "cepam-gaussian",
        "cepam-laplace",
        "fl-gaussian",
        "fl-laplace",
        "fl-gaussian-sdq",
        "fl-laplace-sdq",
    )
    averaged = ("dp-fedavg", "serial", "varying-dp", "stevens", "paraaegis")
    found: list[Case] = []

    def add(
        name: str, label: str = "", refused: str = "", only: tuple[str, str] | None = None, **changes: Any
    ) -> None:
        own = ((f"method[{name}].{only[0]}", only[1]),) if only else ()
        none_local = name.startswith("uldp-sgd") or name in SUMS
        around: dict[str, Any] = {"local": None} if none_local else {}
        method = {"name": name} | changes.pop("method", {})
        found.append(
            Case(
                name=f"{name} {label}".strip(),
                changes=around | {"method": method} | changes,
                refused=refused,
                only=own,
            )
        )

    def noisy(name: str, of_data: dict[str, Any], **required: Any) -> None:
        """Add the noise of a method: a number, none, and one that a word stands for."""
        numbers, target = NOISY | required, {"privacy": {"epsilon": 3.0}}
        add(name, method=numbers, **of_data)
        none = numbers | {"noise_multiplier": 0}
        if name in ("cepam-gaussian", "cepam-laplace"):
            why, only = "leaves it nothing to compress with", ("noise_multiplier", "0")
            add(name, "without noise", why, only, method=none, **of_data)
        else:
            add(name, "without noise", method=none, **of_data)
        add(name, "calibrated", method=numbers | {"noise_multiplier": "calibrated"}, **of_data, **target)
        closed = numbers | {"noise_multiplier": "closed-form"}
        if name in averaged:
            drawn = {} if name in ("varying-dp", "stevens") else {"client_sampling_rate": 0.5}
            add(
                name,
                "closed form",
                method=closed | drawn | {"calibration": "as-published"},
                **of_data,
                **target,
            )
        elif name.startswith("dp-fed"):
            many = {
                "data": CLIENTS | {"n_users": 60},
                "privacy": {"epsilon": 6.0, "delta": 1e-3},
                "rounds": 20,
            }
            add(
                name, "closed form", method=closed | {"client_sampling_rate": 0.05}, evaluate_every=20, **many
            )
        else:
            why, only = "closed forms are those of", ("noise_multiplier", "closed-form")
            add(name, "closed form", why, only, method=closed, **of_data, **target)

    for name in pairs:
        noisy(name, {})
        weighted = {"power": 0} if name.endswith("-w") else {}
        adaptive = NOISY | {
            "clip": {"start": 0.5, "quantile": 0.4, "share": 1.0, "least": 0.01, "most": 10.0}
        }
        add(name, "moving clip", method={**adaptive, "user_sampling_rate": 0.5, **weighted})
        rule = FOUND | {"clip": {"most": 10.0}} | ({"power": 64} if weighted else {})
        add(name, "rate by rule", method=rule, privacy={"epsilon": 3.0}, server={"learning_rate": "by-rule"})
        if name.startswith("uldp-sgd"):
            add(
                name, "a clip without an end", "method: uldp-sgd: gradients grow", method=NOISY | {"clip": {}}
            )
        stream = NOISY | {"correlated": {"period": 2, "bands": 2}} | ({"power": "main"} if weighted else {})
        add(name, "correlated", method=stream, rounds=3)
        if weighted:
            add(name, "some power", method={**NOISY, "power": 2.5})
            why, only = "a file of main silos is shared between institutions", ("power", "a table")
            add(name, "file of main silos", why, only, method={**NOISY, "power": {"main_silos": "0" * 64}})
            add(name, "file that a simulation writes", method={**NOISY, "power": "linked"})
    for bands, period in ((0, 2), (1, 1)):
        stream = {"correlated": {"period": period, "bands": bands}}
        add("uldp-avg", f"{bands} bands of {period}", method={**NOISY, **stream}, rounds=2)
    for name, keys in SUMS.items():
        own_model = "boosted-trees" if name == "boosted-trees" else "whitened-linear"
        around = {"model": {"name": own_model}, "rounds": 2}
        numbers, target = {"noise_multiplier": 2.0}, {"privacy": {"epsilon": 3.0}}
        add(name, method=numbers | keys, **around)
        add(name, "without noise", method={"noise_multiplier": 0}, **around)
        add(name, "calibrated", method={"noise_multiplier": "calibrated", "power": 0}, **around, **target)
        why, only = "closed forms are those of", ("noise_multiplier", "closed-form")
        add(name, "closed form", why, only, method={"noise_multiplier": "closed-form"}, **around, **target)
        for power in (64, 2.5, "main", "linked"):
            add(name, f"power {power}", method=numbers | {"power": power}, **around)
        why, only = "a file of main silos is shared between institutions", ("power", "a table")
        add(
            name,
            "file of main silos",
            why,
            only,
            method=numbers | {"power": {"main_silos": "0" * 64}},
            **around,
        )
    noisy("uldp-naive", {})
    noisy("uldp-group", {}, group_size=2)
    for size in (1, "median", "max"):
        add("uldp-group", f"groups of {size}", method={**NOISY, "group_size": size}, data={"n_users": 400})
    for name in ("dp-fed", "dp-fed-ls"):
        more = {"smoothing": 0.5} if name == "dp-fed-ls" else {}
        noisy(name, clients, **more)
        uniform = {"client_sampling": "uniform", "client_sampling_rate": 0.5, "denominator": "actual"}
        flat = {"smoothing": 0} if more else {}
        add(
            name,
            "uniform",
            method={**NOISY, **flat, "client_sampling_rate": 0.5, "client_sampling": "uniform"},
            **clients,
        )
        add(
            name,
            "actual number",
            method={**NOISY, **more, **uniform, "client_sampling": "poisson"},
            **clients,
        )
    for name in cepam:
        more = {"step": 0.5} if name.endswith("sdq") else {}
        noisy(name, clients, **more)
        add(name, "by norm", method={"noise_multiplier": 5.0, "scale": "norm", **more}, **clients)
        add(name, "weighted", method={**NOISY, **more, "weights": [2.0, 1.0, 3.0]}, **clients)
    add("fl-gaussian", "rounded", method={**NOISY, "step": 0.5}, **clients)
    for lattice in ("Z1", "Z2", "Z3", "A2", "D3", "D4", "E8"):
        add("cepam-gaussian", lattice, method={**NOISY, "lattice": lattice}, **clients)
        add("uldp-avg", f"lrsuq {lattice}", method=NOISY, channel={"name": "lrsuq", "lattice": lattice})
    add("uldp-avg", "lrsuq", method=NOISY, channel={"name": "lrsuq"})
    add("fl-sdq", method={"clip": 1.0, "step": 0.5}, **clients)
    add("fl-sdq", "by norm", method={"scale": "norm", "step": 0.5}, **clients)
    add("fl-sdq", "weighted", method={"clip": 1.0, "step": 0.5, "weights": [2.0, 1.0, 3.0]}, **clients)
    add("fl", "weighted", method={"weights": [2.0, 1.0, 3.0]}, **clients)
    for name in ("fl", "fedavg", "ckks-fedavg"):
        add(name, **(clients if name != "fedavg" else {}))
    for name in averaged:
        noisy(name, clients)
    add("varying-dp", "of steady noise", method={**NOISY, "noise_decay": 1.0}, rounds=2, **clients)
    return found

"""What every experiment of every preset states, without its data: ``python -m tests.pins.presets`` records it anew.

A preset's data may be absent here, so each experiment is composed for a made-up population of its public numbers: one
record of every user, in a silo of a round robin. Noise that a preset asks for by a word is taken as 1, a group size as
what the made-up records give; all else is as in a run. Where the data set brings the silos, there are ten.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedveil
from fedveil.data.records import Population, Records
from fedveil.methods.derive import derive
from fedveil.run.config.composition import Composition
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.study import Selection, load_study
from tests.pins.guarantees import ROLES

FILE = Path(__file__).with_name("presets.json")
PRESETS = sorted(path.stem for path in (Path(fedveil.__file__).parent / "presets").glob("*.toml"))
_DIMENSION = 1000


def made_up(experiment: Experiment) -> Population:
    """Return a population of an experiment's public numbers, with a record of every user."""
    data = experiment.data
    assert data.n_users is not None
    clients = data.allocation is not None and data.allocation.law == "clients"
    n_silos = data.n_silos or (data.n_users if clients else 10)
    user = np.arange(data.n_users, dtype=np.int32)
    records = Records(
        features=np.zeros((data.n_users, 1), np.float32),
        targets=np.zeros(data.n_users, np.int64),
        silo=(user % n_silos).astype(np.int32),
        user=user,
    )
    return Population(
        name="made up",
        train=records,
        test_features=records.features[:0],
        test_targets=records.targets[:0],
        n_users=data.n_users,
        silo_names=tuple(str(number) for number in range(n_silos)),
        task="classification",
        n_classes=2,
    )


def at_some_rate(experiment: Experiment) -> Experiment:
    """Return the experiment with a number for a local rate that a word asks for, which no statement depends on."""
    if experiment.local is None or experiment.local.has_rate:
        return experiment
    return experiment.model_copy(update={"local": replace(experiment.local, learning_rate=0.1)})


def stated(preset: str) -> list[dict[str, Any]]:
    """Return what a preset states of a round, and of how many: every statement with the experiments that make it."""
    names, found = {role: name for name, role in ROLES.items()}, list[dict[str, Any]]()
    for experiment in map(at_some_rate, load_study(preset, Selection()).experiments):
        composition = Composition(experiment=experiment, population=made_up(experiment))
        method = composition.method()
        public = composition.public_facts(method, composition.population.train, _DIMENSION)
        guarantee = derive(method, public)
        facts = {
            "rounds": experiment.rounds,
            "delta": experiment.privacy.delta,
            "adjacency": guarantee.adjacency.value,
            "unit": guarantee.unit,
            "grid_loss": guarantee.grid_loss,
            "noise_decay": guarantee.noise_decay,
            "uncovered": len(guarantee.uncovered) + len(composition.uncovered_choices(method)),
            "reader": guarantee.event.to_json(),
        } | {names[view.role]: view.event.to_json() for view in guarantee.views}
        alike = [each for each in found if {**each, "experiments": None} == {**facts, "experiments": None}]
        if not alike:
            found.append({"experiments": [], **facts})
        (alike or found[-1:])[0]["experiments"].append(experiment.name)
    return found


def read() -> dict[str, list[dict[str, Any]]]:
    """Return what was recorded, by preset."""
    recorded: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
    return recorded


def write() -> None:
    """Write what all presets state, one line a statement, so that a change is read as one."""
    presets = [
        f"{json.dumps(preset)}: [\n"
        + ",\n".join(json.dumps(one, sort_keys=True) for one in stated(preset))
        + "\n]"
        for preset in PRESETS
    ]
    FILE.write_text("{\n" + ",\n".join(presets) + "\n}\n")


if __name__ == "__main__":
    write()

"""A made-up federation to try things on: four hospitals in the shape of UCI Heart Disease, with patients in common.

Every step is one of the ceremony (:mod:`~.founder`, :mod:`~.joining`). One process plays all of them on this host
without passphrases and could have kept every key. Institutions take their steps apart.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.founder import admit, create_federation, seal
from fedveil.federation.enrollment.joining import (
    DRAFT,
    DraftedPolicy,
    accept,
    join_as_coordinator,
    join_as_silo,
)
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.membership import MEMBERSHIP

# --- a federation on one host ---


@dataclass(frozen=True, kw_only=True)
class Provisioned:
    """Folders of all parties of a federation on one host.

    Attributes:
        authority: the founder's.
        coordinator: the coordinator's.
        silos: one for each silo.
    """

    authority: Path
    coordinator: Path
    silos: tuple[Path, ...]


def provision(
    folder: Path,
    silos: tuple[str, ...],
    *,
    schema: Path,
    host: str = "127.0.0.1",
    port: int = 9443,
    policy: DraftedPolicy = DRAFT,
) -> Provisioned:
    """Create a federation and have all its parties join, here.

    Args:
        folder: made here; must not exist.
        silos: their names.
        schema: the public schema of all silos' tables.
        host: the coordinator's host name or address, as the silos reach it.
        port: its port.
        policy: what the drafted policies allow.

    Raises:
        ConfigError: the folder exists, a name that cannot be, or twice the same.
        DataError: the schema is none.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; a federation is never overwritten")
    if len(set(silos)) != len(silos) or not silos:
        raise ConfigError("silos: give each silo one name of its own")
    places = Provisioned(
        authority=folder / "authority",
        coordinator=folder / "coordinator",
        silos=tuple(folder / "silos" / name for name in silos),
    )
    create_federation(
        places.authority, name="demonstration", schema=schema, host=host, port=port, passphrase=None
    )
    charter = places.authority / "charter.toml"
    request = join_as_coordinator(places.coordinator, charter, passphrase=None)
    requests = [(places.coordinator / "coordinator.request", request)]
    for name, path in zip(silos, places.silos, strict=True):
        request = join_as_silo(path, charter, name=name, passphrase=None, policy=policy)
        requests.append((path / f"{name}.request", request))
    for file, request in requests:
        admit(places.authority, file, request.fingerprint)
    sealed = seal(places.authority, None)
    for path in (places.coordinator, *places.silos):
        accept(path, places.authority / "sealed" / MEMBERSHIP, sealed.fingerprint, None)
    return places


# --- four hospitals ---

HOSPITALS: Final = {"cleveland": 199, "hungarian": 172, "switzerland": 30, "va": 85}
_PATIENTS: Final = 50
_TEST_RECORDS: Final = 254

_SCHEMA: Final = f"""\
# Public: bounds and categories come from what is known of people, not from records.
n_users = {_PATIENTS}
user = "patient"

[target]
kind = "label"
column = "disease"
classes = ["no", "yes"]

[features]
age = {{ kind = "number", lower = 0, upper = 120 }}
sex = {{ kind = "category", categories = ["female", "male"] }}
pain = {{ kind = "category", categories = ["typical", "atypical", "other", "none"] }}
pressure = {{ kind = "number", lower = 60, upper = 240 }}
cholesterol = {{ kind = "number", lower = 80, upper = 600, missing = "middle" }}
heart_rate = {{ kind = "number", lower = 40, upper = 220 }}
"""

_EXPERIMENT: Final = """\
name = "demonstration"
rounds = {rounds}

[data.table]
schema_file = "schema.toml"
files = [{files}]              # of a simulation; in a federation every silo has its own
test_file = "test.csv"

[model]
name = "linear"
loss = "binary_cross_entropy"

[local]
learning_rate = 0.05
epochs = 5

[method]
name = "uldp-avg"
clip = 1.0
noise_multiplier = 5.0

[server]
learning_rate = 10.0

[protection]
name = "secure-aggregation"
"""


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """Folders and experiment of a demonstration.

    Attributes:
        provisioned: the folders of the parties.
        experiment: the experiment to run.
    """

    provisioned: Provisioned
    experiment: Path


def write_demonstration(
    folder: Path,
    *,
    rounds: int = 10,
    host: str = "127.0.0.1",
    port: int = 9443,
    hospitals: Mapping[str, int] = HOSPITALS,
) -> Demonstration:
    """Make up tables, create a federation over them, and give each silo its table.

    Args:
        folder: made here; must not exist.
        rounds: number of rounds of the experiment.
        host: host name of the coordinator.
        port: port of the coordinator; silos have none.
        hospitals: names, and how many records each has.

    Raises:
        ConfigError: there is such a folder, or it cannot be made.
    """
    data = folder / "data"
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; name a folder that is to be made")
    try:
        data.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None
    randomness = np.random.default_rng(1988)
    for hospital, records in hospitals.items():
        _write_table(data / f"{hospital}.csv", randomness, records)
    _write_table(data / "test.csv", randomness, _TEST_RECORDS)
    (data / "schema.toml").write_text(_SCHEMA, encoding="utf-8")
    files = ", ".join(f'"{hospital}.csv"' for hospital in hospitals)
    experiment = data / "experiment.toml"
    experiment.write_text(_EXPERIMENT.format(rounds=rounds, files=files), encoding="utf-8")
    provisioned = provision(
        folder / "federation",
        tuple(hospitals),
        schema=data / "schema.toml",
        host=host,
        port=port,
        policy=DraftedPolicy(epsilon=20.0),
    )
    for path in provisioned.silos:
        settings = SiloFolder(path).settings
        table = Path("..", "..", "..", "data", f"{settings.name}.csv")
        settings.model_copy(update={"table": table}).write(path / "silo.toml")
    return Demonstration(provisioned=provisioned, experiment=experiment)


def _write_table(path: Path, randomness: np.random.Generator, records: int) -> None:
    """Write one made-up table; a patient's number is the same person in every hospital."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["patient", "age", "sex", "pain", "pressure", "cholesterol", "heart_rate", "disease"])
        for _ in range(records):
            age, male, pain = randomness.normal(54, 9), randomness.random() < 0.7, int(randomness.integers(4))
            pressure, cholesterol = randomness.normal(131, 17), randomness.normal(245, 50)
            rate = randomness.normal(150, 22)
            risk = 0.06 * (age - 54) + (male - 0.5) + (pain == 3) * 2.0 - 0.04 * (rate - 150) - 0.5
            sick = randomness.random() < 1 / (1 + math.exp(-risk))
            table.writerow(
                [
                    int(randomness.integers(_PATIENTS)),
                    round(age),
                    "male" if male else "female",
                    ("typical", "atypical", "other", "none")[pain],
                    round(pressure),
                    "" if randomness.random() < 0.05 else round(cholesterol),
                    round(rate),
                    "yes" if sick else "no",
                ]
            )

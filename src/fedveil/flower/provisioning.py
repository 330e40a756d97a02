"""Provisions a federation: keys, certificates, membership, and one folder per party to hand over."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ConfigError
from fedveil.federation.membership import Membership
from fedveil.flower.certificates import Authority, write_node_key
from fedveil.flower.folders import CoordinatorSettings, SiloSettings, schema_digest
from fedveil.population.schema import read_schema

_POLICY: Final = """\
# What this silo takes part in, whatever the coordinator proposes. Read it, and make it yours.
epsilon = {epsilon:g}          # the most that its users may spend over ALL runs, at delta
delta = {delta:g}
clip = {clip:g}             # the largest bound of one contribution
methods = ["uldp-naive", "uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w"]
models = ["linear"]
protections = ["secure-aggregation"]
trust_coordinator = false   # true counts what readers of the models learn, not what the coordinator sees
disclose_counts = false     # true tells the coordinator how many records each user has, where weights need it
"""


@dataclass(frozen=True, kw_only=True)
class Provisioned:
    """Where the folders are.

    Attributes:
        authority: the certificate authority's key: keep it offline.
        coordinator: the coordinator's folder.
        silos: one folder per silo, to hand over.
    """

    authority: Path
    coordinator: Path
    silos: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class DraftedPolicy:
    """What a silo's first policy allows: the most that its users spend, at which delta, and the largest bound."""

    epsilon: float = 1.0
    delta: float = 1e-5
    clip: float = 1.0


DRAFT: Final = DraftedPolicy()


def provision(
    folder: Path,
    silos: tuple[str, ...],
    *,
    schema: Path,
    host: str = "127.0.0.1",
    port: int = 9443,
    policy: DraftedPolicy = DRAFT,
) -> Provisioned:
    """Write a new federation.

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
    read_schema(schema)
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; a federation is never overwritten")
    keys = {name: IdentityKey.generate() for name in silos}
    key = IdentityKey.generate()
    if len(keys) != len(silos) or not silos:
        raise ConfigError("silos: give each silo one name of its own")
    membership = Membership(
        silos=silos,
        roster=tuple(keys[name].public for name in silos),
        coordinator=key.public,
        schema_digest=schema_digest(schema),
    )
    authority = Authority.create("fedveil federation")
    places = Provisioned(
        authority=folder / "authority",
        coordinator=folder / "coordinator",
        silos=tuple(folder / "silos" / name for name in silos),
    )
    for path in (places.authority, places.coordinator, *places.silos):
        path.mkdir(parents=True, mode=0o700)
    authority.save(places.authority)
    for path, identity in ((places.coordinator, key), *zip(places.silos, keys.values(), strict=True)):
        identity.save(path / "identity.key")
        (path / "membership.toml").write_text(membership.to_toml(), encoding="utf-8")
        shutil.copyfile(schema, path / "schema.toml")
        authority.publish(path)
    _coordinator(places.coordinator, authority, host, port)
    for name, path in zip(silos, places.silos, strict=True):
        public = write_node_key(path)
        (places.coordinator / "nodes" / f"{name}.pub").write_bytes(public + b"\n")
        SiloSettings(name=name, coordinator=f"{host}:{port}").write(path / "silo.toml")
        (path / "policy.toml").write_text(
            _POLICY.format(epsilon=policy.epsilon, delta=policy.delta, clip=policy.clip), encoding="utf-8"
        )
    Membership.read(places.coordinator / "membership.toml")
    return places


def _coordinator(path: Path, authority: Authority, host: str, port: int) -> None:
    (path / "nodes").mkdir()
    authority.issue(path, "server", tuple(dict.fromkeys((host, "127.0.0.1", "localhost"))))
    CoordinatorSettings(host=host, port=port).write(path / "coordinator.toml")

"""Founds a federation whose parties are all on this host, for demonstrations and tests.

Every step is one of the ceremony (:mod:`~.founder`, :mod:`~.joining`), played by one
process without passphrases: whoever runs it could have kept every key. Institutions take their steps apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.founder import admit, create_federation, seal
from fedveil.federation.enrollment.joining import (
    DRAFT,
    DraftedPolicy,
    accept,
    join_as_coordinator,
    join_as_silo,
)
from fedveil.federation.membership import MEMBERSHIP


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
    asked = [(places.coordinator / "coordinator.request", request)]
    for name, path in zip(silos, places.silos, strict=True):
        request = join_as_silo(path, charter, name=name, passphrase=None, policy=policy)
        asked.append((path / f"{name}.request", request))
    for file, request in asked:
        admit(places.authority, file, request.fingerprint)
    sealed = seal(places.authority, None)
    for path in (places.coordinator, *places.silos):
        accept(path, places.authority / "sealed" / MEMBERSHIP, sealed.fingerprint, None)
    return places

"""Joining a federation: a party generates its keys, requests admission and accepts a sealed membership.

Claim: the private halves of a party's keys are made in its own folder and leave it in no file; a membership is accepted
only if the founder whom the charter names sealed it, its fingerprint is the one that the operator typed in, and it is
the present one or has a larger serial number and all revocations of the present one. Condition: the party's folder has
the present one. ``tests/test_ceremony.py`` searches all files of all parties, and restores a founder's older folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomlkit
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.crypto.keys import IdentityKey, Passphrase, is_protected, read_private_file, same_fingerprint
from fedveil.data.schema import parse_schema
from fedveil.errors import ConfigError, IntegrityError
from fedveil.federation.enrollment.certificates import (
    certificate_key_digest,
    new_node_key,
    new_server_key,
    node_key_digest,
    node_public,
    server_key_digest,
)
from fedveil.federation.enrollment.founder import COORDINATOR, NAME, Request, client_certificate
from fedveil.federation.hosts.folders import CoordinatorSettings, SiloSettings, lock_membership
from fedveil.federation.hosts.link_folder import LinkSettings
from fedveil.federation.membership import CHARTER, MEMBERSHIP, Charter, Membership
from fedveil.files import read_content, replace_file, sync_folder, writing
from fedveil.sanitize import sanitize

IDENTITY: Final = "identity.key"
NODE: Final = "node.key"
CLIENT: Final = "client.crt"
SERVER: Final = "server.key"
COORDINATOR_SETTINGS: Final = "coordinator.toml"
NEXT: Final = ".next"

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


_SETTINGS: Final = """\
name = {name}
coordinator = {coordinator}    # as this silo reaches it; the host is the one that the charter names
table = {table}    # CSV, Parquet or Excel; a relative path begins in this folder
# format = {{ encoding = "utf-8" }}    # how the table is written, where it differs from the schema's format
{users}
# main_silos = "main_silos.csv"    # each user's main silo, for runs that name such a file by its SHA-256
# metrics = "127.0.0.1:9464"    # a loopback port for collectors of figures, beside the socket run/metrics
carrier = "https"
# socket = "/srv/fedveil-sockets/north"    # with carrier = "bridge": where NVFlare or Flower asks this silo
# group = "nvflare"    # with carrier = "bridge": users of this host who may open the socket
"""
_NO_LIST: Final = "# users: the schema names no list of users; their ids are numbers from 0"
_LIST: Final = "users = {users}    # the list of all users' ids whose SHA-256 the schema names"


@dataclass(frozen=True, kw_only=True)
class LocalFiles:
    """A silo's own files, relative to its folder.

    Attributes:
        table: its records.
        users: the list of users; None: ``users.txt`` where the schema names a list.
    """

    table: Path = Path("table.csv")
    users: Path | None = None


FILES: Final = LocalFiles()


@dataclass(frozen=True, kw_only=True)
class DraftedPolicy:
    """Limits of a silo's drafted policy: epsilon and delta of its users, and the largest clipping bound."""

    epsilon: float = 1.0
    delta: float = 1e-5
    clip: float = 1.0


DRAFT: Final = DraftedPolicy()


def join_as_silo(
    folder: Path,
    charter: Path,
    *,
    name: str,
    passphrase: bytes | None,
    policy: DraftedPolicy = DRAFT,
    holds: LocalFiles = FILES,
) -> Request:
    """Create a silo's folder with its keys, and its request for admission, ``NAME.request``.

    Args:
        folder: made here; must not exist.
        charter: the federation's, as the founder handed it out.
        name: name of the silo.
        passphrase: passphrase of the identity key's file; None: mode 0600 alone protects it.
        policy: what the drafted policy allows.
        holds: the silo's own files, for its settings.

    Raises:
        ConfigError: the folder exists, it or a file in it cannot be written, the charter is none, the name is none
            that a membership has, or a list of users is given and the schema names none. A folder that was half made
            is known to nobody: remove it, and join again.
        CryptoError: a key cannot be written.
    """
    if name == COORDINATOR:
        raise ConfigError(f"a silo cannot be named '{COORDINATOR}'")
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"--name {sanitize(name)}: at most 60 letters, digits, '.', '_' and '-', the first a letter or "
            "digit; it is "
            "the silo's name in the membership, and in the name of its request"
        )
    pinned = Charter.read(charter)
    drafted_settings = _draft_settings(pinned, name, holds)
    _settle(folder, pinned)
    _write(folder / "silo.toml", drafted_settings.encode())
    SiloSettings.read(folder / "silo.toml")
    drafted = _POLICY.format(epsilon=policy.epsilon, delta=policy.delta, clip=policy.clip)
    _write(folder / "policy.toml", drafted.encode())
    identity, (node, public) = IdentityKey.generate(), new_node_key(folder / NODE)
    identity.save(folder / IDENTITY, passphrase)
    return _ask(folder, pinned, name, (identity, node, public), None)


def rotate(folder: Path, passphrase: Passphrase | None) -> Request:
    """Generate a party's next keys beside the present ones, and the request to replace them.

    They are used once a membership that names them is accepted. Until then a silo neither moves nor leaves.

    Args:
        folder: folder of a silo or of the coordinator.
        passphrase: passphrase of the identity keys, the present one and the next.

    Raises:
        ConfigError: no membership was accepted: nobody knows the present keys yet, so nothing is there to replace; or
            the request cannot be written.
        CryptoError: a key cannot be written.
    """
    if not (folder / MEMBERSHIP).is_file():
        raise ConfigError(
            f"{folder}: no membership was accepted here, and a rotation replaces the keys of one; join in a new folder "
            "for other keys"
        )
    coordinates = (folder / COORDINATOR_SETTINGS).exists()
    tls = _server_key(folder) if coordinates else folder / NODE
    for key in (folder / IDENTITY, tls):
        _next(key).unlink(missing_ok=True)
    previous, identity = IdentityKey.load(folder / IDENTITY, passphrase), IdentityKey.generate()
    protected = is_protected(read_private_file(folder / IDENTITY))
    charter = Charter.read(folder / CHARTER)
    if coordinates:
        request = new_server_key(_next(tls))
    else:
        node, public = new_node_key(_next(tls))
    identity.save(_next(folder / IDENTITY), passphrase() if protected and passphrase else None)
    if coordinates:
        return _ask_as_coordinator(folder, charter, identity, request, previous)
    name = SiloSettings.read(folder / "silo.toml").name
    return _ask(folder, charter, name, (identity, node, public), previous)


def _draft_settings(charter: Charter, name: str, holds: LocalFiles) -> str:
    """Return ``silo.toml`` with all settings; those without a value are comments."""
    schema = parse_schema(charter.data_schema.encode(), CHARTER)
    if schema.users is None and holds.users is not None:
        raise ConfigError(
            f"--users {sanitize(str(holds.users))}: the charter's schema names no list of users: ids are numbers from 0"
        )
    users = "" if schema.users is None else str(holds.users or "users.txt")
    return _SETTINGS.format(
        name=_quoted(name),
        coordinator=_quoted(f"{charter.host}:{charter.port}"),
        table=_quoted(str(holds.table)),
        users=_LIST.format(users=_quoted(users)) if users else _NO_LIST,
    )


def _quoted(text: str) -> str:
    """Return a text as a TOML string."""
    return tomlkit.string(text).as_string()


def join_as_coordinator(
    folder: Path, charter: Path, *, passphrase: bytes | None, listen: tuple[str, int] | None = None
) -> Request:
    """Create the coordinator's folder with its keys, and its request for admission, ``coordinator.request``.

    Args:
        folder: made here; must not exist.
        charter: the federation's, as the founder handed it out.
        passphrase: passphrase of the identity key's file; None: mode 0600 alone protects it.
        listen: address and port of this host at which the link listens. They differ from the charter's where an
            address translation, a load balancer or a proxy stands before it; None: the charter's.

    Raises:
        ConfigError: the folder exists or cannot be written, or the charter is none.
    """
    pinned = Charter.read(charter)
    host, port = listen or (pinned.host, pinned.port)
    listening = LinkSettings(host=host, port=port)
    _settle(folder, pinned)
    identity = IdentityKey.generate()
    identity.save(folder / IDENTITY, passphrase)
    CoordinatorSettings().write(folder / COORDINATOR_SETTINGS)
    link = folder / CoordinatorSettings().link
    with writing(link, ConfigError):
        link.mkdir(mode=0o700)
    listening.write(link / "link.toml")
    _write(link / "ca.crt", read_content(folder / "ca.crt", ConfigError))
    return _ask_as_coordinator(folder, pinned, identity, new_server_key(link / SERVER))


def accept(folder: Path, sealed: Path, fingerprint: str, passphrase: Passphrase | None) -> Membership:
    """Accept a membership that the founder sealed, and make it the party's present one.

    A crash or a full disk at any moment leaves nothing that accepting it again does not end: the membership is written
    last, and a key is taken from its next file or, where that was done, from its own.

    Args:
        folder: the party's.
        sealed: ``membership.toml`` as the founder handed it out; beside it lies the party's certificate, ``server.crt``
            or ``silo-NAME.crt``.
        fingerprint: fingerprint of the membership, as the founder read it out.
        passphrase: passphrase of the party's identity key.

    Raises:
        ConfigError: what was typed in is no fingerprint, or a file cannot be written.
        IntegrityError: not sealed by the charter's founder, another fingerprint, an older one than the present or
            one that has lost a revocation or does not have this party's keys, or a certificate of another key.
    """
    charter, offered = Charter.read(folder / CHARTER), Membership.read(sealed)
    offered.check(charter)
    if not same_fingerprint(fingerprint, offered.fingerprint):
        raise IntegrityError(f"{sealed}: its fingerprint is another than the one that was typed in")
    with lock_membership(folder):
        _replace_membership(folder, sealed, offered, passphrase)
    return offered


def _replace_membership(
    folder: Path, sealed: Path, offered: Membership, passphrase: Passphrase | None
) -> None:
    """Take the keys and the certificate that a checked membership names for a party, and then the membership."""
    target = folder / MEMBERSHIP
    if target.exists():
        offered.check_follows(Membership.read(target), sealed)
    if (folder / COORDINATOR_SETTINGS).exists():
        keys = _keys_of_coordinator(folder, offered, passphrase)
        current, certificate, key = _server_key(folder).with_name("server.crt"), "server.crt", offered.server
    else:
        name = SiloSettings.read(folder / "silo.toml").name
        keys = _keys_of_silo(folder, offered, name, passphrase)
        current, certificate = folder / CLIENT, client_certificate(name)
        key = node_key_digest(offered.nodes[offered.number(name)])
    _check_own(sealed, None not in keys.values())
    issued = sealed.parent / certificate
    if (
        not issued.exists() and current.exists()
    ):  # the membership alone was handed out, or its acceptance was interrupted
        issued = current
    if certificate_key_digest(issued) != key:
        raise IntegrityError(f"{issued}: of another key than {sealed.name} names for this party")
    if issued != current:
        _write(current, read_content(issued, ConfigError))
    with writing(folder, ConfigError):
        for present, source in keys.items():
            if source is not None and source != present:
                os.replace(source, present)
                sync_folder(present.parent)
    _write(target, offered.to_toml().encode())


def _keys_of_silo(
    folder: Path, offered: Membership, name: str, passphrase: Passphrase | None
) -> dict[Path, Path | None]:
    """Map the path of each of a silo's keys to the file of the key that a membership names; None if absent."""
    number = offered.number(name)
    public, node = offered.roster[number], offered.nodes[number].encode()
    identity, tls = folder / IDENTITY, folder / NODE
    return {
        identity: _named(identity, lambda path: IdentityKey.load(path, passphrase).public == public),
        tls: _named(tls, lambda path: node_public(path) == node),
    }


def _keys_of_coordinator(
    folder: Path, offered: Membership, passphrase: Passphrase | None
) -> dict[Path, Path | None]:
    """Map the path of each of a coordinator's keys to the file of the key that a membership names; None if absent.

    Where another user of the host has the link's folder, its TLS key cannot be read, and is not looked for.
    """
    identity, tls = folder / IDENTITY, _server_key(folder)
    own = _named(identity, lambda path: IdentityKey.load(path, passphrase).public == offered.coordinator)
    if not os.access(tls.parent, os.R_OK | os.X_OK):
        return {identity: own}
    return {
        identity: own,
        tls: _named(tls, lambda path: server_key_digest(path) == offered.server),
    }


def _write(path: Path, content: bytes) -> None:
    """Write a file of the party atomically."""
    with writing(path, ConfigError):
        replace_file(path, content)


def _named(key: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Return the file, next or present, that holds the key in a membership; None if there is none."""
    for path in (_next(key), key):
        if path.exists() and fits(path):
            return path
    return None


def _next(key: Path) -> Path:
    """Return the path of the next key, which replaces a present one."""
    return key.with_name(key.name + NEXT)


def _server_key(folder: Path) -> Path:
    """Return the path of the link's TLS key."""
    return folder / CoordinatorSettings.read(folder / COORDINATOR_SETTINGS).link / SERVER


def _check_own(sealed: Path, is_own: bool) -> None:
    if not is_own:
        raise IntegrityError(f"{sealed}: it does not have this party's keys")


def _settle(folder: Path, pinned: Charter) -> None:
    """Create a party's folder with its public files."""
    with writing(folder, ConfigError):
        if folder.exists():
            raise ConfigError(
                f"{folder}: exists already, and keys are never overwritten; "
                "a folder without a request is incomplete and known to no other party: remove it"
            )
        folder.mkdir(parents=True, mode=0o700)
        (folder / CHARTER).write_text(pinned.to_toml(), encoding="utf-8")
        (folder / "ca.crt").write_text(pinned.authority, encoding="ascii")
        (folder / "schema.toml").write_text(pinned.data_schema, encoding="utf-8")


def _ask(
    folder: Path,
    charter: Charter,
    name: str,
    keys: tuple[IdentityKey, ec.EllipticCurvePrivateKey, bytes],
    previous: IdentityKey | None,
) -> Request:
    identity, node, public = keys
    request = Request(
        role="silo",
        name=name,
        charter=charter.digest,
        identity=identity.public,
        transport=public.decode("ascii"),
    ).with_signatures(identity, node, previous)
    request.write(folder / f"{name}.request")
    return request


def _ask_as_coordinator(
    folder: Path,
    charter: Charter,
    identity: IdentityKey,
    certificate: bytes,
    previous: IdentityKey | None = None,
) -> Request:
    request = Request(
        role="coordinator",
        name=COORDINATOR,
        charter=charter.digest,
        identity=identity.public,
        transport=certificate.decode("ascii"),
    ).with_signatures(identity, previous=previous)
    request.write(folder / "coordinator.request")
    return request

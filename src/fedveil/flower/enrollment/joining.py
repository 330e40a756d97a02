"""A party joins a federation: makes its keys where they are used, asks to be admitted, and accepts who belongs to it.

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

from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.crypto.key_files import is_protected
from fedveil.crypto.keys import IdentityKey, Passphrase, read_private_file, same_groups
from fedveil.errors import ConfigError, IntegrityError
from fedveil.federation.charter import CHARTER, Charter
from fedveil.federation.membership import Membership
from fedveil.files import read_content, replace_file, sync_folder, writing
from fedveil.flower.coordinator_host.link_folder import LinkSettings
from fedveil.flower.enrollment.certificates import new_node_key, new_server_key, node_public
from fedveil.flower.enrollment.founder import COORDINATOR, MEMBERSHIP
from fedveil.flower.enrollment.requests import NAME, Request
from fedveil.flower.folders import CoordinatorSettings, SiloSettings
from fedveil.sanitize import sanitize

IDENTITY: Final = "identity.key"
NODE: Final = "node.key"
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


@dataclass(frozen=True, kw_only=True)
class DraftedPolicy:
    """What a silo's first policy allows: the most that its users spend, at which delta, and the largest bound."""

    epsilon: float = 1.0
    delta: float = 1e-5
    clip: float = 1.0


DRAFT: Final = DraftedPolicy()


def join_as_silo(
    folder: Path, charter: Path, *, name: str, passphrase: bytes | None, policy: DraftedPolicy = DRAFT
) -> Request:
    """Make a silo's folder with its keys, and the request to be admitted, ``NAME.request``.

    Args:
        folder: made here; must not exist.
        charter: the federation's, as the founder handed it out.
        name: of the silo.
        passphrase: of the identity key's file; None: mode 0600 alone protects it.
        policy: what the drafted policy allows.

    Raises:
        ConfigError: the folder exists, it or a file in it cannot be written, the charter is none, or the name is none
            that a membership has. A folder that was half made is known to nobody: remove it, and join again.
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
    pinned = _settle(folder, charter)
    SiloSettings(name=name, coordinator=f"{pinned.host}:{pinned.port}").write(folder / "silo.toml")
    drafted = _POLICY.format(epsilon=policy.epsilon, delta=policy.delta, clip=policy.clip)
    _write(folder / "policy.toml", drafted.encode())
    identity, (node, public) = IdentityKey.generate(), new_node_key(folder / NODE)
    identity.save(folder / IDENTITY, passphrase)
    return _ask(folder, pinned, name, (identity, node, public), None)


def rotate(folder: Path, passphrase: Passphrase | None) -> Request:
    """Make new keys for a silo beside the present ones, and the request to replace them.

    They are used once a membership that names them is accepted. Until then the silo neither moves nor leaves.

    Args:
        folder: the silo's.
        passphrase: of the identity keys, the present one and the next.

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
    name = SiloSettings.read(folder / "silo.toml").name
    for stem in (IDENTITY, NODE):
        (folder / (stem + NEXT)).unlink(missing_ok=True)
    previous = IdentityKey.load(folder / IDENTITY, passphrase)
    identity, (node, public) = IdentityKey.generate(), new_node_key(folder / (NODE + NEXT))
    protected = is_protected(read_private_file(folder / IDENTITY))
    identity.save(folder / (IDENTITY + NEXT), passphrase() if protected and passphrase else None)
    return _ask(folder, Charter.read(folder / CHARTER), name, (identity, node, public), previous)


def join_as_coordinator(folder: Path, charter: Path, *, passphrase: bytes | None) -> Request:
    """Make the coordinator's folder with its keys, and the request to be admitted, ``coordinator.request``.

    Raises:
        ConfigError: the folder exists or cannot be written, or the charter is none.
    """
    pinned = _settle(folder, charter)
    identity = IdentityKey.generate()
    identity.save(folder / IDENTITY, passphrase)
    CoordinatorSettings().write(folder / "coordinator.toml")
    link = folder / CoordinatorSettings().link
    with writing(link, ConfigError):
        link.mkdir(mode=0o700)
    LinkSettings(host=pinned.host, port=pinned.port).write(link / "link.toml")
    _write(link / "ca.crt", read_content(folder / "ca.crt", ConfigError))
    csr = new_server_key(link / "server.key")
    request = Request(
        role="coordinator",
        name=COORDINATOR,
        charter=pinned.digest,
        identity=identity.public,
        transport=csr.decode("ascii"),
    ).with_signatures(identity)
    request.write(folder / "coordinator.request")
    return request


def accept(folder: Path, sealed: Path, fingerprint: str, passphrase: Passphrase | None) -> Membership:
    """Accept a membership that the founder sealed; from then on it is the party's.

    A crash or a full disk at any moment leaves nothing that accepting it again does not end: the membership is written
    last, and a key is taken from its next file or, where that was done, from its own.

    Args:
        folder: the party's.
        sealed: ``membership.toml`` as the founder handed it out; for the coordinator ``server.crt`` lies beside it.
        fingerprint: of the membership, as the founder read it out.
        passphrase: of the party's identity key.

    Raises:
        ConfigError: what was typed in is no fingerprint, or a file cannot be written.
        IntegrityError: not sealed by the charter's founder, another fingerprint, an older one than the present or
            one that has lost a revocation, or one that does not have this party's key.
    """
    charter, offered = Charter.read(folder / CHARTER), Membership.read(sealed)
    offered.check(charter)
    if not same_groups(fingerprint, offered.fingerprint):
        raise IntegrityError(f"{sealed}: its fingerprint is another than the one that was typed in")
    target = folder / MEMBERSHIP
    if target.exists():
        _check_follows(sealed, offered, Membership.read(target))
    if (folder / "coordinator.toml").exists():
        _check_own(sealed, offered.coordinator == IdentityKey.load(folder / IDENTITY, passphrase).public)
        link = folder / CoordinatorSettings.read(folder / "coordinator.toml").link
        _write(link / "server.crt", read_content(sealed.parent / "server.crt", ConfigError))
    else:
        number = offered.number(SiloSettings.read(folder / "silo.toml").name)
        public, node = offered.roster[number], offered.nodes[number].encode()
        named = (
            _named(folder / IDENTITY, lambda path: IdentityKey.load(path, passphrase).public == public),
            _named(folder / NODE, lambda path: node_public(path) == node),
        )
        _check_own(sealed, None not in named)
        with writing(folder, ConfigError):
            for key, stem in zip(named, (IDENTITY, NODE), strict=True):
                if key is not None and key != folder / stem:
                    os.replace(key, folder / stem)
            sync_folder(folder)
    _write(target, offered.to_toml().encode())
    return offered


def _write(path: Path, content: bytes) -> None:
    """Write a file of the party's, whole or not at all."""
    with writing(path, ConfigError):
        replace_file(path, content)


def _check_follows(sealed: Path, offered: Membership, present: Membership) -> None:
    """Return if a membership is the present one, or a later one without whom the present one has revoked."""
    if offered.digest == present.digest:
        return
    if offered.serial <= present.serial:
        another = "another " if offered.serial == present.serial else ""
        raise IntegrityError(
            f"{sealed}: serial {offered.serial}, but {another}{present.serial} was accepted here before"
        )
    if {one.identity for one in present.revoked} - {one.identity for one in offered.revoked}:
        raise IntegrityError(
            f"{sealed}: a key that was revoked before is not revoked in it: the founder must revoke it again"
        )


def _named(key: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Return the file of a key that a membership names: the next one, or the present one, which it may be already."""
    for path in (key.with_name(key.name + NEXT), key):
        if path.exists() and fits(path):
            return path
    return None


def _check_own(sealed: Path, own: bool) -> None:
    if not own:
        raise IntegrityError(f"{sealed}: it does not have this party's keys")


def _settle(folder: Path, charter: Path) -> Charter:
    """Make a party's folder with what is public."""
    pinned = Charter.read(charter)
    with writing(folder, ConfigError):
        if folder.exists():
            raise ConfigError(
                f"{folder}: exists already, and keys are never overwritten; a folder without a request was half made "
                "and is known to nobody: remove it"
            )
        folder.mkdir(parents=True, mode=0o700)
        (folder / CHARTER).write_text(pinned.to_toml(), encoding="utf-8")
        (folder / "ca.crt").write_text(pinned.authority, encoding="ascii")
        (folder / "schema.toml").write_text(pinned.data_schema, encoding="utf-8")
    return pinned


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

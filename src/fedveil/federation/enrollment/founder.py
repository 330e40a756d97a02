"""Founder of a federation: creates the charter, admits parties by fingerprint, and seals memberships.

Claim: a membership that the parties accept has only keys whose fingerprint the founder typed in, and no key that was
revoked. Conditions: the founder hears the fingerprint from a person it knows, and keeps ``founder.key`` and ``ca.key``
offline. No private half of any other party's key ever reaches the founder. ``tests/test_ceremony.py`` tries foreign
requests, wrong fingerprints, revoked keys and older memberships.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from fedveil.crypto.keys import IdentityKey, Passphrase, PublicIdentity, same_fingerprint
from fedveil.data.schema import read_schema
from fedveil.errors import ConfigError, IntegrityError
from fedveil.federation.charter import CHARTER, Charter
from fedveil.federation.enrollment.certificates import CERTIFICATE_DAYS, Authority
from fedveil.federation.enrollment.requests import Request
from fedveil.federation.membership import LONGEST_REASON, MEMBERSHIP, Membership, Revoked
from fedveil.files import parse_json, read_content, read_text, reading, replace_file, writing

COORDINATOR: Final = "coordinator"
"""The name of the coordinator, which no silo has."""
_KEY: Final = "founder.key"
_ADMITTED: Final = "admitted"
_REVOKED: Final = "revoked.json"
_REPLACED: Final = "replaced by its owner"


def client_certificate(silo: str) -> str:
    """Return the name of a silo's certificate among the sealed files."""
    return f"silo-{silo}.crt"


def create_federation(
    folder: Path, *, name: str, schema: Path, host: str, port: int, passphrase: bytes | None
) -> Charter:
    """Create a founder's folder with a certificate authority, the founder's key and the charter.

    Args:
        folder: made here; must not exist.
        name: of the federation.
        schema: the public schema of all silos' tables.
        host: the coordinator's host name or address, as the silos reach it.
        port: its port.
        passphrase: of both keys' files; None: mode 0600 alone protects them.

    Raises:
        ConfigError: the folder exists, or a name, host or port that cannot be, and nothing was made; or the folder
            cannot be written.
        DataError: the schema is none.
    """
    read_schema(schema)
    with writing(folder, ConfigError):
        if folder.exists():
            raise ConfigError(f"{folder}: exists already; a federation is never overwritten")
    founder, text = IdentityKey.generate(), read_text(schema, ConfigError)
    named = Charter(name=name, host=host, port=port, founder=founder.public, authority="", data_schema=text)
    named.check()
    with writing(folder, ConfigError):
        (folder / _ADMITTED).mkdir(parents=True)
        folder.chmod(0o700)
        authority = Authority.create(f"fedveil federation {name}")
        authority.save(folder, passphrase)
        founder.save(folder / _KEY, passphrase)
        charter = replace(named, authority=(folder / "ca.crt").read_text(encoding="ascii"))
        (folder / CHARTER).write_text(charter.to_toml(), encoding="utf-8")
    return Charter.read(folder / CHARTER)


def admit(folder: Path, request: Path, fingerprint: str) -> Request:
    """Admit a party to the next membership.

    If a coordinator replaces its key, the former one counts as revoked: silos still have to recognise the terms that it
    signed, to continue the runs that they charged under them.

    Args:
        folder: the founder's.
        request: the party's file.
        fingerprint: as the party's operator read it out, ``request`` and 8 groups of 4.

    Raises:
        ConfigError: what was typed in is no fingerprint.
        IntegrityError: another fingerprint, a foreign request, or a key that was revoked or is not replaced by its
            owner.
    """
    asked = Request.read(request)
    asked.check(Charter.read(folder / CHARTER).digest)
    if not same_fingerprint(fingerprint, asked.fingerprint):
        raise IntegrityError(
            f"{request}: its fingerprint is another than the one that was typed in: another request, or a changed one"
        )
    if asked.role == "silo" and asked.name == COORDINATOR:
        raise ConfigError(f"{request}: a silo cannot be named '{COORDINATOR}'")
    revoked = _revoked(folder)
    if asked.identity in {one.identity for one in revoked} or asked.transport_digest in {
        one.transport for one in revoked
    }:
        raise IntegrityError(f"{request}: its key was revoked; a revoked key does not come back")
    place = folder / _ADMITTED / f"{_slot(asked)}.request"
    if place.exists():
        before = Request.read(place)
        if before.identity != asked.identity:
            asked.replaces(before.identity)
            if asked.role == "coordinator":
                _keep_revoked(folder, Revoked(identity=before.identity, since=_day(0), reason=_REPLACED))
    asked.write(place)
    return asked


def revoke(folder: Path, name: str, reason: str) -> Revoked:
    """Leave a party out of the next membership, and revoke its key in all later ones.

    In the place of a coordinator whose key was lost another one joins, with keys of its own; the silos that accept the
    next membership go on with their ledgers, and answer the lost key no more.

    Args:
        folder: the founder's.
        name: of the silo, or ``coordinator``.
        reason: for all members to read.

    Raises:
        ConfigError: no party of this name was admitted, or a reason that no membership has room for.
    """
    if len(reason) > LONGEST_REASON:
        raise ConfigError(f"--reason has {len(reason)} characters; a membership takes {LONGEST_REASON}")
    place = folder / _ADMITTED / f"{COORDINATOR if name == COORDINATOR else f'silo-{name}'}.request"
    if not place.is_file():
        raise ConfigError(f"{folder}: no silo '{name}' was admitted")
    asked = Request.read(place)
    one = Revoked(identity=asked.identity, since=_day(0), reason=reason, transport=asked.transport_digest)
    _keep_revoked(folder, one)
    place.unlink()
    return one


def seal(
    folder: Path, passphrase: Passphrase | None, days: int = CERTIFICATE_DAYS, above: int = 0
) -> Membership:
    """Seal the admitted parties as the next membership, and issue new certificates for all of them.

    Writes ``sealed/membership.toml``, ``sealed/server.crt`` and for each silo ``sealed/silo-NAME.crt``. Hand them to
    all parties; nothing in them is secret.

    Args:
        folder: the founder's.
        passphrase: of the founder's keys.
        days: for how long it is valid.
        above: a serial number that parties have seen before the folder was restored; this one is larger.

    Raises:
        ConfigError: nobody, or no coordinator, was admitted; or a number or text that no membership has, by its key.
    """
    charter = Charter.read(folder / CHARTER)
    admitted = [Request.read(path) for path in sorted((folder / _ADMITTED).glob("*.request"))]
    target = folder / "sealed" / MEMBERSHIP
    before = Membership.read(target) if target.exists() else None
    known = () if before is None else before.silos
    # Silos that were sealed before keep their order: who is added changes nobody's number.
    silos = sorted(
        (one for one in admitted if one.role == "silo"),
        key=lambda one: (known.index(one.name) if one.name in known else len(known), one.name),
    )
    coordinators = [one for one in admitted if one.role == "coordinator"]
    if not silos or len(coordinators) != 1:
        raise ConfigError(f"{folder}: admit the coordinator and at least one silo before you seal")
    serial = max(above, 0 if before is None else before.serial) + 1
    membership = Membership(
        silos=tuple(one.name for one in silos),
        roster=tuple(one.identity for one in silos),
        coordinator=coordinators[0].identity,
        schema_digest=charter.schema_digest,
        nodes=tuple(one.transport for one in silos),
        serial=serial,
        valid_until=_day(days),
        charter=charter.digest,
        revoked=_revoked(folder),
        server=coordinators[0].transport_digest,
    ).with_signature(IdentityKey.load(folder / _KEY, passphrase))
    Membership.parse(membership.to_toml(), target)  # what no party reads is not handed out
    target.parent.mkdir(exist_ok=True)
    authority = Authority.load(folder, passphrase)
    hosts = tuple(dict.fromkeys((charter.host, "127.0.0.1", "localhost")))
    replace_file(target.parent / "server.crt", authority.certify(coordinators[0].transport, hosts, days))
    for silo in silos:
        replace_file(
            target.parent / client_certificate(silo.name),
            authority.certify_silo(silo.transport, silo.name, days),
        )
    replace_file(target, membership.to_toml().encode())
    membership.check(charter)
    return membership


def _slot(request: Request) -> str:
    return "coordinator" if request.role == "coordinator" else f"silo-{request.name}"


def _revoked(folder: Path) -> tuple[Revoked, ...]:
    path = folder / _REVOKED
    if not path.exists():
        return ()
    with reading(path, ConfigError):
        document = parse_json(read_content(path, ConfigError), path, ConfigError)
        return tuple(
            Revoked(
                identity=PublicIdentity(bytes.fromhex(one["identity"])),
                since=one["since"],
                reason=one["reason"],
                transport=one.get("transport", ""),
            )
            for one in document
        )


def _keep_revoked(folder: Path, one: Revoked) -> None:
    """Add a key to those that every later membership lists as revoked."""
    document = [
        {
            "identity": each.identity.raw.hex(),
            "since": each.since,
            "reason": each.reason,
            "transport": each.transport,
        }
        for each in (*(each for each in _revoked(folder) if each.identity != one.identity), one)
    ]
    replace_file(folder / _REVOKED, json.dumps(document, indent=1).encode())


def _day(days: int) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).strftime("%Y-%m-%d")

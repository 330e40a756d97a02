"""Keys are made where they are used: found, join, admit, seal, accept, rotate, revoke; and what is refused."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.cli.options import PromptedPassphrase
from fedveil.crypto import keys as key_files
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ConfigError, CryptoError, FedveilError, IntegrityError
from fedveil.federation.audit.ledger_audit import export_ledger, verify_ledger
from fedveil.federation.enrollment.certificates import Authority, days_left, node_key_digest, node_public
from fedveil.federation.enrollment.founder import Request, admit, create_federation, revoke, seal
from fedveil.federation.enrollment.joining import (
    LocalFiles,
    accept,
    join_as_coordinator,
    join_as_silo,
    rotate,
)
from fedveil.federation.hosts.folders import (
    CoordinatorFolder,
    SiloFolder,
    SiloSettings,
    members_of,
)
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.link import server_context
from fedveil.federation.hosts.link_folder import LinkSettings
from fedveil.federation.hosts.status import party_status
from fedveil.federation.membership import Charter, Membership
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.transport.https.mailbox import Mailbox
from fedveil.privacy.events import GaussianEvent
from fedveil.privacy.ledger import Origin
from fedveil.protocols.messages import SERVER
from fedveil.protocols.session_messages import Terms
from tests.full_disks import Disk, from_then_on

SECRET = b"five random words of mine"
SCHEMA = """
n_users = 5
user = "who"
[target]
kind = "label"
column = "ill"
classes = ["0", "1"]
[features]
age = { kind = "number", lower = 0, upper = 100 }
"""


def asked() -> bytes:
    return SECRET


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2id with the least memory: what it costs is not what these tests are about."""
    monkeypatch.setattr(key_files, "_KIBIBYTES", 32)


@dataclass(frozen=True)
class Parties:
    """Folders of a federation with two silos, north and south."""

    root: Path

    @property
    def founder(self) -> Path:
        return self.root / "founder"

    @property
    def sealed(self) -> Path:
        return self.founder / "sealed" / "membership.toml"

    def seal(self) -> Membership:
        """Seal, and have everybody who belongs to it accept."""
        made = seal(self.founder, asked)
        for name in ("coordinator", *made.silos):
            accept(self.root / name, self.sealed, made.fingerprint, asked)
        return made


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    made = Parties(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    create_federation(
        made.founder,
        name="hearts",
        schema=tmp_path / "schema.toml",
        host="learn.example.org",
        port=9443,
        passphrase=SECRET,
    )
    charter = made.founder / "charter.toml"
    requests = [join_as_coordinator(tmp_path / "coordinator", charter, passphrase=SECRET)]
    requests += [
        join_as_silo(tmp_path / name, charter, name=name, passphrase=SECRET) for name in ("north", "south")
    ]
    for one in requests:
        admit(made.founder, tmp_path / one.name / f"{one.name}.request", one.fingerprint)
    made.seal()
    return made


def test_a_folder_that_cannot_be_made_is_one_error_that_names_it(parties: Parties) -> None:
    (parties.root / "a file").touch()
    folder, charter = parties.root / "a file" / "new", parties.founder / "charter.toml"
    said = "a file/new cannot be written: Not a directory"
    with pytest.raises(ConfigError, match=said):
        join_as_silo(folder, charter, name="west", passphrase=None)
    with pytest.raises(ConfigError, match=said):
        join_as_coordinator(folder, charter, passphrase=None)
    schema = parties.root / "schema.toml"
    with pytest.raises(ConfigError, match=said):
        create_federation(folder, name="b", schema=schema, host="localhost", port=1, passphrase=None)


def test_a_full_disk_is_one_error_at_every_moment_and_loses_no_key(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, policies and memberships were not: Python's traceback answered."""
    disk = Disk(monkeypatch)
    said = list[str]()

    def at_every_moment(act: Callable[[Path], Any], least: int) -> None:
        for moment in range(100):
            disk.fill(from_then_on(moment))
            try:
                with disk.acting(True):
                    act(parties.root / f"west-{moment}")
            except FedveilError as error:
                said.append(str(error))
            else:
                assert moment >= least
                return

    charter, north = parties.founder / "charter.toml", parties.root / "north"
    at_every_moment(lambda folder: join_as_silo(folder, charter, name="west", passphrase=None), 15)
    at_every_moment(
        lambda folder: join_as_coordinator(folder.with_suffix(".c"), charter, passphrase=None), 15
    )
    at_every_moment(lambda _: rotate(north, asked), 5)
    request = Request.read(north / "north.request")
    admit(parties.founder, north / "north.request", request.fingerprint)
    disk.room()
    made = seal(parties.founder, asked)
    at_every_moment(lambda _: accept(north, parties.sealed, made.fingerprint, asked), 5)
    assert IdentityKey.load(north / "identity.key", asked).public == request.identity
    assert [one for one in said if not one.endswith(" cannot be written: No space left on device")] == []


def halves(path: Path) -> list[bytes]:
    """The private half of a key's file, in every form in which it could stand in another file."""
    content = path.read_bytes()
    if path.name.startswith(("identity", "founder")):
        raw = IdentityKey.load(path, asked)._private.private_bytes_raw()
    else:
        if key_files.is_protected(content):
            content, _ = key_files.unprotect(content, SECRET, kind=b"authority")
        key = load_pem_private_key(content, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        raw = key.private_numbers().private_value.to_bytes(48, "big")
        der = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        assert raw in der
    return [raw, raw.hex().encode(), *(base64.b64encode(bytes(pad) + raw)[4:-4] for pad in range(3))]


def test_no_file_of_any_party_holds_anothers_private_half(parties: Parties) -> None:
    silo = parties.root / "south"
    rotate(silo, asked)
    keys = list(parties.root.rglob("*.key*"))
    assert sorted(path.relative_to(parties.root).as_posix() for path in keys) == [
        *("coordinator/identity.key", "coordinator/link/server.key", "founder/ca.key", "founder/founder.key"),
        *("north/identity.key", "north/node.key"),
        *("south/identity.key", "south/identity.key.next", "south/node.key", "south/node.key.next"),
    ]
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    files = {path: path.read_bytes() for path in parties.root.rglob("*") if path.is_file()}
    for key in keys:
        for half in halves(key):
            holders = {path for path, content in files.items() if half in content}
            assert holders <= {key}, key
    plain = (parties.root / "north" / "node.key").read_bytes()  # what the search would find
    assert b"PRIVATE" in plain


def test_a_membership_has_the_keys_that_were_admitted(parties: Parties) -> None:
    north, coordinator = (
        SiloFolder(parties.root / "north", asked),
        CoordinatorFolder(parties.root / "coordinator", asked),
    )
    membership = north.membership
    assert membership == coordinator.membership
    assert (membership.serial, membership.silos) == (1, ("north", "south"))
    assert north.identity.public == membership.roster[0]
    assert coordinator.identity.public == membership.coordinator
    assert 396 < days_left(coordinator / "link/server.crt", coordinator / "ca.crt") < 398
    assert north.schema.n_users == 5
    assert membership.fingerprint.split()[0] == "membership"
    assert len(membership.fingerprint.split()) == 9


@pytest.mark.parametrize("typed", ["", "fingerprint", "0000 " * 7, "0000 " * 9, "000g " * 8])
def test_what_is_no_fingerprint_is_a_mistake_in_what_was_asked(parties: Parties, typed: str) -> None:
    with pytest.raises(ConfigError, match="and 8 groups of 4 hexadecimal digits are needed"):
        admit(parties.founder, parties.root / "north" / "north.request", typed)
    with pytest.raises(ConfigError, match="and 8 groups of 4 hexadecimal digits are needed"):
        accept(parties.root / "north", parties.sealed, typed, asked)


@pytest.mark.parametrize("typed", ["0000 " * 8, "one digit"])
def test_another_fingerprint_is_refused(parties: Parties, typed: str, tmp_path: Path) -> None:
    request = parties.root / "north" / "north.request"
    right = Request.read(request).fingerprint

    def wrong(right: str) -> str:
        return right[:-1] + ("0" if right[-1] != "0" else "1") if typed == "one digit" else typed

    with pytest.raises(IntegrityError, match="fingerprint is another"):
        admit(parties.founder, request, wrong(right))
    admit(parties.founder, request, right.upper().replace(" ", ""))
    admit(parties.founder, request, right.removeprefix("request "))
    sealed = Membership.read(parties.sealed).fingerprint
    with pytest.raises(IntegrityError, match="fingerprint is another"):
        accept(parties.root / "north", parties.sealed, wrong(sealed), asked)


def altered(request: Request, other: IdentityKey) -> dict[str, Request]:
    return {
        "another charter": replace(request, charter=bytes(32)),
        "another identity": replace(request, identity=other.public),
        "another name": replace(request, name="west"),
        "another node": replace(request, transport=request.transport.replace("A", "B", 1)),
        "signed by another": request.with_signatures(other),
        "no node's signature": replace(request, transport_signature=b""),
        "another role": replace(request, role="coordinator"),
    }


def test_a_fingerprint_of_something_else_is_named(parties: Parties) -> None:
    """Their digits look alike: each begins with a word of its own."""
    charter = Charter.read(parties.founder / "charter.toml")
    membership = Membership.read(parties.sealed)
    request = Request.read(parties.root / "north" / "north.request")
    shown = {
        "charter": charter.fingerprint,
        "membership": membership.fingerprint,
        "request": request.fingerprint,
        "identity": request.identity.fingerprint,
    }
    assert {kind: text.split()[0] for kind, text in shown.items()} == {kind: kind for kind in shown}
    for kind, text in shown.items():
        if kind != "request":
            with pytest.raises(ConfigError, match="a fingerprint of the request is needed"):
                admit(parties.founder, parties.root / "north" / "north.request", text)
        if kind != "membership":
            with pytest.raises(ConfigError, match="a fingerprint of the membership is needed"):
                accept(parties.root / "north", parties.sealed, text, asked)


def test_a_silos_settings_are_drafted_whole(parties: Parties, tmp_path: Path) -> None:
    charter, listed = parties.founder / "charter.toml", tmp_path / "listed"
    settings = SiloFolder(parties.root / "north").settings
    assert (settings.table, settings.users) == (Path("table.csv"), None)
    drafted = (parties.root / "north" / "silo.toml").read_text()
    assert all(re.search(rf"(?m)^(# )?{key}[ :]", drafted) for key in SiloSettings.model_fields)
    holds = LocalFiles(users=Path("ids.txt"))
    with pytest.raises(ConfigError, match="names no list of users: ids are numbers from 0"):
        join_as_silo(tmp_path / "west", charter, name="west", passphrase=None, holds=holds)
    assert not (tmp_path / "west").exists()
    (tmp_path / "with-list.toml").write_text('users = "' + 64 * "a" + '"\n' + SCHEMA)
    made = {"name": "lists", "host": "localhost", "port": 1, "passphrase": None}
    create_federation(listed, schema=tmp_path / "with-list.toml", **made)
    for number, (holds, table, users) in enumerate(
        (
            (LocalFiles(), "table.csv", "users.txt"),
            (
                LocalFiles(table=Path('/data/a "b".csv'), users=Path("/data/ids")),
                '/data/a "b".csv',
                "/data/ids",
            ),
        )
    ):
        join_as_silo(
            tmp_path / f"{number}", listed / "charter.toml", name="west", passphrase=None, holds=holds
        )
        found = SiloSettings.read(tmp_path / f"{number}" / "silo.toml")
        assert (found.table, found.users) == (Path(table), Path(users))


def test_where_the_link_listens_is_not_the_public_name(parties: Parties, tmp_path: Path) -> None:
    charter = parties.founder / "charter.toml"
    join_as_coordinator(tmp_path / "c", charter, passphrase=None, listen=("10.0.0.5", 19443))
    settings = LinkSettings.read(tmp_path / "c" / "link" / "link.toml")
    assert (settings.host, settings.port) == ("10.0.0.5", 19443)
    sealed = x509.load_pem_x509_certificate((parties.sealed.parent / "server.crt").read_bytes())
    names = sealed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert "learn.example.org" in names.value.get_values_for_type(x509.DNSName)
    assert SiloFolder(parties.root / "north").settings.coordinator == "learn.example.org:9443"


def test_the_days_that_are_shown_are_those_that_run_out_first(parties: Parties, tmp_path: Path) -> None:
    coordinator, north = CoordinatorFolder(parties.root / "coordinator"), SiloFolder(parties.root / "north")
    for home, file in ((coordinator, "server.crt"), (north, "client.crt")):
        found = party_status(home.path, served=False)
        assert found["expires_first"] == file  # to the second; a membership is valid until the day's end
        assert 396 < found["certificate_days"] <= 397
    days = seal(parties.founder, asked, days=20)
    for name in ("coordinator", "north"):
        accept(parties.root / name, parties.sealed, days.fingerprint, asked)
    assert 19 < party_status(north.path, served=False)["certificate_days"] <= 20
    seal(parties.founder, asked)
    shutil.copy(
        parties.sealed.parent / "silo-north.crt", north / "client.crt"
    )  # the membership is still the old one
    assert party_status(north.path, served=False)["expires_first"] == "membership.toml"


def test_foreign_and_changed_requests_are_refused(parties: Parties, tmp_path: Path) -> None:
    request = Request.read(parties.root / "north" / "north.request")
    for what, one in altered(request, IdentityKey.generate()).items():
        path = tmp_path / "changed.request"
        one.write(path)
        with pytest.raises(IntegrityError):
            admit(parties.founder, path, one.fingerprint)
        assert Request.read(path) == one, what


@pytest.mark.parametrize("name", ["so/uth", "../south", "", "a" * 61, "s\u00fcd", "-south", "south\n"])
def test_a_name_that_no_membership_has_is_refused_before_anything_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 60 letters, digits") as refused:
        join_as_silo(tmp_path / "south", tmp_path / "charter.toml", name=name, passphrase=None)
    assert len(str(refused.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_keys_that_nobody_has_admitted_are_not_replaced(parties: Parties) -> None:
    folder = parties.root / "west"
    request = join_as_silo(folder, parties.founder / "charter.toml", name="west", passphrase=None)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="no membership was accepted here"):
        rotate(folder, None)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    admit(parties.founder, folder / "west.request", request.fingerprint)


def test_a_key_is_replaced_by_its_owner_alone(parties: Parties) -> None:
    root = parties.root
    stranger = join_as_silo(
        root / "stranger", parties.founder / "charter.toml", name="north", passphrase=None
    )
    with pytest.raises(IntegrityError, match="replace a key that has not signed"):
        admit(parties.founder, root / "stranger" / "north.request", stranger.fingerprint)
    before = SiloFolder(root / "north", asked).identity.public
    request = rotate(root / "north", asked)
    admit(parties.founder, root / "north" / "north.request", request.fingerprint)
    assert SiloFolder(root / "north", asked).identity.public == before
    made = parties.seal()
    assert made.serial == 2
    assert SiloFolder(root / "north", asked).identity.public == request.identity == made.roster[0] != before
    assert not list((root / "north").glob("*.next"))


def test_a_revoked_key_does_not_come_back(parties: Parties) -> None:
    root = parties.root
    one = revoke(parties.founder, "south", "the disk was stolen")
    made = parties.seal()
    assert (made.serial, made.silos, made.revoked) == (2, ("north",), (one,))
    with pytest.raises(ConfigError, match="no silo 'south'"):
        accept(root / "south", parties.sealed, made.fingerprint, asked)
    request = Request.read(root / "south" / "south.request")
    with pytest.raises(IntegrityError, match="was revoked"):
        admit(parties.founder, root / "south" / "south.request", request.fingerprint)
    with pytest.raises(ConfigError, match="key that was revoked"):
        replace(made, silos=("north", "south"), roster=(*made.roster, one.identity), nodes=())
    with pytest.raises(ConfigError, match="no silo 'west'"):
        revoke(parties.founder, "west", "never heard of")


def test_a_crash_while_keys_change_is_ended_by_accepting_again(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each of its writes, a silo has the old keys or accepts again; nothing is left between."""
    north = parties.root / "north"
    request = rotate(north, asked)
    admit(parties.founder, north / "north.request", request.fingerprint)
    made = seal(parties.founder, asked)
    before = {path.name: path.read_bytes() for path in north.iterdir()}
    whole, kills = os.replace, 0
    for allowed in range(10):
        left = iter(range(allowed))

        def replaced(source: Any, target: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            whole(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replaced)
            try:
                accept(north, parties.sealed, made.fingerprint, asked)
            except KeyboardInterrupt:
                kills += 1
            else:
                break
        assert SiloFolder(north).membership.serial == 1
        accept(north, parties.sealed, made.fingerprint, asked)
        folder = SiloFolder(north, asked)
        assert folder.membership == made
        assert folder.identity.public == request.identity
        assert node_public(north / "node.key") == request.transport.encode()
        for path in north.iterdir():
            path.unlink()
        for name, content in before.items():
            (north / name).write_bytes(content)
            (north / name).chmod(0o600)
    assert kills == 4


def test_a_silo_is_not_served_with_a_key_that_its_membership_does_not_name(parties: Parties) -> None:
    north = parties.root / "north"
    (north / "table.csv").write_text("who,age,ill\n0,40,1\n1,50,0\n")
    shutil.copy(parties.root / "south" / "identity.key", north / "identity.key")
    with pytest.raises(IntegrityError, match="not the key that membership"):
        open_silo(SiloFolder(north, asked))


def charged(folder: Path, membership: Membership) -> None:
    """Have a silo charge a round that the present coordinator asked for, and keep the message."""
    with open_silo(SiloFolder(folder, asked)) as party:
        key = IdentityKey.load(folder.parent / "coordinator" / "identity.key", asked)
        assert key.public == membership.coordinator
        terms = Terms(
            membership=membership.digest, opened=bytes(16), nonces=(), experiment="{}", head=bytes(32)
        )
        message = SignedMessage(
            run=bytes(16),
            session=bytes(16),
            number=0,
            sender=SERVER,
            recipient=membership.number(folder.name),
            parts=(terms,),
        )
        party._keep_terms(terms, message.seal(key))
        party._ledger.ledger.charge(
            run="run",
            round=membership.serial,
            attempt=0,
            event=GaussianEvent(noise_multiplier=5.0),
            budget=None,
            origin=Origin(
                terms=terms.digest.hex(),
                coordinator=hashlib.sha256(key.public.raw).hexdigest(),
                membership=membership.serial,
                policy="c" * 64,
            ),
        )


def test_a_lost_key_of_the_coordinator_is_revoked_and_the_ledgers_go_on(
    parties: Parties, tmp_path: Path
) -> None:
    """Another coordinator joins under the same founder; an auditor follows the charges of both."""
    root, north = parties.root, parties.root / "north"
    (north / "table.csv").write_text("who,age,ill\n0,40,1\n1,50,0\n")
    charged(north, SiloFolder(north).membership)
    stranger = join_as_coordinator(root / "stranger", parties.founder / "charter.toml", passphrase=SECRET)
    with pytest.raises(IntegrityError, match="replace a key that has not signed"):
        admit(parties.founder, root / "stranger" / "coordinator.request", stranger.fingerprint)
    old = Request.read(root / "coordinator" / "coordinator.request")
    revoke(parties.founder, "coordinator", "the host burnt down")
    with pytest.raises(ConfigError, match="admit the coordinator"):
        seal(parties.founder, asked)
    with pytest.raises(IntegrityError, match="was revoked"):
        admit(parties.founder, root / "coordinator" / "coordinator.request", old.fingerprint)
    (root / "coordinator").rename(root / "burnt")
    new = join_as_coordinator(root / "coordinator", parties.founder / "charter.toml", passphrase=SECRET)
    admit(parties.founder, root / "coordinator" / "coordinator.request", new.fingerprint)
    made = parties.seal()
    assert (made.serial, made.coordinator) == (2, new.identity)
    assert [one.identity for one in made.revoked] == [old.identity]
    charged(north, made)
    export, silo = tmp_path / "north.json", SiloFolder(north, asked)
    export_ledger(north / "state", export, identity=silo.identity, membership=made, number=0, delta=1e-5)
    found = {one.name: one.outcome for one in verify_ledger(export, membership=parties.sealed).checks}
    assert found["terms"] == found["membership"] == "holds"


def test_every_kind_of_key_is_revoked(parties: Parties, tmp_path: Path) -> None:
    """Identity and TLS keys of a silo and of the coordinator. Those of the founder end with the charter."""
    root, charter = parties.root, parties.founder / "charter.toml"
    before = SiloFolder(root / "north").membership
    south = node_key_digest(before.nodes[1])
    revoke(parties.founder, "south", "stolen")
    made = parties.seal()
    assert made.silos == ("north",)
    assert (made.revoked[0].identity, made.revoked[0].transport) == (before.roster[1], south)
    mailbox = Mailbox()
    mailbox.introduce(members_of(made))
    assert mailbox.number(south) is None
    assert mailbox.members is not None
    assert mailbox.members.revoked == (south,)
    thief = load_pem_private_key((root / "south" / "node.key").read_bytes(), None)
    assert isinstance(thief, ec.EllipticCurvePrivateKey)
    again = join_as_silo(tmp_path / "west", charter, name="west", passphrase=None)
    stolen = replace(again, transport=before.nodes[1])
    stolen.with_signatures(IdentityKey.load(tmp_path / "west" / "identity.key"), thief).write(
        tmp_path / "west.request"
    )
    with pytest.raises(IntegrityError, match="was revoked"):
        admit(parties.founder, tmp_path / "west.request", stolen.fingerprint)

    old = Request.read(root / "coordinator" / "coordinator.request")
    revoke(parties.founder, "coordinator", "stolen")
    (root / "coordinator").rename(root / "stolen")
    new = join_as_coordinator(root / "coordinator", charter, passphrase=None)
    identity = IdentityKey.load(root / "coordinator" / "identity.key")
    with_old_tls = replace(new, transport=old.transport).with_signatures(identity)
    with_old_tls.write(tmp_path / "coordinator.request")
    with pytest.raises(IntegrityError, match="was revoked"):
        admit(parties.founder, tmp_path / "coordinator.request", with_old_tls.fingerprint)
    admit(parties.founder, root / "coordinator" / "coordinator.request", new.fingerprint)
    later = parties.seal()
    assert later.server == new.transport_digest != before.server
    assert {one.transport for one in later.revoked} == {south, before.server}
    assert SiloFolder(root / "north").server_key == later.server  # a silo compares it in every handshake
    with pytest.raises(ConfigError, match="has a key that was revoked"):
        replace(later, server=before.server)
    with pytest.raises(IntegrityError, match="does not have this party's keys"):
        accept(root / "stolen", parties.sealed, later.fingerprint, asked)


def test_a_coordinator_changes_its_keys(parties: Parties) -> None:
    home = parties.root / "coordinator"
    request = rotate(home, asked)
    admit(parties.founder, home / "coordinator.request", request.fingerprint)
    CoordinatorFolder(home, asked).check_own_keys()  # until then it is served with the keys that it has
    made = parties.seal()
    assert (made.coordinator, made.server) == (request.identity, request.transport_digest)
    folder = CoordinatorFolder(home, asked)
    assert folder.identity.public == request.identity
    folder.check_own_keys()
    server_context(folder.link)
    assert not list(home.rglob("*.next"))
    shutil.copy(parties.sealed.with_name("silo-north.crt"), home / "link" / "server.crt")
    with pytest.raises(ConfigError, match=r"server\.crt: not of the key that membership\.toml names"):
        folder.check_own_keys()


def test_a_certificate_of_another_key_is_not_accepted(parties: Parties) -> None:
    certificates = [parties.sealed.with_name(f"silo-{name}.crt") for name in ("north", "south")]
    shutil.copy(certificates[1], certificates[0])
    fingerprint = Membership.read(parties.sealed).fingerprint
    with pytest.raises(IntegrityError, match=r"silo-north\.crt: of another key than membership\.toml names"):
        accept(parties.root / "north", parties.sealed, fingerprint, asked)


def test_a_federation_that_is_founded_again_goes_on_with_its_ledgers(parties: Parties) -> None:
    """The founder's keys are lost: new ones, new folders, and each silo's state carried over."""
    root = parties.root
    (root / "north" / "table.csv").write_text("who,age,ill\n0,40,1\n1,50,0\n")
    parties.seal()
    charged(root / "north", SiloFolder(root / "north").membership)
    (root / "again").mkdir()
    again = Parties(root / "again")
    (again.root / "schema.toml").write_text(SCHEMA)
    charter = again.founder / "charter.toml"
    create_federation(
        again.founder,
        name="hearts",
        schema=again.root / "schema.toml",
        host="learn.example.org",
        port=9443,
        passphrase=None,
    )
    for one in (
        join_as_coordinator(again.root / "coordinator", charter, passphrase=SECRET),
        join_as_silo(again.root / "north", charter, name="north", passphrase=SECRET),
    ):
        admit(again.founder, again.root / one.name / f"{one.name}.request", one.fingerprint)
    for part in ("state", "table.csv"):
        (root / "north" / part).rename(again.root / "north" / part)
    assert again.seal().serial == 1
    with open_silo(SiloFolder(again.root / "north", asked)) as party:
        assert len(party._ledger.ledger.entries) == 1


def test_an_admission_that_a_crash_ends_leaves_the_one_before(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a request lay there: neither the next admission nor the next seal could read it."""
    before = Request.read(parties.founder / "admitted" / "silo-north.request")
    file = parties.root / "north" / "north.request"
    asked_ = rotate(parties.root / "north", asked)
    with monkeypatch.context() as crash:
        crash.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(ConfigError, match=r"silo-north\.request cannot be written: No space left"):
            admit(parties.founder, file, asked_.fingerprint)
    assert Request.read(parties.founder / "admitted" / "silo-north.request") == before
    assert admit(parties.founder, file, asked_.fingerprint) == asked_


def test_nothing_is_sealed_that_no_party_could_read(parties: Parties, tmp_path: Path) -> None:
    """It was written, and neither parties nor the founder's next seal could read what lay there."""
    sealed = parties.sealed.read_bytes()
    with pytest.raises(ConfigError, match="--reason has 201 characters; a membership takes 200"):
        revoke(parties.founder, "north", "x" * 201)
    with pytest.raises(ConfigError, match=r"serial: must be < 2\.14748e"):
        seal(parties.founder, asked, above=2**31)
    assert parties.sealed.read_bytes() == sealed
    revoke(parties.founder, "south", "x" * 200)
    parties.seal()


def test_two_silos_of_one_node_key_are_not_sealed_together(parties: Parties, tmp_path: Path) -> None:
    """The link registers a key once: no run of anybody began under such a membership."""
    charter = parties.founder / "charter.toml"
    private = load_pem_private_key((parties.root / "south" / "node.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    joined = join_as_silo(tmp_path / "west", charter, name="west", passphrase=None)
    identity = IdentityKey.load(tmp_path / "west" / "identity.key")
    for comment in (" as somebody else", " " + "long" * 1000):
        named = replace(joined, transport=node_public(parties.root / "south" / "node.key").decode() + comment)
        named.with_signatures(identity, private).write(tmp_path / "west.request")
        with pytest.raises(IntegrityError, match="the node key of 'west' has more beside it than the key"):
            admit(parties.founder, tmp_path / "west.request", named.fingerprint)
    same = replace(joined, transport=node_public(parties.root / "south" / "node.key").decode())
    same.with_signatures(identity, private).write(tmp_path / "west.request")
    with pytest.raises(IntegrityError, match="its key was admitted as 'south'; each party has its own keys"):
        admit(parties.founder, tmp_path / "west.request", same.fingerprint)
    # Admitted and then revoked as "west", the key of "south" stood in memberships as revoked and in use.
    assert "south" in parties.seal().silos


def test_a_silo_is_not_admitted_under_two_names(parties: Parties, tmp_path: Path) -> None:
    """No membership with both could be sealed, and revoking one name revoked the key of both."""
    charter, south = parties.founder / "charter.toml", parties.root / "south"
    joined = join_as_silo(tmp_path / "west", charter, name="west", passphrase=None)
    node = load_pem_private_key((tmp_path / "west" / "node.key").read_bytes(), None)
    assert isinstance(node, ec.EllipticCurvePrivateKey)
    identity = IdentityKey.load(south / "identity.key", asked)
    twice = replace(joined, identity=identity.public).with_signatures(identity, node)
    twice.write(tmp_path / "west.request")
    with pytest.raises(IntegrityError, match="its key was admitted as 'south'"):
        admit(parties.founder, tmp_path / "west.request", twice.fingerprint)
    assert parties.seal().silos == ("north", "south")


def test_a_key_of_small_order_is_refused_by_its_place(parties: Parties) -> None:
    """The error named the file, but not whose key it is."""
    charter, small = parties.founder / "charter.toml", bytes([1, *bytes(31)]).hex()
    text, known = parties.sealed.read_text(), Membership.read(parties.sealed)
    for key, raw in (("silos.1.identity", known.roster[1].raw), ("coordinator", known.coordinator.raw)):
        with pytest.raises(
            ConfigError, match=f"membership: {key}: .* has small order: any party can forge its signatures"
        ):
            Membership.parse(text.replace(raw.hex(), small), "membership")
    charter.write_text(charter.read_text().replace(Charter.read(charter).founder.raw.hex(), small))
    with pytest.raises(ConfigError, match=r"charter\.toml: founder: .* has small order"):
        Charter.read(charter)


def test_no_silo_is_named_like_the_coordinator(parties: Parties, tmp_path: Path) -> None:
    charter = parties.founder / "charter.toml"
    with pytest.raises(ConfigError, match="cannot be named 'coordinator'"):
        join_as_silo(tmp_path / "other", charter, name="coordinator", passphrase=None)
    asked_ = Request.read(parties.root / "north" / "north.request")
    key = IdentityKey.generate()
    named = replace(asked_, name="coordinator", identity=key.public).with_signatures(key)
    named.write(tmp_path / "named.request")
    with pytest.raises((ConfigError, IntegrityError)):
        admit(parties.founder, tmp_path / "named.request", named.fingerprint)


def test_an_older_or_unsealed_membership_is_refused(parties: Parties, tmp_path: Path) -> None:
    first = parties.sealed.read_text()
    parties.seal()
    old, charter = tmp_path / "membership.toml", Charter.read(parties.founder / "charter.toml")
    old.write_text(first)
    with pytest.raises(IntegrityError, match="serial 1, but 2 was accepted"):
        accept(parties.root / "north", old, Membership.read(old).fingerprint, asked)
    made = Membership.read(parties.sealed)
    changes: dict[str, Membership] = {
        "serial": replace(made, serial=3),
        "a silo less": replace(made, silos=made.silos[:1], roster=made.roster[:1], nodes=made.nodes[:1]),
        "valid for longer": replace(made, valid_until="9999-01-01"),
        "sealed by another": made.with_signature(IdentityKey.generate()),
        "not sealed": replace(made, seal=b""),
        "another charter": replace(made, charter=bytes(32)),
    }
    for what, one in changes.items():
        with pytest.raises(IntegrityError):
            one.check(charter)
        old.write_text(one.to_toml())
        with pytest.raises(IntegrityError):
            accept(parties.root / "north", old, one.fingerprint, asked)
        assert Membership.read(old) == one, what
    target = parties.root / "north" / "membership.toml"
    target.write_text(changes["serial"].to_toml())  # whoever can write into the folder
    with pytest.raises(IntegrityError, match="not sealed by the founder"):
        _ = SiloFolder(parties.root / "north").membership


def test_a_membership_ends(parties: Parties) -> None:
    charter, founder = (
        Charter.read(parties.founder / "charter.toml"),
        IdentityKey.load(parties.founder / "founder.key", asked),
    )
    made = Membership.read(parties.sealed)
    with pytest.raises(ConfigError, match="was valid until 2020-01-01"):
        replace(made, valid_until="2020-01-01").with_signature(founder).check(charter)


def test_a_membership_older_than_a_charge_is_refused_at_the_start(parties: Parties) -> None:
    """Replaced in the folder by an earlier one that the founder sealed: the ledger remembers the later one."""
    north = parties.root / "north"
    first = (north / "membership.toml").read_text()
    (north / "table.csv").write_text("who,age,ill\n0,40,1\n1,50,0\n")
    parties.seal()
    with open_silo(SiloFolder(north, asked)) as party:
        party._ledger.ledger.charge(
            run="run",
            round=1,
            attempt=0,
            event=GaussianEvent(noise_multiplier=5.0),
            budget=None,
            origin=Origin(terms="a" * 64, coordinator="b" * 64, membership=2, policy="c" * 64),
        )
    (north / "membership.toml").write_text(first)
    with pytest.raises(IntegrityError, match="serial 1, but this silo was served under 2"):
        open_silo(SiloFolder(north, asked))


def another_coordinator(parties: Parties) -> None:
    """The coordinator's key is stolen: it is revoked, and another one is admitted."""
    revoke(parties.founder, "coordinator", "stolen")
    (parties.root / "coordinator").rename(parties.root / "robbed")
    joined = join_as_coordinator(
        parties.root / "coordinator", parties.founder / "charter.toml", passphrase=SECRET
    )
    admit(parties.founder, parties.root / "coordinator" / "coordinator.request", joined.fingerprint)


def test_a_founders_folder_from_a_backup_brings_no_revoked_key_back(parties: Parties) -> None:
    backup, north = parties.root / "backup", parties.root / "north"
    shutil.copytree(parties.founder, backup)
    another_coordinator(parties)
    made = parties.seal()
    shutil.rmtree(parties.founder)
    backup.rename(parties.founder)
    for above, cause in ((0, "serial 2, but another 2 was accepted"), (2, "must revoke it again")):
        again = seal(parties.founder, asked, above=above)
        with pytest.raises(IntegrityError, match=cause):
            accept(north, parties.sealed, again.fingerprint, asked)
        assert SiloFolder(north).membership.digest == made.digest
    revoke(parties.founder, "coordinator", "stolen, as was known before the backup was restored")
    new = parties.root / "coordinator" / "coordinator.request"
    admit(parties.founder, new, Request.read(new).fingerprint)
    assert parties.seal().revoked[0].identity == made.revoked[0].identity
    assert SiloFolder(north).membership.serial == 4


def test_a_membership_older_than_one_that_was_served_is_refused_at_the_start(parties: Parties) -> None:
    """Nothing was charged under the later one: that the silo was served under it is in the ledger."""
    north = parties.root / "north"
    first = (north / "membership.toml").read_text()
    (north / "table.csv").write_text("who,age,ill\n0,40,1\n1,50,0\n")
    another_coordinator(parties)
    parties.seal()
    for _ in range(2):
        with open_silo(SiloFolder(north, asked)) as party:
            notes = [note.text for note in party._ledger.ledger.notes if note.kind == "membership"]
            charter = party._membership.charter.hex()
        assert notes == [f"{charter} 2"]
    (north / "membership.toml").write_text(first)
    with pytest.raises(IntegrityError, match="serial 1, but this silo was served under 2"):
        open_silo(SiloFolder(north, asked))


# --- files of keys -------------------------------------------------------------------------------------------


def test_a_key_file_costs_what_the_page_says() -> None:
    """A fixture lowers the memory for these tests alone."""
    source = Path(key_files.__file__).read_text()
    assert "_KIBIBYTES: Final = 256 * 1024\n_PASSES: Final = 3\n_LANES: Final = 4\n" in source


def test_a_passphrase_is_read_to_the_end_of_its_descriptor() -> None:
    """A pipe may give it in pieces; the first one would be another passphrase."""
    reading, writing = os.pipe()
    asked = PromptedPassphrase(reading)

    def write() -> None:
        for piece in (b"five random ", b"words of mine\n"):
            os.write(writing, piece)
            time.sleep(0.05)
        os.close(writing)

    with ThreadPoolExecutor(1) as workers:
        written = workers.submit(write)
        assert asked() == b"five random words of mine"
        written.result()
    os.close(reading)


def test_a_protected_key_opens_with_its_passphrase_alone(tmp_path: Path) -> None:
    key, path = IdentityKey.generate(), tmp_path / "identity.key"
    key.save(path, SECRET)
    content = path.read_bytes()
    assert IdentityKey.load(path, asked).public == key.public
    assert key._private.private_bytes_raw() not in content
    refusals: tuple[tuple[Callable[[], bytes] | None, str], ...] = (
        (None, "takes a passphrase"),
        (lambda: b"five random words of min", "another passphrase"),
        (lambda: b"", "no passphrase"),
    )
    for given, said in refusals:
        with pytest.raises(CryptoError, match=said):
            IdentityKey.load(path, given)
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 1
        path.unlink()
        path.write_bytes(changed)
        path.chmod(0o600)
        with pytest.raises(CryptoError):
            IdentityKey.load(path, asked)
    path.write_bytes(content)
    path.chmod(0o640)
    with pytest.raises(CryptoError, match="0640"):
        IdentityKey.load(path, asked)
    with pytest.raises(CryptoError, match="protects nothing"):
        key.save(tmp_path / "empty", b"")


def test_the_authoritys_key_takes_a_passphrase_too(parties: Parties) -> None:
    assert (
        Authority.load(parties.founder, asked).certificate.subject.rfc4514_string()
        == "CN=fedveil federation hearts"
    )
    with pytest.raises(CryptoError, match="takes a passphrase"):
        Authority.load(parties.founder, None)
    with pytest.raises(CryptoError, match="another passphrase"):
        Authority.load(parties.founder, lambda: b"wrong")


# --- as commands ---------------------------------------------------------------------------------------------


def said(*words: str) -> str:
    """Run a command with the passphrase on a descriptor; return what it prints last on its last line."""

    read, write = os.pipe()
    os.write(write, SECRET + b"\n")
    os.close(write)
    options = [] if words[1] in ("admit", "revoke") else ["--passphrase-fd", str(read)]
    result = CliRunner().invoke(app.app, [*words, *options], catch_exceptions=False)
    os.close(read)
    assert result.exit_code == 0, result.output
    return result.output.strip().rpartition(": ")[2]


def test_the_ceremony_by_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(SCHEMA)
    said("federation", "create", "founder", "--host", "learn.example.org")
    charter = ("--charter", "founder/charter.toml")
    prints = {
        "c/coordinator": said("coordinator", "join", "c", *charter, "--listen", "0.0.0.0:9443"),
        "n/north": said("silo", "join", "n", "--name", "north", *charter),
        "s/south": said("silo", "join", "s", "--name", "south", *charter),
    }
    requests = [f"{name}.request" for name in prints]
    given = [word for one in prints.values() for word in ("--fingerprint", one)]
    few = CliRunner().invoke(app.app, ["federation", "admit", "founder", *requests, *given[:2]])
    assert "given 1 times for 3 requests" in str(few.exception or few.output)
    said("federation", "admit", "founder", *requests, *given)
    fingerprint = said("federation", "seal", "founder")
    for group, folder in (("coordinator", "c"), ("silo", "n"), ("silo", "s")):
        said(group, "accept", folder, "founder/sealed/membership.toml", "--fingerprint", fingerprint)
    again = said("silo", "rotate", "n")
    said("federation", "admit", "founder", "n/north.request", "--fingerprint", again)
    said("federation", "revoke", "founder", "south", "--reason", "it left")
    fingerprint = said("federation", "seal", "founder")
    said("silo", "accept", "n", "founder/sealed/membership.toml", "--fingerprint", fingerprint)
    membership = SiloFolder(Path("n"), asked).membership
    assert (membership.serial, membership.silos) == (2, ("north",))

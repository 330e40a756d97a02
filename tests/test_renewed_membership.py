"""A membership that is accepted while parties are served: who may go on under it, when, and what is refused."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.crypto.keys import IdentityKey
from fedveil.errors import IntegrityError, ProtocolError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.federation.enrollment.founder import admit, revoke, seal
from fedveil.federation.enrollment.joining import (
    DraftedPolicy,
    accept,
    join_as_coordinator,
    join_as_silo,
    rotate,
)
from fedveil.federation.hosts.coordinator_service import CoordinatorService
from fedveil.federation.hosts.folders import CoordinatorFolder, MembershipFile, SiloFolder
from fedveil.federation.hosts.metrics_server import ask_party
from fedveil.federation.hosts.silo_service import ServedSilo
from fedveil.federation.hosts.sockets import free_port
from fedveil.federation.hosts.submission import Submission, create_run, due_parts, read_document
from fedveil.federation.membership import Membership, Revoked
from fedveil.privacy.ledger import read_entries


@dataclass
class Federation:
    """Silos that are served in this process, and whoever coordinates."""

    made: Demonstration
    silos: dict[str, ServedSilo]

    @property
    def founder(self) -> Path:
        return self.made.provisioned.authority

    @property
    def coordinator(self) -> Path:
        return self.made.provisioned.coordinator

    @property
    def sealed(self) -> Path:
        return self.founder / "sealed" / "membership.toml"

    def folder(self, silo: str) -> Path:
        return self.made.provisioned.silos[0].with_name(silo)

    def join(self, name: str) -> None:
        """Have a silo join, with a table of another's rows, and be admitted."""
        charter = self.founder / "charter.toml"
        asked = join_as_silo(
            self.folder(name), charter, name=name, passphrase=None, policy=DraftedPolicy(epsilon=20.0)
        )
        admit(self.founder, self.folder(name) / f"{name}.request", asked.fingerprint)
        shutil.copy(self.made.experiment.parent / "south.csv", self.folder(name) / "table.csv")

    def accept(self, *parties: Path) -> Membership:
        made = Membership.read(self.sealed)
        for party in parties:
            accept(party, self.sealed, made.fingerprint, None)
        return made

    def begin(self) -> CoordinatorParty[Any]:
        home = CoordinatorFolder(self.coordinator)
        run = create_run(home, read_document(self.made.experiment, home))
        (party,) = due_parts(home, run.path)
        return party

    def play(
        self, party: CoordinatorParty[Any], order: tuple[str, ...], until: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Exchange messages until the run ends, or until something; return why it ended."""
        while not party.is_finished and not until():
            for number, data in party.messages():
                try:
                    party.receive(number, self.silos[order[number]].receive(data))
                except ProtocolError as error:
                    party.stop(f"{order[number]}: {error}")
                    break
        for number, data in party.farewells:
            with suppress(ProtocolError):
                party.receive(number, self.silos[order[number]].receive(data))
        return None if party.outcome is None else party.outcome.stopped

    def charges(self, silo: str) -> int:
        return len(read_entries(self.folder(silo) / "state" / "ledger.jsonl"))


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = write_demonstration(
        tmp_path / "demo", rounds=2, port=free_port(), hospitals={"north": 30, "south": 30}
    )
    with ExitStack() as served:
        silos = {path.name: ServedSilo(SiloFolder(path)) for path in made.provisioned.silos}
        for one in silos.values():
            served.callback(one.close)
        yield Federation(made, silos)


def after_a_round(party: CoordinatorParty[Any]) -> Callable[[], bool]:
    return lambda: party._part.number > 1


def test_a_run_goes_on_while_a_silo_is_added_and_the_next_run_has_it(federation: Federation) -> None:
    with closing(federation.begin()) as party:
        federation.play(party, ("north", "south"), after_a_round(party))
        federation.join("a-third")  # sorts before the others, and changes nobody's number
        seal(federation.founder, None)
        made = federation.accept(*map(federation.folder, ("north", "south", "a-third")))
        assert made.silos == ("north", "south", "a-third")
        assert federation.play(party, ("north", "south")) is None  # the coordinator has accepted nothing yet
    assert (federation.charges("north"), federation.charges("south")) == (2, 2)
    federation.accept(federation.coordinator)
    with closing(ServedSilo(SiloFolder(federation.folder("a-third")))) as third:
        federation.silos["a-third"] = third
        with closing(federation.begin()) as party:
            assert federation.play(party, made.silos) is None
    assert [federation.charges(name) for name in made.silos] == [4, 4, 2]


def test_a_silo_that_has_not_accepted_is_named(federation: Federation) -> None:
    federation.join("west")
    seal(federation.founder, None)
    made = federation.accept(*map(federation.folder, ("north", "west")), federation.coordinator)
    with closing(ServedSilo(SiloFolder(federation.folder("west")))) as west:
        federation.silos["west"] = west
        with closing(federation.begin()) as party:
            stopped = federation.play(party, made.silos)
    assert stopped is not None
    assert stopped.startswith("silo south refuses (schema): the coordinator has another membership")
    assert [federation.charges(name) for name in ("north", "south")] == [0, 0]


def _unsealed(federation: Federation) -> bytes:
    """One more silo by nobody's seal, with a seal of another founder over it."""
    present = Membership.read(federation.sealed)
    added = replace(
        present,
        serial=2,
        silos=(*present.silos, "west"),
        roster=(*present.roster, IdentityKey.generate().public),
        nodes=(*present.nodes, "ssh-rsa x"),
    )
    return added.with_signature(IdentityKey.generate()).to_toml().encode()


def _altered(federation: Federation) -> bytes:
    """What the founder sealed, but for one silo's key."""
    sealed = seal(federation.founder, None)
    other = replace(sealed, roster=(sealed.roster[0], IdentityKey.generate().public))
    return other.to_toml().encode()


def _other_key(federation: Federation) -> bytes:
    """A seal of the founder over another key of the silo, which its owner never asked for."""
    folder = federation.folder("north")
    charter = federation.founder / "charter.toml"
    revoke(federation.founder, "north", "taken over")
    stranger = join_as_silo(folder.with_name("stranger"), charter, name="north", passphrase=None)
    admit(federation.founder, folder.with_name("stranger") / "north.request", stranger.fingerprint)
    seal(federation.founder, None)
    return federation.sealed.read_bytes()


def _older(federation: Federation) -> bytes:
    """The first membership, once a second one was accepted."""
    before = federation.sealed.read_bytes()
    seal(federation.founder, None)
    federation.accept(federation.folder("north"), federation.folder("south"), federation.coordinator)
    with closing(federation.begin()) as party:
        assert federation.play(party, ("north", "south")) is None
    return before


def _without_revocation(federation: Federation) -> bytes:
    """A founder's folder that was restored has lost a revocation."""
    backup = federation.founder.with_name("backup")
    shutil.copytree(federation.founder, backup)
    federation.join("west")
    revoke(federation.founder, "west", "the disk was stolen")
    seal(federation.founder, None)
    federation.accept(federation.folder("north"), federation.folder("south"), federation.coordinator)
    with closing(federation.begin()) as party:
        assert federation.play(party, ("north", "south")) is None
    seal(backup, None, above=7)
    return (backup / "sealed" / "membership.toml").read_bytes()


@pytest.mark.parametrize(
    ("forge", "before"),
    [(_unsealed, 0), (_altered, 0), (_other_key, 0), (_older, 2), (_without_revocation, 2)],
    ids=[
        "another seal",
        "another key under the seal",
        "another key of this silo",
        "older",
        "lost revocation",
    ],
)
def test_no_other_membership_is_used(
    forge: Callable[[Federation], bytes],
    before: int,
    federation: Federation,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Put into a served silo's folder, it gives no session; with the right one back, the silo goes on."""
    file = federation.folder("north") / "membership.toml"
    bad = forge(federation)
    right = file.read_bytes()
    file.with_suffix(".bad").write_bytes(bad)
    os.replace(file.with_suffix(".bad"), file)
    party = federation.begin()
    with closing(party):
        stopped = federation.play(party, ("north", "south"))
    assert stopped is not None
    assert "north" in stopped
    assert [federation.charges(name) for name in ("north", "south")] == [before, before]
    file.with_suffix(".right").write_bytes(right)
    os.replace(file.with_suffix(".right"), file)
    with closing(federation.begin()) as party:
        assert federation.play(party, ("north", "south")) is None
    assert [federation.charges(name) for name in ("north", "south")] == [before + 2, before + 2]


def test_a_file_that_is_replaced_between_its_check_and_its_use_is_not_used(federation: Federation) -> None:
    """The silo keeps to its membership while one that adds a silo waits; what lies there by then is checked anew."""
    bad = _without_revocation(federation)
    federation.join("a-third")
    seal(federation.founder, None)
    made = federation.accept(*map(federation.folder, ("north", "south", "a-third")), federation.coordinator)
    north, file = federation.silos["north"], federation.folder("north") / "membership.toml"
    with pytest.raises(ProtocolError):
        north.receive(b"")  # it has read the new membership, and is not asked to go on under it yet
    right = file.read_bytes()
    file.write_bytes(bad)
    with closing(ServedSilo(SiloFolder(federation.folder("a-third")))) as third:
        federation.silos["a-third"] = third
        with closing(federation.begin()) as party:
            stopped = federation.play(party, made.silos)
        assert stopped is not None
        assert "north" in stopped
        assert [federation.charges(name) for name in made.silos] == [2, 2, 0]
        file.write_bytes(right)
        with closing(federation.begin()) as party:
            assert federation.play(party, made.silos) is None


def test_a_revoked_coordinator_gets_nothing_more_of_the_session_that_is_open(federation: Federation) -> None:
    party = federation.begin()
    with closing(party):
        federation.play(party, ("north", "south"), after_a_round(party))
        assert federation.charges("north") == 1
        revoke(federation.founder, "coordinator", "its key was stolen")
        again = federation.coordinator.with_name("again")
        asked = join_as_coordinator(again, federation.founder / "charter.toml", passphrase=None)
        admit(federation.founder, again / "coordinator.request", asked.fingerprint)
        seal(federation.founder, None)
        federation.accept(federation.folder("north"))
        (data,) = (data for number, data in party.messages() if number == 0)
        with pytest.raises(ProtocolError):
            federation.silos["north"].receive(data)
        party.stop("revoked")
    assert federation.charges("north") == 1


def test_a_silo_goes_on_with_its_next_keys(federation: Federation) -> None:
    north = federation.folder("north")
    asked = rotate(north, None)
    admit(federation.founder, north / "north.request", asked.fingerprint)
    seal(federation.founder, None)
    made = federation.accept(north, federation.folder("south"), federation.coordinator)
    with closing(federation.begin()) as party:
        assert federation.play(party, made.silos) is None
    assert federation.charges("north") == 2


@pytest.mark.parametrize("changed", ["north", "coordinator", "both"])
def test_a_run_is_resumed_after_keys_were_changed(federation: Federation, changed: str) -> None:
    """Its earlier rounds were charged under terms that the former key of the coordinator signed."""
    homes = {"north": federation.folder("north"), "coordinator": federation.coordinator}
    party = federation.begin()
    with closing(party):
        federation.play(party, ("north", "south"), after_a_round(party))
        party.stop("interrupted")
    for _ in range(2):  # so that the former key is not that of the membership just before, either
        for name in homes if changed == "both" else (changed,):
            asked = rotate(homes[name], None)
            admit(federation.founder, homes[name] / f"{name}.request", asked.fingerprint)
        seal(federation.founder, None)
        federation.accept(homes["north"], federation.folder("south"), federation.coordinator)
    (resumed,) = due_parts(CoordinatorFolder(federation.coordinator), party._run.folder.path)
    with closing(resumed):
        assert federation.play(resumed, ("north", "south")) is None
    assert [federation.charges(name) for name in ("north", "south")] == [2, 2]


def test_what_extends_a_membership_takes_nothing_away(federation: Federation) -> None:
    present = Membership.read(federation.sealed)
    key = IdentityKey.generate().public
    west = {
        "silos": (*present.silos, "west"),
        "roster": (*present.roster, key),
        "nodes": (*present.nodes, "x"),
    }
    assert replace(present, serial=2, **west).extends(present)
    assert replace(present, serial=2, valid_until="9999-01-01").extends(present)
    revoked = Revoked(identity=key, since="2026-01-01", reason="lost")
    for change in (
        {"silos": present.silos[:1], "roster": present.roster[:1], "nodes": present.nodes[:1]},
        {"silos": present.silos[::-1], "roster": present.roster[::-1], "nodes": present.nodes[::-1]},
        {"roster": (present.roster[0], key)},
        {"nodes": (present.nodes[0], "x")},
        {"coordinator": key},
        {"server": "ab" * 32},
        {"charter": bytes(range(32))},
        {"schema_digest": bytes(range(32))},
        {"valid_until": "2020-01-01"},
        {"revoked": (revoked,)},
    ):
        changed: dict[str, Any] = {"serial": 2, **change}
        assert not replace(present, **changed).extends(present), change


def test_a_file_that_is_refused_is_refused_again(federation: Federation) -> None:
    folder = SiloFolder(federation.folder("north"))
    file, present = MembershipFile(folder), folder.membership
    assert file.read_if_changed(present) is None
    (folder / "membership.toml").write_bytes(_unsealed(federation))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="not sealed by the founder"):
            file.read_if_changed(present)


def test_a_run_that_is_played_ends_where_a_key_is_taken_away(federation: Federation) -> None:
    """And the coordinator goes on under the new membership, without a restart."""
    home = CoordinatorFolder(federation.coordinator)
    service = CoordinatorService(home)
    try:
        run = create_run(home, read_document(federation.made.experiment, home))
        with Submission(home, run.path) as submitted:
            assert submitted.lasts(0.5)  # for no silo is there
            revoke(federation.founder, "south", "its disk was stolen")
            seal(federation.founder, None)
            federation.accept(federation.coordinator)
            until = time.monotonic() + 120
            while submitted.lasts(0.5):
                assert time.monotonic() < until
            end = submitted.end()
        assert end is not None
        assert "a key was replaced or revoked in the membership that was accepted" in (end.error or "")
        while service.silos != ("north",):
            assert time.monotonic() < until
            time.sleep(0.1)
        status = ask_party(federation.coordinator, "/connection")
        assert status is not None
        assert "south" not in status[1]
    finally:
        service.stop()

"""A membership that is delivered to served silos: who accepts it, and what no carrier can do with it."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ConfigError, IntegrityError, ProtocolError
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.enrollment.founder import revoke, seal
from fedveil.federation.hosts.coordinator_service import CoordinatorService
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.metrics_server import ask_party
from fedveil.federation.hosts.silo_service import ServedSilo, SiloService
from fedveil.federation.hosts.sockets import RunOutcome, free_port
from fedveil.federation.hosts.submission import Submission, create_run, read_document
from fedveil.federation.membership import (
    Charter,
    Membership,
    MembershipDelivery,
    Outcome,
    open_delivery,
    pack_answer,
    pack_delivery,
)
from fedveil.federation.transport.interface import LARGEST_OPENING, Received
from fedveil.privacy.ledger import read_entries
from tests.commands import output
from tests.test_renewed_membership import Federation, after_a_round, federation  # noqa: F401 (a fixture)

SILOS = ("north", "south")


def allow(federation: Federation, *silos: str) -> None:  # noqa: F811
    for silo in silos:
        with (federation.folder(silo) / "policy.toml").open("a") as policy:
            policy.write("accept_added_silos = true\n")


def deliver(federation: Federation, silo: str, membership: Membership | bytes) -> Outcome:  # noqa: F811
    message = membership if isinstance(membership, bytes) else pack_delivery(membership)
    answer = federation.silos[silo].receive(message)
    assert answer[:-1] == pack_answer(Outcome.ACCEPTED)[:-1]
    return Outcome(answer[-1])


def add_west(federation: Federation) -> Membership:  # noqa: F811
    federation.join("west")
    seal(federation.founder, None)
    return Membership.read(federation.sealed)


def serial(federation: Federation, silo: str) -> int:  # noqa: F811
    return Membership.read(federation.folder(silo) / "membership.toml").serial


def test_the_next_run_has_the_added_silo_and_the_open_one_ends_among_its_own(federation: Federation) -> None:  # noqa: F811
    allow(federation, *SILOS)
    with closing(federation.begin()) as party:
        federation.play(party, SILOS, after_a_round(party))
        made = add_west(federation)
        assert [deliver(federation, silo, made) for silo in SILOS] == [Outcome.ACCEPTED] * 2
        assert federation.play(party, SILOS) is None
    assert [federation.charges(silo) for silo in SILOS] == [2, 2]
    federation.accept(federation.coordinator, federation.folder("west"))
    with ExitStack() as served:
        federation.silos["west"] = served.enter_context(
            closing(ServedSilo(SiloFolder(federation.folder("west"))))
        )
        with closing(federation.begin()) as party:
            assert federation.play(party, made.silos) is None
    assert [federation.charges(silo) for silo in made.silos] == [4, 4, 2]
    assert deliver(federation, "north", made) is Outcome.PRESENT


def test_without_the_policys_word_nothing_is_accepted(federation: Federation) -> None:  # noqa: F811
    made = add_west(federation)
    assert deliver(federation, "north", made) is Outcome.BY_HAND
    allow(federation, "north")  # it is read again with every delivery
    assert (deliver(federation, "north", made), deliver(federation, "south", made)) == (
        Outcome.ACCEPTED,
        Outcome.BY_HAND,
    )
    assert (serial(federation, "north"), serial(federation, "south")) == (made.serial, 1)


def _unsealed(federation: Federation) -> Membership:  # noqa: F811
    return replace(add_west(federation), seal=bytes(64))


def _by_another_founder(federation: Federation) -> Membership:  # noqa: F811
    return add_west(federation).with_signature(IdentityKey.generate())


def _changed_under_the_seal(federation: Federation) -> bytes:  # noqa: F811
    return pack_delivery(add_west(federation)).replace(b"west", b"best")


def _of_another_federation(federation: Federation) -> Membership:  # noqa: F811
    """By the same founder's key."""
    founder = IdentityKey.load(federation.founder / "founder.key", None)
    return replace(add_west(federation), charter=bytes(32)).with_signature(founder)


def _replaces_a_key(federation: Federation) -> Membership:  # noqa: F811
    founder = IdentityKey.load(federation.founder / "founder.key", None)
    made = add_west(federation)
    roster = (made.roster[0], IdentityKey.generate().public, *made.roster[2:])
    return replace(made, roster=roster).with_signature(founder)


def _revokes(federation: Federation) -> Membership:  # noqa: F811
    federation.join("west")
    revoke(federation.founder, "south", "the disk was stolen")
    seal(federation.founder, None)
    return Membership.read(federation.sealed)


def _expired(federation: Federation) -> Membership:  # noqa: F811
    founder = IdentityKey.load(federation.founder / "founder.key", None)
    return replace(add_west(federation), valid_until="2020-01-01").with_signature(founder)


@pytest.mark.parametrize(
    "forge",
    [
        _unsealed,
        _by_another_founder,
        _changed_under_the_seal,
        _of_another_federation,
        _replaces_a_key,
        _revokes,
        _expired,
    ],
)
def test_nothing_else_is_accepted(
    forge: Callable[[Federation], Membership | bytes],
    federation: Federation,  # noqa: F811
) -> None:
    allow(federation, *SILOS)
    before = (federation.folder("north") / "membership.toml").read_bytes()
    forged = forge(federation)
    assert deliver(federation, "north", forged) is Outcome.REFUSED
    assert (federation.folder("north") / "membership.toml").read_bytes() == before
    with closing(federation.begin()) as party:
        assert federation.play(party, SILOS) is None


def test_an_older_one_or_a_second_one_of_a_number_is_refused(federation: Federation) -> None:  # noqa: F811
    allow(federation, *SILOS)
    first = Membership.read(federation.sealed)
    made = add_west(federation)
    founder = IdentityKey.load(federation.founder / "founder.key", None)
    second = replace(made, valid_until="9998-01-01").with_signature(founder)  # of the same serial number
    assert deliver(federation, "north", made) is Outcome.ACCEPTED
    assert deliver(federation, "north", second) is Outcome.REFUSED
    assert deliver(federation, "north", first) is Outcome.REFUSED
    assert Membership.read(federation.folder("north") / "membership.toml") == made


def test_a_membership_that_the_operator_accepts_at_this_moment_is_kept(federation: Federation) -> None:  # noqa: F811
    """What is delivered is held against the file under its lock, not only against what was read before."""
    allow(federation, "north")
    north = SiloFolder(federation.folder("north"))
    party = federation.silos["north"]
    present, made = north.membership, add_west(federation)
    seal(federation.founder, None)
    newer = federation.accept(federation.folder("north"))
    with pytest.raises(ConfigError, match="replaced at this moment"):
        party._file.accept_added(made, present)
    assert Membership.read(north / "membership.toml") == newer


def test_text_without_the_founders_signature_is_not_parsed(federation: Federation) -> None:  # noqa: F811
    """It is refused by its signature, though it is no TOML and no UTF-8."""
    made = Membership.read(federation.sealed)
    charter = Charter.read(federation.founder / "charter.toml")
    message = pack_delivery(made)
    with pytest.raises(IntegrityError, match="not sealed by the founder"):
        open_delivery(message[:-40] + b"\xff" * 40, charter)
    with pytest.raises(IntegrityError, match="above the limit"):
        open_delivery(message + bytes(LARGEST_OPENING), charter)
    assert open_delivery(message, charter) == made


def test_deliveries_without_end_use_up_the_allowance(federation: Federation) -> None:  # noqa: F811
    policy: Path = federation.folder("north") / "policy.toml"
    policy.write_text(policy.read_text() + "uncharged_cpu_seconds = 0.001\n")
    with closing(federation.silos.pop("north")):
        pass
    with closing(ServedSilo(SiloFolder(federation.folder("north")))) as north:
        message = pack_delivery(add_west(federation))

        def deliver_for_ever() -> None:
            for _ in range(100):
                north.receive(message)

        with pytest.raises(ProtocolError, match="uncharged_cpu_seconds"):
            deliver_for_ever()


def test_a_silo_is_added_without_a_command_at_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All parties are served, over HTTPS; two commands at the new silo, two at the founder, one at the coordinator."""
    caplog.set_level(logging.INFO, "fedveil")
    made = write_demonstration(
        tmp_path / "demo", rounds=2, port=free_port(), hospitals={"north": 30, "south": 30}
    )
    founder, home = made.provisioned.authority, CoordinatorFolder(made.provisioned.coordinator)
    north, south = made.provisioned.silos
    for silo in (north, south):
        with (silo / "policy.toml").open("a") as policy:
            policy.write("accept_added_silos = true\n")
    west, sealed = north.with_name("west"), founder / "sealed" / "membership.toml"
    commands = list[str]()

    def command(*words: object) -> str:
        commands.append(" ".join(map(str, words[:2])))
        return output(*words)

    with ExitStack() as served:
        coordinator = CoordinatorService(home)
        served.callback(coordinator.stop)
        for silo in (north, south):
            served.callback(SiloService(SiloFolder(silo)).stop)
        given = {path: path.read_bytes() for silo in (north, south) for path in silo.glob("*.toml")}
        joined = command(
            *("silo", "join", west, "--name", "west", "--charter", founder / "charter.toml"),
            *("--table", made.experiment.parent / "south.csv", "--no-passphrase"),
        )
        shutil.copy(south / "policy.toml", west / "policy.toml")  # its operator's choice
        asked = joined.strip().rpartition(": ")[2]
        command("federation", "admit", founder, west / "west.request", "--fingerprint", asked)
        fingerprint = command("federation", "seal", founder).strip().rpartition(": ")[2]
        command("coordinator", "accept", home.path, sealed, "--fingerprint", fingerprint)
        command("silo", "accept", west, sealed, "--fingerprint", fingerprint)
        served.callback(SiloService(SiloFolder(west)).stop)  # `silo serve west --accept` does both
        run = create_run(home.again(), read_document(made.experiment, home.again()))
        with Submission(home, run.path) as submitted:
            until = time.monotonic() + 120
            while submitted.lasts(0.5):
                assert time.monotonic() < until
            end = submitted.end()
    assert end == RunOutcome(None, None, ())
    changed = {path for path, before in given.items() if path.read_bytes() != before}
    assert changed == {silo / "membership.toml" for silo in (north, south)}
    for silo in (north, south, west):
        assert Membership.read(silo / "membership.toml") == Membership.read(sealed)
        assert len(read_entries(silo / "state" / "ledger.jsonl")) == 2
    assert caplog.text.count("(accept_added_silos); added: west") == 2
    assert Counter(commands) == {
        "silo join": 1,
        "federation admit": 1,
        "federation seal": 1,
        "coordinator accept": 1,
        "silo accept": 1,
    }


def test_an_open_connection_to_a_server_whose_key_is_revoked_ends(tmp_path: Path) -> None:
    """The silo alone has accepted: the thief of a TLS key would go on serving under it."""
    made = write_demonstration(tmp_path / "demo", port=free_port(), hospitals={"north": 3})
    founder, coordinator, (north,) = (
        made.provisioned.authority,
        made.provisioned.coordinator,
        made.provisioned.silos,
    )
    with ExitStack() as served:
        served.callback(CoordinatorService(CoordinatorFolder(coordinator)).stop)
        served.callback(SiloService(SiloFolder(north)).stop)

        def wait_for(status: int, text: str) -> None:
            until = time.monotonic() + 60
            while (found := ask_party(north, "/ready")) is None or found[0] != status or text not in found[1]:
                assert time.monotonic() < until, found
                time.sleep(0.1)

        wait_for(200, "")
        asked = output("coordinator", "rotate", coordinator).strip().rpartition(": ")[2]
        output("federation", "admit", founder, coordinator / "coordinator.request", "--fingerprint", asked)
        fingerprint = output("federation", "seal", founder).strip().rpartition(": ")[2]
        wait_for(200, "")
        output("silo", "accept", north, founder / "sealed" / "membership.toml", "--fingerprint", fingerprint)
        wait_for(503, "wrong-server-key")


class _Carrier:
    """A transport by hand."""

    def __init__(self) -> None:
        self.current: dict[int, bytes] = {}
        self.arrived: list[Received] = []

    def offer(self, messages: dict[int, bytes], withdrawn: tuple[int, ...] = ()) -> None:
        self.current = {silo: data for silo, data in self.current.items() if silo not in withdrawn} | messages

    def collect(self, seconds: float) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None: ...


def test_a_silos_own_message_waits_for_its_answer(
    federation: Federation,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the answer is; and a silo that has the membership is not asked again."""
    caplog.set_level(logging.INFO, "fedveil.coordinator")
    made, carrier, delivered = Membership.read(federation.sealed), _Carrier(), set[int]()
    transport = MembershipDelivery(carrier, made, delivered)
    transport.offer({0: b"zero", 1: b"one"})
    assert carrier.current == dict.fromkeys((0, 1), pack_delivery(made))
    transport.offer({0: b"newer"})
    carrier.arrived = [
        Received(0, pack_answer(Outcome.PRESENT)),
        Received(1, pack_answer(Outcome.BY_HAND)),
        Received(7, pack_answer(Outcome.PRESENT)),
        Received(1, b"its own"),
    ]
    assert transport.collect(0.0) == [Received(1, b"its own")]
    assert (carrier.current, delivered) == ({0: b"newer", 1: b"one"}, {0})
    assert "silo south has not accepted membership 1: its operator accepts it" in caplog.text
    again = MembershipDelivery(carrier, made, delivered)
    again.offer({0: b"zero", 1: b"one"})
    assert carrier.current == {0: b"zero", 1: pack_delivery(made)}
    carrier.arrived = [
        Received(1, pack_answer(Outcome.BY_HAND)[:-1] + b"\xff\xff")
    ]  # from a carrier that makes it up
    again.offer({}, (1,))
    assert again.collect(0.0) == []
    assert delivered == {0}

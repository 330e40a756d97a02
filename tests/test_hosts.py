"""A federation created, checked and served: keys and certificates, the key process's socket, the exchange loop."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.crypto.keys import IdentityKey
from fedveil.errors import BusyError, ConfigError, CryptoError, DataError, IntegrityError, ProtocolError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.enrollment.certificates import (
    Authority,
    certificate_key_digest,
    check_client_certificate,
    days_left,
    new_server_key,
    node_key_digest,
)
from fedveil.federation.enrollment.demonstration import (
    HOSPITALS,
    Demonstration,
    provision,
    write_demonstration,
)
from fedveil.federation.exchange import ReplyKind
from fedveil.federation.hosts.child_process import settings_of_parent
from fedveil.federation.hosts.coordinator_service import AttachedLink
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.key_process import KeyProcess, open_silo
from fedveil.federation.hosts.link_folder import LinkFolder
from fedveil.federation.hosts.metrics_server import Meter
from fedveil.federation.hosts.silo_checks import inspect_silo
from fedveil.federation.hosts.sockets import LINK, RunningFolder, RunOutcome, free_port, listen
from fedveil.federation.hosts.submission import Submission, create_run, due_parts, read_document, watch
from fedveil.federation.membership import Membership
from fedveil.federation.silo import SiloParty
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.transport.exchange_loop import Patience, SilenceTimer, exchange_messages
from fedveil.federation.transport.interface import BEGINNING, LARGEST_OPENING, Received
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.statistics.figures import rows
from fedveil.statistics.result import read_released
from tests.commands import as_json, ended, output
from tests.federation_world import small_keys
from tests.list_of_users import write_list
from tests.processes import ask
from tests.runs import Silent, json_lines

COHORT = """
name = "cohort"
[data.table]
schema_file = "schema.toml"
files = {files}
[privacy]
epsilon = 15.0
[protection]
name = "secure-aggregation"
[statistics]
silos = "uniform"
max_standard_error = 1e6
[statistics.release]
age = {{ show = ["count", "missing", "quantiles"], bins = 8 }}
"""


@pytest.fixture
def made(tmp_path: Path) -> Demonstration:
    return write_demonstration(tmp_path / "demo", rounds=2)


@pytest.fixture
def guards(made: Demonstration) -> Iterator[list[Path]]:
    """The guards of all silos, each on its socket."""
    with serving(made) as paths:
        yield paths


@contextmanager
def serving(
    made: Demonstration, around: Callable[[SiloParty, int], Any] = lambda party, _: party, **settings: Any
) -> Iterator[list[Path]]:
    served, paths = [], []
    folder = Path(tempfile.mkdtemp(prefix="fedveil-"))
    for number, path in enumerate(made.provisioned.silos):
        paths.append(folder / str(number))
        guard = KeyProcess(around(open_silo(SiloFolder(path)), number), paths[-1], **settings)
        threading.Thread(target=guard.serve, daemon=True).start()
        served.append(guard)
    yield paths
    for guard in served:
        guard.close()
    shutil.rmtree(folder)


def test_a_federation_is_founded_with_keys_that_only_their_owner_reads(made: Demonstration) -> None:
    founded = made.provisioned
    secrets = [founded.authority / "ca.key", founded.coordinator / "identity.key"]
    secrets += [founded.coordinator / "link" / "server.key"]
    for path in founded.silos:
        secrets += [path / "identity.key", path / "node.key"]
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in founded.silos} == {0o700}
    assert not list(founded.coordinator.glob("ca.key"))
    coordinator = CoordinatorFolder(founded.coordinator)
    membership = coordinator.membership
    assert membership.silos == tuple(HOSPITALS)
    assert coordinator.identity.public == membership.coordinator
    for number, path in enumerate(founded.silos):
        silo = SiloFolder(path)
        assert silo.membership.digest == membership.digest
        assert silo.identity.public == membership.roster[number]
        assert check_client_certificate(path) > 396
    assert len({node_key_digest(public) for public in membership.nodes}) == 4
    assert certificate_key_digest(founded.coordinator / "link" / "server.crt") == membership.server


def test_a_membership_survives_its_document(made: Demonstration) -> None:
    path = made.provisioned.coordinator / "membership.toml"
    membership = Membership.read(path)
    assert membership.to_toml() == path.read_text()
    path.write_text(path.read_text().replace("switzerland", "va"))
    with pytest.raises(ConfigError, match="same name"):
        Membership.read(path)
    path.write_text("coordinator = 3")
    with pytest.raises(ConfigError, match="silos: is required"):
        Membership.read(path)


def test_nothing_is_overwritten(made: Demonstration, tmp_path: Path) -> None:
    schema = made.provisioned.coordinator / "schema.toml"
    with pytest.raises(ConfigError, match="exists already"):
        provision(made.provisioned.coordinator.parent, ("a", "b"), schema=schema)
    with pytest.raises(ConfigError, match="name of its own"):
        provision(tmp_path / "twice", ("a", "a"), schema=schema)


def test_a_silo_is_checked_on_its_own_host(made: Demonstration) -> None:
    path = made.provisioned.silos[3]
    found_ = inspect_silo(SiloFolder(path))
    assert found_["records (shown here only)"] == HOSPITALS["va"]
    assert found_["spent over all runs"] == "nothing yet"
    assert found_["allowed over all runs"] == "epsilon 20 at delta 1e-05"
    with (path / "policy.toml").open("a") as policy:
        policy.write("without_guarantee = true\n")
    assert inspect_silo(SiloFolder(path))["allowed over all runs"].startswith("no limit: ")
    assert as_json("federation", "check", path, "--offline")["silo"] == "va (number 3 of 4)"


def test_a_silo_whose_table_is_a_header_alone_is_checked_like_any_other(made: Demonstration) -> None:
    silo = SiloFolder(made.provisioned.silos[3])
    table = silo / str(silo.settings.table)
    table.write_text(table.read_text().splitlines()[0] + "\n")
    checked = inspect_silo(silo)
    assert checked["records (shown here only)"] == checked["users with records (shown here only)"] == 0
    assert checked["records per user: least, median, most (shown here only)"] == "nobody has any"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: (path / "schema.toml").write_text((path / "schema.toml").read_text() + "\n"), "agreed"),
        (lambda path: shutil.copy(path.parent / "va" / "identity.key", path / "identity.key"), "not the key"),
        (lambda path: (path / "node.key").chmod(0o644), "mode 0644"),
        (lambda path: (path / "ca.crt").write_bytes(b"none"), "no certificate"),
        (lambda path: (path / "ca.crt").unlink(), "cannot be read"),
        (lambda path: (path / "silo.toml").write_text('name = "va"\ncoordinator = "a:1"\nport = 1'), "port"),
        (lambda path: (path / "policy.toml").unlink(), "no such file"),
        (lambda path: (path / "silo.toml").write_text('name = "nowhere"\ncoordinator = "a:1"'), "no silo"),
        (lambda path: (path / "membership.toml").unlink(), "not a folder of"),
    ],
)
def test_what_is_wrong_with_a_silo_is_said(spoil: Any, expected: str, made: Demonstration) -> None:
    path = made.provisioned.silos[0]
    spoil(path)
    with pytest.raises((ConfigError, CryptoError, IntegrityError), match=expected):
        inspect_silo(SiloFolder(path))


def test_a_table_that_does_not_fit_is_named_without_its_values(made: Demonstration) -> None:
    path = made.provisioned.silos[2]
    table = path / str(SiloFolder(path).settings.table)
    lines = table.read_text().splitlines()
    lines[5] = "61" + lines[5][lines[5].index(",") :]
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"record 5 .*'patient': the user is no whole number below 50"):
        inspect_silo(SiloFolder(path))


def test_a_list_of_users_that_the_schema_does_not_name_is_refused(made: Demonstration) -> None:
    silo = SiloFolder(made.provisioned.silos[2])
    assert inspect_silo(silo)["list of users"] == "none: ids are numbers"
    write_list(silo / "users.txt", map(str, reversed(range(50))))
    silo.settings.model_copy(update={"users": Path("users.txt")}).write(silo / "silo.toml")
    with pytest.raises(DataError, match="and the schema names none"):
        open_silo(silo)


def test_a_silo_reads_the_file_of_main_silos_that_its_settings_name(made: Demonstration) -> None:
    """Its digest, which an experiment names, is what ``sha256sum`` prints; another user in a line is noticed."""
    silo = SiloFolder(made.provisioned.silos[2])
    assert inspect_silo(silo)["main silos' file"] == "none"
    path = silo.path / "main-silos.csv"
    path.write_text("5e" * 32 + "\n" + "".join(f"{user},va\n" for user in range(50)))
    silo.settings.model_copy(update={"main_silos": Path(path.name)}).write(silo / "silo.toml")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert inspect_silo(silo)["main silos' file"] == f"sha256 {digest}"
    path.write_text(path.read_text().replace("\n7,va\n", "\n8,va\n"))
    with pytest.raises(DataError, match="line 9 is not of the user"):
        inspect_silo(silo)


def issue(authority: Authority, folder: Path, *hosts: str, days: int = 397) -> None:
    """Write a server's key and its certificate."""
    request = new_server_key(folder / "server.key").decode()
    (folder / "server.crt").write_bytes(authority.certify(request, hosts, days))


def test_a_certificate_is_valid_for_a_while_and_of_one_authority(tmp_path: Path) -> None:
    authority = Authority.create("one")
    authority.save(tmp_path, None)
    issue(authority, tmp_path, "127.0.0.1", "example.org")
    assert 396 < days_left(tmp_path / "server.crt", tmp_path / "ca.crt") < 398
    with pytest.raises(CryptoError, match="never overwritten"):
        issue(authority, tmp_path, "127.0.0.1")


def test_a_clock_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    authority = Authority.create("one")
    authority.save(tmp_path, None)
    issue(authority, tmp_path, "127.0.0.1", days=1)
    for clock in (datetime.now(UTC) - timedelta(days=2), datetime.now(UTC) + timedelta(days=2)):
        with pytest.raises(ConfigError, match="this clock says"):
            days_left(tmp_path / "server.crt", tmp_path / "ca.crt", now=clock)


def test_the_guard_answers_messages_and_refuses_all_else(guards: list[Path]) -> None:
    assert guards[0].stat().st_mode & 0o777 == 0o600
    with pytest.raises(ProtocolError, match="at least"):
        ask(guards[0], b"hello")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(guards[0]))
        connection.sendall((LARGEST_OPENING + 1).to_bytes(8, "big") + bytes(BEGINNING))
        assert connection.recv(1) == b""  # by its beginning: the rest has not come
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(guards[0]))
        connection.sendall(b"\0" * 5)
    with pytest.raises(ProtocolError, match="at least"):
        ask(guards[0], b"still there")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('test_file = "test.csv"', "", "public test table"),
        ('loss = "binary_cross_entropy"', "", "model.name and model.loss"),
        ('schema_file = "schema.toml"', 'schema_file = "other.toml"', "not the schema"),
    ],
)
def test_an_experiment_must_fit_a_federation(old: str, new: str, expected: str, made: Demonstration) -> None:
    path = made.experiment
    schema = path.with_name("schema.toml")
    path.with_name("other.toml").write_text(schema.read_text() + "\n")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=expected):
        read_document(path, CoordinatorFolder(made.provisioned.coordinator))


class Loop:
    """A transport in this process: a message that is offered meets a key process. Some are lost, and asked for again.

    Args:
        sockets: of the key processes, by silo; the others are away.
        lost: whether the message of a number is lost.
    """

    def __init__(
        self, sockets: Mapping[int, Path], lost: Callable[[int], bool] = lambda sent: sent % 5 == 0
    ) -> None:
        self._sockets, self._lost = sockets, lost
        self._current: dict[int, bytes] = {}
        self._due: set[int] = set()
        self.sent = 0

    def offer(self, messages: Mapping[int, bytes], withdrawn: Collection[int] = ()) -> None:
        self._current.update(messages)
        self._due |= messages.keys() & self._sockets.keys()
        self._due -= set(withdrawn)

    def collect(self, seconds: float) -> list[Received]:
        found = []
        for silo in sorted(self._due):
            self.sent += 1
            if not self._lost(self.sent):
                self._due.discard(silo)
                found.append(Received(silo, ask(self._sockets[silo], self._current[silo])))
        if not found:
            time.sleep(min(seconds, 0.02))
        return found

    def close(self) -> None:
        self._current.clear()


def exchange(
    home: CoordinatorFolder, party: CoordinatorParty[Any], transport: Loop, **waits: Any
) -> tuple[str, ...]:
    """Exchange messages until a part of a run ends."""
    silos = home.membership.silos
    return exchange_messages(transport, party, silos, Patience(**waits), Meter(silos))


def test_a_coordinator_is_not_served_under_a_certificate_that_is_not_valid(made: Demonstration) -> None:
    from fedveil.federation.hosts.coordinator_service import CoordinatorService

    home = CoordinatorFolder(made.provisioned.coordinator)
    Authority.create("other").publish(home / "link")
    with pytest.raises(ConfigError, match=r"no certificate of ca.crt"):
        CoordinatorService(home)


def test_a_link_has_no_other_key_than_that_of_tls(made: Demonstration, tmp_path: Path) -> None:
    home = CoordinatorFolder(made.provisioned.coordinator)
    held = {path.name for path in home.link.path.iterdir()}
    assert held == {"ca.crt", "link.toml", "server.crt", "server.key"}
    settings = home.link.settings
    settings.model_copy(update={"group": "nobody-knows-it"}).write(home.link / "link.toml")
    with pytest.raises(ConfigError, match=r"link\.toml: group: this host has no group"):
        _ = home.link.group
    shutil.copyfile(home / "identity.key", home.link / "identity.key")
    with pytest.raises(ConfigError, match=r"holds identity\.key"):
        _ = home.link
    with pytest.raises(ConfigError, match=r"has no link\.toml"):
        LinkFolder(tmp_path)


@pytest.mark.parametrize("loose", ["run", "run/link"])
def test_a_link_that_every_user_of_the_host_reaches_is_not_used(
    loose: str, made: Demonstration, tmp_path: Path
) -> None:
    """Whoever else can open the socket could replace messages, and read the answers."""
    home = CoordinatorFolder(made.provisioned.coordinator)
    home.settings.model_copy(update={"start_link": False}).write(home / "coordinator.toml")
    running = RunningFolder(home.link.path, os.getgid())
    listening = listen(running / LINK, os.getgid())
    attached = AttachedLink(home)
    assert attached.listens
    (home.link / loose).chmod((home.link / loose).stat().st_mode | 0o001)
    with pytest.raises(ConfigError, match="gives every user of this host access"):
        AttachedLink(home)
    listening.close()
    assert not attached.listens
    running.close()


def test_a_run_is_submitted_where_a_coordinator_is_served(made: Demonstration) -> None:
    home = CoordinatorFolder(made.provisioned.coordinator)
    with pytest.raises(BusyError, match="no coordinator is served"):
        Submission(home, home / "runs")
    told = ended("federation", "run", made.experiment, "--home", home.path)
    assert (told.code, "no coordinator is served" in told.err) == (75, True)
    assert not (home / "runs" / "demonstration").exists()  # the run that is played later has this name


def test_a_mistake_of_an_operator_is_answered_with_what_helps(made: Demonstration, tmp_path: Path) -> None:
    assert "exists already; name a folder that is to be made" in ended("federation", "demo", tmp_path).mistake
    assert "`fedveil silo accept`" in ended("silo", "serve", tmp_path).mistake
    silo = SiloFolder(made.provisioned.silos[0])
    table = silo.path / silo.settings.table
    moved = table.rename(table.with_suffix(".away"))
    try:
        with pytest.raises(DataError, match=r"no such table; put it there, or name it in .*silo\.toml"):
            silo.share()
    finally:
        moved.rename(table)


def test_a_run_is_exchanged_though_messages_are_lost(
    made: Demonstration, guards: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """And the silos' logs say when each joins, is charged and ends."""
    caplog.set_level(logging.INFO, "fedveil.silo")
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    assert exchange(home, party, Loop(dict(enumerate(guards)))) == ()
    assert party.outcome is not None
    assert (party.outcome.rounds, party.outcome.stopped) == (2, None)
    assert party.outcome.statement.epsilon is not None
    said = Counter(one.getMessage().split()[0] for one in caplog.records if one.name == "fedveil.silo")
    assert (said["joined"], said["charged"]) == (4, 8)
    assert "charged ledger entries: 1; the ledger ends with" in caplog.text
    assert f"run {party.run.hex()[:16]} ended" in caplog.text
    found_ = inspect_silo(SiloFolder(made.provisioned.silos[0]))
    assert "2 rounds of 1 runs" in found_["spent over all runs"]
    told, end = Silent(), RunOutcome(error=None, stopped=None, silent=())
    waiting = SimpleNamespace(lasts=lambda seconds: False, end=lambda: end)
    assert watch("go on", folder, told, read_document(made.experiment, home), waiting) == end  # type: ignore[arg-type]
    assert [row["round"] for row in told.rows] == []


def test_releases_that_the_policies_allow_are_exchanged(made: Demonstration) -> None:
    """From a file with [statistics] to what is shown: refused as policies come, and then allowed by name."""
    home = CoordinatorFolder(made.provisioned.coordinator)
    path = made.experiment.with_name("cohort.toml")
    path.write_text(COHORT.format(files=[f"{name}.csv" for name in HOSPITALS]))
    folder, ended = create_run(home, read_document(path, home)), list[str | None]()
    for allowed in ("", 'releases = ["count", "missing", "quantiles"]\n'):
        for silo in made.provisioned.silos:
            policy = silo / "policy.toml"
            policy.write_text(allowed + policy.read_text())
        with serving(made) as paths:
            for party in due_parts(home, folder.path):
                exchange(home, party, Loop(dict(enumerate(paths))))
                assert party.outcome is not None
                ended.append(party.outcome.stopped)
                if ended[-1] is not None:
                    break
    refusal, released = ended
    assert "its policy does not allow one of the requested releases" in (refusal or "")
    assert released is None
    assert "person-silo pairs" in {row.figure for row in rows(read_released(folder.path))}
    for party in due_parts(home, folder.path):  # a lost signature of the end at most
        assert party._part.step is None
        party.close()


def test_private_weighting_is_exchanged(made: Demonstration, monkeypatch: pytest.MonkeyPatch) -> None:
    small_keys(monkeypatch)
    for path in made.provisioned.silos:
        policy = path / "policy.toml"
        policy.write_text(policy.read_text().replace('"secure-aggregation"', '"private-weighting"'))
    text = made.experiment.read_text().replace('name = "uldp-avg"', 'name = "uldp-avg-w"')
    made.experiment.write_text(text.replace('"secure-aggregation"', '"private-weighting"\nn_max = 80'))
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    with serving(made) as paths:
        exchange(home, party, Loop(dict(enumerate(paths))))
    assert party.outcome is not None
    assert (party.outcome.rounds, party.outcome.stopped) == (2, None)


def test_silent_silos_are_left_behind_where_the_protocol_recovers(
    made: Demonstration, guards: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    text = made.experiment.read_text()
    recovery = '"secure-aggregation"\non_dropout = "recover"\nmax_dropouts = 1'
    made.experiment.write_text(text.replace('"secure-aggregation"', recovery))
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    exchange(home, party, Loop(dict(enumerate(guards[:3]))), drop_after=2.0)
    assert party.outcome is not None
    assert (party.outcome.rounds, party.outcome.stopped) == (2, None)
    assert "silo va: silent for 2 s; the round continues without it" in caplog.text
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["summed"] for row in rows[1:]] == [3, 3]


def test_patience_ends_with_the_model_and_the_run_goes_on_later(
    made: Demonstration, guards: list[Path]
) -> None:
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    assert exchange(home, party, Loop({}), give_up_after=0.1) == tuple(HOSPITALS)
    assert party.outcome is not None
    assert "has not answered for 0.1 s" in (party.outcome.stopped or "")
    assert (folder / "model.safetensors").exists()
    (again,) = due_parts(home, folder.path)
    assert again.run == party.run
    exchange(home, again, Loop(dict(enumerate(guards))))
    assert again.outcome is not None
    assert (again.outcome.rounds, again.outcome.stopped) == (2, None)


def test_a_late_answer_does_not_keep_the_coordinator_busy() -> None:
    """Of a silo without a current message: it is not asked again, and nothing is due after five seconds."""
    now, waits = [0.0], list[float]()

    class Party:
        is_finished, awaited_silos, farewells = False, (1,), dict[int, bytes]()

        def messages(self) -> dict[int, bytes]:
            return {1: b"current"}

        def receive(self, silo: int, message: bytes) -> ReplyKind:
            return ReplyKind.NOTHING

        def drop_missing(self, silos: tuple[int, ...]) -> tuple[str, ...]:
            return ()

        def stop(self, reason: str) -> None:
            self.is_finished = True

    class Late(Loop):
        def collect(self, seconds: float) -> list[Received]:
            assert len(waits) < 100
            waits.append(seconds)
            now[0] += seconds
            return [] if len(waits) > 1 else [Received(0, b"late")]

    patience = Patience(give_up_after=30.0, clock=lambda: now[0])
    party: Any = Party()
    silos = ("north", "south")
    assert exchange_messages(Late({}), party, silos, patience, Meter(silos)) == ("south",)
    assert set(waits) == {1.0}


def test_a_run_ends_where_its_process_is_to_end_and_can_be_resumed(
    made: Demonstration, guards: list[Path]
) -> None:
    """Whatever it waits for: a process that is to end has seconds, and a silo may take minutes."""
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    looks, silos = iter([False, False, True]), home.membership.silos
    assert exchange_messages(Loop({}), party, silos, Patience(), Meter(silos), lambda: next(looks)) == ()
    assert party.outcome is None
    assert party.messages()
    party.close()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "served again"])
def test_what_a_killed_link_left_goes_with_its_coordinator(again: bool, made: Demonstration) -> None:
    folder = LinkFolder(made.provisioned.coordinator / "link")
    (folder / "run").mkdir()
    serving_again = RunningFolder(folder.path) if again else None
    (folder / "run" / LINK).touch()
    link = object.__new__(AttachedLink)
    link._running, link._group = folder / "run", folder.group
    link._stopping = threading.Event()
    link._child = SimpleNamespace(stop=lambda: None)  # type: ignore[assignment]
    link.stop()
    assert any((folder / "run").iterdir()) == again
    if serving_again is not None:
        serving_again.close()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "served again"])
def test_a_child_whose_parent_is_gone_removes_what_it_left(again: bool, tmp_path: Path) -> None:
    """A process that is killed removes nothing; what another one that serves the party has made meanwhile stays."""
    (tmp_path / "run").mkdir()
    serving_again = RunningFolder(tmp_path) if again else None
    (tmp_path / "run" / "guard").touch()
    reading, writing = os.pipe()
    os.write(writing, json.dumps({"party": str(tmp_path)}).encode() + b"\n")
    ended = threading.Event()
    with open(reading, "rb", buffering=0) as told:
        assert settings_of_parent(ended.set, told) == {"party": str(tmp_path)}
        assert not ended.wait(0.05)
        assert (tmp_path / "run" / "guard").exists()
        os.close(writing)
        assert ended.wait(15)
    assert (tmp_path / "run" / "guard").exists() == again
    if serving_again is not None:
        serving_again.close()


def test_a_silence_is_of_one_silo_and_signs_of_life_end_it_for_a_while() -> None:
    now = [0.0]
    silence = SilenceTimer(Patience(max_work=100.0, clock=lambda: now[0]))
    silence.wait({0: b"a", 1: b"b"})
    for _ in range(12):
        now[0] += 10.0
        silence.note_alive(0)
        silence.note_alive(7)  # nobody waits for it
        silence.wait({0: b"a", 1: b"b"})
    assert now[0] == 120.0
    assert silence.silent_for(29.0) == (0, 1)  # the signs after 100 s did not count
    assert silence.silent_for(30.0) == (1,)
    silence.wait({0: b"a", 1: b"c"})
    assert silence.silent_for(0.0) == (0,)
    silence.wait({})
    assert silence.silent_for(0.0) == ()


def test_a_run_ends_though_silos_work_for_longer_than_patience(made: Demonstration) -> None:
    """A silent silo is given up after a second; this one works for longer, says so, and pays once."""
    signs = [0]

    class Slowly:
        """A silo of which silo 1 takes 2.2 s for its third message."""

        def __init__(self, party: SiloParty, number: int) -> None:
            self._party, self._number, self._read = party, number, 0

        def receive(self, data: bytes) -> bytes:
            self._read += 1
            time.sleep(2.2 if self._number == 1 and self._read == 3 else 0.0)
            return self._party.receive(data)

        def in_progress_message(self, *words: Any) -> bytes:
            signs[0] += 1
            return self._party.in_progress_message(*words)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._party, name)

    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    with serving(made, Slowly, sign_of_life=0.1) as paths:
        exchange(home, party, Loop(dict(enumerate(paths))), give_up_after=1.6)
    assert party.outcome is not None
    assert (party.outcome.rounds, party.outcome.stopped) == (2, None)
    assert signs[0] > 0
    charged = read_entries(made.provisioned.silos[1] / "state" / LEDGER)
    assert [entry.round for entry in charged] == [1, 2]


def test_silos_do_not_learn_the_coordinators_paths(made: Demonstration) -> None:
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    (party,) = due_parts(home, folder.path)
    assert len(party.messages()) == 4
    assert not any(str(made.experiment.parent).encode() in message for _, message in party.messages())
    party.close()


def test_a_run_between_institutions_is_not_resumed_in_one_process(made: Demonstration) -> None:
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = create_run(home, read_document(made.experiment, home))
    next(due_parts(home, folder.path)).close()
    assert "federation run --resume" in ended("resume", folder.path).mistake


def test_a_refusal_names_the_silo() -> None:
    assert str(RefusalError(Code.KNOWN_SEED, silo="va")).startswith("silo va refuses (policy): privacy")


def test_identities_are_not_guessed(made: Demonstration) -> None:
    path = made.provisioned.silos[0]
    (path / "identity.key").unlink()
    IdentityKey.generate().save(path / "identity.key")
    with pytest.raises(IntegrityError, match="not the key that membership"):
        inspect_silo(SiloFolder(path))


@pytest.mark.slow
def test_four_hospitals_as_real_processes_under_tls(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    shown = output("federation", "demo", target, "--rounds", 2, "--port", free_port())
    assert "Epsilon against the server is " in shown
    run = next((target / "federation" / "coordinator" / "runs").iterdir())
    rows = json_lines(run / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert json.loads((run / "privacy.json").read_text())["epsilon"] is not None
    assert (run / "report.html").exists()

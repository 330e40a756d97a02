"""The processes of served parties: what they listen on, what they read, who opens their sockets, what they say."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.federation.hosts.coordinator_service import AttachedLink, CoordinatorService
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.link_folder import LinkFolder
from fedveil.federation.hosts.metrics_server import ask_party
from fedveil.federation.hosts.silo_checks import try_coordinator
from fedveil.federation.hosts.silo_service import SiloService
from fedveil.federation.hosts.sockets import LINK, address, free_port, send_frame
from fedveil.federation.hosts.submission import Submission
from tests.commands import ended
from tests.processes import Processes, tree

OTHER_USER = 65534
LOCAL_USER = """\
import os, socket, sys
os.setgroups([])
os.setgid(65533)
os.setuid(65533)
with socket.socket(socket.AF_UNIX) as tried:
    try:
        tried.connect(sys.argv[1])
    except PermissionError:
        sys.exit(0)
sys.exit(1)
"""

# `fedveil link`, as another user. It becomes him after its imports: others may not be able to read the package.
LINK_OF_ANOTHER = """\
import os, sys
import cryptography.hazmat.backends.openssl.backend, encodings.cp437, encodings.idna
import fedveil.cli.operations, fedveil.federation.hosts.link
from fedveil.cli.app import main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.argv = ["fedveil", "--log-format", "json", "--log-level", "info", "link", sys.argv[1]]
main()
"""
LINKS_USER = """\
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for name in sys.argv[1:]:
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.connect(name) if name.endswith("party") else open(name)
    except PermissionError:
        continue
    sys.exit(1)
"""


@dataclass(kw_only=True)
class Served:
    """A federation that is served: the coordinator and one silo, each with the processes that it starts.

    Attributes:
        made: its folders.
        party: the coordinator.
        silo: the first silo.
        link: the number of the link's process: of another user, if the tests are root's.
    """

    made: Demonstration
    link: int
    party: CoordinatorService
    silo: SiloService

    @property
    def port(self) -> int:
        return CoordinatorFolder(self.made.provisioned.coordinator).link.settings.port

    @property
    def processes(self) -> list[int]:
        return [os.getpid(), self.link, self.silo.network.number]


@contextlib.contextmanager
def link_of_another_user(home: CoordinatorFolder) -> Iterator[int]:
    """Serve the link as another user, from a folder of their own; yield the number of the process."""
    folder = Path(tempfile.mkdtemp(prefix="fedveil-link-"))
    folder.rmdir()
    shutil.move(home.link.path, folder)
    for path in (folder, *folder.iterdir()):
        os.chown(path, OTHER_USER, OTHER_USER)
    link = LinkFolder(folder)
    link.settings.model_copy(update={"group": grp.getgrgid(OTHER_USER).gr_name}).write(link / "link.toml")
    changed = {"link": str(folder), "start_link": False}
    home.settings.model_copy(update=changed).write(home / "coordinator.toml")
    started = [sys.executable, "-c", LINK_OF_ANOTHER, str(folder)]
    process = subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process.pid
        assert process.poll() is None
        process.terminate()
        _, said = process.communicate(timeout=30)
        assert not list((folder / "run").iterdir())  # its sockets are gone
        lines = [
            json.loads(line) for line in said.splitlines()
        ]  # every line is in the format that was asked for
        assert any("is connected" in line["message"] for line in lines)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def wait_for_health(folder: Path) -> None:
    until = time.monotonic() + 60
    while (found := ask_party(folder, "/ready")) is None or found[0] != 200:
        assert time.monotonic() < until, found
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = write_demonstration(tmp_path_factory.mktemp("served") / "demo", port=free_port())
    home = CoordinatorFolder(made.provisioned.coordinator)
    with contextlib.ExitStack() as ending:
        other = ending.enter_context(link_of_another_user(home)) if os.geteuid() == 0 else None
        party = CoordinatorService(home)
        ending.callback(party.stop)
        silo = SiloService(SiloFolder(made.provisioned.silos[0]))
        ending.callback(silo.stop)
        number = party.link.number if other is None else other
        assert number is not None
        wait_for_health(made.provisioned.silos[0])
        yield Served(made=made, party=party, silo=silo, link=number)


def listening(process: int) -> set[int]:
    """The TCP ports at which a process listens, at whatever address."""
    found = set()
    inodes = own_sockets(process)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def sockets(process: int) -> list[Path]:
    """The Unix sockets at which a process listens; one without a file would have no mode."""
    found = []
    inodes = own_sockets(process)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & 0x10000:
            assert fields[7].startswith("/"), fields[7]
            found.append(Path(os.path.realpath(fields[7].replace("/proc/self/", f"/proc/{process}/"))))
    return found


def resident_kilobytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def own_sockets(process: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)
            if name.startswith("socket:["):
                found.add(name[8:-1])
    return found


def test_the_coordinator_listens_at_one_port_and_a_silo_at_none(served: Served) -> None:
    link, network = served.link, served.silo.network.number
    assert {process: listening(process) for process in served.processes} == {
        os.getpid(): set(),
        link: {served.port},
        network: set(),
    }
    assert {process: len(sockets(process)) for process in served.processes} == {
        os.getpid(): 4,  # submissions, the key process, and what each of the two says of itself
        link: 1,
        network: 0,
    }
    for process in served.processes:
        for path in sockets(process):
            shared = process == link and served.party.link.number is None
            assert stat.S_IMODE(path.stat().st_mode) == (0o660 if shared else 0o600)
            assert stat.S_IMODE(path.parent.stat().st_mode) == (0o750 if shared else 0o700)


def test_another_user_of_a_partys_host_opens_no_socket(served: Served) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    found = [path for process in served.processes for path in sockets(process)]
    assert len(found) == 5
    opened = {parent for path in found for parent in path.parents if parent.is_dir()}
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in opened}
    own = [sys.executable, "-S", "-c", LOCAL_USER]
    try:
        assert [subprocess.run([*own, str(path)], check=False).returncode for path in found] == [0] * 5
        for parent, mode in modes.items():
            parent.chmod(mode | 0o055)  # the sockets' own mode must do
        assert [subprocess.run([*own, str(path)], check=False).returncode for path in found] == [0] * 5
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)


def test_the_links_user_reads_nothing_of_the_coordinator(served: Served) -> None:
    """Who breaks into the process that the network reaches has no identity key, no run folder and no ledger."""
    if served.party.link.number is not None:
        pytest.skip("becoming another user needs root")
    status = Path(f"/proc/{served.link}/status").read_text().splitlines()
    users = {line.split()[0]: set(line.split()[1:]) for line in status if line.startswith(("Uid:", "Gid:"))}
    assert users == {"Uid:": {str(OTHER_USER)}, "Gid:": {str(OTHER_USER)}}
    coordinator = served.made.provisioned.coordinator
    opened = {parent for parent in (coordinator, *coordinator.parents) if parent.is_dir()}
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in opened}
    secrets = [str(coordinator / "identity.key"), str(coordinator / "run" / "party")]
    try:
        for parent, mode in modes.items():
            parent.chmod(mode | 0o055)  # the file's own mode must do
        tried = [sys.executable, "-S", "-c", LINKS_USER, *secrets]
        assert subprocess.run(tried, check=False).returncode == 0
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)
    held = {int(name) for name in os.listdir(f"/proc/{served.link}/fd")}
    names = [os.readlink(f"/proc/{served.link}/fd/{number}") for number in held]
    assert not [name for name in names if str(coordinator) in name]


def test_what_faces_the_network_reads_no_table_trains_nothing_and_is_small(served: Served) -> None:
    """Link and network process run neither PyTorch nor what reads tables, start nothing, and stay below 60 MB."""
    loaded = [Path(f"/proc/{process}/maps").read_text() for process in served.processes]
    assert ["libtorch" in maps for maps in loaded] == [True, False, False]
    assert not any(name in maps for maps in loaded[1:] for name in ("pyarrow", "numpy"))
    for process in served.processes[1:]:
        assert set(tree(process)) == {process}
        assert resident_kilobytes(process) < 70_000


def test_a_coordinator_at_rest_loads_neither_what_trains_nor_what_reads_tables(tmp_path: Path) -> None:
    """They take 100 MB. A coordinator waits for runs most of its time, and tells its figures meanwhile."""
    made = write_demonstration(tmp_path / "demo", port=free_port())
    home = CoordinatorFolder(made.provisioned.coordinator)
    with Processes() as processes:
        process = processes.serve(home).pid
        found = ask_party(home.path, "/metrics")
        assert found is not None
        assert found[0] == 200
        maps = Path(f"/proc/{process}/maps").read_text()
        assert not any(name in maps for name in ("libtorch", "pyarrow"))
        assert resident_kilobytes(process) < 250_000


def test_a_check_tries_the_coordinator_and_says_each_finding(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = SiloFolder(served.made.provisioned.silos[1])
    well = ended("federation", "check", silo.path, "--json")
    found = json.loads(well.out)
    assert well.code == 0
    assert "over TLS 1.3, with the key that membership.toml names" in found["coordinator: connection"]
    assert found["coordinator: clock"] == "within 60 s of the coordinator's"
    assert found["coordinator: name"] == "127.0.0.1 is 127.0.0.1"
    monkeypatch.setenv("HTTPS_PROXY", f"http://name:pass@127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    by_proxy = try_coordinator(silo)
    assert by_proxy.findings["proxy"].startswith("connections go through 127.0.0.1:")
    assert "pass" not in str(by_proxy)
    assert by_proxy.trouble.startswith("proxy-unreachable: ")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert try_coordinator(silo).findings["proxy"] == "none: NO_PROXY excepts the coordinator"
    monkeypatch.undo()
    copied = tmp_path / "north"
    shutil.copytree(silo.path, copied)
    away = silo.settings.model_copy(
        update={"coordinator": f"127.0.0.1:{free_port()}", "table": silo.path / silo.settings.table}
    )
    away.write(copied / "silo.toml")
    refused = ended("federation", "check", copied)
    assert (refused.code, "nothing listens at" in " ".join(refused.out.split())) == (74, True)
    assert "the coordinator cannot be reached (refused)" in refused.err
    nowhere = away.model_copy(update={"coordinator": "nowhere.invalid:9443"})
    nowhere.write(copied / "silo.toml")
    lost = try_coordinator(SiloFolder(copied))
    assert lost.findings["name"].startswith("nowhere.invalid cannot be resolved")
    assert lost.trouble.startswith("dns: ")
    (copied / "client.crt").unlink()
    with pytest.raises(ConfigError, match=r"client\.crt: missing; accept the membership again"):
        try_coordinator(SiloFolder(copied))


def test_health_and_status_tell_the_connections(served: Served) -> None:
    coordinator, silo = served.made.provisioned.coordinator, served.made.provisioned.silos[0]
    wait_for_health(silo)
    assert facts(silo) == {"connected": True, "last_contact_seconds": facts(silo)["last_contact_seconds"]}
    until = time.monotonic() + 30
    while silo.name not in facts(coordinator).get("connected", ()):
        assert time.monotonic() < until
        time.sleep(0.1)
    found = facts(coordinator)
    assert found["link"] is True
    assert {path.name for path in served.made.provisioned.silos[2:]} <= set(found["absent"])
    for folder in (coordinator, silo):
        metrics = ask_party(folder, "/metrics")
        assert metrics is not None
        assert "fedveil_connected 1" in metrics[1]


def facts(folder: Path) -> dict[str, Any]:
    found = ask_party(folder, "/connection")
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_what_is_submitted_and_is_no_run_ends_and_harms_nobody(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = CoordinatorFolder(served.made.provisioned.coordinator)
    for _ in range(2):
        with Submission(home, tmp_path / "none") as submission:
            assert not submission.lasts(60.0)
            end = submission.end()
            assert end is not None
            assert str(tmp_path / "none") in str(end.error)  # there is no folder to say it in
    assert str(tmp_path / "none") in caplog.text
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address(home / "run" / "party"))
        send_frame(connection, b"[]")
        assert connection.recv(1) == b""


def test_a_party_is_served_once(served: Served) -> None:
    with pytest.raises(ConfigError, match="already served"):
        CoordinatorService(CoordinatorFolder(served.made.provisioned.coordinator))
    with pytest.raises(ConfigError, match="already served"):
        SiloService(SiloFolder(served.made.provisioned.silos[0]))


def test_a_child_ends_with_a_parent_that_is_killed(served: Served, tmp_path: Path) -> None:
    parent = (
        "import sys, json, time\nfrom fedveil.federation.hosts.child_process import ChildProcess\n"
        "child = ChildProcess(sys.argv[1], json.loads(sys.argv[2]))\n"
        "print(child.number, flush=True)\ntime.sleep(600)\n"
    )
    silo = served.made.provisioned.silos[1]
    told = {
        "folder": str(silo),
        "party": str(tmp_path),
        "coordinator": "127.0.0.1:9",
        "key_process": str(tmp_path / "no"),
        "server_key": "",
        "largest": 1 << 20,
    }
    module = "fedveil.federation.transport.https.silo_client"
    started_by = [sys.executable, "-c", parent, module, json.dumps(told)]
    with subprocess.Popen(started_by, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_child_is_not_started_by_hand() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from fedveil.federation.hosts.child_process import settings_of_parent as s; s(print)",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "fedveil coordinator" in done.stderr


def test_a_link_that_is_killed_is_started_again_and_one_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """Out of memory, say: the coordinator goes on with the next one, and introduces the members to it."""
    made = write_demonstration(tmp_path / "demo", port=free_port(), hospitals={"north": 3, "south": 3})
    home = CoordinatorFolder(made.provisioned.coordinator)
    link = AttachedLink(home)
    try:
        assert {path.name for path in (home.link / "run").iterdir()} == {LINK}
        first = link.number
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + 60
        while link.number == first or not link.listens:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        link.stop()
    assert not link.listens
    assert not list((home.link / "run").iterdir())


def test_a_link_whose_port_is_taken_says_so_with_a_code_that_is_tried_again(tmp_path: Path) -> None:
    made = write_demonstration(tmp_path / "demo", port=free_port(), hospitals={"north": 3})
    home = CoordinatorFolder(made.provisioned.coordinator)
    with socket.create_server(("127.0.0.1", home.link.settings.port)):
        done = subprocess.run(
            [sys.executable, "-m", "fedveil", "--log-format", "json", "link", str(home.link.path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 75
    told = [json.loads(line)["message"] for line in done.stderr.splitlines()]  # every line is one of the log
    assert not any(one.startswith("listening on") for one in told)
    assert "cannot listen there: Address already in use" in told[-1]
    assert done.stdout == ""


def test_health_costs_little(tmp_path: Path) -> None:
    """A probe every 30 s must not cost seconds of a processor: it imports neither PyTorch nor pydantic."""
    code = (
        "import sys, time\nsys.argv = ['fedveil', 'health', sys.argv[1]]\n"
        "from fedveil.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    print(end.code, sorted({'torch', 'numpy', 'pydantic', 'cryptography', 'httpcore'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 []"

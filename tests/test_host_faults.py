"""Faults of a party's host: each has its own sentence and an exit code by which a service manager tries again."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest

from fedveil.errors import BusyError, ConfigError
from fedveil.federation.enrollment.certificates import days_left
from fedveil.federation.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.federation.hosts.child_process import ChildProcess, ProcessError
from fedveil.federation.hosts.coordinator_service import AttachedLink
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.sockets import (
    LOOPBACK,
    RunningFolder,
    check_closed,
    free_port,
    listen,
    listen_at,
)
from tests.commands import ended


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Demonstration:
    folder = tmp_path_factory.mktemp("faults") / "demo"
    return write_demonstration(folder, port=free_port(), hospitals={"north": 30, "south": 30})


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no further descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = os.open(os.devnull, os.O_RDONLY)  # the lowest free number
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("host", "error", "code", "told"),
    [
        (LOOPBACK, BusyError, 75, "Address already in use"),
        ("192.0.2.1", BusyError, 75, "Cannot assign requested address"),
        ("nowhere.invalid", BusyError, 75, "not known|Temporary failure"),
        (f"{'a' * 70}.invalid", ConfigError, 2, "neither an address nor a name of a host"),
    ],
    ids=["taken", "of another host", "without DNS", "no name"],
)
def test_an_address_that_may_come_is_tried_again(
    host: str, error: type[ConfigError], code: int, told: str
) -> None:
    """A link that starts before the network is up, say."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        with pytest.raises(
            error, match=rf"link.toml: cannot listen there: .*({told})|link.toml: {told}"
        ) as found:
            listen_at(host, taken.getsockname()[1], "link.toml", backlog=1)
        assert found.value.exit_code == code


@pytest.mark.parametrize("party", ["coordinator", "silo"])
def test_a_port_for_figures_that_is_taken_is_tried_again(party: str, made: Demonstration) -> None:
    provisioned = made.provisioned
    folder = (
        CoordinatorFolder(provisioned.coordinator)
        if party == "coordinator"
        else SiloFolder(provisioned.silos[0])
    )
    with socket.create_server((LOOPBACK, 0)) as taken:
        metrics = f"{LOOPBACK}:{taken.getsockname()[1]}"
        before = folder.settings
        before.model_copy(update={"metrics": metrics}).write(folder / f"{party}.toml")
        try:
            found = ended(party, "serve", folder.path)
        finally:
            before.write(folder / f"{party}.toml")
    assert found.code == 75, found
    assert f'metrics = "{metrics}": cannot listen there: Address already in use' in " ".join(
        found.err.split()
    )
    assert not list((folder / "run").iterdir())


def test_without_descriptors_nothing_is_a_mistake_in_what_was_asked(
    made: Demonstration, tmp_path: Path
) -> None:
    party = made.provisioned.silos[0]
    with no_descriptors():
        with pytest.raises(ConfigError, match="Too many open files") as folder:
            RunningFolder(party)
        with pytest.raises(ConfigError, match="Too many open files") as unix:
            listen(tmp_path / "socket")
        with pytest.raises(ConfigError, match="Too many open files") as port:
            listen_at(LOOPBACK, 0, "link.toml", backlog=1)
        with pytest.raises(ProcessError, match="cannot be started: Too many open files") as child:
            ChildProcess("fedveil.federation.hosts.link", {})
        with pytest.raises(ConfigError, match="Too many open files") as certificate:
            days_left(party / "client.crt", party / "ca.crt")
    found = [one.value.exit_code for one in (folder, unix, port, child, certificate)]
    assert found == [74] * 5


def test_a_link_that_cannot_be_started_now_is_started_later(
    made: Demonstration, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that starts it must not end: the coordinator would be served without a link for good."""
    link = AttachedLink(CoordinatorFolder(made.provisioned.coordinator))
    try:
        first = link.number
        assert first is not None
        until = time.monotonic() + 120
        with caplog.at_level(logging.ERROR, logger="fedveil.coordinator"):
            with no_descriptors():
                os.kill(first, signal.SIGKILL)
                while "cannot be started" not in caplog.text:
                    assert time.monotonic() < until
                    time.sleep(0.05)
            while link.number == first or not link.listens:
                assert time.monotonic() < until
                time.sleep(0.05)
    finally:
        link.stop()


def test_a_clock_that_is_behind_may_be_set_yet_and_an_expired_certificate_stays_one(
    made: Demonstration,
) -> None:
    path, issuer = made.provisioned.silos[0] / "client.crt", made.provisioned.silos[0] / "ca.crt"
    now = datetime.now(UTC)
    with pytest.raises(BusyError, match="set the clock"):
        days_left(path, issuer, now=now - timedelta(days=3650))
    with pytest.raises(ConfigError, match="issue it again") as expired:
        days_left(path, issuer, now=now + timedelta(days=3650))
    assert expired.value.exit_code == 2


def test_a_socket_that_is_gone_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(BusyError, match="the process that made it has ended"):
        check_closed(tmp_path / "socket")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (errno.EMFILE, 74, "fedveil: this host: Too many open files"),
        (errno.EIO, 74, "fedveil: this host: Input/output error"),
        (errno.EAGAIN, 74, "fedveil: this host: Resource temporarily unavailable"),
        (errno.ESPIPE, 70, "Illegal seek"),
    ],
)
def test_a_fault_of_the_host_is_one_line_and_a_bug_is_none(
    error: int, code: int, told: str, tmp_path: Path
) -> None:
    """Wherever it is met, and nothing better is said of it."""
    with mock.patch(
        "fedveil.federation.hosts.metrics_server.ask_party", side_effect=OSError(error, os.strerror(error))
    ):
        found = ended("health", tmp_path)
    assert found.code == code
    assert told in found.err
    assert ("Traceback" in found.err) == (code == 70)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_folder_of_another_user_is_named(made: Demonstration) -> None:
    """As after a copy by root; a restart would change nothing."""
    link = CoordinatorFolder(made.provisioned.coordinator).link
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, "link", str(link.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "Permission denied; this command's user needs access to it" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


OTHER_USER = """\
import os
import fedveil.cli.operations
import fedveil.federation.hosts.link
from fedveil import user_code
from fedveil.cli.app import main
# while this user can read where they are installed
user_code._distributions(), user_code._needed()
os.setgid(65534)
os.setuid(65534)
main()
"""


def test_a_service_that_is_stopped_has_not_failed(made: Demonstration) -> None:
    link = CoordinatorFolder(made.provisioned.coordinator).link
    for _ in range(3):  # stopped as soon as it says that it listens, while asyncio's loop begins
        command = [sys.executable, "-u", "-m", "fedveil", "link", str(link.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as served:
            assert served.stdout is not None
            first = served.stdout.readline()
            opened = (link / "run" / "link").exists()
            served.terminate()
            _, told = served.communicate(timeout=60)
        assert (served.returncode, told) == (0, b"")
        assert opened
        assert first.startswith(b"listening on "), first

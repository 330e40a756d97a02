"""What the built-in transport costs: exchanges over HTTPS with client certificates, and what its processes hold.

Silos are threads that answer with the message itself, so only the transport is measured. The memory of a silo's network
process is that of a real one. A reconnection lasts from the link's end until all silos have answered the next one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.curves import Place
from benchmarks.federation_nodes import cpu_seconds_of, megabytes_of
from benchmarks.harness import Row, at_most
from benchmarks.silo_threads import client_of, start
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.child_process import ChildProcess
from fedveil.federation.hosts.coordinator_service import AttachedLink
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder, members_of
from fedveil.federation.hosts.sockets import free_port
from fedveil.federation.transport.https.mailbox import MailboxClient
from fedveil.federation.transport.interface import LARGEST_MESSAGE

_REPEATS = 30
_SECONDS = 300.0


def rows(quick: bool) -> Iterator[Row]:
    """Measure; see the module's text."""
    yield from _idle(5 if quick else _REPEATS, 5.0 if quick else 60.0)
    yield from _long(1 << (20 if quick else 26))
    for silos in (10,) if quick else (10, 50, 200):
        yield from _many(silos, 5 if quick else _REPEATS)
    yield from _reconnected(20 if quick else 200)


def smallest() -> Iterator[Row]:
    """Exchange one small message with two silos."""
    yield from _many(2, 1)


class _Federation:
    """A link as a process, silos as threads, and the coordinator's end.

    Args:
        silos: number of silos that answer.
        spare: number of further members, which are not served.
    """

    def __init__(self, silos: int, *, spare: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        names = {f"silo{number:03}": 1 for number in range(silos + spare)}
        made = write_demonstration(Path(self._folder.name) / "demo", port=free_port(), hospitals=names)
        folders = [SiloFolder(path) for path in made.provisioned.silos]
        self.silos, self.spare = folders[:silos], folders[silos:]
        home = CoordinatorFolder(made.provisioned.coordinator)
        self.link = AttachedLink(home)
        self._over = False
        self.coordinator = MailboxClient(self.link.socket, members_of(home.membership), LARGEST_MESSAGE)
        self.coordinator.introduce()
        for silo in self.silos:
            start(client_of(silo, lambda message: message), lambda: self._over)

    def __enter__(self) -> _Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self.coordinator.close()
        self.link.stop()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    @property
    def process(self) -> int:
        """The number of the link's process."""
        number = self.link.number
        assert number is not None
        return number

    def exchange(self, length: int) -> float:
        """Exchange a message of this length with every silo; return the seconds until all have answered.

        Raises:
            TimeoutError: not all did.
        """
        messages = {silo: os.urandom(8) + bytes(length) for silo in range(len(self.silos))}
        waiting, began = set(messages), time.perf_counter()
        self.coordinator.offer(messages)
        while waiting:
            for received in self.coordinator.collect(1.0):
                if received.message == messages[received.silo]:
                    waiting.discard(received.silo)
            if time.perf_counter() - began > _SECONDS:
                raise TimeoutError(f"{len(waiting)} silos did not answer")
        return time.perf_counter() - began


def _idle(repeats: int, seconds: float) -> Iterator[Row]:
    """Measure silos that wait, and one message to each of them after a pause."""
    with _Federation(4, spare=1) as federation:
        federation.exchange(1000)
        time.sleep(1.0)
        times = []
        for _ in range(repeats):
            time.sleep(0.1)
            times.append(federation.exchange(1000))
        yield at_most("4 idle silos, 1 kB: an exchange, median", "s", statistics.median(times), 0.03)
        yield Row(case="4 idle silos, 1 kB: an exchange, longest", unit="s", ours=max(times))
        module = "fedveil.federation.transport.https.silo_client"
        network = ChildProcess(module, _settings(federation), lambda report: None)
        try:
            time.sleep(3.0)
            before = cpu_seconds_of(federation.process)
            time.sleep(seconds)
            share = 100 * (cpu_seconds_of(federation.process) - before) / seconds
            yield at_most("4 idle silos: the link's share of a core", "%", share, 0.5)
            yield at_most("the link's memory", "MB", megabytes_of(federation.process), 50.0)
            yield at_most("a silo's network process: memory", "MB", megabytes_of(network.number), 50.0)
        finally:
            network.stop()


def _settings(federation: _Federation) -> dict[str, object]:
    (silo,) = federation.spare
    return {
        "folder": str(silo.path),
        "party": str(silo.path),
        "coordinator": silo.settings.coordinator,
        "key_process": str(silo / "run" / "none"),
        "server_key": silo.server_key,
        "largest": LARGEST_MESSAGE,
    }


def _long(length: int) -> Iterator[Row]:
    """Measure a long message that one silo returns."""
    with _Federation(1) as federation:
        federation.exchange(1000)
        seconds = statistics.median(federation.exchange(length) for _ in range(3))
    yield at_most(f"a message of {length >> 20} MiB and back", "s", seconds, 5.0)


def _many(silos: int, repeats: int) -> Iterator[Row]:
    """Measure exchanges with many silos at once."""
    with _Federation(silos) as federation:
        federation.exchange(10_000)
        before, own = cpu_seconds_of(federation.process), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        seconds = statistics.median(federation.exchange(10_000) for _ in range(repeats))
        spent = (cpu_seconds_of(federation.process) - before) / repeats / silos
        own = (sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - own) / repeats / silos
        memory = megabytes_of(federation.process)
    place = Place(plot="silos", curve="exchange, s", x=silos)
    yield Row(case=f"{silos} silos, 10 kB: an exchange, median", unit="s", ours=seconds, place=place)
    yield Row(case=f"{silos} silos, 10 kB: the link's CPU a message", unit="s", ours=spent)
    yield Row(
        case=f"{silos} silos, 10 kB: coordinator's end and all silos, CPU a message", unit="s", ours=own
    )
    yield Row(case=f"{silos} silos: the link's memory", unit="MB", ours=memory)


def _reconnected(silos: int) -> Iterator[Row]:
    """Measure how long silos are away when the link is killed."""
    with _Federation(silos) as federation:
        federation.exchange(1000)
        os.kill(federation.process, 9)
        began = time.perf_counter()
        federation.exchange(1000)
        seconds = time.perf_counter() - began
    load = os.getloadavg()[0]
    yield at_most(f"{silos} silos: all back after the link was killed, load {load:.0f}", "s", seconds, 60.0)

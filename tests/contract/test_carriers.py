"""What every transport does, whatever carries its bytes: a new one joins with a line in ``CARRIERS``."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ProtocolError
from fedveil.federation.hosts.sockets import BRIDGE, PROXY, listen, receive_frame, send_frame
from fedveil.federation.transport.bridge import Bridge, MailboxConnection, ask_key_process
from fedveil.federation.transport.exchange_loop import Patience, exchange_messages
from fedveil.federation.transport.https.http_server import Limits
from fedveil.federation.transport.interface import (
    ANSWER_PATH,
    MESSAGE_PATH,
    AnswerMessage,
    NoAnswerError,
    Transport,
)
from tests.bridges import flower_deployment, nvflare_simulator
from tests.federation_world import World, asked, population
from tests.mailboxes import Place, ServedMailbox, SiloThread, make_place

SILOS = 3
SECONDS = 120.0  # more than 256 MiB take on a loaded machine; a test waits for it only where it fails
_LIMITS = Limits(poll_seconds=1.0)


class Carried:
    """A transport with silos that answer; each of its parts can be ended and started again.

    Args:
        place: keys and folders.
    """

    seconds = SECONDS
    give_up_after = 2.0  # more than the silos that are there take for an answer on a busy machine

    def __init__(self, place: Place) -> None:
        self.place = place
        self.served = ServedMailbox(place, _LIMITS)
        self.coordinator: Transport = self.served.coordinator()
        self._silos: dict[int, SiloThread] = {}
        self._answers: dict[int, AnswerMessage] = {}

    def serve(self, silo: int, is_ending: Callable[[], bool]) -> None:
        """Serve a silo by this transport."""
        self.place.client(silo, self._answers[silo]).serve(is_ending)

    def start_silo(self, silo: int, answer: AnswerMessage) -> None:
        """Start the silo's end; one that runs already is ended."""
        self.stop_silo(silo)
        self._answers[silo] = answer
        self._silos[silo] = SiloThread(lambda is_ending: self.serve(silo, is_ending))

    def stop_silo(self, silo: int) -> None:
        """End the silo's end at once."""
        if silo in self._silos:
            self._silos.pop(silo).stop()

    def restart_mailbox(self) -> None:
        """Lose all that is under way."""
        self.served.restart()

    def restart_coordinator(self) -> None:
        """Begin another coordinator's end, which knows nothing of the last offers."""
        self.coordinator.close()
        self.coordinator = self.served.coordinator()

    def close(self) -> None:
        """End all."""
        for silo in list(self._silos):
            self.stop_silo(silo)
        self.coordinator.close()
        self.served.stop()


class CarriedByProxy(Carried):
    """A proxy that ends TLS names the certificate that it has verified."""

    def serve(self, silo: int, is_ending: Callable[[], bool]) -> None:
        """Ask, answer, bring; begin anew after whatever goes wrong."""
        certificate = (self.place.silo(silo) / "client.crt").read_text()
        headers = {"X-Client-Certificate": certificate.replace("\n", "%0A").replace("+", "%2B")}
        link, tag = MailboxConnection(str(self.served.run / PROXY), SECONDS), ""
        while not is_ending():
            try:
                asked = headers | {"If-None-Match": tag}
                status, found, message = link.request_whole("GET", MESSAGE_PATH, asked)
                if status == 200:
                    answer, tag = self._answers[silo](message), found["ETag"]
                    link.request_whole("POST", ANSWER_PATH, headers | {"Answers": tag}, answer)
                elif status != 204:
                    raise OSError(status)
            except OSError:  # one of them is a key process that gives no answer
                tag = ""
                time.sleep(0.02)
        link.close()


class CarriedByBridge(Carried):
    """A bridge at the link's host, and key processes at sockets; the system between the two hands bytes over."""

    def serve(self, silo: int, is_ending: Callable[[], bool]) -> None:
        """Carry one silo's messages; a bridge is ended as its process is."""
        with served_answers(self.place.silo(silo) / "guard", self._answers[silo], is_ending) as path:
            bridge = Bridge(str(self.served.run / BRIDGE), pause=0.02)
            bridge.add(self.place.members.names[silo], partial(ask_key_process, path))
            while not is_ending():
                time.sleep(0.01)
            bridge.close()


_opening = threading.Lock()


@contextlib.contextmanager
def served_answers(
    path: Path, answer: AnswerMessage, is_ending: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Answer at a Unix socket as a key process does, in its frames."""
    with _opening:  # one that was ended before it began must not take the socket's name from its successor
        listening = None if is_ending() else listen(path)
    if listening is None:
        yield str(path)
        return

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                message = receive_frame(connection)
                try:
                    given = b"\0", answer(message)
                except NoAnswerError as error:
                    given = b"\1", str(error).encode()
                connection.sendall(given[0])
                send_frame(connection, given[1])

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield str(path)
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


class CarriedBySystem(Carried):
    """A bridge in another system's processes, which run from one test to the next; key processes at sockets."""

    seconds = 300.0
    give_up_after = 30.0

    def serve(self, silo: int, is_ending: Callable[[], bool]) -> None:
        """Answer at the socket of the silo's key process."""
        name = self.place.members.names[silo]
        with served_answers(self.place.folder / "sockets" / name, self._answers[silo], is_ending):
            while not is_ending():
                time.sleep(0.01)


CARRIERS = {
    "https": Carried,
    "proxy": CarriedByProxy,
    "bridge": CarriedByBridge,
    "nvflare": CarriedBySystem,
    "flower": CarriedBySystem,
}
SYSTEMS: Mapping[str, Callable[..., contextlib.AbstractContextManager[Path]]] = {
    "nvflare": nvflare_simulator,
    "flower": flower_deployment,
}
PARAMETERS = [pytest.param(name, marks=pytest.mark.slow if name in SYSTEMS else ()) for name in CARRIERS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("carriers"), SILOS)


@pytest.fixture(scope="module", params=PARAMETERS)
def carrier(request: pytest.FixtureRequest, place: Place) -> Iterator[str]:
    """Name of a carrier; the system that it needs runs."""
    name = request.param
    with contextlib.ExitStack() as ending:
        if name in SYSTEMS:
            (folder := place.folder / name).mkdir()
            (sockets := place.folder / "sockets").mkdir(exist_ok=True)
            bridge = place.folder / "link" / "run" / BRIDGE
            ending.enter_context(SYSTEMS[name](folder, bridge, sockets, place.members.names))
        yield name


@pytest.fixture
def carried(carrier: str, place: Place, request: pytest.FixtureRequest) -> Iterator[Carried]:
    played = ("bit_for_bit", f"-{64 << 20}")
    if carrier == "flower" and not any(one in request.node.name for one in played):
        pytest.skip("an exchange by Flower takes 10 s or minutes, and may be repeated")
    made = CARRIERS[carrier](place)
    yield made
    made.close()


def collect(carried: Carried, silos: set[int]) -> dict[int, bytes]:
    """The first answer of each of some silos."""
    found: dict[int, bytes] = {}
    until = time.monotonic() + carried.seconds
    while silos - found.keys() and time.monotonic() < until:
        for received in carried.coordinator.collect(0.5):
            found.setdefault(received.silo, received.message)
    assert silos <= found.keys(), f"{silos - found.keys()} did not answer"
    return found


def echo(message: bytes) -> bytes:
    return message


@pytest.mark.parametrize(
    "size",
    [
        1,
        1 << 20,
        pytest.param(64 << 20, marks=pytest.mark.slow),
        pytest.param(1 << 28, marks=pytest.mark.slow),
    ],
)
def test_a_message_and_its_answer_arrive_unchanged(carried: Carried, size: int) -> None:
    message = os.urandom(min(size, 1 << 20)) * max(1, size >> 20)
    carried.start_silo(0, echo)
    carried.coordinator.offer({0: message})
    assert collect(carried, {0})[0] == message


def test_an_empty_answer_arrives(carried: Carried) -> None:
    carried.start_silo(1, lambda message: b"")
    carried.coordinator.offer({1: b"anything"})
    assert collect(carried, {1}) == {1: b""}


def test_each_silo_gets_its_own_message(carried: Carried) -> None:
    seen = Counter[tuple[int, bytes]]()

    def answer(silo: int) -> AnswerMessage:
        def noted(message: bytes) -> bytes:
            seen[silo, message] += 1
            return b"from %d" % silo

        return noted

    for silo in range(SILOS):
        carried.start_silo(silo, answer(silo))
    carried.coordinator.offer({silo: b"to %d" % silo for silo in range(SILOS)})
    assert collect(carried, set(range(SILOS))) == {silo: b"from %d" % silo for silo in range(SILOS)}
    assert seen == {(silo, b"to %d" % silo): 1 for silo in range(SILOS)}


def test_only_the_current_message_is_delivered(carried: Carried) -> None:
    """Replaced and withdrawn messages reach no silo, and an answer to one reaches nobody."""
    seen: list[bytes] = []
    begun, go_on = threading.Event(), threading.Event()

    def slowly(message: bytes) -> bytes:
        seen.append(message)
        if message == b"first":
            begun.set()
            assert go_on.wait(carried.seconds)
        return message

    coordinator = carried.coordinator
    coordinator.offer({0: b"never", 1: b"withdrawn"})
    coordinator.offer({0: b"first"}, {1})
    carried.start_silo(0, slowly)
    carried.start_silo(1, slowly)
    assert begun.wait(carried.seconds)
    coordinator.offer({0: b"second"})
    go_on.set()
    found = [received.message for received in coordinator.collect(carried.seconds)]
    assert found == [b"second"]
    assert coordinator.collect(0.2) == []
    assert seen == [b"first", b"second"]


def test_what_is_offered_again_is_asked_again(carried: Carried) -> None:
    times = Counter[bytes]()

    def answer(message: bytes) -> bytes:
        times[message] += 1
        return b"%d" % times[message]

    carried.start_silo(2, answer)
    for number in (1, 2, 3):
        carried.coordinator.offer({2: b"the same"})
        assert collect(carried, {2}) == {2: b"%d" % number}
    assert carried.coordinator.collect(0.2) == []


def test_a_silo_whose_key_process_gives_no_answer_asks_again(carried: Carried) -> None:
    failing = [True, True]

    def answer(message: bytes) -> bytes:
        if failing and failing.pop():
            raise NoAnswerError("not yet")
        return message

    carried.start_silo(0, answer)
    carried.coordinator.offer({0: b"patience"})
    assert collect(carried, {0}) == {0: b"patience"}
    assert not failing


@pytest.mark.parametrize("ended", ["mailbox", "coordinator", "silo"])
@pytest.mark.parametrize("moment", ["before", "while it is answered", "after"])
def test_a_message_outlives_the_end_of_any_part_at_any_moment(
    carried: Carried, ended: str, moment: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(message: bytes) -> bytes:
        begun.set()
        if moment == "while it is answered":
            go_on.wait(carried.seconds)
        return b"answer to " + message

    def restart() -> None:
        if ended == "mailbox":
            carried.restart_mailbox()
        elif ended == "coordinator":
            carried.restart_coordinator()
            carried.coordinator.offer({0: b"message"})  # as a run folder that is opened again does
        else:
            carried.start_silo(0, answer)

    carried.start_silo(0, answer)
    if moment == "before":
        restart()
    carried.coordinator.offer({0: b"message"})
    if moment != "before":
        assert begun.wait(carried.seconds)
        restart()
    go_on.set()
    assert collect(carried, {0}) == {0: b"answer to message"}


@pytest.mark.parametrize("seed", range(2))
def test_every_message_is_answered_whatever_is_ended_in_between(carried: Carried, seed: int) -> None:
    """A random walk: messages are replaced while mailbox, silos and the coordinator's end are started again."""
    source, current = random.Random(seed), dict[int, bytes]()
    for silo in range(SILOS):
        carried.start_silo(silo, echo)
    for step in range(20):
        silo, action = source.randrange(SILOS), source.random()
        if action < 0.6:
            current[silo] = b"%d of silo %d" % (step, silo)
            carried.coordinator.offer({silo: current[silo]})
        elif action < 0.75:
            carried.restart_mailbox()
        elif action < 0.9:
            carried.start_silo(silo, echo)
        else:
            carried.restart_coordinator()
            carried.coordinator.offer(current)
    missing, until = set(current), time.monotonic() + carried.seconds
    while missing and time.monotonic() < until:
        for received in carried.coordinator.collect(0.5):
            if received.message == current[received.silo]:
                missing.discard(received.silo)
    assert missing == set()


class Quiet:
    """Counts nothing."""

    def count_message(self, outcome: str) -> None: ...

    def note_alive(self, silo: int) -> None: ...

    def observe_latency(self, seconds: float) -> None: ...


def answers_of(world: World, silo: int, lock: threading.Lock) -> AnswerMessage:
    """A silo's key process, in this process."""

    def answer(message: bytes) -> bytes:
        with lock:
            try:
                return world.party(silo).receive(message)
            except ProtocolError as error:
                raise NoAnswerError(str(error)) from error

    return answer


def play(
    world: World, carried: Carried, meanwhile: Callable[[], None] = lambda: None, **waits: float
) -> tuple[str, ...]:
    """Play a run over a transport, with something that happens in another thread."""
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.05):
            meanwhile()

    world.coordinator = world.coordinate()
    disturbing = threading.Thread(target=disturb, daemon=True)
    disturbing.start()
    try:
        silos = world.membership.silos
        return exchange_messages(carried.coordinator, world.coordinator, silos, Patience(**waits), Quiet())
    finally:
        over.set()
        disturbing.join(SECONDS)


PROTECTIONS: Mapping[str, dict[str, Any]] = {
    "in the open": {},
    "secure aggregation": {"protection": {"name": "secure-aggregation"}},
}


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_run_is_that_of_one_process_bit_for_bit(carried: Carried, protection: str, tmp_path: Path) -> None:
    """Though the mailbox loses all that is under way again and again."""
    world = World(tmp_path / "world", asked(rounds=2, **PROTECTIONS[protection]), population(silos=SILOS))
    lock, restarts = threading.Lock(), [3]

    def lose() -> None:
        if restarts[0]:
            restarts[0] -= 1
            carried.restart_mailbox()

    try:
        for silo in range(SILOS):
            carried.start_silo(silo, answers_of(world, silo, lock))
        assert play(world, carried, lose) == ()
        world.assert_as_in_one_process()
    finally:
        world.close()


def test_a_silo_that_vanishes_is_waited_for_and_ends_the_run_with_its_name(
    carried: Carried, tmp_path: Path
) -> None:
    world = World(tmp_path / "world", asked(rounds=2), population(silos=SILOS))
    lock = threading.Lock()
    try:
        for silo in range(SILOS - 1):
            carried.start_silo(silo, answers_of(world, silo, lock))
        name = world.membership.silos[SILOS - 1]
        assert play(world, carried, give_up_after=carried.give_up_after) == (name,)
        assert f"silo {name} has not answered for {carried.give_up_after:g} s" in (
            world.outcome.stopped or ""
        )
    finally:
        world.close()

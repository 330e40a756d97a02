"""No message waits: not for the end of a poll, of a connection that was closed, or of a pause after a fault."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest

from fedveil.federation.transport.https.http_server import Limits
from fedveil.federation.transport.https.silo_client import RetryPolicy, SiloClient
from tests.mailboxes import LONGEST, Place, ServedMailbox, SiloThread, make_place
from tests.test_https_silo_client import answer, client_of, serving

SECONDS = 10.0
"""For an exchange on a busy machine: a message whose silo is not woken waits for up to 25 s."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("waits") / "place", 2)


def test_no_message_waits_for_the_end_of_a_poll(place: Place) -> None:
    """Messages come, are replaced and withdrawn at any moment of a poll or between two; members are introduced anew."""
    source, waits, over = random.Random(0), list[float](), threading.Event()
    served = ServedMailbox(place, Limits())
    coordinator, monitor = served.coordinator(), served.coordinator(0)

    def introduce() -> None:
        while not over.wait(0.005):
            monitor.set_members(place.members)
            assert monitor.last_contacts() is not None

    def echo(message: bytes) -> bytes:
        return message

    introducing = threading.Thread(target=introduce)
    with contextlib.ExitStack() as ending:
        ending.callback(served.stop)
        for one in (coordinator, monitor):
            ending.callback(one.close)
        assert coordinator.introduce()
        for silo in range(2):
            retry = RetryPolicy(sleep=waits.append)
            client = SiloClient(place.server, place.context(silo), echo, LONGEST, retry=retry)
            ending.callback(SiloThread(client.serve).stop)
        introducing.start()
        ending.callback(introducing.join)
        ending.callback(over.set)
        for number in range(200):
            messages = {silo: b"%d" % number for silo in range(2) if source.random() < 0.8}
            began = time.monotonic()
            coordinator.offer(messages, {0, 1} - messages.keys())
            while messages:
                for received in coordinator.collect(1.0):
                    if messages.get(received.silo) == received.message:
                        del messages[received.silo]
                        if source.random() < 0.5:
                            coordinator.offer({}, {received.silo})
                assert time.monotonic() - began < SECONDS, number
            if source.random() < 0.3:
                time.sleep(source.uniform(0.0, 0.01))
        assert waits == []


def test_a_connection_that_was_closed_while_it_was_idle_costs_no_pause(place: Place) -> None:
    """Each connection is closed after its first answer, without a word."""
    requests, waits = list[bytes](), list[float]()

    def reply(request: bytes) -> bytes:
        requests.append(request)
        return answer("409 Conflict" if request.startswith(b"POST") else "204 No Content")

    with serving(place, reply) as server:
        client = client_of(place, server, retry=RetryPolicy(sleep=waits.append))
        client.serve(lambda: len(requests) > 100)
    assert waits == []

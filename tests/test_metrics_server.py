"""The page for collectors: what it tells, on which sockets, and that it knows no count of records."""

from __future__ import annotations

import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from fedveil.errors import ConfigError, RunFolderError
from fedveil.federation.hosts.metrics_server import (
    AT_ONCE,
    SOCKET,
    Meter,
    MetricsServer,
    ask_party,
    local_port,
)
from fedveil.federation.hosts.sockets import RunningFolder, address
from fedveil.protocols.refusals import Code


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningFolder]:
    with closing(RunningFolder(tmp_path)) as folder:
        yield folder


@pytest.fixture
def port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


def connect(running: RunningFolder) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(address(running / SOCKET))
    return connection


def answer_of(connection: socket.socket, question: bytes = b"") -> bytes:
    """All that comes back for what is sent."""
    connection.sendall(question)
    with connection:
        return b"".join(iter(lambda: connection.recv(4096), b""))


def asked(running: RunningFolder, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text that the socket answers a question with."""
    head, _, text = (
        answer_of(connect(running), f"{method} {path} HTTP/1.1\r\nHost: any\r\n\r\n".encode())
        .decode()
        .partition("\r\n\r\n")
    )
    return int(head.split()[1]), text


def test_the_socket_answers_four_paths_to_its_owner(running: RunningFolder, tmp_path: Path) -> None:
    trouble = ["", "dns: a name"]
    connection = {"connected": False}
    with closing(
        MetricsServer(running, None, lambda: trouble.pop(0), lambda: "fedveil_round 3\n", lambda: connection)
    ):
        assert (running / SOCKET).stat().st_mode & 0o777 == 0o600
        assert asked(running, "/live") == (200, "OK\n")
        assert [asked(running, "/ready") for _ in range(2)] == [(200, "OK\n"), (503, "dns: a name\n")]
        assert asked(running, "/connection") == (200, '{"connected": false}\n')
        assert asked(running, "/metrics") == (200, "fedveil_round 3\n")
        assert asked(running, "/metrics", "HEAD") == (200, "")
        assert asked(running, "/")[0] == asked(running, "/metrics/../secret")[0] == 404
        assert {asked(running, "/metrics", method)[0] for method in ("POST", "PUT", "TRACE")} == {405}
        assert ask_party(tmp_path, "/live") == (200, "OK")
    assert ask_party(tmp_path, "/live") is None
    assert ask_party(tmp_path / "nowhere", "/live") is None


@pytest.mark.parametrize(
    "question", [b"GET /live\r\n\r\n", b"\0" * 8192, b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 1362]
)
def test_what_is_no_short_question_is_answered_so(running: RunningFolder, question: bytes) -> None:
    with closing(MetricsServer(running, None, str, str)):
        assert answer_of(connect(running), question[:8192]).startswith(b"HTTP/1.1 400 ")


def test_slow_senders_hold_a_connection_for_seconds_and_nothing_else(running: RunningFolder) -> None:
    """The deadline is of a whole question: who sends a byte now and then holds no thread; others wait that long."""
    before = threading.active_count()
    server = MetricsServer(running, None, str, str, question_seconds=0.3)
    with closing(server), ExitStack() as slow:
        senders = [slow.enter_context(connect(running)) for _ in range(AT_ONCE)]
        sent = 0
        with suppress(OSError):
            while sent < 100:
                for connection in senders:
                    connection.sendall(b"G")
                sent += 1
                time.sleep(0.05)
        assert sent < 50
        assert asked(running, "/live")[0] == 200
        assert threading.active_count() <= before + AT_ONCE


def test_figures_are_computed_once_a_second(running: RunningFolder, caplog: pytest.LogCaptureFixture) -> None:
    times: list[int] = []

    def figures() -> str:
        times.append(1)
        if len(times) > 1:
            raise RunFolderError("a private place")
        return "here\n"

    with closing(MetricsServer(running, None, str, figures)) as server:
        assert {asked(running, "/metrics") for _ in range(5)} == {(200, "here\n")}
        assert len(times) == 1
        server.fresh_seconds = 0.0
        time.sleep(1.0)
        with caplog.at_level(logging.WARNING):
            asked(running, "/metrics")
            assert asked(running, "/metrics")[0] == asked(running, "/ready")[0] == 503
    assert "a private place" not in caplog.text
    assert "RunFolderError" in caplog.text


def test_a_port_is_on_a_loopback_address_alone(running: RunningFolder, port: int) -> None:
    for wrong in (
        "0.0.0.0:9464",
        "192.0.2.1:9464",
        "9464",
        "localhost:9464",
        "127.0.0.1:0",
        "127.0.0.1:x",
        "::1:9464",
        "127.0.0.1:+9464",
        "[::1%eth0]:9464",
    ):
        with pytest.raises(ConfigError, match="loopback address and a port"):
            MetricsServer(running, wrong, str, str)
    assert local_port("[::1]:9464") == ("::1", 9464)
    with (
        closing(socket.create_server(("127.0.0.1", port))),
        pytest.raises(ConfigError, match="in use"),
    ):
        MetricsServer(running, f"127.0.0.1:{port}", str, str)


def test_a_port_answers_its_own_address_alone(running: RunningFolder, port: int) -> None:
    """A page of the web whose name leads to this host (DNS rebinding) brings that name, and is told nothing."""
    with closing(MetricsServer(running, f"127.0.0.1:{port}", str, lambda: "here\n")):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == b"here\n"
        own = f"Host: 127.0.0.1:{port}\r\n"
        for hosts in ("", "Host: evil.example\r\n", f"{own}{own}", f"{own}host: evil.example\r\n"):
            tried = socket.create_connection(("127.0.0.1", port), timeout=10)
            answer = answer_of(tried, f"GET /metrics HTTP/1.1\r\n{hosts}\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 421 ")
            assert b"here" not in answer


def test_what_passes_is_counted_and_timed() -> None:
    assert Meter(("south",)).text() == ""
    meter = Meter(("south", 'no"rth\n'))
    for seconds in (0.05, 0.2, 2.0, 5000.0):
        meter.observe_latency(seconds)
        meter.count_message("answer")
    meter.count_message("sent")
    meter.note_alive(1)
    meter.count_refusal(Code.RUN_BUDGET.name)
    text = meter.text()
    assert 'fedveil_refusals_total{code="run_budget"} 1\n' in text
    assert 'fedveil_messages_total{outcome="answer"} 4\n' in text
    buckets = dict(re.findall(r'_bucket\{le="([^"]+)"\} (\d+)', text))
    assert (buckets["0.1"], buckets["0.3"], buckets["3"], buckets["1000"], buckets["+Inf"]) == tuple("12334")
    assert "fedveil_exchange_seconds_count 4\n" in text
    assert "fedveil_exchange_seconds_sum 5002.25\n" in text
    for line in text.splitlines():
        assert re.fullmatch(
            r"# TYPE fedveil_\w+ (gauge|counter|histogram)|fedveil_\w+(\{\w+=\"(\\.|[^\"\\])*\"\})? [-+.e\d]+",
            line,
        ), line

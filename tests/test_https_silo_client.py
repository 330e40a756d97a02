"""The silo's network process against hostile servers and broken networks: what it holds, and what it says of them."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpcore
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.certificates import (
    Authority,
    KeyDigests,
    certificate_key_digest,
    new_server_key,
)
from fedveil.federation.hosts.silo_checks import describe_skew
from fedveil.federation.hosts.sockets import free_port
from fedveil.federation.hosts.status import SiloConnection
from fedveil.federation.transport.https.connection_faults import Fault, fault_of_status
from fedveil.federation.transport.https.http_server import Limits
from fedveil.federation.transport.https.silo_client import (
    FaultError,
    RetryPolicy,
    SiloClient,
    TimedBackend,
    client_context,
)
from fedveil.sanitize import FaultLog
from tests.mailboxes import Place, ServedMailbox, make_place

LARGEST = 1 << 20
Trickle = Callable[[Callable[[bytes], None]], None]
"""Sends bytes as it likes, by a function that sends some."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("client") / "place", 2)


@contextlib.contextmanager
def serving(
    place: Place,
    answers: Callable[[bytes], bytes],
    *,
    folder: Path | None = None,
    trickle: Trickle | None = None,
) -> Iterator[str]:
    """A TLS server with the link's certificate, which answers each connection's first request with any bytes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found = folder or place.folder / "link"
    context.load_cert_chain(found / "server.crt", found / "server.key")

    def serve(connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            connection,
            context.wrap_socket(connection, server_side=True) as secured,
        ):
            request = b""
            while b"\r\n\r\n" not in request:
                if not (data := secured.recv(1 << 16)):
                    return
                request += data
            if trickle is not None:
                trickle(secured.sendall)
            secured.sendall(answers(request))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(10)


def client_of(place: Place, server: str, **changed: Any) -> SiloClient:
    folder = changed.pop("folder", place.silo(0))
    context = client_context(folder, changed.pop("server_key", place.server_key))
    return SiloClient(server, context, lambda message: message, LARGEST, **changed)


def fault_of(client: SiloClient) -> Fault:
    with pytest.raises(FaultError) as failed:
        client.ping()
    return failed.value.fault


def answer(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# --- what a server can make it hold ---------------------------------------------------------------------------------


def test_compression_is_not_undone(place: Place) -> None:
    """6 MB of gzip can be 6 GB of zeros."""
    bomb = gzip.compress(bytes(4 << 20))
    with serving(place, lambda request: answer("409 Conflict", bomb, "Content-Encoding: gzip")) as server:
        assert fault_of(client_of(place, server)).code == "encoded"
    requests: list[bytes] = []
    with serving(place, lambda request: requests.append(request) or answer("409 Conflict")) as server:  # type: ignore[func-returns-value]
        client_of(place, server).ping()
    assert b"accept-encoding: identity" in requests[0].lower()


def test_a_clock_that_differs_from_the_coordinators_is_noticed(place: Place) -> None:
    for ahead, said in ((300, "300 s ahead of the coordinator's: set the clock"), (-300, "300 s behind")):
        date = f"Date: {formatdate(time.time() - ahead, usegmt=True)}"
        with serving(place, lambda request, date=date: answer("409 Conflict", b"", date)) as server:  # type: ignore[misc]
            skew = client_of(place, server).ping().skew
        assert skew is not None
        assert abs(skew - ahead) < 30
        assert describe_skew(float(ahead)).startswith(said)
    assert describe_skew(-59.0) == "within 60 s of the coordinator's"
    for date in ("today", "Mon, 01 Jan 2024 00:00:00 +99999999999999"):
        with serving(
            place, lambda request, date=date: answer("409 Conflict", b"", f"Date: {date}")
        ) as server:  # type: ignore[misc]
            assert (
                describe_skew(client_of(place, server).ping().skew)
                == "the coordinator does not tell its time"
            )


@pytest.mark.parametrize("announced", [1 << 40, None])
def test_a_message_above_the_policys_limit_is_not_read_to_its_end(
    place: Place, announced: int | None
) -> None:
    sent = bytes(LARGEST + (4 << 20))
    with serving(place, lambda request: answer("409 Conflict", sent, length=announced)) as server:
        found = fault_of(client_of(place, server))
    assert found.code == "message-too-long"
    assert "policy.toml: max_message_bytes" in found.sentence


def test_endless_headers_end(place: Place) -> None:
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(4000))
    with serving(place, lambda request: b"HTTP/1.1 409 Conflict\r\n" + lines) as server:
        assert fault_of(client_of(place, server)).code == "disconnected"


PIECES = {
    "head": [b"H"] + [b"T"] * 1000,
    "body": [b"HTTP/1.1 409 Conflict\r\nContent-Length: 10000\r\n\r\n"] + [b"a"] * 1000,
    "interim answers": [b"HTTP/1.1 102 Processing\r\n\r\n"] * 1000,
}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("sender", ["server", "proxy"])
def test_a_server_or_proxy_that_sends_little_by_little_holds_no_silo(
    place: Place, monkeypatch: pytest.MonkeyPatch, sender: str, pieces: str
) -> None:
    """Each piece came within the timeout of a single read."""
    sent = []

    def trickle(send: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            for piece in PIECES[pieces]:
                send(piece)
                sent.append(piece)
                time.sleep(0.02)

    with contextlib.ExitStack() as ending:
        if sender == "server":
            server = ending.enter_context(serving(place, lambda request: b"", trickle=trickle))
        else:
            port, _ = ending.enter_context(proxy(trickle=trickle))
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
            server = place.server
        began = time.monotonic()
        found = fault_of(client_of(place, server, retry=RetryPolicy(answer_seconds=0.3)))
        assert time.monotonic() - began < 5
    refused = (sender, pieces) == ("proxy", "body")  # by its status, before its body
    assert found.code == ("proxy-refused" if refused else "timeout")
    assert refused or len(sent) > 1


def test_nothing_that_a_server_sets_is_kept(place: Place) -> None:
    """Cookies would grow without end, and go out with every request."""
    requests: list[bytes] = []

    def set_more(request: bytes) -> bytes:
        requests.append(request)
        return answer("409 Conflict", b"", f"Set-Cookie: c{len(requests)}=x; Path=/")

    with serving(place, set_more) as server:
        client = client_of(place, server, retry=RetryPolicy(sleep=lambda seconds: None))
        client.serve(lambda: len(requests) > 3)
    assert not any(b"cookie" in one.lower() for one in requests)


@pytest.mark.parametrize("tag", ["", "ETag: \u00e9", "ETag: " + "a" * 101])
def test_a_message_without_a_valid_tag_is_not_answered(place: Place, tag: str) -> None:
    reports: list[str] = []

    def given(request: bytes) -> bytes:
        return (
            answer("409 Conflict")
            if request.startswith(b"POST")
            else answer("200 OK", b"message", tag or "X: y")
        )

    with serving(place, given) as server:
        client_of(
            place,
            server,
            report=lambda fault: reports.append("" if fault is None else fault.code),
            retry=RetryPolicy(sleep=lambda seconds: None),
        ).serve(lambda: len(reports) > 3)
    assert set(reports) == {"", "tag"}


def test_no_redirect_is_followed(place: Place) -> None:
    asked: list[bytes] = []

    def lead(request: bytes) -> bytes:
        asked.append(request)
        return answer("302 Found", b"", "Location: https://127.0.0.1:1/")

    with serving(place, lead) as server:
        assert fault_of(client_of(place, server)).code == "status-302"
    assert len(asked) == 1


# --- whom it speaks to ----------------------------------------------------------------------------------------------


def issue(authority: Authority, folder: Path, *hosts: str, days: int = 397) -> Path:
    """Another server's key and certificate."""
    folder.mkdir()
    request = new_server_key(folder / "server.key").decode()
    (folder / "server.crt").write_bytes(authority.certify(request, hosts, days))
    return folder


def test_nothing_is_sent_to_a_server_with_another_key_than_the_membership_names(
    place: Place, tmp_path: Path
) -> None:
    """A revoked key of a coordinator, whose certificate is valid for a year: not even a header arrives."""
    asked: list[bytes] = []
    revoked = issue(place.authority, tmp_path / "revoked", "127.0.0.1")

    def noted(request: bytes) -> bytes:
        asked.append(request)
        return answer("409 Conflict")

    with serving(place, noted, folder=revoked) as server:
        assert fault_of(client_of(place, server)).code == "wrong-server-key"
        assert asked == []
        client_of(place, server, server_key=certificate_key_digest(revoked / "server.crt")).ping()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("case", "code"),
    [("other", "untrusted-certificate"), ("host", "wrong-host-name"), ("expired", "expired-certificate")],
)
def test_a_certificate_that_is_not_the_coordinators_is_told(
    place: Place, tmp_path: Path, case: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of another authority is what a proxy that inspects TLS shows."""
    authority = Authority.create("proxy") if case == "other" else place.authority
    host, days = ("learn.example.org" if case == "host" else "127.0.0.1"), (0 if case == "expired" else 397)
    with serving(
        place, lambda request: b"", folder=issue(authority, tmp_path / "false", host, days=days)
    ) as server:
        time.sleep(1.1 if case == "expired" else 0.0)
        found = fault_of(client_of(place, server))
    assert found.code == code
    if case == "other":
        assert "a proxy on the way inspects TLS" in found.sentence
        FaultLog(logging.getLogger("fedveil.silo")).warn(found.code, found.sentence)
        assert (
            caplog.records[-1].getMessage().endswith("have the proxy except this host")
        )  # what to do is not cut off


def test_a_connection_does_not_outlive_the_certificate_of_the_server(tmp_path: Path) -> None:
    """TLS checks it when the connection begins, and the connection could be used for years."""
    place = make_place(tmp_path / "place", 1)
    key = load_pem_private_key((place.folder / "link" / "server.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    pem = request.public_bytes(Encoding.PEM).decode()
    certificate = place.authority.certify(pem, ("127.0.0.1",), days=3 / 86400)
    (place.folder / "link" / "server.crt").write_bytes(certificate)
    served = ServedMailbox(place, Limits(poll_seconds=0.1))
    reports: list[str] = []

    def report(fault: Fault | None) -> None:
        reports.append("" if fault is None else fault.code)

    try:
        with contextlib.closing(served.coordinator()) as coordinator:
            assert coordinator.introduce()
            until = time.monotonic() + 20
            client_of(place, place.server, folder=place.silo(0), report=report).serve(
                lambda: "expired-certificate" in reports or time.monotonic() > until
            )
    finally:
        served.stop()
    assert reports == ["", "expired-certificate"]


def test_a_server_of_tls_1_2_or_of_none_is_told(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def plain() -> None:
            connection = listening.accept()[0]
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=plain)
        thread.start()
        assert fault_of(client_of(place, f"127.0.0.1:{listening.getsockname()[1]}")).code == "tls"
        thread.join(10)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 503 Busy\r\n\r\n"])
@pytest.mark.parametrize("reset", [False, True])
def test_no_socket_is_left_open_where_tls_does_not_begin(place: Place, sent: bytes, reset: bool) -> None:
    """A server that is restarted, or a firewall, closes or resets a connection between its start and TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        opened = socket.create_connection(listening.getsockname())
        descriptor = opened.fileno()
        with listening.accept()[0] as accepted:
            accepted.sendall(sent)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        with pytest.raises(OSError, match=r"TLS|SSL|EOF"):
            place.context(0).wrap_socket(opened, server_hostname="127.0.0.1")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_silo_whose_certificate_is_not_accepted_is_told(place: Place, tmp_path: Path) -> None:
    """With TLS 1.3 a client learns of it when it reads."""
    other = make_place(tmp_path / "other", 1)
    strange = tmp_path / "strange"
    shutil.copytree(other.silo(0), strange)
    shutil.copy(place.silo(0) / "ca.crt", strange / "ca.crt")
    served = ServedMailbox(place)
    try:
        found = fault_of(client_of(place, place.server, folder=strange))
    finally:
        served.stop()
    assert found.code in ("client-certificate", "disconnected")
    assert "does not accept this silo's certificate" in found.sentence


# --- what it says of the network ------------------------------------------------------------------------------------


def test_a_name_a_port_and_a_network_that_are_not_there_are_told(place: Place) -> None:
    assert fault_of(client_of(place, "no-such-host.invalid:9443")).code == "dns"
    nobody = f"127.0.0.1:{free_port()}"
    found = fault_of(client_of(place, nobody))
    assert (found.code, nobody in found.sentence) == ("refused", True)


def test_what_a_status_means_is_told() -> None:
    codes = {
        (403, ""): "not-a-member",
        (403, "revoked"): "revoked",
        (503, "not-ready"): "not-ready",
        (500, "x"): "status-500",
    }
    assert {key: fault_of_status(*key).code for key in codes} == codes
    assert "join again" in fault_of_status(403, "revoked").sentence


@contextlib.contextmanager
def proxy(
    reply: bytes | None = None, trickle: Trickle | None = None, secured: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that takes CONNECT alone; yield its port and what was asked of it.

    With ``reply`` it refuses; with ``secured`` it speaks TLS.
    """
    asked: list[bytes] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def lead(plain: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            plain,
            plain if secured is None else secured.wrap_socket(plain, server_side=True) as connection,
        ):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (data := connection.recv(1)):
                    return
                head += data
            asked.append(head)
            if trickle is not None:
                trickle(connection.sendall)
                return
            if reply is not None:
                connection.sendall(reply)
                return
            host, port = head.split()[1].rsplit(b":", 1)
            with socket.create_connection((host.decode(), int(port))) as there:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=carry, args=(there, connection), daemon=True)
                back.start()
                carry(connection, there)
                back.join(10)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=lead, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield listening.getsockname()[1], asked
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(10)


def test_a_silo_goes_through_the_proxy_of_its_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedMailbox(place)
    coordinator = served.coordinator()
    try:
        assert coordinator.introduce()
        with proxy() as (port, asked):
            monkeypatch.setenv("HTTPS_PROXY", f"http://name:pass@127.0.0.1:{port}")
            client_of(place, place.server).ping()
            assert asked[0].startswith(f"CONNECT {place.server} HTTP/1.1\r\n".encode())
            assert b"proxy-authorization: basic" in asked[0].lower()
            monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{port}")  # as curl takes it
            client_of(place, place.server).ping()
            assert len(asked) == 2
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            client_of(place, place.server).ping()
            assert len(asked) == 2
    finally:
        coordinator.close()
        served.stop()


def secured_proxy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Return the TLS of a proxy whose certificate the client's environment trusts."""
    authority = Authority.create("proxies")
    request = new_server_key(folder / "proxy.key")
    (folder / "proxy.crt").write_bytes(authority.certify(request.decode(), ("127.0.0.1",)))
    (folder / "ca.crt").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.crt"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "proxy.crt", folder / "proxy.key")
    return context


def test_a_silo_goes_through_a_proxy_with_tls(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedMailbox(place)
    coordinator = served.coordinator()
    try:
        assert coordinator.introduce()
        with proxy(secured=secured_proxy(tmp_path, monkeypatch)) as (port, asked):
            monkeypatch.setenv("HTTPS_PROXY", f"https://127.0.0.1:{port}")
            client_of(place, place.server).ping()
            assert asked[0].startswith(f"CONNECT {place.server} HTTP/1.1\r\n".encode())
            wrong = client_of(place, place.server, server_key="0" * 64)
            assert fault_of(wrong).code == "wrong-server-key"
    finally:
        coordinator.close()
        served.stop()


def test_a_proxy_with_tls_that_sends_byte_by_byte_holds_no_silo(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are of one record of the TLS within its own, which the client must have whole."""
    sent = 0

    def drip(send: Callable[[bytes], None]) -> None:
        nonlocal sent
        send(b"HTTP/1.1 200 OK\r\n\r\n" + b"\x16\x03\x03\x40\x00\x02\x00\x3f\xf0")
        for _ in range(1000):
            send(b"\x03")
            sent += 1
            time.sleep(0.02)

    with proxy(trickle=drip, secured=secured_proxy(tmp_path, monkeypatch)) as (port, _):
        monkeypatch.setenv("HTTPS_PROXY", f"https://127.0.0.1:{port}")
        began = time.monotonic()
        assert (
            fault_of(client_of(place, place.server, retry=RetryPolicy(answer_seconds=0.4))).code == "timeout"
        )
        assert time.monotonic() - began < 5
    assert sent > 1


def test_a_name_with_many_addresses_takes_no_longer() -> None:
    with contextlib.ExitStack() as ending:
        listening = ending.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        address = listening.getsockname()
        for _ in range(8):  # fill the queue: the next connection is not answered
            waiting = ending.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM) * 20
        backend = TimedBackend(lambda *_, **__: found)
        backend.until = time.monotonic() + 0.5
        with pytest.raises((httpcore.TimeoutException, httpcore.ConnectError)):
            backend.connect_tcp("silo.example", address[1], 20)
        assert time.monotonic() < backend.until + 3


def test_a_proxy_that_is_dead_or_refuses_is_told_without_its_password(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://name:secret@127.0.0.1:{free_port()}")
    found = [fault_of(client_of(place, place.server))]
    for reply in (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", b"HTTP/1.1 403 Forbidden\r\n\r\n"):
        with proxy(reply) as (port, _):
            monkeypatch.setenv("HTTPS_PROXY", f"http://name:secret@127.0.0.1:{port}")
            found.append(fault_of(client_of(place, place.server)))
    assert [one.code for one in found] == ["proxy-unreachable", "proxy-authentication", "proxy-refused"]
    assert all("HTTPS_PROXY" in one.sentence and "secret" not in one.sentence for one in found)


@pytest.mark.parametrize(
    "named", ["socks5://n:secret@a:1", "ftp://a:1", "http://n:secret@a:port", "http://", "http://[::1"]
)
def test_what_is_no_http_proxy_is_refused_without_its_password(
    place: Place, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", named)
    with pytest.raises(ConfigError, match=r"^HTTPS_PROXY \(or ALL_PROXY\): must be an HTTP proxy") as refused:
        client_of(place, place.server)
    assert "secret" not in str(refused.value)


def test_it_reports_the_connection_and_comes_back_with_growing_jittered_waits(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[str] = []
    waits: list[float] = []
    over = threading.Event()

    def report(fault: Fault | None) -> None:
        reports.append("connected" if fault is None else fault.code)
        if fault is None:
            over.set()

    with contextlib.ExitStack() as ending, caplog.at_level(logging.INFO, "fedveil.silo"):

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 12:
                served = ServedMailbox(place, Limits(poll_seconds=0.2))
                ending.callback(served.stop)
                coordinator = served.coordinator()
                ending.callback(coordinator.close)
                assert coordinator.introduce()

        retry = RetryPolicy(first=1.0, longest=30.0, sleep=wait)
        client_of(place, place.server, report=report, retry=retry).serve(over.is_set)
    assert reports[:13] == ["refused"] * 12 + ["connected"]
    longest = [min(30.0, 2.0**number) for number in range(12)]
    assert all(0.3 * most <= waited <= most for waited, most in zip(waits, longest, strict=True))
    assert len({round(waited / most, 6) for waited, most in zip(waits, longest, strict=True)}) > 6
    lines = [one.getMessage() for one in caplog.records if one.name == "fedveil.silo"]
    assert [line.split(":")[0] for line in lines] == ["refused", "connected to the coordinator at 127.0.0.1"]


@pytest.mark.parametrize(
    "line", ["5", "[1]", '{"fault": 5}', '{"fault": {"code": "\\u001b[2J"}}', "[" * 60_000]
)
def test_a_network_process_that_reports_anything_stops_no_health(line: str) -> None:
    """It faces the network; what it writes is shown by `health`, `status` and the metrics."""
    connection = SiloConnection()
    with contextlib.suppress(RecursionError):  # the reader of the lines drops it
        connection.note_report(json.loads(line))
    assert connection.trouble().isprintable()
    assert connection.facts()["connected"] is False
    connection.note_report({"fault": None})
    assert connection.facts()["connected"] is True


def test_the_client_needs_its_own_key(place: Place, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(place.silo(0), wrong)
    shutil.copy(place.silo(1) / "node.key", wrong / "node.key")
    with pytest.raises(ssl.SSLError):
        client_context(wrong, place.server_key)
    assert replace(place, port=1).server == "127.0.0.1:1"
    assert os.stat(place.silo(0) / "node.key").st_mode & 0o777 == 0o600


def test_a_certificate_whose_end_cannot_be_read_is_one_that_cannot_be_read() -> None:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(datetime(2026, 1, 1))
    found = (
        builder.not_valid_after(datetime(2051, 1, 2, 3, 4, 5)).sign(key, SHA256()).public_bytes(Encoding.DER)
    )
    assert KeyDigests()(found)
    assert not KeyDigests().has_expired(found)
    damaged = found.replace(b"20510102030405Z", b"00000102030405Z")
    assert KeyDigests()(damaged) == ""
    assert not KeyDigests().has_expired(damaged)

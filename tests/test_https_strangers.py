"""What strangers, members and slow senders get of a mailbox: every attack on the port that the network reaches."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import parse_headers
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from fedveil.federation.enrollment.certificates import Authority, new_node_key
from fedveil.federation.hosts.deployment import Hosting, write_deployment
from fedveil.federation.hosts.link import server_context
from fedveil.federation.hosts.sockets import BRIDGE, LINK, PROXY, address, free_port, listen
from fedveil.federation.transport.bridge import MailboxConnection, ask_key_process
from fedveil.federation.transport.https.connection_faults import fault_of_status
from fedveil.federation.transport.https.http_server import HttpServer, Limits, Request, Response
from fedveil.federation.transport.https.mailbox import MailboxClient, Members
from fedveil.federation.transport.https.silo_client import SiloClient
from fedveil.federation.transport.interface import (
    ANSWER_PATH,
    MEMBERS_PATH,
    MESSAGE_PATH,
    MESSAGES_PATH,
    pack_frames,
)
from fedveil.sanitize import FaultLog
from tests.fuzz import Decoder, Requests, play
from tests.mailboxes import Place, ServedMailbox, certify, make_place

LONGEST = 1 << 20
ENDED = (ConnectionError, ssl.SSLError)
"""How the end of a connection shows."""
_LIMITS = Limits(
    handshake_seconds=0.6,
    header_seconds=0.6,
    idle_seconds=1.2,
    lag_seconds=0.6,
    least_rate=1e6,
    strangers=20,
    poll_seconds=3.0,
)
"""Times short enough for tests; the others are those of a link that is served."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Three members, and beside them keys and certificates of those who are none."""
    made = make_place(tmp_path_factory.mktemp("strangers") / "place", 3)
    certify(Authority.create("test"), made.folder / "other authority", "silo-0")
    certify(made.authority, made.folder / "no member", "silo-0")
    certify(made.authority, made.folder / "expired", "silo-0", days=0)
    server = made.folder / "server as client"
    server.mkdir()
    for name, target in (("server.crt", "client.crt"), ("server.key", "node.key")):
        (server / target).write_bytes((made.folder / "link" / name).read_bytes())
    return made


@pytest.fixture(scope="module")
def served(place: Place) -> Iterator[ServedMailbox]:
    made = ServedMailbox(place, _LIMITS)
    yield made
    made.stop()


@pytest.fixture
def coordinator(served: ServedMailbox) -> Iterator[MailboxClient]:
    made = served.coordinator(LONGEST)
    made.offer({0: b"for silo 0", 1: b"for silo 1"}, {2})
    yield made
    made.offer({}, {0, 1, 2})
    made.close()


def context(
    place: Place, name: str | None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.maximum_version = version
    made.load_verify_locations(cafile=place.folder / "link" / "ca.crt")
    if name is not None:
        made.load_cert_chain(place.folder / name / "client.crt", place.folder / name / "node.key")
    return made


def client(place: Place, name: str | None, **more: Any) -> httpx.Client:
    return httpx.Client(base_url=f"https://{place.server}", verify=context(place, name, **more), timeout=10)


def tag_of(silo: httpx.Client) -> str:
    return str(silo.get(MESSAGE_PATH).headers["etag"])


def raw(place: Place, name: str | None = None) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", place.port))
    return plain if name is None else context(place, name).wrap_socket(plain, server_hostname="127.0.0.1")


def certified_again(place: Place, name: str, seconds: float) -> Path:
    """Another certificate of silo 0, for its own key."""
    folder = place.folder / name
    shutil.copytree(place.silo(0), folder)
    public = load_pem_private_key((folder / "node.key").read_bytes(), None).public_key()
    node = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (folder / "client.crt").write_bytes(place.authority.certify_silo(node, "silo-0", days=seconds / 86400))
    return folder


# --- who is believed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "other authority", "server as client", "expired"])
@pytest.mark.usefixtures("coordinator")
def test_without_a_valid_certificate_of_the_authority_no_http_is_spoken(
    place: Place, name: str | None
) -> None:
    with client(place, name) as stranger, pytest.raises(httpx.TransportError):
        stranger.get(MESSAGE_PATH)


@pytest.mark.usefixtures("coordinator")
def test_nobody_speaks_tls_1_2_or_no_tls(place: Place) -> None:
    with client(place, "silo-0", version=ssl.TLSVersion.TLSv1_2) as old, pytest.raises(httpx.TransportError):
        old.get(MESSAGE_PATH)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{place.server}{MESSAGE_PATH}")


@pytest.mark.usefixtures("coordinator")
def test_a_certificate_with_a_members_name_and_another_key_is_no_members(place: Place) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        for path in (MESSAGE_PATH, ANSWER_PATH, "/v1/members", "/v1/messages", "/v1/answers?1", "/"):
            with client(place, "no member") as stranger:
                refused = stranger.request(method, path)
            found = refused.status_code, refused.headers["cause"], refused.content
            assert found == (403, "not-a-member", b""), (method, path)


def test_a_revoked_key_is_refused_as_revoked_on_a_connection_that_is_open(
    place: Place, served: ServedMailbox, coordinator: MailboxClient
) -> None:
    keys, names = place.members.keys, place.members.names
    with client(place, "silo-2") as silo, client(place, "silo-0") as other:
        assert silo.post(ANSWER_PATH, headers={"Answers": "none"}, content=b"").status_code == 409
        without = Members(keys=keys[:2], names=names[:2], revoked=keys[2:])
        with contextlib.closing(MailboxClient(served.run / LINK, without)) as later:
            assert later.introduce()
        try:
            refused = silo.get(MESSAGE_PATH)
            assert (refused.status_code, refused.headers["cause"]) == (403, "revoked")
            assert other.get(MESSAGE_PATH).content == b"for silo 0"  # what others have stays theirs
        finally:
            assert coordinator.introduce()


def test_a_certificate_that_expires_is_refused_on_a_connection_that_is_open(
    place: Place, served: ServedMailbox, coordinator: MailboxClient
) -> None:
    """TLS checks it once; a connection that is used again and again would outlive it by years."""
    short = certified_again(place, "short", seconds=3)
    escaped = (short / "client.crt").read_text().replace("\n", "%0A").replace("+", "%2B")
    with client(place, "short") as silo, client(place, "silo-0") as other:
        first = silo.get(MESSAGE_PATH)
        assert first.content == b"for silo 0"
        until = time.monotonic() + 15
        while (refused := silo.get(MESSAGE_PATH)).status_code == 200:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert refused.extensions["network_stream"] is first.extensions["network_stream"]
        assert (refused.status_code, refused.headers["cause"], refused.content) == (403, "expired", b"")
        with pytest.raises(httpx.TransportError):
            silo.get(MESSAGE_PATH)  # the connection was closed, and no other is begun
        assert other.get(MESSAGE_PATH).content == b"for silo 0"
    link = MailboxConnection(str(served.run / PROXY), 5.0)  # a proxy checks a certificate once too
    status, found, _ = link.request_whole("GET", MESSAGE_PATH, {"X-Client-Certificate": escaped})
    assert (status, found["Cause"]) == (403, "expired")
    assert "the founder seals again" in fault_of_status(403, "expired").sentence
    link.close()


def polled(silo: httpx.Client, meanwhile: Callable[[], object]) -> tuple[int, str, bytes]:
    """What a poll is answered after something has happened while it waits."""
    with ThreadPoolExecutor(1) as thread:
        poll = thread.submit(silo.get, MESSAGE_PATH)
        time.sleep(0.3)
        assert not poll.done()
        meanwhile()
        found = poll.result(20)
    return found.status_code, found.headers.get("cause", ""), found.content


def test_a_poll_ends_with_the_certificate_and_the_membership_that_it_was_begun_under(
    place: Place, served: ServedMailbox, coordinator: MailboxClient
) -> None:
    """It waited on for up to 25 s, and a message that came meanwhile was given to a certificate that had expired."""
    coordinator.offer({}, {0, 2})
    certified_again(place, "shorter", seconds=2)

    def offer() -> None:
        time.sleep(2.1)
        coordinator.offer({0: b"for silo 0"})

    with client(place, "shorter") as silo:
        assert polled(silo, offer) == (403, "expired", b"")
    with client(place, "silo-0") as silo:
        assert silo.get(MESSAGE_PATH).content == b"for silo 0"
    keys, names = place.members.keys, place.members.names
    without = Members(keys=keys[:2], names=names[:2], revoked=keys[2:])
    try:
        with (
            contextlib.closing(MailboxClient(served.run / LINK, without)) as later,
            client(place, "silo-2") as silo,
        ):
            began = time.monotonic()
            assert polled(silo, later.introduce) == (403, "revoked", b"")
            assert time.monotonic() - began < _LIMITS.poll_seconds / 2
    finally:
        assert coordinator.introduce()


def test_an_answer_is_not_taken_whose_key_is_revoked_while_it_is_sent(
    place: Place, served: ServedMailbox, coordinator: MailboxClient
) -> None:
    coordinator.offer({2: b"for silo 2"})
    keys, names = place.members.keys, place.members.names
    without = Members(keys=keys[:2], names=names[:2], revoked=keys[2:])
    with client(place, "silo-2") as member:
        tag = tag_of(member)
    head = f"POST {ANSWER_PATH} HTTP/1.1\r\nHost: x\r\nAnswers: {tag}\r\nContent-Length: 4\r\n\r\nan"
    try:
        with (
            raw(place, "silo-2") as member,
            contextlib.closing(MailboxClient(served.run / LINK, without)) as later,
        ):
            member.sendall(head.encode())
            time.sleep(0.1)
            assert later.introduce()
            member.sendall(b"sw")
            assert member.recv(64).startswith(b"HTTP/1.1 403")
    finally:
        assert coordinator.introduce()
    assert coordinator.collect(0.05) == []


def test_before_the_members_are_known_everybody_is_told_to_wait(place: Place, tmp_path: Path) -> None:
    """Not 403: every silo would log a refusal at each start of the coordinator."""
    other = make_place(tmp_path / "place", 1)
    mailbox = ServedMailbox(other, _LIMITS)
    try:
        with client(other, "silo-0") as silo:
            waits = silo.get(MESSAGE_PATH)
        assert (waits.status_code, waits.headers["cause"]) == (503, "not-ready")
    finally:
        mailbox.stop()


# --- what a member may do -------------------------------------------------------------------------------------------


def test_a_member_reads_its_own_message_and_answers_no_other(
    place: Place, coordinator: MailboxClient
) -> None:
    with client(place, "silo-0") as own, client(place, "silo-1") as other:
        assert (own.get(MESSAGE_PATH).content, other.get(MESSAGE_PATH).content) == (
            b"for silo 0",
            b"for silo 1",
        )
        tag = tag_of(own)
        assert other.post(ANSWER_PATH, headers={"Answers": tag}, content=b"x").status_code == 409
        assert own.post(ANSWER_PATH, headers={"Answers": ""}, content=b"x").status_code == 409
        assert coordinator.collect(0.05) == []
        assert own.post(ANSWER_PATH, headers={"Answers": tag}, content=b"mine").status_code == 204
    assert [(one.silo, one.message) for one in coordinator.collect(5)] == [(0, b"mine")]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"{MESSAGE_PATH}/",
        f"{MESSAGE_PATH}?x",
        "/v1//message",
        "/v1/../v1/message",
        "/V1/MESSAGE",
        "/v1/mess%61ge",
        "/v1/members",
        "/v1/messages",
        "/v1/answers?1",
    ],
)
@pytest.mark.usefixtures("coordinator")
def test_another_spelling_of_a_path_is_another_path(place: Place, path: str) -> None:
    with raw(place, "silo-0") as member:
        member.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert member.recv(64).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE"])
@pytest.mark.usefixtures("coordinator")
def test_another_method_is_another_route(place: Place, method: str) -> None:
    with client(place, "silo-0") as member:
        assert member.request(method, MESSAGE_PATH).status_code == 404


@pytest.mark.usefixtures("coordinator")
def test_the_headers_of_proxies_and_bridges_are_not_read_at_the_port(place: Place) -> None:
    escaped = (place.silo(1) / "client.crt").read_text().replace("\n", "%0A").replace("+", "%2B")
    with client(place, "silo-0") as member:
        forged = {"X-Client-Certificate": escaped, "Silo": "silo-1"}
        assert member.get(MESSAGE_PATH, headers=forged).content == b"for silo 0"


def test_at_the_proxys_socket_a_certificate_of_no_member_is_refused(
    place: Place, served: ServedMailbox, coordinator: MailboxClient
) -> None:
    transport = httpx.HTTPTransport(uds=address(served.run / PROXY))
    with httpx.Client(base_url="http://link", transport=transport) as proxy:
        for name, status in (("no member", 403), ("silo-1", 200)):
            certificate = (place.folder / name / "client.crt").read_text()
            escaped = certificate.replace("\n", "%0A").replace("+", "%2B")
            assert proxy.get(MESSAGE_PATH, headers={"X-Client-Certificate": escaped}).status_code == status
        assert proxy.get(MESSAGE_PATH).status_code == 403
        assert proxy.get(MESSAGE_PATH, headers={"X-Client-Certificate": "%00"}).status_code == 403
        assert proxy.get(MESSAGE_PATH, headers={"Silo": "silo-1"}).status_code == 403


@pytest.mark.parametrize("name", ["silo-9", "1", "", "no member"])
@pytest.mark.usefixtures("coordinator")
def test_at_the_bridges_socket_the_name_of_no_silo_is_refused(served: ServedMailbox, name: str) -> None:
    transport = httpx.HTTPTransport(uds=address(served.run / BRIDGE))
    with httpx.Client(base_url="http://link", transport=transport) as bridge:
        assert bridge.get(MESSAGE_PATH, headers={"Silo": name}).status_code == 403
        assert bridge.get(MESSAGE_PATH, headers={"Silo": "silo-1"}).status_code == 200


def test_the_sockets_of_the_link_are_its_owners_alone(served: ServedMailbox) -> None:
    assert {path.name: path.stat().st_mode & 0o777 for path in served.run.iterdir()} == {
        LINK: 0o600,
        PROXY: 0o600,
        BRIDGE: 0o600,
    }


def test_an_answer_whose_message_is_replaced_while_it_is_sent_is_not_taken(
    place: Place, coordinator: MailboxClient
) -> None:
    with client(place, "silo-0") as member:
        tag = tag_of(member)
    head = f"POST {ANSWER_PATH} HTTP/1.1\r\nHost: x\r\nAnswers: {tag}\r\nContent-Length: 4\r\n\r\nan"
    with raw(place, "silo-0") as member:
        member.sendall(head.encode())
        time.sleep(0.1)
        coordinator.offer({0: b"another message"})
        member.sendall(b"sw")
        assert member.recv(64).startswith(b"HTTP/1.1 409")
    assert coordinator.collect(0.05) == []


# --- lengths --------------------------------------------------------------------------------------------------------


def test_a_body_is_judged_by_its_length_before_it_is_read(place: Place, coordinator: MailboxClient) -> None:
    with client(place, "silo-0") as member:
        tag = {"Answers": tag_of(member)}
        began = time.monotonic()
        assert member.post(ANSWER_PATH, headers=tag, content=bytes(LONGEST + 1)).status_code == 413
        assert time.monotonic() - began < 5
        assert member.post(ANSWER_PATH, headers=tag, content=iter([b"x"])).status_code == 411  # chunked
        assert member.get(MESSAGE_PATH).status_code == 200
        assert member.request("GET", MESSAGE_PATH, content=b"a body").status_code == 413
    assert coordinator.collect(0.05) == []


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", b"400"),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"4"),
        ("Content-Length: -1\r\n\r\n", b"400"),
        ("Content-Length: 1_0\r\n\r\n0123456789", b"400"),
        ("Answers: a\r\nAnswers: b\r\nContent-Length: 0\r\n\r\n", b"400"),
        ("X: " + "a" * (1 << 20) + "\r\n\r\n", b"4"),
    ],
)
@pytest.mark.usefixtures("coordinator")
def test_what_two_readers_would_read_in_two_ways_is_refused(place: Place, lines: str, status: bytes) -> None:
    with raw(place, "silo-0") as member, contextlib.suppress(*ENDED):
        member.settimeout(10)
        with contextlib.suppress(*ENDED):
            member.sendall(f"POST {ANSWER_PATH} HTTP/1.1\r\nHost: x\r\n{lines}".encode())
        said = member.recv(64)
        assert said.startswith(b"HTTP/1.1 " + status) or said == b""


def test_bytes_that_are_sent_ahead_end_the_connection(place: Place, coordinator: MailboxClient) -> None:
    coordinator.offer({}, {0})
    request = f"GET {MESSAGE_PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with raw(place, "silo-0") as member:
        member.settimeout(10)
        member.sendall(request)
        time.sleep(0.1)
        member.sendall(request)
        assert member.recv(64) == b""


# --- times ----------------------------------------------------------------------------------------------------------

_HEAD = f"GET {MESSAGE_PATH} HTTP/1.1\r\nHost: x\r\n".encode()
SLOW: dict[str, tuple[str | None, bytes, float]] = {
    "TCP, then nothing": (None, b"", 0.0),
    "TLS, then nothing": ("silo-0", b"", 0.0),
    "half a header": ("silo-0", _HEAD, 0.0),
    "a header, byte by byte": ("silo-0", _HEAD + b"X: ", 0.1),
    "content of a GET that does not come": ("silo-0", _HEAD + b"Content-Length: 5\r\n\r\n", 0.0),
    "the same of no member": ("no member", _HEAD + b"Content-Length: 5\r\n\r\n", 0.0),
    "a body that stops": ("silo-0", b"", 0.0),
    "a body, byte by byte": ("silo-0", b"", 0.1),
    "garbage in TCP": (None, os.urandom(3000), 0.0),
    "garbage in TLS": ("silo-0", b"\0" + os.urandom(3000), 0.0),
}


@pytest.mark.parametrize("case", SLOW)
def test_whoever_is_slow_is_cut_off(place: Place, coordinator: MailboxClient, case: str) -> None:
    name, words, pause = SLOW[case]
    if "body" in case:
        with client(place, "silo-0") as member:
            tag = tag_of(member)
        words = f"POST {ANSWER_PATH} HTTP/1.1\r\nHost: x\r\nAnswers: {tag}\r\nContent-Length: 100000\r\n\r\n".encode()
    began, said = time.monotonic(), b""
    with contextlib.suppress(*ENDED), raw(place, name) as slow:
        slow.sendall(words)
        slow.settimeout(pause or 10)
        while time.monotonic() - began < 10:
            try:
                piece = slow.recv(4096)
                said += piece
                if not piece:
                    break
            except TimeoutError:
                slow.sendall(b"x")
    assert time.monotonic() - began < 5  # 0.6 s, and a busy machine
    assert said == b"" or said.startswith(b"HTTP/1.1 4" if "garbage" in case else b"HTTP/1.1 408"), said


def test_a_reader_that_takes_nothing_is_cut_off(place: Place, coordinator: MailboxClient) -> None:
    coordinator.offer({0: bytes(32 << 20)})
    with raw(place, "silo-0") as member:
        member.sendall(_HEAD + b"\r\n")
        time.sleep(2)
        read = 0
        with contextlib.suppress(*ENDED):
            while piece := member.recv(1 << 20):
                read += len(piece)
    assert read < 32 << 20


# --- numbers --------------------------------------------------------------------------------------------------------


def test_the_newest_request_of_a_member_waits_and_the_others_end(
    place: Place, coordinator: MailboxClient
) -> None:
    coordinator.offer({}, {0})
    ended: list[httpx.Response] = []
    clients = [client(place, "silo-0") for _ in range(4)]
    threads = [
        threading.Thread(target=lambda one=one: ended.append(one.get(MESSAGE_PATH))) for one in clients
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    assert [one.status_code for one in ended] == [204, 204, 204]
    assert all("replaced" in one.headers for one in ended)
    coordinator.offer({0: b"at last"})
    threads[-1].join(10)
    assert ended[-1].content == b"at last"
    for thread, one in zip(threads, clients, strict=True):
        thread.join(10)
        one.close()


def test_a_member_has_a_number_of_connections(place: Place, coordinator: MailboxClient) -> None:
    opened = []
    for _ in range(_LIMITS.member_connections + 3):
        opened.append(raw(place, "silo-1"))
        opened[-1].sendall(
            f"POST {ANSWER_PATH} HTTP/1.1\r\nHost: x\r\nAnswers: n\r\nContent-Length: 0\r\n\r\n".encode()
        )
        assert opened[-1].recv(64).startswith(b"HTTP/1.1 409")
    # a refusal closes the connection; those that are kept are polls
    polls = [raw(place, "silo-1") for _ in range(_LIMITS.member_connections + 2)]
    for one in polls:
        one.settimeout(10)
        one.sendall(_HEAD + b"\r\n")
        time.sleep(0.02)
        assert one.recv(64).startswith(b"HTTP/1.1 200")
    assert polls[0].recv(1 << 16) is not None
    ended = 0
    for one in polls:
        one.setblocking(False)
        with contextlib.suppress(ssl.SSLWantReadError, BlockingIOError):
            while piece := one.recv(1 << 16):
                assert piece
            ended += 1
    assert ended >= 2
    for one in (*opened, *polls):
        one.close()


def test_silent_connections_do_not_keep_members_out(place: Place, coordinator: MailboxClient) -> None:
    """Three times as many as the link holds of strangers: the oldest goes, and a member comes in at once."""
    before = len(os.listdir("/proc/self/fd"))
    held = [socket.create_connection(("127.0.0.1", place.port)) for _ in range(3 * _LIMITS.strangers)]
    try:
        with client(place, "silo-0") as member:
            began = time.monotonic()
            assert member.get(MESSAGE_PATH).content == b"for silo 0"
            assert time.monotonic() - began < 5
    finally:
        for one in held:
            one.close()
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before + 2:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_no_more_strangers_are_held_than_the_limit(place: Place, coordinator: MailboxClient) -> None:
    """The oldest is closed for the newest, long before its handshake is late."""
    with contextlib.ExitStack() as held:
        opened = [
            held.enter_context(socket.create_connection(("127.0.0.1", place.port)))
            for _ in range(2 * _LIMITS.strangers)
        ]
        began = time.monotonic()
        opened[0].settimeout(10)
        with contextlib.suppress(*ENDED):
            assert opened[0].recv(1) == b""
        assert time.monotonic() - began < _LIMITS.handshake_seconds / 2


def test_a_flood_of_one_fault_is_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    now = [0.0]
    faults = FaultLog(logging.getLogger("fedveil.link"), lambda: now[0])
    for number in range(1000):
        now[0] = number / 10
        faults.warn("tls", "a connection did not complete its TLS handshake")
    lines = [one.getMessage() for one in caplog.records]
    assert lines == [
        "tls: a connection did not complete its TLS handshake",
        "tls: a connection did not complete its TLS handshake (599 more like it since the last such line)",
    ]


def test_a_member_whose_certificate_has_the_node_key_of_another_is_not_made(tmp_path: Path) -> None:
    """A certificate is for a key: the server sees that the other end has it."""
    made = make_place(tmp_path / "place", 2)
    stolen = made.folder / "stolen"
    stolen.mkdir()
    new_node_key(stolen / "node.key")
    (stolen / "client.crt").write_bytes((made.silo(0) / "client.crt").read_bytes())
    with pytest.raises(ssl.SSLError, match=r"(?i)mismatch"):
        context(made, "stolen")


def test_no_bytes_do_more_at_a_connection_than_be_answered_or_end_it() -> None:
    """``python -m tests.fuzz`` tries as many as are asked for."""
    with contextlib.closing(Requests()) as read:
        decoder = Decoder(name="requests to a mailbox", read=read, good=Requests.good)
        assert play((decoder,), 2000).inputs == 2000


# --- a link that is broken into -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nMailbox: other\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nMailbox: one\r\nContent-Length: 13\r\n\r\n" + bytes(12) + b"x",
        b"HTTP/1.1 200 OK\r\nMailbox: one\r\nContent-Length: 20000\r\n\r\n" + b"[" * 20000,
        b"HTTP/1.1 200 OK\r\nMailbox: one\r\nContent-Length: x\r\n\r\n[1, 2, true]",
        b"HTTP/1.1 200 OK\r\nMailbox: one\r\nContent-Length: 1000000000000\r\n\r\n" + bytes(1 << 22),
        b"HTTP/1.1 200 OK\r\nMailbox: one\r\nContent-Length: 100\r\n\r\n"
        + b"".join(pack_frames([(0, b"part")])),
        b"HTTP/1.1 200 OK\r\nMailbox: one\r\nConnection: close\r\n\r\n[1, 2, 3]",
        b"HTTP/1.1 500 Error\r\nMailbox: one\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
)
def test_a_link_that_sends_anything_stops_no_coordinator(place: Place, tmp_path: Path, reply: bytes) -> None:
    """It counts as a mailbox that is gone; no more of its answer is read than the longest message takes."""
    right = b"HTTP/1.1 204 No Content\r\nMailbox: one\r\n\r\n"
    asked = list[bytes]()

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listening.accept()[0]
                with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
                    while line := stream.readline().split():
                        asked.append(line[1])
                        length = int(parse_headers(stream)["Content-Length"] or 0)
                        stream.read(length)
                        connection.sendall(right if line[0] == b"PUT" else reply)
                        if line[0] == b"GET":
                            break

    with listen(tmp_path / "link") as listening:
        serving = threading.Thread(target=serve, args=(listening,), daemon=True)
        serving.start()
        with contextlib.closing(MailboxClient(tmp_path / "link", place.members, longest=1000)) as client:
            client.offer({0: b"message"})
            assert client.collect(0.01) == []
            assert client.last_contacts() is None
        listening.shutdown(socket.SHUT_RDWR)
        serving.join(10)
    assert {MEMBERS_PATH.encode(), MESSAGES_PATH.encode()} <= set(asked)


@pytest.mark.parametrize(
    "reply",
    [
        [b"H"] + [b"T"] * 1000,
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"] + [b"a"] * 1000,
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000,
    ],
    ids=["head", "body", "interim answers"],
)
def test_a_link_that_sends_little_by_little_holds_no_coordinator(tmp_path: Path, reply: list[bytes]) -> None:
    """Each piece came within the timeout of a single read."""
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        connection = listening.accept()[0]
        with connection, contextlib.suppress(OSError):
            for piece in reply:
                connection.sendall(piece)
                if over.wait(0.02):
                    return

    with listen(tmp_path / "link") as listening:
        serving = threading.Thread(target=serve, args=(listening,), daemon=True)
        serving.start()
        link, began = MailboxConnection(str(tmp_path / "link"), 0.2), time.monotonic()
        with pytest.raises(OSError, match=r"^no answer of the mailbox: (too slow|timed out)$"):
            link.request_whole("GET", "/v1/answers?1", {})
        assert time.monotonic() - began < 5
        over.set()
        serving.join(10)


def test_a_link_that_accepts_nobody_holds_no_coordinator(tmp_path: Path) -> None:
    """A Unix socket whose queue is full refuses at once; were it to wait, the time would be the request's."""
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(address(tmp_path / "link"))
        listening.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(8):  # fill the queue
                waiting = opened.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(address(tmp_path / "link"))
        began = time.monotonic()
        for ask in (
            lambda: MailboxConnection(str(tmp_path / "link"), 0.2).request_whole("GET", "/v1/answers?1", {}),
            lambda: ask_key_process(str(tmp_path / "link"), b"message"),
        ):
            with pytest.raises(OSError, match=r"temporarily unavailable|timed out"):
                ask()
        assert time.monotonic() - began < 2


# --- behind nginx ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_that_ends_tls_lets_members_in_alone(
    place: Place, served: ServedMailbox, tmp_path: Path
) -> None:
    """The file that `fedveil deploy write` makes, with this place's paths, and a silo's own client before it."""
    port, link = free_port(), place.folder / "link"
    (written,) = [
        path
        for path in write_deployment(tmp_path / "files", Hosting(port=port))
        if path.name == "nginx-tls.conf"
    ]
    text = written.read_text().replace("/srv/fedveil-link", str(link))
    head = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; user root;\n"
    bodies = f"http {{\n    client_body_temp_path {tmp_path}/bodies;\n"
    (tmp_path / "nginx.conf").write_text(head + text.replace("http {\n", bodies))
    nginx = subprocess.Popen(["nginx", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)])
    over, coordinator = threading.Event(), served.coordinator()
    try:
        until = time.monotonic() + 30
        while not listens(port):
            assert time.monotonic() < until
            assert nginx.poll() is None, (tmp_path / "error.log").read_text()
            time.sleep(0.05)
        coordinator.offer({0: bytes(3 << 20)})
        silo = SiloClient(f"127.0.0.1:{port}", place.context(0), lambda message: message + b"!", 1 << 28)
        threading.Thread(target=silo.serve, args=(over.is_set,), daemon=True).start()
        (received,) = coordinator.collect(20)
        assert (received.silo, received.message) == (0, bytes(3 << 20) + b"!")
        over.set()
        address_, forged = f"https://127.0.0.1:{port}", (place.silo(1) / "client.crt").read_text()
        header = {"X-Client-Certificate": forged.replace("\n", "%0A").replace("+", "%2B")}
        for name, status in (("no member", 403), ("silo-2", 204), (None, 400)):
            with httpx.Client(base_url=address_, verify=context(place, name), timeout=20) as one:
                assert one.get(MESSAGE_PATH, headers=header).status_code == status, name
        for name in ("other authority", "expired"):
            with httpx.Client(base_url=address_, verify=context(place, name), timeout=20) as one:
                assert one.get(MESSAGE_PATH).status_code == 400, name
    finally:
        over.set()
        coordinator.offer({}, {0})
        coordinator.close()
        nginx.terminate()
        nginx.wait(20)


# --- the listening socket -------------------------------------------------------------------------------------------


async def answers_nothing(request: Request) -> Response:
    return Response(HTTPStatus.NO_CONTENT)


def test_a_connection_that_is_accepted_while_the_server_ends_is_closed() -> None:
    """The server is cancelled in the turn of its loop that accepts: such a connection stayed open."""
    with (
        contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening,
        socket.socket() as silo,
    ):
        silo.settimeout(10)

        async def end_while_it_accepts() -> None:
            serving = asyncio.ensure_future(HttpServer(listening, answers_nothing, Limits()).serve())
            await asyncio.sleep(0.01)
            silo.connect(listening.getsockname())
            await asyncio.sleep(0)  # the next turn finds the connection
            asyncio.get_running_loop().call_soon(serving.cancel)
            await asyncio.wait((serving,))

        asyncio.run(end_while_it_accepts())
        gc.collect()  # warns of a connection that nobody closed
        with contextlib.suppress(ConnectionError):
            assert silo.recv(1) == b""


@pytest.mark.parametrize("moment", ["begins", "is complete"])
def test_a_connection_whose_handshake_the_end_of_the_server_meets_is_closed(
    place: Place, moment: str
) -> None:
    """It stayed open: asyncio's own end of such a connection waits for the other side, for up to 30 s."""
    serving = list[asyncio.Future[None]]()
    over = threading.Event()

    class Cancels(ssl.SSLObject):
        def do_handshake(self) -> None:
            if moment == "begins":
                serving[0].cancel()
            super().do_handshake()
            serving[0].cancel()

    shown = server_context(place.link)
    shown.sslobject_class = Cancels

    def connect(address_: tuple[str, int]) -> None:
        with contextlib.suppress(*ENDED), socket.create_connection(address_) as plain:
            made = context(place, "silo-0").wrap_socket(plain, server_hostname="127.0.0.1")
            over.wait(20)
            made.close()

    async def serve() -> None:
        serving.append(asyncio.ensure_future(HttpServer(listening, answers_nothing, Limits(), shown).serve()))
        await asyncio.wait(serving)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=connect, args=(("127.0.0.1", port),))
        thread.start()
        asyncio.run(serve())
        left = [one for one in gc.get_objects() if isinstance(one, socket.socket) and is_open_at(one, port)]
        over.set()
        thread.join(10)
    assert left == []


def is_open_at(one: socket.socket, port: int) -> bool:
    """Whether a socket is open, with a port of this host as its own."""
    return one.fileno() >= 0 and one.family == socket.AF_INET and one.getsockname()[1] == port


class NoDescriptorLeft(socket.socket):
    """A listening socket that cannot accept, for a while."""

    failures = 3

    def accept(self) -> tuple[socket.socket, Any]:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_server_without_a_free_descriptor_waits_and_goes_on() -> None:
    created = socket.create_server(("127.0.0.1", 0))
    with NoDescriptorLeft(fileno=created.detach()) as listening, socket.socket() as silo:

        async def ask() -> bytes:
            serving = asyncio.ensure_future(HttpServer(listening, answers_nothing, Limits()).serve())
            silo.connect(listening.getsockname())
            silo.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(silo, b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await asyncio.wait_for(loop.sock_recv(silo, 100), 10)
            serving.cancel()
            await asyncio.wait((serving,))
            return answer

        assert asyncio.run(ask()).startswith(b"HTTP/1.1 204 ")
        assert listening.failures < 0


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0

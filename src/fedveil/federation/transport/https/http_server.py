"""An HTTP/1.1 server of short requests and long polls, on asyncio and h11, with limits that hold before TLS.

Claim: whoever is not a member of the federation holds at most :attr:`Limits.strangers` connections together, each for
at most a handshake and one header; the newest displaces the oldest, so silent connections do not keep members out. A
member holds at most :attr:`Limits.member_connections`. A body is measured by its announced length before any of it is
read, and its sender is cut off when it is too slow. No request is read while another one on its connection is
answered: bytes sent ahead end the connection. ``tests/test_https_strangers.py`` tries each.
Not claimed: that a flood of handshakes leaves processor time for members.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final

import h11

from fedveil.federation.transport.interface import split
from fedveil.sanitize import FaultLog

_READ_BYTES: Final = 1 << 16
_ACCEPT_PAUSE_SECONDS: Final = 0.1
_LINGER_SECONDS: Final = 1.0
_CLOSING_SECONDS: Final = 0.01
_LINGER_BYTES: Final = 1 << 20
_log = logging.getLogger("fedveil.link")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on connections and requests.

    Attributes:
        handshake_seconds: for TLS.
        header_seconds: from the connection to the end of the first header.
        idle_seconds: from an answer to the end of the next header.
        header_bytes: largest size of the request line and all header fields together, in bytes.
        lag_seconds: how far a body, or the reader of an answer, may lag behind ``least_rate``.
        least_rate: bytes a second.
        strangers: connections that no member has been recognised on.
        member_connections: connections of one member.
        member_requests: requests of one member that are answered at the same time.
        poll_seconds: how long a request for a message waits for one.
    """

    handshake_seconds: float = 20.0
    header_seconds: float = 10.0
    idle_seconds: float = 30.0
    header_bytes: int = 1 << 14
    lag_seconds: float = 30.0
    least_rate: float = float(1 << 14)
    strangers: int = 512
    member_connections: int = 8
    member_requests: int = 4
    poll_seconds: float = 25.0


class RefusedRequestError(Exception):
    """A request that is answered by a status of 400 or more.

    Args:
        status: HTTP status.
        cause: short name of the reason, sent as the header ``Cause``.
    """

    def __init__(self, status: int, cause: str = "") -> None:
        super().__init__(status)
        self.status, self.cause = status, cause


class ClosedByPeerError(Exception):
    """The other end closed the connection, or sent bytes that no request allows."""


@dataclass(frozen=True)
class Response:
    """An answer: status, header fields and body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Request:
    """One request, whose body is read on demand.

    Attributes:
        method: such as ``GET``.
        target: path and query, as they were sent.
        peer: the client's certificate (DER), or None.
    """

    def __init__(self, connection: Connection, head: h11.Request, peer: bytes | None) -> None:
        self._connection, self.peer = connection, peer
        self.method, self.target = head.method.decode("ascii"), head.target.decode("latin-1")
        self._fields = list(head.headers)
        self._waited = 0.0
        self._received = 0

    def header(self, name: str) -> str:
        """Return a header field, empty if it is missing.

        Raises:
            RefusedRequestError: it was sent twice.
        """
        values = [value for key, value in self._fields if key == name.lower().encode()]
        if len(values) > 1:
            raise RefusedRequestError(400, "repeated-header")
        return values[0].decode("latin-1") if values else ""

    def check_length(self, largest: int) -> None:
        """Check the announced length of the body.

        Raises:
            RefusedRequestError: 411 without a length, 413 above the limit.
        """
        length = self.header("content-length")
        if self.header("transfer-encoding") or not length.isdecimal():
            raise RefusedRequestError(411)
        if len(length) > 20 or int(length) > largest:
            raise RefusedRequestError(413)

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces.

        Raises:
            RefusedRequestError: 408 if it comes too slowly.
        """
        limits, clock = self._connection.limits, time.monotonic
        while True:
            allowed = limits.lag_seconds + self._received / limits.least_rate - self._waited
            began = clock()
            try:
                async with asyncio.timeout(max(0.0, allowed)):
                    event = await self._connection.next_event()
            except TimeoutError:
                raise RefusedRequestError(408) from None
            self._waited += clock() - began
            if not isinstance(event, h11.Data):
                return
            self._received += len(event.data)
            yield bytes(event.data)

    async def read(self, largest: int) -> bytes:
        """Return the whole body.

        Raises:
            RefusedRequestError: 411, 413 or 408.
        """
        self.check_length(largest)
        body = bytearray()
        async for piece in self.body():
            body += piece
        return bytes(body)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event; return whether it came in time.

        Raises:
            ClosedByPeerError: the client has gone, or has sent more.
        """
        return await self._connection.wait(event, seconds)


Handler = Callable[[Request], Awaitable[Response]]


class Connection:
    """One connection: requests, one after the other.

    Args:
        reader: bytes from the client.
        writer: bytes to it.
        limits: bounds.
        peer: the client's certificate (DER), or None.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits, peer: bytes | None
    ) -> None:
        self.limits, self._peer = limits, peer
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)

    async def serve(self, handler: Handler) -> None:
        """Answer requests until the connection ends."""
        seconds = self.limits.header_seconds
        while True:
            try:
                async with asyncio.timeout(seconds):
                    head = await self.next_event()
                    if not isinstance(head, h11.Request):
                        return
                    # A body that is announced and does not come must not outlast the deadline.
                    has_body = head.method == b"GET" and not isinstance(
                        await self.next_event(), h11.EndOfMessage
                    )
            except TimeoutError:
                return
            request = Request(self, head, self._peer)
            try:
                if has_body:
                    raise RefusedRequestError(413)
                response = await handler(request)
            except RefusedRequestError as refused:
                cause = {"Cause": refused.cause} if refused.cause else {}
                response = Response(refused.status, cause)
            await self._send(response)
            ended = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
            if not ended or self._http.trailing_data[0]:
                await self._linger()
                return
            self._http.start_next_cycle()
            seconds = self.limits.idle_seconds

    async def next_event(self) -> object:
        """Return h11's next event.

        Raises:
            RefusedRequestError: bytes that are no HTTP.
            ClosedByPeerError: the connection ended.
        """
        while True:
            try:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    return event
                data = await self._reader.read(_READ_BYTES)
                if not data and self._http.their_state is h11.IDLE:
                    raise ClosedByPeerError
                self._http.receive_data(data)
            except h11.RemoteProtocolError as error:
                await self._send(Response(error.error_status_hint))
                raise ClosedByPeerError from None

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event while watching the connection."""
        waiting = asyncio.ensure_future(event.wait())
        reading = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait((waiting, reading), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                raise ClosedByPeerError
            return waiting.done()
        finally:
            for task in (waiting, reading):
                task.cancel()
            await asyncio.gather(waiting, reading, return_exceptions=True)

    async def _send(self, response: Response) -> None:
        now = formatdate(usegmt=True)  # `fedveil federation check` compares the clocks
        fields = [("Content-Length", str(len(response.body))), ("Date", now), *response.headers.items()]
        if response.status >= 400:
            fields.append(("Connection", "close"))
        elif response.status == 204:
            del fields[0]
        with contextlib.suppress(h11.LocalProtocolError):  # the request was no HTTP, and an answer was sent
            head = h11.Response(status_code=response.status, headers=fields)
            pending = self._http.send(head) or b""
            for piece in split(response.body):
                # The head goes with the first piece: a short answer is one TLS record and one packet.
                self._writer.write(pending + (self._http.send(h11.Data(data=piece)) or b""))
                pending = b""
                await self._drain()
            self._writer.write(pending + (self._http.send(h11.EndOfMessage()) or b""))
        await self._drain()

    async def _drain(self) -> None:
        async with asyncio.timeout(self.limits.lag_seconds):
            await self._writer.drain()

    async def _linger(self) -> None:
        """Read a little of what is still sent, so that the client gets to read the answer before a reset."""
        bytes_left = _LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while bytes_left > 0 and (data := await self._reader.read(_READ_BYTES)):
                    bytes_left -= len(data)


class HttpServer:
    """Serves one listening socket.

    Args:
        listening: the socket; closed with the server.
        handler: answers a request, or raises RefusedRequestError.
        limits: bounds.
        context: TLS; None serves a Unix socket, whose file mode says who may connect, without the limits on strangers.
        member_of: number of the member with a certificate (DER), or None.
    """

    def __init__(
        self,
        listening: socket.socket,
        handler: Handler,
        limits: Limits,
        context: ssl.SSLContext | None = None,
        member_of: Callable[[bytes], int | None] = lambda certificate: None,
    ) -> None:
        self._listening, self._handler, self._limits = listening, handler, limits
        self._context, self._member_of = context, member_of
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._members: dict[int, dict[asyncio.Task[None], None]] = {}
        self._accepted: dict[asyncio.Task[None], socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults = FaultLog(_log)

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        loop.add_reader(self._listening, self._accept, loop)
        try:
            await loop.create_future()
        finally:
            loop.remove_reader(self._listening)
            self._listening.close()
            ending = self._tasks | self._accepted.keys()
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await asyncio.sleep(_CLOSING_SECONDS)  # asyncio closes sockets in a later turn of its loop

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept a connection. A cancelled `loop.sock_accept` would lose the one that it has accepted already."""
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._faults.warn("accept", f"a connection was not accepted: {error.strerror}")
            self._make_room(0)
            loop.remove_reader(self._listening)
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._accept_again, loop)
            return
        connection.setblocking(False)
        task = loop.create_task(self._serve_one(connection))
        self._accepted[task] = connection
        task.add_done_callback(self._forget)
        if self._context is not None:
            self._make_room(self._limits.strangers - 1)
            self._strangers[task] = None

    def _accept_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on after a pause, if the server still serves."""
        if self._listening.fileno() >= 0:
            loop.add_reader(self._listening, self._accept, loop)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Drop a task that has ended; close its connection if it was cancelled before it began."""
        self._strangers.pop(task, None)
        self._tasks.discard(task)
        if (connection := self._accepted.pop(task, None)) is not None:
            connection.close()

    def _make_room(self, most: int) -> None:
        """Close the oldest connections of strangers beyond a number."""
        if len(self._strangers) > most:
            for task in list(self._strangers)[: max(1, len(self._strangers) - most)]:
                self._strangers.pop(task, None)
                task.cancel()
            self._faults.warn(
                "too-many-strangers",
                f"more than {self._limits.strangers} connections of no member; the oldest were closed",
            )

    async def _serve_one(self, connection: socket.socket) -> None:
        loop, context, task = asyncio.get_running_loop(), self._context, asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        del self._accepted[task]
        reader = asyncio.StreamReader(_READ_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        seconds = None if context is None else self._limits.handshake_seconds
        connecting = loop.create_task(
            loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=seconds
            )
        )
        try:
            transport, _ = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # A connection whose handshake has just been completed would stay open: asyncio waits for the client to end.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                (await connecting)[0].abort()
            raise
        except OSError as error:  # includes ssl.SSLError and timeouts
            reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
            self._faults.warn("tls", f"a connection did not complete its TLS handshake ({reason})")
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        secured = writer.get_extra_info("ssl_object")
        peer = None if secured is None else secured.getpeercert(binary_form=True)
        try:
            await Connection(reader, writer, self._limits, peer).serve(self._recognise)
        except (ClosedByPeerError, TimeoutError, OSError, h11.ProtocolError):
            pass
        except asyncio.CancelledError:
            transport.abort()
            raise
        except Exception:
            _log.exception("a request could not be answered")
        finally:
            writer.close()
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_LINGER_SECONDS):
                        await writer.wait_closed()
            finally:
                transport.abort()

    async def _recognise(self, request: Request) -> Response:
        """Count the connection as its member's, if it is one's, and answer."""
        task = asyncio.current_task()
        member = None if request.peer is None else self._member_of(request.peer)
        if task is not None and member is not None and task in self._strangers:
            del self._strangers[task]
            own = self._members.setdefault(member, {})
            own[task] = None
            task.add_done_callback(lambda ended: own.pop(ended, None))
            if len(own) > self._limits.member_connections:
                next(iter(own)).cancel()
        return await self._handler(request)

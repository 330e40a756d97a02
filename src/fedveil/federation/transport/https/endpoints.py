"""HTTP endpoints of the mailbox for silos, for a proxy or a bridge on their behalf, and for the coordinator.

    silos, HTTPS with client certificates      GET  /v1/message    the current message, or 204 after a poll
    a TLS-terminating proxy, Unix socket       POST /v1/answer     204, or 409: that message is not current
    a bridge, Unix socket                      the same two
    the coordinator, Unix socket               PUT  /v1/members    who may fetch messages
                                               GET  /v1/members    when each silo was seen last
                                               PUT  /v1/messages   frames: current messages from now on
                                               GET  /v1/answers?S  frames: answers, waiting S seconds for the first

Claim: a stranger gets no message and stores none; a member reads its own messages and answers those alone. A member is
recognised by the public key of its certificate, never by the name in it. Conditions: who can open the proxy's socket
vouches for certificates, who can open the bridge's socket speaks for every silo, and who can open the coordinator's
replaces messages; signatures bound what any of them can do. ``tests/test_https_strangers.py`` tries each.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote_to_bytes

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from fedveil.federation.enrollment.certificates import KeyDigests, key_and_end
from fedveil.federation.transport import interface
from fedveil.federation.transport.https.http_server import Limits, RefusedRequestError, Request, Response
from fedveil.federation.transport.https.mailbox import CONTACT_SECONDS, Mailbox, Members, Slot
from fedveil.federation.transport.interface import (
    ANSWER_PATH,
    HEADER,
    MAILBOX_HEADER,
    MESSAGE_PATH,
    TAG_HEADER,
    pack_frames,
)
from fedveil.sanitize import FaultLog

_MEMBERS_BYTES: Final = 1 << 20
_LONGEST_POLL: Final = 60.0
_log = logging.getLogger("fedveil.link")


Identify = Callable[[Request], str]
"""Returns the digest of the key that a request comes from; empty if there is none.

TLS checks a certificate when a connection begins, and a connection may stay open for longer than the certificate is
valid. So every request is refused (403 ``expired``) whose certificate has expired since, and one that waits or sends
for long is checked again before it is given a message or its answer is taken.
"""


def by_certificate(digests: KeyDigests) -> Identify:
    """Identify a request by the client certificate of its TLS connection."""

    def identify(request: Request) -> str:
        if request.peer is None:
            return ""
        if digests.has_expired(request.peer):
            raise _expired()
        return digests(request.peer)

    return identify


def by_proxy_header(request: Request) -> str:
    """Identify a request by the certificate that a proxy has verified: nginx's ``$ssl_client_escaped_cert``."""
    escaped = request.header("X-Client-Certificate")
    try:
        digest, end = key_and_end(x509.load_pem_x509_certificate(unquote_to_bytes(escaped)))
    except (ValueError, UnsupportedAlgorithm):
        return ""
    if datetime.now(UTC) > end:
        raise _expired()
    return digest


def _expired() -> RefusedRequestError:
    return RefusedRequestError(403, "expired")


def by_silo_name(mailbox: Mailbox) -> Identify:
    """Identify a request by the name in its header ``Silo``: a bridge speaks for all silos."""

    def identify(request: Request) -> str:
        members, name = mailbox.members, request.header("Silo")
        return (
            dict(zip(members.names, members.keys, strict=True)).get(name, "") if members is not None else ""
        )

    return identify


class SiloEndpoint:
    """Serves the silos, or a proxy or bridge on their behalf.

    Args:
        mailbox: what is served.
        identify: whose request it is.
        limits: how long a poll lasts, how many requests a member may have.
    """

    def __init__(self, mailbox: Mailbox, identify: Identify, limits: Limits) -> None:
        self._mailbox, self._identify, self._limits = mailbox, identify, limits
        self._faults = FaultLog(_log)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        slot, name = self._admit(request)
        serve = {("GET", MESSAGE_PATH): self._get_message, ("POST", ANSWER_PATH): self._store_answer}.get(
            (request.method, request.target)
        )
        if serve is None:
            raise RefusedRequestError(404)
        if slot.requests >= self._limits.member_requests:
            raise RefusedRequestError(429, "busy")
        self._note_contact(slot, name)
        slot.requests += 1
        try:
            return await serve(slot, request)
        finally:
            slot.requests -= 1
            slot.last_request = time.monotonic()

    def _admit(self, request: Request) -> tuple[Slot, str]:
        """Return the slot and the name of the member that a request comes from.

        Raises:
            RefusedRequestError: it comes from none now.
        """
        key = self._identify(request)
        members, silo = self._mailbox.members, self._mailbox.number(key)
        if members is None:  # not 403: every silo would report a refusal at each start of the coordinator
            raise RefusedRequestError(503, "not-ready")
        if silo is None:
            cause = "revoked" if key in members.revoked else "not-a-member"
            self._faults.warn(cause, f"a certificate of this federation with the key {key[:16]} was refused")
            raise RefusedRequestError(403, cause)
        return self._mailbox.slot(silo), members.names[silo]

    def _note_contact(self, slot: Slot, name: str) -> None:
        is_absent = slot.last_request is None or time.monotonic() - slot.last_request > CONTACT_SECONDS
        if is_absent and not slot.requests:
            _log.info("silo %s is connected", name)

    async def _get_message(self, slot: Slot, request: Request) -> Response:
        """Return the current message, once it is another than the silo was given last."""
        known_tag, known_digest = request.header("If-None-Match"), request.header("Have")
        until = time.monotonic() + self._limits.poll_seconds
        own = slot.newest = object()
        slot.wake()  # an older request, perhaps of a dead connection, waits no longer
        while not slot.tag or slot.tag == known_tag:
            if slot.newest is not own:
                return Response(204, {"Replaced": "1"})
            seconds_left = until - time.monotonic()
            if seconds_left <= 0 or not await request.wait(slot.changed, seconds_left):
                return Response(204)
            self._admit(request)  # its certificate may have expired, or its key been revoked, while it waited
        if slot.digest == known_digest:
            return Response(200, {TAG_HEADER: slot.tag, "Again": "1"})
        return Response(200, {TAG_HEADER: slot.tag}, slot.message)

    async def _store_answer(self, slot: Slot, request: Request) -> Response:
        tag = request.header("Answers")
        if not tag or tag != slot.tag:
            raise RefusedRequestError(409)
        answer = await request.read(self._mailbox.longest)
        self._admit(request)  # as above: a long answer may take hours
        if tag != slot.tag:  # replaced while the answer was read
            raise RefusedRequestError(409)
        self._mailbox.store(slot, answer)
        return Response(204)


class CoordinatorEndpoint:
    """Serves the coordinator.

    Args:
        mailbox: what is served.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        path, _, query = request.target.partition("?")
        match request.method, path:
            case "PUT", interface.MEMBERS_PATH:
                document = json.loads(await request.read(_MEMBERS_BYTES))
                self._mailbox.introduce(Members(**{name: tuple(value) for name, value in document.items()}))
                return self._respond(204)
            case "GET", interface.MEMBERS_PATH:
                contacts = json.dumps(self._mailbox.last_contacts())
                return self._respond(200, contacts.encode())
            case "PUT", interface.MESSAGES_PATH:
                await self._offer(request)
                return self._respond(204)
            case "GET", interface.ANSWERS_PATH:
                return await self._collect(request, float(query or 0))
        raise RefusedRequestError(404)

    def _respond(self, status: int, body: bytes = b"") -> Response:
        return Response(status, {MAILBOX_HEADER: self._mailbox.name}, body)

    async def _offer(self, request: Request) -> None:
        """Read frames as they come: a message is held once, however long the body is."""
        if self._mailbox.members is None:
            raise RefusedRequestError(409, "no-members")
        self._mailbox.set_longest(int(request.header("Longest-Answer")))
        request.check_length(1 << 62)
        pending, silo, missing = bytearray(), -1, HEADER.size
        async for piece in request.body():
            pending += piece
            while len(pending) >= missing:
                if silo < 0:
                    silo, length = HEADER.unpack_from(pending)
                    del pending[: HEADER.size]
                    missing = length
                else:
                    self._mailbox.offer(silo, bytes(memoryview(pending)[:missing]))
                    del pending[:missing]
                    silo, missing = -1, HEADER.size

    async def _collect(self, request: Request, seconds: float) -> Response:
        mailbox = self._mailbox
        until = time.monotonic() + (min(seconds, _LONGEST_POLL) if math.isfinite(seconds) else 0.0)
        while not (answers := mailbox.collect()):
            mailbox.arrived.clear()
            seconds_left = until - time.monotonic()
            if seconds_left <= 0 or not await request.wait(mailbox.arrived, seconds_left):
                break
        return self._respond(200, b"".join(pack_frames(answers)))

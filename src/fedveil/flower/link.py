"""The coordinator's link: Flower's SuperLink behind two doors, in a process that holds the TLS key and no other.

Flower serves three APIs on one port: the silos' (Fleet), the one that starts runs of received code (Control) and the
one that hands out their tasks (Runtime); neither of the last two asks a stranger for a key. Here they share no door.
The public door, under TLS, knows :data:`ROUTES` and nothing else; what else Flower's app can do is reached through a
Unix socket that its owner alone can open. Nothing that a SuperLink would start is started, no SuperExec, no gRPC
server, no process: so no code that was received is run.

Claim: a stranger with host, port and the authority's certificate can neither start a run nor hold a task's token.
Conditions: who can read the private socket or the TLS key is the coordinator. Enforced by :class:`Door` (before Flower
sees a request), :class:`_NothingStarted` and isolation "process" under a secret that lives in memory. Broken in
``tests/test_flower_strangers.py``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

import uvicorn
from flwr.common.constant import ISOLATION_MODE_PROCESS, TRANSPORT_TYPE_GRPC_RERE
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from fedveil.federation.limits import LARGEST_LETTER
from fedveil.flower.child import settings_of_parent
from fedveil.flower.sockets import listen

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTES: Final = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "confirm-message-received",
        "deactivate-node",
        "pull-messages",
        "pull-object",
        "push-messages",
        "push-object",
        "send-node-heartbeat",
    )
)
"""What silos need of Flower: signs of life, messages, and the objects in them; each a POST under a node's signature."""

LARGEST_BODY: Final = LARGEST_LETTER + (1 << 20)
"""Bytes of a request beyond which it is cut off: a letter, and Flower's words around it."""

_CONNECTIONS: Final = 256
_IDLE_SECONDS: Final = 30
_HEADER_BYTES: Final = 1 << 14


class Door:
    """Lets through the requests that are listed, up to a length, and answers everything else itself.

    404 for another method or path than the listed ones, compared byte by byte as they were sent; 413 for a longer body,
    by its header or once so much has come.

    Args:
        app: what is behind it.
        routes: the paths that POST may ask for.
        largest: bytes of a body.
    """

    def __init__(self, app: App, routes: frozenset[str], largest: int) -> None:
        self._app, self._largest = app, largest
        self._routes = frozenset(route.encode() for route in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"nothing here speaks {scope['type']}")
        if scope["method"] != "POST" or scope["raw_path"] not in self._routes or scope["query_string"]:
            await _say(send, 404)
            return
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(not value.isdigit() or int(value) > self._largest for value in lengths):
            await _say(send, 413)
            return
        await self._let_through(scope, receive, send)

    async def _let_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        come, cut, answered = 0, False, False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal come, cut
            message = await receive()
            come += len(message.get("body", b""))
            if come > self._largest:
                cut = True
                return {"type": "http.disconnect"}
            return message

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal answered
            if not cut:  # what the app says of half a body is of no use
                answered = True
                await send(message)

        try:
            await self._app(scope, counted, answer)
        except Exception:
            if not cut:
                raise
        if cut and not answered:
            await _say(send, 413)


async def _say(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class _NothingStarted(SuperLinkLifespan):
    """A SuperLink's life without the processes and servers that it would start beside the app."""

    def startup(self) -> None:
        """Have the state ready."""
        self.state_factory.state()

    def shutdown(self) -> None:
        """Nothing was started."""


def make_app(folder: Path, host: str, port: int, secret: bytes) -> App:
    """Return Flower's app of a SuperLink: state in memory, registered nodes only, tasks for who knows the secret.

    Args:
        folder: the coordinator's.
        host: of the public door.
        port: of the public door.
        secret: at least 32 random bytes.
    """
    authority, certificate, key = (folder / name for name in ("ca.crt", "server.crt", "server.key"))
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=False,
        certificates=(authority.read_bytes(), certificate.read_bytes(), key.read_bytes()),
        superexec_auth_secret=secret,
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(authority),
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        database=FLWR_IN_MEMORY_DB_NAME,
        isolation=ISOLATION_MODE_PROCESS,
        runtime_dependency_install=False,
    )
    return create_app(config, _NothingStarted)


def main() -> None:
    """Serve both doors until the parent ends."""
    servers: list[uvicorn.Server] = []
    ended = threading.Event()
    settings = settings_of_parent(ended.set)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    folder, host, port = Path(settings["folder"]), settings["host"], settings["port"]
    app = make_app(folder, host, port, bytes.fromhex(settings["secret"]))
    public = uvicorn.Config(
        Door(app, ROUTES, LARGEST_BODY),
        host=host,
        port=port,
        ssl_certfile=folder / "server.crt",
        ssl_keyfile=folder / "server.key",
        http="h11",  # it bounds headers
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )
    private = uvicorn.Config(app, ws="none", lifespan="on", log_level="warning", access_log=False)
    public_socket = public.bind_socket()
    private_socket = listen(Path(settings["socket"]))
    servers += [uvicorn.Server(public), uvicorn.Server(private)]

    async def serve() -> None:
        sockets = (public_socket, private_socket)
        await asyncio.gather(
            *(server.serve(sockets=[opened]) for server, opened in zip(servers, sockets, strict=True))
        )

    serving = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    serving.start()
    while serving.is_alive() and not ended.wait(0.2):
        pass
    for server in servers:
        server.should_exit = True
    serving.join(5)


if __name__ == "__main__":
    main()

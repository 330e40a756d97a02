"""The coordinator's link: Flower's SuperLink behind two doors, in a process that holds the TLS key and no other key.

Flower serves three APIs on one port: the silos' (Fleet), the one that starts runs of received code (Control) and the
one that hands out their tasks (Runtime); neither of the last two asks a stranger for a key. Here they share no door.
The public door, under TLS, knows :data:`ROUTES` and nothing else; what else Flower's app can do is reached through a
Unix socket that its owner alone can open, or the group named for a coordinator of another user. Nothing that a
SuperLink would start is started, no SuperExec, no gRPC server, no process: so no code that was received is run.

Claim: a stranger with host, port and the authority's certificate can neither start a run nor hold a task's token.
Whoever breaks into the link, a process of another user than the coordinator, has neither identity key nor run folders.
Conditions: who can open the private socket is the coordinator; who can read the TLS key can stand in for the link.
Enforced by :class:`~.gateway.Gateway` (before Flower sees a request), :class:`_NothingStarted`, isolation
"process" under a secret that is new at every start, and the modes of socket and secret, which both sides check. Broken
in ``tests/test_flower_non_members.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import threading
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import uvicorn
from flwr.app import Message
from flwr.common.constant import ISOLATION_MODE_PROCESS, TRANSPORT_TYPE_GRPC_RERE
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStore
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app
from flwr.superlink.routers.fleet.node_auth import authenticate_node

from fedveil.crypto.keys import read_private_file, write_private_file
from fedveil.errors import FedveilError
from fedveil.federation.limits import LARGEST_LETTER
from fedveil.flower.child_process import settings_of_parent
from fedveil.flower.coordinator_host.gateway import CAME_BY_DOOR, SMALL_BODY, DeadlineProtocol, Gateway
from fedveil.flower.coordinator_host.link_folder import LinkFolder
from fedveil.flower.coordinator_host.link_objects import PUSH_OBJECT, ROUTES_OF_SUPERNODES, patch_object_store
from fedveil.flower.coordinator_host.long_poll import App, LongPollApp, Notifier, Scope
from fedveil.flower.envelope import letter_end, object_end
from fedveil.flower.sockets import DOOR, SECRET, RunningFolder, listen
from fedveil.sanitize import quiet_log

ROUTES: Final = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "pull-messages",
        "push-messages",
        "send-node-heartbeat",
    )
)
"""What silos need of Flower: signs of life, and messages; each a POST under a node's signature."""

PUSH: Final = "/v1/fleet/push-messages"
_ENDS: Final = {PUSH: letter_end, PUSH_OBJECT: object_end}
LARGEST_BODY: Final = LARGEST_LETTER + (1 << 20)
"""Bytes of a request that brings a letter, and Flower's words around it."""

UNREGISTERED: Final = "Attempted to register SuperNode with public key"
"""How Flower's errors begin about a node that is not registered."""

_LOOK_SECONDS: Final = 0.2
_SILO_WAITS: Final = 10.0
_COORDINATOR_WAITS: Final = 1.0
_CONNECTIONS: Final = 900
"""A silo has two, and as many again that it gave up while the link was too busy to answer; a process may have 1024
files open unless its user says otherwise."""
_IDLE_SECONDS: Final = 30
_HEADER_BYTES: Final = 1 << 14


class _NothingStarted(SuperLinkLifespan):
    """A SuperLink's life without the processes and servers that it would start beside the app."""

    def startup(self) -> None:
        """Have the state ready."""
        self.state_factory.state()

    def shutdown(self) -> None:
        """Nothing was started."""


def make_app(folder: LinkFolder, secret: bytes) -> Any:
    """Return Flower's app of a SuperLink: state in memory, registered nodes only, tasks for who knows the secret.

    Args:
        folder: the link's.
        secret: at least 32 random bytes.
    """
    authority, certificate, key = (folder / name for name in ("ca.crt", "server.crt", "server.key"))
    settings = folder.settings
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=settings.host,
        port=settings.port,
        insecure=False,
        certificates=(authority.read_bytes(), certificate.read_bytes(), read_private_file(key)),
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
    app = create_app(config, _NothingStarted)
    state = app.state.linkstate_factory.state()
    _keep_no_trees(state.object_store)
    if settings.supernodes:
        patch_object_store(state)
    _take_answers_alone(state)
    return app


def _keep_no_trees(store: ObjectStore) -> None:
    """Have a store refuse objects that name others: letters are in their messages, and a few names can make 2^k."""
    register = store.preregister

    def one_alone(run_id: int, object_tree: ObjectTree) -> list[str]:
        if object_tree.children:
            raise ValueError("a message names objects; its letter is in the message itself")
        return register(run_id, object_tree)

    store.preregister = one_alone  # type: ignore[method-assign]


def _take_answers_alone(state: LinkState) -> None:
    """Have a state take nothing but answers from silos, and none under the name of a message that is just being sent.

    Flower looks whose a message says it is, not who sent it; and a name that is given again ends the sending of all
    messages that are sent with the first that had it.
    """
    keep, sending = state.store_message_and_object_tree, ""
    names: set[str] = set()

    def keep_answer(message: Message, object_tree: ObjectTree, session_id: str) -> tuple[bool, list[str]]:
        nonlocal sending, names
        if not CAME_BY_DOOR.get():
            if session_id != sending:
                sending, names = session_id, set()
            names.add(object_tree.object_id)
        elif not message.metadata.reply_to_message_id or object_tree.object_id in names:
            raise ValueError("a silo sends what is no answer of its own")
        return keep(message, object_tree, session_id)

    state.store_message_and_object_tree = keep_answer  # type: ignore[method-assign]


def longest_body(app: Any) -> Callable[[Scope], int]:
    """Return how long the body of a request may be, by its header: a letter's is of a node that signs the time.

    Flower checks the signature too, once it has read the body.

    Args:
        app: Flower's, with the registered nodes.
    """
    state = app.state.linkstate_factory.state()

    def longest(scope: Scope) -> int:
        if scope["raw_path"].decode("latin-1") not in _ENDS:
            return SMALL_BODY
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            if state.get_node_id_by_public_key(key) is None:
                return SMALL_BODY
            claimed = SimpleNamespace(protobuf_request=ActivateNodeRequest(public_key=key))
            authenticate_node(SimpleNamespace(headers=headers, state=claimed))  # type: ignore[arg-type]
        except Exception:  # whatever it is: nothing shows that a member asks
            return SMALL_BODY
        return LARGEST_BODY

    return longest


def _public_server(folder: LinkFolder, app: App, largest: Callable[[Scope], int]) -> uvicorn.Config:
    settings = folder.settings
    routes = ROUTES | ROUTES_OF_SUPERNODES if settings.supernodes else ROUTES
    return uvicorn.Config(
        Gateway(app, routes, largest, _ENDS),
        host=settings.host,
        port=settings.port,
        ssl_certfile=folder / "server.crt",
        ssl_keyfile=folder / "server.key",
        http=DeadlineProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )


def serve(folder: LinkFolder, ended: Callable[[float], bool]) -> None:
    """Serve both doors.

    Args:
        folder: the link's.
        ended: waits so many seconds, and returns whether the link is to end.

    Raises:
        ConfigError: the link is served already, or its certificate is not valid at this clock.
        CryptoError: others can read the TLS key.
    """
    folder.check_certificate()
    group = folder.group
    running = RunningFolder(folder.path, group)
    try:
        secret = secrets.token_bytes(32)
        app = make_app(folder, secret)
        to_silos, to_coordinator = Notifier(), Notifier()
        behind_public = LongPollApp(
            app,
            pull="/v1/fleet/pull-messages",
            heard=to_silos,
            seconds=_SILO_WAITS,
            push=PUSH,
            rung=to_coordinator,
        )
        behind_private = LongPollApp(
            app,
            pull="/v1/runtime/pull-messages",
            heard=to_coordinator,
            seconds=_COORDINATOR_WAITS,
            push="/v1/runtime/push-messages",
            rung=to_silos,
        )
        public = _public_server(folder, behind_public, longest_body(app))
        private = uvicorn.Config(
            behind_private, ws="none", lifespan="on", log_level="warning", access_log=False
        )
        public_socket = public.bind_socket()
        _write_secret(running / SECRET, secret, group)
        private_socket = listen(running / DOOR, group)
        servers = [uvicorn.Server(public), uvicorn.Server(private)]

        async def both() -> None:
            sockets = (public_socket, private_socket)
            await asyncio.gather(
                *(server.serve(sockets=[opened]) for server, opened in zip(servers, sockets, strict=True)),
                let_go(),
            )

        async def let_go() -> None:
            while not any(server.should_exit for server in servers):
                await asyncio.sleep(_LOOK_SECONDS)
            to_silos.close()
            to_coordinator.close()

        serving = threading.Thread(target=asyncio.run, args=(both(),), daemon=True)
        serving.start()
        try:
            while serving.is_alive() and not ended(_LOOK_SECONDS):
                pass
        finally:
            for server in servers:
                server.should_exit = True
            serving.join(5)
    finally:
        running.close()


def _write_secret(path: Path, secret: bytes, group: int | None) -> None:
    write_private_file(path, secret.hex().encode())
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(0o640)


def quiet_flower() -> None:
    """Have Flower log warnings and errors, but those of a silo that waits to be known: its own log says that it does.

    Flower logs each of its requests as an error, with the key.
    """
    log = quiet_log("flwr")
    log.setLevel(logging.WARNING)
    log.addFilter(lambda record: UNREGISTERED not in str(record.msg))


def main() -> None:
    """Serve both doors until the parent ends, or ends this process; socket and secret do not outlive it."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    settings = settings_of_parent(over.set)
    quiet_flower()
    try:
        serve(LinkFolder(Path(settings["folder"])), over.wait)
    except FedveilError as error:
        raise SystemExit(f"the link: {error}") from None


if __name__ == "__main__":
    main()

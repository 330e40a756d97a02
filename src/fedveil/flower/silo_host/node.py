"""The silo's carrier: asks the coordinator for letters, hands each to the guard of its silo, and carries answers back.

It is a process of its own with the node's key and nothing else: no table, no identity key, no listening port. It speaks
Flower's Fleet API as a SuperNode does, and is none: an app that a coordinator's host would send is never fetched, and
no process is started for a message.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node as NodeMessage
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedveil.errors import ConfigError
from fedveil.flower.child_process import end_now, settings_of_parent
from fedveil.flower.envelope import LastMessage, pack_message, unpack_message
from fedveil.flower.heartbeat import heartbeat
from fedveil.flower.silo_host.ipc import ask
from fedveil.protocols.errors import ProtocolError

_LOOK_SECONDS: Final = 0.1
_AGAIN_SECONDS: Final = 3.0
_BUSY: Final = 503
_NOT_SIGNED: Final = 401
_AHEAD_SECONDS: Final = 4.0
_ANSWER_SECONDS: Final = 30.0
_KEPT_SECONDS: Final = 20.0
"""More than between two signs of life, and less than the link keeps a connection that is idle."""
_log = logging.getLogger("fedveil.silo")

Answer = Callable[[bytes], bytes]
"""What a silo does with a letter: it returns the answering letter, or raises ProtocolError or OSError."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A silo as the coordinator's link knows it.

    Attributes:
        coordinator: host and port.
        authority: PEM of the one authority that is believed.
        key: the node's private key.
        answer: of the silo.
        last: the letter that it was asked about last.
    """

    coordinator: str
    authority: bytes
    key: ec.EllipticCurvePrivateKey
    answer: Answer
    last: LastMessage = field(default_factory=LastMessage)

    @classmethod
    def from_folder(cls, folder: Path, coordinator: str, answer: Answer) -> Node:
        """Return the node whose key and authority are in a silo's folder.

        Raises:
            ConfigError: the key is of another kind.
        """
        key = load_ssh_private_key((folder / "node.key").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / 'node.key'}: not an elliptic curve key")
        authority = (folder / "ca.crt").read_bytes()
        return cls(coordinator=coordinator, authority=authority, key=key, answer=answer)

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer letters until ``ended()``, or until the link has taken no sign of life for a minute.

        The link keeps a question for letters waiting until there is one. A link that is too busy to answer is asked
        again, and one that is left for another reason is told so: for a minute it lets no node in twice.

        Raises:
            httpx.HTTPError: the connection is broken, or the link does not know this node.
        """
        with self._connected() as link:
            activation = ActivateNodeRequest(
                public_key=public_key_to_bytes(self.key.public_key()),
                heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL,
            )
            node = NodeMessage(node_id=link.ActivateNode(activation).node_id)
            sign_of_life = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            try:
                with heartbeat(lambda: link.SendNodeHeartbeat(sign_of_life).success, _log) as lost:
                    while not (ended() or lost.is_set()):
                        self._look(link, node)
            finally:
                with contextlib.suppress(httpx.HTTPError):
                    link.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _connected(self) -> FleetHttpClient:
        """Return a client of Flower's whose connections last from one sign of life to the next.

        A new one costs the link more than the sign, and a place.
        """
        signing = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        client = FleetHttpClient.from_server_address(
            self.coordinator, False, self.authority, [version, signing]
        )
        client._client.close()
        trusted = ssl.create_default_context(cadata=self.authority.decode())
        kept = httpx.Limits(keepalive_expiry=_KEPT_SECONDS)
        client._client = httpx.Client(verify=trusted, timeout=_ANSWER_SECONDS, limits=kept)
        return client

    def _look(self, link: FleetHttpClient, node: NodeMessage) -> None:
        """Answer the next letter, if there is one."""
        try:
            letters = link.PullMessages(PullMessagesRequest(node=node)).messages_list
        except httpx.TimeoutException:
            return
        except httpx.HTTPStatusError as error:
            if error.response.status_code != _BUSY:
                raise
            time.sleep(_AGAIN_SECONDS)
            return
        if letters:
            self._carry(link, node, message_from_proto(letters[0]))
        else:
            time.sleep(_LOOK_SECONDS)

    def _carry(self, link: FleetHttpClient, node: NodeMessage, message: Message) -> None:
        """Answer a letter. An answer that the link does not take is lost: its run is over, or it is asked for again."""
        begun = time.monotonic()
        reply = message_to_proto(reply_to(message, self.answer, self.last.resolve))
        reply.metadata.message_id = secrets.token_hex(32)
        answer = PushMessagesRequest(
            node=node,
            messages_list=[reply],
            message_object_trees=[ObjectTree(object_id=reply.metadata.message_id)],
            clientapp_runtime_list=[time.monotonic() - begun],
        )
        try:
            link.PushMessages(answer)
        except httpx.HTTPStatusError as error:
            _log.warning("the link does not take an answer (status %d)", error.response.status_code)
        except httpx.TransportError:  # a connection that was idle for the time of the answer
            link.PushMessages(answer)


def reply_to(
    message: Message, answer: Answer, letter_of: Callable[[Message], bytes] = unpack_message
) -> Message:
    """Return the message that carries the answer to a message's letter, or says that there is none.

    Why there is none stays in the silo's own log.
    """
    try:
        return Message(pack_message(answer(letter_of(message))), reply_to=message)
    except (ProtocolError, OSError) as error:
        _log.warning("a letter was not answered: %s", error)
        reason = Error(
            code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="the silo did not answer this letter"
        )
        return Message(reason, reply_to=message)


def warn_refused(response: httpx.Response) -> None:
    """Tell the silo's own log why the link may have refused this node: where the clocks differ, that."""
    status, ahead = response.status_code, 0.0
    _log.warning("the coordinator does not know this node (any more), or is not well (status %d)", status)
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        ahead = time.time() - parsedate_to_datetime(response.headers["date"]).timestamp()
    if status == _NOT_SIGNED and abs(ahead) >= _AHEAD_SECONDS:
        _log.warning(
            "this host's clock is %+.0f s from the coordinator's, which takes signatures of its own last 305 s and "
            "of the next 5: set the clocks",
            ahead,
        )


def main() -> None:
    """Carry letters until the parent ends; a connection that breaks is made again."""
    settings = settings_of_parent(end_now)
    guard = settings["guard"]
    node = Node.from_folder(
        Path(settings["folder"]), settings["coordinator"], lambda letter: ask(Path(guard), letter)
    )
    while True:
        try:
            node.serve(lambda: False)
        except httpx.HTTPStatusError as error:
            warn_refused(error.response)
        except httpx.HTTPError as error:
            _log.warning("the coordinator cannot be reached (%s)", type(error).__name__)
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    main()

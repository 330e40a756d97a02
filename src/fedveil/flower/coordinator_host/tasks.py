"""What the coordinator asks of its link through the private socket: register nodes, start a run, hold its one task."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import httpx
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedveil.flower.bundle import Bundle, ForeignBundleError
from fedveil.flower.child_process import ProcessError
from fedveil.flower.envelope import NONCE_BYTES, letter_of, name_of, object_of, pack_message
from fedveil.flower.flower_api import VERSION, local_client, run_client, task_client
from fedveil.flower.heartbeat import heartbeat
from fedveil.flower.sockets import address
from fedveil.protocols.errors import ProtocolError

_PUSHED_BYTES: Final = 1 << 28
_NO_TASK: Final = 401
_LINK: Final = "http://link"
_log = logging.getLogger("fedveil.coordinator")
_Client = TypeVar("_Client", bound=ProtobufClient)


class TaskLostError(Exception):
    """The link took the task of a run of Flower's back, or is too busy to answer: nothing is lost but that run."""


class MessageQueue:
    """The messages of one of Flower's runs: what the coordinator sends to nodes, and what they answer.

    A letter travels in its message. Flower's own Grid sends what a message holds as three objects, with a request for
    each in every direction, and looks for one that is not there yet after a second. The link keeps what it needs to
    know of such objects until the run ends: some 2 kB for each message of parties that follow the protocol, and it
    refuses one that names further objects. How often a silo pushes is not bounded. A SuperNode sends its answer as an
    object after all, which is fetched once it is there.

    Args:
        client: of the link, with the token of the run's task.
    """

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client = client
        self._begun: dict[str, MessageProto] = {}
        """Answers whose letter is an object that has not come yet, by the message that they answer."""

    def get_nodes(self) -> list[NodeInfo]:
        """Return the nodes that are online."""
        return list(self._client.GetNodes(GetNodesRequest()).nodes)

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; return the number that Flower gives each, empty for one that it does not take."""
        keys: list[str] = []
        request, size = PushAppMessagesRequest(), 0
        for message in messages:
            made, nonce = message_to_proto(message), secrets.token_bytes(NONCE_BYTES)
            made.metadata.message_id, made.metadata.group_id = name_of(object_of(nonce)), nonce.hex()
            if size and size + made.ByteSize() > _PUSHED_BYTES:
                keys += self._client.PushMessages(request).message_ids
                request, size = PushAppMessagesRequest(), 0
            request.messages_list.append(made)
            request.message_object_trees.append(ObjectTree(object_id=made.metadata.message_id))
            size += made.ByteSize()
        return keys + list(self._client.PushMessages(request).message_ids)

    def pull_messages(self, keys: Iterable[str]) -> list[Message]:
        """Return the answers to messages; the link waits a second for the first that comes."""
        asked = list(keys)
        whole = [found for key in asked if key in self._begun and (found := self._whole(key)) is not None]
        left = [key for key in asked if key not in self._begun]
        if whole or (asked and not left):
            return whole
        for answer in self._client.PullMessages(PullAppMessagesRequest(message_ids=left)).messages_list:
            if answer.content.ByteSize() or answer.HasField("error"):
                whole.append(message_from_proto(answer))
            else:
                self._begun[answer.metadata.reply_to_message_id] = answer
        return whole

    def _whole(self, key: str) -> Message | None:
        """Return an answer with the letter of its object, with none if that did not come; None if it may still come."""
        answer = message_from_proto(self._begun[key])
        node, run, name = Node(node_id=SUPERLINK_NODE_ID), answer.metadata.run_id, answer.metadata.message_id
        found = self._client.PullObject(PullObjectRequest(node=node, run_id=run, object_id=name))
        if found.object_found and not found.object_available:
            return None
        del self._begun[key]
        with contextlib.suppress(ProtocolError):  # who reads it sees that it holds none
            answer.content = pack_message(letter_of(found.object_content))
        received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name)
        self._client.ConfirmMessageReceived(received)
        return answer


class LinkClient:
    """The coordinator's side of its link.

    Args:
        socket: of the link's private door.
        secret: that the link was started with.
    """

    def __init__(self, socket: Path, secret: bytes) -> None:
        self._socket = socket
        self._control = self._reaching(ControlHttpClient(_LINK, interceptors=[VERSION]))
        self._executor = self._reaching(task_client(_LINK, secret))
        self._bundle = Bundle.build()

    def close(self) -> None:
        """Close the connections."""
        self._control.close()
        self._executor.close()

    def register(self, keys: Iterable[bytes]) -> None:
        """Tell the link the node keys of the silos: it serves no other.

        Raises:
            httpx.HTTPError: it does not take one.
        """
        for key in keys:
            self._control.RegisterNode(RegisterNodeRequest(public_key=key))

    @contextlib.contextmanager
    def playing(self) -> Iterator[MessageQueue]:
        """Start a run and hold its task; what is sent within it is forgotten by the link at its end.

        Raises:
            ProcessError: the link did not start it.
            TaskLostError: the link took no sign of life for too long, or did not answer in time; begin another.
            httpx.HTTPError: the link is gone.
        """
        fab = Fab(self._bundle.digest, self._bundle.content, {})
        run = self._control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        try:
            with (
                contextlib.closing(self._holding(self._token(run))) as client,
                heartbeat(lambda: client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success, _log),
            ):
                self._begin(client, run)
                yield MessageQueue(client)
        except httpx.TimeoutException as error:
            raise TaskLostError("the link did not answer in time") from error
        except httpx.HTTPStatusError as error:
            if error.response.status_code != _NO_TASK:
                raise
            raise TaskLostError("the link has taken the task back") from error
        finally:
            with contextlib.suppress(httpx.HTTPError):
                self._control.StopRun(StopRunRequest(run_id=run))

    def _token(self, run: int) -> str:
        """Return the token of a run's task; runs that this coordinator did not start are ended unplayed."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        while True:
            task = self._executor.AcquireTask(request)
            if not task.token:
                raise ProcessError("the link started no run")
            if task.task.run_id == run:
                return str(task.token)
            _log.warning("a run that this coordinator did not start is not played")
            self._control.StopRun(StopRunRequest(run_id=task.task.run_id))

    def _begin(self, client: RuntimeHttpClient, run: int) -> None:
        """Take the task's input, which must be of the run that was started and of the bundle that was built.

        Raises:
            ForeignBundleError: it is not.
        """
        given = client.PullTaskInput(PullTaskInputRequest())
        if given.run.run_id != run:
            raise ForeignBundleError("a task is of another run than the one that was started")
        self._bundle.check(given.fab.content)
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, run
        TaskIdentity.node_id = given.context.node_id

    def _holding(self, token: str) -> RuntimeHttpClient:
        return self._reaching(run_client(_LINK, token))

    def _reaching(self, client: _Client) -> _Client:
        """Return a client of Flower's whose bytes go through the socket."""
        return local_client(client, httpx.HTTPTransport(uds=address(self._socket)))

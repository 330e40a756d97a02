"""Answers the messages that a SuperNode takes: what Flower would start an app for in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from typing import Final

import httpx
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.runtime import RuntimeHttpClient

from fedveil.flower.bundle import Bundle, ForeignBundleError
from fedveil.flower.envelope import NONCE_BYTES, LastMessage, name_of, object_of, unpack_message
from fedveil.flower.flower_api import local_client, run_client, task_client
from fedveil.flower.heartbeat import heartbeat
from fedveil.flower.silo_host.node import Answer, reply_to
from fedveil.protocols.errors import ProtocolError

_LOOK_SECONDS: Final = 0.05
_NO_TASK: Final = 401
_log = logging.getLogger("fedveil.silo")
_TASKS: Final = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])


class Worker:
    """Who answers a SuperNode's messages, one after another; nothing is started for one, and no app is loaded.

    A message is answered only where its run's app is fedveil's own, which holds no code: whoever serves the link
    chooses what a SuperNode fetches.

    Args:
        address: of the SuperNode's Runtime API.
        secret: that the SuperNode was started with.
        answer: of the silo.
    """

    def __init__(self, address: str, secret: bytes, answer: Answer) -> None:
        self._address, self._answer = address, answer
        self._asking = local_client(task_client(address, secret))
        self._bundle, self._last = Bundle.build(), LastMessage()

    def work(self) -> bool:
        """Answer the next message, if there is one; return whether there was.

        Raises:
            httpx.HTTPError: the SuperNode is gone, or may wait for this answer for ever.
        """
        task = self._asking.AcquireTask(_TASKS)
        if not task.token:
            return False
        begun = time.monotonic()
        with (
            contextlib.closing(local_client(run_client(self._address, task.token))) as client,
            heartbeat(lambda: client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success, _log),
        ):
            try:
                self._hold(client)
            except httpx.HTTPStatusError as error:
                late = (
                    time.monotonic() - begun > HEARTBEAT_DEFAULT_INTERVAL
                )  # it may lack a sign of life, and wait
                if late or error.response.status_code != _NO_TASK:
                    raise
                _log.warning("the SuperNode has taken a message back")
        return True

    def _hold(self, client: RuntimeHttpClient) -> None:
        """Answer the message of a task."""
        given = client.PullTaskInput(PullTaskInputRequest())
        while not (messages := client.PullMessages(PullAppMessagesRequest()).messages_list):
            time.sleep(_LOOK_SECONDS)  # a SuperNode makes a task known before it has the message
        if self._received(client, given, messages[0]):
            self._reply(client, given, messages[0])
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED))

    def _received(
        self, client: RuntimeHttpClient, given: PullTaskInputResponse, message: MessageProto
    ) -> bool:
        """Wait until the SuperNode has a message's object too, which holds nothing, and have it let go of that.

        Returns:
            Whether it came; if not, no answer is waited for.
        """
        node, run, name = Node(node_id=given.context.node_id), given.run.run_id, message.metadata.message_id
        asked = PullObjectRequest(node=node, run_id=run, object_id=name)
        while (found := client.PullObject(asked)).object_found:
            if found.object_available:
                received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name)
                client.ConfirmMessageReceived(received)
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _reply(self, client: RuntimeHttpClient, given: PullTaskInputResponse, message: MessageProto) -> None:
        """Answer a message, by an object that holds the letter."""
        node, run = Node(node_id=given.context.node_id), given.run.run_id
        reply = reply_to(
            message_from_proto(message), lambda letter: self._answered(given, letter), self._last.resolve
        )
        letter = unpack_message(reply) if reply.has_content() else b""
        content = object_of(secrets.token_bytes(NONCE_BYTES), letter)
        made = message_to_proto(reply)
        made.metadata.message_id = name_of(content)
        if reply.has_content():
            made.content.Clear()
        tree = ObjectTree(object_id=made.metadata.message_id)
        session = client.PushMessages(
            PushAppMessagesRequest(messages_list=[made], message_object_trees=[tree])
        ).session_id
        sent = PushObjectRequest(
            node=node, run_id=run, object_id=tree.object_id, object_content=content, session_id=session
        )
        if not client.PushObject(sent).stored:  # given up meanwhile, or there was no room for it
            asked = PullObjectRequest(node=node, run_id=run, object_id=tree.object_id)
            if client.PullObject(asked).object_found:
                raise httpx.HTTPError("the SuperNode does not take an answer that it waits for")

    def _answered(self, given: PullTaskInputResponse, letter: bytes) -> bytes:
        try:
            self._bundle.check(given.fab.content)
        except ForeignBundleError as error:
            raise ProtocolError(str(error)) from None
        return self._answer(letter)

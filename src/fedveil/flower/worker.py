"""Answers the messages that a SuperNode takes: what Flower would start an app for in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import Final

from flwr.common.constant import SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PushObjectRequest
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

from fedveil.flower.beating import beating
from fedveil.flower.bundle import Bundle, ForeignBundleError
from fedveil.flower.envelope import NONCE_BYTES, LastLetter, letter_in, name_of, object_of
from fedveil.flower.node import Answer, reply_to
from fedveil.flower.runtime import asking, holding, reaching
from fedveil.protection.errors import ProtocolError

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
        self._asking = reaching(asking(address, secret))
        self._bundle, self._last = Bundle.build(), LastLetter()

    def work(self) -> bool:
        """Answer the next message, if there is one; return whether there was.

        Raises:
            httpx.HTTPError: the SuperNode is gone, or has taken the task back; it may wait for this answer for ever.
        """
        task = self._asking.AcquireTask(_TASKS)
        if not task.token:
            return False
        with (
            contextlib.closing(reaching(holding(self._address, task.token))) as client,
            beating(lambda: client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success, _log),
        ):
            given = client.PullTaskInput(PullTaskInputRequest())
            for message in client.PullMessages(PullAppMessagesRequest()).messages_list:
                self._reply(client, given, message)
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED))
        return True

    def _reply(self, client: RuntimeHttpClient, given: PullTaskInputResponse, message: MessageProto) -> None:
        """Answer a message; its object holds nothing, and the answer's holds the letter."""
        node, run = Node(node_id=given.context.node_id), given.run.run_id
        received = ConfirmMessageReceivedRequest(
            node=node, run_id=run, message_object_id=message.metadata.message_id
        )
        client.ConfirmMessageReceived(received)
        reply = reply_to(
            message_from_proto(message), lambda letter: self._answered(given, letter), self._last.of
        )
        letter = letter_in(reply) if reply.has_content() else b""
        content = object_of(secrets.token_bytes(NONCE_BYTES), letter)
        made = message_to_proto(reply)
        made.metadata.message_id = name_of(content)
        if reply.has_content():
            made.content.Clear()
        tree = ObjectTree(object_id=made.metadata.message_id)
        session = client.PushMessages(
            PushAppMessagesRequest(messages_list=[made], message_object_trees=[tree])
        ).session_id
        client.PushObject(
            PushObjectRequest(
                node=node,
                run_id=run,
                object_id=tree.object_id,
                object_content=content,
                session_id=session,
            )
        )

    def _answered(self, given: PullTaskInputResponse, letter: bytes) -> bytes:
        try:
            self._bundle.check(given.fab.content)
        except ForeignBundleError as error:
            raise ProtocolError(str(error)) from None
        return self._answer(letter)

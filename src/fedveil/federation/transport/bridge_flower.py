"""A bridge inside a Flower app, by Flower's public API: a ServerApp and a ClientApp.

Flower starts a process for each message at a silo, unless it is configured otherwise, so an exchange takes seconds
(docs/how-to/carry-messages-by-flower.md).
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from .bridge import Bridge, ask_key_process  # relative: the files may lie in an app

client = ClientApp()
server = ServerApp()

_RECORD: Final = "fedveil"
_MESSAGE: Final = "message"
_SILO: Final = "silo"
_REPLY_SECONDS: Final = 90.0
"""More than a process of Flower takes to start, and :func:`~.bridge.ask_key_process` to return. After it the message is
sent again: a SuperNode that ends has taken the message with it."""

_LEAST_RATE: Final = 2.0**19
"""Bytes a second, by which a long message has more time: 64 MiB pass the SuperLink twice, and their answer does."""

_LOOK_SECONDS: Final = 0.05
_NODES_SECONDS: Final = 3.0
_log = logging.getLogger("fedveil.bridge")


@client.query()
def answer_query(message: Message, context: Context) -> Message:
    """Return the key process's answer to a message; without a message, the silo's name, as the operator set it."""
    record = message.content.config_records[_RECORD]
    node = context.node_config
    if _MESSAGE not in record:
        return Message(_content(_SILO, str(node[_SILO])), reply_to=message)
    answer = ask_key_process(str(node["socket"]), bytes(record[_MESSAGE]))  # type: ignore[arg-type]
    return Message(_content(_MESSAGE, answer), reply_to=message)


@server.main()
def carry_messages(grid: Grid, context: Context) -> None:
    """Carry messages between the link of this host and Flower's nodes, until none has passed for ``idle-seconds``."""
    config = context.run_config
    nodes = _Nodes(grid)
    bridge = Bridge(str(config["bridge"]))
    try:
        while bridge.idle_seconds() < float(config["idle-seconds"]):
            for silo in nodes.find_silos():
                bridge.add(silo, lambda message, silo=silo: nodes.send(silo, message))  # type: ignore[misc]
            time.sleep(_NODES_SECONDS)
    finally:
        bridge.close()


class _Nodes:
    """Flower's nodes by the names of their silos; any thread may use it.

    Args:
        grid: used by one thread at a time.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._lock = grid, threading.Lock()
        self._silos: dict[int, str] = {}

    def find_silos(self) -> set[str]:
        """Ask new nodes for the names of their silos; return the silos of all nodes."""
        with self._lock:
            present = set(self._grid.get_node_ids())
        self._silos = {node: silo for node, silo in self._silos.items() if node in present}
        new = sorted(present - self._silos.keys())
        with ThreadPoolExecutor(max(1, len(new))) as pool:
            self._silos |= {
                node: silo for node, silo in zip(new, pool.map(self._ask_silo, new), strict=True) if silo
            }
        return set(self._silos.values())

    def _ask_silo(self, node: int) -> str:
        """Return the name of a node's silo; empty if the node does not say."""
        try:
            return str(self._exchange(node, RecordDict({_RECORD: ConfigRecord({})}))[_SILO])
        except OSError as error:
            _log.warning("%s", error)
            return ""

    def send(self, silo: str, message: bytes) -> bytes:
        """Send a message to a silo; return its answer.

        Raises:
            OSError: no node says that it is this silo's, or none answered.
        """
        nodes = [node for node, name in self._silos.items() if name == silo]
        if not nodes:
            raise OSError(f"no SuperNode belongs to silo {silo}")
        reply = self._exchange(nodes[-1], _content(_MESSAGE, message))
        return bytes(reply[_MESSAGE])  # type: ignore[arg-type]

    def _exchange(self, node: int, content: RecordDict) -> ConfigRecord:
        record = content.config_records[_RECORD]
        seconds = _REPLY_SECONDS + len(bytes(record.get(_MESSAGE, b""))) / _LEAST_RATE  # type: ignore[arg-type]
        query = Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=seconds)
        with self._lock:
            keys = list(self._grid.push_messages([query]))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._lock:
                replies = list(self._grid.pull_messages(keys))
            if replies and replies[0].has_error():
                raise OSError(f"node {node}: {replies[0].error}")
            if replies:
                return replies[0].content.config_records[_RECORD]
            time.sleep(_LOOK_SECONDS)
        raise OSError(f"node {node}: no reply within {seconds:.0f} s")


def _content(name: str, value: str | bytes) -> RecordDict:
    return RecordDict({_RECORD: ConfigRecord({name: value})})

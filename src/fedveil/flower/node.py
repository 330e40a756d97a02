"""The silo's carrier: asks the coordinator for letters, hands each to the guard of its silo, and carries answers back.

It is a process of its own with the node's key and nothing else: no table, no identity key, no listening port. It speaks
Flower's Fleet API as a SuperNode does, and is none: an app that a coordinator's host would send is never fetched, and
no process is started for a message.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from fedveil.errors import ConfigError
from fedveil.flower.child import end_now, settings_of_parent
from fedveil.flower.envelope import content_of, letter_in
from fedveil.flower.relay import ask
from fedveil.protection.errors import ProtocolError

_LEAST_WAIT: Final = 0.1
_MOST_WAIT: Final = 3.0
_PATIENCE: Final = 20.0
_AGAIN_SECONDS: Final = 3.0
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
    """

    coordinator: str
    authority: bytes
    key: ec.EllipticCurvePrivateKey
    answer: Answer

    @classmethod
    def of(cls, folder: Path, coordinator: str, answer: Answer) -> Node:
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
        """Answer letters until the connection breaks, or ``ended()``.

        It looks again after a twentieth of the time that nothing came, from 0.1 to 3 seconds: so what a letter waits
        is little against what the exchange takes, and an idle federation is left in peace.
        """
        keys = (self.key, self.key.public_key())
        with http_request_response(self.coordinator, False, self.authority, keys) as link:
            _, receive, send, _, _, pull, push, confirm = link
            heard = time.monotonic()
            while not ended():
                received = receive()
                if received is None:
                    silence = time.monotonic() - heard
                    time.sleep(min(max(silence / _PATIENCE, _LEAST_WAIT), _MOST_WAIT))
                    continue
                with contextlib.suppress(RunNotRunningException):  # the run is over; nobody waits
                    self._carry(received, send, pull, push, confirm)
                heard = time.monotonic()

    def _carry(self, received: Any, send: Any, pull: Any, push: Any, confirm: Any) -> None:
        envelope, tree = received
        run = envelope.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            lambda name: pull(run, name),
            lambda name: confirm(run, name),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        begun = time.monotonic()
        reply = reply_to(message, self.answer)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
        wanted, session = send(reply, tree, time.monotonic() - begun)
        push_objects(
            objects,
            lambda name, content: push(run, session, name, content),
            object_ids_to_push=wanted,
        )


def reply_to(message: Message, answer: Answer) -> Message:
    """Return the message that carries the answer to a message's letter, or says that there is none.

    Why there is none stays in the silo's own log.
    """
    try:
        return Message(content_of(answer(letter_in(message))), reply_to=message)
    except (ProtocolError, OSError) as error:
        _log.warning("a letter was not answered: %s", error)
        reason = Error(
            code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="the silo did not answer this letter"
        )
        return Message(reason, reply_to=message)


def main() -> None:
    """Carry letters until the parent ends; what ends by itself is started again by the parent."""
    settings = settings_of_parent(end_now)
    guard = settings["guard"]
    node = Node.of(Path(settings["folder"]), settings["coordinator"], lambda letter: ask(Path(guard), letter))
    try:
        while True:
            node.serve(lambda: False)
            time.sleep(_AGAIN_SECONDS)
    except KeyboardInterrupt:  # how Flower ends a node that the coordinator does not know any more
        raise SystemExit("the coordinator does not know this node (any more)") from None


if __name__ == "__main__":
    main()

"""What a link gives to silos that carry letters by Flower's own SuperNode, where its settings let them in.

A SuperNode asks for the run and the app of a message, and for the object that the message names; it sends its answer as
an object too. So five more of Flower's requests are let through, each under the signature of a registered node key.

Claim: an object of a message to a silo holds 32 random bytes and nothing else, so that no request for objects yields a
letter that was sent to somebody. An answer's object is given to the coordinator alone, and deleted by who knows its
name, the SHA-256 of 32 random bytes and the letter: its sender and the coordinator. A silo can have one object at the
link for each message that was sent to it, of one letter at most. Nobody has a silo wait for an object that does not
come: the coordinator alone sends messages to silos (the link takes answers alone from them), and one that does not make
its own object known is refused.
Not claimed: who asks for a run learns how many bytes all silos have sent in it and how long all their answers took.
``tests/test_flower_supernodes.py`` tries each.
"""

from __future__ import annotations

from typing import Final

from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import LinkState

from fedveil.flower.coordinator_host.gateway import CAME_BY_DOOR
from fedveil.flower.envelope import NONCE_BYTES, letter_of, name_of, object_of
from fedveil.protocols.errors import ProtocolError

PUSH_OBJECT: Final = "/v1/fleet/push-object"
ROUTES_OF_SUPERNODES: Final = frozenset(
    {PUSH_OBJECT}
    | {f"/v1/fleet/{name}" for name in ("get-run", "get-fab", "pull-object", "confirm-message-received")}
)


def patch_object_store(state: LinkState) -> None:
    """Have a link's state make the object of every message to a silo, and take objects that hold a letter alone.

    Args:
        state: the link's; three of its methods are replaced.
    """
    store, keep, store_object = state.object_store, state.store_message_and_object_tree, state.store_object
    get_object = state.get_object

    def store_letter(run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if not session_id:  # Flower would look for any that waits for the object
            return False
        try:
            letter_of(object_content)  # before Flower splits what stands there for a head, however long it is
        except ProtocolError:
            return False
        return store_object(run_id, session_id, object_id, object_content)

    def get_no_letter(run_id: int, object_id: str) -> bytes | None:
        found = get_object(run_id, object_id)
        return None if found and letter_of(found) and CAME_BY_DOOR.get() else found

    def keep_with_object(
        message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        name, content = message.metadata.message_id, b""
        if not message.metadata.reply_to_message_id:
            nonce = bytes.fromhex(message.metadata.group_id)
            content = object_of(nonce)
            if len(nonce) != NONCE_BYTES or name != name_of(content):
                raise ValueError("a message to a silo does not make its object known")
        if object_tree.object_id != name:
            raise ValueError("a message names another object than its own")
        if content:  # first: where Flower waits for one object too long, all messages sent with it end
            store.preregister(message.metadata.run_id, object_tree)
            store.put(name, content)
        return keep(message, object_tree, session_id)

    state.get_object = get_no_letter  # type: ignore[method-assign]
    state.store_object = store_letter  # type: ignore[method-assign]
    state.store_message_and_object_tree = keep_with_object  # type: ignore[method-assign]

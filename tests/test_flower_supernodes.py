"""Flower's own SuperNode as a silo's carrier: what its requests give to whom, and how its messages are answered."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
import uvicorn
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.node_pb2 import Node as NodeMessage
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import Run
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.main import create_app
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.nodestate import NodeStateFactory

from fedveil.errors import ConfigError
from fedveil.flower.bundle import Bundle
from fedveil.flower.coordinator_host.gateway import SMALL_BODY
from fedveil.flower.coordinator_host.link import LARGEST_BODY, ROUTES, _public_server, longest_body, make_app
from fedveil.flower.coordinator_host.link_objects import PUSH_OBJECT, ROUTES_OF_SUPERNODES
from fedveil.flower.coordinator_host.tasks import LinkClient, MessageQueue
from fedveil.flower.enrollment.certificates import node_key_pem
from fedveil.flower.enrollment.demonstration import write_demonstration
from fedveil.flower.envelope import letter_of, name_of, object_of, pack_message, unpack_message
from fedveil.flower.flower_api import local_client
from fedveil.flower.folders import CoordinatorFolder, SiloFolder, SiloSettings
from fedveil.flower.silo_host.service import CARRIERS
from fedveil.flower.silo_host.supernode import flags, main, work
from fedveil.flower.silo_host.worker import Worker
from fedveil.protocols.errors import ProtocolError
from tests.test_flower_non_members import node_key, signed

SECRET = bytes(range(32))
NONCE = bytes(32)


# --- an object that carries a letter --------------------------------------------------------------------------


@pytest.mark.parametrize("letter", [b"", b"a letter", bytes(1000), b"ConfigRecord  5\0" * 9])
def test_an_object_gives_back_its_letter_and_is_one_of_flowers(letter: bytes) -> None:
    from flwr.supercore.inflatable.inflatable_object import get_object_id
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content

    content = object_of(NONCE, letter)
    assert letter_of(content) == letter
    validate_object_content(content)
    assert name_of(content) == get_object_id(content) == hashlib.sha256(content).hexdigest()
    assert name_of(object_of(b"1" * 32, letter)) != name_of(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(100),
        b"ConfigRecord  31\0" + bytes(31),
        b"ConfigRecord  33\0" + bytes(32),
        b"ConfigRecord  032\0" + bytes(32),
        b"Message  32\0" + bytes(32),
        b"ConfigRecord " + b"a" * 64 + b" 32\0" + bytes(32),
        b" " * 1000 + b"\0" + bytes(32),
    ],
)
def test_another_object_holds_no_letter(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="no letter"):
        letter_of(content)


# --- the link -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(config: uvicorn.Config, family: int, at: Any) -> Iterator[Any]:
    """Serve an app in a thread, at an address; yield that."""
    with socket.socket(family) as listening:
        listening.bind(at)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield listening.getsockname()
        server.should_exit = True
        thread.join(10)


@dataclass(kw_only=True)
class Link:
    """A link behind its doors, both of them Unix sockets here, and the silos' folders.

    Attributes:
        app: Flower's.
        public: the public door's socket.
        tasks: the coordinator's side.
        silos: their folders.
        active: clients and nodes that are, by silo.
    """

    app: Any
    public: Path
    tasks: LinkClient
    silos: tuple[Path, ...]
    active: dict[int, tuple[FleetHttpClient, NodeMessage]] = field(default_factory=dict)

    @property
    def state(self) -> Any:
        return self.app.state.linkstate_factory.state()

    def fleet(self, silo: int) -> tuple[FleetHttpClient, NodeMessage]:
        """A client with a silo's key, and its activated node."""
        if silo not in self.active:
            key = node_key(self.silos[silo])
            signing = NodeAuthHttpInterceptor(key, key.public_key())
            client = FleetHttpClient("http://link", interceptors=[signing])
            local_client(client, httpx.HTTPTransport(uds=str(self.public)))
            public = public_key_to_bytes(key.public_key())
            activation = ActivateNodeRequest(public_key=public, heartbeat_interval=300)
            number = client.ActivateNode(activation).node_id
            self.active[silo] = client, NodeMessage(node_id=number)
        return self.active[silo]

    def status(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """The status of a request at the public door."""
        connection = http.client.HTTPConnection("link")
        with socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.connect(str(self.public))
            connection.request(
                "POST", path, body=body, headers={"content-type": "application/protobuf", **headers}
            )
            return connection.getresponse().status


@contextlib.contextmanager
def link(folder: Path, *, supernodes: bool) -> Iterator[Link]:
    made = write_demonstration(folder / "demo", hospitals={"north": 10, "south": 10})
    home = CoordinatorFolder(made.provisioned.coordinator)
    home.link.settings.model_copy(update={"supernodes": supernodes}).write(home.link / "link.toml")
    app = make_app(home.link, SECRET)
    door = _public_server(home.link, app, longest_body(app)).app
    public = uvicorn.Config(door, ws="none", lifespan="off", log_level="warning")
    private = uvicorn.Config(app, ws="none", lifespan="on", log_level="warning")
    there = [str(folder / name) for name in ("private", "public")]
    with serving(private, socket.AF_UNIX, there[0]), serving(public, socket.AF_UNIX, there[1]):
        tasks = LinkClient(folder / "private", SECRET)
        tasks.register(map(node_key_pem, home.membership.nodes))
        found = Link(app=app, public=folder / "public", tasks=tasks, silos=tuple(made.provisioned.silos))
        try:
            yield found
        finally:
            tasks.close()
            for client, _ in found.active.values():
                client.close()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with link(tmp_path_factory.mktemp("opened"), supernodes=True) as found:
        yield found


def asked(post: MessageQueue, node: NodeMessage, letter: bytes = b"a letter") -> str:
    """Send a letter to a silo."""
    message = Message(pack_message(letter), dst_node_id=node.node_id, message_type=MessageType.QUERY)
    (key,) = post.push_messages([message])
    assert key
    return key


def answer_to(message: MessageProto, letter: bytes) -> tuple[MessageProto, bytes]:
    """What a SuperNode sends first of an answer, and the object that it sends then."""
    reply = message_to_proto(Message(RecordDict(), reply_to=message_from_proto(message)))
    content = object_of(secrets.token_bytes(32), letter)
    reply.metadata.message_id = name_of(content)
    return reply, content


def pushed(client: FleetHttpClient, node: NodeMessage, reply: MessageProto) -> Any:
    tree = ObjectTree(object_id=reply.metadata.message_id)
    return client.PushMessages(
        PushMessagesRequest(node=node, messages_list=[reply], message_object_trees=[tree])
    )


def test_a_letter_goes_to_a_supernode_and_its_answer_comes_as_an_object(opened: Link) -> None:
    """Every request of a SuperNode, in its order; nothing of the letter or of the answer is left at the link."""
    with opened.tasks.playing() as post:
        client, node = opened.fleet(0)
        key = asked(post, node)
        pulled = client.PullMessages(PullMessagesRequest(node=node))
        (message,), (tree,) = pulled.messages_list, pulled.message_object_trees
        run = message.metadata.run_id
        assert tree.object_id == message.metadata.message_id == key
        assert not tree.children
        assert unpack_message(message_from_proto(message)) == b"a letter"
        digest = client.GetRun(GetRunRequest(node=node, run_id=run)).run.fab_hash
        fab = client.GetFab(GetFabRequest(node=node, run_id=run, hash_str=digest)).fab
        Bundle.build().check(fab.content)
        found = client.PullObject(PullObjectRequest(node=node, run_id=run, object_id=key))
        assert name_of(found.object_content) == key
        assert letter_of(found.object_content) == b""
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=key)
        )
        reply, content = answer_to(message, b"an answer")
        session = pushed(client, node, reply).session_id
        assert post.pull_messages([key]) == []  # its object is still to come
        assert post.pull_messages([key]) == []
        sent = PushObjectRequest(
            node=node, run_id=run, object_id=name_of(content), object_content=content, session_id=session
        )
        assert client.PushObject(sent).stored
        (answer,) = post.pull_messages([key])
        assert answer.metadata.reply_to_message_id == key
        assert unpack_message(answer) == b"an answer"
        assert len(opened.state.object_store) == 0
        assert not client.PushObject(sent).stored


def test_an_answer_whose_object_never_comes_is_lost_and_nothing_waits_for_it(
    opened: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr.supercore.corestate.in_memory_corestate.OBJECT_PUSH_SESSION_TTL_SECONDS", -1)
    with opened.tasks.playing() as post:
        client, node = opened.fleet(0)
        key = asked(post, node)
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        pushed(client, node, answer_to(message, b"an answer")[0])
        assert post.pull_messages([key]) == []
        (answer,) = post.pull_messages([key])
        with pytest.raises(ProtocolError, match="holds no letter"):
            unpack_message(answer)
        assert key not in post._begun


def test_a_member_has_one_object_of_one_letter_for_each_message_it_was_sent(opened: Link) -> None:
    with opened.tasks.playing() as post:
        client, node = opened.fleet(0)
        asked(post, node)
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        run, store = message.metadata.run_id, opened.state.object_store
        reply, content = answer_to(message, b"an answer")
        first = pushed(client, node, reply)
        before = len(store)
        again, other = answer_to(message, b"another answer")
        assert not pushed(client, node, again).objects_to_push  # one answer to each message
        assert len(store) == before
        named = ObjectTree(object_id=name_of(other))  # the same answer again, and another object with it
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            client.PushMessages(
                PushMessagesRequest(node=node, messages_list=[reply], message_object_trees=[named])
            )
        assert len(store) == before

        def stored(content: bytes, name: str, session: str) -> bool:
            request = PushObjectRequest(
                node=node, run_id=run, object_id=name, object_content=content, session_id=session
            )
            return bool(client.PushObject(request).stored)

        assert not stored(other, name_of(other), first.session_id)
        assert not stored(other, name_of(content), first.session_id)  # not what the name stands for
        assert not stored(content, name_of(content), "another session")
        assert store.get(name_of(content)) == b""
        assert stored(content, name_of(content), first.session_id)
        tree = ObjectTree(object_id=name_of(b" " * 99))
        session = opened.state.start_session(run)
        opened.state.preregister_object_tree(tree, session)
        assert not stored(b" " * 99, tree.object_id, session)  # no letter


def test_a_member_reads_and_deletes_no_object_of_another(opened: Link) -> None:
    """It would need the name, which is the digest of what it holds; of a message to another it holds no letter."""
    with opened.tasks.playing() as post:
        (client, node), (curious, itself) = opened.fleet(0), opened.fleet(1)
        key = asked(post, node, b"for the first alone")
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        run = message.metadata.run_id
        reply, content = answer_to(message, b"an answer")
        session = pushed(client, node, reply).session_id
        name = name_of(content)
        client.PushObject(
            PushObjectRequest(
                node=node, run_id=run, object_id=name, object_content=content, session_id=session
            )
        )
        assert not curious.PullMessages(PullMessagesRequest(node=itself)).messages_list
        with pytest.raises(httpx.HTTPStatusError, match="401"):  # in another's name
            curious.PullObject(PullObjectRequest(node=node, run_id=run, object_id=name))
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            curious.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name)
            )
        for guess in ("", name[:-1], name_of(b"an answer"), name_of(object_of(NONCE, b"an answer"))):
            asks = PullObjectRequest(node=itself, run_id=run, object_id=guess)
            assert not curious.PullObject(asks).object_found
        found = curious.PullObject(PullObjectRequest(node=itself, run_id=run, object_id=key))
        assert letter_of(found.object_content) == b""  # even under its name
        for who, its in (
            (client, node),
            (curious, itself),
        ):  # nor its own, again and again: 256 MiB for 100 bytes
            asks = PullObjectRequest(node=its, run_id=run, object_id=name)
            assert not who.PullObject(asks).object_found
        assert post.pull_messages([key]) == []
        (answer,) = post.pull_messages([key])
        assert unpack_message(answer) == b"an answer"


@pytest.mark.parametrize("supernodes", [True, False])
def test_no_member_sends_a_message_in_the_coordinators_name(tmp_path: Path, supernodes: bool) -> None:
    """Flower believes what a message says of its sender.

    Such messages filled the link; and a member who made one known with its object, took that back, and named its own
    answer as that object had a silo with a SuperNode wait for it for two hours.
    """
    with link(tmp_path, supernodes=supernodes) as found, found.tasks.playing() as post:
        (client, node), (_, other) = found.fleet(0), found.fleet(1)
        asked(post, node)
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        before = len(found.state.object_store)
        for group in ("", "no digits", "00" * 31, secrets.token_bytes(32).hex()):
            known = len(group) == 64
            message.metadata.dst_node_id = other.node_id
            message.metadata.message_id = name_of(object_of(bytes.fromhex(group))) if known else "a" * 64
            message.metadata.group_id = group
            with pytest.raises(httpx.HTTPStatusError, match="500"):
                pushed(client, node, message)
            assert found.state.get_message_ins(node_id=other.node_id, limit=1) == []
            assert len(found.state.object_store) == before


@pytest.mark.parametrize("session", ["", "another"])
def test_a_member_ends_no_message_that_was_sent_with_its_own(
    opened: Link, monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    """Flower ends all messages that were sent together where one's object comes late: three minutes after them."""
    monkeypatch.setattr("flwr.supercore.corestate.in_memory_corestate.OBJECT_PUSH_SESSION_TTL_SECONDS", -1)
    with opened.tasks.playing() as post:
        (client, node), (honest, other) = opened.fleet(0), opened.fleet(1)
        to = [
            Message(pack_message(b"a letter"), dst_node_id=one.node_id, message_type=MessageType.QUERY)
            for one in (other, node)
        ]
        post.push_messages(to)
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        content = object_of(bytes.fromhex(message.metadata.group_id))
        sent = PushObjectRequest(
            node=node,
            run_id=message.metadata.run_id,
            object_id=name_of(content),
            object_content=content,
            session_id=session,
        )
        assert not client.PushObject(sent).stored
        assert honest.PullMessages(PullMessagesRequest(node=other)).messages_list


def test_a_member_does_not_cut_off_what_the_coordinator_is_sending(
    opened: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an answer with the name of the first of many messages, while the next ones are still to be taken."""
    state, (client, node), (_, other) = opened.state, opened.fleet(0), opened.fleet(1)
    keep, refused = state.store_message_and_object_tree, []

    def keep_slowly(message: Message, tree: ObjectTree, session: str) -> Any:
        kept = keep(message, tree, session)
        if message.metadata.dst_node_id == node.node_id:
            (got,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
            reply, _ = answer_to(got, b"an answer")
            reply.metadata.message_id = got.metadata.message_id
            with pytest.raises(httpx.HTTPStatusError, match="500"):
                pushed(client, node, reply)
            refused.append(reply)
        return kept

    with opened.tasks.playing() as post, monkeypatch.context() as slow:
        slow.setattr(state, "store_message_and_object_tree", keep_slowly)
        to = [
            Message(pack_message(b"a letter"), dst_node_id=one.node_id, message_type=MessageType.QUERY)
            for one in (node, other)
        ]
        assert all(post.push_messages(to))
        assert len(refused) == 1


def strangers(silos: tuple[Path, ...]) -> dict[str, dict[str, str]]:
    from cryptography.hazmat.primitives.asymmetric import ec

    unknown = ec.generate_private_key(ec.SECP384R1())
    member, other = map(node_key, silos)
    return {
        "nothing": {},
        "made up": {"flwr-public-key": "AAAA", "flwr-timestamp": "now", "flwr-signature": "AAAA"},
        "an unlisted key": signed(unknown),
        "a member's public key": signed(unknown, public_key_to_bytes(member.public_key())),
        "another member's key": signed(other),
        "an old signature": signed(member, age=3600.0),
        "a signature of another member": signed(member, public_key_to_bytes(other.public_key())),
    }


def test_a_stranger_gets_nothing_where_supernodes_are_let_in(opened: Link) -> None:
    with opened.tasks.playing() as post:
        client, node = opened.fleet(0)
        key = asked(post, node)
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        run, before = message.metadata.run_id, len(opened.state.object_store)
        assert before == 1
        bodies: dict[str, Any] = {
            "get-run": GetRunRequest(node=node, run_id=run),
            "get-fab": GetFabRequest(node=node, run_id=run),
            "pull-object": PullObjectRequest(node=node, run_id=run, object_id=key),
            "push-object": PushObjectRequest(node=node, run_id=run, object_id=key),
            "confirm-message-received": ConfirmMessageReceivedRequest(
                node=node, run_id=run, message_object_id=key
            ),
        }
        assert {f"/v1/fleet/{name}" for name in bodies} == ROUTES_OF_SUPERNODES
        for who, headers in strangers(opened.silos).items():
            for name, body in bodies.items():
                status = opened.status(f"/v1/fleet/{name}", body.SerializeToString(), headers)
                assert status == 401, (who, name, status)
            for closed in ("/v1/fleet/register-node", "/v1/control/start-run", "/v1/runtime/push-object"):
                assert opened.status(closed, b"", headers) == 404
            if who != "another member's key":  # who may send an object, and not as this member
                long = {**headers, "content-length": str(SMALL_BODY + 1)}
                assert opened.status(PUSH_OBJECT, b"", long) == 413, who
        assert len(opened.state.object_store) == before


def test_where_supernodes_are_not_let_in_their_routes_are_not_there(tmp_path: Path) -> None:
    """Not for a member either; messages make no objects."""
    with link(tmp_path, supernodes=False) as closed, closed.tasks.playing() as post:
        client, node = closed.fleet(0)
        asked(post, node)
        for headers in (*strangers(closed.silos).values(), signed(node_key(closed.silos[0]))):
            for path in ROUTES_OF_SUPERNODES:
                assert closed.status(path, b"", headers) == 404
        (message,) = client.PullMessages(PullMessagesRequest(node=node)).messages_list
        assert closed.state.object_store.get(message.metadata.message_id) == b""


def test_a_long_body_is_a_members_letter(opened: Link) -> None:
    longest = longest_body(opened.app)

    def scope(path: str, headers: dict[str, str]) -> dict[str, Any]:
        found = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"raw_path": path.encode(), "headers": found}

    member = signed(node_key(opened.silos[0]))
    lengths = {path: longest(scope(path, member)) for path in ROUTES | ROUTES_OF_SUPERNODES}
    long = {path for path, length in lengths.items() if length == LARGEST_BODY}
    assert long == {PUSH_OBJECT, "/v1/fleet/push-messages"}
    assert longest(scope(PUSH_OBJECT, {})) == SMALL_BODY


# --- the silo -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SuperNode:
    """A SuperNode's own state, and where its Runtime API is."""

    state: Any
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def takes(self, content: bytes, letter: bytes, late: float = 0.0, lost: bool = False) -> str:
        """Take a message of a run of some app, in Flower's order: its task first; return its number."""
        run = Run.create_empty(7)
        run.fab_hash = Bundle(content).digest
        run.series_id = 3
        context = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={})
        self.state.set_run_series_context(3, context)
        self.state.store_run(run)
        self.state.store_fab(Fab(run.fab_hash, content, {}))
        task = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=7, fab_hash=run.fab_hash)
        beside = object_of(secrets.token_bytes(32))
        message = message_to_proto(Message(pack_message(letter), dst_node_id=5, message_type="query"))
        message.metadata.message_id = name_of(beside)
        message.metadata.run_id = 7

        def comes() -> None:
            time.sleep(late)
            self.state.object_store.preregister(7, ObjectTree(object_id=name_of(beside)))
            self.state.store_message(message_from_proto(message))
            time.sleep(late)
            if lost:
                self.state.delete_messages(message_ids=[name_of(beside)])
                self.state.object_store.delete(name_of(beside))
                self.state.finish_task(task, "failed", "its object did not come")
            else:
                self.state.object_store.put(name_of(beside), beside)

        coming = threading.Thread(target=comes)
        coming.start()
        if not late:
            coming.join()
        return name_of(beside)

    def answer(self) -> tuple[Message, bytes]:
        """What it would send of the answer that it has: the message, and its object."""
        (reply,) = self.state.get_messages_legacy(is_reply=True)
        return reply, self.state.object_store.get(reply.metadata.message_id)


@pytest.fixture
def supernode(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperNode]:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    state = factory.state()
    state.set_node_id(5)
    app = create_app(state_factory=factory, superexec_auth_secret=SECRET)
    config = uvicorn.Config(app, ws="none", log_level="warning")
    with serving(config, socket.AF_INET, ("127.0.0.1", 0)) as (_, port):
        yield SuperNode(state=state, port=port)


@contextlib.contextmanager
def working(
    supernode: SuperNode, answer: Callable[[bytes], bytes], secret: bytes = SECRET
) -> Iterator[Worker]:
    worker = Worker(supernode.address, secret, answer)
    with contextlib.closing(worker._asking):
        yield worker


def noted(into: list[bytes]) -> Callable[[bytes], bytes]:
    def answer(letter: bytes) -> bytes:
        into.append(letter)
        return b"answer to " + letter

    return answer


def test_a_supernodes_message_is_answered_and_nothing_of_it_stays(supernode: SuperNode) -> None:
    read: list[bytes] = []
    with working(supernode, noted(read)) as worker:
        assert not worker.work()
        for letter in (b"first", b"second", b"second"):
            asked_about = supernode.takes(Bundle.build().content, letter)
            assert worker.work()
            reply, content = supernode.answer()
            assert reply.metadata.reply_to_message_id == asked_about
            assert name_of(content) == reply.metadata.message_id
            assert letter_of(content) == b"answer to " + letter
            assert not reply.content.config_records  # a SuperNode sends the object alone
            assert supernode.state.object_store.get(asked_about) is None
        assert not worker.work()
    assert read == [b"first", b"second", b"second"]


def test_a_task_is_known_before_its_message_and_that_before_its_object(supernode: SuperNode) -> None:
    """A SuperNode would have them in this order, and wait for ever for the answer to a message that was missed."""
    read: list[bytes] = []
    with working(supernode, noted(read)) as worker:
        supernode.takes(Bundle.build().content, b"late", late=0.2)
        assert worker.work()
        assert letter_of(supernode.answer()[1]) == b"answer to late"


def test_a_message_that_a_supernode_gives_up_is_passed_over(
    supernode: SuperNode, caplog: pytest.LogCaptureFixture
) -> None:
    """As where its run ends meanwhile; the next one is answered."""
    read: list[bytes] = []
    with working(supernode, noted(read)) as worker:
        supernode.takes(Bundle.build().content, b"lost", late=0.2, lost=True)
        assert worker.work()
        supernode.takes(Bundle.build().content, b"next")
        assert worker.work()
    assert read == [b"next"]


def test_a_message_of_another_app_is_not_answered(
    supernode: SuperNode, caplog: pytest.LogCaptureFixture
) -> None:
    """The silo is not asked; the SuperNode, which waits for an answer, gets one that says so."""
    import io
    import zipfile

    read: list[bytes] = []
    foreign = io.BytesIO(Bundle.build().content)
    with zipfile.ZipFile(foreign, "a") as archive:
        archive.writestr("client.py", "raise SystemExit('this was run')")
    supernode.takes(foreign.getvalue(), b"a letter")
    with working(supernode, noted(read)) as worker:
        assert worker.work()
    reply, content = supernode.answer()
    assert reply.error.reason == "the silo did not answer this letter"
    assert letter_of(content) == b""
    assert read == []
    assert "not fedveil's own" in caplog.text


def test_a_refusal_of_the_guard_is_no_answer(supernode: SuperNode) -> None:
    def refuse(letter: bytes) -> bytes:
        raise ProtocolError("not for me")

    supernode.takes(Bundle.build().content, b"a letter")
    with working(supernode, refuse) as worker:
        assert worker.work()
    assert supernode.answer()[0].has_error()


def test_another_user_of_a_silos_host_gets_no_task_and_no_letter_at_its_port(supernode: SuperNode) -> None:
    """Every route of the SuperNode's own app, taken from the app, without the secret or with another one."""
    supernode.takes(Bundle.build().content, b"a letter")
    with httpx.Client(base_url=supernode.address) as client:
        paths = set(client.get("/openapi.json").json()["paths"])
        assert "/v1/runtime/acquire-task" in paths
        assert len(paths) > 20
        for path in sorted(paths - {"/health"}):
            for headers in ({}, {"flwr-task-token": "a" * 32}):
                sent = {"content-type": "application/protobuf", **headers}
                status = client.post(path, content=b"", headers=sent).status_code
                assert status in (401, 405, 422, 415), (path, status)
    with (
        working(supernode, noted([]), bytes(32)) as worker,
        pytest.raises(httpx.HTTPStatusError, match="401"),
    ):
        worker.work()
    assert supernode.state.get_messages_legacy(is_reply=False)  # nobody has had it


@pytest.mark.parametrize("ours", [True, False])
def test_a_port_that_another_process_took_first_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Between choosing a port and listening at it, another user could take it and have the guard read letters."""
    asked: list[bool] = []

    class Asking(Worker):
        def __init__(self) -> None:
            pass

        def work(self) -> bool:
            asked.append(True)
            raise ValueError

    monkeypatch.setattr("fedveil.flower.silo_host.supernode._STARTING_SECONDS", 0.0)
    monkeypatch.setattr("fedveil.flower.silo_host.supernode.end_now", lambda: None)
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with (
        subprocess.Popen(
            [sys.executable, "-S", "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        assert other.stdout is not None
        port = own.getsockname()[1] if ours else int(other.stdout.readline())
        work(Asking(), port)
        other.kill()
    assert asked == [True] * ours


def test_a_supernode_that_has_no_room_for_an_answer_begins_anew(
    supernode: SuperNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the answer's object for ever; where it gave the answer up meanwhile, the next one is due."""
    store = supernode.state.object_store
    put = store.put

    def no_room(name: str, content: bytes) -> None:
        if letter_of(content):
            raise MemoryError
        put(name, content)

    def given_up(name: str, content: bytes) -> None:
        if letter_of(content):
            store.delete(name)
        put(name, content)

    with working(supernode, noted([])) as worker:
        monkeypatch.setattr(store, "put", no_room)
        supernode.takes(Bundle.build().content, b"long")
        with pytest.raises(httpx.HTTPError, match="waits for"):
            worker.work()
        supernode.state.delete_messages()
        monkeypatch.setattr(store, "put", given_up)
        supernode.takes(Bundle.build().content, b"late")
        assert worker.work()


def test_what_a_links_host_says_moves_no_cursor_and_a_thread_that_fails_ends_the_carrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower logs names of objects as they come.

    Its thread that gives signs of life ends at a status that it does not expect, and the SuperNode would go on asking
    for messages to a node that is gone.
    """
    from flwr.supercore import log
    from flwr.supercore.heartbeat import HeartbeatSender

    carrier, ended = "fedveil.flower.silo_host.supernode", threading.Event()

    def refused() -> bool:
        raise RuntimeError("The SuperLink does not recognize this SuperNode.")

    def runs() -> None:
        log(logging.ERROR, ValueError("Invalid object ID format: \x1b[2J"))
        HeartbeatSender(refused).start()
        assert ended.wait(10)

    told = {"folder": str(tmp_path), "guard": str(tmp_path / "guard"), "coordinator": "127.0.0.1:9443"}
    monkeypatch.setattr(f"{carrier}.settings_of_parent", lambda end: told)
    monkeypatch.setattr(f"{carrier}.end_now", ended.set)
    monkeypatch.setattr(f"{carrier}.flower_supernode", runs)
    monkeypatch.setattr(f"{carrier}.work", lambda worker, port: worker._asking.close())
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("threading.excepthook", threading.excepthook)
    monkeypatch.setattr(logging.getLogger("flwr"), "filters", [])
    main()
    assert "Invalid object ID format: \N{REPLACEMENT CHARACTER}[2J" in caplog.messages


def test_a_supernode_is_started_with_flags_that_it_knows(tmp_path: Path) -> None:
    """Nothing that is secret among them; a process for each message is what they rule out."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    words = flags(tmp_path, "learn.example.org:9443", 40001, 7)
    found = _parse_args_run_supernode().parse_args(words[1:])
    assert (found.isolation, found.host, found.port, found.insecure) == ("process", "127.0.0.1", 40001, False)
    assert found.superlink == "learn.example.org:9443"
    assert found.root_certificates == str(tmp_path / "ca.crt")
    assert found.auth_supernode_private_key == str(tmp_path / "node.key")
    assert found.superexec_auth_secret_file == "/dev/fd/7"
    assert found.health_server_address is None


def test_a_silo_names_its_carrier_and_no_other_word_will_do(tmp_path: Path) -> None:
    made = write_demonstration(tmp_path / "demo", hospitals={"north": 10, "south": 10})
    folder = SiloFolder(made.provisioned.silos[0])
    assert folder.settings.carrier == "fleet"
    for name in CARRIERS:
        folder.settings.model_copy(update={"carrier": name}).write(folder / "silo.toml")
        assert SiloSettings.read(folder / "silo.toml").carrier == name
    folder.settings.model_copy(update={"carrier": "pigeon"}).write(folder / "silo.toml")
    with pytest.raises(ConfigError, match="carrier"):
        SiloSettings.read(folder / "silo.toml")

"""Real strangers: who is no member gets nothing from any port or socket of any party, and runs no code."""

from __future__ import annotations

import contextlib
import grp
import http.client
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
)

from fedveil.flower.sockets import free_port

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StartRunRequest, StopRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node as NodeMessage
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.runtime import RuntimeHttpClient

from fedveil.errors import ConfigError
from fedveil.flower.bundle import Bundle, ForeignBundleError
from fedveil.flower.coordinator_host.attached_link import AttachedLink
from fedveil.flower.coordinator_host.gateway import SMALL_BODY
from fedveil.flower.coordinator_host.link import LARGEST_BODY, PUSH, ROUTES, make_app
from fedveil.flower.coordinator_host.link_folder import LinkFolder
from fedveil.flower.coordinator_host.link_objects import ROUTES_OF_SUPERNODES
from fedveil.flower.coordinator_host.service import CoordinatorService
from fedveil.flower.coordinator_host.submission import Submission
from fedveil.flower.coordinator_host.tasks import MessageQueue
from fedveil.flower.enrollment.certificates import Authority
from fedveil.flower.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.flower.envelope import pack_message
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.silo_host.ipc import send_frame
from fedveil.flower.silo_host.service import SiloService
from fedveil.flower.sockets import DOOR, SECRET, address
from tests.non_members import Stranger
from tests.test_flower import issue

CLOSED = {f"/v1/fleet/{name}" for name in ("register-node", "unregister-node")} | ROUTES_OF_SUPERNODES
"""Routes of Flower's Fleet API that no silo needs: the coordinator registers, nobody fetches an app or an object.

Where a link lets SuperNodes in, all but two of them are open to members: ``tests/test_flower_supernodes.py``.
"""

OTHER_USER = 65534
LOCAL_USER = """\
import os, socket, sys
os.setgroups([])
os.setgid(65533)
os.setuid(65533)
with socket.socket(socket.AF_UNIX) as tried:
    try:
        tried.connect(sys.argv[1])
    except PermissionError:
        sys.exit(0)
sys.exit(1)
"""


# `fedveil link`, as another user. It becomes him after its imports: others may not be able to read the package.
LINK = """\
import os, sys
import encodings.cp437, fedveil.cli.link, fedveil.flower.coordinator_host.link
from fedveil.cli.app import main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.argv = ["fedveil", "link", sys.argv[1]]
main()
"""
LINKS_USER = """\
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for name in sys.argv[1:]:
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.connect(name) if name.endswith("party") else open(name)
    except PermissionError:
        continue
    sys.exit(1)
"""


@dataclass(kw_only=True)
class Served:
    """A federation that is served: the coordinator and one silo, each with the processes that it starts.

    Attributes:
        made: its folders.
        party: the coordinator.
        silo: the first silo.
        link: the number of the link's process: of another user, if the tests are root's.
    """

    made: Demonstration
    link: int
    party: CoordinatorService
    silo: SiloService

    @property
    def address(self) -> tuple[str, int]:
        settings = CoordinatorFolder(self.made.provisioned.coordinator).link.settings
        return settings.host, settings.port

    @property
    def processes(self) -> list[int]:
        return [os.getpid(), self.link, self.silo.carrier.number]

    def state(self) -> tuple[set[int], dict[int, str]]:
        """What the link knows: its runs, and the nodes with what they are doing."""
        control = self.party._tasks._control
        runs = control.ListRuns(ListRunsRequest()).run_dict
        nodes = control.ListNodes(ListNodesRequest()).nodes_info
        return set(runs), {node.node_id: node.status for node in nodes}


@contextlib.contextmanager
def link_of_another_user(home: CoordinatorFolder) -> Iterator[int]:
    """Serve the link as another user, from a folder of their own; yield the number of the process."""
    folder = Path(tempfile.mkdtemp(prefix="fedveil-link-"))
    folder.rmdir()
    shutil.move(home.link.path, folder)
    for path in (folder, *folder.iterdir()):
        os.chown(path, OTHER_USER, OTHER_USER)
    link = LinkFolder(folder)
    link.settings.model_copy(update={"group": grp.getgrgid(OTHER_USER).gr_name}).write(link / "link.toml")
    changed = {"link": str(folder), "start_link": False}
    home.settings.model_copy(update=changed).write(home / "coordinator.toml")
    process = subprocess.Popen([sys.executable, "-c", LINK, str(folder)], stdout=subprocess.DEVNULL)
    try:
        yield process.pid
        assert process.poll() is None
        process.terminate()
        process.wait(30)
        assert not list((folder / "run").iterdir())  # socket and secret are gone
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = write_demonstration(tmp_path_factory.mktemp("strangers") / "demo", port=free_port())
    home = CoordinatorFolder(made.provisioned.coordinator)
    with contextlib.ExitStack() as ending:
        other = ending.enter_context(link_of_another_user(home)) if os.geteuid() == 0 else None
        party = CoordinatorService(home)
        ending.callback(party.stop)
        silo = SiloService(SiloFolder(made.provisioned.silos[0]))
        ending.callback(silo.stop)
        number = party.link.number if other is None else other
        assert number is not None
        found = Served(made=made, party=party, silo=silo, link=number)
        while "online" not in found.state()[1].values():
            assert silo.carrier.ended is None
        yield found


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    found = Stranger(tmp_path_factory.mktemp("stranger"))
    yield found
    found.leaves()


@pytest.fixture(scope="module")
def flowers_routes(served: Served) -> set[tuple[str, str]]:
    """Every method and path of Flower's own app, taken from the app."""
    from fastapi.routing import iter_route_contexts

    app: Any = make_app(CoordinatorFolder(served.made.provisioned.coordinator).link, bytes(32))
    found = set()
    for context in iter_route_contexts(app.routes):
        methods = getattr(context, "methods", None) or getattr(context.route, "methods", None) or {"GET"}
        path = getattr(context, "path", None) or context.route.path
        found |= {(method, path) for method in methods}
    found |= {("POST", path) for path in app.openapi()["paths"]}
    return found


def ask(
    served: Served, path: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
) -> int:
    """Send one request as it is written, to the public port under its TLS; return the status."""
    context = ssl.create_default_context(cafile=str(served.made.provisioned.silos[0] / "ca.crt"))
    host, port = served.address
    connection = http.client.HTTPSConnection(host, port, context=context, timeout=20)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        sent = {"content-type": "application/protobuf", "content-length": str(len(body)), **(headers or {})}
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


def signed(key: ec.EllipticCurvePrivateKey, public: bytes | None = None, age: float = 0.0) -> dict[str, str]:
    """The headers by which a node proves who it is."""
    stamp = (now() - timedelta(seconds=age)).isoformat()
    own = public_key_to_bytes(key.public_key())
    return {
        "flwr-public-key": b64encode(public or own).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": b64encode(sign_message(key, stamp.encode())).decode(),
    }


def node_key(silo: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key((silo / "node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def test_every_route_of_flowers_is_let_through_or_closed_by_name(
    flowers_routes: set[tuple[str, str]],
) -> None:
    fleet = {(method, path) for method, path in flowers_routes if path.startswith("/v1/fleet/")}
    assert fleet == {("POST", path) for path in ROUTES | CLOSED}
    assert not ROUTES & CLOSED
    control = {path for _, path in flowers_routes if path.startswith("/v1/control/")}
    runtime = {path for _, path in flowers_routes if path.startswith("/v1/runtime/")}
    assert "/v1/control/start-run" in control
    assert "/v1/runtime/acquire-task" in runtime
    assert len(control) > 40
    assert len(runtime) > 10


def test_the_coordinator_listens_at_one_port_and_a_silo_at_none(served: Served) -> None:
    _, port = served.address
    link = served.link
    assert {process: listening(process) for process in served.processes} == {
        os.getpid(): set(),
        link: {port},
        served.silo.carrier.number: set(),
    }
    assert {process: len(sockets(process)) for process in served.processes} == {
        os.getpid(): 4,  # submissions, the guard, and what each of the two says of itself
        link: 1,
        served.silo.carrier.number: 0,
    }
    for process in served.processes:
        for path in sockets(process):
            shared = process == link and served.party.link.number is None
            assert stat.S_IMODE(path.stat().st_mode) == (0o660 if shared else 0o600)
            assert stat.S_IMODE(path.parent.stat().st_mode) == (0o750 if shared else 0o700)


def test_a_stranger_gets_nothing_at_any_route(served: Served, flowers_routes: set[tuple[str, str]]) -> None:
    before = served.state()
    unknown = ec.generate_private_key(ec.SECP384R1())
    member, other = (node_key(path) for path in served.made.provisioned.silos[:2])
    others_public = public_key_to_bytes(other.public_key())
    (online,) = (node for node, status in before[1].items() if status == "online")
    body = PullMessagesRequest(node=NodeMessage(node_id=online)).SerializeToString()
    strangers = {
        "nothing": {},
        "made up": {"flwr-public-key": "AAAA", "flwr-timestamp": "now", "flwr-signature": "AAAA"},
        "an unlisted key": signed(unknown),
        "a member's public key": signed(unknown, public_key_to_bytes(member.public_key())),
        "another member's key": signed(other),
        "an old signature": signed(member, age=3600.0),
        "a signature of another member": signed(member, others_public),
    }
    for method, path in sorted(flowers_routes | {("POST", route) for route in ROUTES}):
        public = method == "POST" and path in ROUTES
        for who, headers in strangers.items():
            if not public and who not in ("nothing", "another member's key"):
                continue
            status = ask(served, path, body, headers, method)
            assert status == (401 if public else 404), (who, method, path, status)
    long = {"content-length": str(SMALL_BODY + 1)}
    for who in strangers.keys() - {"another member's key"}:  # who may send a letter, and not as this member
        assert ask(served, PUSH, headers=strangers[who] | long) == 413, who
    assert ask(served, PUSH, bytes(SMALL_BODY + 1), signed(member)) not in (408, 413)
    assert ask(served, PUSH, headers=signed(member) | {"content-length": str(LARGEST_BODY + 1)}) == 413
    activate = ActivateNodeRequest(
        public_key=public_key_to_bytes(unknown.public_key()), heartbeat_interval=30
    )
    status = ask(served, "/v1/fleet/activate-node", activate.SerializeToString(), signed(unknown))
    assert status == 412  # Flower's own answer to a key that proves itself and is not registered
    assert served.state() == before


@pytest.mark.parametrize(
    "path",
    [
        "//v1/control/start-run",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..;/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull%2Dmessages",
        "/v1/fleet/pull-messages?x=1",
        "/v1/fleet/pull-messages;x",
        "/V1/FLEET/PULL-MESSAGES",
        "/v1/runtime/acquire-task%00",
        "http://127.0.0.1/v1/control/start-run",
        "http://127.0.0.1/v1/fleet/pull-messages",
        "/docs",
        "/openapi.json",
        "/health",
        "/",
        "*",
    ],
)
def test_another_spelling_of_a_path_is_another_path(served: Served, path: str) -> None:
    assert ask(served, path) == 404


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "post"])
def test_another_method_is_another_route(served: Served, method: str) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert ask(served, "/v1/fleet/pull-messages", method=method) in (400, 404)
    assert ask(served, "/v1/fleet/pull-messages", method=method, headers=upgrade) in (400, 404)


def test_a_long_body_is_refused_unread(served: Served) -> None:
    headers = {"content-length": str(SMALL_BODY + 1)}
    for path in ("/v1/fleet/pull-messages", PUSH):
        assert ask(served, path, headers=headers) == 413


def foreign_app(folder: Path, marker: Path, secret: Path) -> Path:
    """An app whose server would copy the coordinator's identity key as soon as it is imported."""
    app = folder / "foreign"
    (app / "foreign").mkdir(parents=True)
    (app / "foreign" / "server.py").write_text(
        f"from flwr.serverapp import ServerApp\nopen({str(marker)!r}, 'w').write(open({str(secret)!r}).read())\n"
        "app = ServerApp()\n\n@app.main()\ndef main(grid, context):\n    pass\n"
    )
    (app / "foreign" / "client.py").write_text("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    (app / "pyproject.toml").write_text(
        '[project]\nname = "foreign"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "foreign"\n[tool.flwr.app.components]\n'
        'serverapp = "foreign.server:app"\nclientapp = "foreign.client:app"\n'
    )
    return app


def test_a_stranger_starts_no_run_and_runs_no_code(
    served: Served, stranger: Stranger, tmp_path: Path
) -> None:
    """``flwr run``, ``flwr list`` and ``flwr supernode list`` with host, port and the public certificate."""
    before, marker = served.state(), tmp_path / "marker"
    app = foreign_app(tmp_path, marker, served.made.provisioned.coordinator / "identity.key")
    host, port = served.address
    (stranger.home / "config.toml").write_text(
        f'[superlink]\ndefault = "there"\n[superlink.there]\naddress = "{host}:{port}"\n'
        f'root-certificates = "{served.made.provisioned.silos[0] / "ca.crt"}"\ninsecure = false\n'
    )
    for command in (["run", str(app), "there"], ["list", "there"], ["supernode", "list", "there"]):
        status, said = stranger.asks(*command)
        assert status != 0, said
        assert "404 Not Found" in said
    assert served.state() == before
    assert not marker.exists()


def started(served: Served, content: bytes) -> int:
    """Start a run as who can open the link's own socket."""
    fab = Fab(Bundle(content).digest, content, {})
    run = served.party._tasks._control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
    assert run
    return int(run)


def status_of(served: Served, run: int) -> str:
    found = served.party._tasks._control.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
    return f"{found.status}:{found.sub_status}"


def test_a_task_that_waits_is_no_strangers(served: Served) -> None:
    """The poller that won a task's token: 404 at the public door, 401 at the private one without the secret."""
    run = started(served, Bundle.build().content)
    request = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    for _ in range(20):
        assert ask(served, "/v1/runtime/acquire-task", request.SerializeToString()) == 404
    tasks = served.party._tasks
    import httpx

    without = tasks._reaching(RuntimeHttpClient("http://link"))
    with contextlib.closing(without), pytest.raises(httpx.HTTPStatusError, match="401"):
        without.AcquireTask(request)
    assert status_of(served, run).startswith("pending")
    assert tasks._token(run)


def test_a_task_that_the_link_took_back_ends_no_run_of_ours(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the link was too busy to take signs of life for a minute: another task follows."""
    tasks, known = served.party._tasks, list[int]()
    party: Any = SimpleNamespace(is_finished=False)

    def carried(post: MessageQueue, *_: Any) -> tuple[str, ...]:
        known.append(len(post.get_nodes()))
        party.is_finished = len(known) == 2
        for run in () if party.is_finished else served.state()[0]:
            tasks._control.StopRun(StopRunRequest(run_id=run))
        post.get_nodes()
        return ("north",)

    monkeypatch.setattr("fedveil.flower.coordinator_host.service.carry_messages", carried)
    assert served.party._carry(party) == ("north",)
    assert known[0] == known[1] > 0
    assert "the link has taken the task back" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a pattern library, in Flower's own bundling
def test_a_run_of_another_app_is_ended_unplayed(served: Served, tmp_path: Path) -> None:
    """Even who reaches the private socket gets no code run: the coordinator plays the run that it started itself."""
    from flwr.cli.build import build_fab_from_disk

    marker = tmp_path / "marker"
    foreign = build_fab_from_disk(foreign_app(tmp_path, marker, tmp_path / "nothing"))
    before = started(served, foreign)
    with served.party._tasks.playing() as post:
        assert list(post.get_nodes())
    assert status_of(served, before) == "finished:stopped"
    tasks = served.party._tasks
    again = started(served, foreign)
    client = tasks._holding(tasks._token(again))
    with contextlib.closing(client), pytest.raises(ForeignBundleError, match="is not run"):
        tasks._begin(client, again)
    assert not marker.exists()


def test_a_message_that_holds_its_letter_is_answered_and_forgotten_with_its_run(served: Served) -> None:
    """The way of every letter: in its message, through both doors, kept waiting for and not looked for."""
    (online,) = (node for node, status in served.state()[1].items() if status == "online")
    with served.party._tasks.playing() as post:
        message = Message(pack_message(b"no letter"), dst_node_id=online, message_type="query")
        (key,) = post.push_messages([message])
        answers = next(found for found in (post.pull_messages([key]) for _ in range(60)) if found)
        assert post.pull_messages([]) == []
    (answer,) = answers
    assert answer.metadata.reply_to_message_id == key
    assert answer.error.reason == "the silo did not answer this letter"  # its guard has read and refused it


def test_the_bundle_holds_no_code_and_is_the_same_wherever_it_is_built() -> None:
    import io
    import zipfile

    bundle = Bundle.build()
    assert bundle.digest == Bundle.build().digest
    with zipfile.ZipFile(io.BytesIO(bundle.content)) as archive:
        assert set(archive.namelist()) == {"pyproject.toml"}
    bundle.check(bundle.content)
    for wrong in (bundle.content + b"\0", bundle.content[:-1], b""):
        with pytest.raises(ForeignBundleError):
            bundle.check(wrong)


def test_what_is_submitted_and_is_no_run_ends_and_harms_nobody(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = CoordinatorFolder(served.made.provisioned.coordinator)
    for _ in range(2):
        with Submission(home, tmp_path / "none") as submission:
            assert not submission.lasts(60.0)
            end = submission.end()
            assert end is not None
            assert str(tmp_path / "none") in str(end.error)  # there is no folder to say it in
    assert str(tmp_path / "none") in caplog.text
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address(home / "run" / "party"))
        send_frame(connection, b"[]")
        assert connection.recv(1) == b""


def test_no_proxy_of_the_environment_comes_between_party_and_link(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = served.party._tasks._reaching(ControlHttpClient("http://link"))
    with contextlib.closing(client):
        assert set(client.ListRuns(ListRunsRequest()).run_dict) == served.state()[0]


def test_another_user_of_a_partys_host_opens_no_socket(served: Served) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    found = [path for process in served.processes for path in sockets(process)]
    assert len(found) == 5
    opened = {parent for path in found for parent in path.parents if parent.is_dir()}
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in opened}
    own = [sys.executable, "-S", "-c", LOCAL_USER]
    try:
        assert [subprocess.run([*own, str(path)], check=False).returncode for path in found] == [0] * 5
        for parent, mode in modes.items():
            parent.chmod(mode | 0o055)  # the sockets' own mode must do
        assert [subprocess.run([*own, str(path)], check=False).returncode for path in found] == [0] * 5
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)


def test_the_links_user_reads_nothing_of_the_coordinator(served: Served) -> None:
    """Who breaks into the process that speaks with the network has no identity key, no run folder and no ledger."""
    if served.party.link.number is not None:
        pytest.skip("becoming another user needs root")
    status = Path(f"/proc/{served.link}/status").read_text().splitlines()
    users = {line.split()[0]: set(line.split()[1:]) for line in status if line.startswith(("Uid:", "Gid:"))}
    assert users == {"Uid:": {str(OTHER_USER)}, "Gid:": {str(OTHER_USER)}}
    coordinator = served.made.provisioned.coordinator
    opened = {parent for parent in (coordinator, *coordinator.parents) if parent.is_dir()}
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in opened}
    secrets = [str(coordinator / "identity.key"), str(coordinator / "run" / "party")]
    try:
        for parent, mode in modes.items():
            parent.chmod(mode | 0o055)  # the file's own mode must do
        tried = [sys.executable, "-S", "-c", LINKS_USER, *secrets]
        assert subprocess.run(tried, check=False).returncode == 0
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)
    held = {int(name) for name in os.listdir(f"/proc/{served.link}/fd")}
    names = [os.readlink(f"/proc/{served.link}/fd/{number}") for number in held]
    assert not [name for name in names if str(coordinator) in name]


def test_what_processes_are_told_stands_where_nobody_else_reads(served: Served) -> None:
    secret = served.party.link.secret.hex().encode()
    for process in served.processes:
        folder = Path(f"/proc/{process}")
        assert secret not in (folder / "cmdline").read_bytes()
        assert secret not in (folder / "environ").read_bytes()


def test_what_speaks_with_the_network_reads_no_table_and_trains_nothing(served: Served) -> None:
    """Link and carrier run neither PyTorch nor what reads tables; the parties do."""
    loaded = [Path(f"/proc/{process}/maps").read_text() for process in served.processes]
    assert ["libtorch" in maps for maps in loaded] == [True, False, False]
    assert not any("pyarrow" in maps for maps in loaded[1:])


def test_a_party_is_served_once(served: Served) -> None:
    with pytest.raises(ConfigError, match="served already"):
        CoordinatorService(CoordinatorFolder(served.made.provisioned.coordinator))
    with pytest.raises(ConfigError, match="served already"):
        SiloService(SiloFolder(served.made.provisioned.silos[0]))


def test_a_child_ends_with_a_parent_that_is_killed(served: Served, tmp_path: Path) -> None:
    import signal
    import time

    parent = (
        "import sys, json, time\nfrom fedveil.flower.child_process import ChildProcess\n"
        "child = ChildProcess(sys.argv[1], json.loads(sys.argv[2]), {})\n"
        "print(child.number, flush=True)\ntime.sleep(600)\n"
    )
    silo = served.made.provisioned.silos[1]
    told = {
        "folder": str(silo),
        "party": str(tmp_path),
        "coordinator": "127.0.0.1:9",
        "guard": str(tmp_path / "no"),
    }
    settings = json.dumps(told)
    started_by = [sys.executable, "-c", parent, "fedveil.flower.silo_host.node", settings]
    with subprocess.Popen(started_by, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_a_link_that_is_ended_leaves_no_socket_and_no_secret(tmp_path: Path) -> None:
    made = write_demonstration(tmp_path / "demo", port=free_port())
    home = CoordinatorFolder(made.provisioned.coordinator)
    link = AttachedLink(home)
    assert {path.name for path in (home.link / "run").iterdir()} == {DOOR, SECRET}
    link.stop()
    assert link.ended
    assert not list((home.link / "run").iterdir())


def test_a_child_is_not_started_by_hand() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from fedveil.flower.child_process import settings_of_parent as s; s(print)"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "fedveil coordinator" in done.stderr


def listening(process: int) -> set[int]:
    """The TCP ports at which a process listens, at whatever address."""
    found = set()
    inodes = own_sockets(process)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def sockets(process: int) -> list[Path]:
    """The Unix sockets at which a process listens; one without a file would have no mode."""
    found = []
    inodes = own_sockets(process)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & 0x10000:
            assert fields[7].startswith("/"), fields[7]
            found.append(Path(os.path.realpath(fields[7].replace("/proc/self/", f"/proc/{process}/"))))
    return found


def own_sockets(process: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)
            if name.startswith("socket:["):
                found.add(name[8:-1])
    return found


def connect(
    stranger: Stranger, served: Served, *, authority: Path | None, private: Path | None, public: Path | None
) -> str:
    """Ask for messages as a SuperNode does; return what it said."""
    files = ["" if path is None else str(path) for path in (authority, private, public)]
    host, port = served.address
    status, said = stranger.asks("connect", f"{host}:{port}", *files)
    assert (status == 0) == ("waiting:" in said)
    return said


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A node key that nobody registered."""
    path = tmp_path / "node.key"
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path


def test_a_member_connects(served: Served, stranger: Stranger) -> None:
    silo = served.made.provisioned.silos[1]
    said = connect(
        stranger, served, authority=silo / "ca.crt", private=silo / "node.key", public=silo / "node.key"
    )
    assert "waiting: None" in said


def test_a_coordinator_of_another_authority_is_not_believed(
    served: Served, stranger: Stranger, tmp_path: Path
) -> None:
    Authority.create("other").publish(tmp_path)
    key = served.made.provisioned.silos[1] / "node.key"
    said = connect(stranger, served, authority=tmp_path / "ca.crt", private=key, public=key)
    assert "certificate verify failed" in said


def test_nobody_speaks_without_tls(served: Served, stranger: Stranger) -> None:
    key = served.made.provisioned.silos[1] / "node.key"
    said = connect(stranger, served, authority=None, private=key, public=key)
    assert "Failed to initialize the connection" in said


def test_a_node_whose_key_is_not_registered_is_refused(
    served: Served, stranger: Stranger, unknown: Path
) -> None:
    said = connect(
        stranger,
        served,
        authority=served.made.provisioned.silos[0] / "ca.crt",
        private=unknown,
        public=unknown,
    )
    assert "Failed to activate SuperNode" in said


def test_nobody_registers_himself(served: Served, stranger: Stranger) -> None:
    said = connect(
        stranger, served, authority=served.made.provisioned.silos[0] / "ca.crt", private=None, public=None
    )
    assert "404 Not Found" in said


def test_a_members_public_key_is_not_enough(served: Served, stranger: Stranger, unknown: Path) -> None:
    silo = served.made.provisioned.silos[1]
    said = connect(stranger, served, authority=silo / "ca.crt", private=unknown, public=silo / "node.key")
    assert "401 Unauthorized" in said


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_silo_whose_clock_is_wrong_is_told_so_by_its_own_log(
    ahead: float, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The link takes no signature of another time; an answer of it says what its own time is."""
    import httpx
    from flwr.supernode import node_auth_http_interceptor as signing

    from fedveil.flower.silo_host import node

    true = time.time()
    silo = served.made.provisioned.silos[1]
    one = node.Node.from_folder(silo, "{}:{}".format(*served.address), lambda letter: letter)
    with monkeypatch.context() as wrong:
        wrong.setattr(signing, "now", lambda: now() + timedelta(seconds=ahead))
        with pytest.raises(httpx.HTTPStatusError, match="401") as refused:
            one.serve(lambda: True)
    monkeypatch.setattr(node, "time", SimpleNamespace(time=lambda: true + ahead))
    for answer in (
        refused.value.response,
        httpx.Response(401, headers={"date": "noon"}),
        httpx.Response(401),
    ):
        node.warn_refused(answer)
    _, told, *others = (one.getMessage() for one in caplog.records if one.name == "fedveil.silo")
    assert abs(float(told.split()[4]) - ahead) < 300
    assert len(others) == 2


@contextlib.contextmanager
def proxy(to: tuple[str, int] | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that takes CONNECT alone; yield its port and what was asked of it. With ``to`` it leads elsewhere."""
    asked: list[bytes] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def lead(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += connection.recv(1)
            asked.append(head.split(b"\r\n")[0])
            host, port = asked[-1].split()[1].rsplit(b":", 1)
            with socket.create_connection(to or (host.decode(), int(port))) as there:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=carry, args=(there, connection))
                back.start()
                carry(connection, there)
                back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=lead, args=(listening.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield listening.getsockname()[1], asked
        listening.shutdown(socket.SHUT_RDWR)
    accepting.join()


def test_a_silo_goes_through_the_proxy_of_its_environment_and_believes_no_other_authority(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from fedveil.flower.silo_host.node import Node

    silo, where = served.made.provisioned.silos[1], "{}:{}".format(*served.address)
    online = list(served.state()[1].values()).count("online")
    found = list[int]()

    def seen() -> bool:
        found.append(list(served.state()[1].values()).count("online"))
        return True

    with proxy() as (port, asked):
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        Node.from_folder(silo, where, lambda letter: letter).serve(seen)
        assert set(asked) == {f"CONNECT {where} HTTP/1.1".encode()}
        assert found == [online + 1]
        before = len(asked)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        Node.from_folder(silo, where, lambda letter: letter).serve(seen)
        assert len(asked) == before
        monkeypatch.delenv("NO_PROXY")
    other = Authority.create("other")
    other.save(tmp_path, None)
    issue(other, tmp_path, served.address[0])
    served_by = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served_by.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with (
        socket.create_server(("127.0.0.1", 0)) as plain,
        served_by.wrap_socket(plain, server_side=True) as false,
    ):

        def shake() -> None:
            with contextlib.suppress(OSError):
                false.accept()

        shaking = threading.Thread(target=shake)
        shaking.start()
        with proxy(false.getsockname()) as (port, asked):
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                Node.from_folder(silo, where, lambda letter: letter).serve(lambda: True)
            assert asked
        shaking.join()

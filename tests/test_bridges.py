"""What a bridge is made of: apps and jobs that need no fedveil, a silo that opens one socket to a group."""

from __future__ import annotations

import ast
import grp
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.deployment import write_flower_app, write_nvflare_job
from fedveil.federation.hosts.folders import SiloFolder, SiloSettings
from fedveil.federation.hosts.metrics_server import as_metrics, ask_party
from fedveil.federation.hosts.silo_checks import try_coordinator
from fedveil.federation.hosts.silo_service import SiloService
from fedveil.federation.hosts.sockets import free_port
from fedveil.federation.hosts.status import BridgeConnection
from fedveil.federation.transport.bridge import Bridge, ask_key_process
from tests.processes import tree
from tests.source import parsed, walked

SOURCE = Path(__file__).parents[1] / "src" / "fedveil" / "federation" / "transport"
SOCKET = Path("/srv/fedveil/coordinator/link/run/bridge")


@pytest.mark.parametrize("path", sorted(SOURCE.glob("bridge*.py")), ids=lambda path: path.stem)
def test_a_bridges_modules_import_no_other_of_fedveil(path: Path) -> None:
    """So an app or a job has all its code, and who runs it has none of fedveil's."""
    systems = {"bridge_flower": {"flwr"}, "bridge_nvflare": {"nvflare"}}.get(path.stem, set())
    for node in walked(parsed(path)):
        if isinstance(node, ast.Import):
            assert all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            own = node.level == 1 and module == "bridge"
            assert own or (node.level == 0 and module in systems | set(sys.stdlib_module_names)), module


def test_flowers_public_names_alone_are_used() -> None:
    modules = {
        node.module
        for node in walked(parsed(SOURCE / "bridge_flower.py"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr")
    }
    assert modules == {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def test_a_flower_app_is_complete(tmp_path: Path) -> None:
    written = write_flower_app(tmp_path / "app", SOCKET)
    assert {str(path.relative_to(tmp_path / "app")) for path in written} == {
        "pyproject.toml",
        "fedveil_bridge/__init__.py",
        "fedveil_bridge/bridge.py",
        "fedveil_bridge/bridge_flower.py",
    }
    app = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == {"bridge": str(SOCKET), "idle-seconds": 3600.0}
    loaded = (
        "import sys, fedveil_bridge.bridge_flower as app; app.server, app.client; "
        "assert 'fedveil' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", loaded], env={"PYTHONPATH": str(tmp_path / "app")}, check=True
    )
    with pytest.raises(ConfigError, match=r"pyproject\.toml: exists already"):
        write_flower_app(tmp_path / "app", SOCKET)


@pytest.mark.parametrize("installed", [False, True])
def test_an_nvflare_job_has_code_only_if_fedveil_is_not_installed(tmp_path: Path, installed: bool) -> None:
    written = write_nvflare_job(tmp_path / "job", SOCKET, {"site-1": "north"}, installed=installed)
    assert any("custom" in path.parts for path in written) is not installed
    documents = {path.name: json.loads(path.read_text()) for path in written if path.suffix == ".json"}
    package = "fedveil.federation.transport" if installed else "fedveil_bridge"
    (server,) = documents["config_fed_server.json"]["workflows"]
    assert server["path"] == f"{package}.bridge_nvflare.ServerBridge"
    assert server["args"] == {"bridge": str(SOCKET), "silos": {"site-1": "north"}, "idle_seconds": 3600.0}
    (site,) = documents["config_fed_client.json"]["executors"]
    assert site["executor"] == {"path": f"{package}.bridge_nvflare.SiteBridge", "args": {}}
    assert documents["meta.json"]["deploy_map"] == {"app": ["server", "site-1"]}


def test_a_socket_that_is_no_whole_path_is_refused(tmp_path: Path) -> None:
    for write in (write_flower_app, lambda *given: write_nvflare_job(*given, {}, installed=False)):
        with pytest.raises(ConfigError, match=r"--bridge run/bridge: the whole path"):
            write(tmp_path / "app", Path("run/bridge"))
    assert list(tmp_path.iterdir()) == []


def test_a_group_is_for_a_bridge_and_one_of_this_host(tmp_path: Path) -> None:
    path = tmp_path / "silo.toml"
    (tmp_path / "membership.toml").touch()

    def write(**more: str) -> None:
        settings = {"name": "north", "coordinator": "learn.example.org:9443", **more}
        path.write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items()))

    outside = str(tmp_path.parent / "socket")
    for more in (
        {},
        {"socket": outside},
        {"carrier": "bridge"},
        {"carrier": "bridge", "socket": "run/guard"},
    ):
        write(group="staff", **more)
        with pytest.raises(ConfigError, match=r'group: needs carrier = "bridge" and a whole path as socket'):
            SiloSettings.read(path)
    write(carrier="bridge", socket=str(tmp_path / "run" / "guard"), group="staff")
    with pytest.raises(ConfigError, match=r"silo\.toml: socket: in the silo's folder"):
        _ = SiloFolder(tmp_path).group
    write(carrier="bridge", socket=outside, group="no such group")
    with pytest.raises(ConfigError, match=r"silo\.toml: group: this host has no group 'no such group'"):
        _ = SiloFolder(tmp_path).group


def test_a_bridged_silo_has_one_process_and_a_socket_for_a_group(tmp_path: Path) -> None:
    made = write_demonstration(tmp_path / "demo", port=free_port())
    folder = SiloFolder(made.provisioned.silos[0])
    group, guard = grp.getgrgid(os.getgid()), tmp_path / "guard"
    changed = {"carrier": "bridge", "group": group.gr_name, "socket": guard}
    folder.settings.model_copy(update=changed).write(folder / "silo.toml")
    guard.write_text("a file of the operator's")
    with pytest.raises(ConfigError, match=r"guard: a file that is no socket"):
        SiloService(folder)
    guard.unlink()
    before = tree(os.getpid())
    service = SiloService(folder)
    try:
        assert tree(os.getpid()) == before
        assert (guard.stat().st_mode & 0o777, guard.stat().st_gid) == (0o660, group.gr_gid)
        assert {path.stat().st_mode & 0o077 for path in (folder.path, folder / "run")} == {0}
        assert ask_party(folder.path, "/ready") == (200, "OK")
        unheard = '{"carrier": "bridge", "last_contact_seconds": null}'
        assert ask_party(folder.path, "/connection") == (200, unheard)
        metrics = ask_party(folder.path, "/metrics")
        assert metrics is not None
        assert "fedveil_connected" not in metrics[1]
        with pytest.raises(OSError, match=r"did not answer the message"):
            ask_key_process(str(guard), b"no message of the coordinator's")
        assert ask_party(folder.path, "/connection") == (200, unheard)
        assert try_coordinator(folder).findings["connection"].startswith("made by a bridge")
    finally:
        service.stop()


def test_the_last_contact_of_a_bridge_is_told() -> None:
    now = [10.0]
    connection = BridgeConnection(lambda: now[0])
    connection.note_contact()
    now[0] = 14.25
    assert connection.facts() == {"carrier": "bridge", "last_contact_seconds": 4.2}
    status = {"role": "silo", "version": "1", "served": True, "membership": 1, "certificate_days": 5.0}
    assert "fedveil_last_contact_seconds 4.2\n" in as_metrics(status | {"connection": connection.facts()})


def test_a_bridge_without_a_mailbox_tries_again_and_ends_at_once(tmp_path: Path) -> None:
    bridge = Bridge(str(tmp_path / "none"), pause=0.01)
    bridge.add("north", lambda message: message)
    assert bridge.idle_seconds() < 60
    bridge.close()
    with pytest.raises(OSError, match=r"No such file"):
        ask_key_process(str(tmp_path / "none"), b"anything")

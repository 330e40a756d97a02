"""Who is no member of a federation does not get past a real SuperLink under TLS: another authority, key, or none."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.flower_nodes import free_port
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedveil.flower.certificates import Authority
from fedveil.flower.demonstration import Demonstration, write_demonstration
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.processes import register_nodes, start_superlink

# What a SuperNode does first, in a process of its own: Flower ends the one whose node is not known.
CLIENT = """\
import sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supernode.fleet_http_connection import http_request_response

address, authority, private, public = sys.argv[1:]
keys = tuple(load_ssh_private_key(Path(path).read_bytes(), None) for path in (private, public) if path)
keys = (keys[0], keys[1].public_key()) if keys else None
certificates = Path(authority).read_bytes() if authority else None
with http_request_response(address, not authority, certificates, keys, max_retries=0, max_wait_time=5.0) as link:
    print("waiting:", link[1]())
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demonstration]:
    """A federation whose SuperLink runs and knows the node keys of its silos."""
    pytest.importorskip("flwr")
    port = free_port()
    federation = write_demonstration(tmp_path_factory.mktemp("strangers") / "demo", port=port)
    home = CoordinatorFolder(federation.founded.coordinator)
    link = start_superlink(home, output=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not listens(port):
            assert time.monotonic() < until
            time.sleep(0.2)
        register_nodes(home)
        yield federation
    finally:
        link.terminate()
        link.wait()


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def connect(made: Demonstration, *, authority: Path | None, private: Path | None, public: Path | None) -> str:
    """Ask for messages as a SuperNode does; return what it said."""
    settings = CoordinatorFolder(made.founded.coordinator).settings
    files = ["" if path is None else str(path) for path in (authority, private, public)]
    address = f"{settings.host}:{settings.port}"
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, address, *files],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode == 0) == ("waiting:" in done.stdout)
    return done.stdout + done.stderr


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A node key that nobody registered."""
    path = tmp_path / "node.key"
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path


def test_a_member_connects(made: Demonstration) -> None:
    silo = made.founded.silos[0]
    said = connect(made, authority=silo / "ca.crt", private=silo / "node.key", public=silo / "node.key")
    assert "waiting: None" in said


def test_a_coordinator_of_another_authority_is_not_believed(made: Demonstration, tmp_path: Path) -> None:
    Authority.create("other").publish(tmp_path)
    key = made.founded.silos[0] / "node.key"
    said = connect(made, authority=tmp_path / "ca.crt", private=key, public=key)
    assert "certificate verify failed" in said


def test_nobody_speaks_without_tls(made: Demonstration) -> None:
    key = made.founded.silos[0] / "node.key"
    said = connect(made, authority=None, private=key, public=key)
    assert "Failed to initialize the connection" in said


def test_a_node_whose_key_is_not_registered_is_refused(made: Demonstration, unknown: Path) -> None:
    said = connect(made, authority=made.founded.silos[0] / "ca.crt", private=unknown, public=unknown)
    assert "Failed to activate SuperNode" in said


def test_nobody_registers_himself(made: Demonstration) -> None:
    said = connect(made, authority=made.founded.silos[0] / "ca.crt", private=None, public=None)
    assert "All SuperNodes must be registered" in said


def test_a_members_public_key_is_not_enough(made: Demonstration, unknown: Path) -> None:
    silo = made.founded.silos[0]
    said = connect(made, authority=silo / "ca.crt", private=unknown, public=silo / "node.key")
    assert "401 Unauthorized" in said

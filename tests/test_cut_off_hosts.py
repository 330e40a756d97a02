"""Two hosts, as network namespaces: a silo behind a cable that is cut for a while, and healed; and cut for good."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.privacy.ledger import read_entries
from tests.processes import FEDVEIL, Processes

HOST, FAR = "10.213.77.1", "10.213.77.2"
NAMESPACE, NEAR_END, FAR_END = "fedveil-far", "fedveil-near", "fedveil-end"
PORT = 19443
CUT_SECONDS = 10.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def far_host() -> Iterator[str]:
    """A network namespace with a cable to this one."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", NAMESPACE)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces may not be made here")
    try:
        ip("link", "add", NEAR_END, "type", "veth", "peer", "name", FAR_END, "netns", NAMESPACE)
        ip("address", "add", f"{HOST}/24", "dev", NEAR_END)
        ip("link", "set", NEAR_END, "up")
        ip("-n", NAMESPACE, "address", "add", f"{FAR}/24", "dev", FAR_END)
        ip("-n", NAMESPACE, "link", "set", FAR_END, "up")
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        yield NAMESPACE
    finally:
        ip("netns", "delete", NAMESPACE)


def wait_for_port() -> None:
    """Return once the coordinator listens, and the silos had some seconds to connect."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, PORT), timeout=2).close()
        except OSError:
            time.sleep(1)
        else:
            break
    time.sleep(15)


def column(run: Path, name: str) -> list[int]:
    """What metrics.jsonl says of every round so far."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line).get(name) for line in lines]


def recovering(experiment: Path) -> Path:
    """The same experiment, whose rounds go on without one of the four silos."""
    text = experiment.read_text().replace('"demonstration"\nrounds = 3', '"recovered"\nrounds = 2')
    text = text.replace(
        '"secure-aggregation"', '"secure-aggregation"\non_dropout = "recover"\nmax_dropouts = 1'
    )
    path = experiment.with_name("recovered.toml")
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_host_is_cut_off_and_waited_for_and_cut_off_and_left_behind(far_host: str, tmp_path: Path) -> None:
    made = write_demonstration(tmp_path / "demo", rounds=3, host=HOST, port=PORT)
    home = CoordinatorFolder(made.provisioned.coordinator)
    home.settings.model_copy(update={"resend_after_seconds": 30.0}).write(home / "coordinator.toml")
    *near, far = made.provisioned.silos
    with Processes() as processes:
        processes.start("coordinator", "serve", home.path)
        for path in near:
            processes.start("silo", "serve", path)
        processes.start("silo", "serve", far, by=["ip", "netns", "exec", far_host, *FEDVEIL])
        wait_for_port()
        submitted = processes.start("federation", "run", made.experiment, "--home", home.path)
        run = home / "runs" / "demonstration"
        deadline = time.monotonic() + 900
        while 1 not in column(run, "round"):
            assert time.monotonic() < deadline
            assert submitted.poll() is None
            time.sleep(0.5)
        ip("link", "set", NEAR_END, "down")
        time.sleep(CUT_SECONDS)
        before = column(run, "round")
        ip("link", "set", NEAR_END, "up")
        assert submitted.wait(900) == 0
        assert before[-1] < 3
        assert column(run, "round") == [0, 1, 2, 3]
        assert column(run, "summed")[1:] == [4, 4, 4]
        ip("link", "set", NEAR_END, "down")
        home.settings.model_copy(update={"drop_after_seconds": 20.0}).write(home / "coordinator.toml")
        again = processes.start("federation", "run", recovering(made.experiment), "--home", home.path)
        assert again.wait(900) == 0
        run = home / "runs" / "recovered"
        assert column(run, "round") == [0, 1, 2]
        assert column(run, "summed")[1:] == [3, 3]
        charged = {
            path.name: len(read_entries(path / "state" / "ledger.jsonl")) for path in made.provisioned.silos
        }
        assert charged == {path.name: 5 for path in near} | {far.name: 3}

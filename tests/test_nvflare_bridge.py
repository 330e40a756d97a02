"""A bridge in a deployment of NVFlare on this host (POC mode): an absent silo, kills, and a job after another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.federation.hosts.deployment import write_nvflare_job
from fedveil.federation.hosts.sockets import BRIDGE
from tests.bridges import program, started
from tests.contract.test_carriers import Carried, answers_of, collect, echo, play, served_answers
from tests.federation_world import World, asked, population
from tests.mailboxes import make_place

SITES = {"site-1": "silo-0", "site-2": "silo-1"}


class Deployment:
    """A server and sites of NVFlare, each a process that a test starts and ends.

    Args:
        folder: made here.
        sockets: folder of the key processes' sockets, by the sites' names.
    """

    def __init__(self, folder: Path, sockets: Path) -> None:
        self._nvflare = program("nvflare", "nvflare")
        folder.mkdir()
        self._folder, self._project = folder, folder / "poc" / "example_project" / "prod_00"
        self.environment = {
            "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
            "HOME": str(folder),
            "FEDVEIL_KEY_PROCESS": str(sockets / "{site}"),
            "PATH": f"{Path(self._nvflare).parent}:{os.environ['PATH']}",
        }
        self.ask("poc", "prepare", "-n", str(len(SITES)))

    def folder_of(self, name: str) -> Path:
        """Return the folder of the server or of a site."""
        return self._project / name

    def ask(self, *words: str, check: bool = True) -> str:
        """Run a command of NVFlare; return what it printed."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self._nvflare, *words],
            env=environment | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Start the server or a site."""
        script = self._project / name / "startup" / "sub_start.sh"
        return started(["bash", script], self._folder / f"{name}.log", self.environment)

    def submit(self, job: Path) -> str:
        """Submit a job, once the server takes it; return its number."""
        kit = str(self._project / "admin@nvidia.com")
        until = time.monotonic() + 200
        while True:
            printed = self.ask("job", "submit", "-j", str(job), "--startup-kit", kit, check=False)
            if found := re.search(r"[0-9a-f]{8}-[0-9a-f-]{27}", printed):
                return found[0]
            assert time.monotonic() < until, printed
            time.sleep(2.0)

    def abort(self, job: str) -> None:
        """Abort a job."""
        kit = str(self._project / "admin@nvidia.com")
        self.ask("job", "abort", job, "--startup-kit", kit, "--force")

    def kill_job(self, site: str) -> None:
        """Kill a site's process of the job."""
        assert self._kill_jobs(self._project / site), f"{site}: no process of a job"

    def close(self) -> None:
        """End what server and sites have left: the processes of a job outlive the site that started them."""
        self._kill_jobs(self._project)

    def _kill_jobs(self, folder: Path) -> bool:
        """Kill the processes of jobs below a folder; return whether there were any."""
        found = False
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
                if re.search(rb"worker_process|runner_process", words) and os.fsencode(folder) in words:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        return found


@contextlib.contextmanager
def answering(path: Path, world: World, silo: int, lock: threading.Lock) -> Iterator[None]:
    with served_answers(path, answers_of(world, silo, lock)):
        yield


@pytest.mark.slow
def test_a_run_outlives_absent_sites_and_jobs(tmp_path: Path) -> None:
    place = make_place(tmp_path / "place", len(SITES))
    (sockets := tmp_path / "sockets").mkdir()
    deployment = Deployment(tmp_path / "nvflare", sockets)
    write_nvflare_job(tmp_path / "job", place.folder / "link" / "run" / BRIDGE, SITES, installed=False)
    carried, lock = Carried(place), threading.Lock()
    carried.seconds = 200.0
    world = World(tmp_path / "world", asked(rounds=3), population(silos=len(SITES)))
    with contextlib.ExitStack() as ending:
        ending.callback(world.close)
        ending.callback(carried.close)
        ending.callback(deployment.close)
        ending.enter_context(deployment.start("server"))
        ending.enter_context(deployment.start("site-1"))
        with contextlib.ExitStack() as echoing:
            for site in SITES:
                echoing.enter_context(served_answers(sockets / site, echo))
            carried.coordinator.offer({0: b"to the first", 1: b"to the second"})
            job = deployment.submit(tmp_path / "job")
            assert collect(carried, {0}) == {0: b"to the first"}  # the second site is absent

            deployment.kill_job("site-1")
            deployment.abort(job)
            ending.enter_context(deployment.start("site-2"))
            time.sleep(20.0)  # the site is known to the server
            carried.coordinator.offer({0: b"again"})
            job = deployment.submit(tmp_path / "job")
            assert collect(carried, {0, 1}) == {0: b"again", 1: b"to the second"}

            times = []
            for number in range(20):
                began = time.monotonic()
                carried.coordinator.offer(dict.fromkeys(range(len(SITES)), b"%d" % number * 512))
                collect(carried, {0, 1})
                times.append(time.monotonic() - began)
            print(json.dumps({"exchange": sorted(times)}))
        for silo, site in enumerate(SITES):
            ending.enter_context(answering(sockets / site, world, silo, lock))
        ended = []

        def resubmit() -> None:
            if not ended:
                ended.append(job)
                deployment.abort(job)
                deployment.submit(tmp_path / "job")

        assert play(world, carried, resubmit, give_up_after=600.0) == ()
        assert ended == [job]
        world.assert_as_in_one_process()

"""What operators see and run: status, health, metrics, logs, exit codes, and the files of services."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

import fedveil
from fedveil import __version__
from fedveil.cli import app
from fedveil.errors import (
    BudgetError,
    BusyError,
    ConfigError,
    CoordinatorGoneError,
    FedveilError,
    HostError,
    IntegrityError,
    RefusedRunError,
    RunFolderError,
    SilentSiloError,
)
from fedveil.federation.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.federation.hosts.child_process import ProcessError
from fedveil.federation.hosts.deployment import (
    CONTAINERS,
    PACKAGES,
    REQUIREMENTS,
    SERVICES,
    Hosting,
    write_deployment,
)
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.metrics_server import MetricsServer, as_metrics
from fedveil.federation.hosts.sockets import (
    SOCKET,
    RunningFolder,
    RunOutcome,
    address,
    receive_frame,
    send_frame,
)
from fedveil.federation.hosts.status import party_status
from fedveil.federation.hosts.submission import Submission, read_document, wait
from fedveil.federation.silo_ledger import LEDGER
from fedveil.privacy.events import GaussianEvent, NoGuarantee
from fedveil.privacy.ledger import Ledger, Origin
from fedveil.protocols.refusals import RefusalError
from fedveil.run.folder.run_folder import RunFolder
from fedveil.sanitize import LogFormat, LogLevel, show_log
from tests.commands import ended
from tests.full_disks import Disk

IMAGE = "python:3.12-slim@sha256:" + "5e" * 32
ANSWERS: dict[str, Any] = {
    "host": "learn.example.org",
    "port": 9443,
    "link": 9443,
    "memory": "8G",
    "program": "/opt/fedveil/bin/fedveil",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Demonstration:
    return write_demonstration(tmp_path_factory.mktemp("operations") / "demo", rounds=3)


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app.app, [str(word) for word in words], catch_exceptions=False)


def test_a_party_tells_how_it_does(made: Demonstration) -> None:
    coordinator, silo = made.provisioned.coordinator, made.provisioned.silos[0]
    assert run("health", coordinator).exit_code == run("health", silo).exit_code == 1
    trouble = ["", "dns: the name of learn.example.org:9443 cannot be resolved"]
    connection = {"connected": False, "cause": trouble[1]}
    with (
        closing(RunningFolder(silo)) as running,
        closing(MetricsServer(running, None, lambda: trouble.pop(0), str, lambda: connection)),
    ):
        well, ill = run("health", silo), run("health", silo)
        assert (well.exit_code, well.output) == (0, "")
        assert (ill.exit_code, ill.output.strip()) == (1, connection["cause"])
        assert json.loads(run("status", silo, "--json").output)["cause"] == connection["cause"]
        assert run("health", coordinator).exit_code == 1
        status = json.loads(run("status", silo, "--json").output)
        assert (status["role"], status["served"], status["membership"]) == ("silo", True, 1)
    assert json.loads(run("status", silo, "--json").output)["served"] is False
    found = json.loads(run("status", coordinator, "--json").output)
    assert (found["role"], found["silos"], found["runs"]) == ("coordinator", 4, 0)
    assert 396 < found["certificate_days"] < 398
    assert run("health", made.provisioned.authority).exit_code == 1
    with pytest.raises(ConfigError, match="not a party's folder"):
        party_status(made.provisioned.authority, served=False)


def test_a_silo_tells_what_is_spent_and_no_count(made: Demonstration) -> None:
    path = made.provisioned.silos[1]
    with open_silo(SiloFolder(path)) as party:
        party._ledger.ledger.charge(
            run="run",
            round=1,
            attempt=0,
            event=GaussianEvent(noise_multiplier=5.0),
            budget=None,
            origin=Origin(terms="a" * 64, coordinator="b" * 64, membership=1, policy="c" * 64),
        )
        records = len(party._share.train)
    status = party_status(path, served=False)
    assert 0 < status["spent_ratio"] == status["spent_epsilon"] / status["allowed_epsilon"] < 1
    assert records > 100
    assert records not in status.values()
    assert set(status) == {
        *(
            "role",
            "served",
            "version",
            "membership",
            "valid_until",
            "fingerprint",
            "name",
            "certificate_days",
            "expires_first",
        ),
        *("allowed_epsilon", "delta", "ledger_head", "spent_epsilon", "spent_ratio"),
    }
    shown = run("status", path, "--metrics").output
    samples = dict(re.findall(r"^(fedveil_\w+)(?:\{[^}]*\})? (\S+)$", shown, re.MULTILINE))
    assert float(samples["fedveil_budget_spent_ratio"]) == pytest.approx(status["spent_ratio"])
    assert (samples["fedveil_served"], samples["fedveil_membership_serial"]) == ("0", "1")
    for line in shown.splitlines():
        assert re.fullmatch(
            r'# TYPE fedveil_\w+ gauge|fedveil_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-+.e\d]+', line
        )


def test_what_no_epsilon_bounds_is_above_every_alarm(made: Demonstration, tmp_path: Path) -> None:
    """A sample that is left out raises none: the silo that spent most would be the quiet one."""
    path = Path(shutil.copytree(made.provisioned.silos[0], tmp_path / "silo"))
    (path / "state").mkdir(exist_ok=True)
    with Ledger(path / "state" / LEDGER, unit="user") as ledger:
        ledger.charge(run="run", round=1, attempt=0, event=NoGuarantee(reason="no noise"))
    assert "\nfedveil_budget_spent_ratio +Inf\n" in as_metrics(party_status(path, served=False))


def test_the_figures_of_a_silo_are_the_same_over_other_records(made: Demonstration) -> None:
    path = made.provisioned.silos[0]
    table = path / str(SiloFolder(path).settings.table)
    before, lines = as_metrics(party_status(path, served=True)), table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[: len(lines) // 2]))
    try:
        assert as_metrics(party_status(path, served=True)) == before
    finally:
        table.write_text("".join(lines))


def test_logs_are_lines_of_json_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("fedveil")
    before = list(log.handlers), log.level
    log.handlers.clear()
    try:
        show_log(LogLevel.INFO, LogFormat.JSON)
        logging.getLogger("fedveil.silo").warning("a message\nof \x1b[31m%s", "somebody")
        logging.getLogger("fedveil.silo").debug("not shown")
        (line,) = capsys.readouterr().err.splitlines()
        found = json.loads(line)
        assert (found["level"], found["log"]) == ("warning", "fedveil.silo")
        assert "somebody" in found["message"]
        assert line.isascii()
        assert "\x1b" not in found["message"]
        show_log(LogLevel.INFO)
        logging.getLogger("fedveil.silo").warning("for people")
        assert capsys.readouterr().err.endswith("WARNING fedveil.silo: for people\n")
    finally:
        log.handlers[:], log.level = before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FedveilError, 2),
        (ConfigError, 2),
        (RefusedRunError, 3),
        (RefusalError, 3),
        (BudgetError, 4),
        (SilentSiloError, 5),
        (CoordinatorGoneError, 6),
        (IntegrityError, 7),
        (HostError, 74),
        (BusyError, 75),
    ],
)
def test_exit_codes_are_those_of_the_page(error: type[FedveilError], code: int) -> None:
    assert error.exit_code == code
    page = (Path(__file__).parents[1] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert f"\n| {code} | " in page


def is_restarted(unit: str, code: int) -> bool:
    """What systemd does with a service that ends with a code: the rules of Restart= in systemd.service(5)."""
    text = (Path(fedveil.__file__).parent / "deploy" / unit).read_text()
    (policy,) = re.findall(r"^Restart=(.*)$", text, re.MULTILINE)
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert policy == "on-failure"
    # Its own limit, 5 starts in 10 s, would let a disk that is full for a minute end the service for good.
    assert re.findall(r"^(?:RestartSec|StartLimitIntervalSec)=(.*)$", text, re.MULTILINE) == ["0", "5"]
    clean = code == 0 or -code in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
    return not clean and str(code) not in prevented.split()


def test_a_unit_is_restarted_after_what_may_pass_and_after_nothing_else(
    made: Demonstration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the codes that the program really gives."""
    silo = made.provisioned.silos[2]
    wrong = ended("silo", "serve", tmp_path).code
    with pytest.MonkeyPatch.context() as patched:
        disk = Disk(patched)
        disk.fill(lambda _: True)
        with disk.acting(True):
            full = ended("silo", "serve", silo).code
    with closing(RunningFolder(silo)):
        busy = ended("silo", "serve", silo).code
    assert (wrong, full, busy, ProcessError.exit_code) == (2, 74, 75, 74)
    for unit in ("fedveil-silo@.service", "fedveil-link.service", "fedveil-coordinator.service"):
        codes = (wrong, IntegrityError.exit_code, full, busy, ProcessError.exit_code, -signal.SIGKILL, 70, 0)
        found = [is_restarted(unit, code) for code in codes]
        assert found == [False, False, True, True, True, True, True, False], unit


def test_a_bug_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "app", Mock(side_effect=RuntimeError("nobody foresaw this")))
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 70
    assert "nobody foresaw this" in capsys.readouterr().err


def test_whoever_tidies_up_is_not_in_the_way_of_whoever_starts(made: Demonstration) -> None:
    """A child whose parent is gone has the lock for an instant; a party that starts then waits for it."""
    silo = made.provisioned.silos[2]
    (silo / "run").mkdir(exist_ok=True)
    descriptor = os.open(silo / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, os.close, (descriptor,))
    timer.start()
    running = RunningFolder(silo)
    with pytest.raises(BusyError, match="already served"):
        RunningFolder(silo)
    timer.join()
    running.close()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (b"", CoordinatorGoneError),
        (b'{"error": "No space left", "stopped": null, "silent": []}', RunFolderError),
        (b'{"error": null, "stopped": "silent for 900 s", "silent": ["va"]}', None),
    ],
)
def test_who_waits_for_a_run_is_told_within_a_second_how_it_ended(
    end: bytes, told: type[FedveilError] | None, made: Demonstration
) -> None:
    """Another process holds the coordinator's end of what was submitted, and is killed, or has no room for the end."""
    home = CoordinatorFolder(made.provisioned.coordinator)
    folder = RunFolder.create(home / "runs", read_document(made.experiment, home))
    (home / "run").mkdir(exist_ok=True)
    served: list[subprocess.Popen[bytes]] = []
    waits = threading.Event()

    def take() -> None:
        connection, _ = listening.accept()
        with connection:
            receive_frame(connection)
            send_frame(connection, b'{"before": 0}')
            served.append(subprocess.Popen(["sleep", "60"], pass_fds=[connection.fileno()]))
            waits.wait()
            if end:
                send_frame(connection, end)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address(home / "run" / SOCKET))
        listening.listen()
        taking = threading.Thread(target=take)
        taking.start()
        with Submission(home, folder.path) as submitted:
            assert submitted.lasts(0.05)
            waits.set()
            taking.join()
            served[0].kill()
            served[0].wait()
            killed = time.monotonic()
            if told is None:
                assert wait("fedveil go on", folder.path, submitted, lambda: None) == RunOutcome(
                    None, "silent for 900 s", ("va",)
                )
            else:
                with pytest.raises(told, match="No space left" if end else "start it again"):
                    wait("fedveil go on", folder.path, submitted, lambda: None)
            assert time.monotonic() - killed < 1
    (home / "run" / SOCKET).unlink()


# --- services ------------------------------------------------------------------------------------------------


def test_every_placeholder_is_filled_and_nothing_is_overwritten(tmp_path: Path) -> None:
    wheels(tmp_path / "deploy" / PACKAGES)
    made = write_deployment(tmp_path / "deploy", Hosting(**ANSWERS, image=IMAGE))
    assert {path.name for path in made} == {*SERVICES, *CONTAINERS, REQUIREMENTS}
    for path in made:
        assert not re.search(r"@[A-Z]+@", path.read_text()), path
    with pytest.raises(ConfigError, match="exists already"):
        write_deployment(tmp_path / "deploy", Hosting(**ANSWERS, image=IMAGE))
    for wrong, right in (
        ({"memory": "lots"}, "such as 8G"),
        ({"image": "python:3.12"}, "64 hexadecimal digits"),
    ):
        with pytest.raises(ConfigError, match=right):
            write_deployment(tmp_path / "wrong", Hosting(**ANSWERS | wrong))
    assert not (tmp_path / "wrong").exists()
    made = write_deployment(tmp_path / "hosts", Hosting(**ANSWERS))
    assert {path.name for path in made} == set(SERVICES)


def wheels(folder: Path, version: str = __version__) -> dict[str, str]:
    """Write wheels of fedveil and of what it needs in its place; return their digests."""
    folder.mkdir(parents=True)
    found = {}
    for name, needs in (("fedveil", "Requires-Dist: some-need; extra == 'federation'\n"), ("some_need", "")):
        path = folder / f"{name}-{version}-py3-none-any.whl"
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            extra = "Provides-Extra: federation\n" if needs else ""
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extra}{needs}"
            archive.writestr(f"{about}/METADATA", metadata)
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_a_container_is_built_of_the_wheels_beside_it_and_of_nothing_from_an_index(tmp_path: Path) -> None:
    """A name of this project that somebody else registered is asked of nobody; a base image is named by its digest."""
    folder = tmp_path / "deploy"
    digests = wheels(folder / PACKAGES)
    assert run("deploy", "write", folder, "--image", IMAGE).exit_code == 0
    assert (folder / REQUIREMENTS).read_text().splitlines() == [
        f"fedveil[federation]=={__version__} --hash=sha256:{digests['fedveil']}",
        f"some-need=={__version__} --hash=sha256:{digests['some_need']}",
    ]
    docker = (folder / "Dockerfile").read_text()
    installs = [line for line in docker.splitlines() if "install" in line]
    assert len(installs) == 1
    assert {"--no-index", "--require-hashes"} <= set(installs[0].split())
    assert re.findall(r"^FROM (\S+)", docker, re.MULTILINE) == [IMAGE, IMAGE]


@pytest.mark.slow
def test_pip_takes_those_wheels_and_no_other(tmp_path: Path) -> None:
    """By the command of the Dockerfile: the same wheels, one of them with another byte, one of them missing."""
    folder = tmp_path / "deploy"
    wheels(folder / PACKAGES)
    write_deployment(folder, Hosting(**ANSWERS, image=IMAGE))
    (command,) = re.findall(r"pip (install .*)$", (folder / "Dockerfile").read_text(), re.MULTILINE)
    asked = [*command.replace(" /", f" {folder}/").split(), "--target", str(tmp_path / "there")]

    def pip() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", *asked, "--upgrade"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert pip().returncode == 0
    need = folder / PACKAGES / f"some_need-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(need, "a") as archive:
        archive.writestr("some_need.py", "")
    changed = pip()
    assert changed.returncode != 0
    assert "DO NOT MATCH THE HASHES" in changed.stderr
    need.unlink()
    assert "No matching distribution found for some-need" in pip().stderr


@pytest.mark.parametrize("spoiled", ["no folder", "a source archive", "another version", "two versions"])
def test_packages_of_which_no_container_can_be_built_are_refused(spoiled: str, tmp_path: Path) -> None:
    folder, reason = tmp_path / "deploy", "one wheel of fedveil"
    if spoiled == "no folder":
        reason = "no such file"
    else:
        wheels(folder / PACKAGES, "0.0.1" if spoiled == "another version" else __version__)
    if spoiled == "a source archive":
        reason = "is no wheel"
        (folder / PACKAGES / "some-need-1.tar.gz").touch()
    if spoiled == "two versions":
        (folder / PACKAGES / f"fedveil-{__version__}-1-py3-none-any.whl").touch()
    with pytest.raises(ConfigError, match=reason):
        write_deployment(folder, Hosting(**ANSWERS, image=IMAGE))
    assert not (folder / "Dockerfile").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"host": "a\nb"},
        {"memory": "8G\nUser=root"},
        {"program": "fedveil; rm"},
        {"image": "python:3.12-slim"},
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        write_deployment(tmp_path / "deploy", Hosting(**(ANSWERS | change)))
    assert not (tmp_path / "deploy").exists()


def test_services_are_read_by_who_runs_them(tmp_path: Path) -> None:
    """Containers by their schema's words; units by systemd's own verifier, and the proxy by its own, where they are."""
    folder = tmp_path / "deploy"
    wheels(folder / PACKAGES)
    assert run("deploy", "write", folder, "--behind", "10.0.0.2:9443", "--image", IMAGE).exit_code == 0
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    assert set(compose) == {"services", "secrets"}
    for one in compose["services"].values():
        assert (one["read_only"], one["cap_drop"], one["mem_limit"]) == (True, ["ALL"], "8G")
        assert one["environment"]["CREDENTIALS_DIRECTORY"] == "/run/secrets"
        assert (one["ulimits"], one["memswap_limit"]) == ({"core": 0}, one["mem_limit"])  # no key on a disk
        assert all(set(secret) == {"source", "target"} for secret in one["secrets"])
        assert one["command"][:2] in (["coordinator", "serve"], ["silo", "serve"])
        assert {secret["source"] for secret in one["secrets"]} <= set(compose["secrets"])
    assert "ports" not in compose["services"]["silo"]
    docker = (folder / "Dockerfile").read_text().splitlines()
    assert "USER 10001" in docker
    assert docker[-1] == 'ENTRYPOINT ["fedveil"]'
    for path in folder.glob("*.service"):
        settings = dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))
        assert {"ProtectSystem", "NoNewPrivileges", "MemoryMax", "RestrictAddressFamilies"} <= set(settings)
        assert (settings["LimitCORE"], settings["MemorySwapMax"]) == ("0", "0")


def test_every_process_has_a_user_and_a_port_of_its_own(tmp_path: Path) -> None:
    """Who breaks into the link, or into a silo on the coordinator's host, is not the coordinator."""
    folder = tmp_path / "deploy"
    assert run("deploy", "write", folder).exit_code == 0
    users = {
        path.name: re.findall(r"^User=(.*)$", path.read_text(), re.MULTILINE)
        for path in folder.glob("*.service")
    }
    assert users == {
        "fedveil-coordinator.service": ["fedveil"],
        "fedveil-link.service": ["fedveil-link"],
        "fedveil-silo@.service": ["fedveil-%i"],
    }
    proxy = (folder / "nginx.conf").read_text()
    assert re.findall(r"(?:listen|proxy_pass) (?:127\.0\.0\.1:)?(\d+);", proxy) == ["9443", "9444"]
    with pytest.raises(ConfigError, match="HOST:PORT is needed"):
        run("deploy", "write", tmp_path / "other", "--behind", "10.0.0.2")
    with pytest.raises(ConfigError, match="at one port of this host"):
        write_deployment(tmp_path / "other", Hosting(link=9443))
    write_deployment(tmp_path / "other", Hosting(host="10.0.0.2", link=9443))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    folder = tmp_path / "deploy"
    write_deployment(folder, Hosting(**(ANSWERS | {"program": "/bin/true"})))
    for name in ("fedveil-link.service", "fedveil-coordinator.service", "fedveil-silo@north.service"):
        if "@" in name:
            shutil.copy(folder / "fedveil-silo@.service", folder / name)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(folder / name)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        own = [line for line in done.stderr.splitlines() if str(folder) in line or name in line]
        assert own == []


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_accepts_the_proxy(tmp_path: Path) -> None:
    """Also where the module that it needs is a package of its own, as Debian's is."""
    write_deployment(tmp_path / "deploy", Hosting())
    done = subprocess.run(
        [
            "nginx",
            "-t",
            "-e",
            "stderr",
            "-c",
            tmp_path / "deploy" / "nginx.conf",
            "-g",
            f"pid {tmp_path}/pid;",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def composer() -> list[str]:
    """The command of Docker Compose, of version 2 or 1; none where there is none."""
    found = ["docker", "compose"] if shutil.which("docker") else []
    if found and subprocess.run([*found, "version"], capture_output=True, check=False).returncode == 0:
        return found
    return ["docker-compose"] if shutil.which("docker-compose") else []


def test_compose_accepts_the_services(tmp_path: Path) -> None:
    command = composer()
    if not command:
        pytest.skip("Docker Compose is not installed")
    wheels(tmp_path / "deploy" / PACKAGES)
    write_deployment(tmp_path / "deploy", Hosting(**ANSWERS, image=IMAGE))
    asked = [*command, "-f", str(tmp_path / "deploy" / "compose.yaml"), "config", "--services"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"coordinator", "silo"}

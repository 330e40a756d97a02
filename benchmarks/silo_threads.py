"""Silos as threads, which fetch messages as a silo's network process does, and a coordinator as a process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedveil.errors import ProtocolError
from fedveil.federation.enrollment.demonstration import Demonstration
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.silo import SiloParty
from fedveil.federation.transport.https.silo_client import RetryPolicy, SiloClient, client_context
from fedveil.federation.transport.interface import AnswerMessage, NoAnswerError


def client_of(folder: SiloFolder, answer: AnswerMessage, retry: RetryPolicy = RetryPolicy()) -> SiloClient:  # noqa: B008
    """Return what fetches a silo's messages."""
    context = client_context(folder.path, folder.server_key)
    largest = folder.policy.max_message_bytes
    return SiloClient(folder.settings.coordinator, context, answer, largest, retry=retry)


def start(client: SiloClient, is_ending: Callable[[], bool]) -> threading.Thread:
    """Serve a silo in a thread."""
    thread = threading.Thread(target=client.serve, args=(is_ending,), daemon=True)
    thread.start()
    return thread


def _answered(party: SiloParty) -> AnswerMessage:
    def answer(message: bytes) -> bytes:
        try:
            return party.receive(message)
        except ProtocolError as error:
            raise NoAnswerError(str(error)) from error

    return answer


@contextlib.contextmanager
def connected(made: Demonstration, *, output: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Serve a federation: its coordinator is a process, which is yielded, and its silos are threads.

    Args:
        made: its folders.
        output: where the coordinator's messages go.
    """
    ended, coordinator = threading.Event(), served(made, output=output)
    parties: list[SiloParty] = []
    try:
        for folder in map(SiloFolder, made.provisioned.silos):
            parties.append(open_silo(folder))
            start(client_of(folder, _answered(parties[-1])), ended.is_set)
        yield coordinator
    finally:
        ended.set()
        for party in parties:
            party.close()
        with coordinator:
            coordinator.terminate()


def served(made: Demonstration, *, output: int | None = None) -> subprocess.Popen[str]:
    """Start ``fedveil coordinator serve``; return once it listens.

    Raises:
        RuntimeError: it ended instead.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "fedveil", "coordinator", "serve", str(made.provisioned.coordinator)],
        stdout=subprocess.PIPE,
        stderr=output,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "listening on" in line:
            return process
    with process:
        raise RuntimeError(f"the coordinator ended with exit code {process.wait()}")


def wait_for(path: Path, seconds: float = 600.0) -> None:
    """Return when a file is there.

    Raises:
        TimeoutError: it was not written in time.
    """
    begin = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{path} was not written")
        time.sleep(0.5)
    time.sleep(0.5)

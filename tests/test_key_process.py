"""The process with a silo's keys: what one that carries messages, and is broken into, can do to it by its socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from fedveil.errors import ProtocolError
from fedveil.federation.hosts.key_process import KeyProcess
from fedveil.federation.hosts.sockets import send_frame
from fedveil.federation.transport.interface import BEGINNING, LARGEST_OPENING
from tests.processes import ask


class Slow:
    """A silo that answers a message when it is let, and counts how often it has read one."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.read: list[bytes] = []

    def receive(self, message: bytes) -> bytes:
        self.read.append(message)
        assert self.let.wait(30)
        return b"answer to " + message

    def longest(self, beginning: bytes) -> int:
        return LARGEST_OPENING

    def in_progress_message(self, message: bytes) -> bytes:
        if message == b"forged":
            raise ProtocolError("not signed")
        return b"at work"

    def close(self) -> None:
        self.let.set()


def test_a_guard_at_work_says_so_and_reads_each_message_once(tmp_path: Path) -> None:
    silo = Slow()
    guard = KeyProcess(silo, tmp_path / "guard", sign_of_life=0.05)
    threading.Thread(target=guard.serve, daemon=True).start()
    path = tmp_path / "guard"
    for _ in range(3):
        assert ask(path, b"one") == b"at work"
    assert ask(path, b"two") == b"at work"  # of a coordinator that was started again, say
    with pytest.raises(ProtocolError):
        ask(path, b"forged")  # nobody else is told whether the silo works
    assert silo.read == [b"one"]
    silo.let.set()
    assert ask(path, b"two") == b"answer to two"
    assert ask(path, b"one") == b"answer to one"  # the silo itself repeats what it has answered
    assert silo.read == [b"one", b"two", b"one"]
    guard.close()


class Verbose(Slow):
    """A silo whose answers fill the buffers of a socket."""

    def receive(self, message: bytes) -> bytes:
        return message * (1 << 22)


def test_a_carrier_that_reads_no_answer_keeps_no_guard(tmp_path: Path) -> None:
    """What speaks with the network could leave an answer in the socket, and the guard waited for it without end."""
    path = tmp_path / "guard"
    guard = KeyProcess(Verbose(), path, question_seconds=0.2)
    threading.Thread(target=guard.serve, daemon=True).start()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        send_frame(silent, b"one")
        assert len(ask(path, b"two")) == 3 << 22
    guard.close()


def test_a_carrier_that_sends_a_byte_at_a_time_keeps_no_guard(tmp_path: Path) -> None:
    """Each byte came within the timeout of a single read, and the guard read no other message."""
    path = tmp_path / "guard"
    guard = KeyProcess(Verbose(), path, question_seconds=0.2)
    threading.Thread(target=guard.serve, daemon=True).start()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        with contextlib.suppress(OSError):
            for byte in (100).to_bytes(8, "big") + bytes(100):
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
        assert slow.recv(1) == b""  # the message came whole, and was not read any more
    assert len(ask(path, b"two")) == 3 << 22
    guard.close()


def test_the_time_for_a_message_is_that_of_its_own_length(tmp_path: Path) -> None:
    """It was that of the longest which its beginning allows: minutes for a message of some bytes."""
    path = tmp_path / "guard"
    guard = KeyProcess(Verbose(), path, question_seconds=0.2)
    threading.Thread(target=guard.serve, daemon=True).start()
    length, ended = BEGINNING + 40, False
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        slow.sendall(length.to_bytes(8, "big") + bytes(BEGINNING))
        try:
            for _ in range(40):  # 2 s, and the longest message may take 4 s
                time.sleep(0.05)
                slow.sendall(b"x")
            ended = slow.recv(1) == b""
        except ConnectionError:
            ended = True
    assert ended
    assert len(ask(path, b"two")) == 3 << 22
    guard.close()


class Forgetful(Verbose):
    """A silo without memory for its first message, as its policy limits it."""

    failures = 1

    def longest(self, beginning: bytes) -> int:
        self.failures -= 1
        if self.failures >= 0:
            raise MemoryError
        return LARGEST_OPENING


def test_a_message_that_memory_does_not_suffice_for_ends_no_guard(tmp_path: Path) -> None:
    """The thread that accepts ended with the error: the process lived, and answered nobody any more."""
    path = tmp_path / "guard"
    guard = KeyProcess(Forgetful(), path)
    threading.Thread(target=guard.serve, daemon=True).start()
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(path))
        first.settimeout(10)
        send_frame(first, b"one")
        with contextlib.suppress(ConnectionError):
            assert first.recv(1) == b""
    assert len(ask(path, b"two")) == 3 << 22
    guard.close()

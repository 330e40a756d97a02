"""Sockets of a party are closed to other users from their first moment, and leave the process as it was."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedveil.federation.hosts.sockets import accept_connections, listen


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("group", "expected"), [(None, 0o600), (os.getgid(), 0o660)])
def test_a_socket_opens_to_its_owner_and_group_alone(
    group: int | None, expected: int, tmp_path: Path
) -> None:
    with listen(tmp_path / "socket", group):
        assert mode(tmp_path / "socket") == expected


def test_sockets_that_open_at_once_change_no_permission_of_the_process(tmp_path: Path) -> None:
    """A umask is of the whole process: folders that were made meanwhile could not be entered, later ones neither."""

    def open_one(number: int) -> None:
        with listen(tmp_path / f"s{number}"):
            (tmp_path / f"f{number}").mkdir()

    (tmp_path / "before").mkdir()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(open_one, range(2000)))
    (tmp_path / "after").mkdir()
    assert {mode(path) for path in tmp_path.iterdir() if path.is_dir()} == {mode(tmp_path / "before")}


class NoDescriptorLeft(socket.socket):
    """A listening socket that cannot accept, for a while."""

    failures = 3

    def accept(self) -> tuple[socket.socket, Any]:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_party_without_a_free_descriptor_waits_and_accepts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key process, or a coordinator, whose training had all descriptors for a moment accepted nobody any more."""
    path, over = tmp_path / "socket", threading.Event()
    with (
        NoDescriptorLeft(fileno=listen(path).detach()) as listening,
        contextlib.closing(accept_connections(listening, over.is_set)) as accepted,
        socket.socket(socket.AF_UNIX) as connecting,
    ):
        connecting.connect(str(path))
        with next(accepted) as connection:
            connecting.sendall(b"x")
            assert connection.recv(1) == b"x"
        assert "a local connection was not accepted: Too many open files" in caplog.text
        threading.Timer(0.1, lambda: (over.set(), listening.shutdown(socket.SHUT_RDWR))).start()
        assert list(accepted) == []

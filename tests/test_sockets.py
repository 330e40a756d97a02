"""Sockets of a party are closed to other users from their first moment, and leave the process as it was."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedveil.federation.hosts.sockets import listen


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

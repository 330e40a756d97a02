"""Files of lines: whatever a crash leaves at their end, complete lines stay, and a torn one is never continued."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedveil.errors import RunFolderError
from fedveil.line_log import LineLog, Lines, split_lines
from fedveil.run.folder.documents import SCHEMA_VERSION, FailedAttempt, read_lines
from fedveil.run.folder.run_folder import RunFolder
from tests.federation_world import Killed, Moments

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LINES = [b"one", b"", b'{"three": 3}']


@pytest.fixture
def log(tmp_path: Path) -> LineLog:
    return LineLog(tmp_path / "lines", mode=0o600)


def test_a_line_counts_from_its_newline_on(log: LineLog) -> None:
    """The file is cut at every byte: complete lines are read, and the next append continues after them."""
    whole = b"".join(line + b"\n" for line in LINES)
    for length in range(len(whole) + 1):
        log.path.write_bytes(whole[:length])
        complete = LINES[: whole[:length].count(b"\n")]
        found = log.read()
        assert found.complete == complete
        assert b"".join(line + b"\n" for line in complete) + found.torn == whole[:length]
        log.append(b"next")
        assert log.read() == Lines([*complete, b"next"], b"")


def test_a_missing_file_has_no_lines_and_is_created_for_its_owner(log: LineLog) -> None:
    assert log.read() == split_lines(b"") == Lines([], b"")
    assert not log.mend()
    assert not log.path.exists()
    log.append(b"one", b"two")
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    log.replace([b"two"])
    assert (log.content(), stat.S_IMODE(log.path.stat().st_mode)) == (b"two\n", 0o600)


def test_garbage_within_the_file_is_left_to_the_reader_of_lines(log: LineLog) -> None:
    """Only the last line may be torn: other bytes are never dropped, and no character but a newline ends a line."""
    content = b"one\n\x00\xff\r\x0b\xe2\x80\xa8\n\ntwo\n"
    log.path.write_bytes(content)
    log.append(b"three")
    assert log.content() == content + b"three\n"
    assert log.read().complete == [b"one", b"\x00\xff\r\x0b\xe2\x80\xa8", b"", b"two", b"three"]


@pytest.mark.parametrize("locked", [False, True])
def test_a_torn_line_is_cut_off_or_ended(log: LineLog, locked: bool) -> None:
    log.path.write_bytes(b"one\ntw")
    if locked:
        log.lock()
    assert log.mend()
    assert log.content() == b"one\n"
    assert not log.mend()
    log.close()
    log.path.write_bytes(b"one\ntwo")
    if locked:
        log.lock()
    assert log.mend(keep=True)
    assert not log.mend(keep=True)
    assert log.read() == Lines([b"one", b"two"], b"")
    log.close()


def test_lines_are_flushed_before_the_name_of_a_new_file(
    log: LineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = list[tuple[int, bool]]()
    monkeypatch.setattr(
        os, "fsync", lambda at: flushed.append((log.path.stat().st_size, stat.S_ISDIR(os.fstat(at).st_mode)))
    )
    log.append(b"one")
    log.append(b"two")
    log.append(b"three", flush=False)
    assert flushed == [(4, False), (4, True), (8, False)]
    flushed.clear()
    log.path.write_bytes(b"one\ntw")
    log.append(b"three")
    assert flushed == [(4, False), (10, False)]  # the cut is durable before anything is written behind it


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_what_a_full_disk_did_not_take_is_taken_back(
    log: LineLog, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write = os.write
    log.append(b"one")

    def full(descriptor: int, *data: bytes) -> int:
        if step == "write" and len(data[0]) > 3:
            return write(descriptor, data[0][:3])
        raise FULL

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            log.append(b"another")
        assert log.content() == b"one\n"
        patched.setattr(os, "ftruncate", Mock(side_effect=FULL))  # not even that: what was whole stays whole
        with pytest.raises(OSError, match="No space left"):
            log.append(b"another")
        assert log.content().startswith(b"one\n")
    log.append(b"two")
    assert log.read().complete in ([b"one", b"two"], [b"one", b"another", b"two"])
    monkeypatch.setattr(os, "write", lambda at, data: write(at, data[:3]))
    log.append(b"in many pieces")
    assert log.read().complete[-2:] == [b"two", b"in many pieces"]


@pytest.mark.parametrize("begins_torn", [False, True])
def test_a_kill_at_any_write_loses_no_complete_line_and_leaves_a_file_that_goes_on(
    log: LineLog, monkeypatch: pytest.MonkeyPatch, begins_torn: bool
) -> None:
    moments = Moments(monkeypatch)
    for after in range(10):
        log.path.write_bytes(b"one\n" + b"torn" * begins_torn)
        kills = moments.kills
        try:
            moments.during(after, lambda: log.append(b"two", b"three"))
        except Killed:
            assert log.read().complete in ([b"one"], [b"one", b"two"], [b"one", b"two", b"three"])
            log.append(b"four")
            assert log.read().torn == b""
            assert (log.read().complete[0], log.read().complete[-1]) == (b"one", b"four")
        if moments.kills == kills:
            break
    assert moments.kills == 2 + begins_torn


def test_a_lock_that_is_given_up_within_a_moment_is_waited_for(log: LineLog) -> None:
    """A program that is being started holds the locks of the process that starts it, until it begins."""
    other = LineLog(log.path)
    other.lock()
    soon = threading.Timer(0.1, other.close)
    soon.start()
    log.lock()
    assert log.is_locked
    soon.join()
    log.close()


def test_a_lock_keeps_other_writers_out_until_it_is_closed(log: LineLog) -> None:
    other = LineLog(log.path)
    log.lock()
    log.append(b"one")
    with pytest.raises(RunFolderError, match="another process is writing this file"):
        other.lock()
    assert not other.is_locked
    waits = (
        "import sys; from pathlib import Path; from fedveil.line_log import LineLog\n"
        "log = LineLog(Path(sys.argv[1])); print(flush=True); log.lock(wait=True)\n"
        "log.append(log.read().complete[-1] + b'+')\n"
    )
    with subprocess.Popen([sys.executable, "-c", waits, log.path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        log.append(b"two")
        log.close()
        log.close()
        assert process.wait(60) == 0
    other.lock()
    assert other.read() == Lines([b"one", b"two", b"two+"], b"")
    other.close()


def test_a_locked_file_is_read_whatever_its_name_denotes_by_now(log: LineLog) -> None:
    log.append(b"one")
    log.lock()
    log.path.rename(log.path.with_name("moved"))
    log.path.write_bytes(b"theirs\n")
    assert log.read().complete == [b"one"]
    log.close()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_neither_read_nor_locked(log: LineLog, kind: str) -> None:
    log.path.mkdir() if kind == "folder" else os.mkfifo(log.path)
    for use in (log.read, log.lock):
        with pytest.raises(RunFolderError, match="lines"):
            use()


def test_a_failure_recorded_after_a_kill_within_the_last_record_is_read(tmp_path: Path) -> None:
    """Else the two would be one damaged line, and the run could not go on."""
    path = tmp_path / "attempts.jsonl"
    path.write_bytes(b'{"schema_version": 1, "round": 1, "att')
    for attempt in range(2):
        row = {"round": 1, "attempt": attempt, "silos": [0], "may_have_released": False}
        RunFolder(tmp_path).append(path.name, {"schema_version": SCHEMA_VERSION, **row})
    found, torn = read_lines(path, FailedAttempt)
    assert ([one.attempt for one in found], torn) == ([0, 1], False)

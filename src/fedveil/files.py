"""Files that are replaced whole and durably, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(target: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file by writing a temporary neighbour, flushing it to the disk and renaming it.

    Readers see the old or the new content, never half of one; after the return the new one survives a crash.

    Args:
        target: the file.
        content: what it shall hold.
        mode: permissions, before the umask.

    Raises:
        OSError: it could not be written; the old content is as it was.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What a silo keeps of a run on its disk, so that a restart repeats an answer instead of making another one.

The noisy sum of a round is written and fsynced before it leaves. Asked for the same round again, the silo sends the
same sum, under new masks where there are masks: the coordinator learns nothing new, and nothing is charged twice.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64
from safetensors.torch import save
from torch import Tensor

from fedveil.errors import RunFolderError
from fedveil.files import LARGEST_FILE, read_content, reading, replace_file, sync_folder

_NUMBERS: Final = b"FVS1"
_BYTES: Final = b"FVB1"
_HEADER: Final = struct.Struct(">4sI32s")
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True)
class ModelStore:
    """Where a silo keeps the last model of one run, for the run's owners to fetch.

    Attributes:
        folder: of all runs.
        run: 16 bytes, the run.
    """

    folder: Path
    run: bytes

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Replace the model, atomically and durably.

        Raises:
            RunFolderError: the disk is full, say.
        """
        path = self.folder / f"{self.run.hex()}.safetensors"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(
                path, save({name: value.contiguous() for name, value in tensors.items()}), mode=0o600
            )
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be written: {error.strerror}") from None


def _nothing() -> Float64[np.ndarray, " d"]:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answered:
    """The last round a silo answered.

    Attributes:
        round: its number.
        request: SHA-256 of what was asked: the experiment, all users' totals, the model and who takes part.
        vector: (d,) the noisy sum that was sent; empty where a channel makes bytes of it.
        coded: those bytes, and the key of the message.
    """

    round: int
    request: bytes
    vector: Float64[np.ndarray, " d"] = field(default_factory=_nothing)
    coded: bytes = b""


@dataclass(frozen=True)
class AnswerStore:
    """One file per run in a folder that only the silo reads."""

    folder: Path

    def read(self, run: bytes) -> Answered | None:
        """Return the last answer of a run, None before the first.

        Raises:
            RunFolderError: the file is damaged.
        """
        path = self._path(run)
        if not path.exists():
            return None
        content = read_content(path, RunFolderError, largest=LARGEST_FILE)
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if len(body) < _HEADER.size or hashlib.sha256(body).digest() != digest:
            raise RunFolderError(
                f"{path}: damaged; what was answered is unknown, so this run cannot go on here"
            )
        magic, number, request = _HEADER.unpack_from(body)
        if magic == _BYTES:
            return Answered(round=number, request=request, coded=body[_HEADER.size :])
        if magic != _NUMBERS:
            raise RunFolderError(f"{path}: written by another version; this run cannot go on here")
        with reading(path, RunFolderError):
            vector = np.frombuffer(body, dtype="<f8", offset=_HEADER.size).astype(np.float64)
            return Answered(round=number, request=request, vector=vector)

    def write(self, run: bytes, answered: Answered) -> None:
        """Replace the answer of a run, atomically and durably.

        Raises:
            RunFolderError: the disk is full, say; nothing may be sent.
        """
        magic, content = _NUMBERS, answered.vector.astype("<f8").tobytes()
        if answered.coded:
            magic, content = _BYTES, answered.coded
        body = _HEADER.pack(magic, answered.round, answered.request) + content
        path = self._path(run)
        try:
            self._replace(path, body + hashlib.sha256(body).digest())
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be written: {error.strerror}; nothing was sent") from None

    def secret(self, run: bytes) -> bytes:
        """Return 32 random bytes that stay the same for a run, made and kept when they are first asked for.

        Raises:
            RunFolderError: the file is damaged, or cannot be written.
        """
        path = self.folder / f"{run.hex()}.secret"
        try:
            content = read_content(path, RunFolderError) if path.exists() else b""
            if not content:
                content = os.urandom(_DIGEST_BYTES)
                self._replace(path, content)
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be kept: {error.strerror}") from None
        if len(content) != _DIGEST_BYTES:
            raise RunFolderError(f"{path}: damaged; this run cannot go on here")
        return content

    def _replace(self, path: Path, content: bytes) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700)
            sync_folder(self.folder.parent)
        replace_file(path, content, mode=0o600)

    def _path(self, run: bytes) -> Path:
        return self.folder / f"{run.hex()}.answer"

"""Persisted answers of a silo, so that a restart repeats a contribution instead of creating another.

The silo writes and fsyncs its contribution to a round before any of it leaves. When the coordinator asks for the same
round again, the silo sends the same contribution, under new masks or another seal. The coordinator learns nothing
new, and the ledger is charged once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import save
from torch import Tensor

from fedveil.errors import ProtocolError, RunFolderError
from fedveil.files import LARGEST_FILE, check_file, read_content, reading, replace_file, sync_folder, writing
from fedveil.protocols.field_codecs import Reader, Writer

_MAGIC: Final = b"FVR4"
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True)
class ModelStore:
    """File of the last model of one run, for the silo's owner to fetch.

    Attributes:
        folder: folder of the models of all runs.
        run: 16 bytes, the run.
    """

    folder: Path
    run: bytes

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Replace the model, atomically and durably.

        Raises:
            RunFolderError: the file cannot be written, for example because the disk is full.
        """
        path = self.folder / f"{self.run.hex()}.safetensors"
        with writing(path, RunFolderError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(
                path, save({name: value.contiguous() for name, value in tensors.items()}), mode=0o600
            )


Tensors = Mapping[str, np.ndarray]
"""Tensors by name."""


def _none() -> Tensors:
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """Record of the last round to which a silo has contributed.

    Attributes:
        round: number of the round.
        request: SHA-256 of the request: terms, all users' totals, model, participants.
        binding: SHA-256 of the further context of the contribution, as its protocol defines it.
        head: head of the silo's ledger when the round was charged.
        contribution: the silo's contribution, packed by its protocol; non-empty before anything leaves.
        before: state at the start of the round: ``model`` (d,) float32, and the data that the next round needs. Empty
            unless the silos alone have the models, or messages contain parts of earlier rounds.
        after: state at the end of the round; empty until the sum has arrived.
        refused: whether the silo refused the decrypted sum of the round. It then contributes nothing more to the run.
    """

    round: int
    request: bytes
    binding: bytes
    head: bytes = bytes(32)
    contribution: bytes = b""
    before: Tensors = field(default_factory=_none)
    after: Tensors = field(default_factory=_none)
    refused: bool = False

    def encode(self) -> bytes:
        """Encode the record; the last 32 bytes are its SHA-256."""
        writer = (
            Writer()
            # The head stands first, so that RecordStore.heads reads it without loading tensors.
            .fixed_bytes(_MAGIC, len(_MAGIC))
            .fixed_bytes(self.head, _DIGEST_BYTES)
            .number(self.round, 4)
        )
        writer.number(self.refused, 1)
        writer.fixed_bytes(self.request, _DIGEST_BYTES).fixed_bytes(self.binding, _DIGEST_BYTES).block(
            self.contribution
        )
        for tensors in (self.before, self.after):
            writer.block(save_arrays(dict(tensors)) if tensors else b"")
        body = writer.bytes()
        return body + hashlib.sha256(body).digest()

    @classmethod
    def decode(cls, data: bytes) -> RoundRecord:
        """Decode a record of :meth:`encode`.

        Raises:
            RunFolderError: the data are damaged, or of another version.
        """
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if len(body) < len(_MAGIC) or hashlib.sha256(body).digest() != digest:
            raise RunFolderError(
                "damaged; the stored answer is unknown, so this silo cannot continue the run"
            )
        if body[: len(_MAGIC)] != _MAGIC:
            raise RunFolderError("written by another version; this silo cannot continue the run")
        try:
            reader = Reader(body[len(_MAGIC) :])
            head, number, refused = reader.fixed_bytes(_DIGEST_BYTES), reader.number(4), reader.number(1)
            if refused > 1:
                raise ValueError("the flag `refused` is neither 0 nor 1")
            request, binding = (reader.fixed_bytes(_DIGEST_BYTES) for _ in range(2))
            contribution = reader.block()
            before, after = (
                load_arrays(block) if block else {} for block in (reader.block(), reader.block())
            )
            reader.finish()
        except (ProtocolError, SafetensorError, KeyError, ValueError) as error:
            raise RunFolderError(f"damaged, or of another kind ({type(error).__name__})") from None
        return cls(
            round=number,
            request=request,
            binding=binding,
            head=head,
            contribution=contribution,
            before=before,
            after=after,
            refused=bool(refused),
        )


@dataclass(frozen=True)
class RecordStore:
    """Records of a silo's runs: one file per run, in a folder that only the silo reads."""

    folder: Path

    def read(self, run: bytes) -> RoundRecord | None:
        """Return the last record of a run; None before the first.

        Raises:
            RunFolderError: the file is damaged.
        """
        path = self._path(run)
        if not path.exists():
            return None
        content = read_content(path, RunFolderError, largest=LARGEST_FILE)
        try:
            return RoundRecord.decode(content)
        except RunFolderError as error:
            raise RunFolderError(f"{path}: {error}") from None

    def write(self, run: bytes, record: RoundRecord) -> None:
        """Replace the record of a run, atomically and durably.

        Raises:
            RunFolderError: the file cannot be written, for example because the disk is full; nothing may be sent.
        """
        path = self._path(run)
        with writing(path, RunFolderError, "; nothing was sent"):
            self._replace(path, record.encode())

    def heads(self) -> Iterator[str]:
        """Yield the ledger head of every record of this version, in hexadecimal."""
        for path in sorted(self.folder.glob("*.answer")):
            check_file(path, RunFolderError)
            with reading(path, RunFolderError), open(path, "rb") as stream:
                start = stream.read(len(_MAGIC) + _DIGEST_BYTES)
            if start[: len(_MAGIC)] == _MAGIC:
                yield start[len(_MAGIC) :].hex()

    def secret(self, run: bytes) -> bytes:
        """Return 32 random bytes that are constant for a run; created and persisted on the first call.

        Raises:
            RunFolderError: the file is damaged, or cannot be written.
        """
        path = self.folder / f"{run.hex()}.secret"
        with writing(path, RunFolderError):
            content = read_content(path, RunFolderError) if path.exists() else b""
            if not content:
                content = os.urandom(_DIGEST_BYTES)
                self._replace(path, content)
        if len(content) != _DIGEST_BYTES:
            raise RunFolderError(f"{path}: damaged; this silo cannot continue the run")
        return content

    def _replace(self, path: Path, content: bytes) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700)
            # Without the parent's fsync, a power loss could remove the new folder together with the fsynced file.
            sync_folder(self.folder.parent)
        replace_file(path, content, mode=0o600)

    def _path(self, run: bytes) -> Path:
        return self.folder / f"{run.hex()}.answer"

"""The run folder: what a run leaves behind, written so that a kill at any moment loses nothing.

====================  ==================================================================================
file                  content
====================  ==================================================================================
experiment.toml       the resolved experiment, enough to repeat the run
metrics.jsonl         one line a round; round 0 is the initial model
ledger.jsonl          one line a round, written before the round's noise is drawn
privacy.json          the statement
diagnostics.json      records per user and silo: simulation only
model.safetensors     the last model
preprocessing.json    the release that refined the schema, if one did
schema.toml           the schema that it refined
stopped.json          after which round a callback has ended the run, if one did
evaluation.json       the release of test metrics, if there is one
spectrum.json         how far the model moved, by frequency (from released models alone)
audit.json            what attacks showed, if the run was audited
checkpoint/           the model and the optimiser's state after the last complete round, and that round's line of
                      metrics
environment.json      versions, machine, trainer
transcript.jsonl      every message of a protocol's parties, if it was asked for
attempts.jsonl        attempts at a round that failed because silos vanished, if any did
report.html           the self-contained report
====================  ==================================================================================

A file is replaced by writing a temporary neighbour, flushing it to the disk and renaming it: readers see the old or the
new content, never half of one. A round counts as complete when its checkpoint has been renamed into place; a
resumed run plays again what its checkpoint lacks, and charges it again unless its noise is from a seed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedveil.errors import RunFolderError
from fedveil.files import (
    LARGEST_FILE,
    append_file,
    check_file,
    check_schema_version,
    folders_with,
    parse_json,
    read_content,
    read_toml,
    reading,
    replace_file,
    writing,
)
from fedveil.privacy.ledger import Head
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.config.release_document import KINDS
from fedveil.run.folder.documents import SCHEMA_VERSION, RoundRow, read_line
from fedveil.training.server.optimizers import State

Row = dict[str, Any]

PREPROCESSED: Final = "preprocessing.json"
SCHEMA: Final = "schema.toml"
"""The refined schema in the folder of a run with [preprocessing]."""

_CHECKPOINT: Final = "checkpoint/state.safetensors"
_CHECKPOINT_VERSION: Final = 2
_STATE: Final = "state."
"""Before the names of an optimiser's tensors in a checkpoint."""


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The global model after a complete round, that round's line of metrics, and where the ledger stood.

    Attributes:
        round: its number; 0 is the initial model.
        model: (d,) after it.
        state: of the server's optimiser after it, tensors by name.
        row: its line of metrics.
        ledger: its last charge.
    """

    round: int
    model: Float32[Tensor, " d"]
    state: State
    row: Row
    ledger: Head


class Document(Protocol):
    """What a run folder is made for."""

    file: ClassVar[str]
    """Its own name in the folder."""

    @property
    def name(self) -> str:
        """Of the folder."""
        ...

    def to_toml(self) -> str:
        """Return the complete document."""
        ...


def _instead(path: Path) -> str:
    """Say what a folder without an experiment is."""
    if not path.exists():
        return "not a run folder: there is no such folder"
    made = next((kind for kind in KINDS if (path / kind.file).exists()), None)
    if made is not None:
        return f"a run of `fedveil {made.command}`, which trained no model: it has no experiment.toml"
    return f"not a run folder: it has no experiment.toml{folders_with(path, 'experiment.toml')}"


@dataclass(frozen=True)
class RunFolder:
    """Paths and atomic writes of one run folder."""

    path: Path

    @classmethod
    def create(cls, parent: Path, experiment: Document) -> RunFolder:
        """Make a new folder for what runs; an existing one is never touched, the new one is numbered."""
        number = 1
        while True:
            path = parent / (experiment.name if number == 1 else f"{experiment.name}-{number}")
            try:
                path.mkdir(mode=0o700, parents=True)  # parts of it are exact functions of private records
                (path / "checkpoint").mkdir()
                break
            except FileExistsError:
                number += 1
            except OSError as error:
                raise RunFolderError(f"{path}: cannot make the run folder: {error.strerror}") from None
        folder = cls(path)
        folder.write(experiment.file, experiment.to_toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, Experiment]:
        """Open an existing folder and read its experiment; another version's folder is refused."""
        if not (path / "experiment.toml").is_file():
            raise RunFolderError(f"{path}: {_instead(path)}")
        document = check_schema_version(
            read_toml(path / "experiment.toml"), path / "experiment.toml", SCHEMA_VERSION
        )
        folder = cls(path)
        return folder, folder.with_refined_schema(parse(document, str(path / "experiment.toml")))

    def with_refined_schema(self, experiment: Experiment) -> Experiment:
        """Return the experiment on the schema that its preprocessing has written here; itself where none has."""
        table = experiment.data.table
        if experiment.preprocessing is None or table is None or not (self / SCHEMA).exists():
            return experiment
        table = table.model_copy(update={"schema_file": (self / SCHEMA).absolute()})
        return experiment.model_copy(update={"data": experiment.data.model_copy(update={"table": table})})

    def __truediv__(self, name: str) -> Path:
        """Return the path of one of its files."""
        return self.path / name

    def write(self, name: str, content: bytes) -> None:
        """Replace a file atomically and durably."""
        target = self.path / name
        so = f"; nothing was released, `fedveil resume {self.path}` goes on from the last complete round"
        with writing(target, RunFolderError, so):
            replace_file(target, content)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file; the object gets the schema version."""
        document = {"schema_version": SCHEMA_VERSION, **content}
        self.write(name, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Release a round: after this call it counts as complete."""
        metadata = {
            "schema_version": str(_CHECKPOINT_VERSION),
            "round": str(checkpoint.round),
            "row": json.dumps(checkpoint.row, allow_nan=False),
            "ledger_count": str(checkpoint.ledger.count),
            "ledger_digest": checkpoint.ledger.digest,
            "experiment": self._experiment_digest,
        }
        tensors = {
            "model": checkpoint.model,
            **{_STATE + name: value for name, value in checkpoint.state.items()},
        }
        whole = {name: value.cpu().contiguous() for name, value in tensors.items()}
        self.write(_CHECKPOINT, save(whole, metadata))

    @property
    def has_begun(self) -> bool:
        """Whether round 0, the initial model, was reached."""
        return (self.path / _CHECKPOINT).exists()

    def read_checkpoint(self) -> Checkpoint | None:
        """Return the last complete round, or None if not even round 0 was reached.

        Raises:
            RunFolderError: it is damaged, of another version or of another experiment.
        """
        path = self.path / _CHECKPOINT
        if not self.has_begun:
            return None
        with reading(path, RunFolderError), stored_tensors(path) as stored:
            metadata, model = stored.metadata(), stored.get_tensor("model")
            if metadata["schema_version"] != str(_CHECKPOINT_VERSION):
                raise RunFolderError(
                    f"{path}: schema version {metadata['schema_version']} is not readable here; this program reads "
                    f"{_CHECKPOINT_VERSION}"
                )
            state = {
                name.removeprefix(_STATE): stored.get_tensor(name)
                for name in stored.keys()  # noqa: SIM118
                if name.startswith(_STATE)
            }
            if metadata["experiment"] != self._experiment_digest:
                raise RunFolderError(
                    f"{self / 'experiment.toml'}: was changed since the run began, and what its metrics have shown may "
                    "have chosen the change (another average, say); put it back, or run the changed experiment in a "
                    "folder of its own, with a ledger and an epsilon of its own"
                )
            number, charges = int(metadata["round"]), int(metadata["ledger_count"])
            row = parse_json(metadata["row"], path, RunFolderError)
            if row["round"] != number or min(number, charges) < 0:
                raise ValueError
            if model.dtype != torch.float32 or model.ndim != 1 or not bool(torch.isfinite(model).all()):
                raise RunFolderError(f"{path} is damaged: its model is no vector of finite float32 numbers")
            head = Head(count=charges, digest=metadata["ledger_digest"])
            return Checkpoint(round=number, model=model, state=state, row=row, ledger=head)

    @cached_property
    def _experiment_digest(self) -> str:
        """The digest of the experiment as it was when this process first asked."""
        return hashlib.sha256(read_content(self / "experiment.toml", RunFolderError)).hexdigest()

    def write_model(self, tensors: dict[str, Tensor]) -> None:
        """Write the named tensors of the last model."""
        self.write(
            "model.safetensors", save({name: value.cpu().contiguous() for name, value in tensors.items()})
        )

    def append(self, name: str, *rows: Row) -> None:
        """Add one line per row to a file of lines, durably."""
        path = self.path / name
        with writing(path, RunFolderError):
            append_file(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())

    def drop_torn_line(self, name: str) -> None:
        """Make a file of lines end with a whole one, whatever the crash left."""
        content = read_content(self.path / name, RunFolderError, largest=LARGEST_FILE)
        self.write(name, content[: content.rfind(b"\n") + 1])

    def mend_metrics(self, checkpoint: Checkpoint) -> None:
        """Make metrics.jsonl end with the checkpoint's line, whatever the crash left."""
        path = self.path / "metrics.jsonl"
        kept = []
        content = read_content(path, RunFolderError, largest=LARGEST_FILE) if path.exists() else b""
        for line in content.split(b"\n"):
            try:
                row, _ = read_line(line, path, RoundRow)
            except RunFolderError:
                break
            if row.round >= checkpoint.round:
                break
            kept.append(line)
        kept.append(json.dumps(checkpoint.row, allow_nan=False).encode())
        self.write("metrics.jsonl", b"\n".join(kept) + b"\n")


@contextmanager
def stored_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        RunFolderError: it is missing, or none.
    """
    check_file(path, RunFolderError)
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise RunFolderError(f"{path} is damaged: no safetensors file ({error})") from None


def drop_unbegun(path: Path) -> None:
    """Remove the folder of a run that was killed before its experiment was written, if there is one.

    Nothing was released, drawn or charged before.

    Raises:
        RunFolderError: there is something else in it, which is nobody's to remove, or the folder cannot be removed.
    """
    unwritten = f".{Experiment.file}.tmp"
    try:
        found = {entry.name for entry in path.iterdir()}
        if found <= {"checkpoint", unwritten}:
            path.joinpath(unwritten).unlink(missing_ok=True)
            if "checkpoint" in found:
                path.joinpath("checkpoint").rmdir()
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"{path}: no run folder, for it has no {Experiment.file}, and cannot be removed ({error.strerror}); move "
            "it away"
        ) from None

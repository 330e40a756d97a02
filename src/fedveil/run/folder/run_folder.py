"""Write and read the run folder, so that a crash at any moment loses nothing.

====================  ==================================================================================
file                  content
====================  ==================================================================================
experiment.toml       the resolved experiment, enough to repeat the run
metrics.jsonl         one line per round; round 0 is the initial model
ledger.jsonl          one line per charge, written before the round's noise is drawn
privacy.json          the privacy statement
diagnostics.json      records per user and silo: simulation only
model.safetensors     the last model
preprocessing.json    the releases that refined the schema or the clip, if any
schema.toml           the refined schema
stopped.json          the round after which a callback ended the run, if one did
evaluation.json       the release of test metrics, if requested
spectrum.json         displacement of the model by frequency (from released models only)
public_test.json      the released model on the public test records; absent unless the test records are public
audit.json            results of attacks, if the run was audited
checkpoint/           model and optimiser state after the last complete round, with that round's line of metrics
environment.json      versions, machine, trainer
transcript.jsonl      every message of the protocol's parties, if requested
attempts.jsonl        attempts at a round that failed because silos vanished, if any
report.html           the self-contained report
====================  ==================================================================================

To replace a file, the folder writes a temporary file next to it, flushes that file to disk and renames it. Readers
see the old or the new content, never a mixture. A round is complete when its checkpoint has been renamed into place.
A resumed run plays again the rounds that are missing from its checkpoint. It charges them again unless their noise
is from a seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import (
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
from fedveil.line_log import LineLog
from fedveil.privacy.ledger import Head
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.config.release_document import KINDS
from fedveil.run.folder.documents import EXPERIMENT_VERSION, SCHEMA_VERSION, RoundRow, read_line
from fedveil.training.server.optimizers import State

Row = dict[str, Any]

STARTED_BY: Final = "FEDVEIL_STARTED_BY"
"""Environment variable with the process id of a run that starts a worker, until the worker has imported the script."""
PREPROCESSED: Final = "preprocessing.json"
SCHEMA: Final = "schema.toml"
"""Name of the refined schema in the folder of a run with [preprocessing]."""

STATEMENT: Final = "privacy.json"
"""Name of the privacy statement."""

_CHECKPOINT: Final = "checkpoint/state.safetensors"
_CHECKPOINT_VERSION: Final = 2
_STATE: Final = "state."
"""Prefix of the names of an optimiser's tensors in a checkpoint."""


def finite(value: float) -> float | None:
    """Return the value, or None if JSON has no number for it (NaN or infinity)."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The state of a run after a complete round.

    Attributes:
        round: number of the round; 0 is the initial model.
        model: (d,) float32 global model after the round.
        state: state of the server's optimiser after the round, tensors by name.
        row: the round's line of metrics.
        ledger: the ledger head: number and digest of the last charge.
    """

    round: int
    model: Float32[Tensor, " d"]
    state: State
    row: Row
    ledger: Head


class Document(Protocol):
    """The document for which a run folder is created."""

    file: ClassVar[str]
    """Name of the document's file in the folder."""

    @property
    def name(self) -> str:
        """Name of the run, and of its folder."""
        ...

    def to_toml(self) -> str:
        """Return the complete document as TOML."""
        ...


def _instead(path: Path) -> str:
    """Describe a folder without an experiment, for an error."""
    if not path.exists():
        return "not a run folder: there is no such folder"
    release_kind = next((kind for kind in KINDS if (path / kind.file).exists()), None)
    if release_kind is not None:
        return f"a run of `fedveil {release_kind.command}`, which trained no model: it has no experiment.toml"
    return f"not a run folder: it has no experiment.toml{folders_with(path, 'experiment.toml')}"


@dataclass(frozen=True)
class RunFolder:
    """Paths and atomic writes of one run folder."""

    path: Path

    @classmethod
    def create(cls, parent: Path, experiment: Document, *, numbered: bool = True) -> RunFolder:
        """Create a new folder for a document; an existing folder is never changed.

        Args:
            parent: the folder in which it is created.
            experiment: the document; the folder has its name.
            numbered: whether the name gets a number if the folder exists; else that is an error.

        Raises:
            RunFolderError: the folder cannot be created.
            ConfigError: this process is a worker that imports the script of its run.
        """
        if os.environ.get(STARTED_BY, str(os.getpid())) != str(os.getpid()):
            raise ConfigError(
                "trainer.processes: every worker process imports the script that was started, and this script trains "
                'while it is imported: call fedveil under `if __name__ == "__main__":`'
            )
        number = 1
        while True:
            path = parent / (experiment.name if number == 1 else f"{experiment.name}-{number}")
            try:
                # Only the owner may read it: some files are exact functions of private records.
                path.mkdir(mode=0o700, parents=True)
                (path / "checkpoint").mkdir()
                break
            except FileExistsError:
                if not numbered:
                    raise RunFolderError(
                        f"{path}: another process has made this run folder meanwhile; wait for its run, or stop it"
                    ) from None
                number += 1
            except OSError as error:
                raise RunFolderError(f"{path}: cannot make the run folder: {error.strerror}") from None
        folder = cls(path)
        folder.write(experiment.file, experiment.to_toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, Experiment]:
        """Open an existing folder and read its experiment.

        Raises:
            RunFolderError: the path is not a run folder, or its schema version is another one.
        """
        if not (path / "experiment.toml").is_file():
            raise RunFolderError(f"{path}: {_instead(path)}")
        document = check_schema_version(
            read_toml(path / "experiment.toml"), path / "experiment.toml", EXPERIMENT_VERSION
        )
        folder = cls(path)
        return folder, folder.with_refined_schema(parse(document, str(path / "experiment.toml")))

    def with_refined_schema(self, experiment: Experiment) -> Experiment:
        """Return the experiment on the refined schema of this folder; unchanged if the folder has none."""
        table = experiment.data.table
        if experiment.preprocessing is None or table is None or not (self / SCHEMA).exists():
            return experiment
        table = table.model_copy(update={"schema_file": (self / SCHEMA).absolute()})
        return experiment.model_copy(update={"data": experiment.data.model_copy(update={"table": table})})

    def __truediv__(self, name: str) -> Path:
        """Return the path of a file in the folder."""
        return self.path / name

    def write(self, name: str, content: bytes) -> None:
        """Replace a file atomically and durably."""
        target = self.path / name
        so = f"; nothing was released, `fedveil resume {self.path}` goes on from the last complete round"
        with writing(target, RunFolderError, so):
            replace_file(target, content)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically and durably; the object gets the schema version."""
        document = {"schema_version": SCHEMA_VERSION, **content}
        self.write(name, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store a round; after this call it counts as complete and released."""
        metadata = {
            "schema_version": str(_CHECKPOINT_VERSION),
            "round": str(checkpoint.round),
            "row": json.dumps(checkpoint.row, allow_nan=False),
            "ledger_count": str(checkpoint.ledger.count),
            "ledger_digest": checkpoint.ledger.digest,
            # Binds the checkpoint to the experiment: metrics of finished rounds may not choose its later settings.
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
        """Return whether the run has stored round 0, the initial model."""
        return (self.path / _CHECKPOINT).exists()

    def read_checkpoint(self) -> Checkpoint | None:
        """Return the last complete round; None if round 0 is not stored.

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
            # `reading` turns a ValueError into an error that names the file.
            if row["round"] != number or min(number, charges) < 0:
                raise ValueError
            if model.dtype != torch.float32 or model.ndim != 1 or not bool(torch.isfinite(model).all()):
                raise RunFolderError(f"{path} is damaged: its model is no vector of finite float32 numbers")
            head = Head(count=charges, digest=metadata["ledger_digest"])
            return Checkpoint(round=number, model=model, state=state, row=row, ledger=head)

    @cached_property
    def _experiment_digest(self) -> str:
        """SHA-256 of experiment.toml, read once per process."""
        return hashlib.sha256(read_content(self / "experiment.toml", RunFolderError)).hexdigest()

    def write_model(self, tensors: dict[str, Tensor]) -> None:
        """Write the named tensors of the last model."""
        self.write(
            "model.safetensors", save({name: value.cpu().contiguous() for name, value in tensors.items()})
        )

    def append(self, name: str, *rows: Row) -> None:
        """Append one line per row to a file of lines, durably."""
        log = LineLog(self.path / name)
        with writing(log.path, RunFolderError):
            log.append(*(json.dumps(row, allow_nan=False).encode() for row in rows))

    def rounds_with_metrics(self) -> set[int]:
        """Return the rounds after round 0 that have a complete line in metrics.jsonl."""
        return {number for number, _ in self._metrics_lines()} - {0}

    def check_own_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Check that a checkpoint was written in this folder: its line of metrics continues metrics.jsonl.

        The ledgers of two runs of one experiment may be equal, byte for byte. Rounds of the other run are charged in
        the other folder, so a run that went on from them would state less than its models cost. The lines of two runs
        differ, in their seconds alone if in nothing else. Hence metrics.jsonl has either the checkpoint's line or none
        for its round, and ``elapsed`` of the checkpoint is that of the line before plus the seconds of the round.
        After a crash the line before is there: it is on disk before the next round is charged.

        Raises:
            RunFolderError: one of the two lines is another one, or the line before is missing.
        """
        path, number, row = self / "metrics.jsonl", checkpoint.round, checkpoint.row
        lines = {at: json.loads(line) for at, line in self._metrics_lines() if at in (number - 1, number)}
        if number and number - 1 not in lines:
            raise RunFolderError(
                f"{path}: has no complete line for round {number - 1}, so that nothing shows in which folder the "
                f"checkpoint of round {number} was written; put back metrics.jsonl, or remove the checkpoint, so that "
                "its rounds are played and charged again"
            )
        other = None
        with reading(path, RunFolderError):
            if lines.get(number, row) != row:
                other = f"another line for round {number}"
            elif number and row["elapsed"] != lines[number - 1]["elapsed"] + row["seconds"]:
                other = (
                    f"a line for round {number - 1} that the checkpoint of round {number} does not continue"
                )
        if other is not None:
            raise RunFolderError(
                f"{self / _CHECKPOINT}: was written in another run folder, or before this run went on from an older "
                f"checkpoint: metrics.jsonl has {other}; put back the checkpoint of this run, or remove it, so that "
                "its rounds are played and charged again"
            )

    def mend_metrics(self, checkpoint: Checkpoint) -> None:
        """Make metrics.jsonl end with the checkpoint's line.

        A crash may have left a torn line, or none for the last checkpoint. Lines of later rounds are dropped,
        because these rounds are not complete.
        """
        lines = [
            line for _, line in takewhile(lambda entry: entry[0] < checkpoint.round, self._metrics_lines())
        ]
        lines.append(json.dumps(checkpoint.row, allow_nan=False).encode())
        self.write("metrics.jsonl", b"\n".join(lines) + b"\n")

    def _metrics_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the round and the bytes of each line of metrics.jsonl, up to a damaged one."""
        log = LineLog(self / "metrics.jsonl")
        for line in log.read().complete:
            try:
                row, _ = read_line(line, log.path, RoundRow)
            except RunFolderError:
                return
            yield row.round, line


@contextmanager
def stored_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        RunFolderError: the file is missing or is not a safetensors file.
    """
    check_file(path, RunFolderError)
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise RunFolderError(f"{path} is damaged: no safetensors file ({error})") from None


def drop_unbegun(path: Path) -> None:
    """Remove the folder of a run that was killed before its experiment was written, if it exists.

    Nothing was released, sampled or charged in it.

    Raises:
        RunFolderError: the folder has other files, which are not ours to remove, or it cannot be removed.
    """
    # `replace_file` writes this temporary file before it renames it to experiment.toml.
    unwritten = f".{Experiment.file}.tmp"
    try:
        names = {entry.name for entry in path.iterdir()}
        if names <= {"checkpoint", unwritten}:
            path.joinpath(unwritten).unlink(missing_ok=True)
            if "checkpoint" in names:
                path.joinpath("checkpoint").rmdir()
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"{path}: no run folder, for it has no {Experiment.file}, and cannot be removed ({error.strerror}); move "
            "it away"
        ) from None

"""Submits a run to the coordinator that is served on this host and watches its folder until it ends."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedveil.engine.documents import read_rows
from fedveil.engine.experiment import Experiment, parse, read_toml
from fedveil.engine.folder import Row, RunFolder
from fedveil.engine.run import Observer
from fedveil.engine.setup import prepare
from fedveil.errors import BusyError, ConfigError, CoordinatorGoneError, RunFolderError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.heads import HEADS, HeadsSeen
from fedveil.federation.share import FixedPopulation, public_share
from fedveil.files import parse_json, read_content, reading
from fedveil.flower.folders import CoordinatorFolder, schema_digest
from fedveil.flower.relay import receive_frame, send_frame
from fedveil.flower.sockets import address
from fedveil.protection.errors import ProtocolError

END: Final = "end.json"
"""Written when a run's play ends: {"error": text or null, "stopped": text or null, "silent": names of silos}."""

SOCKET: Final = "party"
"""The coordinator's socket for submissions, in its folder ``run``."""

_LOOK_SECONDS: Final = 0.5


class Unwatched:
    """An observer that looks at nothing: the run folder says it all."""

    def started(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Nothing."""

    def training(self, round_number: int, done: int, total: int) -> None:
        """Nothing."""

    def completed(self, row: Row) -> None:
        """Nothing."""


def read_experiment(path: Path, home: CoordinatorFolder) -> Experiment:
    """Read an experiment that a federation can run.

    Raises:
        ConfigError: no tables, another schema, no public test table, or a model that is left to be guessed.
    """
    experiment = parse(read_toml(path), str(path)).anchored(path.parent)
    table = experiment.data.table
    if table is None:
        raise ConfigError(f"{path}: data.table: a federation trains on the silos' own tables")
    if schema_digest(table.schema_file) != home.membership.schema_digest:
        raise ConfigError(f"{path}: data.table.schema_file: not the schema that the members agreed on")
    if table.test_file is None:
        raise ConfigError(
            f"{path}: data.table.test_file: nobody can hold records out of tables that nobody may pool; "
            "give a public test table"
        )
    if experiment.model.name is None or experiment.model.loss is None:
        raise ConfigError(
            f"{path}: model.name and model.loss: silos allow models and losses by name; give both"
        )
    return experiment


def open_run(home: CoordinatorFolder, path: Path) -> CoordinatorParty:
    """Open a run folder as the coordinator, new or interrupted.

    Raises:
        FedveilError: whatever is wrong with the coordinator's folder, the experiment or the run folder.
    """
    folder, experiment = RunFolder.open(path)
    table = experiment.data.table
    if table is None or table.test_file is None:
        raise RunFolderError(f"{path}: not a run of a federation")
    membership = home.membership
    share = public_share(home.schema, table.test_file, membership)
    return CoordinatorParty(
        prepared=prepare(experiment, FixedPopulation(share)),
        membership=membership,
        identity=home.identity,
        folder=folder,
        heads=HeadsSeen(home / HEADS),
        observer=Unwatched(),
    )


class Submission:
    """A run that was submitted, until its end.

    Args:
        home: the coordinator's folder.
        run: the run folder.

    Raises:
        BusyError: no coordinator is served from this folder.
    """

    def __init__(self, home: CoordinatorFolder, run: Path) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.connect(address(home / "run" / SOCKET))
            send_frame(self._connection, json.dumps({"run": str(run.absolute())}).encode())
            self.before = int(json.loads(receive_frame(self._connection))["before"])
        except (OSError, ProtocolError) as error:
            self._connection.close()
            raise BusyError(
                f"{home.path}: no coordinator is served; start `fedveil coordinator serve {home.path}` "
                f"({type(error).__name__})"
            ) from None

    def __enter__(self) -> Submission:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait no longer; the run goes on."""
        self._connection.close()

    def lasts(self, seconds: float) -> bool:
        """Wait for the end for so many seconds; return whether the run waits or is played still."""
        ended, _, _ = select.select([self._connection], [], [], seconds)
        return not ended


def watch(
    folder: RunFolder, observer: Observer, experiment: Experiment, lasts: Callable[[float], bool]
) -> tuple[str | None, tuple[str, ...]]:
    """Tell the observer of every new line of metrics, until the run ends.

    Args:
        folder: the run folder.
        observer: who is told.
        experiment: what runs.
        lasts: waits so many seconds, and returns whether the run waits or is played still.

    Returns:
        Why it stopped early, None if it did not; and the silos whose silence ended it.

    Raises:
        RunFolderError: the run ended with an error, or the coordinator's process is gone.
    """
    done = max(1, len(read_rows(folder / "metrics.jsonl")))
    observer.started(folder.path, experiment, done - 1)
    while True:
        lives = lasts(_LOOK_SECONDS)
        ended = (folder / END).exists()
        rows = read_rows(folder / "metrics.jsonl")
        for row in rows[done:]:
            observer.completed(row)
        done = max(done, len(rows))
        if ended:
            with reading(folder / END, RunFolderError):
                end = parse_json(read_content(folder / END, RunFolderError), folder / END, RunFolderError)
                if end["error"] is not None:
                    raise RunFolderError(f"{folder.path}: the run ended: {end['error']}")
                stopped = None if end["stopped"] is None else str(end["stopped"])
                return stopped, tuple(str(silo) for silo in end["silent"])
        if not lives:
            raise CoordinatorGoneError(
                f"{folder.path}: the coordinator's process is gone; start it again and go on by "
                f"`fedveil federation run --resume {folder.path}`"
            )

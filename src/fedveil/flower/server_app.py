"""The ServerApp: opens the coordinator's run folder and carries its letters over Flower's Grid until the run ends."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.engine.folder import RunFolder
from fedveil.errors import FedveilError
from fedveil.flower.carrier import carry
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.submission import END, open_run
from fedveil.foreign import quiet_log

app = ServerApp()
_log = quiet_log("fedveil.coordinator")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run whose folder the submission named, from its last complete round."""
    run = RunFolder(Path(str(context.run_config["run"])))
    end: dict[str, str | None] = {"error": "the coordinator's process was stopped", "stopped": None}
    try:
        home = CoordinatorFolder(Path(str(context.run_config["coordinator"])))
        party = open_run(home, run.path)
        try:
            carry(grid, party, home)
        finally:
            party.close()
        assert party.outcome is not None
        end = {"error": None, "stopped": party.outcome.stopped}
    except FedveilError as problem:
        end["error"] = str(problem)
        _log.error("%s", problem)
    finally:
        run.write_json(END, end)

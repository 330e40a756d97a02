"""Observers that keep a run's numbers elsewhere: TensorBoard, MLflow, Weights & Biases (the extra ``observers``).

They are callbacks, and are told what callbacks are: public numbers, unless private ones are asked for. When a round was
complete is private (how long one takes depends on who takes part and with how many records), and what keeps numbers
notes the time of each. So rounds are noted as a second apart, and Weights & Biases, which reads the clock
by itself, is told all of them once the run is over. What is kept has no true times of rounds; whoever watches it being
written has: TensorBoard's file grows with every round, and a server of MLflow is told of each when it is complete.
TensorBoard names its file by the run's start, the host and the process.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from fedveil.api.callbacks import Callback, RoundSummary
from fedveil.errors import ConfigError
from fedveil.files import as_path, parse_toml, read_text
from fedveil.privacy.statement import Statement
from fedveil.run.config.experiment import flatten_keys
from fedveil.run.folder.documents import NORM_LEVELS

_TOLD: Final = (
    "name",
    "rounds",
    "seed",
    "method",
    "local",
    "channel",
    "protection",
    "server",
    "privacy",
    "trainer",
)
"""What is told of an experiment: neither data, which have paths, nor the model."""


class Tracker(Callback):
    """A callback that keeps numbers elsewhere.

    Args:
        private: whether private numbers are kept too: participants, norms before clipping, seconds, and test metrics
            where the test records were held out of the private ones.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.sees_private = private

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        document = parse_toml(
            read_text(folder / "experiment.toml", ConfigError), folder / "experiment.toml", ConfigError
        )
        self._began = time.time()
        self._begin(folder, done, flatten_keys({key: document[key] for key in _TOLD if key in document}))

    def on_round_end(self, round: RoundSummary) -> str | None:
        self._keep(round.number, scalars(round))
        return None

    def on_run_end(self, statement: Statement | None) -> None:
        sentences = () if statement is None else statement.sentences()
        self._end(
            "\n".join(sentences) or "The run broke off: there is no statement.", broken=statement is None
        )

    def _at(self, number: int) -> float:
        """Return the time that is noted for a round, in seconds."""
        return self._began + number

    @abstractmethod
    def _begin(self, folder: Path, done: int, settings: Mapping[str, Any]) -> None:
        """Open what keeps the numbers of a run folder."""

    @abstractmethod
    def _keep(self, number: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of a round."""

    @abstractmethod
    def _end(self, statement: str, *, broken: bool) -> None:
        """Keep the statement's sentences and close."""


class TensorBoard(Tracker):
    """Writes event files that ``tensorboard --logdir FOLDER`` shows; one folder per run below it.

    Args:
        folder: where.
        private: as for every tracker.

    Raises:
        ConfigError: the library is not installed.
    """

    def __init__(self, folder: str | Path, *, private: bool = False) -> None:
        super().__init__(private=private)
        self.folder = as_path(folder, "TensorBoard")
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise ConfigError(
                "TensorBoard: tensorboard is not installed; pip install 'fedveil[observers]'"
            ) from None

    def _begin(self, folder: Path, done: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / folder.name), purge_step=done + 1 if done else None)
        lines = [f"    {key} = {json.dumps(value)}" for key, value in settings.items()]
        self._writer.add_text("experiment", "\n".join(lines), walltime=self._at(0))

    def _keep(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number, walltime=self._at(number))
        self._writer.flush()

    def _end(self, statement: str, *, broken: bool) -> None:
        self._writer.add_text("statement", statement, walltime=self._at(0))
        self._writer.close()


class MLflow(Tracker):
    """Logs a run to MLflow.

    Args:
        experiment: of MLflow; made if it is missing.
        uri: of the tracking server or store, such as ``sqlite:///mlflow.db``, a file; None is MLflow's own default.
        private: as for every tracker.

    Raises:
        ConfigError: the library is not installed.
    """

    def __init__(self, experiment: str = "fedveil", *, uri: str | None = None, private: bool = False) -> None:
        super().__init__(private=private)
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError("MLflow: mlflow is not installed; pip install 'fedveil[observers]'") from None
        self.experiment, self._client = experiment, MlflowClient(tracking_uri=uri)

    def _begin(self, folder: Path, done: int, settings: Mapping[str, Any]) -> None:
        found = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        made = self._client.create_run(number, run_name=folder.name, start_time=self._milliseconds(done))
        self._run, self._last = made.info.run_id, done
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def _keep(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, timestamp=self._milliseconds(number), step=number)
        self._last = number

    def _end(self, statement: str, *, broken: bool) -> None:
        self._client.set_tag(self._run, "fedveil.statement", statement)
        status = "FAILED" if broken else "FINISHED"
        self._client.set_terminated(self._run, status=status, end_time=self._milliseconds(self._last))

    def _milliseconds(self, number: int) -> int:
        return int(1000 * self._at(number))


class WandB(Tracker):
    """Logs a run to Weights & Biases once it is over; nothing leaves the machine unless ``mode`` is "online".

    Of the machine and the program nothing is sent: no host name, code, packages, system load or console.

    Args:
        project: of Weights & Biases.
        folder: where files are kept; ``wandb sync`` sends those of an offline run later.
        mode: "offline" or "online".
        private: as for every tracker.

    Raises:
        ConfigError: the library is not installed.
    """

    def __init__(
        self,
        project: str = "fedveil",
        *,
        folder: str | Path = ".",
        mode: Literal["offline", "online"] = "offline",
        private: bool = False,
    ) -> None:
        super().__init__(private=private)
        self.project, self.folder, self.mode = project, as_path(folder, "WandB"), mode
        try:
            import wandb
        except ImportError:
            raise ConfigError("WandB: wandb is not installed; pip install 'fedveil[observers]'") from None
        self._wandb = wandb

    def _begin(self, folder: Path, done: int, settings: Mapping[str, Any]) -> None:
        self._name, self._settings = folder.name, dict(settings)
        self._rounds: list[tuple[int, dict[str, float]]] = []

    def _keep(self, number: int, values: Mapping[str, float]) -> None:
        self._rounds.append((number, dict(values)))

    def _end(self, statement: str, *, broken: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = self._wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            host="",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        made = self._wandb.init(
            project=self.project,
            dir=str(self.folder),
            mode=self.mode,
            name=self._name,
            config=self._settings,
            settings=quiet,
        )
        for number, values in self._rounds:
            made.log(values, step=number)
        made.summary["statement"] = statement
        made.finish(exit_code=int(broken))


def scalars(round: RoundSummary) -> dict[str, float]:
    """Return a round's numbers by name: epsilon, ``test/...``, and ``private/...`` where they are told."""
    found: dict[str, float | None] = {"epsilon": round.epsilon}
    found |= {f"test/{name}": value for name, value in (round.test or {}).items()}
    for name, value in (round.private or {}).items():
        if name == "norms" and value is not None:
            found |= {f"private/norm_{level:g}": one for level, one in zip(NORM_LEVELS, value, strict=True)}
        elif isinstance(value, int | float):
            found[f"private/{name}"] = value
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}

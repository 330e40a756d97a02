"""Trackers that log a run's numbers to TensorBoard, MLflow or Weights & Biases (extra ``observers``).

A tracker is a callback: it receives public numbers, and private numbers only on request.

Times of rounds are private, because the duration of a round depends on the participants and on their numbers of
records. Trackers store a time with each number. So rounds are logged with artificial times, one second apart. Weights
& Biases reads the clock itself, so it receives all rounds after the end of the run. The stored log therefore contains
no true times of rounds.

Not claimed: that a party who watches the log during the run learns no times. The TensorBoard file grows with every
round, and an MLflow server receives each round when it is complete. TensorBoard's file name contains the start time
of the run, the host and the process.
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
from fedveil.arguments import explain_arguments, flag_argument
from fedveil.errors import ConfigError
from fedveil.files import as_path, parse_toml, read_text
from fedveil.privacy.statement import Statement
from fedveil.run.config.experiment import flatten_keys
from fedveil.run.folder.documents import NORM_LEVELS

_LOGGED_KEYS: Final = (
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
"""Tables and keys of an experiment that are logged; ``data`` contains local paths, and the model is left out too."""


class Tracker(Callback):
    """Base class of callbacks that log a run's numbers to another program.

    Args:
        private: whether private numbers are logged too: participants, norms before clipping, seconds, and test
            metrics even if the test records were held out of the private ones.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.sees_private = flag_argument(f"{type(self).__name__}: private", private)

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        document = parse_toml(
            read_text(folder / "experiment.toml", ConfigError), folder / "experiment.toml", ConfigError
        )
        self._began = time.time()
        self._begin(
            folder, done, flatten_keys({key: document[key] for key in _LOGGED_KEYS if key in document})
        )

    def on_round_end(self, round: RoundSummary) -> str | None:
        self._keep(round.number, scalars(round))
        return None

    def on_run_end(self, statement: Statement | None) -> None:
        sentences = () if statement is None else statement.sentences()
        self._end(
            "\n".join(sentences) or "The run broke off: there is no statement.", broken=statement is None
        )

    def _at(self, number: int) -> float:
        """Return the artificial time of a round in seconds since the epoch.

        Rounds are one second apart, beginning at the start of the run.
        """
        return self._began + number

    @abstractmethod
    def _begin(self, folder: Path, done: int, settings: Mapping[str, Any]) -> None:
        """Open the log of a run folder, with the experiment's settings."""

    @abstractmethod
    def _keep(self, number: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a round."""

    @abstractmethod
    def _end(self, statement: str, *, broken: bool) -> None:
        """Log the statement and close the log; ``broken`` if the run ended by an error."""


@explain_arguments
class TensorBoard(Tracker):
    """Writes event files for ``tensorboard --logdir FOLDER``, in one subfolder per run.

    Args:
        folder: parent folder of the event files.
        private: whether private numbers are logged too; see :class:`Tracker`.

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

        # A resumed run may repeat its last incomplete round: TensorBoard drops earlier numbers from this round on.
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


@explain_arguments
class MLflow(Tracker):
    """Logs a run to MLflow.

    Args:
        experiment: name of the MLflow experiment; it is created if it is missing.
        uri: URI of the tracking server or store, such as the file ``sqlite:///mlflow.db``; None: MLflow's default.
        private: whether private numbers are logged too; see :class:`Tracker`.

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


@explain_arguments
class WandB(Tracker):
    """Logs a run to Weights & Biases after its end.

    Nothing leaves the machine unless ``mode`` is "online".

    No facts about the machine or the program are sent: no host name, code, packages, system load or console output.

    Args:
        project: name of the Weights & Biases project.
        folder: folder of the log files; ``wandb sync`` sends those of an offline run later.
        mode: "offline" or "online".
        private: whether private numbers are logged too; see :class:`Tracker`.

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
        self._rounds.append(
            (number, dict(values))
        )  # sent at the end, so that the clock of wandb shows no duration

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
    """Return a round's finite numbers by name: epsilon, ``test/...``, and ``private/...`` if it has them."""
    found: dict[str, float | None] = {"epsilon": round.epsilon}
    found |= {f"test/{name}": value for name, value in (round.test or {}).items()}
    for name, value in (round.private or {}).items():
        if name == "norms" and value is not None:
            found |= {f"private/norm_{level:g}": one for level, one in zip(NORM_LEVELS, value, strict=True)}
        elif isinstance(value, int | float):
            found[f"private/{name}"] = value
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}

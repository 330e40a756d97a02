"""Callbacks: they receive public numbers after each round, and private numbers only on request.

A private number is a function of the records that no guarantee covers: the number of participants, the duration of a
round, norms before clipping. A callback with private numbers must not end the run, because the end of a run is public
and would reveal them. So the run goes on whatever such a callback returns or raises, and its error is raised after the
run's end.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from safetensors.torch import save_file
from torch import Tensor

from fedveil.arguments import explain_arguments, explain_arguments_as, flag_argument, text_argument
from fedveil.config_keys import finite_argument, whole_argument
from fedveil.console import number
from fedveil.errors import ConfigError, FedveilError
from fedveil.files import as_path, parse_toml, read_text
from fedveil.methods.method import released_model
from fedveil.privacy.statement import Statement, show_epsilon
from fedveil.report.run_data import DIRECTION
from fedveil.run.advice import advice, heard_before, news
from fedveil.run.config.experiment import Experiment, flatten_keys
from fedveil.run.folder.documents import NORM_LEVELS, RoundRow
from fedveil.run.folder.run_folder import Row, RunFolder
from fedveil.run.folder.shown import METRICS, Kind
from fedveil.run.loop import StopTraining
from fedveil.run.setup import Prepared
from fedveil.run.steps.experiment import Outcome


@explain_arguments_as("RoundSummary", "callbacks receive it after every round")
@dataclass(frozen=True, kw_only=True, eq=False)
class RoundSummary:
    """A completed round, described by public numbers.

    Attributes:
        number: number of the round, from 1.
        rounds: number of rounds of the experiment.
        epsilon: epsilon spent so far; None without a guarantee.
        test: metrics on the PUBLIC test table; None if the round was not evaluated, or if the test records were held
            out of the private records. A callback with ``sees_private`` also receives metrics on held-out records.
        private: the other numbers of the round, for a callback with ``sees_private``; otherwise None.
        folder: the run folder; its checkpoint is that of this round.
        advice: a suggestion that is computed only from released models and public numbers; None if there is none.
    """

    number: int
    rounds: int
    epsilon: float | None
    test: Mapping[str, float | None] | None
    private: Mapping[str, Any] | None
    folder: Path
    _prepared: Prepared = field(repr=False)
    advice: str | None = None

    def __repr__(self) -> str:
        """Return public numbers only, even for a callback with ``sees_private``."""
        spent = "none" if self.epsilon is None else show_epsilon(self.epsilon)
        return f"RoundSummary({self.number} of {self.rounds}, epsilon={spent}, folder='{self.folder}')"

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters of this round's model by name; the model is released, so epsilon covers it."""
        checkpoint = RunFolder(self.folder).read_checkpoint()
        assert checkpoint is not None
        released = released_model(self._prepared.method, checkpoint.model, checkpoint.state)
        return self._prepared.task.state(released)


@explain_arguments
class Callback:
    """Base class of callbacks; override the methods that you need.

    Attributes:
        sees_private: whether the callback receives the private numbers of every round; it then cannot end the run.
        needs_public_test: whether to refuse a population whose test records were held out of the private records.
    """

    sees_private: bool = False
    needs_public_test: ClassVar[bool] = False

    def __init__(self) -> None:
        pass  # so that an argument is refused, with its name, where a subclass takes none

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        """Handle the start of a run of ``rounds`` rounds in a folder, or its resumption after ``done`` rounds."""

    def on_round_end(self, round: RoundSummary) -> str | None:
        """Handle a completed round; return a reason to end the run, or None to continue."""
        return None

    def on_run_end(self, statement: Statement | None) -> None:
        """Handle the end of the run: after its last round, early, or by an error (the statement is then None)."""


@explain_arguments
class EarlyStop(Callback):
    """Ends a run when a metric on the PUBLIC test table stops improving.

    Args:
        metric: name of the metric, as in ``metrics``.
        patience: number of evaluated rounds without improvement after which the run ends.
        least: smallest difference that counts as an improvement.
        lower_is_better: whether smaller values are better; None: for ``loss``,
            ``mae``, ``rmse`` and ``brier``.
    """

    needs_public_test: ClassVar[bool] = True

    def __init__(
        self, metric: str, *, patience: int = 5, least: float = 0.0, lower_is_better: bool | None = None
    ) -> None:
        self.metric = text_argument("EarlyStop: metric", metric)
        self.patience = whole_argument("EarlyStop: patience", patience, 1)
        self.least = finite_argument("EarlyStop: least", least)
        lower = DIRECTION.get(metric, 1) < 0
        if lower_is_better is not None:
            lower = flag_argument("EarlyStop: lower_is_better", lower_is_better)
        self._sign = -1.0 if lower else 1.0
        self._best, self._since = -math.inf, 0

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        self._best, self._since = -math.inf, 0

    def on_round_end(self, round: RoundSummary) -> str | None:
        if round.test is None:
            return None
        if self.metric not in round.test:
            raise ConfigError(
                f"EarlyStop: there is no metric '{self.metric}'; there are: {', '.join(round.test)}"
            )
        value = round.test[self.metric]
        reached = -math.inf if value is None else self._sign * value
        if reached > self._best + self.least:
            self._best, self._since = reached, 0
            return None
        self._since += 1
        if self._since < self.patience:
            return None
        return f"round {round.number}: {self.metric} has not improved for {self.patience} evaluated rounds"


@explain_arguments
class Checkpoints(Callback):
    """Writes the model of every k-th round as ``round-NNNNN.safetensors`` into a folder.

    Args:
        folder: the folder; it is created if it is missing.
        every: k.
    """

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        self.folder, self.every = (
            as_path(folder, "Checkpoints"),
            whole_argument("Checkpoints: every", every, 1),
        )

    def on_round_end(self, round: RoundSummary) -> str | None:
        if round.number % self.every == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: value.contiguous() for name, value in round.state_dict().items()},
                self.folder / f"round-{round.number:05d}.safetensors",
            )
        return None


@explain_arguments
class Progress(Callback):
    """Prints one line per round (number, epsilon, metrics on a public test table), and each advice once."""

    def __init__(self) -> None:
        self._advised = 0

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        self._advised = 0

    def on_round_end(self, round: RoundSummary) -> str | None:
        spent = "none" if round.epsilon is None else show_epsilon(round.epsilon)
        metrics = "".join(f"  {name} {number(value)}" for name, value in (round.test or {}).items())
        print(f"round {round.number}/{round.rounds}  epsilon {spent}{metrics}")
        if (text := news(round.advice, self._advised)) is not None:
            print(text)
            self._advised += text.count("\n") + 1
        return None


_PUBLIC: Final = frozenset(name for name, kind in METRICS.items() if kind is Kind.COVERED)


class CallbackObserver:
    """Observer of a run that passes to each callback the numbers that it may see."""

    def __init__(self, prepared: Prepared, callbacks: Sequence[Any], *, public_test: bool) -> None:
        if not isinstance(callbacks, Sequence):
            raise ConfigError(f"callbacks: a list is needed, [{type(callbacks).__name__}(...)]")
        for callback in callbacks:
            if not isinstance(callback, Callback):
                description = (
                    f"{callback.__name__} is a class; hand over {callback.__name__}()"
                    if isinstance(callback, type)
                    else f"not {type(callback).__name__}"
                )
                raise ConfigError(f"callbacks: a fedveil.Callback is needed: {description}")
            if callback.needs_public_test and not public_test:
                raise ConfigError(
                    f"callbacks: {type(callback).__name__} ends the run by test metrics, and these test records are "
                    "held out of the private ones: the end of the run would leak information about them. Give public "
                    "records: fedveil.population(..., test=(features, targets))"
                )
        self._prepared, self._callbacks, self._public_test = prepared, tuple(callbacks), public_test
        # Read once: a callback that clears `sees_private` later has already seen private numbers, and must not become
        # able to end the run.
        self._see = tuple(bool(callback.sees_private) for callback in callbacks)
        self._postponed: dict[int, BaseException] = {}
        self._folder: Path | None = None
        self._heard: list[RoundRow] = []

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Pass the start of the run, with its folder, to every callback."""
        self._folder, self._heard = folder, []
        for callback in self._callbacks:
            callback.on_run_start(folder, experiment.rounds, done)

    def training(self, round_number: int, done: int, total: int) -> None:
        """Ignore the progress within a round.

        The number of steps is private: it depends on the participants.
        """

    def on_round_end(self, row: Row) -> None:
        """Pass a completed round to every callback.

        A callback that sees private numbers, and asks to end the run or fails, gets no further round.
        :meth:`until_the_end` raises its error after the run: raised now, it would end the run at a round that private
        numbers chose.

        Raises:
            StopTraining: a callback gives a reason to end the run.
        """
        # After a resumption, advice must follow from all rounds, not only from those of this process.
        if not self._heard and self._folder is not None:
            self._heard += heard_before(self._folder, row["round"])
        self._heard.append(RoundRow.model_validate(row))
        # Every callback receives the round, even if an earlier one ends the run.
        reasons = []
        for index, (callback, sees_private) in enumerate(zip(self._callbacks, self._see, strict=True)):
            if index in self._postponed:
                continue
            try:
                reason = callback.on_round_end(self._summary(row, sees_private))
            except StopTraining as error:
                reason = str(error)
            except KeyboardInterrupt:  # of the person at the keyboard, at a moment that no number chose
                raise
            except BaseException as error:
                # Errors that derive from BaseException alone end a run as well (asyncio.CancelledError, GeneratorExit).
                if not sees_private:
                    raise
                self._postponed[index] = error
                continue
            if reason is not None and sees_private:
                self._postponed[index] = ConfigError(
                    f"callbacks: {type(callback).__name__} sees private numbers, so it cannot end the run: when a run "
                    f"ends is public, and the run went on to its end in {self._folder}; let another callback end it by "
                    "public numbers"
                )
                continue
            reasons += [reason] if reason is not None else []
        if reasons:
            raise StopTraining("; ".join(reasons))

    def until_the_end(self, play: Callable[[], Outcome]) -> Outcome:
        """Execute a run; pass its end to every callback that received its start, even after an error.

        An exception of user code is raised unchanged, with a note about how to resume the run. That of a callback that
        sees private numbers is raised after a complete run.
        """
        statement = None
        try:
            outcome = play()
            statement = outcome.statement
            if self._postponed:
                raise next(iter(self._postponed.values()))
            return outcome
        except Exception as error:
            if self._folder is not None and not isinstance(error, FedveilError):
                error.add_note(
                    f"the run is kept: fedveil.resume({str(self._folder)!r}, model, people) goes on from its last "
                    "complete round"
                )
            raise
        finally:
            for callback in self._callbacks if self._folder is not None else ():
                callback.on_run_end(statement)

    def _summary(self, row: Row, private: bool) -> RoundSummary:
        assert self._folder is not None, "told of its start first"
        # Exact metrics on held-out private records are private; those on a public table are not.
        shown = private or self._public_test
        return RoundSummary(
            number=row["round"],
            rounds=self._prepared.experiment.rounds,
            epsilon=row["epsilon"],
            test=row["test"] if shown else None,
            private={key: value for key, value in row.items() if key not in _PUBLIC | {"test"}}
            if private
            else None,
            folder=self._folder,
            advice=advice(self._heard, self._prepared.experiment.rounds),
            _prepared=self._prepared,
        )


# --- trackers: TensorBoard, MLflow, Weights & Biases (extra ``observers``) ---
# Times of rounds are private, because the duration of a round depends on the participants and on their numbers of
# records. Trackers store a time with each number. So rounds are logged with artificial times, one second apart. Weights
# & Biases reads the clock itself, so it receives all rounds after the end of the run. The stored log therefore contains
# no true times of rounds.
#
# Not claimed: that a party who watches the log during the run learns no times. The TensorBoard file grows with every
# round, and an MLflow server receives each round when it is complete. TensorBoard's file name contains the start time
# of the run, the host and the process.


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
    def _begin(self, folder: Path, completed: int, settings: Mapping[str, Any]) -> None:
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

    def _begin(self, folder: Path, completed: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run may repeat its last incomplete round: TensorBoard drops earlier numbers from this round on.
        self._writer = SummaryWriter(
            str(self.folder / folder.name), purge_step=completed + 1 if completed else None
        )
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

    def _begin(self, folder: Path, completed: int, settings: Mapping[str, Any]) -> None:
        existing = self._client.get_experiment_by_name(self.experiment)
        number = (
            self._client.create_experiment(self.experiment) if existing is None else existing.experiment_id
        )
        run = self._client.create_run(number, run_name=folder.name, start_time=self._milliseconds(completed))
        self._run, self._last = run.info.run_id, completed
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

    def _begin(self, folder: Path, completed: int, settings: Mapping[str, Any]) -> None:
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
        run = self._wandb.init(
            project=self.project,
            dir=str(self.folder),
            mode=self.mode,
            name=self._name,
            config=self._settings,
            settings=quiet,
        )
        for step, values in self._rounds:
            run.log(values, step=step)
        run.summary["statement"] = statement
        run.finish(exit_code=int(broken))


def scalars(round: RoundSummary) -> dict[str, float]:
    """Return a round's finite numbers by name: epsilon, ``test/...``, and ``private/...`` if it has them."""
    values: dict[str, float | None] = {"epsilon": round.epsilon}
    values |= {f"test/{name}": value for name, value in (round.test or {}).items()}
    for name, value in (round.private or {}).items():
        if name == "norms" and value is not None:
            values |= {
                f"private/norm_{level:g}": norm for level, norm in zip(NORM_LEVELS, value, strict=True)
            }
        elif isinstance(value, int | float):
            values[f"private/{name}"] = value
    return {
        name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)
    }

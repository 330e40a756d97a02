"""Estimators with scikit-learn's conventions: ``fit(X, y, user=...)``, ``predict``, pipelines, cross-validation.

>>> from fedveil.sklearn import Classifier
>>> model = Classifier(epsilon=2.0, n_users=5000)                             # doctest: +SKIP
>>> model.fit(X, y, user=patient, silo=hospital).predict(X_new)               # doctest: +SKIP

Every ``fit`` spends. In cross-validation and searches give ``epsilon=fedveil.Budget(3.0, fits=...)``: all copies of the
estimator share it, and the fit after the last is refused. Whatever was fitted on the records before (a scaler, PCA, a
choice of features) is covered by no guarantee: scale by declared ``bounds`` instead.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data

from fedveil.api.budget import Budget, Charge, note_fit
from fedveil.api.result import Result
from fedveil.api.training import TrainingArguments, play
from fedveil.arguments import explain_arguments_as, stacklevel_of_caller
from fedveil.config_keys import is_number, plain
from fedveil.data.arrays import Counted, population
from fedveil.data.input_arrays import read_features, read_numbers
from fedveil.data.records import Population, Task
from fedveil.errors import ConfigError, DataError
from fedveil.files import as_path
from fedveil.run.setup import Prepared
from fedveil.sanitize import describe_columns
from fedveil.training.metrics import c_index

__all__ = ["Classifier", "CoxRegressor", "MultiLabelClassifier", "Regressor"]

_FORWARDED = (
    *("method", "rounds", "loss", "local_learning_rate", "local_epochs", "batch_size"),
    *("server_learning_rate", "server", "settings"),
)
"""Arguments that go on to :func:`fedveil.train` as they are; None leaves its default."""

_STANDARDISED = 1e-6


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of the estimators: ``__init__`` stores the arguments and ``fit`` checks them."""

    __metadata_request__fit: ClassVar[Mapping[str, bool]] = {"user": True, "silo": True}
    _task: ClassVar[Task]

    def __init__(
        self,
        model: Any = "linear",
        *,
        epsilon: Any = None,
        delta: float | None = None,
        n_users: int | Counted | None = None,
        silos: Sequence[Any] | None = None,
        bounds: Any = None,
        method: Any = None,
        rounds: int | None = None,
        loss: Any = None,
        local_learning_rate: Any = None,
        local_epochs: int | None = None,
        batch_size: int | None = None,
        server_learning_rate: Any = None,
        server: Any = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
        folder: str | Path | None = None,
    ) -> None:
        self.model, self.epsilon, self.delta, self.n_users = model, epsilon, delta, n_users
        self.silos, self.bounds = silos, bounds
        self.method, self.rounds, self.loss, self.batch_size = method, rounds, loss, batch_size
        self.local_learning_rate, self.local_epochs = local_learning_rate, local_epochs
        self.server_learning_rate, self.server, self.settings = server_learning_rate, server, settings
        self.random_state, self.folder = random_state, folder

    def fit(self, X: Any, y: Any, *, user: Any = None, silo: Any = None) -> Self:
        """Train on private records.

        Args:
            X: (n, p) numbers, or a data frame of them.
            y: (n,) labels or numbers; (n, k) for several labels or numbers; for :class:`CoxRegressor` (n, 2) of
                (event, time), or (n, 3) of (event, time, entry).
            user: (n,) the person to whom each record belongs. Required: ``user=np.arange(len(X))`` says that every
                row is another person.
            silo: (n,) the silo that holds each record; None is one silo.

        Raises:
            FedveilError: an argument or a value is wrong, or the budget is spent.

        Warns:
            UserWarning: users of this fit were in earlier fits that no common budget counts; or every column has mean
                0 and standard deviation 1, as if a scaler had been fitted on these records.
        """
        where = f"{type(self).__name__}.fit"
        if user is None:
            raise ConfigError(
                f"{where}: user is needed: the person to whom each record belongs, fit(X, y, user=patient). "
                "user=np.arange(len(X)) says that every row is another person"
            )
        if self.epsilon is None and self.method is None:
            raise ConfigError(
                f"{where}: epsilon is needed: what this fit may spend, or fedveil.Budget(epsilon, fits=) for several"
            )
        if self.n_users is None:
            raise ConfigError(
                f"{where}: n_users is needed: the public number of all users, the same in every fold; "
                'n_users="counted" counts those with records, and the statement says so'
            )
        X = self._read(X, where)
        people = self._population(X, y, user, silo)
        _warn_of_scaler(X)
        folder = tempfile.mkdtemp(prefix="fedveil-") if self.folder is None else self.folder
        result = _train(self, people, as_path(folder, f"{where}: folder"))
        self.result_ = result
        self.predictor_, self.statement_ = result.predictor, result.statement
        self.epsilon_, self.folder_ = result.statement.epsilon, result.folder
        return self

    def _population(self, X: np.ndarray, y: Any, user: Any, silo: Any) -> Population:
        raise NotImplementedError

    def _people(self, X: np.ndarray, y: Any, user: Any, silo: Any, **declared: Any) -> Population:
        silos = self.silos
        if silo is None:  # one silo by the caller's word: records decide nothing
            silo, silos = np.zeros(len(X), dtype=np.int64), [0] if silos is None else silos
        return population(
            self._scaled(X),
            y,
            user=user,
            silo=silo,
            n_users=self.n_users,
            silos=silos,
            test_share=0.0,
            name=type(self).__name__,
            **{"task": self._task} | declared,
        )

    def _outputs(self, X: Any) -> np.ndarray:
        """Return the model's (n, k) outputs."""
        check_is_fitted(self, "predictor_")
        read = self._read(X, type(self).__name__, reset=False)
        return np.asarray(self.predictor_.outputs(self._scaled(read)))

    def _read(self, X: Any, where: str, *, reset: bool = True) -> np.ndarray:
        """Return (n, p) float32 features, and note or compare their number and names.

        Raises:
            DataError: scikit-learn refuses them. Its errors repeat cells (a text, or the whole array), so this one
                names row and column instead, and is raised without them.
        """
        try:
            return np.asarray(validate_data(self, X, dtype=np.float32, reset=reset))
        except (ValueError, TypeError, ArithmeticError):
            pass
        # Not in the handler: a traceback would show scikit-learn's error as the context of this one.
        raise _refusal(X, where)

    def _scaled(self, X: np.ndarray) -> np.ndarray:
        """Return the features with declared bounds scaled to [-1, 1]; values outside are taken for the bound."""
        if self.bounds is None:
            return X
        scaled = X.copy()
        names = list(getattr(self, "feature_names_in_", ()))
        for column, (lower, upper) in _bounds(self.bounds, X.shape[1], names).items():
            scaled[:, column] = 2 * (np.clip(X[:, column], lower, upper) - lower) / (upper - lower) - 1
        return scaled

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without the training records, which a saved model must not carry."""
        return {key: value for key, value in super().__getstate__().items() if key != "result_"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # fresh noise in every fit
        return tags


@explain_arguments_as("sklearn.Classifier")
class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classifier with user-level differential privacy.

    Args:
        model: ``"linear"``, another shipped model, or a ``torch.nn.Module``, which is copied.
        epsilon: what one fit spends; or a :class:`fedveil.Budget` for several.
        delta: delta of the guarantee; None is that of :func:`fedveil.train`, or of the budget.
        n_users: the PUBLIC number of all users, with or without records; the same in every fold.
        silos: names of the silos; None takes those that have records, and the statement says so.
        classes: labels in the order of the outputs; None takes those that occur, and the statement says so.
        bounds: declared bounds by column, ``{"age": (0, 120)}``, or one pair for all; these columns are scaled to
            [-1, 1], and values outside are taken for the bound.
        method: as of :func:`fedveil.train`; None is its default.
        rounds, loss, local_learning_rate, local_epochs, batch_size, server_learning_rate, server, settings: as of
            :func:`fedveil.train`; None is its default.
        random_state: seed of batches and of initial values, never of noise: two fits differ.
        folder: parent of the run folders; None makes a temporary folder for each fit. Keep it to prove what was spent.

    Attributes:
        classes_: labels in the order of the outputs.
        statement_: what the fit guarantees.
        epsilon_: its epsilon.
        result_: the :class:`fedveil.Result`; a pickled estimator has none, because it holds the records.
        folder_: the run folder.
    """

    _task = "classification"

    def __init__(
        self,
        model: Any = "linear",
        *,
        epsilon: Any = None,
        delta: float | None = None,
        n_users: int | Counted | None = None,
        silos: Sequence[Any] | None = None,
        classes: Sequence[Any] | None = None,
        bounds: Any = None,
        method: Any = None,
        rounds: int | None = None,
        loss: Any = None,
        local_learning_rate: Any = None,
        local_epochs: int | None = None,
        batch_size: int | None = None,
        server_learning_rate: Any = None,
        server: Any = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__(
            model,
            epsilon=epsilon,
            delta=delta,
            n_users=n_users,
            silos=silos,
            bounds=bounds,
            method=method,
            rounds=rounds,
            loss=loss,
            local_learning_rate=local_learning_rate,
            local_epochs=local_epochs,
            batch_size=batch_size,
            server_learning_rate=server_learning_rate,
            server=server,
            settings=settings,
            random_state=random_state,
            folder=folder,
        )
        self.classes = classes

    def _population(self, X: np.ndarray, y: Any, user: Any, silo: Any) -> Population:
        people = self._people(X, y, user, silo, classes=self.classes)
        self.classes_ = np.array(people.classes)
        return people

    def decision_function(self, X: Any) -> np.ndarray:
        """Return (n,) scores of the second of two classes, or (n, classes) scores."""
        outputs = self._outputs(X)
        if outputs.shape[1] > 2:
            return outputs
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return (n, classes) probabilities."""
        outputs = torch.from_numpy(self._outputs(X)).double()
        if outputs.shape[1] == 1:  # one logit, of the second class
            outputs = torch.cat((torch.zeros_like(outputs), outputs), dim=1)
        return np.asarray(torch.softmax(outputs, dim=1))

    def predict(self, X: Any) -> np.ndarray:
        """Return (n,) the most probable labels."""
        chosen = self.predict_proba(X).argmax(axis=1)  # first, because it says that nothing was fitted
        return np.asarray(self.classes_[chosen])


@explain_arguments_as("sklearn.MultiLabelClassifier")
class MultiLabelClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Several labels of a record with user-level differential privacy; arguments as of :class:`Classifier`.

    ``y`` is (n, k) of 0 and 1, k >= 2: a record has none or several of k labels. ``score`` is the share of records all
    of whose labels are predicted.

    Attributes:
        classes_: (k,) names of the columns of ``y``, if it is a data frame; otherwise their numbers.
    """

    _task = "multi-label"

    def _population(self, X: np.ndarray, y: Any, user: Any, silo: Any) -> Population:
        people = self._people(X, y, user, silo)
        names = people.target_names
        self.classes_ = np.array(names if hasattr(y, "columns") else range(len(names)))
        return people

    def decision_function(self, X: Any) -> np.ndarray:
        """Return (n, k) logits."""
        return self._outputs(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the (n, k) probability of each label."""
        return np.asarray(torch.sigmoid(torch.from_numpy(self._outputs(X)).double()))

    def predict(self, X: Any) -> np.ndarray:
        """Return (n, k) of 1 for a label that is more probable than not, and 0 for any other."""
        return (self._outputs(X) > 0).astype(np.int64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output, tags.target_tags.single_output = True, False
        tags.classifier_tags.multi_label = True
        return tags


@explain_arguments_as("sklearn.Regressor")
class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Regression of numbers with user-level differential privacy; arguments as of :class:`Classifier`, and:

    Args:
        target_range: declared bounds of the target; for a ``y`` of k columns a pair for each, or one pair for all. The
            model is trained on targets scaled to [-1, 1] by them, and ``predict`` scales back. None trains on the
            targets as they are. A target outside is refused.
    """

    _task = "regression"

    def __init__(
        self,
        model: Any = "linear",
        *,
        epsilon: Any = None,
        delta: float | None = None,
        n_users: int | Counted | None = None,
        silos: Sequence[Any] | None = None,
        target_range: Any = None,
        bounds: Any = None,
        method: Any = None,
        rounds: int | None = None,
        loss: Any = None,
        local_learning_rate: Any = None,
        local_epochs: int | None = None,
        batch_size: int | None = None,
        server_learning_rate: Any = None,
        server: Any = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__(
            model,
            epsilon=epsilon,
            delta=delta,
            n_users=n_users,
            silos=silos,
            bounds=bounds,
            method=method,
            rounds=rounds,
            loss=loss,
            local_learning_rate=local_learning_rate,
            local_epochs=local_epochs,
            batch_size=batch_size,
            server_learning_rate=server_learning_rate,
            server=server,
            settings=settings,
            random_state=random_state,
            folder=folder,
        )
        self.target_range = target_range

    def _population(self, X: np.ndarray, y: Any, user: Any, silo: Any) -> Population:
        shape = _shape(y)
        several = len(shape) == 2 and shape[1] > 1
        task: Task = "multi-output" if several else "regression"
        self.n_outputs_ = shape[1] if several else 1
        if self.target_range is None:
            return self._people(X, y, user, silo, task=task)
        targets = np.asarray(read_numbers(y, task, "y"), dtype=np.float64)
        lower, upper = self._ranges()
        # The targets were read as float32, in which one at a bound may lie beyond it.
        outside = np.argwhere((targets < lower.astype(np.float32)) | (targets > upper.astype(np.float32)))
        if len(outside):
            row, *column = outside[0].tolist()
            first, last = (
                np.broadcast_to(bound, targets.shape[1:])[tuple(column)] for bound in (lower, upper)
            )
            raise ConfigError(
                f"y, row {row}: the target{''.join(f' {index}' for index in column)} is outside of target_range, "
                f"{first:g} to {last:g}; numpy.clip takes it for the bound"
            )
        scaled = 2 * (np.clip(targets, lower, upper) - lower) / (upper - lower) - 1
        return self._people(X, scaled, user, silo, task=task, target_range=(-1.0, 1.0))

    def _ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper bounds, (k,) or () if one pair holds for all targets.

        Raises:
            ConfigError: no pair, or not as many pairs as targets.
        """
        declared: Any = self.target_range
        if self.n_outputs_ == 1 or np.ndim(declared) == 1:
            pair = np.array(_pair(declared, "target_range"))
            return pair[0], pair[1]
        if len(declared) != self.n_outputs_:
            raise ConfigError(
                f"target_range: give one pair for all, or {self.n_outputs_} pairs, one for each target"
            )
        pairs = np.array(
            [_pair(bounds, f"target_range of target {index}") for index, bounds in enumerate(declared)]
        )
        return pairs[:, 0], pairs[:, 1]

    def predict(self, X: Any) -> np.ndarray:
        """Return (n,) numbers, or (n, k) after a fit to k."""
        outputs = self._outputs(X).astype(np.float64)
        scaled = outputs if self.n_outputs_ > 1 else outputs[:, 0]
        if self.target_range is None:
            return scaled
        lower, upper = self._ranges()
        return np.asarray(lower + (scaled + 1) * (upper - lower) / 2)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@explain_arguments_as("sklearn.CoxRegressor")
class CoxRegressor(_Estimator):
    """Cox's proportional hazards with user-level differential privacy; arguments as of :class:`Classifier`.

    ``y`` is (n, 2) of (event, time), (n, 3) of (event, time, entry) with late entry, or a structured array with a truth
    value and a time, as of scikit-survival.
    """

    _task = "survival"

    def _population(self, X: np.ndarray, y: Any, user: Any, silo: Any) -> Population:
        return self._people(X, y, user, silo)

    def predict(self, X: Any) -> np.ndarray:
        """Return (n,) log hazards: a higher one means an earlier event."""
        return self._outputs(X)[:, 0]

    def score(self, X: Any, y: Any) -> float:
        """Return Harrell's concordance index of the predictions; exact, and covered by no guarantee."""
        targets = torch.from_numpy(np.asarray(read_numbers(y, "survival", "y")))
        return c_index(torch.from_numpy(self._outputs(X)), targets)


def _train(estimator: Any, people: Population, folder: Path) -> Result:
    """Train an estimator's model; its budget is charged before training, and the fit is noted."""
    arguments = {name: value for name in _FORWARDED if (value := getattr(estimator, name)) is not None}
    budget = estimator.epsilon if isinstance(estimator.epsilon, Budget) else None
    delta = estimator.delta if budget is None else budget.delta
    if budget is not None and estimator.delta not in (None, budget.delta):
        raise ConfigError(
            f"{type(estimator).__name__}.fit: delta: that of the budget counts, {budget.delta:g}; leave it out"
        )
    arguments |= {} if delta is None else {"delta": delta}
    arguments |= {"seed": _seed(estimator), "metrics": ["loss"]}
    learned: Any = None

    def prepare(epsilon: float | None) -> Prepared:
        nonlocal learned
        spends = {} if epsilon is None else {"epsilon": epsilon}
        training_arguments = TrainingArguments.bind(f"{type(estimator).__name__}.fit", arguments | spends)
        prepared, learned = training_arguments.prepare(estimator.model, people)
        return prepared

    if budget is None:
        prepared = prepare(estimator.epsilon)
        charge = Charge.of_run(prepared)
    else:
        prepared, charge = budget.admit(prepare)
    note_fit(prepared, charge, budget)
    result = play(prepared, learned, folder)
    if budget is not None:
        budget.settle(charge, result.statement)
    return result


def _seed(estimator: Any) -> int:
    """Return the seed of a fit, drawn from ``random_state`` by scikit-learn's convention.

    Raises:
        ConfigError: neither None, a whole number from 0 to 2^32 - 1, nor a ``RandomState``.
    """
    try:
        return int(check_random_state(estimator.random_state).randint(2**31))
    except (ValueError, TypeError):
        raise ConfigError(
            f"{type(estimator).__name__}.fit: random_state must be None, a whole number from 0 to 2^32 - 1 or a "
            f"numpy RandomState, not {type(estimator.random_state).__name__}"
        ) from None


def _shape(targets: Any) -> tuple[int, ...]:
    """Return the shape of targets; of a list that of its first entry decides, so that no entry is converted here."""
    if (shape := getattr(targets, "shape", None)) is not None:
        return tuple(shape)
    if not isinstance(targets, list | tuple):
        return ()
    return (len(targets), *(_shape(targets[0]) if targets else ()))


def _refusal(X: Any, where: str) -> DataError:
    """Return an error about features that scikit-learn refuses, without a value."""
    try:
        features = read_features(X, f"{where}: X").values
    except DataError as error:
        return error
    return DataError(
        f"{where}: X: (records, features) of numbers are needed, with the feature names and the number of features of "
        f"fit; the shape is {features.shape}"
    )


def _bounds(bounds: Any, width: int, names: Sequence[str]) -> dict[int, tuple[float, float]]:
    """Return declared bounds by the number of the column.

    Raises:
        ConfigError: no pair, or a column that does not exist.
    """
    if not isinstance(bounds, Mapping):
        return dict.fromkeys(range(width), _pair(bounds, "bounds"))
    by_column = {}
    for column, pair in bounds.items():
        index = names.index(column) if column in names else plain(column)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < width:
            requested = [name for name in bounds if isinstance(name, str)]
            available = describe_columns(names, requested) if names else f"0 to {width - 1}"
            raise ConfigError(f"bounds: there is no column {column!r}; there are: {available}")
        by_column[index] = _pair(pair, f"bounds of {column!r}")
    return by_column


def _pair(bounds: Any, where: str) -> tuple[float, float]:
    """Return (lower, upper) as finite floats.

    Raises:
        ConfigError: something else, or lower is not below upper.
    """
    try:
        lower, upper = (plain(end) for end in bounds)
    except (TypeError, ValueError):
        lower = upper = None
    if not (is_number(lower) and is_number(upper)) or not -np.inf < lower < upper < np.inf:
        raise ConfigError(f"{where} must be (lower, upper), two finite numbers, lower below upper")
    return float(lower), float(upper)


def _warn_of_scaler(X: np.ndarray) -> None:
    """Warn if every column has mean 0 and standard deviation 1: a scaler was fitted on these very records."""
    if len(X) < 2:
        return
    wide = X.astype(np.float64)
    if np.all(np.abs(wide.mean(axis=0)) < _STANDARDISED) and np.all(
        np.abs(wide.std(axis=0) - 1) < _STANDARDISED
    ):
        warnings.warn(
            "every column has mean 0 and standard deviation 1: a scaler was fitted on these records, and no guarantee "
            "covers its means and deviations. Declare bounds= instead",
            stacklevel=stacklevel_of_caller(),
        )

"""Choose what an experiment leaves open, from public facts: the recommended settings.

A document with ``privacy.epsilon`` and without ``[method]`` gets these settings; its own keys replace them. In Python,
:func:`fedveil.train` without a method does the same. Everything follows from public numbers: the kind of task, the
number k of classes and p of features, the number d of parameters, |U|, |S|, epsilon and delta. No record is read.

=========  ==========================================================================================================
method     ``uldp-avg-w``; each user's whole weight in the main silo (``power = "linked"``), everyone in every round
clip       adaptive: starts at 0.1 and follows the median length of the updates, within the same release
silos      secure aggregation, if there are 2 to 50 silos: the server's epsilon is then that of readers
start      the output layer at zero; a model that is handed over keeps its values
local      30 epochs of full batches at rate 1 / (c (p + 1)), c the curvature of the loss by an output (below)
rounds     30
server     min(3, 0.25 / rho) mean updates, rho the noise-to-travel ratio
release    an exponential average of the models, beta = 0.8
denoiser   Laplacian smoothing for images where rho >= 0.5; none for tables
delta      min(1e-5, 1 / (10 |U|))
=========  ==========================================================================================================

Local rate. For features in [-1, 1] and a constant, ||x||^2 <= p + 1, so the curvature of a contribution's loss in the
parameters of a linear model is at most c (p + 1), and gradient descent is stable below 2 / (c (p + 1)). c bounds the
curvature of the loss by an output for two classes (1/4) and squared error (2). For k > 2 classes c = (k - 1) / k^2 is
the curvature at a zero start; the bound is 1/2. Gradients by an output are bounded there, and the clip holds what
overshoots. For Cox c = 1/2 was chosen.

The constants were chosen on digits and TcgaBrca (docs/theory/recommended.md has what they were tried on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fedveil.data.allocation import CLIENT_LAWS
from fedveil.errors import ConfigError
from fedveil.registry import find
from fedveil.training.losses import Loss

BY_RULE: Final = "by-rule"
MOST_CLASSES: Final = 10
"""Number of classes up to which Newton steps are chosen."""
TREES_FROM: Final = 7_500
"""Users times epsilon from which on boosted trees are chosen for a table of few columns and two classes."""
TREES_FROM_OF_CLASSES: Final = 15_000
"""The same for more than two classes."""
TREES_FROM_A_COLUMN: Final = 1_000
"""The same for each column; the larger of the two decides."""
NEWTON_FROM_A_FEATURE: Final = 33
"""Users times epsilon, for each of p + 1 parameters, from which on Newton steps are taken for two classes."""
NEWTON_FROM_A_FEATURE_OTHERWISE: Final = 100
"""The same for more than two classes, and for features that no schema scales."""
LARGEST_CAP: Final = 1_000
"""Largest ``method.cap`` of counts."""
_ROUNDS: Final = {"newton": 12, "boosted-trees": 31}
"""T of methods that do not take the recommended number of rounds; newton for counts takes 24."""
METHOD_OF_MODEL: Final = {
    "boosted-trees": "boosted-trees",
    "whitened-linear": "newton",
    "whitened-hazards": "newton",
}
"""Models that one method alone trains; without a method, that one is taken."""
_COUNT_ROUNDS: Final = 24
_COX_HINT: Final = (
    "Its loss compares the records of one user: users with one record each teach it nothing, and without this "
    "protection newton is taken"
)
_WHOLE: Final = ("method", "protection")
"""Tables that a document replaces as a whole; of all others it replaces single keys."""


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """Public facts of a table, from which its model is chosen.

    Attributes:
        task: kind of the targets.
        classes: k; None for other targets.
        n_users: |U|.
        columns: number of declared columns; of a table without a schema the number of features.
        features: p, the number of features of a record, with one for each category of a column.
        scaled: whether a schema scales the features to [-1, 1].
        bounded: whether a number to predict has declared bounds, or survival a declared horizon.
        epsilon: epsilon of training, without the shares of other releases.
        largest_count: largest count that the schema declares of a target; None for other targets.
        protection: name of the protection that was asked for; "" leaves it to the rule.
    """

    task: str
    classes: int | None
    n_users: int
    columns: int
    features: int
    scaled: bool
    bounded: bool
    epsilon: float
    largest_count: int | None = None
    protection: str = ""


@dataclass(frozen=True, kw_only=True)
class TableModel:
    """The model that a rule of public facts chooses for a table.

    Attributes:
        model: name of the model.
        method: name of the method; None: the recommended settings.
        rounds: T.
        reason: the facts that decided, in one sentence.
        loss: name of the loss; None: that of the kind of target.
        keys: keys of the method besides its name and noise.
        hint: a declaration that would let another model be taken; "" for none.
    """

    model: str
    method: str | None
    rounds: int
    reason: str
    loss: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""

    def __str__(self) -> str:
        sentence = f"model {self.model}, method {self.method or 'recommended'}: {self.reason}"
        return f"{sentence}. {self.hint}" if self.hint else sentence


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """The recommended settings; :data:`RECOMMENDED` is the one that all commands use.

    Attributes:
        rounds: T.
        epochs: local epochs of full batches.
        clip: start of the adaptive clip.
        beta: beta of the average of models.
        most_silos: number of silos up to which secure aggregation is played.
        delta: largest delta.
    """

    rounds: int = 30
    epochs: int = 30
    clip: float = 0.1
    beta: float = 0.8
    most_silos: int = 50
    delta: float = 1e-5

    def tables(
        self,
        n_silos: int | None = None,
        *,
        denoises: bool = True,
        starts: bool = True,
        protection: str = "",
    ) -> dict[str, Any]:
        """Return the tables of an experiment.

        Args:
            n_silos: |S|; None if it is not known yet.
            denoises: whether a denoiser is asked for.
            starts: whether the initial model is chosen; False if it is handed over.
            protection: name of the protection that was asked for. One that computes the weights n_su / N_u takes the
                place of the file of main silos (power 1).
        """
        masked = n_silos is None or 1 < n_silos <= self.most_silos
        server: dict[str, Any] = {"learning_rate": BY_RULE, "average": {"name": "ema", "beta": self.beta}}
        return {
            "rounds": self.rounds,
            **({"model": {"start": "zero-output"}} if starts else {}),
            "local": {"learning_rate": BY_RULE, "epochs": self.epochs},
            "method": {
                "name": "uldp-avg-w",
                "power": 1 if has_capability(protection, "weighs") else "linked",
                "clip": {"start": self.clip},
                "noise_multiplier": "calibrated",
            },
            "server": server | ({"denoiser": {"name": BY_RULE}} if denoises else {}),
            **({"protection": {"name": "secure-aggregation"}} if masked else {}),
        }

    def complete(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a document with the recommended settings for all that it leaves open.

        A document with a method is returned as it is, with the method's number of rounds if it has none: a method has
        its own defaults. A model that one method alone trains takes that method. The document's keys replace the
        recommended ones; its ``[method]`` and ``[protection]`` replace theirs as a whole.

        Raises:
            ConfigError: neither a method nor an epsilon.
        """
        if "method" in document:
            rounds = rounds_of(subtable(document, "method"))
            return dict(document) if rounds is None else {"rounds": rounds} | dict(document)
        privacy, model, data = (subtable(document, key) for key in ("privacy", "model", "data"))
        if "epsilon" not in privacy:
            raise ConfigError(
                "method: give [privacy] with epsilon = 2 (or another number) for the recommended settings, or [method] "
                "with a name"
            )
        if own := METHOD_OF_MODEL.get(str(model.get("name", ""))):
            method = {"name": own, "power": "linked", "noise_multiplier": "calibrated"}
            n_silos = _silos(data)
            masked = n_silos is None or 1 < n_silos <= self.most_silos
            hidden = {"protection": {"name": "secure-aggregation"}} if masked else {}
            return self.complete({"method": method} | hidden | dict(document))
        own_start = ":" in str(model.get("name", "")) or "initial" in model or "start" in model
        protection = str(subtable(document, "protection").get("name", ""))
        tables = self.tables(_silos(data), starts=not own_start, protection=protection)
        for key, value in document.items():
            inner = tables.get(key)
            if isinstance(inner, dict) and isinstance(value, Mapping) and key not in _WHOLE:
                tables[key] = inner | dict(value)
            else:
                tables[key] = value
        return tables

    def table_model(self, facts: TableFacts) -> TableModel:
        """Return the model for a table by public facts; docs/which-model.md has the figures behind the rule.

        Raises:
            ConfigError: survival without a declared horizon.
        """
        if facts.task == "survival" and not facts.bounded:
            raise ConfigError(
                "target: survival needs the public time at which follow-up ends: horizon in the schema's target "
                "(horizon = 1825), or in Python fedveil.train('whitened-hazards', people, "
                "method=fedveil.newton(horizon=1825), rounds=12, epsilon=2); without it only models that compare a "
                "user's own records are left, and users with one record each teach them nothing"
            )
        if (why := _why_linear(facts)) is not None:
            hint = _COX_HINT if facts.task == "survival" else ""
            return TableModel(model="linear", method=None, rounds=self.rounds, reason=why, hint=hint)
        newton = TableModel(model="whitened-linear", method="newton", rounds=_ROUNDS["newton"], reason="")
        if facts.task == "survival":
            return replace(
                newton, model="whitened-hazards", reason="survival up to the horizon of the schema"
            )
        if facts.largest_count is not None:
            return replace(
                newton,
                model="whitened-rates",
                rounds=_COUNT_ROUNDS,
                loss="poisson",
                keys={"cap": min(facts.largest_count, LARGEST_CAP)},
                reason=f"the target is declared as a count of at most {facts.largest_count} (Poisson regression)",
            )
        if facts.task == "regression":
            return replace(
                newton,
                reason="linear models predicted numbers better than trees on most tables",
                hint=_count_hint(facts),
            )
        if not facts.scaled:
            return replace(newton, reason="no schema scales the features to [-1, 1], as trees need")
        fewest = TREES_FROM if (facts.classes or 2) == 2 else TREES_FROM_OF_CLASSES
        evidence, needed = facts.n_users * facts.epsilon, max(fewest, TREES_FROM_A_COLUMN * facts.columns)
        of_classes = "" if fewest == TREES_FROM else f" and {facts.classes} classes"
        compared = f"{facts.n_users:,} users x epsilon {facts.epsilon:g} = {evidence:,.0f}"
        limit = f"{needed:,}, from which on trees are taken for {facts.columns} columns{of_classes}"
        if evidence < needed:
            return replace(newton, reason=f"{compared} is below {limit}")
        return TableModel(
            model="boosted-trees",
            method="boosted-trees",
            rounds=_ROUNDS["boosted-trees"],
            reason=f"{compared} reaches {limit}",
        )

    def delta_for(self, n_users: int) -> float:
        """Return min(1e-5, 1 / (10 |U|)).

        >>> RECOMMENDED.delta_for(100), RECOMMENDED.delta_for(1_000_000)
        (1e-05, 1e-07)
        """
        return min(self.delta, 1 / (10 * n_users))

    def local_rate(self, loss: Loss, outputs: int, features: int) -> float:
        """Return the rate 1 / (c (p + 1)) of local training.

        Args:
            loss: gives c.
            outputs: number of outputs of the model for a record.
            features: p.

        Raises:
            ConfigError: c is not known for the loss.
        """
        curvature = loss.curvature(outputs)
        if curvature is None:
            raise ConfigError(
                f"local.learning_rate: 'by-rule' needs the curvature of the loss, which is not known for {loss.name}; "
                "give a number"
            )
        return 1 / (curvature * (features + 1))


RECOMMENDED: Final = Recommended()


def rounds_of(method: Mapping[str, Any]) -> int | None:
    """Return T of a table ``[method]`` whose document gives no rounds; None: the recommended number."""
    name = method.get("name")
    if name == "newton" and method.get("cap") is not None:
        return _COUNT_ROUNDS
    return _ROUNDS.get(name) if isinstance(name, str) else None


def has_capability(protection: str, capability: str) -> bool:
    """Return whether a registered protection ``weighs`` or ``divides``; False for a name that validation refuses."""
    try:
        return bool(protection) and bool(getattr(find("protections", protection).load(), capability, False))
    except ConfigError:
        return False


def _why_linear(facts: TableFacts) -> str | None:
    """Return why neither Newton steps nor trees are taken; None if they can be."""
    for capability, reason in (
        ("weighs", "computes weights by records"),
        ("divides", "encrypts a part of an update"),
    ):
        if has_capability(facts.protection, capability):
            return f"protection {facts.protection} {reason}, and the others send sums of statistics"
    if facts.task not in ("classification", "regression", "survival"):
        return f"{facts.task} has no Newton step and no tree here"
    if facts.task == "regression" and not facts.bounded:
        return "the number to predict has no declared bounds, which the others need"
    if (facts.classes or 2) > MOST_CLASSES:
        return f"Newton steps were compared on up to {MOST_CLASSES} classes"
    return _why_few(facts) if facts.task == "classification" else None


def _why_few(facts: TableFacts) -> str | None:
    """Return why the users are too few for the matrix of second moments of Newton steps; None if they are enough.

    Its noise, in units of what all users together can move, is about (p + 1) / (0.24 |U| epsilon).
    """
    easy = facts.scaled and (facts.classes or 2) == 2
    evidence = facts.n_users * facts.epsilon
    needed = (NEWTON_FROM_A_FEATURE if easy else NEWTON_FROM_A_FEATURE_OTHERWISE) * (facts.features + 1)
    if evidence >= needed:
        return None
    unscaled = "" if facts.scaled else " that no schema scales"
    return (
        f"{facts.n_users:,} users x epsilon {facts.epsilon:g} = {evidence:,.0f} is below {needed:,}, from which on "
        f"Newton steps are taken for {facts.classes or 2} classes and {facts.features} features{unscaled}"
    )


def _count_hint(facts: TableFacts) -> str:
    """Return how to declare a number to predict as a count, if it may be one."""
    return (
        "If it is a count (0, 1, 2, ...), squared error fits it badly: declare count = true in the schema's [target], "
        "with lower = 0 and upper, and Poisson regression is taken"
        if facts.scaled
        else "If it is a count (0, 1, 2, ...), squared error fits it badly: take "
        'fedveil.train("whitened-rates", people, method=fedveil.newton(cap=C), loss="poisson", ...), C about '
        "4 times the mean that you expect"
    )


def _silos(data: Mapping[str, Any]) -> int | None:
    """Return |S| as far as a table ``[data]`` says it; one file of tables counts as one silo."""
    table, n_silos = subtable(data, "table"), data.get("n_silos")
    if table:
        return len(table.get("files", ()))
    if n_silos is None and subtable(data, "allocation").get("law") in CLIENT_LAWS:
        n_silos = data.get("n_users")
    return n_silos if isinstance(n_silos, int) else None


def subtable(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of a document that is not validated yet; empty if there is none."""
    table = document.get(key)
    return table if isinstance(table, Mapping) else {}

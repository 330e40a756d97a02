"""Check a model and its features against public facts, before the first round.

The model is tried on synthetic records. Features are those of a PUBLIC test table. Private records are not read, so
that their sizes are not revealed. If test records were held out of the private ones, no remark on sizes is made.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedveil.data.records import Population
from fedveil.errors import LargeDeltaWarning, PrivacyError, TooFewPeopleWarning
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import sum_noise_std
from fedveil.methods.noise_ratio import SCALE, noise_ratio
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.statement import show_epsilon
from fedveil.run.config.experiment import Experiment
from fedveil.run.setup import Prepared
from fedveil.training.losses import Loss
from fedveil.training.task import Task

_ROWS: Final = 16
_SIZES: Final = (1.0, 30.0, 1000.0)
LARGEST: Final = 1e3
"""Root mean square of a feature or target above which training is not expected to work.

Images of bytes have at most 255.
"""
SMALLEST: Final = 1e-3
"""Root mean square of the largest feature below which training is not expected to work."""


def remarks(task: Task, population: Population) -> tuple[str, ...]:
    """Return the remarks of one or two sentences each; empty if public facts give no reason for any."""
    candidates = []
    if population.task == "classification" and (outputs := _outputs(task, population)):
        candidates += [_bounded(task, outputs), _unnormalised(task, outputs)]
    if population.public_test and len(population.test_features):
        candidates += [_features(task, population), _targets(population)]
    return tuple(remark for remark in candidates if remark is not None)


def _outputs(task: Task, population: Population) -> list[Float[Tensor, "n k"]]:
    """Return the outputs of a model with random parameters for synthetic records of each size; empty if not finite."""
    generator = torch.Generator().manual_seed(0)
    parameters = torch.randn(task.dimension, generator=generator).to(task.initial())
    records = torch.randn(_ROWS, *population.feature_shape, generator=generator)
    outputs = []
    with suppress(Exception):  # a model that rejects synthetic records is not judged by them
        outputs = [task.predict(parameters, size * records).cpu() for size in _SIZES]
    return outputs if all(output.isfinite().all() for output in outputs) else []


def _unnormalised(task: Task, outputs: list[Float[Tensor, "n k"]]) -> str | None:
    """Return a remark if the loss expects log-probabilities and the model's outputs are none.

    Such a loss falls by c if c is added to all outputs (``torch.nn.NLLLoss``), so without a log-softmax it has no
    minimum. The exponentials of log-probabilities sum to 1.
    """
    if outputs[0].shape[1] < 2:
        return None
    present, targets = torch.ones(_ROWS), torch.zeros(_ROWS, dtype=torch.int64)
    falls = False
    with suppress(Exception):
        terms, moved = (task.loss.records(outputs[0] + shift, targets, present) for shift in (0.0, 3.0))
        falls = torch.allclose(terms - 3.0, moved, rtol=1e-3, atol=1e-3)
    if not falls or all(output.logsumexp(1).abs().max() < 1e-2 for output in outputs):
        return None
    return (
        "The loss expects log-probabilities, and the model's outputs are none: it can be lowered without end "
        "and learns "
        "nothing of the classes. End the model with a log-softmax, or take cross_entropy, which applies it."
    )


def _bounded(task: Task, outputs: list[Float[Tensor, "n k"]]) -> str | None:
    """Return a remark if the last layer keeps outputs within [-1, 1] although the loss expects logits.

    A model with random parameters whose outputs stay within [-1, 1] on every synthetic record has such a layer; an
    unbounded model exceeds 1 on at least the largest records.
    """
    if max(float(output.abs().max()) for output in outputs) > 1 or not _takes_logits(task.loss, outputs[0]):
        return None
    return (
        "The model's outputs stay between -1 and 1 whatever its parameters and features are, and its loss takes them "
        "for logits: it applies the softmax or the sigmoid itself. Leave out the last layer (a softmax, sigmoid or "
        "tanh): with it the model can be sure of nothing and hardly learns."
    )


def _takes_logits(loss: Loss, outputs: Float[Tensor, "n k"]) -> bool:
    """Return whether a loss applies a softmax or a sigmoid to the outputs itself.

    A softmax is invariant to a constant that is added to all outputs. A sigmoid with cross-entropy is proportional
    to softplus(z) at target 0.
    """
    present, targets = torch.ones(len(outputs)), torch.zeros(len(outputs), dtype=torch.int64)
    with suppress(Exception):
        if outputs.shape[1] > 1:
            terms, moved = (loss.records(outputs + shift, targets, present) for shift in (0.0, 3.0))
            return torch.allclose(terms, moved, rtol=1e-3, atol=1e-4)
        logits = torch.linspace(-2.0, 2.0, len(outputs))[:, None]
        ratio = loss.records(logits, targets, present) / nn.functional.softplus(logits[:, 0])
        return torch.allclose(ratio, ratio[:1], rtol=1e-3)
    return False


def _features(task: Task, population: Population) -> str | None:
    """Return a remark if features of the public test records are far from the scale of networks' inputs."""
    if population.test_features.dtype.kind not in "fc" or any(
        isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in task.model.modules()
    ):
        return None
    size = _size(population.scale.apply(np.asarray(population.test_features)))
    if SMALLEST <= size <= LARGEST:
        return None
    return (
        f"Features of the public test records have the size {size:.1g} (root mean square); models train well near 1. "
        "Divide all features by public constants (declared bounds, lower and upper, do it for tables), or the clip is "
        "spent on their unit."
    )


def _targets(population: Population) -> str | None:
    """Return a remark if the targets of the public test records are larger than a model can reach from 0."""
    if population.task not in ("regression", "multi-output"):
        return None
    size = _size(np.asarray(population.test_targets, dtype=np.float64))
    if size <= LARGEST:
        return None
    return (
        f"Targets of the public test records have the size {size:.1g} (root mean square); models begin near 0. Divide "
        "targets by a public constant."
    )


def _size(values: np.ndarray) -> float:
    """Return the root mean square of the largest column; 1 if all values are zero."""
    columns = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    largest = float(np.sqrt((columns**2).mean(axis=0)).max(initial=0.0))
    return largest or 1.0


# --- too few people, or a loss that teaches nothing ---

_DELTA_SHARE: Final = 10
"""A delta of 1 / (10 |U|) or more gives a warning."""


def people_warnings(prepared: Prepared) -> tuple[Warning, ...]:
    """Return the warnings about a run, computed from public numbers only.

    Let rho = sqrt(d) / (|U| mu) be the noise-to-travel ratio, for d parameters and a run of Gaussian strength mu. Noise
    is a large part of the model if rho > 1/4, and most of it if rho > 1. Each of the three remedies (more people, a
    larger epsilon, a smaller model) gives rho = 1/4 by itself.
    """
    epsilon = prepared.epsilon_after(prepared.experiment.rounds)
    if not math.isfinite(epsilon):
        return ()
    candidates = [_few_people(prepared, epsilon), _large_delta(prepared), _lone_records(prepared)]
    return tuple(warning for warning in candidates if warning is not None)


def explain_open_server(experiment: Experiment, epsilon: float | None, to_server: float | None) -> str | None:
    """Return why nothing is guaranteed against the server though readers are bounded, and what would change it.

    Args:
        experiment: the experiment.
        epsilon: against readers of the models; None: nothing is guaranteed.
        to_server: the same against the server.

    Returns:
        A sentence; None if the server is bounded, nobody is, or a protection was chosen.
    """
    power = experiment.method.get("power")
    counts = power == "main" or (isinstance(power, float) and power > 0)
    if epsilon is None or to_server is not None or experiment.protection.name != "none" or power is None:
        return None
    linked = "method.power = 'linked' and " if counts else ""
    return (
        "nothing is guaranteed against the server, which sees the silos' sums one by one: "
        f"{linked}protection.name = 'secure-aggregation' shows it their total alone (in Python protection=)"
    )


def _large_delta(prepared: Prepared) -> Warning | None:
    users, delta = prepared.population.n_users, prepared.experiment.privacy.delta
    if delta < 1 / (_DELTA_SHARE * users):
        return None
    return LargeDeltaWarning(
        f"delta = {delta:g} allows to publish the records of {delta * users:.2g} of {users} people in expectation; "
        f"take a delta below {1 / (_DELTA_SHARE * users):.2g}"
    )


def _lone_records(prepared: Prepared) -> Warning | None:
    """Return a warning if a loss compares records, and a contribution holds those of one user in one silo."""
    method: Any = prepared.method
    loss = prepared.task.loss
    if loss.separable or method.local.sums_records or method.contribution.per not in ("pair", "record"):
        return None
    return UserWarning(
        f"the loss {loss.name} compares records with each other, and one contribution holds those of one user in one "
        "silo: a user with a single record there moves nothing. The method newton with a horizon (target.horizon in "
        "the schema, model whitened-hazards) compares no records"
    )


def noise_ratio_of(prepared: Prepared) -> float | None:
    """Return rho of a run (:func:`fedveil.methods.noise_ratio.noise_ratio`), from public numbers only."""
    people = prepared.population
    public = PublicFacts(n_silos=people.n_silos, n_users=people.n_users, dimension=prepared.task.dimension)
    return noise_ratio(prepared.method, public, prepared.experiment.rounds)


def _few_people(prepared: Prepared, epsilon: float) -> Warning | None:
    ratio, people, dimension = noise_ratio_of(prepared), prepared.population, prepared.task.dimension
    if ratio is None or ratio <= SCALE:
        return None
    remedies = [f"{math.ceil(people.n_users * ratio / SCALE)} people"]
    if (more := _epsilon_at(prepared, ratio)) is not None:
        remedies.append(f"epsilon {show_epsilon(more)}")
    remedies.append(f"a model of {max(1, math.floor(dimension * (SCALE / ratio) ** 2))} parameters")
    which = ", or ".join(remedies)
    mostly = " The model will be mostly noise; no clip and no rate changes that." if ratio > 1 else ""
    return TooFewPeopleWarning(
        f"{people.n_users} people, {dimension} parameters, epsilon {show_epsilon(epsilon)}: noise is {ratio:.2g} of "
        f"the largest possible movement of the model. {SCALE:g} needs {which}.{mostly}"
    )


def _epsilon_at(prepared: Prepared, ratio: float) -> float | None:
    """Return the epsilon at which the ratio is SCALE; None if users are sampled, whose epsilon is another function."""
    method, rounds = prepared.method, prepared.experiment.rounds
    noise = sum_noise_std(method, prepared.population.n_silos)
    if (
        method.sampler.rate < 1
        or method.sampler.adjacency is not Adjacency.ADD_OR_REMOVE_ONE
        or noise is None
    ):
        return None
    release = GaussianEvent(noise_multiplier=noise / method.bound.norm / math.sqrt(rounds) * SCALE / ratio)
    try:
        return make_accountant("pld").epsilon(release, prepared.experiment.privacy.delta)
    except PrivacyError:  # more than the accountant counts
        return None

"""Attack a run and report the attacks' results next to its privacy claim (`fedveil audit RUN`).

Two attacks run:

1. Loss-threshold membership inference on the run's last model: which records was the model trained on?
2. The one-run audit. It trains once more, under the same experiment and with fresh noise. Each of m canary units is
   left out with probability 1/2, and the attack guesses from ALL released rounds which canaries were in.

Let the rows of U_t be the updates of the canaries from w_t, each bounded as the method bounds it. The score of
canary i is component i of

    sum over the run's complete rounds of (U_t U_t^T + r I)^{-1} U_t Delta_t,

the ridge regression of the released mean Delta_t on the canaries' updates. It estimates the contribution of each
canary. The mean is (w_{t+1} - w_t) / eta under a plain step; other server steps are assumed to be inverted by the
attacker. (Andrew et al. 2024, "One-shot empirical privacy estimation for federated learning", score random canaries
by inner products alone.) The scores and coins give a lower bound on epsilon for the unit that the run's statement
protects.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.data.records import Groups, Population, Records
from fedveil.errors import ConfigError, RunFolderError
from fedveil.methods.method import begin_state, sum_noise_std
from fedveil.privacy.audit import (
    EpsilonBound,
    Membership,
    attack_accuracy,
    canary_bound,
    membership,
    membership_bound,
)
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.task_choice import check_code
from fedveil.run.folder.diagnostics import require_same_records
from fedveil.run.folder.documents import read_statement
from fedveil.run.folder.run_folder import RunFolder, stored_tensors
from fedveil.run.process_group import require_one_process
from fedveil.run.setup import Prepared, prepare, setting_with
from fedveil.run.simulation import SimulatedParties, play_round
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.server.optimizers import Model, Optimizer, State, Vector
from fedveil.training.steps import LocalGradient
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trainer_choice import choose_trainer

_MOST_RECORDS = 20_000
_MOST_CANARY_FLOATS = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Results of the attacks on a run.

    Attributes:
        claimed: epsilon of the run's statement; None if the run guarantees nothing.
        unit: the protected unit of the statement.
        inference: membership inference on the run's last model.
        bound: lower bound on the epsilon of training under the same experiment; None if it was not requested.
        accuracy_bound: largest probability, by the claim, that an attacker is right about one unit that a fair coin
            put in; None if the run guarantees nothing.
        membership_bound: the same by 1/2 + epsilon / 4 + delta (DP-Fed-LS, section 6.4).
    """

    claimed: float | None
    unit: str
    inference: Membership
    bound: EpsilonBound | None
    accuracy_bound: float | None
    membership_bound: float | None

    @property
    def is_refuted(self) -> bool:
        """Return whether the claimed epsilon lies below the lower bound of an attack."""
        return self.claimed is not None and self.bound is not None and self.bound.epsilon > self.claimed


def audit(
    path: Path,
    *,
    canaries: int = 200,
    code: Collection[str] = (),
    prepared: Prepared | None = None,
) -> Audit:
    """Attack a run and write ``audit.json`` into its folder.

    Args:
        path: folder of a complete run.
        canaries: number of units in the one-run audit; 0 skips this audit, which trains once more.
        code: import paths of models, losses and metrics that the folder may name and that may run.
        prepared: the run's experiment over the objects with which it began; None: read them as the folder names them.

    Raises:
        RunFolderError: the path is not a run folder; the run has no model or statement yet; the folder does not
            name the training records, or the records at hand differ; or the folder is not writable (checked before
            training).
        ConfigError: more canaries than users, too many canaries for the memory, an import path missing from ``code``,
            or several processes of ``torchrun``.
        DataError: the training records of the run are missing.
    """
    require_one_process("an audit")
    folder, experiment = RunFolder.open(path)
    for name in ("model.safetensors", "privacy.json"):
        if not (folder / name).is_file():
            raise RunFolderError(
                f"{path}: has no {name}: an audit needs a run that ended; `fedveil resume {path}` ends it"
            )
    if not os.access(path, os.W_OK):
        raise RunFolderError(
            f"{path}: audit.json and report.html are left there, and nothing can be written; audit a copy of the folder"
        )
    statement = read_statement(folder / "privacy.json")
    if prepared is None:
        check_code(experiment, code, path)
        prepared = prepare(experiment)
    require_same_records(folder, prepared)
    with stored_tensors(folder / "model.safetensors") as stored:
        named = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    if {name: value.shape for name, value in named.items()} != dict(
        zip(prepared.task.layout.names, prepared.task.layout.shapes, strict=True)
    ):
        raise RunFolderError(f"{path}: model.safetensors is not the model that experiment.toml describes")
    model = torch.cat([named[name].reshape(-1) for name in prepared.task.layout.names])
    bound = None
    if canaries:
        n_rounds = _rounds_of(folder)
        coins, scores = canary_scores(prepared, canaries, experiment.privacy.randomness(), n_rounds)
        bound = canary_bound(scores, coins, delta=statement.delta)
    result = Audit(
        claimed=statement.epsilon,
        unit=statement.unit,
        inference=infer_membership(prepared, model),
        bound=bound,
        accuracy_bound=attack_accuracy(statement),
        membership_bound=membership_bound(statement),
    )
    folder.write_json("audit.json", {**asdict(result), "refuted": result.is_refuted})
    return result


def _rounds_of(folder: RunFolder) -> int:
    """Return the number of rounds that a run played, which its claim covers.

    Raises:
        RunFolderError: the folder has no checkpoint.
    """
    checkpoint = folder.read_checkpoint()
    if checkpoint is None:
        raise RunFolderError(f"{folder.path}: has no checkpoint: how many rounds it played is unknown")
    return checkpoint.round


def infer_membership(prepared: Prepared, model: Float32[Tensor, " d"]) -> Membership:
    """Attack a model by its loss: compare training records with equally many test records.

    The experiment's seed samples the records. Records of a contribution with weight 0, such as those outside a
    user's main silo, were not trained on and are not members.

    Args:
        prepared: the experiment that ran.
        model: (d,) parameters of the attacked model.
    """
    population, setting = prepared.population, prepared.setting
    # `groups.order` lists the records by contribution, so a contribution's weight is repeated `size` times.
    trained = np.repeat(setting.weights.cpu().numpy() > 0, setting.cohort.groups.size)
    train = setting.cohort.groups.order[trained]
    count = min(len(train), len(population.test_targets), _MOST_RECORDS)
    random = ExperimentRandomness(prepared.experiment.seed).numpy("audit", "records")
    members = random.choice(train, count, replace=False)
    non_members = random.choice(len(population.test_targets), count, replace=False)
    records = population.train
    return membership(
        -_losses(prepared, model, population, records.features[members], records.targets[members]),
        -_losses(
            prepared,
            model,
            population,
            population.test_features[non_members],
            population.test_targets[non_members],
        ),
    )


def _losses(
    prepared: Prepared,
    model: Float32[Tensor, " d"],
    population: Population,
    features: np.ndarray,
    targets: np.ndarray,
) -> Float64[np.ndarray, " n"]:
    """Return the loss of each record by itself; a NaN counts as infinite.

    Args:
        prepared: the experiment that ran.
        model: (d,) parameters of the attacked model.
        population: supplies the scale of the features.
        features: (n, ...) features of the records.
        targets: (n,) targets of the records.
    """
    raw = torch.from_numpy(population.scale.apply(np.asarray(features)))
    outputs = prepared.task.predict(model, raw)
    alone = torch.ones(len(outputs), dtype=torch.bool)
    losses = (
        prepared.task.loss.records(outputs, torch.from_numpy(np.asarray(targets)), alone).double().numpy()
    )
    return np.asarray(np.nan_to_num(losses, nan=np.inf))


def canary_scores(
    prepared: Prepared, canaries: int, privacy: PrivacyRandomness, rounds: int
) -> tuple[np.ndarray, Float64[np.ndarray, " m"]]:
    """Train once, leaving each canary out with probability 1/2; return coins (True: in) and scores.

    Canaries are users with records as long as enough of them exist. Users without records have score 0. Thus the
    number of users with records, which is private, does not decide whether the audit is refused.

    Args:
        prepared: the experiment that ran.
        canaries: m.
        privacy: source of coins, noise and samples.
        rounds: number of rounds to play: those that the claim covers. A budget or a callback may have ended the run
            early.

    Returns:
        (m,) bool coins and (m,) float64 scores.

    Raises:
        ConfigError: more canaries than users, or more than 2^28 numbers in all canaries' updates.
    """
    records, n_users = prepared.population.train, prepared.population.n_users
    if canaries > n_users:
        raise ConfigError(f"{canaries} canaries, but only {n_users} users; ask for at most that many")
    if canaries * prepared.length > _MOST_CANARY_FLOATS:
        most = _MOST_CANARY_FLOATS // prepared.length
        raise ConfigError(
            f"{canaries} canaries of {prepared.length} numbers do not fit; ask for at most {most}"
        )
    present = np.unique(records.user)
    random = ExperimentRandomness(prepared.experiment.seed).numpy("audit", "canaries")
    chosen = np.sort(random.choice(present, min(canaries, len(present)), False))
    # The top bit of each uint64 is a fair coin.
    coins = (privacy.stream("audit", "coins").uint64(canaries) >> np.uint64(63)).astype(bool)
    included = ~np.isin(records.user, chosen[~coins[: len(chosen)]])
    # Train without the canaries whose coin is False; the watching cohort below holds all canaries.
    setting = setting_with(prepared, records.select(np.flatnonzero(included)))
    watcher = _canary_cohort(prepared, records, chosen)
    everyone, ones = torch.arange(len(chosen)), torch.ones(len(chosen), dtype=torch.float64)
    model, scores = prepared.task.initial(), np.zeros(len(chosen))
    # r = sigma^2 / Var(coin), the ridge of the best linear estimator; a fair coin has variance 1/4.
    ridge = 4 * (sum_noise_std(setting.method, setting.cohort.n_silos) or 0.0) ** 2
    experiment = ExperimentRandomness(prepared.experiment.seed)
    released = _Released(setting.method.server)
    state = begin_state(replace(setting.method, server=released), model)
    first = as_trained(setting.method.local, 1)
    # Choose the trainer once: the choice tries kernels, and the rounds differ in their learning rate only.
    watching = (
        RecordSumsTrainer(task=prepared.task, local=first)
        if first.sums_records
        else choose_trainer(prepared.task, first, cohort=watcher, bound=setting.method.bound)
    )
    # Plaintext parties yield the same sums as the method's protection, which only hides how they are computed.
    parties = SimulatedParties.in_the_open(setting)
    for number in range(1, rounds + 1):
        context = prepared.round_context(number, model, state, privacy, measured=False)
        # Only the server's optimiser is replaced, by one that also records Delta_t.
        context = replace(context, setting=replace(setting, method=replace(setting.method, server=released)))
        bound = setting.method.at_round(number, state).bound
        after, state, _ = play_round(context, parties)
        local = as_trained(setting.method.local, number)
        trainer = replace(watching, local=local)
        path = ("audit", number)
        # U_t: the canaries' updates from w_t under this round's bound; each silo holds one canary, so sums are
        # updates.
        job = TrainJob(model, watcher, everyone, ones, bound, experiment, path)
        updates = trainer.sums(job).total
        # The updates are in the bound's unit and the mean is in the model's: divide by `unit`.
        scores += _attribution(updates, released.mean.to(updates.device) / bound.unit, ridge)
        model = after
    return coins, np.concatenate([scores, np.zeros(canaries - len(chosen))])


class _Released(Optimizer):
    """The method's optimiser with a record of the last mean, so that the attack need not invert steps."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner, self.mean = inner, torch.zeros(0, dtype=torch.float64)
        self._noise_std = 0.0

    @property
    def reads(self) -> str:  # type: ignore[override]
        """Kind of the vectors that the method's optimiser reads."""
        return self._inner.reads

    def at_noise(self, noise_std: float) -> _Released:
        """Return this optimiser, whose next step is told the noise."""
        self._noise_std = noise_std
        return self

    def init(self, model: Model) -> State:
        """Return the state before the first round."""
        return self._inner.init(model)

    def step(self, model: Model, mean: Vector, state: State) -> tuple[Model, State]:
        """Return the next model and state, and record the mean."""
        self.mean = mean
        return self._inner.at_noise(self._noise_std).step(model, mean, state)


def as_trained(local: Any, number: int) -> Any:
    """Return the local step that computes a canary's update.

    It is the method's step with the learning rate of round ``number``, or one gradient under DP-SGD, whose unit is
    a record.
    """
    return LocalGradient() if local.own_noise else local.at_round(number)


def _attribution(
    updates: Float64[Tensor, "m d"], step: Float64[Tensor, " d"], ridge: float
) -> Float64[np.ndarray, " m"]:
    """Return the ridge regression (U U^T + r I)^{-1} U Delta of a step on the canaries' updates.

    Args:
        updates: (m, d) matrix U.
        step: (d,) released mean Delta.
        ridge: r, the noise variance over the coin's variance.

    Returns:
        (m,) float64 contribution of each canary.
    """
    gram = updates @ updates.T
    # Without noise r = 0 and the Gram matrix may be singular: add 0.1 % of its mean diagonal; 1e-300 covers U = 0.
    strength = ridge + 1e-3 * float(gram.diagonal().mean()) + 1e-300
    solved = torch.linalg.solve(gram + strength * torch.eye(len(gram)).to(gram), updates @ step)
    return np.asarray(solved.cpu().numpy())


def _canary_cohort(prepared: Prepared, records: Records, chosen: np.ndarray) -> Cohort:
    """Return the canaries as contributions, each alone in a silo, so that every silo sum is one update.

    Args:
        prepared: the experiment that ran.
        records: the training records of all users.
        chosen: (m,) user ids of the canaries, ascending.
    """
    order = np.argsort(records.user, kind="stable")
    start = np.searchsorted(records.user[order], chosen, side="left")
    stop = np.searchsorted(records.user[order], chosen, side="right")
    groups = Groups(
        order=order,
        start=start.astype(np.int64),
        size=(stop - start).astype(np.int64),
        silo=np.arange(len(chosen), dtype=np.int32),
        user=chosen.astype(np.int32),
    )
    return Cohort.from_records(
        records,
        groups=groups,
        n_silos=len(chosen),
        scale=prepared.population.scale,
        device=prepared.setting.cohort.device,
    )

"""`fedveil audit RUN`: attack a run, and put what the attacks show beside what it claims.

Two attacks. Loss-threshold membership inference asks of the run's own last model which records it was trained on. The
one-run audit trains once more, under the same experiment and with fresh noise, with every canary unit left out with
probability 1/2, and guesses from ALL released rounds which canaries were in. With U_t the matrix of the updates that
the canaries would make from w_t, each bounded as the method bounds it, the score of canary i is component i of

    sum over the run's complete rounds of (U_t U_t^T + r I)^{-1} U_t Delta_t,

the ridge regression of the released mean Delta_t on the canaries' updates: what each of them seems to have put in. The
mean is (w_{t+1} - w_t) / eta under a plain step; any other step of the server is taken to be undone. (Andrew et al.
2024, "One-shot empirical privacy estimation for federated learning", score random canaries by inner products alone.) A
lower bound on epsilon follows, for the unit that the run's own statement protects.
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
from fedveil.privacy.audit import EpsilonBound, Membership, canary_bound, membership
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.named_code import check_code
from fedveil.run.folder.diagnostics import require_same_records
from fedveil.run.folder.documents import read_statement
from fedveil.run.folder.run_folder import RunFolder, stored_tensors
from fedveil.run.rounds.round_loop import play_round
from fedveil.run.rounds.simulated_parties import SimulatedParties
from fedveil.run.setup import Prepared, prepare, setting_with
from fedveil.training.server.optimizers import Model, Optimizer, State, Vector
from fedveil.training.steps import LocalGradient, LocalSgd
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trainer_choice import choose_trainer

_MOST_RECORDS = 20_000
_MOST_CANARY_FLOATS = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the attacks on a run show.

    Attributes:
        claimed: the run's epsilon; None if it guarantees nothing.
        unit: what it protects.
        inference: membership inference on the run's own last model.
        bound: the lower bound on epsilon of training under the same experiment; None if it was not asked for.
    """

    claimed: float | None
    unit: str
    inference: Membership
    bound: EpsilonBound | None

    @property
    def is_refuted(self) -> bool:
        """Whether the claim lies below what an attack demonstrates."""
        return self.claimed is not None and self.bound is not None and self.bound.epsilon > self.claimed


def audit(
    path: Path,
    *,
    canaries: int = 200,
    code: Collection[str] = (),
) -> Audit:
    """Attack a run and write ``audit.json`` into its folder.

    Args:
        path: the run folder of a complete run.
        canaries: units of the one-run audit; 0 leaves it out (it trains once more).
        code: import paths of models, losses and metrics that the folder may name, and that may run.

    Raises:
        RunFolderError: no run folder, a run that has no model or statement yet, or one whose members are unknown: it
            does not say which records it was trained on, or those at hand are others; or a folder where nothing can be
            written, before anything is trained.
        ConfigError: more canaries than users, or too many for the memory; code that is not named.
        DataError: the records that the run was trained on are not here.
    """
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
    check_code(experiment, code, path)
    statement = read_statement(folder / "privacy.json")
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
        played = _rounds_of(folder)
        coins, scores = canary_scores(prepared, canaries, experiment.privacy.randomness(), played)
        bound = canary_bound(scores, coins, delta=statement.delta)
    found = Audit(
        claimed=statement.epsilon,
        unit=statement.unit,
        inference=infer_membership(prepared, model),
        bound=bound,
    )
    folder.write_json("audit.json", {**asdict(found), "refuted": found.is_refuted})
    return found


def _rounds_of(folder: RunFolder) -> int:
    """Return how many rounds a run played, which its claim is about."""
    checkpoint = folder.read_checkpoint()
    if checkpoint is None:
        raise RunFolderError(f"{folder.path}: has no checkpoint: how many rounds it played is unknown")
    return checkpoint.round


def infer_membership(prepared: Prepared, model: Float32[Tensor, " d"]) -> Membership:
    """Attack a model by its loss: training records against as many test records, drawn by the experiment's seed.

    Records of a contribution without weight, as outside of a user's main silo, were not trained on: they are no
    members.
    """
    population, setting = prepared.population, prepared.setting
    trained = np.repeat(setting.weights.cpu().numpy() > 0, setting.cohort.groups.size)
    train = setting.cohort.groups.order[trained]
    count = min(len(train), len(population.test_targets), _MOST_RECORDS)
    random = ExperimentRandomness(prepared.experiment.seed).numpy("audit", "records")
    members = random.choice(train, count, replace=False)
    others = random.choice(len(population.test_targets), count, replace=False)
    records = population.train
    return membership(
        -_losses(prepared, model, population, records.features[members], records.targets[members]),
        -_losses(
            prepared, model, population, population.test_features[others], population.test_targets[others]
        ),
    )


def _losses(
    prepared: Prepared,
    model: Float32[Tensor, " d"],
    population: Population,
    features: np.ndarray,
    targets: np.ndarray,
) -> Float64[np.ndarray, " n"]:
    """Return the loss of each record by itself, not-a-number counted as infinite."""
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
    """Train once with each canary left out with probability 1/2; return the coins (True: in) and the scores.

    Canaries are users with records as long as there are any; users without are scored 0, so that how many there are
    decides no refusal.

    Args:
        prepared: what ran.
        canaries: m.
        privacy: where coins, noise and samples come from.
        rounds: that are played: as many as the claim is about, which a budget or a callback may have ended early.
    """
    records, n_users = prepared.population.train, prepared.population.n_users
    if canaries > n_users:
        raise ConfigError(f"{canaries} canaries, but only {n_users} users; ask for at most that many")
    if canaries * prepared.task.dimension > _MOST_CANARY_FLOATS:
        most = _MOST_CANARY_FLOATS // prepared.task.dimension
        raise ConfigError(
            f"{canaries} canaries of {prepared.task.dimension} parameters do not fit; ask for at most {most}"
        )
    present = np.unique(records.user)
    random = ExperimentRandomness(prepared.experiment.seed).numpy("audit", "canaries")
    chosen = np.sort(random.choice(present, min(canaries, len(present)), False))
    coins = (privacy.stream("audit", "coins").uint64(canaries) >> np.uint64(63)).astype(bool)
    kept = ~np.isin(records.user, chosen[~coins[: len(chosen)]])
    setting = setting_with(prepared, records.select(np.flatnonzero(kept)))
    watcher = _canary_cohort(prepared, records, chosen)
    everyone, ones = torch.arange(len(chosen)), torch.ones(len(chosen), dtype=torch.float64)
    model, scores = prepared.task.initial(), np.zeros(len(chosen))
    ridge = (
        4 * (setting.method.noise_std(setting.cohort.n_silos) or 0.0) ** 2
    )  # noise over the variance of a fair coin
    experiment = ExperimentRandomness(prepared.experiment.seed)
    released = _Released(setting.method.server)
    state = replace(setting.method, server=released).init(model)
    first = as_trained(setting.method.local, 1)
    # Once: choosing tries kernels, and the rounds differ in their learning rate alone.
    watching = choose_trainer(prepared.task, first, cohort=watcher, bound=setting.method.bound)
    parties = SimulatedParties.in_the_open(setting)  # the sums of the method, whatever hides them
    for number in range(1, rounds + 1):
        turn = prepared.round_context(number, model, state, privacy, measured=False)
        turn = replace(turn, setting=replace(setting, method=replace(setting.method, server=released)))
        bound = setting.method.at_round(number, state).bound
        after, state, _ = play_round(turn, parties)
        local = as_trained(setting.method.local, number)
        trainer = replace(watching, local=local)
        path = ("audit", number)
        job = TrainJob(model, watcher, everyone, ones, bound, experiment, path)
        updates = trainer.sums(job).total
        scores += _attribution(updates, released.mean.to(updates.device) / bound.unit, ridge)
        model = after
    return coins, np.concatenate([scores, np.zeros(canaries - len(chosen))])


class _Released(Optimizer):
    """A method's optimiser, and the last mean that it was given: who attacks need not undo its steps."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner, self.mean = inner, torch.zeros(0, dtype=torch.float64)

    def init(self, model: Model) -> State:
        """Return the state before the first round."""
        return self._inner.init(model)

    def step(self, model: Model, mean: Vector, state: State) -> tuple[Model, State]:
        """Return the next model and state; keep the mean."""
        self.mean = mean
        return self._inner.step(model, mean, state)


def as_trained(local: Any, number: int) -> LocalSgd | LocalGradient:
    """Return the local step by which a canary's update is told: the method's, or a gradient for DP-SGD's records."""
    at_round: LocalSgd | LocalGradient = LocalGradient() if local.own_noise else local.at_round(number)
    return at_round


def _attribution(
    updates: Float64[Tensor, "m d"], step: Float64[Tensor, " d"], ridge: float
) -> Float64[np.ndarray, " m"]:
    """Return the ridge regression of the model's step on the canaries' updates."""
    gram = updates @ updates.T
    strength = ridge + 1e-3 * float(gram.diagonal().mean()) + 1e-300
    solved = torch.linalg.solve(gram + strength * torch.eye(len(gram)).to(gram), updates @ step)
    return np.asarray(solved.cpu().numpy())


def _canary_cohort(prepared: Prepared, records: Records, chosen: np.ndarray) -> Cohort:
    """Return the canaries as contributions of their own, each alone in a silo of its own, so that sums are single."""
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

"""What a federation would guarantee, before any data exists: rows of sigma, rounds, rate and epsilon per method.

The rows come from the same derivation as a run's statement: a method is composed for the planned federation, its
guarantee derived, and the event composed over the rounds. Where clients are sampled, the closed forms of DP-Fed-LS
stand beside the accountant (Figure S9): rows of the accountants "theorem 1" and "theorem 2", infinite outside their
domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedveil.crypto.ckks import CkksParameters
from fedveil.errors import ConfigError, FedveilError
from fedveil.methods.derive import derive
from fedveil.methods.dp_fed_ls import dp_fed
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.noise_ratio import noise_to_displacement, rounds_by_rule, step_by_rule
from fedveil.methods.uldp import uldp_avg_w, uldp_group, uldp_naive
from fedveil.privacy.accountant import Accountant, explain_large_delta, is_large_delta
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import calibrate_noise, calibrate_rounds
from fedveil.privacy.events import Event, SelfComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.run.folder.run_folder import Row, finite
from fedveil.training.server.denoise import SMOOTHED_FROM, effective_dimensions
from fedveil.training.steps import LocalSgd

_POINTS = 12


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A federation as it is planned; every number is public.

    Attributes:
        n_users, n_silos: |U| and |S|.
        rounds: T, at most; None finds the most rounds that the target ``epsilon`` allows each sigma.
        noise_multipliers: values of sigma; empty finds the least sigma that keeps T rounds within ``epsilon``.
        sampling_rates: values of q, the Poisson rate of users.
        delta: of the guarantee.
        epsilon: a target, from which rounds or noise are found; None where both are given.
        group_sizes: values of k of uldp-group.
        records_per_silo, batch_size, epochs: of DP-SGD in uldp-group.
        colluding_silos: so many silos together have the noise of the guarantee against them.
        accountant: its name.
        client_sampling_rates: values of tau, the share of the clients in a round of dp-fed; a client is a user.
        allow_large_delta: whether delta may be 1 / n_users or more.
    """

    n_users: int
    n_silos: int
    rounds: int | None
    noise_multipliers: tuple[float, ...]
    sampling_rates: tuple[float, ...]
    delta: float
    epsilon: float | None
    group_sizes: tuple[int, ...]
    records_per_silo: int
    batch_size: int
    epochs: int
    colluding_silos: int
    accountant: str
    client_sampling_rates: tuple[float, ...] = ()
    allow_large_delta: bool = False

    def __post_init__(self) -> None:
        make_accountant(self.accountant)
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ConfigError(f"epsilon = {self.epsilon}: a target must be above 0 and finite")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta = {self.delta}: must be above 0 and below 1")
        if is_large_delta(self.delta, self.n_users) and not self.allow_large_delta:
            raise ConfigError(
                f"{explain_large_delta(self.delta, self.n_users)}, or, to plan it all the same, --allow-large-delta"
            )
        for sigma in self.noise_multipliers:
            if not 0 <= sigma < math.inf:
                raise ConfigError(f"sigma = {sigma}: a finite number >= 0 is needed")
        for rate in (*self.sampling_rates, *self.client_sampling_rates):
            if not 0 < rate <= 1:
                raise ConfigError(f"rate = {rate}: users are drawn with a probability above 0 and at most 1")
        given = (self.epsilon is not None, self.rounds is not None, bool(self.noise_multipliers))
        if sum(given) != 2:
            raise ConfigError(
                "a plan takes two of epsilon, rounds and sigma (noise multipliers), and finds the third; "
                f"{sum(given)} are given"
            )


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A method in one of the settings that a plan compares.

    Attributes:
        label: its name, or the names of methods with the same guarantee.
        rate: the share of the users in a round.
        build: its builder.
        keys: of the builder, all but the noise multiplier.
    """

    label: str
    rate: float
    build: Callable[..., Method]
    keys: Mapping[str, Any]

    def method(self, sigma: float) -> Method:
        """Return the method at a noise multiplier."""
        return self.build(clip=1.0, noise_multiplier=sigma, **self.keys)


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """The rows of a plan, and why others are missing: every row stands alone.

    Attributes:
        rows: method, setting, number of rounds and what they cost.
        refused: the same keys with a ``reason`` instead of the cost, for rows that have no number.
        left_out: names of the methods that the plan's accountant has no bound for.
    """

    rows: list[Row] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _errors: list[FedveilError] = field(default_factory=list)

    @contextmanager
    def attempting(self, row: Row) -> Iterator[None]:
        """Note a row as refused if the block raises an error of the plan's own."""
        try:
            yield
        except FedveilError as error:
            self._errors.append(error)
            self.refused.append({**row, "reason": str(error)})

    def checked(self) -> PlanTable:
        """Return the table.

        Raises:
            FedveilError: no row has a number; the first refusal, with those of the other rows.
        """
        if self.rows or not self._errors:
            return self
        reasons = dict.fromkeys(f"{row['method']}: {row['reason']}" for row in self.refused)
        first = self._errors[0]
        raise type(first)(
            str(first) if len(self.refused) == 1 else "no row can be planned: " + "; ".join(reasons)
        )


def plan_rows(plan: Plan) -> PlanTable:
    """Return one row per method, setting and number of rounds, for the table and the plot.

    With a target epsilon the noise multiplier is the least one that keeps all T rounds within it, or, where sigma is
    given, T is the most rounds that stay within it (0 where one round is too much) and that the accountant can count. A
    method whose event the accountant does not support is left out. So is what the grid of the noise costs, which
    depends on the model: a run's statement adds it, 1e-8 to 5e-8 for 100 rounds of 10^5 parameters and 10 silos.

    Raises:
        FedveilError: no row has a number.
    """
    found = PlanTable()
    for planned in _methods(plan):
        with found.attempting(_row(plan, planned, None)):
            if not _supported(plan, planned):
                found.left_out.append(planned.label)
                continue
            for sigma in _noise_multipliers(plan, planned):
                with found.attempting(_row(plan, planned, sigma)):
                    _add_ladder(found, plan, planned, sigma)
    return found.checked()


def _row(plan: Plan, planned: _Planned, sigma: float | None) -> Row:
    """Return the keys of a row but for its cost; what is to be found is None."""
    return {
        "method": planned.label,
        "noise_multiplier": sigma,
        "rounds": plan.rounds,
        "users": plan.n_users,
        "sampling_rate": planned.rate,
    }


def _add_ladder(found: PlanTable, plan: Plan, planned: _Planned, sigma: float) -> None:
    """Add the rows of one method and noise to a table: numbers of rounds up to the most."""
    method, row = planned.method(sigma), _row(plan, planned, sigma)
    numerical, event = _accountant(plan, method), _event(plan, method)
    most = _most_rounds(plan, numerical, event)
    if most == 0:
        found.rows.append({**row, "rounds": 0, "epsilon": 0.0, "accountant": plan.accountant})
    for rounds in _ladder(most) if most else ():
        at: Row = {**row, "rounds": rounds}
        with found.attempting(at):  # the accountant may count fewer rounds than are asked for
            spent = SelfComposedEvent(event=event, count=rounds)
            epsilon = finite(numerical.epsilon(spent, plan.delta))
            found.rows.append({**at, "epsilon": epsilon, "accountant": plan.accountant})
            form = method.closed_form
            if form is not None:  # Theorem 1 (uniform) or 2 (Poisson) of DP-Fed-LS
                bound = finite(form.epsilon(rounds, sigma, plan.delta))
                found.rows.append({**at, "epsilon": bound, "accountant": form.name})


def noise_ratio_rows(plan: Plan, parameters: int, rounds: Sequence[int]) -> PlanTable:
    """Return one row per sampling rate and number of rounds: how much noise a run of pairs has beside its way.

    At a target epsilon: the noise multiplier z that T rounds need, the noise-to-travel ratio rho, the step that the
    rule proposes for it (min(3, 0.25 / rho) mean updates), the way eta T and the noise eta T rho of the last model,
    both in units of the clip, that noise under Laplacian smoothing with sigma = 1, sqrt(d~_sigma / d) of it
    (Proposition 1 of DP-Fed-LS: what smoothing buys; what it takes of the way no public number tells), whether
    ``denoiser = "by-rule"`` smooths, the rounds that go as far as the rule would without its cap on steps, the
    rho under other weights than the main silo's, and what all silos send in float64.

    With all weight in one silo a user's sum is as long as the update. By records it may be shorter by sqrt(|S|),
    for updates at right angles of a user who is everywhere alike; with weights 1 / |S| by |S|, for a user of one silo.
    The noise is the same, so rho is up to that many times as large.

    Args:
        plan: its ``epsilon`` is the target; its own rounds and noise multipliers are not read.
        parameters: d.
        rounds: every T.

    Raises:
        ConfigError: no target epsilon, or a number of rounds or parameters below 1.
        FedveilError: no row has a number.
    """
    if plan.epsilon is None:
        raise ConfigError("--over rounds=...: rounds are compared at one epsilon; give --epsilon")
    if parameters < 1 or not rounds or min(rounds) < 1:
        raise ConfigError("--over rounds=...: rounds and --parameters are whole numbers of at least 1")
    public = PublicFacts(n_silos=plan.n_silos, n_users=plan.n_users, dimension=parameters)
    kept = math.sqrt(effective_dimensions(parameters, 1.0)[1] / parameters)
    found = PlanTable()
    for pairs in _pairs(plan):
        for number in rounds:
            at = replace(plan, rounds=number, noise_multipliers=())
            with found.attempting(_row(at, pairs, None)):
                found.rows.append(_travel_row(at, pairs, public, kept))
    return found.checked()


def _travel_row(plan: Plan, pairs: _Planned, public: PublicFacts, kept: float) -> Row:
    """Return one row of :func:`noise_ratio_rows`; ``kept`` is the share of the noise that smoothing leaves."""
    number, parameters = plan.rounds, public.dimension
    assert number is not None, "travel_rows gives it"
    assert parameters is not None, "travel_rows gives it"
    (sigma,) = _noise_multipliers(plan, pairs)
    ratio = noise_to_displacement(pairs.method(sigma), public, number)
    step = step_by_rule(ratio)
    return {
        "rounds": number,
        "sampling_rate": pairs.rate,
        "noise_multiplier": sigma,
        "rho": ratio,
        "rho_by_records": ratio * math.sqrt(plan.n_silos),
        "rho_uniform": ratio * plan.n_silos,
        "step": step,
        "way": step * number,
        "noise": step * number * ratio,
        "noise_smoothed": step * number * ratio * kept,
        "rounds_by_rule": rounds_by_rule(number, ratio),
        "smoothed_by_rule": ratio >= SMOOTHED_FROM,
        "mebibytes_up": 8 * parameters * plan.n_silos * number / 2**20,
    }


def ratio_rows(n_silos: int, parameters: int, ratios: Sequence[float]) -> list[Row]:
    """Return one row per share r of the parameters under encryption, which need no noise against the server.

    Theorem 1 of ParaAegis: what noise and clip leave of the gradient falls as 1 - r. It costs bytes: for every 4,096
    encrypted numbers a fresh CKKS ciphertext from each silo and one of their sum back, where others are 8 bytes each.

    Args:
        n_silos: |S|.
        parameters: d.
        ratios: every r.

    Raises:
        ConfigError: no parameter, or a share outside [0, 1].
    """
    if parameters < 1 or not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError("--over ratio=...: ratios are between 0 and 1, and --parameters is at least 1")
    ckks, rows = CkksParameters(silos=n_silos), []
    for ratio in ratios:
        hidden = round(ratio * parameters)
        blocks, clear = math.ceil(hidden / ckks.degree), 8 * (parameters - hidden)
        row: Row = {"ratio": ratio, "error_left": 1 - ratio}
        row["mebibytes_up"] = n_silos * (blocks * ckks.fresh_bytes + clear) / 2**20
        row["mebibytes_down"] = n_silos * (blocks * ckks.sum_bytes + clear) / 2**20
        rows.append(row)
    return rows


def read_over(text: str) -> tuple[str, tuple[float, ...]]:
    """Return the key and the values of ``rounds=T,T,...`` or ``ratio=r,r,...``.

    >>> read_over("rounds=10,50")
    ('rounds', (10, 50))

    Raises:
        ConfigError: another key, or no such numbers.
    """
    key, _, values = text.partition("=")
    try:
        number = {"rounds": int, "ratio": float}[key.strip()]
        return key.strip(), tuple(number(value) for value in values.split(","))
    except (KeyError, ValueError):
        raise ConfigError(
            f"--over {text}: expected rounds=T,T,... or ratio=r,r,..., for instance --over rounds=20,50,200"
        ) from None


def _supported(plan: Plan, planned: _Planned) -> bool:
    method = planned.method(1.0)
    return _accountant(plan, method).supports(_event(plan, method))


def _accountant(plan: Plan, method: Method) -> Accountant:
    return make_accountant(plan.accountant, method.sampler.adjacency)


def _pairs(plan: Plan) -> list[_Planned]:
    """Return the methods of (silo, user) pairs, one for every sampling rate of users."""
    label, keys = (
        "uldp-sgd, uldp-avg, uldp-avg-w",
        {"local": _local(plan), "colluding_silos": plan.colluding_silos},
    )
    return [
        _Planned(label=label, rate=rate, build=uldp_avg_w, keys={**keys, "user_sampling_rate": rate})
        for rate in plan.sampling_rates
    ]


def _methods(plan: Plan) -> Iterator[_Planned]:
    """Yield the methods to plan."""
    local = _local(plan)
    yield from _pairs(plan)
    naive = {"local": local, "n_silos": plan.n_silos, "colluding_silos": plan.colluding_silos}
    yield _Planned(label="uldp-naive", rate=1.0, build=uldp_naive, keys=naive)
    for size in plan.group_sizes:
        keys = {"local": local, "group_size": size}
        yield _Planned(label=f"uldp-group-{size}", rate=1.0, build=uldp_group, keys=keys)
    for rate in plan.client_sampling_rates:
        for sampling in ("uniform", "poisson"):
            drawn = {"client_sampling": sampling, "client_sampling_rate": rate}
            keys = {"local": local, "n_users": plan.n_users, **drawn}
            yield _Planned(label=f"dp-fed, dp-fed-ls ({sampling})", rate=rate, build=dp_fed, keys=keys)


def _local(plan: Plan) -> LocalSgd:
    """Return the local training, whose rate no guarantee depends on."""
    return LocalSgd(learning_rate=1.0, epochs=plan.epochs, batch_size=plan.batch_size)


def _noise_multipliers(plan: Plan, planned: _Planned) -> tuple[float, ...]:
    if plan.noise_multipliers:
        return plan.noise_multipliers
    assert plan.epsilon is not None
    assert plan.rounds is not None
    rounds = plan.rounds

    def event(sigma: float) -> Event:
        return SelfComposedEvent(event=_event(plan, planned.method(sigma)), count=rounds)

    accountant = _accountant(plan, planned.method(1.0))
    budget = Budget(epsilon=plan.epsilon, delta=plan.delta, accountant=accountant)
    return (calibrate_noise(event, budget, tolerance=1e-3),)


def _most_rounds(plan: Plan, accountant: Accountant, event: Event) -> int:
    if plan.rounds is not None:
        return plan.rounds
    assert plan.epsilon is not None
    if accountant.epsilon(event, plan.delta) > plan.epsilon:
        return 0
    return calibrate_rounds(event, Budget(epsilon=plan.epsilon, delta=plan.delta, accountant=accountant))


def _event(plan: Plan, method: Method) -> Event:
    silo_records = (plan.records_per_silo,) * plan.n_silos
    federation = PublicFacts(n_silos=plan.n_silos, n_users=plan.n_users, silo_records=silo_records)
    return derive(method, federation).event


def _ladder(rounds: int) -> list[int]:
    """Return at most twelve numbers of rounds from 1 to T, evenly spaced on a logarithmic scale."""
    return sorted({round(float(value)) for value in np.geomspace(1, rounds, _POINTS)})

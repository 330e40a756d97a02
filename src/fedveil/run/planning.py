"""Plan the privacy of a federation before any data exists: sigma, rounds, rate and epsilon per method.

A plan uses the derivation of a run's statement: it composes a method for the planned federation, derives its
guarantee and composes the event over the rounds. If clients are sampled, rows with the closed forms of DP-Fed-LS
(Figure S9) appear next to those of the accountant. Their accountants are named "theorem 1" and "theorem 2", and
their epsilon is infinite outside the theorem's domain.
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
from fedveil.methods.noise_ratio import noise_ratio, noise_to_displacement, rounds_by_rule, step_by_rule
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
    """Public numbers of a planned federation.

    Attributes:
        n_users, n_silos: |U| and |S|.
        rounds: T, at most; None finds the largest T that the target ``epsilon`` allows for each sigma.
        noise_multipliers: values of sigma; empty finds the least sigma that keeps T rounds within ``epsilon``.
        sampling_rates: values of q, the Poisson rate of users.
        delta: delta of the guarantee.
        epsilon: target from which rounds or noise are found; None if both are given.
        group_sizes: values of k of uldp-group.
        records_per_silo, batch_size, epochs: of DP-SGD in uldp-group.
        colluding_silos: number of colluding silos against which the full noise of the guarantee remains.
        accountant: its name.
        client_sampling_rates: values of tau, the fraction of clients in a round of dp-fed; a client is a user.
        allow_large_delta: whether delta may be 1 / n_users or more.
        parameters: d, with which rows have ``rho``; None: they have none.
    """

    n_users: int
    n_silos: int
    rounds: int | None
    noise_multipliers: tuple[float, ...]
    sampling_rates: tuple[float, ...] = (1.0,)
    delta: float = 1e-5
    epsilon: float | None = None
    group_sizes: tuple[int, ...] = (2, 8)
    records_per_silo: int = 1000
    batch_size: int = 64
    epochs: int = 1
    colluding_silos: int = 0
    accountant: str = "pld"
    client_sampling_rates: tuple[float, ...] = ()
    allow_large_delta: bool = False
    parameters: int | None = None

    @classmethod
    def with_defaults(cls, **numbers: Any) -> Plan:
        """Return a plan of some public numbers; the others have their defaults.

        Two of ``epsilon``, ``rounds`` and ``noise_multipliers`` determine the third. Without a target epsilon the
        noise multiplier is 5, and 50 rounds are planned unless a target and a noise multiplier are given.
        """
        sigmas = tuple(numbers.get("noise_multipliers", ())) or (() if numbers.get("epsilon") else (5.0,))
        rounds = numbers.get("rounds")
        if rounds is None and not (numbers.get("epsilon") and sigmas):
            rounds = 50
        return cls(**{**numbers, "noise_multipliers": sigmas, "rounds": rounds})

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
        present = (self.epsilon is not None, self.rounds is not None, bool(self.noise_multipliers))
        if sum(present) != 2:
            raise ConfigError(
                "a plan takes two of epsilon, rounds and sigma (noise multipliers), and finds the third; "
                f"{sum(present)} are given"
            )


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """One method in one of the settings that a plan compares.

    Attributes:
        label: name of the method, or names of several methods with the same guarantee.
        rate: fraction of the users in a round.
        build: builder of the method.
        keys: arguments of the builder, except the noise multiplier.
    """

    label: str
    rate: float
    build: Callable[..., Method]
    keys: Mapping[str, Any]

    def method(self, sigma: float) -> Method:
        """Return the method with noise multiplier ``sigma`` and clip bound 1."""
        return self.build(clip=1.0, noise_multiplier=sigma, **self.keys)


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """Rows of a plan, with the reasons for missing rows; one refused row does not affect the others.

    Attributes:
        rows: method, setting, number of rounds and their cost.
        refused: the same keys with a ``reason`` instead of the cost, for rows without a number.
        left_out: names of the methods that the plan's accountant does not support.
    """

    rows: list[Row] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _errors: list[FedveilError] = field(default_factory=list)

    @contextmanager
    def attempting(self, row: Row) -> Iterator[None]:
        """Record a row as refused if the block raises a :class:`FedveilError`."""
        try:
            yield
        except FedveilError as error:
            self._errors.append(error)
            self.refused.append({**row, "reason": str(error)})

    def checked(self) -> PlanTable:
        """Return the table if it has at least one row, or if no row was refused.

        Raises:
            FedveilError: every row was refused; the error has the type of the first refusal and lists all reasons.
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

    With a target epsilon, the noise multiplier is the least one that keeps all T rounds within epsilon. If sigma is
    given instead, T is the largest number of rounds within epsilon that the accountant can count, and 0 if one
    round exceeds it; a closed form has its own T (equation 6 of DP-Fed-LS). Methods whose event the accountant does
    not support are left out.

    Not claimed: the cost of the noise grid, which depends on the model. A run's statement adds it: 1e-8 to 5e-8 for
    100 rounds of 10^5 parameters and 10 silos.

    Raises:
        FedveilError: no row has a number.
    """
    table = PlanTable()
    for planned in _methods(plan):
        with table.attempting(_row(plan, planned, None)):
            if not _supported(plan, planned):
                table.left_out.append(planned.label)
                continue
            for sigma in _noise_multipliers(plan, planned):
                with table.attempting(_row(plan, planned, sigma)):
                    first = len(table.rows)
                    _add_ladder(table, plan, planned, sigma)
                    _add_noise_ratios(table.rows[first:], plan, planned.method(sigma))
    return table.checked()


def _add_noise_ratios(rows: Sequence[Row], plan: Plan, method: Method) -> None:
    """Add ``rho`` to the rows of one method and noise, if the plan has a number of parameters."""
    if plan.parameters is None:
        return
    public = PublicFacts(n_silos=plan.n_silos, n_users=plan.n_users, dimension=plan.parameters)
    for row in rows:
        row["rho"] = noise_ratio(method, public, row["rounds"]) if row["rounds"] else None


def _row(plan: Plan, planned: _Planned, sigma: float | None) -> Row:
    """Return the keys of a row except its cost; a value that is still to be found is None."""
    return {
        "method": planned.label,
        "noise_multiplier": sigma,
        "rounds": plan.rounds,
        "users": plan.n_users,
        "sampling_rate": planned.rate,
    }


def _add_ladder(table: PlanTable, plan: Plan, planned: _Planned, sigma: float) -> None:
    """Add the rows of one method and noise to a table, for numbers of rounds up to the maximum."""
    method, row = planned.method(sigma), _row(plan, planned, sigma)
    numerical, event = _accountant(plan, method), _event(plan, method)

    def epsilon_of(rounds: int) -> float:
        return numerical.epsilon(SelfComposedEvent(event=event, count=rounds), plan.delta)

    _add_rows(table, row, plan.accountant, _most_rounds(plan, numerical, event), epsilon_of)
    form = method.closed_form
    if form is None:
        return
    most, target = plan.rounds, math.inf
    if most is None:  # equation 6 of DP-Fed-LS
        assert plan.epsilon is not None
        target = plan.epsilon
        most = form.rounds(sigma, target, plan.delta)
    # Equation 6 is exact; the theorem's epsilon is searched on a grid, and may lie just above the target.
    _add_rows(
        table, row, form.name, most, lambda rounds: min(target, form.epsilon(rounds, sigma, plan.delta))
    )


def _add_rows(table: PlanTable, row: Row, name: str, most: int, epsilon_of: Callable[[int], float]) -> None:
    """Add the rows of one accountant or theorem up to ``most`` rounds; one row of 0 rounds if there are none."""
    for rounds in _ladder(most) if most else (0,):
        labels: Row = {**row, "rounds": rounds}
        with table.attempting(labels):  # the accountant may support fewer rounds than requested
            epsilon = finite(epsilon_of(rounds)) if rounds else 0.0
            table.rows.append({**labels, "epsilon": epsilon, "accountant": name})


def noise_ratio_rows(plan: Plan, parameters: int, rounds: Sequence[int]) -> PlanTable:
    """Return one row per sampling rate and number of rounds: noise against model displacement for pairs.

    A pair is the contribution of one user in one silo. Each row is at the target epsilon and has these columns:

    - ``noise_multiplier``: z, which T rounds need;
    - ``rho``: the ratio of noise to model displacement;
    - ``step``: the step that the rule proposes for rho, min(3, 0.25 / rho) mean updates;
    - ``way`` and ``noise``: eta T and eta T rho, displacement and noise of the last model in units of the clip;
    - ``noise_smoothed``: the noise under Laplacian smoothing with sigma = 1, which is sqrt(d~_sigma / d) of it
      (Proposition 1 of DP-Fed-LS). No public number shows how much displacement smoothing removes;
    - ``smoothed_by_rule``: whether ``denoiser = "by-rule"`` smooths;
    - ``rounds_by_rule``: the rounds that reach the displacement of the rule without its cap on steps;
    - ``rho_by_records`` and ``rho_uniform``: upper limits of rho under weights other than the main silo's;
    - ``mebibytes_up``: MiB that all silos send in float64.

    With all weight in one silo, a user's sum is as long as the update. Under weights by records it may be shorter
    by sqrt(|S|): the user has equal shares in all silos, with orthogonal updates. Under weights 1 / |S| it may be
    shorter by |S|: the user is in one silo. The noise is the same, so rho is up to that many times as large.

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
    # sqrt(d~_sigma / d) with sigma = 1, Proposition 1 of DP-Fed-LS.
    smoothing_factor = math.sqrt(effective_dimensions(parameters, 1.0)[1] / parameters)
    table = PlanTable()
    for pairs in _pairs(plan):
        for number in rounds:
            single = replace(plan, rounds=number, noise_multipliers=())
            with table.attempting(_row(single, pairs, None)):
                table.rows.append(_noise_ratio_row(single, pairs, public, smoothing_factor))
    return table.checked()


def _noise_ratio_row(plan: Plan, pairs: _Planned, public: PublicFacts, noise_left: float) -> Row:
    """Return one row of :func:`noise_ratio_rows`.

    Args:
        plan: with one number of rounds and without noise multipliers.
        pairs: the method at one sampling rate.
        public: the planned federation with d parameters.
        noise_left: fraction of the noise that smoothing leaves, sqrt(d~_sigma / d).
    """
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
        # The two extremes of the docstring of `noise_ratio_rows`: the user's sum is sqrt(|S|) or |S| times shorter.
        "rho_by_records": ratio * math.sqrt(plan.n_silos),
        "rho_uniform": ratio * plan.n_silos,
        "step": step,
        "way": step * number,
        "noise": step * number * ratio,
        "noise_smoothed": step * number * ratio * noise_left,
        "rounds_by_rule": rounds_by_rule(number, ratio),
        "smoothed_by_rule": ratio >= SMOOTHED_FROM,
        # 8 bytes per float64.
        "mebibytes_up": 8 * parameters * plan.n_silos * number / 2**20,
    }


def ratio_rows(n_silos: int, parameters: int, ratios: Sequence[float]) -> list[Row]:
    """Return one row per fraction r of encrypted parameters, which need no noise against the server.

    Theorem 1 of ParaAegis: the error of the gradient by noise and clipping falls as 1 - r. Encryption costs bytes.
    For every 4,096 encrypted numbers each silo sends a fresh CKKS ciphertext and receives a ciphertext of the sum.
    A number in the clear has 8 bytes.

    Args:
        n_silos: |S|.
        parameters: d.
        ratios: every r.

    Raises:
        ConfigError: no parameter, or a fraction outside [0, 1].
    """
    if parameters < 1 or not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError("--over ratio=...: ratios are between 0 and 1, and --parameters is at least 1")
    ckks, rows = CkksParameters(silos=n_silos), []
    for ratio in ratios:
        hidden = round(ratio * parameters)
        blocks, clear = math.ceil(hidden / ckks.degree), 8 * (parameters - hidden)
        # Per silo and block of encrypted numbers: one fresh ciphertext up, one ciphertext of the sum down.
        row: Row = {"ratio": ratio, "error_left": 1 - ratio}
        row["mebibytes_up"] = n_silos * (blocks * ckks.fresh_bytes + clear) / 2**20
        row["mebibytes_down"] = n_silos * (blocks * ckks.sum_bytes + clear) / 2**20
        rows.append(row)
    return rows


def read_over(text: str) -> tuple[str, tuple[float, ...]]:
    """Parse ``rounds=T,T,...`` or ``ratio=r,r,...`` into its key and values.

    >>> read_over("rounds=10,50")
    ('rounds', (10, 50))

    Raises:
        ConfigError: another key, or values that are not numbers.
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
    """Return whether the accountant supports the event of a method; sigma does not matter for that."""
    method = planned.method(1.0)
    return _accountant(plan, method).supports(_event(plan, method))


def _accountant(plan: Plan, method: Method) -> Accountant:
    """Return the plan's accountant for the adjacency of the method's sampler."""
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
    """Return the local training of all methods; no guarantee depends on its learning rate of 1."""
    return LocalSgd(learning_rate=1.0, epochs=plan.epochs, batch_size=plan.batch_size)


def _noise_multipliers(plan: Plan, planned: _Planned) -> tuple[float, ...]:
    """Return the plan's values of sigma, or the least sigma (relative tolerance 1e-3) for T and epsilon."""
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
    """Return T, or the largest number of rounds within the target epsilon; 0 if one round exceeds it."""
    if plan.rounds is not None:
        return plan.rounds
    assert plan.epsilon is not None
    if accountant.epsilon(event, plan.delta) > plan.epsilon:
        return 0
    return calibrate_rounds(event, Budget(epsilon=plan.epsilon, delta=plan.delta, accountant=accountant))


def _event(plan: Plan, method: Method) -> Event:
    """Return the privacy event of one round of a method in the planned federation."""
    silo_records = (plan.records_per_silo,) * plan.n_silos
    federation = PublicFacts(n_silos=plan.n_silos, n_users=plan.n_users, silo_records=silo_records)
    return derive(method, federation).event


def _ladder(rounds: int) -> list[int]:
    """Return at most twelve numbers of rounds from 1 to T, evenly spaced on a logarithmic scale."""
    return sorted({round(float(value)) for value in np.geomspace(1, rounds, _POINTS)})

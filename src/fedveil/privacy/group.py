"""Turn record-level DP-SGD inside silos into guarantees for a user with up to k records.

DP-SGD protects one record. A user's k records are a group, and four bounds exist for the group:

================================  ==========================================================  =================
bound                             definition                                                  valid for
================================  ==========================================================  =================
:func:`group_event`               the group's own privacy loss, a mixture of Gaussians: the   every k
                                  tightest, used in statements
:func:`lemma6`                    Renyi group privacy (Mironov 2017, Proposition 2; Lemma 6   every k, by the
                                  of ULDP-FL): (alpha, rho) -> (alpha / 2^c, 3^c rho) if      next power of two
                                  alpha >= 2^{c+1}                                            above
:func:`lemma5`                    (epsilon, delta) -> (k epsilon, k e^{(k-1) epsilon} delta)  every k
                                  (Lemma 5 of ULDP-FL)
:func:`published_group_epsilon`   Lemma 6 as the authors evaluate it, with orders below       nothing: a figure
                                  2^{c+1} and the power of two BELOW k                        to compare with
================================  ==========================================================  =================

The first bound is exact for one step of one silo. Each of the k records is in the batch with probability q, so they
change the sum of clipped gradients by Binomial(k, q) clip units. The batch's release is N(0, s^2) without the user
and sum_i P(B = i) N(i, s^2) with the user. (In several dimensions the records' gradients need not be parallel;
parallel gradients are the worst case, Choquette-Choo, Ganesh, Steinke and Thakurta, Corollary 4.7.)

Lemmas 5 and 6 go from neighbour to neighbour, one record at a time. For records in several silos they therefore hold
with the costliest silo's divergence. :func:`worst_split` explains how the mixture covers several silos.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from fedveil.errors import PrivacyError
from fedveil.privacy.accounting import OPACUS_ORDERS, Conversion, sampled_gaussian_rdp
from fedveil.privacy.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    MixtureOfGaussiansEvent,
    PoissonSampledEvent,
    SelfComposedEvent,
)

_LEAST_PROBABILITY = 1e-20
_MOST_COUNTS = 1_000_000

Silos = tuple[tuple[float, int], ...]
"""(rate, steps) of DP-SGD in every silo: batch sampling rate in (0, 1], number of steps (0: no training)."""


def _check(group_size: int, silos: Silos) -> None:
    if group_size < 1:
        raise PrivacyError(f"group size k = {group_size}: a user owns at least 1 record")
    for silo, (rate, steps) in enumerate(silos):
        if steps < 0 or (steps > 0 and not 0 < rate <= 1):
            raise PrivacyError(
                f"silo {silo}: rate {rate} for {steps} steps; the rate must be above 0 and at most 1, and "
                "the steps not negative"
            )


def group_event(*, group_size: int, rate: float, noise_multiplier: float) -> Event:
    """Return the event of one DP-SGD step for a user with ``group_size`` = k records in the silo.

    The event is the mixture sum_i P(Binomial(k, q) = i) N(i, s^2) against N(0, s^2). Outcomes i in the upper tail of
    total probability below 1e-20 are counted as the largest i that is kept. This changes delta by less than 1e-20 a
    step, which is within the error that the ``pld`` accountant already adds (1e-15 a step).

    Args:
        group_size: k >= 1.
        rate: batch sampling rate q in (0, 1].
        noise_multiplier: s, standard deviation of the noise on the sum over the clip bound.

    Raises:
        PrivacyError: k or q outside its domain, or a million of a user's records in one batch.
    """
    from scipy.stats import binom

    _check(group_size, ((rate, 1),))
    if rate == 1:
        return GaussianEvent(noise_multiplier=noise_multiplier / group_size)
    if group_size == 1:
        return PoissonSampledEvent(rate=rate, event=GaussianEvent(noise_multiplier=noise_multiplier))
    most = _largest_count(group_size, rate)
    if most > _MOST_COUNTS:
        raise PrivacyError(
            f"group size k = {group_size}: up to {most} of a user's records are in one batch, more than the "
            f"{_MOST_COUNTS} that are counted"
        )
    tail = float(binom.sf(most - 1, group_size, rate))
    probabilities = np.append(binom.pmf(np.arange(most), group_size, rate), tail)
    counts = np.flatnonzero(probabilities > 0)
    return MixtureOfGaussiansEvent(
        noise_multiplier=noise_multiplier,
        sensitivities=tuple(float(i) for i in counts),
        probabilities=tuple(float(p) for p in probabilities[counts]),
    )


def _largest_count(group_size: int, rate: float) -> int:
    """Return the largest i with P(Binomial(k, q) >= i) at least 1e-20, by bisection."""
    from scipy.stats import binom

    low, high = 0, group_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        reached = binom.sf(middle - 1, group_size, rate) >= _LEAST_PROBABILITY
        low, high = (middle, high) if reached else (low, middle)
    return low


def worst_split(*, group_size: int, noise_multiplier: float, silos: Silos) -> tuple[Event, tuple[int, ...]]:
    """Return an event that covers EVERY split of k records over the silos, and the split with nearly its cost.

    Silos train in parallel, so the t-th steps of all silos are one joint release. Its mean moves by the vector (B_1,
    ..., B_S) with independent B_s ~ Binomial(k_s, q_s). The length of this vector is at most B_1 + ... + B_S, which
    is stochastically below Binomial(k, q) with q the largest rate among the silos that still have a t-th step. A
    mixture of Gaussians whose shift is stochastically larger costs more for every epsilon, in both directions (see
    docs/theory/group-privacy.md). So

        for t = 1, 2, ...:  the mixture Binomial(k, max of q_s over silos with at least t steps)

    bounds every split. If one silo has both the largest rate and the most steps, the split with all k records in this
    silo attains the bound. Otherwise the bound may exceed the worst split; tests find the worst split by trying all.

    Args:
        group_size: k, the most records a user keeps over all silos.
        noise_multiplier: noise multiplier of DP-SGD, the same in every silo.
        silos: (rate, steps) of every silo; steps of one round give the event of one round.

    Returns:
        The event, and the number of records per silo in the costliest split, or in one of nearly its cost.
    """
    _check(group_size, silos)
    rates = np.array([rate if steps > 0 else 0.0 for rate, steps in silos])
    steps = np.array([steps for _, steps in silos])
    events: list[Event] = []
    begin = 0
    for end in sorted(set(steps.tolist()) - {0}):
        rate = float(rates[steps >= end].max())
        step = group_event(group_size=group_size, rate=rate, noise_multiplier=noise_multiplier)
        events.append(SelfComposedEvent(event=step, count=end - begin))
        begin = end
    # For small rates the Renyi divergence of a silo is about proportional to steps x rate^2.
    nearest = int(np.argmax(rates**2 * steps)) if len(silos) else 0
    return ComposedEvent(events=tuple(events)), tuple(group_size * (s == nearest) for s in range(len(silos)))


# --- published bounds -------------------------------------------------------------------------------------


def lemma6(*, group_size: int, noise_multiplier: float, silos: Silos, delta: float) -> float:
    """Return epsilon by Renyi group privacy with valid orders; k is rounded UP to a power of two 2^c.

    (alpha, rho) for one record gives (alpha / 2^c, 3^c rho) for the group, if alpha >= 2^{c+1}
    (Mironov 2017, Proposition 2, whose map is 2^c-stable; ULDP-FL, Lemma 6, prints 2^k and 3^k).
    """
    power = 1 << (group_size - 1).bit_length()
    orders = (
        tuple(order for order in _authors_orders(power) if order >= 2 * power) if power > 1 else OPACUS_ORDERS
    )
    return _lemma6(power, noise_multiplier, silos, delta, orders)


def published_group_epsilon(*, group_size: int, noise_multiplier: float, silos: Silos, delta: float) -> float:
    """Return the figure that the authors of ULDP-FL print.

    Not claimed: a guarantee for k >= 16, or for a k that is no power of two. The authors' grid of orders restarts at
    k + 10, which Lemma 6 excludes while k + 10 < 2k, and they round k DOWN to a power of two.
    """
    power = 1 << (group_size.bit_length() - 1)
    return _lemma6(power, noise_multiplier, silos, delta, _authors_orders(power))


def _authors_orders(power: int) -> tuple[float, ...]:
    """Return the authors' orders for 2^c: 2^{c+1} + (0, 0.1, ..., 9.9), and the integers from 2^c + 10."""
    fine = (2 * power + step / 10 for step in range(100))
    return (*fine, *(float(order) for order in range(power + 10, 4 * power + 64)))


def _lemma6(
    power: int, noise_multiplier: float, silos: Silos, delta: float, orders: tuple[float, ...]
) -> float:
    rdp = _costliest_rdp(noise_multiplier, silos, orders)
    group_orders = tuple(order / power for order in orders)
    return Conversion.BALLE_2020.epsilon(group_orders, 3 ** (power.bit_length() - 1) * rdp, delta)


def lemma5(*, group_size: int, noise_multiplier: float, silos: Silos, delta: float) -> float:
    """Return epsilon by group privacy of (epsilon, delta): (k e, k e^{(k-1) e} d) for a record's (e, d).

    The record's (e, d) is chosen so that the group's delta equals ``delta``. With the conversion of Balle
    et al., ln d = (alpha - 1) (rho - e + a) with a = ln((alpha-1)/alpha) - ln(alpha)/(alpha-1), the
    condition ln k + (k-1) e + ln d = ln delta has for each order alpha > k the solution

        e = (ln(k / delta) + (alpha - 1) (rho + a)) / (alpha - k),

    and the smallest over the orders counts. (The paper searches over Opacus' orders, which end at
    63; here the orders continue as far as k requires.)
    """
    orders = (*OPACUS_ORDERS, *(float(order) for order in range(64, 4 * group_size + 64)))
    valid = tuple(order for order in orders if order > group_size)
    rdp = _costliest_rdp(noise_multiplier, silos, valid)
    a = np.array(valid)
    converted = rdp + np.log1p(-1 / a) - np.log(a) / (a - 1)
    record = (math.log(group_size / delta) + (a - 1) * converted) / (a - group_size)
    return group_size * max(0.0, float(record.min()))


def _costliest_rdp(
    noise_multiplier: float, silos: Silos, orders: tuple[float, ...]
) -> Float64[np.ndarray, " orders"]:
    """Return the largest record-level Renyi divergence over the silos, order by order."""
    _check(1, silos)
    costs = [
        steps * sampled_gaussian_rdp(rate, noise_multiplier, orders) for rate, steps in silos if steps > 0
    ]
    return np.max(costs, axis=0) if costs else np.zeros(len(orders))

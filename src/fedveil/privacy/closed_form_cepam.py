"""The one-round privacy profiles that CEPAM publishes: Lemma 9, Theorems 12 and 13, as they stand in the paper.

K clients of n records each take tau local steps, each on one record drawn with replacement; the server is trusted; the
unit is a record, replaced by another. A record is drawn at all with p = 1 - (1 - 1/n)^tau, and a profile
(epsilon~, delta~) of the noise alone becomes epsilon = ln(1 + p (e^epsilon~ - 1)).

These figures are for reproduction: the paper scales its noise by the norm of the private update, which it sends in
clear, so no guarantee follows from them, and they speak of one round. What a statement reports comes from
:mod:`fedveil.privacy.accounting`. docs/theory/closed-forms.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr

from fedveil.errors import PrivacyError


@dataclass(frozen=True, kw_only=True)
class OneRoundProfile:
    """(epsilon, delta) of one round as published, for one record of n.

    Attributes:
        epsilon: of one round.
        delta: of one round, at most 1.
        records: n, records of a client.
    """

    epsilon: float
    delta: float
    records: int

    @property
    def meaningless(self) -> bool:
        """Whether delta >= 1/n: a mechanism that publishes one of the n records outright may meet the claim."""
        return self.delta >= 1 / self.records


def gaussian_profile(
    *, clients: int, steps: int, records: int, std: float, gamma: float, base_epsilon: float
) -> OneRoundProfile:
    """Theorem 12: CEPAM-Gaussian. The mean of K decoded updates has noise std ``std / (gamma sqrt(K))``, times a norm.

    Args:
        clients: K.
        steps: tau, local steps on one record each.
        records: n, records of each client.
        std: sigma of LRSUQ.
        gamma: the factor by which a normalised update is stretched.
        base_epsilon: epsilon~ > 0 of the noise without sub-sampling.

    Raises:
        PrivacyError: an argument outside its domain.
    """
    _check(
        {
            "clients": clients,
            "steps": steps,
            "records": records,
            "std": std,
            "gamma": gamma,
            "base_epsilon": base_epsilon,
        }
    )
    shift = 2 * steps * gamma / (math.sqrt(clients) * std)
    delta = sampled_gaussian_delta(shift=shift, steps=steps, records=records, base_epsilon=base_epsilon)
    return OneRoundProfile(
        epsilon=amplified(base_epsilon, steps=steps, records=records), delta=delta, records=records
    )


def laplace_profile(
    *, steps: int, records: int, b: float, gamma: float, base_epsilon: float
) -> OneRoundProfile:
    """Theorem 13: CEPAM-Laplace, delta = 0 where epsilon~ >= 2 tau gamma / b; arguments as in :func:`gaussian_profile`.

    Raises:
        PrivacyError: an argument outside its domain, or a base_epsilon that the theorem does not cover.
    """
    _check({"steps": steps, "records": records, "b": b, "gamma": gamma, "base_epsilon": base_epsilon})
    least = 2 * steps * gamma / b
    if base_epsilon < least:
        raise PrivacyError(
            f"base_epsilon = {base_epsilon:g}: Theorem 13 of CEPAM needs at least 2 tau gamma / b = {least:g}"
        )
    return OneRoundProfile(
        epsilon=amplified(base_epsilon, steps=steps, records=records), delta=0.0, records=records
    )


def amplified(base_epsilon: float, *, steps: int, records: int) -> float:
    """Return ln(1 + p (e^epsilon~ - 1)), p = 1 - (1 - 1/n)^tau; n is at least 2."""
    _check({"steps": steps, "records": records, "base_epsilon": base_epsilon})
    missed = steps * math.log1p(-1 / records)
    return float(np.logaddexp(missed, math.log(-math.expm1(missed)) + base_epsilon))


def sampled_gaussian_delta(*, shift: float, steps: int, records: int, base_epsilon: float) -> float:
    """Lemma 9: delta of a Gaussian mechanism whose tau inputs are drawn from n records with replacement.

    delta = sum_j C(tau, j) n^-j (1 - 1/n)^(tau - j) (e^epsilon~ - 1) / (e^(epsilon~/j) - 1) delta_1(epsilon~/j), where
    delta_1 is the exact profile of one Gaussian release (Balle and Wang) and the fraction is group privacy for j
    copies of the record. The sum over j is not capped term by term; the paper's figures are not either.

    Args:
        shift: l2 sensitivity to one of the tau inputs over the noise's standard deviation.
        steps: tau.
        records: n, at least 2.
        base_epsilon: epsilon~ > 0.

    Returns:
        delta, at most 1.
    """
    _check({"shift": shift, "steps": steps, "records": records, "base_epsilon": base_epsilon})
    copies = np.arange(1, steps + 1)
    each = base_epsilon / copies
    chosen = gammaln(steps + 1) - gammaln(copies + 1) - gammaln(steps - copies + 1)
    drawn = chosen - copies * math.log(records) + (steps - copies) * math.log1p(-1 / records)
    group = base_epsilon - each + np.log(-np.expm1(-base_epsilon)) - np.log(-np.expm1(-each))
    near, far = shift / 2 - each / shift, -shift / 2 - each / shift
    one = np.maximum(ndtr(near) - np.exp(each + log_ndtr(far)), 0.0)
    present = one > 0
    terms = np.exp(np.minimum(drawn[present] + group[present] + np.log(one[present]), 0.0))
    return float(min(1.0, terms.sum()))


def _check(values: Mapping[str, int | float]) -> None:
    for name, value in values.items():
        least = 2 if name == "records" else 1 if name in ("steps", "clients") else 0
        if not math.isfinite(value) or value < least or value == 0:
            wanted = f"at least {least}" if least else "above 0"
            raise PrivacyError(f"{name} = {value}: a finite number {wanted} is needed")

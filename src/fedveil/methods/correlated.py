"""Encode silos' messages over rounds, so that the noise of different rounds cancels in the model.

A sender encodes its sums g_1, g_2, ... by a banded Toeplitz matrix C before it adds fresh noise,

    y_t = sum_{j<k} c_j g_{t-j} + Z_t,       1 = c_0 >= c_1 >= ... >= c_{k-1} >= 0,

and the reader decodes x_t = y_t - sum_{j>=1} c_j x_{t-j}, whose noise is C^-1 Z. A user takes part at most in every
b-th round. With k <= b, the columns of C for the rounds of one user do not overlap. A stream of rows of norm at most
1 therefore changes y_1 ... y_t by at most s_t,

    s_t^2 = max over sets P of rounds up to t, b apart, of sum_{i in P} ||C[1..t] e_i||^2
          = sum of the strengths of the first t rounds,   strength_t = c_j^2,   j = (t - 1) mod b   (0 for j >= k).

A user that takes part in round 1 and every b rounds after it attains the maximum. A user may have records at several
silos, with the same or with different rounds: ||C sum_s w_s delta_s|| <= sum_s w_s ||C delta_s|| <= s_t for weights
that sum to at most 1 and stay constant over the rounds. Sums depend on earlier releases through the model, but the
bound holds on every path. So T rounds with noise of standard deviation sigma are one Gaussian release of multiplier
sigma / s_T. Rounds that are charged sigma / sqrt(strength_t) each compose to that release after every round.
docs/theory/correlated-noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float32, Float64
from pydantic import ConfigDict, Field
from torch import Tensor

from fedveil.config_keys import check_ranges
from fedveil.errors import CompositionError, PrivacyError
from fedveil.methods.channels import refuses_unbounded
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.method import Method
from fedveil.privacy.sampling import Scheduled
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.stage import Sensitivity

BITS: Final = 6
"""Number of fractional bits of a coefficient.

Coefficients are multiples of 2^-6, so the encoded sums lie exactly on a grid 2^-6 times that of the sums.
"""

_LEAST_GAIN: Final = 1e-9


def check_coefficients(coefficients: Sequence[float], period: int) -> None:
    """Check that coefficients start with 1, never rise, are not negative, dyadic, and at most b.

    Raises:
        PrivacyError: the first rule that the coefficients break.
    """
    if not coefficients or coefficients[0] != 1:
        raise PrivacyError(f"coefficients {tuple(coefficients)}: the first must be 1")
    if len(coefficients) > period:
        raise PrivacyError(
            f"{len(coefficients)} bands, and a user takes part every {period} rounds: with more bands than that the "
            "user's rounds overlap in what is sent, and the sensitivity is larger; take at most as many bands as rounds"
        )
    if not all(0 <= after <= before for before, after in pairwise(coefficients)):
        raise PrivacyError(
            f"coefficients {tuple(coefficients)}: with signs, or if they rise, the sensitivity is known as a bound "
            "alone; take coefficients that fall and are not negative"
        )
    if any(coefficient * 2**BITS != math.floor(coefficient * 2**BITS) for coefficient in coefficients):
        raise PrivacyError(
            f"coefficients {tuple(coefficients)}: multiples of 2^-{BITS} are needed, so that sums stay on a grid"
        )


def strengths(coefficients: Sequence[float], period: int) -> tuple[float, ...]:
    """Return s_t^2 - s_{t-1}^2 of the rounds of one period: c_j^2, and 0 after the last band.

    >>> strengths((1.0, 0.5), 3)
    (1.0, 0.25, 0.0)

    Raises:
        PrivacyError: coefficients that :func:`check_coefficients` refuses.
    """
    check_coefficients(coefficients, period)
    return (
        *(coefficient * coefficient for coefficient in coefficients),
        *(0.0 for _ in range(period - len(coefficients))),
    )


def squared_sensitivity(coefficients: Sequence[float], period: int, rounds: int) -> float:
    """Return s_T^2 after ``rounds`` rounds.

    >>> squared_sensitivity((1.0,), 5, 11), squared_sensitivity((1.0, 0.5), 2, 3)
    (3.0, 2.25)
    """
    repeated = strengths(coefficients, period)
    whole, remainder = divmod(rounds, period)
    return whole * math.fsum(repeated) + math.fsum(repeated[:remainder])


def decoded_error(coefficients: Sequence[float], rounds: int) -> float:
    """Return the root mean square over T rounds of the noise in the model x_1 + ... + x_t.

    The unit is the standard deviation of the noise of one message.

    >>> decoded_error((1.0,), 3) == 2**0.5
    True
    """
    from scipy.signal import lfilter

    # summed[i] is the sum of the first i + 1 coefficients of C^-1: the weight of a message's noise in the model i
    # rounds later. It occurs in T - i of the T models.
    summed = lfilter([1.0], coefficients, np.ones(rounds))
    return float(np.sqrt((summed**2 @ np.arange(rounds, 0, -1)) / rounds))


@lru_cache(maxsize=64)
def best_coefficients(rounds: int | None, period: int, bands: int) -> tuple[float, ...]:
    """Return coefficients with little noise in the models of T rounds at equal privacy.

    The objective is :func:`decoded_error` times s_T, a function of public numbers alone. A coordinate search over
    non-increasing multiples of 2^-6 with halving steps starts at the coefficients of (1 - x)^(-1/2). These are
    optimal for one participation without a limit on bands, and they are the result if T is not known.

    Args:
        rounds: T; None if it is not known.
        period: b.
        bands: k, at most b.
    """
    unit = 2.0**-BITS
    coefficients = [1.0]
    for j in range(1, bands if rounds is None else min(bands, rounds)):
        # Power series of (1 - x)^(-1/2): the coefficient of x^j is the one before it times (2 j - 1) / (2 j).
        coefficients.append(coefficients[-1] * (2 * j - 1) / (2 * j))
    coefficients = [round(value / unit) * unit for value in coefficients]
    if rounds is None:
        return tuple(coefficients)

    def error(tried: list[float]) -> float:
        return decoded_error(tried, rounds) * math.sqrt(squared_sensitivity(tried, period, rounds))

    least, step = error(coefficients), 2.0**-3
    while step >= unit:
        moved = False
        for index in range(1, len(coefficients)):
            for move in (step, -step):
                tried = [*coefficients[:index], coefficients[index] + move, *coefficients[index + 1 :]]
                below = coefficients[index + 1] if index + 1 < len(coefficients) else 0.0
                if below <= tried[index] <= coefficients[index - 1] and error(tried) < least * (
                    1 - _LEAST_GAIN
                ):
                    coefficients, least, moved = tried, error(tried), True
        if not moved:
            step /= 2
    return tuple(coefficients)


_UNIT: Final = 2.0**-BITS


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise:
    """Schedule in which a user takes part once in ``period`` rounds, with noise that cancels over rounds.

    Args:
        period: b; a user takes part in a silo in every b-th round, by a public schedule.
        bands: k, the number of rounds over which noise is correlated, at most b. 0 takes b; 1 is independent noise.

    Raises:
        CompositionError: a number outside its range, or more bands than the period.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    period: Annotated[int, Field(ge=1)]
    bands: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        """Refuse numbers outside their range, and more bands than the period."""
        check_ranges(self)
        if self.bands > self.period:
            raise CompositionError(
                f"bands = {self.bands} and period = {self.period}: with more bands than the period has rounds, "
                "a user's rounds overlap in what is sent, and the sensitivity is larger: take bands <= period"
            )


@dataclass(frozen=True, kw_only=True)
class CorrelatedShares(GaussianShares):
    """Shares of noise on an encoded message: each silo adds parts of its earlier sums, then a fresh share.

    y_t = sum_{j<k} c_j g_{t-j} + Z_t. The claims are those of the shares for a round of strength 1; rounds compose by
    their :attr:`strengths`.

    Attributes:
        coefficients: 1 = c_0 >= c_1 >= ... >= 0, the bands; multiples of 2^-6.
        period: b; a user takes part in a silo in every b-th round.
    """

    supports_noise_decay: ClassVar[bool] = False  # the charge depends on the round already
    noise_known: ClassVar[bool] = False  # the noise of decoded sums is correlated over rounds

    coefficients: tuple[float, ...]
    period: int

    def __post_init__(self) -> None:
        """Refuse coefficients for which the sensitivity is unknown."""
        super().__post_init__()
        try:
            check_coefficients(self.coefficients, self.period)
        except PrivacyError as error:
            raise CompositionError(f"correlated noise: {error}") from None

    @property
    def memory(self) -> int:
        """Number of earlier sums in a message: k - 1."""
        return len(self.coefficients) - 1

    @property
    def gain(self) -> float:
        """Largest ratio of the norms of a message and its sums: sum_j c_j."""
        return sum(self.coefficients)

    @property
    def sum_unit(self) -> float:
        """2^-6: parts of sums lie on a grid 2^-6 times the sums'."""
        return _UNIT

    @property
    def strengths(self) -> tuple[float, ...]:
        """Strengths s_t^2 - s_{t-1}^2 of the rounds of a period."""
        return strengths(self.coefficients, self.period)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse rounds of a user less than b apart, weights that may change, and sums that nobody can decode."""
        if method.contribution.per != "pair":
            yield (
                "correlated noise is for (silo, user) pairs on a schedule; take uldp-avg, uldp-avg-w, uldp-sgd or "
                "uldp-sgd-w"
            )
        if method.sampler.period != self.period:
            yield (
                f"correlated noise counts on users who take part once in {self.period} rounds, and here nothing keeps "
                "their rounds apart: sampled users, and everybody in every round, overlap in what is sent"
            )
        protection = method.protection
        if protection.max_dropouts:
            yield (
                "correlated noise: without a silo, what it sent before would be subtracted for as many rounds as there "
                "are bands, and weights that change from round to round break the bound on a user's stream: "
                "max_dropouts must be 0"
            )
        if protection.weighs or protection.divides:
            yield (
                "correlated noise adds up a silo's weighted sums of several rounds, which private weighting and "
                "partial encryption never let it see: take secure aggregation, or independent noise"
            )
        if method.denoiser.changes:
            yield (
                f"{method.denoiser.description} takes the noise of a round for independent, and what is decoded has "
                "noise that is correlated over rounds: remove the denoiser"
            )
        if method.denominator == "actual":
            yield "correlated noise divides by the public share of the users, never by how many of them there are"
        yield from refuses_unbounded(method)
        yield from super().refuses(method)

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        if self.noise_multiplier == 0:
            return ()
        n, bands = sensitivity.n_senders, ", ".join(f"{coefficient:g}" for coefficient in self.coefficients)
        return (
            f"each silo's message combines its sums of this round and of the rounds before it with the coefficients "
            f"{bands}; one user, who takes part once in {self.period} rounds, changes all messages of these rounds "
            f"together by at most {show_at_most(sensitivity.total * sum(self.strengths) ** 0.5)} (l2 norm); "
            "each silo adds "
            f"fresh discrete Gaussian noise of standard deviation {show_at_least(self.share_std(n))} to each message; "
            "the ledger's charge for a single round is no guarantee by itself",
            *self.describe_rounding(sensitivity),
        )

    def encode_sums(self, sums: Sequence[Float64[np.ndarray, " d"]]) -> Float64[np.ndarray, " d"]:
        """Return sum_j c_j g_{t-j} of a silo's sums, this round's first.

        The result is exact: all terms are multiples of one grid. ``strict=False``: in the first rounds fewer than k
        sums exist.
        """
        encoded: np.ndarray = sum(
            (c * g for c, g in zip(self.coefficients, sums, strict=False)), start=np.zeros_like(sums[0])
        )
        return encoded

    def init(self, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
        """Return the reader's state before the first round: zeros for the decoded sums, models and units."""
        if not self.memory:
            return {}
        return {
            "decoded": torch.zeros(self.memory, length, dtype=torch.float64),
            "models": torch.zeros(self.memory, len(model), dtype=torch.float32),
            "units": torch.zeros(self.memory, dtype=torch.float64),
        }

    def decode_sum(
        self,
        total: Float64[np.ndarray, " length"],
        state: Mapping[str, Tensor],
        model: Float32[Tensor, " d"],
        unit: float,
    ) -> tuple[Float64[np.ndarray, " length"], Mapping[str, Tensor]]:
        """Return x_t = y_t - sum_{j>=1} c_j x_{t-j}, and the reader's next state.

        The state consists of released numbers only. It also keeps the models and units of the last rounds: a silo
        that has lost its earlier sums trains them again from these.
        """
        if not self.memory:
            return total, {}
        # x_t = y_t - sum_{j>=1} c_j x_{t-j}: row j - 1 of state["decoded"] is x_{t-j}, newest first.
        back = torch.tensor(self.coefficients[1:], dtype=torch.float64)
        decoded = torch.from_numpy(total) - back @ state["decoded"]
        newest = {
            "decoded": decoded,
            "models": model.cpu(),
            "units": torch.tensor(unit, dtype=torch.float64),
        }
        next_state = {name: torch.cat([value[None], state[name][:-1]]) for name, value in newest.items()}
        return decoded.numpy(), next_state


def with_correlated_noise(method: Method, correlated: CorrelatedNoise | None, rounds: int | None) -> Method:
    """Return a method of (silo, user) pairs with noise correlated over its rounds, if requested.

    Args:
        method: a method with shares of Gaussian noise.
        correlated: schedule and bands; None for independent noise.
        rounds: T, for which the coefficients are optimised; None for no particular number.

    Raises:
        CompositionError: the method samples users, or cannot be encoded for another reason.
    """
    if correlated is None:
        return method
    if type(correlated) is not CorrelatedNoise:
        raise CompositionError(
            f"method.correlated: {type(correlated).__name__} is another class, whose methods would be ignored: "
            "coefficients follow from the fields of Correlated"
        )
    if method.sampler.samples:
        raise CompositionError(
            "method.correlated: users who are drawn may take part in any two rounds, so that their rounds overlap in "
            "what is sent; leave user_sampling_rate at 1, the schedule takes its place"
        )
    shares: Any = method.channel  # methods of pairs send shares of Gaussian noise
    period = correlated.period
    # No bands were chosen (0): as many as the period, the most for which a user's rounds do not overlap.
    coefficients = best_coefficients(rounds, period, correlated.bands or period)
    channel = CorrelatedShares(**vars(shares), coefficients=coefficients, period=period)
    return replace(method, sampler=Scheduled(period=period), channel=channel)

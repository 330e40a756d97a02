"""Weight the contributions in the sum of their silo."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64, Int64
from pydantic import Field
from torch import Tensor

from fedveil.data.main_silos import MainSilos, MainSilosError
from fedveil.data.records import Groups, Population
from fedveil.errors import CompositionError
from fedveil.privacy.claims import Role, Sent
from fedveil.protocols.session_messages import LARGEST_SCORE, UserCounts, UserTotals
from fedveil.stage import Stage


@dataclass(frozen=True, kw_only=True)
class DeclaredMain:
    """Main silo of each user, as named in a file that all silos share (:mod:`fedveil.data.main_silos`).

    Attributes:
        main_silos: the file's SHA-256, in hexadecimal; a silo with another file takes no part.
    """

    main_silos: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


Power: TypeAlias = Annotated[float, Field(ge=0, le=64)] | Literal["main", "linked"]
"""Exponent p of the weights n_su^p / sum_s' n_s'u^p; "main" is p = infinity, "linked" the same by a file."""


@dataclass(frozen=True)
class Weights(Stage):
    """Weight of a contribution in its silo's sum. For pairs, the weights of one user sum to at most 1.

    ONE: w = 1 (FedAVG, ULDP-NAIVE, DP-Fed: the server divides by the number of silos or of clients).
    UNIFORM: w_su = 1/|S| (ULDP-AVG); the share of a silo in which the user has no record is lost.
    BY_RECORDS: w_su = n_su/N_u (ULDP-AVG-w, equation 3).
    EQUAL: w_su = 1/(silos in which the user has a record): BY_RECORDS as if each silo had one record.
    MAIN: w_su = 1 in the silo in which the user has most records, the first of them if several have as many; 0 in the
        others, which neither train nor send for the user.
    of_clients: w_k = p_k / max p for clients, by public numbers p_k of the experiment (CEPAM's p_k).

    Three of them are w_su = n_su^p / sum_s' n_s'u^p with p = 1, 0 and infinity (:meth:`by_power`). Between
    institutions a file can name the main silos, so that no silo shows counts.

    Guarantees: a weight is a function of its user's record counts alone, or of the user's line of the file. The
    weights of a user sum to at most 1 + |S| 2^-52 in float64. That is less than the margin that bounds leave for
    rounding (:mod:`fedveil.privacy.bounds`). For the file, this needs no trust: it names one silo per user, and a
    silo takes part only with the file of the digest, which all silos sign with the experiment.

    Args:
        law: one, uniform over the silos, by powers of record counts, by a file of main silos, or public numbers.
        power: p.
        digest: digest of the file; empty until a simulation has written it (``power = "linked"``).
        clients: w_k of every client, at most 1; empty for other laws.
    """

    law: Literal["one", "uniform", "records", "declared", "public"]
    power: float = 1.0
    digest: str = ""
    clients: tuple[float, ...] = ()

    ONE: ClassVar[Weights]
    UNIFORM: ClassVar[Weights]
    BY_RECORDS: ClassVar[Weights]
    EQUAL: ClassVar[Weights]
    MAIN: ClassVar[Weights]

    @classmethod
    def by_power(cls, power: Power | DeclaredMain) -> Weights:
        """Return the weights n_su^p / sum_s' n_s'u^p; "main" is p = infinity, by counts or by a file."""
        if isinstance(power, DeclaredMain):
            if type(power) is not DeclaredMain:
                raise CompositionError(
                    f"method.power: {type(power).__name__} is another class, whose methods would be ignored: weights "
                    "follow from the fields of DeclaredMain"
                )
            return cls("declared", math.inf, power.main_silos)
        if power == "linked":
            return cls("declared", math.inf)
        return cls("records", math.inf if power == "main" else float(power))

    @classmethod
    def of_clients(cls, numbers: tuple[float, ...]) -> Weights:
        """Return the weights of clients in proportion to public numbers, the largest being 1."""
        return cls("public", clients=tuple(number / max(numbers) for number in numbers))

    @property
    def mean(self) -> float:
        """Mean weight of a client; 1 for weights that are not numbers of the experiment."""
        return math.fsum(self.clients) / len(self.clients) if self.clients else 1.0

    def with_file(self, digest: str) -> Weights:
        """Return the weights with the digest of the file that a simulation wrote."""
        return replace(self, digest=digest)

    @property
    def linked(self) -> bool:
        """Return whether a simulation writes the file of main silos; between institutions the silos have one."""
        return self.law == "declared" and not self.digest

    @property
    def uniform(self) -> bool:
        """Return whether every silo has the weight 1/|S|, whatever records it holds."""
        return self.law == "uniform"

    @property
    def by_records(self) -> bool:
        """Return whether a weight depends on the user's records at other silos: their number, or whether any exist."""
        return self.law == "records"

    @property
    def main(self) -> bool:
        """Return whether a user has all weight in one silo, so that a sum stays valid without any other silo."""
        return math.isinf(self.power)

    @property
    def supports_user_totals(self) -> bool:
        """Return whether totals of whole scores suffice to compute the weights (:meth:`scores`)."""
        return not self.main and self.power == int(self.power)

    @property
    def description(self) -> str:
        """Weight as a formula."""
        if self.main:
            return "1 in the main silo"
        if self.law == "public":
            return "p_k / max p, public numbers"
        if not self.by_records:
            return "1" if self.law == "one" else "1/|S|"
        if self.power in (0, 1):
            return "n_su/N_u" if self.power else "1/(silos of the user)"
        return f"n_su^{self.power:g} / sum_s n_su^{self.power:g}"

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse pairs whose weights do not sum to at most 1, and weights of pairs for other contributions."""
        pairs = method.contribution.per == "pair"
        if pairs and self.law == "one":
            yield (
                "with weight 1 a user's influence grows with the number of silos the user is in; weights of a user "
                "must sum to at most 1 over the silos (uniform or by records)"
            )
        if self.law == "public":
            yield from self._refuses_clients(method)
        elif not pairs and self.law != "one":
            yield f"weights {self.description} are those of (silo, user) pairs"

    def _refuses_clients(self, method: Any) -> Iterable[str]:
        """Refuse public weights of anything but all clients, whose number and whose sum of weights are fixed."""
        if (
            method.contribution.per != "client"
            or method.sampler.rate != 1
            or method.denominator != "expected"
        ):
            yield "public weights are those of clients who all take part, divided by the sum of their weights"
        if not all(0 < weight <= 1 for weight in self.clients):
            yield f"weights {self.clients}: the weight of a client is above 0 and at most 1"
        senders = getattr(method.channel, "senders", len(self.clients))
        if senders != len(self.clients):
            yield f"{len(self.clients)} weights for {senders} clients: give one number for each client"

    def sends(self) -> tuple[Sent, ...]:
        """Return the messages of unprotected weights: silos send scores, and receive totals."""
        if not self.by_records:
            return ()
        return Sent(UserCounts, Role.SERVER), Sent(UserTotals, Role.SILO)

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the trust in the author of a file of main silos, and what the file or public weights reveal."""
        if self.law == "public":
            return (
                f"the clients' weights, public numbers from {min(self.clients):.3g} to 1 times the largest: epsilon "
                "holds for any numbers, and if these were computed from the clients' records, they tell about the "
                "records",
            )
        if self.law != "declared":
            return ()
        return (
            f"the file of main silos that the silos share (sha256 {self.digest[:16]}...): epsilon relies on its author "
            "to have chosen each user's main silo from that user's records alone, and every silo learns every user's "
            "main silo",
        )

    def for_population(self, groups: Groups, population: Population) -> Float64[Tensor, " m"]:
        """Return the weight of each contribution of a population, or of one party's part of it.

        If all records are present, as in a simulation, main silos follow from the records, as those of the file that
        the simulation writes. A party without the declared file has weight 0; a silo then takes no part
        (:meth:`check_file`).

        Returns:
            (m,) float64 weights.
        """
        main_silos = population.main_silos
        if self.law != "declared" or population.complete:
            return self.for_groups(groups, population.n_silos, population.n_users)
        if main_silos is None or main_silos.digest != self.digest:
            return torch.zeros(len(groups), dtype=torch.float64)
        return torch.from_numpy((main_silos.silo[groups.user] == groups.silo).astype(np.float64))

    def check_file(self, main_silos: MainSilos | None) -> None:
        """Check that a declared file of main silos is the given one.

        Raises:
            MainSilosError: another file than the declared one, or none.
        """
        if self.law == "declared" and (main_silos is None or main_silos.digest != self.digest):
            raise MainSilosError(
                f"method.power: the run's file of main silos has the sha256 {self.digest}, and silo.toml names "
                + ("none (main_silos)" if main_silos is None else f"one that has {main_silos.digest}")
            )

    def for_groups(self, groups: Groups, n_silos: int, n_users: int) -> Float64[Tensor, " m"]:
        """Return the (m,) float64 weights of the contributions of all silos."""
        if self.law == "public":
            return torch.tensor(self.clients, dtype=torch.float64)[
                torch.from_numpy(groups.silo.astype(np.int64))
            ]
        if not self.by_records and not self.main:
            weight = 1.0 if self.law == "one" else 1.0 / n_silos
            return torch.full((len(groups.size),), weight, dtype=torch.float64)
        largest = np.zeros(n_users, dtype=groups.size.dtype)
        np.maximum.at(largest, groups.user, groups.size)
        if self.main:
            # Among the silos with most records of a user, the one with the lowest number is the main silo.
            first = np.full(n_users, n_silos)
            most = groups.size == largest[groups.user]
            np.minimum.at(first, groups.user[most], groups.silo[most])
            return torch.from_numpy((most & (groups.silo == first[groups.user])).astype(np.float64))
        scores: np.ndarray = groups.size.astype(np.float64)
        if self.power != 1:  # relative to the user's largest count, so that no power overflows
            scores = (scores / largest[groups.user]) ** self.power
        # Equation 3 of ULDP-FL with the power p: w_su = n_su^p / sum_s' n_s'u^p.
        totals = np.bincount(groups.user, weights=scores, minlength=n_users)
        return torch.from_numpy(scores / totals[groups.user])

    def scores(self, counts: Int64[np.ndarray, " m"], n_silos: int) -> Int64[np.ndarray, " m"]:
        """Return n^p for whole p, as whole numbers, from which silos compute weights without sharing counts.

        A count above ((2^32 - 1) / |S|)^(1/p) is replaced by the largest whole number below that. So a user's scores
        of all silos sum to at most the range of :class:`~fedveil.protocols.session_messages.UserTotals`, for any
        number of records. The weights still sum to 1. The limit is a function of public numbers.

        Raises:
            CompositionError: a power that is not whole.
        """
        if not self.supports_user_totals:
            raise CompositionError(f"weights {self.description}: {NOT_WHOLE}")
        power, largest = int(self.power), LARGEST_SCORE // n_silos
        most = round(largest ** (1 / max(1, power)))
        # Floating-point roots may round up; this restores most^p <= largest exactly, in whole numbers.
        most -= most ** max(1, power) > largest
        scores: np.ndarray = np.where(counts > 0, np.minimum(counts, most) ** power, 0)
        return scores


NOT_WHOLE = (
    "without a party that has all counts, silos weigh by totals of whole scores, so the power must be 0, 1, 2, ...; "
    "the main silo needs a comparison, which a sum does not give: take power = 2, which comes near to it, or name the "
    "main silos in a file that the silos share (power = {main_silos = its sha256})"
)

Weights.ONE = Weights("one")
Weights.UNIFORM = Weights("uniform")
Weights.BY_RECORDS = Weights("records")
Weights.EQUAL = Weights("records", 0.0)
Weights.MAIN = Weights("records", math.inf)

"""Allocation of records to users and silos in experiments: the laws of the ULDP-FL experiments.

A real federation has users and silos; an experiment on a public data set assigns them at random. The laws follow the
program of the ULDP-FL authors, which differs from the text of the paper in some places. All laws are seeded: they are
part of the experiment, not of any privacy mechanism.

==============  ==========================================  =======================================
law             silos are assigned                          silos are fixed by the data
==============  ==========================================  =======================================
uniform         equal counts per user, equal silos          user of every record uniform
zipf            N_u multinomial in k^-0.5; a user's silos   N_u the same, above a minimum; 80 %
                in k^-2 over a random silo order per user   of a user's records in one random silo
limited-labels  zipf, with at most k labels per user        (not defined)
clients         equal counts; every user is a silo          (not defined)
dirichlet       every user is a silo; the users' shares of  (not defined)
                each class are Dirichlet(concentration)
==============  ==========================================  =======================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedveil.config_keys import Count, NonNegative, Positive, Share, check_ranges
from fedveil.errors import ConfigError, DataError
from fedveil.randomness import ExperimentRandomness

Law: TypeAlias = Literal["uniform", "zipf", "limited-labels", "clients", "dirichlet"]
CLIENT_LAWS = ("clients", "dirichlet")
"""Laws under which every user is a silo."""
Column: TypeAlias = Int32[np.ndarray, "n"]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One law of allocation with its parameters.

    Args:
        law: name of the law, from the table of this module.
        user_exponent: a of P(user k) ∝ k^-a, k = 1 .. |U|; 0 is the uniform multinomial.
        silo_exponent: b of P(a user's j-th silo) ∝ j^-b, j = 1 .. |S|.
        main_share: expected share of a user's records in the user's main silo ("zipf" with fixed silos).
        labels_per_user: k of "limited-labels".
        concentration: parameter of "dirichlet"; the smaller it is, the fewer users share a class.

    Raises:
        ConfigError: an exponent is negative, a concentration is not positive, one of them is not finite, a share is
            outside [0, 1], or ``labels_per_user`` is below 1.
    """

    law: Law = "zipf"
    user_exponent: NonNegative = 0.5
    silo_exponent: NonNegative = 2.0
    main_share: Share = 0.8
    labels_per_user: Count = 2
    concentration: Positive = 1.0

    def __post_init__(self) -> None:
        """Refuse a number outside its range."""
        check_ranges(self)

    def allocate(
        self,
        labels: Int64[np.ndarray, "n"] | None,
        n: int,
        *,
        n_users: int,
        n_silos: int,
        randomness: ExperimentRandomness,
    ) -> tuple[Column, Column]:
        """Assign n records to users and silos if the data prescribe neither.

        Args:
            labels: (n,) classes; only "limited-labels" and "dirichlet" read them.
            n: number of records.
            n_users: |U|.
            n_silos: |S|; must equal ``n_users`` for "clients" and "dirichlet".
            randomness: randomness of the experiment; the result depends on its seed alone.

        Returns:
            (user, silo), two (n,) int32 columns of numbers from 0. Some users and silos may get no record.

        Raises:
            ConfigError: no user or no silo; "clients" or "dirichlet" with |S| != |U|; "limited-labels" or "dirichlet"
                without labels.
        """
        _check_counts(n_users, n_silos)
        # Separate named streams: the number of silos does not change the allocation to users.
        users, silos = randomness.numpy("allocation", "users"), randomness.numpy("allocation", "silos")
        if self.law in CLIENT_LAWS:
            if n_silos != n_users:
                raise ConfigError(
                    f"allocation '{self.law}' makes every user a silo: {n_users} users need as many silos"
                )
            if self.law == "clients":
                user = deal_evenly(n, n_users, users)
            elif labels is None:
                raise ConfigError("allocation 'dirichlet' needs class labels; this data set has none")
            else:
                user = share_classes(labels, n_users, self.concentration, users)
            return user, user.copy()
        if self.law == "uniform":
            return deal_evenly(n, n_users, users), deal_evenly(n, n_silos, silos)
        user = draw_zipf(n, n_users, self.user_exponent, users)
        if self.law == "limited-labels":
            if labels is None:
                raise ConfigError("allocation 'limited-labels' needs class labels; this data set has none")
            user = limit_labels(np.bincount(user, minlength=n_users), labels, self.labels_per_user, users)
        return user, spread_over_silos(user, n_users, n_silos, self.silo_exponent, silos)

    def allocate_within_silos(
        self, silo: Column, *, n_users: int, n_silos: int, least: int, randomness: ExperimentRandomness
    ) -> Column:
        """Assign records to users if every record already belongs to a silo (hospitals, centres).

        Args:
            silo: (n,) the silo of every record.
            n_users: |U|.
            n_silos: |S|.
            least: minimum number of records of a user, which the law tries to keep in one silo. 2 for a loss that has
                no gradient on a single record (Cox), else 1.
            randomness: randomness of the experiment.

        Returns:
            user, an (n,) int32 column of numbers from 0.

        Raises:
            ConfigError: the law does not support fixed silos, or there is no user or no silo.
            DataError: fewer than ``least`` records per user under "zipf".
        """
        _check_counts(n_users, n_silos)
        generator = randomness.numpy("allocation", "users")
        if self.law == "uniform":
            return fixed_uniform(silo, n_users, n_silos, least, generator)
        if self.law == "zipf":
            law = FixedZipf(exponent=self.user_exponent, main_share=self.main_share, least=least)
            return law.users(silo, n_users, n_silos, generator)
        raise ConfigError(
            f"allocation '{self.law}' needs free silos; these data come in silos: use uniform or zipf"
        )


def deal_evenly(n: int, hands: int, generator: np.random.Generator) -> Column:
    """Assign n records at random to ``hands`` users or silos, with counts that differ by at most one."""
    dealt: Column = generator.permutation(np.arange(n, dtype=np.int32) % np.int32(hands))
    return dealt


def share_classes(
    labels: Int64[np.ndarray, "n"], n_users: int, concentration: float, generator: np.random.Generator
) -> Column:
    """Split the records of each class over the users by shares from a symmetric Dirichlet distribution."""
    user = np.empty(len(labels), dtype=np.int32)
    for label in np.unique(labels):
        of_class = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(n_users, concentration))
        # Rounding the cumulative shares, not each share, makes the counts add up to the size of the class.
        ends = np.rint(np.cumsum(shares) * len(of_class)).astype(np.int64)
        user[of_class] = np.searchsorted(ends, np.arange(len(of_class)), side="right").clip(max=n_users - 1)
    return user


def zipf_law(size: int, exponent: float) -> Float64[np.ndarray, "size"]:
    """Return the bounded Zipf law P(k) = k^-exponent / sum_j j^-exponent on k = 1 .. size."""
    weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def draw_zipf(n: int, size: int, exponent: float, generator: np.random.Generator) -> Column:
    """Draw n independent numbers 0 .. size - 1, number k with probability ∝ (k + 1)^-exponent."""
    return generator.choice(size, size=n, p=zipf_law(size, exponent)).astype(np.int32)


def spread_over_silos(
    user: Column, n_users: int, n_silos: int, exponent: float, generator: np.random.Generator
) -> Column:
    """Assign each user's records to silos by a Zipf law over a random silo order of that user.

    The j-th silo in the user's order gets a record with probability ∝ j^-exponent, j = 1 .. ``n_silos``.
    """
    orders = generator.permuted(np.tile(np.arange(n_silos, dtype=np.int32), (n_users, 1)), axis=1)
    rank = draw_zipf(len(user), n_silos, exponent, generator)
    chosen: Column = orders[user, rank]
    return chosen


def limit_labels(
    counts: np.ndarray, labels: Int64[np.ndarray, "n"], labels_per_user: int, generator: np.random.Generator
) -> Column:
    """Assign user u about ``counts[u]`` records of at most ``labels_per_user`` labels.

    In the order of their numbers, users draw k of the open labels and take round(N_u / k) records of each. If a label
    has at most half of that number left, the first open label with more than half replaces it. A label that runs
    short is closed. Records that no user takes go to user 0, so user 0 alone may hold more labels.

    Args:
        counts: (|U|,) wanted records per user, N_u.
        labels: (n,) classes of the records.
        labels_per_user: k.
        generator: source of the labels drawn and of the order within a label.

    Returns:
        user, an (n,) int32 column of numbers.
    """
    stock = {
        int(label): generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)
    }
    n_taken = dict.fromkeys(stock, 0)
    open_labels = list(stock)
    user = np.zeros(len(labels), dtype=np.int32)

    def count_left(label: int) -> int:
        return len(stock[label]) - n_taken[label]

    for user_number in np.flatnonzero(counts):
        if not open_labels:
            break
        k = min(labels_per_user, len(open_labels))
        quota = round(int(counts[user_number]) / k)  # round(N_u / k) records of each of k labels
        for drawn in generator.choice(open_labels, size=k, replace=False).tolist():
            label = drawn
            # The label has at most half of the wanted records left: take the first open label with more than half.
            if 0 < quota >= 2 * count_left(drawn):
                label = next((other for other in open_labels if 2 * count_left(other) > quota), drawn)
            share = stock[label][n_taken[label] : n_taken[label] + quota]
            user[share] = user_number
            n_taken[label] += len(share)
            if len(share) < quota and label in open_labels:
                open_labels.remove(label)
    return user


def fixed_uniform(
    silo: Column, n_users: int, n_silos: int, together: int, generator: np.random.Generator
) -> Column:
    """Draw the user of every record uniformly with replacement; some users may get no record.

    With ``together`` = 2, one user is drawn for each pair of records of a silo; an odd last record joins the last
    pair.
    """

    def users_of(size: int) -> np.ndarray:
        blocks = max(1, size // together)  # a silo with one record still needs one user
        drawn = generator.integers(n_users, size=blocks)
        return np.append(np.repeat(drawn, together), np.repeat(drawn[-1:], together))[:size]

    return _within_silos(silo, n_silos, users_of, generator)


@dataclass(frozen=True, kw_only=True)
class FixedZipf:
    """Zipf law for fixed silos: N_u = least + a multinomial count in k^-exponent, mostly in one main silo.

    Each record draws the user's main silo with probability ``main_share``, and the other silos with equal shares of
    the rest. If the silo is full, the next silo in numerical order with free records takes it. With ``least`` = 2,
    records that are alone in their silo first move to another silo of their user (:func:`pair_up`).

    Attributes:
        exponent: exponent of the Zipf law over users.
        main_share: probability of the main silo.
        least: minimum number of records per user.
    """

    exponent: float
    main_share: float
    least: int

    def users(self, silo: Column, n_users: int, n_silos: int, generator: np.random.Generator) -> Column:
        """Return the user of every record, given the silo of every record.

        Raises:
            DataError: fewer than ``least`` records per user.
        """
        least = self.least
        if len(silo) < least * n_users:
            raise DataError(
                f"allocation 'zipf' gives each user at least {least} of the {len(silo)} records, but n_users is "
                f"{n_users}; at most {len(silo) // least} users fit"
            )
        extra = generator.multinomial(len(silo) - least * n_users, zipf_law(n_users, self.exponent))
        room = np.bincount(silo, minlength=n_silos).tolist()
        members: list[list[int]] = [[] for _ in range(n_silos)]
        other_share = (1 - self.main_share) / max(1, n_silos - 1)
        for user, count in enumerate((least + extra).tolist()):
            # P(main silo) = main_share; the other |S| - 1 silos share the rest equally.
            law = np.full(n_silos, other_share)
            law[generator.integers(n_silos)] = self.main_share if n_silos > 1 else 1.0
            wished = generator.choice(n_silos, size=count, p=law / law.sum())
            if least > 1:
                wished = pair_up(wished, generator)
            for index in wished.tolist():
                # Ends, because the users' counts add up to the number of records, so that some silo has room.
                while not room[index]:
                    index = (index + 1) % n_silos
                room[index] -= 1
                members[index].append(user)
        queues = iter(members)  # `_within_silos` calls the function once per silo, in the order of the silos
        return _within_silos(silo, n_silos, lambda _: np.array(next(queues)), generator)


def pair_up(wished: Int64[np.ndarray, "k"], generator: np.random.Generator) -> Int64[np.ndarray, "k"]:
    """Move a user's records that are alone in their silo to a random silo with two or more of them.

    If no silo has two records of the user, one random silo takes the role of this silo, and a second one keeps its
    single record, as in the authors' program. So a few contributions of one record remain, and their Cox gradient is
    zero.
    """
    silos, counts = np.unique(wished, return_counts=True)
    firm, singles = silos[counts >= 2], silos[counts < 2]
    if not len(firm):  # chosen[1] is in neither set: the authors' program leaves this silo with one record
        firm, singles = (chosen := generator.permutation(singles))[:1], chosen[2:]
    moves = np.isin(wished, singles)
    return np.where(moves, generator.choice(firm, size=len(wished)), wished)


def _within_silos(
    silo: Column, n_silos: int, users_of: Callable[[int], np.ndarray], generator: np.random.Generator
) -> Column:
    """Assign ``users_of(size)`` to the records of each silo, in random order within the silo."""
    order = np.argsort(silo, kind="stable")
    sizes = np.bincount(silo, minlength=n_silos)
    user = np.empty(len(silo), dtype=np.int32)
    for rows in np.split(order, np.cumsum(sizes)[:-1]):
        user[rows] = generator.permutation(users_of(len(rows)))
    return user


def _check_counts(n_users: int, n_silos: int) -> None:
    if n_users < 1 or n_silos < 1:
        raise ConfigError(f"an allocation needs at least one user and one silo, not {n_users} and {n_silos}")

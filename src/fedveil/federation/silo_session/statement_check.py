"""Check of a run's privacy statement by a silo, before the silo signs it.

A silo signs no statement that promises more than the terms give.

Claim: a statement that a silo signs is, word for word, the one that the terms give for the coordinator's number of
rounds and charges, including every release. The statement charges every round of every part at least as often as the
silo's own ledger implies. No epsilon in it, and no published figure, is below the silo's own value by more than
rounding differences between machines.

A silo that contributed nothing to a round that needs it signs nothing. All charges of the run in its ledger were made
under the session's experiment (``SiloParty._check_one_experiment`` refuses other sessions). After it has signed, the
silo joins no session of the run, contributes to no round of the run, and signs no other end
(:meth:`~fedveil.federation.silo_ledger.SiloLedger.end`).

Not claimed: how often the coordinator asked other silos for a round without this one. Not claimed: that the last
round with the silo's contribution counts as complete (it is charged in any case). Not claimed: which line of the
record the coordinator names, because silos never see the record. Tests: ``tests/test_federation_closing.py``,
``tests/test_federation_statements.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce, wraps
from operator import and_
from typing import Final, ParamSpec

from fedveil.errors import FedveilError
from fedveil.federation.audit.run_record import RoundPlace
from fedveil.federation.transport.interface import LARGEST_STATEMENT
from fedveil.files import parse_json
from fedveil.methods.guarantee import Guarantee
from fedveil.privacy.events import Event, atoms
from fedveil.privacy.statement import Statement
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import Finalize
from fedveil.run.folder.statement import state
from fedveil.run.releases.series import PreparedReleases
from fedveil.run.releases.side_releases import SpentBudget
from fedveil.run.rounds.retries import MOST_ATTEMPTS
from fedveil.run.setup import Prepared

_SLACK: Final = 1e-6
_LONG: Final = 1000
"""Number of rounds for whose attempts every run has an allowance.

A run may be resumed often, with up to ``MOST_ATTEMPTS`` attempts each time.
"""


@dataclass(frozen=True, kw_only=True)
class SiloCharges:
    """Charges of a run in a silo's ledger.

    Attributes:
        times: least number of the coordinator's charges, by round over all parts.
        needs_all_silos: whether every round needs every silo.
    """

    times: Counter[RoundPlace]
    needs_all_silos: bool

    def rounds_of(self, part: str) -> Counter[int]:
        """Return the least charges of one part, by number of the round."""
        return Counter({number: count for (name, number), count in self.times.items() if name == part})

    def require(self, releases: Collection[str]) -> None:
        """Check that the silo was charged once for each release, and for all if every silo is needed.

        Raises:
            StatementMismatchError: the ledger has another release, or one more than once; or it lacks one that needs
                this silo.
        """
        charged = {name: self.rounds_of(name) for name, _ in self.times if name}
        if any(name not in releases or times != Counter([1]) for name, times in charged.items()):
            raise StatementMismatchError
        if self.needs_all_silos and len(charged) < len(releases):
            raise StatementMismatchError


class StatementMismatchError(FedveilError):
    """The coordinator's text is not a statement, or differs from the silo's own."""


_Checked = ParamSpec("_Checked")


def _refusing(check: Callable[_Checked, None]) -> Callable[_Checked, None]:
    """Turn every failure of a check into one refusal code, so that no reason leaves the silo."""

    @wraps(check)
    def checked(*args: _Checked.args, **kwargs: _Checked.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except RefusalError:
            raise
        except (FedveilError, ValueError):
            raise RefusalError(Code.STATEMENT) from None

    return checked


@_refusing
def check_training(prepared: Prepared, closing: Finalize, silo_charges: SiloCharges) -> None:
    """Check the statement of a run of training, with its side releases, against the terms.

    Args:
        prepared: the experiment as the silo holds it.
        closing: the coordinator's message with the statement.
        silo_charges: charges of the run in the silo's ledger.

    Raises:
        RefusalError: the statement differs.
    """
    rounds, charges, number = closing.round, closing.charges, prepared.experiment.rounds
    if not rounds <= min(charges, number) or charges > MOST_ATTEMPTS * max(number, _LONG):
        raise StatementMismatchError  # before the statement is read or recomputed
    _check_length(closing)
    silo_charges.require([release.name for release in prepared.side_releases])
    own_counts = silo_charges.rounds_of("")
    # least[t] = max(the silo's own charges of round t, 1 for every completed round): the fewest charges of each
    # round.
    least = own_counts | Counter(range(1, rounds + 1))
    # At most one round beyond the completed ones can have begun.
    if max(own_counts, default=0) - 1 > rounds or least.total() > charges:
        raise StatementMismatchError
    # If every round needs every silo, this silo was charged for each completed one; else at least one charge must
    # exist.
    if (
        sum(charged <= rounds for charged in own_counts) < rounds
        if silo_charges.needs_all_silos
        else rounds and not silo_charges.times
    ):
        raise StatementMismatchError
    stated = _read_statement(closing)
    release_events = (release.event for release in prepared.side_releases)
    if not _consists_of_charges(
        prepared.guarantee, least, (min(rounds + 1, number), charges), _without(stated.event, release_events)
    ):
        raise StatementMismatchError
    spent = SpentBudget(charges=charges, side_releases=prepared.side_releases, event=stated.event)
    _compare(stated, state(prepared, rounds, spent))


@_refusing
def check_releases(prepared: PreparedReleases, closing: Finalize, silo_charges: SiloCharges) -> None:
    """Check the statement of a document's releases, all of them made.

    Args:
        prepared: the releases as the silo holds them.
        closing: the coordinator's message with the statement.
        silo_charges: charges of the run in the silo's ledger.

    Raises:
        RefusalError: the statement differs.
    """
    if closing.round or closing.charges or not silo_charges.times:
        raise StatementMismatchError
    _check_length(closing)
    silo_charges.require([prepared.part(index) for index in range(prepared.count)])
    counts = [1] * prepared.count
    _compare(
        _read_statement(closing), prepared.series.statement(prepared.document.name, counts, prepared.notes)
    )


def _read_statement(closing: Finalize) -> Statement:
    return Statement.from_json(parse_json(closing.statement, "the statement", StatementMismatchError))


def _check_length(closing: Finalize) -> None:
    """Refuse an overlong text before it is read."""
    if len(closing.statement) > LARGEST_STATEMENT:
        raise StatementMismatchError


def _without(event: Event, releases: Iterable[Event]) -> Counter[Event]:
    """Return the atoms of an event minus those of the releases; missing atoms count below 0."""
    remaining = Counter(atoms(event))
    for release in releases:
        remaining.subtract(atoms(release))
    return remaining


def _consists_of_charges(
    guarantee: Guarantee, least: Counter[int], counts: tuple[int, int], remaining: Counter[Event]
) -> bool:
    """Return whether atoms are the least charges of each round plus further charges of begun rounds.

    Args:
        guarantee: the guarantee of the run.
        least: fewest charges of each round.
        counts: number of begun rounds, and of all charges.
        remaining: atoms of the stated event without the releases. Consumed.
    """
    begun, charges = counts
    n_further = charges - least.total()
    # The event of a repeated attempt differs from the first one: its strength is at least 1
    # (guarantee.event_at_round).
    first, again = (
        {
            number: atoms(guarantee.event_at_round(guarantee.event, number, again=repeated))
            for number in range(1, begun + 1)
        }
        for repeated in (False, True)
    )
    # n charges of a round = the event of its first attempt, and n - 1 events of repeated attempts.
    for number, times in least.items():
        remaining.subtract(first[number])
        remaining.subtract({atom: (times - 1) * count for atom, count in again[number].items()})
    if _consists_of(remaining, again, n_further):
        return True
    if not n_further or not begun or begun in least:
        return False
    remaining.subtract(first[begun])  # round charged, but not requested from this silo
    return _consists_of(remaining, again, n_further - 1)


def _consists_of(remaining: Counter[Event], events: Mapping[int, Counter[Event]], number: int) -> bool:
    """Return whether atoms can be those of ``number`` of these events.

    All events share some atoms (the loss of a grid, a distance), and each has one more at most (its release). So the
    shared atoms must be there as often as the events, and the others once each.
    """
    counts = list(events.values()) or [Counter[Event]()]
    shared = reduce(and_, counts)
    releases = {atom for event in counts for atom in event - shared}
    unshared = Counter(remaining)
    unshared.subtract({atom: number * count for atom, count in shared.items()})
    n_own = max(sum((event - shared).values()) for event in counts)
    return (
        min(unshared.values(), default=0) >= 0
        and {atom for atom, times in unshared.items() if times} <= releases
        and unshared.total() == number * n_own
    )


def _compare(claimed: Statement, computed: Statement) -> None:
    """Check that the coordinator's statement has the text of the silo's own, and no figure below the silo's own.

    Raises:
        StatementMismatchError: it does not.
    """
    if _without_figures(claimed) != _without_figures(computed):
        raise StatementMismatchError
    # Larger figures are accepted: they promise less. _SLACK covers rounding differences between machines.
    if not all(
        _at_least(figure, bound) for figure, bound in zip(_figures(claimed), _figures(computed), strict=True)
    ):
        raise StatementMismatchError


def _without_figures(statement: Statement) -> Statement:
    return replace(
        statement,
        epsilon=None if statement.epsilon is None else 0.0,
        epsilons=tuple((name, None if value is None else 0.0) for name, value in statement.epsilons),
        trust=tuple(replace(item, epsilon=None if item.epsilon is None else 0.0) for item in statement.trust),
        as_published=tuple(replace(item, value=None) for item in statement.as_published),
    )


def _figures(statement: Statement) -> list[float | None]:
    return [
        statement.epsilon,
        *(value for _, value in statement.epsilons),
        *(item.epsilon for item in statement.trust),
        *(item.value for item in statement.as_published),
    ]


def _at_least(stated: float | None, computed: float | None) -> bool:
    """Return whether a stated figure is at least the computed one, up to rounding; None is infinite."""
    lower = (math.inf if computed is None else computed) * (1 - _SLACK)
    return (math.inf if stated is None else stated) >= lower

"""What a silo computes of a run's statement before it signs it: it signs none that promises more than the terms give.

Claim: a statement that a silo signs is, word for word, the one that the terms give for as many rounds and charges as
the coordinator says, with every release beside them; it charges every round of every part at least as often as the
silo's own ledger shows that it must have been asked for; and no epsilon in it, nor a figure of a publication, is below
the silo's own by more than the rounding of another machine. A silo that gave nothing to a round that needs it signs
nothing; and whatever its ledger charged to the run was charged under the session's experiment, or it would not be in
the session (``SiloParty._check_one_experiment``). Once it has signed, it joins no session of the run, gives to no round
of it, and signs no other end (:meth:`~fedveil.federation.silo_ledger.SiloLedger.end`). Not shown by it: how often other
silos were asked for a round without this one; that the last round which the silo gave something to counts as complete
(it is charged either way); and which line of the record the coordinator names, for silos never see the record. Tests:
``tests/test_federation_closing.py``, ``tests/test_federation_statements.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Final, ParamSpec

from fedveil.errors import FedveilError
from fedveil.federation.audit.run_record import RoundPlace
from fedveil.federation.errors import RefusalError
from fedveil.federation.limits import LARGEST_STATEMENT
from fedveil.files import parse_json
from fedveil.methods.guarantee import Guarantee
from fedveil.privacy.events import Event, atoms
from fedveil.privacy.statement import Statement
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Finalize
from fedveil.run.folder.statement import state
from fedveil.run.releases.prepared_releases import PreparedReleases
from fedveil.run.releases.side_releases import SpentBudget
from fedveil.run.rounds.retries import MOST_ATTEMPTS
from fedveil.run.setup import Prepared

_SLACK: Final = 1e-6
_LONG: Final = 1000
"""Rounds that a run may always have attempts for: it may be resumed often, each time with ``MOST_ATTEMPTS``."""


@dataclass(frozen=True, kw_only=True)
class SiloCharges:
    """What a silo's ledger shows of a run.

    Attributes:
        times: rounds of all parts, and how often the coordinator must have charged each.
        whole: whether every round needs every silo.
    """

    times: Counter[RoundPlace]
    whole: bool

    def rounds_of(self, part: str) -> Counter[int]:
        """Return the rounds of a part."""
        return Counter({number: many for (name, number), many in self.times.items() if name == part})

    def require(self, releases: Collection[str]) -> None:
        """Return if these releases were asked for as a run has them: each once, and all of a silo that all need.

        Raises:
            StatementMismatchError: another one, or one more often; or one without this silo, which needs it.
        """
        found = {name: self.rounds_of(name) for name, _ in self.times if name}
        if any(name not in releases or times != Counter([1]) for name, times in found.items()):
            raise StatementMismatchError
        if self.whole and len(found) < len(releases):
            raise StatementMismatchError


class StatementMismatchError(FedveilError):
    """What a coordinator calls a statement is none, or another."""


_Checked = ParamSpec("_Checked")


def _refusing(check: Callable[_Checked, None]) -> Callable[_Checked, None]:
    """Have a check refuse, whatever fails in it, with one code: no reason leaves the silo."""

    @wraps(check)
    def checked(*given: _Checked.args, **named: _Checked.kwargs) -> None:
        try:
            check(*given, **named)
        except RefusalError:
            raise
        except (FedveilError, ValueError):
            raise RefusalError(Code.STATEMENT) from None

    return checked


@_refusing
def check_training(prepared: Prepared, closing: Finalize, own: SiloCharges) -> None:
    """Return if a run of training, and of what is released beside it, states what its terms give.

    Args:
        prepared: the experiment as the silo holds it.
        closing: what the coordinator says at the end.
        own: what the silo's ledger shows of the run.

    Raises:
        RefusalError: another statement.
    """
    rounds, charges, number = closing.round, closing.charges, prepared.experiment.rounds
    if not rounds <= min(charges, number) or charges > MOST_ATTEMPTS * max(number, _LONG):
        raise StatementMismatchError  # before any of it is read or computed
    _check_length(closing)
    own.require([one.name for one in prepared.side_releases])
    charged = own.rounds_of("")
    least = charged | Counter(range(1, rounds + 1))
    if max(charged, default=0) - 1 > rounds or least.total() > charges:
        raise StatementMismatchError
    if sum(one <= rounds for one in charged) < rounds if own.whole else rounds and not own.times:
        raise StatementMismatchError
    stated = _stated(closing)
    beside = (one.guarantee.event for one in prepared.side_releases)
    if not _composed(
        prepared.guarantee, least, (min(rounds + 1, number), charges), _without(stated.event, beside)
    ):
        raise StatementMismatchError
    spent = SpentBudget(charges=charges, beside=prepared.side_releases, event=stated.event)
    _compare(stated, state(prepared, rounds, spent))


@_refusing
def check_releases(prepared: PreparedReleases, closing: Finalize, own: SiloCharges) -> None:
    """Return if a document's releases state what they give together; all of them are made.

    Args:
        prepared: the releases as the silo holds them.
        closing: what the coordinator says at the end.
        own: what the silo's ledger shows of the run.

    Raises:
        RefusalError: another statement.
    """
    if closing.round or closing.charges or not own.times:
        raise StatementMismatchError
    _check_length(closing)
    own.require([prepared.part(made) for made in range(prepared.count)])
    once = [1] * prepared.count
    _compare(_stated(closing), prepared.series.statement(prepared.document.name, once, prepared.notes))


def _stated(closing: Finalize) -> Statement:
    return Statement.from_json(parse_json(closing.statement, "the statement", StatementMismatchError))


def _check_length(closing: Finalize) -> None:
    """Refuse a text that no run states, before any of it is read."""
    if len(closing.statement) > LARGEST_STATEMENT:
        raise StatementMismatchError


def _without(event: Event, releases: Iterable[Event]) -> Counter[Event]:
    """Return the atoms of an event but those of releases; what is not there counts below 0."""
    left = Counter(atoms(event))
    for one in releases:
        left.subtract(atoms(one))
    return left


def _composed(
    guarantee: Guarantee, least: Counter[int], counts: tuple[int, int], left: Counter[Event]
) -> bool:
    """Return whether atoms are each round's as often as it must be, and what is left those of any round begun."""
    begun, charges = counts
    rest = charges - least.total()
    first, again = (
        {
            number: atoms(guarantee.event_at_round(guarantee.event, number, again=repeated))
            for number in range(1, begun + 1)
        }
        for repeated in (False, True)
    )
    for number, times in least.items():
        left.subtract(first[number])
        left.subtract({atom: (times - 1) * count for atom, count in again[number].items()})
    if _made_of(left, again, rest):
        return True
    if not rest or not begun or begun in least:
        return False
    left.subtract(first[begun])  # charged, and not asked of this silo
    return _made_of(left, again, rest - 1)


def _made_of(left: Counter[Event], events: Mapping[int, Counter[Event]], number: int) -> bool:
    """Return whether what is left is so many of these events, which have one size."""
    size = sum(next(iter(events.values()), Counter[Event]()).values())
    possible = {atom for one in events.values() for atom in one}
    return (
        min(left.values(), default=0) >= 0
        and {atom for atom, times in left.items() if times} <= possible
        and sum(left.values()) == number * size
    )


def _compare(stated: Statement, own: Statement) -> None:
    """Return if a statement says what the silo's own does, and no figure is below its own.

    Raises:
        StatementMismatchError: it does not.
    """
    if _without_figures(stated) != _without_figures(own):
        raise StatementMismatchError
    if not all(_at_least(said, found) for said, found in zip(_figures(stated), _figures(own), strict=True)):
        raise StatementMismatchError


def _without_figures(statement: Statement) -> Statement:
    return replace(
        statement,
        epsilon=None if statement.epsilon is None else 0.0,
        epsilons=tuple((name, None if value is None else 0.0) for name, value in statement.epsilons),
        trust=tuple(replace(one, epsilon=None if one.epsilon is None else 0.0) for one in statement.trust),
        as_published=tuple(replace(one, value=None) for one in statement.as_published),
    )


def _figures(statement: Statement) -> list[float | None]:
    return [
        statement.epsilon,
        *(value for _, value in statement.epsilons),
        *(one.epsilon for one in statement.trust),
        *(one.value for one in statement.as_published),
    ]


def _at_least(said: float | None, found: float | None) -> bool:
    return (math.inf if said is None else said) >= (math.inf if found is None else found) * (1 - _SLACK)

"""What a silo computes of a run's statement before it signs it: it signs none that promises more than the terms give.

Claim: a statement that a silo signs is, word for word, the one that the terms give for as many rounds and charges as
the coordinator says; it charges every round at least as often as the silo's own ledger shows that it must have been
asked for; and no epsilon in it, nor a figure of a publication, is below the silo's own by more than the rounding of
another machine. A silo that gave nothing to a round that needs it signs nothing, and none signs the end of a run with
releases beside its rounds, whose statement is complete only after them. Not shown by it: how often other silos
were asked for a round without this one; that the last round which the silo gave something to counts as complete (it is
charged either way); which line of the record the coordinator names, for silos never see the record; and that the run
does not go on afterwards. Tests: ``tests/test_federation_closing.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from fedveil.engine.attempts import MOST_ATTEMPTS
from fedveil.engine.setup import Prepared
from fedveil.engine.side_releases import Spent
from fedveil.engine.statement import state
from fedveil.errors import FedveilError
from fedveil.federation.errors import RefusalError
from fedveil.federation.limits import LARGEST_STATEMENT
from fedveil.files import parse_json
from fedveil.methods.claims import Guarantee
from fedveil.privacy.events import Event, atoms
from fedveil.privacy.statement import Statement
from fedveil.protection.parts import Closing
from fedveil.protection.refusals import Code

_SLACK: Final = 1e-6
_LONG: Final = 1000
"""Rounds that a run may always have attempts for: it may be resumed often, each time with ``MOST_ATTEMPTS``."""


def check_statement(prepared: Prepared, closing: Closing, charged: Counter[int], *, whole: bool) -> None:
    """Return if a run states what its terms give.

    Args:
        prepared: the experiment as the silo holds it.
        closing: what the coordinator says at the end.
        charged: rounds of the run, and how often the coordinator must have charged each, as the silo's ledger shows.
        whole: whether every round needs every silo.

    Raises:
        RefusalError: another statement.
    """
    if prepared.beside:
        raise RefusalError(Code.STATEMENT)
    try:
        _check_size(closing, prepared.experiment.rounds)
        stated = Statement.from_json(parse_json(closing.statement, "the statement", RefusedText))
        rounds, charges = closing.round, closing.charges
        guarantee, number = prepared.guarantee, prepared.experiment.rounds
        least = charged | Counter(range(1, rounds + 1))
        if max(charged, default=0) - 1 > rounds or least.total() > charges:
            raise RefusedText
        if sum(one <= rounds for one in charged) < rounds if whole else rounds and not charged:
            raise RefusedText
        if not _composed(guarantee, least, (min(rounds + 1, number), charges), stated.event):
            raise RefusedText
        own = state(prepared, rounds, Spent(charges=charges, beside=(), event=stated.event))
        if _without_figures(stated) != _without_figures(own):
            raise RefusedText
        if not all(
            _at_least(said, found) for said, found in zip(_figures(stated), _figures(own), strict=True)
        ):
            raise RefusedText
    except RefusalError:
        raise
    except (FedveilError, ValueError):
        raise RefusalError(Code.STATEMENT) from None


class RefusedText(FedveilError):
    """What a coordinator calls a statement is none, or another."""


def _check_size(closing: Closing, rounds: int) -> None:
    """Refuse what a run of so many rounds does not state, before any of it is read or computed."""
    if not closing.round <= min(closing.charges, rounds):
        raise RefusedText
    if closing.charges > MOST_ATTEMPTS * max(rounds, _LONG) or len(closing.statement) > LARGEST_STATEMENT:
        raise RefusedText


def _composed(guarantee: Guarantee, least: Counter[int], counts: tuple[int, int], event: Event) -> bool:
    """Return whether an event is each round's as often as it must be, and what is left those of any round begun."""
    begun, charges = counts
    left, rest = Counter(atoms(event)), charges - least.total()
    first, again = (
        {
            number: atoms(guarantee.of_round(guarantee.event, number, again=repeated))
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

"""What a silo computes of a run's statement before it signs it: it signs none that promises more than the terms give.

Claim: a statement that a silo signs is, word for word, the one that the terms give for as many rounds and charges as
the coordinator says, no fewer rounds than the silo gave something to; and no epsilon in it is below the silo's own
figure by more than the rounding of another machine. Not shown by it: that the coordinator charged no more than it says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fedveil.engine.setup import Prepared
from fedveil.engine.side_releases import Spent
from fedveil.engine.statement import state
from fedveil.errors import FedveilError
from fedveil.federation.errors import RefusalError
from fedveil.files import parse_json
from fedveil.methods.claims import Guarantee
from fedveil.privacy.events import Event, atoms
from fedveil.privacy.statement import Statement
from fedveil.protection.parts import Closing
from fedveil.protection.refusals import Code

_SLACK: Final = 1e-6


def check_statement(prepared: Prepared, closing: Closing, charged: Sequence[int]) -> None:
    """Return if a run states what its terms give.

    Args:
        prepared: the experiment as the silo holds it.
        closing: what the coordinator says at the end.
        charged: the rounds of the run that the silo has charged, once for each charge.

    Raises:
        RefusalError: another statement.
    """
    try:
        stated = Statement.from_json(parse_json(closing.statement, "the statement", RefusedText))
        rounds, charges = closing.round, closing.charges
        guarantee, number = prepared.guarantee, prepared.experiment.rounds
        if not max(charged, default=0) - 1 <= rounds <= min(charges, number):
            raise RefusedText
        if not _composed(guarantee, (rounds, min(rounds + 1, number), charges), stated.event):
            raise RefusedText
        own = state(prepared, rounds, Spent(charges=charges, beside=prepared.beside, event=stated.event))
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


def _composed(guarantee: Guarantee, counts: tuple[int, int, int], event: Event) -> bool:
    """Return whether an event is every round's once, and those of rounds up to the next one as often as is left."""
    rounds, begun, charges = counts
    left = Counter(atoms(event))
    of_rounds = [atoms(guarantee.of_round(guarantee.event, number)) for number in range(1, begun + 1)]
    for one in of_rounds[:rounds]:
        left.subtract(one)
    possible = {atom for one in of_rounds for atom in one}
    size = sum(of_rounds[0].values()) if of_rounds else 0
    more = {atom for atom, times in left.items() if times}
    return (
        min(left.values(), default=0) >= 0
        and more <= possible
        and sum(left.values()) == (charges - rounds) * size
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
    ]


def _at_least(said: float | None, found: float | None) -> bool:
    return (math.inf if said is None else said) >= (math.inf if found is None else found) * (1 - _SLACK)

"""Check a statement against ledger and experiment: the same events and delta, no smaller epsilon than they cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from fedveil.checks import Check, tried
from fedveil.errors import IntegrityError
from fedveil.files import reading
from fedveil.foreign import foreign
from fedveil.privacy.accounting import ACCOUNTANTS, make_accountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, atoms
from fedveil.privacy.ledger_lines import Entry
from fedveil.privacy.statement import Statement, show_epsilon


def same_events(statement: Statement, entries: Sequence[Entry]) -> str:
    """Return in words that a statement's event is the composition of a ledger's charges.

    Raises:
        IntegrityError: it is not.
    """
    for entry in entries:
        if (entry.unit, entry.adjacency) != (statement.unit, statement.adjacency):
            raise IntegrityError(
                f"charge {entry.index + 1} is for one {entry.unit} under {entry.adjacency.value}, the statement for "
                f"one {statement.unit} under {statement.adjacency.value}"
            )
    charged: Counter[Event] = sum((atoms(entry.event) for entry in entries), Counter())
    if charged != atoms(statement.event):
        raise IntegrityError("the statement's event is not the composition of what the ledger charged")
    return "its event is the composition of all charges"


def same_privacy(statement: Statement, *, delta: object, accountant: object, seed: object) -> str:
    """Return in words that a statement is of what an experiment, or a document of releases, asked for.

    Args:
        statement: of the run.
        delta, accountant: that were asked for.
        seed: ``privacy.insecure_seed``; None: the noise could not be predicted.

    Raises:
        IntegrityError: its noise came from a known seed, and it says not; or it has another delta or accountant.
    """
    if seed is not None and statement.secure_randomness:
        raise IntegrityError(
            "the noise came from a known seed (privacy.insecure_seed), and the statement says that nobody could "
            "predict it"
        )
    if (delta, accountant) != (statement.delta, statement.accountant):
        raise IntegrityError(
            f"the statement is for delta {statement.delta:g} by accountant '{foreign(statement.accountant)}', and "
            "another was asked for"
        )
    return f"delta {statement.delta:g} and accountant {statement.accountant}, as was asked for"


def recomputed(statement: Statement) -> Iterator[Check]:
    """Recompute epsilon by every accountant: what is stated must not be smaller."""
    if statement.epsilon is None:
        yield Check(
            name="epsilon",
            outcome="unchecked",
            detail=f"nothing is guaranteed: {'; '.join(statement.reasons)}",
        )
        return
    stated = dict(statement.epsilons)
    if stated.get(statement.accountant) is None:
        yield Check(
            name="epsilon",
            outcome="fails",
            detail=f"no figure of {statement.accountant}, which is said to bound it",
        )
        return
    lines = [
        (f"a line for {line.party}", line.epsilon) for line in statement.trust if line.role is Role.READER
    ]
    for words, value in lines:
        if value is None or value < statement.epsilon:
            yield Check(
                name="epsilon", outcome="fails", detail=f"{words} promises less than the statement's epsilon"
            )
    for name, value in dict.fromkeys((*stated.items(), (statement.accountant, statement.epsilon))):
        yield tried(f"epsilon by {name}", partial(_epsilon, statement, name, value))


def _epsilon(statement: Statement, name: str, stated: float | None) -> str:
    if name not in ACCOUNTANTS:
        raise IntegrityError(f"there is no accountant '{name}'")
    with reading("the recorded event", IntegrityError):
        found = make_accountant(name, statement.adjacency).epsilon(statement.event, statement.delta)
    claimed = math.inf if stated is None else stated
    if found > claimed * (1 + 1e-9):
        raise IntegrityError(
            f"the recorded events cost {show_epsilon(found)} at delta {statement.delta:g}, more than the "
            f"{show_epsilon(stated)} that is stated"
        )
    return f"recomputed {show_epsilon(found)}, stated {show_epsilon(stated)}"

"""Define the accounting rule of a kind of release: what accountants need to know to bound it.

An accountant composes releases; the rule of an event says what a single release of it costs. A package that brings a
new event, for a new sampler say, brings its rule in the same file, and every accountant can count the event:

    @dataclass(frozen=True, kw_only=True)
    class HalvesEvent(Event, type="halves"): ...

    class HalvesRule(AccountingRule, event=HalvesEvent): ...

The definition of the class registers the rule. Registry kind ``accounting_rules`` names rules by the event's type, so
that a ledger is readable in a process that has not loaded the rule yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import numpy as np
from jaxtyping import Float64

from fedveil.errors import PrivacyError
from fedveil.privacy.events import Adjacency, Event, is_known_type
from fedveil.registry import PACKAGE, find, members

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Orders: TypeAlias = tuple[float, ...]
Divergences: TypeAlias = Callable[[Orders], Float64[np.ndarray, " orders"]]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Privacy loss of one release, for accountants that compose loss distributions.

    Attributes:
        typical: typical loss; the grid of losses is a tenth of the smallest one.
        largest: loss that is exceeded with negligible probability.
        spread: standard deviation of the loss.
        discretise: returns, for the spacing of the grid, a distribution on its multiples that dominates the loss for
            both orders of the neighbours: a wider spacing may cost more, never less.
    """

    typical: float
    largest: float
    spread: float
    discretise: Callable[[float], PrivacyLossDistribution]


class AccountingRule:
    """Cost of one release of an event; bounds that a rule does not have are None.

    A rule is trusted as a proof is: both bounds must hold for every pair of neighbours, whatever other people's
    contributions are. ``tests/contract/test_samplers.py`` tries to break them.

    Attributes:
        event: the event's class.
    """

    event: ClassVar[type[Event]]

    def __init_subclass__(cls, *, event: type[Event]) -> None:
        """Register the rule of an event."""
        if event in _RULES:
            raise PrivacyError(f"{cls.__name__}: events of type {event.type!r} have a rule already")
        cls.event = event
        _RULES[event] = cls()

    def losses(self, release: Any, adjacency: Adjacency) -> Losses | None:
        """Return the privacy loss of a release; None if there is no bound under this adjacency."""
        return None

    def divergences(self, release: Any, adjacency: Adjacency) -> Divergences | None:
        """Return the Renyi divergences of a release by order, for both orders of the neighbours; None as above."""
        return None


_RULES: Final[dict[type[Event], AccountingRule]] = {}


def rule_of(release: Event) -> AccountingRule:
    """Return the rule of a release; a rule without bounds if its event has none."""
    kind = type(release)
    if kind not in _RULES and any(one.name == kind.type for one in members("accounting_rules")):
        find("accounting_rules", kind.type).load()
    return _RULES.get(kind, _UNBOUNDED)


_UNBOUNDED: Final = object.__new__(AccountingRule)


def load_event_types(event: object) -> None:
    """Load the packages that define the events of a document of one's own.

    An event's type is looked up among accounting rules and samplers of this name. Documents of other parties are read
    without this call, so that they load no package.

    Args:
        event: an event in its JSON form.
    """
    for name in _unknown_types(event):
        for kind in ("accounting_rules", "samplers"):
            if any(one.name == name and one.package != PACKAGE for one in members(kind)):
                find(kind, name).load()


def _unknown_types(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        name = value.get("type")
        if isinstance(name, str) and not is_known_type(name):
            yield name
        for inner in value.values():
            yield from _unknown_types(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _unknown_types(inner)

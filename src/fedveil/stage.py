"""What a stage of a method must declare: its privacy claims, what it cannot be combined with, and its description."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import get_annotations, isabstract
from typing import Any, Final, Literal, Protocol, TypeVar, runtime_checkable

from fedveil.config_keys import check_ranges
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Claim, Reveals
from fedveil.registry import is_own


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How far one unit moves what a round sends, and the noise that is on it; l2 unless the bound is another.

    Attributes:
        unit: who is protected as a whole.
        total: of the sum over all senders; infinite where contributions are not bounded.
        messages: of all senders' messages together, one by one.
        even: whether every sender carries the same share of it at most, so that the rest moves by less without one.
        reweighs: whether what a unit holds at one sender changes the weight of what it holds at the others.
        reach: how far a message moves when it goes from anywhere to anywhere in its ball, counted once where
            accountants double what is replaced.
        largest: the largest l2 norm of a message before its noise; 0 where contributions are not bounded.
        ballots: how many ballots one unit can change, given the model.
        n_senders: how many messages a round has.
        n_silos: how many silos there are, of which those may be some.
        noise: standard deviation of the noise of one message; 0 for none, or where it is not Gaussian.
        bound: of one contribution; its grid is that of the messages.
        group: how many contributions are one unit's, where that is limited.
        records: of every sender, where the noise depends on them.
        weight: of a contribution in its sender's sum, as a formula for people.
        together: how many senders pool what they know, where a line is about senders; the noise is sized for them.
        divided: whether a message travels in two parts, each with a bound and noise of its own, or without.
    """

    unit: Literal["user", "client"]
    total: float
    messages: float
    even: bool
    reach: float
    largest: float
    ballots: int
    n_senders: int
    n_silos: int
    noise: float
    bound: Bound
    group: int = 1
    records: tuple[int, ...] | None = None
    reweighs: bool = False
    weight: str = "1"
    together: int = 1
    divided: bool = False

    @property
    def norm(self) -> float:
        """The bound of one contribution; 0 where there is none."""
        return self.bound.norm if self.bound.bounded else 0.0

    def pooled_sensitivity(self, unknown: int, known: int, of_all: int) -> float:
        """Return how far a unit moves the sum over all senders but ``known`` of them, over the noise left there.

        In multiples of one message's noise, for senders who know of their own noise: ``unknown`` shares are left.
        What is guaranteed to a unit is what it holds elsewhere, a share 1 - known / n of the whole where every sender
        carries the same. Where weights depend on what a unit holds everywhere, it may stay with the known senders and
        weigh more there without the rest: the sum moves from one end of its ball to the other, by twice the whole. It
        is never less than the whole over all ``of_all`` shares: who knows more is not promised more.
        """
        share = 1 - known / self.n_senders if self.even else 2.0 if self.reweighs else 1.0
        return self.total * max(share / math.sqrt(unknown), 1 / math.sqrt(of_all))


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure in the literature that the derivation does not support.

    Attributes:
        name: where it stands.
        gap: what its theory misses.
        epsilon: the figure as a function of (rounds, delta).
    """

    name: str
    gap: str
    epsilon: Callable[[int, float], float]


@runtime_checkable
class ClosedForm(Protocol):
    """A published theorem that says how much noise is enough, in units of what the noise is measured in."""

    @property
    def name(self) -> str:
        """Which theorem."""
        ...

    def noise_multiplier(self, rounds: int, epsilon: float, delta: float) -> float:
        """Return the noise that is enough for so many rounds."""
        ...

    def epsilon(self, rounds: int, noise_multiplier: float, delta: float) -> float:
        """Return what it shows for so much noise; infinite outside its domain."""
        ...


_Answer = TypeVar("_Answer", bound=Callable[..., Any])
_DUTY: Final = "__duty__"


def everyone_adds(sender: str, tolerated: int) -> str:
    """Return what a statement about the senders' own noise takes on trust, for a "Not covered" line.

    Args:
        sender: what those who add noise are called.
        tolerated: how many of them may fail to add theirs, because the others' shares are sized for that. What they
            contribute is bounded by nobody else, so that the bound is taken on trust of all.
    """
    some = f"bounded contributions from every {sender}, and on noise from all but {tolerated} of them"
    relied = some if tolerated else f"noise and bounded contributions from every {sender}"
    return f"departures from the method: epsilon relies on {relied}, which no other party can check"


def duty(default: _Answer) -> _Answer:
    """Mark a default that is no answer: a method refuses a stage whose class does not define this itself."""
    setattr(default, _DUTY, True)
    return default


def answers(stage: Any, name: str) -> bool:
    """Return whether the class of a stage defines a method of this name, and not by a default that is no answer."""
    return _defines(type(stage), name)


def _defines(kind: type[Any], name: str) -> bool:
    found = getattr(kind, name, None)
    return callable(found) and not getattr(found, _DUTY, False)


# --- classes of other packages ---------------------------------------------------------------------------------


def redefined(stage: Any, *names: str) -> tuple[str, ...]:
    """Return those of the names that a class of another package defines for a stage, in place of fedveil's own."""
    assert all(hasattr(type(stage), name) for name in names), f"{type(stage).__name__} lacks one of {names}"
    return tuple(name for name in names if not _is_ours(type(stage), name))


def ignored(stage: Any, duties: Iterable[str], words: Iterable[str] = ()) -> str:
    """Return why members that another package's class adds to a stage of fedveil would never be used; "" where not.

    A stage is used through the attributes of its fedveil class. A class that is derived from a complete stage, adds
    members and redefines no such attribute acts as the stage that it is derived from, under a name of its own. So does
    a member that another base class hides.

    Args:
        stage: the stage.
        duties: what a class must define to be complete.
        words: attributes that change nothing but what a stage says, besides those of every stage.
    """
    kinds = type(stage).__mro__
    own = next(kind for kind in kinds if is_own(kind))
    if own in _ROOTS or isabstract(own) or not all(_defines(own, name) for name in duties):
        return ""
    known = {*dir(own), *(name for kind in own.__mro__ for name in _members(kind))}
    given = {name for kind in kinds if not is_own(kind) for name in _members(kind)}
    hidden = sorted(name for name in given if _is_ours(type(stage), name))
    if hidden:
        return f"takes {', '.join(hidden)} from another base class, and {own.__name__} hides that"
    if given & known - _WORDS - set(words):
        return ""
    added = sorted(given - known)
    if not added:
        return ""
    return f"adds {', '.join(added)}, which nothing uses, so that it acts as {own.__name__} does"


def _members(kind: type[Any]) -> set[str]:
    """Return the fields, methods and attributes that a class itself defines."""
    named = {*vars(kind), *get_annotations(kind)}
    return {name for name in named if name == "__call__" or not name.startswith("__")} - {"_abc_impl"}


def _is_ours(kind: type[Any], name: str) -> bool:
    """Return whether fedveil's own code defines an attribute of a class, or nobody does."""
    return next((is_own(one) for one in kind.__mro__ if name in _members(one)), True)


class Stage:
    """A stage of a method: a frozen value that answers for itself, with what most stages have to say: nothing.

    Its fields are the keys of its section in an experiment, with the types, ranges and defaults that they declare
    (:mod:`fedveil.config_keys`); the ranges hold wherever a stage is built.
    """

    def __post_init__(self) -> None:
        """Refuse a number outside the range of its field; a stage that has more to check calls this first."""
        check_ranges(self)

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why the stage has no place in a method; it asks other stages for facts, not types."""
        return ()

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return what the stage does for privacy in a round, in words, with its parameters."""
        return ()

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return what the stage lets depend on private data although no event accounts for it."""
        return ()

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the figures in the literature for what the stage does, where the derivation does not support them."""
        return ()


class Source(Stage):
    """A stage that may draw noise, and claims events for it; what claims nothing guarantees nothing."""

    @property
    def content(self) -> Reveals:
        """What a message tells whoever reads it; a stage that does not say tells UNDECLARED."""
        return Reveals.UNDECLARED

    @duty
    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Return what one round does to one unit, for each thing that may be known."""
        return ()

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        """Return what a round costs in epsilon, per coordinate, because its noise lies on a grid."""
        return 0.0


_ROOTS: Final = (object, Stage, Source)
_WORDS: Final = frozenset(
    {"refuses", "mechanisms", "uncovered_facts", "published_figures", "description", "name"}
)
"""What a stage says: attributes that do not change what it does."""

"""Define the interface of a method's stages: privacy claims, refusals and statement sentences.

A method (:class:`fedveil.methods.method.Method`) is a composition of stages: sampler, local training, bound, weights,
channel, protection, denoiser and server optimiser. This module holds their base classes, the sensitivity that noise
is compared with, and the checks of stages that other packages define.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import get_annotations, isabstract
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar, runtime_checkable

from fedveil.config_keys import check_ranges
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Claim, Reveals
from fedveil.registry import is_own


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Sensitivity of a round: how far one unit changes the sum and the messages, and their noise.

    All lengths are in the unit of the update, in the norm of ``bound`` (l2 unless the bound is l1). One unit is one
    user or one client; adding or removing it, or replacing it, makes neighbouring data.

    Attributes:
        unit: the protected unit.
        total: sensitivity of the sum over all senders; infinite if contributions are not bounded.
        messages: sensitivity of the messages of all senders, taken as one long vector.
        even: whether every sender carries at most the same share of a unit's change. Then the sum without one sender
            has a proportionally smaller sensitivity.
        reweighs: whether the records that a unit has at one sender change the weights of its contributions at others.
        reach: distance that one message can change inside its ball: 2 times ``largest`` under add-or-remove
            adjacency. Under replace-one adjacency it is ``largest``, because accountants double the sensitivity of a
            replacement.
        largest: the largest l2 norm of a message before its noise; 0 if contributions are not bounded.
        ballots: number of ballots (votes of partial encryption) that one unit can change, given the model.
        n_senders: number of messages in a round.
        n_silos: number of silos; the senders of a round may be only some of them.
        noise: standard deviation of the noise of one message; 0 without noise, or if the noise is not Gaussian.
        bound: bound of one contribution; its grid is the grid of the messages.
        group: largest number of contributions of one unit, if the method limits it.
        records: number of records of every sender; needed only if the noise depends on them.
        weight: weight of a contribution in its sender's sum, as a formula for people.
        together: number of senders in the coalition that a statement about senders assumes; the noise is sized for
            it.
        divided: whether a message has two parts, each with its own bound and noise or with neither.
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
        """Bound of one contribution; 0 without a bound."""
        return self.bound.norm if self.bound.bounded else 0.0

    def pooled_sensitivity(self, unknown: int, n_colluding: int, of_all: int) -> float:
        """Return the sensitivity of the sum against a coalition of senders, relative to one share of noise.

        Divided by the standard deviation of one share, the result is 1/z of the coalition's view:

            max( f total / sqrt(unknown), total / sqrt(of_all) )

        The ``n_colluding`` senders of the coalition subtract their own messages and noise from the sum, so ``unknown``
        shares of the noise are left. The guarantee covers the data that the unit has at the other senders, the
        fraction f of the whole:

        - f = 1 - known / n if every sender carries the same share.
        - f = 2 if weights depend on all records of a unit. The unit may then stay at the known senders and weigh more
          there without its other records, so that the sum moves from one end of its ball to the other.
        - f = 1 otherwise: all data may be elsewhere.

        The second term is the sensitivity without any knowledge: a party that knows more gets no stronger promise.

        Args:
            unknown: number of noise shares that the coalition does not know.
            n_colluding: number of senders in the coalition.
            of_all: number of shares for which the noise is sized.
        """
        # f of the docstring: the part of a unit's change that the coalition does not know
        share = 1 - n_colluding / self.n_senders if self.even else 2.0 if self.reweighs else 1.0
        return self.total * max(share / math.sqrt(unknown), 1 / math.sqrt(of_all))


@dataclass(frozen=True, kw_only=True)
class Published:
    """Figure in the literature that the derivation does not support.

    Attributes:
        name: the theorem or table that states the figure.
        gap: the assumption or step that its theory misses.
        epsilon: the figure as a function of (rounds, delta).
    """

    name: str
    gap: str
    epsilon: Callable[[int, float], float]


@runtime_checkable
class ClosedForm(Protocol):
    """Published theorem that states a sufficient noise, as a noise multiplier."""

    @property
    def name(self) -> str:
        """Name of the theorem."""
        ...

    def noise_multiplier(self, rounds: int, epsilon: float, delta: float) -> float:
        """Return the noise multiplier that the theorem asks for ``rounds`` rounds at (epsilon, delta)."""
        ...

    def epsilon(self, rounds: int, noise_multiplier: float, delta: float) -> float:
        """Return the epsilon that the theorem shows for a noise multiplier; infinite outside its domain."""
        ...

    def rounds(self, noise_multiplier: float, epsilon: float, delta: float) -> int:
        """Return the most rounds that the theorem allows at (epsilon, delta); 0 if it allows none."""
        ...


_Answer = TypeVar("_Answer", bound=Callable[..., Any])
_DUTY: Final = "__duty__"


def everyone_adds(sender: str, tolerated: int) -> str:
    """Return a "Not covered" sentence: epsilon trusts the senders to clip and to add noise.

    Args:
        sender: name of a sender in the sentence ("silo" or "client").
        tolerated: number of senders that may fail to add their noise, because the shares of the others are sized for
            that. The bound is trusted for every sender: no other party bounds a sender's contribution.
    """
    assumption = f"bounded contributions from every {sender}, and on noise from all but {tolerated} of them"
    relied = assumption if tolerated else f"noise and bounded contributions from every {sender}"
    return f"departures from the method: epsilon relies on {relied}, which no other party can check"


def duty(default: _Answer) -> _Answer:
    """Mark a default method as abstract: a method refuses a stage whose class does not override it."""
    setattr(default, _DUTY, True)
    return default


def answers(stage: Any, name: str) -> bool:
    """Return whether a stage's class overrides a method, instead of inheriting a :func:`duty` default."""
    return _defines(type(stage), name)


def _defines(kind: type[Any], name: str) -> bool:
    attribute = getattr(kind, name, None)
    return callable(attribute) and not getattr(attribute, _DUTY, False)


# --- classes of other packages ---------------------------------------------------------------------------------


def redefined(stage: Any, *names: str) -> tuple[str, ...]:
    """Return those of the names that a class of another package overrides for a stage."""
    assert all(hasattr(type(stage), name) for name in names), f"{type(stage).__name__} lacks one of {names}"
    if all(is_own(kind) for kind in type(stage).__mro__):
        return ()
    return tuple(name for name in names if not _is_ours(type(stage), name))


def ignored(stage: Any, duties: Iterable[str], words: Iterable[str] = ()) -> str:
    """Return why a run would ignore members that another package's class adds; "" if it uses them.

    A run uses a stage through the attributes of its fedveil class. A derived class that adds members and overrides
    none of these attributes behaves like its parent, under a name of its own. A member that another base class hides
    has no effect either.

    Args:
        stage: the stage.
        duties: names of the methods that a complete class must define.
        words: names of further attributes that change only the stage's description, in addition to ``_WORDS``.
    """
    kinds = type(stage).__mro__
    foreign_members = {name for kind in kinds if not is_own(kind) for name in _members(kind)}
    if not foreign_members:
        return ""
    # The first fedveil class in the MRO is the class through which a run uses the stage. An incomplete base class has
    # nothing to fall back on, so a class derived from it cannot silently act as its parent.
    own = next(kind for kind in kinds if is_own(kind))
    if own in _ROOTS or isabstract(own) or not all(_defines(own, name) for name in duties):
        return ""
    own_members = {*dir(own), *(name for kind in own.__mro__ for name in _members(kind))}
    # A mixin that stands after the fedveil class in the MRO loses: Python finds fedveil's member first.
    hidden = sorted(name for name in foreign_members if _is_ours(type(stage), name))
    if hidden:
        return f"takes {', '.join(hidden)} from another base class, and {own.__name__} hides that"
    if foreign_members & own_members - _WORDS - set(words):
        return ""
    added = sorted(foreign_members - own_members)
    if not added:
        return ""
    return f"adds {', '.join(added)}, which nothing uses, so that it acts as {own.__name__} does"


def _members(kind: type[Any]) -> set[str]:
    """Return the fields, methods and attributes that a class body itself defines."""
    named = {*vars(kind), *get_annotations(kind)}
    return {name for name in named if name == "__call__" or not name.startswith("__")} - {"_abc_impl"}


def _is_ours(kind: type[Any], name: str) -> bool:
    """Return whether fedveil or Python defines an attribute of a class, or no class does."""
    return next((is_own(base) for base in kind.__mro__ if name in _members(base)), True)


class Stage:
    """Base class of the stages of a method: a frozen value with neutral defaults.

    The fields of a stage are the keys of its section in an experiment. Their annotations declare types, ranges and
    defaults (:mod:`fedveil.config_keys`). The ranges are checked wherever a stage is built.
    """

    def __post_init__(self) -> None:
        """Refuse a number outside the range of its field; subclasses with further checks call this first."""
        check_ranges(self)

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why the stage cannot be part of a method.

        Implementations ask the other stages for facts (properties), never for their types, so that stages of other
        packages combine.
        """
        return ()

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return the stage's privacy mechanism in one round, as sentences with its parameters."""
        return ()

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return sentences on outputs that depend on private data although no privacy event accounts for them."""
        return ()

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return figures in the literature on this stage that the derivation does not support."""
        return ()


class Source(Stage):
    """Stage that may add noise and claims privacy events for it; without claims it guarantees nothing.

    Attributes:
        sends: kind of the vectors that a contribution is; the server's step must read the same kind.
        sums_records: whether a contribution is a mean of vectors of its records, and no update of the model
            (:mod:`fedveil.training.record_sums`).
    """

    sends: ClassVar[str] = "updates"
    sums_records: ClassVar[bool] = False

    def message_length(self, dimension: int) -> int:
        """Return the length of a contribution for a model of ``dimension`` parameters; an update has as many."""
        return dimension

    @property
    def content(self) -> Reveals:
        """Information that a message reveals to its reader; UNDECLARED unless the stage says otherwise."""
        return Reveals.UNDECLARED

    @duty
    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Return the claims of one round about one unit, one for each set of knowledge that a party may have."""
        return ()

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        """Return the additional epsilon of a round, per coordinate, because the noise lies on a grid."""
        return 0.0


_ROOTS: Final = (object, Stage, Source)
_WORDS: Final = frozenset(
    {"refuses", "mechanisms", "uncovered_facts", "published_figures", "description", "name"}
)
"""Attributes of every stage that change only its description, not its behaviour."""

"""Describe released information as privacy events, apart from any bound on their cost.

An event documents a mechanism well enough for every accountant; :mod:`fedveil.privacy.accounting` turns
events into epsilon. The separation follows Google's ``dp_accounting``.

Noise multipliers are relative to the bound on ONE unit's contribution: with contributions of l2 norm at most
C and noise N(0, s^2 I) on their sum, ``noise_multiplier = s / C`` (l1 norm and scale for Laplace). The
:class:`Adjacency`, an attribute of the accountant, defines the effect of a neighbouring population on that
contribution (add, remove or replace).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, get_args

from pydantic import PlainSerializer, PlainValidator

from fedveil.errors import PrivacyError

Json = dict[str, object]

_TYPES: Final[dict[str, type[Event]]] = {}
"""Every class of event by its name in JSON."""

_LEAST: Final = 1e-100
_MOST: Final = 1e100
"""Upper limit of noise multipliers and shifts; ``_LEAST`` is the lower limit of noise multipliers.

Within the limits, their squares and the results of accountants fit double precision.
"""


class Adjacency(Enum):
    """Pairs of neighbouring populations that a guarantee compares."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


def _positive(name: str, value: float) -> None:
    """Refuse a noise multiplier that is not positive and finite, or outside [1e-100, 1e100]."""
    if not (math.isfinite(value) and value > 0):
        raise PrivacyError(
            f"{name} = {value}: must be positive and finite; a release without noise is "
            "NoGuarantee(reason=...), and a round that releases nothing is ComposedEvent(events=())"
        )
    if not _LEAST <= value <= _MOST:
        raise PrivacyError(
            f"{name} = {value}: must lie between {_LEAST:g} and {_MOST:g}: less noise hides nothing, more is not drawn"
        )


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events: immutable, hashable, comparable values; the JSON form is a type and the fields.

    A subclass is declared with its name in JSON: ``class X(Event, type="x")``. Its fields are numbers, whole numbers,
    strings, events, and tuples of numbers or events.
    """

    type: ClassVar[str]

    def __init_subclass__(cls, *, type: str) -> None:
        """Register a class of event under its name."""
        registered = _TYPES.get(type)
        # A module that is loaded again, in a notebook say, defines its event again.
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise PrivacyError(
                f"{cls.__name__}: an event of type {type!r} exists already: {registered.__qualname__}"
            )
        cls.type = type
        _TYPES[type] = cls

    def to_json(self) -> Json:
        """Return the JSON form; :func:`event_from_json` reads it back to an equal event."""
        return {"type": self.type} | {
            field_info.name: _written(getattr(self, field_info.name)) for field_info in fields(self)
        }


@dataclass(frozen=True, kw_only=True)
class _Noisy:
    """Release whose noise is ``noise_multiplier`` times the bound on one contribution."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        """Refuse a multiplier outside [1e-100, 1e100]."""
        _positive(f"{type(self).__name__}.noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class GaussianEvent(_Noisy, Event, type="gaussian"):
    """Release of a sum with Gaussian noise; ``noise_multiplier`` = standard deviation / l2 bound."""


@dataclass(frozen=True, kw_only=True)
class ConcentratedEvent(_Noisy, Event, type="concentrated"):
    """Release with Renyi divergences at most those of a Gaussian release of this multiplier.

    This is 1/(2 z^2)-zCDP (Bun and Steinke 2016), and nothing finer is known about the release. An example is
    discrete Gaussian noise of few steps on whole numbers: its privacy loss has jumps that a Gaussian's privacy loss
    lacks.
    """


@dataclass(frozen=True, kw_only=True)
class LaplaceEvent(_Noisy, Event, type="laplace"):
    """Release of a sum with Laplace noise; ``noise_multiplier`` = scale b / l1 bound."""


@dataclass(frozen=True, kw_only=True)
class PoissonSampledEvent(Event, type="poisson_sampled"):
    """Event over a Poisson sample: every unit takes part with probability ``rate``, in (0, 1]."""

    rate: float
    event: Event

    def __post_init__(self) -> None:
        """Refuse a rate outside (0, 1]."""
        if not 0 < self.rate <= 1:
            raise PrivacyError(f"PoissonSampledEvent.rate = {self.rate}: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class SampledWithoutReplacementEvent(Event, type="sampled_without_replacement"):
    """Event over ``sample`` of ``population`` units, sampled uniformly without replacement.

    Neighbours replace one unit's data, because adding a unit would change the public size of the population. As for
    every event, noise multipliers of ``event`` are relative to ONE contribution. Accountants double the sensitivity,
    because a replaced unit removes its contribution and adds another.
    """

    population: int
    sample: int
    event: Event

    def __post_init__(self) -> None:
        """Refuse a sample below 1 or above the population."""
        if not 1 <= self.sample <= self.population:
            raise PrivacyError(
                f"SampledWithoutReplacementEvent: {self.sample} of {self.population} units; "
                "the sample must be at least 1 and at most the population"
            )

    @property
    def rate(self) -> float:
        """Probability that a given unit is sampled."""
        return self.sample / self.population


@dataclass(frozen=True, kw_only=True)
class ComposedEvent(Event, type="composed"):
    """Adaptive composition: each event may depend on earlier results; empty if nothing was released."""

    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class SelfComposedEvent(Event, type="self_composed"):
    """Adaptive composition of ``count`` >= 1 copies of one event."""

    count: int
    event: Event

    def __post_init__(self) -> None:
        """Refuse a count below 1."""
        if self.count < 1:
            raise PrivacyError(f"SelfComposedEvent.count = {self.count}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class MixtureOfGaussiansEvent(Event, type="mixture_of_gaussians"):
    """Release with Gaussian noise whose mean moves by a random amount.

    One of two neighbours gives N(0, s^2), the other sum_i p_i N(c_i, s^2), with c_i = ``sensitivities[i]``
    >= 0 in units of the clip bound, p_i = ``probabilities[i]`` summing to 1 and s = ``noise_multiplier`` in
    the same unit. With c = (0..k) and p = Binomial(k, q) it is one Poisson-sampled step for a user with k records
    (Choquette-Choo, Ganesh, Steinke and Thakurta, "Privacy amplification for matrix mechanisms").
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse lengths, sensitivities or probabilities that form no mixture."""
        _positive("MixtureOfGaussiansEvent.noise_multiplier", self.noise_multiplier)
        if len(self.sensitivities) != len(self.probabilities) or not self.sensitivities:
            raise PrivacyError(
                f"MixtureOfGaussiansEvent: {len(self.sensitivities)} sensitivities and "
                f"{len(self.probabilities)} probabilities; there must be one probability per sensitivity"
            )
        if not all(0 <= value <= _MOST for value in self.sensitivities):
            raise PrivacyError(
                f"MixtureOfGaussiansEvent.sensitivities: must be finite, not negative, and at most {_MOST:g}"
            )
        if not all(value > 0 for value in self.probabilities):
            raise PrivacyError(
                "MixtureOfGaussiansEvent.probabilities: must be positive; leave out the others"
            )
        # The tolerance allows for the rounding of one float64 number per probability.
        total = math.fsum(self.probabilities)
        if abs(total - 1) > 1e-12 * max(10, len(self.probabilities)):
            raise PrivacyError(f"MixtureOfGaussiansEvent.probabilities: sum to {total}, must sum to 1")


@dataclass(frozen=True, kw_only=True)
class NoGuarantee(Event, type="no_guarantee"):
    """Release without any bound (epsilon is infinite); ``reason`` explains it in one sentence."""

    reason: str

    def __post_init__(self) -> None:
        """Refuse an empty reason."""
        if not self.reason.strip():
            raise PrivacyError("NoGuarantee.reason: must say why there is no guarantee")


@dataclass(frozen=True, kw_only=True)
class NearbyEvent(Event, type="nearby"):
    """Statistical distance between a party's view and a function of the other releases.

    A party sees X, and the claim is for X'. For every population the laws of X and X' differ by at most d in total
    variation. Distances add up, whatever is released in between. With P and Q the laws of X for two neighbours, P'
    and Q' those of X', and X' (epsilon, delta)-DP, for every set A

        P(A) <= P'(A) + d <= e^epsilon Q'(A) + delta + d <= e^epsilon Q(A) + delta + (1 + e^epsilon) d,

    so X is (epsilon, delta + (1 + e^epsilon) d)-DP. Accountants subtract the additional term from the requested
    delta.
    """

    distance: float

    def __post_init__(self) -> None:
        """Refuse a distance outside (0, 1]."""
        if not 0 < self.distance <= 1:
            raise PrivacyError(f"NearbyEvent.distance = {self.distance}: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class GridEvent(Event, type="grid"):
    """Noise on a grid: it changes a log-likelihood ratio of the release by at most ``loss``.

    A release that is (epsilon, delta)-DP with continuous noise is then (epsilon + loss, e^loss delta)-DP. Losses of
    releases add up.
    """

    loss: float

    def __post_init__(self) -> None:
        """Refuse a loss that is not positive and finite."""
        if not (math.isfinite(self.loss) and self.loss > 0):
            raise PrivacyError(f"GridEvent.loss = {self.loss}: must be positive and finite")


def at_distance(event: Event, distance: float) -> Event:
    """Return an event seen at a statistical distance; unchanged at 0 and for :class:`NoGuarantee`."""
    if distance == 0 or isinstance(event, NoGuarantee):
        return event
    return ComposedEvent(events=(event, NearbyEvent(distance=min(distance, 1.0))))


def split_distance(event: Event) -> tuple[Event, float]:
    """Split an event into the rest and the sum of its statistical distances, rounded up.

    The inverse of :func:`at_distance`.
    """
    return _without(event, NearbyEvent, "distance")


def split_grid_loss(event: Event) -> tuple[Event, float]:
    """Split an event into the rest and the sum of its grid losses, rounded up."""
    return _without(event, GridEvent, "loss")


def _without(event: Event, kind: type[Event], name: str) -> tuple[Event, float]:
    counts = atoms(event)
    amounts = [count * getattr(atom, name) for atom, count in counts.items() if isinstance(atom, kind)]
    if not amounts:
        return event, 0.0
    remaining = Counter({atom: count for atom, count in counts.items() if not isinstance(atom, kind)})
    # fsum rounds correctly, the products round once each; a relative 1e-15 outweighs both, so the sum is an upper
    # bound.
    return compose(remaining), math.fsum(amounts) * (1 + 1e-15)


def atoms(event: Event) -> Counter[Event]:
    """Count the single releases in an event: compositions are expanded, equal releases are added up.

    The order of adaptive composition does not change any accountant's bound, so the counts are sufficient. A Poisson
    or fixed-size sample of rate 1 is replaced by the sampled event.

    >>> step = GaussianEvent(noise_multiplier=2.0)
    >>> atoms(ComposedEvent(events=(step, SelfComposedEvent(event=step, count=9)))) == {step: 10}
    True
    """
    counts: Counter[Event] = Counter()
    pending = [(event, 1)]
    while pending:
        current, times = pending.pop()
        match current:
            case ComposedEvent():
                pending.extend((inner, times) for inner in reversed(current.events))
            case SelfComposedEvent():
                pending.append((current.event, times * current.count))
            case PoissonSampledEvent(rate=1.0) | SampledWithoutReplacementEvent(rate=1.0):
                pending.append((current.event, times))
            case _:
                counts[current] += times
    return counts


def compose(events: Counter[Event]) -> Event:
    """Return the composition of counted releases, the inverse of :func:`atoms`."""
    parts = tuple(e if count == 1 else SelfComposedEvent(event=e, count=count) for e, count in events.items())
    return parts[0] if len(parts) == 1 else ComposedEvent(events=parts)


def all_of(events: Iterable[Event]) -> Event:
    """Return the composition of several events, with equal releases counted together."""
    counts: Counter[Event] = Counter()
    for event in events:
        counts.update(atoms(event))
    return compose(counts)


def event_from_json(data: object) -> Event:
    """Read an event from its JSON form.

    Raises:
        PrivacyError: an unknown type, a missing, unknown or ill-typed field, or a value outside its domain.
    """
    if not isinstance(data, Mapping):
        raise PrivacyError(f"an event must be a JSON object with a 'type', found {type(data).__name__}")
    name = data.get("type")
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise PrivacyError(f"unknown event type {name!r}: this version of fedveil cannot account for it")
    event_fields = fields(kind)
    if set(data) != {"type", *(item.name for item in event_fields)}:
        raise PrivacyError(
            f"event {name!r}: fields must be {sorted(item.name for item in event_fields)}, "
            f"found {sorted(set(data) - {'type'})}"
        )
    return kind(
        **{
            item.name: _read(f"event {name!r}: {item.name!r}", _type_name(item.type), data[item.name])
            for item in event_fields
        }
    )


def is_known_type(name: str) -> bool:
    """Return whether this process has loaded the class of an event's type."""
    return name in _TYPES


AnEvent = Annotated[Event, PlainValidator(event_from_json), PlainSerializer(lambda event: event.to_json())]
"""An event as a field of a document."""


def _written(value: object) -> object:
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    return value.to_json() if isinstance(value, Event) else value


def _type_name(declared: Any) -> str:
    """Return the declared type of a field as in the source: a string where annotations are not evaluated."""
    if isinstance(declared, str):
        return declared
    name = declared.__name__ if isinstance(declared, type) and not get_args(declared) else str(declared)
    return name.replace(f"{Event.__module__}.", "")


_PLAIN: Final = {"float": ("a number", int | float), "int": ("an integer", int), "str": ("a string", str)}
"""JSON type of a plain field, by its declared type."""


def _read(name: str, kind: str, value: object) -> object:
    """Read a field of a declared type: a number, a string, an event, or a list of these."""
    if kind == "Event":
        return event_from_json(value)
    if kind.startswith("tuple["):
        if not isinstance(value, list):
            raise PrivacyError(f"{name} must be a list, found {type(value).__name__}")
        return tuple(_read(name, kind.removeprefix("tuple[").removesuffix(", ...]"), item) for item in value)
    expected, plain = _PLAIN[kind]
    if not isinstance(value, plain) or isinstance(value, bool):
        raise PrivacyError(f"{name} must be {expected}, found {type(value).__name__}")
    return float(value) if kind == "float" else value

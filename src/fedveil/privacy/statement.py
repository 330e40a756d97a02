"""State the privacy of a run: guarantee, parties, assumptions, and exceptions.

A statement is derived from the method that ran and from the ledger of its releases; no field is entered by hand. It
is stored as ``privacy.json``, and :meth:`Statement.sentences` gives it in plain English.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import partial
from typing import Annotated, Final, Literal, TypedDict, Unpack, get_args

from pydantic import (
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    with_config,
)

from fedveil.arguments import explain_arguments_as
from fedveil.checks import Check, run_check
from fedveil.errors import IntegrityError, PrivacyError, RunFolderError
from fedveil.files import check_schema_version, reading
from fedveil.privacy.accountant import Accountant, cached_epsilon, is_large_delta
from fedveil.privacy.accounting import ACCOUNTANTS, make_accountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, AnEvent, Event, Json, NoGuarantee, atoms
from fedveil.privacy.ledger import Entry
from fedveil.sanitize import one_line, sanitize
from fedveil.validation import explain_errors

SCHEMA_VERSION = 3

Unit = Literal["record", "client", "user", "silo"]

_UNIT_WORDS: dict[str, str] = {
    "record": "one record",
    "client": "one client (all the records it holds)",
    "user": "one user (all of the user's records, in every silo)",
    "silo": "one silo (all the records it holds)",
}
_ADJACENCY_WORDS = {
    Adjacency.ADD_OR_REMOVE_ONE: "Adding or removing {unit}",
    Adjacency.REPLACE_ONE: "Replacing the data of {unit} with any other data",
}
_LARGE_EPSILON = 10.0
_EXACT = Context(prec=400)  # a double has at most 309 digits before the point
_NOTHING = "infinite: nothing is guaranteed"
KNOWN_SEED: Final = (
    "the noise came from a known seed (privacy.insecure_seed), so that anybody can subtract it"
)


_ROLES: Final = {
    "reader": Role.READER,
    "server": Role.SERVER,
    "sender": Role.SILO,
    "server+sender": Role.SERVER | Role.SILO,
}


def _role(name: object) -> Role:
    if not isinstance(name, str) or name not in _ROLES:
        raise ValueError(f"must be one of {', '.join(_ROLES)}")
    return _ROLES[name]


def _role_name(role: Role) -> str:
    return next(name for name, value in _ROLES.items() if value == role)


_Role = Annotated[Role, PlainValidator(_role), PlainSerializer(_role_name)]
_Epsilons = Annotated[
    tuple[tuple[str, float | None], ...],
    BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, Mapping) else value),
    PlainSerializer(dict),
]


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """Line of a statement about one party or coalition: its view, and the epsilon against it.

    Attributes:
        role: the party; code reads this field, never the words.
        party: the party, in words.
        sees: data that the party sees, in words.
        epsilon: against the party; None if nothing is guaranteed.
        event: everything that was released to the party.
    """

    role: _Role
    party: str
    sees: str
    epsilon: float | None
    event: AnEvent


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class AsPublished:
    """Published figure that was reproduced, with its value (None: infinite) and the gap in its theory."""

    name: str
    value: float | None
    gap: str


@explain_arguments_as("Statement", "a result and a bundle have one: result.statement")
@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Statement:
    """Privacy statement of one run.

    Attributes:
        unit: the protected unit.
        adjacency: the neighbouring populations that the guarantee compares.
        epsilon: the reported bound; None if nothing is guaranteed, and then ``reasons`` gives the reasons.
        delta: the largest change of a probability in addition to the factor e^epsilon. Not claimed: that the factor
            is exceeded with probability at most delta; for Gaussian noise it is exceeded several times as often.
        accountant: name of the accountant that bounded epsilon.
        epsilons: (accountant, epsilon) of every accountant with a bound for the event; None for infinity.
        event: everything that was released, as the ledger charged it. Recomputing from it gives
            ``epsilons``.
        units: public number of units; a delta of 1/units or more causes a warning. None if it is not public.
        mechanisms: every mechanism with its noise law, noise multiplier, sampling and count, in words.
        trust: parties and coalitions, with their views and the guarantees against them.
        randomness: source of the noise and the samples, in words.
        secure_randomness: whether it was unpredictable.
        uncovered: choices that depended on private data and that epsilon does not cover.
        as_published: figures that were reproduced although their theory has a gap.
        reasons: reasons why nothing is guaranteed; empty exactly if ``epsilon`` is a number.
        notes: facts about the data that a reader must know (a subset, a public scaling).
        released: kind of release that the claim is about.

    Raises:
        PrivacyError: an epsilon of None without reasons, a number with reasons, or a value outside its domain.
    """

    unit: Unit
    adjacency: Adjacency
    epsilon: float | None
    delta: float
    accountant: str
    epsilons: _Epsilons
    units: int | None
    mechanisms: tuple[str, ...]
    trust: tuple[Disclosure, ...]
    randomness: str
    secure_randomness: bool
    uncovered: tuple[str, ...] = ()
    as_published: tuple[AsPublished, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    released: Literal["models", "statistics", "models and statistics"] = "models"
    event: AnEvent

    def __post_init__(self) -> None:
        """Refuse a statement that contradicts itself."""
        if self.unit not in get_args(Unit):
            raise PrivacyError(f"statement unit {self.unit!r}: must be one of {', '.join(get_args(Unit))}")
        if self.epsilon is not None and not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise PrivacyError(
                f"statement epsilon = {self.epsilon}: must be finite and not negative, or None"
            )
        if self.released not in ("models", "statistics", "models and statistics"):
            raise PrivacyError(f"statement of {self.released!r}: models or statistics are released, or both")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"statement delta = {self.delta}: must be above 0 and below 1")
        if (self.epsilon is None) != bool(self.reasons):
            raise PrivacyError("a statement gives reasons exactly when it guarantees nothing")
        if self.epsilon is not None and not self.secure_randomness:
            raise PrivacyError(
                "noise from a known seed guarantees nothing: epsilon must be None, with that reason"
            )

    @property
    def has_large_delta(self) -> bool:
        """Return whether delta is at least 1 / units, so that the statement promises nothing to any single unit."""
        return self.units is not None and is_large_delta(self.delta, self.units)

    @property
    def delta_warning(self) -> str | None:
        """Warning about a delta of 1 / units or more; None for a smaller delta."""
        if not self.has_large_delta:
            return None
        return (
            f"Warning: delta = {show_delta(self.delta)} is not below 1 / {self.units}; a mechanism that publishes "
            f"the data of one {self.unit}, chosen at random, can satisfy differential privacy with such a delta."
        )

    def __str__(self) -> str:
        """Return the statement in plain English, one sentence a line."""
        return "\n".join(self.sentences())

    def __repr__(self) -> str:
        return f"Statement({self.short})"

    @property
    def short(self) -> str:
        """Epsilon, delta and the unit, in one line; figures are rounded up."""
        bound = f"epsilon={show_epsilon(self.epsilon)}"
        large = " (not below 1 / units)" if self.has_large_delta else ""
        return f"{bound}, delta={show_delta(self.delta)}{large} for one {self.unit}, released={self.released}"

    def line_for(self, role: Role) -> float | None:
        """Return the epsilon of a role's line, or of readers (None: nothing is guaranteed).

        Raises:
            PrivacyError: the statement has no line for the role; the message names the existing lines.
        """
        lines = {**{d.role: d.epsilon for d in self.trust}, Role.READER: self.epsilon}
        if role not in lines:
            roles = ", ".join(str(existing) for existing in lines)
            raise PrivacyError(
                f"statement: no line of {role!r}; there are {roles}, of fedveil.privacy.claims"
            )
        return lines[role]

    def summary(self) -> str:
        """Return the statement in three sentences: the guarantee, the other parties, and what is not covered.

        Figures are rounded up. :meth:`sentences` has the whole statement, with its mechanisms and assumptions.
        """
        unit = _UNIT_WORDS[self.unit]
        if self.epsilon is None:
            claim = f"Nothing is guaranteed for {unit}: {'; '.join(self.reasons)}."
        else:
            claim = (
                f"Against readers of the released {self.released}, {unit} is protected with epsilon "
                f"{show_epsilon(self.epsilon)} at delta {show_delta(self.delta)}{self._weakness()}."
            )
        other_lines = [
            f"{d.party}: {show_epsilon(d.epsilon)}" for d in self.trust if d.role is not Role.READER
        ]
        parties = (
            f"Epsilon against {'; '.join(other_lines)}."
            if other_lines
            else "No other party has a line of its own."
        )
        adds = (
            ""
            if self.epsilon is None
            else "Anything else that is released from the same data adds to epsilon, and "
        )
        first = "; ".join(text.rstrip(".") for text in self.uncovered[:2])
        items = f"{len(self.uncovered)} items are not covered{f', first: {first}' if first else ''}."
        return "\n".join(map(one_line, (claim, parties, (adds + items)[:1].upper() + (adds + items)[1:])))

    def _weakness(self) -> str:
        """Return why a guarantee protects little; empty if neither delta nor epsilon is large."""
        if self.has_large_delta:
            return f", which promises nothing to any one {self.unit}: delta is not below 1 / {self.units}"
        assert self.epsilon is not None, "there is a guarantee"
        return (
            ", which promises little against a determined attacker" if self.epsilon > _LARGE_EPSILON else ""
        )

    def _repr_html_(self) -> str:
        """Return the summary as HTML for a notebook; ``print`` shows the whole statement."""
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.summary().splitlines())
        return f"{lines}<details><summary>whole statement</summary>{self._whole_html()}</details>"

    def _whole_html(self) -> str:
        return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.sentences())

    def sentences(self) -> tuple[str, ...]:
        """Return the statement in plain English, the claim first. Figures are rounded up, never down.

        Each sentence is one printable line. Text from a file (mechanisms, notes) therefore cannot imitate another
        claim.
        """
        texts = (
            self._claim(),
            *self._warnings(),
            *(f"Mechanism: {text}." for text in self.mechanisms),
            *(
                f"Epsilon against {d.party} is {show_epsilon(d.epsilon)}. What this party sees: {d.sees}."
                for d in self.trust
            ),
            f"Randomness: {self.randomness}.",
            *(f"Data: {text.rstrip('.')}." for text in self.notes),
            *(f"Not covered: {text.rstrip('.')}." for text in self.uncovered),
            *(
                f"As published, {p.name}: {show_epsilon(p.value)}. This figure is no guarantee, because its "
                f"derivation has a gap: {p.gap}."
                for p in self.as_published
            ),
        )
        return tuple(map(one_line, texts))

    def _claim(self) -> str:
        unit = _UNIT_WORDS[self.unit]
        if self.epsilon is None:
            return f"Nothing is guaranteed for {unit}: {'; '.join(self.reasons)}."
        change = _ADJACENCY_WORDS[self.adjacency].format(unit=unit)
        epsilon, delta = show_epsilon(self.epsilon), show_delta(self.delta)
        return (
            f"{change} changes the probability of any result computed from the released {self.released} by at most a "
            f"factor of e^{epsilon}, plus at most {delta}: this is ({epsilon}, {delta})-differential privacy "
            f"(accountant: {self.accountant})."
        )

    def _warnings(self) -> tuple[str, ...]:
        texts = []
        if self.epsilon is not None:
            texts.append(
                "Anything else that is released from the same data, by this run or another, adds to this epsilon."
            )
        if self.epsilon is not None and self.epsilon > _LARGE_EPSILON:
            texts.append(
                f"An epsilon above {_LARGE_EPSILON:g} promises little against a determined attacker."
            )
        if self.delta_warning is not None:
            texts.append(self.delta_warning)
        return tuple(texts)

    def to_json(self) -> Json:
        """Return the JSON form, without infinities: an infinite epsilon is null, as the sentences explain."""
        values = _VALUES.dump_python(self, mode="json")
        return {"schema_version": SCHEMA_VERSION, "sentences": list(self.sentences()), **values}

    @classmethod
    def from_json(cls, data: object, document_name: object = "the privacy statement") -> Statement:
        """Read a statement from its JSON form; its sentences must equal those that its values give.

        Args:
            data: the JSON value.
            document_name: name of the document in errors, usually its file.

        Raises:
            RunFolderError: another version, or no statement; names the place and the key.
        """
        document = check_schema_version(data, document_name, SCHEMA_VERSION)
        values = {key: value for key, value in document.items() if key not in ("schema_version", "sentences")}
        with reading(document_name, RunFolderError):
            try:
                statement = _VALUES.validate_python(values)
            except ValidationError as error:
                raise RunFolderError(f"{document_name} is damaged: {explain_errors(error, cls)}") from None
            except PrivacyError as error:
                raise RunFolderError(f"{document_name} is damaged: {error}") from error
            # Sentences are derived, so a file with edited sentences differs from the text that its own values give.
            if json.dumps(statement.to_json(), sort_keys=True) != json.dumps(document, sort_keys=True):
                raise RunFolderError(
                    f"{document_name} is damaged: its sentences or fields do not fit its values"
                )
        return statement


_VALUES: Final = TypeAdapter(Statement)


def show_epsilon(epsilon: float | None) -> str:
    """Return epsilon with two decimals (four below 0.1), rounded up.

    >>> show_epsilon(2.8013), show_epsilon(0.01234), show_epsilon(None)
    ('2.81', '0.0124', 'infinite: nothing is guaranteed')
    """
    if epsilon is None or epsilon == math.inf:
        return _NOTHING
    return str(round_exactly(epsilon, 2 if epsilon >= 0.1 or epsilon == 0 else 4, ROUND_CEILING))


def show_delta(delta: float) -> str:
    """Return delta with at most six significant digits, rounded up.

    >>> show_delta(1e-5), show_delta(0.0005011872336272725)
    ('1e-05', '0.000501188')
    """
    return _rounded(delta, 6, ROUND_CEILING)


def show_at_most(value: float) -> str:
    """Return an upper bound with at most six significant digits, rounded up.

    >>> show_at_most(1.0307764), show_at_most(2.0)
    ('1.03078', '2')
    """
    return _rounded(value, 6, ROUND_CEILING)


def show_at_least(value: float) -> str:
    """Return the size of noise with at most six significant digits, rounded down.

    The value is first rounded to 13 digits, so that the rounding error of double precision does not show (0.1 x 0.7
    is less than 0.07 in float64).

    >>> show_at_least(4.99999994), show_at_least(0.1 * 0.7)
    ('4.99999', '0.07')
    """
    return _rounded(float(f"{value:.13g}"), 6, ROUND_FLOOR)


def show_noise(multiplier: float) -> str:
    """Return a noise multiplier with at most four significant digits, rounded up.

    Noise of the shown size is sufficient for the epsilon next to it.

    >>> show_noise(9.834499), show_noise(5.0), show_noise(28.2101)
    ('9.835', '5', '28.22')
    """
    return _rounded(multiplier, 4, ROUND_CEILING)


def _rounded(value: float, digits: int, rounding: str) -> str:
    """Return a positive number with ``digits`` significant digits, rounded from its shortest decimal form."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # `repr` is the shortest decimal that reads back as this float: 0.07 is rounded as 0.07, not as
    # 0.07000000000000000666.
    exact = Decimal(repr(value))
    short = exact.quantize(Decimal(1).scaleb(exact.adjusted() + 1 - digits), rounding, _EXACT)
    return f"{float(short):.{digits}g}"


def show_lower_bound(epsilon: float) -> str:
    """Return a lower bound on epsilon with two decimals (four below 0.1), rounded down.

    >>> show_lower_bound(2.8093), show_lower_bound(0.01239)
    ('2.80', '0.0123')
    """
    return str(round_exactly(epsilon, 2 if epsilon >= 0.1 or epsilon == 0 else 4, ROUND_FLOOR))


def round_exactly(value: float, decimals: int, rounding: str) -> Decimal:
    """Return a finite number with ``decimals`` decimals, rounded from the exact value of the double.

    >>> round_exactly(2.5000000000001, 2, ROUND_CEILING), round_exactly(2.5, 2, ROUND_CEILING)
    (Decimal('2.51'), Decimal('2.50'))
    """
    return Decimal(value).quantize(Decimal(1).scaleb(-decimals), rounding=rounding, context=_EXACT)


def epsilons_by_accountant(
    event: Event, delta: float, adjacency: Adjacency
) -> tuple[tuple[str, float | None], ...]:
    """Return (accountant, epsilon) for every accountant with a bound for the event; None for infinity.

    An accountant that supports the event but refuses the number (a delta below its rounding error, for example) is
    left out.

    Args:
        event: everything that was released.
        delta: delta of the statement.
        adjacency: the neighbouring populations.
    """
    epsilons: list[tuple[str, float | None]] = []
    for name in ACCOUNTANTS:
        accountant = make_accountant(name, adjacency)
        if not accountant.supports(event):
            continue
        with suppress(PrivacyError):
            epsilon = cached_epsilon(accountant, event, delta)
            epsilons.append((name, epsilon if math.isfinite(epsilon) else None))
    return tuple(epsilons)


# --- building a statement ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Party:
    """Party or coalition of a statement: its role, its name in words, and what it sees in words."""

    role: Role
    party: str
    sees: str


class StatementTexts(TypedDict, total=False):
    """Sentences and facts of a :class:`Statement` that do not follow from its events."""

    mechanisms: tuple[str, ...]
    randomness: str
    uncovered: Iterable[str]
    as_published: tuple[AsPublished, ...]
    notes: tuple[str, ...]
    released: Literal["models", "statistics", "models and statistics"]


@dataclass(frozen=True, kw_only=True)
class StatementBuilder:
    """Builder of all statements: of runs, of releases, and of a silo's updates.

    Attributes:
        unit: the protected unit.
        adjacency: the neighbouring populations.
        delta: delta of every epsilon in the statement.
        accountant: bounds every epsilon that is claimed.
        units: public number of units; None if it is not public.
        secure: whether noise and samples were unpredictable.
    """

    unit: Unit
    adjacency: Adjacency
    delta: float
    accountant: Accountant
    units: int | None
    secure: bool = True

    def build(
        self,
        charged_event: Event,
        observed_event: Callable[[Role], Event],
        parties: Iterable[Party],
        **texts: Unpack[StatementTexts],
    ) -> Statement:
        """Return the statement of everything that was charged.

        Nothing is guaranteed, and the statement says why, if an event guarantees nothing, if the noise came from a
        known seed, or if the accountant has no finite epsilon.

        Args:
            charged_event: the composition of the ledger's charges.
            observed_event: the event of everything that a role observes; that of readers gives the claimed epsilon.
            parties: the parties other than readers, in the order of their lines.
            **texts: the other fields; equal sentences of ``uncovered`` are stated once.
        """
        reasons = [event.reason for event in atoms(charged_event) if isinstance(event, NoGuarantee)]
        if not self.secure:
            reasons.append(KNOWN_SEED)
        epsilon = None if reasons else self._epsilon(observed_event(Role.READER))
        if epsilon is None and not reasons:
            reasons.append(
                f"the accountant {self.accountant.name} shows no finite epsilon at delta {show_delta(self.delta)}"
            )
        texts["uncovered"] = tuple(dict.fromkeys(texts.get("uncovered", ())))
        return Statement(
            unit=self.unit,
            adjacency=self.adjacency,
            epsilon=epsilon,
            delta=self.delta,
            accountant=self.accountant.name,
            epsilons=epsilons_by_accountant(charged_event, self.delta, self.adjacency),
            event=charged_event,
            units=self.units,
            trust=tuple(self._line(party, observed_event(party.role)) for party in parties),
            secure_randomness=self.secure,
            reasons=tuple(reasons),
            **texts,  # type: ignore[arg-type]
        )

    def _line(self, party: Party, event: Event) -> Disclosure:
        epsilon = self._epsilon(event) if self.secure else None
        return Disclosure(role=party.role, party=party.party, sees=party.sees, epsilon=epsilon, event=event)

    def _epsilon(self, event: Event) -> float | None:
        """Return the epsilon of an event; None if it is infinite."""
        epsilon = cached_epsilon(self.accountant, event, self.delta)
        return epsilon if math.isfinite(epsilon) else None


# --- statement checks ----------------------------------------------------------------------------------------------
# Check a statement against ledger and experiment: the same events and delta, and no epsilon below their cost.


def check_same_events(statement: Statement, entries: Sequence[Entry]) -> str:
    """Check that a statement's event is the composition of a ledger's charges; return this in words.

    Raises:
        IntegrityError: it is not, or a charge has another unit or adjacency.
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


def check_same_privacy(statement: Statement, *, delta: object, accountant: object, seed: object) -> str:
    """Check that a statement has the requested delta, accountant and randomness; return this in words.

    Args:
        statement: statement of the run.
        delta, accountant: as requested by the experiment, or by a document of releases.
        seed: ``privacy.insecure_seed``; None: the noise was unpredictable.

    Raises:
        IntegrityError: the noise came from a known seed and the statement denies it, or delta or accountant differ.
    """
    if seed is not None and statement.secure_randomness:
        raise IntegrityError(
            "the noise came from a known seed (privacy.insecure_seed), and the statement says that nobody could "
            "predict it"
        )
    if (delta, accountant) != (statement.delta, statement.accountant):
        raise IntegrityError(
            f"the statement is for delta {statement.delta:g} by accountant '{sanitize(statement.accountant)}', "
            "and another was requested"
        )
    return f"delta {statement.delta:g} and accountant {statement.accountant}, as was asked for"


def check_epsilons(statement: Statement) -> Iterator[Check]:
    """Recompute epsilon by every accountant: the stated epsilon must not be smaller."""
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
        yield run_check(
            f"epsilon by {name}", partial(_check_epsilon, statement, statement.event, name, value)
        )
    for line in statement.trust:
        check = partial(_check_epsilon, statement, line.event, statement.accountant, line.epsilon)
        yield run_check(f"epsilon against {_role_name(line.role)}", check)


def _check_epsilon(statement: Statement, event: Event, name: str, stated: float | None) -> str:
    """Check that an epsilon recomputed by the accountant ``name`` is at most the stated one; return both in words."""
    if name not in ACCOUNTANTS:
        raise IntegrityError(f"there is no accountant '{name}'")
    with reading("the recorded event", IntegrityError):
        recomputed = cached_epsilon(make_accountant(name, statement.adjacency), event, statement.delta)
    claimed = math.inf if stated is None else stated
    # The tolerance of 1e-9 allows for rounding.
    if recomputed > claimed * (1 + 1e-9):
        raise IntegrityError(
            f"the recorded events cost {show_epsilon(recomputed)} at delta {statement.delta:g}, more than the "
            f"{show_epsilon(stated)} that is stated"
        )
    return f"recomputed {show_epsilon(recomputed)}, stated {show_epsilon(stated)}"

"""Policy of a silo: the runs and releases that it takes part in, whatever the coordinator proposes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from fedveil.config_keys import Count, Positive
from fedveil.errors import ConfigError, ProtocolError, RunFolderError, did_you_mean
from fedveil.federation.terms import versions
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.files import parse_json, read_content, read_toml, reading, replace_file
from fedveil.methods.guarantee import Guarantee
from fedveil.methods.method import Method, shows_counts
from fedveil.privacy.accounting import dominating_event, make_accountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, NoGuarantee, atoms
from fedveil.privacy.ledger import Budget
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.registry import PACKAGE, find, third_party
from fedveil.run.config.experiment import Experiment, asked_for
from fedveil.run.releases.requests import RequestScope
from fedveil.sanitize import sanitize
from fedveil.statistics.inference.request import FAMILIES
from fedveil.statistics.request import FIGURES
from fedveil.training.losses import LOSSES
from fedveil.training.models import MODELS
from fedveil.user_code import check_name
from fedveil.validation import DocumentTable, validate_document

RELEASES: Final = (
    *FIGURES,
    *(f"{family}-regression" for family in FAMILIES),
    "preprocessing",
    "evaluation",
)
"""Names of the releases that a policy can allow from a silo's records."""

_NOT_AGAINST: Final = {
    Role.READER: Code.NOT_AGAINST_READERS,
    Role.SERVER: Code.NOT_AGAINST_COORDINATOR,
    Role.SILO: Code.NOT_AGAINST_SILOS,
}


def counted_sentence(policy: Mapping[str, Any]) -> tuple[str, str]:
    """Return which parties' knowledge a silo's ledger counts under a policy, and which it omits ("" if none).

    The second text names a party that a reader could expect to be counted.

    Args:
        policy: its keys and values.
    """
    readers, coordinator = "what readers of the models learn", "what the coordinator learns"
    counted = readers if policy["trust_coordinator"] else coordinator
    if not (policy["trust_silos"] or policy["without_guarantee"]):
        return f"{counted}, or another silo if that is more", ""
    silos = "what other silos learn"
    return counted, silos if policy["trust_coordinator"] else f"{silos}, nor {readers}"


class Policy(DocumentTable):
    """Limits that a silo sets for itself; a missing key has the cautious default.

    Attributes:
        epsilon: limit of what the silo's users may spend over ALL runs.
        delta: the delta at which epsilon is computed.
        accountant: the accountant that computes epsilon.
        clip: largest bound of a contribution, and of a part of a contribution that has a bound of its own.
        methods: methods that may run.
        models: models that may be trained. A ``package.module:factory`` is code; it is loaded only if listed here.
        losses: losses that may be minimised; the same rule holds.
        packages: installed third-party packages whose stages and methods may run. Their code is loaded only if listed
            here. fedveil does not verify the guarantees that they claim: list no package that you have not read.
        protections: accepted ways to hide the silo's message from the coordinator; any one of them suffices.
        releases: figures that may be counted or estimated from the silo's records: those of `fedveil stats` ("count",
            "histogram", "survival", ...), "logistic-regression" and so on for `fedveil infer`.
        columns: columns of the schema that releases may read (counted values, groups, orders, targets); None: all.
            Training reads the features of a model regardless of this key.
        max_release_length: most numbers of one release.
        min_standard_error: in people. A release with less noise is refused, because its precision spends the users'
            budget; 0 refuses none.
        by_silo: allow figures silo by silo, including this silo's own.
        trust_silos: do not count what another silo learns. Allow runs without a guarantee against silos (partial
            encryption without noise on the encrypted part; weights by records in the open).
        trust_coordinator: count what readers of the models learn, instead of what the coordinator sees.
        disclose_counts: if weights need it, send the number of records of each user to the coordinator, and the
            totals to all silos. It also requires both kinds of trust.
        without_guarantee: take part in runs without any guarantee (tests, public data); epsilon then limits no run.
        accept_added_silos: accept a delivered membership without a command, if the founder sealed it and it only adds
            silos behind the present ones or is valid for longer.
        max_message_bytes: largest message in bytes; a longer one is refused unread.
        max_rounds: most rounds of a run.
        max_epochs: most passes over the records in a round.
        max_parameters: most parameters of a model.
        round_seconds: longest time in seconds for the training of a round, for scoring held-out records, or for
            counting records in a release. The limit is tested every second between two steps (``trainer = "gram"``:
            between chunks of contributions), and between chunks of records.
        memory_mb: memory limit of the silo's process in MB, under `fedveil silo serve`.
        uncharged_cpu_seconds: processor seconds in 24 hours for messages that lead to no charged round, and for
            repeated rounds that cost no charge. Beyond it the silo reads no message.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: Literal["pld", "rdp"] = "pld"
    clip: Positive
    methods: tuple[str, ...] = ("uldp-naive", "uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w")
    models: tuple[str, ...] = ("linear",)
    losses: tuple[str, ...] = tuple(LOSSES)
    packages: tuple[str, ...] = ()
    protections: Annotated[tuple[str, ...], Field(min_length=1)] = ("secure-aggregation",)
    releases: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    max_release_length: Annotated[int, Field(ge=1)] = 4096
    min_standard_error: Annotated[float, Field(ge=0)] = 0.0
    by_silo: bool = False
    trust_silos: bool = False
    trust_coordinator: bool = False
    disclose_counts: bool = False
    without_guarantee: bool = False
    accept_added_silos: bool = False
    max_message_bytes: Annotated[int, Field(ge=1024, le=LARGEST_MESSAGE)] = LARGEST_MESSAGE
    max_rounds: Count = 10_000
    max_epochs: Count = 100
    max_parameters: Count = 20_000_000
    round_seconds: Positive = 3600.0
    memory_mb: Annotated[int, Field(ge=1024)] = 8192
    uncharged_cpu_seconds: Positive = 60.0

    @field_validator("releases")
    @classmethod
    def _known(cls, releases: tuple[str, ...]) -> tuple[str, ...]:
        for name in releases:
            if name not in RELEASES:
                raise ValueError(
                    f"no figure '{name}'; there are: {', '.join(RELEASES)}{did_you_mean(name, RELEASES)}"
                )
        return releases

    @field_validator("methods", "protections")
    @classmethod
    def _members(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for name in names:
            _exists(find, str(info.field_name), name)
        return names

    @field_validator("models", "losses")
    @classmethod
    def _shipped(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kind, registry = ("model", MODELS) if info.field_name == "models" else ("loss", LOSSES)
        for name in names:
            _exists(check_name, name, kind, registry)
        return names

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a policy file.

        Raises:
            ConfigError: the file is missing, not TOML, or not a policy; names the file and the key.
        """
        return validate_document(cls, read_toml(path), path)

    @property
    def budget(self) -> Budget | None:
        """Budget of the silo's ledger; None if runs without a guarantee are allowed."""
        if self.without_guarantee:
            return None
        return Budget(epsilon=self.epsilon, delta=self.delta, accountant=make_accountant(self.accountant))

    def check_packages(self, document: dict[str, Any], coordinator_versions: Any) -> None:
        """Refuse members of packages that the policy does not list, before the document is validated.

        Validation of the document would import, and so run, their code.

        Args:
            document: tables of the experiment.
            coordinator_versions: package versions that the coordinator composed the document with, by name.

        Raises:
            RefusalError: a package is not listed, a member is not installed here or is ambiguous, or a version
                differs from the coordinator's.
        """
        try:
            members = third_party(asked_for(document))
        except ConfigError as error:
            raise RefusalError(Code.PACKAGE, detail=str(error)) from None
        for key, member in members.items():
            if member.package not in self.packages:
                raise RefusalError(
                    Code.PACKAGE,
                    detail=f"{key} = {sanitize(member.name)!r} comes from the package {sanitize(member.package)}; this "
                    f"silo allows: {', '.join((PACKAGE, *self.packages))}",
                )
        if coordinator_versions != (installed := versions(members.values())):
            raise RefusalError(
                Code.VERSION,
                detail=f"the coordinator composed the experiment with {sanitize(str(coordinator_versions))}, and this "
                f"silo has {installed}",
            )

    def check_request(self, experiment: Experiment) -> None:
        """Refuse requests of an experiment that the policy excludes, before any code that it names is loaded.

        Raises:
            RefusalError: the method, model, loss or protection is not allowed, or rounds or epochs exceed a limit.
                The error names the allowed ones.
        """
        self.check_protection(experiment.protection.name, experiment.privacy.insecure_seed)
        for code, key, requested, allowed in (
            (Code.METHOD, "method.name", experiment.method.name, self.methods),
            (Code.MODEL, "model.name", experiment.model.name, self.models),
            (Code.LOSS, "model.loss", experiment.model.loss, self.losses),
        ):
            _check_named(code, key, requested, allowed)
        if experiment.rounds > self.max_rounds:
            raise RefusalError(Code.ROUNDS, experiment.rounds, self.max_rounds)
        if experiment.local is not None and experiment.local.epochs > self.max_epochs:
            raise RefusalError(Code.EPOCHS, experiment.local.epochs, self.max_epochs)

    def check_protection(self, protection: str, seed: int | None) -> None:
        """Refuse a protection that is not allowed, and noise from a known seed; applies to runs of every kind.

        Raises:
            RefusalError: names the allowed protections.
        """
        _check_named(Code.PROTECTION, "protection.name", protection, self.protections)
        if seed is not None and not self.without_guarantee:
            raise RefusalError(Code.KNOWN_SEED)

    def check_scope(self, scope: RequestScope) -> None:
        """Refuse figures, columns and lengths of releases that are not allowed, before noise is calibrated.

        Raises:
            RefusalError: names the allowed ones.
        """
        for figure in sorted(scope.figures):
            _check_named(Code.RELEASE, "releases", figure, self.releases)
        for column in sorted(scope.columns) if self.columns is not None else ():
            _check_named(Code.COLUMN, "a column of a release", column, self.columns or ())
        if scope.by_silo and not self.by_silo:
            raise RefusalError(Code.BY_SILO)
        self._check_length(scope.numbers)

    def check_release(self, numbers: int, std: float) -> None:
        """Refuse a release that is too long, or more precise than the policy allows.

        Args:
            numbers: length of the release.
            std: standard deviation of the noise on each number, in people.

        Raises:
            RefusalError: names the limit.
        """
        self._check_length(numbers)
        if std < self.min_standard_error:
            raise RefusalError(Code.PRECISION, std, self.min_standard_error)

    def _check_length(self, numbers: int) -> None:
        if numbers > self.max_release_length:
            raise RefusalError(Code.DIMENSION, numbers, self.max_release_length)

    def check_method(self, method: Method, parameters: int) -> None:
        """Refuse a method with too large a bound, or with weights that disclose counts against the policy.

        Args:
            method: the method of the run.
            parameters: number of parameters of the model.

        Raises:
            RefusalError: names the limit.
        """
        if parameters > self.max_parameters:
            raise RefusalError(Code.LARGE_MODEL, parameters, self.max_parameters)
        if method.bound.bounded:
            if method.protection.largest_bound(method.bound) > self.clip:
                raise RefusalError(Code.CLIP, self.clip)
        elif not self.without_guarantee:
            raise RefusalError(Code.UNBOUNDED)
        allowed = self.disclose_counts and self.trust_coordinator and self.trust_silos
        if shows_counts(method) and not (allowed or self.without_guarantee):
            raise RefusalError(Code.DISCLOSES_COUNTS)

    def event(self, guarantee: Guarantee) -> Event:
        """Return the event of one round for the silo's own ledger: the cost against every untrusted party.

        A dominating event over the roles is charged. No role alone suffices: a coordinator may see less than the
        silos do, and nothing at all if everything is encrypted.

        Raises:
            RefusalError: the method guarantees nothing against a party that the policy counts.
        """
        counted = Role.READER if self.trust_coordinator else Role.SERVER
        roles = (counted,) if self.trust_silos else (counted, Role.SILO)
        for role in () if self.without_guarantee else roles:
            if any(isinstance(atom, NoGuarantee) for atom in atoms(guarantee.event_for(role))):
                raise RefusalError(_NOT_AGAINST[role])
        if self.without_guarantee:
            return guarantee.event_for(counted)
        return dominating_event(guarantee.event_for(role) for role in roles)


def _exists(check: Callable[..., object], *arguments: Any) -> None:
    """Refuse an unknown name through its lookup function; no code is loaded."""
    try:
        check(*arguments)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _check_named(code: Code, key: str, requested: str | None, allowed: Sequence[str]) -> None:
    """Refuse a name that is not in the allowed list."""
    if requested not in allowed:
        named = ", ".join(allowed) or "none"
        raise RefusalError(code, detail=f"{key} = {sanitize(str(requested))!r}; this silo allows: {named}")


# --- limits on work: processor seconds a day without a charge, and seconds a round ---
# Claim: regardless of the messages that a coordinator signs, a silo spends at most its policy's
# ``uncharged_cpu_seconds`` of processor time in any 24 hours, plus one message, on messages that lead to no charged
# round. These are refusals, answers outside a session, sessions without a charge, and repeated rounds that cost no
# charge, until another round is charged. The budget bounds the charged rounds. Every restart of the silo's process adds
# at most one second and the open session, which are not on disk yet; more while the disk is full.
# Condition: the work runs in the thread that reads the messages. Threads of linear algebra libraries are not counted.
# The clock of the silo's host is right.
# Enforced by CpuQuota in SiloParty.receive; ``tests/test_federation_limits.py`` exhausts it.


_HOUR: Final = 3600.0
_HOURS: Final = 24
_LARGEST: Final = 1 << 16

UNCHARGED_CPU_FILE: Final = "uncharged_cpu.json"
"""File in the silo's state folder: processor seconds without a charge, by hour since 1970."""

Outcome = Literal["charged", "answered", "refused"]
"""Effect of a message: a round was charged, the session continues, or nothing happened."""


class CpuQuota:
    """Counter of the processor seconds of the last 24 hours that led to no charge.

    Args:
        path: file that keeps the seconds for the next process.
        clock: seconds since 1970.

    Raises:
        RunFolderError: the file is damaged.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._spent = _read(path)
        self._unpaid = self._unsaved = 0.0
        self._paid = False

    def check(self, limit: float) -> None:
        """Check that a message may be read.

        Args:
            limit: processor seconds a day.

        Raises:
            ProtocolError: the limit of the day is reached.
        """
        # Whole hours: the present one and the 24 before it cover any 24 hours that end now.
        now = int(self._clock() // _HOUR)
        self._spent = {hour: seconds for hour, seconds in self._spent.items() if hour >= now - _HOURS}
        if math.fsum(self._spent.values()) + self._unpaid >= limit:
            raise ProtocolError(
                f"messages that led to no round have taken {limit:g} s of a processor within a day, which is all "
                "that policy.toml allows (uncharged_cpu_seconds): none is read until it is over"
            )

    def begin(self) -> None:
        """Begin a session: the open cost of an earlier session without a charge becomes spent."""
        self._spend(self._unpaid)
        self._unpaid, self._paid = 0.0, False

    def begin_round(self) -> None:
        """Begin a round: the charge of an earlier round does not cover this request, which may be a repeat."""
        self._paid = False

    def count(self, seconds: float, outcome: Outcome) -> None:
        """Count the cost of a message; messages of a charged round are free, even before the charge."""
        # "answered" is provisional (_unpaid): a charge later in the round clears it, and a new session makes it
        # final.
        if outcome == "charged":
            self._unpaid, self._paid = 0.0, True
        elif outcome == "refused":
            self._spend(seconds)
        elif not self._paid:
            self._unpaid += seconds

    def _spend(self, seconds: float) -> None:
        """Add seconds to the present hour; write the file once a second of processor time is not in it."""
        hour = int(self._clock() // _HOUR)
        self._spent[hour] = self._spent.get(hour, 0.0) + seconds
        self._unsaved += seconds
        if self._unsaved >= 1.0:
            with suppress(OSError):  # a full disk keeps no answer back; the next message tries again
                replace_file(self._path, json.dumps(self._spent).encode(), mode=0o600)
                self._unsaved = 0.0


def _read(path: Path) -> dict[int, float]:
    """Return the seconds of a file by hour; none if it does not exist."""
    if not path.exists():
        return {}
    with reading(path, RunFolderError):
        content = parse_json(read_content(path, RunFolderError, largest=_LARGEST), path, RunFolderError)
        usage = {int(hour): float(seconds) for hour, seconds in content.items()}
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in usage.values()):
            raise ValueError
        return usage


class Deadline:
    """Time limit of training or scoring; tested between chunks, and every second inside a chunk.

    Args:
        seconds: limit from now.
        clock: seconds since any moment; never goes back.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self._until = clock, seconds, clock() + seconds

    def __call__(self, done: int, total: int) -> None:
        """Check that time is left. The arguments are unused; they match the progress callback.

        Raises:
            RefusalError: the time is over; a charge that was made stays.
        """
        if self._clock() >= self._until:
            raise RefusalError(Code.OVERTIME, self._seconds)

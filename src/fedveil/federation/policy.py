"""A silo's own policy: what it takes part in, whatever the coordinator proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.engine.experiment import Experiment, asked_for, read_toml
from fedveil.errors import ConfigError
from fedveil.federation.errors import RefusalError
from fedveil.federation.limits import LARGEST_LETTER
from fedveil.foreign import foreign
from fedveil.local.losses import LOSSES
from fedveil.methods.claims import Guarantee
from fedveil.methods.method import Method
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, NoGuarantee, atoms, costliest
from fedveil.privacy.ledger import Budget
from fedveil.registry import PACKAGE, outsiders
from fedveil.validation import problems

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Policy(BaseModel):
    """The limits a silo sets by itself; a missing key has the cautious default.

    Attributes:
        epsilon: the most that the silo's users may spend over ALL runs.
        delta: of epsilon.
        accountant: that counts.
        clip: the largest bound of a contribution.
        methods: methods that may run.
        models: models that may be trained; a ``package.module:factory`` is code, and is loaded only if it is here.
        losses: losses that may be minimised; the same holds.
        packages: installed packages whose stages and methods may run; their code is loaded only if they are here. What
            they guarantee is what they claim: name none that you have not read.
        protections: what must hide the silo's message from the coordinator; any one of them.
        trust_silos: do not count what another silo learns, and take part where nothing is guaranteed against it
            (partial encryption whose encrypted part has no noise; weights by records in the open).
        trust_coordinator: count what readers of the models learn, instead of what the coordinator sees.
        disclose_counts: tell the coordinator how many records each user has, where weights need it, and all silos the
            totals; it takes trust in both as well.
        without_guarantee: take part in runs that guarantee nothing (tests, public data).
        largest_letter: bytes of a letter beyond which it is refused unread.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    epsilon: _Positive
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: Literal["pld", "rdp"] = "pld"
    clip: _Positive
    methods: tuple[str, ...] = ("uldp-naive", "uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w")
    models: tuple[str, ...] = ("linear",)
    losses: tuple[str, ...] = tuple(LOSSES)
    packages: tuple[str, ...] = ()
    protections: Annotated[tuple[str, ...], Field(min_length=1)] = ("secure-aggregation",)
    trust_silos: bool = False
    trust_coordinator: bool = False
    disclose_counts: bool = False
    without_guarantee: bool = False
    largest_letter: Annotated[int, Field(ge=1024, le=LARGEST_LETTER)] = LARGEST_LETTER

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a policy file.

        Raises:
            ConfigError: missing, no TOML, or not a policy; names the file and the key.
        """
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ConfigError(f"{path}: {problems(error, list(cls.model_fields))}") from None

    @property
    def budget(self) -> Budget | None:
        """What the silo's ledger may hold; None where runs without a guarantee are allowed."""
        if self.without_guarantee:
            return None
        return Budget(epsilon=self.epsilon, delta=self.delta, accountant=make_accountant(self.accountant))

    def check_packages(self, document: dict[str, Any]) -> None:
        """Refuse members of packages that are not named, before the document is read: that would run their code.

        Raises:
            RefusalError: a package that is not named, a member that is not installed here, or an ambiguous one.
        """
        try:
            found = outsiders(asked_for(document))
        except ConfigError as error:
            raise RefusalError("policy", str(error)) from None
        for key, member in found.items():
            if member.package not in self.packages:
                raise RefusalError(
                    "policy",
                    f"{key} = {foreign(member.name)!r} comes from the package {foreign(member.package)}; this silo "
                    f"allows: {', '.join((PACKAGE, *self.packages))}",
                )

    def check_request(self, experiment: Experiment) -> None:
        """Refuse what the experiment's document asks for, before any code it names is loaded.

        Raises:
            RefusalError: a method, model, loss or protection that is not allowed, named, with those that are.
        """
        for key, asked, allowed in (
            ("method.name", experiment.method.name, self.methods),
            ("model.name", experiment.model.name, self.models),
            ("model.loss", experiment.model.loss, self.losses),
            ("protection.name", experiment.protection.name, self.protections),
        ):
            if asked not in allowed:
                raise RefusalError("policy", f"{key} = {asked!r}; this silo allows: {', '.join(allowed)}")
        if experiment.privacy.insecure_seed is not None and not self.without_guarantee:
            raise RefusalError(
                "policy", "privacy.insecure_seed: noise from a known seed protects nobody; remove the key"
            )

    def check_method(self, method: Method) -> None:
        """Refuse a method whose bound is looser than allowed, or whose weights need counts that stay here.

        Raises:
            RefusalError: says which limit would be accepted.
        """
        if method.bound.bounded:
            if method.bound.norm > self.clip:
                raise RefusalError(
                    "policy",
                    f"method.clip = {method.bound.norm:g}; this silo allows at most {self.clip:g}",
                )
        elif not self.without_guarantee:
            raise RefusalError("policy", f"{method.name} does not bound what one user changes")
        allowed = self.disclose_counts and self.trust_coordinator and self.trust_silos
        if method.shows_counts and not (allowed or self.without_guarantee):
            raise RefusalError(
                "policy",
                f"{method.name}: the coordinator would learn how many records each user has here, and every silo how "
                "many she has in all, and no noise covers either; use uldp-avg or private weighting, or allow it by "
                "disclose_counts with trust_coordinator and trust_silos",
            )

    def event(self, guarantee: Guarantee) -> Event:
        """Return what one round is charged as in the silo's own ledger: what it costs against each who is not trusted.

        A coordinator may see less than the silos do, and nothing at all where everything is encrypted.

        Raises:
            RefusalError: the method guarantees nothing against a party that counts.
        """
        counted = Role.READER if self.trust_coordinator else Role.SERVER
        against = {
            Role.READER: "readers of the models",
            Role.SERVER: "the coordinator",
            Role.SILO: "another silo",
        }
        key = {Role.READER: "without_guarantee", Role.SERVER: "trust_coordinator", Role.SILO: "trust_silos"}
        asked = (counted,) if self.trust_silos else (counted, Role.SILO)
        for role in () if self.without_guarantee else asked:
            reasons = [one.reason for one in atoms(guarantee.against(role)) if isinstance(one, NoGuarantee)]
            if reasons:
                raise RefusalError(
                    "policy",
                    f"nothing is guaranteed against {against[role]}: {reasons[0]}; allow it by {key[role]}",
                )
        if self.without_guarantee:
            return guarantee.against(counted)
        return costliest(guarantee.against(role) for role in asked)

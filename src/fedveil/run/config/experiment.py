"""Define the experiment: one validated TOML document that suffices to repeat a run.

Pydantic checks the document and refuses an unknown key, a wrong type or an impossible value with the key's path.
The run folder stores the complete document, including defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from fedveil.config_keys import Count, LearningRate, Positive
from fedveil.data.allocation import Allocation
from fedveil.data.identities import MOST_USERS
from fedveil.data.splits import TEST_SHARE
from fedveil.errors import ConfigError, did_you_mean
from fedveil.files import parse_toml
from fedveil.privacy.accountant import explain_large_delta, is_large_delta
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.choice import Choice, ChoiceField, StageField, section_error
from fedveil.run.config.in_memory_method import SESSION, ChosenMethod, LocalField, explain_missing_local
from fedveil.run.config.recommended import RECOMMENDED
from fedveil.statistics.request import (
    LEAST_BINS,
    MOST_BINS,
    MOST_GROUPINGS,
    MOST_HORIZONS,
    Columns,
    SiloWeights,
)
from fedveil.training.losses import LOSSES
from fedveil.training.metrics import METRIC_NAMES
from fedveil.training.models import MODELS
from fedveil.training.steps import LocalSgd
from fedveil.user_code import check_name
from fedveil.validation import DocumentTable, validate_document

# --- sections ------------------------------------------------------------------------------------------------------
# One class per table that is not a stage, with defaults, ranges and meanings of its keys. All other tables name a
# registered member and have its keys (`fedveil.run.config.choice`).


def refuse_session(key: str, name: str) -> None:
    """Refuse to look up an object that was passed in a Python session and exists only there.

    Raises:
        ConfigError: the name begins with "session:"; the message names the key and how to resume.
    """
    if name.startswith(SESSION):
        raise ConfigError(
            f"{key}: '{name}' was handed over in a Python session, and is not available in this process; "
            "fedveil.resume(folder, model, people) goes on with the same objects"
        )


Device: TypeAlias = Literal["auto", "cpu", "cuda"]
_Sha256: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Section(DocumentTable):
    """A table of the document; unknown keys are refused and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class TableSection(Section):
    """Your own tables: one file per silo (named by the file), or files with a silo column; see the schema."""

    schema_file: Path = Field(description="public schema (`fedveil schema` drafts one)")
    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    test_file: Path | None = Field(
        None, description="test table; default: a share of the records is held out"
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] = TEST_SHARE

    @model_validator(mode="after")
    def _one_test(self) -> TableSection:
        """Check that test_share is not set next to a test_file."""
        # A run folder's document states the default test_share next to a test_file, which must stay readable.
        if self.test_file is not None and self.test_share != TEST_SHARE:
            raise ValueError(
                "test_share is of the records that are held out, and beside test_file none are; leave test_share or "
                "test_file out"
            )
        return self

    def resolve_paths(self, folder: Path) -> TableSection:
        """Return the section with paths resolved relative to a folder."""
        return self.model_copy(
            update={
                "schema_file": (folder / self.schema_file).absolute(),
                "files": tuple((folder / path).absolute() for path in self.files),
                "test_file": None if self.test_file is None else (folder / self.test_file).absolute(),
            }
        )


class DataSection(Section):
    """The training records, and their allocation to silos and users."""

    name: str | None = Field(None, description="a data set of the catalogue (`fedveil data`)")
    table: TableSection | None = Field(None, description="your own tables, instead of name")
    folder: Path | None = Field(None, description="folder of the canonical files; default: FEDVEIL_DATA")
    n_users: Annotated[Count, Field(le=MOST_USERS)] | None = Field(
        None, description="|U|, the public number of users"
    )
    n_silos: Annotated[Count, Field(le=1_000_000)] | None = Field(
        None, description="|S|; fixed by the medical data sets and by your own tables"
    )
    allocation: Annotated[Allocation, StageField(Allocation)] | None = Field(
        None, description="of a catalogue data set; default: zipf"
    )
    seed: int | None = Field(None, description="seed of split and allocation; default: the experiment's")

    @field_validator("allocation")
    @classmethod
    def _without_default(cls, allocation: Allocation | None, info: ValidationInfo) -> Allocation | None:
        """Replace the default allocation by None, so that equal allocations have one form in documents."""
        return None if allocation == Allocation() and info.data.get("table") is None else allocation

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        """Check that the section names one source of records, with the keys of that source only."""
        if (self.name is None) == (self.table is None):
            raise ValueError("give either name (a data set of the catalogue) or table (your own files)")
        if self.name is not None and self.n_users is None:
            raise ValueError("n_users: the public number of users is required")
        if self.table is not None and (self.allocation is not None or self.n_silos is not None):
            raise ValueError(
                "allocation and n_silos belong to catalogue data; your tables have the users and silos of all records"
            )
        if self.table is not None and self.n_users is not None:
            raise ValueError("n_users: the schema of your tables declares it")
        return self


class ModelSection(Section):
    """The model, its loss and its metrics; None takes the data set's default."""

    name: str | None = Field(None, description="a shipped model, or package.module:factory")
    loss: str | None = Field(None, description="a shipped loss, or package.module:function")
    class_weights: Annotated[tuple[Positive, ...], Field(min_length=2)] | None = Field(
        None, description="DECLARED weights of the classes in the loss; default: all 1"
    )
    metrics: tuple[str, ...] | None = Field(None, description="shipped metrics, or package.module:function")
    sha256: _Sha256 | None = Field(
        None,
        description="of what training begins with: a model handed over in Python (its layers and all their values), "
        "or the file initial",
    )
    loss_sha256: _Sha256 | None = Field(
        None,
        description="of a loss that was handed over in Python: all that it holds, and of its code the names alone",
    )
    start: Literal["seed", "zeros", "zero-output"] = Field(
        "seed",
        description="initial parameters: drawn from the experiment's seed, or zero (models of one linear layer), or "
        "from the seed with the last layer zero",
    )
    initial: Path | None = Field(None, description="public model to start from, a safetensors file")
    initial_layers: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="layers that are taken from initial; default: all"
    )

    @model_validator(mode="after")
    def _named(self) -> ModelSection:
        """Refuse unknown names of built-in members before a record is read.

        Objects of import paths are checked when they are loaded.
        """
        for key, kind, names, known_names in (
            ("name", "model", (self.name,), MODELS),
            ("loss", "loss", (self.loss,), LOSSES),
            ("metrics", "metric", self.metrics or (), METRIC_NAMES),
        ):
            for name in names:
                if name is None:
                    continue
                try:
                    check_name(name, kind, known_names)
                except ConfigError as error:
                    raise section_error(str(error), (key,)) from None
        return self

    @model_validator(mode="after")
    def _from_a_file(self) -> ModelSection:
        """Check that the keys of an initial model fit together."""
        if self.initial_layers is not None and self.initial is None:
            raise ValueError("initial_layers: give initial, the file that they are taken from")
        if self.initial is not None and self.start != "seed":
            raise ValueError("start: the parameters are those of initial; remove one of the two")
        return self


class TrainerSection(Section):
    """Execution of the local training; changes the speed, not the result."""

    name: Literal["auto", "loop", "vmap", "gram"] = "auto"
    compile: bool = Field(
        False,
        description="compile the vectorised step: takes tens of seconds and a C++ compiler, tried before the first "
        "round (pays for long runs of small networks)",
    )
    device: Device = "auto"
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="in which layers compute; updates are float32, and bounded as they are"
    )
    memory_mb: Count | None = Field(None, description="memory a chunk may take; default: what is fastest")
    processes: Count = Field(
        1, description="processes that share the contributions of a round, one core each"
    )


class ServerSection(Section):
    """The server's post-processing of the noisy mean and of the models, for any method."""

    denoiser: Annotated[Choice, ChoiceField("denoisers")] | None = Field(
        None, description="default: the method's own, which is none but for dp-fed-ls"
    )
    learning_rate: LearningRate | Literal["by-rule"] | None = Field(
        None,
        description="eta, in mean updates of a user (of a silo, where a contribution is a silo), and in the unit of a "
        'parameter for FedAdam and FedYogi; `"by-rule"` takes min(3, 0.25 / rho), rho the '
        "[noise-to-travel ratio](../theory/noise-to-travel.md); default: the method's own, which is 1",
    )
    optimizer: Annotated[Choice, ChoiceField("optimizers")] | None = Field(
        None, description="default: a plain step"
    )
    average: Annotated[Choice, ChoiceField("averages")] | None = Field(
        None, description="which model the run releases; default: the last"
    )


class PrivacySection(Section):
    """The claimed guarantee, its accountant, and the budget that stops a run."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: Literal["pld", "rdp"] = "pld"
    epsilon: Positive | None = Field(None, description="target of method.noise_multiplier = 'calibrated'")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="of epsilon that this document spends, a share of mu^2; others about the same people have the rest",
    )
    budget: Positive | None = Field(None, description="the run stops before the round that would exceed it")
    colluding_silos: Annotated[int, Field(ge=0)] = Field(
        0,
        description="silos that pool what they know and still have the stated noise against them (without "
        "amplification by sampling)",
    )
    allow_large_delta: bool | None = Field(
        None, description="true allows a delta of 1 / n_users or more, which promises nothing to any one user"
    )
    insecure_seed: int | None = Field(
        None, description="repeatable noise that protects nobody: for tests; the statement says so"
    )

    def randomness(self) -> PrivacyRandomness:
        """Return the source of noise and sampling: the operating system, or a seed if one is named."""
        seed = self.insecure_seed
        return PrivacyRandomness.system() if seed is None else PrivacyRandomness.insecure(seed)

    def check_delta(self, n_users: int) -> None:
        """Check that delta is below 1 / n_users, unless a large delta is allowed by name.

        Args:
            n_users: |U|, the public number of users.

        Raises:
            ConfigError: delta is 1 / n_users or more; the message gives a delta that is small enough.
        """
        if is_large_delta(self.delta, n_users) and not self.allow_large_delta:
            raise ConfigError(
                f"privacy.{explain_large_delta(self.delta, n_users)}, or, to run it all the same, "
                "privacy.allow_large_delta = true (in Python: settings)"
            )

    @field_validator("allow_large_delta")
    @classmethod
    def _only_if_allowed(cls, value: bool | None) -> bool | None:
        """Replace false by None, so that equal choices have one form in documents."""
        return value or None

    @model_validator(mode="after")
    def _of_a_target(self) -> PrivacySection:
        """Check that a share of epsilon comes with an epsilon."""
        if self.share < 1 and self.epsilon is None:
            raise ValueError("share: of privacy.epsilon, which is not given")
        return self


class EvaluationSection(Section):
    """Test metrics as releases of the run; held-out users are protected like training users."""

    silos: SiloWeights | None = Field(
        None,
        description="a person's weights over silos; default: equal under private-weighting, else uniform",
    )
    by: Annotated[Columns, Field(max_length=MOST_GROUPINGS)] = Field(
        (), description='columns of declared categories whose groups are compared; "silo" is one'
    )
    bins: Annotated[int, Field(ge=LEAST_BINS, le=MOST_BINS)] | None = Field(
        None, description="of scores; default: as few as lose less than a quarter of the noise"
    )
    max_standard_error: Positive | None = Field(
        None,
        description="error that counts in full at most, where the target is a number; default: between its bounds",
    )
    horizons: Annotated[tuple[Positive, ...], Field(max_length=MOST_HORIZONS)] = Field(
        (), description="times by which events are predicted, where the target is a survival time; ascending"
    )

    @field_validator("horizons")
    @classmethod
    def _ascending(cls, horizons: tuple[float, ...]) -> tuple[float, ...]:
        """Check that the horizons are ascending."""
        if any(after <= before for before, after in pairwise(horizons)):
            raise ValueError("must be ascending")
        return horizons


class PreprocessingSection(Section):
    """Refinement of schema and clip by releases of the run; nothing else is fitted on records.

    Refined values stay within the declared ones.
    """

    silos: SiloWeights | None = Field(
        None,
        description="a person's weights over silos; default: equal under private-weighting, else uniform",
    )
    bounds: Columns = Field((), description="numbers whose bounds are refined within the declared ones")
    impute: Columns = Field((), description="numbers whose missing values are taken for the median")
    pool: dict[str, Positive] = Field(
        {}, description='by column: categories with fewer people than this become "other", which is all zeros'
    )
    clip: Literal["quantile"] | None = Field(
        None, description="the .8 quantile of the updates' lengths becomes the clip; default: as declared"
    )

    @model_validator(mode="after")
    def _something(self) -> PreprocessingSection:
        """Check that the section requests a refinement."""
        if not (self.bounds or self.impute or self.pool or self.clip):
            raise ValueError(
                "no release is requested; give bounds, impute, pool or clip, or remove [preprocessing]"
            )
        return self


class BudgetSection(Section):
    """Shares of a run's epsilon, as shares of mu^2; training has the rest."""

    preprocessing: Annotated[float, Field(gt=0, lt=1)] = Field(0.07, description="of [preprocessing]")
    evaluation: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="of [evaluation]")
    votes: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="of protection.partition = 'noisy-votes', whose vote_noise is found for it"
    )

    @model_validator(mode="after")
    def _rest(self) -> BudgetSection:
        """Check that the shares leave a part of the budget for training."""
        if self.preprocessing + self.evaluation + self.votes >= 1:
            raise ValueError("the shares leave nothing for training; together they must be below 1")
        return self


# --- experiment ------------------------------------------------------------


def _default_choice(kind: str, name: str) -> Callable[[], Choice]:
    """Return a factory of the choice that a document without the section has: with every default of the member."""
    return partial(ChoiceField(kind).read, {"name": name})


class Experiment(Section):
    """One complete training run."""

    file: ClassVar[str] = "experiment.toml"

    schema_version: Literal[2] = 2
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]
    seed: int = Field(0, description="initial model, split, allocation, batches, dropout")
    rounds: Annotated[Count, Field(le=1_000_000_000)] = RECOMMENDED.rounds
    evaluate_every: Count = Field(1, description="rounds between evaluations on the test set")
    data: DataSection
    model: ModelSection = ModelSection()
    local: Annotated[LocalSgd, LocalField()] | None = None
    trainer: TrainerSection = TrainerSection()
    method: Annotated[Choice, ChosenMethod()]
    sampler: Annotated[Choice, ChoiceField("samplers")] | None = Field(
        None, description="which users take part in a round; default: the method's own, everyone without one"
    )
    channel: Annotated[Choice, ChoiceField("channels")] = Field(
        default_factory=_default_choice("channels", "additive")
    )
    protection: Annotated[Choice, ChoiceField("protections")] = Field(
        default_factory=_default_choice("protections", "none")
    )
    server: ServerSection = ServerSection()
    privacy: PrivacySection = PrivacySection()
    preprocessing: PreprocessingSection | None = Field(
        None, description="the schema refined; default: as declared"
    )
    evaluation: EvaluationSection | None = Field(None, description="private test metrics; default: none")
    budget: BudgetSection | None = Field(None, description="shares of the releases that are no round")

    @property
    def shares(self) -> BudgetSection:
        """The shares of the budget, including defaults."""
        return self.budget or BudgetSection()

    @model_validator(mode="before")
    @classmethod
    def _with_recommended(cls, document: Any) -> Any:
        """Add the recommended settings to a document without a method."""
        if not isinstance(document, Mapping):
            return document
        try:
            return RECOMMENDED.complete(document)
        except ConfigError as error:
            raise ValueError("; ".join((str(error), *_slips(document)))) from None

    @model_validator(mode="after")
    def _coherent(self) -> Experiment:
        """Check the keys of different tables against each other."""
        is_word, missing = isinstance(self.method.get("noise_multiplier"), str), list[str]()
        if self.local is None and self.method.needs("local"):
            missing.append(f"local: {explain_missing_local(self.method.name)}")
        if is_word and self.privacy.epsilon is None:
            missing.append(
                "privacy.epsilon: needed where method.noise_multiplier is found for it, for instance 2.0"
            )
        if missing:
            raise ValueError("; ".join(missing))
        self._check_server_rate()
        if not is_word and self.privacy.epsilon is not None:
            raise ValueError(
                "privacy.epsilon: needs method.noise_multiplier = 'calibrated', which finds the noise for it; with a "
                "number there remove it, or give privacy.budget, at which a run stops"
            )
        self._check_shares()
        return self

    def _check_server_rate(self) -> None:
        """Check that the server's learning rate and its optimizer fit together."""
        rate, optimizer = self.server.learning_rate, self.server.optimizer
        if optimizer is None:
            return
        if rate is None and optimizer.needs("learning_rate", without_default=True):
            raise ValueError(f"server.learning_rate: the optimizer '{optimizer.name}' needs a number")
        if rate is not None and not optimizer.needs("learning_rate"):
            raise ValueError(
                f"server.learning_rate: the optimizer '{optimizer.name}' does not read it; remove one of the two"
            )
        if isinstance(rate, str):
            raise ValueError(
                f"server.learning_rate: '{rate}' is the rule of a plain step; give a number beside server.optimizer"
            )

    def unused_tables(self) -> tuple[str, ...]:
        """Return a sentence for each table that the experiment's method does not read.

        Such a table is not refused, so that all methods of a sweep can share one file.
        """
        if self.local is None or self.method.needs("local"):
            return ()
        return (
            f"[local]: {self.method.name} sends one gradient per contribution, or brings its own local steps, and "
            "does not read this table",
        )

    def _check_shares(self) -> None:
        """Check that side releases have a budget, and that held-out records belong to the silos' tables."""
        keys = [name for name in ("preprocessing", "evaluation") if getattr(self, name) is not None]
        keys += ["budget.votes"] if self.shares.votes else []
        if self.privacy.share < 1:
            keys.append("privacy.share")
        if not keys:
            if self.budget is not None:
                raise ValueError(
                    "budget: shares epsilon between training, [preprocessing], [evaluation] and votes; give one of "
                    "them too"
                )
            return
        if self.method.get("noise_multiplier") != "calibrated":
            raise ValueError(
                f"{keys[0]}: spends a share of privacy.epsilon, and the noise of training is found for the rest: give "
                "privacy.epsilon and method.noise_multiplier = 'calibrated'"
            )
        if self.preprocessing is not None and self.data.table is None and self.evaluation is None:
            raise ValueError("preprocessing: is of your own tables (data.table), whose schema it refines")
        if self.evaluation is not None and (self.data.table is None or self.data.table.test_file is not None):
            raise ValueError(
                "evaluation: is of records that are held out of your own tables (data.table, in Python fedveil.tables, "
                "without a test file); "
                "a test table from outside has records of no silo's users, and metrics on it need no noise"
            )

    def resolve_paths(self, folder: Path) -> Experiment:
        """Return the experiment with paths of tables and initial model resolved relative to a folder."""
        data, model = self.data, self.model
        if data.table is not None:
            data = data.model_copy(update={"table": data.table.resolve_paths(folder)})
        if model.initial is not None:
            model = model.model_copy(update={"initial": (folder / model.initial).absolute()})
        return self.model_copy(update={"data": data, "model": model})

    def to_toml(self) -> str:
        """Return the complete document; :func:`parse` reads it back to an equal experiment."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


def _slips(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unknown keys of a document and of its table ``[privacy]``, which may be slips of what it lacks."""
    for above, kind in (("", Experiment), ("privacy.", PrivacySection)):
        table = document.get(above.rstrip(".")) if above else document
        for key in table if isinstance(table, Mapping) else ():
            if key not in kind.model_fields:
                yield f"{above}{key}: no such key{did_you_mean(str(key), kind.model_fields)}"


def flatten_keys(document: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of a document by key path: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    values: dict[str, Any] = {}
    for key, value in document.items():
        values |= (
            flatten_keys(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
        )
    return values


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge changes into a document, table by table; a change to None removes the key."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            laid = merge(inner if isinstance(inner, dict) else {}, value)
            # A table whose changes only remove keys must not create an empty table.
            if laid or key in merged or not value:
                merged[key] = laid
        else:
            merged[key] = value
    return merged


def parse_assignment(text: str) -> dict[str, Any]:
    """Parse ``a.b=value`` into nested tables; the value is a TOML value, and a bare word is a string.

    ``a.b=`` removes the key so that its default holds; its value is None here.

    Raises:
        ConfigError: no key, a value that is not TOML, or the removal of an unknown key.
    """
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: expected KEY=VALUE, for instance --set method.clip=0.5")
    parsed: Any
    try:
        parsed = parse_toml(f"value = {value}", "--set", ConfigError)["value"]
    except ConfigError:
        parsed = value.strip()
        if parsed.startswith(("[", "{")):
            raise ConfigError(
                f"--set {text}: {parsed} is no TOML value; a shell takes quotation marks away unless others stand "
                """around them, for instance --set 'evaluation.by=["ward"]'"""
            ) from None
    if not value.strip():
        _check_path(path)
        parsed = None
    for part in reversed(path):
        parsed = {part: parsed}
    return dict(parsed)


def _check_path(path: list[str]) -> None:
    """Refuse to remove a key that no experiment has: a misspelt key would otherwise have no effect."""
    for depth, part in enumerate(path):
        keys = _known_keys(tuple(path[:depth]))
        if part not in keys:
            raise ConfigError(
                f"--set {'.'.join(path)}=: no such key '{part}'; known here: "
                f"{', '.join(keys)}{did_you_mean(part, keys)}"
            )


def parse(document: dict[str, Any], origin: str) -> Experiment:
    """Validate a document.

    Args:
        document: the nested tables.
        origin: name of the document in an error (a file or a preset).

    Raises:
        ConfigError: a wrong document; the message names each wrong key's path.
    """
    return validate_document(Experiment, document, origin)


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at a path; for a choice, the keys of all members of its kind."""
    model: Any = Experiment
    for part in path:
        section = model.model_fields.get(part)
        mark = _mark_of(section)
        if mark is not None:
            return mark.known_keys()
        inner = [section.annotation, *get_args(section.annotation)] if section else []
        model = next(
            (
                annotation
                for annotation in inner
                if isinstance(annotation, type) and issubclass(annotation, BaseModel)
            ),
            Experiment,
        )
    return sorted(model.model_fields)


def _mark_of(section: FieldInfo | None) -> ChoiceField | StageField | None:
    """Return the annotation of a field as a stage's section or a choice; None if it has neither."""
    if section is None:
        return None
    marks = (
        *section.metadata,
        *(mark for argument in get_args(section.annotation) for mark in get_args(argument)[1:]),
    )
    return next((mark for mark in marks if isinstance(mark, ChoiceField | StageField)), None)


def asked_for(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the kind and name of every member that a document names, by key; nothing is loaded.

    A name that is not a string is left to :func:`parse`, which refuses it.
    """
    members = {}
    for path, kind in _slots(Experiment, ()):
        table: Any = document
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        name = table.get("name") if isinstance(table, dict) else None
        if isinstance(name, str):
            members[".".join((*path, "name"))] = (kind, name)
    data = document.get("data")
    if isinstance(data, dict) and isinstance(data.get("name"), str):
        members["data.name"] = ("data_sets", data["name"])
    return members


def _slots(table: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path and the kind of every choice."""
    for name, section in table.model_fields.items():
        mark = _mark_of(section)
        if mark is not None and mark.kind:
            yield (*above, name), mark.kind
        elif isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel):
            yield from _slots(section.annotation, (*above, name))

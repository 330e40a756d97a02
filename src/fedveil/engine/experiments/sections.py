"""The sections of an experiment that are no stage: one class per table, with defaults, ranges and meanings of its keys.

The others name a registered member, whose keys they have (:mod:`fedveil.engine.experiments.choice`).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from fedveil.engine.experiments.choice import Choice, Chosen, Keys, refused
from fedveil.engine.experiments.handed_over import SESSION
from fedveil.errors import ConfigError
from fedveil.keys import Count, Positive
from fedveil.local.import_path import check_name
from fedveil.local.losses import LOSSES
from fedveil.local.metrics import METRIC_NAMES
from fedveil.local.models import MODELS
from fedveil.population.allocation import Allocation
from fedveil.population.identities import MOST_USERS
from fedveil.population.splits import TEST_SHARE
from fedveil.privacy.accountant import explain_large_delta, is_large_delta
from fedveil.randomness import PrivacyRandomness
from fedveil.statistics.limits import (
    LEAST_BINS,
    MOST_BINS,
    MOST_GROUPINGS,
    MOST_HORIZONS,
    Columns,
    SiloWeights,
)
from fedveil.validation import DocumentTable


def refuse_session(key: str, name: str) -> None:
    """Refuse to look for something that was handed over in Python, and is nowhere else.

    Raises:
        ConfigError: it was; names the key and how to go on.
    """
    if name.startswith(SESSION):
        raise ConfigError(
            f"{key}: '{name}' was handed over in a Python session, and is nowhere to be found from here; "
            "fedveil.resume(folder, model, people) goes on with the same objects"
        )


Device: TypeAlias = Literal["auto", "cpu", "cuda"]
_Sha256: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Section(DocumentTable):
    """A table of the document: unknown keys are refused, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class TableSection(Section):
    """Your own tables: one file per silo (named by the file), or files with a silo column; the schema says which."""

    schema_file: Path = Field(description="public schema (`fedveil schema` drafts one)")
    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    test_file: Path | None = Field(
        None, description="test table; default: a share of the records is held out"
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] = TEST_SHARE

    @model_validator(mode="after")
    def _one_test(self) -> TableSection:
        if self.test_file is not None and self.test_share != TEST_SHARE:  # run folders state the usual one
            raise ValueError(
                "test_share is of the records that are held out, and beside test_file none are; leave test_share or "
                "test_file out"
            )
        return self

    def anchored(self, folder: Path) -> TableSection:
        """Return the section with its paths taken relative to a folder."""
        return self.model_copy(
            update={
                "schema_file": (folder / self.schema_file).absolute(),
                "files": tuple((folder / path).absolute() for path in self.files),
                "test_file": None if self.test_file is None else (folder / self.test_file).absolute(),
            }
        )


class DataSection(Section):
    """Which records are trained on, and how they are allotted to silos and users."""

    name: str | None = Field(None, description="a data set of the catalogue (`fedveil data`)")
    table: TableSection | None = Field(None, description="your own tables, instead of name")
    folder: Path | None = Field(None, description="folder of the canonical files; default: FEDVEIL_DATA")
    n_users: Annotated[Count, Field(le=MOST_USERS)] | None = Field(
        None, description="|U|, the public number of users"
    )
    n_silos: Annotated[Count, Field(le=1_000_000)] | None = Field(
        None, description="|S|; fixed by the medical data sets and by your own tables"
    )
    allocation: Annotated[Allocation, Keys(Allocation)] | None = Field(
        None, description="of a catalogue data set; default: zipf"
    )
    seed: int | None = Field(None, description="seed of split and allocation; default: the experiment's")

    @field_validator("allocation")
    @classmethod
    def _usual(cls, given: Allocation | None, there: ValidationInfo) -> Allocation | None:
        """Write the usual allocation in one way: left out. It allots the same records to the same users."""
        return None if given == Allocation() and there.data.get("table") is None else given

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if (self.name is None) == (self.table is None):
            raise ValueError("give either name (a data set of the catalogue) or table (your own files)")
        if self.name is not None and self.n_users is None:
            raise ValueError("n_users: the public number of users is required")
        if self.table is not None and (self.allocation is not None or self.n_silos is not None):
            raise ValueError(
                "allocation and n_silos belong to catalogue data; your tables say who holds what"
            )
        if self.table is not None and self.n_users is not None:
            raise ValueError("n_users: the schema of your tables declares it")
        return self


class ModelSection(Section):
    """The model, what it minimises and how it is judged; None takes the data set's own choice."""

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
    start: Literal["seed", "zeros"] = Field(
        "seed",
        description="initial parameters: drawn from the experiment's seed, or zero (models of one linear layer)",
    )
    initial: Path | None = Field(None, description="public model to start from, a safetensors file")
    initial_layers: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="layers that are taken from initial; default: all"
    )

    @model_validator(mode="after")
    def _named(self) -> ModelSection:
        """Refuse a name of nothing before a record is read; what an import path names is seen when it is loaded."""
        for key, what, names, known in (
            ("name", "model", (self.name,), MODELS),
            ("loss", "loss", (self.loss,), LOSSES),
            ("metrics", "metric", self.metrics or (), METRIC_NAMES),
        ):
            for name in names:
                if name is None:
                    continue
                try:
                    check_name(name, what, known)
                except ConfigError as error:
                    raise refused(str(error), (key,)) from None
        return self

    @model_validator(mode="after")
    def _from_a_file(self) -> ModelSection:
        if self.initial_layers is not None and self.initial is None:
            raise ValueError("initial_layers: give initial, the file that they are taken from")
        if self.initial is not None and self.start != "seed":
            raise ValueError("start: the parameters are those of initial; remove one of the two")
        return self


class TrainerSection(Section):
    """How the local training is executed; changes the speed, not the result."""

    name: Literal["auto", "loop", "vmap", "span"] = "auto"
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
    """What the server does with the noisy mean and with the models, whatever the method: post-processing."""

    denoiser: Annotated[Choice, Chosen("denoisers")] | None = Field(
        None, description="default: the method's own, which is none but for dp-fed-ls"
    )
    optimizer: Annotated[Choice, Chosen("optimizers")] | None = Field(
        None, description="default: a plain step at method.learning_rate"
    )
    average: Annotated[Choice, Chosen("averages")] | None = Field(
        None, description="which model the run releases; default: the last"
    )


class PrivacySection(Section):
    """What is claimed, by which accountant, and when to stop."""

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
        """Return where noise and sampling come from: the operating system, unless a seed was asked for by name."""
        seed = self.insecure_seed
        return PrivacyRandomness.system() if seed is None else PrivacyRandomness.insecure(seed)

    def check_delta(self, n_users: int) -> None:
        """Refuse a delta that is many users' worth, unless it is allowed by name.

        Args:
            n_users: |U|, the public number of users.

        Raises:
            ConfigError: delta is 1 / n_users or more; says which delta would do.
        """
        if is_large_delta(self.delta, n_users) and not self.allow_large_delta:
            raise ConfigError(
                f"privacy.{explain_large_delta(self.delta, n_users)}, or, to run it all the same, "
                "privacy.allow_large_delta = true (in Python: settings)"
            )

    @field_validator("allow_large_delta")
    @classmethod
    def _only_if_allowed(cls, given: bool | None) -> bool | None:
        """Write the usual choice in one way: left out."""
        return given or None

    @model_validator(mode="after")
    def _of_a_target(self) -> PrivacySection:
        if self.share < 1 and self.epsilon is None:
            raise ValueError("share: of privacy.epsilon, which is not given")
        return self


class EvaluationSection(Section):
    """Test metrics as releases of the run: held-out people are protected as those are who are trained on."""

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
    largest_error: Positive | None = Field(
        None,
        description="error that counts in full at most, where the target is a number; default: between its bounds",
    )
    horizons: Annotated[tuple[Positive, ...], Field(max_length=MOST_HORIZONS)] = Field(
        (), description="times by which events are predicted, where the target is a survival time; ascending"
    )

    @field_validator("horizons")
    @classmethod
    def _ascending(cls, horizons: tuple[float, ...]) -> tuple[float, ...]:
        if any(after <= before for before, after in pairwise(horizons)):
            raise ValueError("must be ascending")
        return horizons


class PreprocessingSection(Section):
    """Schema and clip refined by releases of the run, inside of what is declared; nothing else is fitted on records."""

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
        if not (self.bounds or self.impute or self.pool or self.clip):
            raise ValueError(
                "nothing is asked for; give bounds, impute, pool or clip, or remove [preprocessing]"
            )
        return self


class BudgetSection(Section):
    """How a run's epsilon is shared: shares of mu^2, of which training has the rest."""

    preprocessing: Annotated[float, Field(gt=0, lt=1)] = Field(0.07, description="of [preprocessing]")
    evaluation: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="of [evaluation]")
    votes: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="of protection.partition = 'noisy-votes', whose vote_noise is found for it"
    )

    @model_validator(mode="after")
    def _rest(self) -> BudgetSection:
        if self.preprocessing + self.evaluation + self.votes >= 1:
            raise ValueError("the shares leave nothing for training; together they must be below 1")
        return self

"""The sections of an experiment: one class per table of the document, with defaults, ranges and what each key means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from fedveil.errors import ConfigError, PrivacyError
from fedveil.methods import METHODS
from fedveil.methods.protections import (
    NO_PROTECTION,
    PartialEncryption,
    PrivateWeighting,
    Protection,
    SecureAggregation,
)
from fedveil.population.allocation import Law
from fedveil.privacy.bounds import Clip
from fedveil.server.optimizers import AnyOptimizer

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
LatticeName = Literal["Z1", "Z2", "Z3", "A2", "D3", "D4", "E8"]


SESSION = "session:"
"""How the name of data, a model, a loss or a metric begins that was handed over in Python and has no other name."""


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


class Section(BaseModel):
    """A table of the document: unknown keys are refused, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class TableSection(Section):
    """Your own tables: one file per silo (named by the file), or files with a silo column; the schema says which."""

    schema_file: Path = Field(description="public schema (`fedveil schema` drafts one)")
    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    test_file: Path | None = Field(
        None, description="test table; default: a share of the records is held out"
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2

    def anchored(self, folder: Path) -> TableSection:
        """Return the section with its paths taken relative to a folder."""
        return self.model_copy(
            update={
                "schema_file": (folder / self.schema_file).absolute(),
                "files": tuple((folder / path).absolute() for path in self.files),
                "test_file": None if self.test_file is None else (folder / self.test_file).absolute(),
            }
        )


class AllocationSection(Section):
    """The law by which a catalogue's records are handed to users and silos (docs/reference/data-sets.md)."""

    law: Law = "zipf"
    user_exponent: NonNegative = 0.5
    silo_exponent: NonNegative = 2.0
    main_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    labels_per_user: Count = 2
    concentration: Positive = Field(1.0, description="of the law dirichlet")


class DataSection(Section):
    """Which records are trained on, and how they are allotted to silos and users."""

    name: str | None = Field(None, description="a data set of the catalogue (`fedveil data`)")
    table: TableSection | None = Field(None, description="your own tables, instead of name")
    folder: Path | None = Field(None, description="folder of the canonical files; default: FEDVEIL_DATA")
    n_users: Count | None = Field(None, description="|U|, the public number of users")
    n_silos: Count | None = Field(
        None, description="|S|; fixed by the medical data sets and by your own tables"
    )
    allocation: AllocationSection | None = Field(None, description="of a catalogue data set; default: zipf")
    seed: int | None = Field(None, description="seed of split and allocation; default: the experiment's")

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
    metrics: tuple[str, ...] | None = Field(None, description="shipped metrics, or package.module:function")
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="of a model that was handed over in Python: its layers and all their values"
    )
    initial: Path | None = Field(None, description="public model to start from, a safetensors file")
    initial_layers: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="layers that are taken from initial; default: all"
    )

    @model_validator(mode="after")
    def _from_a_file(self) -> ModelSection:
        if self.initial_layers is not None and self.initial is None:
            raise ValueError("initial_layers: give initial, the file that they are taken from")
        return self


class LocalSection(Section):
    """What one contribution computes: local stochastic gradient descent."""

    learning_rate: Positive = Field(0.1, description="eta_l")
    epochs: Count = Field(1, description="Q, passes over the contribution's own records")
    steps: Count | None = Field(None, description="tau, where the one pass stops; default: whole passes")
    batch_size: Count | None = Field(None, description="records per step; default: all of the contribution")
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    decay: Fraction = Field(1.0, description="factor by which learning_rate falls from round to round")


class TrainerSection(Section):
    """How the local training is executed; changes the speed, not the result."""

    name: Literal["auto", "loop", "vmap", "span"] = "auto"
    compile: bool = Field(
        False, description="compile the vectorised step (pays for long runs of small networks)"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_mb: Count | None = Field(None, description="memory a chunk may take; default: what is fastest")
    processes: Count = Field(
        1, description="processes that share the contributions of a round, one core each"
    )


class MethodSection(Section):
    """The method and its stages' parameters; a parameter that the method does not have is refused."""

    name: str
    learning_rate: Positive | None = Field(
        None, description="eta_g of the server's plain step; default: 1; server.optimizer has its own"
    )
    clip: Positive | None = Field(None, description="C, l2 bound of a contribution")
    noise_multiplier: NonNegative | Literal["calibrated", "closed-form"] | None = Field(
        None,
        description="sigma; 'calibrated' finds the least noise for privacy.epsilon by the accountant, "
        "'closed-form' by Theorem 1 or 2 of DP-Fed-LS, or Remark 1 of ParaAegis; where noise falls, that of round 1",
    )
    user_sampling_rate: Fraction | None = Field(None, description="q, Poisson rate of users per round")
    group_size: Count | Literal["median", "max"] | None = Field(None, description="k, records kept per user")
    client_sampling: Literal["uniform", "poisson"] | None = Field(
        None, description="clients without replacement, or each by itself; default: poisson"
    )
    client_sampling_rate: Fraction | None = Field(None, description="tau, share of the clients in a round")
    denominator: Literal["expected", "actual"] | None = Field(
        None, description="what a mean over clients is divided by; 'actual' is not covered by the guarantee"
    )
    smoothing: NonNegative | None = Field(None, description="sigma of Laplacian smoothing (dp-fed-ls)")
    calibration: Literal["client", "as-published"] | None = Field(
        None,
        description="what the noise of paraaegis and its baselines is measured in: clip, or 2 clip over the records "
        "of the largest client, which is no bound for a client; default: client",
    )
    noise_decay: Fraction | None = Field(
        None, description="factor by which the noise of varying-dp falls every round"
    )
    scale: Literal["clip", "norm"] | None = Field(
        None, description="what a client's noise is measured in: clip, or each update's norm (no guarantee)"
    )
    lattice: LatticeName | None = Field(
        None, description="of cepam-gaussian; default: the cheapest, by block"
    )
    step: Positive | None = Field(
        None, description="SDQ's step, in units of the noise (fl-sdq: of the scale)"
    )

    @field_validator("clip")
    @classmethod
    def _clippable(cls, clip: float | None) -> float | None:
        if clip is not None:
            try:
                Clip(norm=clip)
            except PrivacyError as error:
                raise ValueError(str(error)) from None
        return clip

    @model_validator(mode="after")
    def _known(self) -> MethodSection:
        if self.name not in METHODS:
            raise ValueError(f"no method '{self.name}'; there are: {', '.join(METHODS)}")
        try:
            METHODS[self.name].check(self.parameters())
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def parameters(self) -> dict[str, Any]:
        """Return the method's own parameters: those that were given."""
        given = self.model_dump(exclude={"name", "learning_rate"})
        return {key: value for key, value in given.items() if value is not None}


class ChannelSection(Section):
    """How a silo's noisy sum travels: as numbers, or as bytes whose compression error is the noise."""

    name: Literal["additive", "lrsuq"] = Field("additive", description="lrsuq: docs/theory/lrsuq.md")
    lattice: LatticeName | None = Field(
        None, description="of lrsuq; default: the cheapest way, block by block"
    )

    @model_validator(mode="after")
    def _quantised(self) -> ChannelSection:
        if self.lattice is not None and self.name != "lrsuq":
            raise ValueError(f"lattice: {self.name} quantises nothing; it belongs to name = 'lrsuq'")
        return self


_PARTIAL = (
    "ratio",
    "decay",
    "strategy",
    "partition",
    "votes",
    "vote_noise",
    "he_noise",
    "he_clip",
    "processes",
)


class ProtectionSection(Section):
    """What hides a silo's message from the server."""

    name: Literal["none", "secure-aggregation", "private-weighting", "partial-encryption"] = "none"
    n_max: Count | None = Field(
        None, description="N_max of private-weighting, largest number of records of a user; default: 2000"
    )
    cipher: Literal["paillier", "rlwe"] | None = Field(
        None, description="of private-weighting; rlwe is for models of many parameters; default: paillier"
    )
    key_bits: Literal[2048, 3072, 4096] | None = Field(
        None, description="size of the Paillier modulus of private-weighting; default: 3072"
    )
    private_sampling: bool | None = Field(
        None, description="private-weighting draws users by oblivious transfer, hidden from the server"
    )
    on_missing: Literal["end", "retry", "recover"] | None = Field(
        None, description="what happens when a silo vanishes in a round; default: end"
    )
    missing_silos: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="silos that a sum under secure-aggregation may lack; more noise pays for it; default: 0",
    )
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="simulation: probability that a silo vanishes in an attempt at a round; default: 0"
    )

    ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="r of partial-encryption, share of the coordinates that is encrypted; default: 0.1"
    )
    decay: Fraction | None = Field(
        None, description="lambda of partial-encryption: ratio falls by it every round; default: 1"
    )
    strategy: Literal["max", "min", "random"] | None = Field(
        None, description="which coordinates partial-encryption encrypts; default: max"
    )
    partition: Literal["votes", "noisy-votes", "released"] | None = Field(
        None, description="what partial-encryption takes them from; default: votes, which are not paid for"
    )
    votes: Literal["plain", "secagg"] | None = Field(
        None, description="whether the server sees each ballot, or the sum of all; default: plain"
    )
    vote_noise: NonNegative | None = Field(
        None, description="noise of noisy-votes on the counts, in norms of one ballot"
    )
    he_noise: NonNegative | None = Field(
        None,
        description="noise of the encrypted part over that of the clear part, each in its own bound; default: 0",
    )
    he_clip: Positive | None = Field(
        None, description="l2 bound of the encrypted part of paraaegis; default: none"
    )
    processes: Count | None = Field(
        None, description="worker processes of this machine in which partial-encryption encrypts; default: 1"
    )

    @model_validator(mode="after")
    def _weighting(self) -> ProtectionSection:
        given = set(self.model_dump(exclude={"name"}, exclude_none=True))
        for key in sorted(given & set(_PARTIAL)):
            if self.name != "partial-encryption":
                raise ValueError(f"{key}: belongs to name = 'partial-encryption'")
        for key in sorted(given & {"n_max", "cipher", "key_bits", "private_sampling"}):
            if self.name != "private-weighting":
                raise ValueError(f"{key}: belongs to name = 'private-weighting'")
        for key in sorted(given & {"on_missing", "missing_silos", "dropout_rate"}):
            if self.name not in ("secure-aggregation", "private-weighting"):
                raise ValueError(f"{key}: belongs to name = 'secure-aggregation' or 'private-weighting'")
        if self.name == "private-weighting" and (self.on_missing == "recover" or self.missing_silos):
            raise ValueError(
                "private-weighting cannot do without a silo: the weights of the others depend on its records; "
                "on_missing = 'retry' waits for it"
            )
        if self.key_bits is not None and self.cipher == "rlwe":
            raise ValueError("key_bits: the size of a Paillier modulus; rlwe chooses its ring by the sums")
        return self

    def value(self) -> Protection:
        """Return the stage of a method that these keys ask for."""
        if self.name == "none":
            return NO_PROTECTION
        if self.name == "secure-aggregation":
            return SecureAggregation(
                on_missing=self.on_missing or "end", missing_silos=self.missing_silos or 0
            )
        if self.name == "partial-encryption":
            return PartialEncryption(
                clip="parts" if self.he_clip is not None else "whole",
                **self.model_dump(include=set(_PARTIAL), exclude_none=True),
            )
        given = self.model_dump(exclude={"name", "n_max", "missing_silos", "dropout_rate"}, exclude_none=True)
        if self.n_max is not None:
            given["largest_count"] = self.n_max
        return PrivateWeighting(**given)


class ServerSection(Section):
    """What the server does with the noisy mean, whatever the method: post-processing, free of charge."""

    optimizer: AnyOptimizer | None = Field(
        None, description="the server's step; default: a plain one at method.learning_rate"
    )

    denoiser: Literal["none", "laplacian", "james-stein", "soft-threshold"] | None = Field(
        None, description="default: the method's own, which is none but for dp-fed-ls"
    )
    smoothing: NonNegative | None = Field(None, description="sigma of the laplacian denoiser; default: 1")
    scope: Literal["tensor", "vector"] | None = Field(
        None, description="what is one cycle of the laplacian; default: tensor"
    )
    order: Literal["BCHW", "BCWH", "BHWC", "BWHC"] | None = Field(
        None, description="the order in which the laplacian unfolds convolution kernels; default: BCHW"
    )

    @field_validator("optimizer", mode="wrap")
    @classmethod
    def _possible(cls, given: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(given)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def options(self) -> dict[str, Any]:
        """Return the options that were given; all are the laplacian denoiser's."""
        return self.model_dump(exclude={"denoiser", "optimizer"}, exclude_none=True)


class PrivacySection(Section):
    """What is claimed, by which accountant, and when to stop."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: Literal["pld", "rdp"] = "pld"
    epsilon: Positive | None = Field(None, description="target of method.noise_multiplier = 'calibrated'")
    budget: Positive | None = Field(None, description="the run stops before the round that would exceed it")
    colluding_silos: Annotated[int, Field(ge=0)] = Field(
        0,
        description="silos that pool what they know and still have the stated noise against them (without "
        "amplification by sampling)",
    )
    insecure_seed: int | None = Field(
        None, description="repeatable noise that protects nobody: for tests; the statement says so"
    )

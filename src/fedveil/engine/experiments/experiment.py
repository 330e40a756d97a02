"""An experiment: everything that is needed to repeat a run, as one validated TOML document.

The document is checked by pydantic (an unknown key, a wrong type or an impossible value is refused with the key's
path) and written back complete, defaults included, into the run folder. Its tables are in ``sections.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import tomlkit
from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from fedveil.engine.experiments.choice import Choice, Chosen, Keys
from fedveil.engine.experiments.handed_over import ChosenMethod
from fedveil.engine.experiments.sections import (
    BudgetSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    PreprocessingSection,
    PrivacySection,
    Section,
    ServerSection,
    TrainerSection,
)
from fedveil.errors import ConfigError, meant
from fedveil.files import parse_toml
from fedveil.keys import Count
from fedveil.local.steps import LocalSgd
from fedveil.validation import validated


class Experiment(Section):
    """One training run, complete."""

    file: ClassVar[str] = "experiment.toml"

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]
    seed: int = Field(0, description="initial model, split, allocation, batches, dropout")
    rounds: Annotated[Count, Field(le=1_000_000_000)]
    evaluate_every: Count = Field(1, description="rounds between evaluations on the test set")
    data: DataSection
    model: ModelSection = ModelSection()
    local: Annotated[LocalSgd, Keys(LocalSgd)] | None = None
    trainer: TrainerSection = TrainerSection()
    method: Annotated[Choice, ChosenMethod()]
    channel: Annotated[Choice, Chosen("channels")] = Choice("channels", "additive")
    protection: Annotated[Choice, Chosen("protections")] = Choice("protections", "none")
    server: ServerSection = ServerSection()
    privacy: PrivacySection = PrivacySection()
    preprocessing: PreprocessingSection | None = Field(
        None, description="the schema refined; default: as declared"
    )
    evaluation: EvaluationSection | None = Field(None, description="private test metrics; default: none")
    budget: BudgetSection | None = Field(None, description="shares of the releases that are no round")

    @property
    def shares(self) -> BudgetSection:
        """The shares of the budget, defaults included."""
        return self.budget or BudgetSection()

    @model_validator(mode="after")
    def _coherent(self) -> Experiment:
        trains = self.method.needs("local")
        if trains and self.local is None:
            raise ValueError(f"local: {self.method.name} trains locally; give [local] with a learning_rate")
        if not trains and self.local is not None:
            raise ValueError(f"local: {self.method.name} sends one gradient per contribution; remove [local]")
        if self.server.optimizer is not None and not self.method.as_default("learning_rate"):
            raise ValueError(
                "method.learning_rate: server.optimizer has a learning rate of its own; remove one of the two"
            )
        found = isinstance(self.method.get("noise_multiplier"), str)
        if found and self.privacy.epsilon is None:
            raise ValueError("privacy.epsilon: needed where method.noise_multiplier is found for it")
        if not found and self.privacy.epsilon is not None:
            raise ValueError(
                "privacy.epsilon: needs method.noise_multiplier = 'calibrated', which finds the noise for it; with a "
                "number there remove it, or give privacy.budget, at which a run stops"
            )
        self._check_shares()
        return self

    def _check_shares(self) -> None:
        """Refuse releases beside the rounds that nothing pays for, or of people who are in no silo."""
        asked = [name for name in ("preprocessing", "evaluation") if getattr(self, name) is not None]
        asked += ["budget.votes"] if self.shares.votes else []
        if self.privacy.share < 1:
            asked.append("privacy.share")
        if not asked:
            if self.budget is not None:
                raise ValueError(
                    "budget: shares epsilon between training, [preprocessing], [evaluation] and votes; give one of "
                    "them too"
                )
            return
        if self.method.get("noise_multiplier") != "calibrated":
            raise ValueError(
                f"{asked[0]}: spends a share of privacy.epsilon, and the noise of training is found for the rest: give "
                "privacy.epsilon and method.noise_multiplier = 'calibrated'"
            )
        if self.preprocessing is not None and self.data.table is None and self.evaluation is None:
            raise ValueError("preprocessing: is of your own tables (data.table), whose schema it refines")
        if self.evaluation is not None and (self.data.table is None or self.data.table.test_file is not None):
            raise ValueError(
                "evaluation: is of records that are held out of your own tables (data.table, in Python fedveil.tables, "
                "without a test file); a test table that comes from outside belongs to nobody in a silo, and metrics "
                "on it need no noise"
            )

    def anchored(self, folder: Path) -> Experiment:
        """Return the experiment with the paths of its tables and initial model taken relative to a folder."""
        data, model = self.data, self.model
        if data.table is not None:
            data = data.model_copy(update={"table": data.table.anchored(folder)})
        if model.initial is not None:
            model = model.model_copy(update={"initial": (folder / model.initial).absolute()})
        return self.model_copy(update={"data": data, "model": model})

    def to_toml(self) -> str:
        """Return the complete document; :func:`parse` reads it back to an equal experiment."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


def dotted(document: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of a document by the paths of their keys: ``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= dotted(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return base with changes laid over it, table by table; a change to None takes the key away."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            laid = merge(inner if isinstance(inner, dict) else {}, value)
            if laid or key in merged or not value:
                merged[key] = laid
        else:
            merged[key] = value
    return merged


def parse_assignment(text: str) -> dict[str, Any]:
    """Read ``a.b=value`` (a TOML value; a bare word counts as a string) into nested tables.

    ``a.b=`` takes the key away, so that its default holds: its value is None here.
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
    """Refuse to take a key away that no experiment has: a slip would pass unseen."""
    for depth, part in enumerate(path):
        known = _known_keys(tuple(path[:depth]))
        if part not in known:
            raise ConfigError(
                f"--set {'.'.join(path)}=: no such key '{part}'; known here: {', '.join(known)}{meant(part, known)}"
            )


def parse(document: dict[str, Any], origin: str) -> Experiment:
    """Validate a document; raise :class:`ConfigError` with each offending key's path.

    Args:
        document: the nested tables.
        origin: what to call the document in an error (a file or a preset).
    """
    return validated(Experiment, document, origin)


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at a path; those of a choice are those of every member of its kind."""
    model: Any = Experiment
    for part in path:
        section = model.model_fields.get(part)
        mark = _mark_of(section)
        if mark is not None:
            return mark.known()
        inner = [section.annotation, *get_args(section.annotation)] if section else []
        model = next(
            (one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), Experiment
        )
    return sorted(model.model_fields)


def _mark_of(section: FieldInfo | None) -> Chosen | Keys | None:
    """Return what says that a field of a table is a section of a stage, or of one that it names."""
    if section is None:
        return None
    marks = (*section.metadata, *(mark for one in get_args(section.annotation) for mark in get_args(one)[1:]))
    return next((mark for mark in marks if isinstance(mark, Chosen | Keys)), None)


def asked_for(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the kind and the name of every member that a document asks for, by key; nothing is loaded.

    What is no name is left to :func:`parse`, which refuses it.
    """
    found = {}
    for path, kind in _slots(Experiment, ()):
        table: Any = document
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        name = table.get("name") if isinstance(table, dict) else None
        if isinstance(name, str):
            found[".".join((*path, "name"))] = (kind, name)
    data = document.get("data")
    if isinstance(data, dict) and isinstance(data.get("name"), str):
        found["data.name"] = ("data_sets", data["name"])
    return found


def _slots(table: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path and the kind of every choice."""
    for name, section in table.model_fields.items():
        mark = _mark_of(section)
        if isinstance(mark, Chosen):
            yield (*above, name), mark.kind
        elif isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel):
            yield from _slots(section.annotation, (*above, name))

"""An experiment: everything that is needed to repeat a run, as one validated TOML document.

The document is checked by pydantic (an unknown key, a wrong type or an impossible value is refused with the key's
path) and written back complete, defaults included, into the run folder. Its tables are in ``sections.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tomlkit
from pydantic import BaseModel, Field, ValidationError, model_validator

from fedveil.engine.sections import (
    ChannelSection,
    Count,
    DataSection,
    LocalSection,
    MethodSection,
    ModelSection,
    PrivacySection,
    ProtectionSection,
    Section,
    ServerSection,
    TrainerSection,
)
from fedveil.errors import ConfigError
from fedveil.files import parse_toml, read_text
from fedveil.methods import METHODS
from fedveil.validation import plain


class Experiment(Section):
    """One training run, complete."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]
    seed: int = Field(0, description="initial model, split, allocation, batches, dropout")
    rounds: Count
    evaluate_every: Count = Field(1, description="rounds between evaluations on the test set")
    data: DataSection
    model: ModelSection = ModelSection()
    local: LocalSection | None = None
    trainer: TrainerSection = TrainerSection()
    method: MethodSection
    channel: ChannelSection = ChannelSection()
    protection: ProtectionSection = ProtectionSection()
    server: ServerSection = ServerSection()
    privacy: PrivacySection = PrivacySection()

    @model_validator(mode="after")
    def _coherent(self) -> Experiment:
        recipe = METHODS[self.method.name]
        if recipe.uses_local and self.local is None:
            raise ValueError(f"local: {self.method.name} trains locally; give [local] with a learning_rate")
        if not recipe.uses_local and self.local is not None:
            raise ValueError(f"local: {self.method.name} sends one gradient per contribution; remove [local]")
        self._check_calibration(self.method)
        if self.method.name == "dp-fed-ls" and self.server.denoiser is not None:
            raise ValueError("server.denoiser: dp-fed-ls brings its own; use dp-fed with another one")
        if self.server.denoiser != "laplacian" and self.server.options():
            key = next(iter(self.server.options()))
            raise ValueError(f"server.{key}: {_smoothed_by(self.method.name, key)}")
        if self.server.optimizer is not None and self.method.learning_rate is not None:
            raise ValueError(
                "method.learning_rate: server.optimizer has a learning rate of its own; remove one of the two"
            )
        calibrated = isinstance(self.method.noise_multiplier, str)
        if calibrated and self.privacy.epsilon is None:
            raise ValueError("privacy.epsilon: needed where method.noise_multiplier is found for it")
        if not calibrated and self.privacy.epsilon is not None:
            raise ValueError(
                "privacy.epsilon: the target of a calibrated noise_multiplier; to stop at a budget use privacy.budget"
            )
        return self

    def _check_calibration(self, method: MethodSection) -> None:
        published = method.calibration == "as-published"
        if method.noise_multiplier == "closed-form" and not (
            published or method.name in ("dp-fed", "dp-fed-ls")
        ):
            raise ValueError(
                "method.noise_multiplier: the closed forms are those of dp-fed and dp-fed-ls, and, with "
                "method.calibration = 'as-published', Remark 1 of ParaAegis"
            )
        if published and method.noise_multiplier == "calibrated":
            raise ValueError(
                "method.calibration: as published the noise bounds no client, so no accountant can calibrate it; give "
                "noise_multiplier = 'closed-form' or a number"
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


def _smoothed_by(method: str, key: str) -> str:
    """Say which key is right where an option of the laplacian denoiser has no laplacian denoiser to go to."""
    if method != "dp-fed-ls":
        return "belongs to server.denoiser = 'laplacian'; give that too, or remove it"
    if key == "smoothing":
        return "dp-fed-ls takes sigma as method.smoothing"
    return f"dp-fed-ls smooths as published; for another {key} use dp-fed with server.denoiser = 'laplacian'"


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
                f"--set {'.'.join(path)}=: no such key '{part}'; known here: {', '.join(known)}"
            )


def parse(document: dict[str, Any], origin: str) -> Experiment:
    """Validate a document; raise :class:`ConfigError` with each offending key's path.

    Args:
        document: the nested tables.
        origin: what to call the document in an error (a file or a preset).
    """
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        tables = _tables(problem["loc"])
        path = ".".join(
            str(part)
            for part, table in zip(problem["loc"], tables, strict=True)
            if table is not None and not _is_union_tag(part)
        )
        message = plain(
            problem, _keys(next((one for one in reversed(tables) if one is not None), (Experiment,)))
        )
        lines.append(f"{path}: {message}" if path else message)
    return "; ".join(dict.fromkeys(lines))


def _is_union_tag(part: object) -> bool:
    return isinstance(part, str) and (
        part.startswith(("constrained-", "literal[")) or part in {"float", "int"}
    )


def _known_keys(path: tuple[str, ...]) -> list[str]:
    """Return the keys of the table at a path; those of all its arms where a name chooses one."""
    inside = _tables((*path, ""))[-1]
    return [] if inside is None else _keys(inside)


def _tables(path: tuple[int | str, ...]) -> list[tuple[type, ...] | None]:
    """Return what the table that each part of a path lies in may be; None for the name of an arm, which is no key."""
    tables: list[tuple[type, ...] | None] = []
    inside: tuple[type, ...] = (Experiment,)
    for part in path:
        named = tuple(one for one in inside if part and part == getattr(one, "name", None))
        tables.append(None if named else inside)
        found = [_fields(one)[part] for one in inside if part in _fields(one)]
        inside = named or tuple(one for annotation in found for one in _classes(annotation)) or inside
    return tables


def _keys(tables: tuple[type, ...]) -> list[str]:
    return sorted({str(key) for one in tables for key in _fields(one)})


def _fields(table: Any) -> dict[int | str, Any]:
    """Return the annotation of every key of a table: a section, or a stage."""
    if issubclass(table, BaseModel):
        return {key: field.annotation for key, field in table.model_fields.items()}
    return {field.name: field.type for field in fields(table) if field.init}


def _classes(annotation: Any) -> Iterator[type]:
    """Yield the sections and stages that a value with this annotation may be."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _classes(inner)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an unreadable one is a :class:`ConfigError` that names file and line."""
    return parse_toml(read_text(path, ConfigError), path, ConfigError)

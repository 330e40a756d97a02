"""The page of reproductions: nothing on it but what result files hold, and files that notice an edit."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reproduction.index import IndexItem, index_items
from reproduction.layout import lay_out
from reproduction.page import _counted, pages
from reproduction.play import reproduce
from reproduction.results import ResultError, ResultFolder, Results, Run, digest
from reproduction.rows import comparison, order_rows, order_verdict, section_rows
from reproduction.run_counts import runs_wanted
from reproduction.table import Expectation, NoiseFacts, Table, code_digest, load_table, table_names
from reproduction.verdicts import Comparison, Summary, agreement, bound_holds, order, summary
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.cli.benchmarks import reproduce_command
from fedveil.errors import ConfigError, HostError
from fedveil.privacy.published_bounds import remark_1_noise
from fedveil.run.config.experiment import parse
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from tests.executors import numbered, workers

ROOT = Path(__file__).parent.parent
TABLES = {name: load_table(name) for name in table_names()}
SETTINGS = "0" * 64
PARAMETERS = {
    ("creditcard", "default"): 5_012,
    ("mnist", "default"): 21_840,
    ("mnist", "linear"): 7_850,
    ("mnist_canonical", "default"): 7_850,
    ("mnist_canonical", "cnn"): 21_840,
    ("svhn_subset", "cnn"): 31_340,
    ("svhn_subset", "mlp"): 98_666,
    ("shakespeare", "lstm_10"): 820_450,
    ("imagenette", "resnet_small_groupnorm"): 78_378,
}
"""Parameters by data set and network, of which tests/test_models.py checks each against the built network."""


def run(cell: str, seed: int | None, value: float) -> Run:
    return Run(
        cell=cell, seed=seed, settings=SETTINGS, version="0", cpu_seconds=1.0, values={"accuracy": value}
    )


DIGITS = Table(
    name="digits",
    title="Digits",
    items=("none/digits",),
    parts=({"preset": "digits", "variants": ["uldp-naive"], "settings": ["rounds=2", "local.epochs=1"]},),
    value="accuracy",
    last=2,
    rounds=(1,),
    chosen="Nothing.",
)


@cache
def committed_pages():
    return pages(ResultFolder(ROOT / "results"), "reproduction")


def test_the_pages_and_figures_are_what_the_result_files_say():
    docs = ROOT / "docs"
    written = dict(committed_pages())
    there = [docs / "reproduction.md", *(path for path in docs.glob("reproduction/**/*") if path.is_file())]
    assert {path.relative_to(docs).as_posix(): path.read_text() for path in there} == written, (
        "run `fedveil reproduce --page docs/reproduction.md`, and remove what it does not write"
    )


def test_every_measured_table_has_one_section_and_the_index_links_to_it():
    written = dict(committed_pages())
    index = written.pop("reproduction.md")
    sections = {
        (path, name)
        for path, text in written.items()
        for name in re.findall('^<a id="([^"]*)"></a>$', text, re.MULTILINE)
    }
    assert len(sections) == len({name for _, name in sections})
    linked = {
        (path, name)
        for label, path, name in re.findall(r"\[([^\]]*)\]\(([^)#]*)#([^)]*)\)", index)
        if label == name
    }
    assert linked == sections


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_page_shows_every_cell_of_a_table_once_and_what_is_outside_in_bold(table):
    rows = section_rows(table, ResultFolder(ROOT / "results").read(table.name))
    if not rows:
        return
    lines, said = lay_out(table, rows)
    shown = Counter(text.strip("*").split(" (")[0].split("; ")[0] for line in lines for text in line.values())
    assert Counter(row[table.value].replace(" ± ", "±").split(" (")[0] for row in rows) <= shown
    outside = sum(row.get("verdict") == "outside" for row in rows)
    assert sum(text.startswith("**") for line in lines for text in line.values()) == outside
    assert f"{outside} outside" in said or not outside


def test_no_cell_stands_on_the_page_with_fewer_than_three_runs():
    folder = ResultFolder(ROOT / "results")
    shown = {
        name: [line["n"] for line in section_rows(table, folder.read(name))] for name, table in TABLES.items()
    }
    assert any(shown.values())
    assert {n for counts in shown.values() for n in counts} <= {"exact", *map(str, range(3, 100))}


def test_a_result_file_belongs_to_a_table():
    assert {path.stem for path in (ROOT / "results").glob("*")} <= {
        *TABLES,
        "benchmarks",
        "price",
        "defaults",
        "first-run",
        "tables",
        "choices",
        "classes-and-numbers",
        "outcomes",
        "survival-trees",
        "flamby",
        "ergonomics",
        "statistics",
        "statistics-speed",
        "inference",
    }


def test_a_page_without_result_files_has_no_section_and_no_measured_figure(tmp_path):
    (text,) = pages(ResultFolder(tmp_path), "reproduction").values()
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    assert headings == ["Index", "Not reproduced", "Not yet measured"]
    assert "±" not in text.split("## Index")[1]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_what_is_said_of_a_table_holds_no_measured_figure(table):
    known = {item.id for items in index_items().values() for item in items}
    assert set(table.items) <= known
    for note in table.notes:
        bare = re.sub(r"\{[^}]*\}|`[^`]*`", "", note)
        assert not re.search(r"\d\.\d|\d %|±", bare), f"{note}: measured values stand as {{cell/value}}"


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_cells_are_valid_and_published_figures_and_orders_name_them(table):
    if table.compute:
        table.computation()
        return
    for cell in table.cells(0):
        cell.check()
    cells = {cell.name for cell in table.cells(0)}
    assert len(cells) == len(table.cells(0))
    assert set(table.published) <= cells
    assert {cell for one in table.expected for pair in one.pairs for cell in pair} <= cells
    assert {item for one in table.expected for item in one.items} <= set(table.items)


LARGEST_CLIENTS = {
    (5, None): 1894,
    (10, None): 947,
    (25, None): 379,
    (50, None): 190,
    (10, 1.0): 1329,
    (10, 0.5): 1715,
}
"""Images of the largest of so many clients of Imagenette; by concentration, the mean of five seeds."""


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.regimes])
def test_noise_to_travel_ratios_are_those_of_the_runs(name):
    """Rounds, noise, contributions and parameters of a regime are its cells' own, so that rho is that of the runs."""
    table = TABLES[name]
    documents = {cell.name: cell.document for cell in table.cells(0)}
    names = documents or {one.cell for one in ResultFolder(ROOT / "results").read(name).runs}
    for regime in table.regimes:
        assert regime.cells == tuple(
            one for one in regime.cells if any(cell.startswith(one) for cell in names)
        )
    for cell, document in documents.items():
        regime = table.regime(cell)
        if regime is None:
            continue
        method, data, ours = document["method"], document["data"], regime.ours
        assert ours.rounds == document["rounds"]
        rate = method.get("client_sampling_rate", method.get("user_sampling_rate", 1.0))
        assert ours.users == pytest.approx(rate * data["n_users"])
        if (
            method["noise_multiplier"] == "closed-form"
        ):  # Remark 1: of every client, in units of 2 theta / |D_i|
            law = data.get("allocation", {})
            largest = LARGEST_CLIENTS[data["n_users"], law.get("concentration")]
            each = remark_1_noise(
                rounds=document["rounds"],
                epsilon=document["privacy"]["epsilon"],
                delta=document["privacy"]["delta"],
            )
            noises = 1 if method["name"] == "stevens" else data["n_users"]  # in the sum of a round
            assert ours.noise_multiplier == pytest.approx(math.sqrt(noises) * 2 / largest * each, rel=2e-3)
        else:
            assert ours.noise_multiplier == method["noise_multiplier"]
        assert ours.parameters == PARAMETERS[data["name"], document.get("model", {}).get("name", "default")]


UNRATED = {
    "varying-dp": "its noise falls, and the paper does not print how fast",
    "users100-zipf-uldp-sgd": "it has the published ratio",
    "z01-sigma0": "the paper has no such noise",
    "z01-sigma1": "the paper has no such noise",
    "not-private": "it has no noise",
    "james-stein": "the paper has no such row in Table 6",
    "soft-threshold": "the paper has no such row in Table 6",
}
"""Ends of the names of cells without a noise-to-travel ratio, in tables that have one, and the reason."""


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.regimes])
def test_every_cell_with_noise_has_its_ratio(name):
    """An order between two cells without a ratio would be judged as one in the published noise regime."""
    table = TABLES[name]
    noisy = [cell.name for cell in table.cells(0) if "noise_multiplier" in cell.document["method"]]
    assert [cell for cell in noisy if table.regime(cell) is None and not cell.endswith(tuple(UNRATED))] == []


def test_a_ratio_of_some_cells_of_a_line_is_not_shown_for_all():
    table = Table(name="t", title="t", items=("x",), compute="m:f", value="v", chosen="nothing")
    ratios = {"a-x": "0.9", "a-y": "", "b-x": "0.9", "b-y": ""}
    cells = [
        {
            "cell": cell,
            "n": "3",
            "v": "1",
            "noise / travel": ratio,
            "published noise / travel": ratio and "11",
        }
        for cell, ratio in ratios.items()
    ]
    lines, _ = lay_out(table, cells)
    assert lines == [
        {"v": "a", "x": "1", "y": "1"},
        {"v": "b", "x": "1", "y": "1"},
        {"v": "noise / travel", "x": "0.9 (11)", "y": ""},
    ]
    changed = [{**row, "noise / travel": "0.5"} if row["cell"] == "b-x" else row for row in cells]
    lines, _ = lay_out(table, changed)
    assert lines == [
        {"v; noise / travel": "a", "x": "1; 0.9 (11)", "y": "1; none"},
        {"v; noise / travel": "b", "x": "1; 0.5 (11)", "y": "1; none"},
    ]


def test_an_order_under_another_noise_regime_is_counted_apart():
    facts = {"parameters": 100, "rounds": 25, "noise_multiplier": 1.0, "users": 10}
    near, far = facts | {"users": 19}, facts | {"users": 21}
    found = Comparison(n=3, difference=1.0, width=0.5, order="contradicted")
    verdicts = []
    for published in (near, far):
        regime = {"cells": ["a"], "ours": facts, "published": published}
        table = Table(
            name="t", title="t", items=("x",), compute="m:f", value="v", chosen="nothing", regimes=(regime,)
        )
        verdicts.append(order_verdict(table, ("a1", "b"), found))
        assert order_verdict(table, ("b", "c"), found) == "contradicted"
    assert verdicts == ["contradicted", "contradicted in another noise regime"]
    assert NoiseFacts(**facts).ratio == pytest.approx(0.2)


def test_the_index_has_every_item_of_the_four_papers_once():
    every = [item.id for items in index_items().values() for item in items]
    ids = [name for name in every if not name.startswith("beyond/")]
    statements = [name for name in ids if re.search("theorem|proposition|corollary", name)]
    assert (len(ids) - len(statements), len(statements)) == (38, 11)
    assert len(set(every)) == len(every)


def test_an_edited_result_file_is_refused(tmp_path):
    folder = ResultFolder(tmp_path)
    folder.write(Results(table="digits", command="c").adding([run("a", 0, 0.5)]))
    path = tmp_path / "digits.json"
    assert folder.read("digits").runs[0].values["accuracy"] == 0.5
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(ResultError, match=r"digits\.json was edited"):
        folder.read("digits")


def test_results_that_cannot_be_written_are_one_error_that_names_them(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(ResultError, match=r"a file/results/digits\.json cannot be written: Not a directory"):
        ResultFolder(tmp_path / "a file" / "results").write(Results(table="digits", command="c"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"digest": 1, "runs": 2}', "{"])
def test_a_damaged_result_file_is_one_error_that_names_it(tmp_path, text):
    (tmp_path / "digits.json").write_text(text)
    with pytest.raises(ResultError, match=r"digits\.json"):
        ResultFolder(tmp_path).read("digits")


def test_a_result_file_of_another_table_is_refused(tmp_path):
    document = Results(table="other", command="c").model_dump(mode="json")
    (tmp_path / "digits.json").write_text(json.dumps(document | {"digest": digest(document)}))
    with pytest.raises(ResultError, match="'other', not of 'digits'"):
        ResultFolder(tmp_path).read("digits")


def test_an_unknown_table_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"figure-99: no such table; known are .*table-2"):
        load_table("figure-99")
    assert CliRunner().invoke(app, ["reproduce", "figure-99"]).exit_code


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    monkeypatch.setattr("reproduction.play.reproduce", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        reproduce_command(name="figure-2", results=tmp_path, runs=tmp_path, processes=1, executor=None)
    assert stopped.value.__notes__ == ["the same command goes on where it was"]


def test_a_table_is_played_and_then_goes_on_where_it_was(tmp_path):
    results, runs = ResultFolder(tmp_path / "results"), tmp_path / "runs"
    played = reproduce(DIGITS, results, runs, NullObserver(), seeds=2)
    first = next(played)
    played.close()  # interrupted
    assert (first.cell, first.seed) == ("uldp-naive", 0)
    assert [one.seed for one in reproduce(DIGITS, results, runs, NullObserver(), seeds=2)] == [1]
    assert [one.seed for one in reproduce(DIGITS, results, runs, NullObserver(), seeds=2)] == []
    kept = results.read("digits")
    assert [one.seed for one in kept.runs] == [0, 1]
    assert [number for number, _ in kept.runs[0].curve["accuracy"]] == [0, 1, 2], "all evaluated rounds"
    assert section_rows(DIGITS, kept) == [], "two runs are too few for the page"
    row = section_rows(DIGITS, kept, least=1)[0]
    assert row["n"] == "2"
    changed = DIGITS.model_copy(
        update={"parts": (DIGITS.parts[0].model_copy(update={"settings": ("rounds=1", "local.epochs=1")}),)}
    )
    again = list(reproduce(changed, results, runs, NullObserver(), seeds=1))
    assert [one.seed for one in again] == [0], "other settings are another run"
    assert len(results.read("digits").runs_of("uldp-naive")) == 2, "which takes the place of the old one"


def test_models_are_evaluated_on_training_records_where_the_table_asks_for_it(tmp_path):
    table = Table.model_validate(DIGITS.model_dump() | {"training_records": True, "value": "loss", "last": 1})
    results, runs = ResultFolder(tmp_path / "results"), tmp_path / "runs"
    cell = table.cells(0)[0]
    found = cell.settings()
    assert found != DIGITS.cells(0)[0].settings(), "what is evaluated is a setting of the run"
    left = runs / "digits" / found[:16] / cell.document["name"]
    left.mkdir(parents=True)
    (left / "experiment.toml").touch()  # of an interrupted run, which would go on with test records
    (one,) = reproduce(table, results, runs, NullObserver(), seeds=1)
    prepared = prepare(parse(cell.document, cell.name))
    (model,) = runs.rglob("model.safetensors")
    prepared.task.model.load_state_dict(load_file(model))
    train, scale = prepared.population.train, prepared.population.scale
    outputs = prepared.task.model(torch.from_numpy(scale.apply(train.features)))
    expected = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(train.targets)).item()
    assert one.values["loss"] == pytest.approx(expected, rel=1e-5)
    (tested,) = reproduce(DIGITS, ResultFolder(tmp_path / "tested"), runs, NullObserver(), seeds=1)
    assert abs(one.values["loss"] - tested.values["loss"]) > 1e-3
    for wrong in ({"attack": True, "curves": ("loss",)}, {"parts": (), "compute": "dp_fed_ls:inequalities"}):
        with pytest.raises(ValueError, match="training_records"):
            Table.model_validate(table.model_dump() | wrong)


def test_an_order_at_a_round_compares_the_curves_there():
    said = Expectation(says="more", round=5, pairs=(("a", "b"),))
    runs = [
        run(cell, seed, last).model_copy(update={"curve": {"accuracy": ((5, early + seed / 1e3), (9, last))}})
        for cell, early, last in (("a", 0.2, 0.9), ("b", 0.7, 0.1))
        for seed in range(3)
    ]
    kept = Results(table="digits", command="c").adding(runs)
    assert comparison(DIGITS, said, ("a", "b"), kept).order == "contradicted"
    assert comparison(DIGITS, said.model_copy(update={"round": 0}), ("a", "b"), kept).order == "holds"
    assert comparison(DIGITS, said.model_copy(update={"round": 7}), ("a", "b"), kept) is None
    (row,) = order_rows(DIGITS.model_copy(update={"expected": (said,)}), kept)
    assert row["value"] == "accuracy, round 5"


def test_workers_play_a_table_and_what_a_dead_one_left_goes_on(tmp_path):
    results, runs = ResultFolder(tmp_path / "results"), tmp_path / "runs"

    def play(number: int, task: Callable[..., Any], *arguments: Any) -> Any:
        found = task(*arguments)
        if number == 1:
            raise BrokenExecutor("killed after its run, before its result was kept")
        return found

    with pytest.raises(HostError, match=r"^uldp-naive: its worker ended before it did .* resumes it"):
        list(reproduce(DIGITS, results, runs, NullObserver(), seeds=2, workers=partial(numbered, play)))
    assert [one.seed for one in results.read("digits").runs] == [0], "the other run is kept"
    again = reproduce(DIGITS, results, runs, NullObserver(), seeds=2, workers=workers)
    assert [(one.seed, one.cpu_seconds) for one in again] == [(1, None)], (
        "its folder is read, not played again"
    )
    charges = [len(path.read_bytes().splitlines()) for path in runs.rglob("ledger.jsonl")]
    assert len(set(charges)) == 1
    assert len(charges) == 2


def test_workers_play_a_computation(tmp_path):
    table, results = load_table("cepam-proposition-14"), ResultFolder(tmp_path)
    kept = list(reproduce(table, results, tmp_path, NullObserver(), seeds=1, workers=workers))
    assert {one.cell: one.values for one in kept} == {
        one.cell: one.values
        for one in reproduce(table, ResultFolder(tmp_path / "here"), tmp_path, NullObserver(), seeds=1)
    }


def test_a_cheap_cell_is_played_five_times_and_one_of_minutes_as_often_as_the_table_says():
    table = DIGITS.model_copy(update={"seeds": 3})
    kept = Results(table="digits", command="c").adding([run("cheap", seed, 0.5) for seed in range(3)])
    expensive = [run("expensive", seed, 0.5).model_copy(update={"cpu_seconds": 121.0}) for seed in range(3)]
    unknown = [run("unknown", 0, 0.5).model_copy(update={"cpu_seconds": None})]
    kept = kept.adding(expensive).adding(unknown)
    assert [runs_wanted(table, kept, cell) for cell in ("cheap", "expensive", "unknown", "none")] == [
        5,
        3,
        3,
        3,
    ]
    assert runs_wanted(table.model_copy(update={"seeds": 20}), kept, "cheap") == 20
    assert runs_wanted(table, kept, "cheap", asked=2) == 2


def test_a_cheap_table_goes_on_to_five_runs_unless_it_is_told_how_many(tmp_path):
    table, results = DIGITS.model_copy(update={"seeds": 1}), ResultFolder(tmp_path / "results")
    assert len(list(reproduce(table, results, tmp_path / "runs", NullObserver(), seeds=1))) == 1
    assert [one.seed for one in reproduce(table, results, tmp_path / "runs", NullObserver())] == [1, 2, 3, 4]


def test_runs_of_unequal_lengths_are_not_compared():
    said = Expectation(says="more", pairs=(("a", "b"),))
    runs = [run(cell, seed, value) for cell, value in (("a", 0.9), ("b", 0.1)) for seed in range(3)]

    def verdict(lengths: dict[str, float]) -> str:
        longer = [
            one.model_copy(update={"values": one.values | {"rounds": lengths[one.cell]}}) for one in runs
        ]
        found = comparison(DIGITS, said, ("a", "b"), Results(table="digits", command="c").adding(longer))
        return found.order

    assert verdict({"a": 20.0, "b": 20.0}) == "holds"
    assert verdict({"a": 100.0, "b": 20.0}) == "not comparable"


def test_that_two_cells_are_alike_can_be_contradicted_and_not_shown():
    said = Expectation(says="alike", same=True, pairs=(("a", "b"), ("a", "c")))
    runs = [
        run(cell, seed, value + seed / 1e3) for cell, value in (("a", 0.9), ("b", 0.1)) for seed in range(3)
    ]
    runs += [run("c", seed, 0.9 + noise) for seed, noise in enumerate((0.01, -0.01, 0.0))]
    kept = Results(table="digits", command="c").adding(runs)
    verdicts = [comparison(DIGITS, said, pair, kept).order for pair in said.pairs]
    assert verdicts == ["contradicted", "undecided"]
    table = DIGITS.model_copy(update={"expected": (said,)})
    assert [row["order"] for row in order_rows(table, kept)] == ["`a` = `b`", "`a` = `c`"]
    with pytest.raises(ValueError, match="less and same"):
        Expectation(says="alike", same=True, less=True, pairs=(("a", "b"),))


def test_the_index_counts_what_the_paper_states_of_the_item_alone():
    pair = (("a", "b"),)
    table = DIGITS.model_copy(
        update={
            "items": ("none/one", "none/two"),
            "expected": (
                Expectation(says="ours", beyond=True, pairs=pair),
                Expectation(says="of all", pairs=pair),
                Expectation(says="of one", items=("none/one",), pairs=pair),
            ),
        }
    )
    runs = [run(cell, seed, value) for cell, value in (("a", 0.9), ("b", 0.1)) for seed in range(3)]
    kept = Results(table="digits", command="c").adding(runs)
    counted = [_counted(table, kept, IndexItem(id=name, title="t")) for name in table.items]
    assert counted == ["2 orders hold", "1 order holds"]
    assert [row["stated"] for row in order_rows(table, kept)] == [
        "of all",
        "of one",
        "beyond the paper: ours",
    ]


def test_the_model_of_a_run_is_attacked_where_the_table_asks_for_it(tmp_path):
    table = DIGITS.model_copy(update={"attack": True, "value": "attack AUC", "curves": ("loss",)})
    results = ResultFolder(tmp_path / "results")
    (found,) = reproduce(table, results, tmp_path / "runs", NullObserver(), seeds=1)
    (told,) = (tmp_path / "runs").rglob("audit.json")
    assert found.values["attack AUC"] == pytest.approx(
        json.loads(told.read_text())["inference"]["auc"], rel=1e-6
    )
    loss = dict(found.curve["loss"])[1]
    assert list(found.curve) == ["loss"]
    (row,) = section_rows(table, results.read("digits"), least=1)
    assert float(row["loss, round 1"]) == pytest.approx(loss, rel=1e-3)
    with pytest.raises(ValueError, match="name what is shown of the rounds in curves"):
        Table.model_validate(table.model_dump() | {"curves": ()})
    with pytest.raises(ValueError, match="a computation has no model"):
        Table.model_validate(
            table.model_dump() | {"parts": (), "compute": "dp_fed_ls:inequalities", "exact": True}
        )


def test_the_interval_holds_the_mean_of_other_runs_as_often_as_it_says():
    law = np.random.default_rng(3)
    inside = 0
    for _ in range(2000):
        ours = summary(list(law.normal(50, 2, size=4)))
        inside += agreement(ours, f"{law.normal(50, 2, size=3).mean():.4f}", runs=3) == "inside"
    assert 1850 < inside < 1945  # 1900 ± 4.7 standard deviations
    shifted = summary(list(law.normal(50, 2, size=40)))
    assert agreement(shifted, "59.0", runs=3) == "outside"


def test_an_exact_value_agrees_within_the_printed_digits_alone():
    ours = Summary(n=1, mean=2.8492, sd=None, exact=True)
    assert agreement(ours, "2.85", runs=1) == "inside"
    assert agreement(ours, "2.849", runs=1) == "inside"
    assert agreement(ours, "2.84", runs=1) == "outside"


def test_one_run_is_never_compared():
    alone = summary([0.5])
    assert agreement(alone, "0.5", runs=5) == "not comparable"
    assert order([0.9], [0.1]).order == "undecided"


def test_an_order_needs_an_interval_without_zero():
    assert order([3.0, 3.1, 3.2], [1.0, 1.2, 1.1]).order == "holds"
    assert order([1.0, 1.2, 1.1], [3.0, 3.1, 3.2]).order == "contradicted"
    assert order([1.0, 1.2, 1.1], [3.0, 3.1, 3.2], less=True).order == "holds"
    assert order([3.0, 0.0, 1.0], [1.0, 1.2, 1.1]).order == "undecided"


def test_a_bound_is_told_from_a_violated_and_a_vacuous_one():
    measured = summary([1.0, 1.1, 0.9])
    assert bound_holds(measured, 2.0, 5.0) == "holds"
    assert bound_holds(measured, 6.0, 5.0) == "vacuous"
    assert bound_holds(measured, 0.5, 5.0) == "violated"
    assert bound_holds(measured, 0.99, 5.0) == "holds", "within the spread of the runs"


def test_settings_of_a_computation_follow_its_code_and_not_its_prose() -> None:
    code = '"""Words."""\nimport math\n\n\ndef f(x):\n    """Words."""\n    return 2 * math.sin(x)  # why\n'
    same = "from math import pi\nimport math\ndef f(x):\n    return 2*math.sin(x)\n"
    assert code_digest(code) == code_digest(same)
    assert code_digest(code) != code_digest(code.replace("2", "3"))
    assert code_digest(code) != code_digest(code.replace("sin", "cos"))

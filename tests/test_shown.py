"""Every field of a run folder is listed as covered, tested or private, and the statement names what is not covered."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedveil.privacy.events import ComposedEvent, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.report.page import write_report
from fedveil.run.folder.shown import FEDERATED, FIELDS, FILES, METRICS, Kind, uncovered_outputs
from fedveil.run.folder.statement import state
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.side_releases import SpentBudget
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import run
from tests.federation_world import World, asked, clients, population
from tests.runs import Silent, json_lines

DOCUMENTS = Path(__file__).parents[1] / "docs"
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"method": {"name": "fedavg"}},
    "uldp-group": {"method": {"name": "uldp-group", "group_size": 2}},
    "lrsuq": {"channel": {"name": "lrsuq"}},
    "silos that vanish": {
        "protection": {
            "name": "secure-aggregation",
            "on_dropout": "recover",
            "max_dropouts": 1,
            "dropout_rate": 0.1,
        }
    },
    "clients": {"method": {"name": "cepam-gaussian"}, "data": {"n_users": 3}},
}


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def unlisted(folder: Path) -> set[str]:
    """What a run folder has that no table lists."""
    found = {path.name for path in folder.iterdir()} - set(FILES) - set(FIELDS)
    for name, fields in FIELDS.items():
        for line in lines(folder / name) if (folder / name).exists() else ():
            found |= {f"{name}: {key}" for key in line if key not in fields}
    return found


def prepared_for(case: str) -> Prepared:
    held = clients() if case == "clients" else population()
    return prepare(asked(**CASES[case], rounds=2), FixedPopulation(held))


@pytest.mark.parametrize("case", CASES)
def test_a_run_writes_what_is_listed_and_nothing_else(case: str, tmp_path: Path) -> None:
    folder = run(prepared_for(case), tmp_path, Silent(), transcript=True).folder
    write_report(folder)
    assert all((folder / name).exists() for name in FIELDS)
    assert unlisted(folder) == set()
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"shortest_stay": 3}\n')
    (folder / "extra.json").write_text("{}")
    assert unlisted(folder) == {"metrics.jsonl: shortest_stay", "extra.json"}


def test_institutions_write_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path, asked(method={"user_sampling_rate": 0.5}, rounds=2), population())
    world.play()
    world.close()
    folder = world.run_folder.path
    write_report(folder)
    assert unlisted(folder) == set()
    written = {key for row in json_lines(folder / "metrics.jsonl") for key in row} | {
        path.name for path in folder.iterdir()
    }
    private = {name for name, kind in (METRICS | FILES).items() if kind is Kind.PRIVATE}
    assert written & private == FEDERATED
    uncovered = json.loads((folder / "privacy.json").read_text())["uncovered"]
    assert set(uncovered_outputs(is_federated=True)) <= set(uncovered)
    listed = re.findall(r"[a-z_.]+", " ".join(uncovered_outputs(is_federated=True)))
    assert {name for name in private if name in listed} == FEDERATED


def test_the_statement_and_the_documents_name_every_field_that_is_private(tmp_path: Path) -> None:
    statement = run(prepared_for("clients"), tmp_path, Silent()).statement
    said = " ".join(statement.uncovered)
    page = (DOCUMENTS / "reference" / "run-folder.md").read_text()
    table = page.partition("## `metrics.jsonl`")[2].partition("\n## ")[0]
    for name, kind in METRICS.items():
        rows = [
            line for line in table.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]
        ]
        (row,) = rows or [""]
        assert ("*private*" in row) == (kind is Kind.PRIVATE), name
        assert f" {name}" in said or kind is not Kind.PRIVATE, name
    for name, kind in FILES.items():
        assert (f" {name}" in said) == (kind is Kind.PRIVATE), name
    assert set(uncovered_outputs()) <= set(statement.uncovered)


def test_private_fields_alone_follow_the_records(tmp_path: Path) -> None:
    """What is listed as covered is the same, to the byte, whatever the records are: here, other records of one user."""
    held = population()
    mine = held.train.user == 0
    other = replace(held.train, features=held.train.features * (1 - 2 * mine[:, None]).astype("float32"))
    folders = [
        run(
            prepare(asked(rounds=2), FixedPopulation(replace(held, train=records))), tmp_path / name, Silent()
        ).folder
        for name, records in (("one", held.train), ("other", other))
    ]
    for name, fields in FIELDS.items():
        shown = [
            [{key: line[key] for key in line if fields[key] is Kind.COVERED} for line in lines(folder / name)]
            for folder in folders
        ]
        for line in (*shown[0], *shown[1]):
            for told in ("time", "previous", "digest"):  # the clock knows no record
                line.pop(told, None)
            if (moved := line.get("movement")) is not None:
                assert moved.pop("model") > 0  # how far the released models are, which differ
        assert shown[0] == shown[1], name
    assert len({(folder / "experiment.toml").read_bytes() for folder in folders}) == 1


# --- one epsilon ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("fedavg", "silos that vanish")])
def test_epsilon_stands_among_the_epsilons_with_the_grid_loss(case: str, tmp_path: Path) -> None:
    """With a grid so coarse that its loss shows in every digit."""
    prepared = prepared_for(case)
    secure = prepared.experiment.privacy.model_copy(update={"insecure_seed": None})
    prepared = replace(
        prepared,
        experiment=prepared.experiment.model_copy(update={"privacy": secure}),
        guarantee=replace(prepared.guarantee, grid_loss=0.01),
    )
    ledger = run(prepared, tmp_path, Silent()).folder / "ledger.jsonl"
    spent = ComposedEvent(events=tuple(entry.event for entry in read_entries(ledger)))
    statement = state(prepared, 2, SpentBudget(charges=2, side_releases=(), event=spent))
    continuous, loss = split_grid_loss(spent)
    assert loss == pytest.approx(2 * 0.01 * prepared.task.dimension)
    assert statement.epsilon == pytest.approx(prepared.accountant.epsilon(spent, statement.delta))
    assert dict(statement.epsilons)[statement.accountant] == pytest.approx(statement.epsilon, rel=1e-9)
    assert statement.epsilon > prepared.accountant.epsilon(continuous, statement.delta) + loss


@pytest.mark.skipif(not find_spec("tenseal"), reason="partial encryption needs tenseal")
def test_a_published_figure_without_noise_is_infinite(tmp_path: Path) -> None:
    method = {"name": "paraaegis", "noise_multiplier": 0.0, "calibration": "as-published"}
    protection = {"name": "partial-encryption", "ratio": 0.5}
    experiment = asked(method=method, protection=protection, data={"n_users": 3}, rounds=1)
    statement = run(prepare(experiment, FixedPopulation(clients())), tmp_path, Silent()).statement
    assert [claim.value for claim in statement.as_published] == [None]
    assert any("infinite" in text for text in statement.sentences() if "Remark 1" in text)

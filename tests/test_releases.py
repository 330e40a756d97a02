"""A release from end to end: planned without data, charged, summed under a protection, decoded, read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.data.columns import ColumnTable, State, read_columns
from fedveil.errors import ConfigError, FedveilError, RunFolderError
from fedveil.methods.weights import Weights
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.bounds import Clip, FixedVector
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.randomness import PrivacyRandomness
from fedveil.run.audit import audit
from fedveil.run.config.release_document import ReleaseDocument, read_releases
from fedveil.run.folder.documents import read_statement
from fedveil.run.releases.release import noisy_sum
from fedveil.run.releases.statistics import PreparedRelease, prepare_release
from fedveil.run.simulation import make_releases, resume_releases
from fedveil.run.sweep import sweep
from fedveil.statistics.figures import rows
from fedveil.statistics.local_vectors import silo_sums
from fedveil.statistics.result import read_released
from fedveil.statistics.strategy import Strategy
from tests.commands import as_json, ended, output
from tests.hospitals import FILES, write_tables

SCHEMA = """
n_users = {users}
user = "who"
{silos}
[target]
kind = "survival"
time = "days"
event = "died"
[features]
age = {{ kind = "number", lower = 0, upper = 100 }}
sick = {{ kind = "category", categories = ["0", "1"] }}
ward = {{ kind = "category", categories = ["x", "y"] }}
"""
RELEASE = """
age = { show = ["count", "missing", "quantiles", "mean"], bins = 8 }
follow_up = { kind = "survival", grid = [0, 100, 200] }
table = { kind = "cross", columns = ["sick", "ward"] }
"""
DOCUMENT = """
name = "cohort"
[data.table]
schema_file = "schema.toml"
files = ["north.csv", "south.csv", "west.csv"]
[privacy]
{privacy}
[protection]
{protection}
[statistics]
{statistics}
[statistics.release]
{release}
"""
PEOPLE = 400


def written(
    folder: Path,
    *,
    people: int = PEOPLE,
    privacy: str = "epsilon = 2.0",
    protection: str = 'name = "secure-aggregation"',
    statistics: str = 'silos = "uniform"',
    release: str = RELEASE,
    silos: str = 'silos = ["north", "south", "west"]',
) -> Path:
    """Write a request and its schema, and no table; return the request's path."""
    (folder / "schema.toml").write_text(SCHEMA.format(users=people, silos=silos))
    text = DOCUMENT.format(privacy=privacy, protection=protection, statistics=statistics, release=release)
    (folder / "cohort.toml").write_text(text)
    return folder / "cohort.toml"


def tables(folder: Path, *, people: int = PEOPLE, without: int | None = None, odd: bool = True) -> None:
    """Write three hospitals' tables; every third person is in all of them."""
    rng = np.random.default_rng(0)
    lines: dict[str, list[str]] = {name: [] for name in FILES}
    for who in range(people):
        cells = (
            f"{rng.integers(0, 101)},{rng.integers(0, 2)},{'xy'[rng.integers(0, 2)]},{rng.integers(1, 300)},1"
        )
        if odd and who % 40 == 0:
            cells = "ninety,7,?,never,"
        for place, name in enumerate(lines):
            if who != without and (who % 3 == 0 or who % 3 == place):
                lines[name].append(f"p{who},{cells}")
    write_tables(folder, "who,age,sick,ward,days,died", lines)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a release."""
    folder = tmp_path_factory.mktemp("cohort")
    tables(folder)
    document = read_releases(written(folder), ReleaseDocument)
    return make_releases(prepare_release(document), folder / "runs")


def refusal(folder: Path, **changes: Any) -> str:
    """Return why a request is refused; no table exists, so nothing else can be wrong."""
    with pytest.raises(FedveilError) as caught:
        prepare_release(read_releases(written(folder, **changes), ReleaseDocument))
    return str(caught.value)


# --- what is refused, and before what -----------------------------------------------------------------------


def test_under_torchrun_no_rank_releases_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the training of one run; each would charge and make a release of its own."""
    tables(tmp_path)
    document = read_releases(written(tmp_path), ReleaseDocument)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun started several processes"):
        make_releases(prepare_release(document), tmp_path / "runs")
    with pytest.raises(ConfigError, match="a sweep: torchrun started several processes"):
        list(sweep([], tmp_path / "sweep"))
    with pytest.raises(ConfigError, match="an audit: torchrun started several processes"):
        audit(tmp_path / "run")
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"release": 'age = { show = ["min"] }'}, "one person alone"),
        ({"release": 'age = { show = ["max"] }'}, "quantiles = [0.01, 0.99]"),
        ({"release": 'age = { show = ["distinct"] }'}, "declare categories"),
        ({"release": 'age = { show = ["total"] }'}, "no figure 'total'"),
        ({"release": 'age = { show = ["quantile"] }'}, "did you mean 'quantiles'?"),
        ({"release": 'age = { show = ["histogram"], bins = "auto" }'}, "bins that depend on the records"),
        ({"release": 'age = { show = ["histogram"], edges = [0, 5, 5] }'}, "edges: at least two numbers"),
        ({"release": 'age = { show = ["histogram"], bins = 4, edges = [0, 5] }'}, "not both"),
        # Charged, and then no person counted or the release could not be read: the range or a share overflowed.
        ({"release": "days = { lower = -1e308, upper = 1e308 }"}, "numbers of at most 3.4e38"),
        ({"release": 'days = { show = ["variance"], lower = -1e200, upper = 1e200 }'}, "at most 3.4e38"),
        ({"release": "days = { lower = 0, upper = 5e-324 }"}, "the same number in float32"),
        ({"release": 'days = { show = ["histogram"], edges = [-1.7e308, 0, 1.7e308] }'}, "at most 3.4e38"),
        ({"release": 'f = { kind = "survival", grid = [0, 5e-324, 1e-323] }'}, "differ in float32"),
        ({"release": "age = { weight = 1e308 }\nward = { weight = 1e308 }"}, "weight: must be <= 1e+09"),
        ({"release": "age = { weight = 5e-324 }"}, "weight: must be >= 1e-09"),
        ({"release": 'days = { show = ["mean"] }'}, "no declared bounds"),
        ({"release": 'sick = { show = ["mean"] }'}, "'mean' is of numbers"),
        ({"release": 'age = { show = ["categories"] }'}, "ask for its histogram"),
        ({"release": 'weight = { show = ["count"] }'}, "declares no column 'weight'"),
        ({"release": 'age = { show = ["count"], color = 1 }'}, "no such key"),
        ({"release": 'ward = { show = ["categories"], discover = true }'}, "declare the code list"),
        ({"release": 'f = { kind = "survival", grid = [0, 200, 100] }'}, "grid: at least two numbers"),
        ({"release": 'f = { kind = "cross", columns = ["sick", "sick"] }'}, "named twice"),
        ({"release": 'f = { kind = "cross", columns = ["sick", "age"] }'}, "'age' is a number"),
        ({"release": 'f = { kind = "joint", columns = ["sick", "age"] }'}, "must be one of"),
        ({"statistics": 'silos = "uniform"\nby = ["ward", "ward"]'}, "named twice; name it once"),
        ({"statistics": 'silos = "uniform"\nby = ["age"]'}, "groups are declared categories"),
        ({"statistics": 'silos = "uniform"\nby = ["ward", "sick", "silo"]'}, "at most 2"),
        ({"statistics": 'silos = "uniform"\ncombine = "ever"'}, "OR over silos"),
        ({"statistics": 'silos = "uniform"\ncombine = "any"'}, "the categories 0 and 1"),
        ({"statistics": 'silos = "uniform"\ncombine = "first"'}, "name it"),
        ({"statistics": 'silos = "uniform"\norder = "age"'}, "belongs to combine"),
        ({"statistics": 'silos = "records"'}, "private-weighting"),
        ({"statistics": 'silos = "equal"', "protection": 'name = "none"'}, "private-weighting"),
        ({"protection": 'name = "private-weighting"'}, "private weighting"),
        ({"protection": 'name = "partial-encryption"'}, "is for models"),
        ({"privacy": "epsilon = 0.01"}, "epsilon is too small"),
        ({"privacy": "delta = 1e-5"}, "privacy.epsilon: needed"),
        ({"privacy": "epsilon = 1.0\nbudget = 2.0"}, "belongs to training"),
        ({"silos": 'silo = "ward2"'}, "declare silos"),
        (
            {"people": 300, "release": 'm = { kind = "correlation", columns = ["age", "days"] }'},
            "no declared bounds",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_would_do(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(tmp_path, **changes)


def test_a_budget_that_is_too_small_names_the_block_and_an_epsilon_that_would_do(tmp_path: Path) -> None:
    told = refusal(tmp_path, privacy="epsilon = 0.1", release='age = { show = ["histogram"], bins = 20 }')
    assert "statistics.release.age" in told
    needed = float(told.split("epsilon = ")[1].split(",")[0])
    prepare_release(
        read_releases(
            written(
                tmp_path,
                privacy=f"epsilon = {needed * 1.05}",
                release='age = { show = ["histogram"], bins = 20 }',
            ),
            ReleaseDocument,
        )
    )


def test_the_plan_and_the_refusals_read_no_table(tmp_path: Path) -> None:
    """No table exists: whatever is decided before a release is decided without one, and so for neighbours alike."""
    plan = as_json("stats", str(written(tmp_path)), "--plan")
    assert plan["epsilon"] == pytest.approx(2.0, abs=1e-3)
    assert [one["release"] for one in plan["blocks"]] == ["age", "age", "follow_up", "follow_up", "table"]
    assert not (tmp_path / "runs").exists()


def test_a_plan_promises_nothing_of_noise_from_a_known_seed(tmp_path: Path) -> None:
    request = str(written(tmp_path, privacy="epsilon = 2.0\ninsecure_seed = 1"))
    assert as_json("stats", request, "--plan")["epsilon"] is None
    assert "epsilon none at delta 1e-05" in output("stats", request, "--plan")


# --- what is released ---------------------------------------------------------------------------------------


def test_a_release_is_charged_once_for_what_it_states(released: Path) -> None:
    (entry,) = read_entries(released / "ledger.jsonl")
    statement = json.loads((released / "privacy.json").read_text())
    noise, loss = split_grid_loss(entry.event)
    assert isinstance(noise, GaussianEvent)
    assert 0 < loss < 1e-9
    assert statement["epsilon"] == pytest.approx(2.0, abs=1e-3)
    assert statement["released"] == "statistics"
    assert {line["role"]: line["epsilon"] for line in statement["trust"]}["server"] == statement["epsilon"]
    assert "released statistics" in statement["sentences"][0]


def test_what_is_stored_reads_back_and_a_damaged_file_does_not(released: Path, tmp_path: Path) -> None:
    before = read_released(released)
    assert before.to_json() == json.loads((released / "statistics.json").read_text())
    for change in (
        {"releases": [{"vector": [0.0], "noise_std": 1.0}]},
        {"releases": []},
        {"layout": []},
        {"request": {}},
        {"schema_version": 9},
    ):
        broken = before.to_json() | change
        (tmp_path / "statistics.json").write_text(json.dumps(broken))
        with pytest.raises(RunFolderError):
            read_released(tmp_path)


def test_a_release_killed_after_its_charge_is_charged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path, people=60)
    statistics = 'silos = "uniform"\nmax_standard_error = 1e6'
    document = read_releases(written(tmp_path, people=60, statistics=statistics), ReleaseDocument)

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedveil.run.simulation.noisy_sum", killed)
        with pytest.raises(KeyboardInterrupt):
            make_releases(prepare_release(document), tmp_path / "runs")
    folder = tmp_path / "runs" / "cohort"
    kept, twice = set(), spent_by_two(folder)
    for _ in range(2):  # what is made is stated again and released no second time
        statement = as_json("resume", folder)["statement"]
        kept.add((folder / "statistics.json").read_bytes())
        assert statement["epsilon"] == pytest.approx(twice, rel=1e-6)
        assert "charged 2 times" in " ".join(statement["mechanisms"])
    assert len(kept) == 1
    assert [entry.attempt for entry in read_entries(folder / "ledger.jsonl")] == [0, 1]


@pytest.mark.parametrize(
    ("file", "was", "now", "told"),
    [
        ("statistics.toml", "epsilon = 2.0", "epsilon = 1.9", "charged for other releases"),
        ("statistics.toml", "delta = 1e-05", "delta = 0.0001", "charged for other releases"),
        ("statistics.toml", 'name = "cohort"', 'name = "court"', "charged for other releases"),
        ("statistics.toml", "bins = 8", "bins = 4", "is a release of other figures"),
        (
            "../../schema.toml",
            "upper = 100",
            "upper = 120",
            "is a release of other figures, or of other tables",
        ),
    ],
)
def test_what_was_released_is_not_stated_again_for_another_document(
    released: Path, file: str, was: str, now: str, told: str
) -> None:
    path, before = (released / file).resolve(), (released / "privacy.json").read_bytes()
    content = path.read_text()
    assert was in content
    path.write_text(content.replace(was, now))
    try:
        with pytest.raises(RunFolderError, match=told):
            resume_releases(
                prepare_release(read_releases(released / "statistics.toml", ReleaseDocument)), released
            )
    finally:
        path.write_text(content)
    assert (released / "privacy.json").read_bytes() == before
    resume_releases(prepare_release(read_releases(released / "statistics.toml", ReleaseDocument)), released)
    assert (released / "privacy.json").read_bytes() == before


def test_charges_that_another_machine_rounded_otherwise_are_told_from_another_document(
    released: Path,
) -> None:
    prepared = prepare_release(read_releases(released / "statistics.toml", ReleaseDocument))
    (release,) = prepared.series.releases
    event = release.guarantee.event
    assert isinstance(event, GaussianEvent)
    for factor, told in ((1 + 1e-12, "whose last digits differ"), (1.001, "charged for other releases")):
        another = replace(event, noise_multiplier=event.noise_multiplier * factor)
        release.__dict__["guarantee"] = replace(release.guarantee, event=another)
        with pytest.raises(RunFolderError, match=told):
            resume_releases(prepared, released)


def spent_by_two(folder: Path) -> float:
    """Two releases of mu are one of sqrt(2) mu."""
    (entry,) = read_entries(folder / "ledger.jsonl")
    event = split_grid_loss(entry.event)[0]
    assert isinstance(event, GaussianEvent)
    return gaussian_epsilon(2**0.5 / event.noise_multiplier, 1e-5)


def test_rows_are_near_the_exact_figures(released: Path) -> None:
    """Within 6 standard deviations of their noise: decoding finds what was sent, cell by cell."""
    found = read_released(released)
    document = read_releases(released.parent.parent / "cohort.toml", ReleaseDocument)
    prepared = prepare_release(document)
    assert document.data.table is not None
    table = read_columns(prepared.declared.schema, document.data.table.files, prepared.step.columns)
    pairs = table.pairs()
    shown = {(row.figure, row.cell): row.interval for row in rows(found)}
    total = shown["person-silo pairs", ""]
    assert total is not None
    assert total.low_here is not None
    sd = (total.estimate - total.low_here) / 1.96
    assert abs(total.estimate - len(pairs)) < 6 * sd
    ages = table.numbers("age")
    mean = shown["mean", ""]
    assert mean is not None
    assert mean.low_here is not None
    exact = float(ages.values[ages.state == State.VALID].mean())
    assert abs(mean.estimate - exact) < 6 * (mean.estimate - mean.low_here) / 1.96


def test_bytes_that_are_no_text_are_counted_in_their_own_cell(tmp_path: Path) -> None:
    """One byte of one person's cell, and the release is made: the person is counted as undeclared."""
    written(tmp_path)
    tables(tmp_path, odd=False)
    path = tmp_path / "north.csv"
    before = table_of(read_releases(tmp_path / "cohort.toml", ReleaseDocument)).places("ward")
    content = path.read_bytes()
    place = content.index(b",x,")
    path.write_bytes(content[: place + 1] + b"\xff" + content[place + 2 :])
    after = table_of(read_releases(tmp_path / "cohort.toml", ReleaseDocument)).places("ward")
    assert (before.state != after.state).sum() == 1
    assert after.state[before.state != after.state].tolist() == [State.INVALID]


def test_one_cell_of_one_person_changes_no_decision(tmp_path: Path) -> None:
    """Neighbours: the same method, lengths and silos, with and without a person whose cells nobody declared."""
    written(tmp_path)
    found = []
    for without in (None, 0):
        tables(tmp_path, without=without)
        document = read_releases(tmp_path / "cohort.toml", ReleaseDocument)
        prepared = prepare_release(document)
        found.append(
            (prepared.release(()).method, prepared.declared, sum_of(prepared, table_of(document)).shape)
        )
    assert found[0] == found[1]


def sum_of(prepared: PreparedRelease, table: ColumnTable) -> np.ndarray:
    """Return the noisy sum of a release."""
    return noisy_sum(prepared.release(()), table, PrivacyRandomness.system()).vector


def table_of(document: ReleaseDocument) -> Any:
    """Return the columns that a document's release reads."""
    prepared = prepare_release(document)
    assert document.data.table is not None
    return read_columns(prepared.declared.schema, document.data.table.files, prepared.step.columns)


def test_groups_by_silo_and_category_add_up_to_all(tmp_path: Path) -> None:
    """Every group has its row, groups of one block sum to its total, and no group costs noise of its own."""
    tables(tmp_path)
    release = 'age = { show = ["count", "mean"] }'
    statistics = 'silos = "uniform"\nby = ["silo", "ward"]\nfloor = 0\nmax_standard_error = 1e6'
    document = read_releases(written(tmp_path, release=release, statistics=statistics), ReleaseDocument)
    prepared = prepare_release(document)
    ungrouped = prepare_release(read_releases(written(tmp_path, release=release), ReleaseDocument))
    assert prepared.release(()).method.channel.nominal() == pytest.approx(
        ungrouped.release(()).method.channel.nominal(), rel=1e-3
    )
    cells = read_released(make_releases(prepared, tmp_path / "runs"))
    counted = {row.group: row.interval for row in rows(cells) if row.figure == cells.counted_unit}
    assert len(counted) == 1 + 3 * 3
    total = counted.pop("all")
    assert total is not None
    values = cells.cells["age", "cells"].values
    assert total.estimate == pytest.approx(float(values.sum()))
    assert all(one is None or one.estimate < total.estimate for one in counted.values())


@pytest.mark.parametrize("protection", ["none", "secure-aggregation"])
def test_the_noise_is_that_of_one_central_gaussian(tmp_path: Path, protection: str) -> None:
    """Its sum of squares over all numbers and releases: within 4.9 sd of chi-square, and not 10 % less noise."""
    tables(tmp_path, people=60)
    release = (
        'table = { kind = "cross", columns = ["sick", "ward"] }\nage = { show = ["histogram"], bins = 60 }'
    )
    statistics = 'silos = "uniform"\nmax_standard_error = 1e6'
    asked = written(
        tmp_path, people=60, protection=f'name = "{protection}"', release=release, statistics=statistics
    )
    document = read_releases(asked, ReleaseDocument)
    prepared, table = prepare_release(document), table_of(document)
    weights = Weights.UNIFORM.for_groups(table.pairs(), 3, 60)
    exact = silo_sums(prepared.step, table, weights, prepared.release(()).bound).sum(axis=0)  # type: ignore[arg-type]
    errors = np.concatenate([sum_of(prepared, table) - exact for _ in range(60)])
    ratio = float((errors**2).mean()) / prepared.release(()).std() ** 2
    tolerance = 4.9 * (2 / len(errors)) ** 0.5
    assert ratio == pytest.approx(1.0, abs=tolerance)
    assert tolerance < 0.19


def test_people_are_counted_under_private_weighting(tmp_path: Path) -> None:
    """Somebody in three silos counts 1; the server learns the sum alone, and counts stay where they are."""
    tables(tmp_path, people=6, odd=False)
    asked = written(
        tmp_path,
        people=6,
        privacy="epsilon = 60.0\ndelta = 1e-3",
        protection='name = "private-weighting"\nkey_bits = 2048\nn_max = 6',
        statistics='silos = "records"\nmax_standard_error = 1e6\nfloor = 0',
        release='sick = { show = ["count", "categories"] }',
    )
    document = read_releases(asked, ReleaseDocument)
    folder = make_releases(prepare_release(document), tmp_path / "runs")
    released, statement = read_released(folder), read_statement(folder / "privacy.json")
    assert released.counted_unit == "people"
    total = next(row.interval for row in rows(released) if row.figure == "people")
    assert total is not None
    assert total.estimate == pytest.approx(6, abs=6 * released.noisy_sum.std * 2)
    assert statement.line_for(Role.SERVER) == statement.epsilon
    assert any("which users have a record" in text for text in statement.uncovered)
    assert (
        sum("by at most 1.00001 (l2" in text for text in statement.mechanisms) == 2
    )  # the grid's share, rounded up
    assert not any("by at most 1 (l2" in text for text in statement.mechanisms)


# --- reading it again ---------------------------------------------------------------------------------------


def test_show_derives_what_nobody_asked_for(released: Path) -> None:
    shown = as_json("show", str(released), "--cross", "sick", "--quantile", "age=.1,.9")
    output("show", released, "--csv", released.parent / "rows.csv")
    assert len((released.parent / "rows.csv").read_text().splitlines()) == 1 + len(
        rows(read_released(released))
    )
    assert shown["counted"] == "person-silo pairs"
    assert [row["cell"] for row in shown["rows"]] == ["0", "1", "missing or undeclared", "0.1", "0.9"]
    whole = {row.cell: row.interval for row in rows(read_released(released)) if row.release == "table"}
    parts = [one for ward in ("x", "y") if (one := whole[f"0, {ward}"])]
    assert len(parts) == 2
    # They differ by the noise of one cell, "0, missing or undeclared": six standard deviations, 2e-9.
    noise = (parts[0].high_here - parts[0].low_here) / 2 / 1.96
    assert shown["rows"][0]["estimate"] == pytest.approx(sum(one.estimate for one in parts), abs=6 * noise)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cross", "sick,age"], "no release has these together"),
        (["--quantile", "days=.5"], "no release has bins"),
        (["--quantile", "age=1.5"], "between 0 and 1"),
        (["--quantile", "age"], "expected COLUMN="),
    ],
)
def test_show_refuses_what_was_not_released(released: Path, arguments: list[str], words: str) -> None:
    assert words in ended("show", released, *arguments).mistake


def test_the_same_cells_are_not_paid_for_twice(released: Path) -> None:
    asked = [str(released.parent.parent / "cohort.toml"), "--runs", str(released.parent)]
    assert "has every requested cell" in ended("stats", *asked).mistake
    again = as_json("stats", *asked, "--repeat")
    assert Path(again["folder"]).name == "cohort-2"
    page = Path(again["report"]).read_text(encoding="utf-8")
    assert "Kaplan-Meier: follow_up" in page
    assert "too few people for this budget" in page
    first = read_released(released).noisy_sum.vector
    assert not np.array_equal(first, read_released(Path(again["folder"])).noisy_sum.vector)


def test_truncation_shifts_a_million_peoples_counts_by_less_than_a_tenth_of_one(tmp_path: Path) -> None:
    """The messages' grid at epsilon .5 against the grid of a trained update's clip, which loses people of a CDF."""
    strategy, whole = Strategy(kind="prefix", ordered=64), torch.ones(64, dtype=torch.float64)
    vectors = torch.from_numpy(strategy.matrix.T.copy())  # row k: a person in bin k

    def shift(bound: FixedVector) -> float:
        rows = vectors.clone()
        kept = bound.quantize_(rows, bound.norms(rows), whole).numpy() * bound.grid
        lost = strategy.decoder @ (strategy.matrix - kept.T)
        return 1e6 * float(np.abs(np.cumsum(lost, axis=0)).max())

    document = read_releases(
        written(tmp_path, people=10**6, privacy="epsilon = 0.5\ndelta = 1e-7"), ReleaseDocument
    )
    method = prepare_release(document).release(()).method
    assert isinstance(method.bound, FixedVector)
    assert shift(method.bound) < 0.1
    assert shift(FixedVector(norm=1.0, step=Clip(norm=1.0).grid)) > 1.0

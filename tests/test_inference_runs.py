"""A regression from end to end: planned without data, charged release by release, stored, shown again."""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.errors import FedveilError, RunFolderError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.events import GaussianEvent, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.run.config.release_document import InferenceDocument, read_releases
from fedveil.run.folder.documents import read_statement
from fedveil.run.releases.inference import prepare_inference
from fedveil.run.simulation import make_releases
from fedveil.statistics.inference.result import read_fitted
from tests.commands import as_json, ended, output
from tests.hospitals import write_tables

SCHEMA = """
n_users = {users}
user = "who"
{silos}
[target]
kind = "survival"
time = "days"
event = "died"
[features]
age = {{ kind = "number", lower = 20, upper = 100 }}
stay = {{ kind = "number", lower = 0, upper = 60 }}
ward = {{ kind = "category", categories = ["x", "y"] }}
sick = {{ kind = "category", categories = ["0", "1"] }}
only = {{ kind = "category", categories = ["z"] }}
"""
DOCUMENT = """
name = "odds"
[data.table]
schema_file = "schema.toml"
files = ["north.csv", "south.csv"]
[privacy]
{privacy}
[protection]
name = "{protection}"
[inference]
silos = "uniform"
{inference}
"""
LOGISTIC = 'family = "logistic"\ntarget = "sick"\nfeatures = ["age", "ward"]'
PEOPLE = 1500


def written(
    folder: Path,
    *,
    people: int = PEOPLE,
    privacy: str = "epsilon = 8.0",
    protection: str = "secure-aggregation",
    inference: str = LOGISTIC,
    silos: str = 'silos = ["north", "south"]',
) -> Path:
    """Write a request and its schema, and no table; return the request's path."""
    (folder / "schema.toml").write_text(SCHEMA.format(users=people, silos=silos))
    text = DOCUMENT.format(privacy=privacy, protection=protection, inference=inference)
    (folder / "odds.toml").write_text(text)
    return folder / "odds.toml"


def tables(folder: Path, *, people: int = PEOPLE, without: int | None = None, odd: bool = True) -> None:
    """Write two hospitals' tables: odds rise by e^0.05 a year, and are doubled in ward y; some cells are odd."""
    rng = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"north": [], "south": []}
    for who in range(people):
        age, ward, place = rng.normal(60, 13), rng.integers(2), rng.integers(2)
        sick = rng.random() < 1 / (1 + np.exp(-(0.05 * (age - 60) + np.log(2) * (ward - 0.5))))
        cells = f"{age:.1f},{rng.integers(1, 40)},{'xy'[ward]},{int(sick)},z,{rng.integers(1, 400)},{rng.integers(2)}"
        if odd and who % 50 == 0:
            cells = "old,,?,7,,never,"
        if who != without:
            lines[("north", "south")[place]].append(f"p{who},{cells}")
    write_tables(folder, "who,age,stay,ward,sick,only,days,died", lines)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a regression."""
    folder = tmp_path_factory.mktemp("odds")
    tables(folder)
    return make_releases(
        prepare_inference(read_releases(written(folder), InferenceDocument)), folder / "runs"
    )


# --- what is refused, and before what -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inference": 'family = "cox"'}, "must be one of"),
        ({"inference": LOGISTIC + "\ncolor = 1"}, "inference.color: no such key"),
        ({"inference": 'family = "logistic"'}, "survival time; name a column"),
        ({"inference": 'family = "logistic"\ntarget = "age"'}, "two categories"),
        ({"inference": 'family = "logistic"\ntarget = "only"'}, "two categories"),
        ({"inference": 'family = "linear"\ntarget = "age"'}, "inference.cut: is required"),
        ({"inference": 'family = "linear"\ncut = 5\ntarget = "ward"'}, "a number is needed"),
        ({"inference": 'family = "poisson"\ncap = 3\ntarget = "ward"'}, "a number is needed"),
        ({"inference": 'family = "poisson"\ntarget = "stay"\ncap = 0'}, "inference.cap"),
        ({"inference": 'family = "survival"\ngrid = [0, 5, 5]'}, "each above the one before"),
        ({"inference": 'family = "survival"\ngrid = [0, 5]\nhazard = 1.5'}, "inference.hazard"),
        ({"inference": LOGISTIC.replace('"ward"', '"ward", "ward"')}, "named twice"),
        ({"inference": LOGISTIC.replace('"ward"', '"sick"')}, "is what is explained"),
        ({"inference": LOGISTIC.replace('"ward"', '"height"')}, "no feature of the schema"),
        ({"inference": LOGISTIC.replace('"ward"', '"only"')}, "one category"),
        ({"inference": LOGISTIC + '\nreference = { ward = "q" }'}, "not declared"),
        ({"inference": LOGISTIC + '\nreference = { age = "q" }'}, "has no categories"),
        ({"inference": LOGISTIC + '\nreference = { stay = "q" }'}, "no such feature is requested"),
        ({"inference": LOGISTIC + "\nscale = { ward = { centre = 0, scale = 1 } }"}, "have no scale"),
        ({"inference": LOGISTIC + "\nscale = { age = { centre = 0, scale = 0 } }"}, "scale.age.scale"),
        (
            {"inference": LOGISTIC + "\nscale = { age = { centre = 0, scale = 1e-300 } }"},
            "a million times the scale",
        ),
        (
            {"inference": LOGISTIC + "\nscale = { age = { centre = -1e300, scale = 1 } }"},
            "a million times the scale",
        ),
        (
            {"inference": LOGISTIC + "\nscale = { age = { centre = 0, scale = 1e300 } }"},
            "or less than a millionth",
        ),
        ({"inference": 'family = "linear"\ntarget = "age"\ncut = 1e-320'}, "inference.cut: must be >= 1e-12"),
        (
            {"inference": 'family = "survival"\ngrid = [0, 5]\nrate = 1e308'},
            "inference.rate: must be <= 1e+300",
        ),
        ({"inference": LOGISTIC + "\nbound = 0.5"}, "inference.bound"),
        ({"inference": LOGISTIC + '\ncombine = "first"'}, "belongs to combine"),
        ({"inference": LOGISTIC + '\ncombine = "any"'}, "inference.combine"),
        ({"privacy": "epsilon = 0.05"}, "too few people for this budget"),
        ({"privacy": "delta = 1e-5"}, "privacy.epsilon: needed"),
        ({"silos": 'silo = "place"'}, "declare silos"),
        ({"protection": "partial-encryption"}, "is for models"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """No table exists, so nothing else can be wrong."""
    with pytest.raises(FedveilError) as caught:
        prepare_inference(read_releases(written(tmp_path, **changes), InferenceDocument))
    assert words in str(caught.value)


def test_people_are_weighed_alike_in_all_silos_unless_the_counts_are_hidden(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace('silos = "uniform"\n', ""))
    assert read_releases(path, InferenceDocument).inference.silos == "uniform"
    hidden = 'silos = "equal"', "secure-aggregation", "private-weighting"
    path.write_text(path.read_text().replace(*hidden[1:]))
    assert read_releases(path, InferenceDocument).inference.silos == "records"


def test_people_cannot_be_weighed_in_the_open(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace('silos = "uniform"', 'silos = "records"'))
    with pytest.raises(FedveilError, match=r"inference\.silos.*private-weighting"):
        prepare_inference(read_releases(path, InferenceDocument))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_budget_that_is_too_small_names_one_that_would_do(share: float, tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="too few people") as caught:
        prepare_inference(
            read_releases(written(tmp_path, privacy=f"epsilon = 0.05\nshare = {share}"), InferenceDocument)
        )
    needed = float(str(caught.value).split("epsilon = ")[1].split(";")[0])
    enough = f"epsilon = {1.1 * needed}\nshare = {share}"
    prepare_inference(read_releases(written(tmp_path, privacy=enough), InferenceDocument))


def test_the_plan_reads_no_table_and_costs_what_is_declared(tmp_path: Path) -> None:
    plan = as_json("infer", str(written(tmp_path)), "--plan")
    assert plan["epsilon"] == pytest.approx(8.0, abs=1e-3)
    assert sum(one["share"] for one in plan["releases"]) == pytest.approx(1.0)
    assert [one["coefficient"] for one in plan["effects"]] == ["intercept", "age", "ward = y"]
    assert not (tmp_path / "runs").exists()


def test_the_plan_promises_nothing_of_noise_from_a_known_seed(tmp_path: Path) -> None:
    request = str(written(tmp_path, privacy="epsilon = 8.0\ninsecure_seed = 1"))
    assert as_json("infer", request, "--plan")["epsilon"] is None
    assert "epsilon none at delta 1e-05" in output("infer", request, "--plan")


def test_one_person_changes_no_decision_before_the_releases(tmp_path: Path) -> None:
    """Neighbours: the same methods, charges and lengths with and without somebody, whose cells are odd ones."""
    written(tmp_path)
    found = []
    for without in (None, 0):
        tables(tmp_path, people=80, without=without)
        document = read_releases(tmp_path / "odds.toml", InferenceDocument)
        folder = make_releases(prepare_inference(document), tmp_path / "runs")
        charges, fitted = [one.event for one in read_entries(folder / "ledger.jsonl")], read_fitted(folder)
        found.append((charges, [len(one.vector) for one in fitted.releases], fitted.names))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "fatal", ["fedveil.privacy.ledger.Ledger.charge", "fedveil.run.simulation.noisy_sum"]
)
def test_a_killed_regression_goes_on_under_its_charges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: str
) -> None:
    """Killed ahead of the second charge and behind it: the same bytes as without a kill, and three charges."""
    tables(tmp_path, people=80)
    document = read_releases(written(tmp_path, privacy="epsilon = 8.0\ninsecure_seed = 1"), InferenceDocument)
    prepared = prepare_inference(document)
    whole = make_releases(prepared, tmp_path / "whole")
    work, calls = pkgutil.resolve_name(fatal), []

    def mortal(*given: Any, **named: Any) -> Any:
        calls.append(fatal)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return work(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(fatal, mortal)
        with pytest.raises(KeyboardInterrupt):
            make_releases(prepared, tmp_path / "runs")
    folder = tmp_path / "runs" / "odds"
    with pytest.raises(RunFolderError, match="1 of 3 releases are made"):
        read_fitted(folder)
    assert as_json("resume", str(folder))["folder"] == str(folder)
    assert (folder / "inference.json").read_bytes() == (whole / "inference.json").read_bytes()
    assert [entry.round for entry in read_entries(folder / "ledger.jsonl")] == [1, 2, 3]


# --- what is released ---------------------------------------------------------------------------------------


def test_three_charges_compose_to_the_declared_epsilon(made: Path) -> None:
    entries = read_entries(made / "ledger.jsonl")
    assert [entry.round for entry in entries] == [1, 2, 3]
    strengths = []
    for entry in entries:
        noise = split_grid_loss(entry.event)[0]
        assert isinstance(noise, GaussianEvent)
        strengths.append(noise.noise_multiplier**-2)
    assert gaussian_epsilon(sum(strengths) ** 0.5, 1e-5) == pytest.approx(8.0, abs=1e-3)
    assert read_statement(made / "privacy.json").epsilon == pytest.approx(8.0, abs=1e-3)
    assert len({line.epsilon for line in read_statement(made / "privacy.json").trust}) >= 1
    assert sum("release odds/" in text for text in read_statement(made / "privacy.json").mechanisms) == 3


def test_coefficients_are_near_the_truth_in_units_of_their_columns(made: Path) -> None:
    found = {one.name: one for one in read_fitted(made).effects}
    for name, truth in (("age", 0.05), ("ward = y", float(np.log(2)))):
        one = found[name]
        assert abs(one.estimate - truth) < 5 * (one.high - one.low) / 3.92
        assert one.ratio is not None
        assert one.ratio[0] == pytest.approx(np.exp(one.estimate))
        assert 0 < one.privacy < 1


def test_what_is_stored_reads_back_and_what_does_not_follow_is_refused(made: Path, tmp_path: Path) -> None:
    stored = json.loads((made / "inference.json").read_text())
    assert read_fitted(made).to_json() == stored
    steered = json.loads(json.dumps(stored))
    steered["releases"][2]["theta"][1] += 0.01
    for broken in (
        steered,
        stored | {"releases": stored["releases"][:2]},
        stored | {"request": {}},
        stored | {"schema_version": 9},
        stored | {"releases": [one | {"vector": [0.0]} for one in stored["releases"]]},
        *(
            stored | {"releases": [*stored["releases"][:2], stored["releases"][2] | {"noise_std": std}]}
            for std in (0.0, 1e-160, 1e160)
        ),
    ):
        (tmp_path / "inference.json").write_text(json.dumps(broken))
        with pytest.raises(RunFolderError):
            read_fitted(tmp_path)


def test_the_command_prints_a_table_and_show_reads_it_again(tmp_path: Path) -> None:
    tables(tmp_path)
    linear = 'family = "linear"\ntarget = "stay"\nfeatures = ["age"]\ncentre = 20\ncut = 25\n'
    asked = ("infer", str(written(tmp_path, inference=linear)), "--runs", str(tmp_path / "runs"))
    # The last name is longer than file systems take; root may write everywhere, so that permissions are not tried.
    for place, why in (
        ("", "Is a directory"),
        ("absent/a.csv", "No such file"),
        ("a" * 300, "File name too long"),
    ):
        assert f"cannot be written: {why}" in ended(*asked, "--csv", str(tmp_path / place)).mistake
    assert not (tmp_path / "runs").exists()
    printed = output(*asked, "--csv", str(tmp_path / "effects.csv"))
    header, intercept = (tmp_path / "effects.csv").read_text().splitlines()[:2]
    assert header == "name,estimate,low,high,z,freedom,p,privacy"
    assert intercept.startswith("intercept,")
    assert "n: at most" in printed
    assert "is this regression of the same tables" in ended(*asked).mistake
    assert "intercept" in printed
    assert "e^coefficient" not in printed
    assert "records without a value" in printed
    shown = as_json("show", str(tmp_path / "runs" / "odds"), "--csv", str(tmp_path / "again.csv"))
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "effects.csv").read_text()
    assert [one["name"] for one in shown["effects"]] == ["intercept", "age"]
    assert shown["effects"][0]["estimate"] == pytest.approx(20, abs=5)
    page = (tmp_path / "runs" / "odds" / "report.html").read_text(encoding="utf-8")
    assert "linear regression of stay" in page
    assert Path(as_json(*asked, "--repeat")["folder"]).name == "odds-2"


def test_a_page_without_people_enough_says_so(tmp_path: Path) -> None:
    """Planned for 1500 people, of whom five came: no interval, in the table, the page and the JSON."""
    tables(tmp_path, people=5)
    told = as_json("infer", str(written(tmp_path)), "--runs", str(tmp_path / "runs"))
    assert told["shown"] is False
    assert told["effects"] == []
    assert "too few people or events" in Path(told["report"]).read_text(encoding="utf-8")
    assert "too few people or events" in output("show", tmp_path / "runs" / "odds")


@pytest.mark.slow
def test_private_weighting_carries_a_regression(tmp_path: Path) -> None:
    tables(tmp_path, people=8)
    path = written(
        tmp_path,
        people=8,
        privacy="epsilon = 2000.0\ndelta = 1e-3",
        inference='family = "logistic"\ntarget = "sick"\nfeatures = ["age"]',
    )
    text = path.read_text().replace('silos = "uniform"', 'silos = "equal"')
    path.write_text(text.replace('"secure-aggregation"', '"private-weighting"\nkey_bits = 2048\nn_max = 4'))
    folder = make_releases(prepare_inference(read_releases(path, InferenceDocument)), tmp_path / "runs")
    assert len(read_fitted(folder).releases) == 3
    assert any(
        "which users have a record" in text for text in read_statement(folder / "privacy.json").uncovered
    )

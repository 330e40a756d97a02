"""Run folders as reports read them, and the page made of one run."""

import base64
import dataclasses
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedveil.errors import ConfigError, RunFolderError
from fedveil.privacy.claims import Role
from fedveil.privacy.events import NoGuarantee
from fedveil.privacy.statement import AsPublished, Disclosure
from fedveil.report.document import escape, fields, write_document
from fedveil.report.drawing import show, show_delta, show_epsilon
from fedveil.report.page import report_page, write_report
from fedveil.report.plan import write_plan
from fedveil.report.run_data import load_run
from tests.report_folders import Tags, diagnostics, metric_rows, statement, write_run

HOSTILE = '</script><script>alert("silo")</script><img src=x onerror=alert(1)>'


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def visible(page: str) -> str:
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def test_a_run_folder_is_read_back(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", name="digits-seed3", rounds=4, epsilon=2.5))
    assert (run.name, run.variant, run.metrics) == ("digits-seed3", "digits", ("accuracy", "loss"))
    assert [row.round for row in run.rounds] == [0, 1, 2, 3, 4]
    assert run.rounds[-1].epsilon == 2.5
    assert run.rounds[0].norms is None
    assert run.rounds[1].norms is not None
    assert run.statement.epsilon == 2.5
    assert not run.interrupted_line
    assert run.diagnostics is not None
    assert run.diagnostics.silo_names[-1] == "harbour"


def test_no_guarantee_is_an_infinite_epsilon(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", epsilon=None))
    assert run.statement.epsilon is None
    assert all(row.epsilon == math.inf for row in run.rounds[1:])


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("digits-seed3", "digits"),
        ("digits_seed_12", "digits"),
        ("digits seed=1", "digits"),
        ("digits", "digits"),
        ("seed-3", "seed-3"),
        ("linseed3", "linseed3"),
    ],
)
def test_a_variant_is_the_name_without_its_seed(tmp_path: Path, name: str, variant: str) -> None:
    assert load_run(write_run(tmp_path / "run", name=name, rounds=1)).variant == variant


def test_an_unfinished_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=5)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    run = load_run(folder)
    assert run.interrupted_line
    assert run.rounds[-1].round == 4
    assert "ends in the middle of a line" in report_page(run)


def test_a_run_without_a_round_still_has_a_statement(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    page = visible(report_page(load_run(folder)))
    assert "No round yet" in page
    assert "ε = 2.50" in page
    assert 'id="result"' not in page


@pytest.mark.parametrize("file", ["experiment.toml", "metrics.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / file).unlink()
    with pytest.raises(RunFolderError, match=rf"{file} is missing"):
        load_run(folder)


def test_there_is_no_report_without_a_statement(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "privacy.json").unlink()
    with pytest.raises(RunFolderError, match=r"privacy.json is missing.*`fedveil resume"):
        write_report(folder)


def test_rounds_that_were_not_evaluated_are_left_out_of_curves(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [row | {"test": row["test"] if row["round"] in (0, 2) else None} for row in metric_rows(rounds=3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = visible(report_page(load_run(folder)))
    assert "at round 0 to 0.3268 at round 2" in page
    assert "0.3268 (round 2)" in page


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        write_report(tmp_path / "absent")


@pytest.mark.parametrize(
    "file", ["experiment.toml", "metrics.jsonl", "privacy.json", "diagnostics.json", "environment.json"]
)
def test_another_schema_version_is_refused(tmp_path: Path, file: str) -> None:
    path = write_run(tmp_path / "run") / file
    path.write_text(re.sub(r'(schema_version"?(:| =)) \d', r"\1 9", path.read_text()))
    with pytest.raises(RunFolderError, match=rf"{file}.* has schema_version 9"):
        load_run(path.parent)


def unequal_names() -> str:
    return json.dumps(diagnostics() | {"silo_names": ["north"]})


def without_unit() -> str:
    return json.dumps({key: value for key, value in statement().items() if key != "unit"})


def nameless_party() -> str:
    return json.dumps(statement() | {"trust": [{"role": "server", "sees": "all"}]})


def negative_epsilon() -> str:
    return json.dumps(statement() | {"epsilon": -1.0})


def repeated_round() -> str:
    return "".join(json.dumps(metric_rows(rounds=2)[number]) + "\n" for number in (0, 1, 1))


def six_norms() -> str:
    return json.dumps(metric_rows(rounds=1)[1] | {"norms": [1.0] * 6}) + "\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("experiment.toml", lambda: "name = ", "experiment.toml: not a TOML document"),
        ("privacy.json", lambda: "{", "privacy.json is damaged: it is not valid JSON"),
        ("privacy.json", lambda: "[]", "privacy.json is damaged: it should hold a JSON object"),
        ("diagnostics.json", lambda: "[]", "diagnostics.json is damaged: it should hold a JSON object"),
        ("privacy.json", nameless_party, r"privacy.json is damaged: trust\.0\.party: is required"),
        (
            "privacy.json",
            negative_epsilon,
            "privacy.json is damaged: statement epsilon = -1.0: must be .*not negative",
        ),
        ("privacy.json", without_unit, "privacy.json is damaged: unit: is required"),
        ("metrics.jsonl", lambda: "{}}\n", r"metrics.jsonl, line 1, is damaged"),
        ("metrics.jsonl", repeated_round, r"metrics.jsonl, line 3, is damaged: round 1 follows round 1"),
        (
            "metrics.jsonl",
            six_norms,
            r"metrics.jsonl, line 1, is damaged: norms: needs 7 or more entries, not 6",
        ),
        ("diagnostics.json", unequal_names, r"diagnostics.json is damaged: silo_names: must have 5 names"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: Callable[[], str], message: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(content())
    with pytest.raises(RunFolderError, match=message):
        load_run(folder)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "privacy.json").write_bytes(b'{"unit": "\xff"}')
    with pytest.raises(RunFolderError, match=r"privacy.json is damaged: byte 10 is not UTF-8"):
        load_run(folder)


def test_the_statement_follows_the_summary_in_words(tmp_path: Path) -> None:
    page = visible(write_report(write_run(tmp_path / "run", epsilon=1.0)).read_text())
    assert re.findall(r'<section id="([a-z]+)"', page) == [
        "summary",
        "statement",
        "result",
        "curves",
        "population",
        "environment",
        "experiment",
    ]
    claim = re.search(r'<div class="claim guaranteed">(.*?)</div>', page)
    assert claim is not None
    assert "Against readers of the models, each user is protected with" in claim[1]
    assert "ε = 1.00, δ = 1e-5" in claim[1]
    assert "Adding or removing one user (all of the user&#39;s records, in every silo) changes" in claim[1]
    assert "Not covered: the learning rate was chosen by hand." in claim[1]


@pytest.mark.parametrize("delta", [1e-5, 1.00004e-5, 3**-7, 1 / 3])
def test_a_report_never_shows_a_delta_smaller_than_it_is(delta: float) -> None:
    assert delta <= float(show_delta(delta)) <= delta * (1 + 1e-5)


def test_no_guarantee_is_said_with_its_reasons(tmp_path: Path) -> None:
    page = visible(report_page(load_run(write_run(tmp_path / "run", epsilon=None))))
    assert '<p class="headline">No privacy guarantee</p>' in page
    assert "<li>contributions are not clipped</li>" in page
    assert "Privacy spent" not in page
    assert "is protected with" not in page


def test_each_party_has_its_own_epsilon(tmp_path: Path) -> None:
    page = visible(report_page(load_run(write_run(tmp_path / "run", epsilon=2.5))))
    row = '<th scope="row">{}</th><td>{}</td><td class="number">{}</td>'
    assert row.format("the server", "every silo&#39;s sum before noise", "∞") in page
    assert row.format("a reader of the models", "the model of every round", "2.50") in page


def test_every_field_of_the_statement_is_shown(tmp_path: Path) -> None:
    page = visible(report_page(load_run(write_run(tmp_path / "run", epsilon=2.5))))
    for text in ("Secure randomness", "rounds are not composed", "&#34;gaussian&#34;", "2.81"):
        assert text in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spectrum": {}}, "spectrum: no such key"),
        ({"epsilon": 0.1}, "its sentences or fields do not fit its values"),
        ({"sentences": ["Nothing can be learned."]}, "its sentences or fields do not fit its values"),
    ],
)
def test_a_statement_whose_words_are_not_those_of_its_values_is_not_reported(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = write_run(tmp_path / "run", epsilon=2.5)
    rewrite(folder / "privacy.json", **change)
    with pytest.raises(RunFolderError, match=rf"privacy\.json is damaged: {message}"):
        load_run(folder)


def test_diagnostics_are_labelled_as_not_covered(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    page = visible(report_page(load_run(folder)))
    assert "Nothing in this section is covered" in page[page.index('id="population"') :]
    (folder / "diagnostics.json").unlink()
    rows = [row | {"norms": None, "clipped": None} for row in metric_rows(rounds=3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 'id="population"' not in visible(report_page(load_run(folder)))


def test_bits_are_shown_against_its_information_limit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    communication_cost = {
        "float32_bytes": 50_000,
        "bits_per_parameter": 0.16,
        "limit": 0.004,
        "ratio": 40.0,
        "acceptance": 0.785,
    }
    first, *rest = metric_rows(rounds=3)
    rows = [first, *(row | {"bytes_up": 250, "communication_cost": communication_cost} for row in rest)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = visible(report_page(load_run(folder)))
    told = "0.16 bits per parameter at round 3, the limit 0.004. All messages together: 750 bytes, 200 times fewer"
    assert told in page[page.index('id="population"') :]
    assert "78.5% of the draws were accepted at round 3" in page


def test_messages_of_plain_numbers_have_no_limit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    communication_cost = {
        "float32_bytes": 400,
        "bits_per_parameter": 32.0,
        "limit": None,
        "acceptance": None,
    }
    first, *rest = metric_rows(rounds=3)
    rows = [first, *(row | {"bytes_up": 400, "communication_cost": communication_cost} for row in rest)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = visible(report_page(load_run(folder)))
    assert "32 bits per parameter at round 3. All messages together: 1,200 bytes, 1 times fewer" in page
    assert "Acceptance rate" not in page


def test_lost_contributions_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [row | {"nonfinite": 2, "norms": None} for row in metric_rows(rounds=3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "8 contributions were not finite numbers" in report_page(load_run(folder))


def test_a_metric_that_diverged_is_shown_as_such(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [row | {"test": {"loss": None if row["round"] else 1.0}} for row in metric_rows(rounds=3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "not a number" in visible(report_page(load_run(folder)))


def test_hostile_names_inject_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2, settings=f"text = '''{HOSTILE}'''\n")
    rewrite(folder / "diagnostics.json", silo_names=[HOSTILE] * 5)
    rewrite(folder / "environment.json", **{HOSTILE: HOSTILE})
    disclosure = Disclosure(
        role=Role.SERVER, party=HOSTILE, sees=HOSTILE, epsilon=None, event=NoGuarantee(reason=HOSTILE)
    )
    lists = dict.fromkeys(("mechanisms", "uncovered", "notes"), (HOSTILE,) * 2)
    hostile = dataclasses.replace(
        load_run(folder).statement,
        accountant=HOSTILE,
        randomness=HOSTILE,
        trust=(disclosure,),
        epsilons=((HOSTILE, 1.0),),
        as_published=(AsPublished(name=HOSTILE, value=1.0, gap=HOSTILE),),
        **lists,
    )
    (folder / "privacy.json").write_text(json.dumps(hostile.to_json()))
    rows = [row | {"test": {HOSTILE: 0.5}} for row in metric_rows(rounds=2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report_page(load_run(folder))
    tags = Tags()
    tags.feed(page)
    assert not tags.loads
    assert not tags.handlers
    assert not tags.scripts
    assert HOSTILE not in page


def test_the_page_forbids_the_network_and_foreign_scripts(tmp_path: Path) -> None:
    page = report_page(load_run(write_run(tmp_path / "run", rounds=2)))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    said = html.unescape(policy[1])
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert said == f"default-src 'none'; style-src 'sha256-{digest}'"
    assert "<script" not in page
    assert not re.search(r"<[^>]* style=", page)


def test_every_figure_can_be_read_without_seeing_it(tmp_path: Path) -> None:
    page = visible(report_page(load_run(write_run(tmp_path / "run", rounds=3))))
    figures = re.findall(r"<figure>(.*?)</figure>", page)
    assert len(figures) == 8
    for figure in figures:
        assert re.search(r'role="img" aria-label="[^"]{20,}"', figure)
        assert re.search(r"<figcaption>[^<]{10,}", figure)
        assert "<h3>" in figure


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers(-(10**20), 10**20) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_json_value_becomes_inert_html(value: object) -> None:
    tags = Tags()
    page = fields([("value", value)])  # type: ignore[list-item]
    tags.feed(page)
    assert [*tags.scripts, *tags.loads, *tags.handlers] == []
    assert set(re.findall(r"</?([a-z]+)", page)) <= {"ul", "li", "dl", "div", "dt", "dd"}


def test_escape_covers_attributes() -> None:
    assert escape("\"'<&>") == "&#34;&#39;&lt;&amp;&gt;"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (1e-5, "1e-5"),
        (0.123456, "0.1235"),
        (math.inf, "∞"),
        (2e20, "2e+20"),
    ],
)
def test_numbers_are_shown_for_readers(value: float, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (0.0, "0"),
        (2.8013, "2.81"),
        (2.5, "2.50"),
        (2.5000000000001, "2.51"),
        (1e-300, f"0.{'0' * 299}101"),
        (0.012341, "0.0124"),
        (12345.678, "12,345.68"),
        (math.inf, "∞"),
    ],
)
def test_epsilons_are_rounded_up(epsilon: float, text: str) -> None:
    assert show_epsilon(epsilon) == text


@given(st.floats(0, exclude_min=True, allow_infinity=False))
@example(2.5000000000001)
@example(math.nextafter(0.1, 0))
@example(1.7976931348623157e308)
def test_no_epsilon_is_shown_as_a_better_promise(epsilon: float) -> None:
    above = Fraction(show_epsilon(epsilon).replace(",", "")) - Fraction(epsilon)
    assert 0 <= above < (Fraction(1, 100) if epsilon >= 0.1 else Fraction(epsilon) / 100)  # three digits


def test_a_page_is_written_over_no_other_kind_of_file(tmp_path: Path) -> None:
    table = tmp_path / "north.csv"
    table.write_text("patient")
    with pytest.raises(ConfigError, match=r"north.csv: a page is written as .html"):
        write_document(table, "new")
    assert table.read_text() == "patient"


def test_a_failed_write_keeps_the_old_page(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"absent/report.html cannot be written"):
        write_document(tmp_path / "absent" / "report.html", "new")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_document(tmp_path / "page.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_page_is_written_through_no_link_of_another_user(tmp_path: Path) -> None:
    """In a folder that is shared, what lay under the name of the draft was followed and written to."""
    page, other = tmp_path / "page.html", tmp_path / "another's"
    other.write_text("theirs")
    for name in (f".page.html.{os.getpid()}.tmp", ".page.html.tmp"):
        (tmp_path / name).symlink_to(other)
    assert write_document(page, "new\n").read_bytes() == b"new\n"
    assert other.read_text() == "theirs"


def plan_rows() -> list[dict[str, object]]:
    return [
        {
            "method": method,
            "noise_multiplier": sigma,
            "rounds": rounds,
            "users": 100,
            "sampling_rate": None,
            "epsilon": None if method == "fedavg" else math.sqrt(rounds) / sigma,
            "accountant": "pld",
        }
        for method in ("uldp-avg", "uldp-avg-w", "fedavg")
        for sigma in (1.0, 5.0)
        for rounds in (10, 100)
    ]


def test_a_plan_has_a_plot_for_each_quantity_it_varies(tmp_path: Path) -> None:
    page = write_plan(plan_rows(), tmp_path / "plan.html").read_text()  # type: ignore[arg-type]
    assert re.findall(r"<h3>([^<]*)</h3>", visible(page)) == [
        "ε against rounds",
        "ε against noise multiplier σ",
    ]
    assert "uldp-avg = uldp-avg-w, noise multiplier σ 5" in visible(page)
    assert visible(page).count("<tr>") == 13


def test_a_plan_of_one_row_is_a_table_alone(tmp_path: Path) -> None:
    page = write_plan(plan_rows()[:1], tmp_path / "plan.html").read_text()  # type: ignore[arg-type]
    assert "<figure>" not in page
    assert "3.17" in visible(page)


def test_a_report_is_small(tmp_path: Path) -> None:
    """A run folder with four of them stays below 0.8 MB."""
    assert write_report(write_run(tmp_path / "run", rounds=100)).stat().st_size < 200_000

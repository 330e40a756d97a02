"""The pages in a real browser: every plot is drawn, nothing is complained about, no script but ours runs."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.report.compare import compare
from fedveil.report.page import write_report
from fedveil.report.plan import write_plan
from fedveil.report.run_data import load_run
from tests.report_folders import Tags, metric_rows, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium")


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's elements after its scripts have run, and whatever the console was told."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def drawn(dom: str) -> tuple[int, int]:
    """How many figures the page has, and how many of them hold a plot with traces."""
    figures = re.findall(r"<figure>.*?</figure>", dom, re.DOTALL)
    traces = re.compile(r'<g class="trace [^"]*".*?<path [^>]*\bd="M', re.DOTALL)
    return len(figures), sum(
        'class="main-svg"' in figure and bool(traces.search(figure)) for figure in figures
    )


def test_the_report_of_a_run_is_drawn(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path / "run"))
    dom, console = opened(report, tmp_path / "profile")
    assert console == []
    assert drawn(dom) == (8, 8)


def test_a_comparison_is_drawn(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(s), name=f"avg-seed{s}", seed=s, best=0.8 + s / 20) for s in range(3)]
    runs.append(write_run(tmp_path / "fedavg", name="fedavg", epsilon=None))
    page = compare(runs).write(tmp_path / "compare.html")
    dom, console = opened(page, tmp_path / "profile")
    assert console == []
    assert drawn(dom) == (4, 4)


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    rows = [
        {"method": "uldp-avg", "noise_multiplier": 5.0, "rounds": t, "epsilon": t**0.5} for t in (10, 100)
    ]
    dom, console = opened(write_plan(rows, tmp_path / "plan.html"), tmp_path / "profile")
    assert console == []
    assert drawn(dom) == (1, 1)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Names that try to be script, in every place where plotly or the page shows one."""
    hostile = '</script><img src=x onerror="document.title=\'taken\'"><a href="javascript:alert(1)">silo</a>'
    folder = write_run(tmp_path / "run", rounds=3)
    rows = [row | {"test": {hostile: row["round"]}} for row in metric_rows(rounds=3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "diagnostics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"silo_names": [hostile] * 5}))
    statement = replace(load_run(folder).statement, accountant=hostile, mechanisms=(hostile,))
    (folder / "privacy.json").write_text(json.dumps(statement.to_json()))
    dom, console = opened(write_report(folder), tmp_path / "profile")
    assert console == []
    assert drawn(dom) == (7, 7)
    assert "<title>digits-avg-w · fedveil</title>" in dom
    tags = Tags()
    tags.feed(dom)
    assert [*tags.loads, *tags.handlers] == []
    assert len(tags.scripts) == 2 + 7


def test_the_policy_stops_a_foreign_script(tmp_path: Path) -> None:
    """Were a name let through unescaped, the page's own policy would refuse to run it, and we would see."""
    report = write_report(write_run(tmp_path / "run", rounds=3))
    page = report.read_text().replace("<main>", "<main><script>document.title = 'taken'</script>", 1)
    report.write_text(page)
    dom, console = opened(report, tmp_path / "profile")
    assert "<title>digits-avg-w · fedveil</title>" in dom
    assert len(console) == 1
    assert "Executing inline script violates" in console[0]

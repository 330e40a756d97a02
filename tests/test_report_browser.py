"""The pages in a real browser: every plot is drawn, nothing is complained about, no script runs."""

import html
import json
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.data.data_report import ColumnFacts, DataFinding, DataReport, SiloFacts
from fedveil.report.compare import compare
from fedveil.report.data import write_data_page
from fedveil.report.page import write_report
from fedveil.report.plan import write_plan
from fedveil.report.run_data import load_run
from tests.report_folders import Tags, metric_rows, write_run
from tests.test_python import train

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


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker axe, as npm has it."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on the path, which would bring axe")
    try:
        subprocess.run(
            [npm, "pack", "axe-core@4.14.1"], cwd=folder, check=True, capture_output=True, timeout=60
        )
    except (subprocess.SubprocessError, OSError):
        pytest.skip("npm could not bring axe-core")
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        found = packed.extractfile("package/axe.min.js")
        assert found is not None
        return found.read().decode()


def complaints(page: Path, axe: str, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """What axe finds on a page of this width (in a frame: a window of Chromium is never as narrow as a telephone)."""
    assert CHROMIUM is not None
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    tell = """setTimeout(async () => {
        const found = await axe.run({resultTypes: ["violations"]});
        const bad = found.violations.filter((one) => ["serious", "critical"].includes(one.impact));
        parent.told(JSON.stringify({
          bad: bad.map((one) => [one.id, one.nodes[0].html.slice(0, 150)]),
          drawn: document.querySelectorAll("svg.plot .series").length,
          wide: document.documentElement.scrollWidth, width: innerWidth,
          dark: matchMedia("(prefers-color-scheme: dark)").matches}));
      }, 3000);"""
    inner = text.replace("</body>", f"<script>{axe}</script><script>{tell}</script></body>")
    outer = folder / f"{width}{dark}.html"
    shown = json.dumps(inner).replace("</", "<\\/")
    outer.write_text(
        f"""<!doctype html><iframe id="frame" width="{width}" height="800" style="border:0"></iframe><script>
        function told(text) {{ document.title = text; }}
        document.getElementById("frame").srcdoc = {shown};</script>"""
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    flags = [*FLAGS, scheme, "--window-size=1400,900", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, "axe did not answer"
    answer: dict[str, Any] = json.loads(html.unescape(title[1]))
    return answer


def pages(folder: Path) -> dict[str, Path]:
    """A page of every kind that has plots or wide tables."""
    run = write_run(folder / "run")
    rows = [
        {"method": "uldp-avg", "noise_multiplier": 5.0, "rounds": t, "epsilon": t**0.5} for t in (10, 100)
    ]
    columns = [ColumnFacts(name="age", kind="number", missing=0.1, invalid=0.0, outside=0.0, distinct=40)]
    found = [DataFinding(bears_on="model", where="age", found="10 % missing", effect="declare it")]
    looked = DataReport(
        records=40,
        people=20,
        n_users=30,
        in_several_silos=3,
        silos=(SiloFacts(name="north", records=40, people=20),),
        columns=tuple(columns),
        classes={"no": 30, "yes": 10},
        findings=tuple(found),
    )
    return {
        "report": write_report(run),
        "comparison": compare([run, write_run(folder / "other", name="other")]).write(
            folder / "compare.html"
        ),
        "plan": write_plan(rows, folder / "plan.html"),
        "data": write_data_page(looked, folder / "data.html"),
        "card": train(folder / "trained").save(folder / "model") / "card.html",
    }


@pytest.mark.slow
def test_nobody_is_kept_out(tmp_path: Path, axe: str) -> None:
    """Axe finds nothing serious on a telephone and on a desk, in light and in dark, and no page is too wide."""
    for name, page in pages(tmp_path).items():
        for width in (390, 1280):
            for dark in (False, True):
                answer = complaints(page, axe, tmp_path, width=width, dark=dark)
                assert answer["bad"] == [], (name, width, dark)
                assert (answer["width"], answer["dark"]) == (width, dark)
                assert answer["wide"] <= width, name
                assert (answer["drawn"] > 0) == (name not in ("data", "card"))


def drawn(dom: str) -> tuple[int, int]:
    """How many figures the page has, and how many of them hold a drawn series."""
    figures = re.findall(r"<figure>.*?</figure>", dom, re.DOTALL)
    series = re.compile(r'<(path|rect|circle|polygon) class="series" [^>]*\b(d="M|width|r=|points)')
    return len(figures), sum(bool(series.search(figure)) for figure in figures)


def pages_of(page: Path, folder: Path) -> int:
    """How many sheets the page fills when it is printed."""
    assert CHROMIUM is not None
    printed = folder / "printed.pdf"
    subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={folder / 'printer'}",
            "--no-pdf-header-footer",
            f"--print-to-pdf={printed}",
            page.as_uri(),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    return len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))


def test_a_report_is_printed_on_two_sheets_with_all_caveats(tmp_path: Path) -> None:
    """Folded remarks are printed: a text of several sheets within one shows it; private diagnostics are not."""
    assert pages_of(train(tmp_path / "trained").report(), tmp_path) == 2
    folder = write_run(tmp_path / "run")
    write_report(folder)
    page = (folder / "report.html").read_text()
    page = page.replace("the learning rate was chosen by hand", "by hand. " * 6000, 1)
    (folder / "report.html").write_text(page)
    assert pages_of(folder / "report.html", tmp_path) > 2  # it stands in a folded part, and fills sheets
    (folder / "report.html").write_text(page.replace('class="printed"', 'class="unprinted"'))
    assert pages_of(folder / "report.html", tmp_path) <= 2


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
    """Names that try to be script, in every place where a plot or the page shows one."""
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
    assert [*tags.loads, *tags.handlers, *tags.scripts] == []


def test_the_policy_stops_a_foreign_script(tmp_path: Path) -> None:
    """Were a name let through unescaped, the page's own policy would refuse to run it, and we would see."""
    report = write_report(write_run(tmp_path / "run", rounds=3))
    page = report.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>", 1)
    report.write_text(page)
    dom, console = opened(report, tmp_path / "profile")
    assert "<title>digits-avg-w · fedveil</title>" in dom
    assert len(console) == 1
    assert "Executing inline script violates" in console[0]

"""The page of a federation: what it shows, that it makes no request, and that no text of a file acts in it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedveil.cli.federation_page import federation_page
from fedveil.federation.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import END, RunOutcome
from fedveil.federation.hosts.submission import create_run, read_document
from tests.commands import ended
from tests.report_folders import statement
from tests.test_report_browser import CHROMIUM, FLAGS

CONNECTION = {
    "link": True,
    "connected": ["north"],
    "absent": ["east", "south"],
    "last_contact_seconds": {"north": 3.0, "south": 400.0},
}


class Page(HTMLParser):
    """Texts by element, and whatever could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[list[str]] = []
        self.loads, self._in_cell = list[str](), False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th") and self.cells:
            self.cells[-1].append("")
            self._in_cell = True
        self.loads += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "srcset", "action", "onclick", "onerror")
            or (name == "href" and not (value or "").startswith("#"))
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells[-1][-1] = (self.cells[-1][-1] + data).strip()

    def row(self, first: str) -> list[str]:
        (found,) = (row for row in self.cells if row and row[0] == first)
        return found


@pytest.fixture
def made(tmp_path: Path) -> Demonstration:
    return write_demonstration(tmp_path / "demo", rounds=2, hospitals={"north": 40, "south": 41, "east": 42})


def test_the_page_shows_silos_runs_and_refusals(made: Demonstration, tmp_path: Path) -> None:
    home = CoordinatorFolder(made.provisioned.coordinator)
    done, refused, damaged = (create_run(home, read_document(made.experiment, home)) for _ in range(3))
    done.write_json("privacy.json", statement(epsilon=3.5))
    done.write_json(END, asdict(RunOutcome(None, None, ())))
    (done / "metrics.jsonl").write_text(
        json.dumps(
            {
                "schema_version": 1,
                "round": 2,
                "test": {},
                "epsilon": 3.5,
                "seconds": 1234.5,
                "elapsed": 98765.4,
            }
        )
        + "\n"
    )
    why = "silo south refuses (policy): <script>alert(1)</script> its policy does not allow method.name"
    refused.write_json(END, asdict(RunOutcome(None, why, ())))
    (damaged / "privacy.json").write_text("{")
    text = federation_page(home, CONNECTION)
    page = Page(text)
    assert page.row("north")[1:] == ["connected", "3 s ago", ""]
    assert page.row("south")[1:] == ["absent", "400 s ago", "has stopped asking"]
    assert page.row("east")[1:] == ["absent", "none", "never connected since the link started"]
    (state,) = (row for row in page.cells if row[:1] == [done.path.name])
    assert state[1:] == ["complete", "2", "3.50"]
    assert page.row("the server") == ["the server", done.path.name, "∞"]
    names = [row[0] for row in page.cells if len(row) == 4 and row[0].startswith("demonstration")]
    assert names == [run.path.name for run in (done, refused, damaged)]  # as submitted, not as changed
    (stopped,) = (row for row in page.cells if row[:1] == [refused.path.name] and len(row) == 2)
    assert stopped[1] == why
    assert "<script>alert" not in text
    (broken,) = (row for row in page.cells if row[:1] == [damaged.path.name] and len(row) == 2)
    assert "privacy.json" in broken[1]
    assert page.loads == []
    assert re.search(r"Content-Security-Policy[^>]*default-src &#39;none&#39;|default-src 'none'", text)
    for private in ("1234.5", "98765.4"):  # how long a round takes depends on the records
        assert private not in text
    assert "server.crt runs out first" in text


def test_the_command_writes_the_page_of_a_coordinator_that_is_not_served(
    made: Demonstration, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    told = ended("federation", "status", made.provisioned.coordinator, "--html", file)
    assert (told.code, str(file) in "".join(told.out.split())) == (0, True), told.err
    text = file.read_text()
    assert "No process serves this coordinator." in text
    assert "No run was submitted yet." in text
    wrong = ended("federation", "status", made.provisioned.coordinator, "--html", tmp_path / "page.txt")
    assert wrong.code == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium")
def test_no_heading_is_cut_on_a_telephone(made: Demonstration, tmp_path: Path) -> None:
    """At a width of 390 px no table is wider than the page; a reader would not see that it goes on."""
    assert CHROMIUM is not None
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = create_run(home, read_document(made.experiment, home))
    run.write_json("privacy.json", statement(epsilon=3.5))
    text = federation_page(home, CONNECTION).replace("<meta http-equiv=", "<meta name=")
    tell = """<script>addEventListener("load", () => parent.told(JSON.stringify(
        [...document.querySelectorAll(".scroll")].map((one) => one.scrollWidth - one.clientWidth))));</script>"""
    shown = json.dumps(text.replace("</body>", f"{tell}</body>")).replace("</", "<\\/")
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"""<!doctype html><iframe id="frame" width="390" height="800" style="border:0"></iframe><script>
        function told(text) {{ document.title = text; }}
        document.getElementById("frame").srcdoc = {shown};</script>"""
    )
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, outer.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    beyond = re.search(r"<title>(.*?)</title>", done.stdout)
    assert beyond is not None
    assert json.loads(beyond[1]) == [0, 0, 0]

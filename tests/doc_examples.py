"""The examples of README and docs: fenced blocks and indented commands, with how each is tried.

Every block must have an entry in :data:`TRIED`: a new one fails `test_every_example_is_tried_or_says_why_not`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block, named by its page and its place among the page's blocks."""

    page: str
    place: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.place}"

    @property
    def commands(self) -> list[str]:
        return re.findall(r"^\$ (.*?)(?: +# .*)?$", self.text, re.MULTILINE)


def _blocks(path: Path) -> list[Block]:
    page = str(path.relative_to(ROOT))
    return [
        Block(page, place, found["language"], textwrap.dedent(found["text"]))
        for place, found in enumerate(_FENCED.finditer(path.read_text(encoding="utf-8")))
    ]


BLOCKS = {block.name: block for path in PAGES for block in _blocks(path)}


def indented_commands() -> list[tuple[str, str]]:
    """Return the commands that stand indented in the text, each with its page."""
    found = []
    for path in PAGES:
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        for line in re.findall(
            r"^    ((?:[A-Z_]+=\S+ )?(?:fedveil|pytest|torchrun) .*)$", text, re.MULTILINE
        ):
            found.append((str(path.relative_to(ROOT)), line))
    return found


def inline_commands() -> list[tuple[str, str]]:
    """Return the runs, reproductions and benchmarks that a sentence names by preset, table or module, with its page."""
    found = set()
    for path in PAGES:
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        for span in re.findall(r"`(fedveil (?:run|reproduce|bench) [a-z0-9][a-z0-9_-]*(?:\s[^`]*)?)`", text):
            found.add((str(path.relative_to(ROOT)), " ".join(span.split())))
    return sorted(found)


RUN = "run by itself, in an empty folder"
HOSPITALS = "run in order by test_the_tutorial_of_three_hospitals_is_true"
DIGITS = "run by test_what_is_said_of_the_first_run_is_true"
PLUGIN = (
    "test_the_pages_show_the_files_of_the_example; test_it_runs_from_toml_and_its_state_survives_a_resume"
)
BESIDE = "test_pages_work_beside_the_tables_of_a_tutorial"
PARSED = "its commands and the experiments that they name are read; "

TRIED = {
    "README.md:0": "test_fresh_clone runs both commands in a fresh clone",
    "README.md:1": DIGITS,
    "README.md:2": "an installation and a run: .ci/wheel does both in a clean environment",
    "README.md:3": RUN,
    "docs/which-model.md:0": f"run by {BESIDE}",
    "docs/which-of-the-four.md:0": PARSED + "they take an hour",
    "docs/architecture.md:0": "a drawing: nothing to run",
    "docs/deployment.md:0": PARSED
    + "processes that listen on ports: test_hosts starts the same demonstration",
    "docs/deployment.md:1": "run by test_the_handbook_is_true",
    "docs/deployment.md:2": "run by test_the_handbook_is_true",
    "docs/deployment.md:3": "run by test_the_handbook_is_true",
    "docs/deployment.md:4": "run by test_the_handbook_is_true",
    "docs/deployment.md:5": "run by test_the_handbook_is_true",
    "docs/deployment.md:6": "run by test_the_handbook_is_true",
    "docs/deployment.md:7": "run by test_the_handbook_is_true",
    "docs/deployment.md:8": "run by test_the_handbook_is_true",
    "docs/deployment.md:9": "run by test_the_handbook_is_true",
    "docs/deployment.md:10": "run by test_the_handbook_is_true",
    "docs/deployment.md:11": "run by test_the_handbook_is_true",
    "docs/deployment.md:12": "run by test_the_handbook_is_true",
    "docs/deployment.md:13": "run by test_the_handbook_is_true",
    "docs/deployment.md:14": "run by test_the_handbook_is_true",
    "docs/deployment.md:15": "run by test_the_handbook_is_true",
    "docs/how-to/add-a-method.md:0": PLUGIN,
    "docs/how-to/add-a-method.md:1": PLUGIN,
    **{f"docs/how-to/add-a-stage.md:{place}": PLUGIN for place in range(2)},
    "docs/how-to/choose-clip.md:0": f"laid over [data.table] by {BESIDE}",
    "docs/how-to/choose-epsilon.md:0": "run by test_plans_are_made",
    "docs/how-to/compare-methods.md:0": PARSED + "they take minutes",
    "docs/how-to/compare-methods.md:1": "checked by test_compared_methods_hold_against_the_same_party",
    "docs/how-to/early-stopping.md:0": RUN,
    "docs/how-to/imbalanced-classes.md:0": "laid over an experiment by test_fragments_of_documents_are_valid",
    "docs/how-to/train-on-a-gpu.md:0": "laid over an experiment by test_fragments_of_documents_are_valid",
    "docs/how-to/local-algorithms.md:0": "laid over an experiment by test_fragments_of_documents_are_valid",
    "docs/how-to/local-algorithms.md:1": RUN,
    "docs/how-to/local-algorithms.md:2": PLUGIN,
    "docs/how-to/local-algorithms.md:3": PLUGIN,
    "docs/how-to/choose-noise-and-rounds.md:0": "run by test_plans_are_made",
    "docs/how-to/choose-noise-and-rounds.md:1": "run by test_plans_are_made",
    "docs/how-to/choose-noise-and-rounds.md:2": "run by test_plans_are_made",
    "docs/how-to/choose-noise-and-rounds.md:3": "run by test_plans_are_made",
    "docs/how-to/choose-noise-and-rounds.md:4": "run by test_plans_are_made",
    "docs/how-to/choose-noise-and-rounds.md:5": f"laid over [data.table] by {BESIDE}",
    "docs/how-to/choose-a-server-optimiser.md:0": "laid over an experiment by test_fragments_of_documents_are_valid",
    "docs/how-to/choose-a-server-optimiser.md:1": "laid over an experiment by test_fragments_of_documents_are_valid",
    "docs/how-to/choose-a-server-optimiser.md:2": RUN,
    "docs/how-to/compose-a-method.md:0": RUN,
    "docs/how-to/compose-a-method.md:1": RUN,
    "docs/how-to/compose-a-method.md:2": RUN,
    "docs/how-to/compose-a-method.md:3": RUN,
    "docs/how-to/count-people.md:0": f"read and planned by {BESIDE}",
    "docs/how-to/estimate-effects.md:0": f"read and planned by {BESIDE}",
    "docs/how-to/evaluate-privately.md:0": f"laid over [data.table] by {BESIDE}",
    "docs/how-to/evaluate-privately.md:1": "laid over a run by test_the_sections_of_the_page_are_planned",
    "docs/how-to/evaluate-privately.md:2": "laid over a run by test_the_sections_of_the_page_are_planned",
    "docs/how-to/evaluate-privately.md:3": "laid over a run by test_a_study_to_odds_ratios_costs_one_epsilon",
    "docs/how-to/hide-record-counts.md:0": PARSED + "needs the data set heart_disease",
    "docs/how-to/hide-record-counts.md:1": "read as a policy by test_fragments_of_documents_are_valid",
    "docs/how-to/hide-record-counts.md:2": "run by test_what_is_said_of_the_first_run_is_true",
    "docs/how-to/more-accuracy.md:0": "laid over an experiment by test_fragments_of_documents_are_valid",
    "docs/how-to/more-accuracy.md:1": "read as a method by test_fragments_of_documents_are_valid",
    "docs/how-to/cross-validation.md:0": RUN,
    "docs/how-to/cross-validation.md:1": RUN,
    "docs/how-to/notebooks.md:0": RUN,
    "docs/how-to/carry-messages-by-flower.md:0": "a drawing: nothing to run",
    "docs/how-to/carry-messages-by-flower.md:1": "settings that test_bridges reads",
    "docs/how-to/carry-messages-by-flower.md:2": "settings that test_bridges reads",
    "docs/how-to/carry-messages-by-flower.md:3": "needs another system: the suite of carriers starts one",
    "docs/how-to/carry-messages-by-flower.md:4": "needs another system: the suite of carriers starts one",
    "docs/how-to/carry-messages-by-nvflare.md:0": "a drawing: nothing to run",
    "docs/how-to/carry-messages-by-nvflare.md:1": "settings that test_bridges reads",
    "docs/how-to/carry-messages-by-nvflare.md:2": "settings that test_bridges reads",
    "docs/how-to/carry-messages-by-nvflare.md:3": "needs another system: the suite of carriers starts one",
    "docs/how-to/filter-nvflare-updates.md:0": "makes a folder and a file of an operating system's user",
    "docs/how-to/filter-nvflare-updates.md:1": "filters that test_nvflare_filter runs; needs NVFlare",
    "docs/how-to/pieces-for-flower.md:0": RUN,
    "docs/how-to/pieces-for-flower.md:1": RUN,
    "docs/how-to/pieces-for-flower.md:2": RUN,
    "docs/how-to/refine-a-schema.md:0": f"laid over [data.table] by {BESIDE}",
    "docs/how-to/reproduce-the-figures.md:0": PARSED + "the second downloads; test_cli runs the first",
    "docs/how-to/reproduce-the-figures.md:1": PARSED + "needs the data set heart_disease",
    "docs/how-to/reproduce-the-figures.md:2": PARSED + "needs the data set heart_disease, and hours",
    "docs/how-to/reproduce-the-figures.md:3": PARSED + "needs the data set heart_disease, and hours",
    "docs/how-to/resume-and-budget.md:0": HOSPITALS,
    "docs/how-to/resume-and-budget.md:1": "run by test_a_run_stops_at_the_budget_of_the_page",
    "docs/how-to/resume-and-budget.md:2": "compared by test_a_run_stops_at_the_budget_of_the_page",
    "docs/how-to/several-processes.md:0": PARSED + "needs the data set shakespeare",
    "docs/how-to/train-from-python.md:0": RUN,
    "docs/how-to/train-from-python.md:1": RUN,
    "docs/how-to/train-from-python.md:2": RUN,
    "docs/how-to/use-a-model.md:0": RUN,
    "docs/how-to/your-own-tables.md:0": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:1": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:2": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:3": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:4": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:5": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:6": "read as a schema by test_fragments_of_documents_are_valid",
    "docs/how-to/your-own-tables.md:7": f"run by {BESIDE}",
    "docs/how-to/your-own-tables.md:8": f"run by {BESIDE}",
    "docs/reference/errors.md:0": "compared by test_messages_are_those_of_the_program",
    "docs/tutorial/first-run.md:0": "test_fresh_clone runs it in a fresh clone",
    "docs/tutorial/first-run.md:1": DIGITS,
    "docs/tutorial/first-run.md:2": DIGITS,
    "docs/tutorial/first-run.md:3": DIGITS,
    "docs/tutorial/first-run.md:4": DIGITS,
}
TRIED |= {
    "docs/theory/weights.md:0": "test_main_silos reads a file of that form",
    "docs/theory/weights.md:1": "asked for by test_main_silos, with a digest",
}
TRIED |= {f"docs/tutorial/own-hospitals.md:{place}": HOSPITALS for place in range(9)}
TRIED |= {
    f"docs/tutorial/whole-study.md:{place}": "run in order by test_the_tutorial_of_a_whole_study_is_true"
    for place in range(10)
}

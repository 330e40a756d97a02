"""The search box of the documentation finds the right page first for what people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from lunr import lunr
from lunr.index import Index

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow  # the whole site is built and indexed
PHRASES = {
    "choose epsilon": "how-to/choose-epsilon",
    "choose clip": "how-to/choose-clip",
    "class imbalance": "how-to/imbalanced-classes",
    "imbalanced classes": "how-to/imbalanced-classes",
    "tune hyper-parameters": "how-to/tune-hyperparameters",
    "hyperparameter tuning": "how-to/tune-hyperparameters",
    "gpu": "how-to/train-on-a-gpu",
    "notebooks": "how-to/notebooks",
    "jupyter notebook": "how-to/notebooks",
    "early stopping": "how-to/early-stopping",
    "cross-validation": "how-to/cross-validation",
    "cross validation": "how-to/cross-validation",
    "fedprox": "how-to/local-algorithms",
    "compare methods": "how-to/compare-methods",
    "several machines": "how-to/several-processes",
    "predict": "how-to/use-a-model",
    "resume a run": "how-to/resume-and-budget",
    "privacy budget": "how-to/resume-and-budget",
    "csv tables": "how-to/your-own-tables",
    "missing values": "how-to/your-own-tables",
    "survival analysis": "how-to/estimate-effects",
    "confidence intervals": "how-to/estimate-effects",
    "kaplan meier": "how-to/count-people",
    "secure aggregation": "theory/secure-aggregation",
    "membership inference": "theory/audit",
    "three hospitals": "tutorial/own-hospitals",
    "server learning rate": "how-to/choose-a-server-optimiser",
    "custom model": "how-to/train-from-python",
    "add a method": "how-to/add-a-method",
    "command line": "reference/commands",
}


class Search:
    """Search as the site's search box does it: every entry has a title and a text, and a title counts far more."""

    def __init__(self, entries: list[dict[str, str]], boost: float) -> None:
        self._index: Index = lunr(
            ref="location",
            fields=[{"field_name": "title", "boost": boost}, "text"],
            documents=entries,
        )

    def pages(self, phrase: str) -> list[str]:
        """Return the pages found, best first: pages on which every word is found go before all others."""
        best: dict[str, float] = defaultdict(float)
        words: dict[str, set[str]] = defaultdict(set)
        for found in self._index.search(phrase):
            page = found["ref"].split("#")[0].rstrip("/")
            best[page] = max(best[page], found["score"])
            words[page] |= set(found["match_data"].metadata)
        return sorted(best, key=lambda page: (-len(words[page]), -best[page]))


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    return Search(index["docs"], index["config"]["fields"]["title"]["boost"])


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_first_page_found_is_the_one_looked_for(search: Search, phrase: str) -> None:
    found = search.pages(phrase)
    assert found[:1] == [PHRASES[phrase]], found[:5]

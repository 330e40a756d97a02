"""Shapes and types of every annotated function in the numerical packages are checked while the tests run."""

import gc
import logging
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("randomness", "privacy", "quantization", "data", "training", "methods")
ROOT = Path(__file__).resolve().parents[1]
SAME_WORKER = (
    ("tests/test_run.py", "tests/test_distributed.py", "tests/test_ledger.py", "tests/test_paraaegis.py"),
    ("tests/test_source_rules.py", "tests/test_dependencies.py", "tests/test_console.py"),
    ("tests/test_accounting.py", "tests/test_dpsgd.py"),
)
"""Groups of files whose tests share an expensive state of a process: the fork server, Opacus, the parsed source."""


MEMORY, FREE_BYTES = Path("/dev/shm"), 4 << 30
"""Where temporary files lie, if it has so many bytes free: the tests make and unlink some hundred thousand."""


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only deals them out to workers needs no library."""
    if (
        "TMPDIR" not in os.environ
        and os.access(MEMORY, os.W_OK)
        and shutil.disk_usage(MEMORY).free > FREE_BYTES
    ):
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)  # of this process and of those that it starts
    if config.getoption("dist", "no") != "no":
        return
    gc.disable()  # until all is imported
    import torch
    from hypothesis import settings

    from tests.shape_checks import install

    packages = [f"fedveil.{package}" for package in PACKAGES]
    install(packages, "beartype.beartype", arrays_alone=bool(config.option.markexpr))
    from tests.memoised import remember
    from tests.trials import remember_trials

    examples = 40 if config.option.markexpr else 100
    settings.register_profile(
        "fedveil", deadline=None, derandomize=True, print_blob=True, max_examples=examples
    )
    settings.load_profile("fedveil")
    torch.set_num_threads(1)
    remember_trials()
    remember()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal whole files out to workers: what a file's tests share is made once, and what files share once in a group."""
    from xdist.scheduler import LoadFileScheduling

    class Dealt(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((group[0] for group in SAME_WORKER if file in group), file)

    return Dealt(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the libraries, which stay, and let it look at the rest less often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the shapes of every call, or of the first ones in the fast suite; forget the fits of earlier tests."""
    from tests.shape_checks import FAST, look_at

    look_at(FAST if item.config.option.markexpr else math.inf, item.location[0])
    if (budget := sys.modules.get("fedveil.api.budget")) is not None:
        budget.forget_fits()  # every test is a process of its own to the memory of earlier fits


def pytest_runtest_teardown() -> None:
    """Take back where and how much a command logs: the stream that was standard error is closed by then."""
    log = logging.getLogger("fedveil")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of the real data sets; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("FEDVEIL_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"real data not found: {folder} is no folder; set FEDVEIL_DATA")
    return folder

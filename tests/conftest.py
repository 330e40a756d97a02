"""Shapes and types of every annotated function in the numerical rooms are checked while the tests run."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.shape_checks import install

install(
    [
        f"fedveil.{room}"
        for room in ("randomness", "privacy", "quantization", "population", "local", "server", "methods")
    ],
    "beartype.beartype",
)

from tests.trials import remember_trials  # noqa: E402

settings.register_profile("fedveil", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedveil")
torch.set_num_threads(1)
remember_trials()

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of the real data sets; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("FEDVEIL_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"real data not found: {folder} is no folder; set FEDVEIL_DATA")
    return folder

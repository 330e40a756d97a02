"""What a run records of public test records, and that it records nothing of private ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedveil.report.run_data import load_run
from fedveil.report.summary import PUBLIC
from tests.test_python import people, train


def test_a_run_describes_its_released_model_on_public_test_records(tmp_path: Path) -> None:
    result = train(tmp_path)
    found = json.loads((result.folder / "public_test.json").read_text())
    counts = np.array(found["confusion"])
    assert counts.sum() == found["records"]
    assert np.trace(counts) / counts.sum() == pytest.approx(result.metrics["accuracy"])
    assert found["roc"][0] == [0.0, 0.0]
    assert found["roc"][-1] == [1.0, 1.0]
    if "auc" in result.metrics:
        x, y = np.array(found["roc"]).T
        assert np.trapezoid(y, x) == pytest.approx(result.metrics["auc"])
    assert sum(one["weight"] for one in found["calibration"]) == pytest.approx(found["records"])
    assert result.summary.coverage == PUBLIC
    page = result.report().read_text()
    assert all(f"<h3>{title}</h3>" in page for title in ("ROC curve", "Calibration"))
    assert f"The released model on {found['records']} public test records" in page


def test_a_run_describes_nothing_of_held_out_private_records(tmp_path: Path) -> None:
    result = train(tmp_path, held=people(test=None))
    assert not (result.folder / "public_test.json").exists()
    assert load_run(result.folder).public_test is None
    page = result.report().read_text()
    assert "ROC curve" not in page
    assert "predicted 0" not in page

"""What a silo's noisy updates cost over all jobs, and that none leaves without its charge."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.errors import BudgetError, FedveilError, IntegrityError, PrivacyError, RunFolderError
from fedveil.federation.transport.silo_account import LEDGER, STATEMENT, SiloAccount
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.statement import Statement, check_epsilons

DELTA = 1e-5
NUMBERS = 4000


@pytest.fixture(autouse=True)
def _new_ledger(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()


def account(noise_multiplier: float = 0.5, clip: float = 2.0, epsilon: float = 1e6) -> SiloAccount:
    return SiloAccount(clip=clip, noise_multiplier=noise_multiplier, epsilon=epsilon, delta=DELTA)


def row(step: float) -> torch.Tensor:
    return torch.full((1, NUMBERS), step, dtype=torch.float64).float()


@pytest.mark.parametrize("step", [0.0, 1.0, 1e30, 1e300, np.nan])
def test_an_update_is_clipped_and_has_the_noise(tmp_path: Path, step: float) -> None:
    noisy, _ = account().release(tmp_path, "job", row(step))
    length = 0.0 if not step < 1e39 else min(2.0, step * np.sqrt(NUMBERS))  # 1e39: beyond float32
    noise = noisy - length / np.sqrt(NUMBERS)
    assert abs(noise.mean()) < 5.2 / np.sqrt(NUMBERS)
    assert abs(noise.std() - 1) < 5.2 / np.sqrt(2 * NUMBERS)


def test_opposite_data_sets_differ_by_twice_the_clip_alone(tmp_path: Path) -> None:
    """The charged sensitivity, which a data set's replacement reaches, at so little noise that it shows."""
    small = account(noise_multiplier=2.0**-9, epsilon=1e9)
    one, _ = small.release(tmp_path, "job", row(1e9))
    other, _ = small.release(tmp_path, "job", row(-1e9))
    along = np.ones(NUMBERS) / np.sqrt(NUMBERS)
    assert abs((one - other) @ along - 4.0) < 6 * 2**0.5 * 2.0**-8 + 1e-4


def test_the_budget_holds_over_all_jobs(tmp_path: Path) -> None:
    most = gaussian_epsilon(2 * np.sqrt(3) / 40.0, DELTA) + 1e-6  # three updates; neighbours replace the data
    limited = account(40.0, epsilon=most)
    for job in ("one", "one", "two"):
        limited.release(tmp_path, job, row(0.5))
    before = (tmp_path / LEDGER).read_bytes()
    for job in ("one", "three"):
        with pytest.raises(BudgetError):
            account(40.0, epsilon=most).release(tmp_path, job, row(0.5))
    assert (tmp_path / LEDGER).read_bytes() == before
    charged = [(entry.run, entry.round, entry.unit) for entry in read_entries(tmp_path / LEDGER)]
    assert charged == [("one", 1, "silo"), ("one", 2, "silo"), ("two", 1, "silo")]
    statement = Statement.from_json(json.loads((tmp_path / STATEMENT).read_text()))
    assert statement.epsilon == pytest.approx(most, abs=2e-6)
    assert all(check.outcome == "holds" for check in check_epsilons(statement))
    words = str(statement)
    assert "Replacing the data of one silo (all the records it holds) with any other data" in words
    assert "metrics, events, streams, logs, files" in words


def test_what_cannot_be_charged_does_not_leave(tmp_path: Path) -> None:
    ledger, statement = tmp_path / LEDGER, tmp_path / STATEMENT
    account().release(tmp_path, "job", row(1.0))
    copy = ledger.read_bytes()
    account().release(tmp_path, "job", row(1.0))
    whole = ledger.read_bytes()
    for content in (b"", copy, whole.replace(b"gaussian", b"gaussiaM", 1)):  # lost, an older copy, edited
        ledger.write_bytes(content)
        with pytest.raises(IntegrityError):
            account().release(tmp_path, "job", row(1.0))
        assert ledger.read_bytes() == content
    ledger.write_bytes(whole)
    statement.unlink()
    account().release(tmp_path, "job", row(1.0))  # it is written again
    assert "3 updates" in statement.read_text()
    for begun in ("not JSON", "{}"):
        statement.write_text(begun)
        with pytest.raises(RunFolderError):
            account().release(tmp_path, "job", row(1.0))
    assert len(read_entries(ledger)) == 3
    with pytest.raises(FedveilError):
        account().release(tmp_path / "missing", "job", row(1.0))


def test_a_deleted_ledger_is_not_begun_again(tmp_path: Path) -> None:
    """Not even where the statement is gone too: the operator alone makes a ledger."""
    account().release(tmp_path, "job", row(1.0))
    ledger, statement = tmp_path / LEDGER, tmp_path / STATEMENT
    kept = ledger.read_bytes()
    for path in (ledger, statement):
        path.unlink()
        with pytest.raises(IntegrityError, match=r"ledger\.jsonl: no such file: put back the ledger"):
            account().release(tmp_path, "job", row(1.0))
        assert not ledger.exists()
    ledger.write_bytes(kept)
    account().release(tmp_path, "job", row(1.0))
    assert len(read_entries(ledger)) == 2


def test_a_statement_that_cannot_be_written_keeps_an_update_back(tmp_path: Path) -> None:
    (tmp_path / f".{STATEMENT}.tmp").mkdir()
    with pytest.raises(RunFolderError):
        account().release(tmp_path, "job", row(1.0))
    assert len(read_entries(tmp_path / LEDGER)) == 1  # charged, and nothing was released


@pytest.mark.parametrize("clip", [0.0, -1.0, np.inf, np.nan])
def test_a_clip_that_bounds_nothing_is_refused(clip: float) -> None:
    with pytest.raises(PrivacyError):
        account(clip=clip)


@pytest.mark.parametrize("noise_multiplier", [0.0, -1.0, np.nan, np.inf, 2.0**-11, 2.0**20])
def test_noise_that_hides_nothing_is_refused(noise_multiplier: float) -> None:
    with pytest.raises(PrivacyError):
        account(noise_multiplier)

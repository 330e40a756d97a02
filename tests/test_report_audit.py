"""The report's audit and spectrum sections: an attack that refutes the claim is an error in red."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.report.page import report_page, write_report
from fedveil.report.run_data import load_run
from fedveil.training.server.denoise import spectrum
from tests.test_audit import finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("runs"), rounds=2)


def with_audit(
    folder: Path,
    epsilon: float | None,
    refuted: bool,
    area: tuple[float, float, float] = (0.5123, 0.49, 0.53),
) -> str:
    bound = (
        None
        if epsilon is None
        else {"epsilon": epsilon, "confidence": 0.95, "canaries": 60, "guesses": 30, "right": 29}
    )
    document = {
        "schema_version": 1,
        "inference": {
            **dict(zip(("auc", "low", "high"), area, strict=True)),
            "confidence": 0.95,
            "true_positive_rates": [[0.001, 0.002], [0.01, 0.011]],
        },
        "bound": bound,
        "refuted": refuted,
    }
    (folder / "audit.json").write_text(json.dumps(document))
    return report_page(load_run(folder))


def test_a_refuted_claim_is_an_error_in_red(folder: Path) -> None:
    page = with_audit(folder, 9.5, True)
    assert 'class="notice error"' in page
    assert "ERROR: the run claims" in page
    assert "29 of 30 guesses right about 60 canaries" in page
    assert ".notice.error" in page


def test_a_standing_claim_is_said_to_stand_and_no_more(folder: Path) -> None:
    page = with_audit(folder, 0.2, False)
    assert "stands: no attack here contradicts it" in page
    assert 'class="notice error"' not in page
    assert "0.5123" in page


def test_an_area_below_one_half_is_told_as_records_that_differ(folder: Path) -> None:
    """Significantly: the interval excludes one half, and nothing is said where it does not."""
    for high, told in ((0.38, True), (0.4999, True), (0.5, False), (0.53, False)):
        page = with_audit(folder, 0.2, False, area=(0.341, 0.30, high))
        assert ("these differ from each other" in page) is told, high


def test_inference_alone_judges_nothing(folder: Path) -> None:
    page = with_audit(folder, None, False)
    assert "True positive rate at 0.001 false positives" in page
    assert "contradicts" not in page


def test_a_run_shows_its_spectrum_on_request(folder: Path) -> None:
    (folder / "audit.json").unlink(missing_ok=True)
    assert "Spectrum of the model" not in write_report(folder).read_text(encoding="utf-8")
    page = write_report(folder, with_spectrum=True).read_text(encoding="utf-8")
    assert "Spectrum of the model" in page
    assert 'id="audit"' not in page


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000])
def test_spectrum_of_small_vectors(size: int) -> None:
    found = spectrum(torch.ones(size))
    assert len(found.frequencies) == len(found.magnitudes) <= 48
    assert all(abs(value) < 1e-9 for value in found.magnitudes)


def test_white_noise_is_flat_and_a_wave_is_a_line() -> None:
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=100_000))
    high = [m for f, m in zip(*vars(spectrum(noise)).values(), strict=True) if f > 1000]
    assert max(abs(magnitude / 100_000**0.5 - 1) for magnitude in high) < 0.2
    wave = torch.sin(2 * torch.pi * 37 * torch.arange(4096, dtype=torch.float64) / 4096)
    found = spectrum(wave)
    peak = found.frequencies[int(np.argmax(found.magnitudes))]
    assert 33 < peak < 42


def test_a_long_vector_has_the_spectrum_of_a_short_one_in_a_quarter_of_the_memory() -> None:
    """Of a length with a large prime factor, whose own transform takes 125 bytes for each number."""
    length = (1 << 20) + 7
    at = torch.arange(length, dtype=torch.float64) / length
    vector = torch.from_numpy(np.random.default_rng(0).normal(size=length)) + 3.0
    vector += torch.sin(2 * torch.pi * 2000 * at)
    tracemalloc.start()
    found = spectrum(vector.float())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * length
    power = torch.fft.rfft(vector).abs().square()[1:].numpy()
    for frequency, magnitude in zip(found.frequencies[30:-1], found.magnitudes[30:-1], strict=True):
        near = power[
            int(frequency * 0.9) : int(frequency * 1.1)
        ]  # within a band, whose neighbours are 1.3 apart
        if not 1500 < frequency < 2700:
            assert abs(magnitude / np.sqrt(near.mean()) - 1) < 0.2
    loudest = found.frequencies[int(np.argmax(found.magnitudes))]
    assert 1700 < loudest < 2400
    assert max(found.magnitudes[:4]) < 6 * length**0.5  # the mean of 3 does not leak

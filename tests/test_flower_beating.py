"""Signs of life go on, whatever became of one of them."""

from __future__ import annotations

import logging
import threading

import pytest

from fedveil.flower import beating as beats


def test_a_sign_of_life_that_failed_is_told_by_its_kind_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beats, "_BEAT_SECONDS", 0.001)
    given, again = [], threading.Event()

    def beat() -> bool:
        given.append(1)
        if len(given) == 1:
            raise ValueError("a page of a proxy")
        if len(given) == 3:
            again.set()
        return len(given) > 2

    log = logging.getLogger("fedveil.test")
    with caplog.at_level(logging.WARNING, log.name), beats.beating(beat, log):
        assert again.wait(20)
    assert [record.getMessage() for record in caplog.records] == [
        "the link took no sign of life (ValueError)",
        "the link took no sign of life (refused)",
    ]


@pytest.mark.parametrize("failed", [5, 6])
def test_who_is_taken_for_gone_is_told_after_a_minute(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: ten seconds lie between two signs, and one that is taken ends the count."""
    monkeypatch.setattr(beats, "_BEAT_SECONDS", 0.0)
    assert beats._MOST_FAILED == 6
    given, over = [], threading.Event()

    def beat() -> bool:
        given.append(1)
        if len(given) > 2 * failed + 2:
            over.set()
        return len(given) % (failed + 1) == 0

    with beats.beating(beat, logging.getLogger("fedveil.test")) as lost:
        assert over.wait(20)
        assert lost.is_set() == (failed == 6)

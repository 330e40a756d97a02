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

    def beat() -> None:
        given.append(1)
        if len(given) == 1:
            raise ValueError("a page of a proxy")
        again.set()

    log = logging.getLogger("fedveil.test")
    with caplog.at_level(logging.WARNING, log.name), beats.beating(beat, log):
        assert again.wait(20)
    assert [record.getMessage() for record in caplog.records] == [
        "the link took no sign of life (ValueError)"
    ]

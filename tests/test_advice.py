"""What a run says about its noise: from released models and public numbers, when there is a reason, and no sooner."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.methods.method import begin_state
from fedveil.privacy.ledger import Head
from fedveil.report.page import write_report
from fedveil.run.advice import advice, advice_of
from fedveil.run.config.experiment import merge, parse
from fedveil.run.folder.documents import RoundRow, read_rows
from fedveil.run.folder.run_folder import Checkpoint
from fedveil.run.setup import prepare
from fedveil.run.steps.training import movement


def rows(
    *, noise: float = 10.0, model: float = 10.0, most: float | None = 20.0, **changes: Any
) -> list[RoundRow]:
    """Rows 0 and 20 of a run of 10,000 parameters; the noise's length is known to 2 %."""
    first = {"round": 0, "seconds": 0.0, "test": None, "epsilon": None, "clip": 1.0}
    found = {"parameters": 10_000, "model": model, "noise": noise, "most": most}
    return [
        RoundRow.model_validate(one) for one in (first, first | {"round": 20, "movement": found} | changes)
    ]


def test_noise_that_nothing_outweighs_asks_for_people_and_not_for_another_clip() -> None:
    said = advice(rows(most=9.9), 20)
    assert said is not None
    assert "1 times as far as people can" in said
    assert "No clip and no learning rate" in said
    assert "No clip" not in (advice(rows(most=10.1), 20) or "")


def test_a_run_is_judged_by_its_last_round() -> None:
    """People's part grows with the rounds, noise with their root."""
    assert "No clip" in (advice(rows(most=9.9), 20) or "")
    assert "No clip" not in (advice(rows(most=9.9), 21) or "")


def test_updates_that_are_not_heard_ask_for_a_clip_that_follows() -> None:
    said = advice(rows(), 20)
    assert said is not None
    assert "clip = { start = 0.1 }" in said
    assert "reach at most 10%" in said  # S^2 = 3 * 100 * sqrt(2 / 10,000)
    assert "at least 4.9 times" in said
    followed = rows(clip=0.2)
    assert "The clip follows" in (advice(followed, 20) or "")


def test_people_who_are_heard_hear_nothing() -> None:
    """Noise 10 and people's part 10 / 1.5 (or a little less, by the spread) is the border."""
    border = math.hypot(10, math.sqrt(100 / 1.5**2 - 3 * 100 * math.sqrt(2e-4)))
    assert advice(rows(model=border * 1.02), 20) is None
    assert advice(rows(model=border * 0.98), 20) is not None


@pytest.mark.parametrize("changes", [{"movement": None}, {"noise": 0.0}])
def test_nothing_is_said_where_nothing_is_known(changes: dict[str, Any]) -> None:
    assert advice(rows(**changes), 20) is None
    assert advice([], 20) is None


PLAIN: dict[str, Any] = {
    "name": "a",
    "rounds": 3,
    "data": {"name": "digits", "n_users": 20, "n_silos": 3},
    "local": {"learning_rate": 0.1, "batch_size": 8},
    "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0},
    "server": {"learning_rate": 4 / 3},
}


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"server": {"optimizer": {"name": "sgd", "momentum": 0.5}}}, False),
        ({"server": {"optimizer": {"name": "sgd", "schedule": "cosine"}}}, False),
        ({"server": {"optimizer": {"name": "fedadam"}}}, False),
        ({"server": {"denoiser": {"name": "laplacian", "smoothing": 1.0}}}, False),
        ({"method": {"name": "uldp-group", "clip": 0.5, "noise_multiplier": 5.0, "group_size": 2}}, False),
    ],
)
def test_steps_that_are_not_plain_and_noise_that_is_not_known_have_no_movement(
    changes: dict[str, Any], known: bool
) -> None:
    prepared = prepare(parse(merge(PLAIN, changes), "test"))
    model = prepared.task.initial()
    start = Checkpoint(
        round=0,
        model=model,
        state=begin_state(prepared.method, model),
        row={"round": 0},
        ledger=Head(count=0, digest=""),
    )
    assert (movement(prepared, start, model) is not None) is known


def test_noise_moves_the_model_as_far_as_is_said(tmp_path: Path) -> None:
    """A run without updates is noise alone: its length has the relative standard deviation 1 / sqrt(2 d)."""
    result = made(tmp_path, steps=1e-12)
    last = RoundRow.model_validate(read_rows(result.folder / "metrics.jsonl")[-1]).movement
    assert last is not None
    assert last.most is not None
    away = 6 / math.sqrt(2 * last.parameters)
    assert last.parameters == 3_002
    assert abs(last.model / last.noise - 1) < away < 0.1
    assert last.most == pytest.approx(3 * 40.0 * 0.5 / 2)  # rounds, rate, clip, silos
    assert last.noise == pytest.approx(math.sqrt(3 * 3_002) * 40.0 * 5 * 0.5 / (30 * 2))


def made(folder: Path, *, steps: float, flip: bool = False, **changes: Any) -> fv.Result:
    random = np.random.default_rng(0)
    features, user = random.normal(size=(90, 1500)), np.repeat(np.arange(30), 3)
    targets = (features[:, 0] > 0).astype(int)
    people = fv.population(
        -features if flip else features,
        targets,
        user=user,
        silo=user % 2,
        n_users=30,
        task="classification",
        classes=[0, 1],
        silos=[0, 1],
    )
    torch.manual_seed(0)
    method = fv.uldp_avg(clip=0.5, noise_multiplier=5.0, local_learning_rate=steps)
    return fv.train(
        torch.nn.Linear(1500, 2),
        people,
        method=method,
        rounds=3,
        delta=1e-3,
        folder=folder,
        server_learning_rate=20.0,
        **changes,
    )


def test_a_run_says_it_once_while_it_trains_and_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = made(tmp_path, steps=0.1, callbacks=[fv.Progress()])
    assert result.advice is not None
    assert "more people, fewer parameters or a larger epsilon" in result.advice.lower()
    printed = capsys.readouterr().out
    assert printed.count("noise") == 1
    assert advice_of(result.folder) == result.advice
    assert result.advice in write_report(result.folder).read_text().replace("&#39;", "'")


def test_advice_is_the_same_whoever_the_records_belong_to(tmp_path: Path) -> None:
    """With the same released models: a row's private fields say nothing to it."""
    result = made(tmp_path, steps=0.1)
    read = [RoundRow.model_validate(row) for row in read_rows(result.folder / "metrics.jsonl")]
    others = [
        row.model_copy(
            update={
                "norms": (9.0,) * 7,
                "clipped": 1.0,
                "contributions": 3,
                "nonfinite": 1,
                "seconds": 7.0,
                "test": {},
            }
        )
        for row in read
    ]
    assert advice(others, 3) == advice(read, 3) is not None

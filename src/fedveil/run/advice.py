"""Derive advice about a run from its public numbers.

No private data is read, so advice costs no budget. Round 0 may have remarks on the model and its features
(:mod:`fedveil.run.remarks`); the rest concerns noise.

In expectation, noise moves a model of d parameters by ``noise``. The square of that displacement has the relative
standard deviation sqrt(2 / d). If the model is ``model`` away from its start, the users' updates have moved it by
at most

    S = sqrt(max(0, model^2 - noise^2) + 3 noise^2 sqrt(2 / d))

(three standard deviations; if the users' displacement is small, its cross term with the noise is smaller than
that). The users' displacement grows at most with the number of rounds, and the noise with its root. Thus after T
rounds noise / S is at least sqrt(t / T) times its value after t rounds. Before anything is known about the users,
noise / ``most`` is the noise-to-travel ratio (docs/theory/noise-to-travel.md). The numbers are those of
:mod:`fedveil.run.steps.training`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fedveil.run.folder.documents import RoundRow, read_lines

_LEAST: Final = 1.5
"""Smallest ratio of noise to the users' displacement at which advice is given."""


def advice_of(folder: Path) -> str | None:
    """Return the advice on the complete rounds of a run folder; None if there is no reason for any.

    Raises:
        RunFolderError: ``metrics.jsonl`` is damaged.
    """
    rows, _ = read_lines(folder / "metrics.jsonl", RoundRow)
    return advice(rows, rows[-1].round) if rows else None


def advice(rows: Sequence[RoundRow], rounds: int) -> str | None:
    """Return the advice after the last row, one line each; None if public numbers give no reason for any.

    Lines are only appended as the run proceeds, so that :func:`news` can show the new ones.

    Args:
        rows: rows of ``metrics.jsonl``, from round 0 on.
        rounds: T, the planned number of rounds.
    """
    lines = [remark for row in rows for remark in row.remarks]
    noise = _of_noise(rows, rounds)
    return "\n".join([*lines, *([] if noise is None else [noise])]) or None


def heard_before(folder: Path, number: int) -> list[RoundRow]:
    """Return the rows of a run folder before round ``number``; empty if no folder with rows is here.

    Raises:
        RunFolderError: ``metrics.jsonl`` is damaged.
    """
    path = folder / "metrics.jsonl"
    return [row for row in read_lines(path, RoundRow)[0] if row.round < number] if path.exists() else []


def news(advice: str | None, lines: int) -> str | None:
    """Return the advice without its first ``lines`` lines; None if nothing is left."""
    return "\n".join((advice or "").split("\n")[lines:]) or None


def _of_noise(rows: Sequence[RoundRow], rounds: int) -> str | None:
    """Return the advice about noise after the last row; None if noise is small or unknown."""
    last = rows[-1] if rows else None
    if last is None or last.movement is None or not last.movement.noise or not last.round:
        return None
    movement, progress = last.movement, math.sqrt(last.round / rounds)
    # Certain case: noise grows with sqrt(t) and `most` with t, so noise / most after T rounds is its value after t,
    # times progress = sqrt(t / T).
    if movement.most is not None and movement.noise * progress >= movement.most:
        times = f"{movement.noise * progress / movement.most:.2g} times"
        return (
            f"After all {rounds} rounds the noise will have moved the model {times} as far as people can, even if all "
            "their updates were as long as the clip and agreed. No clip and no learning rate changes that; more "
            "people, fewer parameters or a larger epsilon would."
        )
    # S of the module's docstring: an upper limit of the users' displacement.
    spread = 3 * movement.noise**2 * math.sqrt(2 / movement.parameters)
    people = math.sqrt(max(0.0, movement.model**2 - movement.noise**2) + spread)
    if movement.noise * progress < _LEAST * people:
        return None
    times = f"at least {movement.noise / people:.2g} times"
    sentence = f"In {last.round} rounds the noise has moved the model {times} as far as people's updates have"
    if movement.most is None:
        return f"{sentence}. More people, fewer parameters or a larger epsilon would help."
    share = f"at most {min(1.0, people / movement.most):.0%}"
    sentence += f"; these reach {share} of what the clip allows, because they are short or disagree"
    if len({row.clip for row in rows}) > 1:
        return (
            f"{sentence}. The clip follows their length; more people, fewer parameters or a larger epsilon would "
            "help."
        )
    return (
        f"{sentence}. If they are shorter than the clip, a smaller clip removes noise and nothing else: "
        "method.clip = { start = 0.1 } makes it follow their median length within the same epsilon, and more local "
        "steps make them longer. If they disagree, more people or fewer parameters help."
    )

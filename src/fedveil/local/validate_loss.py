"""Whether a loss is what the bound on a contribution needs: a function of one batch, and of nothing before it.

A bound on each contribution bounds what a user moves only if no other contribution reads the records. A loss that
keeps a state carries records from one contribution to the next; one whose terms depend on other rows makes a record's
gradient depend on whatever lies beside it, padding included. Made-up records alone are looked at.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fedveil.errors import ModelError
from fedveil.local.losses import Loss, TaskKind
from fedveil.local.stillness import WHY, held_by
from fedveil.registry import is_own
from fedveil.stage import ignored, redefined

_ROWS = 40  # more than the fewest that losses of hard examples keep
_FIXED = ("__call__", "in_closed_form", "by_row")
_WORDS = ("name", "tasks", "check_targets", "check_task")
_CALLS = 4  # in between, with larger outputs each: what a running mean of losses would follow


def validate_loss(loss: Loss, task: TaskKind, outputs: int, like: Shaped[Tensor, "n *target"]) -> None:
    """Try a loss on made-up outputs and targets, and refuse it if its terms are not those of a batch by itself.

    Args:
        loss: whatever its origin.
        task: what the targets mean.
        outputs: k, how many numbers the model gives a record.
        like: targets of the right dtype and shape, no value of which is looked at.

    Raises:
        ModelError: it fails, gives no finite term per record, keeps a state, draws random numbers, lets a record's term
            depend on other rows although it is called separable, lets padding rows count, or brings slopes of its own.
    """
    if not is_own(type(loss)) and type(loss).slopes is not Loss.slopes:
        raise ModelError(
            f"loss {loss.name} brings slopes of its own, or derives from a loss that has some: they are asked for many "
            "contributions at once, and nobody has tried them; derive from fedveil's Loss, and give `records` alone"
        )
    unused = redefined(loss, *_FIXED)
    if unused:
        raise ModelError(
            f"loss {loss.name} defines {', '.join(unused)}: trainers take the mean over a batch themselves and decide "
            "how they compute it; give `records` alone"
        )
    if reason := ignored(loss, ("records", "check_targets"), _WORDS):
        raise ModelError(f"loss {loss.name} {reason}: trainers use `records`; define that")
    generator = torch.Generator().manual_seed(0)
    made_up = torch.randn(_ROWS, outputs, generator=generator)
    targets = _targets(task, outputs, like)
    present = torch.ones(_ROWS)
    with torch.random.fork_rng(devices=[]):
        with suppress(Exception):  # what is made at a first call, of made-up rows, and then stays is no state
            loss.records(made_up.clone(), targets.clone(), present.clone())
        terms = _terms(loss, made_up, targets, present)
        for call in range(_CALLS):
            _terms(loss, made_up * 3.0 ** (call + 1), targets.roll(1, 0), present)
        again = _terms(loss, made_up, targets, present)
        if not torch.equal(terms, again):
            raise ModelError(
                f"loss {loss.name} gives other terms when it is called again: it keeps a state, or draws random "
                f"numbers; {WHY}: compute each batch by itself"
            )
        if loss.separable:
            beside = torch.cat([made_up, 2 - 3 * made_up])
            crowd = _terms(loss, beside, torch.cat([targets, targets.flip(0)]), torch.ones(2 * _ROWS))
            alone = [
                _terms(loss, made_up[row : row + 1], targets[row : row + 1], present[:1])
                for row in range(_ROWS)
            ]
            if not all(
                torch.allclose(terms, one, rtol=1e-4, atol=1e-5) for one in (crowd[:_ROWS], torch.cat(alone))
            ):
                raise ModelError(
                    f"loss {loss.name}: the term of a record changes with the other records of its batch, or with "
                    "their number (a mean, a weight or a rank over the batch): compute each term from its own row; "
                    "weights of classes are declared: model.class_weights"
                )
        else:
            absent = torch.cat([present[:-2], torch.zeros(2)])
            padded = torch.cat([made_up[:-2], 1 - made_up[-2:]])
            kept = [_terms(loss, some, targets, absent)[:-2] for some in (made_up, padded)] + [
                _terms(loss, made_up[:-2], targets[:-2], present[:-2])
            ]
            if not all(torch.allclose(kept[0], one, rtol=1e-4, atol=1e-5) for one in kept[1:]):
                raise ModelError(
                    f"loss {loss.name}: terms change with rows whose mask is 0; such rows pad a batch, as many of them "
                    "as others need: leave them out of everything"
                )


def _terms(
    loss: Loss, outputs: Float[Tensor, "n k"], targets: Shaped[Tensor, "n *target"], mask: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the terms; a loss that holds something else afterwards is refused."""
    before = held_by(loss)
    try:
        terms = loss.records(outputs.clone(), targets.clone(), mask.clone())
    except ModelError as error:
        raise ModelError(
            f"{error}; return one term a record: no mean over them (reduction='none'), and no second axis"
        ) from None
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(
            f"loss {loss.name} fails on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if terms.shape != mask.shape:
        raise ModelError(f"loss {loss.name} must give one term a record, not {tuple(terms.shape)}")
    if held_by(loss) != before:
        raise ModelError(
            f"loss {loss.name} writes to what it holds (a buffer, an attribute, a variable that it closes over): "
            f"{WHY}; compute each batch by itself"
        )
    return terms.detach()


def _targets(task: TaskKind, outputs: int, like: Shaped[Tensor, "n *target"]) -> Shaped[Tensor, "r *target"]:
    """Return made-up targets: every class in turn, events and none, different numbers."""
    shape = (_ROWS, *like.shape[1:])
    row = torch.arange(_ROWS)
    if task == "survival":
        return torch.stack([(row % 2 == 0).to(like.dtype), (row + 1).to(like.dtype)], -1)
    values = row % max(outputs, 2) if task == "classification" else row / _ROWS
    return values.to(like.dtype).reshape(_ROWS, *(1 for _ in shape[1:])).expand(shape)

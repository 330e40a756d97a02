"""Whether a model or a loss carries anything from one batch to the next outside the parameters that are trained.

What a forward pass writes - a buffer, a frozen parameter, a counter, a list of past losses - is read by the pass after
it, which may be another user's: it goes around every bound. A copy is tried before training
(:mod:`fedveil.local.validate`, :mod:`fedveil.local.validate_loss`), and :func:`unchanged` looks again after every round
of training, so that state which a few made-up batches did not show ends the run before anything is released.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from fedveil.errors import ModelError

if TYPE_CHECKING:
    from fedveil.local.task import Task

_RECURRENT: Final = (
    "_flat_weights",
    "_flat_weight_refs",
)  # where recurrent layers list their parameters again
_OWN: Final = frozenset({*vars(nn.Module()), *_RECURRENT})
_DEPTH: Final = 4
WHY: Final = (
    "what one pass writes and the next one reads carries records of one user into the training of others"
)


def fingerprint(module: nn.Module, of_objects: Callable[[object], object] = id) -> dict[str, object]:
    """Return what a module holds by name: parameters, buffers, and plain attributes of all its parts.

    Numbers, texts, tensors and containers of them are told by their values, other objects by which they are, or by what
    ``of_objects`` says of them.
    """
    found: dict[str, object] = {}
    for path, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held |= {name: value for name, value in vars(part).items() if name not in _OWN}
        found |= {f"{path}.{name}".lstrip("."): _told(value, of_objects) for name, value in held.items()}
    return found


def difference(before: Mapping[str, object], module: nn.Module) -> str | None:
    """Return the name of the first thing in which a module is not what it was; None: it is."""
    now = fingerprint(module)
    return next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)


@contextmanager
def unchanged(task: Task) -> Iterator[None]:
    """Refuse a task whose model or loss is another one after training than before.

    Raises:
        ModelError: names what was written.
    """
    modules = [("model", task.model), *(("loss", module) for module in task.loss.modules())]
    before = [fingerprint(module) for _, module in modules]
    yield
    for (what, module), then in zip(modules, before, strict=True):
        name = difference(then, module)
        if name is not None:
            raise ModelError(
                f"the {what} wrote to its {name} while it was trained: {WHY}; nothing was released"
            )


def _told(value: object, of_objects: Callable[[object], object], depth: int = 0) -> object:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), zlib.crc32(data.numpy().tobytes())
    if isinstance(value, int | float | str | bytes | None):
        return repr(value)
    if depth < _DEPTH and isinstance(value, Mapping):
        return [(repr(key), _told(one, of_objects, depth + 1)) for key, one in value.items()]
    if depth < _DEPTH and isinstance(value, list | tuple | deque):
        return [_told(one, of_objects, depth + 1) for one in value]
    return of_objects(value)

"""Whether a model or a loss carries anything from one batch to the next outside the parameters that are trained.

What a forward pass writes - a buffer, a frozen parameter, a counter, a list of past losses - is read by the pass after
it, which may be another user's: it goes around every bound. A copy is tried before training
(:mod:`fedveil.local.validate`, :mod:`fedveil.local.validate_loss`), and :func:`unchanged` looks again after every round
of training, so that state which a few made-up batches did not show ends the run before anything is released.
"""

from __future__ import annotations

import inspect
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.errors import ModelError

if TYPE_CHECKING:
    from fedveil.local.task import Task

_AGAIN: Final = ("_flat_weights", "_flat_weight_refs")
"""Where recurrent layers list their parameters again."""

_OWN: Final = frozenset({*vars(nn.Module()), *_AGAIN})
_PLAIN: Final = (int, float, complex, str, bytes, np.generic, type(None))
_DEPTH: Final = 6
WHY: Final = (
    "what one pass writes and the next one reads carries records of one user into the training of others"
)


def fingerprint(module: nn.Module, of_objects: Callable[[object], object] = id) -> dict[str, object]:
    """Return what a module holds by name: parameters, buffers, and plain attributes of all its parts.

    Numbers, texts, tensors, arrays, containers of them, functions by what they close over and name, and objects by
    their attributes are told by their values; anything else by which it is, or by what ``of_objects`` says of it.
    """
    found: dict[str, object] = {}
    for path, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held |= {name: value for name, value in vars(part).items() if name not in _OWN}
        found |= {f"{path}.{name}".lstrip("."): held_by(value, of_objects) for name, value in held.items()}
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
    model, loss = fingerprint(task.model), held_by(task.loss)
    yield
    if (name := difference(model, task.model)) is not None:
        raise ModelError(f"the model wrote to its {name} while it was trained: {WHY}; nothing was released")
    if held_by(task.loss) != loss:
        raise ModelError(
            f"loss {task.loss.name} holds something else after training than before: {WHY}; nothing was released"
        )


def held_by(value: object, of_objects: Callable[[object], object] = id, depth: int = 0) -> object:
    """Return what a value holds, as far down as a few levels; equal for values that hold the same."""

    def told(one: object) -> object:
        return held_by(one, of_objects, depth + 1)

    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, zlib.crc32(data.numpy().data)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype, value.shape, zlib.crc32(np.ascontiguousarray(value).data)
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth >= _DEPTH or isinstance(value, type | ModuleType):
        return of_objects(value)
    if isinstance(value, nn.Module):
        return fingerprint(value, of_objects)
    if isinstance(value, Mapping):
        return [(repr(key), told(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return [told(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(told(one)) for one in value)
    if isinstance(value, FunctionType):
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        plain = [one for one in named if not callable(one)]
        closed = inspect.getclosurevars(value).nonlocals
        return of_objects(value.__code__), told([*plain, closed, value.__defaults__, value.__kwdefaults__])
    if isinstance(value, MethodType):
        return of_objects(value.__func__), told(value.__self__)
    if isinstance(value, partial):
        return told([value.func, value.args, value.keywords])
    if hasattr(value, "__dict__"):
        return of_objects(type(value)), told(vars(value))
    with suppress(Exception):  # whatever an object of another library says of itself
        return of_objects(type(value)), zlib.crc32(pickle.dumps(value))
    return of_objects(value)

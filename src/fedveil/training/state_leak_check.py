"""Detect state that a model or a loss carries between batches outside the trained parameters.

If a forward pass writes a buffer, a frozen parameter, a counter or a list of past losses, the next pass reads it. The
next pass may belong to another user, so the state bypasses every bound. A copy is tried before training
(:mod:`fedveil.training.validation`). :func:`check_unchanged` checks again after every round of training. State that a
few made-up batches did not show then ends the run before anything is released.

The check covers all that the model, its hooks and the loss can reach by attributes, containers, closures, defaults
and the names in their own code, through objects, classes, functions and modules of the user. For installed packages
it covers the objects and not the code.

Not claimed: a defence against code that hides on purpose. The check finds mistakes. It does not see a file, a C
extension, the cache of ``functools``, a context variable, a weak reference, methods of a metaclass, or an attribute
set on a third-party module.
"""

from __future__ import annotations

import pickle
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from logging import Logger
from pathlib import Path
from random import Random
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.errors import ModelError
from fedveil.registry import is_own
from fedveil.training.shapes import equal_with_nan

if TYPE_CHECKING:
    from fedveil.training.losses import Loss
    from fedveil.training.task import Task

_AGAIN: Final = ("_flat_weights", "_flat_weight_refs")
"""Attributes in which recurrent layers list their parameters a second time."""

_TRAINED: Final = frozenset({"_parameters", "_buffers", "_modules", "training", *_AGAIN})
_PLAIN: Final = (int, float, complex, str, bytes, np.generic, type(None))
_MOST: Final = 100_000
_TOO_MUCH: Final = (
    f"the model or the loss reaches more than {_MOST:,} objects, or a chain of many hundreds: too much to compare "
    "before and after every round; keep numbers in tensors or arrays, and name in its code what it needs alone"
)
WHY: Final = (
    "what one pass writes and the next one reads carries records of one user into the training of others"
)


def fingerprint(module: nn.Module, of_objects: Callable[[object], object] = id) -> dict[str, object]:
    """Return the values that a module and its sub-modules hold, by name.

    The values are parameters, buffers, attributes, hooks and the code of ``forward``.

    Numbers, texts, tensors, arrays and containers of them are compared by value. Functions are compared by the values
    that they close over and name, and objects by their attributes. Anything else is compared by ``of_objects``: by
    default its identity.

    Raises:
        ModelError: the module holds a value that cannot be compared.
    """
    with _refusing_chains():
        return _Teller(of_objects).module(module)


def first_difference(before: Mapping[str, object], module: nn.Module) -> str | None:
    """Return the name of the first value that differs from a module's fingerprint; None if none does."""
    now = fingerprint(module)
    return next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)


@contextmanager
def check_unchanged(task: Task) -> Iterator[None]:
    """Refuse a task whose model or loss differs after training from before.

    Raises:
        ModelError: names the changed value.
    """
    model = fingerprint(task.model)
    with check_loss_unchanged(task.loss):
        yield
    if (name := first_difference(model, task.model)) is not None:
        raise ModelError(f"the model wrote to its {name} while it was trained: {WHY}; nothing was released")


@contextmanager
def check_algorithm_unchanged(local: object, start: Tensor) -> Iterator[None]:
    """Refuse a local algorithm that holds something else after a round, or that wrote to the model all start from.

    Algorithms of fedveil do neither, and are not looked at.

    Args:
        local: the local steps of the round, with their algorithm if they have one.
        start: (d,) the global model.

    Raises:
        ModelError: names the class of the algorithm.
    """
    algorithm = getattr(local, "algorithm", None)
    if algorithm is None or is_own(type(algorithm)):
        yield
        return
    where = f"{type(algorithm).__name__}, given as local algorithm,"
    before, original = snapshot(algorithm), start.clone()
    yield
    if start.shape != original.shape or not equal_with_nan(start, original):
        raise ModelError(
            f"{where} wrote to the global model while contributions were trained, and others start from it: bounding "
            "each bounds nothing; nothing was released"
        )
    if snapshot(algorithm) != before:
        raise ModelError(
            f"{where} holds something else after training than before: {WHY}; nothing was released"
        )


@contextmanager
def check_loss_unchanged(loss: Loss) -> Iterator[None]:
    """Refuse a loss that differs after training from before.

    The Gram trainer never calls the model, so it checks the loss alone.

    Raises:
        ModelError: names the loss.
    """
    before = snapshot(loss)
    yield
    if snapshot(loss) != before:
        raise ModelError(
            f"loss {loss.name} holds something else after training than before: {WHY}; nothing was released"
        )


def snapshot(value: object, of_objects: Callable[[object], object] = id) -> object:
    """Return a comparable description of the values that an object holds, equal for equal values.

    Raises:
        ModelError: the object holds an iterator, or more values than can be compared.
    """
    with _refusing_chains():
        return _Teller(of_objects).describe(value)


@contextmanager
def _refusing_chains() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ModelError(_TOO_MUCH) from None


def tensor_bytes(value: Tensor) -> bytes:
    """Return the bytes of a tensor's numbers; for a sparse tensor, also those of its indices."""
    match value.layout:
        case torch.sparse_coo:
            parts = [value._indices(), value._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            parts = [value.crow_indices(), value.col_indices(), value.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            parts = [value.ccol_indices(), value.row_indices(), value.values()]
        case _:
            parts = [value]
    flat = (part.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in parts)
    return b"".join(part.numpy().tobytes() for part in flat)


class _Teller:
    """Describer of values for comparison.

    A value that occurs again is described by the number of its first occurrence.
    """

    def __init__(self, of_objects: Callable[[object], object]) -> None:
        self._of_objects = of_objects
        # The object is kept alive with its number: Python reuses the id of a freed object.
        self._seen: dict[int, tuple[int, object]] = {}

    def module(self, module: nn.Module) -> dict[str, object]:
        """Return a description of each value in each sub-module, by name."""
        descriptions: dict[str, object] = {}
        for path, part in module.named_modules():
            attributes = {**part._parameters, **part._buffers}
            attributes |= {name: value for name, value in vars(part).items() if name not in _TRAINED}
            for name, value in attributes.items():
                # The keys of hooks are a counter of the whole process, so only the hooks themselves are compared.
                hooks = name.endswith("_hooks") and isinstance(value, Mapping)
                description = self._each(value.values()) if hooks else self.describe(value)
                descriptions[f"{path}.{name}".lstrip(".")] = description
            descriptions[f"{path}.forward()".lstrip(".")] = self.describe(type(part))
        return descriptions

    def describe(self, value: object) -> object:
        """Return a description of a value."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            hung = [
                (name, self.describe(attribute))
                for name, attribute in vars(value).items()
                if not _is_compiler_note(name)
            ]
            return value.dtype, value.shape, zlib.crc32(tensor_bytes(value)), hung
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.dtype, value.shape, zlib.crc32(np.ascontiguousarray(value).data)
        # A cycle of references would recurse for ever; its second visit is described by its number.
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if len(self._seen) > _MOST:
            raise ModelError(_TOO_MUCH)
        return self._within(value)

    def _each(self, values: Iterable[object]) -> list[object]:
        return [self.describe(value) for value in values]

    def _within(self, value: object) -> object:  # noqa: C901 - one case for each kind of value
        match value:
            case nn.Module():
                return self.module(value)
            case Mapping():
                return [
                    (self.describe(key), self.describe(item)) for key, item in value.items()
                ], self._attributes(value)
            case list() | tuple() | deque() | np.ndarray():
                return self._each(value), self._attributes(value)
            case set() | frozenset():
                # A new _Teller for each element: the order of a set differs between processes and must not matter.
                return sorted(
                    repr(_Teller(self._of_objects).describe(element)) for element in value
                ), self._attributes(value)
            case Random():
                return self.describe(value.getstate()), self._attributes(value)
            case torch.Generator():
                return self.describe(value.get_state())
            case FunctionType():
                return self._of_objects(value.__code__), self._function(value)
            case MethodType():
                return self._each((value.__func__, value.__self__))
            case staticmethod() | classmethod():
                return self.describe(value.__func__)
            case property():
                return self._each((value.fget, value.fset))
            case partial():
                return self._each((value.func, value.args, value.keywords))
            case type():
                return self._of_objects(value), self._class(value)
            case ModuleType() | BuiltinFunctionType() | Logger():
                return self._of_objects(value)
            case Iterator():
                raise ModelError(
                    f"the model or the loss holds a {type(value).__name__}, which gives something else whenever it is "
                    f"asked: {WHY}; keep a list, and choose from it by the batch alone"
                )
        return self._object(value)

    def _function(self, function: FunctionType) -> list[object]:
        """Return the closure and defaults of a function, and the values of the names in its code."""
        cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
        descriptions = self._each((*cells, function.__defaults__, function.__kwdefaults__, vars(function)))
        if _is_installed(function.__module__):
            return descriptions
        names = _names(function.__code__)
        within = {
            name: module for name in names if (module := sys.modules.get(name)) and not _is_installed(name)
        }
        return descriptions + self._named(names, within | function.__globals__, set())

    def _named(self, names: tuple[str, ...], space: Mapping[str, object], behind: set[int]) -> list[object]:
        """Return the values of these names in a module's namespace, and in the user's modules that they name."""
        descriptions = []
        for name, value in ((name, space[name]) for name in names if name in space):
            if isinstance(value, ModuleType) and not _is_installed(value.__name__):
                if id(value) not in behind:
                    behind.add(id(value))
                    descriptions += self._named(names, vars(value), behind)
            else:
                descriptions.append((name, self.describe(value)))
        return descriptions

    def _class(self, kind: type) -> list[object]:
        """Return the members of a user's class and of its bases: values, and functions by what they hold."""
        if _is_installed(kind.__module__):
            return []
        own = [
            (name, member)
            for name, member in vars(kind).items()
            if isinstance(member, FunctionType | staticmethod | classmethod | property)
            or not name.startswith(("__", "_abc_"))
        ]
        return [*((name, self.describe(member)) for name, member in own), *self._each(kind.__bases__)]

    def _object(self, value: object) -> object:
        """Return a description of an object: its class and attributes, or its pickle if it has no attributes."""
        if hasattr(value, "__dict__") or any(_slots(base) for base in type(value).__mro__):
            return self.describe(type(value)), self._attributes(value)
        with suppress(Exception):  # pickling a third-party object may raise anything
            return self.describe(type(value)), zlib.crc32(pickle.dumps(value))
        return self._of_objects(value)

    def _attributes(self, value: object) -> list[object]:
        """Return the attributes of an object, in its dictionary and its slots."""
        slots = sorted(
            {name for base in type(value).__mro__ for name in _slots(base) if hasattr(value, name)}
        )
        described = [(name, self.describe(getattr(value, name))) for name in slots]
        return described + [
            (name, self.describe(attribute)) for name, attribute in getattr(value, "__dict__", {}).items()
        ]


def _is_compiler_note(name: str) -> bool:
    """Return whether torch.compile set this attribute on a tensor; it then holds no number of a record."""
    return name.startswith("_dynamo_")


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _slots(kind: type) -> list[str]:
    """Return the names of a class's slots as attributes, with private names mangled."""
    slots = vars(kind).get("__slots__", ())
    own = [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.endswith("__")]
    return [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name for name in own]


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names in a code object and in the functions inside it."""
    inner = [
        name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)
    ]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python, to fedveil, or to an installed package."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names or root == __name__.partition(".")[0]:
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:
        return False
    folder = Path(file).parent
    return any((folder.parent if Path(file).stem == "__init__" else folder).glob("*.dist-info"))

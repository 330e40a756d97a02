"""Define builders that vary another builder's method: they have its keys, and keys of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import get_type_hints

from fedveil.methods.method import Method

Builder = Callable[..., Method]


def variant_of(base: Callable[..., object], **fixed: object) -> Callable[[Builder], Builder]:
    """Make a builder from a function that changes the method of another builder, or uses common keys.

    Args:
        base: the other builder, or a dataclass whose fields are keys; its keys are the variant's too.
        fixed: keys of ``base`` that the variant does not have, with their values.

    Returns:
        A decorator of a function that takes the result of ``base``. The function's keyword arguments are the
            variant's own keys. In the signature they stand after the base's keys without a default, and before those
            with one.
    """

    def decorate(change: Builder) -> Builder:
        plain, *own = inspect.signature(change).parameters.values()
        theirs = [one for one in inspect.signature(base).parameters.values() if one.name not in fixed]
        needed = [one for one in (*theirs, *own) if one.default is one.empty]
        others = [one for one in (*own, *theirs) if one.default is not one.empty]

        @wraps(change)
        def build(**keys: object) -> Method:
            changed = {one.name: keys.pop(one.name) for one in own if one.name in keys}
            return change(base(**fixed, **keys), **changed)

        hints = get_type_hints(base, include_extras=True) | get_type_hints(change, include_extras=True)
        build.__annotations__ = {
            name: hint for name, hint in hints.items() if name not in (plain.name, *fixed)
        }
        build.__signature__ = inspect.Signature(needed + others)  # type: ignore[attr-defined]
        return build

    return decorate

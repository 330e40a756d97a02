"""Import objects that a user names by path: a model factory, a loss, a metric."""

import importlib
from collections.abc import Collection
from typing import cast

from fedveil.errors import ConfigError, did_you_mean
from fedveil.sanitize import sanitize


def check_name(name: str, what: str, known: Collection[str]) -> None:
    """Check that a name is known or is an import path ``package.module:name``.

    Raises:
        ConfigError: it is neither; the error lists the known names.
    """
    module, _, attribute = name.partition(":")
    if name not in known and not (module and attribute):
        raise ConfigError(
            f"no {what} named {name!r}; use one of {', '.join(known)}, or "
            f"package.module:name{did_you_mean(name, known)}"
        )


def import_object(path: str, what: str, known: Collection[str] = ()) -> object:
    """Return the object at an import path ``package.module:attribute``.

    Raises:
        ConfigError: the path has another form (the error lists the known names), or nothing can be imported from it.
    """
    check_name(path, what, known)
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an import runs the module's code, which may raise anything
        why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{what} {path}: module {module_name} cannot be imported ({sanitize(str(why))})"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{what} {path}: module {module_name} has no {attribute}")
    return cast(object, getattr(module, attribute))

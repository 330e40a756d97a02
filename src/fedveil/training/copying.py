"""Copy a caller's model, without the wrappers that only change how it is computed.

Training works on a copy, so that the caller's model stays unchanged. A model that cannot be copied is refused, and
the error names the attribute that prevents it.
"""

from __future__ import annotations

import copy
import sys

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedveil.errors import ModelError
from fedveil.sanitize import sanitize


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    while is_compiled(model) or isinstance(model, nn.DataParallel | DistributedDataParallel):
        model = model._orig_mod if is_compiled(model) else model.module  # type: ignore[assignment]
    return model


def is_compiled(model: nn.Module) -> bool:
    """Return whether ``torch.compile`` made this module from another one."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # looked up, not imported: the import takes seconds
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def copy_module(module: nn.Module, name: str = "model") -> nn.Module:
    """Return a copy of a module that shares nothing with it.

    Args:
        module: a model or a loss.
        name: its name in an error.

    Raises:
        ModelError: the module cannot be copied; the error names the attribute that prevents it.
    """
    try:
        copied = copy.deepcopy(module)
    except Exception as error:  # any error of an object that the module holds
        raise ModelError(
            f"the {name} cannot be copied, and training works on a copy: {_obstacle(module)} "
            f"({type(error).__name__}: {sanitize(str(error))})"
        ) from error
    if copied is module or not isinstance(copied, nn.Module):
        raise ModelError(
            f"the {name} cannot be copied, and training works on a copy: {type(module).__name__}.__deepcopy__ returns "
            "no other module"
        )
    return copied


def _obstacle(module: nn.Module) -> str:
    """Return the attribute of a module that cannot be copied, and how to correct it."""
    for path, part in module.named_modules():
        own = {**vars(part), **part._parameters, **part._buffers}
        for name, value in own.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            member = f"{path}.{name}".lstrip(".")
            if isinstance(value, Tensor) and not value.is_leaf:
                return (
                    f"{member} is computed from other tensors (torch.nn.utils.weight_norm, torch.nn.utils.prune): use "
                    "torch.nn.utils.parametrizations.weight_norm, make pruning permanent by "
                    "torch.nn.utils.prune.remove, and detach() other computed tensors"
                )
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{member} is a {type(value).__name__}; keep locks, files, generators and connections out of it"
    return f"{type(module).__name__} holds something that cannot"


def named_layers(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's direct children by all their names; named_children leaves out every second name of a child."""
    return [
        (name, layer)
        for name, layer in parent.named_modules(remove_duplicate=False)
        if name and "." not in name
    ]

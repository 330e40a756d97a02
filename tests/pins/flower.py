"""What fedveil uses of Flower: every name that is imported, and the methods that are called, with signatures.

`python -m tests.pins.flower` writes those of the installed release into flower.json, beside what it has of others.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import fedveil.flower

RECORDED: Final = Path(__file__).parent / "flower.json"
CALLED: Final = {
    "flwr.supercore.control.control_http_client:ControlHttpClient": (
        "RegisterNode",
        "StartRun",
        "StopRun",
        "close",
    ),
    "flwr.supercore.runtime:RuntimeHttpClient": (
        *("AcquireTask", "PullTaskInput", "SendTaskHeartbeat"),
        *("GetNodes", "PushMessages", "PullMessages", "PullObject", "PushObject"),
        *("ConfirmMessageReceived", "PushTaskOutput", "close"),
    ),
    "flwr.supernode.fleet_http_client:FleetHttpClient": (
        *("from_server_address", "ActivateNode", "DeactivateNode", "SendNodeHeartbeat"),
        *("PushMessages", "PullMessages"),
    ),
    "flwr.superlink.cli.flower_superlink:SuperLinkLifespan": ("startup", "shutdown"),
    "flwr.app:Message": ("has_content", "has_error"),
    "flwr.server.superlink.linkstate:LinkState": (
        *("get_node_id_by_public_key", "get_object", "store_message_and_object_tree", "store_object"),
    ),
    "flwr.supercore.object_store:ObjectStore": ("preregister", "put"),
}
"""Methods beside those that an import names."""


def installed() -> str:
    """The installed release, by its first two numbers."""
    return ".".join(version("flwr").split(".")[:2])


def imported() -> list[str]:
    """Every name of Flower's that fedveil imports, with its module."""
    names = set()
    for path in Path(str(fedveil.flower.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                names |= {f"{node.module}:{alias.name}" for alias in node.names}
    return sorted(names)


def contract() -> dict[str, str]:
    """What the installed release gives under each name: a signature, the fields of a message, or a value."""
    found = {}
    for name in imported():
        module, _, attribute = name.partition(":")
        given = getattr(importlib.import_module(module), attribute)
        found[name] = _described(given)
        for method in CALLED.get(name, ()):
            found[f"{name}.{method}"] = _described(getattr(given, method))
    return found


def _described(given: Any) -> str:
    fields = getattr(getattr(given, "DESCRIPTOR", None), "fields_by_name", None)
    if fields is not None:
        return f"message of {', '.join(sorted(fields))}"
    if inspect.isclass(given) and issubclass(given, Exception):
        return "exception"
    if inspect.isclass(given) and issubclass(given, Enum):  # its signature is another in every Python
        return f"one of {', '.join(one.name for one in given)}"
    if not callable(given):
        return repr(given)
    try:
        signature = inspect.signature(given)
    except ValueError:
        return "callable"
    plain = [
        one.replace(
            annotation=inspect.Parameter.empty, default=... if one.default is not one.empty else one.empty
        )
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(plain)).replace("Ellipsis", "...")


if __name__ == "__main__":
    known = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    RECORDED.write_text(
        json.dumps(known | {installed(): contract()}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )

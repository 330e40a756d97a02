"""Flower's Runtime API, of a link and of a SuperNode: tasks are for who knows a secret, the rest for who has one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeVar

import httpx
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient

from fedveil.errors import ConfigError

_SECONDS: Final = 120.0
_ACQUIRE: Final = "/flwr.proto.Runtime/AcquireTask"
_Client = TypeVar("_Client", bound=ProtobufClient)

VERSION: Final = RuntimeVersionHttpInterceptor(component_name="fedveil")
"""What a client says of itself."""


def task_client(address: str, secret: bytes) -> RuntimeHttpClient:
    """Return a client that may ask for tasks."""
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
    return RuntimeHttpClient(address, interceptors=[VERSION, signed])


def run_client(address: str, token: str) -> RuntimeHttpClient:
    """Return a client that holds a task."""
    return RuntimeHttpClient(address, interceptors=[VERSION, RuntimeTokenHttpInterceptor(token=token)])


def local_client(client: _Client, transport: httpx.BaseTransport | None = None) -> _Client:
    """Return a client of Flower's whose bytes stay on this host, whatever proxy the environment names."""
    client._client.close()
    client._client = httpx.Client(transport=transport, timeout=_SECONDS, trust_env=False)
    return client


# --- flower version ------------------------------------------------------------------------------------------------
# The releases of Flower that letters are carried over: any other is refused before anything of it is imported.
#
# The carrier stands on names of Flower's that are not all its public interface. What they were in each of these
# releases is recorded, and compared by ``tests/test_flower_contract.py``; under another release nobody knows what a
# name does, and the door that keeps strangers out is made of them.

RELEASES: Final = ("1.41", "1.42")
"""By their first two numbers; as the extra ``federation`` has them."""


def check_flower_version() -> None:
    """Return if the installed release of Flower is one of them.

    Raises:
        ConfigError: it is another one, or there is none; says which would do, and how to install it.
    """
    wanted = f"{RELEASES[0]} to {RELEASES[-1]}"
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise ConfigError(
            "a federation needs flwr, which is not installed: pip install 'fedveil[federation]'"
        ) from None
    if ".".join(found.split(".")[:2]) not in RELEASES:
        raise ConfigError(
            f"flwr {found} is installed, and this release of fedveil carries letters over flwr {wanted} alone: its "
            "doors are made of names that another release may have changed. pip install 'fedveil[federation]' brings "
            "one of them; nothing was started"
        )

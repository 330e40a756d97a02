"""Flower's Runtime API, of a link and of a SuperNode: tasks are for who knows a secret, the rest for who has one."""

from __future__ import annotations

from typing import Final, TypeVar

import httpx
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient

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

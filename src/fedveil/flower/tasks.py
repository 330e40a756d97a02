"""What the coordinator asks of its link through the private socket: register nodes, start a run, hold its one task."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedveil.flower.bundle import Bundle, ForeignBundleError
from fedveil.flower.child import ProcessError
from fedveil.flower.sockets import address

_SECONDS: Final = 120.0
_BEAT_SECONDS: Final = 10.0
_VERSION: Final = RuntimeVersionHttpInterceptor(component_name="fedveil")
_ACQUIRE: Final = "/flwr.proto.Runtime/AcquireTask"
_log = logging.getLogger("fedveil.coordinator")
_Client = TypeVar("_Client", bound=ProtobufClient)


class Tasks:
    """The coordinator's side of its link.

    Args:
        socket: of the link's private door.
        secret: that the link was started with.
    """

    def __init__(self, socket: Path, secret: bytes) -> None:
        self._socket = socket
        self._control = self._reaching(ControlHttpClient("http://link", interceptors=[_VERSION]))
        signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
        self._executor = self._reaching(RuntimeHttpClient("http://link", interceptors=[_VERSION, signed]))
        self._bundle = Bundle.build()

    def close(self) -> None:
        """Close the connections."""
        self._control.close()
        self._executor.close()

    def register(self, keys: Iterable[bytes]) -> None:
        """Tell the link the node keys of the silos: it serves no other.

        Raises:
            httpx.HTTPError: it does not take one.
        """
        for key in keys:
            self._control.RegisterNode(RegisterNodeRequest(public_key=key))

    @contextlib.contextmanager
    def playing(self) -> Iterator[Grid]:
        """Start a run and hold its task; what is sent over the Grid is sent within that run.

        Raises:
            ProcessError: the link did not start it.
            httpx.HTTPError: the link is gone.
        """
        fab = Fab(self._bundle.digest, self._bundle.content, {})
        run = self._control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        with contextlib.closing(self._grid(self._token(run))) as grid:
            client = grid._runtime_client
            with _beating(client):
                status = SubStatus.FAILED
                try:
                    self._begin(grid, run)
                    yield grid
                    status = SubStatus.COMPLETED
                finally:
                    with contextlib.suppress(httpx.HTTPError):
                        client.PushTaskOutput(PushTaskOutputRequest(sub_status=status))

    def _token(self, run: int) -> str:
        """Return the token of a run's task; tasks of runs that this coordinator did not start are ended unplayed."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        while True:
            task = self._executor.AcquireTask(request)
            if not task.token:
                raise ProcessError("the link started no run")
            if task.task.run_id == run:
                return str(task.token)
            _log.warning("a run that this coordinator did not start is not played")
            with contextlib.closing(self._grid(task.token)) as grid:
                grid._runtime_client.PushTaskOutput(
                    PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="not fedveil's")
                )

    def _begin(self, grid: HttpGrid, run: int) -> None:
        """Take the task's input, which must be of the run that was started and of the bundle that was built.

        Raises:
            ForeignBundleError: it is not.
        """
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        if given.run.run_id != run:
            raise ForeignBundleError("a task is of another run than the one that was started")
        self._bundle.check(given.fab.content)
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, run
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))

    def _grid(self, token: str) -> HttpGrid:
        grid = HttpGrid("link", insecure=True, token=token)
        grid._client = self._reaching(
            RuntimeHttpClient(
                "http://link", interceptors=[_VERSION, RuntimeTokenHttpInterceptor(token=token)]
            )
        )
        return grid

    def _reaching(self, client: _Client) -> _Client:
        """Return a client of Flower's whose bytes go through the socket, whatever proxy the environment names."""
        client._client.close()
        client._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=address(self._socket)), timeout=_SECONDS, trust_env=False
        )
        return client


@contextlib.contextmanager
def _beating(client: RuntimeHttpClient) -> Iterator[None]:
    """Say again and again that the task is held: Flower takes it back after 30 seconds of silence."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError as error:
                _log.warning("the link took no sign of life (%s)", type(error).__name__)
            if ended.wait(_BEAT_SECONDS):
                return

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join(_SECONDS)

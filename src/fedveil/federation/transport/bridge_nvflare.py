"""A bridge inside an NVFlare job: a controller at the server, a component at each site.

Messages travel as NVFlare's auxiliary requests (public since NVFlare 2.3), which the server sends at once; NVFlare's
tasks would wait until a site asks for the next one.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, Final

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from .bridge import Bridge, ask_key_process  # relative: the files may lie in a job

SOCKET_VARIABLE: Final = "FEDVEIL_KEY_PROCESS"
"""Environment variable of a site's NVFlare client: path of the key process's socket. The site's operator sets it, not
the job, so that who submits a job chooses no socket of a site. ``{site}`` in it stands for the site's name."""

_TOPIC: Final = "fedveil.message"
_MESSAGE: Final = "message"
_ANSWER_SECONDS: Final = 90.0
"""More than :func:`~.bridge.ask_key_process` waits."""

_LOOK_SECONDS: Final = 0.5


class SiteBridge(Executor):  # type: ignore[misc]
    """At a site: hands messages to the silo's key process, and returns its answers."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Accept messages from the beginning of a job."""
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(_TOPIC, self._answer)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Refuse a task: the bridge has none, but NVFlare wants an executor at every site."""
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        path = os.environ.get(SOCKET_VARIABLE, "").replace("{site}", fl_ctx.get_identity_name())
        try:
            if not path:
                raise OSError(f"{SOCKET_VARIABLE} is not set; it names the socket of the silo's key process")
            answer = ask_key_process(path, bytes(request[_MESSAGE]))
        except OSError as error:
            self.log_warning(fl_ctx, f"a message was not answered: {error}", fire_event=False)
            return make_reply(ReturnCode.SERVICE_UNAVAILABLE)
        reply = make_reply(ReturnCode.OK)
        reply[_MESSAGE] = answer
        return reply


class ServerBridge(Controller):  # type: ignore[misc]
    """At the server: carries messages between the link of this host and the sites, until the job is aborted.

    Args:
        bridge: path of the link's socket ``run/bridge``.
        silos: name of the silo at each site; a site that is missing here has the silo of its own name.
        idle_seconds: the job ends when no message has passed for so long.
    """

    def __init__(
        self, bridge: str, silos: dict[str, str] | None = None, idle_seconds: float = 3600.0
    ) -> None:
        super().__init__()
        self._path, self._silos, self._idle_seconds = bridge, silos or {}, idle_seconds

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: all is done in the control flow."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: the control flow ends by itself."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Carry messages."""
        bridge = Bridge(self._path)
        engine = fl_ctx.get_engine()
        try:
            for client in engine.get_clients():
                bridge.add(self._silos.get(client.name, client.name), partial(_send, engine, client.name))
            while not abort_signal.triggered and bridge.idle_seconds() < self._idle_seconds:
                time.sleep(_LOOK_SECONDS)
        finally:
            bridge.close()


def _send(engine: Any, site: str, message: bytes) -> bytes:
    """Send a message to a site; return its answer."""
    request = Shareable()
    request[_MESSAGE] = message
    with engine.new_context() as fl_ctx:
        replies = engine.send_aux_request([site], _TOPIC, request, _ANSWER_SECONDS, fl_ctx, optional=True)
    reply = (replies or {}).get(site)
    if reply is None or reply.get_return_code() != ReturnCode.OK:
        raise OSError(f"site {site}: {'no reply' if reply is None else reply.get_return_code()}")
    return bytes(reply[_MESSAGE])

"""The coordinator at its host: starts its link, and plays the runs that are submitted to its socket, one after another.

The party holds the identity key and the run folders; the link, a process of its own, holds the TLS key. Where another
user of the host serves the link, whoever breaks into it reads neither (``start_link``). Who can open
the party's socket can have runs of its own folders played: the socket's owner alone. A submission is one frame with the
path of a run folder; the answer is one frame that says how many runs are before it; the connection ends with the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fedveil.errors import FedveilError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.flower.coordinator_host.attached_link import AttachedLink
from fedveil.flower.coordinator_host.submission import END, SOCKET, RunOutcome, due_parts
from fedveil.flower.coordinator_host.tasks import LinkClient, TaskLostError
from fedveil.flower.coordinator_host.transport import carry_messages
from fedveil.flower.enrollment.certificates import node_key_pem
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.metrics import Meter, as_metrics
from fedveil.flower.metrics_server import MetricsServer
from fedveil.flower.silo_host.ipc import receive_frame, send_frame
from fedveil.flower.sockets import RunningFolder, listen
from fedveil.flower.status import party_status
from fedveil.protocols.errors import ProtocolError
from fedveil.run.folder.run_folder import RunFolder

_QUESTION_SECONDS: Final = 10.0
_PLAYER_SECONDS: Final = 3.0
_log = logging.getLogger("fedveil.coordinator")


@dataclass(frozen=True)
class _Submitted:
    """A run that waits or is played, and who waits for its end."""

    run: Path
    connection: socket.socket


class CoordinatorService:
    """A coordinator that is served: its link listens, knows the silos' node keys, and runs can be submitted.

    Args:
        home: the coordinator's folder.

    Raises:
        ConfigError: it is served already, or its link's socket is open to every user of the host.
        ProcessError: the link did not start; what it printed says why.
    """

    def __init__(self, home: CoordinatorFolder) -> None:
        self._home = home
        self._folder = RunningFolder(home.path)
        self._waiting: queue.Queue[_Submitted | None] = queue.Queue()
        self._stopping = False
        try:
            self.link = AttachedLink(home)
        except BaseException:
            self._folder.close()
            raise
        try:
            self._tasks = LinkClient(self.link.door, self.link.secret)
            self._tasks.register(map(node_key_pem, home.membership.nodes))
            self._listening = listen(self._folder / SOCKET)
            self._meter = Meter(home.membership.silos)
            self._page = MetricsServer(self._folder, home.settings.metrics, self._ready, self._figures)
        except BaseException:
            self.link.stop()
            self._folder.close()
            raise
        self._player = threading.Thread(target=self._play_all, daemon=True)
        self._player.start()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """End the run that is played, and the link; runs that wait are not played."""
        self._stopping = True
        self._page.close()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._waiting.put(None)
        self._player.join(
            _PLAYER_SECONDS
        )  # what it computes for longer is lost as if the process were killed
        self.link.stop()
        self._tasks.close()
        self._folder.close()

    def _ready(self) -> bool:
        return not self._stopping and not self.link.ended

    def _figures(self) -> str:
        return as_metrics(party_status(self._home.path, served=True)) + self._meter.text()

    def _accept(self) -> None:
        """Take submissions, until :meth:`stop`."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.settimeout(_QUESTION_SECONDS)
            try:
                run = Path(json.loads(receive_frame(connection))["run"])
                send_frame(connection, json.dumps({"before": self._waiting.unfinished_tasks}).encode())
                connection.settimeout(None)
            except (OSError, ProtocolError, ValueError, KeyError, TypeError) as error:
                _log.warning("what was submitted is no run (%s)", type(error).__name__)
                connection.close()
                continue
            self._waiting.put(_Submitted(run, connection))

    def _play_all(self) -> None:
        while True:
            submitted = self._waiting.get()
            if submitted is None:
                return
            with submitted.connection:
                if not self._stopping:
                    end = json.dumps(asdict(self._play(submitted.run))).encode()
                    submitted.connection.settimeout(_QUESTION_SECONDS)
                    with contextlib.suppress(OSError):  # nobody may wait any more
                        send_frame(submitted.connection, end)
            self._waiting.task_done()

    def _carry(self, party: CoordinatorParty[Any]) -> tuple[str, ...]:
        """Carry letters until a part of a run ends, in as many runs of Flower's as it takes; return who was silent."""
        silent: tuple[str, ...] = ()
        while not party.is_finished:
            try:
                with self._tasks.playing() as post:
                    silent = carry_messages(post, party, self._home, self._meter, lambda: self._stopping)
            except TaskLostError as lost:
                _log.warning("%s: the letters that are under way are sent again", lost)
        return silent

    def _play(self, path: Path) -> RunOutcome:
        """Play a run from its last complete round; leave in its folder how it ended, and return it."""
        error: str | None = None
        stopped: str | None = None
        silent: tuple[str, ...] = ()
        try:
            for party in due_parts(self._home, path):
                with contextlib.closing(party):
                    silent = self._carry(party)
                if party.refused is not None:
                    self._meter.count_refusal(party.refused)
                assert party.outcome is not None
                if (stopped := party.outcome.stopped) is not None:
                    break
        except FedveilError as problem:
            error = str(problem)
            _log.error("%s", problem)
        except (Exception, SystemExit) as problem:  # a metric of one's own may ask for the process's end
            if self._stopping or self.link.ended:
                error = "the coordinator's process was stopped"
            else:
                error = f"the coordinator failed ({type(problem).__name__}); its own log says where"
                _log.exception("a run failed")
        end = RunOutcome(error, stopped, silent)
        with contextlib.suppress(
            FedveilError
        ):  # said already, or there is no folder to say it in, or no room
            RunFolder(path).write_json(END, asdict(end))
        return end

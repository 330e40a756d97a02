"""The coordinator at its host: starts its link, and plays the runs that are submitted to its socket, one after another.

The party holds the identity key and the run folders; the link, a process of its own, holds the TLS key. Where another
user of the host serves the link, whoever breaks into it reads neither (``start_link``). A link that ends is started
again, and a run goes on with the next one. Who can open the party's socket can have runs of its own folders played: the
socket's owner alone. A submission is one frame with the
path of a run folder; the answer is one frame that says how many runs are before it; the connection ends with the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedveil.errors import ConfigError, FedveilError, ProtocolError
from fedveil.federation.hosts.child_process import ChildProcess, ProcessError
from fedveil.federation.hosts.folders import CoordinatorFolder, MembershipFile, members_of
from fedveil.federation.hosts.metrics_server import Meter, MetricsServer, as_metrics
from fedveil.federation.hosts.sockets import (
    END,
    LINK,
    SOCKET,
    RunningFolder,
    RunOutcome,
    accept_connections,
    address,
    check_closed,
    listen,
    receive_frame,
    send_frame,
)
from fedveil.federation.hosts.status import LinkConnection, party_status
from fedveil.federation.membership import MembershipDelivery
from fedveil.federation.transport.https.mailbox import MailboxClient

if TYPE_CHECKING:
    from fedveil.federation.coordinator import CoordinatorParty

# --- the link: a process that the coordinator starts itself, or one that another user of the host serves ---


_STARTING_SECONDS: Final = 120.0
_LINK_LOOK_SECONDS: Final = 0.05
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class AttachedLink:
    """A link that listens. One that this coordinator started is started again when it ends.

    Claim: the coordinator trusts no socket that every user of its host could have opened. Enforced here, whoever
    started the link.

    Args:
        home: the coordinator's folder.

    Raises:
        ConfigError: the link's folder or socket is open to every user of the host, its certificate is not valid at
            this clock, or ``link.toml`` asks for something impossible.
        ProcessError: the link did not start; what it logged says why.
    """

    def __init__(self, home: CoordinatorFolder) -> None:
        self._folder, self._party = home.link, home.path
        self._running = self._folder / "run"
        self.socket = self._running / LINK
        self._group = self._folder.group
        self._stopping = threading.Event()
        self._child: ChildProcess | None = None
        if home.settings.start_link:
            self._folder.check_certificate()
            self._child = self._start()
        try:
            self._wait()
            for path in (self._running, self.socket):
                check_closed(path)
        except BaseException:
            self.stop()
            raise
        if self._child is not None:
            threading.Thread(target=self._keep_running, daemon=True).start()

    @property
    def number(self) -> int | None:
        """The number of the process, if it was started here."""
        return None if self._child is None else self._child.number

    @property
    def listens(self) -> bool:
        """Return whether a process accepts connections at the socket."""
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                return tried.connect_ex(address(self.socket)) == 0
        except OSError:  # there is no folder yet
            return False

    def stop(self) -> None:
        """End it, if it was started here, and remove what it has left if it was killed."""
        self._stopping.set()
        if self._child is not None:
            self._child.stop()
            with contextlib.suppress(ConfigError, OSError):  # it is served again, or its folder is gone
                RunningFolder(self._running.parent, self._group).close()

    def _start(self) -> ChildProcess:
        settings = {"folder": str(self._folder.path), "party": str(self._party)}
        return ChildProcess("fedveil.federation.hosts.link", settings)

    def _keep_running(self) -> None:
        """Start the link again whenever it ends: out of memory, say. Silos and runs go on with the next one."""
        pause = _FIRST_PAUSE
        while self._child is not None and not self._stopping.is_set():
            began = time.monotonic()
            code = self._child.wait()
            if self._stopping.is_set():
                return
            pause = (
                _FIRST_PAUSE if time.monotonic() - began > _LONGEST_PAUSE else min(2 * pause, _LONGEST_PAUSE)
            )
            _log.warning("the link ended with exit code %d; it is started again in %g s", code, pause)
            if self._stopping.wait(pause):
                return
            try:
                self._child = self._start()
            except (
                ProcessError
            ) as error:  # no room for a process now; the one that has ended is waited for again
                _log.error("%s", error)

    def _wait(self) -> None:
        until = time.monotonic() + _STARTING_SECONDS
        while not self.listens:
            if self._child is not None and (code := self._child.ended) is not None:
                kind = ConfigError if code == ConfigError.exit_code else ProcessError
                raise kind(f"the link ended with exit code {code}; its messages are above")
            if time.monotonic() > until:
                raise ProcessError(f"{self.socket}: no link listens after {_STARTING_SECONDS:g} s")
            time.sleep(_LINK_LOOK_SECONDS)


# --- the service ---


_QUESTION_SECONDS: Final = 10.0
_PLAYER_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 2.0
_QUESTION_PATIENCE: Final = 60.0
"""Seconds after which a silo that does not say whether it would take part counts as silent."""

_log = logging.getLogger("fedveil.coordinator")


@dataclass(frozen=True)
class _Submitted:
    """A run that waits or is played, and who waits for its end.

    Attributes:
        path: the run folder, or a document of which the silos are only asked whether they would take part.
        is_document: whether it is such a document.
        connection: to the process that waits for the end.
    """

    path: Path
    is_document: bool
    connection: socket.socket


class CoordinatorService:
    """A coordinator that is served: its link knows the silos' keys, and runs can be submitted.

    Args:
        home: the coordinator's folder.

    Raises:
        ConfigError: it is served already, its link's socket is open to every user of the host, or the membership names
            no server key.
        ProcessError: the link did not start; what it logged says why.
    """

    def __init__(self, home: CoordinatorFolder) -> None:
        self._file, self._membership = MembershipFile(home), home.membership
        self._home, membership = home.under(self._membership), self._membership
        self._members = members_of(membership)
        self._newest, self._reported = membership, ""
        self._delivered = set[int]()  # silos that are known to have the present membership
        self._playing = threading.Lock()
        self._monitoring = threading.Lock()
        home.check_own_keys()
        self._folder = RunningFolder(home.path)
        self._waiting: queue.Queue[_Submitted | None] = queue.Queue()
        self._stopping = threading.Event()
        self._connection = LinkConnection(membership.silos)
        with contextlib.ExitStack() as begun:
            begun.callback(self._folder.close)
            self.link = AttachedLink(home)
            begun.callback(self.link.stop)
            self._monitor = MailboxClient(self.link.socket, self._members)
            begun.callback(self._monitor.close)
            self._connection.note_contacts(self._monitor.last_contacts())
            self._listening = listen(self._folder / SOCKET)
            begun.callback(self._listening.close)
            self._meter = Meter(membership.silos)
            self._page = MetricsServer(
                self._folder, home.settings.metrics, self.trouble, self._figures, self._connection.facts
            )
            begun.callback(self._page.close)
            self._begun = begun.pop_all()
        self._player = threading.Thread(target=self._play_all, daemon=True)
        self._player.start()
        for work in (self._accept, self._watch_link):
            threading.Thread(target=work, daemon=True).start()

    @property
    def silos(self) -> tuple[str, ...]:
        """Names of the silos of the membership that it is served under."""
        return self._membership.silos

    def wait(self) -> None:
        """Wait until :meth:`stop`."""
        self._stopping.wait()

    def stop(self) -> None:
        """End the run that is played, and the link; runs that wait are not played."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._waiting.put(None)
        # a computation that takes longer is lost as if the process were killed
        self._player.join(_PLAYER_SECONDS)
        self._begun.close()

    def trouble(self) -> str:
        """Return why no run can be played; empty if runs can."""
        return (
            "stopping: the coordinator is stopping" if self._stopping.is_set() else self._connection.trouble()
        )

    def _watch_link(self) -> None:
        """Introduce the members to every link that starts, and note which silos are connected."""
        connected = set[str]()
        while not self._stopping.wait(_LOOK_SECONDS):
            self._look_at_membership()
            with self._monitoring:
                self._connection.note_contacts(self._monitor.last_contacts())
            facts = self._connection.facts()
            now = set(facts.get("connected", ()))
            for name in sorted(now - connected):
                _log.info("silo %s is connected", name)
            for name in sorted(connected - now):
                _log.warning("silo %s is not connected any more", name)
            connected = now

    def _look_at_membership(self) -> None:
        """Go on under a membership that was accepted: between two runs, or at once where it takes a key away."""
        try:
            self._read_membership()
            if self._newest.digest != self._membership.digest and self._playing.acquire(blocking=False):
                try:
                    self._renew()
                finally:
                    self._playing.release()
        except FedveilError as error:
            if (reason := str(error)) != self._reported:
                _log.error("the changed membership is not used: %s", reason)
                self._reported = reason

    def _read_membership(self) -> None:
        """Note the newest membership that was accepted.

        Raises:
            FedveilError: the file is not one that this coordinator may go on under.
        """
        membership = self._file.read_if_changed(self._newest)
        if membership is not None:
            self._newest = membership

    def _renew(self) -> None:
        """Go on under the newest membership; no run is played now.

        Raises:
            FedveilError: a key cannot be read.
        """
        if self._newest.digest == self._membership.digest:
            return
        home = self._home.again().under(self._newest)
        _ = home.identity
        self._membership, self._home = self._newest, home
        self._members, silos = members_of(self._membership), self._membership.silos
        self._delivered = set()
        self._meter.set_silos(silos)
        with self._monitoring:
            self._connection.set_silos(silos)
            self._monitor.set_members(self._members)
        _log.info("continues under membership %d", self._membership.serial)

    def _figures(self) -> str:
        status = party_status(self._home.path, served=True) | {"connection": self._connection.facts()}
        return as_metrics(status) + self._meter.text()

    def _accept(self) -> None:
        """Take submissions, until :meth:`stop`."""
        for connection in accept_connections(self._listening, self._stopping.is_set):
            connection.settimeout(_QUESTION_SECONDS)
            try:
                submission = json.loads(receive_frame(connection))
                is_document = "document" in submission
                path = Path(submission["document" if is_document else "run"])
                send_frame(connection, json.dumps({"before": self._waiting.unfinished_tasks}).encode())
                connection.settimeout(None)
            except (OSError, ProtocolError, ValueError, KeyError, TypeError, RecursionError) as error:
                _log.warning("the submitted folder is not a run (%s)", type(error).__name__)
                connection.close()
                continue
            self._waiting.put(_Submitted(path, is_document, connection))

    def _play_all(self) -> None:
        while True:
            submitted = self._waiting.get()
            if submitted is None:
                return
            with submitted.connection, self._playing:
                if not self._stopping.is_set():
                    play = self._ask_policies if submitted.is_document else self._play
                    end = json.dumps(asdict(play(submitted.path))).encode()
                    submitted.connection.settimeout(_QUESTION_SECONDS)
                    with contextlib.suppress(OSError):  # nobody may wait any more
                        send_frame(submitted.connection, end)
            self._waiting.task_done()

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or self._is_superseded()

    def _is_superseded(self) -> bool:
        """Return whether a membership was accepted that takes a key from the present one, so that its run ends.

        It is asked of the two memberships: a flag that one thread sets while another goes on under the newest
        membership could stay, and would end every later run.
        """
        newest, present = self._newest, self._membership
        return newest is not present and not newest.extends(present)

    def _exchange(self, party: CoordinatorParty[Any], most_seconds: float = math.inf) -> tuple[str, ...]:
        """Exchange messages until a part of a run ends; return the silos whose silence has ended it.

        Args:
            party: the coordinator's side of the part.
            most_seconds: patience with silent silos, at most.

        Raises:
            ProcessError: this process is to end; the run goes on when its folder is opened again.
        """
        loop = import_module("fedveil.federation.transport.exchange_loop")
        settings = self._home.settings
        patience = loop.Patience(
            drop_after=settings.drop_after_seconds,
            give_up_after=min(settings.patience, most_seconds),
            max_work=settings.max_work_seconds,
        )
        mailbox = MailboxClient(self.link.socket, self._members, party.longest_answer)
        transport = MembershipDelivery(mailbox, self._membership, self._delivered)
        with contextlib.closing(transport):
            silent: tuple[str, ...] = loop.exchange_messages(
                transport, party, self._membership.silos, patience, self._meter, self._is_ending
            )
        if not party.is_finished:
            raise ProcessError(
                "a key was replaced or revoked in the membership that was accepted; resume the run under it"
                if self._is_superseded()
                else "the coordinator's process was stopped"
            )
        return silent

    def _ask_policies(self, document: Path) -> RunOutcome:
        """Ask all silos whether they would take part in a run of a document, and play nothing."""

        def ask() -> RunOutcome:
            submission = import_module("fedveil.federation.hosts.submission")
            with submission.policy_question(self._home, document) as party:
                silent = self._exchange(party, _QUESTION_PATIENCE)
            return RunOutcome(None, "; ".join(party.refusals) or None, silent)

        return self._outcome_of(ask)

    def _play(self, path: Path) -> RunOutcome:
        """Play a run from its last complete round; leave in its folder how it ended, and return it."""

        def play() -> RunOutcome:
            stopped: str | None = None
            silent: tuple[str, ...] = ()
            for party in import_module("fedveil.federation.hosts.submission").due_parts(self._home, path):
                with contextlib.closing(party):
                    silent = self._exchange(party)
                if party.refused is not None:
                    self._meter.count_refusal(party.refused.name)
                assert party.outcome is not None
                if (stopped := party.outcome.stopped) is not None:
                    break
            return RunOutcome(None, stopped, silent)

        end = self._outcome_of(play)
        with contextlib.suppress(
            FedveilError
        ):  # said already, or there is no folder to say it in, or no room
            import_module("fedveil.run.folder.run_folder").RunFolder(path).write_json(END, asdict(end))
        return end

    def _outcome_of(self, play: Callable[[], RunOutcome]) -> RunOutcome:
        """Return how a play ends; whatever it raises becomes a text, and this process goes on."""
        try:
            self._read_membership()
            self._renew()
            return play()
        except FedveilError as problem:
            error = str(problem)
            _log.error("%s", problem)
        except (Exception, SystemExit) as problem:  # a user's metric may ask for the end of the process
            if self._stopping.is_set():
                error = "the coordinator's process was stopped"
            else:
                error = f"the coordinator failed ({type(problem).__name__}); its own log says where"
                _log.exception("a run failed")
        return RunOutcome(error, None, ())

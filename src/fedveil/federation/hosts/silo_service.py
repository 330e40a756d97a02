"""A silo that is served on its host: the key process is this one, the network process one of its own.

The silo goes on under a membership that its operator, or its policy, accepts while it is served (:class:`ServedSilo`).

Claim: a served silo uses a membership only if the founder whom its charter names sealed it, it has a larger serial
number than the one before and all its revocations, and it names this silo's keys. Where it only adds silos or
is valid for longer, the silo goes on under the membership before until the coordinator proposes a session under the
new one, so that no run ends. Where it changes anything else, such as a key that it revokes, the silo goes on under it
at once, and leaves the session that is open.
Where ``membership.toml`` is none of these, the silo joins no session.
With ``accept_added_silos`` in its policy the silo itself accepts a membership that is delivered to it, if it only adds
silos or is valid for longer: no key that an operator compared is replaced or removed without the operator.

Conditions: only the silo's operator can write to its folder, and typed in the fingerprint (``silo accept``) or trusts
the founder's key for added silos; and the folder has its ledger, which refuses a smaller serial number at every start.
Enforced by :meth:`ServedSilo.receive`, :func:`~fedveil.federation.hosts.key_process.open_silo`, and
:meth:`Membership.check_follows`.
``tests/test_renewed_membership.py`` tries a foreign seal, an older membership, a lost revocation and another key;
``tests/test_membership_delivery.py`` the same for deliveries.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from pathlib import Path
from typing import Final

from fedveil.errors import FedveilError, HostError, ProtocolError
from fedveil.federation.enrollment.certificates import check_client_certificate
from fedveil.federation.hosts.child_process import ChildProcess
from fedveil.federation.hosts.folders import MembershipFile, SiloFolder
from fedveil.federation.hosts.key_process import KeyProcess, open_silo
from fedveil.federation.hosts.metrics_server import MetricsServer, as_metrics
from fedveil.federation.hosts.sockets import RunningFolder
from fedveil.federation.hosts.status import BridgeConnection, SiloConnection, party_status
from fedveil.federation.membership import CHARTER, Charter, Outcome, is_delivery, open_delivery, pack_answer
from fedveil.federation.silo import SiloParty
from fedveil.federation.transport.https.connection_faults import proxy_for


class ServedSilo:
    """The silo of a folder, opened again where its membership has changed; see the module.

    :meth:`receive` is called by one thread, the other methods by any.

    Args:
        folder: the silo's.

    Raises:
        FedveilError: whatever is wrong with keys, policy, schema or table.
    """

    def __init__(self, folder: SiloFolder) -> None:
        self._folder = folder
        self._file = MembershipFile(folder)
        self._party: SiloParty | None = open_silo(folder)
        self._newest, self._reported = self._party.membership, ""

    def receive(self, data: bytes) -> bytes:
        """Read a message of the coordinator and return the answer, as :meth:`SiloParty.receive` does."""
        self._read_membership()
        party = self._open_party()
        if is_delivery(data):
            with party.uncharged_work():
                return pack_answer(self._accept_delivered(data))
        newest, present = self._newest, party.membership
        if newest.digest != present.digest and (
            not newest.extends(present) or party.proposed_membership(data) == newest.digest
        ):
            party = self._renew(party)
        return party.receive(data)

    def in_progress_message(self, data: bytes) -> bytes:
        """Return a keep-alive that answers a message."""
        return self._open_party().in_progress_message(data)

    def longest(self, beginning: bytes) -> int:
        """Return the size limit in bytes of a message with this beginning."""
        return self._open_party().longest(beginning)

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        if self._party is not None:
            self._party.close()

    def _accept_delivered(self, data: bytes) -> Outcome:
        """Accept a delivered membership if the policy allows it, and say what was done with it.

        The session that is open goes on under the membership before.
        """
        try:
            offered = open_delivery(data, Charter.read(self._folder / CHARTER))
            if offered.digest == self._newest.digest:
                return Outcome.PRESENT
            if not self._folder.policy.accept_added_silos:
                return Outcome.BY_HAND
            added = offered.silos[len(self._newest.silos) :]
            self._file.accept_added(offered, self._newest)
        except FedveilError as error:
            self._report(f"a delivered membership is not used: {error}")
            return Outcome.REFUSED
        _log.warning(
            "accepted membership %d, fingerprint '%s', as policy.toml says (accept_added_silos); added: %s",
            offered.serial,
            offered.fingerprint,
            ", ".join(added) or "no silo",
        )
        self._read_membership()
        return Outcome.ACCEPTED

    def _report(self, reason: str) -> None:
        """Log why a membership is not used, once for each reason."""
        if reason != self._reported:
            _log.error("%s", reason)
            self._reported = reason

    def _open_party(self) -> SiloParty:
        if self._party is None:
            raise ProtocolError(
                "the silo cannot be opened under its newest membership; its log gives the reason"
            )
        return self._party

    def _read_membership(self) -> None:
        """Note the newest membership, if the file has changed; one that is not to be used ends no session."""
        try:
            membership = self._file.read_if_changed(self._newest)
        except FedveilError as error:
            # The party itself refuses sessions for as long as the file is not right.
            self._report(f"the changed membership is not used: {error}")
            return
        if membership is not None:
            self._newest = membership
        if self._party is None:
            self._party = self._reopened()

    def _renew(self, party: SiloParty) -> SiloParty:
        """Open the silo under the newest membership; the one before is closed first, because it has the ledger."""
        party.close()
        self._party = None
        self._party = self._reopened()
        return self._open_party()

    def _reopened(self) -> SiloParty | None:
        self._folder = self._folder.again()
        try:
            opened = open_silo(self._folder, after=self._newest)
        except FedveilError as error:
            _log.error("the silo cannot be opened under membership %d: %s", self._newest.serial, error)
            return None
        _log.info("continues under membership %d", opened.membership.serial)
        return opened


_AGAIN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 2.0
_SOON_DAYS: Final = 30.0
_log = logging.getLogger("fedveil.silo")


def limit_memory(folder: SiloFolder) -> None:
    """Let this process take no more memory than the silo's policy allows: what needs more fails, and is refused."""
    most = folder.policy.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class SiloService:
    """A silo that is served: the key process answers on a socket, to which messages are carried.

    With ``carrier = "https"`` the silo's own network process carries them; with ``"bridge"`` a process of Flower or
    NVFlare does, which this one neither starts nor knows.

    Args:
        folder: the silo's.

    Raises:
        ConfigError: the client certificate is missing, of another key or not valid at this clock, or the membership
            names no server key; this host has no group of the name in ``silo.toml``; or HTTPS_PROXY is not the URL of
            an HTTP proxy.
        CryptoError: the node key is missing, or others can read it.
    """

    def __init__(self, folder: SiloFolder) -> None:
        self._silo, group = folder, folder.group
        is_bridged = folder.settings.carrier == "bridge"
        self._settings = {} if is_bridged else self._network_settings()
        self._reports, bridged = SiloConnection(), BridgeConnection()
        self._connection = bridged if is_bridged else self._reports
        self._membership = MembershipFile(folder)
        self._newest = folder.membership
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._failure: FedveilError | None = None
        self._is_renewed = False
        with contextlib.ExitStack() as begun:
            self._running = RunningFolder(folder.path)
            begun.callback(self._running.close)
            key_process = KeyProcess(
                ServedSilo(folder), self._key_socket, group=group, note_contact=bridged.note_contact
            )
            begun.callback(key_process.close)
            threading.Thread(target=key_process.serve, daemon=True).start()
            if not is_bridged:
                self.network = self._start()
                begun.callback(lambda: self.network.stop())  # the one that runs then
            page = MetricsServer(
                self._running,
                folder.settings.metrics,
                self._connection.trouble,
                self._figures,
                self._connection.facts,
            )
            begun.callback(page.close)
            self._begun = begun.pop_all()
        for work in () if is_bridged else (self._keep_network, self._watch_membership):
            threading.Thread(target=work, daemon=True).start()

    @property
    def _key_socket(self) -> Path:
        return self._silo.path / self._silo.settings.socket

    def wait(self) -> None:
        """Wait until :meth:`stop`.

        Raises:
            FedveilError: the network process cannot be started again: a certificate is not valid, say.
        """
        self._stopping.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the network process and the key process."""
        with self._lock:
            self._stopping.set()
        self._begun.close()

    def _keep_network(self) -> None:
        """Start the network process again whenever it ends, and where the membership has changed."""
        while True:
            code = self.network.wait()
            if self._stopping.is_set():
                return
            if not self._is_renewed:
                self._reports.note_end(code)
                _log.warning("the network process ended with exit code %d; it is started again", code)
                self._stopping.wait(_AGAIN_SECONDS)
            self._is_renewed = False
            with self._lock:
                if self._stopping.is_set():
                    return
                try:
                    self._settings = self._network_settings()
                    self.network = self._start()
                except FedveilError as error:
                    if error.exit_code == HostError.exit_code:
                        _log.error("%s", error)
                        continue  # no room now; the process that has ended is waited for again
                    self._failure = error
                    self._stopping.set()
                    return

    def _watch_membership(self) -> None:
        """End the network process where a membership was accepted: the next one has its keys and certificate."""
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                membership = self._membership.read_if_changed(self._newest)
            except FedveilError:
                continue  # the key process says so
            if membership is not None:
                self._newest = membership
                with self._lock:
                    if not self._stopping.is_set():
                        self._is_renewed = True
                        self.network.stop()

    def _figures(self) -> str:
        status = party_status(self._silo.path, served=True) | {"connection": self._connection.facts()}
        return as_metrics(status)

    def _network_settings(self) -> dict[str, object]:
        folder = self._silo
        proxy_for(folder.settings.coordinator)  # refused here, and not again and again by the network process
        if (days := check_client_certificate(folder.path)) < _SOON_DAYS:
            _log.warning("the certificate client.crt is valid for %.0f days; the founder seals again", days)
        return {
            "folder": str(folder.path),
            "party": str(folder.path),
            "coordinator": folder.settings.coordinator,
            "key_process": str(self._key_socket),
            "server_key": folder.server_key,
            "largest": folder.policy.max_message_bytes,
        }

    def _start(self) -> ChildProcess:
        return ChildProcess(
            "fedveil.federation.transport.https.silo_client", self._settings, self._reports.note_report
        )

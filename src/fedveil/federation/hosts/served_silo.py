"""A silo that goes on under a membership that its operator, or its policy, accepts while it is served.

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

import logging
from typing import Final

from fedveil.errors import FedveilError, ProtocolError
from fedveil.federation.charter import CHARTER, Charter
from fedveil.federation.hosts.folders import MembershipFile, SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.membership_delivery import Outcome, is_delivery, open_delivery, pack_answer
from fedveil.federation.silo import SiloParty

_log: Final = logging.getLogger("fedveil.silo")


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
            raise ProtocolError("the silo cannot be opened under its newest membership; its own log says why")
        return self._party

    def _read_membership(self) -> None:
        """Note the newest membership, if the file has changed; one that is not to be used ends no session."""
        try:
            found = self._file.read_if_changed(self._newest)
        except FedveilError as error:
            # The party itself refuses sessions for as long as the file is not right.
            self._report(f"the changed membership is not used: {error}")
            return
        if found is not None:
            self._newest = found
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
        _log.info("goes on under membership %d", opened.membership.serial)
        return opened

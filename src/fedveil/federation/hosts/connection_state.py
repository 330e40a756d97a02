"""State of a party's connection, its time and its cause, as shown by ``health``, ``status`` and the metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from fedveil.sanitize import LONGEST_SENTENCE, one_line

CONTACT_SECONDS: Final = 90.0
"""Seconds without contact after which a silo counts as not connected; it polls every 25 seconds."""


class SiloConnection:
    """A silo's connection to its coordinator, as its network process reports it; any thread may use it.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._fault: dict[str, str] | None = {"code": "starting", "sentence": "the network process starts"}
        self._contact: float | None = None

    def note_report(self, report: Any) -> None:
        """Note a line of the network process: a contact, or a fault. That process faces the network, and may lie."""
        fault = report.get("fault", "") if isinstance(report, dict) else ""
        if fault is not None:
            given = fault if isinstance(fault, dict) else {}
            fault = {
                name: one_line(str(given.get(name, "unknown"))[:LONGEST_SENTENCE])
                for name in ("code", "sentence")
            }
        with self._lock:
            self._fault = fault
            if fault is None:
                self._contact = self._clock()

    def note_end(self, code: int) -> None:
        """Note that the network process ended."""
        with self._lock:
            self._fault = {"code": "ended", "sentence": f"the network process ended with exit code {code}"}

    def trouble(self) -> str:
        """Return why the silo is not connected; empty if it is."""
        with self._lock:
            if self._fault is not None:
                return f"{self._fault['code']}: {self._fault['sentence']}"
            silent = self._clock() - (self._contact or 0.0)
        return f"silent: no contact for {silent:.0f} s" if silent > CONTACT_SECONDS else ""

    def facts(self) -> dict[str, Any]:
        """Return the state of the connection, for `status` and the metrics."""
        trouble = self.trouble()
        with self._lock:
            contact = None if self._contact is None else round(self._clock() - self._contact, 1)
        found: dict[str, Any] = {"connected": not trouble, "last_contact_seconds": contact}
        return found | ({"cause": trouble} if trouble else {})


class BridgeConnection:
    """The last message that a bridge brought to a silo; any thread may use it.

    Between runs a bridge brings none, so silence is no fault, and whether the bridge is there cannot be told here.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._contact: float | None = None

    def note_contact(self) -> None:
        """Note that a message of the coordinator's was answered."""
        self._contact = self._clock()

    def trouble(self) -> str:
        """Return nothing: see above."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return the state of the connection, for `status` and the metrics."""
        contact = self._contact
        ago = None if contact is None else round(self._clock() - contact, 1)
        return {"carrier": "bridge", "last_contact_seconds": ago}


class LinkConnection:
    """The coordinator's connection to its link, and the silos' to the link; any thread may use it.

    Args:
        silos: names, by number.
    """

    def __init__(self, silos: tuple[str, ...]) -> None:
        self._silos, self._lock = silos, threading.Lock()
        self._seen: Sequence[float | None] | None = None

    def set_silos(self, silos: tuple[str, ...]) -> None:
        """Set the names, where the membership has changed; nothing is known of the contacts then."""
        with self._lock:
            self._silos, self._seen = silos, None

    def note_contacts(self, seen: Sequence[float | None] | None) -> None:
        """Note the seconds since each silo asked last; None where the link does not answer."""
        with self._lock:
            self._seen = seen

    def trouble(self) -> str:
        """Return why nothing can be exchanged; empty if it can. Absent silos are no trouble of the coordinator."""
        with self._lock:
            return "link: the link does not answer; its own log says why" if self._seen is None else ""

    def facts(self) -> dict[str, Any]:
        """Return the state of the connections for ``status`` and the metrics."""
        with self._lock:
            seen, silos = self._seen, self._silos
        if seen is None:
            return {"link": False, "cause": self.trouble()}
        contacts = {name: ago for name, ago in zip(silos, seen, strict=True) if ago is not None}
        connected = sorted(name for name, ago in contacts.items() if ago <= CONTACT_SECONDS)
        return {
            "link": True,
            "connected": connected,
            "absent": sorted(set(silos) - set(connected)),
            "last_contact_seconds": {name: round(ago, 1) for name, ago in contacts.items()},
        }

"""Status of a party on its own host: from its folder, and of its connection.

No figure of the status depends on records: spent epsilon is computed from the silo's ledger, which contains none.

A coordinator at rest has this module, so that it may not load PyTorch, nor what reads tables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from fedveil import __version__
from fedveil.errors import ConfigError
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.sockets import END
from fedveil.files import read_toml
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import all_of
from fedveil.privacy.ledger import read_entries, read_head
from fedveil.run.folder.documents import read_rows
from fedveil.sanitize import LONGEST_SENTENCE, one_line

_ENDED: Final = ("waits or is played", "ended")


def party_status(folder: Path, *, served: bool) -> dict[str, Any]:
    """Return the status of a coordinator's or a silo's folder.

    Args:
        folder: the party's.
        served: whether a process serves it.

    Raises:
        FedveilError: it is no party's folder, or what is wrong with it.
    """
    if (folder / "coordinator.toml").is_file():
        return {"served": served, **_coordinator(CoordinatorFolder(folder))}
    if (folder / "silo.toml").is_file():
        return {"served": served, **_silo(SiloFolder(folder))}
    raise ConfigError(f"{folder}: neither coordinator.toml nor silo.toml: not a party's folder")


def _common(home: CoordinatorFolder | SiloFolder, role: str) -> dict[str, Any]:
    membership, (file, days) = home.membership, home.first_expiry
    return {
        "role": role,
        "version": __version__,
        "membership": membership.serial,
        "valid_until": membership.valid_until,
        "fingerprint": membership.fingerprint,
        "certificate_days": round(days, 1),
        "expires_first": file,
    }


def _coordinator(home: CoordinatorFolder) -> dict[str, Any]:
    runs = sorted((home / "runs").glob("*/experiment.toml"), key=lambda path: path.stat().st_mtime)
    status = _common(home, "coordinator") | {
        "silos": len(home.membership.silos),
        "runs": len(runs),
    }
    if runs:
        folder, experiment = runs[-1].parent, read_toml(runs[-1])
        rows = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        status |= {
            "run": experiment.get("name"),
            "round": rows[-1]["round"] if rows else 0,
            "rounds": experiment.get("rounds"),
            "state": _ENDED[(folder / END).exists()],
        }
    return status


def _silo(home: SiloFolder) -> dict[str, Any]:
    ledger = import_module(
        "fedveil.federation.silo_ledger"
    ).LEDGER  # loads PyTorch, which a coordinator need not
    policy, path = home.policy, home / "state" / ledger
    allowed = None if policy.budget is None else policy.epsilon
    status = _common(home, "silo") | {
        "name": home.settings.name,
        "allowed_epsilon": allowed,
        "delta": policy.delta,
    }
    if path.exists():
        stamp = path.stat()
        written = stamp.st_ino, stamp.st_size, stamp.st_mtime_ns
        head, spent = _read_spent(path, written, policy.accountant, policy.delta)
        status |= {
            "ledger_head": head,
            "spent_epsilon": spent if spent < float("inf") else None,
            "spent_ratio": spent / allowed if allowed is not None and spent < float("inf") else None,
        }
    return status


@lru_cache(maxsize=1)
def _read_spent(path: Path, file_state: tuple[int, ...], accountant: str, delta: float) -> tuple[str, float]:
    """Return the head and the epsilon of a ledger: read once until it is written again, however often it is asked."""
    event = all_of(entry.event for entry in read_entries(path))
    return read_head(path).digest, make_accountant(accountant).epsilon(event, delta)


# --- connections: state, time and cause, as shown by ``health``, ``status`` and the metrics ---


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
            fields = fault if isinstance(fault, dict) else {}
            fault = {
                name: one_line(str(fields.get(name, "unknown"))[:LONGEST_SENTENCE])
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
        facts: dict[str, Any] = {"connected": not trouble, "last_contact_seconds": contact}
        return facts | ({"cause": trouble} if trouble else {})


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
            return "link: the link does not answer; its log gives the reason" if self._seen is None else ""

    def facts(self) -> dict[str, Any]:
        """Return the state of the connections for ``status`` and the metrics."""
        with self._lock:
            ages, silos = self._seen, self._silos
        if ages is None:
            return {"link": False, "cause": self.trouble()}
        contacts = {name: ago for name, ago in zip(silos, ages, strict=True) if ago is not None}
        connected = sorted(name for name, ago in contacts.items() if ago <= CONTACT_SECONDS)
        return {
            "link": True,
            "connected": connected,
            "absent": sorted(set(silos) - set(connected)),
            "last_contact_seconds": {name: round(ago, 1) for name, ago in contacts.items()},
        }

"""The figures of a served party as Prometheus reads them (text format 0.0.4).

Claim: no figure is a record count, or depends on one but by how long a silo takes to answer, which the coordinator sees
anyway and its page tells; a silo's own page tells no time. Nothing says what a message held. Refusals are counted by
their code, which is public, and not by silo. ``tests/test_metrics_server.py``.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from fedveil.protocols.refusals import Code
from fedveil.sanitize import sanitize

_BOUNDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, math.inf)


class Meter:
    """Counts what passes at the coordinator since it is served; any thread may.

    Args:
        silos: names of those that messages come from.
    """

    def __init__(self, silos: tuple[str, ...]) -> None:
        self._silos = silos
        self._lock = threading.Lock()
        self._messages: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._below: Counter[float] = Counter()
        self._waited = 0.0
        self._heard: dict[str, float] = {}

    def set_silos(self, silos: tuple[str, ...]) -> None:
        """Set the names, where the membership has changed."""
        with self._lock:
            self._silos = silos

    def count_message(self, outcome: str) -> None:
        """Count a silo's message by what became of it."""
        with self._lock:
            self._messages[outcome] += 1

    def count_refusal(self, code: Code) -> None:
        """Count a refusal that ended a run."""
        with self._lock:
            self._refusals[code.name.lower()] += 1

    def observe_latency(self, seconds: float) -> None:
        """Count an answer, by how long it was waited for."""
        with self._lock:
            self._waited += seconds
            self._below.update(bound for bound in _BOUNDS if seconds <= bound)

    def note_alive(self, silo: int) -> None:
        """Note that a silo lives, by its number."""
        with self._lock:
            self._heard[self._silos[silo]] = time.monotonic()

    def text(self) -> str:
        """Return all of it as Prometheus reads it."""
        with self._lock:
            lines = [
                *_by_label("fedveil_messages_total", "counter", "outcome", self._messages),
                *_by_label("fedveil_refusals_total", "counter", "code", self._refusals),
            ]
            if self._below:
                name = "fedveil_exchange_seconds"
                below = {
                    "+Inf" if bound == math.inf else f"{bound:g}": self._below[bound] for bound in _BOUNDS
                }
                lines.append(f"# TYPE {name} histogram")
                lines += [_sample(f"{name}_bucket", number, le=bound) for bound, number in below.items()]
                lines += [_sample(f"{name}_sum", self._waited), _sample(f"{name}_count", below["+Inf"])]
            now = time.monotonic()
            ago = {silo: now - at for silo, at in self._heard.items()}
            lines += _by_label("fedveil_silo_last_seen_seconds", "gauge", "silo", ago)
        return "".join(f"{line}\n" for line in lines)


def as_metrics(status: Mapping[str, Any]) -> str:
    """Return a party's status (:func:`~fedveil.federation.hosts.status.party_status`) as Prometheus reads it."""
    lines = [
        "# TYPE fedveil_build_info gauge",
        _sample("fedveil_build_info", 1, role=status["role"], version=status["version"]),
    ]
    figures = {
        "fedveil_served": int(status["served"]),
        "fedveil_membership_serial": status["membership"],
        "fedveil_certificate_days": status["certificate_days"],
        "fedveil_round": status.get("round"),
        "fedveil_rounds": status.get("rounds"),
        "fedveil_budget_spent_ratio": status.get("spent_ratio"),
    }
    if "spent_ratio" in status and status["spent_ratio"] is None:  # no epsilon is enough: above every limit
        figures["fedveil_budget_spent_ratio"] = "+Inf"
    connection = status.get("connection", {})
    if (connected := connection.get("link", connection.get("connected"))) is not None:
        figures["fedveil_connected"] = int(connected)
    for name, value in figures.items():
        if value is not None:
            lines += [f"# TYPE {name} gauge", _sample(name, value)]
    contact = connection.get("last_contact_seconds")
    if isinstance(contact, Mapping):
        lines += _by_label("fedveil_silo_contact_seconds", "gauge", "silo", contact)
    elif contact is not None:
        lines += [
            "# TYPE fedveil_last_contact_seconds gauge",
            _sample("fedveil_last_contact_seconds", contact),
        ]
    return "".join(f"{line}\n" for line in lines)


def _by_label(name: str, kind: str, label: str, values: Mapping[str, float]) -> list[str]:
    if not values:
        return []
    return [
        f"# TYPE {name} {kind}",
        *(_sample(name, value, **{label: text}) for text, value in sorted(values.items())),
    ]


def _sample(name: str, value: float | str, **labels: str) -> str:
    quoted = ",".join(
        f"{key}={json.dumps(sanitize(text), ensure_ascii=False)}" for key, text in labels.items()
    )
    return f"{name}{{{quoted}}} {value}" if quoted else f"{name} {value}"

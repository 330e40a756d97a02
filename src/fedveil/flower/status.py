"""What a party's folder tells of it, on its own host: whether it is served, how far its run is, what ends soon.

No figure here depends on records. What is spent is computed from the silo's ledger, which knows none.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

from fedveil import __version__
from fedveil.engine.documents import read_rows
from fedveil.engine.folder import RunFolder
from fedveil.errors import ConfigError
from fedveil.federation.silo_ledger import LEDGER
from fedveil.flower.certificates import days_left
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.submission import END
from fedveil.foreign import foreign
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Event, atoms, compose
from fedveil.privacy.ledger import read_entries, read_head

_ENDED: Final = ("waits or is played", "ended")


def party_status(folder: Path) -> dict[str, Any]:
    """Return what a folder of a coordinator or a silo tells.

    Raises:
        FedveilError: it is no party's folder, or what is wrong with it.
    """
    if (folder / "coordinator.toml").is_file():
        return _coordinator(CoordinatorFolder(folder))
    if (folder / "silo.toml").is_file():
        return _silo(SiloFolder(folder))
    raise ConfigError(f"{folder}: neither coordinator.toml nor silo.toml: not a party's folder")


def is_served(folder: Path) -> bool:
    """Return whether a process of this host serves a party: it holds the lock of the folder ``run``."""
    try:
        lock = os.open(folder / "run", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _common(home: CoordinatorFolder | SiloFolder, role: str) -> dict[str, Any]:
    membership = home.membership
    return {
        "role": role,
        "served": is_served(home.path),
        "version": __version__,
        "membership": membership.serial,
        "valid_until": membership.valid_until,
        "fingerprint": membership.fingerprint,
    }


def _coordinator(home: CoordinatorFolder) -> dict[str, Any]:
    runs = sorted((home / "runs").glob("*/experiment.toml"), key=lambda path: path.stat().st_mtime)
    found = _common(home, "coordinator") | {
        "certificate_days": round(days_left(home.link / "server.crt", home.link / "ca.crt"), 1),
        "silos": len(home.membership.silos),
        "runs": len(runs),
    }
    if runs:
        folder, experiment = RunFolder.open(runs[-1].parent)
        rows = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        found |= {
            "run": experiment.name,
            "round": rows[-1]["round"] if rows else 0,
            "rounds": experiment.rounds,
            "state": _ENDED[(folder / END).exists()],
        }
    return found


def _silo(home: SiloFolder) -> dict[str, Any]:
    policy, path = home.policy, home / "state" / LEDGER
    found = _common(home, "silo") | {
        "name": home.settings.name,
        "certificate_days": round(days_left(home / "ca.crt", home / "ca.crt"), 1),
        "allowed_epsilon": policy.epsilon,
        "delta": policy.delta,
    }
    if path.exists():
        counted: Counter[Event] = Counter()
        for entry in read_entries(path):
            counted.update(atoms(entry.event))
        spent = make_accountant(policy.accountant).epsilon(compose(counted), policy.delta)
        found |= {
            "ledger_head": read_head(path).digest,
            "spent_epsilon": spent if spent < float("inf") else None,
            "spent_ratio": spent / policy.epsilon if spent < float("inf") else None,
        }
    return found


def as_metrics(status: dict[str, Any]) -> str:
    """Return a status as Prometheus reads it (text format 0.0.4), for a collector of text files."""
    labels = {"role": status["role"], "version": status["version"]}
    lines = [
        "# TYPE fedveil_build_info gauge",
        f"fedveil_build_info{{{','.join(f'{key}={_quoted(value)}' for key, value in labels.items())}}} 1",
    ]
    figures = {
        "fedveil_served": int(status["served"]),
        "fedveil_membership_serial": status["membership"],
        "fedveil_certificate_days": status["certificate_days"],
        "fedveil_round": status.get("round"),
        "fedveil_rounds": status.get("rounds"),
        "fedveil_budget_spent_ratio": status.get("spent_ratio"),
    }
    for name, value in figures.items():
        if value is not None:
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(foreign(text), ensure_ascii=False)

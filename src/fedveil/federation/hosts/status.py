"""Status of a party from its folder, on its own host.

No figure of the status depends on records: spent epsilon is computed from the silo's ledger, which contains none.

A coordinator at rest has this module, so that it may not load PyTorch, nor what reads tables.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from fedveil import __version__
from fedveil.errors import ConfigError
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.ipc import END
from fedveil.files import read_toml
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import all_of
from fedveil.privacy.ledger import read_entries, read_head
from fedveil.run.folder.documents import read_rows

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
    found = _common(home, "coordinator") | {
        "silos": len(home.membership.silos),
        "runs": len(runs),
    }
    if runs:
        folder, experiment = runs[-1].parent, read_toml(runs[-1])
        rows = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        found |= {
            "run": experiment.get("name"),
            "round": rows[-1]["round"] if rows else 0,
            "rounds": experiment.get("rounds"),
            "state": _ENDED[(folder / END).exists()],
        }
    return found


def _silo(home: SiloFolder) -> dict[str, Any]:
    ledger = import_module(
        "fedveil.federation.silo_ledger"
    ).LEDGER  # loads PyTorch, which a coordinator need not
    policy, path = home.policy, home / "state" / ledger
    allowed = None if policy.budget is None else policy.epsilon
    found = _common(home, "silo") | {
        "name": home.settings.name,
        "allowed_epsilon": allowed,
        "delta": policy.delta,
    }
    if path.exists():
        stamp = path.stat()
        written = stamp.st_ino, stamp.st_size, stamp.st_mtime_ns
        head, spent = _spent(path, written, policy.accountant, policy.delta)
        found |= {
            "ledger_head": head,
            "spent_epsilon": spent if spent < float("inf") else None,
            "spent_ratio": spent / allowed if allowed is not None and spent < float("inf") else None,
        }
    return found


@lru_cache(maxsize=1)
def _spent(path: Path, written: tuple[int, ...], accountant: str, delta: float) -> tuple[str, float]:
    """Return the head and the epsilon of a ledger: read once until it is written again, however often it is asked."""
    charged = all_of(entry.event for entry in read_entries(path))
    return read_head(path).digest, make_accountant(accountant).epsilon(charged, delta)

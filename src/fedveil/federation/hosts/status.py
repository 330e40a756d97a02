"""Status of a party from its folder, on its own host, and the checks of a silo before it takes part.

No figure of the status depends on records: spent epsilon is computed from the silo's ledger, which contains none.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedveil import __version__
from fedveil.errors import ConfigError
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.ipc import END
from fedveil.federation.policy import counted_sentence
from fedveil.federation.silo_ledger import LEDGER
from fedveil.files import read_toml
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import all_of
from fedveil.privacy.ledger import read_entries, read_head
from fedveil.privacy.statement import show_epsilon
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


# --- checks of a silo before it takes part ---


_SOON: Final = 30.0


def inspect_silo(silo: SiloFolder) -> dict[str, Any]:
    """Check certificates, keys, clock, policy, table and ledger of a silo; return what a person should read.

    Raises:
        FedveilError: the first thing that is wrong, with what would be right.
    """
    settings, membership, policy = silo.settings, silo.membership, silo.policy
    number = membership.number(settings.name)
    silo.check_own_keys()
    file, days = silo.first_expiry
    share = silo.share()
    per_user = np.bincount(share.train.user, minlength=share.n_users)
    present = per_user[per_user > 0]
    counts, but = counted_sentence(policy.model_dump())
    return {
        "silo": f"{settings.name} (number {number} of {len(membership.silos)})",
        "identity": silo.identity.public.fingerprint,
        "coordinator's identity": membership.coordinator.fingerprint,
        "membership": f"{membership.fingerprint} (serial {membership.serial}, valid until {membership.valid_until})",
        "certificates": f"{file} runs out first, in {days:.0f} days"
        + ("; the founder seals again" if days < _SOON else ""),
        "records (shown here only)": len(share.train),
        "users with records (shown here only)": len(present),
        "records per user: least, median, most (shown here only)": (
            f"{present.min()}, {np.median(present):g}, {present.max()}" if len(present) else "nobody has any"
        ),
        "list of users": "none: ids are numbers"
        if silo.schema.users is None
        else f"sha256 {silo.schema.users}",
        "main silos' file": "none" if share.main_silos is None else f"sha256 {share.main_silos.digest}",
        "spent over all runs": _spent_in_words(silo),
        "allowed over all runs": (
            "no limit: without_guarantee allows runs that guarantee nothing"
            if policy.budget is None
            else f"epsilon {policy.epsilon:g} at delta {policy.delta:g}"
        ),
        "the ledger counts": counts + (f"; not {but}" if but else ""),
        "allowed methods": ", ".join(policy.methods),
        "allowed protections": ", ".join(policy.protections),
    }


def _spent_in_words(silo: SiloFolder) -> str:
    path = silo / "state" / LEDGER
    if not path.exists():
        return "nothing yet"
    entries, policy = read_entries(path), silo.policy
    charged = all_of(entry.event for entry in entries)
    epsilon = make_accountant(policy.accountant).epsilon(charged, policy.delta)
    runs = len({entry.run.partition("/")[0] for entry in entries})  # parts of a run follow a slash
    return f"epsilon {show_epsilon(epsilon)} at delta {policy.delta:g}, {len(entries)} rounds of {runs} runs"

"""Checks of a silo on its own host before it takes part; nothing is sent."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.policy import counted_sentence
from fedveil.federation.silo_ledger import LEDGER
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import all_of
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.statement import show_epsilon

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

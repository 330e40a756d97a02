"""Checks of a silo before it takes part: on its own host, and of its connection to the coordinator."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedveil.errors import HostError
from fedveil.federation.enrollment.certificates import check_client_certificate
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.policy import counted_sentence
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.transport.https.connection_faults import host_of_server, host_of_url, proxy_for
from fedveil.federation.transport.https.silo_client import FaultError, SiloClient, client_context
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import all_of
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.statement import show_epsilon

# --- on the silo's own host ---


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
    per_user = share.records_per_user()
    present = per_user[per_user > 0]
    counts, omission = counted_sentence(policy.model_dump())
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
        "the ledger counts": counts + (f"; not {omission}" if omission else ""),
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


# --- its connection to the coordinator ---


MOST_SKEW_SECONDS: Final = 60.0
"""A larger difference of clocks is a finding: certificates are judged, and ledgers dated, by the host's clock."""


class UnreachableError(HostError):
    """The coordinator cannot be reached; says why."""


@dataclass(frozen=True)
class Reachability:
    """Results of the connection tests between a silo and the coordinator.

    Attributes:
        findings: sentences, by what was tried.
        trouble: code and sentence of what prevents the connection; empty if nothing does.
    """

    findings: dict[str, str]
    trouble: str

    def check(self) -> None:
        """Return if the coordinator was reached.

        Raises:
            UnreachableError: it was not; names the code of what prevents it.
        """
        if self.trouble:
            code = self.trouble.partition(":")[0]
            raise UnreachableError(f"the coordinator cannot be reached ({code}); see above")


def try_coordinator(folder: SiloFolder) -> Reachability:
    """Make one authenticated request to the coordinator, and tell what was found on the way.

    Raises:
        ConfigError: a certificate or key of the silo itself is missing, or not valid at this clock; or HTTPS_PROXY is
            not the URL of an HTTP proxy.
    """
    if folder.settings.carrier == "bridge":
        finding = "made by a bridge, whose own log says whether messages pass"
        return Reachability({"connection": finding}, "")
    check_client_certificate(folder.path)
    server = folder.settings.coordinator
    host, proxy = host_of_server(server), proxy_for(server)
    findings = {"name": _resolve(host, proxy), "proxy": _describe_proxy(proxy)}
    client = SiloClient(
        server,
        client_context(folder.path, folder.server_key),
        lambda message: message,
        folder.policy.max_message_bytes,
    )
    try:
        contact = client.ping()
    except FaultError as error:
        findings["connection"] = error.fault.sentence
        return Reachability(findings, f"{error.fault.code}: {error.fault.sentence}")
    findings["connection"] = (
        f"{server} answered after {contact.seconds:.3f} s over TLS 1.3, with the key that membership.toml names"
    )
    findings["clock"] = describe_skew(contact.skew)
    return Reachability(findings, "")


def _resolve(host: str, proxy: str | None) -> str:
    if proxy is not None:
        return f"{host} is resolved by the proxy"
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{host} cannot be resolved: {error.strerror or error}"
    return f"{host} is {', '.join(sorted({str(entry[4][0]) for entry in entries}))}"


def _describe_proxy(proxy: str | None) -> str:
    if proxy is not None:
        return f"connections go through {host_of_url(proxy)} (HTTPS_PROXY)"
    named = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    return "none: NO_PROXY excepts the coordinator" if named else "none: HTTPS_PROXY is not set"


def describe_skew(skew: float | None) -> str:
    """Return a difference of clocks in words.

    Args:
        skew: seconds by which this host's clock is ahead of the coordinator's; None: not known.
    """
    if skew is None:
        return "the coordinator does not tell its time"
    if abs(skew) <= MOST_SKEW_SECONDS:
        return f"within {MOST_SKEW_SECONDS:.0f} s of the coordinator's"
    relation = "ahead of" if skew > 0 else "behind"
    return f"{abs(skew):.0f} s {relation} the coordinator's: set the clock of one of the two hosts"

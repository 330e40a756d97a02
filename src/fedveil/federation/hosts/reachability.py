"""Check of a silo's connection to its coordinator: one sentence each on name, proxy, TLS, keys and clock."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Final

from fedveil.errors import HostError
from fedveil.federation.enrollment.certificates import check_client_certificate
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.transport.https.connection_faults import host_of_server, host_of_url, proxy_for
from fedveil.federation.transport.https.silo_client import FaultError, SiloClient, client_context

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
        told = "made by a bridge, whose own log says whether messages pass"
        return Reachability({"connection": told}, "")
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
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{host} cannot be resolved: {error.strerror or error}"
    return f"{host} is {', '.join(sorted({str(one[4][0]) for one in found}))}"


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
    where = "ahead of" if skew > 0 else "behind"
    return f"{abs(skew):.0f} s {where} the coordinator's: set the clock of one of the two hosts"

"""Why a silo does not reach its coordinator: a short code and a sentence that says what to do."""

from __future__ import annotations

import socket
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import httpcore

from fedveil.errors import ConfigError

NETWORK_ERRORS: Final = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.TimeoutException,
    OSError,
)
"""Errors of a request by httpcore."""


@dataclass(frozen=True)
class Fault:
    """Reason for a missing connection or answer.

    Attributes:
        code: short name, for logs and metrics.
        sentence: what happened, and what to do.
    """

    code: str
    sentence: str


class WrongServerKeyError(ssl.SSLCertVerificationError):
    """A server certificate of the federation's authority with another key than the membership names."""


def host_of_server(server: str) -> str:
    """Return the host of ``HOST:PORT``, without the brackets of an IPv6 address."""
    return server.rpartition(":")[0].strip("[]")


def proxy_for(server: str) -> str | None:
    """Return the URL of the proxy that the environment names for a server, or None.

    The variables are ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``; ``HOST:PORT`` means ``http://HOST:PORT``.

    Args:
        server: host and port.

    Raises:
        ConfigError: not the URL of an HTTP proxy.
    """
    if urllib.request.proxy_bypass(host_of_server(server)):  # type: ignore[attr-defined, unused-ignore]
        return None
    proxies = urllib.request.getproxies()
    named = proxies.get("https") or proxies.get("all")
    if not named:
        return None
    url = named if "://" in named else f"http://{named}"
    try:
        proxy_of_url(url)
    except ValueError:
        raise ConfigError(  # without what it is: it may have a password
            "HTTPS_PROXY (or ALL_PROXY): must be an HTTP proxy, http://HOST:PORT or http://NAME:PASSWORD@HOST:PORT; "
            "other kinds, such as SOCKS, are not supported"
        ) from None
    return url


def proxy_of_url(url: str) -> httpcore.Proxy:
    """Return a proxy.

    Args:
        url: ``http`` or ``https``, with host and perhaps port, user name and password.

    Raises:
        ValueError: it is another.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not the URL of an HTTP proxy")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    name, password = unquote(parts.username or ""), unquote(parts.password or "")
    host = parts.hostname.encode("idna")
    return httpcore.Proxy(
        httpcore.URL(scheme=parts.scheme.encode(), host=host, port=port, target=b"/"),
        auth=(name.encode(), password.encode()) if name or password else None,
    )


_VERIFY_SENTENCES: Final = (
    ("expired", "expired-certificate", "the coordinator's certificate has expired: the founder seals again"),
    (
        "not yet valid",
        "clock",
        "the coordinator's certificate is not valid yet: set the clock of this host, or of the founder's",
    ),
    (
        "mismatch",
        "wrong-host-name",
        "the certificate of the server is for another host name: silo.toml (coordinator) must have the charter's name",
    ),
    ("is not valid for", "wrong-host-name", "silo.toml (coordinator) must have the charter's host name"),
)

_STATUS_SENTENCES: Final = {
    "not-a-member": "the coordinator has not accepted a membership that names this silo's key (yet)",
    "expired": "this silo's certificate has expired: the founder seals again, and the silo accepts",
    "revoked": "this silo's key was revoked by the founder; join again with new keys",
    "not-ready": "the coordinator's mailbox runs, but the coordinator has not introduced the members yet",
    "busy": "this silo has too many open requests at the coordinator: is it served twice?",
}


def fault_of_status(status: int, cause: str) -> Fault:
    """Return the fault behind an HTTP status of 400 or more."""
    if cause in _STATUS_SENTENCES:
        return Fault(cause, _STATUS_SENTENCES[cause])
    causes = {403: "not-a-member", 429: "busy", 503: "not-ready"}
    if status in causes:
        return Fault(causes[status], _STATUS_SENTENCES[causes[status]])
    return Fault(f"status-{status}", f"the coordinator's address answered with HTTP status {status}")


def fault_of_error(error: Exception, server: str, proxy: str | None) -> Fault:
    """Return why a request failed.

    Args:
        error: one of :data:`NETWORK_ERRORS`.
        server: host and port of the coordinator.
        proxy: URL of the proxy, or None.
    """
    route = "" if proxy is None else f" through the proxy {host_of_url(proxy)} (HTTPS_PROXY)"
    for cause in _chain(error):
        if isinstance(cause, WrongServerKeyError):
            return Fault("wrong-server-key", _WRONG_KEY.format(server=server))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _fault_of_certificate(cause, server, route)
        if isinstance(cause, ssl.SSLError):
            return _fault_of_tls(cause, server, route)
    if isinstance(error, httpcore.ProxyError):
        return _fault_of_proxy(str(error), route)
    if isinstance(error, httpcore.TimeoutException):
        return Fault("timeout", f"{server}{route}: no answer in time; does a firewall drop the packets?")
    if isinstance(error, httpcore.ConnectError):
        return _fault_of_connecting(error, server, proxy)
    return Fault("disconnected", _DISCONNECTED.format(server=server))


def _fault_of_connecting(error: httpcore.ConnectError, server: str, proxy: str | None) -> Fault:
    where = server if proxy is None else f"the proxy {host_of_url(proxy)} (HTTPS_PROXY)"
    for cause in _chain(error):
        if isinstance(cause, socket.gaierror):
            return Fault("dns", f"the name of {where} cannot be resolved: {cause.strerror}")
        if isinstance(cause, ConnectionRefusedError):
            code = "refused" if proxy is None else "proxy-unreachable"
            return Fault(code, f"nothing listens at {where}: is it served, and is the port right?")
    return Fault(
        "unreachable" if proxy is None else "proxy-unreachable", f"{where} cannot be reached: {error}"
    )


def _fault_of_tls(error: ssl.SSLError, server: str, route: str) -> Fault:
    if "ALERT" in (error.reason or ""):
        return Fault("client-certificate", _DISCONNECTED.format(server=server))
    return Fault("tls", f"{server}{route}: does not speak TLS 1.3 ({error.reason})")


_WRONG_KEY: Final = (
    "{server}: its certificate is of the federation's authority, but its key is not the one that membership.toml "
    "names: it was rotated or revoked; accept the newest membership"
)
_DISCONNECTED: Final = (
    "{server} ended the connection: it was restarted, or it does not accept this silo's certificate (expired, or of "
    "another authority: accept the newest membership)"
)


def _fault_of_certificate(error: ssl.SSLCertVerificationError, server: str, route: str) -> Fault:
    message = error.verify_message or ""
    for words, code, sentence in _VERIFY_SENTENCES:
        if words in message:
            return Fault(code, f"{server}{route}: {sentence}")
    return Fault(
        "untrusted-certificate",
        f"{server}{route}: its certificate is not of the federation's authority ({message}): a proxy on the way "
        "inspects TLS, or another server answers. The connection must reach the coordinator unchanged: have the proxy "
        "except this host",
    )


def _fault_of_proxy(message: str, route: str) -> Fault:
    if message.startswith("407"):
        return Fault(
            "proxy-authentication",
            f"the connection{route} needs a user name and a password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
        )
    return Fault("proxy-refused", f"the connection{route} was refused: {message}")


def host_of_url(url: str) -> str:
    """Return host and port of a URL, without the password that may stand in it."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

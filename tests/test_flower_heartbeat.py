"""Signs of life go on, whatever became of one of them."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

pytest.importorskip("flwr")

import httpx

from fedveil.flower import heartbeat as beats
from fedveil.flower.coordinator_host import link
from fedveil.flower.enrollment.certificates import Authority
from fedveil.flower.silo_host import node as nodes


def test_a_sign_of_life_that_failed_is_told_by_its_kind_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beats, "_BEAT_SECONDS", 0.001)
    given, again = [], threading.Event()

    def beat() -> bool:
        given.append(1)
        if len(given) == 1:
            raise ValueError("a page of a proxy")
        if len(given) == 3:
            again.set()
        return len(given) > 2

    log = logging.getLogger("fedveil.test")
    with caplog.at_level(logging.WARNING, log.name), beats.heartbeat(beat, log):
        assert again.wait(20)
    assert [record.getMessage() for record in caplog.records] == [
        "the link took no sign of life (ValueError)",
        "the link took no sign of life (refused)",
    ]


@pytest.mark.parametrize("failed", [5, 6])
def test_who_is_taken_for_gone_is_told_after_a_minute(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: ten seconds lie between two signs, and one that is taken ends the count."""
    monkeypatch.setattr(beats, "_BEAT_SECONDS", 0.0)
    assert beats._MOST_FAILED == 6
    given, over = [], threading.Event()

    def beat() -> bool:
        given.append(1)
        if len(given) > 2 * failed + 2:
            over.set()
        return len(given) % (failed + 1) == 0

    with beats.heartbeat(beat, logging.getLogger("fedveil.test")) as lost:
        assert over.wait(20)
        assert lost.is_set() == (failed == 6)


def test_a_connection_lasts_from_one_sign_of_life_to_the_next() -> None:
    """New ones for each, of 200 silos, took all places of a busy link, and most of its time."""
    assert beats._BEAT_SECONDS < nodes._KEPT_SECONDS < link._IDLE_SECONDS
    authority = Authority.create("here").certificate.public_bytes(Encoding.PEM)
    node = nodes.Node(
        coordinator="host:1",
        authority=authority,
        key=ec.generate_private_key(ec.SECP384R1()),
        answer=bytes,
    )
    with node._connected() as connected:
        pool: Any = connected._client._transport
        assert pool._pool._keepalive_expiry == nodes._KEPT_SECONDS
        assert pool._pool._ssl_context.verify_mode is ssl.CERT_REQUIRED
        assert pool._pool._ssl_context.check_hostname
        assert len(pool._pool._ssl_context.get_ca_certs()) == 1


def failing(status: int) -> Exception:
    return httpx.HTTPStatusError("", request=None, response=SimpleNamespace(status_code=status))


@pytest.mark.parametrize("last", [None, httpx.ConnectError("gone"), failing(401)])
def test_a_link_that_is_busy_is_asked_again_and_one_that_is_left_is_told(
    last: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a node begins anew without a word, the link lets it in after a minute at the earliest."""
    asked, busy = list[str](), [httpx.ReadTimeout("slow"), failing(503), last]

    class Link:
        def __getattr__(self, name: str) -> Any:
            def answer(_: Any) -> Any:
                asked.append(name)
                if name == "PullMessages" and (error := busy.pop(0)):
                    raise error
                return SimpleNamespace(node_id=1, success=True, messages_list=[])

            return answer

    monkeypatch.setattr(nodes.Node, "_connected", lambda _: contextlib.nullcontext(Link()))
    monkeypatch.setattr(nodes, "_AGAIN_SECONDS", 0.0)
    key = ec.generate_private_key(ec.SECP384R1())
    node = nodes.Node(coordinator="host:1", authority=b"", key=key, answer=bytes)
    with contextlib.nullcontext() if last is None else pytest.raises(type(last)):
        node.serve(lambda: not busy)
    assert [name for name in asked if name != "SendNodeHeartbeat"] == [
        "ActivateNode",
        *["PullMessages"] * 3,
        "DeactivateNode",
    ]

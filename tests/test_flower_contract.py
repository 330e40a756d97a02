"""Flower gives what fedveil uses: names, signatures and messages, alike in every release that is allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.supernode.fleet_http_client import FleetHttpClient

from tests.pins.flower import RECORDED, contract, imported, installed

ROOT = Path(__file__).parents[1]


def test_the_installed_release_gives_what_was_recorded_of_it() -> None:
    known = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert contract() == known[installed()]
    assert len(imported()) > 30


def test_the_lowest_and_the_highest_release_allowed_give_the_same() -> None:
    """A release beyond them is let in once `python -m tests.pins.flower` has run under it and nothing differs."""
    (low, above) = re.findall(
        r'"flwr>=1\.(\d+),<1\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )[0]
    known = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert set(known) == {f"1.{minor}" for minor in range(int(low), int(above))}
    assert all(given == known[installed()] for given in known.values())


def test_a_client_of_the_link_has_the_connections_that_a_carrier_replaces() -> None:
    with FleetHttpClient.from_server_address("127.0.0.1:9", False, None, []) as client:
        assert isinstance(client._client, httpx.Client)

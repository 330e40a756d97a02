"""Flower gives what fedveil uses: names, signatures and messages, alike in every release that is allowed."""

from __future__ import annotations

import json
import logging
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error.base import FlowerError
from flwr.superlink.servicer.fleet.fleet_handlers import activate_node
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedveil.cli.coordinator import open_party, serve_command
from fedveil.cli.link import import_late as imported_to_serve
from fedveil.crypto.errors import CryptoError
from fedveil.errors import ConfigError
from fedveil.flower.coordinator_host.link import quiet_flower
from fedveil.flower.enrollment.certificates import new_node_key
from fedveil.flower.flower_version import RELEASES, check_flower_version
from fedveil.flower.silo_host.service import SiloService
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
    assert tuple(known) == RELEASES


@pytest.mark.parametrize(
    ("release", "refused"),
    [
        *(("1.41.0", False), ("1.42.3", False), ("1.42.0rc1", False)),
        *(
            ("1.40.9", True),
            ("1.43.0", True),
            ("1.4", True),
            ("1.410.0", True),
            ("2.41.0", True),
            (None, True),
        ),
    ],
)
def test_another_release_is_refused_before_anything_of_it_is_imported(
    release: str | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By everything that serves: the coordinator, its link, a silo. Neither folder, key nor socket is touched."""

    def found(package: str) -> str:
        if package != "flwr" or release is None:
            raise PackageNotFoundError(package)
        return release

    monkeypatch.setattr("fedveil.flower.flower_version.version", found)
    if not refused:
        check_flower_version()
        return
    said = (
        f"flwr {release} is installed, .*flwr 1.41 to 1.42 alone" if release else "needs flwr, which is not"
    )
    nothing: Any = object()  # what is served: nothing of it is looked at
    for serve in (
        lambda: imported_to_serve("fedveil.flower.coordinator_host.link"),
        lambda: open_party(nothing),
        lambda: serve_command(nothing),
        lambda: SiloService(nothing),
    ):
        with pytest.raises(ConfigError, match=said):
            serve()


def test_a_client_of_the_link_has_the_connections_that_a_carrier_replaces() -> None:
    with FleetHttpClient.from_server_address("127.0.0.1:9", False, None, []) as client:
        assert isinstance(client._client, httpx.Client)


def test_a_silo_that_waits_to_be_known_is_no_error_of_the_links_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower tells of each of its requests, with the key, as an error; other errors are told."""
    log, told = logging.getLogger("flwr"), list[str]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(log, "filters", list(log.filters))
    monkeypatch.setattr(log, "handlers", [handler])
    before = log.level
    quiet_flower()
    nobody = mock.Mock(**{"get_node_id_by_public_key.return_value": None})
    with pytest.raises(FlowerError) as raised:
        activate_node(ActivateNodeRequest(public_key=b"key"), nobody)
    log.error("%s", raised.value.message)
    log.error("another error")
    log.setLevel(before)
    assert told == ["another error"]


def test_a_silo_is_not_served_with_a_node_key_that_others_read(tmp_path: Path) -> None:
    new_node_key(tmp_path / "node.key")
    (tmp_path / "node.key").chmod(0o644)
    folder: Any = tmp_path
    with pytest.raises(CryptoError, match=r"node.key has mode 0644"):
        SiloService(folder)
    assert not (tmp_path / "run").exists()

"""Processes of their own, forked from one that has the libraries loaded: a fresh interpreter takes seconds."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from types import SimpleNamespace

import pytest

from fedveil.data.catalogue.digits import read_digits
from fedveil.run import process_group


def forking() -> ForkServerContext:
    """Return a context whose processes begin with the commands that train imported, unchecked, and nothing done yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedveil.cli.training", "tests.test_run"])
    ensure_running()  # now: it would keep the environment in which a run starts its workers
    return context


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run fork its processes from one that has all imported, where it starts interpreters otherwise."""
    monkeypatch.setattr(process_group, "multiprocessing", SimpleNamespace(get_context=lambda _: forking()))


def tell_modules(to: Connection) -> None:
    """Send the names of all modules that are loaded once the digits are read."""
    read_digits()
    to.send(sorted(sys.modules))
    to.close()

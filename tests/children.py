"""Processes of their own, forked from one that has the libraries loaded: a fresh interpreter takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return a context whose processes begin with the commands that train imported, unchecked, and nothing done yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedveil.commands.training", "tests.test_run"])
    return context

"""What a silo's carrier costs: the time of an exchange with a silo that was idle, and in a row, and its memory.

An exchange here is a letter that the guard refuses at once, so that nothing is measured but who carries it. Pauses
before an exchange with an idle silo are drawn from 0 to 13 s. A SuperNode looks for an answer every half second, and
for a message again three seconds after there was none.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Message, MessageType

from benchmarks.harness import Row
from fedveil.flower.coordinator_host.service import CoordinatorService
from fedveil.flower.coordinator_host.tasks import MessageQueue
from fedveil.flower.enrollment.demonstration import write_demonstration
from fedveil.flower.envelope import pack_message
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.silo_host.service import CARRIERS, SiloService
from fedveil.flower.sockets import free_port

_LONGEST_PAUSE = 13.0
"""Seconds; as long as a SuperNode takes to ask, to be kept waiting, and to pause."""


def exchange(post: MessageQueue, node: int) -> float:
    """Return the seconds from a letter to its answer."""
    begin = time.perf_counter()
    message = Message(pack_message(b"no letter"), dst_node_id=node, message_type=MessageType.QUERY)
    keys = post.push_messages([message])
    while not (answers := post.pull_messages(keys)):
        time.sleep(0.05)
    if answers[0].error.reason != "the silo did not answer this letter":
        raise ValueError(answers[0].error.reason)
    return time.perf_counter() - begin


def memory(process: int) -> float:
    """Return the MB of a process, its part of what it shares included."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def measure(folder: Path, carrier: str, number: int, longest: float = _LONGEST_PAUSE) -> Iterator[Row]:
    """Yield the figures of a carrier over so many exchanges each, with pauses up to a length in seconds."""
    made = write_demonstration(folder, port=free_port(), hospitals={"north": 60, "south": 50})
    home, silo = CoordinatorFolder(made.provisioned.coordinator), SiloFolder(made.provisioned.silos[0])
    home.link.settings.model_copy(update={"supernodes": True}).write(home.link / "link.toml")
    silo.settings.model_copy(update={"carrier": carrier}).write(silo / "silo.toml")
    party, served, pause = CoordinatorService(home), SiloService(silo), random.Random(7)
    try:
        with party._tasks.playing() as post:
            while not (nodes := post.get_nodes()):
                time.sleep(0.2)
            node = nodes[0].node_id
            exchange(post, node)
            idle = []
            for _ in range(number):
                time.sleep(pause.uniform(0, longest))
                idle.append(exchange(post, node))
            row = [exchange(post, node) for _ in range(number)]
            megabytes = memory(served.carrier.number)
    finally:
        served.stop()
        party.stop()
    yield Row(case=f"{carrier}: exchange with an idle silo, median", unit="s", ours=statistics.median(idle))
    yield Row(case=f"{carrier}: exchange with an idle silo, longest", unit="s", ours=max(idle))
    yield Row(case=f"{carrier}: exchanges in a row, median", unit="s", ours=statistics.median(row))
    yield Row(case=f"{carrier}: memory", unit="MB", ours=megabytes)


def rows(quick: bool) -> Iterator[Row]:
    """Yield the figures of every carrier over ten exchanges each; with ``quick`` two."""
    for carrier in CARRIERS:
        with tempfile.TemporaryDirectory() as folder:
            yield from measure(Path(folder) / "demo", carrier, 2 if quick else 10)


def smallest() -> Iterator[Row]:
    """Yield the figures of every carrier over one exchange each, without a pause."""
    for carrier in CARRIERS:
        with tempfile.TemporaryDirectory() as folder:
            yield from measure(Path(folder) / "demo", carrier, 1, 0.0)

"""What every benchmark shares: one row of a result, medians of alternating runs, and memory of a fresh
process.

A benchmark is a module ``benchmarks.NAME`` with a docstring and two functions. ``rows(quick: bool) -> Iterator[Row]``
ends within a minute with ``quick``. ``smallest() -> Iterator[Row]`` plays the kinds of cases in their smallest size, as
the tests do. ``fedveil bench NAME --json`` prints :func:`report`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import torch

import fedveil
from benchmarks.curves import Place
from fedveil.run.executors import Workers


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured case.

    Args:
        case: what was measured.
        unit: of ``ours`` and ``peer``.
        ours: our figure.
        peer: the same for what it is compared with; None where there is none.
        ratio: how many times better ours is than the peer's; None without a peer.
        target: what the figure is held to, of the ratio where there is one and of ``ours`` otherwise; None
        without one.
        met: whether the target is met; None without a target.
        place: where the figure stands on a curve; None if it is not on one.
    """

    case: str
    unit: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    place: Place | None = None


def compared(case: str, unit: str, ours: float, peer: float, target: float | None) -> Row:
    """Make the row of a rate (higher is better) that is held to ``target`` times a peer's."""
    ratio = ours / peer
    met = None if target is None else ratio >= target
    return Row(case=case, unit=unit, ours=ours, peer=peer, ratio=ratio, target=target, met=met)


def at_most(case: str, unit: str, ours: float, target: float) -> Row:
    """Make the row of a figure that must not exceed a target."""
    return Row(case=case, unit=unit, ours=ours, target=target, met=ours <= target)


def cpu_seconds(*cases: Callable[[], object], repeats: int) -> list[float]:
    """Return the median CPU seconds of each case; the cases alternate, so that a busy machine slows all
    alike.

    Every case runs once before, uncounted (allocators, caches, compilation).
    """
    for case in cases:
        case()
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, spent in zip(cases, seconds, strict=True):
            before = time.process_time()
            case()
            spent.append(time.process_time() - before)
    return [statistics.median(spent) for spent in seconds]


def fresh_cpu_seconds(
    prepare: Callable[..., Callable[[], object]], *arguments: object, repeats: int
) -> float:
    """Return the median CPU seconds of a call in a fresh process, which holds no memory that other cases freed.

    ``prepare(*arguments)`` builds the data and returns the call, which runs once before, uncounted.
    """
    return _in_fresh_process(_timed, prepare, arguments, repeats)


def _timed(
    prepare: Callable[..., Callable[[], object]], arguments: tuple[object, ...], repeats: int
) -> float:
    torch.set_num_threads(1)
    return cpu_seconds(prepare(*arguments), repeats=repeats)[0]


def _in_fresh_process(measure: Callable[..., float], *arguments: object) -> float:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, measure, arguments))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def _send(sender: Connection, measure: Callable[..., float], arguments: tuple[object, ...]) -> None:
    sender.send(measure(*arguments))


def extra_peak_megabytes(prepare: Callable[..., Callable[[], object]], *arguments: object) -> float:
    """Return how far a call raises the resident memory of a fresh process above what it held before, in MB.

    ``prepare(*arguments)`` builds the data and returns the call; what it allocates is not counted. Memory is sampled
    every millisecond (Linux). Mapped files do not count: the system takes their memory back when it is needed.
    """
    return _in_fresh_process(_extra_peak, prepare, arguments)


def _extra_peak(prepare: Callable[..., Callable[[], object]], arguments: tuple[object, ...]) -> float:
    torch.set_num_threads(1)
    call = prepare(*arguments)
    before = peak = _resident_megabytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _resident_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return max(peak, _resident_megabytes()) - before


def _resident_megabytes() -> float:
    with open("/proc/self/statm") as fields:
        resident, mapped = (int(field) for field in fields.read().split()[1:3])
    return (resident - mapped) * resource.getpagesize() / 1e6


def machine() -> dict[str, str | int]:
    """Describe what the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load(
    name: str,
    *,
    quick: bool,
    smallest: bool = False,
    workers: AbstractContextManager[Workers] | None = None,
) -> Iterator[Row]:
    """Return the rows of the benchmark with this name, measured as they are asked for.

    Args:
        name: of the module.
        quick: at most a minute.
        smallest: the smallest cases alone.
        workers: play the runs of a benchmark whose ``rows`` takes workers; None: this process.

    Raises:
        ModuleNotFoundError: there is no such benchmark.
        ValueError: the benchmark takes no workers.
    """
    module = importlib.import_module(f"benchmarks.{name}")
    rows: Iterator[Row]
    if workers is None:
        rows = module.smallest() if smallest else module.rows(quick)
    elif smallest or "workers" not in inspect.signature(module.rows).parameters:
        raise ValueError(f"{name} is measured in this process; leave them out")
    else:
        rows = module.rows(quick, workers)
    return rows


def report(name: str, rows: Iterable[Row], *, quick: bool, smallest: bool = False) -> dict[str, object]:
    """Return what ``fedveil bench NAME --json`` prints.

    Every row goes to standard error as soon as it is measured: a benchmark that breaks off loses none. ``load`` is how
    many other processes were running or waiting for a processor, on average of the minute before the first row: times
    that were taken on a busy machine say so.
    """
    load, measured = round(os.getloadavg()[0], 1), []
    for row in rows:
        print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
        measured.append(asdict(row))
    described = {**machine(), "fedveil": fedveil.__version__, "load": load}
    sizes = {"quick": quick} | ({"smallest": True} if smallest else {})
    return {"schema_version": 2, "name": name, **sizes, "machine": described, "rows": measured}

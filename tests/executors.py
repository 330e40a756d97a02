"""Executors for tests of sweeps, in threads of the test's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from typing import Any

from fedveil.run.executors import Workers


class OneThread(ThreadPoolExecutor):
    """Plays every task in one thread, by ``play`` if it is given."""

    def __init__(self, play: Callable[..., Any] | None = None) -> None:
        super().__init__(1)
        self._play = play

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._play or fn, *args, **kwargs)


def workers(play: Callable[..., Any] | None = None) -> nullcontext[Workers]:
    return nullcontext(Workers(executor=OneThread(play)))


class Numbered(ThreadPoolExecutor):
    """Plays every task by ``play``, which is told the task's number."""

    def __init__(self, play: Callable[..., Any]) -> None:
        super().__init__(1)
        self._play, self._numbers = play, count()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._play, next(self._numbers), fn, *args, **kwargs)


def numbered(play: Callable[..., Any]) -> nullcontext[Workers]:
    return nullcontext(Workers(executor=Numbered(play)))


class Interrupted(OneThread):
    """Every task ends by Ctrl-C; ``begun`` has those that began."""

    begun: list[str]

    def __init__(self) -> None:
        super().__init__(self.interrupt)
        type(self).begun = []

    def interrupt(self, point: Any, *_: Any) -> None:
        self.begun.append(point.experiment.name)
        time.sleep(0.1 * (len(self.begun) > 1))  # the pool may begin the second before it is told
        raise KeyboardInterrupt


class Lost(Executor):
    """The workers die, as of a scheduler that was killed."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(BrokenExecutor("a worker died"))
        return future


class Uncancellable(OneThread):
    """Its futures cannot be cancelled, as those of Parsl."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        future.cancel = self.refuse  # type: ignore[method-assign]
        return future

    def refuse(self) -> bool:
        raise NotImplementedError("Cancel not implemented")


def no_executor() -> str:
    return "threads"

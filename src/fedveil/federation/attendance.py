"""What whoever has a run's terms alone can tell: how many silos a round needs, and what another charge of it means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from fedveil.errors import IntegrityError
from fedveil.files import parse_json, reading

_PLACE: Final = "the experiment of the terms"


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """What the protection of a run asks of its silos.

    Attributes:
        least: silos without which no round ends.
        repeats: whether a round that is asked for again is the same release: its coordinator charges it once.
    """

    least: int
    repeats: bool

    @classmethod
    def of(cls, experiment: str, silos: int) -> Attendance:
        """Return what an experiment asks for.

        Args:
            experiment: the text of the terms.
            silos: |S|.

        Raises:
            IntegrityError: it is no experiment.
        """
        with reading(_PLACE, IntegrityError):
            protection = _parsed(experiment)["protection"]
            missing = int(protection.get("missing_silos", 0))
            anew = protection.get("on_missing") == "recover" or protection.get("private_sampling", False)
        return cls(least=max(1, silos - missing), repeats=not anew)

    def owed(self, charged: Iterable[int]) -> Counter[int]:
        """Return how often a coordinator has charged each round at least, if a silo has charged these."""
        return Counter(set(charged) if self.repeats else charged)


def but_trainer(experiment: str) -> dict[str, Any]:
    """Return an experiment without its trainer, of which "auto" was asked and one was chosen from public facts.

    Raises:
        IntegrityError: it is none.
    """
    with reading(_PLACE, IntegrityError):
        document = _parsed(experiment)
    document.pop("trainer", None)
    return document


def _parsed(experiment: str) -> dict[str, Any]:
    return dict(parse_json(experiment, _PLACE, IntegrityError))

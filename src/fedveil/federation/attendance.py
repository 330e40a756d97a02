"""What whoever has a run's terms alone can tell: how many silos a round needs, what another charge of it means, and
which round of which part a charge is of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from fedveil.errors import IntegrityError
from fedveil.federation.run_record import RoundPlace
from fedveil.files import parse_json, reading
from fedveil.foreign import foreign
from fedveil.privacy.ledger_lines import Entry

_PLACE: Final = "the experiment of the terms"


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """What the protection of a run asks of its silos.

    Attributes:
        name: of the run in its coordinator's ledger.
        least: silos without which no round ends.
        repeats: whether a round that is asked for again is the same release: its coordinator charges it once.
        trains: whether the run has rounds of training; else it is a document of releases.
    """

    name: str
    least: int
    repeats: bool
    trains: bool

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
            document = _parsed(experiment)
            protection, name = document["protection"], str(document["name"])
            missing = int(protection.get("missing_silos", 0))
            anew = protection.get("on_missing") == "recover" or protection.get("private_sampling", False)
        least = max(1, silos - missing)
        return cls(name=name, least=least, repeats=not anew, trains="rounds" in document)

    def owed(self, charged: Iterable[RoundPlace]) -> Counter[RoundPlace]:
        """Return how often a coordinator has charged each round at least, if a silo has charged these."""
        return Counter(set(charged) if self.repeats else charged)

    def place(self, entry: Entry) -> RoundPlace:
        """Return which round of which part a charge of the run's own ledger is of.

        Raises:
            IntegrityError: of none.
        """
        run, _, part = entry.run.partition("/")
        if run != self.name:
            raise IntegrityError(f"charge {entry.index + 1} is of another run than '{foreign(self.name)}'")
        if part:
            return part, 1
        return ("", entry.round) if self.trains else (str(entry.round), 1)


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

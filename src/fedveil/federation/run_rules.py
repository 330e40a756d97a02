"""What whoever has a run's terms alone can tell: how many silos a round needs, what another charge of it means, and
which round of which part a charge is of, and where a part stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from fedveil.errors import IntegrityError
from fedveil.federation.audit.run_record import NOTHING, RoundPlace
from fedveil.files import parse_json, reading
from fedveil.privacy.ledger import Entry
from fedveil.sanitize import sanitize
from fedveil.training.trainer_choice import is_batch_independent

_PLACE: Final = "the experiment of the terms"


@dataclass(frozen=True, kw_only=True)
class RunRules:
    """What the protection of a run asks of its silos.

    Attributes:
        name: of the run in its coordinator's ledger.
        least: silos without which no round ends.
        repeats: whether a round that is asked for again is the same release: its coordinator charges it once.
        trains: whether the run has rounds of training; else it is a document of releases.
        averages: whether the run's model is an average, and not the one that its last round ended with.
    """

    name: str
    quorum: int
    repeats: bool
    trains: bool
    averages: bool

    @classmethod
    @lru_cache(maxsize=8)
    def from_terms(cls, experiment: str, silos: int) -> RunRules:
        """Return what an experiment asks for; it is read once, for every line of a record asks.

        Args:
            experiment: the text of the terms.
            silos: |S|.

        Raises:
            IntegrityError: it is no experiment.
        """
        with reading(_PLACE, IntegrityError):
            document = _parsed(experiment)
            protection, name = document["protection"], str(document["name"])
            missing = int(protection.get("max_dropouts", 0))
            anew = protection.get("on_dropout") == "recover" or protection.get("private_sampling", False)
            averages = (document.get("server") or {}).get("average") is not None
        least = max(1, silos - missing)
        return cls(name=name, quorum=least, repeats=not anew, trains="rounds" in document, averages=averages)

    def required_charges(self, charged: Iterable[RoundPlace]) -> Counter[RoundPlace]:
        """Return how often a coordinator has charged each round at least, if a silo has charged these."""
        return Counter(set(charged) if self.repeats else charged)

    def place(self, entry: Entry) -> RoundPlace:
        """Return which round of which part a charge of the run's own ledger is of.

        Raises:
            IntegrityError: of none.
        """
        run, _, part = entry.run.partition("/")
        if run != self.name:
            raise IntegrityError(f"charge {entry.index + 1} is of another run than '{sanitize(self.name)}'")
        if part:
            return part, 1
        return ("", entry.round) if self.trains else (str(entry.round), 1)

    def position_error(self, part: str, before: Collection[str], asked: str, ended: str | None) -> str | None:
        """Return what is wrong with where a part stands, or with the model that it evaluates.

        An average of models, and a model that the silos alone have, is in no line: it is held against nothing.

        Args:
            part: its name.
            before: what the names of the parts of the lines before it begin with, up to a slash.
            asked: digest of the model that the silos were shown.
            ended: that of the model which the last round of training ended with; None: there was none.
        """
        kind = part.partition("/")[0]
        if kind == "" and "eval" in before:
            return "a round of training stands behind what comes after it"
        if kind == "eval" and ended is None:
            return "evaluates a model, and no round of training stands before it"
        if kind == "eval" and not self.averages and ended not in (asked, NOTHING.hex()):
            return "evaluates another model than the last round ended with"
        return None


def without_trainer(experiment: str) -> dict[str, Any]:
    """Return an experiment without its trainer, of which "auto" was asked and one was chosen from public facts.

    Raises:
        IntegrityError: it is none.
    """
    with reading(_PLACE, IntegrityError):
        document = _parsed(experiment)
    document.pop("trainer", None)
    return document


def is_batch_independent_run(experiment: str) -> bool:
    """Return whether an experiment computes each contribution by itself: then its statement has nothing of batches.

    Raises:
        IntegrityError: it is none.
    """
    with reading(_PLACE, IntegrityError):
        return is_batch_independent(str((_parsed(experiment).get("trainer") or {}).get("name")))


def _parsed(experiment: str) -> dict[str, Any]:
    return dict(parse_json(experiment, _PLACE, IntegrityError))

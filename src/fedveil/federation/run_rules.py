"""Rules that follow from a run's signed terms alone.

They give the quorum of a round, whether a repeated round is a new release, and the position of each ledger charge and
of each part in the run.
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
    """Facts of a run that its protection and its document fix.

    Attributes:
        name: name of the run in its coordinator's ledger.
        quorum: fewest silos that a round needs.
        repeats: whether a repeated round is the same release, so that its coordinator charges it once.
        trains: whether the run has rounds of training; else it is a document of releases.
        averages: whether the run's model is an average of models rather than the model of the last round.
    """

    name: str
    quorum: int
    repeats: bool
    trains: bool
    averages: bool

    @classmethod
    @lru_cache(maxsize=8)
    def from_terms(cls, experiment: str, silos: int) -> RunRules:
        """Derive the rules from an experiment's text; cached, because every line of a record needs them.

        Args:
            experiment: text of the terms.
            silos: |S|.

        Raises:
            IntegrityError: the text is not an experiment.
        """
        with reading(_PLACE, IntegrityError):
            document = _parsed(experiment)
            protection, name = document["protection"], str(document["name"])
            missing = int(protection.get("max_dropouts", 0))
            # A new release: with recovery the repeated round may sum other silos, and private sampling samples users
            # anew in each session.
            anew = protection.get("on_dropout") == "recover" or protection.get("private_sampling", False)
            averages = (document.get("server") or {}).get("average") is not None
        least = max(1, silos - missing)
        return cls(name=name, quorum=least, repeats=not anew, trains="rounds" in document, averages=averages)

    def required_charges(self, charged: Iterable[RoundPlace]) -> Counter[RoundPlace]:
        """Return the fewest charges of each round in the coordinator's ledger, given the charges of one silo.

        If rounds repeat, the silo may charge a round again after its own crash while the coordinator charges once.
        Otherwise the coordinator charges before every charge of a silo.
        """
        return Counter(set(charged) if self.repeats else charged)

    def place(self, entry: Entry) -> RoundPlace:
        """Return the part and the round of a charge in the run's own ledger.

        Raises:
            IntegrityError: the charge belongs to another run.
        """
        run, _, part = entry.run.partition("/")
        if run != self.name:
            raise IntegrityError(f"charge {entry.index + 1} is of another run than '{sanitize(self.name)}'")
        # Ledger names: "name/part" for a side release; "name" with the round's number for training, or the release's
        # number for a document of releases.
        if part:
            return part, 1
        return ("", entry.round) if self.trains else (str(entry.round), 1)

    def position_error(self, part: str, before: Collection[str], asked: str, ended: str | None) -> str | None:
        """Return the fault in the position of a part, or in the model that it evaluates; None if correct.

        The record holds neither averaged models nor models that only the silos have, so no check applies to these.

        Args:
            part: name of the part.
            before: first components (up to a slash) of the part names in earlier lines.
            asked: digest of the model that the silos received.
            ended: digest of the model of the last training round; None if none was played.
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
    """Return the tables of an experiment without its trainer.

    The coordinator may replace "auto" by a trainer, chosen from public facts. Texts are compared without it.

    Raises:
        IntegrityError: the text is not an experiment.
    """
    with reading(_PLACE, IntegrityError):
        document = _parsed(experiment)
    document.pop("trainer", None)
    return document


def is_batch_independent_run(experiment: str) -> bool:
    """Return whether an experiment's trainer computes each contribution by itself.

    The statement of a batch-independent run says nothing about batches.

    Raises:
        IntegrityError: the text is not an experiment.
    """
    with reading(_PLACE, IntegrityError):
        return is_batch_independent(str((_parsed(experiment).get("trainer") or {}).get("name")))


def _parsed(experiment: str) -> dict[str, Any]:
    return dict(parse_json(experiment, _PLACE, IntegrityError))

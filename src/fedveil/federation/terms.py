"""Terms of a run: the canonical JSON text of its experiment, and the rules that follow from it.

One experiment has one text and one digest:

    keys sorted, no blanks, ASCII, the shortest digits of every number that read back to it; no NaN and no infinity

If the document uses third-party packages, the text also states their versions (key ``packages``). A stage of another
version is a different stage, and a silo with another version refuses to join.

Claim: the time and memory to read a document are bounded by its limit of 64 KiB, regardless of the signer. Enforced
by :func:`read_canonical`. It checks the length first. The JSON grammar has no anchors, no dates and no sections that
can be reopened. It then checks depth and number of values, all before validation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, cast

from fedveil.errors import ConfigError, IntegrityError
from fedveil.federation.audit.run_record import NOTHING, RoundPlace
from fedveil.federation.errors import RefusalError
from fedveil.federation.transport.interface import LARGEST_EXPERIMENT
from fedveil.files import parse_json, reading
from fedveil.privacy.ledger import Entry
from fedveil.protocols.refusals import Code
from fedveil.registry import Member
from fedveil.run.config.experiment import Experiment, TableSection, parse
from fedveil.run.config.release_document import KINDS, TableDocument
from fedveil.run.environment import third_party_members
from fedveil.sanitize import sanitize
from fedveil.training.trainer_choice import is_batch_independent
from fedveil.validation import validate_document

EXPERIMENT: Final = "experiment.toml"
DOCUMENTS: Final[Mapping[str, Callable[[dict[str, Any], str], Experiment | TableDocument]]] = {
    EXPERIMENT: parse,
    **{kind.file: partial(validate_document, kind) for kind in KINDS},
}
"""Parsers of the document kinds, by file name. The folder of a run holds exactly one of these files."""

_PACKAGES: Final = "packages"
_PLACE: Final = "the coordinator's experiment"
_DEEPEST: Final = 8
_MOST_VALUES: Final = 2000
_LARGEST_INTEGER: Final = 2**53


def canonical(experiment: Experiment | TableDocument, packages: Mapping[str, str] | None = None) -> str:
    """Return the canonical text of a document.

    Args:
        document: the experiment or the request for releases.
        packages: versions of the third-party packages that the document needs, by name.

    Raises:
        ConfigError: a number in the document is infinite. Documents between institutions are finite.
    """
    document = experiment.model_dump(mode="json", exclude_none=True)
    try:
        return _text(document | ({_PACKAGES: packages} if packages else {}))
    except ValueError:
        raise ConfigError(
            f"{experiment.name}: a number is infinite; between institutions all are finite"
        ) from None


def public_text(
    document: Experiment | TableDocument, silos: tuple[str, ...], packages: Mapping[str, str] | None = None
) -> str:
    """Return the document's text for the silos, without local paths of the coordinator.

    The text replaces an initial model by its digest (``model.sha256``). Every silo states the digest and signs it
    with the rest.

    Args:
        document: the coordinator's document.
        silos: names of the silos.
        packages: versions of the packages that the document needs; None: the installed versions.
    """
    table = document.data.table
    if table is not None:
        table = TableSection(
            schema_file=Path("schema.toml"),
            files=tuple(Path(f"{name}.csv") for name in silos),
            test_share=table.test_share,
        )
    changes: dict[str, Any] = {"data": document.data.model_copy(update={"table": table, "folder": None})}
    if "model" in type(document).model_fields:
        model = cast(Experiment, document).model
        changes["model"] = model.model_copy(update={"initial": None, "initial_layers": None})
    return canonical(
        document.model_copy(update=changes),
        versions(third_party_members(document)) if packages is None else packages,
    )


def versions(members: Iterable[Member]) -> dict[str, str]:
    """Return the installed versions of the packages that provide these members, by package name."""
    return {one.package: one.version for one in members}


def parse_terms(text: str) -> tuple[dict[str, Any], Any]:
    """Return the tables of a document, and the package versions in its text ({} if it has none).

    Raises:
        FedveilError: as :func:`read_canonical`.
    """
    document = read_canonical(text)
    return document, document.pop(_PACKAGES, {})


def read_canonical(text: str) -> dict[str, Any]:
    """Parse a canonical text and return the tables of the document.

    Raises:
        RefusalError: the text exceeds the limit of length, depth or number of values.
        ConfigError: the text is not JSON, not canonical, or not an object.
    """
    if len(text) > LARGEST_EXPERIMENT:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    document = parse_json(text, _PLACE, ConfigError)
    # Breadth first, one level per pass: at most _DEEPEST + 1 levels are expanded, so no recursion on hostile nesting.
    level, values = [document], 0
    for _ in range(_DEEPEST + 1):
        values += len(level)
        level = [inner for value in level for inner in _within(value)]
    if level or values > _MOST_VALUES:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    # Equality with the re-encoded text rejects duplicate keys, blanks and alternative spellings of numbers: two texts
    # of one experiment would have two digests.
    if not isinstance(document, dict) or _text(document) != text:
        raise ConfigError(f"{_PLACE}: not canonical JSON")
    return document


def _within(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list):
        return value
    # 2^53: larger integers have no exact float64 value, so parties could read different numbers from one text.
    if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
        raise ConfigError(f"{_PLACE}: a whole number of 2^53 or more")
    return []


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- rules that follow from the terms ---
# They give the quorum of a round, whether a repeated round is a new release, and the position of each ledger charge and
# of each part in the run.


_TERMS_PLACE: Final = "the experiment of the terms"


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
        with reading(_TERMS_PLACE, IntegrityError):
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
    with reading(_TERMS_PLACE, IntegrityError):
        document = _parsed(experiment)
    document.pop("trainer", None)
    return document


def is_batch_independent_run(experiment: str) -> bool:
    """Return whether an experiment's trainer computes each contribution by itself.

    The statement of a batch-independent run says nothing about batches.

    Raises:
        IntegrityError: the text is not an experiment.
    """
    with reading(_TERMS_PLACE, IntegrityError):
        return is_batch_independent(str((_parsed(experiment).get("trainer") or {}).get("name")))


def _parsed(experiment: str) -> dict[str, Any]:
    return dict(parse_json(experiment, _TERMS_PLACE, IntegrityError))

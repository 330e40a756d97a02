"""Terms of a run: the canonical JSON text of its experiment, and the rules that follow from it.

The text is canonical: one experiment has one text, and so one digest:

    sorted keys; no blanks; ASCII; for every number the fewest digits that read back to it; no NaN, no infinity

If the document uses third-party packages, the text also states their versions (key ``packages``). A stage of another
version is a different stage, and a silo with another version refuses to join.

Claim: a hostile document cannot cost a reader more time or memory than 64 KiB of JSON can. :func:`read_canonical`
enforces this before validation: it checks the length first, and then the depth and the number of values. JSON is used
instead of YAML or TOML because it has no anchors, dates or sections that can be reopened.
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
from fedveil.federation.transport.interface import LARGEST_EXPERIMENT
from fedveil.files import parse_json, reading
from fedveil.privacy.ledger import Entry
from fedveil.protocols.refusals import Code, RefusalError
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


def canonical(document: Experiment | TableDocument, packages: Mapping[str, str] | None = None) -> str:
    """Return the canonical text of a document.

    Args:
        document: the experiment or the request for releases.
        packages: versions of the third-party packages that the document needs, by name.

    Raises:
        ConfigError: a number in the document is infinite. Documents between institutions are finite.
    """
    tables = document.model_dump(mode="json", exclude_none=True)
    try:
        return _text(tables | ({_PACKAGES: packages} if packages else {}))
    except ValueError:
        raise ConfigError(
            f"{document.name}: a number is infinite; between institutions all are finite"
        ) from None


def public_text(
    document: Experiment | TableDocument, silos: tuple[str, ...], packages: Mapping[str, str] | None = None
) -> str:
    """Return the document's text for the silos, without local paths of the coordinator.

    The text has an initial model's digest (``model.sha256``) instead of its path. Every silo states the digest and
    signs it with the rest of the text.

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
    return {member.package: member.version for member in members}


def parse_terms(text: str) -> tuple[dict[str, Any], Any]:
    """Return the tables of a canonical text, and its package versions ({} if it has none).

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
    # Breadth first, without recursion: of a deeply nested document only _DEEPEST + 1 levels are expanded.
    level, values = [document], 0
    for _ in range(_DEEPEST + 1):
        values += len(level)
        level = [inner for value in level for inner in _children(value)]
    if level or values > _MOST_VALUES:
        raise RefusalError(Code.EXPERIMENT_LENGTH, len(text))
    # Equality with the re-encoded text rejects duplicate keys, blanks and alternative spellings of numbers: two texts
    # of one experiment would have two digests.
    if not isinstance(document, dict) or _text(document) != text:
        raise ConfigError(f"{_PLACE}: not canonical JSON")
    return document


def _children(value: Any) -> list[Any]:
    """Return the values inside a table or list; raise a ConfigError for an integer that float64 cannot hold."""
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
# These rules give the quorum of a round, whether a repeated round is a new release, the round of the run that a ledger
# charge pays for, and the allowed order of the parts.


_TERMS_PLACE: Final = "the experiment of the terms"


@dataclass(frozen=True, kw_only=True)
class RunRules:
    """Facts of a run that follow from its document, mainly from its table ``protection``.

    Attributes:
        name: name of the run in its coordinator's ledger.
        quorum: smallest number of silos with which a round can end.
        repeats: whether a repeated round is the same release, so that the coordinator charges it once.
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
            # Two cases in which a repeated round is a new release: with recovery it may sum other silos, and private
            # sampling samples other users in each session.
            is_new_release = protection.get("on_dropout") == "recover" or protection.get(
                "private_sampling", False
            )
            averages = (document.get("server") or {}).get("average") is not None
        least = max(1, silos - missing)
        return cls(
            name=name,
            quorum=least,
            repeats=not is_new_release,
            trains="rounds" in document,
            averages=averages,
        )

    def required_charges(self, charged_rounds: Iterable[RoundPlace]) -> Counter[RoundPlace]:
        """Return the number of charges that the coordinator's ledger must have at least, for each round.

        If a repeated round is the same release, a silo may charge it again after a crash of its own, and the
        coordinator charges it once. Otherwise the coordinator charges before every charge of a silo.

        Args:
            charged_rounds: the rounds of one silo's charges, with repetitions.
        """
        return Counter(set(charged_rounds) if self.repeats else charged_rounds)

    def place(self, entry: Entry) -> RoundPlace:
        """Return the part and the round that a charge in the run's ledger pays for.

        Raises:
            IntegrityError: the charge belongs to another run.
        """
        run, _, part = entry.run.partition("/")
        if run != self.name:
            raise IntegrityError(f"charge {entry.index + 1} is of another run than '{sanitize(self.name)}'")
        # The ledger entry of a side release has the name "run/part". All others have the run's name: with the number of
        # the round for training, or with the number of the release for a document of releases.
        if part:
            return part, 1
        return ("", entry.round) if self.trains else (str(entry.round), 1)

    def position_error(
        self, part: str, before: Collection[str], received_model: str, last_model: str | None
    ) -> str | None:
        """Return what is wrong with a part's position in the run, or with the model that it evaluates; None if nothing.

        The model is not checked if the record has no digest of it: if it is an average of models, or only the silos
        have it.

        Args:
            part: name of the part; empty for a training round.
            before: kinds of the parts in earlier lines: their names up to the slash ("prep", "eval", or empty).
            received_model: digest of the model that the silos received for this part.
            last_model: digest of the model after the last training round; None if there was none.
        """
        kind = part.partition("/")[0]
        if kind == "" and "eval" in before:
            return "a round of training stands behind what comes after it"
        if kind == "eval" and last_model is None:
            return "evaluates a model, and no round of training stands before it"
        if kind == "eval" and not self.averages and last_model not in (received_model, NOTHING.hex()):
            return "evaluates another model than the last round ended with"
        return None


def without_trainer(experiment: str) -> dict[str, Any]:
    """Return the tables of an experiment without its trainer.

    The coordinator may replace the trainer "auto" by one that it chooses from public facts, so experiments are compared
    without it.

    Raises:
        IntegrityError: the text is not an experiment.
    """
    with reading(_TERMS_PLACE, IntegrityError):
        document = _parsed(experiment)
    document.pop("trainer", None)
    return document


def is_batch_independent_run(experiment: str) -> bool:
    """Return whether an experiment's trainer computes each contribution by itself, not in a batch with others.

    The statement of such a run needs no sentence about batches.

    Raises:
        IntegrityError: the text is not an experiment.
    """
    with reading(_TERMS_PLACE, IntegrityError):
        return is_batch_independent(str((_parsed(experiment).get("trainer") or {}).get("name")))


def _parsed(experiment: str) -> dict[str, Any]:
    return dict(parse_json(experiment, _TERMS_PLACE, IntegrityError))

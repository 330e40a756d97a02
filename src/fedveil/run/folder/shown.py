"""Classify every field of the run folder by the data it reveals, and list those without a guarantee.

=========  =========================================================================================================
kind       the field is a function of
=========  =========================================================================================================
COVERED    the experiment, released models and sums, and facts that the statement covers or names
TESTED     test records
PRIVATE    private records, exactly: counts, lengths, times. A simulation shows them: one process has all records
=========  =========================================================================================================

The statement names everything that is not COVERED (:func:`uncovered_outputs`). A new field must be listed here
before a run may write it: a test compares these tables with the files that runs write. A file that is not read as
fields has one kind for all of its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class Kind(Enum):
    """The data of which a field of the run folder is a function."""

    COVERED = "covered"
    TESTED = "tested"
    PRIVATE = "private"


METRICS: Final[Mapping[str, Kind]] = MappingProxyType(
    dict.fromkeys(
        ("schema_version", "round", "epsilon", "clip", "attempts", "summed", "movement", "remarks"),
        Kind.COVERED,
    )
    | {"test": Kind.TESTED}
    | dict.fromkeys(("participants", "contributions", "nonfinite", "norms", "clipped"), Kind.PRIVATE)
    | dict.fromkeys(("bytes_up", "communication_cost", "seconds", "elapsed"), Kind.PRIVATE)
)
"""Fields of a line of ``metrics.jsonl``.

Message lengths depend on the updates if a channel compresses, and on which users have records if weights are private.
Seconds depend on the participants and their numbers of records.
"""

STATEMENT: Final[Mapping[str, Kind]] = MappingProxyType(
    dict.fromkeys(
        (
            *(
                "schema_version",
                "sentences",
                "unit",
                "adjacency",
                "epsilon",
                "delta",
                "accountant",
                "epsilons",
            ),
            *("units", "mechanisms", "trust", "randomness", "secure_randomness", "uncovered", "as_published"),
            *("reasons", "notes", "released", "event"),
        ),
        Kind.COVERED,
    )
)
"""Fields of ``privacy.json``."""

LEDGER: Final[Mapping[str, Kind]] = MappingProxyType(
    dict.fromkeys(
        (
            *("schema_version", "index", "run", "round", "attempt", "unit", "adjacency", "event"),
            *("previous", "digest", "time", "kind"),
        ),
        Kind.COVERED,
    )
)
"""Fields of a line of ``ledger.jsonl``."""

ENVIRONMENT: Final[Mapping[str, Kind]] = MappingProxyType(
    dict.fromkeys(
        ("schema_version", "python", "machine", "device", "trainer", "parameters", "packages", "data_files"),
        Kind.COVERED,
    )
)
"""Fields of ``environment.json``."""

FIELDS: Final[Mapping[str, Mapping[str, Kind]]] = MappingProxyType(
    {
        "metrics.jsonl": METRICS,
        "privacy.json": STATEMENT,
        "ledger.jsonl": LEDGER,
        "environment.json": ENVIRONMENT,
    }
)
"""The files whose fields have different kinds, or whose fields must all stay COVERED."""

FILES: Final[Mapping[str, Kind]] = MappingProxyType(
    dict.fromkeys(
        (
            *(
                "experiment.toml",
                "model.safetensors",
                "spectrum.json",
                "public_test.json",
                "attempts.jsonl",
                "federation.json",
            ),
            *("run_end.json", "terms.jsonl", "rounds.jsonl", "silo_signatures.json"),
            *("stopped.json", "evaluation.json"),
            "preprocessing.json",
            "schema.toml",
        ),
        Kind.COVERED,
    )
    | dict.fromkeys(
        ("diagnostics.json", "main_silos.csv", "transcript.jsonl", "audit.json", "report.html", "checkpoint"),
        Kind.PRIVATE,
    )
)
"""All other files.

The report plots the private fields. The checkpoint has a line of metrics, with the number of sampled participants.
"""


FEDERATED: Final = frozenset({"seconds", "elapsed", "report.html", "checkpoint"})
"""Names of the PRIVATE fields and files that a run between institutions writes.

Its coordinator has no records: it writes no diagnostics of training, no transcript, and no file of main silos, and
there is nothing to audit. What remains is the time that silos took, in the report and the checkpoint too.
"""


def uncovered_outputs(*, exact_metrics: bool = True, is_federated: bool = False) -> tuple[str, ...]:
    """Return the sentences of a statement about fields and files that no guarantee covers.

    Args:
        exact_metrics: whether metrics on the test records are shown without noise.
        is_federated: whether the run was played between institutions, by a coordinator without records.
    """
    if is_federated:
        times = ", ".join(name for name in METRICS if name in FEDERATED)
        files = ", ".join(name for name in FILES if name in FEDERATED)
        return (
            *((_TESTED,) if exact_metrics else ()),
            f"the times of rounds, which depend on the records: the fields {times} of metrics.jsonl; the files {files}",
            _WAITING,
        )
    fields = ", ".join(name for name, kind in METRICS.items() if kind is Kind.PRIVATE)
    files = ", ".join(name for name, kind in FILES.items() if kind is Kind.PRIVATE)
    return (
        *((_TESTED,) if exact_metrics else ()),
        f"the run's diagnostics, which are computed from private records without noise: the fields {fields} of "
        f"metrics.jsonl; the files {files}; and the progress shown during training. Protect them as you protect the "
        "records",
        "an audit of the run, if one is made (audit.json and its section of the report): it evaluates the training "
        "records and trains on them again",
        _WAITING,
    )


_TESTED: Final = (
    "the metrics on the test records, which are computed without noise after every evaluated round"
)
_WAITING: Final = (
    "how long a round takes: this depends on who takes part and with how many records, and anybody who waits for "
    "the round can see it"
)

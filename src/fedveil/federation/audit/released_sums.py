"""Released sums, as their digests: what ties the files of a run to what its parties signed.

    one release       SHA-256 of the standard deviation of its noise and its numbers, all float64, little-endian
    several           SHA-256 of their digests in their order; zeros for none

Every figure that is shown follows from these numbers and from what was asked of them: which columns, bounds, groups and
silos. What was asked, as the file says it, is the coordinator's word, and held against nothing that silos signed. A
silo is told the numbers of a release with the part of the run that follows it, and signs their digest with its round;
the sum itself no silo sees.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from fedveil.checks import Unchecked
from fedveil.engine.releases.preprocessing import Preprocessed
from fedveil.engine.run_folder.folder import PREPROCESSED
from fedveil.errors import IntegrityError
from fedveil.files import parse_json, reading
from fedveil.foreign import foreign
from fedveil.statistics.evaluation.evaluated import FILE as EVALUATED
from fedveil.statistics.evaluation.evaluated import Evaluated
from fedveil.statistics.inference.fitted import FILE as FITTED
from fedveil.statistics.inference.fitted import Fitted
from fedveil.statistics.released import FILE as COUNTED
from fedveil.statistics.released import Released
from fedveil.statistics.stored import NoisySum, NoisySums

EVALUATING: Final = "checkpoint/evaluation.json"
"""In the run folder: releases of an evaluation that is not whole yet."""

Numbers = tuple[float, Float64[np.ndarray, " d"]]
"""The standard deviation of a release's noise, and what was released."""


def digest_of_release(made: Numbers) -> bytes:
    """Return the digest of one release: 32 bytes."""
    std, vector = made
    return hashlib.sha256(np.array([std, *vector], dtype="<f8").tobytes()).digest()


def digest_of_all(releases: Iterable[bytes]) -> bytes:
    """Return the digest of releases, of their own digests: 32 bytes."""
    content = b"".join(releases)
    return hashlib.sha256(content).digest() if content else bytes(32)


def _preprocessed(data: Any) -> tuple[NoisySums, Any]:
    found = Preprocessed.from_json(data, PREPROCESSED)
    return found.made, found.to_json()


def _evaluated(data: Any) -> tuple[NoisySums, Any]:
    found = Evaluated.from_json(data, EVALUATED)
    return found.releases, found.to_json()


def _evaluating(data: Any) -> tuple[NoisySums, Any]:
    made = tuple(NoisySum.from_json(one, len(one["vector"]), EVALUATING) for one in data["releases"])
    return made, {"releases": [one.to_json() for one in made]}


def _counted(data: Any) -> tuple[NoisySums, Any]:
    found = Released.from_json(data, COUNTED)
    return (found.made,), found.to_json()


def _fitted(data: Any) -> tuple[NoisySums, Any]:
    found = Fitted.from_json(data, FITTED)
    return found.releases, found.to_json()


_FILES: Final[Mapping[str, Callable[[Any], tuple[NoisySums, Any]]]] = {
    PREPROCESSED: _preprocessed,
    EVALUATED: _evaluated,
    EVALUATING: _evaluating,
    COUNTED: _counted,
    FITTED: _fitted,
}
"""What has releases, in their order, as whoever shows their figures reads it: the sums, and all that the file must have
with them. An evaluation has a file of its own until it is whole."""


def check_releases(files: Mapping[str, bytes], record: Sequence[tuple[str, str]], *, whole: bool) -> str:
    """Check that the released numbers of a run are those of its record; return who signed them.

    Args:
        files: of the run.
        record: of every line, in order, the part and the digest of what it ended with.
        whole: whether all files of the run are here.

    Raises:
        IntegrityError: others, or a damaged file.
        Unchecked: a file of some is not here.
    """
    last, found = len(record) - 1, _digests_in(files)
    named = [(number, foreign(part), digest) for number, (part, digest) in enumerate(record) if part]
    for (_, part, said), (name, digest) in zip(named, found, strict=False):
        if said != digest:
            raise IntegrityError(f"{name}: not the numbers of release {part} that the record has")
    if len(found) > len(named) or (whole and len(found) < len(named)):
        raise IntegrityError(f"there are numbers of {len(found)} releases, and the record has {len(named)}")
    if len(found) < len(named):
        raise Unchecked(f"numbers of {len(found)} releases are here, as the record has them, of {len(named)}")
    told = ", ".join(part for number, part, _ in named if number < last)
    words = f"the numbers of {len(named)} releases are those of the record; what they are of, the coordinator says"
    if told:
        words += f"; the silos of the next round were told, and signed, {told}"
    if record[last][0]:
        words += f"; the coordinator alone signed {named[-1][1]}: no silo sees a sum"
    return words


def _digests_in(files: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return the releases that files have: the file of each, and its digest in hexadecimal digits.

    Raises:
        FedveilError: a file is damaged, or has anything else than what its reader makes of it.
    """
    found = []
    for name, read in _FILES.items():
        if name not in files or (name == EVALUATING and EVALUATED in files):
            continue
        with reading(name, IntegrityError):
            data = parse_json(files[name], name, IntegrityError)
            made, whole = read(data)
        if not _same(data, whole):
            raise IntegrityError(f"{name}: not what follows from its released numbers and what was asked for")
        found += [(name, digest_of_release((one.std, one.vector)).hex()) for one in made]
    return found


def _same(found: Any, made: Any) -> bool:
    """Return whether two JSON documents are the same, but for the rounding of another machine."""
    if isinstance(found, dict) and isinstance(made, dict):
        return found.keys() == made.keys() and all(_same(found[key], made[key]) for key in found)
    if isinstance(found, list) and isinstance(made, (list, tuple)):
        return len(found) == len(made) and all(_same(*pair) for pair in zip(found, made, strict=True))
    if isinstance(found, float) and isinstance(made, float):
        return math.isclose(found, made, rel_tol=1e-6, abs_tol=1e-9)
    return bool(found == made)

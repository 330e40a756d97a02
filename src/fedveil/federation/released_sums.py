"""Released sums, as their digests: what ties the files of a run to what its parties signed.

    one release       SHA-256 of the standard deviation of its noise and its numbers, all float64, little-endian
    several           SHA-256 of their digests in their order; zeros for none

Every figure that is shown follows from these numbers and from what was asked for. A silo is told the numbers of a
release with the part of the run that follows it, and signs their digest with its round; the sum itself no silo sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.checks import Unchecked
from fedveil.engine.folder import PREPROCESSED
from fedveil.errors import IntegrityError
from fedveil.files import parse_json, reading
from fedveil.foreign import foreign
from fedveil.statistics.evaluated import FILE as EVALUATED
from fedveil.statistics.inference.fitted import FILE as FITTED
from fedveil.statistics.released import FILE as COUNTED

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


_FILES: Final = (PREPROCESSED, EVALUATED, EVALUATING, COUNTED, FITTED)
"""What has releases, in their order; an evaluation has a file of its own until it is whole."""


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
    words = f"the numbers of {len(named)} releases are those of the record"
    if told:
        words += f"; the silos of the next round were told, and signed, {told}"
    if record[last][0]:
        words += f"; the coordinator alone signed {named[-1][1]}: no silo sees a sum"
    return words


def _digests_in(files: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return the releases that files have: the file of each, and its digest in hexadecimal digits."""
    found = []
    for name in _FILES:
        if name not in files or (name == EVALUATING and EVALUATED in files):
            continue
        with reading(name, IntegrityError):
            data = parse_json(files[name], name, IntegrityError)
            for one in (
                (data,) if name == COUNTED else data["releases"]
            ):  # as its reader does, and no other key
                made = float(one["noise_std"]), np.array(one["vector"], dtype=np.float64)
                found.append((name, digest_of_release(made).hex()))
    return found

"""How what was released is read back from its file: one version, and numbers that fit what was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from jaxtyping import Float64
from pydantic import ValidationError

from fedveil.errors import ConfigError, DataError, RunFolderError
from fedveil.files import reading

SCHEMA_VERSION: Final = 1


@contextmanager
def restoring(data: Any, origin: object) -> Iterator[None]:
    """Have all that fails for what a document holds fail with one error that names it.

    Args:
        data: the document.
        origin: what to call it: its path, mostly.

    Raises:
        RunFolderError: another version, something that is missing, or a request that none could be.
    """
    if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
        raise RunFolderError(f"{origin}: nothing of schema version {SCHEMA_VERSION}")
    with reading(origin, RunFolderError):
        try:
            yield
        except (ValidationError, ConfigError, DataError) as error:
            raise RunFolderError(f"{origin} is damaged: what it is of cannot be released") from error


def noisy_vector(values: Any, noise_std: float, length: int, origin: object) -> Float64[np.ndarray, " d"]:
    """Return a released sum.

    Args:
        values: as the document has it.
        noise_std: of the noise on every number.
        length: what was asked for.
        origin: as in :func:`restoring`.

    Raises:
        RunFolderError: numbers that are not finite, as many as were asked for, under noise.
    """
    found = np.array(values, dtype=np.float64)
    if found.shape != (length,) or not np.isfinite(found).all():
        raise RunFolderError(f"{origin} is damaged: its numbers do not fit what was asked for")
    if not (math.isfinite(noise_std) and noise_std > 0):
        raise RunFolderError(f"{origin} is damaged: its noise has no standard deviation")
    return found

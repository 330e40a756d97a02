"""What clients have to give to a round: an agreement takes of it what its protocol needs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Float64


class Work(Protocol):
    """What the clients of a round have to give; nothing is computed before it is asked for.

    Vectors are (d,), in the unit of the update; whatever is bounded lies on the grid of its bound.
    """

    def message(self, client: int) -> Float64[np.ndarray, " d"] | bytes:
        """Return what the channel makes of a client's sum: numbers with its share of the noise, or a codec's bytes."""
        ...

    def bare(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's bounded, weighted sum before its channel; it carries no noise."""
        ...

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return the bounded contributions of a client's users, ascending, each with weight 1."""
        ...

    def share(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's share of the noise alone."""
        ...

    def dither(self, client: int) -> bytes:
        """Return 32 bytes of a client's own that are the same for the same attempt, to draw remainders from."""
        ...

    def moved(self) -> Float64[np.ndarray, " d"]:
        """Return how far the models that were released have moved from the first one, as all clients know it."""
        ...

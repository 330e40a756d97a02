"""Quantise vectors with an error of a chosen law that is independent of the vector.

===========  ================================================================  ====================================
quantiser    output for x                                                      error
===========  ================================================================  ====================================
SDQ          Q(x - V) + V, V uniform on the cell                               uniform on the cell
RSUQ         the same with the first V whose error lies in the packing ball    uniform on the ball
LRSUQ        RSUQ of x / beta, times beta, beta = layer radius / ball radius   exactly the layered law
===========  ================================================================  ====================================

All three are :class:`LayeredQuantizer` with different laws: :class:`~fedveil.quantization.laws.CellLaw`,
:class:`~fedveil.quantization.laws.BallLaw`, or a noise law. References: CEPAM, Section III and eq. (8); Ling &
Li, "Rejection-sampled universal quantization".

Synchronisation: attempt i takes dithers from the shared stream only for the sub-vectors without an accepted
dither, in index order. The message contains the accepted attempt of each sub-vector, so the receiver knows that set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.errors import UnsupportedPairError
from fedveil.quantization.lattices import Lattice
from fedveil.quantization.laws import CellLaw, Law
from fedveil.quantization.portable import uniforms
from fedveil.quantization.streams import SharedStreams

MIN_ACCEPTANCE = 2.0**-10
"""Least acceptance of a law on a lattice: at most 1023 of 1024 dithers are rejected."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Result of quantising m sub-vectors of n parameters, on the sender's side.

    Attributes:
        points: (m, n) lattice points.
        attempts: (m,) rejected dithers before the accepted one.
        dithers: (m, n) accepted dithers.
        scales: (m,) beta of each sub-vector, in the unit of the update.
    """

    points: Float64[np.ndarray, "m n"]
    attempts: Int64[np.ndarray, " m"]
    dithers: Float64[np.ndarray, "m n"]
    scales: Float64[np.ndarray, " m"]


@dataclass(frozen=True, kw_only=True)
class LayeredQuantizer:
    """Layered rejection-sampled universal quantiser (LRSUQ) of a law on a lattice.

    Raises:
        UnsupportedPairError: the law's layers do not fit the lattice's cell, or fill too little of it.
    """

    law: Law
    lattice: Lattice

    def __post_init__(self) -> None:
        self.law.require(self.lattice.dimension)
        if self.rejects and self.lattice.acceptance < MIN_ACCEPTANCE:
            raise UnsupportedPairError(
                f"on {self.lattice.name} a ball fills {self.lattice.acceptance:.2g} of the cell, so almost every "
                f"dither would be rejected: choose a lattice that fills at least {MIN_ACCEPTANCE:.2g}"
            )

    @property
    def rejects(self) -> bool:
        """Return whether a dither can be rejected: never for SDQ, nor on the line, where ball and cell are equal."""
        return self.lattice.dimension > 1 and not isinstance(self.law, CellLaw)

    def scales(self, streams: SharedStreams, block: int, count: int) -> Float64[np.ndarray, " count"]:
        """Draw the latents of ``count`` sub-vectors and return beta = layer radius / packing radius."""
        latent = self.law.latent(streams.source("latent", block), count, self.lattice.dimension)
        return self.law.radius(latent) / self.lattice.packing_radius

    def quantize(self, x: Float64[np.ndarray, "m n"], streams: SharedStreams, block: int) -> Quantized:
        """Quantise sub-vectors.

        Args:
            x: (m, n) finite sub-vectors, n the lattice's dimension.
            streams: the shared streams of this update.
            block: number of the block within the update; each block has streams of its own.
        """
        count, n = x.shape
        scales = self.scales(streams, block, count)
        scaled = x / scales[:, None]
        source = streams.source("dither", block)
        dithers = self._dithers(uniforms(source, count * n))
        target = scaled - dithers
        points = self.lattice.nearest(target)
        attempts = np.zeros(count, dtype=np.int64)
        if self.rejects:
            pending = np.flatnonzero(self._outside(points, target))
            attempt = 0
            while len(pending):
                attempt += 1
                fresh = self._dithers(uniforms(source, len(pending) * n))
                target = scaled[pending] - fresh
                nearest = self.lattice.nearest(target)
                points[pending], dithers[pending], attempts[pending] = nearest, fresh, attempt
                pending = pending[self._outside(nearest, target)]
        return Quantized(points=points, attempts=attempts, dithers=dithers, scales=scales)

    def replay_dithers(
        self, attempts: Int64[np.ndarray, " m"], streams: SharedStreams, block: int
    ) -> Float64[np.ndarray, "m n"]:
        """Return the sender's accepted dithers, from its numbers of rejected attempts."""
        n = self.lattice.dimension
        source = streams.source("dither", block)
        if not self.rejects:
            return self._dithers(uniforms(source, len(attempts) * n))
        # First compute the row of each accepted dither in the stream, then draw once: the stream position of a dither
        # depends on how many sub-vectors were still without one at each attempt.
        positions = np.empty(len(attempts), dtype=np.int64)
        pending, waiting, drawn = np.arange(len(attempts)), attempts, 0
        while len(pending):
            accepted = waiting == 0
            accepted_at = np.flatnonzero(accepted)
            positions[pending[accepted_at]] = drawn + accepted_at
            drawn += len(pending)
            rejected = np.flatnonzero(~accepted)
            pending, waiting = pending[rejected], waiting[rejected] - 1
        return self._dithers(uniforms(source, drawn * n).reshape(-1, n)[positions].reshape(-1))

    def reconstruct(
        self,
        points: Float64[np.ndarray, "m n"],
        dithers: Float64[np.ndarray, "m n"],
        scales: Float64[np.ndarray, " m"],
    ) -> Float64[np.ndarray, "m n"]:
        """Return the decoded sub-vectors beta (M + V)."""
        decoded: Float64[np.ndarray, "m n"] = points + dithers
        decoded *= scales[:, None]
        return decoded

    def _dithers(self, flat: Float64[np.ndarray, " k"]) -> Float64[np.ndarray, "m n"]:
        return self.lattice.cell_points(flat.reshape(-1, self.lattice.dimension))

    def _outside(
        self, points: Float64[np.ndarray, "m n"], target: Float64[np.ndarray, "m n"]
    ) -> Bool[np.ndarray, " m"]:
        error = points - target
        return np.asarray(np.einsum("ij,ij->i", error, error) > self.lattice.packing_radius**2)

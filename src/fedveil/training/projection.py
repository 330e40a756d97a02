"""Project models as DP-Fed-LS does: after every step, pull a model back into a ball around its start."""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor


def project_(models: Float32[Tensor, "b d"], centre: Float32[Tensor, " d"] | None, radius: float) -> None:
    """Replace every row w by c + (w - c) / max(1, ||w - c|| / radius), in place.

    Norms are computed in float64, so that no finite row overflows. A row that is not finite stays so; the bound on
    contributions counts it and drops it later.

    Args:
        models: (b, d) one model, or one update, per row.
        centre: c; None is the origin.
        radius: L > 0, same unit as the updates.

    >>> rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> project_(rows, None, 1.0)
    >>> [[round(x, 4) for x in row] for row in rows.tolist()]
    [[0.6, 0.8], [0.3, 0.4]]
    """
    moves = models if centre is None else models - centre
    norms = torch.linalg.vector_norm(moves, dim=1, dtype=torch.float64)
    outside = (norms > radius).nonzero().flatten()
    if len(outside):
        shortened = moves[outside].mul_((radius / norms[outside]).float()[:, None])
        models[outside] = shortened if centre is None else shortened.add_(centre)

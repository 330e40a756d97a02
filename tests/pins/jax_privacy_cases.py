"""Record what jax_privacy says of 40 banded codes: ``python tests/pins/jax_privacy_cases.py`` where jax_privacy is.

It is no dependency: the cases were made once by jax_privacy 2.0.0, in an environment of its own, in float64. Codes are
those that :mod:`fedveil.methods.correlated` takes: falling multiples of 2^-6, with at most as many bands as rounds
between two participations.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("jax_privacy_cases.json")
CASES = 40


def cases() -> list[dict[str, object]]:
    """Return the cases, drawn by a fixed seed, with the squared sensitivities of both of its functions."""
    import jax
    from jax_privacy.matrix_factorization import sensitivity, toeplitz

    jax.config.update("jax_enable_x64", True)
    random, found = np.random.default_rng(1), []
    for _ in range(CASES):
        rounds, period = int(random.integers(5, 13)), int(random.integers(1, 6))
        bands = int(random.integers(1, min(period, rounds) + 1))
        steps = np.sort(random.integers(0, 65, bands - 1))[::-1]
        code = [1.0, *(float(step) / 64 for step in steps)]
        matrix = np.zeros((rounds, rounds))
        for j, c in enumerate(code):
            matrix += np.diag(np.full(rounds - j, c), -j)
        found.append(
            {
                "coefficients": code,
                "period": period,
                "rounds": rounds,
                "toeplitz": float(
                    toeplitz.minsep_sensitivity_squared(jax.numpy.array(code), min_sep=period, n=rounds)
                ),
                "banded": float(sensitivity.get_sensitivity_banded(jax.numpy.array(matrix), min_sep=period))
                ** 2,
            }
        )
    return found


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases()) + "\n]\n")

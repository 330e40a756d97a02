"""Federated learning over data that may not be pooled; every run ends with a privacy statement derived from what ran.

>>> import fedveil as fv
>>> people = fv.population(features=X, targets=y, user=patient, silo=hospital, n_users=5000, task="classification")
...                                                             # doctest: +SKIP
>>> result = fv.train(model, people, method=fv.uldp_avg_w(clip=0.5, epochs=5), epsilon=2.0, rounds=50)
...                                                             # doctest: +SKIP

``people`` says which user and which silo (a hospital, say) each record belongs to; ``result.statement`` says who is
protected, against whom, how strongly, and what is not covered. ``help(fv.train)`` explains the arguments, and
``help(fv.uldp_avg_w)`` those of a method.

Everything in ``__all__`` is public and documented in docs/reference/python.md; everything else may change. Names are
imported on first use, so ``import fedveil`` does not load PyTorch.
"""

import os as _os
import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from fedveil.api.callbacks import Callback, Checkpoints, EarlyStop, Progress, RoundSummary
    from fedveil.api.methods import (
        MethodChoice,
        cepam_gaussian,
        cepam_laplace,
        dp_fed,
        dp_fed_ls,
        fedavg,
        method,
        paraaegis,
        uldp_avg,
        uldp_avg_w,
        uldp_group,
        uldp_naive,
        uldp_sgd,
        uldp_sgd_w,
    )
    from fedveil.api.observers import MLflow, TensorBoard, WandB
    from fedveil.api.result import Result
    from fedveil.api.training import resume, train
    from fedveil.bundle.bundle import Bundle
    from fedveil.bundle.bundle import load_bundle as load
    from fedveil.bundle.verification import verify_bundle as verify
    from fedveil.data.arrays import population
    from fedveil.data.records import Population
    from fedveil.data.tables import tables
    from fedveil.errors import FedveilError
    from fedveil.privacy.statement import Statement
    from fedveil.training.server.optimizers import FedAdam as Adam
    from fedveil.training.server.optimizers import FedYogi as Yogi
    from fedveil.training.server.optimizers import ServerSgd as Sgd

__version__ = "0.2.0"

# Intel's library rounds a product by where in memory its arrays start, on some processors, unless it is asked not to
# before its first product: docs/theory/alone-in-a-batch.md. An empty value asks for nothing, like an unset one.
if not _os.environ.get("MKL_CBWR", "").strip():
    _os.environ["MKL_CBWR"] = "AUTO"

_PLACES: _typing.Final = {
    **dict.fromkeys(
        ("Callback", "Checkpoints", "EarlyStop", "Progress", "RoundSummary"), "fedveil.api.callbacks"
    ),
    **dict.fromkeys(("train", "resume"), "fedveil.api.training"),
    **dict.fromkeys(("MLflow", "TensorBoard", "WandB"), "fedveil.api.observers"),
    "Result": "fedveil.api.result",
    "Population": "fedveil.data.records",
    "population": "fedveil.data.arrays",
    "tables": "fedveil.data.tables",
    "Bundle": "fedveil.bundle.bundle",
    "load": "fedveil.bundle.bundle:load_bundle",
    "verify": "fedveil.bundle.verification:verify_bundle",
    "Statement": "fedveil.privacy.statement",
    "Adam": "fedveil.training.server.optimizers:FedAdam",
    "Sgd": "fedveil.training.server.optimizers:ServerSgd",
    "Yogi": "fedveil.training.server.optimizers:FedYogi",
    "FedveilError": "fedveil.errors",
}
"""Of public names; those of the methods are in ``fedveil.api.methods``."""

__all__ = [
    "Adam",
    "Bundle",
    "Callback",
    "Checkpoints",
    "EarlyStop",
    "FedveilError",
    "MLflow",
    "MethodChoice",
    "Population",
    "Progress",
    "Result",
    "RoundSummary",
    "Sgd",
    "Statement",
    "TensorBoard",
    "WandB",
    "Yogi",
    "cepam_gaussian",
    "cepam_laplace",
    "dp_fed",
    "dp_fed_ls",
    "fedavg",
    "load",
    "method",
    "paraaegis",
    "population",
    "resume",
    "tables",
    "train",
    "uldp_avg",
    "uldp_avg_w",
    "uldp_group",
    "uldp_naive",
    "uldp_sgd",
    "uldp_sgd_w",
    "verify",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'fedveil' has no attribute '{name}'; public names: {', '.join(__all__)}"
        )
    place, _, attribute = _PLACES.get(name, "fedveil.api.methods").partition(":")
    found = getattr(_import_module(place), attribute or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names: rooms that happen to be imported, and what this file uses, are none."""
    return sorted(
        {*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__spec__", "__version__"}
    )

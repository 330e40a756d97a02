"""Train models on data that may not be pooled, and derive a privacy statement from every run.

>>> import fedveil as fv
>>> people = fv.population(features=X, targets=y, user=patient, silo=hospital, n_users=5000, task="classification")
...                                                             # doctest: +SKIP
>>> result = fv.train(model, people, method=fv.uldp_avg_w(clip=0.5, epochs=5), epsilon=2.0, rounds=50)
...                                                             # doctest: +SKIP

``people`` assigns each record to a user and a silo (a hospital, say). ``result.statement`` names the protected unit,
the parties against which it is protected, the strength (epsilon, delta), and the exceptions. ``help(fv.train)``
explains the arguments, and ``help(fv.uldp_avg_w)`` those of a method.

Everything in ``__all__`` is public and documented in docs/reference/python.md; everything else may change. Names are
imported on first use, so ``import fedveil`` does not load PyTorch.
"""

import os as _os
import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from fedveil import sklearn
    from fedveil.api.budget import Budget
    from fedveil.api.callbacks import (
        Callback,
        Checkpoints,
        EarlyStop,
        MLflow,
        Progress,
        RoundSummary,
        TensorBoard,
        WandB,
    )
    from fedveil.api.frame import Frame
    from fedveil.api.methods import (
        MethodChoice,
        boosted_trees,
        cepam_gaussian,
        cepam_laplace,
        dp_fed,
        dp_fed_ls,
        fedavg,
        method,
        newton,
        paraaegis,
        uldp_avg,
        uldp_avg_w,
        uldp_group,
        uldp_naive,
        uldp_sgd,
        uldp_sgd_w,
    )
    from fedveil.api.model_selection import cross_validate, sweep
    from fedveil.api.planning import check, plan
    from fedveil.api.releases import infer, stats
    from fedveil.api.result import Result
    from fedveil.api.run_folders import audit, compare, spent
    from fedveil.api.training import resume, train
    from fedveil.bundle.bundle import Bundle
    from fedveil.bundle.bundle import load_bundle as load
    from fedveil.bundle.verification import verify_bundle as verify
    from fedveil.data.arrays import population
    from fedveil.data.records import Population
    from fedveil.data.tables import tables
    from fedveil.errors import FedveilError
    from fedveil.privacy.statement import Statement
    from fedveil.training.local_algorithms import FedProx
    from fedveil.training.server.optimizers import FedAdam as Adam
    from fedveil.training.server.optimizers import FedYogi as Yogi
    from fedveil.training.server.optimizers import ServerSgd as Sgd

__version__ = "0.2.0"

# On some processors, Intel MKL rounds a matrix product differently depending on the memory address of its arrays.
# MKL_CBWR=AUTO turns that off. MKL reads the variable once, before its first product, so importing fedveil sets it.
# An empty value counts as unset. See docs/theory/batch-independence.md.
if not _os.environ.get("MKL_CBWR", "").strip():
    _os.environ["MKL_CBWR"] = "AUTO"

_PLACES: _typing.Final = {
    **dict.fromkeys(
        ("Callback", "Checkpoints", "EarlyStop", "Progress", "RoundSummary"), "fedveil.api.callbacks"
    ),
    **dict.fromkeys(("train", "resume"), "fedveil.api.training"),
    **dict.fromkeys(("MLflow", "TensorBoard", "WandB"), "fedveil.api.callbacks"),
    **dict.fromkeys(("infer", "stats"), "fedveil.api.releases"),
    **dict.fromkeys(("audit", "compare", "spent"), "fedveil.api.run_folders"),
    "Budget": "fedveil.api.budget",
    "Frame": "fedveil.api.frame",
    "cross_validate": "fedveil.api.model_selection",
    "check": "fedveil.api.planning",
    "plan": "fedveil.api.planning",
    "sweep": "fedveil.api.model_selection",
    "sklearn": "fedveil.sklearn",
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
    "FedProx": "fedveil.training.local_algorithms",
    "FedveilError": "fedveil.errors",
}
"""Module, or ``module:attribute``, of each public name; methods are in ``fedveil.api.methods``."""

__all__ = [
    "Adam",
    "Budget",
    "Bundle",
    "Callback",
    "Checkpoints",
    "EarlyStop",
    "FedProx",
    "FedveilError",
    "Frame",
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
    "audit",
    "boosted_trees",
    "cepam_gaussian",
    "cepam_laplace",
    "check",
    "compare",
    "cross_validate",
    "dp_fed",
    "dp_fed_ls",
    "fedavg",
    "infer",
    "load",
    "method",
    "newton",
    "paraaegis",
    "plan",
    "population",
    "resume",
    "sklearn",
    "spent",
    "stats",
    "sweep",
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
    path, _, attribute = _PLACES.get(name, "fedveil.api.methods").partition(":")
    module = _import_module(path)
    value = module if path == f"fedveil.{name}" else getattr(module, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names only, without subpackages that happen to be imported."""
    return sorted(
        {*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__spec__", "__version__"}
    )

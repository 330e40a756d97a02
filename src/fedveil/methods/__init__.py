"""Published systems and their baselines, each a composition of stages, by name.

A new method is one function that returns a :class:`Method` and one line in :data:`METHODS`; its keyword arguments are
the keys that an experiment's ``[method]`` table may give.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.errors import ConfigError
from fedveil.local.steps import LocalSgd
from fedveil.methods.cepam import (
    cepam_gaussian,
    cepam_laplace,
    fl,
    fl_gaussian,
    fl_gaussian_sdq,
    fl_laplace,
    fl_laplace_sdq,
    fl_sdq,
)
from fedveil.methods.dp_fed_ls import dp_fed, dp_fed_ls
from fedveil.methods.fedavg import fedavg
from fedveil.methods.method import Method
from fedveil.methods.paraaegis import ckks_fedavg, dp_fedavg, paraaegis, serial, stevens, varying_dp
from fedveil.methods.uldp import uldp_avg, uldp_avg_w, uldp_group, uldp_naive, uldp_sgd

_FROM_ELSEWHERE = {"local", "n_silos", "n_users", "largest_silo", "colluding_silos", "learning_rate"}


@dataclass(frozen=True)
class Recipe:
    """A method's builder, and what it needs: read off its signature."""

    build: Callable[..., Method]

    @property
    def uses_local(self) -> bool:
        """Whether contributions train locally by SGD."""
        return "local" in self._parameters

    @property
    def keys(self) -> tuple[str, ...]:
        """The parameters of its own that an experiment may give."""
        return tuple(key for key in self._parameters if key not in _FROM_ELSEWHERE)

    @property
    def summary(self) -> str:
        """One line: what the method does."""
        return (self.build.__doc__ or "").partition("\n")[0]

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse a parameter the method does not have, and a missing one that it needs."""
        name = self.build.__name__.replace("_", "-")
        for key in given:
            if key not in self.keys:
                known = ", ".join(self.keys) or "none but learning_rate"
                raise ConfigError(f"{name} has no parameter '{key}'; it has: {known}")
        for key in self.keys:
            if key not in given and self._parameters[key].default is inspect.Parameter.empty:
                raise ConfigError(f"{name} needs the parameter '{key}'")

    def compose(
        self,
        given: Mapping[str, Any],
        *,
        local: LocalSgd | None,
        n_silos: int,
        n_users: int,
        largest_silo: int,
        colluding_silos: int,
        learning_rate: float | None = None,
    ) -> Method:
        """Build the method for ``n_silos`` silos of at most ``largest_silo`` records, and ``n_users`` users.

        Without a ``learning_rate`` it has the method's own.
        """
        shared = {
            "local": local,
            "n_silos": n_silos,
            "n_users": n_users,
            "largest_silo": largest_silo,
            "colluding_silos": colluding_silos,
            "learning_rate": learning_rate,
        }
        if learning_rate is None:
            del shared["learning_rate"]
        return self.build(**given, **{key: shared[key] for key in shared if key in self._parameters})

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.build).parameters


METHODS: dict[str, Recipe] = {
    "fedavg": Recipe(fedavg),
    "uldp-naive": Recipe(uldp_naive),
    "uldp-group": Recipe(uldp_group),
    "uldp-sgd": Recipe(uldp_sgd),
    "uldp-avg": Recipe(uldp_avg),
    "uldp-avg-w": Recipe(uldp_avg_w),
    "dp-fed": Recipe(dp_fed),
    "dp-fed-ls": Recipe(dp_fed_ls),
    "cepam-gaussian": Recipe(cepam_gaussian),
    "cepam-laplace": Recipe(cepam_laplace),
    "fl": Recipe(fl),
    "fl-sdq": Recipe(fl_sdq),
    "fl-gaussian": Recipe(fl_gaussian),
    "fl-laplace": Recipe(fl_laplace),
    "fl-gaussian-sdq": Recipe(fl_gaussian_sdq),
    "fl-laplace-sdq": Recipe(fl_laplace_sdq),
    "dp-fedavg": Recipe(dp_fedavg),
    "ckks-fedavg": Recipe(ckks_fedavg),
    "serial": Recipe(serial),
    "varying-dp": Recipe(varying_dp),
    "stevens": Recipe(stevens),
    "paraaegis": Recipe(paraaegis),
}

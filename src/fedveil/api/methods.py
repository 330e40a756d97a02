"""Methods as values to hand to :func:`fedveil.train`: a name, its own parameters, and how a contribution trains.

One function for every method of the house. Its parameters are those of the method's builder and of ``[local]``, read
off their definitions: there is no second list. ``learning_rate`` is the local one; the server's
is the server optimiser's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedveil.engine.sections import LocalSection
from fedveil.errors import ConfigError
from fedveil.methods import METHODS, Recipe


@dataclass(frozen=True)
class MethodChoice:
    """A method and its parameters, as an experiment's ``[method]`` and ``[local]`` have them.

    Attributes:
        name: of the method.
        parameters: the method's own.
        local: of local training; None where a contribution is one gradient.
    """

    name: str
    parameters: Mapping[str, Any]
    local: Mapping[str, Any] | None

    @property
    def takes_noise(self) -> bool:
        """Whether the method has a noise multiplier."""
        return "noise_multiplier" in METHODS[self.name].keys


class Chooser(Protocol):
    """A function that chooses a method."""

    def __call__(self, **parameters: Any) -> MethodChoice:
        """Return the method with these parameters; ``help`` lists them."""
        ...


def method(name: str, /, **parameters: Any) -> MethodChoice:
    """Choose a method by name, one from another package too.

    Args:
        name: as ``fedveil methods`` lists it.
        parameters: the method's own and those of local training: ``learning_rate`` (eta_l), ``epochs``, ``steps``,
            ``batch_size``, ``momentum``, ``weight_decay``, ``decay``.

    Raises:
        ConfigError: no such method, or a parameter that it does not have; lists those that it has.

    >>> method("uldp-avg-w", clip=0.5, epochs=5).local
    {'epochs': 5}
    """
    if name not in METHODS:
        raise ConfigError(f"method: there is no '{name}'; there are: {', '.join(METHODS)}")
    recipe = METHODS[name]
    own, local = set(recipe.keys), set(LocalSection.model_fields) if recipe.uses_local else set()
    unknown = [key for key in parameters if key not in own | local]
    if unknown:
        hint = (
            "; the server's learning rate is server=fedveil.Sgd(...)"
            if unknown[0].startswith("learning")
            else ""
        )
        raise ConfigError(
            f"method {name}: no parameter '{unknown[0]}'; known here: {', '.join(sorted(own | local))}{hint}"
        )
    return MethodChoice(
        name=name,
        parameters={key: value for key, value in parameters.items() if key in own},
        local={key: value for key, value in parameters.items() if key in local}
        if recipe.uses_local
        else None,
    )


def _chooser(name: str) -> Chooser:
    recipe = METHODS[name]

    def choose(**parameters: Any) -> MethodChoice:
        return method(name, **parameters)

    choose.__name__ = choose.__qualname__ = name.replace("-", "_")
    choose.__doc__ = f"{recipe.summary}\n\n{_parameters(recipe)}"
    choose.__signature__ = _signature(recipe)  # type: ignore[attr-defined]
    return choose


def _signature(recipe: Recipe) -> inspect.Signature:
    """Return a builder's own parameters, with those of local training where it trains."""
    builder = inspect.signature(recipe.build).parameters
    found = {"noise_multiplier": "calibrated"}
    own = [
        builder[key].replace(
            kind=inspect.Parameter.KEYWORD_ONLY, default=found.get(key, builder[key].default)
        )
        for key in recipe.keys
    ]
    local = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for key, field in LocalSection.model_fields.items()
        if recipe.uses_local and key not in recipe.keys
    ]
    return inspect.Signature([*own, *local], return_annotation=MethodChoice)


def _parameters(recipe: Recipe) -> str:
    trained = " and of local training (``[local]``)" if recipe.uses_local else ""
    return (
        f"Parameters of its own: {', '.join(recipe.keys) or 'none'}{trained}; see docs/reference/methods.md."
    )


fedavg = _chooser("fedavg")
uldp_naive = _chooser("uldp-naive")
uldp_group = _chooser("uldp-group")
uldp_sgd = _chooser("uldp-sgd")
uldp_avg = _chooser("uldp-avg")
uldp_avg_w = _chooser("uldp-avg-w")
dp_fed = _chooser("dp-fed")
dp_fed_ls = _chooser("dp-fed-ls")
cepam_gaussian = _chooser("cepam-gaussian")
cepam_laplace = _chooser("cepam-laplace")
paraaegis = _chooser("paraaegis")

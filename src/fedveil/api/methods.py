"""Methods as values to hand to :func:`fedveil.train`: a name, its own parameters, and how a contribution trains.

One function for every method of the house. Its parameters are those of the method's builder and of ``[local]``, read
off their definitions: there is no second list. ``learning_rate`` is the local one; the server's
is the server optimiser's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedveil.engine.sections import LocalSection
from fedveil.errors import ConfigError
from fedveil.keys import Key, keys_of
from fedveil.registry import find


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
        return "noise_multiplier" in _own(find("methods", self.name).load())


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
    builder = find("methods", name).load()
    trains = _trains(builder)
    own, local = set(_own(builder)), set(LocalSection.model_fields) if trains else set()
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
        local={key: value for key, value in parameters.items() if key in local} if trains else None,
    )


def _own(builder: Callable[..., Any]) -> dict[str, Key]:
    """Return a method's own keys; the server's learning rate is the server optimiser's."""
    return {key.name: key for key in keys_of(builder) if not key.filled and key.name != "learning_rate"}


def _trains(builder: Callable[..., Any]) -> bool:
    """Return whether contributions train locally by SGD."""
    return any(key.name == "local" for key in keys_of(builder))


def _chooser(name: str) -> Chooser:
    builder = find("methods", name).load()

    def choose(**parameters: Any) -> MethodChoice:
        return method(name, **parameters)

    choose.__name__ = choose.__qualname__ = name.replace("-", "_")
    choose.__doc__ = f"{(builder.__doc__ or '').partition(chr(10))[0]}\n\n{_parameters(builder)}"
    choose.__signature__ = _signature(builder)  # type: ignore[attr-defined]
    return choose


def _signature(builder: Callable[..., Any]) -> inspect.Signature:
    """Return a builder's own parameters, with those of local training where it trains."""
    own = _own(builder)
    shown = inspect.signature(builder).parameters
    found = {"noise_multiplier": "calibrated"}
    parameters = [
        shown[key].replace(kind=inspect.Parameter.KEYWORD_ONLY, default=found.get(key, shown[key].default))
        for key in own
    ]
    local = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for key, field in LocalSection.model_fields.items()
        if _trains(builder) and key not in own
    ]
    return inspect.Signature([*parameters, *local], return_annotation=MethodChoice)


def _parameters(builder: Callable[..., Any]) -> str:
    trained = " and of local training (``[local]``)" if _trains(builder) else ""
    own = ", ".join(_own(builder)) or "none"
    return f"Parameters of its own: {own}{trained}; see docs/reference/stages.md."


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

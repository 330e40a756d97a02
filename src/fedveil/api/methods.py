"""Methods as values to hand to :func:`fedveil.train`: a name, its own parameters, and how a contribution trains.

One function for every method of the house. Its parameters are those of the method's builder and of ``[local]``, read
off their definitions: there is no second list. ``learning_rate`` is the local one; the server's
is the server optimiser's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fedveil.engine.experiments.choice import Choice, own_keys
from fedveil.errors import ConfigError
from fedveil.keys import Key
from fedveil.local.steps import LocalSgd
from fedveil.registry import find

_SERVER: Final = "learning_rate"


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
        return any(key.name == "noise_multiplier" for key in _keys(self.name))


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
    own = {key.name for key in _keys(name)}
    trains = _trains(name)
    local = {key.name for key in own_keys(LocalSgd)} if trains else set()
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


def _keys(name: str) -> tuple[Key, ...]:
    """Return a method's own keys, without the server's learning rate: that is ``server=``."""
    return tuple(key for key in own_keys(find("methods", name).load()) if key.name != _SERVER)


def _trains(name: str) -> bool:
    """Return whether a contribution of the method trains, and so has a table ``[local]``."""
    return Choice("methods", name).needs("local")


def _chooser(name: str) -> Chooser:
    def choose(**parameters: Any) -> MethodChoice:
        return method(name, **parameters)

    choose.__name__ = choose.__qualname__ = name.replace("-", "_")
    choose.__doc__ = f"{_summary(name)}\n\n{_parameters(name)}"
    choose.__signature__ = _signature(name)  # type: ignore[attr-defined]
    return choose


def _signature(name: str) -> inspect.Signature:
    """Return a builder's own parameters, with those of local training where it trains."""
    found = {key.name: "calibrated" if key.name == "noise_multiplier" else key.default for key in _keys(name)}
    if _trains(name):
        found |= {key.name: key.default for key in own_keys(LocalSgd) if key.name not in found}
    keyword = inspect.Parameter.KEYWORD_ONLY
    given = [inspect.Parameter(key, keyword, default=default) for key, default in found.items()]
    return inspect.Signature(given, return_annotation=MethodChoice)


def _summary(name: str) -> str:
    """Return the first line of a builder's docstring."""
    return (inspect.getdoc(find("methods", name).load()) or name).splitlines()[0]


def _parameters(name: str) -> str:
    trained = " and of local training (``[local]``)" if _trains(name) else ""
    own = ", ".join(key.name for key in _keys(name)) or "none"
    return f"Parameters of its own: {own}{trained}; see docs/reference/methods.md."


fedavg = _chooser("fedavg")
uldp_naive = _chooser("uldp-naive")
uldp_group = _chooser("uldp-group")
uldp_sgd = _chooser("uldp-sgd")
uldp_sgd_w = _chooser("uldp-sgd-w")
uldp_avg = _chooser("uldp-avg")
uldp_avg_w = _chooser("uldp-avg-w")
dp_fed = _chooser("dp-fed")
dp_fed_ls = _chooser("dp-fed-ls")
cepam_gaussian = _chooser("cepam-gaussian")
cepam_laplace = _chooser("cepam-laplace")
paraaegis = _chooser("paraaegis")

"""Choice of a method for :func:`fedveil.train`: name, own parameters and those of local training.

Each main method has a function; :func:`method` takes any name. The parameters of a function are those of the method's
builder and of local training, read from their definitions. ``local_learning_rate`` is the rate of local training; the
server's rate is ``fedveil.train(server_learning_rate=...)``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Final, Protocol

from fedveil.arguments import explain_arguments, explain_arguments_as
from fedveil.config_keys import Key, plain_inside
from fedveil.errors import ConfigError, did_you_mean
from fedveil.registry import find
from fedveil.run.config.choice import Choice, ChoiceField, StageField, own_keys
from fedveil.training.steps import LocalSgd
from fedveil.validation import WrongSectionError, explain_errors

_RATE: Final = "local_learning_rate"
"""Name of the table ``[local]``'s ``learning_rate`` in Python, where no table gives the prefix."""


@explain_arguments_as("MethodChoice", "fedveil.method and fedveil.uldp_avg_w make one")
@dataclass(frozen=True)
class MethodChoice:
    """A method with its parameters, as in the tables ``[method]`` and ``[local]`` of an experiment.

    Attributes:
        name: name of the method.
        parameters: parameters of the method itself.
        local: parameters of local training; None if a contribution is a single gradient.
    """

    name: str
    parameters: Mapping[str, Any]
    local: Mapping[str, Any] | None

    @property
    def takes_noise(self) -> bool:
        """Return whether the method has a noise multiplier."""
        return any(key.name == "noise_multiplier" for key in _keys(self.name))


class Chooser(Protocol):
    """Function that chooses a method by its parameters."""

    def __call__(self, **parameters: Any) -> MethodChoice:
        """Return the method with these parameters; ``help`` lists them."""
        ...


@explain_arguments
def method(name: str, /, **parameters: Any) -> MethodChoice:
    """Choose a method by its name; methods of other installed packages are included.

    Args:
        name: name of the method in the list of ``fedveil methods``.
        parameters: parameters of the method itself, and those of local training: ``local_learning_rate``
            (eta_l), ``epochs``, ``steps``, ``batch_size``, ``momentum``, ``weight_decay``, ``decay``.

    Raises:
        ConfigError: the method does not exist; a parameter does not exist (the error lists the known ones), is
            missing, has the wrong type or is outside its range.

    >>> method("uldp-avg-w", clip=0.5, epochs=5).local
    {'epochs': 5}
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"fedveil.method: name must be text, such as 'uldp-avg-w', not {type(name).__name__}"
        )
    own = {key.name for key in _keys(name)}
    trains = _trains(name)
    local = {shown: key.name for shown, key in _local_keys().items()} if trains else {}
    unknown = [key for key in parameters if key not in own | local.keys()]
    if unknown:
        hint = (
            f"; the rate of local training is {_RATE}, and the server's rate is server_learning_rate of fedveil.train, "
            "in mean updates"
            if unknown[0].endswith("learning_rate")
            else did_you_mean(unknown[0], own | local.keys())
        )
        allowed = ", ".join(sorted(own | local.keys()))
        raise ConfigError(f"method {name}: no parameter '{unknown[0]}'; known here: {allowed}{hint}")
    values = plain_inside(parameters)
    chosen = MethodChoice(
        name=name,
        parameters={key: value for key, value in values.items() if key in own},
        local={local[key]: value for key, value in values.items() if key in local} if trains else None,
    )
    _check(chosen)
    return chosen


def _check(chosen: MethodChoice) -> None:
    """Check the parameters as those of an experiment.

    A missing noise multiplier counts as calibrated.

    Raises:
        ConfigError: a parameter is missing or wrong; the error names it.
    """
    calibrated = {"noise_multiplier": "calibrated"} if chosen.takes_noise else {}
    section = {"name": chosen.name, **calibrated, **chosen.parameters}
    for mark, table in ((ChoiceField("methods"), section), (StageField(LocalSgd), chosen.local)):
        try:
            if table is not None:
                mark.read(dict(table))
        except WrongSectionError as error:
            explanation = explain_errors(error, error.section).replace("learning_rate", _RATE)
            raise ConfigError(f"method {chosen.name}: {explanation}") from None


def _keys(name: str) -> tuple[Key, ...]:
    """Return the configuration keys of a method."""
    return own_keys(find("methods", name).load())


def _local_keys() -> dict[str, Key]:
    """Return the configuration keys of local training by their names in Python."""
    return {_RATE if key.name == "learning_rate" else key.name: key for key in own_keys(LocalSgd)}


def _trains(name: str) -> bool:
    """Return whether the method trains locally, and so has a table ``[local]``."""
    return Choice("methods", name).needs("local")


def _chooser(name: str) -> Chooser:
    """Return the function of one method, with a signature and a docstring derived from its builder."""

    def choose(**parameters: Any) -> MethodChoice:
        return method(name, **parameters)

    choose.__name__ = choose.__qualname__ = name.replace("-", "_")
    choose.__doc__ = f"{_described(name)}\n\n{_parameters(name)}"
    chooser = explain_arguments(choose)
    chooser.__signature__ = _signature(name)  # type: ignore[attr-defined]
    return chooser


def _signature(name: str) -> inspect.Signature:
    """Return the signature of a method's function: the builder's parameters and those of local training."""
    defaults = {
        key.name: "calibrated" if key.name == "noise_multiplier" else key.default for key in _keys(name)
    }
    if _trains(name):
        defaults |= {shown: key.default for shown, key in _local_keys().items() if shown not in defaults}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(key, keyword, default=default) for key, default in defaults.items()]
    return inspect.Signature(parameters, return_annotation=MethodChoice)


def _described(name: str) -> str:
    """Return a builder's docstring without its Raises section, with references to the published algorithm."""
    builder = find("methods", name).load()
    description = (inspect.getdoc(builder) or name).partition("\n\nRaises:")[0]
    source = f"help({builder.__module__}) has the published algorithm; see also docs/reference/methods.md."
    return f"{description}\n\n{source}"


def _parameters(name: str) -> str:
    """Return the Args section, from the documented types of the builder and of local training."""
    keys = {key.name: key for key in _keys(name)} | (_local_keys() if _trains(name) else {})
    lines = {shown: _plain(f"{shown}: {key.meaning}") for shown, key in keys.items()}
    return "Args:\n" + "\n".join(
        fill(line, 100, initial_indent="    ", subsequent_indent=" " * 8) for line in lines.values()
    )


def _plain(text: str) -> str:
    """Return a description without Markdown links and code marks."""
    text = re.sub(r" \(\[how\]\([^)]*\)\)", "", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


fedavg = _chooser("fedavg")
uldp_naive = _chooser("uldp-naive")
uldp_group = _chooser("uldp-group")
uldp_sgd = _chooser("uldp-sgd")
uldp_sgd_w = _chooser("uldp-sgd-w")
uldp_avg = _chooser("uldp-avg")
uldp_avg_w = _chooser("uldp-avg-w")
newton = _chooser("newton")
boosted_trees = _chooser("boosted-trees")
dp_fed = _chooser("dp-fed")
dp_fed_ls = _chooser("dp-fed-ls")
cepam_gaussian = _chooser("cepam-gaussian")
cepam_laplace = _chooser("cepam-laplace")
paraaegis = _chooser("paraaegis")

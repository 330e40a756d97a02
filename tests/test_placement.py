"""`auto` takes a CUDA device where it trains as the CPU does, and never one that trains small models one by one."""

from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.errors import ConfigError, ModelError
from fedveil.run.executors import place_on_device


def place(wanted: Any, **side_by_side: bool | None) -> str:
    """Return the device; devices train side by side, one by one, or (None) not at all."""

    def trainer_of(device: Any) -> Any:
        side = side_by_side[device.type]
        if side is None:
            raise ModelError("no trainer")
        return SimpleNamespace(side_by_side=side)

    device, trainer = place_on_device(wanted, lambda device: device, trainer_of, "cuda" in side_by_side)  # type: ignore[arg-type, return-value]
    assert trainer.side_by_side is side_by_side[device.type]  # type: ignore[attr-defined]
    return str(device)


@pytest.mark.parametrize(
    ("cuda", "cpu", "expected"),
    [
        (True, True, "cuda"),
        (True, False, "cuda"),
        (False, False, "cuda"),  # recurrent layers: one by one everywhere
        (False, None, "cuda"),
        (False, True, "cpu"),
        (None, True, "cpu"),
        (None, False, "cpu"),
    ],
)
def test_auto_is_the_device_that_trains_side_by_side(
    cuda: bool | None, cpu: bool | None, expected: str
) -> None:
    assert place("auto", cuda=cuda, cpu=cpu) == expected


def test_a_device_that_is_asked_for_is_the_one_used() -> None:
    assert place("cuda", cuda=False, cpu=True) == "cuda"
    assert place("cpu", cuda=True, cpu=True) == "cpu"
    assert place("auto", cpu=False) == "cpu"


def test_what_cannot_be_trained_anywhere_or_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainer"):
        place("auto", cuda=None, cpu=None)
    with pytest.raises(ModelError, match="no trainer"):
        place("cuda", cuda=None, cpu=True)
    with pytest.raises(ConfigError, match="no CUDA device is available"):
        place("cuda", cpu=True)

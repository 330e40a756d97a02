"""What the tests check of shapes and types: what differs from all that passed is found, at the first call and later."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float32, TypeCheckError
from torch import Tensor

from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.row_norms import check_weights
from tests import shape_checks
from tests.shape_checks import FAST, _takes_arrays, look_at, remembering

checked = remembering(typechecker=beartype)
Vector = Float32[Tensor, " d"]


@checked
def product(a: Float32[Tensor, "m n"], b: Float32[Tensor, " n"]) -> Float32[Tensor, " m"]:
    return (a @ b)[: 2 if len(b) == 3 else None]


@checked
def named(value: Literal["one", "two"]) -> str:
    return value


@checked
def chosen(value: int, *of: Literal["one", "two"], other: Literal["one", "two"] = "one") -> int:
    return value


@checked
def summed(parts: Sequence[Float32[Tensor, " d"]]) -> Float32[Tensor, " d"]:
    return torch.stack(list(parts)).sum(0)


@checked
def shown(value: Any, wanted: Any) -> int | None:
    return wanted


@dataclass
class Pair:
    one: Float32[np.ndarray, " d"]
    other: Float32[np.ndarray, " d"]


@dataclass
class Words:
    one: str
    other: str


Pair = checked(Pair)  # type: ignore[misc]
Words = checked(Words)  # type: ignore[misc]


def refused(function: Any, *arguments: Any) -> bool:
    try:
        function(*arguments)
    except TypeCheckError:
        return True
    return False


@pytest.mark.parametrize("times", [1, 3])
def test_what_passed_passes_again_and_what_differs_is_refused(times: int) -> None:
    for _ in range(times):
        assert len(product(torch.ones(4, 2), torch.ones(2))) == 4
        assert not refused(product, torch.ones(2, 3), torch.ones(3))
        assert refused(product, torch.ones(4, 2), torch.ones(4))  # one shape fits, the other does not
        assert refused(product, torch.ones(4, 2), torch.ones(2).double())
        assert refused(product, torch.ones(4, 2), np.ones(2, dtype=np.float32))
        assert refused(product, torch.ones(5, 3), torch.ones(3))  # the result has two rows, not five


def test_values_are_looked_at_where_an_annotation_names_them() -> None:
    for _ in range(2):
        assert named("one") == "one"
        assert refused(named, "three")


def test_values_are_looked_at_wherever_they_are_given() -> None:
    for _ in range(2):
        assert chosen(1, "one", "two", other="one") == 1
        assert refused(chosen, 1, "three")
        assert refused(chosen, 1, "one", "two", "three")
        assert refused(lambda: chosen(1, "one", other="three"))
        assert refused(chosen, "1", "one")


def test_elements_are_part_of_what_passed() -> None:
    right = [torch.ones(3)]
    assert not refused(summed, right)
    assert not refused(summed, tuple(right))
    assert refused(summed, [right[0].double()])
    assert refused(summed, tuple(one.double() for one in right))
    assert not refused(summed, right * 100)  # so many that they are looked at anew each time
    assert refused(summed, [one.double() for one in right * 100])


def test_a_result_is_looked_at_although_its_arguments_passed() -> None:
    assert shown(1, 1) == 1
    assert shown(1, None) is None
    assert refused(shown, 1, "one")
    wanted = iter([1, "one"])

    @checked
    def given(value: int) -> int:
        return next(wanted)  # type: ignore[return-value]

    assert given(0) == 1
    assert refused(given, 0)


def test_dataclasses_and_functions_within_functions_are_checked() -> None:
    assert not refused(Pair, np.ones(2, dtype=np.float32), np.ones(2, dtype=np.float32))
    assert refused(Pair, np.ones(2, dtype=np.float32), np.ones(3, dtype=np.float32))
    assert not refused(Words, "a", "b")  # whose code is equal to that of pairs
    assert refused(Pair, "a", "b")

    def made(factor: int) -> Any:
        @checked
        def scaled(value: int) -> int:
            return factor * value

        return scaled

    assert [made(factor)(3) for factor in (1, 2)] == [3, 6]  # what is remembered is no closure
    assert refused(made(2), "3")


def test_the_house_is_checked_in_every_session(request: pytest.FixtureRequest) -> None:
    """In one that leaves slow tests out too: what takes arrays, from the first call in each file on."""
    fast = bool(request.config.option.markexpr)
    assert refused(check_weights, torch.ones(2, 2))
    assert hasattr(gaussian_epsilon, "remembers") is not fast
    assert shape_checks._calls == (FAST if fast else math.inf)
    assert shape_checks._file == request.node.location[0]


def test_what_takes_or_returns_arrays_is_told_by_whatever_name_they_have() -> None:
    def aliased(values: "Vector") -> None: ...

    def returning() -> "np.ndarray | None": ...

    def plain(value: "int", *rest: "str") -> "tuple[float, ...]": ...

    assert [_takes_arrays(one) for one in (aliased, returning, plain)] == [True, True, False]


def test_a_file_looks_at_the_first_calls_of_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    @checked
    def once(value: int) -> int:
        return value

    for name in ("_calls", "_file"):
        monkeypatch.setattr(shape_checks, name, getattr(shape_checks, name))
    for file in ("one", "two"):
        look_at(3, file)
        assert [refused(once, wrong) for wrong in (1, "1", 1.5, "1", 1.5)] == [
            False,
            True,
            True,
            False,
            False,
        ]
        look_at(math.inf, file)  # the same file goes on
        assert not refused(once, "1")

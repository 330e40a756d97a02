"""Numbers of numpy, pandas, PyTorch, fractions and decimal mean what Python's own do wherever a number is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import BaseModel

import fedveil as fv
from fedveil.config_keys import plain, plain_inside, whole_argument
from fedveil.data.arrays import population
from fedveil.errors import CompositionError, ConfigError, FedveilError
from fedveil.methods.uldp import uldp_avg, uldp_group, uldp_naive
from fedveil.methods.weights import Weights
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.bounds import Clip, ClipL1, FixedVector
from fedveil.privacy.sampling import PoissonUsers, UniformClients
from fedveil.randomness import ExperimentRandomness
from fedveil.training.server.averages import Ema
from fedveil.training.server.denoise import Laplacian
from fedveil.training.steps import LocalDpSgd, LocalSgd
from fedveil.validation import validate_document
from tests.shape_checks import look_at
from tests.test_booleans import DOCUMENTS, SAMPLES, TABLES, _fits, _reads
from tests.test_in_memory_objects import METHOD
from tests.test_python import people

FLOATS: dict[str, Callable[[float], Any]] = {
    "numpy": np.float64,
    "an array": np.array,
    "PyTorch": lambda value: torch.tensor(value, dtype=torch.float64),
    "a parameter": lambda value: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)),
    "pandas": lambda value: pd.Series([value]).iloc[0],
    "fractions": Fraction,
    "decimal": Decimal,
    "long": np.longdouble,
}
WHOLE: dict[str, Callable[[int], Any]] = {
    "numpy": np.int64,
    "small": lambda value: np.int32(value) if abs(value) < 2**31 else np.int64(value),
    "an array": np.array,
    "PyTorch": torch.tensor,
    "pandas": lambda value: pd.Series([value]).iloc[0],
    "nullable": lambda value: pd.Series([value], dtype="Int64").iloc[0],
    "fractions": Fraction,
    "decimal": Decimal,
}
NO_NUMBERS = {
    "numpy's truth": np.bool_(True),
    "PyTorch's truth": torch.tensor(True),
    "an array's truth": np.array(True),
    "numpy's text": np.str_("1"),
    "bytes": b"1",
    "an array of one": np.array([1.0]),
    "a tensor of one": torch.tensor([1.0]),
    "a duration": np.timedelta64(1, "D"),
    "a time": np.datetime64("2020-01-01"),
    "a complex number": 1 + 0j,
    "a tensor without a value": torch.tensor(1.0, device="meta"),
    "nothing of pandas": pd.NA,
}
ENDLESS = {
    "numpy": np.float32("inf"),
    "PyTorch": torch.tensor(float("nan")),
    "decimal": Decimal("NaN"),
    "signalling": Decimal("sNaN"),
    "beyond floats": Fraction(10**400, 3),
}


def swapped(value: Any, new: Callable[[Any], Any]) -> Any:
    """Put other numbers in the place of all that a document has."""
    if isinstance(value, dict):
        return {key: swapped(inner, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [swapped(inner, new) for inner in value]
    return new(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def other(name: str) -> Callable[[Any], Any]:
    return lambda value: WHOLE.get(name, int)(value) if isinstance(value, int) else FLOATS[name](value)


@pytest.fixture(autouse=True)
def unchecked() -> None:
    """Check no types of arguments, as in a program: annotations name Python's numbers."""
    look_at(0, "unchecked")


def places(value: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield what puts something else in the place of one number of a document, for each of them."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        for put in places(inner):

            def replaced(new: Any, key: Any = key, inner: Any = inner, put: Any = put) -> Any:
                copied = dict(value) if isinstance(value, dict) else list(value)
                copied[key] = put(new)
                return copied

            yield replaced
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield lambda new: new


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda kind: kind.__name__)
def test_a_document_reads_numbers_of_every_library_alike(document: type[BaseModel]) -> None:
    right = document.model_validate(DOCUMENTS[document])
    for name in FLOATS:
        assert document.model_validate(swapped(DOCUMENTS[document], other(name))) == right


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda kind: kind.__name__)
def test_what_is_no_number_is_refused_wherever_a_document_has_one(document: type[BaseModel]) -> None:
    for put in places(DOCUMENTS[document]):
        for wrong in (*NO_NUMBERS.values(), *ENDLESS.values()):
            if wrong is not pd.NA:
                with pytest.raises(FedveilError, match="file: "):
                    validate_document(document, put(wrong), "file")


@pytest.mark.parametrize("table", TABLES, ids=lambda kind: kind.__name__)
def test_every_key_of_a_member_reads_numbers_of_every_library_alike(table: type[BaseModel]) -> None:
    required = {
        name: next(value for value in SAMPLES if _fits(one, value))
        for name, one in table.model_fields.items()
        if one.is_required()
    }
    for name in table.model_fields:
        for sample in SAMPLES:
            given = {**required, name: sample}
            if type(sample) in (int, float) and _reads(table, given):
                right = table.model_validate(given)
                for library in FLOATS:
                    assert table.model_validate({**required, name: other(library)(sample)}) == right


@pytest.mark.parametrize("library", FLOATS)
def test_stages_that_are_built_in_python_hold_pythons_numbers(library: str) -> None:
    number, count = other(library), WHOLE.get(library, int)
    for made, right in (
        (fv.Sgd(number(0.5), momentum=number(0.25)), fv.Sgd(0.5, momentum=0.25)),
        (
            LocalSgd(learning_rate=number(0.5), batch_size=count(4)),
            LocalSgd(learning_rate=0.5, batch_size=4),
        ),
        (
            LocalDpSgd(
                learning_rate=number(0.5), epochs=count(1), batch_size=count(4), noise_multiplier=number(0.5)
            ),
            LocalDpSgd(learning_rate=0.5, epochs=1, batch_size=4, noise_multiplier=0.5),
        ),
        (Clip(norm=number(0.5)), Clip(norm=0.5)),
        (ClipL1(norm=number(0.5)), ClipL1(norm=0.5)),
        (FixedVector(norm=number(0.5), step=number(0.25)), FixedVector(norm=0.5, step=0.25)),
        (AdaptiveClip(start=number(0.5)), AdaptiveClip(start=0.5)),
        (PoissonUsers(rate=number(0.5)), PoissonUsers(rate=0.5)),
        (UniformClients(population=count(9), sample=count(3)), UniformClients(population=9, sample=3)),
        (Weights("records", number(0.5)), Weights("records", 0.5)),
        (Laplacian(smoothing=number(0.5)), Laplacian(smoothing=0.5)),
        (Ema(beta=number(0.5)), Ema(beta=0.5)),
        (replace(METHOD, noise_decay=number(0.5)), replace(METHOD, noise_decay=0.5)),
    ):
        assert made == right
        assert repr(made) == repr(right)  # the number itself is Python's


@pytest.mark.parametrize("library", FLOATS)
def test_builders_and_choices_take_numbers_of_every_library(library: str) -> None:
    number, count = other(library), WHOLE.get(library, int)
    local = LocalSgd(batch_size=4)
    for builder, keys in (
        (uldp_avg, {"user_sampling_rate": number(0.5)}),
        (uldp_naive, {"n_silos": 3}),
        (uldp_group, {"group_size": count(2)}),
    ):
        given = {"local": local, "clip": number(0.5), "noise_multiplier": number(2.0), **keys}
        assert repr(builder(**given)) == repr(builder(**plain_inside(given)))
    chosen = fv.uldp_avg(clip=number(0.5), epochs=count(2), noise_multiplier=number(1.5))
    assert repr(chosen) == repr(fv.uldp_avg(clip=0.5, epochs=2, noise_multiplier=1.5))
    assert fv.Checkpoints("x", every=count(2)).every == 2
    early = fv.EarlyStop("loss", patience=count(3), least=number(0.5))
    assert (early.patience, early.least) == (3, 0.5)


Y = np.linspace(0.0, 1.0, 20) ** 2
X, USERS, SILOS = np.arange(40.0).reshape(20, 2), [f"u{one}" for one in range(20)], ["a", "b"] * 10


@pytest.mark.parametrize("library", FLOATS)
def test_a_population_takes_numbers_of_every_library_and_holds_out_the_same_records(library: str) -> None:
    number, count = other(library), WHOLE.get(library, int)

    def made(**numbers: Any) -> fv.Population:
        return population(X, Y, user=USERS, silo=SILOS, task="regression", silos=["a", "b"], **numbers)

    held = made(
        n_users=count(30),
        test_share=number(0.25),
        seed=count(7),
        target_range=(number(-0.5), number(64.5)),
    )
    right = made(n_users=30, test_share=0.25, seed=7, target_range=(-0.5, 64.5))
    assert held.n_users == 30
    assert type(held.n_users) is int
    assert np.array_equal(held.test_features, right.test_features)


@pytest.mark.parametrize("wrong", [*NO_NUMBERS.values(), *ENDLESS.values()], ids=[*NO_NUMBERS, *ENDLESS])
def test_what_is_no_number_is_refused_where_a_stage_or_an_argument_is_written(wrong: Any) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: fv.Sgd(wrong),
        lambda: LocalSgd(learning_rate=wrong),
        lambda: LocalSgd(epochs=wrong),
        lambda: LocalDpSgd(learning_rate=0.1, epochs=1, batch_size=2, noise_multiplier=wrong),
        lambda: Clip(norm=wrong),
        lambda: PoissonUsers(rate=wrong),
        lambda: UniformClients(population=9, sample=wrong),
        lambda: fv.uldp_avg(clip=wrong),
        lambda: fv.uldp_avg(clip=0.5, local_learning_rate=wrong),
        lambda: fv.EarlyStop("loss", patience=wrong),
        lambda: fv.EarlyStop("loss", least=wrong),
        lambda: fv.Checkpoints("x", every=wrong),
        lambda: people(n_users=wrong),
        lambda: people(seed=wrong),
        lambda: people(test=None, test_share=wrong),
    )
    for call in calls:
        with pytest.raises(FedveilError):
            call()
    with pytest.raises(FedveilError):
        population(X, Y, user=USERS, silo=SILOS, n_users=30, task="regression", target_range=(wrong, 50))


def test_text_and_nothing_are_no_numbers_for_a_stage() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate = '0.1': a number, or 'by-rule', is needed"):
        LocalSgd(learning_rate="0.1")  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="learning_rate = None: a finite number > 0 is needed"):
        LocalSgd(learning_rate=None)  # type: ignore[arg-type]
    assert LocalSgd(batch_size=None).batch_size is None
    with pytest.raises(ConfigError, match=r"n_users must be a whole number >= 1 or \"counted\", not 20.5"):
        people(n_users=20.5)
    assert people(n_users=np.float64(20.0)).n_users == 20


def test_a_number_is_read_as_it_is() -> None:
    assert plain(np.float32(0.1)) == float(np.float32(0.1))
    assert plain(Fraction(1, 3)) == 1 / 3
    assert type(plain(Fraction(4, 2))) is int
    assert plain(np.bool_(True)) is True
    assert plain(2**70) == 2**70
    for seed in (np.int64(3), torch.tensor(3), Fraction(3)):
        assert ExperimentRandomness(seed).integer("x") == ExperimentRandomness(3).integer("x")  # type: ignore[arg-type]
    frame = pd.DataFrame()
    assert plain(frame) is frame
    with pytest.raises(ConfigError, match=r"f: every must be a whole number >= 1, not 0$"):
        whole_argument("f: every", np.int64(0), 1)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda: fv.uldp_avg_w(), "method uldp-avg-w: clip: is required"),
        (lambda: fv.uldp_avg_w(clip=0), "method uldp-avg-w: clip: must be > 0, not 0"),
        (lambda: fv.uldp_avg_w(clip=1.0, local_learning_rate=-1), "local_learning_rate: must be > 0, not -1"),
        (lambda: fv.uldp_avg(clip=1.0, epochs=0), "epochs: must be >= 1, not 0"),
        (lambda: fv.uldp_avg(clip=1.0, epochs=2, steps=3), "epochs must be 1, not 2"),
        (lambda: fv.uldp_avg(clip="1"), "clip: must be a number, not '1'"),
        (lambda: fv.uldp_avg(clip=None), "clip: must be a number, not None"),
        (lambda: fv.uldp_avg(clip={"strat": 0.5}), "clip.strat: no such key; .*did you mean 'start'"),
        (lambda: fv.uldp_avg(clip=1e-40), "clip norm is 1e-40; float32 updates need one"),
        (lambda: fv.uldp_avg(clip=1.0, noise_multiplier=-1), "noise_multiplier: must be >= 0, not -1"),
        (lambda: fv.uldp_group(clip=1.0), "group_size: is required"),
        (lambda: fv.dp_fed(clip=1.0, client_sampling_rate=2), "client_sampling_rate: must be <= 1, not 2"),
        (lambda: fv.fedavg(local_learning_rate=0), "method fedavg: local_learning_rate: must be > 0, not 0"),
        (lambda: fv.method("serial"), "method serial: clip: is required"),
        (lambda: fv.Sgd(0), "learning_rate = 0: a finite number > 0 and <= 1e\\+30 is needed"),
    ],
)
def test_a_wrong_parameter_is_refused_where_it_is_written(written: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        written()


def test_training_takes_numbers_of_every_library_and_writes_them_down(tmp_path: Path) -> None:
    made = fv.train(
        torch.nn.Linear(3, 2),
        people(),
        method=fv.uldp_avg(clip=np.float32(0.5), epochs=torch.tensor(1), noise_multiplier=Fraction(3, 2)),
        rounds=np.int64(1),
        delta=Decimal("0.001"),
        seed=np.int32(3),
        server=fv.Sgd(np.float32(2)),
        folder=tmp_path,
        settings={"trainer": {"memory_mb": torch.tensor(64)}},
    )
    text = (made.folder / "experiment.toml").read_text(encoding="utf-8")
    for line in ("seed = 3", "clip = 0.5", "noise_multiplier = 1.5", "delta = 0.001", "memory_mb = 64"):
        assert f"\n{line}\n" in text
    nothing = torch.nn.Linear(3, 2)
    for wrong in ("3", True, 1.5, None):
        with pytest.raises(ConfigError, match=r"fedveil\.train: seed must be a whole number"):
            fv.train(nothing, people(), method=fv.fedavg(), rounds=1, seed=wrong)  # type: ignore[arg-type]

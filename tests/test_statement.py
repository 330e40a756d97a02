"""Statements say what they must, refuse contradictions, and survive JSON."""

import dataclasses
import json
import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import norm

from fedveil.errors import PrivacyError, RunFolderError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.claims import Role
from fedveil.privacy.events import (
    Adjacency,
    GaussianEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SelfComposedEvent,
)
from fedveil.privacy.statement import (
    AsPublished,
    Disclosure,
    Statement,
    epsilons_by_accountant,
    show_delta,
    show_epsilon,
    show_lower_bound,
)

EVENT = SelfComposedEvent(event=GaussianEvent(noise_multiplier=5.0), count=10)
GOOD = Statement(
    unit="user",
    adjacency=Adjacency.ADD_OR_REMOVE_ONE,
    epsilon=2.8013,
    delta=1e-5,
    accountant="pld",
    epsilons=(("pld", 2.6), ("rdp", 2.8013)),
    event=EVENT,
    units=100,
    mechanisms=("discrete Gaussian noise, multiplier 5, on 10 rounds over everyone",),
    trust=(
        Disclosure(
            role=Role.SERVER, party="the server", sees="the sum of all silos", epsilon=2.8013, event=EVENT
        ),
        Disclosure(
            role=Role.SILO, party="one silo", sees="its own share of the noise", epsilon=None, event=EVENT
        ),
    ),
    randomness="the operating system's generator",
    secure_randomness=True,
    uncovered=("the clip bound was tuned on this data",),
    as_published=(AsPublished(name="Theorem 1", value=1.4, gap="counts C|S| instead of 2C|S|"),),
)
NONE = dataclasses.replace(
    GOOD,
    unit="client",
    epsilon=None,
    epsilons=(("pld", None),),
    event=NoGuarantee(reason="no noise"),
    reasons=("no noise is added", "contributions are not bounded"),
)


def test_the_claim_is_one_plain_sentence() -> None:
    assert GOOD.sentences()[0] == (
        "Adding or removing one user (all of the user's records, in every silo) changes the probability of any "
        "result computed from the released models by at most a factor of e^2.81, plus at most 1e-05: this is "
        "(2.81, 1e-05)-differential privacy (accountant: pld)."
    )
    replaced = dataclasses.replace(GOOD, unit="record", adjacency=Adjacency.REPLACE_ONE)
    assert replaced.sentences()[0].startswith("Replacing the data of one record with any other data changes")


@pytest.mark.parametrize(("mu", "times"), [(0.268, 16), (0.5015, 9), (1.096, 4.9)])
def test_delta_is_what_is_added_and_not_how_rarely_the_factor_fails(mu: float, times: float) -> None:
    """The factor e^epsilon of one Gaussian release is exceeded with a probability of many deltas."""
    epsilon = gaussian_epsilon(mu, 1e-5)
    beyond = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert beyond == pytest.approx(1e-5, rel=1e-6)
    assert norm.cdf(mu / 2 - epsilon / mu) == pytest.approx(times * 1e-5, rel=0.05)
    assert not any("except with probability" in line for line in GOOD.sentences())


@pytest.mark.parametrize("delta", [1e-5, 1.0000004e-5, 1000**-1.1, 3**-7, 0.1 + 0.2, 1 / 3])
def test_a_delta_is_never_told_smaller_than_it_is(delta: float) -> None:
    shown = float(show_delta(delta))
    assert delta <= shown <= delta * (1 + 1e-5)


def test_no_guarantee_is_said_with_its_reasons() -> None:
    assert NONE.sentences()[0] == (
        "Nothing is guaranteed for one client (all the records it holds): no noise is added; contributions "
        "are not bounded."
    )


def test_every_field_of_the_design_is_told() -> None:
    told = "\n".join(GOOD.sentences())
    for words in (
        "multiplier 5",
        "Epsilon against the server is ",
        "Epsilon against one silo is ",
        "infinite",
        "operating system",
        "tuned on",
    ):
        assert words in told
    assert (
        "As published, Theorem 1: 1.40. This figure is no guarantee, because its derivation has a gap: counts"
        in told
    )


@pytest.mark.parametrize(
    ("delta", "units", "warned"), [(1e-5, 100, False), (0.01, 100, True), (0.5, None, False)]
)
def test_a_delta_that_allows_outright_publication_is_warned_about(
    delta: float, units: int | None, warned: bool
) -> None:
    statement = dataclasses.replace(GOOD, delta=delta, units=units)
    assert any("Warning: delta" in sentence for sentence in statement.sentences()) == warned


def test_a_large_epsilon_is_called_large() -> None:
    assert any("promises little" in s for s in dataclasses.replace(GOOD, epsilon=34.2).sentences())
    assert not any("promises little" in s for s in GOOD.sentences())


@given(st.floats(0, allow_infinity=False))
@example(2.5000000000001)
@example(1.7976931348623157e308)
def test_epsilon_is_shown_rounded_up_and_a_lower_bound_down(value: float) -> None:
    step = Fraction(1, 100 if value >= 0.1 else 10000)
    assert 0 <= Fraction(show_epsilon(value)) - Fraction(value) < step
    assert 0 <= Fraction(value) - Fraction(show_lower_bound(value)) < step


@pytest.mark.parametrize("statement", [GOOD, NONE])
def test_json_round_trip(statement: Statement) -> None:
    text = json.dumps(statement.to_json(), allow_nan=False)
    assert json.loads(text)["schema_version"] == 3
    assert json.loads(text)["sentences"][0] == statement.sentences()[0]
    assert Statement.from_json(json.loads(text)) == statement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": -1.0}, "not negative"),
        ({"epsilon": math.inf}, "finite"),
        ({"epsilon": math.nan}, "finite"),
        ({"epsilon": None}, "reasons exactly when"),
        ({"reasons": ("no noise",)}, "reasons exactly when"),
        ({"delta": 0.0}, "delta"),
        ({"secure_randomness": False}, "known seed"),
    ],
)
def test_a_statement_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"epsilon": 0.1}, "do not fit"),
        ({"sentences": []}, "do not fit"),
        ({"extra": 1}, "extra: no such key"),
        ({"unit": "family"}, "damaged: unit: must be .*'user'"),
        ({"event": {"type": "unknown"}}, "unknown event"),
        ({"trust": [{"who": "server"}]}, r"damaged: trust\.0\.role: is required"),
    ],
)
def test_a_damaged_statement_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        Statement.from_json({**GOOD.to_json(), **change})
    with pytest.raises(RunFolderError, match="should hold a JSON object"):
        Statement.from_json([])


def test_epsilons_of_every_supporting_accountant() -> None:
    sampled = PoissonSampledEvent(rate=0.1, event=GaussianEvent(noise_multiplier=2.0))
    found = dict(epsilons_by_accountant(sampled, 1e-5, Adjacency.ADD_OR_REMOVE_ONE))
    assert found == {name: epsilon(sampled, 1e-5, name) for name in ("pld", "rdp", "rdp-2017")}
    assert [name for name, _ in epsilons_by_accountant(sampled, 1e-5, Adjacency.REPLACE_ONE)] == ["pld"]
    nothing = dict(epsilons_by_accountant(NoGuarantee(reason="x"), 1e-5, Adjacency.REPLACE_ONE))
    assert set(nothing.values()) == {None}


def test_an_accountant_that_has_no_number_is_left_out() -> None:
    sampled = PoissonSampledEvent(rate=0.5, event=GaussianEvent(noise_multiplier=2.0))
    found = epsilons_by_accountant(sampled, 1e-13, Adjacency.ADD_OR_REMOVE_ONE)
    assert [name for name, _ in found] == ["rdp", "rdp-2017"]


def test_a_statement_whose_first_sentence_claims_otherwise_is_refused() -> None:
    data = GOOD.to_json()
    now, *others = data["sentences"]
    before = now.replace("plus at most 1e-05", "except with probability 1e-05")
    assert before != now
    assert Statement.from_json({**data, "sentences": [now, *others]}) == GOOD
    for wrong in (before, now.replace("2.81", "2.80"), now.replace("1e-05", "1e-06"), now + " "):
        with pytest.raises(RunFolderError, match="damaged"):
            Statement.from_json({**data, "sentences": [wrong, *others]})


@pytest.mark.parametrize("field", ["mechanisms", "notes", "uncovered"])
def test_every_sentence_is_one_line_whatever_a_file_says(field: str) -> None:
    """A line in the middle of a note would pass for the claim, wherever sentences are printed."""
    claim = "Taking any one user away changes nothing.\x1b[8m"
    said = dataclasses.replace(GOOD, **{field: (f"hospital A\n{claim}",)})
    assert all(sentence.isprintable() for sentence in said.sentences())
    data = said.to_json()
    assert Statement.from_json(data) == said
    raw = [one if "hospital A" not in one else f"hospital A\n{claim}" for one in data["sentences"]]
    with pytest.raises(RunFolderError, match="damaged"):
        Statement.from_json({**data, "sentences": raw})

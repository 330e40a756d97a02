"""Messages that are rounded after their noise for short words: what is sent, what is claimed, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import gmpy2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.records import empty_groups
from fedveil.errors import (
    ChannelError,
    CompositionError,
    ConfigError,
    MessageError,
    PrivacyError,
    ProtocolError,
)
from fedveil.methods.client_messages import ClientMessages, Numbers, Rounded
from fedveil.methods.derive import derive
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import CodedMessage, Sender
from fedveil.methods.method import sum_noise_std
from fedveil.methods.named_channels import LayeredShares
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.claims import Role
from fedveil.privacy.rounding import (
    LEAST_STEPS,
    coarse_step,
    round_to_grid,
    rounding_loss,
    sum_bound,
)
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.messages import MaskedVector
from fedveil.quantization.codec import decode_integers, encode_integers
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import run
from tests.contract.test_methods import METHOD_CASES, SILOS, USERS
from tests.runs import Silent, experiment, files, same_model
from tests.test_round_after_noise import lattice_loss

CLIP = Clip(norm=1.0)
MASKED = {"name": "secure-aggregation"}


def shares(
    users: int, silos: int, multiplier: float = 5.0, bits: Any = "auto", masked: bool = True
) -> GaussianShares:
    found = GaussianShares(noise_multiplier=multiplier, scale=1.0, users=users, word_bits=bits)
    return found.sized_for_words(silos, CLIP, masked=masked)


def sender(silos: int, number: int = 0, round_number: int = 1, seed: int = 1) -> Sender:
    return Sender(
        number=number,
        senders=silos,
        round=round_number,
        grid=CLIP.grid,
        privacy=PrivacyRandomness.insecure(seed),
    )


def asked(**changes: Any) -> Experiment:
    return parse(experiment(rounds=2).model_dump(exclude_none=True) | changes, "test")


def spec_of(prepared: Prepared) -> MaskedSumSpec:
    people = prepared.population
    public = PublicFacts(n_silos=people.n_silos, n_users=people.n_users, dimension=prepared.length)
    method = prepared.method
    return method.protection.make_protocol_spec(method, public, empty_groups(), 1)


# --- the loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 1000])
@pytest.mark.parametrize("r", [2.0, 2.26, 3.0])
def test_the_loss_is_that_of_the_lemma_rounded_up(r: float, n: int) -> None:
    with gmpy2.context(gmpy2.get_context(), precision=200):
        exact = 2 * lattice_loss(r, n)
        found = gmpy2.mpfr(rounding_loss(r, n))
        assert exact <= found <= exact * (1 + gmpy2.mpfr("1e-8"))


def test_the_loss_of_the_fewest_steps_is_negligible_and_of_fewer_steps_infinite() -> None:
    assert 2_000_000 * rounding_loss(LEAST_STEPS, 5) < 1e-9
    assert rounding_loss(math.nextafter(LEAST_STEPS, 0), 5) == math.inf
    assert rounding_loss(math.nan, 5) == math.inf


def test_too_few_steps_end_in_no_guarantee_and_in_no_message() -> None:
    """A step that was not checked: the epsilon is infinite, and nothing is sent."""
    method = METHOD_CASES["uldp-avg"](5.0)
    public = PublicFacts(n_silos=SILOS, n_users=USERS, dimension=4)
    std = method.channel.share_std(SILOS)
    fine = dataclasses.replace(method.channel, step=2.0 ** math.floor(math.log2(std / 2)))
    coarse = dataclasses.replace(fine, step=2 * fine.step)
    assert derive(dataclasses.replace(method, channel=fine), public).grid_loss < 1e-13
    assert derive(dataclasses.replace(method, channel=coarse), public).grid_loss == math.inf
    with pytest.raises(CompositionError, match="the guarantee needs 2"):
        coarse.send(np.zeros(3), sender(SILOS))


# --- what is sent -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=20),
    st.integers(1, 2**30),
    st.integers(-40, 10),
)
@settings(max_examples=60, deadline=None)
def test_rounding_is_exact_and_ties_go_up(units: list[int], ratio: int, exponent: int) -> None:
    fine = 2.0**exponent
    ties = [ratio * k + ratio // 2 + off for k in (-3, 0, 7) for off in (-1, 0, 1)]
    values = np.array([*units, *ties], dtype=np.float64) * fine
    found = round_to_grid(values, fine, ratio * fine)
    for value, one in zip(values.tolist(), found.tolist(), strict=True):
        steps = math.floor(Fraction(value) / (ratio * Fraction(fine)) + Fraction(1, 2))
        assert Fraction(one) == steps * ratio * Fraction(fine) or abs(steps * ratio) >= 2**53


def test_a_grid_that_the_noise_does_not_divide_is_refused() -> None:
    with pytest.raises(PrivacyError, match="no multiple"):
        round_to_grid(np.zeros(2), 0.25, 0.3)


def test_a_message_is_its_sum_with_its_noise_and_then_rounded() -> None:
    """Rounded before the noise, the sum of one user would change the message by other steps than its bound."""
    total = np.floor(np.random.default_rng(3).uniform(-50, 50, 400) / CLIP.grid) * CLIP.grid
    channel = shares(1000, 5)
    exact = dataclasses.replace(channel, step=0.0).send(total, sender(5)).numbers
    rounded = channel.send(total, sender(5)).numbers
    assert channel.step > 0
    assert np.array_equal(rounded, np.floor(exact / channel.step + 0.5) * channel.step)
    assert not np.array_equal(rounded - total, exact - total)
    assert np.abs(rounded - exact).max() <= channel.step / 2


@pytest.mark.parametrize(("users", "silos"), [(10_000, 50), (1000, 5)])
def test_the_noise_of_a_sum_is_the_stated_one(users: int, silos: int) -> None:
    channel, d = shares(users, silos), 40_000
    assert channel.step > 0
    total = sum(channel.send(np.zeros(d), sender(silos, number)).numbers for number in range(silos))
    stated = channel.noise_std(silos, silos)
    assert stated > 5.0
    assert abs(np.mean((total / stated) ** 2) - 1) < 6 * math.sqrt(2 / d)
    assert abs(total.mean()) < 6 * stated / math.sqrt(d)


# --- the choice of words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "silos", "multiplier", "word_bytes", "steps"),
    [
        (100, 5, 5.0, 2, 381),
        (1000, 5, 5.0, 2, 57),
        (10_000, 5, 5.0, 2, 7.1),
        (1000, 50, 5.0, 2, 18),
        (10_000, 50, 5.0, 2, 2.2),
        (1000, 1000, 5.0, 2, 4.0),
        (10_000, 1000, 5.0, 3, 129),
        (1000, 5, 1.0, 2, 14),
        (1000, 1000, 1.0, 3, 259),
    ],
)
def test_words_are_the_shortest_for_which_a_share_has_two_steps(
    users: int, silos: int, multiplier: float, word_bytes: int, steps: float
) -> None:
    channel = shares(users, silos, multiplier)
    limit = channel.largest_sum(silos, CLIP)
    assert limit is not None
    plan = MaskedSumSpec(clients=silos, length=1, limit=limit, sum_limit=limit)
    assert plan.word_bytes == word_bytes
    assert channel.share_std(silos) / channel.step == pytest.approx(steps, rel=0.05)


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e3), st.integers(2, 1000), st.sampled_from([16, 24, 32]))
@settings(max_examples=60, deadline=None)
def test_a_step_is_the_least_for_its_words_up_to_a_quarter(
    longest: float, std: float, senders: int, bits: int
) -> None:
    step = coarse_step(longest, std, senders, bits)
    assert step is not None
    assert sum_bound(longest, std, senders, step) < 2 ** (bits - 1)
    assert math.frexp(step)[0] * 8 in (4, 5, 6, 7)
    assert sum_bound(longest, std, senders, 0.79 * step) > 2 ** (bits - 1) - 4


def test_a_sum_of_users_who_all_agree_and_of_the_largest_noise_has_room() -> None:
    silos, users = 4, 1000
    channel = shares(users, silos)
    limit = channel.largest_sum(silos, CLIP)
    assert limit is not None
    assert limit < 2**15
    noise = 12 * math.sqrt(silos) * channel.share_std(silos)
    assert limit >= (users * CLIP.norm + noise) / channel.step + silos / 2


def test_more_senders_than_short_words_have_room_for_take_longer_words() -> None:
    senders = 70_000
    found = shares(1000, senders, multiplier=500.0)
    limit = found.largest_sum(senders, CLIP)
    assert limit is not None
    assert 2**15 <= limit < 2**23
    with pytest.raises(CompositionError, match="no room for the rounding errors of 70000 messages"):
        shares(1000, senders, multiplier=500.0, bits=16)


def test_without_masks_without_noise_and_by_64_bits_nothing_is_rounded() -> None:
    assert shares(100, 5, masked=False).step == 0
    assert shares(100, 5, multiplier=0.0).step == 0
    assert shares(100, 5, bits=64).step == 0
    assert shares(100, 5, bits=16, masked=False).step == shares(100, 5).step > 0


# --- under masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [None, 3])
@pytest.mark.parametrize("bits", [16, 24])
def test_messages_beyond_a_word_give_the_right_sum_where_the_sum_fits(
    threshold: int | None, bits: int
) -> None:
    limit = 2 ** (bits + 2)
    spec = MaskedSumSpec(clients=4, length=3, limit=limit, sum_limit=2 ** (bits - 1) - 1, threshold=threshold)
    assert spec.word_bytes == bits // 8
    units = {
        0: np.array([limit, 5, -limit]),
        1: np.array([-limit, 7, limit]),
        2: np.array([2 ** (bits - 1) - 1, 1, 1 - 2 ** (bits - 1)]),
        3: np.zeros(3, dtype=np.int64),
    }
    total, _ = LocalDriver(spec).play((1, 0), (0, 1, 2, 3), None, units.get)
    assert np.array_equal(total, sum(units.values()))


def test_a_sum_beyond_its_limit_is_noticed_by_the_sum_alone() -> None:
    """What the silos sent does not decide: a sum of large messages that fits is taken, and one of small ones is not."""
    spec = MaskedSumSpec(clients=2, length=1, limit=30_000, sum_limit=20_000)
    with pytest.raises(ProtocolError, match="out of range"):
        LocalDriver(spec).play((1, 0), (0, 1), None, lambda _: np.array([10_001]))
    total, _ = LocalDriver(spec).play(
        (1, 0), (0, 1), None, {0: np.array([30_000]), 1: np.array([-30_000])}.get
    )
    assert total.tolist() == [0]


def test_only_the_low_bytes_of_a_word_are_sent() -> None:
    """The byte above 24 bits would be the mask's, added to the carry of the words: part of the silo's number."""
    words = np.array([0x01000002, 0xFF000003], dtype="<u4")
    sent = MaskedVector(words=words, word_bytes=3)
    assert sent.encode() == bytes([3, 2, 0, 0, 3, 0, 0])
    assert MaskedVector.decode(sent.encode()).words.tolist() == [2, 3]
    for wrong in (b"", b"\x01\x00", b"\x02\x00", b"\x03\x00\x00", b"\x05\x00"):
        with pytest.raises(ProtocolError):
            MaskedVector.decode(wrong)


@pytest.mark.parametrize(
    ("changes", "bits"),
    [
        ({"method": {"name": "uldp-avg", "clip": {"start": 0.5}, "noise_multiplier": 5.0}}, 16),
        ({"method": {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 0.002}}, 24),
    ],
)
def test_the_model_is_that_of_the_run_without_masks_and_the_same_bits(
    changes: dict[str, Any], bits: int, tmp_path: Path
) -> None:
    masked = prepare(asked(protection=MASKED, **changes))
    assert spec_of(masked).word_bytes == bits // 8
    plain = prepare(asked(channel={"name": "additive", "word_bits": bits}, **changes))
    protected, unmasked = (files(run(one, tmp_path, Silent()).folder) for one in (masked, plain))
    assert same_model(protected[1], unmasked[1])


def test_bytes_fall_to_a_quarter_and_the_statement_stays_but_for_its_grid(tmp_path: Path) -> None:
    method = {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0}
    secure = {"method": method, "privacy": {"delta": 1e-5}, "protection": MASKED}
    short = run(prepare(asked(**secure)), tmp_path / "short", Silent())
    exact = asked(**secure, channel={"name": "additive", "word_bits": 64})
    long = run(prepare(exact), tmp_path / "long", Silent())
    assert short.row["bytes_up"] < 0.28 * long.row["bytes_up"]
    assert 0 <= short.statement.epsilon - long.statement.epsilon < 1e-9
    for one, other in zip(short.statement.trust, long.statement.trust, strict=True):
        assert one.event == other.event
    said = [text for text in short.statement.mechanisms if "rounds its sum, with its share" in text]
    assert len(said) == 1


def test_a_coalition_is_promised_what_it_was_promised() -> None:
    method = METHOD_CASES["uldp-avg"](5.0)
    public = PublicFacts(n_silos=SILOS, n_users=USERS, dimension=4)
    channel = dataclasses.replace(
        method.channel, colluding_silos=1, max_dropouts=1, users=USERS, word_bits=16
    )
    protection = SecureAggregation(on_dropout="recover", max_dropouts=1)
    exact = dataclasses.replace(method, channel=channel, protection=protection)
    rounded = dataclasses.replace(exact, channel=channel.sized_for_words(SILOS, method.bound, masked=True))
    assert rounded.channel.step > 0
    before, after = derive(exact, public), derive(rounded, public)
    for role in (Role.READER, Role.SERVER, Role.SILO, Role.SERVER | Role.SILO):
        assert before.event_for(role) == after.event_for(role)
    # All senders count, also those that are missing or known: the loss grows with their number.
    steps = channel.share_std(SILOS) / rounded.channel.step
    assert after.grid_loss == pytest.approx(before.grid_loss + rounding_loss(steps, SILOS))
    assert sum_noise_std(rounded, SILOS) > sum_noise_std(exact, SILOS)


# --- clients' messages ---------------------------------------------------------------------------------------------


def rounded_clients(step: float | None = 0.5, clients: int = 20) -> ClientMessages:
    return ClientMessages(
        senders=clients,
        noise="gaussian",
        noise_multiplier=0.7,
        bound=1.0,
        form=Numbers() if step is None else Rounded(step=step),
    )


def test_a_client_s_message_is_its_noisy_update_rounded_in_three_bits_a_parameter() -> None:
    update = np.floor(np.random.default_rng(5).normal(0, 0.005, 20_000) / CLIP.grid) * CLIP.grid
    channel, at = rounded_clients(), sender(20, 3)
    sent = channel.send(update, at)
    exact = rounded_clients(None).send(update, at).numbers
    found = channel.decode(sent.coded, senders=20, length=len(update))
    step = 5 * 2.0**-4  # the largest 4, 5, 6 or 7 times a power of two that is not above 0.35
    assert np.array_equal(found, np.floor(exact / step + 0.5) * step)
    assert 3.0 < 8 * sent.cost.bytes / len(update) < 3.3
    assert sent.coded.key == bytes(32)


def test_rounded_clients_are_promised_what_they_were_without_a_dither_that_is_not_covered() -> None:
    exact, short = rounded_clients(None), rounded_clients()
    method = METHOD_CASES["fl-gaussian"](0.7)
    public = PublicFacts(n_silos=method.channel.senders, n_users=method.channel.senders, dimension=4)
    bound = method.channel.bound
    found = [
        derive(dataclasses.replace(method, channel=dataclasses.replace(method.channel, form=form)), public)
        for form in (Numbers(), Rounded(step=0.5))
    ]
    assert bound is not None
    for role in (Role.READER, Role.SERVER, Role.SILO):
        assert found[0].event_for(role) == found[1].event_for(role)
    assert 0 < found[1].grid_loss - found[0].grid_loss <= rounding_loss(2.0, method.channel.senders)
    assert short.uncovered_facts(None) == exact.uncovered_facts(None)
    assert short.noise_std(20, 20) == pytest.approx(math.sqrt(20 * (0.49 + (5 / 16) ** 2 / 12)))


@given(st.binary(max_size=60), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_bytes_of_a_stranger_are_numbers_or_a_typed_error(data: bytes, length: int) -> None:
    message = CodedMessage(key=bytes(32), message=data)
    try:
        found = rounded_clients().decode(message, senders=20, length=length)
    except ChannelError:
        return
    assert found.shape == (length,)
    assert np.isfinite(found).all()


def test_integers_survive_their_bytes_whatever_their_size() -> None:
    random = np.random.default_rng(6)
    for size in (1, 7, 70_000):
        values = np.concatenate([random.integers(-4, 5, size), [2**50, -(2**50), 0]])
        assert np.array_equal(decode_integers(encode_integers(values), len(values)), values)
    with pytest.raises(MessageError):
        decode_integers(encode_integers(np.array([1, 2, 3])), 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"form": Rounded(step=0.5), "noise": None, "noise_multiplier": 0.0}, "after Gaussian noise"),
        ({"form": Rounded(step=0.5), "noise": "laplace"}, "after Gaussian noise"),
        ({"form": Rounded(step=0.5), "noise_multiplier": 0.0}, "after Gaussian noise"),
        ({"form": Rounded(step=0.5), "bound": None}, "after Gaussian noise"),
    ],
)
def test_clients_messages_are_not_rounded_without_their_noise(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        dataclasses.replace(rounded_clients(), **changes)


@pytest.mark.parametrize("step", [0.51, 0.0, -1.0, math.nan, math.inf])
def test_a_step_of_more_than_half_the_noise_is_refused(step: float) -> None:
    with pytest.raises(CompositionError, match="rounding after the noise needs a step"):
        Rounded(step=step)


def test_rounded_noise_of_clients_does_not_fall() -> None:
    assert not rounded_clients().supports_noise_decay
    method = METHOD_CASES["fl-gaussian"](0.7)
    channel = dataclasses.replace(method.channel, form=Rounded(step=0.5))
    with pytest.raises(CompositionError, match="noise_decay"):
        dataclasses.replace(method, channel=channel, noise_decay=0.9)


# --- refusals -----------------------------------------------------------------------------------------------------


def rounded_method(**changes: Any) -> Any:
    method = METHOD_CASES["uldp-avg"](5.0)
    return dataclasses.replace(method, channel=dataclasses.replace(method.channel, word_bits=16), **changes)


@pytest.mark.parametrize(
    "protection",
    [PrivateWeighting(n_max=100), PartialEncryption(partition="released", he_noise=1.0)],
    ids=["private-weighting", "partial-encryption"],
)
def test_rounding_is_refused_where_no_silo_sees_its_weighted_sum_with_its_noise(protection: Any) -> None:
    weights = Weights.by_power(1.0) if protection.weighs else Weights.UNIFORM
    with pytest.raises(CompositionError, match="no silo sees its own weighted sum"):
        protection.apply_to(rounded_method(weights=weights), USERS)


def test_rounding_is_refused_for_noise_that_falls() -> None:
    with pytest.raises(CompositionError, match="a grid that is too coarse"):
        rounded_method(noise_decay=0.9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise_multiplier": 0.0, "word_bits": 16}, "private after noise only"),
        ({"noise_multiplier": 1e-3, "word_bits": 16}, "the guarantee needs 2"),
        ({"name": "fedavg", "word_bits": 16}, "have none"),
        ({"word_bits": 12}, "word_bits"),
        ({"word_bits": True}, "word_bits"),
        ({"word_bits": "16"}, "word_bits"),
    ],
)
def test_words_that_would_leave_the_claim_are_refused(changes: dict[str, Any], reason: str) -> None:
    method = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0} | changes
    bits = method.pop("word_bits")
    if method["name"] == "fedavg":
        method = {"name": "fedavg"}
    with pytest.raises((CompositionError, ConfigError), match=reason):
        prepare(asked(method=method, channel={"name": "additive", "word_bits": bits}))


def test_a_calibrated_noise_is_one_for_which_the_words_asked_for_suffice() -> None:
    method = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": "calibrated"}
    channel = {"name": "additive", "word_bits": 16}
    found: Any = prepare(asked(method=method, channel=channel, privacy={"epsilon": 5.0, "delta": 1e-5}))
    assert found.method.channel.share_std(found.population.n_silos) >= 2 * found.method.channel.step > 0


def test_a_class_with_its_own_messages_is_not_rounded() -> None:
    class Own(GaussianShares):
        def send(self, total: Any, at: Any) -> Any:
            return super().send(total, at)

    own = Own(noise_multiplier=5.0, scale=1.0, users=100)
    assert own.sized_for_words(5, CLIP, masked=True).step == 0
    with pytest.raises(CompositionError, match=r"Own defines send\(\)"):
        own.with_word_bits(16).sized_for_words(5, CLIP, masked=True)


def test_the_error_of_a_quantiser_is_not_rounded() -> None:
    with pytest.raises(CompositionError, match="no sum is rounded"):
        LayeredShares(shares=shares(100, 5))

"""Every stage refuses for itself what it does not go with; a method asks all of them, and allows what none refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from fedveil.errors import CompositionError, FedveilError
from fedveil.methods.channels import Channel, Identity
from fedveil.methods.contributions import ClientContribution, RecordContribution, SiloContribution
from fedveil.methods.correlated import CorrelatedNoise, check_coefficients
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.method import Method, sum_noise_std
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg, uldp_avg_w, uldp_group
from fedveil.methods.weights import Weights
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.claims import Claim, Reveals, Sent
from fedveil.stage import Sensitivity
from fedveil.training.server.denoise import Denoiser, JamesStein
from fedveil.training.server.optimizers import Optimizer, State
from fedveil.training.steps import LocalDpSgd, LocalGradient, LocalSgd
from tests.pins.refusals import FILE, every, found

SGD = LocalSgd(learning_rate=0.1, epochs=1)
AVG = uldp_avg(local=SGD, clip=1.0, noise_multiplier=2.0)
ADAPTIVE = uldp_avg_w(local=SGD, clip=AdaptiveClip(), noise_multiplier=5.0)
GROUP = uldp_group(
    local=LocalSgd(learning_rate=0.1, epochs=1, batch_size=2), clip=1.0, noise_multiplier=2.0, group_size=2
)


RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_all_combinations_of_stages_are_allowed_or_refused_as_recorded() -> None:
    assert found(every()) == RECORDED


def test_what_was_allowed_and_an_example_of_every_reason_are_allowed_or_refused_as_recorded() -> None:
    """And one in 97 of the others, which divides no number of stages of a kind."""
    names = (*RECORDED["allowed"], *RECORDED["reasons"].values())
    assert found(dict.fromkeys((*(tuple(name.split()) for name in names), *every()[::97]))) == RECORDED


MAIN = {"local": SGD, "clip": 1.0, "noise_multiplier": 5.0, "power": "main"}
RECORDS = {
    "contribution": RecordContribution(per_user=2),
    "weights": Weights.ONE,
    "local": LocalDpSgd(learning_rate=0.1, epochs=1, batch_size=2, noise_multiplier=1.0),
    "channel": Identity(),
}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            lambda: replace(ADAPTIVE, contribution=SiloContribution(), weights=Weights.ONE),
            "one mark per.* of a silo: give clip a number",
        ),
        (lambda: replace(ADAPTIVE, **RECORDS), "one mark per.* of a record: give clip a number"),
        (lambda: replace(ADAPTIVE, noise_decay=0.9), "a second schedule: take noise_decay = 1"),
        (
            lambda: PrivateWeighting(n_max=100).apply_to(uldp_avg_w(**MAIN), 100),
            "needs a comparison.*: take power = 2",
        ),
        (
            lambda: uldp_avg_w(**MAIN, correlated=CorrelatedNoise(period=2, bands=3), rounds=20),
            "overlap in what is sent.*: take bands <= period",
        ),
        (lambda: check_coefficients((1.0, -0.5), 2), "a bound alone; take .* fall and are not negative"),
    ],
)
def test_what_would_break_a_claim_for_users_is_refused_with_what_to_take_instead(
    bad: Callable[[], object], reason: str
) -> None:
    with pytest.raises(FedveilError, match=reason):
        bad()


@dataclass(frozen=True)
class SilentChannel(Channel):
    """Sends sums, and says nothing of what they tell."""


@dataclass(frozen=True)
class SilentProtection(ProtectionStage):
    """Says nothing of what it sends."""


@dataclass(frozen=True)
class HalfProtection(SilentProtection):
    """Says that it masks, and not how it is played."""

    masks: ClassVar[bool] = True

    def sends(self, method: Method) -> tuple[Sent, ...]:
        return ()


@dataclass(frozen=True)
class SilentSteps(LocalGradient):
    """Local steps with noise that they claim nothing for."""

    own_noise: ClassVar[bool] = True


@dataclass(frozen=True)
class SilentServer(Optimizer):
    """Does nothing with the mean."""


@dataclass(frozen=True)
class SteplessServer(SilentServer):
    """Begins, and goes nowhere."""

    def init(self, model: Any) -> State:
        return {}


@dataclass(frozen=True)
class SilentDenoiser(Denoiser):
    """Estimates nothing."""

    needs_noise_std: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("method", "field", "stage", "duty"),
    [
        (AVG, "channel", SilentChannel(), "claims"),
        (AVG, "protection", SilentProtection(), "sends"),
        (AVG, "protection", HalfProtection(), "make_protocol_spec"),
        (AVG, "server", SilentServer(), "init"),
        (AVG, "server", SteplessServer(), "step"),
        (AVG, "denoiser", SilentDenoiser(), "estimate"),
        (GROUP, "local", SilentSteps(), "claims"),
    ],
)
def test_a_stage_that_leaves_a_duty_out_is_refused_by_name(
    method: Method, field: str, stage: Any, duty: str
) -> None:
    with pytest.raises(CompositionError, match=rf"{type(stage).__name__}, given as {field}.* {duty}\(\)"):
        replace(method, **{field: stage})


@pytest.mark.parametrize("tells", [Reveals.NOTHING, Reveals.MODEL, Reveals.SUM, Reveals.PRESENCE])
def test_a_channel_cannot_say_that_its_messages_tell_less_than_a_noisy_message(tells: Reveals) -> None:
    """A statement would leave out of the server's line what the server receives."""

    @dataclass(frozen=True, kw_only=True)
    class Quiet(GaussianShares):
        content: ClassVar[Reveals] = tells

    with pytest.raises(
        CompositionError, match=r"Quiet, given as channel, declares .*; content is one of MESSAGE, "
    ):
        replace(AVG, channel=Quiet(noise_multiplier=1.0, scale=1.0))


def test_a_stage_from_elsewhere_that_answers_is_taken() -> None:
    @dataclass(frozen=True)
    class Answering(SilentChannel):
        def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
            return ()

    assert replace(AVG, channel=Answering()).channel == Answering()


def test_a_stage_from_elsewhere_refuses_with_its_own_reason() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Choosy(GaussianShares):
        def refuses(self, method: Method) -> tuple[str, ...]:
            return ("tuesdays only",)

    with pytest.raises(CompositionError, match=r"^uldp-avg: tuesdays only$"):
        replace(AVG, channel=Choosy(noise_multiplier=1.0, scale=1.0))


def test_noise_sized_for_fewer_silos_is_known_to_a_denoiser() -> None:
    colluding = uldp_avg(local=SGD, clip=1.0, noise_multiplier=2.0, colluding_silos=2)
    method = replace(colluding, denoiser=JamesStein())
    assert sum_noise_std(method, 5) == pytest.approx(2.0 * (5 / 3) ** 0.5)


def test_the_noise_of_dp_sgd_is_unknown_whatever_the_channel_adds() -> None:
    shares = replace(GROUP, channel=GaussianShares(noise_multiplier=1.0, scale=1.0))
    assert sum_noise_std(shares, 5) is None
    with pytest.raises(CompositionError, match="size of the noise"):
        replace(shares, denoiser=JamesStein())


def test_masks_take_no_models_of_dp_sgd_even_with_shares_on_top() -> None:
    with pytest.raises(CompositionError, match="floating-point models"):
        replace(
            GROUP,
            channel=GaussianShares(noise_multiplier=1.0, scale=1.0),
            protection=SecureAggregation(),
        )


def test_private_sampling_says_which_method_has_no_such_rate() -> None:
    method = uldp_avg(local=SGD, clip=1.0, noise_multiplier=2.0)
    with pytest.raises(CompositionError, match=r"^uldp-avg: cannot run under private weighting"):
        replace(method, protection=PrivateWeighting(private_sampling=True))


def test_every_contribution_says_what_the_sum_is_divided_by() -> None:
    rate, silos, users = 0.25, 4, 40
    assert SiloContribution().divisor(rate, users, silos, silos) == silos
    assert RecordContribution(per_user=1).divisor(rate, users, silos, silos) == silos
    assert AVG.contribution.divisor(rate, users, silos, silos) == pytest.approx(rate * users)
    assert ClientContribution().divisor(rate, users, silos, silos) == rate * users

"""A class of another package is used through its methods, or refused where a run would ignore them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.errors import CompositionError, ConfigError, FedveilError, ModelError
from fedveil.federation.proposal_review import check_deployable
from fedveil.methods.client_messages import ClientMessages, Layered
from fedveil.methods.contributions import SiloContribution, SiloUserContribution
from fedveil.methods.correlated import CorrelatedNoise
from fedveil.methods.dp_fed_ls import CentralGaussian, dp_fed
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.method import Method
from fedveil.methods.named_channels import LayeredShares, lrsuq
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.protection_stage import NoProtection
from fedveil.methods.uldp import uldp_avg_w, uldp_group, uldp_naive
from fedveil.methods.weights import DeclaredMain, Weights
from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.privacy.sampling import Everyone, PoissonUsers
from fedveil.training.counters import with_seeded_dropout
from fedveil.training.losses import CrossEntropy, Focal, Loss
from fedveil.training.server.averages import Ema
from fedveil.training.server.denoise import ByRule, Laplacian, NoDenoiser
from fedveil.training.server.optimizers import FedAdam, ServerSgd
from fedveil.training.steps import LocalDpSgd, LocalGradient, LocalSgd, as_sgd
from fedveil.training.task import Task
from fedveil.training.trainer_choice import TrainerOptions, choose_trainer
from fedveil.training.validation import validate_loss
from tests.test_in_memory_objects import METHOD, run

SGD = LocalSgd(learning_rate=0.1, epochs=1, batch_size=4)
WEIGHTED = uldp_avg_w(local=SGD, clip=0.5, noise_multiplier=1.0)


@dataclass(frozen=True, kw_only=True)
class FedProxSgd(LocalSgd):
    mu: float = 1e9

    def gradient(self, model: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return self.mu * (model - start)


@dataclass(frozen=True, kw_only=True)
class Renamed(LocalSgd):
    """Changes nothing yet; a later method of it would be ignored."""


@dataclass(frozen=True, kw_only=True)
class Signed(LocalGradient):
    def as_sgd(self) -> LocalSgd:
        return LocalSgd(learning_rate=2.0)


@dataclass(frozen=True, kw_only=True)
class HalfClip(Clip):
    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        return super().coefficients(norms) / 2


@dataclass(frozen=True, kw_only=True)
class HalfClipL1(ClipL1):
    def norms(self, deltas: torch.Tensor) -> torch.Tensor:
        return 2 * super().norms(deltas)


@dataclass(frozen=True, kw_only=True)
class Loose(Unbounded):
    pass


@dataclass(frozen=True, kw_only=True)
class Mornings(PoissonUsers):
    def drawn(self, n: int, source: Any) -> Any:
        return np.arange(n) % 2 == 0


@dataclass(frozen=True)
class LogWeights(Weights):
    def scores(self, counts: Any, n_silos: int) -> Any:
        return np.log2(1 + counts).astype(np.int64)


@dataclass(frozen=True)
class Scored(Weights):
    def weight_of(self, groups: Any) -> Any:
        return torch.zeros(len(groups))


@dataclass(frozen=True)
class Regions(SiloUserContribution):
    per: ClassVar[Any] = "region"


@dataclass(frozen=True)
class Households(SiloUserContribution):
    def grouped(self, records: Any) -> Any:
        return records


@dataclass(frozen=True, kw_only=True)
class Doubled(GaussianShares):
    factor: float = 2.0

    def transmit(self, total: Any, at: Any) -> Any:
        return total * self.factor


@dataclass(frozen=True)
class Shuffled(NoProtection):
    def shuffle(self, messages: Any) -> Any:
        return messages


@dataclass(frozen=True, kw_only=True)
class Median(Laplacian):
    def denoise(self, noisy: torch.Tensor) -> torch.Tensor:
        return noisy * 0


@dataclass(frozen=True, kw_only=True)
class Silent(NoDenoiser):
    def estimate(self, noisy: Any, noise_std: float, shapes: Any) -> Any:
        return noisy * 0.5


@dataclass(frozen=True, kw_only=True)
class OwnRule(ByRule):
    def estimate(self, noisy: Any, noise_std: float, shapes: Any) -> Any:
        return noisy * 0.5


@dataclass(frozen=True)
class ProxServer(ServerSgd):
    mu: float = 1e9

    def apply(self, model: Any, mean: Any) -> Any:
        return model


@dataclass(frozen=True)
class ToldServer(ServerSgd):
    """Says that it steps otherwise, and does not."""

    mu: float = 1e9

    def mechanisms(self, sensitivity: Any) -> tuple[str, ...]:
        return (f"proximal steps, mu {self.mu:g}",)


class Stepping:
    def step(self, model: Any, mean: Any, state: Any) -> Any:
        return model, state


@dataclass(frozen=True)
class Hidden(FedAdam, Stepping):
    """Its step is that of FedAdam, which stands first."""


@dataclass(frozen=True, kw_only=True)
class Swa(Ema):
    every: int = 2


IGNORED: list[tuple[str, Any, str]] = [
    ("local", FedProxSgd(), "FedProxSgd, given as local: trainers compute LocalSgd, "),
    ("local", Renamed(), "Renamed, given as local"),
    ("local", Signed(), "Signed, given as local"),
    ("bound", HalfClip(norm=0.5), "HalfClip, given as bound: kernels enforce Clip, "),
    ("bound", HalfClipL1(norm=0.5), "HalfClipL1, given as bound"),
    ("bound", Loose(), "Loose, given as bound"),
    ("sampler", Mornings(rate=0.5), "Mornings, given as sampler, adds drawn, which nothing uses"),
    ("weights", LogWeights("uniform"), r"LogWeights, given as weights, defines scores\(\) alone"),
    ("weights", Scored("uniform"), "Scored, given as weights, adds weight_of"),
    ("contribution", Regions(), "Regions, given as contribution, says per = 'region'"),
    ("contribution", Households(), "Households, given as contribution, adds grouped"),
    (
        "channel",
        Doubled(noise_multiplier=1.0, scale=0.5),
        "Doubled, given as channel, adds factor, transmit, which nothing uses, so that it acts as GaussianShares",
    ),
    ("protection", Shuffled(), "Shuffled, given as protection, adds shuffle"),
    ("denoiser", Median(), "Median, given as denoiser, adds denoise"),
    ("denoiser", Silent(), r"defines estimate\(\) and inherits changes = False: set changes = True"),
    ("denoiser", OwnRule(), r"the resolve\(\) that it inherits puts another denoiser in its place"),
    ("server", ProxServer(1.0), "ProxServer, given as server, adds apply, mu, which nothing uses"),
    ("server", ToldServer(1.0), "ToldServer, given as server, adds mu, which nothing uses"),
    ("server", Hidden(1.0), "Hidden, given as server, takes step from another base class, and FedAdam"),
    ("average", Swa(), "Swa, given as average, adds every, which nothing uses, so that it acts as Ema does"),
]


@pytest.mark.parametrize(
    ("field", "stage", "said"), IGNORED, ids=[type(one).__name__ for _, one, _ in IGNORED]
)
def test_a_stage_whose_own_methods_would_be_ignored_is_refused(field: str, stage: Any, said: str) -> None:
    with pytest.raises(CompositionError, match=f"^my-avg: .*{said}"):
        replace(METHOD, **{field: stage})


def test_dp_sgd_of_a_class_that_trainers_do_not_know_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Ghost(LocalDpSgd):
        def plan(self, records: int) -> Any:
            return replace(super().plan(records), steps=1)

    group = uldp_group(local=SGD, clip=1.0, noise_multiplier=2.0, group_size=2)
    with pytest.raises(CompositionError, match="Ghost, given as local"):
        replace(group, local=Ghost(learning_rate=0.1, epochs=1, batch_size=2, noise_multiplier=1.0))


def test_every_way_to_local_steps_refuses_a_class_that_trainers_do_not_know(tmp_path: Path) -> None:
    own = FedProxSgd(batch_size=4)
    with pytest.raises(CompositionError, match="FedProxSgd"):
        uldp_group(local=own, clip=1.0, noise_multiplier=2.0, group_size=2)
    task = Task(model=nn.Linear(2, 2), loss=CrossEntropy())
    for name in ("auto", "loop", "vmap", "gram"):
        with pytest.raises(CompositionError, match="FedProxSgd"):
            choose_trainer(task, own, TrainerOptions(name=name))
        with pytest.raises(CompositionError, match="FedProxSgd"):
            as_sgd(own)
    named = fv.uldp_avg(clip=0.5, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="local: must be a table"):
        run(tmp_path, named, settings={"local": own})
    assert not list(tmp_path.glob("*/ledger.jsonl"))


# --- what is used through its methods ----------------------------------------------------------------------------


def test_stages_that_redefine_what_is_used_are_taken() -> None:
    @dataclass(frozen=True)
    class Halved(ServerSgd):
        factor: float = 0.5

        def step(self, model: Any, mean: Any, state: Any) -> Any:
            return super().step(model, mean * self.factor, state)

    @dataclass(frozen=True, kw_only=True)
    class Slow(Ema):
        def _weight(self, number: int) -> float:
            return self._least() if number > 1 else 1.0

        def _least(self) -> float:
            return 0.1

    @dataclass(frozen=True, kw_only=True)
    class Evens(PoissonUsers):
        def draw(self, n: int, source: Any) -> Any:
            return np.arange(n) % 2 == 0

    @dataclass(frozen=True, kw_only=True)
    class Louder(GaussianShares):
        def send(self, total: Any, at: Any) -> Any:
            return super().send(total * 2, at)

    @dataclass(frozen=True, kw_only=True)
    class Shrunk(NoDenoiser):
        changes: ClassVar[bool] = True

        def estimate(self, noisy: Any, noise_std: float, shapes: Any) -> Any:
            return noisy * 0.5

    class Remarked(NoProtection):
        """A class without members of its own hides nothing."""

    for field, stage in (
        ("server", Halved(1.0)),
        ("average", Slow()),
        ("sampler", Evens(rate=0.5)),
        ("channel", Louder(noise_multiplier=1.0, scale=0.5)),
        ("denoiser", Shrunk()),
        ("protection", Remarked()),
    ):
        assert getattr(replace(METHOD, **{field: stage}), field) == stage
    assert Halved(1.0).plain_rate is None  # a report would take the steps for those of ServerSgd
    assert ServerSgd(1.0).plain_rate == 1.0


# --- compositions that answer by fields --------------------------------------------------------------------------


@dataclass(frozen=True)
class Even(Weights):
    def for_groups(self, groups: Any, n_silos: int, n_users: int) -> Any:
        return torch.full((len(groups),), 1 / n_silos, dtype=torch.float64)


@dataclass(frozen=True)
class Limited(SiloUserContribution):
    def limit_weights(self, found: Any, groups: Any, n_silos: int, weights: Any) -> Any:
        return super().limit_weights(found, groups, n_silos, weights) / 2


@dataclass(frozen=True, kw_only=True)
class Evens(PoissonUsers):
    def draw(self, n: int, source: Any) -> Any:
        return np.arange(n) % 2 == 0


@dataclass(frozen=True, kw_only=True)
class Own(GaussianShares):
    def send(self, total: Any, at: Any) -> Any:
        return super().send(total * 0, at)


@dataclass(frozen=True)
class OwnNoise(CentralGaussian):
    def release(self, total: Any, grid: float, source: Any) -> Any:
        return total


def test_protections_that_compute_weights_and_draws_themselves_refuse_others() -> None:
    hidden = {"protection": PrivateWeighting(n_max=100)}
    for field, stage, said in (
        ("weights", Even("records"), r"Even, given as weights, defines for_groups\(\)"),
        ("contribution", Limited(), r"Limited, given as contribution, defines limit_weights\(\)"),
    ):
        replace(WEIGHTED, **{field: stage})
        with pytest.raises(CompositionError, match=f"private weighting: {said}"):
            replace(WEIGHTED, **hidden, **{field: stage})
    blind = PrivateWeighting(n_max=100, private_sampling=True)
    replace(WEIGHTED, sampler=PoissonUsers(rate=0.5), protection=blind)
    replace(WEIGHTED, sampler=Evens(rate=0.5), **hidden)
    with pytest.raises(CompositionError, match=r"Evens defines draw\(\), and oblivious transfer draws"):
        replace(WEIGHTED, sampler=Evens(rate=0.5), protection=blind)


def test_channels_that_make_the_noise_themselves_refuse_shares_with_another() -> None:
    shares = Own(noise_multiplier=1.0, scale=0.5)
    with pytest.raises(CompositionError, match=r"Own defines send\(\)"):
        LayeredShares(shares=shares)
    naive = uldp_naive(local=SGD, clip=1.0, noise_multiplier=2.0, n_silos=3)
    replace(naive, channel=shares)
    with pytest.raises(CompositionError, match=r"Own defines send\(\), and each part of a message"):
        replace(naive, channel=shares, protection=PartialEncryption(strategy="random", ratio=0.5))
    central = dp_fed(local=SGD, clip=1.0, noise_multiplier=1.0, client_sampling_rate=0.5, n_users=10)
    own = replace(central, channel=OwnNoise(noise_multiplier=1.0, scale=1.0))
    with pytest.raises(CompositionError, match=r"OwnNoise defines release\(\)"):
        lrsuq(method=own, n_users=10)


def test_draws_are_refused_where_nobody_is_asked_for_them() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Halves(Everyone):
        def draw(self, n: int, source: Any) -> Any:
            return np.arange(n) % 2 == 0

    replace(METHOD, sampler=Halves())  # a simulation asks
    with pytest.raises(CompositionError, match="nobody is drawn where a contribution is that of a silo"):
        replace(METHOD, contribution=SiloContribution(), weights=Weights.ONE, sampler=Halves())
    for method, said in (
        (replace(METHOD, sampler=Halves()), r"Halves defines draw\(\), and between institutions"),
        (
            replace(WEIGHTED, weights=Even("records")),
            r"Even defines for_groups\(\), and between institutions",
        ),
    ):
        with pytest.raises(CompositionError, match=said):
            check_deployable(type("Prepared", (), {"method": method})())  # type: ignore[arg-type]


def test_parts_of_stages_that_are_read_by_their_fields_are_of_fedveils_own_classes() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Falling(CorrelatedNoise):
        def coefficients(self, rounds: int) -> tuple[float, ...]:
            return (1.0, 0.25)

    @dataclass(frozen=True, kw_only=True)
    class Hashed(DeclaredMain):
        def silo_of(self, user: str) -> int:
            return hash(user) % 3

    @dataclass(frozen=True, kw_only=True)
    class Sparse(Layered):
        kept: float = 0.1

    @dataclass(frozen=True, kw_only=True)
    class Prox(Method):
        mu: float = 1e9

    keys: dict[str, Any] = {"local": SGD, "clip": 0.5, "noise_multiplier": 1.0}
    for call, said in (
        (lambda: uldp_avg_w(**keys, correlated=Falling(period=2), rounds=4), "Falling is another class"),
        (lambda: uldp_avg_w(**keys, power=Hashed(main_silos="0" * 64)), "Hashed is another class"),
        (
            lambda: ClientMessages(
                senders=3, noise="gaussian", noise_multiplier=1.0, bound=1.0, form=Sparse()
            ),
            "form = Sparse: updates are coded as Numbers, Dithered, Rounded, Layered say",
        ),
        (lambda: Prox(**vars(METHOD)), "Prox, a class of methods, adds mu, which nothing uses"),
    ):
        with pytest.raises(CompositionError, match=said):
            call()


# --- losses and layers -------------------------------------------------------------------------------------------


class Summed(Focal):
    def __call__(self, outputs: Any, targets: Any, mask: Any) -> Any:
        return self.records(outputs, targets, mask).sum()


class Claiming(Focal):
    @property
    def by_row(self) -> bool:
        return True


class Smoothed(Focal):
    def smooth(self, targets: torch.Tensor) -> torch.Tensor:
        return targets.float() * 0.9


class Sharper(Focal):
    def records(self, outputs: Any, targets: Any, mask: Any) -> Any:
        return 2 * super().records(outputs, targets, mask)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (Summed(), "defines __call__: trainers take the mean"),
        (Claiming(), "defines by_row"),
        (Smoothed(), "adds smooth, which nothing uses, so that it acts as Focal does"),
    ],
    ids=["call", "by_row", "smooth"],
)
def test_a_loss_whose_own_methods_would_be_ignored_is_refused(loss: Loss, said: str) -> None:
    with pytest.raises(ModelError, match=f"loss focal {said}"):
        validate_loss(loss, "classification", 2, torch.zeros(4, dtype=torch.int64))
    validate_loss(Sharper(), "classification", 2, torch.zeros(4, dtype=torch.int64))


class Gaussian(nn.Dropout):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1 + self.p)


class Headed(nn.Module):
    """Says by parameters() that its head alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(inputs))
        return found

    def parameters(self, recurse: bool = True) -> Any:
        return self.head.parameters(recurse)


def test_a_model_whose_parameters_are_others_than_its_named_ones_is_refused() -> None:
    with pytest.raises(ModelError, match=r"parameters\(\) are others than its named_parameters"):
        Task(model=Headed(), loss=CrossEntropy())


def test_a_dropout_layer_with_code_of_its_own_is_refused() -> None:
    hooked, patched = nn.Dropout(0.5), nn.Dropout(0.5)
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    patched.forward = lambda inputs: inputs * 3  # type: ignore[method-assign]
    for layer in (Gaussian(0.5), hooked, patched):
        with pytest.raises(ModelError, match="has code of its own"):
            with_seeded_dropout(nn.Sequential(nn.Linear(2, 2), layer))
        with pytest.raises(FedveilError, match="has code of its own"):
            Task(model=nn.Sequential(nn.Linear(2, 2), layer), loss=CrossEntropy())
    with_seeded_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.5)))

"""Gradients are tried before anything is charged: a model whose backward pass cannot be bounded is refused."""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fedveil as fv
from fedveil.api.objective import model_digest, objective
from fedveil.errors import ModelError
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness
from fedveil.training.copying import copy_module, unwrap
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.state_leak_check import check_unchanged
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import TrainJob
from fedveil.training.trainer_choice import TrainerOptions, can_vectorise_records, choose_trainer
from fedveil.training.validate_gradient import batches_like_loop, validate_gradient
from fedveil.training.validation import validate_behaviour, validate_layers
from fedveil.training.vectorized import VmapTrainer
from tests.test_python import people, train
from tests.test_vectorized import Shared
from tests.training import cohort_of, everyone, task_of

COHORT = cohort_of([3, 2])
LOCAL = LocalSgd(learning_rate=0.1)


@pytest.fixture(autouse=True)
def _same_parameters() -> None:
    torch.manual_seed(0)


class Through(nn.Module):
    """A linear layer whose outputs, or features, pass through a function."""

    def __init__(self, after: Callable[..., Tensor], columns: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(columns, 3)
        self.after = after

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.after(self.layer(features))
        return outputs


def with_backward(name: str, slope: Callable[[Tensor], Tensor], **more: Any) -> Any:
    """Return the identity with a backward pass of its own."""

    class Own(torch.autograd.Function):
        generate_vmap_rule = "vmap" not in more

        @staticmethod
        def forward(outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, slopes: Tensor) -> Tensor:
            return slope(slopes)

    Own.__name__ = name
    for key, value in more.items():
        setattr(Own, key, staticmethod(value))
    return Own.apply


class Words(nn.Module):
    """An embedding that is asked for by a function, not by a layer."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table, self.options = nn.Parameter(torch.randn(4, 3)), options

    def forward(self, features: Tensor) -> Tensor:
        words = (features > 0).long()
        return nn.functional.embedding(words, self.table, **self.options).sum(1)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = self.layer(features)
        return outputs


class Roots(nn.Module):
    """Finite outputs, but a slope of infinity: the root of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layer(features).square().sum(1, keepdim=True).sqrt().expand(-1, 3)
        return outputs


def written_over(outputs: Tensor) -> Tensor:
    after = outputs.sigmoid()
    return after.mul_(2.0)


def kept_slopes(store: list[Tensor]) -> Any:
    def keep(slopes: Tensor) -> Tensor:
        store.append(slopes.detach().clone())
        return slopes

    return with_backward("Kept", keep)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a sparse gradient": (lambda: Words(sparse=True), "table has a sparse gradient"),
    "frequencies": (lambda: Words(scale_grad_by_freq=True), "changes with the other records"),
    "a mean over the batch": (
        lambda: Through(with_backward("Mean", lambda slopes: slopes.mean(0).expand_as(slopes).clone())),
        "changes with the other records",
    ),
    "random slopes": (
        lambda: Through(with_backward("Random", lambda slopes: slopes * torch.rand_like(slopes))),
        "draws random numbers",
    ),
    "a state": (lambda: Through(kept_slopes([])), "wrote to its after"),
    "no slope": (Frozen, "no parameter that is trained reaches the loss"),
    "written over": (lambda: Through(written_over), "inplace operation"),
    "infinite slopes": (Roots, "not finite"),
    "a failing backward": (
        lambda: Through(with_backward("Fails", lambda slopes: {}["missing"])),  # type: ignore[index]
        "KeyError",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_gradient_to_bound_is_refused_before_it_is_trained(name: str) -> None:
    model, reason = REFUSED[name]
    task = Task(model=model(), loss=load_loss("cross_entropy"))
    for choose in (choose_trainer, can_vectorise_records):
        with pytest.raises(ModelError, match=reason):
            choose(task, LOCAL, cohort=COHORT) if choose is choose_trainer else choose(task, COHORT)


def test_nothing_is_charged_for_a_model_whose_gradient_fails(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="inplace operation"):
        train(tmp_path, nn.Sequential(Through(written_over, 3), nn.Linear(3, 2)))
    assert not list(tmp_path.rglob("ledger*"))


FITTING = {
    "linear": task_of("linear"),
    "dropout": task_of("mlp_groupnorm"),
    "shared, frozen, unused": Task(model=Shared(), loss=load_loss("cross_entropy")),
    "survival": Task(model=nn.Linear(6, 1), loss=load_loss("cox")),
    "words": Task(model=Words(), loss=load_loss("cross_entropy")),
    "bfloat16": Task(model=task_of("mlp").model, loss=load_loss("cross_entropy"), precision="bfloat16"),
}


@pytest.mark.parametrize("name", FITTING)
def test_models_with_gradients_pass_and_vmap_agrees_with_the_loop(name: str) -> None:
    cohort = COHORT
    if name == "survival":
        times = torch.rand(5, 2, generator=torch.Generator().manual_seed(0)).round()
        cohort = type(COHORT)(**{**vars(COHORT), "targets": times})
    with torch.no_grad():  # of a caller that evaluates models of its own
        validate_gradient(FITTING[name], cohort)
        assert batches_like_loop(FITTING[name], cohort)


def test_a_rule_for_vmap_that_computes_something_else_leaves_the_model_to_the_loop() -> None:
    def doubled(info: Any, dims: Any, outputs: Tensor) -> tuple[Tensor, int]:
        return outputs * 2, dims[0]

    own = with_backward("Doubled", lambda slopes: slopes, vmap=doubled)
    task = Task(model=Through(own), loss=load_loss("cross_entropy"))
    assert isinstance(choose_trainer(task, LOCAL, cohort=COHORT), LoopTrainer)
    with pytest.raises(ModelError, match="other gradients than the loop"):
        choose_trainer(task, LOCAL, TrainerOptions(name="vmap"), cohort=COHORT)
    with pytest.raises(ModelError, match="than the loop"):
        can_vectorise_records(task, COHORT)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_are_refused_by_the_option_that_is_wrong(layer: Any, option: str) -> None:
    with pytest.raises(ModelError, match=f"layer 0 is {layer.__name__}.*{option}=False"):
        Task(model=nn.Sequential(layer(4, 3, **{option: True})), loss=load_loss("cross_entropy"))


# --- models that are handed over ------------------------------------------------------------------------------------


class Holding(nn.Module):
    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.layer, self.thing = nn.Linear(3, 2), thing

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layer(features)
        return outputs


class Same(Holding):
    def __deepcopy__(self, memo: Any) -> "Same":
        return self


def pruned() -> nn.Module:
    model = nn.Linear(3, 2)
    prune.l1_unstructured(model, "weight", 0.5)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), "weight is computed from other tensors"),
        (pruned, "weight is computed from other tensors.*prune.remove"),
        (lambda: Holding(threading.Lock()), "thing is a lock"),
        (lambda: Holding({"queue": (i for i in range(3))}), "thing is a dict"),
        (lambda: Same(0), "returns no other module"),
        (lambda: nn.Linear(3, 2, device="meta"), "weight is on the meta device"),
    ],
    ids=["weight_norm", "pruned", "lock", "generator", "itself", "meta"],
)
def test_a_model_that_cannot_be_copied_is_refused_by_what_stands_in_the_way(
    model: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        objective(model(), people(), 0)
    with pytest.raises(ModelError, match=reason):
        Task(model=model(), loss=load_loss("cross_entropy"))


def test_an_open_file_in_a_model_or_a_loss_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        with pytest.raises(ModelError, match=r"model cannot be copied.*thing is a TextIOWrapper"):
            objective(Holding(log), people(), 0)
        with pytest.raises(ModelError, match=r"loss cannot be copied.*thing is a TextIOWrapper"):
            objective(nn.Linear(3, 2), people(), 0, Holding(log))


def test_what_an_error_advises_can_be_trained() -> None:
    removed = pruned()
    prune.remove(removed, "weight")
    for model in (
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        removed,
        Holding(torch.Generator()),
    ):
        task = objective(model, people(), 0).task
        validate_gradient(task, cohort_of([2], (3,), 2))


def test_a_model_in_data_parallel_is_the_model_within() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for wrapped in (nn.DataParallel(model), nn.DataParallel(nn.DataParallel(model))):
        found = objective(wrapped, people(), 0)
        assert found.section["name"] == "session:Sequential"
        assert found.section["sha256"] == model_digest(model)
        assert list(found.task.layout.names) == [name for name, _ in model.named_parameters()]
        assert unwrap(wrapped) is model
    with pytest.raises(ModelError, match="layer 0 is DataParallel: it spreads"):
        objective(nn.Sequential(nn.DataParallel(model)), people(), 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused_for_what_it_is() -> None:
    model = nn.Linear(3, 2)
    scripts = torch.jit.script(model), torch.jit.trace(model, torch.zeros(1, 3))
    for one in (*scripts, nn.Sequential(scripts[0])):
        with pytest.raises(ModelError, match="Python module it was made from"):
            objective(one, people(), 0)


def test_a_copy_shares_nothing_with_the_model() -> None:
    model = nn.Linear(3, 2)
    copied = copy_module(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert model.weight.abs().sum() > 0


class Recurrent(nn.Module):
    """A cell of PyTorch by itself, and its layer: of both vmap computes some operation slot by slot."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        states, _ = self.layer(features[:, :, None])
        outputs: Tensor = self.last(states[:, -1])
        return outputs


@pytest.mark.parametrize("norm", [False, True])
def test_pytorch_asks_nobody_to_report_a_slow_operation(norm: bool) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)) if norm else None
    model = layer or Recurrent(nn.LSTM(1, 4, batch_first=True))
    task, cohort = Task(model=model, loss=load_loss("cross_entropy")), cohort_of([3, 2], (3,), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = choose_trainer(task, LOCAL, cohort=cohort, bound=Clip(norm=1.0))
        place = (Clip(norm=1.0), ExperimentRandomness(0), ("round", 1))
        trainer.sums(TrainJob(task.initial(), cohort, *everyone(cohort), *place))
        batches_like_loop(task, cohort)


# --- torch.compile --------------------------------------------------------------------------------------------------


def test_what_the_compiler_hangs_on_a_parameter_is_no_state() -> None:
    task = task_of("mlp")
    parameter = next(iter(task.model.parameters()))
    with check_unchanged(task):
        parameter._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"wrote to its 1\.weight"), check_unchanged(task):
        parameter.seen = 3  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected:UserWarning")
def test_compiled_training_is_training_and_a_compiled_model_is_the_model_within(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = [{"trainer": {"name": "vmap", "compile": asked}} for asked in (False, True)]
    fedavg = {"method": fv.fedavg(), "delta": 1e-3}
    plain, compiled = (
        train(tmp_path / str(i), model, settings=one, **fedavg) for i, one in enumerate(settings)
    )
    wrapped = train(tmp_path / "wrapped", torch.compile(model), settings=settings[0], **fedavg)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(wrapped.model.state_dict()[name], value)
    with pytest.raises(ModelError, match="layer 0 is OptimizedModule: it is compiled"):
        objective(nn.Sequential(torch.compile(model)), people(), 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected:UserWarning")
def test_without_a_compiler_compiled_training_is_refused_before_the_first_round() -> None:
    import torch._inductor.config as inductor

    task = Task(model=Through(torch.tanh), loss=load_loss("cross_entropy"))
    options = TrainerOptions(name="vmap", compile=True)
    assert isinstance(choose_trainer(task, LOCAL, options), VmapTrainer)
    missing = {"cpp.cxx": ("there-is-no-such-compiler",), "force_disable_caches": True}
    with inductor.patch(missing), pytest.raises(ModelError, match=r"trainer\.compile = true: .*Compiler"):
        choose_trainer(task, LOCAL, options, cohort=COHORT)


# --- models that mix records, or hold a layer twice -------------------------------------------------------------------


class Outputs(torch.nn.Module):
    """A linear layer whose outputs a function changes."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.change = change

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.change(self.layer(features))


def raises(_: torch.Tensor) -> torch.Tensor:
    raise KeyError("a table of the model")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda z: torch.cumsum(z, 0), "changes with the other records"),
        (lambda z: torch.cumsum(z.flip(0), 0).flip(0), "changes with the other records"),
        (lambda z: torch.cat([z[:1], z[1:] + z[:-1]]), "changes with the other records"),
        (lambda z: torch.cat([z[:3], z[3:4] + z[2:3], z[4:]]), "changes with the other records"),
        (raises, "made-up records of shape .*raises .* raised KeyError$"),
    ],
)
def test_a_model_that_mixes_records_in_any_place_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    features = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    validate_behaviour(Outputs(torch.sigmoid), features)
    with pytest.raises(ModelError, match=reason):
        validate_behaviour(Outputs(change), features)


def test_a_layer_under_two_names_is_refused_and_a_tensor_under_two_names_is_not() -> None:
    layer, relu = torch.nn.Linear(4, 4), torch.nn.ReLU()
    with pytest.raises(ModelError, match="layers 0 and 2 are one Linear under two names"):
        validate_layers(torch.nn.Sequential(layer, relu, layer, relu))
    other = torch.nn.Linear(4, 4)
    other.weight = layer.weight
    validate_layers(torch.nn.Sequential(layer, relu, other, relu))


def test_a_gradient_hook_is_refused_and_not_ignored() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    validate_layers(model)
    handle = model[0].weight.register_hook(lambda gradient: gradient * 100)
    with pytest.raises(ModelError, match=r"0\.weight has a gradient hook"):
        validate_layers(model)
    handle.remove()
    validate_layers(model)

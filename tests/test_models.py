"""Shipped models, seeded initial states, and models that are refused."""

import pytest
import torch

from fedveil.errors import ConfigError, ModelError
from fedveil.randomness import ExperimentRandomness
from fedveil.training.losses import load_loss
from fedveil.training.models import MODELS, build_model
from fedveil.training.task import Task
from fedveil.training.validation import validate_behaviour, validate_layers

SEED = ExperimentRandomness(3)


def build(name: str, input_shape: tuple[int, ...] = (5,), n_outputs: int = 2) -> torch.nn.Module:
    return build_model(name, input_shape=input_shape, n_outputs=n_outputs, randomness=SEED)


@pytest.mark.parametrize(
    ("name", "input_shape", "n_outputs", "parameters"),
    [
        ("linear", (13,), 1, 14),
        ("linear", (39,), 1, 40),
        ("linear", (28, 28), 10, 7_850),
        ("mlp", (28, 28), 10, 25_450),
        ("mlp_32_16", (28, 28), 10, 25_818),
        ("cnn_6", (1, 28, 28), 10, 6_422),
        ("mlp_groupnorm", (30,), 2, 5_012),
        ("resnet_small_groupnorm", (3, 64, 64), 10, 78_378),
        ("resnet18_groupnorm", (3, 64, 64), 10, 11_181_642),
        ("cnn", (28, 28), 10, 21_840),
        ("cnn", (1, 28, 28), 10, 21_840),
        ("cnn", (784,), 10, 21_840),
    ],
)
def test_published_models_have_their_published_number_of_parameters(name, input_shape, n_outputs, parameters):
    model = build(name, input_shape, n_outputs)
    assert Task(model=model, loss=load_loss("cross_entropy")).dimension == parameters
    assert model(torch.zeros(3, *input_shape)).shape == (3, n_outputs)


def stored(model: torch.nn.Module) -> torch.Tensor:
    """Return parameters and buffers as one vector: the structure of trees is in buffers."""
    return torch.cat([one.double().reshape(-1) for one in model.state_dict().values()])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet18_groupnorm"))
        for name in sorted(MODELS)
    ],
)
def test_initial_state_depends_on_the_seed_and_leaves_torchs_stream_alone(name):
    image = (3, 32, 32)
    shapes = {"svhn_cnn": image, "lstm": (80,), "lstm_10": (80,)} | {
        one: image for one in MODELS if "resnet" in one
    }
    shape = shapes.get(name, (16, 16))
    before = torch.random.get_rng_state()
    first, again = (stored(build(name, shape)) for _ in range(2))
    other = build_model(name, input_shape=shape, n_outputs=2, randomness=ExperimentRandomness(4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, stored(other))


def custom(input_shape: tuple[int, ...], n_outputs: int) -> torch.nn.Module:
    return torch.nn.Linear(input_shape[0], n_outputs, bias=False)


def fixed() -> torch.nn.Module:
    return torch.nn.Linear(5, 2)


def no_module(input_shape: tuple[int, ...], n_outputs: int) -> int:
    return n_outputs


def test_a_users_own_factory():
    assert sum(p.numel() for p in build("tests.test_models:custom").parameters()) == 10
    assert sum(p.numel() for p in build("tests.test_models:fixed").parameters()) == 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "cnn"),
        ("nowhere:model", "nowhere"),
        ("tests.test_models:missing", "missing"),
    ],
)
def test_unknown_models_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        build(name)


def test_factories_that_make_no_module_are_refused():
    with pytest.raises(ModelError, match="int"):
        build("tests.test_models:no_module")


def test_a_cnn_needs_an_image():
    with pytest.raises(ModelError, match="16 x 16"):
        build("cnn", (30,))


@pytest.mark.parametrize(
    ("layer", "replacement"),
    [
        (torch.nn.BatchNorm1d(6), r"GroupNorm\(2, 6\)"),
        (torch.nn.BatchNorm2d(64), r"GroupNorm\(32, 64\)"),
        (torch.nn.SyncBatchNorm(4), r"GroupNorm\(4, 4\)"),
        (torch.nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
        (torch.nn.AlphaDropout(0.1), "torch.nn.Dropout"),
        (torch.nn.LSTM(3, 3, num_layers=2, dropout=0.1), "dropout=0"),
        (torch.nn.LazyLinear(3), "shape"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_layers_that_mix_records_are_refused_with_their_replacement(layer, replacement):
    with pytest.raises(ModelError, match=replacement):
        validate_layers(torch.nn.Sequential(torch.nn.Identity(), layer))
    with pytest.raises(ModelError, match="layer 1"):
        Task(model=torch.nn.Sequential(torch.nn.Identity(), layer), loss=load_loss("cross_entropy"))


class Mixing(torch.nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features - features.mean(0)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.seen += len(features)
        return features


class Noisy(torch.nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(features, 0.5, training=self.training)


class Summary(torch.nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Mixing(), "other records"),
        (Counting(), "writes to its seen"),
        (Noisy(), "random numbers"),
        (Summary(), "first axis"),
        (torch.nn.Linear(7, 2), r"shape \(5,\)"),
    ],
)
def test_behaviour_that_no_list_of_layers_finds_is_refused(model, message):
    features = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match=message):
        validate_behaviour(model, features)


def test_good_layers_pass():
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.GroupNorm(2, 8), torch.nn.Dropout(0.5), torch.nn.LayerNorm(8)
    )
    validate_layers(model)
    validate_behaviour(model, torch.randn(4, 5))


def test_the_vector_is_the_parameters_in_order_and_views_share_it():
    model = build("mlp")
    task = Task(model=model, loss=load_loss("cross_entropy"))
    vector = task.initial()
    assert torch.equal(vector, torch.nn.utils.parameters_to_vector(model.parameters()))
    named = task.layout.unflatten(vector)
    assert list(named) == [name for name, _ in model.named_parameters()]
    next(iter(named.values())).fill_(7.0)
    assert (vector[: 5 * 32] == 7.0).all()
    stacked = task.layout.unflatten(torch.stack([vector, 2 * vector]))
    assert all(torch.equal(stacked[name][1], 2 * named[name]) for name in named)
    model.load_state_dict(task.state(vector))


def test_prediction_is_evaluation_mode_of_the_vector_not_of_the_module():
    model = build("mlp_groupnorm")
    task = Task(model=model, loss=load_loss("cross_entropy"))
    features = torch.randn(10, 5)
    vector = task.initial() * 0.5
    outputs = task.predict(vector, features, batch_size=3)
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        torch.testing.assert_close(outputs, model.eval()(features))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(2, 2).double(), "float64"),
        (torch.nn.Linear(2, 2).requires_grad_(False), "no trainable"),
    ],
)
def test_tasks_without_float32_parameters_to_train_are_refused(model, message):
    with pytest.raises(ModelError, match=message):
        Task(model=model, loss=load_loss("cross_entropy"))


def test_a_factory_that_fails_is_no_fault_of_the_program():
    said = r"model math:isclose: the factory failed for records of shape .* \(TypeError: "
    with pytest.raises(ModelError, match=said):
        build("math:isclose")

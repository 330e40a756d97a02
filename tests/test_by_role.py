"""Shakespeare by role and SVHN's subset, against the published statistics; and the two networks of DP-Fed-LS."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.io import loadmat, savemat

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import data_set, load
from fedveil.data.catalogue.data_set import DataFile, digest_of
from fedveil.data.catalogue.shakespeare import ALPHABET, WINDOW, encode, roles_of
from fedveil.data.catalogue.svhn import read_mat
from fedveil.errors import ConfigError, DataError, ModelError
from fedveil.privacy.bounds import Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.models import ChannelNorm, build_model
from fedveil.training.pretrained import PublicModel, take_parameters
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import TrainJob
from fedveil.training.trainer_choice import choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests.synthetic import register, serve, write_images, write_play
from tests.training import cohort_of, everyone

CLIENTS = Allocation(law="clients")


def test_roles_are_those_of_leaf(data_folder: Path) -> None:
    path = data_folder / "shakespeare" / "pg100.txt"
    if not path.is_file():
        pytest.skip("Shakespeare's text is not here")
    roles = roles_of(path.read_text(encoding="utf-8-sig"))
    samples = np.array([max(0, len(said) - WINDOW) for said in roles.values()])
    assert len(roles) == 1144
    assert (samples > 0).sum() == 1129
    assert samples.sum() == 4_226_158
    assert ((samples * 7) // 10 >= 100).sum() == 975
    assert set("".join(roles.values())) <= set(ALPHABET)


def test_clients_are_roles_and_windows_are_in_the_order_of_the_play(data_folder: Path) -> None:
    population = load("shakespeare", allocation=CLIENTS, n_users=12, folder=data_folder)
    train = population.train
    assert population.n_silos == population.n_users == 12
    assert np.array_equal(train.silo, train.user)
    assert train.features.shape[1:] == (WINDOW,)
    assert np.bincount(train.user).min() >= 100
    same = train.user[1:] == train.user[:-1]
    np.testing.assert_array_equal(train.features[1:, :-1][same], train.features[:-1, 1:][same])
    np.testing.assert_array_equal(train.features[1:, -1][same], train.targets[:-1][same])
    assert any("12 of the 975 roles" in note for note in population.notes)


def test_a_small_play() -> None:
    text = """first line
THE SONNETS
by William Shakespeare


THE PLAY

by William Shakespeare

  ANNA. One line,
    and   one more.
                Exit
  Bert. Mine.
  anna. Again.
  BERT. And mine.
    Twice."""
    assert roles_of(text) == {
        "THE PLAY: ANNA": "One line, and one more. Exit Again. ",
        "THE PLAY: BERT": "Mine. And mine. Twice. ",
    }
    assert encode("a\n~").tolist() == [ALPHABET.index("a"), 0, 80]
    with pytest.raises(DataError, match="Gutenberg"):
        roles_of("nothing here")


def test_more_roles_than_there_are_and_other_allocations_are_refused(data_folder: Path) -> None:
    with pytest.raises(ConfigError, match="975 roles"):
        load("shakespeare", allocation=CLIENTS, n_users=976, folder=data_folder)
    with pytest.raises(ConfigError, match="clients"):
        load("shakespeare", allocation=Allocation(law="zipf"), n_users=10, folder=data_folder)


@pytest.mark.slow
def test_the_subset_of_svhn_says_that_it_is_one(data_folder: Path) -> None:
    population = load("svhn_subset", allocation=CLIENTS, n_users=100, folder=data_folder)
    assert population.train.features.shape == (8000, 3, 32, 32)
    assert population.test_targets.shape == (2000,)
    assert "subset" in population.notes[0]
    assert population.train.targets[:0].dtype == np.int64


def test_clients_of_a_made_up_play_are_its_roles_and_no_more_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("shakespeare", write_play(tmp_path), monkeypatch)
    population = load("shakespeare", allocation=CLIENTS, n_users=3, folder=tmp_path)
    train = population.train
    assert [name.rpartition(" ")[2] for name in population.silo_names] == ["ANNA", "BERT", "CLARA"]
    assert np.array_equal(train.silo, train.user)
    assert train.features.shape[1:] == (WINDOW,)
    assert np.bincount(train.user).min() >= 100
    same = train.user[1:] == train.user[:-1]
    np.testing.assert_array_equal(train.features[1:, :-1][same], train.features[:-1, 1:][same])
    np.testing.assert_array_equal(train.features[1:, -1][same], train.targets[:-1][same])
    two = load("shakespeare", allocation=CLIENTS, n_users=2, folder=tmp_path)
    assert any("2 of the 3 roles" in note for note in two.notes)
    with pytest.raises(ConfigError, match="3 roles"):
        load("shakespeare", allocation=CLIENTS, n_users=4, folder=tmp_path)
    with pytest.raises(ConfigError, match="clients"):
        load("shakespeare", allocation=Allocation(law="zipf"), n_users=2, folder=tmp_path)


def test_made_up_images_take_the_shape_of_svhn_and_pixels_from_minus_one_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_images(tmp_path)
    for name in ("mnist_rgb", "mnist_canonical", "mnist_centred"):
        serve(name, files, monkeypatch)
    colour, plain, centred = (
        load(name, allocation=CLIENTS, n_users=6, folder=tmp_path)
        for name in ("mnist_rgb", "mnist_canonical", "mnist_centred")
    )
    assert colour.train.features.shape == (60, 3, 32, 32)
    for channel in range(3):
        framed = colour.train.features[:, channel]
        np.testing.assert_array_equal(framed[:, 2:30, 2:30], plain.train.features[:, 0])
        assert framed.sum() == plain.train.features.sum()
    np.testing.assert_array_equal(centred.train.features, plain.train.features)
    assert np.bincount(centred.train.user).tolist() == [10] * 6
    scaled = centred.scale.apply(centred.train.features)
    assert (scaled.min(), scaled.max()) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "parameters"),
    [
        ("svhn_cnn", (3, 32, 32), 10, 3_431_754),
        ("lstm", (80,), 82, 820_450),
        ("lstm_10", (80,), 82, 820_450),
    ],
)
def test_networks_have_the_published_size(
    name: str, shape: tuple[int, ...], outputs: int, parameters: int
) -> None:
    model = build_model(name, input_shape=shape, n_outputs=outputs, randomness=ExperimentRandomness(0))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    with pytest.raises(ModelError):
        build_model(name, input_shape=(2, 2), n_outputs=outputs, randomness=ExperimentRandomness(0))


def test_the_loop_trains_an_lstm_as_torch_does() -> None:
    model = build_model("lstm", input_shape=(6,), n_outputs=9, randomness=ExperimentRandomness(0))
    task = Task(model=model, loss=load_loss("cross_entropy"))
    cohort = cohort_of([3], n_classes=9)
    cohort.features.mul_(4).add_(4).clamp_(0, 8)
    local = LocalSgd(learning_rate=0.5, epochs=2)
    trainer = choose_trainer(task, local, cohort=cohort)
    assert isinstance(trainer, LoopTrainer)
    sums = trainer.sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), ExperimentRandomness(0), ())
    )
    rows = torch.from_numpy(cohort.groups.members(0))
    start = task.initial()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(cohort.features[rows]), cohort.targets[rows]).backward()
        optimizer.step()
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start
    torch.testing.assert_close(sums.total[0].float(), moved, rtol=1e-4, atol=1e-6)
    assert float(moved.abs().max()) > 0


def test_the_short_lstm_is_the_lstm_on_the_last_ten_characters() -> None:
    short = build_model("lstm_10", input_shape=(80,), n_outputs=82, randomness=ExperimentRandomness(0))
    whole = build_model("lstm", input_shape=(80,), n_outputs=82, randomness=ExperimentRandomness(0))
    whole.load_state_dict(short.state_dict())
    codes = torch.randint(0, 82, (5, 80), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(short(codes), whole(codes[:, -10:]))
    assert not torch.allclose(short(codes), whole(codes[:, -9:]))


def test_channel_norm_is_local_response_normalisation_over_four_channels() -> None:
    images = torch.randn(3, 7, 5, 4, generator=torch.Generator().manual_seed(0)).mul_(60).requires_grad_()
    ours, theirs = ChannelNorm()(images), torch.nn.LocalResponseNorm(4)(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(theirs, images, rtol=1e-2)  # the law has a visible effect at this scale
    slopes = [torch.autograd.grad(out.square().sum(), images)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-3)


def test_the_svhn_network_is_trained_many_at_a_time() -> None:
    model = build_model("svhn_cnn", input_shape=(3, 8, 8), n_outputs=10, randomness=ExperimentRandomness(0))
    task, cohort = Task(model=model, loss=load_loss("cross_entropy")), cohort_of([2, 1], (3, 8, 8), 10)
    local = LocalSgd(learning_rate=0.1, epochs=1, batch_size=2, projection=0.1)
    trainer = choose_trainer(task, local, cohort=cohort)
    assert isinstance(trainer, VmapTrainer)
    job = TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), ExperimentRandomness(0), ())
    oracle = LoopTrainer(task=task, local=local).sums(job)
    torch.testing.assert_close(trainer.sums(job).total, oracle.total, rtol=1e-3, atol=1e-5)


def written_mat(folder: Path, name: str, count: int, **changes: np.ndarray) -> Path:
    random = np.random.default_rng(count)
    content = {
        "X": random.integers(0, 256, (32, 32, 3, count), dtype=np.uint8),
        "y": (np.arange(count) % 10 + 1).astype(np.uint8)[:, None],
    }
    savemat(folder / name, content | changes)
    return folder / name


def test_the_canonical_files_of_svhn_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "svhn").mkdir()
    counts = {"train_32x32.mat": 11, "extra_32x32.mat": 9, "test_32x32.mat": 5}
    paths = [written_mat(tmp_path / "svhn", name, count) for name, count in counts.items()]
    with pytest.raises(DataError, match=r"train_32x32\.mat is not the file it should be: its md5 is"):
        load("svhn", allocation=CLIENTS, n_users=4, folder=tmp_path)
    known = tuple(DataFile(path=f"svhn/{path.name}", md5=digest_of(path, "md5")) for path in paths)
    register(replace(data_set("svhn"), variants=(known,)), monkeypatch)
    population = load("svhn", allocation=CLIENTS, n_users=4, folder=tmp_path)
    assert population.train.features.shape == (20, 3, 32, 32)
    assert population.test_features.shape == (5, 3, 32, 32)
    assert population.train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    pixels = loadmat(paths[1])["X"]
    np.testing.assert_array_equal(population.train.features[11 + 3], pixels[:, :, :, 3].transpose(2, 0, 1))
    assert not any("subset" in note for note in population.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, "no 32 x 32 colour images"),
        ({"X": np.zeros((32, 32, 3, 5), np.float64)}, "no 32 x 32 colour images"),
        ({"y": np.full((5, 1), 11, np.uint8)}, r"labels are not all in 1 \.\. 10"),
    ],
)
def test_a_file_that_is_not_svhns_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_mat(written_mat(tmp_path, "a.mat", 5, **changes))
    (tmp_path / "b.mat").write_bytes(b"no such file format " * 20)
    with pytest.raises(DataError, match="not one of SVHN's"):
        read_mat(tmp_path / "b.mat")


@pytest.mark.slow
def test_mnist_takes_the_shape_of_svhn(data_folder: Path) -> None:
    colour = load("mnist_rgb", allocation=CLIENTS, n_users=10, folder=data_folder)
    plain = load("mnist_canonical", allocation=CLIENTS, n_users=10, folder=data_folder)
    assert colour.train.features.shape == (20_000, 3, 32, 32)
    for channel in range(3):
        framed = colour.train.features[:50, channel]
        np.testing.assert_array_equal(framed[:, 2:30, 2:30], plain.train.features[:50, 0])
        assert framed.sum() == plain.train.features[:50].sum()
    assert colour.scale == load("svhn_subset", allocation=CLIENTS, n_users=10, folder=data_folder).scale


def test_a_public_model_gives_the_layers_that_are_asked_for(tmp_path: Path) -> None:
    def fresh(seed: int) -> dict[str, torch.Tensor]:
        return dict(cnn(seed).named_parameters())

    def cnn(seed: int) -> torch.nn.Module:
        return build_model("cnn", input_shape=(16, 16), n_outputs=3, randomness=ExperimentRandomness(seed))

    path = tmp_path / "public.safetensors"
    save_file({name: value.detach() for name, value in fresh(1).items()}, path)
    whole, some = cnn(0), cnn(0)
    take_parameters(whole, PublicModel.read(path))
    take_parameters(some, PublicModel.read(path), ["2", "5"])
    for name, value in whole.named_parameters():
        assert torch.equal(value, fresh(1)[name])
    for name, value in some.named_parameters():
        assert torch.equal(value, fresh(1 if name.split(".")[0] in ("2", "5") else 0)[name])
    with pytest.raises(
        ModelError, match=r"initial_layers: no layer '3' with parameters; there are: 2, 5, 10, 13"
    ):
        take_parameters(cnn(0), PublicModel.read(path), ["3"])
    with pytest.raises(ModelError, match=r"tensor '0\.weight' is missing, the model needs \(64, 3, 5, 5\)"):
        take_parameters(
            build_model("svhn_cnn", input_shape=(3, 8, 8), n_outputs=3, randomness=ExperimentRandomness(0)),
            PublicModel.read(path),
        )
    save_file({name: value.detach() * float("nan") for name, value in fresh(1).items()}, path)
    with pytest.raises(ModelError, match="has a NaN"):
        take_parameters(cnn(0), PublicModel.read(path))
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"model\.initial: .*public\.safetensors cannot be read"):
        take_parameters(cnn(0), PublicModel.read(path))
    with pytest.raises(ModelError, match="cannot be read"):
        PublicModel.read(tmp_path / "none.safetensors")


def test_mnist_centred_is_the_canonical_split_with_pixels_from_minus_one_to_one(data_folder: Path) -> None:
    centred = load("mnist_centred", allocation=CLIENTS, n_users=30, folder=data_folder)
    plain = load("mnist_canonical", allocation=CLIENTS, n_users=30, folder=data_folder)
    np.testing.assert_array_equal(centred.train.features[:50], plain.train.features[:50])
    assert sorted(set(np.bincount(centred.train.user).tolist())) == [1666, 1667]
    scaled = centred.scale.apply(centred.train.features[:50])
    assert (scaled.min(), scaled.max()) == (-1.0, 1.0)

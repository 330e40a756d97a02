"""Imagenette, from an archive and as a subset, and residual networks on images that are too small."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.catalogue.imagenette import read_archive
from fedveil.errors import DataError, ModelError
from fedveil.randomness import ExperimentRandomness
from fedveil.training.models import build_model


def test_a_thousand_images_are_handed_to_ten_clients(data_folder: Path) -> None:
    if not (data_folder / "imagenette_subset" / "imagenette64_sample.npz").is_file():
        pytest.skip("the subset is not in the data folder")
    law = Allocation(law="dirichlet", concentration=0.5)
    population = load("imagenette_subset", allocation=law, n_users=10, folder=data_folder)
    assert population.train.features.shape == (1000, 3, 64, 64)
    assert population.test_features.shape == (300, 3, 64, 64)
    assert np.bincount(population.test_targets).tolist() == [30] * 10
    assert population.n_silos == 10
    assert population.records_per_silo().sum() == 1000
    assert population.silo_names[3] == "client 3"


def archive(path: Path, side: int) -> Path:
    """Six pictures of one colour each, whose order in the archive is not that of their names."""
    image = pytest.importorskip("PIL.Image")
    with tarfile.open(path, "w:gz") as target:
        for part, label, name, grey in (
            ("val", "n02", "b", 60),
            ("train", "n02", "a", 30),
            ("train", "n01", "z", 20),
            ("train", "n01", "c", 10),
            ("val", "n01", "a", 40),
            ("val", "n02", "a", 50),
        ):
            content = io.BytesIO()
            image.new("L", (side, side), grey).save(content, "JPEG")
            member = tarfile.TarInfo(f"imagenette2-64/{part}/{label}/{name}.JPEG")
            member.size = content.tell()
            content.seek(0)
            target.addfile(member, content)
    return path


def test_pictures_come_in_the_order_of_their_names_in_three_colours(tmp_path: Path) -> None:
    (train, labels), (test, test_labels) = read_archive(archive(tmp_path / "images.tgz", 64))
    assert train.shape == (3, 3, 64, 64)
    assert train.dtype == np.uint8
    assert train[:, :, 7, 9].tolist() == [[10] * 3, [20] * 3, [30] * 3]
    assert test[:, 0, 0, 0].tolist() == [40, 50, 60]
    assert labels.tolist() == [0, 0, 1]
    assert test_labels.tolist() == [0, 1, 1]


def test_a_picture_of_another_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"n01/c\.JPEG is not of 64 x 64 pixels"):
        read_archive(archive(tmp_path / "images.tgz", 32))


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"install fedveil\[images\]"):
        read_archive(tmp_path / "images.tgz")


@pytest.mark.slow
def test_all_images_are_handed_out(data_folder: Path) -> None:
    if not (data_folder / "imagenette_subset" / "imagenette2-64.tgz").is_file():
        pytest.skip("the images are not in the data folder")
    population = load("imagenette", allocation=Allocation(law="clients"), n_users=10, folder=data_folder)
    assert population.test_features.shape == (3925, 3, 64, 64)
    assert sorted(population.records_per_silo()) == [946] + [947] * 9
    assert np.bincount(population.train.targets).tolist() == [
        963,
        955,
        993,
        858,
        941,
        956,
        961,
        931,
        951,
        960,
    ]


@pytest.mark.parametrize("name", ["resnet_small_groupnorm", "resnet18_groupnorm"])
@pytest.mark.parametrize("shape", [(64,), (3, 31, 64)])
def test_residual_networks_say_which_images_they_take(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="at least 32 x 32"):
        build_model(name, input_shape=shape, n_outputs=10, randomness=ExperimentRandomness(0))

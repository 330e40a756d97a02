"""The subset of Imagenette, and residual networks on images that are too small."""

from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import ModelError
from fedveil.local.models import build_model
from fedveil.population.allocation import Allocation
from fedveil.population.catalogue import load
from fedveil.randomness import ExperimentRandomness


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


@pytest.mark.parametrize("name", ["resnet_small_groupnorm", "resnet18_groupnorm"])
@pytest.mark.parametrize("shape", [(64,), (3, 31, 64)])
def test_residual_networks_say_which_images_they_take(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="at least 32 x 32"):
        build_model(name, input_shape=shape, n_outputs=10, randomness=ExperimentRandomness(0))

"""Imagenette, resized to 64 x 64: the first images of each of ten classes of ImageNet."""

from typing import Final

import numpy as np

from fedveil.errors import DataError
from fedveil.population.catalogue.data_set import DataSet, Request
from fedveil.population.catalogue.files import DataFile, Store
from fedveil.population.records import Affine, Population, Records

_SIDE: Final = 64


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    path = source.path(files[0])
    with np.load(path, allow_pickle=False) as stored:
        train, test = (
            np.ascontiguousarray(stored[key].transpose(0, 3, 1, 2)) for key in ("X_train", "X_val")
        )
        labels, test_labels = (stored[key].astype(np.int64) for key in ("y_train", "y_val"))
    if train.shape[1:] != (3, _SIDE, _SIDE):
        raise DataError(f"{path} holds no {_SIDE} x {_SIDE} colour images")
    user, silo, silo_names = request.hand_out(labels)
    return Population(
        name="imagenette_subset",
        train=Records(features=train, targets=labels, silo=silo, user=user),
        test_features=test,
        test_targets=test_labels,
        n_users=request.n_users,
        silo_names=silo_names,
        task="classification",
        n_classes=10,
        scale=Affine(factor=2 / 255, shift=-1.0),
        notes=(
            "A subset, resized: 100 training and 30 validation images of each class, 64 x 64 pixels. Published "
            "experiments train on 9,469 images of 224 x 224; compare methods on this subset with one another only.",
            "Pixels are scaled from 0 .. 255 to -1 .. 1: nothing is fitted on records. Images are neither cropped nor "
            "flipped at random.",
        ),
    )


IMAGENETTE_SUBSET = DataSet(
    name="imagenette_subset",
    title="Imagenette (ten classes of ImageNet), 64 x 64 pixels, three colours (a subset)",
    records="1,300: 1,000 for training, 300 for testing",
    terms="Apache 2.0 for the collection (J. Howard, https://github.com/fastai/imagenette); the pictures under "
    "ImageNet's terms: non-commercial research and education.",
    variants=(
        (
            DataFile(
                path="imagenette_subset/imagenette64_sample.npz",
                sha256="418c4c4a8fc8e899d3f535aacadccde6b580b4267133585c2b5f7b4222fd4b63",
            ),
        ),
    ),
    build=_build,
    model="resnet_small_groupnorm",
)

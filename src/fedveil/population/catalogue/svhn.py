"""SVHN, cropped digits: the part of the test images that is at hand, as a data set of its own."""

import numpy as np

from fedveil.errors import DataError
from fedveil.population.catalogue.data_set import DataSet, Request
from fedveil.population.catalogue.files import DataFile, Store
from fedveil.population.records import Affine, Population, Records

TRAIN_RECORDS = 8_000


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    path = source.path(files[0])
    with np.load(path, allow_pickle=False) as stored:
        if stored["X"].shape[1:] != (32, 32, 3):
            raise DataError(f"{path} holds no 32 x 32 colour images")
        images = np.ascontiguousarray(stored["X"].transpose(0, 3, 1, 2))
        labels = stored["y"].astype(np.int64)
    user, silo, silo_names = request.hand_out(labels[:TRAIN_RECORDS])
    return Population(
        name="svhn_subset",
        train=Records(features=images[:TRAIN_RECORDS], targets=labels[:TRAIN_RECORDS], silo=silo, user=user),
        test_features=images[TRAIN_RECORDS:],
        test_targets=labels[TRAIN_RECORDS:],
        n_users=request.n_users,
        silo_names=silo_names,
        task="classification",
        n_classes=10,
        scale=Affine(factor=2 / 255, shift=-1.0),
        notes=(
            "A subset: the first 10,000 SVHN test images, 8,000 of them for training. Published experiments train on "
            "604,388 images; compare methods on this subset with one another only.",
            "Pixels are scaled from 0 .. 255 to -1 .. 1: nothing is fitted on records. Images are not cropped at "
            "random, as they are in the published experiments.",
        ),
    )


SVHN_SUBSET = DataSet(
    name="svhn_subset",
    title="Street View House Numbers, 32 x 32 pixels, three colours (a subset)",
    records="10,000 (a subset of the canonical test images): 8,000 for training, 2,000 for testing",
    terms="Non-commercial use only. Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu, A. Y. Ng, Reading Digits in "
    "Natural Images with Unsupervised Feature Learning, NIPS workshop 2011.",
    variants=(
        (
            DataFile(
                path="svhn_subset/svhn_test_first10000.npz",
                sha256="ff37b16545786b8ddfef4498f439644cb295ddfdd673680e5743b9ce62221c8c",
            ),
        ),
    ),
    build=_build,
)

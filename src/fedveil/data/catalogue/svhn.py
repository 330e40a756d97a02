"""SVHN, cropped digits: the canonical files, and a subset of the test images as a data set of its own."""

from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from jaxtyping import Int64, UInt8
from scipy.io import loadmat

from fedveil.data.catalogue.data_set import DataFile, DataSet, Request, Store
from fedveil.data.records import Population
from fedveil.errors import DataError

SUBSET_RECORDS: Final = 8_000
_PIXELS_NOTE = (
    "Pixels are scaled from 0 .. 255 to -1 .. 1: nothing is fitted on records. Images are not cropped at random, as "
    "they are in the published experiments."
)


def read_mat(path: Path) -> tuple[UInt8[np.ndarray, "n 3 32 32"], Int64[np.ndarray, " n"]]:
    """Read a canonical file: ``X`` (32, 32, 3, n) uint8 and ``y`` (n, 1) with 10 for the digit 0.

    Returns:
        (n, 3, 32, 32) uint8 images, and (n,) int64 labels in 0 .. 9.

    Raises:
        DataError: the file does not have this form.
    """
    try:
        stored = loadmat(path, variable_names=("X", "y"))
        images, labels = stored["X"], stored["y"].ravel().astype(np.int64)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path} is not one of SVHN's .mat files of cropped digits: {error}") from None
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        _no_images(path)
    if len(labels) and not (labels.min() >= 1 and labels.max() <= 10):
        raise DataError(f"{path}: labels are not all in 1 .. 10")
    return np.ascontiguousarray(
        images.transpose(3, 2, 0, 1)
    ), labels % 10  # the files label the digit 0 as 10


def _no_images(path: Path) -> NoReturn:
    raise DataError(f"{path} holds no 32 x 32 colour images")


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    (train, train_labels), (extra, extra_labels), (test, test_labels) = (
        read_mat(source.path(file)) for file in files
    )
    return request.ten_classes(
        "svhn",
        (np.concatenate((train, extra)), np.concatenate((train_labels, extra_labels))),
        (test, test_labels),
        notes=(
            "Clients hold the canonical training and extra images. Tests are on all 26,032 test images, of which the "
            "published experiments keep 10,000 for validation.",
            _PIXELS_NOTE,
        ),
    )


def _build_subset(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    path = source.path(files[0])
    with np.load(path, allow_pickle=False) as stored:
        if stored["X"].shape[1:] != (32, 32, 3):
            _no_images(path)
        images = np.ascontiguousarray(stored["X"].transpose(0, 3, 1, 2))
        labels = stored["y"].astype(np.int64)
    return request.ten_classes(
        "svhn_subset",
        (images[:SUBSET_RECORDS], labels[:SUBSET_RECORDS]),
        (images[SUBSET_RECORDS:], labels[SUBSET_RECORDS:]),
        public_test=False,
        notes=(
            "A subset: the first 10,000 SVHN test images, 8,000 of them for training. Published experiments train on "
            "604,388 images; compare methods on this subset with one another only.",
            _PIXELS_NOTE,
        ),
    )


_TERMS = (
    "Non-commercial use only. Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu, A. Y. Ng, Reading Digits in "
    "Natural Images with Unsupervised Feature Learning, NIPS workshop 2011, http://ufldl.stanford.edu/housenumbers/."
)

SVHN = DataSet(
    name="svhn",
    title="Street View House Numbers, 32 x 32 pixels, three colours",
    records="630,420: 73,257 training and 531,131 extra images for training, 26,032 for testing",
    terms=_TERMS,
    variants=(
        (
            DataFile(path="svhn/train_32x32.mat", md5="e26dedcc434d2e4c54c9b2d4a06d8373"),
            DataFile(path="svhn/extra_32x32.mat", md5="a93ce644f1a588dc4d68dda5feec44a7"),
            DataFile(path="svhn/test_32x32.mat", md5="eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
    build=_build,
    model="svhn_cnn",
)
SVHN_SUBSET = DataSet(
    name="svhn_subset",
    title="Street View House Numbers, 32 x 32 pixels, three colours (a subset)",
    records="10,000 (a subset of the canonical test images): 8,000 for training, 2,000 for testing",
    terms=_TERMS,
    variants=(
        (
            DataFile(
                path="svhn_subset/svhn_test_first10000.npz",
                sha256="ff37b16545786b8ddfef4498f439644cb295ddfdd673680e5743b9ce62221c8c",
            ),
        ),
    ),
    build=_build_subset,
    model="svhn_cnn",
)

"""MNIST in the preparations of the ULDP-FL, DP-Fed-LS and CEPAM experiments, and in the shape of SVHN."""

import gzip
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fedveil.data.catalogue.data_set import CENTRED, LOCAL_TEST_NOTE, DataFile, DataSet, Request, Store
from fedveil.data.records import Affine, Population, Records
from fedveil.data.splits import local_tests, stratified_holdout
from fedveil.errors import DataError

TEST_RECORDS = 10_000
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081
CANONICAL_RECORDS = 50_000
RGB_RECORDS = 20_000
_UNSIGNED_BYTES = 0x08
# (x / 255 - mean) / std as one affine map of the stored bytes.
_SCALE = Affine(factor=1 / (255 * PIXEL_STD), shift=-PIXEL_MEAN / PIXEL_STD)
_CENTRED_NOTE = "Pixels are scaled from 0 .. 255 to -1 .. 1: nothing is fitted on records."
_SCALE_NOTE = (
    f"Pixels are normalised by mean {PIXEL_MEAN} and standard deviation {PIXEL_STD}, published figures of the "
    "training images: they depend on the data and are not covered by the guarantee."
)


def read_idx(path: Path) -> UInt8[np.ndarray, "n *shape"]:
    """Read a gzipped idx file of unsigned bytes.

    The format is: two zero bytes, the type 8, the number of dimensions, their sizes as big-endian uint32, the values.

    Raises:
        DataError: the file does not have this format.
    """
    with gzip.open(path) as stream:
        content = stream.read()
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(int).tolist()
    if content[:3] != bytes((0, 0, _UNSIGNED_BYTES)) or len(content) - start != int(np.prod(shape)):
        raise DataError(f"{path} is not an idx file of unsigned bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    train_images, train_labels, test_images, test_labels = (read_idx(source.path(file)) for file in files)
    images = np.concatenate((train_images, test_images))[:, None]
    labels = np.concatenate((train_labels, test_labels)).astype(np.int64)
    randomness = request.randomness
    test = stratified_holdout(labels, TEST_RECORDS, randomness.numpy("mnist", "test"))
    rows = np.flatnonzero(~test)
    user, silo, silo_names = request.allocate(labels[rows])
    in_training = ~local_tests(silo, labels[rows], randomness.numpy("mnist", "local test"))
    return Population(
        name="mnist",
        train=Records(
            features=images[rows[in_training]],
            targets=labels[rows[in_training]],
            silo=silo[in_training],
            user=user[in_training],
        ),
        test_features=images[test],
        test_targets=labels[test],
        n_users=request.n_users,
        silo_names=silo_names,
        task="classification",
        n_classes=10,
        scale=_SCALE,
        notes=(
            "The canonical 60,000 and 10,000 images are merged and split again by the seed, as published.",
            _SCALE_NOTE,
            LOCAL_TEST_NOTE,
        ),
    )


def _canonical(
    request: Request, source: Store, files: tuple[DataFile, ...], *, name: str, scale: Affine, note: str
) -> Population:
    """Return the canonical split, with the pixels scaled in one of two published ways."""
    train_images, train_labels, test_images, test_labels = (read_idx(source.path(file)) for file in files)
    return request.ten_classes(
        name,
        (train_images[:CANONICAL_RECORDS, None], train_labels[:CANONICAL_RECORDS].astype(np.int64)),
        (test_images[:, None], test_labels.astype(np.int64)),
        scale=scale,
        notes=(
            "Clients hold the first 50,000 canonical training images; the last 10,000, the published validation "
            "set, are not used. Tests are on all 10,000 canonical test images.",
            note,
        ),
    )


def _build_rgb(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    train_images, train_labels, test_images, test_labels = (read_idx(source.path(file)) for file in files)
    return request.ten_classes(
        "mnist_rgb",
        (_as_colour(train_images[:RGB_RECORDS]), train_labels[:RGB_RECORDS].astype(np.int64)),
        (_as_colour(test_images), test_labels.astype(np.int64)),
        notes=(
            f"The first {RGB_RECORDS:,} canonical training images, with a margin of two pixels and three equal "
            "colours: the shape of SVHN, to pre-train networks for it.",
            _CENTRED_NOTE,
        ),
    )


def _as_colour(images: UInt8[np.ndarray, "n 28 28"]) -> UInt8[np.ndarray, "n 3 32 32"]:
    """Pad images to 32 x 32 pixels and repeat them in three equal colours."""
    framed = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return np.ascontiguousarray(np.repeat(framed[:, None], 3, axis=1))


def _file(name: str, sha256: str) -> DataFile:
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    return DataFile(path=f"mnist/{name}", sha256=sha256, urls=tuple(mirror + name for mirror in mirrors))


_VARIANTS = (
    (
        _file(
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _file(
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _file(
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _file(
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)
_TERMS = (
    "CC BY-SA 3.0, as commonly stated. Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to "
    "document recognition, Proc. IEEE 86(11), 1998."
)

MNIST = DataSet(
    name="mnist",
    title="MNIST handwritten digits, 28 x 28 pixels",
    records="70,000: 60,000 for training (of which silos set 6,000 aside), 10,000 for testing",
    terms=_TERMS,
    variants=_VARIANTS,
    build=_build,
    model="cnn",
)
MNIST_CANONICAL = DataSet(
    name="mnist_canonical",
    title="MNIST in its canonical split, as the DP-Fed-LS experiments use it",
    records="60,000: the first 50,000 training images for clients, 10,000 for testing",
    terms=_TERMS,
    variants=_VARIANTS,
    build=partial(_canonical, name="mnist_canonical", scale=_SCALE, note=_SCALE_NOTE),
)
MNIST_CENTRED = DataSet(
    name="mnist_centred",
    title="MNIST in its canonical split, as the CEPAM experiments use it",
    records="60,000: the first 50,000 training images for clients, 10,000 for testing",
    terms=_TERMS,
    variants=_VARIANTS,
    build=partial(_canonical, name="mnist_centred", scale=CENTRED, note=_CENTRED_NOTE),
    model="mlp_32_16",
)
MNIST_RGB = DataSet(
    name="mnist_rgb",
    title="MNIST in the shape of SVHN: 32 x 32 pixels, three equal colours",
    records="30,000: the first 20,000 training images for clients, 10,000 for testing",
    terms=_TERMS,
    variants=_VARIANTS,
    build=_build_rgb,
    model="svhn_cnn",
)

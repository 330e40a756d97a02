"""Imagenette, ten classes of ImageNet, resized to 64 x 64: all images, and a subset of each class."""

import tarfile
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedveil.data.catalogue.data_set import DataFile, DataSet, Labelled, Request, Store
from fedveil.data.records import Population
from fedveil.errors import DataError

_SIDE: Final = 64
_PIXELS_NOTE: Final = (
    "Pixels are scaled from 0 .. 255 to -1 .. 1: nothing is fitted on records. Images are neither cropped nor flipped "
    "at random."
)
_TERMS: Final = (
    "Apache 2.0 for the collection (J. Howard, https://github.com/fastai/imagenette); the pictures under ImageNet's "
    "terms: non-commercial research and education."
)


def read_archive(path: Path) -> tuple[Labelled, Labelled]:
    """Read ``imagenette2-64/{train,val}/CLASS/NAME.JPEG`` in the order of class and name.

    The label of a class is its rank among the sorted names of the classes.

    Returns:
        Training and validation set: (n, 3, 64, 64) uint8 images and (n,) int64 labels each.

    Raises:
        DataError: pillow is not installed, or an image does not have 64 x 64 pixels.
    """
    try:
        pictures: Any = import_module("PIL.Image")
    except ImportError:
        raise DataError(f"{path} holds JPEG pictures, which pillow reads: install fedveil[images]") from None
    parts: dict[str, list[tuple[str, str, bytes]]] = {"train": [], "val": []}
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member)  # None for a folder
            if stream is not None:
                _, part, label, name = member.name.split("/")
                parts[part].append((label, name, stream.read()))
    names = sorted({label for label, _, _ in parts["train"]})

    def decoded(files: list[tuple[str, str, bytes]]) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((len(files), _SIDE, _SIDE, 3), dtype=np.uint8)
        for row, (label, name, content) in enumerate(files):
            with pictures.open(BytesIO(content)) as picture:
                if picture.size != (_SIDE, _SIDE):
                    raise DataError(f"{path}: {label}/{name} is not of {_SIDE} x {_SIDE} pixels")
                images[row] = picture.convert("RGB")
        labels = np.asarray([names.index(label) for label, _, _ in files], dtype=np.int64)
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels

    return decoded(sorted(parts["train"])), decoded(sorted(parts["val"]))


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    train, test = read_archive(source.path(files[0]))
    note = "All images, resized to 64 x 64 pixels; published experiments train on crops of 224 x 224."
    return request.ten_classes("imagenette", train, test, notes=(note, _PIXELS_NOTE))


def _build_subset(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    path = source.path(files[0])
    with np.load(path, allow_pickle=False) as stored:
        train, test = (
            np.ascontiguousarray(stored[key].transpose(0, 3, 1, 2)) for key in ("X_train", "X_val")
        )
        labels, test_labels = (stored[key].astype(np.int64) for key in ("y_train", "y_val"))
    if train.shape[1:] != (3, _SIDE, _SIDE):
        raise DataError(f"{path} holds no {_SIDE} x {_SIDE} colour images")
    note = (
        "A subset, resized: 100 training and 30 validation images of each class, 64 x 64 pixels. Published "
        "experiments train on 9,469 images of 224 x 224; compare methods on this subset with one another only."
    )
    return request.ten_classes(
        "imagenette_subset", (train, labels), (test, test_labels), notes=(note, _PIXELS_NOTE)
    )


IMAGENETTE = DataSet(
    name="imagenette",
    title="Imagenette (ten classes of ImageNet), 64 x 64 pixels, three colours",
    records="13,394: 9,469 for training, 3,925 for testing",
    terms=_TERMS,
    variants=(
        (
            DataFile(
                path="imagenette_subset/imagenette2-64.tgz",
                sha256="47665b6e20867954480d6cb56446b440466d399751d750f9f37762003b714389",
            ),
        ),
    ),
    build=_build,
    model="resnet_small_groupnorm",
)
IMAGENETTE_SUBSET = DataSet(
    name="imagenette_subset",
    title="Imagenette (ten classes of ImageNet), 64 x 64 pixels, three colours (a subset)",
    records="1,300: 1,000 for training, 300 for testing",
    terms=_TERMS,
    variants=(
        (
            DataFile(
                path="imagenette_subset/imagenette64_sample.npz",
                sha256="418c4c4a8fc8e899d3f535aacadccde6b580b4267133585c2b5f7b4222fd4b63",
            ),
        ),
    ),
    build=_build_subset,
    model="resnet_small_groupnorm",
)

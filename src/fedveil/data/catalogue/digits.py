"""Handwritten digits, 8 x 8 pixels, from scikit-learn, so that a first run needs no network."""

from importlib.metadata import distribution

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue.data_set import DataFile, DataSet, Request, Store
from fedveil.data.records import Affine, Population
from fedveil.data.splits import stratified_holdout

TEST_SHARE = 0.2
BRIGHTEST = 16


def read_digits() -> NDArray[np.int64]:
    """Return one row per image: 64 pixels from 0 to 16, then the digit."""
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    try:
        # `load_digits` reads the same file, but importing scikit-learn costs .8 CPU-s, a sixth of the first run.
        return np.loadtxt(str(path), delimiter=",", dtype=np.int64)
    except FileNotFoundError:  # where the file lies is not part of scikit-learn's interface
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        return np.column_stack((pixels, digits)).astype(np.int64)


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    table = read_digits()
    features, labels = table[:, :-1].astype(np.uint8), table[:, -1]
    count = int(np.ceil(TEST_SHARE * len(labels)))
    test = stratified_holdout(labels, count, request.randomness.numpy("digits", "test"))
    return request.ten_classes(
        "digits",
        (features[~test], labels[~test]),
        (features[test], labels[test]),
        public_test=False,
        scale=Affine(factor=2 / BRIGHTEST, shift=-1.0),
        notes=("Pixels are scaled from their known range 0 .. 16 to -1 .. 1: nothing is fitted on records.",),
    )


DIGITS = DataSet(
    name="digits",
    title="Optical recognition of handwritten digits (UCI test set), 8 x 8 pixels, 64 features",
    records="1,797: 1,437 for training, 360 for testing",
    terms="CC BY 4.0. E. Alpaydin, C. Kaynak, UCI Machine Learning Repository (1998), doi:10.24432/C50P49; "
    "as shipped with scikit-learn.",
    variants=((),),
    build=_build,
    model="mlp",
)

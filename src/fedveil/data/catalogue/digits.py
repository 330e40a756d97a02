"""Handwritten digits, 8 x 8 pixels, from scikit-learn, so that a first run needs no network."""

import numpy as np

from fedveil.data.catalogue.data_set import DataSet, Request
from fedveil.data.catalogue.files import DataFile, Store
from fedveil.data.records import Affine, Population
from fedveil.data.splits import stratified_holdout

TEST_SHARE = 0.2
BRIGHTEST = 16


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    from sklearn.datasets import load_digits  # a local import: it is slow and no other command needs it

    pixels, digits = load_digits(return_X_y=True)
    features, labels = pixels.astype(np.uint8), digits.astype(np.int64)
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

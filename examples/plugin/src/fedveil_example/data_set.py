"""A data set: it reads or makes records, and hands them to users and silos."""

import numpy as np

from fedveil.data.catalogue.data_set import DataSet, Request
from fedveil.data.records import Population, Records


def _build(request: Request, source: object, files: object) -> Population:
    random = request.randomness.numpy("two-blobs")
    labels = random.integers(0, 2, 600)
    features = (random.normal(size=(600, 2)) + 2.0 * labels[:, None]).astype(np.float32)
    user, silo, names = request.allocate(labels[:400])
    return Population(
        name="two-blobs",
        train=Records(features=features[:400], targets=labels[:400], silo=silo, user=user),
        test_features=features[400:],
        test_targets=labels[400:],
        n_users=request.n_users,
        silo_names=names,
        task="classification",
        n_classes=2,
        notes=("The records are made up.",),
    )


TWO_BLOBS = DataSet(
    name="two-blobs",
    title="Two clouds of points in the plane, made up",
    records="600: 400 for training, 200 for testing",
    terms="none: nobody's data",
    variants=((),),
    build=_build,
)

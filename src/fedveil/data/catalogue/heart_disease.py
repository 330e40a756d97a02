"""UCI Heart Disease: four hospitals, in the preparation of FLamby and the experiments of ULDP-FL."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int64

from fedveil.data.catalogue.data_set import DataFile, DataSet, Request, Store
from fedveil.data.records import Population, Records

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
KEPT_COLUMNS = 10  # the last columns, slope, ca and thal, are omitted: most of their cells are missing
CATEGORICAL = {
    2: (2.0, 3.0, 4.0),
    6: (1.0, 2.0),
}  # cp, restecg: values with an indicator; the first value has none
SPLIT_SEED, TRAIN_SHARE = 43, 0.66
LEAST_DEVIATION = 1e-10


@dataclass(frozen=True, kw_only=True, eq=False)
class Hospital:
    """Complete rows of one hospital, not normalised, in FLamby's split: n for training, m for testing."""

    train: Float64[np.ndarray, "n 13"]
    train_labels: Int64[np.ndarray, "n"]
    test: Float64[np.ndarray, "m 13"]
    test_labels: Int64[np.ndarray, "m"]


def read_hospitals(paths: Sequence[Path]) -> list[Hospital]:
    """Read and split the tables of the hospitals, in the order of :data:`HOSPITALS`."""
    tables = []
    for path in paths:
        features, labels = _read(path)
        train, test = _split(labels)
        tables.append(
            Hospital(
                train=features[train],
                train_labels=labels[train],
                test=features[test],
                test_labels=labels[test],
            )
        )
    return tables


def normalise(
    rows: Float64[np.ndarray, "n 13"], reference: Float64[np.ndarray, "m 13"]
) -> Float32[np.ndarray, "n 13"]:
    """Subtract the mean of the reference and divide by its sample deviation; a constant column becomes 0."""
    deviation = reference.std(axis=0, ddof=1) + LEAST_DEVIATION
    return np.asarray((rows - reference.mean(axis=0)) / deviation, dtype=np.float32)


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    tables = read_hospitals([source.path(file) for file in files])
    pooled = np.concatenate([hospital.train for hospital in tables])
    silo = np.repeat(np.arange(len(files), dtype=np.int32), [len(hospital.train) for hospital in tables])
    return Population(
        name="heart_disease",
        train=Records(
            features=np.concatenate([normalise(hospital.train, hospital.train) for hospital in tables]),
            targets=np.concatenate([hospital.train_labels for hospital in tables]),
            silo=silo,
            user=request.allocate_within_silos(silo, HOSPITALS, least=1),
        ),
        test_features=normalise(np.concatenate([hospital.test for hospital in tables]), pooled),
        test_targets=np.concatenate([hospital.test_labels for hospital in tables]),
        n_users=request.n_users,
        silo_names=HOSPITALS,
        task="classification",
        n_classes=2,
        notes=(
            "Each hospital normalises by mean and standard deviation of its own training records, and the test table "
            "by those of all, as published: they depend on the data and are not covered by the guarantee.",
            "Rows with a missing value are left out, as published.",
        ),
    )


def _read(path: Path) -> tuple[Float64[np.ndarray, "n 13"], Int64[np.ndarray, "n"]]:
    """Read the complete rows of one hospital: 8 columns unchanged, 2 as indicators; the label is num > 0."""
    cells = np.array([line.split(",") for line in path.read_text().split()])
    numbers = np.where(cells == "?", "nan", cells).astype(np.float64)
    columns = numbers[:, :KEPT_COLUMNS]
    complete = ~np.isnan(columns).any(axis=1)
    columns, label = columns[complete], (numbers[complete, -1] > 0).astype(np.int64)
    numeric = [c for c in range(KEPT_COLUMNS) if c not in CATEGORICAL]
    indicators = [columns[:, [c]] == np.array(values) for c, values in CATEGORICAL.items()]
    return np.column_stack((columns[:, numeric], *indicators)), label


def _split(labels: Int64[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray]:
    """Return FLamby's train and test rows of one hospital: scikit-learn's split with the published seed."""
    from sklearn.model_selection import train_test_split  # a local import, because it is slow

    # A hospital with two or fewer records of a class cannot be stratified; FLamby then splits it without strata.
    can_stratify = np.bincount(labels, minlength=2).min() > 2
    train, test = train_test_split(
        np.arange(len(labels)),
        train_size=TRAIN_SHARE,
        test_size=1 - TRAIN_SHARE,
        random_state=SPLIT_SEED,
        stratify=labels if can_stratify else None,
    )
    return train, test


def _file(hospital: str, sha256: str) -> DataFile:
    name = f"processed.{hospital}.data"
    url = f"https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/{name}"
    return DataFile(path=f"heart_disease/{name}", sha256=sha256, urls=(url,))


HEART_DISEASE = DataSet(
    name="heart_disease",
    title="UCI Heart Disease: four hospitals, 13 features, disease or none",
    records="740: 486 for training (199, 172, 30, 85), 254 for testing (104, 89, 16, 45)",
    terms="CC BY 4.0. A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, UCI Machine Learning Repository (1988), "
    "doi:10.24432/C52P4X; publications name the investigators of the four hospitals.",
    variants=(
        (
            _file("cleveland", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
            _file("hungarian", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
            _file("switzerland", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
            _file("va", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
        ),
    ),
    build=_build,
)

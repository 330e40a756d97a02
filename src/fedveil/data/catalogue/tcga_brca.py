"""Fed-TCGA-BRCA: survival of breast cancer patients in six regions, in FLamby's published split."""

import csv
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32

from fedveil.data.catalogue.data_set import DataFile, DataSet, Request, Store
from fedveil.data.records import Population, Records
from fedveil.errors import DataError

REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    patients_file, split_file = files
    patients = _read_patients(source.path(patients_file))
    folds = _read_folds(source.path(split_file))
    train_silo, train_features, train_targets = _table(patients, folds["train"])
    _, test_features, test_targets = _table(patients, folds["test"])
    return Population(
        name="tcga_brca",
        train=Records(
            features=train_features,
            targets=train_targets,
            silo=train_silo,
            user=request.allocate_within_silos(train_silo, REGIONS, least=2),
        ),
        test_features=test_features,
        test_targets=test_targets,
        n_users=request.n_users,
        silo_names=REGIONS,
        task="survival",
        notes=(
            "Features are FLamby's: one-hot columns whose choice was made on the data and is not covered by the "
            "guarantee; nothing else is fitted.",
            "Records are handed out in twos where that is possible, for the Cox loss of a single record has no "
            "gradient; some contributions of one record remain, as published.",
        ),
    )


def _read_patients(path: Path) -> dict[str, list[float]]:
    """Read the 39 features, the event and the time in days of every patient, by patient id."""
    with path.open(newline="") as stream:
        header, *rows = csv.reader(stream)
    if header[0] != "pid" or header[-2:] != ["E", "T"]:
        raise DataError(f"{path}: the columns must be pid, the features, E and T")
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows}


def _read_folds(path: Path) -> dict[str, list[tuple[str, int]]]:
    """Read the published split: (patient, silo) pairs for train and test; `fold2` has the form train_3."""
    folds: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            part, _, silo = row["fold2"].partition("_")
            folds[part].append((row["pid"], int(silo)))
    return folds


def _table(
    patients: dict[str, list[float]], fold: list[tuple[str, int]]
) -> tuple[Int32[np.ndarray, "n"], Float32[np.ndarray, "n d"], Float32[np.ndarray, "n 2"]]:
    """Return silo, features and (event, days) of the patients of a fold."""
    rows = np.array([patients[patient] for patient, _ in fold], dtype=np.float32)
    return np.array([silo for _, silo in fold], dtype=np.int32), rows[:, :-2].copy(), rows[:, -2:].copy()


def _file(name: str, sha256: str, folder: str = "") -> DataFile:
    url = f"https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/{folder}{name}"
    return DataFile(path=f"tcga_brca/{name}", sha256=sha256, urls=(url,))


TCGA_BRCA = DataSet(
    name="tcga_brca",
    title="Fed-TCGA-BRCA: survival with breast cancer, six regions, 39 features",
    records="1,088: 866 for training (248, 156, 164, 129, 129, 40), 222 for testing (63, 40, 42, 33, 33, 11)",
    terms="The tables lie in an MIT-licensed repository (FLamby; J. Ogier du Terrail et al., NeurIPS 2022); the data "
    "are open access of The Cancer Genome Atlas under the GDC policy: nobody may try to identify a participant.",
    variants=(
        (
            _file("brca.csv", "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020"),
            _file(
                "train_test_split.csv",
                "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
                "dataset_creation_scripts/",
            ),
        ),
    ),
    build=_build,
)

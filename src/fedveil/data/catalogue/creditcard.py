"""Credit Card Fraud in the preparation of the ULDP-FL experiments, from the full table or a subset."""

import numpy as np
import pyarrow.csv as pa_csv
from jaxtyping import Float64, Int64

from fedveil.data.catalogue.data_set import LOCAL_TEST_NOTE, DataFile, DataSet, Request, Store
from fedveil.data.records import Population, Records
from fedveil.data.splits import local_tests
from fedveil.errors import DataError

FULL_GENUINE, FULL_FRAUDS = 284_315, 492
TEST_GENUINE, TEST_FRAUDS = 42_648, 74
# 42,648 + 74 rows are 15 % of the 284,807 rows, at the ratio of the classes.
POOL_GENUINE = FULL_GENUINE - TEST_GENUINE
KEPT_GENUINE = POOL_GENUINE // 10

_TERMS = (
    "Open Database License 1.0, contents under the Database Contents License 1.0. A. Dal Pozzolo, O. Caelen, R. A. "
    "Johnson, G. Bontempi, Calibrating probability with undersampling for unbalanced classification, IEEE CIDM 2015."
)
_FULL = DataFile(
    path="creditcard/creditcard.csv",
    sha256="76274b691b16a6c49d3f159c883398e03ccd6d1ee12d9d8ee38f4b4b98551a89",
    urls=("https://storage.googleapis.com/download.tensorflow.org/data/creditcard.csv",),
)
_SUBSET = DataFile(
    path="creditcard_subset/creditcard.csv",
    sha256="f61d10a63cd29019eb6a8906201c599729b932d07aeb1ce0d63d107947823125",
)


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    """Split, standardise and allocate the table.

    15 % of the rows are a stratified test set. The scaler is fitted on the other 85 %, the pool. The training set is
    all frauds and 10 % of the genuine rows of the pool. The counts are those of the full table, whichever file is
    read: 24,584 training rows with 418 frauds. With the subset, every genuine row that is not trained on is a test
    row, weighted so that the genuine test rows count as many as in the full table.
    """
    rows, fraud = _read(source, files)
    generator = request.randomness.numpy("creditcard")
    frauds = generator.permutation(np.flatnonzero(fraud == 1))
    genuine = generator.permutation(np.flatnonzero(fraud == 0))
    test_frauds, pool_frauds = np.split(frauds, [TEST_FRAUDS])
    subset = len(genuine) < FULL_GENUINE
    n_test_genuine = len(genuine) - KEPT_GENUINE if subset else TEST_GENUINE
    test_genuine, pool_genuine = np.split(genuine, [n_test_genuine])

    share_of_genuine = POOL_GENUINE / (POOL_GENUINE + len(pool_frauds))
    scaled = _standardised(rows, pool_genuine, pool_frauds, share_of_genuine)
    train = np.sort(np.concatenate((pool_frauds, pool_genuine[:KEPT_GENUINE])))
    test = np.sort(np.concatenate((test_frauds, test_genuine)))
    user, silo, silo_names = request.allocate(fraud[train])
    in_training = ~local_tests(silo, fraud[train], request.randomness.numpy("creditcard", "local test"))
    # The genuine test rows of a subset together weigh as much as the TEST_GENUINE rows of the full table.
    weights = np.where(fraud[test] == 0, TEST_GENUINE / n_test_genuine, 1.0).astype(np.float32)
    notes = [
        "Features are standardised by mean and standard deviation of the private training rows, as "
        "published: they depend on the data and are not covered by the guarantee.",
        "Genuine training rows are under-sampled to 10 %, by label, as published.",
        LOCAL_TEST_NOTE,
    ]
    if subset:
        notes[:0] = [
            f"SUBSET of the data: all {FULL_FRAUDS} frauds, but {len(genuine):,} of {FULL_GENUINE:,} genuine rows.",
            f"Genuine test rows ({n_test_genuine:,}) are weighed by {TEST_GENUINE:,}/{n_test_genuine:,}, so "
            "that metrics are at the original ratio of frauds.",
        ]
    return Population(
        name="creditcard (subset)" if subset else "creditcard",
        train=Records(
            features=scaled[train[in_training]],
            targets=fraud[train[in_training]],
            silo=silo[in_training],
            user=user[in_training],
        ),
        test_features=scaled[test],
        test_targets=fraud[test],
        test_weights=weights if subset else None,
        n_users=request.n_users,
        silo_names=silo_names,
        task="classification",
        n_classes=2,
        notes=tuple(notes),
    )


def _read(
    source: Store, files: tuple[DataFile, ...]
) -> tuple[Float64[np.ndarray, "n 30"], Int64[np.ndarray, "n"]]:
    """Read the CSV file: 30 features (Time, V1 .. V28, Amount) and the class."""
    path = source.path(files[0])
    table = pa_csv.read_csv(path)
    if table.num_columns != 31 or table.column_names[-1] != "Class":
        raise DataError(f"{path} is not the table of 31 columns that ends with Class")
    columns = [table.column(name).to_numpy().astype(np.float64) for name in table.column_names]
    return np.column_stack(columns[:-1]), columns[-1].astype(np.int64)


def _standardised(
    rows: Float64[np.ndarray, "n d"],
    genuine: Int64[np.ndarray, "g"],
    frauds: Int64[np.ndarray, "f"],
    share_of_genuine: float,
) -> np.ndarray:
    """Standardise by mean and deviation of the pool, with the share of genuine rows in the full table.

    The subset has fewer genuine rows than the full table; the weights give both the same mean and variance, up to
    sampling error.
    """
    parts = ((genuine, share_of_genuine), (frauds, 1 - share_of_genuine))
    mean = sum(share * rows[part].mean(axis=0) for part, share in parts)
    variance = sum(share * ((rows[part] - mean) ** 2).mean(axis=0) for part, share in parts)
    return np.asarray((rows - mean) / np.sqrt(variance), dtype=np.float32)


CREDITCARD = DataSet(
    name="creditcard",
    title="Credit Card Fraud Detection (ULB and Worldline), 30 features",
    records="24,584 for training (of which silos set a tenth aside), 42,722 for testing (subset: 10,449, weighed)",
    terms=_TERMS,
    variants=((_FULL,), (_SUBSET,)),
    build=_build,
    model="mlp_groupnorm",
    loss="cross_entropy",
    metrics=("balanced_accuracy", "loss"),
)

"""The catalogue: published counts and preprocessing, files known by digest, nothing needed for the digits."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import catalogue, load
from fedveil.data.catalogue.creditcard import FULL_FRAUDS, FULL_GENUINE
from fedveil.data.catalogue.data_set import DataFile, Store, digest_of, fetch, store
from fedveil.data.catalogue.digits import read_digits
from fedveil.data.catalogue.mnist import read_idx
from fedveil.data.records import Population
from fedveil.errors import ConfigError, DataError
from fedveil.registry import names
from tests.synthetic import PATIENTS, ROWS, serve, serve_hospitals, write_patients

ZIPF, UNIFORM = Allocation(law="zipf"), Allocation(law="uniform")
CONTENT = b"not very much data"
FILE = DataFile(
    path="set/file.bin", sha256=hashlib.sha256(CONTENT).hexdigest(), urls=("https://a", "https://b")
)


def scaled(population: Population) -> np.ndarray:
    return population.scale.apply(population.train.features)


def test_the_digits_need_no_file_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "nowhere"))
    population = load("digits", allocation=ZIPF, n_users=100)
    assert (len(population.train), len(population.test_targets)) == (1437, 360)
    assert (population.n_silos, population.n_users, population.n_classes) == (5, 100, 10)
    assert population.feature_shape == (64,)
    assert scaled(population).min() == -1
    assert scaled(population).max() == 1
    assert np.bincount(population.test_targets).min() >= 34


def test_a_population_depends_on_the_seed_alone() -> None:
    one, same, other = (load("digits", allocation=ZIPF, n_users=20, seed=seed).train for seed in (1, 1, 2))
    assert one.user.tolist() == same.user.tolist()
    assert one.features.tolist() == same.features.tolist()
    assert one.targets.tolist() != other.targets.tolist()


def test_the_digits_are_those_of_scikit_learn() -> None:
    pixels, digits = load_digits(return_X_y=True)
    np.testing.assert_array_equal(read_digits(), np.column_stack((pixels, digits)))


def test_clients_of_the_digits() -> None:
    population = load("digits", allocation=Allocation(law="clients"), n_users=30)
    assert population.n_silos == 30
    assert population.silo_names[7] == "client 7"


@pytest.mark.parametrize("n_users", [100, 10_000])
def test_mnist_trains_on_54000_normalised_images(data_folder: Path, n_users: int) -> None:
    population = load("mnist", allocation=UNIFORM, n_users=n_users, folder=data_folder)
    assert (len(population.train), len(population.test_targets)) == (54_000, 10_000)
    assert population.records_per_silo().tolist() == [10_800] * 5
    assert population.feature_shape == (1, 28, 28)
    assert population.train.features.dtype == np.uint8
    sample = population.scale.apply(population.train.features[::10])
    assert abs(sample.mean()) < 0.02
    assert abs(sample.std() - 1) < 0.02
    assert np.bincount(population.test_targets).tolist() == [
        986,
        1125,
        999,
        1020,
        975,
        902,
        982,
        1042,
        975,
        994,
    ]


def test_the_creditcard_subset_says_so_and_weighs_its_test_rows(data_folder: Path) -> None:
    population = load("creditcard", allocation=UNIFORM, n_users=100, folder=data_folder)
    if population.test_weights is None:
        pytest.skip("the full table is here")
    assert population.records_per_silo().tolist() == [4425, 4425, 4425, 4425, 4424]
    assert len(population.test_targets) == 10_375 + 74
    assert np.bincount(population.test_targets).tolist() == [10_375, 74]
    by_class = np.bincount(population.test_targets, weights=population.test_weights)
    np.testing.assert_allclose(by_class, [42_648, 74], rtol=1e-6)
    assert "subset" in population.name
    assert population.notes[0].startswith("SUBSET")
    assert any("42,648/10,375" in note for note in population.notes)
    genuine = population.train.features[population.train.targets == 0]
    assert (
        abs(genuine.mean(axis=0)).max() < 0.03
    )  # standardised at the original ratio: nearly all rows are genuine
    assert population.feature_shape == (30,)


def test_the_full_creditcard_table_gives_the_published_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fraud = (np.arange(FULL_GENUINE + FULL_FRAUDS) < FULL_FRAUDS).astype(np.int64)
    rows = np.random.default_rng(0).normal(
        3, 2, (len(fraud), 2)
    )  # stands for the table, which is not at hand
    monkeypatch.setattr("fedveil.data.catalogue.creditcard._read", lambda source, files: (rows, fraud))
    population = load("creditcard", allocation=UNIFORM, n_users=100)
    assert population.records_per_silo().tolist() == [4425, 4425, 4425, 4425, 4424]
    assert np.bincount(population.test_targets).tolist() == [42_648, 74]
    assert population.test_weights is None
    assert "subset" not in population.name


def are_normalised_as_published(population: Population) -> None:
    """Each hospital by its own training records, the test table by those of all."""
    for silo in range(4):
        rows = population.train.features[population.train.silo == silo]
        varies = rows.std(axis=0) > 0
        np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(rows[:, varies].std(axis=0, ddof=1), 1, atol=1e-5)
    assert any("not covered" in note for note in population.notes)


def test_heart_disease_has_its_published_counts_and_normalisation(data_folder: Path) -> None:
    population = load("heart_disease", allocation=ZIPF, n_users=50, folder=data_folder)
    assert population.records_per_silo().tolist() == [199, 172, 30, 85]
    assert len(population.test_targets) == 104 + 89 + 16 + 45
    assert population.feature_shape == (13,)
    assert (population.n_classes, population.silo_names[3]) == (2, "va")
    are_normalised_as_published(population)
    assert abs(population.test_features.mean(axis=0)).max() < 0.3  # by pooled, not by their own statistics


def test_made_up_hospitals_lose_rows_with_a_missing_value_and_are_normalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_hospitals(tmp_path, monkeypatch)
    population = load("heart_disease", allocation=ZIPF, n_users=8)
    complete = [rows - 2 for rows in ROWS]
    assert population.records_per_silo().tolist() == [int(0.66 * rows) for rows in complete]
    assert len(population.train) + len(population.test_targets) == sum(complete)
    assert population.feature_shape == (13,)
    assert set(np.unique(population.train.targets)) == {0, 1}
    are_normalised_as_published(population)
    with pytest.raises(ConfigError, match="n_silos is 3, but these data come in 4 silos: cleveland"):
        load("heart_disease", allocation=ZIPF, n_users=8, n_silos=3)


def test_tcga_brca_has_its_published_split(data_folder: Path) -> None:
    population = load("tcga_brca", allocation=ZIPF, n_users=50, folder=data_folder)
    assert population.records_per_silo().tolist() == [248, 156, 164, 129, 129, 40]
    assert len(population.test_targets) == 222
    assert population.feature_shape == (39,)
    assert population.task == "survival"
    assert set(np.unique(population.train.targets[:, 0])) == {0.0, 1.0}
    assert population.records_per_user().min() >= 2


def test_made_up_patients_keep_their_region_and_the_split_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("tcga_brca", write_patients(tmp_path), monkeypatch)
    population = load("tcga_brca", allocation=ZIPF, n_users=8, folder=tmp_path)
    tested = [-(-rows // 3) for rows in PATIENTS]
    assert population.records_per_silo().tolist() == [
        rows - some for rows, some in zip(PATIENTS, tested, strict=True)
    ]
    assert len(population.test_targets) == sum(tested)
    assert (population.feature_shape, population.task) == ((39,), "survival")
    assert set(np.unique(population.train.targets[:, 0])) == {0.0, 1.0}
    assert population.records_per_user().min() >= 2


def test_an_unknown_data_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no data set 'cifar'; there are: digits, mnist"):
        load("cifar", allocation=ZIPF, n_users=5)


def test_the_catalogue_lists_terms_and_what_is_present(tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in catalogue(tmp_path)}
    assert tuple(entries) == names("data_sets")
    assert entries["digits"].present
    assert not entries["mnist"].present
    assert len(entries["mnist"].files) == 4
    for entry in entries.values():
        assert len(entry.terms) > 20
        assert all(
            (file.digest[0], len(file.digest[1])) in (("sha256", 64), ("md5", 32)) for file in entry.files
        )


def test_the_store_is_the_folder_given_else_the_environments_else_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "set"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store(tmp_path) == Store(folder=tmp_path, download=False)
    assert store(None) == Store(folder=tmp_path / "set", download=False)
    monkeypatch.delenv("FEDVEIL_DATA")
    assert store(None) == Store(folder=tmp_path / "cache" / "fedveil", download=True)


def serve_instead(contents: dict[str, bytes | OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let addresses answer with these contents, without a network."""

    def download(url: str, output_file: str, pooch: object) -> None:
        content = contents[url]
        if isinstance(content, OSError):
            Path(output_file).write_bytes(CONTENT[:3])
            raise content
        Path(output_file).write_bytes(content)

    monkeypatch.setattr("pooch.HTTPDownloader", lambda **settings: download)


def test_a_download_tries_its_addresses_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_instead({"https://a": OSError("unreachable"), "https://b": CONTENT}, monkeypatch)
    assert Store(folder=tmp_path, download=True).path(FILE).read_bytes() == CONTENT
    assert digest_of(tmp_path / FILE.path) == FILE.sha256


def test_a_corrupted_download_names_file_and_digests_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = CONTENT[:-1]
    serve_instead({"https://a": wrong, "https://b": wrong}, monkeypatch)
    with pytest.raises(DataError) as caught:
        fetch(FILE, tmp_path / FILE.path)
    told = str(caught.value)
    assert FILE.path in told
    assert FILE.sha256 in told
    assert hashlib.sha256(wrong).hexdigest() in told
    assert list((tmp_path / "set").iterdir()) == []


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    serve_instead({"https://a": full, "https://b": full}, monkeypatch)
    with pytest.raises(DataError, match="No space left on device"):
        fetch(FILE, tmp_path / FILE.path)
    assert list((tmp_path / "set").iterdir()) == []


def test_only_https_is_opened() -> None:
    with pytest.raises(ValueError, match="only https"):
        DataFile(path="x", sha256="0" * 64, urls=("file:///etc/hostname",))


def test_a_file_in_a_folder_is_checked_too(tmp_path: Path) -> None:
    held = Store(folder=tmp_path, download=False)
    with pytest.raises(DataError, match=r"file\.bin is missing"):
        held.path(FILE)
    (tmp_path / "set").mkdir()
    (tmp_path / FILE.path).write_bytes(b"other")
    with pytest.raises(DataError, match=f"expected {FILE.sha256}"):
        held.path(FILE)
    (tmp_path / FILE.path).write_bytes(CONTENT)
    assert held.path(FILE) == tmp_path / FILE.path


def test_a_file_without_address_cannot_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be downloaded"):
        fetch(DataFile(path="x", sha256="0" * 64), tmp_path / "x")


def test_idx_files_are_read_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    header = bytes((0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3))
    path.write_bytes(gzip.compress(header + bytes(range(6))))
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    for content in (b"", header, header + bytes(5), bytes((0, 0, 9)) + header[3:] + bytes(6)):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match="is not an idx file"):
            read_idx(path)

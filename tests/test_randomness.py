"""The three kinds of randomness: named streams, secrecy, repetition."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedveil.randomness import ExperimentRandomness, KeyedStream, PrivacyRandomness

parts = st.one_of(st.text(max_size=8), st.integers(-(10**6), 10**6))
paths = st.lists(parts, max_size=4).map(tuple)


@given(seed=st.integers(0, 2**70), first=paths, second=paths)
def test_experiment_streams_are_named(
    seed: int, first: tuple[str | int, ...], second: tuple[str | int, ...]
) -> None:
    randomness = ExperimentRandomness(seed)
    assert randomness.integer(*first) == ExperimentRandomness(seed).integer(*first)
    assert (randomness.integer(*first) == randomness.integer(*second)) == (first == second)
    assert randomness.integer(*first) != ExperimentRandomness(seed + 1).integer(*first)
    assert 0 <= randomness.integer(*first) < 2**63


def test_names_do_not_run_together_and_text_is_not_a_number() -> None:
    randomness = ExperimentRandomness(0)
    assert randomness.integer("ab", "c") != randomness.integer("a", "bc")
    assert randomness.integer("1") != randomness.integer(1)
    assert randomness.integer("1", 2) != randomness.integer(1, "2")


def test_drawing_from_one_stream_does_not_move_another() -> None:
    randomness = ExperimentRandomness(3)
    expected = randomness.numpy("b").random(4).tolist()
    randomness.numpy("a").random(1000)
    assert randomness.numpy("b").random(4).tolist() == expected


def test_keyed_stream_is_chacha20_in_little_endian_words() -> None:
    key = bytes(range(32))
    reference = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(64))
    assert KeyedStream(key).bytes(64) == reference
    assert KeyedStream(key).uint64(8).tolist() == [
        int.from_bytes(reference[i : i + 8], "little") for i in range(0, 64, 8)
    ]


@given(sizes=st.lists(st.integers(0, 40), max_size=6))
def test_both_holders_of_a_key_draw_alike_however_they_cut_it(sizes: list[int]) -> None:
    key = b"k" * 32
    stream = KeyedStream(key)
    pieces = [stream.uint64(size) for size in sizes]
    whole = KeyedStream(key).uint64(sum(sizes))
    assert np.concatenate([np.zeros(0, dtype=np.uint64), *pieces]).tolist() == whole.tolist()


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedStream(bytes(size))


def test_only_the_system_source_is_secure() -> None:
    system, insecure = PrivacyRandomness.system(), PrivacyRandomness.insecure(1)
    assert system.secure
    assert not insecure.secure
    assert system.stream("noise", 1).uint64(4).tolist() != system.stream("noise", 1).uint64(4).tolist()


def test_insecure_streams_depend_on_seed_and_path_alone() -> None:
    def words(seed: int, *path: str | int) -> list[int]:
        return PrivacyRandomness.insecure(seed).stream(*path).uint64(4).tolist()

    assert words(1, "noise", 2) == words(1, "noise", 2)
    assert words(1, "noise", 2) != words(1, "noise", 3)
    assert words(1, "noise", 2) != words(2, "noise", 2)


@pytest.mark.parametrize("randomness", [PrivacyRandomness.system(), PrivacyRandomness.insecure(4)])
def test_words_are_uniform_in_every_byte(randomness: PrivacyRandomness) -> None:
    """Chi-square per byte position; the system source has no seed, hence the limit of 1e-9 for each."""
    words = randomness.stream("words").uint64(100_000)
    assert words.dtype == np.uint64
    for position in range(8):
        counts = np.bincount((words >> np.uint64(8 * position)).astype(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-9

"""The three kinds of randomness: named streams, secrecy, repetition."""

import copy
import os
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedveil.randomness import ExperimentRandomness, KeyedStream, PrivacyRandomness, SecretStream

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


def keys(count: int) -> Iterator[bytes]:
    return (bytes([number]) * 32 for number in range(count))


def test_a_secret_stream_is_a_keystream_under_keys_of_the_system_each_used_once() -> None:
    """The oracle: so many words of each key's own keystream, and no key drawn before it is needed."""
    drawn = keys(3)
    stream = SecretStream(lambda size: next(drawn)[:size], renewed_after=32)
    expected = [KeyedStream(key).uint64(4).tolist() for key in keys(3)]
    assert (
        stream.uint64(3).tolist() + stream.uint64(6).tolist()
        == [word for words in expected for word in words][:9]
    )
    assert stream.uint64(3).tolist() == expected[2][1:]
    with pytest.raises(StopIteration):
        stream.uint64(1)


def test_two_secret_streams_share_no_key() -> None:
    drawn = keys(2)
    one, other = (SecretStream(lambda size: next(drawn)) for _ in range(2))
    assert one.uint64(2).tolist() == KeyedStream(bytes(32)).uint64(2).tolist()
    assert other.uint64(2).tolist() == KeyedStream(b"\1" * 32).uint64(2).tolist()


def test_a_key_may_be_overwritten_once_the_cipher_is_set_up() -> None:
    """A secret stream erases its key's bytes: the cipher goes on with its own copy."""
    key = bytearray(b"k" * 32)
    stream = KeyedStream(key)
    before = stream.uint64(2).tolist()
    key[:] = bytes(32)
    assert before + stream.uint64(2).tolist() == KeyedStream(b"k" * 32).uint64(4).tolist()


def test_a_forked_process_goes_on_with_a_key_of_its_own() -> None:
    stream = PrivacyRandomness.system().stream("noise", 1)
    stream.uint64(1)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(send, stream.uint64(4).tobytes())
        os._exit(0)
    words = stream.uint64(4).tobytes()
    theirs = os.read(receive, 32)
    os.waitpid(child, 0)
    assert len(theirs) == len(words) == 32
    assert theirs != words


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_secret_stream_is_never_copied_or_stored(copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="cannot be copied or stored"):
        copied(PrivacyRandomness.system().stream("noise", 1))

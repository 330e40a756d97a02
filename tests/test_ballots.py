"""Ballots: secret orders, the largest values with their ties, and bitmaps that any bytes may claim to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import ProtocolError
from fedveil.protocols.partial_encryption.plan import decode_bitmap, encode_bitmap, largest, secret_order


@pytest.mark.parametrize("length", [1, 2, 3, 255, 256, 257, 10_000])
def test_an_order_is_a_permutation_that_both_holders_of_a_key_draw_alike(length):
    order = secret_order(bytes(32), length)
    assert np.array_equal(np.sort(order), np.arange(length))
    assert np.array_equal(order, secret_order(bytes(32), length))
    if length > 3:
        assert not np.array_equal(order, secret_order(b"\x01" * 32, length))


def test_orders_are_uniform():
    """All 24 orders of 4 coordinates come equally often: chi-square of 23 degrees below its 1 - 1e-7 point, 82."""
    counts = {}
    for key in range(12_000):
        order = tuple(secret_order(key.to_bytes(32, "big"), 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 82


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_the_largest_are_those_of_a_stable_sort(values, data):
    array = np.array(values)
    count = data.draw(st.integers(0, len(values)))
    expected = np.zeros(len(values), dtype=bool)
    expected[np.argsort(-array, kind="stable")[:count]] = True
    assert np.array_equal(largest(array, count), expected)
    assert np.array_equal(largest(array.astype(np.float64), count), expected)


@given(st.integers(1, 4000), st.floats(0, 1), st.integers(0, 2**31))
def test_bitmaps_survive_their_bytes_in_the_shorter_form(length, share, seed):
    bits = np.random.default_rng(seed).random(length) < share**4
    data = encode_bitmap(bits)
    assert len(data) <= 1 + -(-length // 8)
    assert np.array_equal(decode_bitmap(data, length, int(bits.sum())), bits)


def test_a_sparse_bitmap_costs_a_byte_a_vote():
    bits = np.random.default_rng(0).random(1_000_000) < 0.01
    assert len(encode_bitmap(bits)) < 1.12 * bits.sum()


def test_no_bytes_pass_for_another_bitmap():
    """20,000 strings: what is accepted has the ones that are due and, in either form, is what it says."""
    rng = np.random.default_rng(1)
    bits = rng.random(300) < 0.05
    good, ones = encode_bitmap(bits), int(bits.sum())
    accepted = 0
    for _ in range(20_000):
        data = bytearray(good if rng.random() < 0.8 else rng.bytes(int(rng.integers(0, 60))))
        for _ in range(int(rng.integers(1, 3))):
            if data:
                data[rng.integers(len(data))] = int(rng.choice([0, 1, 254, 255, rng.integers(256)]))
        if rng.random() < 0.2:
            del data[rng.integers(len(data) + 1) :]
        try:
            decoded = decode_bitmap(bytes(data), 300, ones)
        except ProtocolError:
            continue
        accepted += 1
        assert decoded.shape == (300,)
        assert decoded.sum() == ones
    assert 500 < accepted < 20_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "form"),
        (b"\x02\x00", "form"),
        (b"\x00" + bytes(1), "2 bytes"),
        (b"\x00\x80\x01", "behind its end"),
        (b"\x01\x0b", "beyond"),
        (b"\x01\x01\xff", "beyond"),
        (b"\x01\x00\x00", "2 ones; 1"),
        (b"\x00\x00\x00", "0 ones; 1"),
    ],
)
def test_wrong_bitmaps_say_what_is_wrong(data, message):
    with pytest.raises(ProtocolError, match=message):
        decode_bitmap(data, 11, 1)

"""Residue arithmetic, SEAL's file format, and weighted sums under ring-LWE."""

import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.crypto.rlwe import (
    from_limbs,
    keyed_residues,
    mixed_radix,
    quotients,
    random_below,
    random_limbs,
    times,
    times_small,
    to_signed,
)
from fedveil.errors import CryptoError
from fedveil.randomness import KeyedStream

FALSE_ALARM = 1e-6
PRIMES = (2**59 - 55, 2**60 - 93, 1073741789, 65537, 2**58 - 27)


@given(st.sampled_from(PRIMES), st.integers(0, 2**32 - 1), st.integers(0, 2**200))
@settings(max_examples=60)
def test_products_of_residues_are_exact(modulus, seed, factor):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.integers(0, modulus, 50), [0, 1, modulus - 1, modulus // 2]])
    small = np.concatenate([rng.integers(0, 2**30, 52), [0, 2**30 - 1]])
    oracle = [a * b % modulus for a, b in zip(values.tolist(), small.tolist(), strict=True)]
    assert times_small(values, small, modulus).tolist() == oracle
    assert times(values, factor, modulus).tolist() == [value * factor % modulus for value in values.tolist()]


def whole(limbs):
    return [sum(int(limb[i]) << (30 * k) for k, limb in enumerate(limbs)) for i in range(len(limbs[0]))]


@pytest.mark.parametrize("bits", [1, 30, 31, 137])
def test_random_limbs_are_uniform_numbers_of_their_size(bits):
    limbs = random_limbs(bits, 4000)
    numbers = whole(limbs)
    assert max(numbers) < 2**bits
    top = [number >> max(0, bits - 3) for number in numbers]
    assert stats.chisquare(np.bincount(top, minlength=min(8, 2**bits))).pvalue > FALSE_ALARM
    for modulus in PRIMES:
        assert from_limbs(limbs, modulus).tolist() == [number % modulus for number in numbers]


@pytest.mark.parametrize("bound", [2, 3, 60, 2**30, 2**30 + 1, 2**60, 3**80])
def test_numbers_below_a_bound_are_uniform(bound):
    numbers = whole(random_below(bound, 3000))
    assert len(numbers) == 3000
    assert 0 <= min(numbers) <= max(numbers) < bound
    bins = min(bound, 6)
    counts = np.bincount([number * bins // bound for number in numbers], minlength=bins)
    if bound % bins == 0 or bound > 10**6:
        assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_the_only_number_below_one_is_zero():
    assert whole(random_below(1, 5)) == [0] * 5


def test_keyed_residues_are_uniform_and_alike():
    modulus = PRIMES[3]
    drawn = keyed_residues(KeyedStream(bytes(32)), modulus, 20_000)
    np.testing.assert_array_equal(drawn, keyed_residues(KeyedStream(bytes(32)), modulus, 20_000))
    assert 0 <= drawn.min() <= drawn.max() < modulus
    assert stats.chisquare(np.bincount(drawn * 16 // modulus, minlength=16)).pvalue > FALSE_ALARM


def test_numbers_come_back_from_their_residues():
    moduli = PRIMES[:3]
    product = math.prod(moduli)
    numbers = [int.from_bytes(os.urandom(24), "big") % product for _ in range(40)] + [0, product - 1]
    digits = mixed_radix([np.array([n % q for n in numbers]) for q in moduli], moduli)
    rebuilt = [
        int(digits[0][i]) + moduli[0] * (int(digits[1][i]) + moduli[1] * int(digits[2][i]))
        for i in range(len(numbers))
    ]
    assert rebuilt == numbers
    found = quotients(digits, moduli, 10**30)
    np.testing.assert_allclose(found, [number / 10**30 for number in numbers], rtol=1e-15)
    np.testing.assert_array_equal(to_signed(np.array([-1, 0, 5]), 7), [6, 0, 5])


sealapi = pytest.importorskip("tenseal.sealapi")
rlwe = pytest.importorskip("fedveil.crypto.rlwe")
seal_format = pytest.importorskip("fedveil.crypto.seal_format")

RING = rlwe.Ring(degree=8192, primes=3)
PLAIN = RING.plain_primes(36, 2)


@pytest.fixture(scope="module")
def keys():
    return [rlwe.RlweKey(RING, prime) for prime in PLAIN]


def test_rings_have_the_security_that_is_claimed():
    assert RING.moduli == tuple(sorted(set(RING.moduli)))
    assert all(2**59 < modulus < 2**60 for modulus in RING.moduli)
    with pytest.raises((CryptoError, ValueError), match=r"."):
        rlwe.Ring(degree=8192, primes=4).context(PLAIN[0])


def test_weighted_sums_of_several_plaintext_primes_share_their_polynomials(keys):
    rng = np.random.default_rng(0)
    users = 5
    weights = [[int(rng.integers(0, prime)) for _ in range(users)] for prime in PLAIN]
    factors = [[int(rng.integers(-prime // 2, prime // 2)) for _ in range(users)] for prime in PLAIN]
    engine = rlwe.RingEngine(RING, PLAIN[0])
    bases = [
        [engine.prepare(RING.scale(key.encrypt(w), f)) for w, f in zip(ws, fs, strict=True)]
        for key, ws, fs in zip(keys, weights, factors, strict=True)
    ]
    polynomials = rng.integers(-(2**20), 2**20, (users, 100))
    polynomials[3] = 0
    for key, prime, ws, fs, total in zip(
        keys, PLAIN, weights, factors, engine.weighted_sums(bases, polynomials), strict=True
    ):
        added = rng.integers(0, prime, 8192)
        public = rlwe.RlwePublicKey(RING, prime, key.public)
        flooded = RING.flood(RING.add(total, public.encrypt(added)), 130)
        expected = [
            (sum(int(p[j]) * w * f for p, w, f in zip(polynomials, ws, fs, strict=True)) + int(added[j]))
            % prime
            for j in range(100)
        ]
        found = key.decrypt(flooded)
        assert found[:100].tolist() == expected
        np.testing.assert_array_equal(found[100:], added[100:])
        assert key.noise_budget(total) > key.noise_budget(flooded) > 0


def test_nothing_to_add_up_is_an_encryption_of_nothing(keys):
    engine = rlwe.RingEngine(RING, PLAIN[0])
    (total,) = engine.weighted_sums([[]], np.zeros((0, 10), dtype=np.int64))
    assert not total.any()


def test_the_flood_has_the_size_and_law_that_are_claimed(keys):
    """On an encryption of zero made of zeros, what the flood added can be read off: three uniform numbers, centred."""
    bits = 40
    zero = np.zeros((2, RING.primes, RING.degree), dtype=np.uint64)
    flooded = RING.flood(zero, bits)
    assert not flooded[1].any()
    modulus = RING.moduli[0]
    noise = flooded[0, 0].astype(np.int64)
    noise = np.where(noise > modulus // 2, noise - modulus, noise)
    assert noise.min() > -3 * 2 ** (bits - 1)
    assert noise.max() < 3 * 2 ** (bits - 1) - 1
    standard = noise / 2**bits + 1.5

    def law(scale):  # the distribution function of a sum of three uniform numbers (Irwin and Hall)
        def at(x):
            y = np.clip(1.5 + (x - 1.5) / scale, 0, 3)
            return sum(c * np.maximum(y - k, 0) ** 3 for k, c in enumerate((1, -3, 3))) / 6

        return at

    assert stats.kstest(standard, law(1.0)).pvalue > FALSE_ALARM
    assert stats.kstest(standard, law(1.25)).pvalue < FALSE_ALARM
    assert stats.kstest(standard, law(0.8)).pvalue < FALSE_ALARM
    for index, prime in enumerate(RING.moduli):
        np.testing.assert_array_equal(noise % prime, flooded[0, index].astype(np.int64))


@pytest.mark.parametrize("bits", [4, 6, 9, 12])
def test_the_flood_hides_a_shift_as_well_as_is_claimed(bits):
    """The exact law of three uniform numbers: both the bound on its square roots and the distance that follows."""
    size = 2**bits
    law = np.convolve(np.convolve(np.ones(size), np.ones(size)), np.ones(size)) / size**3
    padded = np.concatenate([np.zeros(size), law, np.zeros(size)])
    assert np.square(np.diff(np.sqrt(padded))).sum() < 1.21 / size**2
    for shift in (1, size // 4, size):
        distance = np.abs(padded - np.roll(padded, shift)).sum() / 2
        assert distance <= 1.1 * shift / size
    one = np.concatenate([np.zeros(size), np.ones(size), np.zeros(size)]) / size
    assert np.square(np.diff(np.sqrt(one))).sum() == pytest.approx(2 / size)


def test_a_silos_ciphertext_is_uniform_to_the_key_holder(keys):
    """c_1 of zero contributions after adding a fresh encryption: residues uniform modulo the primes."""
    public = rlwe.RlwePublicKey(RING, PLAIN[0], keys[0].public)
    fresh = public.encrypt(np.zeros(8192, dtype=np.int64))
    for row, modulus in zip(fresh[1], RING.moduli, strict=True):
        bins = (row >> np.uint64(55)).astype(np.int64)
        counts = np.bincount(bins, minlength=32)
        assert counts.size == 32
        assert modulus >> 55 == 31
        assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_the_same_plaintext_twice_gives_different_ciphertexts(keys):
    assert (keys[0].encrypt(5) != keys[0].encrypt(5)).mean() > 0.99


def test_seals_format_is_read_and_written(keys):
    words = keys[0].encrypt(123)
    data = seal_format.ciphertext_bytes((1, 2, 3, 4), words, ntt=False)
    np.testing.assert_array_equal(seal_format.parse_ciphertext(data), words)
    coefficients = np.arange(10, dtype=np.uint64)
    np.testing.assert_array_equal(
        seal_format.parse_plaintext(seal_format.plaintext_bytes(coefficients)), coefficients
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d[:8], "fewer bytes"),
        (lambda d: b"\0" + d[1:], "known"),
        (lambda d: d[:4] + b"\x09" + d[5:], r"known are 4\.1"),
        (lambda d: d[:5] + b"\x01" + d[6:], "compression mode 1"),
        (lambda d: d[:5] + b"\x02" + d[6:], "cannot be read"),
        (lambda d: d[:-8], "another length"),
    ],
)
def test_another_version_or_layout_of_seal_is_refused(keys, edit, message):
    data = seal_format.ciphertext_bytes((1, 2, 3, 4), keys[0].encrypt(1), ntt=False)
    with pytest.raises(CryptoError, match=message):
        seal_format.parse_ciphertext(edit(data))


def test_a_compressed_object_takes_the_memory_of_its_content_and_no_more(keys):
    """A buffer of the largest size for each of thousands of ciphertexts took longer than decompression."""
    words = keys[0].encrypt(123)
    plain = seal_format.ciphertext_bytes((1, 2, 3, 4), words, ntt=False)
    header = plain[:5] + b"\x02" + plain[6:16]
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    compressed = header + compressor.compress(plain[16:])
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(seal_format.parse_ciphertext(compressed), words)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_received_ciphertexts_and_keys_are_checked(keys):
    words = keys[0].encrypt(1)
    np.testing.assert_array_equal(RING.decode(words.tobytes()), words)
    with pytest.raises(CryptoError, match="393216 bytes"):
        RING.decode(b"short")
    with pytest.raises(CryptoError, match="not below its prime"):
        RING.decode(b"\xff" * RING.ciphertext_bytes)
    with pytest.raises(CryptoError, match="public key of this ring"):
        rlwe.RlwePublicKey(RING, PLAIN[0], b"short")
    with pytest.raises(CryptoError, match="SEAL refuses"):
        rlwe.RlwePublicKey(RING, PLAIN[0], b"\xff" * len(keys[0].public))

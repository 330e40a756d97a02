"""Paillier, multi-exponentiation and oblivious transfer."""

import os
import stat
import threading
from functools import cache

import numpy as np
import phe
import pytest
from gmpy2 import gcd, is_prime, jacobi, legendre, mpz, powmod, primorial
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.crypto import paillier
from fedveil.crypto.oblivious_transfer import TransferReceiver, TransferSender, check_point, group_modulus
from fedveil.crypto.paillier import (
    KEY_BITS,
    FixedPowers,
    PaillierPrivateKey,
    PaillierPublicKey,
    Rerandomizer,
    SimultaneousPowers,
    fixed_window,
    straus_cost,
)
from fedveil.errors import CryptoError
from fedveil.protocols.weighting.paillier_weights import in_threads
from tests.slow_cases import slow_only

FALSE_ALARM = 1e-6


@cache
def key(bits):
    return PaillierPrivateKey.generate_insecure(bits)


def signed(private, ciphertext):
    """Return a plaintext between -n/2 and n/2."""
    n, value = private.public.n, private.decrypt(ciphertext)
    return value - n if 2 * value > n else value


@given(st.integers(-(2**250), 2**250), st.integers(-(2**250), 2**250), st.integers(-(2**200), 2**200))
@settings(max_examples=30)
def test_ciphertexts_add_and_multiply_plaintexts(a, b, k):
    private = key(512)
    public = private.public
    product = private.encrypt(a) * public.encrypt(b) % public.square
    assert signed(private, product) == a + b
    assert signed(private, powmod(public.encrypt(a), k % public.n, public.square)) == (
        (a * k + public.n // 2) % public.n - public.n // 2
    )


def test_encryption_agrees_with_an_independent_implementation():
    private = key(512)
    public = phe.PaillierPublicKey(int(private.public.n))
    oracle = phe.PaillierPrivateKey(public, int(private.p), int(private.q))
    assert oracle.raw_decrypt(int(private.encrypt(12345))) == 12345
    assert oracle.raw_decrypt(int(private.public.encrypt(12345))) == 12345
    assert private.decrypt(mpz(public.raw_encrypt(6789))) == 6789


@pytest.mark.parametrize("bits", [128, *slow_only([160, 192])])
def test_generated_primes_are_what_the_rerandomizer_assumes(bits):
    """p = 2 a b + 1: -1 and h miss a part of the units whose index is a or b, with probability 1 / a + 1 / b."""
    private = PaillierPrivateKey.generate_insecure(bits)
    for prime in (private.p, private.q):
        assert is_prime(prime)
        assert prime % 4 == 3
        half = prime // 2
        small = next(factor for factor in range(3, 2 ** (bits // 8 + 1), 2) if half % factor == 0)
        assert small >= 2 ** (bits // 8 - 2)
        assert is_prime(half // small)
    assert private.public.bits == bits


@pytest.mark.slow
def test_what_the_rerandomizer_may_miss_has_no_small_index():
    """Nor have primes of 1024 bits, which only a quarter-size prime and its cofactor divide, any factor below 2^24."""
    prime = paillier._prime(1024)
    assert gcd(primorial(2**24), prime // 2) == 1
    assert is_prime(prime)
    assert prime.bit_length() == 1024


@pytest.mark.slow
@pytest.mark.parametrize("bits", KEY_BITS)
def test_keys_of_the_offered_sizes_work(bits):
    private = PaillierPrivateKey.generate(bits)
    assert private.public.bits == bits
    assert signed(private, private.encrypt(-5)) == -5


def test_a_process_that_is_to_end_waits_for_no_power():
    """An interpreter waits for threads that are no daemons, and for every task of a pool, before it ends."""
    kept = in_threads(lambda _: threading.current_thread().daemon, range(8))
    assert kept == [True] * 8 or os.cpu_count() == 1


def test_powers_in_threads_are_those_of_a_loop_and_errors_come_through():
    modulus = key(128).public.square
    bases, exponents = [mpz(base) for base in range(2, 40)], list(range(1000, 1038))
    expected = [powmod(b, e, modulus) for b, e in zip(bases, exponents, strict=True)]
    assert in_threads(powmod, bases, exponents, [modulus] * len(bases)) == expected
    assert in_threads(powmod, [], [], []) == []
    assert in_threads(powmod, bases[:1], exponents[:1], [modulus]) == expected[:1]
    with pytest.raises(CryptoError, match="no unit"):
        in_threads(key(128).decrypt, [mpz(1), mpz(0)])


def test_other_sizes_are_not_offered():
    with pytest.raises(CryptoError, match="2048, 3072, 4096"):
        PaillierPrivateKey.generate(1024)
    with pytest.raises(CryptoError, match="large odd"):
        PaillierPublicKey(mpz(2**128))


def test_factors_that_are_no_key_are_refused():
    p = key(128).p
    for a, b in ((p, p), (p, 3 * p), (p, mpz(2) ** 64)):
        with pytest.raises(CryptoError, match="primes"):
            PaillierPrivateKey(a, b)
    with pytest.raises(CryptoError, match="same size"):
        PaillierPrivateKey(mpz(3), mpz(7))


def test_a_key_file_is_private_and_read_back(tmp_path):
    path = tmp_path / "server.json"
    key(512).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PaillierPrivateKey.load(path) == key(512)
    with pytest.raises(CryptoError, match="never overwritten"):
        key(512).save(path)
    for content in (
        b"{}",
        b"[1]",
        b"not json",
        b'{"kind": "paillier", "schema_version": 2, "p": "3", "q": "5"}',
    ):
        bad = tmp_path / f"bad{len(content)}"
        bad.write_bytes(content)
        bad.chmod(0o600)
        with pytest.raises(CryptoError, match="no Paillier key"):
            PaillierPrivateKey.load(bad)


def test_numbers_outside_the_group_are_refused():
    private = key(512)
    for number in (mpz(0), private.p, private.public.n * 5, private.public.square, mpz(-1)):
        with pytest.raises(CryptoError, match="no unit"):
            private.decrypt(number)


def test_the_key_holder_sees_the_randomness_and_rerandomizing_replaces_it_by_a_uniform_unit():
    private = key(256)
    public = private.public
    fixed = public.encode(42) * powmod(mpz(9), public.n, public.square) % public.square
    assert private.randomness(fixed) == 9
    rerandomizer = Rerandomizer(public, uses=2000)
    seen = []
    for _ in range(2000):
        changed = fixed * rerandomizer.factor() % public.square
        seen.append(private.randomness(changed))
    assert private.decrypt(changed) == 42
    assert len(set(seen)) == len(seen)
    bins = np.bincount([int(r) * 16 // int(public.n) for r in seen], minlength=16)
    assert stats.chisquare(bins).pvalue > FALSE_ALARM
    classes = [2 * (legendre(r, private.p) > 0) + (legendre(r, private.q) > 0) for r in seen]
    assert stats.chisquare(np.bincount(classes, minlength=4)).pvalue > FALSE_ALARM


def test_without_rerandomizing_the_randomness_shows_the_exponents():
    """What the requirement is about: even exponents leave squares, which the key holder tells from the rest."""
    private = key(256)
    public = private.public
    ciphertext = private.encrypt(3)
    for exponent in (2, 4, 10):
        used = private.randomness(powmod(ciphertext, exponent, public.square))
        assert legendre(used, private.p) == legendre(used, private.q) == 1
        assert used == powmod(private.randomness(ciphertext), exponent, public.n)


@given(
    st.integers(0, 8),
    st.integers(0, 6),
    st.integers(1, 40),
    st.integers(1, 5000),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_simultaneous_powers_are_products_of_powers(bases, columns, bits, expected, signed, seed):
    rng = np.random.default_rng(seed)
    modulus = key(128).public.square
    units = [mpz(int(rng.integers(2, 2**60))) * 2 + 1 for _ in range(bases)]
    units = [unit for unit in units if gcd(unit, modulus) == 1]
    powers = SimultaneousPowers(units, modulus, bits=bits, products=expected, signed=signed)
    exponents = rng.integers(-(2**bits) if signed else 0, 2**bits, (len(units), columns))
    found = list(powers.products(exponents))
    assert len(found) == columns
    for column, product in zip(exponents.T.tolist(), found, strict=True):
        oracle = mpz(1)
        for unit, exponent in zip(units, column, strict=True):
            oracle = oracle * powmod(unit, exponent, modulus) % modulus
        assert product == oracle == powers.product(column)


def test_wide_exponents_and_the_ends_of_the_range():
    modulus = key(128).public.square
    bits = 700
    powers = SimultaneousPowers([mpz(3), mpz(5)], modulus, bits=bits, products=3)
    for a, b in ((2**bits - 1, -(2**bits)), (0, 0), (12345 << 600, -1)):
        expected = powmod(3, a, modulus) * powmod(5, b, modulus) % modulus
        assert powers.product([a, b]) == expected
    with pytest.raises(CryptoError, match="outside"):
        powers.product([2**bits, 0])
    with pytest.raises(CryptoError, match="63 bits"):
        list(powers.products(np.zeros((2, 1), dtype=np.int64)))
    small = SimultaneousPowers([mpz(3)], modulus, bits=3, products=3)
    with pytest.raises(CryptoError, match="outside"):
        list(small.products(np.array([[8]])))
    unsigned = SimultaneousPowers([mpz(3)], modulus, bits=bits, products=3, signed=False)
    assert unsigned.product([2**bits - 1]) == powmod(3, 2**bits - 1, modulus)
    for outside in (-1, 2**bits):
        with pytest.raises(CryptoError, match=r"outside 0 .. 2\^700 - 1"):
            unsigned.product([outside])
    with pytest.raises(CryptoError, match="no unit"):
        SimultaneousPowers([key(128).p], modulus, bits=3, products=1)


def test_the_cost_model_counts_what_is_done_and_keeps_tables_in_bounds():
    few = straus_cost(bases=20, bits=36, products=16, modulus_bits=6144)
    many = straus_cost(bases=20, bits=36, products=10**5, modulus_bits=6144)
    assert few.window < many.window
    assert many.total(10**5) < 10**5 * 20 * 5
    crowded = straus_cost(bases=10_000, bits=36, products=10**6, modulus_bits=6144)
    assert 10_000 * 2**crowded.window * 768 < 2**29


@pytest.mark.parametrize("window", [1, 3, 8])
def test_fixed_powers(window):
    modulus = key(128).public.square
    powers = FixedPowers(mpz(7), modulus, bits=40, window=window)
    for exponent in (0, 1, 2**40 - 1, 123456789):
        assert powers.raise_to(exponent) == powmod(7, exponent, modulus)
    with pytest.raises(CryptoError, match="exponents of"):
        powers.raise_to(2**48)
    with pytest.raises(CryptoError, match="exponents of"):
        powers.raise_to(-1)


def test_windows_grow_with_use():
    assert fixed_window(bits=512, powers=10**5) == 8
    assert fixed_window(bits=512, powers=4) < 4


def test_the_transfer_group_is_the_published_safe_prime():
    modulus = group_modulus()
    assert modulus.bit_length() == 3072
    assert hex(modulus).startswith("0xffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74")
    assert hex(modulus).endswith("43db5bfce0fd108e4b82d120a93ad2caffffffffffffffff")
    assert is_prime(modulus)
    assert is_prime((modulus - 1) // 2)


@pytest.mark.parametrize("places", [2, 5])
def test_a_transfer_opens_the_chosen_place_and_no_other(places):
    sender = TransferSender(places)
    messages = [bytes([place]) * 40 for place in range(places)]
    for index in range(places):
        receiver = TransferReceiver.choose(index, sender.constants)
        sealed = sender.answer(receiver.request, messages, b"context")
        assert receiver.open(sender.public, sealed, b"context") == messages[index]
        moved = sealed[1:] + sealed[:1]
        with pytest.raises(CryptoError, match="authenticate"):
            receiver.open(sender.public, moved, b"context")
        with pytest.raises(CryptoError, match="authenticate"):
            receiver.open(sender.public, sealed, b"another")


def test_transfers_check_points_places_and_messages():
    sender = TransferSender(3)
    modulus = group_modulus()
    nonresidue = mpz(2)
    while jacobi(nonresidue, modulus) == 1:
        nonresidue += 1
    for point in (mpz(0), mpz(1), modulus, nonresidue):
        with pytest.raises(CryptoError, match="outside the group"):
            check_point(point)
        with pytest.raises(CryptoError, match="outside the group"):
            sender.answer(point, [b"a"] * 3, b"")
    with pytest.raises(CryptoError, match="3 messages of one length"):
        sender.answer(mpz(4), [b"a", b"bb", b"c"], b"")
    with pytest.raises(CryptoError, match="at least 2"):
        TransferSender(1)
    with pytest.raises(CryptoError, match="does not exist"):
        TransferReceiver.choose(3, sender.constants)


def test_requests_of_different_choices_look_alike():
    """The leading bytes of requests are uniform whichever place is asked for (the group's top 64 bits are ones)."""
    sender = TransferSender(2)
    for index in (0, 1):
        tops = [int(TransferReceiver.choose(index, sender.constants).request >> 3069) for _ in range(200)]
        assert stats.chisquare(np.bincount(tops, minlength=8)).pvalue > FALSE_ALARM

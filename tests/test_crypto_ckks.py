"""CKKS sums: exact against a decryption by hand, refused where they must be, and tight where the theory says."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

pytest.importorskip("tenseal")

from fedveil.crypto.ckks import LARGEST_MODULUS_BITS, CkksKey, CkksParameters, CkksSum, coefficients, values
from fedveil.crypto.seal_format import SEED_BYTES
from fedveil.errors import CryptoError

PARAMETERS = CkksParameters(silos=3)
DEGREE = PARAMETERS.degree


@pytest.fixture(scope="module")
def key():
    return CkksKey(PARAMETERS)


def numbers(seed, length, limit=PARAMETERS.limit):
    return np.random.default_rng(seed).integers(-limit, limit + 1, length)


def summed(key, vectors, parameters=PARAMETERS):
    total = CkksSum(parameters, len(vectors[0]))
    for vector in vectors:
        total.add(key.encrypt(vector))
    return total.encode()


def fourier(values, root, q):
    """The discrete Fourier transform of a list modulo q, by the textbook recursion."""
    if len(values) == 1:
        return values
    even, odd = fourier(values[::2], root * root % q, q), fourier(values[1::2], root * root % q, q)
    twisted, power = [], 1
    for value in odd:
        twisted.append(value * power % q)
        power = power * root % q
    return [(a + b) % q for a, b in zip(even, twisted, strict=True)] + [
        (a - b) % q for a, b in zip(even, twisted, strict=True)
    ]


def polynomial(transformed, q):
    """The polynomial of SEAL's transformed form: values at the odd powers of psi, in bit-reversed order."""
    degree = len(transformed)
    root = next(r for x in range(2, 100) if pow(r := pow(x, (q - 1) // (2 * degree), q), degree, q) == q - 1)
    psi = min(pow(root, k, q) for k in range(1, 2 * degree, 2))
    bits = degree.bit_length() - 1
    natural = [transformed[int(f"{k:0{bits}b}"[::-1], 2)] for k in range(degree)]
    back, inverse = pow(psi, -1, q), pow(degree, -1, q)
    plain = fourier(natural, back * back % q, q)
    found = [value * inverse * pow(back, j, q) % q for j, value in enumerate(plain)]
    return np.array([value - q if value > q // 2 else value for value in found])


def by_hand(data, secret, parameters):
    """Decrypt one sum as the definition says: c0 + c1 s modulo q, then the values at the slots' roots of unity."""
    q, degree = parameters.prime, parameters.degree
    c0, c1 = parameters.unpack(data).astype(np.int64).reshape(2, degree)
    plain = c0
    for power, factor in enumerate(polynomial(parameters.unpack(secret).tolist(), q)):
        moved = np.concatenate([-c1[degree - power :], c1[: degree - power]])  # X^power c1, as X^N = -1
        plain = (plain + factor * moved) % q
    zeta = np.exp(1j * np.pi * np.arange(degree) / degree)
    signed = np.where(plain > q // 2, plain - q, plain)
    slots = (np.fft.ifft(signed * zeta) * degree)[::2]  # at zeta^(2k+1), every second one
    return np.stack([slots.real, slots.imag], axis=1).reshape(-1) / parameters.scale


def test_a_sum_decrypted_by_hand_is_the_sum_up_to_the_error_that_is_claimed(key):
    vectors = [numbers(seed, DEGREE) for seed in range(3)]
    data = summed(key, vectors)
    slots = by_hand(data, key.private_bytes(), PARAMETERS)
    error = (slots - sum(vectors)) * PARAMETERS.scale
    claimed = math.sqrt(3 * DEGREE / 2 * (10.5 + 1 / 4))
    assert 0.9 * claimed < error.std() < 1.1 * claimed  # 2 N values: 1.6 % standard error
    assert np.abs(error).max() < PARAMETERS.scale / 4
    assert np.array_equal(key.decrypt(data, DEGREE), sum(vectors))


def test_equal_numbers_of_many_silos_have_errors_of_their_own():
    """Rounded to the nearest, 64 of them would have 1.2 times the error that is claimed, and 4,000 five times."""
    many = CkksParameters(silos=64)
    key, same = CkksKey(many), numbers(0, DEGREE, many.limit)
    slots = by_hand(summed(key, [same] * 64, many), key.private_bytes(), many)
    error = (slots - 64 * same) * many.scale
    claimed = math.sqrt(64 * DEGREE / 2 * (10.5 + 1 / 4))
    assert 0.9 * claimed < error.std() < 1.1 * claimed  # 2 N values: 1.6 % standard error


def test_polynomials_are_their_values_and_products_of_values_are_their_products():
    rng = np.random.default_rng(11)
    p, s = rng.integers(-50, 50, (3, 16)), rng.integers(-1, 2, 16)
    zeta = np.exp(1j * np.pi / 16)
    direct = np.stack([np.polyval(row[::-1], zeta ** (4 * np.arange(8) + 1)) for row in p])
    assert np.allclose(values(p.astype(float)), direct, rtol=0, atol=1e-9)
    assert np.allclose(coefficients(direct), p, rtol=0, atol=1e-9)
    long = np.stack([np.convolve(row, s) for row in p])
    long = np.pad(long, ((0, 0), (0, 1)))
    product = coefficients(values(p.astype(float)) * values(s.astype(float)))
    assert np.allclose(product, long[:, :16] - long[:, 16:], rtol=0, atol=1e-9)


def test_the_product_with_a_key_is_exact_for_the_largest_ciphertexts():
    largest, key = np.full((1, 4096), 2.0**28 - 1), np.ones(4096)
    exact = (2 * np.arange(4096) + 2 - 4096) * (2**28 - 1)  # of X^k: k + 1 terms less the others
    found = coefficients(values(largest) * values(key))
    assert np.abs(found - exact).max() < 1 / 64  # rounding takes away 1/2


@pytest.mark.parametrize("length", [1, DEGREE // 2, DEGREE // 2 + 1, DEGREE, 3 * DEGREE + 5])
def test_sums_of_the_largest_numbers_are_exact_at_every_length(key, length):
    vectors = [np.full(length, PARAMETERS.limit), numbers(1, length), np.full(length, PARAMETERS.limit)]
    assert np.array_equal(key.decrypt(summed(key, vectors), length), sum(vectors))
    assert np.array_equal(key.decrypt(summed(key, [-v for v in vectors]), length), -sum(vectors))


@pytest.mark.parametrize("silos", [2, 10, 100, 1000])
def test_the_scale_leaves_twelve_deviations_and_the_limit_leaves_the_modulus(silos):
    parameters = CkksParameters(silos=silos)
    error = math.sqrt(silos * parameters.degree / 2 * 10.6)
    assert parameters.scale / 2 > 11.9 * error
    assert math.sqrt(2) * silos * parameters.limit * parameters.scale < 2**54
    assert parameters.limit >= 2**24


def test_ciphertexts_have_the_size_that_is_promised_and_are_fresh_every_time(key):
    vector = np.zeros(DEGREE, dtype=np.int64)
    first, second = key.encrypt(vector), key.encrypt(vector)
    assert len(first) == PARAMETERS.fresh_bytes == SEED_BYTES + 7 * DEGREE
    assert len(summed(key, [vector])) == 14 * DEGREE
    assert first[:SEED_BYTES] != second[:SEED_BYTES]
    words = PARAMETERS.unpack(first[SEED_BYTES:]).astype(np.float64) / PARAMETERS.prime
    assert abs(words.mean() - 0.5) < 6 / math.sqrt(12 * DEGREE)  # an encryption of zero looks uniform


def test_a_key_travels_and_another_key_shows_nothing(key):
    vector = numbers(5, DEGREE, limit=1000)
    data = summed(key, [vector])
    assert np.array_equal(CkksKey(PARAMETERS, key.private_bytes()).decrypt(data, DEGREE), vector)
    with pytest.raises(CryptoError, match="another key"):
        CkksKey(PARAMETERS).decrypt(data, DEGREE)


def test_worker_processes_encrypt_the_same_numbers(key):
    vector = numbers(6, 70 * DEGREE)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as workers:
        total = CkksSum(PARAMETERS, len(vector))
        total.add(key.encrypt(vector, workers))
    assert np.array_equal(key.decrypt(total.encode(), len(vector)), vector)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"degree": 1024}, "less than 128 bits"),
        ({"degree": 2048}, "less than 128 bits"),
        ({"degree": 3000}, "no such degree"),
        ({"prime_bits": 50}, "possible"),
        ({"prime_bits": 64}, "possible"),
        ({"silos": 0}, "do not fit"),
        ({"prime_bits": 24}, "do not fit"),
        ({"silos": 10**8}, "do not fit"),
    ],
)
def test_weak_and_useless_parameters_are_refused(given, message):
    with pytest.raises(CryptoError, match=message):
        CkksParameters(**{"silos": 2, **given})


def test_the_table_is_no_laxer_than_seals(key):
    from tenseal import sealapi

    for degree, bits in LARGEST_MODULUS_BITS.items():
        assert bits <= sealapi.CoeffModulus.MaxBitCount(degree, sealapi.SEC_LEVEL_TYPE.TC128)


def test_what_is_altered_or_of_other_parameters_is_refused_and_the_sum_is_as_before(key):
    vector = numbers(7, DEGREE, limit=2**24)
    good = key.encrypt(vector)
    total = CkksSum(PARAMETERS, DEGREE)
    bad = [
        b"",
        good[:-1],
        good + bytes(1),
        CkksKey(CkksParameters(silos=3, degree=8192)).encrypt(vector),  # another degree
        CkksKey(CkksParameters(silos=3, prime_bits=48)).encrypt(np.zeros(DEGREE, np.int64)),  # another level
        good[:SEED_BYTES] + b"\xff" * (len(good) - SEED_BYTES),
    ]
    for data in bad:
        with pytest.raises(CryptoError):
            total.add(data)
    for _ in range(3):
        total.add(good)
    with pytest.raises(CryptoError, match="at most 3"):
        total.add(good)
    summed_up = total.encode()
    assert np.array_equal(key.decrypt(summed_up, DEGREE), 3 * vector)
    for data in (b"", summed_up[:-1], summed_up + bytes(2), b"\xff" * len(summed_up)):
        with pytest.raises(CryptoError):
            key.decrypt(data, DEGREE)
    swapped = key.private_bytes()[7:] + key.private_bytes()[:7]
    for secret in (b"", key.private_bytes()[:-1], b"\xff" * len(swapped), bytes(len(swapped)), swapped):
        with pytest.raises(CryptoError):
            CkksKey(PARAMETERS, secret)
    with pytest.raises(CryptoError, match="limit") as error:
        key.encrypt(np.array([PARAMETERS.limit + 12345]))
    assert str(PARAMETERS.limit + 12345) not in str(error.value)


def test_altered_ciphertexts_sums_and_keys_meet_typed_errors_alone(key):
    rng, parameters = np.random.default_rng(12), CkksParameters(silos=1000)
    sent = key.encrypt(numbers(8, 100))
    readers = (
        (sent, lambda data: CkksSum(parameters, 100).add(data)),
        (summed(key, [numbers(9, 100)]), lambda data: key.decrypt(data, 100)),
        (key.private_bytes(), lambda data: CkksKey(PARAMETERS, data)),
    )
    for data, read in readers:
        for _ in range(300):
            altered = bytearray(data)
            for place in rng.integers(len(data), size=rng.integers(1, 4)):
                altered[place] = int(rng.choice([0, 255, rng.integers(256)]))
            if rng.random() < 0.3:
                del altered[rng.integers(len(altered)) :]
            try:
                read(bytes(altered))
            except CryptoError:
                continue


def test_parameters_have_a_fingerprint_of_their_own():
    some = [{"silos": 3}, {"silos": 300}, {"silos": 3, "degree": 8192}, {"silos": 3, "prime_bits": 48}]
    assert len({CkksParameters(**one).fingerprint for one in some}) == 4

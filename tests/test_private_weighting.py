"""Private weighting: the right sum, a server that sees nothing else, and nothing wrong accepted."""

import dataclasses
import itertools
import math
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import pytest
from gmpy2 import legendre, mpz
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.crypto.key_agreement import AgreementKey, RoundId, SignedKey
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.errors import OwnRecordsError, ProtocolError
from fedveil.protocols.messages import SERVER, Directory, Envelope, RevealRequest
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator, PaillierKeyHolder, choose_layout
from fedveil.protocols.weighting.plan import (
    BlindedHistogram,
    EncryptedSum,
    EncryptedWeights,
    Participants,
    SealedSeed,
    WeightingKey,
    WeightingPlan,
)
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder, choose_parameters
from fedveil.protocols.weighting.server import WeightingServer, drawn_places
from fedveil.protocols.weighting.silo import KEY_PURPOSE, WeightingSilo
from tests.opened_parties import WeightingParties

FALSE_ALARM = 1e-6
needs_seal = pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe")


@cache
def paillier_key(bits):
    return PaillierPrivateKey.generate_insecure(bits)


EVERYBODY = (0, 1, 2)
RUN = bytes(range(16))
SETUP = RoundId(run=RUN, round=0, attempt=0)


def evaluator(bits=768):
    return partial(PaillierEvaluator, bits=bits)


def plan_of(**changes):
    numbers = {
        "silos": 3,
        "users": 6,
        "length": 5,
        "largest_count": 30,
        "norm_limit": 2**18,
        "noise_limit": 2**20,
    }
    return WeightingPlan(**(numbers | changes))


def session_of(plan, counts, bits=768):
    return WeightingParties(
        plan, counts, holder=PaillierKeyHolder(plan, paillier_key(bits)), evaluator=evaluator(bits)
    )


def inputs(session, rng):
    plan = session.plan
    limit = plan.norm_limit // math.isqrt(2 * plan.length)
    contributions = [rng.integers(-limit, limit + 1, (len(s.members), plan.length)) for s in session.silos]
    limit = plan.noise_limit
    noise = [rng.integers(-limit, limit + 1, plan.length) for _ in session.silos]
    return contributions, noise


def plain_sum(session, counts, contributions, noise, drawn=None):
    """The oracle: sum of n_su / N_u y_su + z_s in float64."""
    taking_part = np.ones(session.plan.users) if drawn is None else drawn
    totals = np.maximum(counts.sum(axis=0), 1)
    result = np.sum(noise, axis=0).astype(float)
    for silo, rows in zip(session.silos, contributions, strict=True):
        users = silo.members
        result += (counts[silo.index][users] / totals[users] * taking_part[users]) @ rows
    return result


def check_round(session, counts, rng, round_number=1, drawn=None):
    contributions, noise = inputs(session, rng)
    found = session.aggregate(round_number, zip(contributions, noise, strict=True), drawn=drawn)
    expected = plain_sum(session, counts, contributions, noise, drawn)
    assert np.abs(found - expected).max() <= session.plan.silos / 2 + 1e-3


@pytest.mark.parametrize("cipher", ["paillier", pytest.param("rlwe", marks=needs_seal)])
def test_the_same_dithers_give_the_same_remainders(cipher):
    rng = np.random.default_rng(12)
    counts = rng.integers(1, 4, (2, 2))
    keys = [bytes([silo]) * 32 for silo in range(2)]
    found, plan = [], plan_of(silos=2, users=2)
    holder, make = PaillierKeyHolder(plan, paillier_key(768)), evaluator()
    if cipher == "rlwe":
        holder, make = RlweKeyHolder(plan), RlweEvaluator
    for dither in (keys.__getitem__, keys.__getitem__, lambda silo: None):
        session = WeightingParties(plan, counts, holder=holder, evaluator=make)
        contributions, noise = inputs(session, np.random.default_rng(13))
        found.append(session.aggregate(1, zip(contributions, noise, strict=True), dither=dither))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.all(found[0] != found[2])


@given(
    silos=st.integers(2, 6),
    users=st.integers(1, 20),
    length=st.integers(1, 6),
    per_silo=st.integers(1, 4),
    renewed=st.booleans(),
    rounds=st.integers(1, 3),
    bits=st.sampled_from([512, 768]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=15)
def test_paillier_gives_the_weighted_sum(silos, users, length, per_silo, renewed, rounds, bits, seed):
    rng = np.random.default_rng(seed)
    plan = plan_of(
        silos=silos,
        users=users,
        length=length,
        largest_count=silos * per_silo,
        renewed=renewed,
        rounds=rounds,
    )
    counts = rng.integers(0, per_silo + 1, (silos, users)) * (rng.random((silos, users)) < 0.6)
    counts[0, 0] = 1
    session = session_of(plan, counts, bits)
    for round_number in range(1, rounds + 1):
        drawn = rng.random(users) < 0.5 if renewed else None
        check_round(session, counts, rng, round_number, drawn)


def test_real_numbers_come_out_within_the_published_precision():
    """|secure - plain| <= (|U| + |S|) P for contributions and noise rounded to multiples of P (Theorem 4)."""
    rng = np.random.default_rng(1)
    plan = plan_of(silos=4, users=9, length=12, largest_count=20)
    counts = rng.integers(0, 6, (4, 9))
    session = session_of(plan, counts)
    precision = 1.0 / plan.norm_limit
    deltas = [rng.uniform(-0.25, 0.25, (len(s.members), 12)) for s in session.silos]
    noise = [rng.normal(0, 0.5, 12) for _ in session.silos]
    rounded = [np.rint(d / precision).astype(np.int64) for d in deltas]
    shares = [np.rint(z / precision).astype(np.int64) for z in noise]
    found = session.aggregate(1, zip(rounded, shares, strict=True)) * precision
    expected = plain_sum(session, counts, deltas, noise)
    assert np.abs(found - expected).max() <= (plan.users + plan.silos) * precision


@pytest.mark.parametrize(
    ("users", "length", "rounds", "bits", "packed", "direct"),
    [(6, 4, 1, 512, True, True), (6, 3, 50, 1024, True, False), (60, 40, 10, 512, False, False)],
)
def test_every_layout_gives_the_same_sum(users, length, rounds, bits, packed, direct):
    rng = np.random.default_rng(2)
    plan = plan_of(users=users, length=length, rounds=rounds)
    layout = choose_layout(plan, bits)
    assert (layout.slots > 1, layout.direct) == (packed, direct)
    counts = rng.integers(0, 11, (3, users))
    session = session_of(plan, counts, bits)
    check_round(session, counts, rng, 1)
    check_round(session, counts, rng, 2)


@given(silos=st.integers(2, 6), users=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_under_oblivious_transfer_every_user_counts_with_all_silos_or_with_none(silos, users, seed):
    """Coordinate u has user u alone, so the sum over whoever was drawn can be read off."""
    rng = np.random.default_rng(seed)
    places = int(rng.integers(2, 5))
    plan = plan_of(
        silos=silos,
        users=users,
        length=users,
        largest_count=3 * silos,
        noise_limit=0,
        renewed=True,
        places=places,
        chosen=int(rng.integers(1, places)),
    )
    counts = rng.integers(0, 4, (silos, users))
    counts[0, 0] = 1
    session = session_of(plan, counts, 512)
    rows = [np.eye(users, dtype=np.int64)[silo.members] * 10**5 for silo in session.silos]
    zero = [np.zeros(users, dtype=np.int64)] * silos
    found = session.aggregate(1, zip(rows, zero, strict=True)) / 10**5
    present = counts.sum(axis=0) > 0
    drawn = found > 0.5
    assert np.abs(found - drawn).max() <= (silos / 2 + 1e-3) / 10**5
    assert not drawn[~present].any()


def test_oblivious_transfer_gives_each_user_wholly_or_not_at_all():
    plan = plan_of(users=3, length=3, renewed=True, places=3, chosen=2, noise_limit=0)
    counts = np.array([[1, 2, 0], [2, 0, 0], [1, 1, 1]])
    session = session_of(plan, counts)
    rows = [np.eye(3, dtype=np.int64)[silo.members] * 1000 for silo in session.silos]
    zero = [np.zeros(3, dtype=np.int64)] * 3
    drawn = []
    for round_number in range(1, 21):
        found = session.aggregate(round_number, zip(rows, zero, strict=True)) / 1000
        assert np.all((np.abs(found) < 0.002) | (np.abs(found - 1) < 0.002))
        drawn.append(found > 0.5)
    assert stats.binomtest(int(np.sum(drawn)), 60, 2 / 3).pvalue > FALSE_ALARM
    assert 0 < np.sum(drawn) < 60


def test_places_are_a_uniform_subset():
    counts = np.sum([drawn_places(5, 2) for _ in range(5000)], axis=0)
    assert counts.sum() == 10_000
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


@needs_seal
@pytest.mark.parametrize("renewed", [False, True])
def test_ring_lwe_gives_the_weighted_sum(renewed):
    rng = np.random.default_rng(4)
    plan = plan_of(users=4, length=20, largest_count=40, renewed=renewed)
    counts = rng.integers(0, 14, (3, 4))
    counts[:, 2] = 0
    session = WeightingParties(plan, counts, holder=RlweKeyHolder(plan), evaluator=RlweEvaluator)
    for round_number in (1, 2):
        drawn = np.array([True, False, True, True]) if renewed else None
        check_round(session, counts, rng, round_number, drawn)


@needs_seal
def test_ring_lwe_works_over_several_blocks_and_with_oblivious_transfer():
    rng = np.random.default_rng(5)
    plan = plan_of(silos=2, users=2, length=8192, largest_count=8, renewed=True, places=2, chosen=1)
    counts = np.array([[1, 3], [2, 0]])
    session = WeightingParties(plan, counts, holder=RlweKeyHolder(plan), evaluator=RlweEvaluator)
    contributions, noise = inputs(session, rng)
    found = session.aggregate(1, zip(contributions, noise, strict=True))
    possible = [
        plain_sum(session, counts, contributions, noise, np.array([a, b])) for a in (0, 1) for b in (0, 1)
    ]
    assert min(np.abs(found - expected).max() for expected in possible) <= 1.001


def test_users_without_records_are_agreed_on_and_count_nothing():
    rng = np.random.default_rng(6)
    counts = np.array([[0, 3, 0, 0, 1, 0], [0, 0, 0, 2, 1, 0], [0, 1, 0, 0, 0, 0]])
    session = session_of(plan_of(), counts)
    assert session.server.participants == (1, 3, 4)
    check_round(session, counts, rng)


@pytest.mark.parametrize("places", [0, 4])
def test_a_run_without_any_record_sums_the_noise(places):
    rng = np.random.default_rng(6)
    plan = plan_of(renewed=places > 0, places=places, chosen=places // 2)
    session = session_of(plan, np.zeros((3, 6), dtype=np.int64))
    for round_number in (1, 2):
        noise = [rng.integers(-50, 51, plan.length) for _ in range(plan.silos)]
        nothing = np.zeros((0, plan.length), dtype=np.int64)
        found = session.aggregate(round_number, ((nothing, share) for share in noise))
        assert np.abs(found - sum(noise)).max() <= plan.silos / 2 + 1e-3


def test_a_silo_without_records_still_takes_part():
    rng = np.random.default_rng(7)
    counts = np.array([[2, 3, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 4]])
    check_round(session_of(plan_of(), counts), counts, rng)


def test_powers_of_ten_hold_every_possible_total_and_far_fewer_bits():
    """Appendix D.4 of ULDP-FL, for counts that silos limit by themselves: totals are sums of powers of ten."""
    bits = []
    for silos, most in ((2, 10**4), (3, 10**4), (4, 10**4), (5, 10**4), (5, 100)):
        plan = plan_of(silos=silos, largest_count=silos * most, powers_of_ten=True)
        levels = [0, *(10**k for k in range(len(str(most))))]
        for held in itertools.combinations_with_replacement(levels, silos):
            assert sum(held) == 0 or plan.common % sum(held) == 0
        bits.append(plan.common.bit_length())
    assert bits == [45, 142, 371, 927, 140]
    with pytest.raises(ProtocolError, match="longer than 8192 bits"):
        plan_of(silos=3, largest_count=30_000)
    with pytest.raises(ProtocolError, match="longer than 8192 bits"):
        plan_of(silos=30, largest_count=30 * 10**4, powers_of_ten=True)


def test_a_silo_counts_the_nearest_power_of_ten_by_ratio():
    plan = plan_of(silos=2, users=9, largest_count=2 * 1234, powers_of_ten=True)
    counts = np.array([0, 1, 3, 4, 31, 32, 316, 317, 10**6])
    limited = plan.limit_counts(counts)
    assert limited.tolist() == [0, 1, 1, 10, 10, 100, 100, 1000, 1000]
    plan.check_counts(limited, silo=0)
    with pytest.raises(OwnRecordsError, match="no power of ten"):
        plan.check_counts(np.array([0, 1, 3, 1, 1, 1, 1, 1, 1]), silo=0)


@needs_seal
def test_ring_lwe_weighs_users_of_ten_thousand_records_by_powers_of_ten():
    plan = plan_of(users=5, length=20, largest_count=30_000, powers_of_ten=True, norm_limit=2**14)
    counts = np.array([[1, 10**4, 0, 100, 10], [1, 10**4, 0, 0, 1000], [0, 10**4, 10, 1, 0]])
    session = WeightingParties(plan, counts, holder=RlweKeyHolder(plan), evaluator=RlweEvaluator)
    check_round(session, counts, np.random.default_rng(3))
    with pytest.raises(ProtocolError, match="more than any ring"):
        choose_parameters(dataclasses.replace(plan, largest_count=2000, powers_of_ten=False))


def test_too_many_records_are_refused_without_showing_how_many():
    counts = np.full((3, 6), 3)
    counts[1, 4] = 17
    with pytest.raises(ProtocolError, match=r"silo 1: .* N_max / \|S\| = 10") as error:
        session_of(plan_of(), counts)
    assert "17" not in str(error.value)
    counts[1, 4] = -1
    with pytest.raises(ProtocolError, match="silo 1"):
        session_of(plan_of(), counts)


def test_a_modulus_that_is_too_small_is_refused_with_both_sizes():
    with pytest.raises(
        ProtocolError, match=r"needs 29\d\d bits \(C alone, for N_max = 2000, has 2878\) and .* 2047"
    ):
        choose_layout(plan_of(largest_count=2000), 2048)
    assert choose_layout(plan_of(largest_count=2000), 3072).slots == 1


@pytest.mark.parametrize("public", [b"", b"\x00" * 96, b"\xff" * 95, b"\xff" * 97, b"\x7f" + b"\xff" * 95])
def test_a_key_of_another_size_than_the_agreed_one_is_refused(public):
    with pytest.raises(ProtocolError, match="no number of 768 bits"):
        evaluator()(plan_of(), public)


def test_a_key_that_would_keep_a_silo_searching_for_ever_is_refused():
    """A square has no unit of Jacobi symbol -1; an even number is no modulus."""
    square = int(mpz(2**384 - 317) ** 2)
    with pytest.raises(ProtocolError, match="refused"):
        evaluator()(plan_of(), square.to_bytes(96, "big"))
    with pytest.raises(ProtocolError, match="refused"):
        evaluator()(plan_of(), int(paillier_key(768).public.n - 1).to_bytes(96, "big"))


@pytest.mark.parametrize("factor", [3, 5, 23, 27, 29])
def test_a_key_that_would_show_a_factor_of_a_users_records_is_refused(factor):
    """gcd(r_u N_u, n) = gcd(N_u, n): of such a key the server would read N_u off the blinded total."""
    plan = plan_of(largest_count=29)
    modulus = factor * ((1 << 767) // factor + 1 | 1)
    with pytest.raises(ProtocolError, match="N_max = 29"):
        evaluator()(plan, modulus.to_bytes(96, "big"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silos": 1}, "at least 2 silos"),
        ({"users": 0}, "1 user"),
        ({"largest_count": 2}, "n_max must be at least 3"),
        ({"largest_count": 10_000}, "powers-of-ten"),
        ({"norm_limit": 2**60, "largest_count": 30}, "61 bits"),
        ({"places": 3, "chosen": 1}, "draws users anew"),
        ({"places": 3, "chosen": 3, "renewed": True}, "strictly between"),
    ],
)
def test_plans_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ProtocolError, match=message):
        plan_of(**changes)


def test_ring_lwe_says_what_it_cannot_hold():
    with pytest.raises(ProtocolError, match="cap the records per user"):
        choose_parameters(plan_of(largest_count=2000))


@needs_seal
@pytest.mark.parametrize(("largest_count", "users"), [(6, 5), (16, 100), (64, 100), (100, 1000)])
def test_ring_parameters_leave_room_for_the_flood(largest_count, users):
    plan = plan_of(largest_count=largest_count, users=users, length=10**6, silos=5, noise_limit=2**26)
    chosen = choose_parameters(plan)
    assert chosen.spare_bits >= 0
    assert chosen.flood_bits >= chosen.norm_bits + 48 + math.log2(1.1)
    largest = plan.silos * (1.5 * 2**chosen.flood_bits + 2**chosen.noise_bits)
    modulus = math.prod(chosen.ring.moduli)
    assert largest < modulus / (2 * max(chosen.plain_primes))
    assert chosen.modulus > 2 * plan.largest_sum
    assert all(prime > 2 * plan.norm_limit * plan.count_limit for prime in chosen.plain_primes)


@needs_seal
def test_the_noise_of_a_weighted_sum_stays_below_what_the_flood_is_sized_for():
    """The largest contributions, weights and counts that a plan allows, against the bound B of one coefficient."""
    plan = plan_of(largest_count=30, users=20, length=8191)
    holder = RlweKeyHolder(plan)
    chosen, key = holder.parameters, holder._keys[0]
    silo = RlweEvaluator(plan, holder.public)
    modulus = holder.modulus
    weights = holder.encrypt([modulus - 1 - user for user in range(plan.users)])
    silo.load(weights, [chosen.plain_primes[0] // 2] * plan.users)  # the factor by which noise grows most
    rows = np.full((plan.users, 8192), (plan.norm_limit * plan.count_limit) // math.isqrt(8192))
    sums = silo._engine.weighted_sums(silo._bases, rows * np.sign(np.sin(np.arange(8192) + 1)).astype(int))
    limit = math.log2(math.prod(chosen.ring.moduli) / (2 * chosen.plain_primes[0]))
    found = limit - key.noise_budget(sums[0])
    assert chosen.noise_bits - 12 < found <= chosen.noise_bits


def test_inputs_outside_the_plan_are_refused_with_their_silo():
    counts = np.ones((3, 6), dtype=np.int64)
    session = session_of(plan_of(), counts)
    session.deliver(session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY))
    silo = session.silos[2]
    rows, zero = np.zeros((6, 5), dtype=np.int64), np.zeros(5, dtype=np.int64)
    for bad_rows, bad_noise, message in (
        (rows[:5], zero, "6 users"),
        (rows, zero[:4], "5 coordinates"),
        (rows + 2**18 + 1, zero, "longer than 262144 grid units"),
        (rows, zero - 2**20 - 1, "noise share exceeds"),
    ):
        with pytest.raises(ProtocolError, match=f"silo 2: .*{message}"):
            silo.encrypt_sum(bad_rows, bad_noise)


def test_a_silo_that_changes_its_counts_is_noticed():
    rng = np.random.default_rng(8)
    counts = np.full((3, 6), 5)
    session = session_of(plan_of(), counts)
    session.silos[1]._counts[3] += 1
    with pytest.raises(ProtocolError, match="check coordinate is wrong"):
        session.aggregate(1, zip(*inputs(session, rng), strict=True))


def test_more_records_than_n_max_give_an_error_and_no_garbage():
    rng = np.random.default_rng(9)
    plan = plan_of(largest_count=9)
    counts = np.full((3, 6), 3)
    session = session_of(plan, counts)
    totals = [
        (t + 8 * b) % session.server._holder.modulus
        for t, b in zip(session.server._totals, session.silos[0]._blinds, strict=True)
    ]
    session.server._inverses = {
        u: pow(int(t), -1, session.server._holder.modulus) for u, t in enumerate(totals)
    }
    with pytest.raises(ProtocolError, match="N_max = 9"):
        session.aggregate(1, zip(*inputs(session, rng), strict=True))


def test_a_round_is_played_once_and_a_vanished_silo_reveals_nothing():
    rng = np.random.default_rng(10)
    counts = np.full((3, 6), 2)
    session = session_of(plan_of(), counts)
    contributions, noise = inputs(session, rng)
    first = RoundId(run=session.run, round=1, attempt=0)
    session.deliver(session.server.begin(first, EVERYBODY))
    late = [session.silos[s].encrypt_sum(contributions[s], noise[s]) for s in range(3)]
    session.server.receive(0, late[0])
    session.server.receive(1, late[1])
    assert session.server.missing == (2,)
    assert not session.server.may_have_released
    with pytest.raises(ProtocolError, match=r"silos \[2\] are missing"):
        session.server.result()
    with pytest.raises(ProtocolError, match="keys are used once"):
        session.server.begin(first, EVERYBODY)
    found = session.aggregate(1, zip(contributions, noise, strict=True), attempt=1)
    assert np.abs(found - plain_sum(session, counts, contributions, noise)).max() <= 2
    assert session.server.may_have_released
    with pytest.raises(ProtocolError, match="silo 2: "):
        session.server.receive(2, late[2])
    request = Envelope(round_id=first, sender=SERVER, recipient=0, message=RevealRequest()).encode()
    with pytest.raises(ProtocolError, match="attempt 0"):
        session.silos[0].receive(request)


def test_a_silo_that_missed_the_weights_gets_them_with_the_next_attempt():
    rng = np.random.default_rng(12)
    counts = np.full((3, 6), 2)
    session = session_of(plan_of(rounds=3), counts)
    for recipient, data in session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY):
        if recipient != 2:
            session.silos[recipient].receive(data)
    for round_number, attempt in ((1, 1), (2, 0), (3, 0)):
        contributions, noise = inputs(session, rng)
        found = session.aggregate(round_number, zip(contributions, noise, strict=True), attempt=attempt)
        assert np.abs(found - plain_sum(session, counts, contributions, noise)).max() <= 1.5
    sizes = [line.bytes for line in session.transcript.lines if line.purpose == EncryptedWeights.purpose]
    assert sizes[:3] > sizes[3:6] == sizes[6:]


def altered(data, **changes):
    envelope = Envelope.decode(data)
    message = dataclasses.replace(envelope.message, **changes)
    return dataclasses.replace(envelope, message=message).encode()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (lambda old: old[:-1], "ciphertexts instead of"),
        (lambda old: (*old[:-1], bytes(len(old[0]))), "no unit"),
        (lambda old: (*old[:-1], b"\xff" * len(old[0])), "no unit"),
        (lambda old: (*old[:-1], int(paillier_key(768).public.n).to_bytes(len(old[0]), "big")), "no unit"),
        (lambda old: (*old[:-1], b"short"), "5 bytes"),
    ],
)
def test_ciphertexts_outside_the_group_are_refused(blocks, message):
    rng = np.random.default_rng(11)
    session = session_of(plan_of(), np.full((3, 6), 2))
    contributions, noise = inputs(session, rng)
    session.deliver(session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY))
    data = session.silos[1].encrypt_sum(contributions[1], noise[1])
    old = Envelope.decode(data).message.blocks
    with pytest.raises(ProtocolError, match=f"silo 1: .*{message}"):
        session.server.receive(1, altered(data, blocks=blocks(old)))


def test_weights_outside_the_group_are_refused_by_the_silo():
    session = session_of(plan_of(), np.full((3, 6), 2))
    ((_, data), *_) = session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY)
    old = Envelope.decode(data).message.blocks
    with pytest.raises(ProtocolError, match="no unit"):
        session.silos[0].receive(altered(data, blocks=(bytes(len(old[0])), *old[1:])))
    other = RoundId(run=session.run, round=2, attempt=0)
    short = Envelope(round_id=other, sender=SERVER, recipient=0, message=EncryptedWeights(blocks=old[1:]))
    with pytest.raises(ProtocolError, match="5 encrypted weights for 6"):
        session.silos[0].receive(short.encode())


def silo_of(plan, identities, index):
    roster = tuple(identity.public for identity in identities)
    counts = np.full(6, 2)
    place = ClientContext(run=RUN, number=index, identity=identities[index], roster=roster)
    return WeightingSilo(plan, place, counts=counts, evaluator=evaluator())


def parties_of(plan, identities):
    """Return the silos and the server, who have said nothing yet."""
    server = WeightingServer(plan, RUN, PaillierKeyHolder(plan, paillier_key(768)))
    return [silo_of(plan, identities, index) for index in range(3)], server


def test_the_server_must_list_every_user_of_a_silo():
    plan, identities = plan_of(), [IdentityKey.generate() for _ in range(3)]
    silos, server = parties_of(plan, identities)
    messages = []
    for silo in silos:
        messages += server.receive(silo.index, silo.announce())
    while messages:
        recipient, data = messages.pop(0)
        content = Envelope.decode(data).message
        if isinstance(content, Participants) and recipient == 1:
            with pytest.raises(ProtocolError, match="lacks a user of this silo"):
                silos[1].receive(altered(data, present=(True,) * 5 + (False,)))
            return
        for reply in silos[recipient].receive(data):
            messages += server.receive(recipient, reply)
    pytest.fail("no list of participants was sent")


def test_rounds_need_the_setup_and_the_plans_way_of_sampling():
    plan = plan_of()
    server = WeightingServer(plan, RUN, PaillierKeyHolder(plan, paillier_key(768)))
    with pytest.raises(ProtocolError, match="setup"):
        server.begin(RoundId(run=RUN, round=1, attempt=0), EVERYBODY)
    session = session_of(plan_of(renewed=True), np.full((3, 6), 2))
    with pytest.raises(ProtocolError, match="draws from 6 users"):
        session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY)
    with pytest.raises(ProtocolError, match="draws from 6 users"):
        session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY, np.ones(5, dtype=bool))


def test_messages_of_other_runs_rounds_senders_and_replays_are_refused():
    rng = np.random.default_rng(14)
    session = session_of(plan_of(rounds=2), np.full((3, 6), 2))
    contributions, noise = inputs(session, rng)
    session.aggregate(1, zip(contributions, noise, strict=True))
    weights = session.server.begin(RoundId(run=session.run, round=2, attempt=0), EVERYBODY)
    session.deliver(weights)
    sent = session.silos[1].encrypt_sum(contributions[1], noise[1])
    envelope, round_id = Envelope.decode(sent), RoundId(run=session.run, round=2, attempt=0)
    session.server.receive(1, sent)
    for changes, reason in (
        ({"round_id": dataclasses.replace(round_id, run=bytes(16))}, "another run"),
        ({"round_id": dataclasses.replace(round_id, round=1)}, "round 1"),
        ({"round_id": dataclasses.replace(round_id, attempt=1)}, "attempt 1"),
        ({"sender": 0}, "another party's name"),
        ({"recipient": 2}, "addressed to another party"),
        ({"message": RevealRequest()}, "did not expect"),
        ({}, "a replay"),
    ):
        with pytest.raises(ProtocolError, match=f"silo 1: .*{reason}"):
            session.server.receive(1, dataclasses.replace(envelope, **changes).encode())
    with pytest.raises(ProtocolError, match="keys are used once"):
        session.silos[0].receive(weights[0][1])
    old = dataclasses.replace(
        Envelope.decode(weights[2][1]), round_id=dataclasses.replace(round_id, run=bytes(16))
    )
    with pytest.raises(ProtocolError, match="of the same run"):
        session.silos[2].receive(old.encode())


def test_a_key_that_the_server_put_in_place_is_refused():
    plan, identities = plan_of(), [IdentityKey.generate() for _ in range(3)]
    silos, server = parties_of(plan, identities)
    sent = [message for silo in silos for message in server.receive(silo.index, silo.announce())]
    relayed = next(
        data for to, data in sent if to == 0 and isinstance(Envelope.decode(data).message, Directory)
    )
    keys = Envelope.decode(relayed).message.keys
    swapped = AgreementKey.generate().public
    for key in (
        SignedKey(public=swapped, signature=keys[1][1].signature),
        SignedKey(public=keys[1][1].public, signature=bytes(64)),
        SignedKey.sign(identities[1], swapped, owner=1, purpose="secure aggregation", round_id=SETUP),
        SignedKey.sign(IdentityKey.generate(), swapped, owner=1, purpose=KEY_PURPOSE, round_id=SETUP),
    ):
        silo = silo_of(plan, identities, 0)
        silo._peers = silos[0]._peers
        with pytest.raises(ProtocolError, match="silo 1: its public key was refused"):
            silo.receive(altered(relayed, keys=(keys[0], (1, key), keys[2])))
    assert silos[0].receive(relayed)


def test_a_blinding_seed_from_elsewhere_is_refused():
    plan, identities = plan_of(), [IdentityKey.generate() for _ in range(3)]
    silos, server = parties_of(plan, identities)
    messages = []
    for silo in silos:
        messages += server.receive(silo.index, silo.announce())
    seed = Envelope(round_id=SETUP, sender=0, recipient=1, message=SealedSeed(sealed=bytes(60)))
    with pytest.raises(ProtocolError, match="before the silos' keys"):
        silos[1].receive(seed.encode())
    for recipient, data in messages:
        if recipient == 2:
            silos[2].receive(data)
    for other in (dataclasses.replace(SETUP, run=bytes(16)), dataclasses.replace(SETUP, round=1)):
        with pytest.raises(ProtocolError, match="silo 0: sent a blinding seed that is not for relaying now"):
            server.receive(0, dataclasses.replace(seed, round_id=other).encode())
    assert server.receive(0, seed.encode()) == [(1, seed.encode())]
    forged = Envelope(round_id=SETUP, sender=0, recipient=2, message=SealedSeed(sealed=bytes(60)))
    with pytest.raises(ProtocolError, match="silo 0: its blinding seed was refused"):
        silos[2].receive(forged.encode())
    with pytest.raises(ProtocolError, match="silo 1: "):
        server.receive(1, dataclasses.replace(forged, sender=1, recipient=2).encode())


def test_what_the_server_sees_of_the_counts_is_uniform(monkeypatch):
    """Blinded counts of very different histograms fall evenly into 8 bins of Z_n, and so do the totals."""
    seen = []
    add = WeightingServer._add_histogram

    def watch(server, content):
        seen.append([int.from_bytes(block, "big") for block in content.blocks])
        add(server, content)

    monkeypatch.setattr(WeightingServer, "_add_histogram", watch)
    counts = np.zeros((3, 300), dtype=np.int64)
    counts[0], counts[1, ::2], counts[2, :150] = 10, 1, 7
    session = session_of(plan_of(users=300, length=1), counts)
    n = session.server._holder.modulus
    assert len(seen) == 3
    for values in (*seen, session.server._totals):
        bins = np.bincount([int(value) * 8 // n for value in values], minlength=8)
        assert stats.chisquare(bins).pvalue > FALSE_ALARM


def test_decrypted_messages_of_one_silo_are_uniform_before_the_sum():
    """The key holder decrypts a silo's ciphertexts (zero contributions, zero noise): uniform modulo n all the same."""
    plan = plan_of(length=2000, noise_limit=1)
    session = session_of(plan, np.full((3, 6), 2))
    session.deliver(session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY))
    zero = np.zeros((6, 2000), dtype=np.int64)
    data = session.silos[0].encrypt_sum(zero, zero[0])
    key = paillier_key(768)
    values = [int(key.decrypt(mpz.from_bytes(b, "big"))) for b in Envelope.decode(data).message.blocks]
    assert len(set(values)) == len(values) > 100
    bins = np.bincount([value * 8 // int(key.public.n) for value in values], minlength=8)
    assert stats.chisquare(bins).pvalue > FALSE_ALARM


def test_the_randomness_of_a_ciphertext_carries_no_trace_of_the_exponents():
    """All contributions even: without re-randomisation the randomness would always be a square modulo p and q."""
    plan = plan_of(length=2000, rounds=30, noise_limit=1)
    key = paillier_key(768)
    session = session_of(plan, np.full((3, 6), 2))
    session.deliver(session.server.begin(RoundId(run=session.run, round=1, attempt=0), EVERYBODY))
    rows = np.full((6, 2000), 4)
    data = session.silos[0].encrypt_sum(rows, np.zeros(2000, dtype=np.int64))
    randomness = [key.randomness(mpz.from_bytes(b, "big")) for b in Envelope.decode(data).message.blocks]
    classes = [2 * (legendre(r, key.p) > 0) + (legendre(r, key.q) > 0) for r in randomness]
    assert stats.chisquare(np.bincount(classes, minlength=4)).pvalue > FALSE_ALARM
    bins = np.bincount([int(r) * 8 // int(key.public.n) for r in randomness], minlength=8)
    assert stats.chisquare(bins).pvalue > FALSE_ALARM


def test_the_same_inputs_twice_give_unlinkable_ciphertexts():
    plan = plan_of()
    session = session_of(plan, np.full((3, 6), 2))
    rows, zero = np.full((6, 5), 7), np.zeros(5, dtype=np.int64)
    key, seen = paillier_key(768), []
    for attempt in (0, 1):
        session.deliver(session.server.begin(RoundId(run=session.run, round=1, attempt=attempt), EVERYBODY))
        data = session.silos[0].encrypt_sum(rows, zero)
        for block in Envelope.decode(data).message.blocks:
            value = mpz.from_bytes(block, "big")
            seen += [key.decrypt(value), key.randomness(value)]
    assert len(set(seen)) == len(seen)


def test_no_own_mask_serves_twice():
    """Own masks are given away at the end of an attempt: one seed used again would open another attempt's sum."""
    plan = plan_of()
    session = session_of(plan, np.full((3, 6), 2))
    rows, zero, seeds = np.full((6, 5), 7), np.zeros(5, dtype=np.int64), []
    for attempt in (0, 1):
        session.deliver(session.server.begin(RoundId(run=session.run, round=1, attempt=attempt), EVERYBODY))
        for silo in session.silos:
            silo.encrypt_sum(rows, zero)
            seeds.append(silo._own_mask)
    assert len(set(seeds)) == len(seeds) == 6


def test_the_fraction_that_noise_cannot_cover_is_uniform():
    """T mod C would show n/N exactly, whatever the noise on the grid; the dither makes it uniform."""
    plan = plan_of(users=1, length=400, largest_count=6, noise_limit=1)
    counts = np.array([[1], [2], [0]])
    session = session_of(plan, counts)
    rows = [np.ones((len(s.members), 400), dtype=np.int64) for s in session.silos]
    found = session.aggregate(1, zip(rows, [np.zeros(400, dtype=np.int64)] * 3, strict=True))
    remainders = np.rint(found * plan.common).astype(np.int64) % plan.common
    assert plan.common == 60
    assert stats.chisquare(np.bincount(remainders // 10, minlength=6)).pvalue > FALSE_ALARM


def test_a_transcript_shows_no_function_of_one_silos_counts():
    """Messages have the same senders, purposes and sizes for any counts; their bytes are covered by the tests above."""
    lines = []
    for counts in (np.repeat([[1], [0], [0]], 6, axis=1), np.full((3, 6), 9)):
        session = session_of(plan_of(), counts)
        zero = np.zeros(5, dtype=np.int64)
        rows = [np.zeros((len(s.members), 5), dtype=np.int64) for s in session.silos]
        session.aggregate(1, zip(rows, [zero] * 3, strict=True))
        lines.append(session.transcript.lines)
    assert lines[0] == lines[1]
    kinds = {WeightingKey, SealedSeed, BlindedHistogram, Participants, EncryptedWeights, EncryptedSum}
    assert {kind.purpose for kind in kinds} <= {line.purpose for line in lines[0]}

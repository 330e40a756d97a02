"""Partial encryption: right sums, hidden coordinates, and a typed error for whoever breaks the protocol."""

import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tenseal")

from fedveil.crypto.ckks import CkksKey, CkksParameters
from fedveil.crypto.key_agreement import RoundId
from fedveil.errors import ProtocolError
from fedveil.protocols.messages import SERVER, Envelope, MaskedVector
from fedveil.protocols.partial_encryption.plan import (
    Ballot,
    PartEncoding,
    PartialPlan,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
    decode_bitmap,
    encode_bitmap,
)
from fedveil.protocols.partial_encryption.protocol_spec import PartialEncryptionSpec
from fedveil.randomness import PrivacyRandomness
from tests.opened_parties import PartialParties

SILOS, LENGTH, LIMIT = 3, 40, 2**20


def plan(**changes):
    given = {
        "silos": SILOS,
        "length": LENGTH,
        "ratio": 0.25,
        "clear_limit": LIMIT,
        "hidden_limit": LIMIT,
    }
    return PartialPlan(**{**given, **changes})


def updates(seed=0, silos=SILOS, length=LENGTH):
    rng = np.random.default_rng(seed)
    return {silo: rng.integers(-LIMIT, LIMIT + 1, length) for silo in range(silos)}


def play(session, units, round_number=1, **more):
    def split(silo, partition):
        return units[silo][~partition], units[silo][partition]

    values = {silo: vector.astype(np.float64) for silo, vector in units.items()}
    return session.aggregate(round_number, values, split, **more)


def whole(result):
    total = np.empty(len(result.partition), dtype=np.int64)
    total[~result.partition], total[result.partition] = result.clear, result.hidden
    return total


def most_voted(units, count, sign=1):
    """The partition by the definition: count the votes for each silo's largest values; the most voted win."""
    votes = np.zeros(LENGTH, dtype=int)
    for vector in units.values():
        votes[np.argsort(-sign * np.abs(vector))[:count]] += 1
    return votes


@pytest.mark.parametrize("ballots", ["plain", "secagg", "none"])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.25, 1.0])
def test_the_sum_is_exact_whatever_is_encrypted(ballots, ratio):
    session = PartialParties(plan(ballots=ballots, ratio=ratio))
    for round_number in (1, 2, 5):
        units = updates(round_number)
        if ballots == "none":
            common = np.random.default_rng(9).normal(size=LENGTH)
            result = session.aggregate(
                round_number,
                dict.fromkeys(range(SILOS), common),
                lambda silo, partition, units=units: (units[silo][~partition], units[silo][partition]),
            )
        else:
            result = play(session, units, round_number)
        assert np.array_equal(whole(result), sum(units.values()))
        assert result.partition.sum() == max(1, int(ratio * LENGTH)) * (ratio > 0)


@pytest.mark.parametrize("ballots", ["plain", "secagg"])
@pytest.mark.parametrize(("pick", "sign"), [("largest", 1), ("smallest", -1)])
def test_the_partition_has_the_most_voted_coordinates(ballots, pick, sign):
    session, units = PartialParties(plan(ballots=ballots, pick=pick)), updates(3)
    chosen = play(session, units).partition
    votes = most_voted(units, 10, sign)
    assert chosen.sum() == 10
    assert votes[chosen].min() >= votes[~chosen].max()


def test_values_that_all_have_give_their_largest_without_any_vote():
    session = PartialParties(plan(ballots="none"))
    common = np.random.default_rng(1).normal(size=LENGTH)
    zero = np.zeros(LENGTH, dtype=np.int64)
    result = session.aggregate(1, dict.fromkeys(range(SILOS), common), lambda _, v: (zero[~v], zero[v]))
    assert set(np.flatnonzero(result.partition)) == set(np.argsort(-np.abs(common))[:10])
    purposes = {line.purpose for line in session.transcript.lines}
    assert not any("votes" in purpose for purpose in purposes)
    random = [
        session.aggregate(t, dict.fromkeys(range(SILOS), zero + 0.0), lambda _, v: (zero[~v], zero[v]))
        for t in (2, 3)
    ]  # equal values: ties go by the secret order, which is new in every round
    assert not np.array_equal(random[0].partition, random[1].partition)


def test_the_share_decays_from_round_to_round_and_never_to_nothing():
    falling = plan(ratio=0.5, decay=0.8)
    assert [falling.n_encrypted(t) for t in (1, 2, 3, 40)] == [20, 16, 12, 1]
    assert plan(ratio=0.29, length=100).n_encrypted(1) == 29
    assert plan(ratio=0.0).n_encrypted(1) == 0
    session = PartialParties(falling)
    assert [play(session, updates(t), t).partition.sum() for t in (1, 2, 3)] == [20, 16, 12]


def test_noise_on_votes_is_in_the_counts_and_cancels_nowhere(monkeypatch):
    session = PartialParties(plan(ballots="secagg", ballot_limit=1000))
    units = updates(5)
    lift = np.zeros(LENGTH, dtype=np.int64)
    lift[[4, 17, 30]] = 300
    result = play(session, units, vote_noise=lambda silo: lift - silo)
    assert result.partition[[4, 17, 30]].all()
    with pytest.raises(ProtocolError, match="exceeds 1000"):
        play(session, units, 2, vote_noise=lambda silo: lift * 10)
    monkeypatch.setattr(PartialEncryptionSpec, "noise_on_votes", lambda *_: None)
    with pytest.raises(ProtocolError, match="lacks"):
        play(session, units, 3)


def captured(session):
    """Record all bytes that pass the server from now on."""
    seen, receive = [], session.server.receive

    def spy(sender, data):
        answers = receive(sender, data)
        seen.extend([data, *(answer for _, answer in answers)])
        return answers

    session.server.receive = spy
    return seen


def places_of(units, voter, rounds=60):
    """How often a voter's ballots have a one at every place, over rounds of the same votes."""
    session = PartialParties(plan(silos=len(units)))
    seen, places = captured(session), np.zeros(LENGTH)
    for round_number in range(1, rounds + 1):
        play(session, units, round_number)
    for data in seen:
        envelope = Envelope.decode(data)
        if envelope.sender == voter and isinstance(envelope.message, Ballot):
            places += decode_bitmap(envelope.message.bitmap, LENGTH, 10)
    return places


@pytest.mark.parametrize("nonzero", [LENGTH, 6, 0])
def test_a_ballot_is_spread_evenly_over_all_places_however_often_its_coordinates_are_chosen(nonzero):
    """60 rounds of the same votes: chi-square of 39 degrees of freedom, 1 - 1e-7 point 104.

    So it is of a voter whose update has few numbers, or none: the ballot looks like any other.
    """
    units = updates(6, silos=2)
    units[0][nonzero:] = 0
    expected = 60 * 10 / LENGTH
    assert ((places_of(units, 0) - expected) ** 2 / (expected * 0.75)).sum() < 110


def test_voters_without_records_vote_apart_from_one_another():
    """Ten of forty places each, at random: 2.5 in common, over 50 rounds; one order for all would give ten."""
    session, zeros = PartialParties(plan()), {silo: np.zeros(LENGTH, dtype=np.int64) for silo in range(SILOS)}
    seen, ballots, common = captured(session), {}, []
    for round_number in range(1, 51):
        play(session, zeros, round_number)
    for data in seen:
        envelope = Envelope.decode(data)
        if isinstance(envelope.message, Ballot):
            bits = decode_bitmap(envelope.message.bitmap, LENGTH, 10)
            ballots.setdefault(envelope.round_id.round, []).append(bits)
    common = [int((first & second).sum()) for first, second, _ in ballots.values()]
    assert abs(np.mean(common) - 2.5) < 1.04  # 5.3 standard deviations


def test_every_session_has_a_secret_of_its_own_for_its_orders():
    """Who knows the secret reads coordinates off the ballots; the server must not be able to guess it."""
    secrets = [
        silo.order_secret
        for session in (PartialParties(plan()), PartialParties(plan()))
        for silo in session.silos
    ]
    assert secrets == [secrets[0]] * SILOS + [secrets[SILOS]] * SILOS
    assert secrets[0] != secrets[SILOS]
    assert all(len(secret) == 32 and len(set(secret)) > 8 for secret in secrets)


def test_masked_votes_look_uniform():
    session, units = PartialParties(plan(silos=2, ballots="secagg")), updates(6, silos=2)
    seen = captured(session)
    for round_number in range(1, 31):
        play(session, units, round_number)
    words = [m.words for data in seen if isinstance(m := Envelope.decode(data).message, MaskedVector)]
    share = np.unpackbits(np.concatenate(words).view(np.uint8)).mean()
    assert len(words) == 60
    assert abs(share - 0.5) < 6 * 0.5 / np.sqrt(60 * LENGTH * 8)


def test_one_silo_alone_never_learns_anothers_masked_votes_and_the_server_only_their_sum():
    session = PartialParties(plan(ballots="secagg"))
    seen = captured(session)
    play(session, updates(7))
    words = [m.words for data in seen if isinstance(m := Envelope.decode(data).message, MaskedVector)]
    counts = session.plan.unpack_counts(sum(words[1:], words[0]))
    assert counts.sum() == 30
    assert counts.max() <= SILOS
    assert session.plan.unpack_counts(words[0]).max() > SILOS


@pytest.mark.parametrize("silos", [2, 255, 256, 1000])
def test_counts_of_many_silos_do_not_carry(silos):
    counting = plan(silos=silos, ballots="secagg")
    ones = counting.pack_counts(np.ones(LENGTH, dtype=np.int64))
    total = np.zeros_like(ones)
    for _ in range(silos):
        total += ones
    assert (counting.unpack_counts(total) == silos).all()


def test_bytes_are_those_of_the_numbers_and_the_ciphertexts():
    sizes = {}
    for ratio in (0.0, 0.1, 1.0):
        length = 40_960
        session = PartialParties(
            plan(length=length, ratio=ratio, clear_limit=2**30, hidden_limit=2**30, silos=2)
        )
        play(session, updates(0, 2, length))
        sizes[ratio] = session.transcript.bytes_up(1) / 2 / length
    assert sizes[0.0] == pytest.approx(4, rel=0.01)
    assert sizes[1.0] == pytest.approx(7.016, rel=0.01)
    assert sizes[0.1] == pytest.approx(0.9 * 4 + 0.1 * 7.016 + 0.1, rel=0.03)


def test_part_of_the_silos_can_play_and_one_cannot():
    session, units = PartialParties(plan()), updates(8)
    del units[0]
    assert np.array_equal(whole(play(session, units)), sum(units.values()))
    del units[1]
    with pytest.raises(ProtocolError, match="at least 2"):
        play(session, units, 2)


def test_a_moment_is_played_once():
    session = PartialParties(plan())
    play(session, updates(), 2, attempt=1)
    for round_number, attempt in ((2, 1), (2, 0), (1, 3)):
        with pytest.raises(ProtocolError, match="keys are used once"):
            play(session, updates(), round_number, attempt=attempt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"silos": 1}, "at least 2 silos"),
        ({"ratio": -0.1}, "0 <= r <= 1"),
        ({"ratio": 1.01}, "0 <= r <= 1"),
        ({"ratio": float("nan")}, "0 <= r <= 1"),
        ({"decay": 0.0}, "0 < lambda <= 1"),
        ({"decay": 1.1}, "0 < lambda <= 1"),
        ({"clear_limit": 2**53 + 1}, "of 2\\^53 at most"),
        ({"clear_limit": 0}, "limit of 1"),
        ({"hidden_limit": 2**50}, "from at most 0 silos"),
        ({"length": 0}, "coordinates"),
        ({"ballot_limit": 5}, "take 'secagg'"),
        ({"ballots": "secagg", "ballot_limit": 2**30}, "32 bits"),
    ],
)
def test_plans_that_cannot_work_are_refused(change, message):
    with pytest.raises(ProtocolError, match=message):
        plan(**change)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_names_its_silo(bad):
    session = PartialParties(plan())
    values = {silo: vector.astype(np.float64) for silo, vector in updates().items()}
    values[1][7] = bad
    with pytest.raises(ProtocolError, match=r"silo 1.*finite"):
        session.aggregate(1, values, lambda _, v: None)


@pytest.mark.parametrize("part", ["clear", "hidden"])
def test_a_value_above_the_limit_names_its_silo_and_not_the_value(part):
    session, units = PartialParties(plan()), updates()

    def split(silo, partition):
        clear, hidden = units[silo][~partition], units[silo][partition]
        if silo == 2:
            (clear if part == "clear" else hidden)[3] = LIMIT + 12345
        return clear, hidden

    values = {silo: vector.astype(np.float64) for silo, vector in units.items()}
    with pytest.raises(ProtocolError, match="silo 2") as error:
        session.aggregate(1, values, split)
    assert str(LIMIT + 12345) not in str(error.value)


def test_no_update_is_too_long_to_be_sent():
    """A silo whose update were refused for its length would tell the server of its records, and end everybody's run."""
    loose = PartEncoding(noise_grid=2.0**-30, largest=64.0)
    sent = loose.units(np.array([1e30, -65.0, 64.0, 0.25]), PrivacyRandomness.insecure(0), "noise", 0)
    assert sent.tolist() == [loose.limit, -loose.limit, loose.limit, 2**28]
    noisy = PartEncoding(noise_std=1.0, noise_grid=2.0**-20, largest=64.0)
    sent = noisy.units(np.array([1e30, -65.0]), PrivacyRandomness.insecure(0), "noise", 0)
    assert np.abs(sent).max() <= noisy.limit


def altered(session, silo, change):
    """Let one silo's updates pass through ``change`` before they are sent."""
    party = session.silos[silo]
    encrypted = party.encrypt_update

    def sent(clear, hidden):
        envelope = Envelope.decode(encrypted(clear, hidden))
        return replace(envelope, message=change(envelope.message)).encode()

    party.encrypt_update = sent


def with_parts(update, **changes):
    fields = {name: getattr(update, name) for name in ("tag", "fingerprint", "size", "clear", "hidden")}
    return PartialUpdate(**{**fields, **changes})


OTHER = CkksParameters(silos=300)
CHANGES = {
    "another context": lambda u: with_parts(u, fingerprint=OTHER.fingerprint),
    "another key": lambda u: with_parts(u, tag=bytes(32)),
    "fewer parameters": lambda u: with_parts(u, clear=u.clear[:-1]),
    "wider words": lambda u: with_parts(u, size=u.size + 1),
    "a truncated ciphertext": lambda u: with_parts(u, hidden=u.hidden[:-1]),
    "no ciphertext": lambda u: with_parts(u, hidden=b""),
    "another level": lambda u: with_parts(
        u, hidden=CkksKey(CkksParameters(silos=SILOS, prime_bits=48)).encrypt(np.zeros(10, np.int64))
    ),
    "residues out of range": lambda u: with_parts(u, hidden=b"\xff" * len(u.hidden)),
    "a value above the limit": lambda u: with_parts(u, clear=np.full_like(u.clear, LIMIT + 1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whoever_sends_something_else_is_named(change):
    session = PartialParties(plan())
    altered(session, 1, change)
    with pytest.raises(ProtocolError, match="silo 1"):
        play(session, updates())


def test_a_silo_with_its_own_ckks_key_is_named_and_a_forged_tag_shows_when_decrypting():
    session = PartialParties(plan())
    session.silos[2]._take(bytes(32) + CkksKey(session.plan.ckks).private_bytes())
    with pytest.raises(ProtocolError, match=r"silo 2.*another key"):
        play(session, updates())
    session = PartialParties(plan())
    session.silos[2]._key = CkksKey(session.plan.ckks)
    with pytest.raises(ProtocolError, match="another key"):
        play(session, updates())


@pytest.mark.parametrize(
    "bitmap", [b"", b"\x00" + bytes(5), b"\x01\x00", b"\x02", encode_bitmap(np.ones(LENGTH, dtype=bool))]
)
def test_a_ballot_with_another_number_of_votes_names_its_silo(bitmap):
    session = PartialParties(plan())
    round_id = RoundId(run=session.run, round=1, attempt=0)
    session.server.begin(round_id, (0, 1, 2))
    data = Envelope(round_id=round_id, sender=1, recipient=SERVER, message=Ballot(bitmap=bitmap)).encode()
    with pytest.raises(ProtocolError, match="silo 1"):
        session.server.receive(1, data)
    assert session.server.missing == (0, 1, 2)


def test_the_server_cannot_open_what_it_relays_and_keys_are_relayed_once():
    session = PartialParties(plan())
    lines = [line for line in session.transcript.lines if "sealed" in line.purpose]
    assert len(lines) == 2 * (SILOS - 1)
    forged = Envelope(
        round_id=RoundId(run=session.run, round=0, attempt=0),
        sender=0,
        recipient=1,
        message=SealedKeys(sealed=os.urandom(200)),
    ).encode()
    with pytest.raises(ProtocolError, match="not for relaying"):
        session.server.receive(0, forged)
    with pytest.raises(ProtocolError):
        session.silos[1].receive(forged)


def test_a_server_that_alters_the_sum_or_the_partition_gets_a_typed_error():
    for change in (
        lambda m: Partition(bitmap=b"\x00" + bytes(5)) if isinstance(m, Partition) else m,
        lambda m: _sum(m, clear=m.clear[1:]) if isinstance(m, PartialSum) else m,
        lambda m: _sum(m, hidden=m.hidden[1:]) if isinstance(m, PartialSum) else m,
        lambda m: _sum(m, hidden=os.urandom(len(m.hidden))) if isinstance(m, PartialSum) else m,
        lambda m: _sum(m, clear=m.clear * 0 + 3 * LIMIT + 1) if isinstance(m, PartialSum) else m,
    ):
        session = PartialParties(plan())
        party = session.silos[1]
        receive = party.receive

        def sent(data, change=change, receive=receive):
            envelope = Envelope.decode(data)
            return receive(replace(envelope, message=change(envelope.message)).encode())

        party.receive = sent
        with pytest.raises(ProtocolError):
            play(session, updates())


def test_the_least_number_of_64_bits_is_no_sum_of_eight_bytes():
    """|-2^63| is -2^63 in int64, which is below every limit."""
    session = PartialParties(plan(silos=8, clear_limit=2**53))
    assert session.plan.sum_bytes == 8
    party = session.silos[1]
    receive = party.receive

    def sent(data):
        envelope = Envelope.decode(data)
        if isinstance(envelope.message, PartialSum):
            least = np.full_like(envelope.message.clear, -(2**63))
            envelope = replace(envelope, message=_sum(envelope.message, clear=least))
        return receive(envelope.encode())

    party.receive = sent
    with pytest.raises(ProtocolError, match="out of range"):
        play(session, updates(silos=8))


def _sum(message, **changes):
    fields = {name: getattr(message, name) for name in ("tag", "fingerprint", "size", "clear", "hidden")}
    return PartialSum(**{**fields, **changes})


def test_state_machines_meet_20_000_altered_messages_with_typed_errors_alone():
    """Updates, ballots and sums with bytes changed, cut and added: refused, or a message, never anything else."""
    session = PartialParties(plan(silos=2))
    round_id = RoundId(run=session.run, round=1, attempt=0)
    session.server.begin(round_id, (0, 1))
    rng = np.random.default_rng(2)
    update = PartialUpdate(
        tag=bytes(32),
        fingerprint=session.plan.ckks.fingerprint,
        size=3,
        clear=np.zeros(30, np.int64),
        hidden=b"x" * 60,
    )
    messages = [
        Envelope(round_id=round_id, sender=0, recipient=SERVER, message=message).encode()
        for message in (Ballot(bitmap=encode_bitmap(np.arange(LENGTH) < 10)), update)
    ]
    refused = 0
    for _ in range(20_000):
        data = bytearray(messages[rng.integers(2)])
        for _ in range(int(rng.integers(1, 4))):
            data[rng.integers(len(data))] = int(rng.integers(256))
        if rng.random() < 0.3:
            del data[rng.integers(len(data)) :]
        for party in (lambda d: session.server.receive(0, d), session.silos[1].receive):
            try:
                party(bytes(data))
            except ProtocolError:
                refused += 1
    assert refused > 30_000

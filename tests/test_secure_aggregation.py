"""Secure aggregation: the sum is right, the server sees nothing else, and nothing wrong is accepted."""

import dataclasses
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.crypto.key_agreement import AgreementKey, RoundId, SignedKey
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ProtocolError
from fedveil.protocols.driver import LocalDriver, Transcript
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.messages import (
    SERVER,
    Announcement,
    Directory,
    Envelope,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo

FALSE_ALARM = 1e-6


class Run:
    """All parties, with the messages in the test's hands."""

    def __init__(self, silos=3, length=8, limit=1000):
        self.session = os.urandom(16)
        self.plan = AggregationPlan(clients=silos, length=length, limit=limit)
        self.identities = [IdentityKey.generate() for _ in range(silos)]
        self.roster = tuple(identity.public for identity in self.identities)
        self.silos = [AggregationSilo(self.plan, self.place(i)) for i in range(silos)]
        self.server = AggregationServer(self.plan, self.session)

    def place(self, number):
        return ClientContext(
            run=self.session, number=number, identity=self.identities[number], roster=self.roster
        )

    def meet(self):
        for silo in self.silos:
            for recipient, data in self.server.receive(silo.index, silo.announce()):
                self.silos[recipient].receive(data)
        return self

    def begin(self, round_number=1, attempt=0, cohort=None):
        round_id = RoundId(run=self.session, round=round_number, attempt=attempt)
        for recipient, data in self.server.begin(round_id, cohort or tuple(range(self.plan.clients))):
            self.silos[recipient].receive(data)
        return round_id


@given(
    st.integers(2, 10),
    st.integers(1, 50),
    st.sampled_from([5, 2**14, 2**20, 2**26, 2**33]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_the_sum_is_exact(silos, length, limit, seed):
    driver = LocalDriver(MaskedSumSpec(clients=silos, length=length, limit=limit))
    rng = np.random.default_rng(seed)
    for round_number in (1, 2):
        cohort = [s for s in range(silos) if s < 2 or rng.random() < 0.8]
        units = {s: rng.integers(-limit, limit + 1, length) for s in cohort}
        total, summed = driver.play((round_number, 0), tuple(cohort), None, units.get)
        assert summed == len(cohort)
        np.testing.assert_array_equal(total, sum(units.values()))


@pytest.mark.parametrize(
    ("limit", "bytes_per_word"),
    [(2**13 - 1, 2), (2**13, 3), (2**21 - 1, 3), (2**21, 4), (2**29 - 1, 4), (2**29, 8), (2**61 - 1, 8)],
)
def test_the_extremes_of_the_range_do_not_wrap(limit, bytes_per_word):
    plan = MaskedSumSpec(clients=4, length=2, limit=limit)
    assert plan.word_bytes == bytes_per_word
    driver = LocalDriver(plan)
    units = {s: np.array([limit, -limit]) for s in range(4)}
    total, _ = driver.play((1, 0), (0, 1, 2, 3), None, units.get)
    np.testing.assert_array_equal(total, [4 * limit, -4 * limit])


def test_a_range_that_does_not_fit_is_refused_before_the_run():
    with pytest.raises(ProtocolError, match="need 65 bits"):
        AggregationPlan(clients=4, length=2, limit=2**61)
    with pytest.raises(ProtocolError, match="2 silos"):
        AggregationPlan(clients=1, length=2, limit=1)


def test_a_vector_outside_the_plan_is_refused_with_its_silo():
    run = Run().meet()
    run.begin()
    for bad in (np.full(8, 1001), np.zeros(7, dtype=np.int64), np.zeros(8)):
        with pytest.raises(ProtocolError, match="silo 1: ") as error:
            run.silos[1].mask_vector(bad)
        assert error.value.silo == 1
        assert "1001" not in str(error.value)


def test_a_vanished_silo_reveals_nothing_even_if_it_comes_back_late():
    run = Run(length=4096).meet()
    run.begin()
    first = [run.silos[s].mask_vector(np.full(4096, 7)) for s in range(3)]
    for s in (0, 1):
        assert run.server.receive(s, first[s]) == []
    assert run.server.missing == (2,)
    assert not run.server.may_have_released
    with pytest.raises(ProtocolError, match=r"silos \[2\] are missing"):
        run.server.result()
    run.begin(attempt=1, cohort=(0, 1))
    replies = [run.server.receive(s, run.silos[s].mask_vector(np.full(4096, 7))) for s in (0, 1)]
    for recipient, data in replies[-1]:
        (own,) = run.silos[recipient].receive(data)
        run.server.receive(recipient, own)
    assert run.server.may_have_released
    np.testing.assert_array_equal(run.server.result(), 14)
    with pytest.raises(ProtocolError, match="outside its cohort"):
        run.server.receive(2, first[2])
    # The server holds all three vectors of attempt 0 now. Their sum still carries three own masks.
    total = sum(Envelope.decode(data).message.words for data in first)
    assert stats.chisquare(np.bincount(total.view(np.uint8), minlength=256)).pvalue > FALSE_ALARM


def test_what_the_server_receives_before_the_sum_is_uniform():
    run = Run(length=2**15).meet()
    run.begin()
    for silo in run.silos:
        data = silo.mask_vector(np.full(2**15, 3 + silo.index))
        words = Envelope.decode(data).message.words
        assert stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue > FALSE_ALARM


def test_the_same_vector_masked_twice_is_unlinkable():
    run = Run(length=2**14).meet()
    vectors = []
    for attempt in (0, 1):
        run.begin(attempt=attempt)
        data = run.silos[0].mask_vector(np.zeros(2**14, dtype=np.int64))
        vectors.append(Envelope.decode(data).message.words)
    difference = vectors[0] - vectors[1]
    assert stats.chisquare(np.bincount(difference.view(np.uint8), minlength=256)).pvalue > FALSE_ALARM


def own_masks(run, round_number):
    """Play a round to its end; return the seeds of the own masks that the server is given."""
    run.begin(round_number)
    replies = [
        run.server.receive(silo.index, silo.mask_vector(np.zeros(8, dtype=np.int64))) for silo in run.silos
    ]
    answers = {recipient: run.silos[recipient].receive(data) for recipient, data in replies[-1]}
    for silo, (answer,) in answers.items():
        run.server.receive(silo, answer)
    return [Envelope.decode(answer).message.seed for (answer,) in answers.values()]


def test_no_own_mask_serves_twice():
    """A seed given in one round would open another round's vector, and one silo's another's."""
    seeds = [
        seed for run in (Run().meet(), Run().meet()) for number in (1, 2) for seed in own_masks(run, number)
    ]
    assert len(set(seeds)) == len(seeds) == 12
    assert all(len(seed) == 32 and len(set(seed)) > 8 for seed in seeds)


def test_a_round_or_attempt_is_played_once():
    run = Run().meet()
    round_id = run.begin(round_number=2, attempt=1)
    for earlier in (
        round_id,
        dataclasses.replace(round_id, attempt=0),
        dataclasses.replace(round_id, round=1),
        dataclasses.replace(round_id, run=bytes(16), round=3),
    ):
        with pytest.raises(ProtocolError, match="keys are used once"):
            run.server.begin(earlier, (0, 1, 2))
        start = Envelope(round_id=earlier, sender=SERVER, recipient=0, message=RoundStart(cohort=(0, 1)))
        with pytest.raises(ProtocolError, match="keys are used once"):
            run.silos[0].receive(start.encode())


def test_messages_of_other_runs_rounds_senders_and_replays_are_refused():
    run, other = Run().meet(), Run().meet()
    round_id = run.begin()
    other.begin()
    foreign = other.silos[1].mask_vector(np.zeros(8, dtype=np.int64))
    with pytest.raises(ProtocolError, match="silo 1: a message belongs to another run"):
        run.server.receive(1, foreign)
    data = run.silos[1].mask_vector(np.zeros(8, dtype=np.int64))
    with pytest.raises(ProtocolError, match="silo 0: sent a message under another party's name"):
        run.server.receive(0, data)
    run.server.receive(1, data)
    with pytest.raises(ProtocolError, match="replay"):
        run.server.receive(1, data)
    later = dataclasses.replace(round_id, round=9)
    late = Envelope(
        round_id=later,
        sender=0,
        recipient=SERVER,
        message=MaskedVector(words=np.zeros(8, "<u4"), word_bytes=4),
    )
    with pytest.raises(ProtocolError, match="round 9"):
        run.server.receive(0, late.encode())
    early = Envelope(round_id=round_id, sender=0, recipient=SERVER, message=OwnMask(seed=bytes(32)))
    with pytest.raises(ProtocolError, match="did not expect"):
        run.server.receive(0, early.encode())


@pytest.mark.parametrize("words", [np.zeros(9, "<u4"), np.zeros(8, "<u8"), np.zeros(0, "<u4")])
def test_a_vector_of_another_shape_is_refused(words):
    run = Run().meet()
    round_id = run.begin()
    data = Envelope(
        round_id=round_id, sender=2, recipient=SERVER, message=MaskedVector(words=words, word_bytes=4)
    ).encode()
    with pytest.raises(ProtocolError, match="silo 2: sent"):
        run.server.receive(2, data)


def test_a_silo_gives_its_own_mask_once_and_only_after_its_vector():
    run = Run().meet()
    round_id = run.begin()
    request = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=RevealRequest()).encode()
    with pytest.raises(ProtocolError, match="before it was used"):
        run.silos[0].receive(request)
    run.silos[0].mask_vector(np.zeros(8, dtype=np.int64))
    assert len(run.silos[0].receive(request)) == 1  # the premature request blocks no right one
    fresh = Run().meet()
    round_id = fresh.begin()
    fresh.silos[0].mask_vector(np.zeros(8, dtype=np.int64))
    request = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=RevealRequest()).encode()
    assert len(fresh.silos[0].receive(request)) == 1
    with pytest.raises(ProtocolError, match="replay"):
        fresh.silos[0].receive(request)
    with pytest.raises(ProtocolError, match="no round awaits"):
        fresh.silos[0].mask_vector(np.zeros(8, dtype=np.int64))


def test_a_silo_reads_messages_of_the_server_alone():
    """Who carries them is known to be the server; an envelope that names a silo as its sender was not made by it."""
    run = Run().meet()
    round_id = run.begin()
    run.silos[0].mask_vector(np.zeros(8, dtype=np.int64))
    for sender in (0, 1):
        request = Envelope(round_id=round_id, sender=sender, recipient=0, message=RevealRequest()).encode()
        with pytest.raises(ProtocolError, match="another sender than the server"):
            run.silos[0].receive(request)
    request = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=RevealRequest()).encode()
    assert len(run.silos[0].receive(request)) == 1


def test_a_key_that_the_server_put_in_place_is_refused():
    run = Run()
    run.server.receive(0, run.silos[0].announce())
    run.server.receive(1, run.silos[1].announce())
    relayed = run.server.receive(2, run.silos[2].announce())
    directory = Envelope.decode(relayed[0][1]).message
    swapped = AgreementKey.generate().public
    keys = {
        "swapped": SignedKey(public=swapped, signature=directory.keys[1][1].signature),
        "unsigned": SignedKey(public=directory.keys[1][1].public, signature=bytes(64)),
        "of another identity": SignedKey.sign(
            IdentityKey.generate(),
            swapped,
            owner=1,
            purpose="secure aggregation",
            round_id=run.silos[0].round_id,
        ),
    }
    for name, key in keys.items():
        altered = Directory(keys=(directory.keys[0], (1, key), directory.keys[2]))
        silo = AggregationSilo(run.plan, run.place(0))
        silo._peers._key = run.silos[0]._peers.agreement_key
        data = Envelope(round_id=silo.round_id, sender=SERVER, recipient=0, message=altered).encode()
        with pytest.raises(ProtocolError, match="silo 1: its public key was refused") as error:
            silo.receive(data)
        assert error.value.silo == 1, name


def test_a_directory_must_be_whole_and_hold_the_own_key():
    run = Run()
    round_id = run.silos[0].round_id
    signed = [(s.index, Envelope.decode(s.announce()).message.key) for s in run.silos]
    for keys, message in (
        (signed[:2], "names 2 silos of 3"),
        ([*signed[1:], (7, signed[0][1])], "own key"),
        ([signed[0], (1, signed[0][1]), signed[2]], "same public key"),
        ([signed[0], signed[1], (7, signed[2][1])], "not in the roster"),
    ):
        directory = Directory(keys=tuple(keys))
        data = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=directory).encode()
        with pytest.raises(ProtocolError, match=message):
            silo_zero(run).receive(data)


def silo_zero(run):
    silo = AggregationSilo(run.plan, run.place(0))
    silo._peers = run.silos[0]._peers
    return silo


def test_a_silo_takes_part_only_in_cohorts_that_hide_it():
    run = Run().meet()
    round_id = RoundId(run=run.session, round=1, attempt=0)
    for cohort, message in (((0,), "at least 2"), ((1, 2), "not in"), ((0, 9), "silo 9")):
        start = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=RoundStart(cohort=cohort))
        with pytest.raises(ProtocolError, match=message):
            run.silos[0].receive(start.encode())
    with pytest.raises(ProtocolError, match="at least 2"):
        run.server.begin(round_id, (1,))


def test_nothing_happens_before_the_keys_are_known():
    run = Run()
    round_id = RoundId(run=run.session, round=1, attempt=0)
    with pytest.raises(ProtocolError, match="key is known"):
        run.server.begin(round_id, (0, 1))
    start = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=RoundStart(cohort=(0, 1)))
    with pytest.raises(ProtocolError, match="before the silos' keys"):
        run.silos[0].receive(start.encode())


def test_masks_that_do_not_cancel_are_noticed():
    run = Run(limit=10).meet()
    round_id = run.begin()
    replies = []
    for silo in run.silos:
        data = silo.mask_vector(np.zeros(8, dtype=np.int64))
        if silo.index == 1:
            broken = Envelope.decode(data).message.words ^ np.uint16(1 << 12)
            message = MaskedVector(words=broken, word_bytes=broken.dtype.itemsize)
            data = Envelope(round_id=round_id, sender=1, recipient=SERVER, message=message).encode()
        replies = run.server.receive(silo.index, data)
    for recipient, data in replies:
        (own,) = run.silos[recipient].receive(data)
        run.server.receive(recipient, own)
    with pytest.raises(ProtocolError, match="out of range"):
        run.server.result()


def test_a_roster_names_each_silo_once_and_this_one_rightly():
    run = Run()
    with pytest.raises(ProtocolError, match="not the one that the roster names"):
        AggregationSilo(run.plan, replace(run.place(0), number=1))
    with pytest.raises(ProtocolError, match="same identity"):
        AggregationSilo(
            run.plan,
            replace(run.place(0), roster=(run.roster[0],) * 3),
        )
    with pytest.raises(ProtocolError, match="names 2 silos"):
        AggregationSilo(run.plan, replace(run.place(0), roster=run.roster[:2]))


def test_the_transcript_lists_every_message(tmp_path):
    transcript = Transcript()
    driver = LocalDriver(MaskedSumSpec(clients=3, length=10, limit=10), transcript)
    driver.play((1, 0), (0, 1, 2), None, lambda silo: np.zeros(10, dtype=np.int64))
    purposes = [line.purpose for line in transcript.lines]
    assert len(purposes) == 3 * 6
    assert {purposes.count(purpose) for purpose in set(purposes)} == {3}
    assert {line.sender for line in transcript.lines} == {"server", "silo 0", "silo 1", "silo 2"}
    transcript.write(tmp_path / "transcript.jsonl")
    assert len((tmp_path / "transcript.jsonl").read_text().splitlines()) == 18


def test_an_announcement_goes_to_the_server_alone():
    run = Run()
    announcement = Envelope.decode(run.silos[0].announce())
    assert isinstance(announcement.message, Announcement)
    assert announcement.recipient == SERVER
    with pytest.raises(ProtocolError, match="another sender"):
        run.silos[1].receive(run.silos[0].announce())

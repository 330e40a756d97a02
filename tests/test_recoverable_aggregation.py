"""Secure aggregation with recovery: the sum over the survivors, and nothing about the vanished."""

import contextlib
import dataclasses
import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.crypto.key_agreement import AgreementKey, RoundId, unseal
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.masks import apply_masks_
from fedveil.crypto.shamir import SHARE_BYTES, Share, combine, split
from fedveil.errors import CryptoError, ProtocolError
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.recoverable_aggregation import (
    KEY_PURPOSE,
    SEAL_PURPOSE,
    SHARE_PURPOSE,
    AgreedSurvivors,
    RecoverableServer,
    RecoverableSilo,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    Survivors,
    check_threshold,
)
from fedveil.protocols.secure_aggregation import MASK_PURPOSE, AggregationPlan

FALSE_ALARM = 1e-6
LIMIT = 10**6


class Run:
    """All parties; silos vanish at the steps a test names."""

    def __init__(self, silos=4, threshold=3, length=6):
        self.session = os.urandom(16)
        self.plan = AggregationPlan(clients=silos, length=length, limit=LIMIT)
        identities = [IdentityKey.generate() for _ in range(silos)]
        roster = tuple(identity.public for identity in identities)
        self.silos = [
            RecoverableSilo(
                self.plan,
                ClientContext(run=self.session, number=i, identity=identity, roster=roster),
                threshold=threshold,
            )
            for i, identity in enumerate(identities)
        ]
        self.server = RecoverableServer(self.plan, self.session, threshold=threshold)
        self.threshold = threshold
        self.received = []

    def give(self, silo, data):
        """Give the server a message that arrives."""
        self.received.append((silo, data))
        return self.server.receive(silo, data)

    def step(self, messages, vanished=()):
        """Let the silos answer; return the server's next messages and what the silos said."""
        said, replies = {}, []
        for recipient, data in messages:
            for reply in self.silos[recipient].receive(data):
                said[recipient] = reply
        for silo, reply in said.items():
            if silo not in vanished:
                replies = self.give(silo, reply)
        return replies or self.server.proceed(), said

    def to_vectors(self, round_number=1, attempt=0, cohort=None, vanished=()):
        round_id = RoundId(run=self.session, round=round_number, attempt=attempt)
        messages = self.server.begin(round_id, cohort or tuple(range(self.plan.clients)))
        messages, _ = self.step(messages, vanished)
        messages, _ = self.step([m for m in messages if m[0] not in vanished])
        for recipient, data in messages:
            self.silos[recipient].receive(data)
        return [recipient for recipient, _ in messages]

    def to_signatures(self, units, vanished=()):
        """Send the vectors; return them, and the messages that ask for signatures."""
        members = [silo.index for silo in self.silos if silo.awaits_input]
        vectors = {silo: self.silos[silo].mask_vector(units[silo]) for silo in members}
        replies = []
        for silo in members:
            if silo not in vanished:
                replies = self.give(silo, vectors[silo])
        return vectors, replies or self.server.proceed()

    def finish(self, units, vanished=(), unsigned=(), silent=()):
        vectors, messages = self.to_signatures(units, vanished)
        messages, _ = self.step(messages, unsigned)
        self.said = {recipient: self.silos[recipient].receive(data)[0] for recipient, data in messages}
        for silo, reply in self.said.items():
            if silo not in silent:
                self.give(silo, reply)
        if self.server.missing:
            self.server.proceed()
        return vectors


@given(st.integers(3, 8), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=25)
def test_the_sum_over_the_survivors_is_exact(silos, seed, data):
    threshold = data.draw(st.integers(silos // 2 + 1, silos))
    spare = silos - threshold
    gone = data.draw(st.lists(st.integers(0, silos - 1), unique=True, max_size=spare))
    early = gone[: data.draw(st.integers(0, len(gone)))]
    late = [silo for silo in gone if silo not in early]
    rng = np.random.default_rng(seed)
    run = Run(silos, threshold)
    run.to_vectors(vanished=early)
    units = {s: rng.integers(-LIMIT, LIMIT + 1, 6) for s in range(silos)}
    run.finish(units, vanished=late)
    alive = [s for s in range(silos) if s not in gone]
    assert run.server._cohort == tuple(alive)
    np.testing.assert_array_equal(run.server.result(), sum(units[s] for s in alive))


@pytest.mark.parametrize("gone", [{"unsigned": (2,)}, {"silent": (2,)}])
def test_a_silo_may_vanish_after_its_vector_too(gone):
    run = Run()
    run.to_vectors()
    units = {s: np.full(6, s + 1) for s in range(4)}
    run.finish(units, **gone)
    assert run.server._cohort == (0, 1, 2, 3)
    np.testing.assert_array_equal(run.server.result(), 10)


def test_too_few_survivors_end_the_attempt_and_reveal_nothing():
    run = Run()
    run.to_vectors()
    vectors = {s: run.silos[s].mask_vector(np.zeros(6, dtype=np.int64)) for s in range(4)}
    run.server.receive(0, vectors[0])
    run.server.receive(1, vectors[1])
    with pytest.raises(ProtocolError, match="2 silos are left and 3 are needed"):
        run.server.proceed()
    assert not run.server.may_have_released
    with pytest.raises(ProtocolError, match="not complete"):
        run.server.result()
    run.to_vectors(attempt=1, cohort=(0, 1, 3))
    run.finish({s: np.full(6, 5) for s in range(4)})
    np.testing.assert_array_equal(run.server.result(), 15)


def test_an_attempt_counts_as_released_once_shares_are_asked_for():
    run = Run()
    run.to_vectors()
    _, messages = run.to_signatures({s: np.zeros(6, dtype=np.int64) for s in range(4)})
    assert not run.server.may_have_released
    run.step(messages, (3,))
    assert run.server.may_have_released
    assert run.server.missing == (0, 1, 2)


def opened_by_the_server(run, received, late, gone):
    """Return every reading of a vanished silo's late vector that the server can make from what it received.

    It rebuilds the key whose shares it was given, as recovery does, agrees with every public key that was
    announced, opens of the vanished silo's bundle what opens, and where that gives the seed of the silo's own mask
    takes all masks off.
    """
    round_id = Envelope.decode(late).round_id
    messages = [(sender, Envelope.decode(data).message) for sender, data in received]
    announced = {sender: message for sender, message in messages if isinstance(message, RecoveryKeys)}
    publics = {sender: (keys.mask.public, keys.seal.public) for sender, keys in announced.items()}
    revealed = {sender: dict(m.shares)[gone] for sender, m in messages if isinstance(m, RevealedShares)}
    key = AgreementKey.from_bytes(
        combine([Share(point=s + 1, value=share) for s, share in revealed.items()], threshold=run.threshold)
    )
    assert key.public in publics[gone]
    (bundle,) = [dict(m.shares) for sender, m in messages if sender == gone and isinstance(m, ShareBundle)]
    shares = {}
    for peer, sealed in bundle.items():
        for public, purpose in itertools.product(publics[peer], (SHARE_PURPOSE, MASK_PURPOSE, KEY_PURPOSE)):
            associated = round_id.encode() + gone.to_bytes(2, "big") + peer.to_bytes(2, "big")
            with contextlib.suppress(CryptoError):
                content = unseal(key.agree(public).derive(purpose, round_id), sealed, associated)
                shares[peer] = Share(point=peer + 1, value=content[:SHARE_BYTES])
    if len(shares) < run.threshold:
        return
    seed = combine(list(shares.values()), threshold=run.threshold)
    for which in (0, 1):
        words = Envelope.decode(late).message.words.copy()
        apply_masks_(words, [(seed, False)])
        for peer in bundle:
            mask = key.agree(publics[peer][which]).derive(MASK_PURPOSE, round_id)
            apply_masks_(words, [(mask, gone > peer)])
        yield run.plan.decode(words)


@pytest.mark.parametrize(("silos", "threshold"), [(4, 3), (5, 3)])
def test_a_vanished_silos_late_vector_stays_hidden(silos, threshold):
    gone, length = silos - 1, 4096
    run = Run(silos, threshold, length)
    run.to_vectors()
    units = {s: np.full(length, 1000 * s) for s in range(silos)}
    vectors = run.finish(units, vanished=(gone,))
    np.testing.assert_array_equal(run.server.result(), sum(units[s] for s in range(gone)))
    with pytest.raises(ProtocolError, match=f"silo {gone}"):
        run.server.receive(gone, vectors[gone])
    readings = opened_by_the_server(run, run.received, vectors[gone], gone)
    assert not any(np.array_equal(reading, units[gone]) for reading in readings)
    everything = sum(Envelope.decode(data).message.words for data in vectors.values())
    partly = everything - sum(Envelope.decode(vectors[s]).message.words for s in range(gone))
    partly = partly + run.server._sum
    counts = np.bincount(partly.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_a_silo_never_gives_both_shares_of_anybody():
    run = Run()
    run.to_vectors()
    run.finish({s: np.zeros(6, dtype=np.int64) for s in range(4)})
    round_id = run.server._round_id
    again = Envelope(
        round_id=round_id, sender=SERVER, recipient=0, message=Survivors(silos=(0, 1, 2))
    ).encode()
    with pytest.raises(ProtocolError, match="none was awaited"):
        run.silos[0].receive(again)


@pytest.mark.parametrize("alive", [(0, 1), (1, 2, 3), (0, 1, 2, 3, 7)])
def test_wrong_survivors_are_refused(alive):
    run = Run()
    run.to_vectors()
    run.silos[0].mask_vector(np.zeros(6, dtype=np.int64))
    named = Survivors(silos=alive)
    data = Envelope(round_id=run.server._round_id, sender=SERVER, recipient=0, message=named).encode()
    with pytest.raises(ProtocolError, match="survivors"):
        run.silos[0].receive(data)


def test_altered_shares_are_noticed_with_their_silo():
    run = Run()
    messages = run.server.begin(RoundId(run=run.session, round=1, attempt=0), (0, 1, 2, 3))
    messages, _ = run.step(messages)
    messages, _ = run.step(messages)
    recipient, data = messages[0]
    envelope = Envelope.decode(data)
    (silo, sealed), *others = envelope.message.shares
    bad = RelayedShares(shares=((silo, sealed[:-1] + bytes([sealed[-1] ^ 1])), *others))
    with pytest.raises(ProtocolError, match="silo 1: its shares were refused"):
        run.silos[recipient].receive(dataclasses.replace(envelope, message=bad).encode())


def test_every_silo_has_a_mask_seed_of_its_own_in_every_round():
    """Whoever can guess it takes a silo's mask off."""
    seeds = []
    for _ in range(2):
        run = Run()
        run.to_vectors()
        seeds += [silo._seed for silo in run.silos]
    assert len(set(seeds)) == len(seeds)
    assert all(len(seed) == 32 and len(set(seed)) > 8 for seed in seeds)


def test_wrong_revealed_shares_are_noticed():
    run = Run()
    run.to_vectors()
    for silo in (0, 1, 2):
        run.server.receive(silo, run.silos[silo].mask_vector(np.zeros(6, dtype=np.int64)))
    answers = []
    for recipient, data in run.step(run.server.proceed())[0]:
        envelope = Envelope.decode(run.silos[recipient].receive(data)[0])
        altered = tuple((s, share[:-1] + bytes([share[-1] ^ 1])) for s, share in envelope.message.shares)
        bad = dataclasses.replace(envelope, message=RevealedShares(shares=altered))
        answers.append((recipient, bad.encode()))
    for recipient, data in answers[:-1]:
        run.server.receive(recipient, data)
    with pytest.raises(ProtocolError, match="shares of silo 0's own mask do not give the one") as told:
        run.server.receive(*answers[-1])
    assert told.value.silo is None


def lied_to(silos, threshold, liar, about, vanished=()):
    """Play a round in which one silo gives a wrong share of another's secret."""
    run = Run(silos, threshold)
    run.to_vectors()
    units = {s: np.full(6, s + 1) for s in range(silos)}
    _, messages = run.to_signatures(units, vanished)
    messages, _ = run.step(messages)
    for recipient, data in messages:
        (reply,) = run.silos[recipient].receive(data)
        if recipient == liar:
            envelope = Envelope.decode(reply)
            wrong = tuple(
                (s, share[:-1] + bytes([share[-1] ^ (s == about)])) for s, share in envelope.message.shares
            )
            reply = dataclasses.replace(envelope, message=RevealedShares(shares=wrong)).encode()
        run.give(recipient, reply)
    return run.server.result()


@pytest.mark.parametrize("liar", [0, 2, 4])
def test_who_gives_a_wrong_share_of_a_vanished_silos_key_is_named_and_not_the_vanished_one(liar):
    with pytest.raises(ProtocolError, match=f"^silo {liar} gave a wrong share of silo 5's mask key, or was"):
        lied_to(6, 4, liar, 5, vanished=(5,))


@pytest.mark.parametrize(
    "about", [0, 1, 3], ids=["the liar's own seed", "a survivor's seed", "a vanished silo's key"]
)
def test_a_wrong_share_is_noticed_by_no_more_answers_than_the_threshold(about):
    """Any so many shares lie on one polynomial: only what the silo has announced shows that it is another one."""
    with pytest.raises(ProtocolError, match=f"shares of silo {about}'s .* do not give the one") as told:
        lied_to(4, 3, 0, about, vanished=(3,))
    assert told.value.silo is None
    assert (lied_to(4, 3, None, None, vanished=(3,)) == 6).all()


def test_one_answer_more_names_who_lied_about_a_seed():
    with pytest.raises(ProtocolError, match=r"^silo 1 gave a wrong share of silo 2's own mask, or was"):
        lied_to(4, 3, 1, 2)
    with pytest.raises(ProtocolError, match=r"^silo 1: gave a wrong share of its own mask"):
        lied_to(4, 3, 1, 1)


def deal_once(monkeypatch, place, other):
    """Split all secrets honestly but one: the `place`-th, counted silo by silo, its seed and then its key."""
    dealt = []

    def deal(secret, **numbers):
        dealt.append(secret)
        return (other if len(dealt) == place else split)(secret, **numbers)

    monkeypatch.setattr("fedveil.protocols.recoverable_aggregation.split", deal)


@pytest.mark.parametrize(("place", "dealer"), [(12, 5), (5, 2)], ids=["vanished", "there"])
def test_who_was_dealt_a_wrong_share_is_not_accused_alone(place, dealer, monkeypatch):
    """It gives what it was dealt, and nothing shows that: a dealer would have an honest silo blamed."""

    def other(secret, **numbers):
        shares = list(split(secret, **numbers))
        last = shares[1].value[-1] ^ 1
        shares[1] = dataclasses.replace(shares[1], value=shares[1].value[:-1] + bytes([last]))
        return shares

    deal_once(monkeypatch, place, other)
    with pytest.raises(ProtocolError, match=f"silo 1 gave .*, or was dealt it by silo {dealer}") as told:
        lied_to(6, 4, None, None, vanished=(5,))
    assert told.value.silo is None


@pytest.mark.parametrize("liar", [0, 3])
def test_who_gives_a_wrong_share_of_a_survivors_mask_is_named_where_enough_others_agree(liar):
    with pytest.raises(ProtocolError, match=f"^silo {liar} gave a wrong share of silo 1's own mask, or was"):
        lied_to(6, 4, liar, 1)


def test_where_shares_do_not_show_who_lied_nobody_is_named():
    with pytest.raises(
        ProtocolError, match=r"silo 3 dealt wrong ones, or one of the silos \[0, 1, 2\] gave"
    ) as told:
        lied_to(4, 3, 1, 3, vanished=(3,))
    assert told.value.silo is None


@pytest.mark.parametrize(
    ("place", "dealer", "what"), [(12, 5, "mask key"), (5, 2, "own mask")], ids=["vanished", "there"]
)
def test_who_dealt_another_secret_is_named_by_shares_that_agree(place, dealer, what, monkeypatch):
    deal_once(monkeypatch, place, lambda _, **numbers: split(bytes(32), **numbers))
    with pytest.raises(ProtocolError, match=f"dealt shares of another {what} than its own") as told:
        lied_to(6, 4, None, None, vanished=(5,))
    assert told.value.silo == dealer


def test_a_bundle_must_serve_every_silo():
    run = Run()
    messages = run.server.begin(RoundId(run=run.session, round=1, attempt=0), (0, 1, 2, 3))
    messages, _ = run.step(messages)
    for recipient, data in messages:
        (reply,) = run.silos[recipient].receive(data)
        if recipient == 2:
            envelope = Envelope.decode(reply)
            bad = dataclasses.replace(envelope.message, shares=envelope.message.shares[1:])
            reply = dataclasses.replace(envelope, message=bad).encode()
        if recipient == 3:
            with pytest.raises(ProtocolError, match="silo 2: sealed no shares for silo 0"):
                run.server.receive(recipient, reply)
        else:
            run.server.receive(recipient, reply)


@pytest.mark.parametrize("which", ["exchanged", "the mask key for both", "of the last attempt"])
def test_a_key_serves_the_use_it_was_signed_for(which):
    """The server relays the keys: it must not make a silo seal shares under the key that recovery rebuilds."""
    run = Run()
    run.to_vectors()
    earlier = {sender: Envelope.decode(data).message for sender, data in run.received[:4]}
    round_id = RoundId(run=run.session, round=1, attempt=1)
    messages = run.server.begin(round_id, (0, 1, 2, 3))
    (recipient, data), *_ = run.step(messages)[0]
    envelope = Envelope.decode(data)
    keys = dict(envelope.message.keys)
    mask, seal = keys[3].mask, keys[3].seal
    keys[3] = {
        "exchanged": RecoveryKeys(mask=seal, seal=mask),
        "the mask key for both": RecoveryKeys(mask=mask, seal=mask),
        "of the last attempt": RecoveryKeys(mask=mask, seal=earlier[3].seal),
    }[which]
    bad = RecoveryDirectory(keys=tuple(keys.items()))
    with pytest.raises(ProtocolError, match="silo 3: its public key was refused"):
        run.silos[recipient].receive(dataclasses.replace(envelope, message=bad).encode())
    assert len({KEY_PURPOSE, SEAL_PURPOSE, SHARE_PURPOSE, MASK_PURPOSE}) == 4


@pytest.mark.parametrize(("threshold", "silos"), [(2, 4), (5, 4), (0, 3)])
def test_thresholds_lie_above_half(threshold, silos):
    with pytest.raises(ProtocolError, match="above half"):
        check_threshold(threshold, silos)
    check_threshold(3, 4)


class Liar:
    """A server that tells every silo of five what it likes: other shares, other survivors, other signatures."""

    def __init__(self):
        self.run = Run(silos=5, threshold=3)
        self.round_id = RoundId(run=self.run.session, round=1, attempt=0)
        self.announced = self.run.server.begin(self.round_id, (0, 1, 2, 3, 4))

    def told(self, silo, message):
        envelope = Envelope(round_id=self.round_id, sender=SERVER, recipient=silo, message=message)
        return [Envelope.decode(reply).message for reply in self.run.silos[silo].receive(envelope.encode())]

    def to_vectors(self, relayed=lambda silo, shares: shares):
        """Play to the vectors; every silo gets the sealed shares that ``relayed`` leaves of them."""
        messages, _ = self.run.step(self.announced)
        for silo, data in self.run.step(messages)[0]:
            self.told(silo, RelayedShares(shares=relayed(silo, Envelope.decode(data).message.shares)))
        return [self.run.silos[silo].mask_vector(np.arange(6) + silo) for silo in range(5)]

    def signatures(self, named):
        """Name survivors to each silo; return the signatures of those that sign."""
        given = {}
        for silo, alive in named.items():
            with contextlib.suppress(ProtocolError):
                given[silo] = self.told(silo, Survivors(silos=alive))[0].signature
        return given


LIES = {0: (0, 1, 2), 1: (0, 1, 3), 2: (0, 2, 3), 3: (0, 3, 4), 4: (0, 3, 4)}
"""With silo 0 masked with 1 and 2 alone, shares for these lists would open its vector."""


@pytest.mark.parametrize("relayed", ["of the same list", "of the list's silos", "of all"])
def test_a_server_that_names_other_survivors_to_every_silo_gets_no_share(relayed):
    liar = Liar()
    liar.to_vectors(lambda silo, shares: shares[:2] if silo == 0 else shares)
    signed = liar.signatures(LIES)
    assert set(signed) == {0, 1, 2, 3, 4}
    for silo, alive in LIES.items():
        signatures = {
            "of the same list": {other: signed[other] for other in alive if LIES[other] == alive},
            "of the list's silos": {other: signed[other] for other in alive},
            "of all": signed,
        }[relayed]
        with pytest.raises(ProtocolError, match=r"3 are needed|other survivors|not in"):
            liar.told(silo, AgreedSurvivors(signatures=tuple(signatures.items())))


def test_a_server_that_hides_shares_from_one_silo_gets_no_share_for_a_list_it_is_not_masked_with():
    liar = Liar()
    liar.to_vectors(lambda silo, shares: shares[2:] if silo == 0 else shares)  # silo 0: masks with 3 and 4
    signed = liar.signatures(dict.fromkeys(range(5), (0, 1, 2)))
    assert set(signed) == {1, 2}  # silo 0 holds no shares of 1 and 2; 3 and 4 are not among the survivors
    with pytest.raises(ProtocolError, match="2 silos signed these survivors; 3 are needed"):
        liar.told(1, AgreedSurvivors(signatures=tuple(signed.items())))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_all_shares_of_an_attempt_are_given_for_one_list(data):
    liar = Liar()
    liar.to_vectors()
    every = [alive for size in (3, 4, 5) for alive in itertools.combinations(range(5), size)]
    few = data.draw(st.lists(st.sampled_from(every), min_size=2, max_size=2))
    named = {silo: data.draw(st.sampled_from(few)) for silo in range(5)}
    signed = liar.signatures(named)
    opened = set()
    for silo in signed:
        same = tuple((other, signed[other]) for other in signed if named[other] == named[silo])
        with contextlib.suppress(ProtocolError):
            liar.told(silo, AgreedSurvivors(signatures=same))
            opened.add(named[silo])
    assert len(opened) <= 1


def test_a_signature_is_of_one_silo_and_one_attempt():
    run = Run()
    run.to_vectors()
    units = {s: np.zeros(6, dtype=np.int64) for s in range(4)}
    _, messages = run.to_signatures(units)
    _, before = run.step(messages)
    run.to_vectors(attempt=1)
    _, messages = run.to_signatures(units)
    _, said = run.step(messages)
    signed = {silo: Envelope.decode(reply).message.signature for silo, reply in said.items()}
    old = {silo: Envelope.decode(reply).message.signature for silo, reply in before.items()}
    for silo, bad in enumerate((signed[1], old[2])):
        agreed = AgreedSurvivors(signatures=((0, signed[0]), (1, signed[1]), (2, bad)))
        told = Envelope(round_id=run.server._round_id, sender=SERVER, recipient=silo, message=agreed)
        with pytest.raises(ProtocolError, match="silo 2: signed other survivors"):
            run.silos[silo].receive(told.encode())


def test_silos_that_pool_what_they_know_need_a_higher_threshold():
    check_threshold(4, 5, 2)
    with pytest.raises(ProtocolError, match="2 of which may pool"):
        check_threshold(3, 5, 2)

"""The fold behind every statement: messages say what they tell, stages claim, what nobody claims is not guaranteed.

These are rules of the project, tried on every composition: what fails, fails closed; who knows more is never promised
more.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from fedveil.errors import CompositionError, PrivacyError, ProtocolError
from fedveil.methods.channels import Channel
from fedveil.methods.derive import compute_claims, compute_sensitivity, derive
from fedveil.methods.dp_fed_ls import dp_fed
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import Method, message_kinds, parties_of
from fedveil.methods.paraaegis import paraaegis, varying_dp
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg, uldp_avg_w, uldp_group
from fedveil.privacy.accounting import epsilon, make_accountant
from fedveil.privacy.claims import (
    Claim,
    Key,
    Reveals,
    Role,
    Sent,
    check_reveals,
    covered_knowledge,
    knowledge,
    least_covering_claim,
    no_guarantee,
    reveals,
)
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    Event,
    GaussianEvent,
    NoGuarantee,
    SelfComposedEvent,
    atoms,
    split_grid_loss,
)
from fedveil.privacy.sampling import PoissonUsers
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.messages import KINDS
from fedveil.protocols.plaintext_sums import PlaintextSums, PlaintextVector
from fedveil.protocols.session_messages import PARTS, SampledUsers
from fedveil.randomness import PrivacyRandomness
from fedveil.stage import Sensitivity
from fedveil.training.steps import LocalSgd
from tests.pins.compositions import compositions, public
from tests.pins.guarantees import read as recorded

ROLES = [Role(value) for value in range(1, 8)]


@cache
def cost(event: Event, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> float:
    """Epsilon of one release, by the accountant that has a bound for everything that is released here."""
    if any(isinstance(one, NoGuarantee) for one in atoms(event)):
        return math.inf
    if event == ComposedEvent(events=()):
        return 0.0
    name = "rdp" if make_accountant("rdp", adjacency).supports(event) else "pld"
    return epsilon(event, 1e-5, name, adjacency)


@cache
def folded(name: str) -> tuple[Method, tuple[Claim, ...]]:
    method = dict(compositions())[name]
    return method, compute_claims(method, compute_sensitivity(method, public(method)))


NAMES = {
    method: tuple(names) for method, names in groupby(recorded(), lambda name: name.split(",")[0].split()[0])
}
"""The names of every composition, by method: tests/test_pins.py finds no other."""

each_method = pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)


KNOWN: dict[Any, frozenset[Reveals]] = {}


def known_to(role: Role, sent: tuple[Sent, ...], content: Reveals) -> frozenset[Reveals]:
    """What a role knows, found once: many compositions send the same."""
    asked = role, tuple((one.kind, one.to, frozenset(one.instead.items())) for one in sent), content
    if asked not in KNOWN:
        KNOWN[asked] = knowledge(role, sent, content)
    return KNOWN[asked]


# --- messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS.values(), *PARTS.values()], ids=lambda kind: kind.__name__)
def test_every_field_of_every_message_says_what_it_tells(kind: type) -> None:
    assert check_reveals(kind) is kind
    for one in dataclasses.fields(kind):
        assert one.metadata["tells"] in Reveals
        assert one.metadata["tells"] is not Reveals.UNDECLARED


def test_a_message_that_does_not_say_what_a_field_tells_cannot_be_declared() -> None:
    @dataclass(frozen=True)
    class Silent:
        values: bytes

    with pytest.raises(TypeError, match=r"Silent\.values does not declare what it reveals"):
        check_reveals(Silent)


@dataclass(frozen=True)
class Undeclared:
    values: bytes


@each_method
def test_a_message_that_declares_nothing_leaves_its_readers_without_a_guarantee(
    names: tuple[str, ...],
) -> None:
    for name in names:
        method, claims = folded(name)
        for told in ROLES:
            sent = (*method.sends(), Sent(Undeclared, told))
            for role in ROLES:
                known = known_to(role, sent, method.channel.content)
                assert (Reveals.UNDECLARED in known) == bool(role & told), name
                if role & told:
                    assert isinstance(least_covering_claim(known, claims).event, NoGuarantee), name


@each_method
def test_a_claim_that_is_dropped_never_makes_a_line_smaller(names: tuple[str, ...]) -> None:
    for name in names:
        method, claims = folded(name)
        for role in ROLES:
            known = known_to(role, method.sends(), method.channel.content)
            stated = cost(least_covering_claim(known, claims).event, method.sampler.adjacency)
            for dropped in range(len(claims)):
                rest = claims[:dropped] + claims[dropped + 1 :]
                assert (
                    cost(least_covering_claim(known, rest).event, method.sampler.adjacency) >= stated - 1e-12
                ), name
            assert isinstance(least_covering_claim(known, ()).event, NoGuarantee), name


@each_method
def test_who_knows_more_is_never_promised_more(names: tuple[str, ...]) -> None:
    for name in names:
        method, claims = folded(name)
        lines = {}
        for role in ROLES:
            known = known_to(role, method.sends(), method.channel.content)
            lines[role] = known, cost(least_covering_claim(known, claims).event, method.sampler.adjacency)
        for a, (less, promised) in lines.items():
            for b, (more, same_or_less) in lines.items():
                if less <= more or b & a == a:
                    assert promised <= same_or_less * (1 + 1e-12), (name, a, b)


@each_method
def test_readers_know_the_models_and_every_line_is_that_of_what_is_sent(names: tuple[str, ...]) -> None:
    for name in names:
        method, claims = folded(name)
        guarantee = derive(method, public(method))
        assert known_to(Role.READER, method.sends(), method.channel.content) == {Reveals.MODEL}, name
        assert [view.role for view in guarantee.views] == list(parties_of(method)), name
        for view in guarantee.views:
            known = known_to(view.role, method.sends(), method.channel.content)
            assert view.event == least_covering_claim(known, claims).charged_event, name


def test_a_driver_carries_no_message_that_the_method_does_not_list() -> None:
    """What a view does not count cannot be sent: here a vector in the open, where masks are listed."""
    vector = np.zeros(2)
    listed = LocalDriver(PlaintextSums(clients=2, length=2), kinds={PlaintextVector})
    assert listed.play((1, 0), (0, 1), None, lambda _: vector)[1] == 2
    masked = replace(uldp_avg(local=LOCAL, clip=1.0, noise_multiplier=5.0), protection=SecureAggregation())
    other = LocalDriver(PlaintextSums(clients=2, length=2), kinds=message_kinds(masked))
    with pytest.raises(ProtocolError, match="PlaintextVector is none of the messages that the method lists"):
        other.play((1, 0), (0, 1), None, lambda _: vector)


# --- the fold itself ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Locked:
    counts: bytes = dataclasses.field(metadata=reveals(Reveals.COUNTS, Key.SILOS, besides=Reveals.PRESENCE))
    bits: bytes = dataclasses.field(metadata=reveals(Reveals.DRAWN, Key.NOBODY))


def test_a_field_under_a_key_tells_who_holds_the_key_and_besides_everybody() -> None:
    sent = [Sent(Locked, Role.SERVER)]
    assert knowledge(Role.SERVER, sent, Reveals.EXACT) == {Reveals.PRESENCE}
    assert knowledge(Role.SILO, sent, Reveals.EXACT) == {Reveals.OWN}
    both = knowledge(Role.SERVER | Role.SILO, sent, Reveals.EXACT)
    assert both == {Reveals.PRESENCE, Reveals.COUNTS, Reveals.OWN}


def test_a_server_knows_the_models_and_the_draws_that_it_sends() -> None:
    method = dp_fed(
        local=LocalSgd(learning_rate=0.1, epochs=1),
        n_users=10,
        clip=1.0,
        noise_multiplier=1.0,
        client_sampling_rate=0.1,
    )
    assert {Reveals.MODEL, Reveals.DRAWN} <= knowledge(Role.SERVER, method.sends(), method.channel.content)
    client = knowledge(Role.SILO, method.sends(), method.channel.content)
    assert Reveals.OWN_DRAW in client
    assert Reveals.DRAWN not in client


def test_the_least_claim_that_covers_is_taken_and_what_nobody_covers_is_named() -> None:
    wide = Claim(covered_knowledge(Reveals.SUM, Reveals.DRAWN), GaussianEvent(noise_multiplier=1.0))
    narrow = Claim(covered_knowledge(Reveals.SUM), GaussianEvent(noise_multiplier=3.0))
    assert least_covering_claim(frozenset({Reveals.MODEL}), [wide, narrow]) is narrow
    assert least_covering_claim(frozenset({Reveals.DRAWN}), [narrow, wide]) is wide
    nothing = least_covering_claim(frozenset({Reveals.MODEL, Reveals.COUNTS}), [wide, narrow]).event
    assert isinstance(nothing, NoGuarantee)
    assert "how many records each user has" in nothing.reason
    assert "the models" not in nothing.reason


def test_what_is_unprotected_covers_everything_but_what_nobody_declared() -> None:
    claim = no_guarantee("no noise")
    assert claim.covers == frozenset(Reveals) - {Reveals.UNDECLARED}
    assert isinstance(claim.event, NoGuarantee)


# --- statements that were false -------------------------------------------------------------------------------------


LOCAL = LocalSgd(learning_rate=0.1, epochs=1)


def test_a_client_that_is_told_its_own_draw_keeps_the_amplification_and_would_lose_it_with_all_draws() -> (
    None
):
    """dp-fed, q = 0.1, z = 1, 100 rounds: 7.1 was stated while every client was sent every client's draw (91.8)."""
    method = dp_fed(local=LOCAL, n_users=1000, clip=1.0, noise_multiplier=1.0, client_sampling_rate=0.1)
    facts = PublicFacts(n_silos=1000, n_users=1000)
    client = derive(method, facts).event_for(Role.SILO)
    assert client == PoissonUsers(rate=0.1).event(GaussianEvent(noise_multiplier=1.0))
    told = knowledge(Role.SILO, (*method.sends(), Sent(SampledUsers, Role.SILO)), method.channel.content)
    spoiled = least_covering_claim(told, compute_claims(method, compute_sensitivity(method, facts))).event
    assert spoiled == GaussianEvent(noise_multiplier=1.0)
    hundred = [epsilon(SelfComposedEvent(event=one, count=100), 1e-5) for one in (client, spoiled)]
    assert hundred == pytest.approx([7.1, 91.8], abs=0.15)


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("protection", [None, SecureAggregation()])
def test_weights_by_records_in_the_open_guarantee_nothing_to_server_and_silos(
    protection: SecureAggregation | None, rate: float
) -> None:
    method = uldp_avg_w(local=LOCAL, clip=1.0, noise_multiplier=5.0, user_sampling_rate=rate)
    if protection is not None:
        method = replace(method, protection=protection)
    guarantee = derive(method, PublicFacts(n_silos=5, n_users=100))
    assert math.isfinite(cost(guarantee.event))
    for view in guarantee.views:
        assert isinstance(view.event, NoGuarantee)
        assert "how many records each user has" in view.event.reason
        assert "how many records each user has" in view.sees


def test_the_same_weights_under_private_weighting_are_finite_and_name_who_learns_presence() -> None:
    method = uldp_avg_w(local=LOCAL, clip=1.0, noise_multiplier=5.0)
    method = replace(method, protection=PrivateWeighting(n_max=100))
    guarantee = derive(method, PublicFacts(n_silos=5, n_users=100, dimension=10))
    assert math.isfinite(cost(guarantee.event_for(Role.SERVER)))
    assert math.isfinite(cost(guarantee.event_for(Role.SILO)))
    coalition = guarantee.event_for(Role.SERVER | Role.SILO)
    assert isinstance(coalition, NoGuarantee)
    assert "how many records each user has" in coalition.reason
    *_, lies, present = guarantee.uncovered
    assert lies.startswith("departures from private weighting: a wrong weight from the server")
    assert present.startswith("the server and one silo learn which users have a record")


def test_what_is_taken_on_trust_of_silos_is_named_wherever_they_add_the_noise() -> None:
    """Silos whose share of the noise is not needed are relied on all the same for the bound on what they contribute."""
    shares = [
        uldp_avg(local=LOCAL, clip=1.0, noise_multiplier=5.0, colluding_silos=colluding)
        for colluding in (0, 2)
    ]
    own = uldp_group(local=replace(LOCAL, batch_size=10), clip=1.0, noise_multiplier=5.0, group_size=2)
    relied = "noise and bounded contributions from every silo"
    some = "bounded contributions from every silo, and on noise from all but 2 of them"
    for method, words in ((shares[0], relied), (shares[1], some), (own, relied)):
        uncovered = derive(method, PublicFacts(n_silos=5, n_users=100, silo_records=(20,) * 5)).uncovered
        trust = f"departures from the method: epsilon relies on {words}, which no other party can check"
        assert trust in uncovered


def test_what_is_taken_on_trust_of_the_server_is_named_where_it_adds_the_noise() -> None:
    """A reader of dp-fed's statement saw a line against the server, and none that says what rests on the server."""
    for noise in (0.0, 2.0):
        method = dp_fed(local=LOCAL, n_users=10, clip=1.0, noise_multiplier=noise)
        guarantee = derive(method, PublicFacts(n_silos=10, n_users=10))
        assert any("relies on the server" in line for line in guarantee.uncovered) is (noise > 0)
        assert not any("share of the noise" in view.sees for view in guarantee.views)


def test_noise_that_is_none_is_not_said_to_fall() -> None:
    for noise in (0.0, 2.0):
        method = varying_dp(local=LOCAL, n_users=9, largest_silo=20, clip=1.0, noise_multiplier=noise)
        told = derive(method, PublicFacts(n_silos=9, n_users=9)).mechanisms
        assert any("the noise named above" in text for text in told) is (noise > 0)


def test_parties_learn_and_one_party_learns() -> None:
    method = paraaegis(local=LOCAL, n_users=10, largest_silo=20, clip=1.0, noise_multiplier=2.0)
    uncovered = derive(method, PublicFacts(n_silos=10, n_users=10, dimension=10)).uncovered
    assert any(line.startswith("the server learns in how many coordinates") for line in uncovered)


def test_a_party_is_not_said_to_see_who_was_sampled_where_everybody_takes_part() -> None:
    for rate in (1.0, 0.5):
        plain = uldp_avg_w(local=LOCAL, clip=1.0, noise_multiplier=5.0, user_sampling_rate=rate)
        method = replace(plain, protection=PrivateWeighting(n_max=100))
        guarantee = derive(method, PublicFacts(n_silos=5, n_users=100, dimension=10))
        (server,) = (view for view in guarantee.views if view.role == Role.SERVER)
        assert ("who was sampled" in server.sees) is (rate < 1)


def test_a_silo_is_guaranteed_what_others_hold_and_never_more_than_a_reader() -> None:
    """Brute force: with uniform weights the rest moves by (1 - 1/n) C under n - 1 shares: more is hidden than by n."""
    for n in range(2, 9):
        method = uldp_avg(local=LOCAL, clip=1.0, noise_multiplier=5.0)
        guarantee = derive(method, PublicFacts(n_silos=n, n_users=10))
        share = 5.0 / math.sqrt(n)
        moved = np.linalg.norm(np.full(n - 1, 1 / n), ord=1)
        elsewhere = share * math.sqrt(n - 1) / moved
        silo = guarantee.event_for(Role.SILO)
        assert isinstance(silo, GaussianEvent)
        assert silo.noise_multiplier <= elsewhere * (1 + 1e-12)
        assert silo.noise_multiplier == pytest.approx(min(elsewhere, 5.0))


@dataclass(frozen=True)
class Unclaimed(Channel):
    """A channel that says nothing of itself."""


@dataclass(frozen=True)
class Unheard(Channel):
    """A channel that claims nothing, and does not say what it sends."""

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim nothing."""
        return ()


def test_a_channel_without_claims_is_refused_and_one_that_claims_nothing_guarantees_and_sends_nothing() -> (
    None
):
    """It was claimed as Gaussian, while the raw sum left."""
    plain = uldp_avg(local=LOCAL, clip=1.0, noise_multiplier=5.0)
    with pytest.raises(CompositionError, match="Unclaimed, given as channel, does not define claims"):
        replace(plain, channel=Unclaimed())
    method = replace(plain, channel=Unheard())
    guarantee = derive(method, PublicFacts(n_silos=3, n_users=10))
    for event in (guarantee.event, *(view.event for view in guarantee.views)):
        assert isinstance(event, NoGuarantee)
    with pytest.raises(
        CompositionError, match="Unheard does not define how a silo's sum is sent; nothing was sent"
    ):
        method.channel.send(
            np.ones(3),
            Sender(
                number=0,
                senders=3,
                round=1,
                grid=method.bound.grid,
                privacy=PrivacyRandomness.insecure(1),
            ),
        )


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("colluding", [0, 2])
def test_a_silo_is_guaranteed_what_others_hold_although_they_change_the_weight_of_what_it_holds_itself(
    colluding: int, rate: float
) -> None:
    """Weights n_su / N_u: records elsewhere take weight from those here, so the sum moves by up to 2 C, not C.

    Sampling does not amplify that: with or without records elsewhere, a user who is drawn is in the sum.
    """
    n, noise, most = 5, 5.0, 100
    method = uldp_avg_w(
        local=LOCAL, clip=1.0, noise_multiplier=noise, user_sampling_rate=rate, colluding_silos=colluding
    )
    method = replace(method, protection=PrivateWeighting(n_max=most))
    silo = derive(method, PublicFacts(n_silos=n, n_users=10, dimension=10)).event_for(Role.SILO)
    together = max(1, colluding)
    rng = np.random.default_rng(7)
    moved = 0.0
    for trial in range(500):
        counts = rng.integers(0, most // n + 1, n)
        counts[:together] = trial % 2  # what the pooled silos hold of the user stays
        updates = rng.standard_normal((n, 3))
        updates[together:] = -updates[0]  # the worst case: those elsewhere point the other way
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        with_her, here = counts / max(1, counts.sum()), counts.copy()
        here[together:] = 0
        without = here / max(1, here.sum())
        moved = max(moved, float(np.linalg.norm((with_her - without) @ updates)))
    assert moved > 1.9
    left = noise / math.sqrt(n - colluding) * math.sqrt(n - together) / moved
    assert isinstance(silo, GaussianEvent)
    assert silo.noise_multiplier <= left
    assert silo.noise_multiplier == pytest.approx(left, rel=0.05)


def test_noise_that_has_all_but_gone_is_refused_before_a_round() -> None:
    method = varying_dp(
        local=LOCAL, n_users=6, largest_silo=1, clip=1.0, noise_multiplier=5.0, noise_decay=0.01
    )
    guarantee = derive(method, PublicFacts(n_silos=6, n_users=6, dimension=10))
    assert isinstance(split_grid_loss(guarantee.after_rounds(guarantee.event, 40))[0], GaussianEvent)
    with pytest.raises(PrivacyError, match="next to none in round 52: take a larger noise_decay"):
        guarantee.after_rounds(guarantee.event, 300)


@pytest.mark.parametrize("noise", [1.0, 1.3, 1.9, 3.9, 7.9])
def test_the_grid_loss_of_noise_that_falls_covers_every_round(noise: float) -> None:
    """The grid is agreed for the noise of a round: 1.9 and 7.9 lie finer on theirs than the rounds that follow."""
    method = varying_dp(
        local=LOCAL, n_users=6, largest_silo=1, clip=1.0, noise_multiplier=noise, noise_decay=0.9
    )
    facts, rounds = PublicFacts(n_silos=6, n_users=6, dimension=1), 40
    each = [
        derive(replace(method.at_round(number), noise_decay=1.0), facts).grid_loss
        for number in range(1, rounds + 1)
    ]
    guarantee = derive(method, facts)
    stated = split_grid_loss(guarantee.after_rounds(guarantee.event, rounds))[1]
    charged = (guarantee.event_at_round(guarantee.event, number) for number in range(1, rounds + 1))
    assert sum(each) <= stated <= 8 * sum(each)
    assert split_grid_loss(ComposedEvent(events=tuple(charged)))[1] == pytest.approx(stated, rel=1e-12)


def test_a_round_is_not_charged_without_the_number_of_coordinates_that_its_grid_is_paid_for() -> None:
    method = uldp_avg(local=LOCAL, clip=1.0, noise_multiplier=2.0)
    guarantee = derive(method, PublicFacts(n_silos=3, n_users=9))
    with pytest.raises(PrivacyError, match=r"PublicFacts\(dimension="):
        guarantee.event_at_round(guarantee.event, 1)


@pytest.mark.parametrize(("noise", "seen"), [(0.0, Reveals.EXACT), (2.0, Reveals.MESSAGE)])
def test_a_sum_without_noise_is_not_said_to_have_some(noise: float, seen: Reveals) -> None:
    method = uldp_avg(local=LOCAL, clip=1.0, noise_multiplier=noise)
    known = knowledge(Role.SERVER, method.sends(), method.channel.content)
    assert known & {Reveals.EXACT, Reveals.MESSAGE} == {seen}
    masked = derive(replace(method, protection=SecureAggregation()), PublicFacts(n_silos=3, n_users=9))
    assert any("noisy" in view.sees for view in masked.views) is (noise > 0)
    assert any("share of the noise" in view.sees for view in masked.views) is (noise > 0)

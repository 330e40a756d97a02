"""ParaAegis and its baselines as runs: sums, noise, bounds, the three lines of the statement, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tenseal")


from fedveil.crypto.keys import IdentityKey
from fedveil.errors import BudgetError, CompositionError, ConfigError, PrivacyError, ProtocolError
from fedveil.methods.capabilities import count_senders
from fedveil.methods.derive import compute_sensitivity, derive
from fedveil.methods.guarantee import Guarantee, PublicFacts
from fedveil.methods.paraaegis import dp_fedavg, paraaegis
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.privacy.accounting import PldAccountant, RdpAccountant, make_accountant
from fedveil.privacy.claims import Reveals, Role
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    ConcentratedEvent,
    GaussianEvent,
    NoGuarantee,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
    split_grid_loss,
)
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.driver import LocalDriver, Transcript
from fedveil.protocols.messages import Envelope, RoundStart
from fedveil.protocols.partial_encryption.protocol_spec import PartialEncryptionSpec
from fedveil.protocols.protocol import ClientContext
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.rounds.client_inputs import make_round_inputs
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import play_round
from fedveil.run.training_run import resume, run
from tests.children import forked  # noqa: F401
from tests.contract.test_methods import CLIP, LOCAL, METHOD_CASES
from tests.opened_parties import parties_of
from tests.runs import Silent, json_lines

CLIENTS = 5
PLACE = ClientContext(
    run=bytes(16),
    number=0,
    identity=IdentityKey.generate(),
    roster=(),
    privacy=PrivacyRandomness.insecure(3),
)
FEDERATION = PublicFacts(n_silos=CLIENTS, n_users=CLIENTS, silo_records=(90, 100, 80, 100, 95))


def asked(method: dict[str, Any], protection: dict[str, Any] | None = None, **changes: Any) -> Prepared:
    """Prepare a run of digits over five clients, each a silo."""
    noisy = method["name"] not in ("fedavg", "ckks-fedavg")
    given = {"clip": 0.5, "noise_multiplier": 0.01} | method if noisy else method
    protected = {"name": "partial-encryption", **protection} if protection is not None else {"name": "none"}
    document = {
        "name": "try",
        "rounds": 2,
        "data": {"name": "digits", "n_users": CLIENTS, "n_silos": CLIENTS, "allocation": {"law": "clients"}},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1, "epochs": 1, "batch_size": 64},
        "method": given,
        "protection": protected,
        "privacy": {"insecure_seed": 1},
    }
    if protected.get("partition") == "noisy-votes":
        document["privacy"]["accountant"] = "rdp"
    return prepare(parse(document | changes, "test"))


def turn_of(prepared: Prepared, number: int = 1, model: torch.Tensor | None = None) -> RoundContext:
    return RoundContext(
        setting=prepared.setting,
        model=prepared.task.initial() if model is None else model,
        round_number=number,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.insecure(number),
    )


def aggregate(
    prepared: Prepared,
    messages: np.ndarray,
    round_number: int = 1,
    *,
    model: torch.Tensor | None = None,
    driver: LocalDriver[Any, Any] | None = None,
) -> np.ndarray:
    """Return the sum of these vectors as the silos end with it."""
    agreed, initial = prepared.protocol_spec, prepared.task.initial()
    assert isinstance(agreed, PartialEncryptionSpec)
    driver = (
        LocalDriver(agreed, privacy=PrivacyRandomness.insecure(round_number)) if driver is None else driver
    )
    work = make_round_inputs(turn_of(prepared, round_number, model), agreed, initial)
    work.unprotected_sum = lambda client: messages[client]  # type: ignore[method-assign]
    result, summed = driver.play(
        (round_number, 0),
        tuple(range(len(messages))),
        None,
        work.client_input,
    )
    assert summed == len(messages)
    return agreed.decode_sum(result)


def updates(prepared: Prepared, scale: float = 0.01, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (CLIENTS, prepared.task.dimension))


def test_ckks_fedavg_is_fedavg_to_1e_7_and_1e_5_relative() -> None:
    """The plain mean against the encrypted one, after a round."""
    models = []
    for name in ("fedavg", "ckks-fedavg"):
        prepared = asked({"name": name})
        parties = None
        if isinstance(prepared.protocol_spec, PartialEncryptionSpec):
            parties = parties_of(prepared, PrivacyRandomness.insecure(1))
        models.append(play_round(turn_of(prepared), parties)[0])
    moved = models[0] - prepared.task.initial()
    assert (models[0] - models[1]).abs().max() < 1e-7
    assert torch.linalg.norm(models[0] - models[1]) < 1e-5 * torch.linalg.norm(moved)


def test_the_encrypted_sum_of_unbounded_updates_is_exact_to_1e_7_up_to_64_and_cut_beyond() -> None:
    prepared = asked({"name": "ckks-fedavg"})
    sent = updates(prepared, 1.0)
    sent[0, 0] = 63.9
    error = np.abs(aggregate(prepared, sent) - sent.sum(0))
    assert error.max() / CLIENTS < 1e-7
    exact = sent.sum(0) - sent[2]
    sent[2, 5] = 1e30
    exact += np.clip(sent[2], -64.0, 64.0)
    assert np.abs(aggregate(prepared, sent) - exact).max() / CLIENTS < 1e-7


@pytest.mark.usefixtures("forked")
def test_worker_processes_encrypt_to_the_same_sum() -> None:
    prepared = asked({"name": "ckks-fedavg"}, {"ratio": 1.0, "processes": 2})
    sent = updates(prepared)
    assert np.array_equal(aggregate(prepared, sent), aggregate(asked({"name": "ckks-fedavg"}), sent))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("protection", [{"ratio": 0.3}, {"ratio": 0.3, "strategy": "random"}, {"ratio": 1.0}])
def test_what_is_not_finite_names_its_silo_in_either_part(protection: dict[str, Any], bad: float) -> None:
    prepared = asked({"name": "fedavg"}, protection)
    sent = updates(prepared)
    sent[2, ::2] = bad
    with pytest.raises(ProtocolError, match=r"silo 2.*finite"):
        aggregate(prepared, sent)


def test_the_part_in_clear_has_its_noise_and_the_other_part_none() -> None:
    prepared = asked({"name": "paraaegis", "clip": 1.0, "noise_multiplier": 0.5}, {"ratio": 0.3})
    sent = np.zeros((CLIENTS, prepared.task.dimension))
    noise = np.concatenate([aggregate(prepared, sent, t) for t in range(1, 9)])
    silent = noise == 0
    assert silent.sum() == 8 * int(0.3 * prepared.task.dimension)
    kept, std = noise[~silent], 0.5 * math.sqrt(CLIENTS)
    assert abs(kept.std() / std - 1) < 6 / math.sqrt(2 * len(kept))
    assert abs(kept.mean()) < 6 * std / math.sqrt(len(kept))


def test_noise_in_the_encrypted_part_has_the_size_that_is_asked_for() -> None:
    given = {"ratio": 0.5, "strategy": "random", "he_noise": 3.0, "he_clip": 0.25}
    prepared = asked({"name": "paraaegis", "clip": 1.0, "noise_multiplier": 0.5}, given)
    assert isinstance(prepared.protocol_spec, PartialEncryptionSpec)
    driver, parts = (
        LocalDriver(prepared.protocol_spec, privacy=PrivacyRandomness.insecure(1)),
        {"clear": [], "hidden": []},
    )
    for t in range(1, 9):
        aggregate(prepared, np.zeros((CLIENTS, prepared.task.dimension)), t, driver=driver)
        result = driver._clients[0].result()
        parts["clear"].append(result.clear * prepared.protocol_spec.clear.grid)
        parts["hidden"].append(result.hidden * prepared.protocol_spec.hidden.grid)
    for name, std in (("clear", 0.5), ("hidden", 3.0 * 0.5 * 0.25)):
        noise = np.concatenate(parts[name])
        assert abs(noise.std() / (std * math.sqrt(CLIENTS)) - 1) < 6 / math.sqrt(2 * len(noise))


@pytest.mark.parametrize(
    ("name", "protection", "clear_std", "hidden_std"),
    [
        ("paraaegis", {"he_noise": 3.0, "he_clip": 0.25}, 0.5, 3.0 * 0.5 * 0.25),
        ("uldp-avg", {"he_noise": 1.5}, 0.5 / math.sqrt(CLIENTS), 1.5 * 0.5 / math.sqrt(CLIENTS)),
    ],
    ids=["parts", "whole"],
)
def test_each_parts_noise_is_the_claimed_one_to_one_percent(
    name: str, protection: dict[str, Any], clear_std: float, hidden_std: float
) -> None:
    """Over 150,000 values a part: 5.4 standard errors are 1 %, so 2 % less noise than the account counts shows."""
    given = {"name": name, "clip": 1.0, "noise_multiplier": 0.5}
    agreed, count = asked(given, {"ratio": 0.5, "strategy": "random", **protection}).protocol_spec, 150_000
    assert isinstance(agreed, PartialEncryptionSpec)
    split = agreed.divide(
        np.zeros(2 * count),
        np.arange(2 * count) % 2 == 0,
        1,
        PLACE,
    )
    grids, claimed = (agreed.clear.grid, agreed.hidden.grid), (clear_std, hidden_std)
    for units, grid, std in zip(split, grids, claimed, strict=True):
        assert (units * grid).std() == pytest.approx(std, rel=5.4 / math.sqrt(2 * count))


def among(silos: int, name: str, multiplier: float, protection: dict[str, Any], **sampling: Any) -> Prepared:
    return asked(
        {"name": name, "clip": 1.0, "noise_multiplier": multiplier} | sampling,
        protection,
        data={"name": "digits", "n_users": silos, "n_silos": silos, "allocation": {"law": "clients"}},
    )


@pytest.mark.parametrize("silos", [2, 10, 100, 2000])
@pytest.mark.parametrize("multiplier", [0.03, 0.1, 1.0])
@pytest.mark.parametrize(
    ("name", "protection"),
    [
        ("serial", {"ratio": 1.0}),
        ("paraaegis", {"he_noise": 0.1, "he_clip": 7.0, "strategy": "random"}),
        ("paraaegis", {"he_noise": 2.0, "he_clip": 0.003, "strategy": "random"}),
        ("dp-fed", {"ratio": 1.0, "he_noise": 1.0}),
    ],
)
def test_noise_under_encryption_is_as_fine_as_it_is_accounted_for(
    silos: int, multiplier: float, name: str, protection: dict[str, Any]
) -> None:
    """With many silos a ciphertext holds coarser numbers: sums fit, and the account knows of the grid, and no more."""
    sampling = {"client_sampling_rate": 0.5, "client_sampling": "uniform"} if name == "dp-fed" else {}
    prepared = among(silos, name, multiplier, protection, **sampling)
    agreed = prepared.protocol_spec
    assert isinstance(agreed, PartialEncryptionSpec)
    assert agreed.hidden.limit <= agreed.plan.ckks.limit
    assert agreed.hidden.grid <= agreed.hidden.noise_grid
    senders = count_senders(prepared.setting.method.channel, silos)
    laws = [law for law in (agreed.clear.law, agreed.hidden.law) if law is not None]
    drawn = 2 * senders * max(law.log_ratio_to_gaussian for law in laws)
    assert drawn <= prepared.guarantee.grid_loss <= 4.1 * drawn


def test_epsilon_falls_where_noise_under_encryption_grows() -> None:
    """Its grid is a power of two and jumps; a search for the least noise must not see that."""
    found = [
        among(3000, "serial", z, {"ratio": 1.0}).guarantee.grid_loss
        for z in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("silos", "multiplier", "he_noise", "message"),
    [
        (5000, 20.0, 1.0, r"encrypted sums of 5000 silos have no room for noise of 20 under encryption"),
        (
            2000,
            4e-6,
            1.0,
            r"protection\.he_noise: noise of 4e-06 under encryption, .* is less than 100 steps",
        ),
    ],
)
def test_noise_that_encrypted_sums_cannot_hold_is_refused_before_the_run(
    silos: int, multiplier: float, he_noise: float, message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        among(silos, "dp-fed", multiplier * math.sqrt(silos), {"ratio": 1.0, "he_noise": he_noise})


def test_a_calibration_for_which_ciphertexts_have_no_room_is_out_of_budget() -> None:
    """And not an advice to take less of noise that nobody gave."""
    with pytest.raises(BudgetError, match="needs a noise multiplier of about"):
        asked(
            {"name": "dp-fed", "clip": 1.0, "noise_multiplier": "calibrated"},
            {"ratio": 1.0, "he_noise": 1.0},
            data={"name": "digits", "n_users": 5000, "n_silos": 5000, "allocation": {"law": "clients"}},
            privacy={"insecure_seed": 1, "epsilon": 0.001},
        )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4, 1e30])
def test_each_part_is_bounded_by_itself_for_any_update(scale: float) -> None:
    """Equation 1 with the exponent that is meant: a client moves the part in clear by at most theta."""
    given = {"ratio": 0.25, "he_clip": 0.125}
    prepared = asked({"name": "paraaegis", "clip": 0.5, "noise_multiplier": 0.0}, given)
    sent = np.zeros((CLIENTS, prepared.task.dimension))
    sent[1] = np.random.default_rng(2).normal(0, scale, prepared.task.dimension)
    total = aggregate(prepared, sent)
    chosen = np.argsort(-np.abs(sent[1]))[
        : int(0.25 * len(total))
    ]  # the others vote for nothing in particular
    assert np.linalg.norm(total) <= math.hypot(0.5, 0.125)
    for bound, part in ((0.5, np.delete(sent[1], chosen)), (0.125, sent[1][chosen])):
        assert bound > 0
        assert part.size


def test_the_most_voted_coordinates_are_spared_the_noise_and_dynamic_shares_fall() -> None:
    prepared = asked(
        {"name": "paraaegis", "clip": 1.0, "noise_multiplier": 100.0}, {"ratio": 0.2, "decay": 0.5}
    )
    sent = np.full((CLIENTS, prepared.task.dimension), 1e-4)
    sent[:, :65] = 0.5
    for number, share in ((1, 0.2), (2, 0.1), (3, 0.05)):
        total = aggregate(prepared, sent, number)
        spared = np.isclose(total, 0.5 * CLIENTS)
        assert spared.sum() == min(65, int(share * prepared.task.dimension))


@pytest.mark.parametrize("strategy", ["max", "min", "random"])
def test_the_strategies_take_the_largest_the_smallest_or_any(strategy: str) -> None:
    """The published slip took the smallest: what is spared of a round shows which were taken."""
    prepared = asked(
        {"name": "paraaegis", "clip": 1.0, "noise_multiplier": 100.0}, {"ratio": 0.1, "strategy": strategy}
    )
    size = np.linspace(1e-3, 1, prepared.task.dimension)
    total = aggregate(prepared, np.tile(size, (CLIENTS, 1)))
    ranks = np.flatnonzero(np.isclose(total, CLIENTS * size, atol=1e-6))
    mean = ranks.mean() / prepared.task.dimension
    assert {"max": mean > 0.9, "min": mean < 0.1, "random": 0.2 < mean < 0.8}[strategy]


def test_a_partition_from_released_models_follows_the_models() -> None:
    prepared = asked({"name": "paraaegis", "clip": 1.0, "noise_multiplier": 100.0}, {"partition": "released"})
    moved = prepared.task.initial().clone()
    moved[100:165] += 1
    sent = np.full((CLIENTS, len(moved)), 0.25)
    total = aggregate(prepared, sent, model=moved)
    spared = np.flatnonzero(np.isclose(total, 0.25 * CLIENTS))
    assert set(spared) == set(range(100, 165))


# --- what is guaranteed ---------------------------------------------------------------------------------------


def guaranteed(protection: PartialEncryption, noise_multiplier: float = 4.0) -> Guarantee:
    method = paraaegis(
        local=LOCAL, n_users=CLIENTS, largest_silo=100, clip=CLIP, noise_multiplier=noise_multiplier
    )
    return derive(protection.apply_to(method, CLIENTS), FEDERATION)


def test_without_noise_in_the_encrypted_part_only_the_server_is_kept_out() -> None:
    server, holder, readers, pooled = guaranteed(PartialEncryption(ratio=0.1)).views
    assert server.event.noise_multiplier == pytest.approx(4.0 / (2 * math.sqrt(CLIENTS)))
    for view in (holder, readers, pooled):
        assert isinstance(view.event, NoGuarantee)
        assert "carries no noise" in view.event.reason


@pytest.mark.parametrize("method", ["paraaegis", "uldp-avg", "dp-fed", "serial"])
def test_no_sentence_of_a_divided_message_says_of_all_of_it_what_one_part_has(method: str) -> None:
    """The clip and the noise of one part are not the other's: only the protection's own sentences name them."""
    plain = METHOD_CASES[method](2.0)
    public = replace(FEDERATION, n_silos=6, n_users=6)  # for which the cases are composed
    divided = plain if plain.protection.divides else PartialEncryption().apply_to(plain, public.n_users)
    of_channel = divided.channel.mechanisms(compute_sensitivity(divided, public))
    told = derive(divided, public).mechanisms
    assert set(of_channel) <= set(told)
    assert not any("noise" in text or "clipped" in text for text in of_channel)
    assert sum("in the unencrypted part of each message" in text for text in told) == 1


def test_all_messages_move_with_one_client_once_the_model_did() -> None:
    """Why the server's line counts 2 theta sqrt(n): the models carry a client's data to everybody's next message."""
    opposite = np.stack([np.eye(1, 8)[0], -np.eye(1, 8)[0]])[:, None] * np.ones((1, CLIENTS, 1)) * CLIP
    moved = np.linalg.norm(opposite[0] - opposite[1])
    server = guaranteed(PartialEncryption(ratio=0.1)).event_for(Role.SERVER)
    assert isinstance(server, GaussianEvent)
    assert moved / (4.0 * CLIP) == pytest.approx(1 / server.noise_multiplier)


def test_noise_in_both_parts_is_one_gaussian_release() -> None:
    paid = {"partition": "released", "he_clip": 2.0, "clip": "parts"}
    server, holder, readers, pooled = guaranteed(PartialEncryption(ratio=0.1, he_noise=2.0, **paid)).views
    both = 1 / math.sqrt(1 / 4.0**2 + 1 / 8.0**2)
    assert pooled.event.noise_multiplier == pytest.approx(both)
    assert readers.event.noise_multiplier == pytest.approx(both * math.sqrt(CLIENTS))
    assert holder.event.noise_multiplier == pytest.approx(both * math.sqrt(CLIENTS - 1))
    seen = 1 / math.sqrt(1 / 4.0**2 + 1 / (8.0**2 * CLIENTS))
    assert server.event.noise_multiplier == pytest.approx(seen)


def test_no_neighbours_move_both_parts_farther_than_the_event_says() -> None:
    """Worst clients against the formula: any split of an update over the two parts, scaled to noise 1."""
    paid = {"partition": "released", "he_clip": 2.0, "clip": "parts"}
    event = guaranteed(PartialEncryption(ratio=0.1, he_noise=0.5, **paid)).event
    assert isinstance(event, GaussianEvent)
    clear, hidden = 4.0 * CLIP * math.sqrt(CLIENTS), 0.5 * 4.0 * 2.0 * math.sqrt(CLIENTS)
    worst = max(
        math.hypot(a * CLIP / clear, b * 2.0 / hidden)
        for a in np.linspace(0, 1, 11)
        for b in np.linspace(0, 1, 11)
    )
    assert worst == pytest.approx(1 / event.noise_multiplier)
    whole = derive(
        PartialEncryption(strategy="random", he_noise=0.5).apply_to(METHOD_CASES["dp-fedavg"](4.0), 6),
        PublicFacts(n_silos=6, n_users=6),
    ).event
    assert isinstance(whole, GaussianEvent)
    angles = np.linspace(0, np.pi / 2, 1001)
    share = np.hypot(np.cos(angles) / 4.0, np.sin(angles) / 2.0).max() / math.sqrt(6)
    assert share == pytest.approx(1 / whole.noise_multiplier)


def test_noisy_votes_are_paid_for() -> None:
    free = {"he_noise": 1.0, "he_clip": CLIP, "clip": "parts"}
    released = guaranteed(PartialEncryption(partition="released", **free)).event
    voted = guaranteed(
        PartialEncryption(partition="noisy-votes", votes="secagg", vote_noise=10.0, **free)
    ).event
    assert isinstance(released, GaussianEvent)
    assert isinstance(
        voted, ConcentratedEvent
    )  # counts have whole steps: no accountant of loss distributions
    extra = voted.noise_multiplier**-2 - released.noise_multiplier**-2
    assert extra == pytest.approx(2 / 10.0**2)  # another ballot of k ones is sqrt(2 k) away


def test_an_encrypted_whole_shows_the_server_nothing_and_readers_the_noise() -> None:
    server, _, readers, _ = derive(METHOD_CASES["serial"](4.0), PublicFacts(n_silos=6, n_users=6)).views
    assert server.event == ComposedEvent(events=())
    assert readers.event.noise_multiplier == pytest.approx(4.0 * math.sqrt(6))


def test_the_published_noise_is_named_and_claims_no_client(tmp_path: Path) -> None:
    method = {"name": "paraaegis", "noise_multiplier": "closed-form", "calibration": "as-published"}
    privacy = {"epsilon": 1.0, "delta": 1e-5}
    prepared = asked(method, {"ratio": 0.1}, privacy=privacy)
    largest = max(prepared.population.records_per_silo())
    assert isinstance(prepared.protocol_spec, PartialEncryptionSpec)
    expected = math.sqrt(2 * 2 * math.log(1e5)) * 2 * 0.5 / largest
    assert prepared.protocol_spec.clear.noise_std == pytest.approx(expected)
    statement = run(prepared, tmp_path, Silent()).statement
    assert statement.epsilon is None
    assert [claim.value for claim in statement.as_published] == [pytest.approx(1.0)]
    assert statement.trust[0].epsilon is not None
    assert statement.trust[0].epsilon > 1000
    assert [line.epsilon for line in statement.trust[1:]] == [None, None, None]


def test_drawn_clients_alone_send_and_remark_1_counts_their_share(tmp_path: Path) -> None:
    method = {"name": "paraaegis", "noise_multiplier": "closed-form", "calibration": "as-published"}
    drawn = method | {"client_sampling_rate": 0.6}
    privacy = {"epsilon": 1.0, "delta": 1e-5, "insecure_seed": 1}
    prepared = asked(drawn, {"ratio": 0.1, "strategy": "random"}, privacy=privacy)
    everyone = asked(method, {"ratio": 0.1, "strategy": "random"}, privacy=privacy)
    assert isinstance(prepared.protocol_spec, PartialEncryptionSpec)
    assert isinstance(everyone.protocol_spec, PartialEncryptionSpec)
    ratio = prepared.protocol_spec.clear.noise_std / everyone.protocol_spec.clear.noise_std
    assert ratio == pytest.approx(math.sqrt(0.6))  # q is 1 for everyone
    assert count_senders(prepared.method.channel, CLIENTS) == 3
    assert prepared.method.divisor(CLIENTS, CLIENTS, 3) == 3
    statement = run(prepared, tmp_path, Silent()).statement
    assert [claim.value for claim in statement.as_published] == [pytest.approx(1.0)]
    assert statement.adjacency is Adjacency.REPLACE_ONE
    form = prepared.method.closed_form
    assert form is not None
    assert [form.rounds(form.noise_multiplier(t, 1.0, 1e-5), 1.0, 1e-5) for t in (1, 2, 50)] == [1, 2, 50]


def test_a_sample_that_the_server_reads_amplifies_for_readers_alone() -> None:
    """The server and the clients read who is drawn in a round; readers of the models do not."""
    protected = {"ratio": 0.5, "strategy": "random", "he_noise": 1.0, "he_clip": 0.5}
    given = {"name": "paraaegis", "noise_multiplier": 4.0, "client_sampling_rate": 0.6}
    server, silo, reader, _ = asked(given, protected).guarantee.views
    # Replaced, a client moves both parts by 2 theta each; an event of replacing one counts 2 theta itself.
    both = 4.0 / math.sqrt(2)
    assert isinstance(reader.event, SampledWithoutReplacementEvent)
    assert (reader.event.population, reader.event.sample) == (CLIENTS, 3)
    assert reader.event.event.noise_multiplier == pytest.approx(both * math.sqrt(3))
    # Not sampled: one message's unencrypted part, and the encrypted parts' sum with three shares of noise.
    assert isinstance(server.event, GaussianEvent)
    assert server.event.noise_multiplier == pytest.approx(1 / math.sqrt(1 / 4.0**2 + 1 / (3 * 4.0**2)))
    assert isinstance(silo.event, GaussianEvent)
    assert silo.event.noise_multiplier == pytest.approx(both * math.sqrt(2))


def test_a_target_is_met_against_the_server_by_the_default_calibration(tmp_path: Path) -> None:
    method = {"name": "paraaegis", "noise_multiplier": "calibrated"}
    prepared = asked(method, {"ratio": 0.1, "strategy": "random"}, privacy={"epsilon": 3.0})
    statement = run(prepared, tmp_path, Silent()).statement
    assert statement.trust[0].epsilon == pytest.approx(3.0, rel=1e-3)
    assert statement.epsilon is None
    assert not any("ballot" in text for text in statement.uncovered)


def test_noise_that_falls_is_charged_round_by_round(tmp_path: Path) -> None:
    prepared = asked({"name": "varying-dp", "noise_multiplier": 2.0}, rounds=3, privacy={})
    outcome = run(prepared, tmp_path, Silent())
    entries = read_entries(outcome.folder / "ledger.jsonl")
    charged = [split_grid_loss(one.event)[0].to_json()["noise_multiplier"] for one in entries]
    first = 2.0 * math.sqrt(CLIENTS)
    assert charged == [pytest.approx(first * 0.9**t) for t in range(3)]
    accountant = make_accountant("pld", Adjacency.ADD_OR_REMOVE_ONE)
    one_by_one = ComposedEvent(events=tuple(GaussianEvent(noise_multiplier=z) for z in charged))
    assert outcome.statement.epsilon == pytest.approx(accountant.epsilon(one_by_one, 1e-5), rel=1e-3)
    steady = SelfComposedEvent(event=GaussianEvent(noise_multiplier=first), count=3)
    assert outcome.statement.epsilon > accountant.epsilon(steady, 1e-5)
    falls = "its standard deviation is multiplied by 0.9"
    assert sum(falls in text for text in outcome.statement.mechanisms) == 1
    assert not any(falls in text for text in asked({"name": "dp-fedavg"}).guarantee.mechanisms)


@pytest.mark.parametrize("decay", [0.7, 0.9, 1 - 1e-9])
def test_noise_that_falls_spends_the_budget_of_steady_noise(decay: float) -> None:
    """Varying-DP against DP-FedAvg: both by Remark 1 for the same epsilon, over the same rounds."""
    published = {"noise_multiplier": "closed-form", "calibration": "as-published"}
    privacy = {"epsilon": 1.0, "delta": 1e-5}
    steady = asked({"name": "dp-fedavg", **published}, rounds=20, privacy=privacy)
    falling = asked({"name": "varying-dp", "noise_decay": decay, **published}, rounds=20, privacy=privacy)
    for role in (Role.SERVER, Role.READER):
        spent = steady.epsilon_with(role, 20, ())
        assert 0.999 * spent < falling.epsilon_with(role, 20, ()) <= spent * (1 + 1e-6)
    first = falling.method.channel.noise_multiplier / steady.method.channel.noise_multiplier
    assert first == pytest.approx(math.sqrt(sum(decay ** (-2 * t) for t in range(20)) / 20), rel=1e-3)


def test_noise_on_whole_counts_costs_more_than_gaussian_loss_distributions_say() -> None:
    """Two silos, a ballot of one vote, the least noise: the exact delta of the counts against both accountants."""
    std = 4.0 * math.sqrt(2)
    values = np.arange(-400, 401)
    law = np.exp(-(values**2) / (2 * std**2))
    law /= law.sum()
    moved = np.convolve(
        law, law
    )  # one count goes up by 1 and another down: the loss is (2 (x + y) + 2) / (2 std^2)
    loss = (2 * np.arange(-800, 801) + 2) / (2 * std**2)
    multiplier = std / math.sqrt(2)
    claimed = PldAccountant().epsilon(GaussianEvent(noise_multiplier=multiplier), 1e-5)
    paid = RdpAccountant().epsilon(ConcentratedEvent(noise_multiplier=multiplier), 1e-5)

    def delta(epsilon: float) -> float:
        lost = loss > epsilon
        return float(np.sum(moved[lost] * -np.expm1(epsilon - loss[lost])))

    just_above = claimed + np.linspace(0, 1 / std**2, 9)
    pld = [PldAccountant().delta(GaussianEvent(noise_multiplier=multiplier), e) for e in just_above]
    assert max(delta(e) / d for e, d in zip(just_above, pld, strict=True)) > 1.005
    assert delta(paid) < 1e-5
    with pytest.raises(PrivacyError, match="no bound"):
        PldAccountant().epsilon(ConcentratedEvent(noise_multiplier=multiplier), 1e-5)
    with pytest.raises(ConfigError, match=r"accountant.*rdp has"):
        asked(*ROWS["paraaegis, noisy votes"], privacy={"insecure_seed": 1, "accountant": "pld"})


# --- runs -----------------------------------------------------------------------------------------------------

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "dp-fedavg": ({"name": "dp-fedavg"}, None),
    "ckks-fedavg": ({"name": "ckks-fedavg"}, None),
    "serial": ({"name": "serial"}, None),
    "varying-dp": ({"name": "varying-dp"}, None),
    "stevens": ({"name": "stevens"}, None),
    "paraaegis": ({"name": "paraaegis"}, {"ratio": 0.1, "decay": 0.9}),
    "paraaegis, masked votes": ({"name": "paraaegis"}, {"votes": "secagg"}),
    "paraaegis, noisy votes": (
        {"name": "paraaegis"},
        {"partition": "noisy-votes", "votes": "secagg", "vote_noise": 5.0, "he_noise": 1.0, "he_clip": 0.5},
    ),
    "uldp-avg-w": ({"name": "uldp-avg-w"}, {"ratio": 0.2}),
    "uldp-avg-w, noise in both": (
        {"name": "uldp-avg-w", "noise_multiplier": 5.0},
        {"ratio": 0.2, "partition": "released", "he_noise": 1.0},
    ),
    "dp-fed-ls": (
        {"name": "dp-fed-ls", "smoothing": 1.0, "client_sampling": "uniform", "client_sampling_rate": 0.6},
        {"ratio": 0.2},
    ),
    "fedavg": ({"name": "fedavg"}, {"ratio": 0.5}),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_runs_resumes_and_says_who_is_kept_out(row: str, tmp_path: Path) -> None:
    method, protection = ROWS[row]
    prepared = asked(method, protection)
    with pytest.raises(KeyboardInterrupt):
        run(prepared, tmp_path / "cut", Silent(interrupt_after=1))
    outcome = resume(tmp_path / "cut" / "try", Silent())
    assert outcome.rounds == 2
    rows = json_lines(outcome.folder / "metrics.jsonl")
    assert all(line["test"]["accuracy"] > 0 for line in rows)
    if isinstance(prepared.protocol_spec, PartialEncryptionSpec):
        roles = [line.role for line in outcome.statement.trust]
        assert roles == [Role.SERVER, Role.SILO, Role.READER, Role.SERVER | Role.SILO]
        assert "the models" not in outcome.statement.trust[0].sees
        assert all(line["bytes_up"] > 0 for line in rows[1:])


def test_sums_of_pairs_are_the_same_with_and_without_encryption() -> None:
    """ULDP-AVG-w without noise: grids and weights survive the division, bit for bit."""
    method = {"name": "uldp-avg-w", "noise_multiplier": 0.0}
    plain, hidden = asked(method), asked(method, {"ratio": 0.3})
    assert isinstance(hidden.protocol_spec, PartialEncryptionSpec)
    models = [
        play_round(turn_of(prepared), parties)[0]
        for prepared, parties in (
            (plain, None),
            (hidden, parties_of(hidden, PrivacyRandomness.insecure(1))),
        )
    ]
    assert torch.equal(*models)


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ratio": -0.1}, ">= 0 and <= 1"),
        ({"ratio": 1.1}, ">= 0 and <= 1"),
        ({"decay": 0.0}, "> 0 and <= 1"),
        ({"decay": 1.5}, "> 0 and <= 1"),
        ({"he_noise": -1.0}, ">= 0"),
        ({"he_noise": math.inf}, ">= 0"),
        ({"he_noise": 1.0}, "not paid for"),
        ({"he_noise": 1.0, "strategy": "random", "clip": "parts"}, "needs he_clip"),
        ({"vote_noise": 1.0}, "belong together"),
        ({"partition": "noisy-votes", "vote_noise": 1.0}, "secagg"),
        ({"strategy": "random", "partition": "released"}, "random"),
        ({"strategy": "min", "partition": "released"}, "min"),
        ({"processes": 0}, "whole number >= 1"),
    ],
)
def test_protections_that_promise_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        PartialEncryption(**given)


@pytest.mark.parametrize(
    ("name", "protection", "message"),
    [
        ("uldp-group", PartialEncryption(), "inside the silos"),
        ("uldp-avg", PartialEncryption(clip="parts"), "one contribution"),
        ("ckks-fedavg", PartialEncryption(ratio=0.5), "encrypts everything"),
        ("varying-dp", PartialEncryption(), "noise falls"),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    name: str, protection: PartialEncryption, message: str
) -> None:
    with pytest.raises(CompositionError, match=message):
        protection.apply_to(METHOD_CASES[name](5.0), 6)


def test_noise_that_cannot_be_drawn_is_refused_by_name() -> None:
    with pytest.raises(PrivacyError, match="have no room for noise of"):
        asked(
            {"name": "uldp-naive"}, {"name": "partial-encryption", "partition": "released", "he_noise": 1e300}
        )


@pytest.mark.parametrize(
    ("method", "protection", "message"),
    [
        ({"name": "paraaegis"}, {"ratio": 1.5}, "protection.ratio"),
        ({"name": "paraaegis"}, {"decay": 0}, "protection.decay"),
        ({"name": "paraaegis", "noise_multiplier": "closed-form"}, {}, "as-published"),
        (
            {"name": "paraaegis", "noise_multiplier": "calibrated", "calibration": "as-published"},
            {},
            "closed-form",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_named(
    method: dict[str, Any], protection: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(method, protection, privacy={"epsilon": 1.0})


def test_keys_of_partial_encryption_need_its_name() -> None:
    with pytest.raises(ConfigError, match=r"protection\.ratio: .* belongs to name = 'partial-encryption'"):
        asked({"name": "paraaegis"}, {"name": "none", "ratio": 0.5})


def test_a_method_with_its_own_protection_keeps_it() -> None:
    with pytest.raises(CompositionError, match="brings its own protection"):
        asked({"name": "paraaegis"}, {"name": "secure-aggregation"})


def test_poisson_sampled_clients_bring_no_fixed_noise() -> None:
    given = {"name": "dp-fed", "client_sampling": "poisson", "client_sampling_rate": 0.5}
    with pytest.raises(CompositionError, match="uniform"):
        asked(given, {})


def test_one_client_alone_is_refused() -> None:
    data = {"name": "digits", "n_users": 1, "n_silos": 1, "allocation": {"law": "clients"}}
    with pytest.raises(Exception, match="at least 2 silos"):
        asked({"name": "paraaegis"}, {}, data=data)


def test_dp_fedavg_measures_its_noise_in_a_client_or_as_published() -> None:
    given = {"local": LOCAL, "n_users": 10, "largest_silo": 947, "clip": 1.0, "noise_multiplier": 28.6}
    assert dp_fedavg(**given).channel.noise_multiplier == 28.6
    published = dp_fedavg(**given, calibration="as-published")
    assert published.channel.noise_multiplier == pytest.approx(28.6 * 2 / 947)


def test_a_client_that_reads_who_else_is_in_its_round_has_no_epsilon_of_a_secret_sample() -> None:
    """The start of a round names the drawn clients to each of them, so that nothing is amplified against one."""
    sampled = {"client_sampling": "uniform", "client_sampling_rate": 0.6}
    prepared = asked(
        {"name": "dp-fed", "noise_multiplier": 2.0, **sampled},
        {"partition": "released", "ratio": 0.5, "he_noise": 1.0},
        privacy={"insecure_seed": 1, "delta": 1e-5},
    )
    named = set()

    class Read(Transcript):
        def record(self, data: bytes) -> None:
            message = Envelope.decode(data).message
            if isinstance(message, RoundStart):
                named.add(message.cohort)

    play_round(turn_of(prepared), parties_of(prepared, PrivacyRandomness.insecure(1), Read()))
    assert [len(cohort) for cohort in named] == [3]
    (silo,) = (view for view in prepared.guarantee.views if view.role is Role.SILO)
    assert Reveals.DRAWN.value in silo.sees
    assert isinstance(silo.event, GaussianEvent)
    assert isinstance(prepared.guarantee.event, SampledWithoutReplacementEvent)

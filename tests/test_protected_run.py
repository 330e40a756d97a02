"""A run under secure aggregation: the same model bit for bit, the server's epsilon of the sum, fresh keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.records import empty_groups
from fedveil.errors import CompositionError, ProtocolError
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.privacy.claims import Role
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import resume, run
from tests.commands import ended
from tests.contract.test_methods import CLIP, METHOD_CASES, SILOS, USERS, bounded_sum
from tests.runs import Silent, experiment, files, json_lines, same_model

PROTECTED = {"protection": {"name": "secure-aggregation"}}


def asked(**changes: Any) -> Experiment:
    """Return the experiment with whole tables replaced."""
    document = experiment(rounds=2).model_dump(exclude_none=True) | changes
    if document["method"]["name"] == "uldp-sgd":
        del document["local"]
    return parse(document, "test")


def masked_range(name: str, sigma: float = 5.0) -> MaskedSumSpec:
    method = replace(METHOD_CASES[name](sigma), protection=SecureAggregation())
    public = PublicFacts(n_silos=SILOS, n_users=USERS, dimension=4)
    return method.protection.make_protocol_spec(method, public, empty_groups(), 1)


def word_bytes(prepared: Prepared) -> int:
    public = PublicFacts(
        n_silos=prepared.population.n_silos, n_users=prepared.population.n_users, dimension=prepared.length
    )
    method = prepared.method
    return method.protection.make_protocol_spec(method, public, empty_groups(), 1).word_bytes


def total_of(
    agreed: MaskedSumSpec, messages: Sequence[np.ndarray], driver: LocalDriver[Any, Any] | None = None
) -> np.ndarray:
    """Return the sum of the silos' messages in round 1, as the server learns it."""
    driver = LocalDriver(agreed) if driver is None else driver
    silos = tuple(range(len(messages)))
    units, _ = driver.play((1, 0), silos, None, lambda silo: agreed.units(messages[silo]))
    return agreed.decode_sum(units)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "uldp-naive"},
        {"name": "uldp-sgd"},
        {"name": "uldp-avg"},
        {"name": "uldp-avg-w"},
        {"name": "uldp-avg-w", "user_sampling_rate": 0.5},
        {"name": "uldp-avg", "noise_multiplier": 0.0},
        {"name": "uldp-avg", "noise_multiplier": 1e-4},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_the_model_is_bit_identical_with_and_without_protection(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    method = {"clip": 0.5, "noise_multiplier": 5.0} | changes
    masked = prepare(asked(method=method, **PROTECTED))
    # Under masks messages are rounded for short words; without masks, for words of as many bits as are asked for.
    bits = 8 * word_bytes(masked) if masked.method.channel.step else 64
    plain = files(
        run(
            prepare(asked(method=method, channel={"name": "additive", "word_bits": bits})), tmp_path, Silent()
        ).folder
    )
    protected = files(run(masked, tmp_path, Silent()).folder)
    assert same_model(plain[1], protected[1])
    assert plain[0] == protected[0]
    assert [row["test"] for row in plain[2]] == [row["test"] for row in protected[2]]


def test_a_resumed_run_goes_on_under_new_keys_to_the_same_model(tmp_path: Path) -> None:
    whole = files(run(prepare(asked(rounds=3, **PROTECTED)), tmp_path, Silent()).folder)
    with pytest.raises(KeyboardInterrupt):
        run(prepare(asked(rounds=3, **PROTECTED)), tmp_path / "cut", Silent(interrupt_after=2))
    resumed = files(resume(tmp_path / "cut" / "try", Silent()).folder)
    assert same_model(whole[1], resumed[1])


def test_a_transcript_lists_every_message_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    prepared = prepare(asked(**PROTECTED))
    with pytest.raises(KeyboardInterrupt):
        run(prepared, tmp_path, Silent(interrupt_after=1), transcript=True)
    path = tmp_path / "try" / "transcript.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"schema_version": 1, "rou')
    row = resume(tmp_path / "try", Silent()).row
    assert path.read_bytes().startswith(whole)
    lines = json_lines(path)
    silos = prepared.population.n_silos
    assert [sum(line["round"] == number for line in lines) for number in range(3)] == [
        2 * 2 * silos,  # keys and directory, once per session
        4 * silos,
        4 * silos,
    ]
    assert row["bytes_up"] == sum(
        line["bytes"] for line in lines if line["round"] == 2 and line["recipient"] == "server"
    )


def test_a_run_without_a_protocol_has_no_transcript(tmp_path: Path) -> None:
    outcome = run(prepare(asked()), tmp_path, Silent(), transcript=True)
    assert not (outcome.folder / "transcript.jsonl").exists()
    document = tmp_path / "plain.toml"
    document.write_text(asked().to_toml())
    assert "no protocol runs here" in ended("run", document, "--transcript").mistake


def test_rows_count_the_bytes_of_every_message_to_the_server(tmp_path: Path) -> None:
    prepared = prepare(asked(**PROTECTED))
    row = run(prepared, tmp_path, Silent()).row
    header, word, seed = 38, 2, 32
    silos, d = prepared.population.n_silos, prepared.task.dimension
    assert row["bytes_up"] == silos * (header + 1 + word * d) + silos * (header + seed)
    assert run(prepare(asked()), tmp_path, Silent()).row["bytes_up"] is None


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_statement_gives_the_server_the_epsilon_of_the_unsampled_sum(rate: float, tmp_path: Path) -> None:
    method = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0, "user_sampling_rate": rate}
    full = {**method, "user_sampling_rate": 1.0}
    plain = run(prepare(asked(method=method, privacy={})), tmp_path, Silent()).statement
    protected = run(prepare(asked(method=method, privacy={}, **PROTECTED)), tmp_path, Silent()).statement
    unsampled = run(prepare(asked(method=full, privacy={})), tmp_path, Silent()).statement.epsilon
    assert protected.epsilon == plain.epsilon
    server, pooled = protected.line_for(Role.SERVER), protected.line_for(Role.SERVER | Role.SILO)
    assert server == pytest.approx(unsampled)
    assert pooled is not None
    assert server <= pooled
    assert plain.line_for(Role.SERVER) == pytest.approx(unsampled)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"name": "fedavg"}, "unbounded updates"),
        ({"name": "uldp-group", "clip": 0.5, "noise_multiplier": 5.0, "group_size": 2}, "floating-point"),
    ],
)
def test_what_cannot_be_masked_is_refused_before_training(method: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        prepare(asked(method=method, **PROTECTED))


def test_one_silo_is_refused_before_training() -> None:
    with pytest.raises(ProtocolError, match="needs 2 silos"):
        prepare(asked(data={"name": "digits", "n_users": 20, "n_silos": 1}, **PROTECTED))


# --- the range of a message -------------------------------------------------------------------------------------


@bounded_sum
@pytest.mark.parametrize("sigma", [0.0, 5.0])
def test_the_largest_sum_of_contributions_is_within_the_range(name: str, sigma: float) -> None:
    weight = {"uldp-naive": 1, "uldp-avg-w": USERS}.get(name, USERS / SILOS)
    agreed = masked_range(name, sigma)
    extreme = np.floor(weight * CLIP / agreed.grid) * agreed.grid
    message = np.array([extreme, -extreme, 0.0, agreed.grid])
    total = total_of(agreed, [message] * SILOS)
    np.testing.assert_array_equal(total, SILOS * message)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_messages_within_the_range_add_up_exactly(seed: int) -> None:
    agreed = masked_range("uldp-avg-w")
    units = np.random.default_rng(seed).integers(-agreed.limit, agreed.limit + 1, (SILOS, 4))
    total = total_of(agreed, list(units * agreed.grid))
    np.testing.assert_array_equal(total, units.sum(0) * agreed.grid)


def test_a_message_beyond_the_range_ends_the_round_and_names_the_silo() -> None:
    agreed = masked_range("uldp-avg")
    beyond = np.full(4, (agreed.limit + 1) * agreed.grid)
    with pytest.raises(ProtocolError, match="silo 1: a value of its vector is above the limit"):
        total_of(agreed, [np.zeros(4), beyond, np.zeros(4)])


def test_a_round_is_summed_once() -> None:
    agreed = masked_range("uldp-avg")
    driver = LocalDriver(agreed)
    total_of(agreed, [np.zeros(4)] * SILOS, driver)
    with pytest.raises(ProtocolError, match="keys are used once"):
        total_of(agreed, [np.zeros(4)] * SILOS, driver)

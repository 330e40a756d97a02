"""A silo or client without records takes part: whoever has records, a run refuses nothing and sends as much.

Each method runs under each protection that it goes with, on all records and on those without the only user of a silo,
and on none at all. What is refused, charged, stated, drawn as noise and sent must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedveil.data.records import Population, Records
from fedveil.errors import CompositionError, ConfigError, FedveilError
from fedveil.federation.proposal_review import check_deployable
from fedveil.privacy.ledger import read_entries
from fedveil.randomness import PrivacyRandomness
from fedveil.registry import names
from fedveil.run.config.experiment import merge, parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.rounds.round_context import draw_users
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import run
from fedveil.training.losses import LOSSES
from tests.federation_world import TESTING, World, small_keys
from tests.runs import DrawnStreams, Silent, json_lines
from tests.slow_cases import fast_every

SILOS = 4
"""Silos, and users: the last user has all records of the last silo, and no others."""
OF_CLIENTS = {
    *("dp-fed", "dp-fed-ls", "cepam-gaussian", "cepam-laplace", "fl", "fl-sdq", "fl-gaussian", "fl-laplace"),
    *("fl-gaussian-sdq", "fl-laplace-sdq", "dp-fedavg", "varying-dp", "serial", "stevens", "paraaegis"),
}
NOISE = {"clip": 0.5, "noise_multiplier": 5.0}
METHOD_KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(names("methods"), NOISE),
    "fedavg": {},
    "ckks-fedavg": {},
    "fl": {},
    "cepam-gaussian": NOISE | {"weights": [1.0, 4.0, 2.0, 3.0]},
    "uldp-group": NOISE | {"group_size": 2},
    "fl-sdq": {"clip": 0.5, "step": 1.0},
    "fl-gaussian-sdq": NOISE | {"step": 1.0},
    "fl-laplace-sdq": NOISE | {"step": 1.0},
    "dp-fed-ls": NOISE | {"smoothing": 1.0},
    "newton": {"noise_multiplier": 5.0},
    "boosted-trees": {"noise_multiplier": 5.0},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "lrsuq": {"channel": {"name": "lrsuq"}},
    "correlated": {"rounds": 2, "method": {"correlated": {"period": 2}}},
    "secure-aggregation": {"protection": {"name": "secure-aggregation"}},
    "paillier": {"protection": {"name": "private-weighting", "n_max": 100}},
    "oblivious": {"protection": {"name": "private-weighting", "n_max": 100, "private_sampling": True}},
    "partial": {"protection": {"name": "partial-encryption", "ratio": 0.25}},
    "partial-secagg-votes": {"protection": {"name": "partial-encryption", "ratio": 0.25, "votes": "secagg"}},
    "partial-noise": {
        "protection": {"name": "partial-encryption", "partition": "released", "he_noise": 1.0, "he_clip": 0.5}
    },
}
NEEDS_TENSEAL = tuple(name for name in SETTINGS if name.startswith("partial"))
RATES = (
    "the number of records that each silo trains on: it sets the silo's sampling rate and counts as public"
)


def population(method: str, without: str = "nobody") -> Population:
    """The last silo holds the last user alone; every other one holds all other users, or one where it is a client."""
    random = np.random.default_rng(5)
    silo = np.repeat(np.arange(SILOS, dtype=np.int32), 9)
    user = silo.copy()
    if method not in OF_CLIENTS:
        user[silo < SILOS - 1] = np.tile(np.arange(SILOS - 1, dtype=np.int32), 9)
    target = np.arange(len(silo)) % 2
    records = Records(
        features=(random.normal(size=(len(silo), 3)) + target[:, None]).astype(np.float32),
        targets=target,
        silo=silo,
        user=user,
    )
    kept = {"nobody": silo >= 0, "the last": silo < SILOS - 1, "everybody": silo < 0}[without]
    return Population(
        name="little",
        train=records.select(np.flatnonzero(kept)),
        test_features=random.normal(size=(8, 3)).astype(np.float32),
        test_targets=np.arange(8) % 2,
        n_users=SILOS,
        silo_names=tuple(f"silo{number}" for number in range(SILOS)),
        task="classification",
        n_classes=2,
    )


def document(method: str, setting: str, /, **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "name": "try",
        "rounds": 2 if setting == "paillier" else 1,
        "data": {"name": "digits", "n_users": SILOS, "n_silos": SILOS},
        "model": {"name": "linear", "loss": "cross_entropy"},
        "local": {"learning_rate": 0.1, "epochs": 1, "batch_size": 4},
        "method": {"name": method} | METHOD_KEYS[method],
    }
    if method in ("uldp-sgd", "uldp-sgd-w", "newton", "boosted-trees"):
        del asked["local"]
    if method == "newton":
        asked["model"]["name"] = "whitened-linear"
    if method == "boosted-trees":
        asked |= {"model": {"name": "boosted-trees", "loss": "binary_cross_entropy"}, "rounds": 2}
    if setting == "oblivious":
        asked["method"]["user_sampling_rate"] = 0.5
    if setting in ("lrsuq", "partial", "partial-noise", "partial-secagg-votes") and method in (
        "dp-fed",
        "dp-fed-ls",
    ):
        asked["method"] |= {"client_sampling": "uniform", "client_sampling_rate": 0.5}
    return merge(asked, SETTINGS[setting] | more)


def goes_together(method: str, setting: str, /, **more: Any) -> Prepared | None:
    """The composition prepared on all records; None where its parts do not go together, which no record decides."""
    try:
        return prepare(parse(document(method, setting, **more), "test"), FixedPopulation(population(method)))
    except (CompositionError, ConfigError):
        return None


PRIVATE_FIELDS = {
    "test",
    "norms",
    "clipped",
    "contributions",
    "participants",
    "seconds",
    "elapsed",
    "nonfinite",
}


def public(row: dict[str, Any]) -> dict[str, Any]:
    """What public numbers alone decide in a row: not the model, nor how far it has come."""
    shown = {key: row[key] for key in row if key not in PRIVATE_FIELDS}
    if shown.get("movement"):
        shown["movement"] = {key: shown["movement"][key] for key in ("parameters", "noise", "most")}
    return shown


def agreed_numbers(prepared: Prepared) -> Any:
    """What the parties agree on before any round, but for what each of them alone knows."""
    named = vars(prepared.protocol_spec)
    assert named
    return {
        key: repr(value)
        for key, value in named.items()
        if key not in ("counts", "run") and not callable(value)
    }


def seen(held: Population, asked: dict[str, Any], folder: Path, noise: DrawnStreams) -> dict[str, Any]:
    """What everybody may see of a run but the models: choices, refusals, charges, the statement, noise, messages."""
    noise.paths.clear()
    try:
        prepared = prepare(parse(asked, "test"), FixedPopulation(held))
        outcome = run(prepared, folder, Silent(), transcript=True)
    except FedveilError as error:
        return {"refused": str(error)}
    path = outcome.folder / "transcript.jsonl"
    lines = json_lines(path) if path.exists() else []
    rows = json_lines(outcome.folder / "metrics.jsonl")
    return {
        "refused": None,
        "charges": [(entry.round, entry.event) for entry in read_entries(outcome.folder / "ledger.jsonl")],
        "statement": json.loads((outcome.folder / "privacy.json").read_text()),
        "noise": sorted(noise.paths, key=repr),
        "messages": lines,
        "resolved": (outcome.folder / "experiment.toml").read_text(),  # names the trainer and every choice
        "environment": json.loads((outcome.folder / "environment.json").read_text()),
        "agreed": agreed_numbers(prepared),
        "files": sorted(path.name for path in outcome.folder.iterdir()),
        "rows": [public(row) for row in rows],
    }


def without_what_is_said_to_be_open(shown: dict[str, Any], method: str, setting: str) -> dict[str, Any]:
    """Leave out what the statement names as not covered, after seeing that it names it."""
    if shown["refused"] is not None:
        return shown
    said = " ".join(shown["statement"]["uncovered"])
    if method == "uldp-group":
        assert RATES in said
        senders = {path[3] for path in shown["noise"] if path[0] == "dp-sgd noise"}
        kept = ("refused", "resolved", "environment", "agreed", "files")
        shown = {key: shown[key] for key in kept} | {"noise": senders}
    elif setting in ("paillier", "oblivious"):
        assert "which users have a record in any silo" in said
        lines = [{key: line[key] for key in line if key != "bytes"} for line in shown["messages"]]
        rows = [{key: row[key] for key in row if key != "bytes_up"} for row in shown["rows"]]
        shown = shown | {"messages": lines, "rows": rows}
    elif "depends on" in said or "cepam" in method or "sdq" in method or setting == "lrsuq":
        rows = [
            {key: row[key] for key in row if key not in ("bytes_up", "communication_cost")}
            for row in shown["rows"]
        ]
        shown = shown | {"rows": rows}
    return shown


def settings_of(method: str, tried: Iterable[str] = SETTINGS) -> list[str]:
    """The protections and channels that a method runs with here; at least one, or the test would look at nothing."""
    usable = [name for name in tried if name not in NEEDS_TENSEAL or find_spec("tenseal")]
    if method in ("ckks-fedavg", "serial", "paraaegis") and not find_spec("tenseal"):
        pytest.skip("partial encryption needs tenseal")
    found = [setting for setting in usable if goes_together(method, setting) is not None]
    assert found
    return found


UNDER_EACH = ("uldp-avg", "dp-fed", "cepam-gaussian")
"""Sums of users, of clients, and messages of clients: these methods meet every setting in the fast suite."""
CELLS = [
    *(pytest.param(method, SETTINGS, id=f"{method}, each") for method in UNDER_EACH),
    *(pytest.param(method, ("none",), id=method) for method in names("methods") if method not in UNDER_EACH),
    pytest.param("uldp-avg-w", ("paillier", "oblivious"), id="uldp-avg-w, weighting"),
    *(
        pytest.param(method, SETTINGS, marks=pytest.mark.slow, id=f"{method}, each")
        for method in names("methods")
        if method not in UNDER_EACH
    ),
]


@pytest.mark.parametrize(("method", "settings"), fast_every(CELLS, 2))
def test_a_run_is_the_same_without_the_only_records_of_a_silo(
    method: str, settings: Iterable[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_keys(monkeypatch, 1024)
    noise = DrawnStreams(monkeypatch)
    for setting in settings_of(method, settings):
        asked = document(method, setting, privacy={"insecure_seed": 11})
        full, *neighbours = (
            without_what_is_said_to_be_open(
                seen(population(method, gone), asked, tmp_path / setting / gone, noise), method, setting
            )
            for gone in ("nobody", "the last", "everybody")
        )
        assert full["refused"] is None, setting
        for neighbour in neighbours:
            assert neighbour == full, setting


def letters_of(held: Population, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What passes between institutions, and what the coordinator's folder says at the end."""
    folder.mkdir(parents=True)
    everything = ("none", "secure-aggregation", "private-weighting", "partial-encryption")
    grown = {"models": ("linear", "whitened-linear", "boosted-trees"), "losses": tuple(LOSSES)}
    policy = TESTING.model_copy(update={"protections": everything, **grown})
    world = World(folder, parse(asked, "test"), held, policy)
    passed: list[tuple[int, str, int]] = []
    for silo, party in enumerate(world.silos):
        assert party is not None

        def receive(data: bytes, silo: int = silo, answer: Any = party.receive) -> bytes:
            reply: bytes = answer(data)
            passed.append((silo, "to", len(data)))
            passed.append((silo, "from", len(reply)))
            return reply

        monkeypatched: Any = party
        monkeypatched.receive = receive
    world.play()
    outcome = world.outcome
    world.close()
    rows = json_lines(outcome.folder / "metrics.jsonl")
    return {
        "refused": outcome.stopped,
        "messages": passed,
        "statement": outcome.statement,
        "rows": [public(row) for row in rows],
    }


def travels(prepared: Prepared | None) -> bool:
    try:
        return prepared is not None and check_deployable(prepared) is None
    except CompositionError:
        return False


QUICKLY = ("uldp-avg", "stevens", "cepam-gaussian")
BETWEEN = [
    pytest.param(name, marks=[] if name in QUICKLY else pytest.mark.slow)
    for name in names("methods")
    if name != "uldp-group"
]
"""DP-SGD inside silos runs in one process alone."""


@pytest.mark.parametrize("method", BETWEEN)
def test_institutions_run_the_same_without_the_only_records_of_a_silo(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_keys(monkeypatch, 1024)
    # Between institutions no party has all counts, or knows each user's main silo without a file.
    more = {"method": {"power": 2}} if method in ("newton", "boosted-trees") else {}
    played = [one for one in settings_of(method) if travels(goes_together(method, one, **more))]
    assert played
    for setting in played:
        asked = document(method, setting, privacy={"insecure_seed": 11}, **more)
        full, *neighbours = (
            letters_of(population(method, gone), asked, tmp_path / setting / gone)
            for gone in ("nobody", "the last", "everybody")
        )
        assert full["refused"] is None, setting
        for neighbour in neighbours:
            if setting in ("paillier", "oblivious", "lrsuq") or "cepam" in method or "sdq" in method:
                full["messages"], neighbour["messages"] = (
                    [message[:2] for message in run["messages"]] for run in (full, neighbour)
                )
            assert neighbour == full, setting


@pytest.mark.skipif(not find_spec("tenseal"), reason="partial encryption needs tenseal")
def test_a_drawn_client_is_the_one_that_sends(tmp_path: Path) -> None:
    """Users are numbered by who is there, silos by name: with the first user gone the others' numbers move by one."""
    held = population("dp-fed", "the last")
    others = replace(held.train, silo=held.train.silo + np.int32(1))
    moved = replace(held, train=others)
    asked = document("dp-fed", "partial", privacy={"insecure_seed": 11}, rounds=1)
    asked["method"] |= {"clip": 1e-3, "noise_multiplier": 1e-6}
    asked["protection"]["ratio"] = 1.0
    asked["server"] = {"learning_rate": 1.0}
    prepared = prepare(parse(asked, "test"), FixedPopulation(moved))
    groups = prepared.setting.cohort.groups
    assert groups.user.tolist() == groups.silo.tolist() == [1, 2, 3]
    drawn = draw_users(prepared.method, SILOS, PrivacyRandomness.insecure(11), 1)
    assert drawn is not None
    outcome = run(prepared, tmp_path, Silent())
    assert outcome.row["contributions"] == drawn[1:].sum()
    released = load_file(outcome.folder / "model.safetensors")
    after = torch.cat([released[name].flatten() for name in prepared.task.state(prepared.task.initial())])
    step = (after - prepared.task.initial()).double().norm() * prepared.method.divisor(SILOS, SILOS)
    assert step > 0.5e-3 * np.sqrt(drawn[1:].sum())


@pytest.mark.parametrize("method", ["stevens", "uldp-avg"])
def test_public_numbers_alone_decide_whether_clients_are_silos(method: str) -> None:
    held = replace(population(method), n_users=SILOS + 1)
    prepared = partial(prepare, parse(document(method, "none"), "test"))
    if method == "uldp-avg":
        assert prepared(FixedPopulation(held)).population.n_users == SILOS + 1
    else:
        with pytest.raises(CompositionError, match="5 users and 4 silos: declare as many users as silos"):
            prepared(FixedPopulation(held))

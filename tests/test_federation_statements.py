"""A statement does not depend on the carrier: every method that institutions play says the same as its simulation.

What whole runs write is compared beside their models, in the tests of each protocol.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedveil.crypto.keys import IdentityKey
from fedveil.data.catalogue.data_set import digest_of
from fedveil.errors import CompositionError, ConfigError, FedveilError
from fedveil.federation.audit.run_record import TERMS, read_terms, signed_end
from fedveil.federation.membership import Membership
from fedveil.federation.proposal_review import check_deployable, review_proposal
from fedveil.federation.terms import public_text
from fedveil.files import read_content
from fedveil.privacy.accounting import PldAccountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import (
    Attestation,
    Declined,
    Finalize,
    GlobalModel,
    Goodbye,
    Join,
    RoundTask,
)
from fedveil.registry import BUILTINS
from fedveil.run.config.experiment import Experiment, ModelSection, merge
from fedveil.run.folder.statement import state
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.side_releases import SpentBudget
from fedveil.run.setup import Prepared, prepare
from fedveil.training import pretrained
from tests.federation_world import (
    TESTING,
    World,
    asked,
    clients,
    population,
    public_share_of,
    share_of,
    statement,
)

PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "masks": {"name": "secure-aggregation"},
    "recovery": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1},
    "weighting": {"name": "private-weighting", "n_max": 30},
    "partial": {"name": "partial-encryption", "ratio": 0.5},
}
NEEDED: dict[str, dict[str, float]] = {
    "dp-fed-ls": {"smoothing": 1.0},
    "newton": {"power": 2},
    "boosted-trees": {"power": 2},
} | {name: {"step": 1.0, "clip": 0.5} for name in BUILTINS["methods"] if name.endswith("-sdq")}
IN_ONE_PROCESS_ALONE = {"uldp-group"}
"""Methods that institutions cannot play under any protection."""


def composed(name: str, protection: dict[str, Any]) -> tuple[Prepared, Prepared, Prepared] | None:
    """A method as a simulation, the coordinator and a silo hold it; None if there is no such composition."""
    if protection["name"] == "partial-encryption" and find_spec("tenseal") is None:
        return None
    for held, users in ((population(), 6), (clients(), 3)):
        method = {"name": name} | NEEDED.get(name, {})
        changes: dict[str, Any] = {"method": method, "data": {"n_users": users}}
        try:
            experiment = asked(protection=protection, **changes)
            simulated = prepare(experiment, FixedPopulation(held))
        except FedveilError:
            continue
        shares = (public_share_of(held), share_of(held, 1))
        public, own = (prepare(experiment, FixedPopulation(share)) for share in shares)
        try:
            check_deployable(public)
        except CompositionError:
            continue
        return simulated, public, own
    return None


def published(prepared: Prepared) -> list[tuple[str, str, float]]:
    """The figures of publications: of a round."""
    delta = prepared.experiment.privacy.delta
    return [(claim.name, claim.gap, claim.epsilon(1, delta)) for claim in prepared.guarantee.published]


@pytest.mark.parametrize("name", BUILTINS["methods"])
def test_every_party_states_what_the_simulation_states(name: str) -> None:
    """All that a statement is made of: guarantee and lines, what they leave uncovered, and how it is counted."""
    compared = 0
    for protection in PROTECTIONS.values():
        found = composed(name, protection)
        if found is None:
            continue
        simulated, *parties = found
        for party in parties:
            compared += 1
            assert replace(party.guarantee, published=()) == replace(simulated.guarantee, published=())
            assert published(party) == published(simulated)
            assert party.uncovered == simulated.uncovered
            assert party.method.sends() == simulated.method.sends()
            assert party.task.dimension == simulated.task.dimension
            assert party.accountant.name == simulated.accountant.name
    assert (compared == 0) == (name in IN_ONE_PROCESS_ALONE)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"method": {"noise_multiplier": 10.0}}, False),
        ({"protection": {"name": "secure-aggregation"}}, False),  # the same charge, and another reader
        (
            {"server": {"average": {"name": "tail"}}},
            False,
        ),  # the same charge and readers, chosen after a look
        ({}, True),
    ],
    ids=["more noise", "another protection", "another average", "renewed membership"],
)
def test_a_run_is_joined_under_no_other_experiment_than_its_rounds_had(
    tmp_path: Path, changes: dict[str, Any], fits: bool
) -> None:
    """A coordinator asks for a round under one experiment, and has a better one's statement signed for it."""
    secret: dict[str, Any] = {"privacy": {"insecure_seed": None}}
    world = World(tmp_path, asked(rounds=1, **secret), population())
    world.tell(world.terms())
    world.tell(GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=1), number=1)
    assert world.charged(0) == [1]
    if fits:
        world.membership = replace(world.membership, serial=1)
        world.restart()
    other = asked(rounds=1, **merge(secret, changes))
    (joined, *_) = world.tell(world.terms(other), session=2)
    if fits:
        (answer,) = world.tell(end_after_one_round(world, other), Goodbye(), session=2, number=1)
        assert isinstance(answer, Attestation)
    else:
        assert joined.why.code is Code.OTHER_EXPERIMENT
        assert len(list((tmp_path / "state-0" / "terms").iterdir())) == 1  # and nothing of it is kept
    world.close()


@pytest.mark.parametrize(
    "change", ["a silo more", "another charter", "a lost membership", "a replaced membership"]
)
def test_a_run_is_joined_among_no_other_silos_than_its_rounds_had(tmp_path: Path, change: str) -> None:
    """A lying coordinator names the same experiment after a renewal: with more silos, each would learn less."""
    experiment = asked(rounds=1, privacy={"insecure_seed": None})
    weighted = asked(
        rounds=1,
        method={"name": "uldp-avg-w"},
        protection={"name": "private-weighting"},
        privacy={"insecure_seed": None},
    )
    few, many = (prepare(weighted, FixedPopulation(share_of(population(silos=silos), 0))) for silos in (3, 4))
    at_silos = [one.epsilon_with(Role.SILO, 1, ()) for one in (few, many)]
    assert at_silos[1] < 0.95 * at_silos[0]  # what the statement would say of a round among 3 silos
    world = World(tmp_path, experiment, population())
    world.tell(world.terms())
    world.tell(GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=1), number=1)
    assert world.charged(0) == [1]
    (stored,) = (tmp_path / "state-0" / "memberships").iterdir()
    assert Membership.read(stored) == world.membership
    world.membership = replace(world.membership, serial=1)
    if change == "a silo more":
        world.held = population(silos=4)
        roster = (*world.membership.roster, IdentityKey.generate().public)
        world.membership = replace(world.membership, silos=world.held.silo_names, roster=roster)
    elif change == "another charter":
        world.membership = replace(world.membership, charter=bytes(range(32)))
    elif change == "a lost membership":
        stored.unlink()
    else:
        stored.write_text(replace(world.membership, serial=2).to_toml())
    world.restart()
    (joined, *_) = world.tell(world.terms(), session=2)
    assert isinstance(joined, Declined)
    assert joined.why.code is Code.OTHER_EXPERIMENT
    world.close()


@pytest.mark.parametrize(("first", "then", "fits"), [("gram", "loop", False), ("loop", "gram", True)])
def test_what_was_trained_in_batches_is_not_stated_as_trained_alone(
    tmp_path: Path, first: str, then: str, fits: bool
) -> None:
    """Whoever trains alone states nothing of batches; a coordinator could ask for the rounds in batches, and end so."""
    secret: dict[str, Any] = {"privacy": {"insecure_seed": None}}
    world = World(tmp_path, asked(rounds=1, trainer={"name": first}, **secret), population())
    world.tell(world.terms())
    world.tell(GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=1), number=1)
    assert world.charged(0) == [1]
    (joined, *_) = world.tell(world.terms(asked(rounds=1, trainer={"name": then}, **secret)), session=2)
    assert isinstance(joined, Join) == fits
    assert fits or joined.why.code is Code.OTHER_EXPERIMENT
    world.close()


def round_event(prepared: Prepared) -> Event:
    return prepared.guarantee.event_at_round(prepared.guarantee.event, 1)


def end_after_one_round(world: World, experiment: Experiment) -> Finalize:
    prepared = prepare(experiment, FixedPopulation(share_of(world.held, 0)))
    stated = state(prepared, 1, SpentBudget(charges=1, side_releases=(), event=round_event(prepared)))
    return Finalize(round=1, charges=1, line=bytes(32), statement=json.dumps(stated.to_json()))


def test_an_accountant_that_shows_nothing_finite_leaves_no_guarantee() -> None:
    class Infinite(PldAccountant):
        def epsilon(self, event: Event, delta: float) -> float:
            return math.inf

    experiment = asked(rounds=1, privacy={"insecure_seed": None})
    prepared = replace(prepare(experiment, FixedPopulation(population())), accountant=Infinite())
    stated = state(prepared, 1, SpentBudget(charges=1, side_releases=(), event=round_event(prepared)))
    assert stated.epsilon is None
    assert stated.reasons == ("the accountant pld shows no finite epsilon at delta 1e-05",)
    assert {line.epsilon for line in stated.trust} == {None}


def test_a_session_that_is_open_gives_nothing_once_the_end_was_signed(tmp_path: Path) -> None:
    """A coordinator keeps a session open, has the run's end signed beside it, and asks for the next round there."""
    experiment = asked(rounds=2, privacy={"insecure_seed": None})
    world = World(tmp_path, experiment, population())
    terms, model = world.terms(experiment), GlobalModel(values=np.zeros(4, dtype=np.float32))
    world.tell(terms)
    world.tell(model, RoundTask(round=1), number=1)
    assert isinstance(world.tell(terms, session=2)[0], Join)
    (answer,) = world.tell(terms, end_after_one_round(world, experiment), Goodbye(), session=3)
    assert isinstance(answer, Attestation)
    (refused,) = world.tell(model, RoundTask(round=2), session=2, number=1)
    assert isinstance(refused, Declined)
    assert refused.why.code is Code.RUN_OVER
    assert world.charged(0) == [1]
    world.close()


SIGNED_MODELS: dict[str, Any] = {
    "name": "mlp",
    "loss": "focal",
    "class_weights": [1.0, 9.0],
    "start": "zeros",
    "sha256": "ab" * 32,
    "loss_sha256": "cd" * 32,
}
"""Another value than the usual of every key of a model that silos sign."""
COORDINATORS = {"metrics", "initial", "initial_layers"}
"""Keys that a silo does not read: what the coordinator measures, and its own files."""


@pytest.mark.parametrize("key", sorted(set(ModelSection.model_fields) - COORDINATORS))
def test_a_silo_trains_the_model_that_it_signs(key: str) -> None:
    """Every key of the terms stands in what a silo prepares; those that change a simulation's task change its own."""
    held, policy = population(), TESTING.model_copy(update={"models": ("linear", "mlp")})

    def trained(prepared: Prepared) -> list[list[float]]:
        start = prepared.task.initial()
        outputs = prepared.task.predict(start, torch.from_numpy(held.test_features))
        losses = prepared.task.loss.records(
            outputs, torch.from_numpy(held.test_targets), torch.ones(len(outputs), dtype=torch.bool)
        )
        return [start.tolist(), losses.tolist()]

    for model in ({}, {key: SIGNED_MODELS[key]}):
        experiment = asked(model=model)
        simulated = prepare(experiment, FixedPopulation(held))
        work = review_proposal(public_text(experiment, held.silo_names), None, policy, share_of(held, 0), 0)
        assert work.prepared.experiment.model == experiment.model
        assert trained(work.prepared) == trained(simulated)
        assert work.prepared.uncovered == simulated.uncovered


def test_a_run_that_begins_with_a_public_model_is_signed_by_all(tmp_path: Path) -> None:
    """Its digest is in the terms, so every silo states it; the file's path is not."""
    held, path = population(), tmp_path / "public.safetensors"
    experiment = asked(rounds=1, privacy={"insecure_seed": None})
    task = prepare(experiment, FixedPopulation(held)).task
    save_file({name: torch.ones_like(one) for name, one in task.state(task.initial()).items()}, path)
    begun = experiment.model_copy(update={"model": experiment.model.model_copy(update={"initial": path})})
    world = World(tmp_path, begun, held)
    world.play()
    digest = digest_of(path)
    (line,) = (one for one in statement(world.run_folder.path)["uncovered"] if "initial model" in one)
    assert digest[:16] in line
    assert [one["silo"] for one in signed_end(world.run_folder.path)] == [0, 1, 2]
    (_, text), *_ = read_terms((world.run_folder.path / TERMS).read_bytes()).values()
    assert digest in text
    assert path.name not in text
    world.close()

    other = begun.model_copy(update={"model": begun.model.model_copy(update={"sha256": "ab" * 32})})
    with pytest.raises(ConfigError, match=f"has the SHA-256 {digest}, and model.sha256 is abab"):
        prepare(other, FixedPopulation(held))


def test_the_initial_model_that_was_hashed_is_the_one_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces the file as soon as it has been read: the digest and the parameters are of the same bytes."""
    path, held = tmp_path / "public.safetensors", population()
    task = prepare(asked(), FixedPopulation(held)).task
    first, other = (
        {name: torch.full_like(one, fill) for name, one in task.state(task.initial()).items()}
        for fill in (1.0, 2.0)
    )
    save_file(first, path)
    digest, reads = digest_of(path), list[Path]()

    def once(at: Path, *given: Any, **named: Any) -> bytes:
        content = read_content(at, *given, **named)
        reads.append(at)
        save_file(other, path)
        return content

    monkeypatch.setattr(pretrained, "read_content", once)
    begun = asked(model={"initial": str(path)})
    prepared = prepare(begun, FixedPopulation(held))
    assert reads == [path]
    assert prepared.experiment.model.sha256 == digest
    assert set(prepared.task.initial().tolist()) == {1.0}
    assert digest_of(path) != digest

"""One epsilon over a study: preprocessing, training, evaluation, a regression and votes spend what was declared."""

from __future__ import annotations

import math
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import CompositionError, ConfigError, FedveilError
from fedveil.federation.hosts.submission import create_run, read_document
from fedveil.federation.silo_ledger import LEDGER
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, ComposedEvent, ConcentratedEvent, GaussianEvent, split_grid_loss
from fedveil.privacy.joint_cost import joint_cost
from fedveil.privacy.ledger import read_entries
from fedveil.run.config.experiment import PrivacySection, parse
from fedveil.run.config.release_document import InferenceDocument
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.inference import prepare_inference
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import make_releases
from fedveil.run.training_run import run
from fedveil.validation import validate_document
from tests.doc_examples import BLOCKS
from tests.federation_world import asked, clients, population
from tests.hospitals import table_in
from tests.runs import Silent
from tests.test_federation_run_parts import BOTH, Study
from tests.test_preprocessing import prepared_in, tables

EPSILON, PEOPLE = 20.0, 1500
needs_tenseal = pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe")


def regression(folder: Path, share: float) -> InferenceDocument:
    document = {
        "name": "odds",
        "data": table_in(folder),
        "privacy": {"epsilon": EPSILON, "share": share},
        "protection": {"name": "secure-aggregation"},
        "inference": {"family": "logistic", "target": "sick", "features": ["ward"], "silos": "uniform"},
    }
    return validate_document(InferenceDocument, document, "test")


def strength(folder: Path) -> float:
    """mu^2 of what a run was charged."""
    events = [split_grid_loss(entry.event)[0] for entry in read_entries(folder / "ledger.jsonl")]
    assert all(isinstance(one, GaussianEvent) for one in events)
    return math.fsum(one.noise_multiplier**-2 for one in events if isinstance(one, GaussianEvent))


def test_a_study_to_odds_ratios_costs_one_epsilon(
    tmp_path: Path,
) -> None:
    """Preprocessing, training and evaluation have 0.7 of mu^2, a regression of the same people the rest."""
    tables(tmp_path, people=PEOPLE)
    page = tomllib.loads(BLOCKS["docs/how-to/evaluate-privately.md:3"].text)["privacy"]
    prepared = prepared_in(
        tmp_path, privacy=page | {"epsilon": EPSILON}, evaluation={}, data={"table": {"test_share": 0.5}}
    )
    trained = run(prepared, tmp_path / "runs", Silent())
    estimated = make_releases(prepare_inference(regression(tmp_path, 0.3)), tmp_path / "runs")
    whole = strength(trained.folder) + strength(estimated)
    assert strength(trained.folder) / whole == pytest.approx(0.7, abs=1e-3)
    assert strength(estimated) / whole == pytest.approx(0.3, abs=1e-3)
    assert trained.statement.epsilon is not None
    assert trained.statement.epsilon < EPSILON
    spent = joint_cost([trained.folder, estimated])
    assert (1 - 1e-4) * EPSILON < spent.epsilon <= EPSILON


@pytest.mark.slow
def test_a_study_between_institutions_costs_one_epsilon_in_every_silos_ledger(tmp_path: Path) -> None:
    """A run of all parts and a regression, both submitted to the same coordinator: one ledger a silo has them all."""
    tables(tmp_path, people=PEOPLE)
    whole = {"epsilon": 40.0, "accountant": "pld", "insecure_seed": None}
    study = Study(tmp_path, f'{BOTH}, "logistic-regression"', privacy=whole | {"share": 0.7}, rounds=1)
    assert set(study.play()) == {None}
    asked = regression(tmp_path, 0.3).model_copy(update={"privacy": PrivacySection(epsilon=40.0, share=0.3)})
    (tmp_path / "odds.toml").write_text(asked.to_toml())
    study.run = create_run(study.home, read_document(tmp_path / "odds.toml", study.home))
    assert study.play() == [None] * 3
    for path in study.paths:
        entries = read_entries(path / "state" / LEDGER)
        assert [entry.run[32:] for entry in entries] == [
            "/prep/1",
            "",
            "/eval/1",
            "/eval/2",
            "/1",
            "/2",
            "/3",
        ]
        events = ComposedEvent(events=tuple(entry.event for entry in entries))
        spent = make_accountant("pld").epsilon(events, 1e-5)
        assert spent == pytest.approx(40.0, rel=1e-4)


def test_a_share_of_the_whole_is_the_whole(tmp_path: Path) -> None:
    tables(tmp_path, people=PEOPLE)
    found = [prepare_inference(regression(tmp_path, share)).multiplier for share in (1.0, 0.25)]
    assert found[1] / found[0] == pytest.approx(2.0, rel=1e-3)


def test_rounds_of_drawn_users_share_no_epsilon(tmp_path: Path) -> None:
    """Two of them, each within epsilon beside a Gaussian release of the rest, spend up to twice of it together."""
    tables(tmp_path, people=PEOPLE)
    with pytest.raises(
        CompositionError, match=r"privacy\.share: only Gaussian releases can share one epsilon"
    ):
        prepared_in(tmp_path, privacy={"epsilon": EPSILON, "share": 0.5}, method={"user_sampling_rate": 0.1})


def test_a_share_is_of_the_whole_where_clients_are_replaced() -> None:
    """mu^2 is counted under the method's adjacency, on the side of the others as on one's own."""

    def found(share: float) -> Any:
        document = {
            "name": "clients",
            "rounds": 5,
            "data": {"name": "digits", "n_users": 8, "n_silos": 8},
            "model": {"name": "linear", "loss": "binary_cross_entropy"},
            "local": {},
            "method": {
                "name": "dp-fed",
                "clip": 1.0,
                "noise_multiplier": "calibrated",
                "client_sampling": "uniform",
                "client_sampling_rate": 0.95,
            },
            "privacy": {"epsilon": 3.0, "share": share},
        }
        return prepare(parse(document, "test"), FixedPopulation(clients(8))).guarantee

    whole, part = found(1.0), found(0.8)
    assert whole.adjacency is part.adjacency is Adjacency.REPLACE_ONE
    assert (whole.event.noise_multiplier / part.event.noise_multiplier) ** 2 == pytest.approx(0.8, rel=1e-3)


def voting(**changes: Any) -> Prepared:
    votes = {
        "name": "partial-encryption",
        "ratio": 0.25,
        "partition": "noisy-votes",
        "votes": "secagg",
        "he_noise": 1.0,
    }
    given = changes.pop("protection", {})
    document = {
        "method": {"noise_multiplier": "calibrated"},
        "privacy": {"epsilon": 3.0, "insecure_seed": None, "accountant": "rdp"},
        "budget": {"votes": 0.2},
        "protection": {"name": "none"} if given is None else votes | given,
    }
    return prepare(parse(asked_as(document | changes), "test"), FixedPopulation(population()))


def asked_as(changes: dict[str, Any]) -> dict[str, Any]:
    document = asked().model_dump(mode="json", exclude_none=True)
    del document["privacy"]
    document["method"] |= changes.pop("method")
    return document | changes


@needs_tenseal
def test_votes_have_their_share_and_the_whole_run_the_declared_epsilon() -> None:
    """The noise of the votes is found for their share, that of training last: what is left of one epsilon."""
    prepared = voting()
    rounds, event = prepared.experiment.rounds, prepared.guarantee.event
    assert isinstance(event, ConcentratedEvent)
    protection: Any = prepared.method.protection
    ballots = prepared.method.contribution.ballots(prepared.population.n_silos)
    votes = (math.sqrt(2) * ballots / protection.vote_noise) ** 2
    assert votes * event.noise_multiplier**2 == pytest.approx(0.2, abs=0.002)
    assert prepared.epsilon_with(Role.READER, rounds, ()) == pytest.approx(3.0, abs=1e-3)
    assert voting(budget={"votes": 0.4}).method.protection.vote_noise == pytest.approx(
        protection.vote_noise / math.sqrt(2), rel=1e-6
    )


@needs_tenseal
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protection": {"vote_noise": 1.0}}, "finds protection.vote_noise; remove one of the two"),
        ({"protection": {"partition": "released", "votes": "plain"}}, "there are no votes"),
        ({"budget": None}, r"give vote_noise, or a share of the budget for it \(budget\.votes\)"),
        ({"budget": {"votes": 1.0}}, "must be < 1"),
        ({"budget": {"votes": 0.9}}, "leave nothing for training"),
        ({"privacy": {"share": 0.5}}, r"share: of privacy\.epsilon, which is not given"),
        ({"privacy": {"epsilon": 3.0, "share": 0.0}}, r"privacy\.share: must be > 0"),
        (
            {"method": {"noise_multiplier": 5.0}, "privacy": {}},
            "budget.votes: spends a share of privacy.epsilon",
        ),
        ({"protection": {}, "budget": {"evaluation": 0.1}}, "budget: shares epsilon between"),
    ],
)
def test_what_no_share_is_of_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FedveilError, match=reason) as found:
        voting(**changes)
    assert isinstance(found.value, (ConfigError, CompositionError))


def test_without_votes_there_is_no_share_of_them() -> None:
    with pytest.raises(CompositionError, match="under NoProtection there are no votes"):
        voting(protection=None)

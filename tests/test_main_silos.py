"""Main silos that a file names: a user's weight is in one silo, whatever the file says, and nobody shows counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.main_silos import MainSilos, MainSilosError, read_main_silos
from fedveil.data.records import Population
from fedveil.errors import CompositionError, DataError
from fedveil.federation.proposal_review import review_proposal
from fedveil.federation.silo import to_refusal
from fedveil.federation.silo_data import LocalPopulation
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.silo_session.tasks import SiloTrainingTask
from fedveil.federation.terms import canonical
from fedveil.privacy.claims import Role
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.refusals import Code
from fedveil.run.config.experiment import Experiment
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.records import lengths_of_updates
from fedveil.run.setup import prepare
from fedveil.statistics.preprocessing import LENGTH
from tests.federation_world import (
    MOVING,
    TESTING,
    World,
    asked,
    in_one_process,
    population,
    share_of,
    statement,
)
from tests.runs import files, same_model

SALT = "5e" * 32
USERS = tuple(f"u,{number}" for number in range(6))
SILOS = ("silo0", "silo1", "silo2")
POLICY = TESTING.model_copy(update={"disclose_counts": False})


def text(silos: Sequence[int], salt: str = SALT) -> str:
    lines = (f"{user},{SILOS[silo]}\n" for user, silo in zip(USERS, silos, strict=True))
    return f"{salt}\n" + "".join(lines)


def read(folder: Path, content: str) -> MainSilos:
    path = folder / "main-silos.csv"
    path.write_text(content)
    return read_main_silos(path, USERS, SILOS)


def by_counts(held: Population) -> list[int]:
    """The silo where each user has most records, the first of several."""
    counts = np.zeros((held.n_silos, held.n_users), dtype=np.int64)
    np.add.at(counts, (held.train.silo, held.train.user), 1)
    return counts.argmax(axis=0).tolist()


def declared(found: MainSilos, **changes: Any) -> Experiment:
    method = {"name": "uldp-avg-w", "power": {"main_silos": found.digest}, **changes.pop("method", {})}
    protection = {"name": "secure-aggregation", **changes.pop("protection", {})}
    return asked(method=method, protection=protection, **changes)


def joined(experiment: Experiment, share: LocalPopulation, number: int) -> SiloTrainingTask:
    work = review_proposal(canonical(experiment), None, POLICY, share, number)
    assert isinstance(work, SiloTrainingTask)
    return work


class Declaring(World):
    """Every silo has its file of main silos.

    Attributes:
        own: by silo.
    """

    def __init__(self, folder: Path, experiment: Experiment, held: Population, own: Sequence[MainSilos]):
        self.own = list(own)
        super().__init__(folder, experiment, held, POLICY)

    def share(self, number: int) -> LocalPopulation:
        return replace(share_of(self.held, number), main_silos=self.own[number])


def test_the_model_is_that_of_the_main_silos_in_one_process_bit_for_bit(tmp_path: Path) -> None:
    """Under masks, with a clip that moves; with the file of the true main silos it is also that of power "main"."""
    held = population()
    found = read(tmp_path, text(by_counts(held)))
    experiment = declared(found, method={"clip": MOVING}, rounds=3)
    world = Declaring(tmp_path, experiment, held, [found] * 3)
    world.play()
    there = files(world.run_folder.path)
    here = files(in_one_process(experiment, replace(held, main_silos=found), tmp_path / "here"))
    main = asked(
        method={"name": "uldp-avg-w", "power": "main", "clip": MOVING},
        protection={"name": "secure-aggregation"},
        rounds=3,
    )
    assert same_model(here[1], there[1])
    assert same_model(files(in_one_process(main, held, tmp_path / "main"))[1], there[1])
    assert statement(tmp_path / "here" / "try") == statement(world.run_folder.path)
    world.close()


def test_rounds_go_on_without_a_silo_whose_users_are_then_away(tmp_path: Path) -> None:
    """No weight depends on a silo that is not there; with weights by totals nobody could go on."""
    held = population()
    found = read(tmp_path, text(by_counts(held)))
    recovering = {"on_dropout": "recover", "max_dropouts": 1}
    experiment = declared(found, protection=recovering, rounds=2)
    world = Declaring(tmp_path, experiment, held, [found] * 3)
    world.play()
    assert world.outcome.stopped is None
    here = in_one_process(experiment, replace(held, main_silos=found), tmp_path / "here")
    assert statement(here) == statement(world.run_folder.path)
    world.close()
    by_totals = declared(found, method={"power": 2}, protection=recovering)
    with pytest.raises(CompositionError, match="no longer sum to 1"):
        prepare(by_totals, FixedPopulation(held))


def test_the_server_learns_no_counts_and_its_line_is_that_of_readers() -> None:
    found = MainSilos(digest="ab" * 32, silo=np.zeros(6, dtype=np.int32))
    prepared = prepare(declared(found), FixedPopulation(population()))
    guarantee = prepared.guarantee
    assert guarantee.event_for(Role.SERVER) == guarantee.event
    assert any("relies on its author" in line and "abab" in line for line in prepared.uncovered)
    by_count = prepare(asked(method={"name": "uldp-avg-w", "power": "main"}), FixedPopulation(population()))
    assert not any("its author" in line for line in by_count.uncovered)
    assert by_count.epsilon_with(Role.SERVER, 1, ()) == np.inf


def test_a_pair_that_trains_in_no_round_has_no_length() -> None:
    """Of a user's pairs that in the main silo alone, so that a clip by quantile is one of what is clipped."""
    main = asked(method={"name": "uldp-avg-w", "power": "main"})
    prepared = prepare(main, FixedPopulation(population()))
    lengths = lengths_of_updates(prepared, prepared.task.initial()).numbers(LENGTH).values
    groups, weights = prepared.setting.cohort.groups, prepared.setting.weights.numpy()
    trained = np.zeros(len(lengths), dtype=np.bool_)
    trained[groups.order] = np.repeat(weights > 0, groups.size)
    assert 0 < trained.sum() < len(lengths)
    assert np.array_equal(lengths > 0, trained)


@settings(max_examples=15, deadline=None)
@given(silos=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_whatever_the_file_says_one_user_weighs_at_most_one(silos: list[int]) -> None:
    """Also where it names a silo in which the user has most, few or no records; no silo reads another's table."""
    held = population()
    found = MainSilos(digest="ab" * 32, silo=np.array(silos, dtype=np.int32))
    total = np.zeros(6)
    for number in range(3):
        prepared = joined(declared(found), replace(share_of(held, number), main_silos=found), number).prepared
        np.add.at(total, prepared.setting.cohort.groups.user, prepared.setting.weights.numpy())
    present = [
        bool(((held.train.user == user) & (held.train.silo == silo)).any()) for user, silo in enumerate(silos)
    ]
    assert total.tolist() == [float(one) for one in present]


def test_a_stale_file_or_none_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    held = population()
    found, stale = read(tmp_path, text([0, 1, 2, 0, 1, 2])), read(tmp_path, text([1, 1, 2, 0, 1, 2]))
    for own in (stale, None):
        with pytest.raises(MainSilosError) as refused:
            joined(declared(found), replace(share_of(held, 1), main_silos=own), 1)
        assert to_refusal(refused.value).code is Code.MAIN_SILOS
    world = Declaring(tmp_path, declared(found, rounds=2), held, [found, stale, found])
    world.play()
    assert Code.MAIN_SILOS.template in (world.outcome.stopped or "")
    assert not any(read_entries(tmp_path / f"state-{number}" / LEDGER) for number in range(3))
    world.close()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (text([0] * 6, salt="5e" * 31), "line 1 is not 64 hexadecimal digits"),
        (text([0] * 6, salt="user,silo"), "line 1 is not 64 hexadecimal digits"),
        ("", "line 1 is not 64 hexadecimal digits"),
        (text([0] * 6) + "u,5,silo1\n", "7 users instead of 6"),
        (text([0] * 6).replace("u,4,", "u,3,"), "line 6 is not of the user in line 5"),
        (text([0] * 6).replace("u,4,silo0", "u,4,silo9"), "line 6 names no silo of the federation"),
        (text([0] * 6).replace("u,4,silo0", "u,4"), "line 6 is not of the user"),
    ],
    ids=["short", "no salt", "empty", "twice", "in another's place", "unknown silo", "no silo"],
)
def test_a_file_that_names_no_silo_or_two_for_a_user_is_refused_without_an_id(
    content: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=reason) as refused:
        read(tmp_path, content)
    assert "u," not in str(refused.value)


def test_the_digest_hides_who_is_where(tmp_path: Path) -> None:
    """With another first line the same assignment has another digest."""
    assert read(tmp_path, text([0] * 6)).digest != read(tmp_path, text([0] * 6, salt="5f" * 32)).digest

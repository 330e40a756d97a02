"""Silos that vanish in a round: what is revealed, what is paid, with whom the round goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedveil.errors import CompositionError, ConfigError, ProtocolError, SiloVanished
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import sum_noise_std
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.sampling import PoissonUsers
from fedveil.protocols.driver import NOBODY, Dropouts, LocalDriver
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.journal import Attempt, Journal, Step, StepKey
from fedveil.run.loop import Played, play_part
from fedveil.run.rounds.retries import MOST_ATTEMPTS, DropoutRule, DropoutSimulation
from fedveil.run.rounds.round_context import RoundContext, next_model
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from tests.contract.test_methods import CLIP, LOCAL, SIGMA
from tests.runs import DrawnStreams, Silent, files, json_lines, same_model
from tests.synthetic import serve_hospitals
from tests.test_protected_run import asked
from tests.test_weighted_run import asked as weighted

EARLY, LATE = Dropouts(before_input=frozenset({1})), Dropouts(before_reveal=frozenset({1}))
AVG = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0}


@pytest.fixture(autouse=True)
def _made_up_hospitals(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_hospitals(tmp_path_factory.mktemp("made_up"), monkeypatch)


ALL = (0, 1, 2)


def units(silos: int, length: int = 5) -> dict[int, np.ndarray]:
    return {silo: np.arange(length) * 10**silo - silo for silo in range(silos)}


# --- one attempt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("absent", "released"), [(EARLY, False), (LATE, True)])
def test_a_vanished_silo_ends_the_attempt_and_the_next_is_played_with_the_rest(
    absent: Dropouts, released: bool
) -> None:
    driver, vectors = LocalDriver(MaskedSumSpec(clients=3, length=5, limit=10**4)), units(3)
    with pytest.raises(SiloVanished, match="silos 1 vanished") as vanished:
        driver.play((1, 0), ALL, None, vectors.get, absent)
    assert vanished.value.silos == (1,)
    assert vanished.value.may_have_released is released
    total, summed = driver.play((1, 1), (0, 2), None, vectors.get)
    np.testing.assert_array_equal(total, vectors[0] + vectors[2])
    assert summed == 2
    np.testing.assert_array_equal(driver.play((2, 0), ALL, None, vectors.get)[0], sum(vectors.values()))


@pytest.mark.parametrize(("absent", "rest"), [(NOBODY, (0, 1, 2)), (EARLY, (0, 2)), (LATE, (0, 1, 2))])
def test_with_recovery_the_attempt_goes_on_with_what_arrived(absent: Dropouts, rest: tuple[int, ...]) -> None:
    driver, vectors = LocalDriver(MaskedSumSpec(clients=3, length=5, limit=10**4, threshold=2)), units(3)
    for round_number in (1, 2):
        total, summed = driver.play((round_number, 0), ALL, None, vectors.get, absent)
        np.testing.assert_array_equal(total, sum(vectors[silo] for silo in rest))
        assert summed == len(rest)


@pytest.mark.parametrize(
    "absent",
    [
        Dropouts(before_input=frozenset({0, 1})),
        Dropouts(before_input=frozenset({0}), before_reveal=frozenset({1})),
        Dropouts(before_reveal=frozenset({0, 1})),
    ],
)
def test_recovery_gives_up_below_its_threshold_and_has_released_nothing(absent: Dropouts) -> None:
    driver, vectors = LocalDriver(MaskedSumSpec(clients=3, length=5, limit=10**4, threshold=2)), units(3)
    with pytest.raises(SiloVanished) as vanished:
        driver.play((1, 0), ALL, None, vectors.get, absent)
    assert not vanished.value.may_have_released
    np.testing.assert_array_equal(driver.play((1, 1), ALL, None, vectors.get)[0], sum(vectors.values()))


# --- the rule ---------------------------------------------------------------------------------------------------


class Scripted:
    """A part of one step, with parties whose attempts fail as told; keeps what was on disk at each attempt.

    Args:
        folder: the run folder.
        failures: silos that vanish in each attempt, and whether it may have released.
        repeatable: whether an attempt made again is the same release.
        rule: changes to the rule for vanished silos.
    """

    name, number, before, stopped = "", 1, (), None

    def __init__(
        self,
        folder: Path,
        *failures: tuple[tuple[int, ...], bool],
        repeatable: bool = False,
        **rule: Any,
    ) -> None:
        self.folder, self.failures, self.cohort = folder, list(failures), (0, 1, 2)
        self.rule = DropoutRule(**{"on_dropout": "retry", "waits": True, "least": 2} | rule)
        guarantee: Any = SimpleNamespace(unit="user", adjacency=Adjacency.ADD_OR_REMOVE_ONE)
        self.journal = Journal(RunFolder(folder), guarantee)
        self.played: list[tuple[int, tuple[int, ...], int, int]] = []
        self.step: Step | None = Step(
            self.journal,
            StepKey("run", 1),
            event=lambda _: GaussianEvent(noise_multiplier=2.0),
            refusal=lambda: None,
            repeatable=repeatable,
        )

    @property
    def charges(self) -> int:
        return len(read_entries(self.folder / "ledger.jsonl"))

    def play(self, attempt: Attempt) -> Played:
        failed = self.folder / "attempts.jsonl"
        recorded = len(json_lines(failed)) if failed.exists() else 0
        self.played.append((attempt.number, self.cohort, self.charges, recorded))
        if not self.failures:
            return Played(total=np.zeros(1), summed=len(self.cohort))
        silos, released = self.failures.pop(0)
        raise SiloVanished(silos, may_have_released=released)

    def prepare_retry(self, vanished: SiloVanished) -> None:
        assert self.step is not None
        self.cohort = self.rule.next_cohort(1, self.step.tries, self.cohort, vanished)

    def start(self) -> tuple[np.ndarray, None]:
        return np.zeros(0, dtype=np.float32), None

    def release(self, played: Played) -> None:
        self.step = None

    def all(self) -> list[tuple[int, tuple[int, ...], int, int]]:
        """Play the part; return number, silos, charges and recorded failures on disk at every attempt."""
        try:
            assert play_part(self, self) is None
        finally:
            self.journal.close()
        return self.played


def test_every_attempt_is_paid_before_it_and_recorded_after_it(tmp_path: Path) -> None:
    play = Scripted(tmp_path, ((2,), True), ((0,), False))
    assert play.all() == [(0, (0, 1, 2), 1, 0), (1, (0, 1, 2), 2, 1), (2, (0, 1, 2), 2, 2)]
    assert [row["may_have_released"] for row in json_lines(tmp_path / "attempts.jsonl")] == [True, False]


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("released", [True, False])
def test_a_step_that_was_killed_is_charged_again_unless_it_repeats(
    tmp_path: Path, repeatable: bool, released: bool
) -> None:
    """By the rule: what was on disk is spent, whatever the failure released; a repeat pays for what may have been."""
    with pytest.raises(SiloVanished):
        Scripted(tmp_path, ((2,), released), on_dropout="end", repeatable=repeatable).all()
    again = Scripted(tmp_path, repeatable=repeatable)
    # fresh noise: one charge is spent, whatever the failure; a repeat pays only for what may have been released
    assert again.all() == [(1, (0, 1, 2), 1 + (released or not repeatable), 1)]


@pytest.mark.parametrize(("repeatable", "charges"), [(False, 2), (True, 1)])
def test_an_attempt_killed_on_the_charge_of_one_that_released_nothing_is_charged_again(
    tmp_path: Path, repeatable: bool, charges: int
) -> None:
    """The failure left its charge to the attempt that was killed, whose sum somebody may have seen."""
    killed = Scripted(tmp_path, repeatable=repeatable)
    step = killed.step
    assert step is not None
    step.begin()
    step.fail(SiloVanished((2,), may_have_released=False))
    step.begin()
    assert killed.charges == 1
    killed.journal.close()
    assert Scripted(tmp_path, repeatable=repeatable).all() == [(1, (0, 1, 2), charges, 1)]


def test_an_attempt_of_which_nothing_is_known_may_have_released(tmp_path: Path) -> None:
    """As at a coordinator, whose silos vanish without a word: each attempt is charged, however often it is asked."""
    for repeatable, charges in ((False, 3), (True, 1)):
        (folder := tmp_path / str(repeatable)).mkdir()
        play = Scripted(folder, repeatable=repeatable)
        step = play.step
        assert step is not None
        for _ in range(3):
            assert step.refusal() is None
            assert step.is_due == step.is_due  # asking changes nothing
            step.begin()
        assert play.charges == charges
        play.journal.close()


def test_a_resumed_round_goes_on_counting_its_attempts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Noise of a seed is drawn by the attempt's number: one that failed may have shown its sum with it."""
    (folder := tmp_path / "rule").mkdir()
    with pytest.raises(SiloVanished):
        Scripted(folder, ((2,), True), on_dropout="end").all()
    assert [number for number, *_ in Scripted(folder, ((2,), True)).all()] == [1, 2]

    asked_of = DrawnStreams(monkeypatch).paths
    scripted(monkeypatch, {(1, 0): LATE})
    with pytest.raises(SiloVanished):
        run(prepare(secure()()), tmp_path, Silent())
    before = set(asked_of)
    asked_of.clear()
    assert resume(tmp_path / "try", Silent()).rounds == 3
    assert before
    assert not before & set(asked_of)


def test_the_rest_goes_on_as_long_as_the_noise_is_enough(tmp_path: Path) -> None:
    for name in ("enough", "few"):
        (tmp_path / name).mkdir()
    assert Scripted(tmp_path / "enough", ((2,), False), waits=False).all()[-1] == (1, (0, 1), 1, 1)
    with pytest.raises(ProtocolError, match="1 silos are left and 2 are needed"):
        Scripted(tmp_path / "few", ((2,), False), ((0,), False), waits=False).all()


def test_a_round_ends_at_the_first_vanished_silo_or_after_many_attempts(tmp_path: Path) -> None:
    for name in ("first", "many"):
        (tmp_path / name).mkdir()
    with pytest.raises(SiloVanished):
        Scripted(tmp_path / "first", ((2,), False), on_dropout="end").all()
    assert len(json_lines(tmp_path / "first" / "attempts.jsonl")) == 1
    play = Scripted(tmp_path / "many", *[((2,), False)] * MOST_ATTEMPTS)
    with pytest.raises(ProtocolError, match=f"each of {MOST_ATTEMPTS} attempts"):
        play.all()
    assert len(play.played) == MOST_ATTEMPTS
    assert play.charges == 1


def test_absences_have_their_rate_and_are_those_of_the_seed() -> None:
    absences, silos = DropoutSimulation(rate=0.3, randomness=ExperimentRandomness(5)), tuple(range(40))
    drawn = [absences.draw_dropouts(number, attempt, silos) for number in range(50) for attempt in range(5)]
    assert drawn == [
        absences.draw_dropouts(number, attempt, silos) for number in range(50) for attempt in range(5)
    ]
    early = sum(len(one.before_input) for one in drawn) / len(drawn) / 40
    late = sum(len(one.before_reveal) for one in drawn) / len(drawn) / 40
    assert early == pytest.approx(0.15, abs=0.02)
    assert late == pytest.approx(0.15, abs=0.02)
    assert not any(one.before_input & one.before_reveal for one in drawn)


# --- noise and guarantee ----------------------------------------------------------------------------------------


def lacking(missing: int, colluding: int = 0) -> Any:
    method = uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, colluding_silos=colluding)
    protection = SecureAggregation(on_dropout="retry", max_dropouts=missing)
    return replace(method, channel=replace(method.channel, max_dropouts=missing), protection=protection)


@pytest.mark.parametrize(("missing", "colluding"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_a_sum_that_lacks_silos_keeps_the_stated_noise(missing: int, colluding: int) -> None:
    method, silos = lacking(missing, colluding), 5
    left = sum_noise_std(method, silos, silos - missing)
    unknown = left * math.sqrt((silos - missing - colluding) / (silos - missing))
    assert unknown == pytest.approx(SIGMA * CLIP)
    guarantee = derive(method, PublicFacts(n_silos=silos, n_users=6))
    assert guarantee.event == GaussianEvent(noise_multiplier=SIGMA)
    known = guarantee.views[-1].event
    honest = silos - missing - max(1, colluding)
    rest = 1 - max(1, colluding) / silos  # what a user holds elsewhere, where weights are uniform
    expected = left * math.sqrt(honest / (silos - missing)) / (rest * CLIP)
    assert known.noise_multiplier == pytest.approx(min(SIGMA, expected))
    assert any(f"at most {missing} of them may be missing" in line for line in guarantee.mechanisms)


def test_shares_that_are_not_sized_for_missing_silos_are_refused() -> None:
    method = uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA)
    with pytest.raises(CompositionError, match="sized for 0"):
        replace(method, protection=SecureAggregation(on_dropout="retry", max_dropouts=1))


@pytest.mark.parametrize(
    ("method", "protection", "error", "reason"),
    [
        ({}, {"on_dropout": "recover"}, CompositionError, "nothing to recover from"),
        ({}, {"max_dropouts": 1}, CompositionError, "a missing silo ends the run"),
        ({}, {"on_dropout": "recover", "max_dropouts": 2}, ProtocolError, "threshold 1 of 3"),
        ({}, {"on_dropout": "retry", "max_dropouts": 3}, CompositionError, "honest and there"),
        (
            {"name": "uldp-avg-w"},
            {"on_dropout": "retry", "max_dropouts": 1},
            CompositionError,
            "renormalise",
        ),
        (
            {"name": "uldp-avg-w"},
            {"on_dropout": "recover", "max_dropouts": 1},
            CompositionError,
            "renormalise",
        ),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_before_training(
    method: dict[str, Any], protection: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        prepare(asked(method=AVG | method, protection={"name": "secure-aggregation"} | protection))


@pytest.mark.parametrize(
    ("protection", "reason"),
    [
        ({"name": "none", "dropout_rate": 0.1}, "protection.dropout_rate: no such key; .* it belongs to"),
        ({"name": "private-weighting", "on_dropout": "recover"}, "protection.on_dropout: must be 'end' or"),
        (
            {"name": "private-weighting", "on_dropout": "retry", "max_dropouts": 1},
            "protection.max_dropouts: no such key",
        ),
        ({"name": "secure-aggregation", "dropout_rate": 1.0}, "dropout_rate"),
    ],
)
def test_keys_about_vanished_silos_that_do_not_belong_are_refused(
    protection: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        asked(method=AVG, protection=protection)


# --- whole runs -------------------------------------------------------------------------------------------------


def scripted(monkeypatch: pytest.MonkeyPatch, script: dict[tuple[int, int], Dropouts]) -> None:
    def of(self: DropoutSimulation, round_number: int, attempt: int, cohort: tuple[int, ...]) -> Dropouts:
        return script.get((round_number, attempt), NOBODY)

    monkeypatch.setattr(DropoutSimulation, "draw_dropouts", of)


def secure(**protection: Any) -> Callable[..., Any]:
    return lambda **changes: asked(
        method=AVG,
        rounds=3,
        protection={"name": "secure-aggregation", "dropout_rate": 0.5} | protection,
        **changes,
    )


def test_an_attempt_is_charged_if_and_only_if_it_may_have_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted(monkeypatch, {(1, 0): EARLY, (2, 0): LATE})
    prepared = prepare(secure(on_dropout="retry", max_dropouts=1)(privacy={}))
    outcome = run(prepared, tmp_path, Silent(), transcript=True)
    entries = read_entries(outcome.folder / "ledger.jsonl")
    assert [(entry.round, entry.attempt) for entry in entries] == [(1, 0), (2, 0), (2, 1), (3, 0)]
    rows = json_lines(outcome.folder / "metrics.jsonl")
    assert [row.get("attempts") for row in rows] == [None, 2, 2, 1]
    assert [row.get("summed") for row in rows] == [None, 2, 2, 3]
    spent = [prepared.epsilon_after(charges) for charges in (0, 1, 3, 4)]
    assert [row["epsilon"] for row in rows] == spent
    assert outcome.statement.epsilon == spent[-1]
    failed = json_lines(outcome.folder / "attempts.jsonl")
    assert [(row["round"], row["attempt"], row["silos"], row["may_have_released"]) for row in failed] == [
        (1, 0, [1], False),
        (2, 0, [1], True),
    ]
    lines = json_lines(outcome.folder / "transcript.jsonl")
    assert {line["attempt"] for line in lines if line["round"] == 2} == {0, 1}


@pytest.mark.parametrize(
    "protection",
    [
        {"name": "secure-aggregation", "max_dropouts": 1},
        {"name": "private-weighting", "n_max": 400, "key_bits": 2048},
    ],
    ids=["secure-aggregation", "private-weighting"],
)
def test_every_attempt_draws_its_own_users(
    protection: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two noisy sums over one sample cost more than the two sampled releases that are charged."""
    drawn: list[np.ndarray] = []
    draw = PoissonUsers.draw

    def watch(self: PoissonUsers, n_users: int, source: Any) -> np.ndarray:
        drawn.append(draw(self, n_users, source))
        return drawn[-1]

    monkeypatch.setattr(PoissonUsers, "draw", watch)
    scripted(monkeypatch, {(1, 0): LATE})
    make, name = (
        (weighted, "uldp-avg-w") if protection["name"] == "private-weighting" else (asked, "uldp-avg")
    )
    experiment = make(
        method=AVG | {"name": name, "user_sampling_rate": 0.5},
        rounds=1,
        protection=protection | {"on_dropout": "retry", "dropout_rate": 0.5},
    )
    assert run(prepare(experiment), tmp_path, Silent()).row["attempts"] == 2
    assert len({one.tobytes() for one in drawn}) == len(drawn) == 2  # of a known seed: certain


def test_every_attempt_has_noise_of_its_own() -> None:
    """Two attempts with one noise differ by what their users say, and by nothing that hides it."""
    method, privacy = uldp_avg(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA), PrivacyRandomness.insecure(1)
    sent = [
        method.channel.send(
            np.zeros(8),
            Sender(
                number=silo,
                senders=3,
                round=number,
                attempt=attempt,
                grid=method.bound.grid,
                privacy=privacy,
            ),
        ).numbers
        for number in (1, 2)
        for silo in (0, 1)
        for attempt in (0, 1, 2)
    ]
    assert len({vector.tobytes() for vector in sent}) == len(sent) == 12


def test_a_round_without_a_silo_is_the_mean_over_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted(monkeypatch, {(1, 0): EARLY})
    quiet = AVG | {"noise_multiplier": 0.0}
    whole = prepare(asked(method=quiet, rounds=1))
    kept = whole.setting.cohort.groups.silo != 1
    groups = whole.setting.cohort.groups
    part = replace(
        groups,
        start=groups.start[kept],
        size=groups.size[kept],
        silo=groups.silo[kept],
        user=groups.user[kept],
    )
    setting = replace(
        whole.setting, cohort=replace(whole.setting.cohort, groups=part), weights=whole.setting.weights[kept]
    )
    turn = RoundContext(
        setting=whole.setting,
        model=whole.task.initial(),
        round_number=1,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.insecure(11),
    )
    sums = turn.trainer.sums(replace(turn, setting=setting).sum_job(None))
    expected, _ = next_model(turn, sums.total.numpy().sum(0), n_silos=3, summed=2)
    for rule in ("retry", "recover"):
        protection = {
            "name": "secure-aggregation",
            "on_dropout": rule,
            "max_dropouts": 1,
            "dropout_rate": 0.5,
        }
        outcome = run(prepare(asked(method=quiet, rounds=1, protection=protection)), tmp_path, Silent())
        found = np.concatenate([values.ravel() for values in files(outcome.folder)[1].values()])
        assert outcome.row["summed"] == 2
        assert outcome.row["attempts"] == (2 if rule == "retry" else 1)
        np.testing.assert_allclose(np.sort(found), np.sort(expected.numpy()), rtol=0, atol=1e-6)


def test_weights_by_records_wait_for_the_silo_and_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    protection = {"name": "secure-aggregation", "on_dropout": "retry", "dropout_rate": 0.5}
    quiet = {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 0.0}
    plain = files(run(prepare(asked(method=quiet)), tmp_path, Silent()).folder)[1]
    scripted(monkeypatch, {(1, 0): EARLY, (1, 1): LATE})
    outcome = run(prepare(asked(method=quiet, protection=protection)), tmp_path, Silent())
    assert same_model(plain, files(outcome.folder)[1])
    assert len(read_entries(outcome.folder / "ledger.jsonl")) == 3


@pytest.mark.parametrize("absent", [EARLY, LATE])
def test_a_run_that_ends_at_a_vanished_silo_is_resumed_with_every_release_paid(
    absent: Dropouts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted(monkeypatch, {(2, 0): absent})
    with pytest.raises(SiloVanished) as ended:
        run(prepare(secure()(privacy={})), tmp_path, Silent())
    assert ended.value.exit_code == 2
    folder = tmp_path / "try"
    assert len(read_entries(folder / "ledger.jsonl")) == 2
    outcome = resume(folder, Silent())
    assert outcome.rounds == 3
    assert (
        len(read_entries(folder / "ledger.jsonl")) == 4
    )  # nobody's word is taken that round 2 was not opened


def test_a_budget_that_pays_for_the_rounds_alone_stops_before_a_repeated_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted(monkeypatch, {(3, 0): LATE})
    make = secure(on_dropout="retry", max_dropouts=1)
    budget = prepare(make(privacy={})).epsilon_after(3)
    outcome = run(prepare(make(privacy={"budget": budget})), tmp_path, Silent())
    assert outcome.rounds == 2
    assert outcome.stopped is not None
    assert "above the budget" in outcome.stopped
    assert outcome.statement.epsilon == pytest.approx(budget)
    again = resume(outcome.folder, Silent())
    assert again.rounds == 2
    assert len(read_entries(outcome.folder / "ledger.jsonl")) == 3


@pytest.mark.slow
def test_private_weighting_waits_for_the_silo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted(monkeypatch, {(1, 0): EARLY, (2, 0): LATE})
    protection = {
        "name": "private-weighting",
        "n_max": 400,
        "key_bits": 2048,
        "on_dropout": "retry",
        "dropout_rate": 0.5,
    }
    outcome = run(prepare(weighted(protection=protection)), tmp_path, Silent())
    assert outcome.rounds == 2
    entries = read_entries(outcome.folder / "ledger.jsonl")
    assert [(entry.round, entry.attempt) for entry in entries] == [(1, 0), (2, 0), (2, 1)]
    assert outcome.row["attempts"] == 2

"""The verifier beside the package bounds every epsilon from above, by arithmetic that shares nothing with fedveil's."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr

from fedveil.bundle.writing import bundle_run
from fedveil.errors import PrivacyError
from fedveil.privacy import accounting
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.claims import Role
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    GridEvent,
    LaplaceEvent,
    NearbyEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
    atoms,
    event_from_json,
    split_grid_loss,
)
from fedveil.privacy.group import group_event
from fedveil.privacy.statement import check_epsilons
from fedveil.run.folder.documents import read_statement
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from tests.pins import presets
from tests.runs import Silent, experiment

VERIFIER = Path(__file__).parents[1] / "verifier"
# Nothing installs the program, so its file is loaded.
SPEC = spec_from_file_location("epsilon_verifier", VERIFIER / "epsilon.py")
assert SPEC is not None
assert SPEC.loader is not None
verifier = sys.modules["epsilon_verifier"] = module_from_spec(SPEC)
SPEC.loader.exec_module(verifier)

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
DELTA = 1e-5


def bound(event: Event, delta: float = DELTA, adjacency: Adjacency = ADD) -> float:
    found: float = verifier.epsilon_of(event.to_json(), delta, adjacency.value)
    return found


def gaussian(z: float) -> GaussianEvent:
    return GaussianEvent(noise_multiplier=z)


def test_it_is_short_and_imports_nothing_but_numpy() -> None:
    lines = [line for path in VERIFIER.glob("*.py") for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= 500
    for path in VERIFIER.glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
        names = {alias.name for node in imports for alias in node.names} | {
            str(node.module)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"numpy", "epsilon"}


# --- against closed forms -----------------------------------------------------------------------------------


def delta_of_gaussian(mu: float, e: float) -> float:
    return float(ndtr(mu / 2 - e / mu) - math.exp(e + log_ndtr(-mu / 2 - e / mu)))


def delta_of_sample(q: float, mu: float, e: float) -> float:
    return q * delta_of_gaussian(mu, math.log1p(math.expm1(e) / q))


def delta_of_poisson(q: float, z: float, e: float) -> float:
    """Return delta of one Poisson-sampled Gaussian release: the larger of both directions."""
    inside = 1 + math.expm1(-e) / q
    if inside <= 0:
        return delta_of_sample(q, 1 / z, e)
    # E_Q[(1 - e^e P/Q)^+], with P/Q = 1 - q + q e^l and l the loss of N(1, z^2) against N(0, z^2)
    t = z * z * math.log(inside) + 0.5
    added = ndtr(t / z) - math.exp(e) * ((1 - q) * ndtr(t / z) + q * ndtr((t - 1) / z))
    return max(delta_of_sample(q, 1 / z, e), float(added))


def delta_of_laplace(b: float, e: float) -> float:
    return max(0.0, -math.expm1((e - 1 / b) / 2))


EXACT: list[tuple[str, Event, Adjacency, Callable[[float], float]]] = [
    *(
        (f"gaussian {z}", gaussian(z), ADD, lambda e, z=z: delta_of_gaussian(1 / z, e))
        for z in (0.02, 0.7, 30.0)
    ),
    *(
        (
            f"poisson {q} {z}",
            PoissonSampledEvent(rate=q, event=gaussian(z)),
            ADD,
            lambda e, q=q, z=z: delta_of_poisson(q, z, e),
        )
        for q, z in ((0.01, 1.0), (0.3, 5.0), (0.001, 0.4), (0.9, 2.0))
    ),
    *(
        (f"laplace {b}", LaplaceEvent(noise_multiplier=b), ADD, lambda e, b=b: delta_of_laplace(b, e))
        for b in (0.3, 20.0)
    ),
    *(
        (
            f"fixed {m} {z}",
            SampledWithoutReplacementEvent(population=100, sample=m, event=gaussian(z)),
            REPLACE,
            lambda e, m=m, z=z: delta_of_sample(m / 100, 2 / z, e),
        )
        for m, z in ((5, 1.1), (90, 6.0))
    ),
]


@pytest.mark.parametrize(
    ("event", "adjacency", "exact"), [one[1:] for one in EXACT], ids=[one[0] for one in EXACT]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_the_bound_of_one_release_is_above_its_closed_form_and_near(
    event: Event, adjacency: Adjacency, exact: Callable[[float], float], delta: float
) -> None:
    found = bound(event, delta, adjacency)
    assert exact(found) <= delta
    assert found < 1e-6 or exact(found * 0.996) > delta


@pytest.mark.parametrize("rounds", [2, 200])
def test_compositions_cost_at_least_an_optimistic_estimate(rounds: int) -> None:
    """Distributions that are rounded down give lower bounds on the truth; so does the Gaussian closed form."""
    rate, z = 0.05, 1.5
    lowest = pld.from_gaussian_mechanism(
        z,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=1e-4,
        sampling_prob=rate,
        neighboring_relation=privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
    ).self_compose(rounds)
    event = SelfComposedEvent(event=PoissonSampledEvent(rate=rate, event=gaussian(z)), count=rounds)
    low = lowest.get_epsilon_for_delta(DELTA)
    assert low <= bound(event) <= 1.01 * low + rounds * 1e-4  # each rounds down by up to 1e-4


def test_composing_equal_losses_by_fft_agrees_with_one_gaussian_release() -> None:
    """The product of 400 transforms of one law of N(1/2, 1)-losses is bounded by its stated error."""
    one = verifier.atoms_of(("gaussian", 20.0), ADD.value, False, 9.0, 1 / 64)
    shown, _, _ = verifier.compose(verifier.Sum([(400, one)]), 4.0, 0.1, 5.0)
    for e in (1.0, 2.5, 4.0):
        exact = delta_of_gaussian(1.0, e)
        assert exact <= shown(e) <= exact * 1.02


# --- against the accountants --------------------------------------------------------------------------------


def between(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))


def random_release(source: random.Random, adjacency: Adjacency) -> Event:
    noisy, laplace = (
        gaussian(between(source, 0.3, 100)),
        LaplaceEvent(noise_multiplier=between(source, 0.5, 100)),
    )
    rate, population = between(source, 1e-3, 0.99), source.randint(2, 2000)
    replaced = SampledWithoutReplacementEvent(
        population=population, sample=source.randint(1, population - 1), event=noisy
    )
    own = {
        ADD: (
            PoissonSampledEvent(rate=rate, event=laplace),
            group_event(
                group_size=source.randint(2, 12), rate=min(rate, 0.5), noise_multiplier=between(source, 1, 50)
            ),
        ),
        REPLACE: (replaced, replaced),
    }
    return source.choice((noisy, laplace, PoissonSampledEvent(rate=rate, event=noisy), *own[adjacency]))


def random_costs(source: random.Random) -> Iterator[Event]:
    """Yield sometimes a distance, sometimes a grid loss."""
    if source.random() < 0.15:
        yield NearbyEvent(distance=between(source, 1e-14, 1e-8))
    if source.random() < 0.15:
        yield GridEvent(loss=between(source, 1e-9, 1e-2))


def random_ledger(seed: int) -> tuple[Event, Adjacency, float]:
    """Return a composition of one to three kinds of releases, sometimes with a distance, a grid loss or zCDP."""
    source = random.Random(seed)
    adjacency = source.choice((ADD, ADD, REPLACE))
    events: list[Event] = [
        SelfComposedEvent(event=random_release(source, adjacency), count=int(between(source, 1, 300)))
        for _ in range(source.choice((1, 1, 2, 3)))
    ]
    events += random_costs(source)
    if source.random() < 0.05:
        events = [SelfComposedEvent(event=gaussian(between(source, 2, 50)), count=3)]
        events.append(ConcentratedEvent(noise_multiplier=between(source, 2, 50)))
    return ComposedEvent(events=tuple(events)), adjacency, between(source, 1e-8, 1e-3)


def family(seed: int) -> Iterator[tuple[Event, Adjacency, float]]:
    """Yield a hundred short ledgers of the same few releases, whose loss distributions are then computed once."""
    source = random.Random(seed)
    adjacency = source.choice((ADD, ADD, REPLACE))
    releases = [random_release(source, adjacency) for _ in range(source.choice((1, 2, 3)))]
    # Gaussian releases merge into one of their joint strength, so few counts mean few distributions.
    few = [int(between(source, 1, 30)) for _ in range(3)]
    for _ in range(100):
        events: list[Event] = [
            SelfComposedEvent(
                event=one,
                count=source.choice(few) if isinstance(one, GaussianEvent) else int(between(source, 1, 30)),
            )
            for one in source.sample(releases, source.randint(1, len(releases)))
        ]
        yield ComposedEvent(events=(*events, *random_costs(source))), adjacency, between(source, 1e-8, 1e-3)


def disagreement(event: Event, adjacency: Adjacency, delta: float) -> str:
    """Return how verifier and accountant disagree about a ledger; empty if they agree.

    Below epsilon 0.01 the grid of the accountant is coarser than 1 %, and its figure may be far above the truth.
    """
    concentrated = any(isinstance(one, ConcentratedEvent) for one in atoms(event))
    stated = math.nan
    with suppress(PrivacyError):
        stated = make_accountant("rdp" if concentrated else "pld", adjacency).epsilon(event, delta)
    found = bound(event, delta, adjacency)
    least = 0.0 if concentrated or stated < 0.01 else 0.9 * stated
    agree = math.isnan(stated) or stated == found or least <= found <= 1.01 * stated + 1e-6
    return "" if agree else f"{event} at delta {delta}: accountant {stated}, verifier {found}"


def test_random_ledgers_cost_what_the_accountants_say() -> None:
    assert [text for seed in range(4) if (text := disagreement(*random_ledger(seed)))] == []


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_ledgers_of_their_own_releases_cost_what_the_accountants_say(block: int) -> None:
    seeds = range(1000 + 100 * block, 1100 + 100 * block)
    assert [text for seed in seeds if (text := disagreement(*random_ledger(seed)))] == []


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_a_hundred_thousand_random_ledgers_cost_what_the_accountants_say(block: int) -> None:
    seeds = range(10 * block, 10 * block + 10)
    found = [text for seed in seeds for one in family(seed) if (text := disagreement(*one))]
    for cached in (accounting._distribution, accounting._gaussian_distribution, verifier.atoms_of):
        cached.cache_clear()  # of dozens of blocks in one process they take more than 20 GB
    assert found == []


def test_gaussian_ledgers_cost_their_closed_form() -> None:
    for seed in range(15):
        source = random.Random(seed)
        z, delta = (
            [between(source, 0.5, 50) for _ in range(source.randint(1, 99))],
            between(source, 1e-12, 0.1),
        )
        exact = gaussian_epsilon(math.sqrt(sum(one**-2 for one in z)), delta)
        found = bound(ComposedEvent(events=tuple(map(gaussian, z))), delta)
        assert exact * (1 - 1e-9) <= found <= exact * 1.003 + 1e-6, seed


def ledgers_of(preset: str) -> Iterator[tuple[Event, float, Adjacency]]:
    """Return the different ledgers of a preset, against every party."""
    found = {}
    for facts in presets.read()[preset]:
        loss = facts["grid_loss"] * facts["rounds"] * 1000
        grid = [GridEvent(loss=loss)] if loss else []
        for event in (event_from_json(one) for one in facts.values() if isinstance(one, dict)):
            rounds = SelfComposedEvent(event=event, count=facts["rounds"])
            key = (ComposedEvent(events=(rounds, *grid)), facts["delta"], Adjacency(facts["adjacency"]))
            found[key] = None
    yield from found


def check_presets(ledgers: Iterable[tuple[Event, float, Adjacency]]) -> None:
    for event, delta, adjacency in ledgers:
        judge = make_accountant("pld", adjacency)
        if not judge.supports(event):
            judge = make_accountant("rdp", adjacency)
        stated, found = judge.epsilon(event, delta), bound(event, delta, adjacency)
        least = 0.99 * stated if judge.name == "pld" else 0.0
        assert stated == found or least <= found <= 1.01 * stated + 1e-6, event


def test_a_ledger_of_every_preset_costs_what_the_accountant_says() -> None:
    firsts = {next(ledgers_of(preset)) for preset in presets.PRESETS}
    assert len(firsts) > 10
    check_presets(firsts)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_ledger_of_every_preset_costs_what_the_accountant_says(preset: str) -> None:
    check_presets(ledgers_of(preset))


# --- refusals and files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"type": "novel"},
        {"type": "gaussian"},
        {"type": "gaussian", "noise_multiplier": 1.0, "clip": 1.0},
        {"type": "gaussian", "noise_multiplier": 0},
        {"type": "gaussian", "noise_multiplier": math.nan},
        {"type": "gaussian", "noise_multiplier": True},
        {"type": "poisson_sampled", "rate": 0.1, "event": {"type": "composed", "events": []}},
        {"type": "poisson_sampled", "rate": 1.1, "event": {"type": "gaussian", "noise_multiplier": 1.0}},
        {"type": "sampled_without_replacement", "population": 9, "sample": 3, "event": {"type": "laplace"}},
        {"type": "composed", "events": 3},
        {"type": "self_composed", "count": 0, "event": {"type": "gaussian", "noise_multiplier": 1.0}},
        {
            "type": "mixture_of_gaussians",
            "noise_multiplier": 1.0,
            "sensitivities": [1.0],
            "probabilities": [0.5],
        },
        {"type": "concentrated", "noise_multiplier": "5"},
        {"type": "grid", "loss": -1},
        {"type": "nearby", "distance": 2},
        [],
        None,
    ],
)
def test_no_claim_is_made_about_what_is_unknown_or_malformed(event: object) -> None:
    with pytest.raises((verifier.RefusedError, TypeError)):
        verifier.epsilon_of({"type": "composed", "events": [event]}, DELTA, ADD.value)


@pytest.mark.parametrize(
    ("release", "adjacency"),
    [
        (SampledWithoutReplacementEvent(population=9, sample=3, event=gaussian(1.0)), ADD),
        (PoissonSampledEvent(rate=0.1, event=LaplaceEvent(noise_multiplier=1.0)), REPLACE),
        (group_event(group_size=3, rate=0.1, noise_multiplier=2.0), REPLACE),
    ],
)
def test_no_claim_is_made_under_an_adjacency_without_a_bound(release: Event, adjacency: Adjacency) -> None:
    with pytest.raises(verifier.RefusedError):
        bound(release, DELTA, adjacency)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan, 1e-300])
def test_no_claim_is_made_at_a_delta_out_of_range(delta: float) -> None:
    with pytest.raises(verifier.RefusedError):
        bound(gaussian(1.0), delta)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under secure aggregation, with unpredictable noise."""
    folder = tmp_path_factory.mktemp("ran")
    method = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0}
    other = {"privacy": {"insecure_seed": None}, "protection": {"name": "secure-aggregation"}}
    wanted = experiment(rounds=2, method=method, **other)
    run(prepare(wanted), folder, Silent())
    return next(folder.rglob("ledger.jsonl")).parent


def verify(path: Path, *options: str) -> tuple[int, str]:
    """Play the program in a process of its own, without the package."""
    done = subprocess.run(
        [sys.executable, "-P", str(VERIFIER / "verify.py"), str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(VERIFIER), "PATH": ""},
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_and_its_bundle_are_verified_against_every_party(ran: Path, tmp_path: Path) -> None:
    code, text = verify(ran)
    stated = json.loads((ran / "privacy.json").read_text())
    assert code == 0
    charged = [json.loads(line)["event"] for line in (ran / "ledger.jsonl").read_text().splitlines()]
    assert all(split_grid_loss(event_from_json(one))[1] > 0 for one in charged)
    assert [line.split(" stated ")[0].split(" (")[0].strip() for line in text.splitlines()] == [
        "reader",
        *(one["role"] for one in stated["trust"]),
    ]
    assert text.count("agrees") == len(stated["trust"]) + 1 > 2
    assert text.count("(by stated events)") == len(stated["trust"])  # the reader's are the ledger's
    assert verify(bundle_run(ran, tmp_path / "it.zip"))[0] == 0
    assert verify(ran / "ledger.jsonl", "--delta", "1e-5")[0] == 0
    assert verify(ran / "ledger.jsonl")[0] == 2


def test_a_statement_that_promises_too_much_or_another_event_disagrees(ran: Path, tmp_path: Path) -> None:
    def changed(change: Callable[[dict[str, Any]], None]) -> tuple[int, str]:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(ran / "ledger.jsonl", folder)
        statement = json.loads((ran / "privacy.json").read_text())
        change(statement)
        (folder / "privacy.json").write_text(json.dumps(statement))
        return verify(folder)

    code, text = changed(lambda one: one.update(epsilon=one["epsilon"] * 0.98))
    assert (code, text.count("DISAGREES")) == (1, 1)
    assert changed(lambda one: one["trust"][0].update(epsilon=0.0))[0] == 1
    assert changed(lambda one: one.update(event={"type": "gaussian", "noise_multiplier": 50.0}))[0] == 1
    assert changed(lambda one: one.update(unit="record"))[0] == 1
    assert changed(lambda one: one["trust"][0].pop("event"))[0] == 2


def test_fedveil_verify_computes_every_line_of_a_statement_again(ran: Path) -> None:
    statement = read_statement(ran / "privacy.json")
    server = next(line for line in statement.trust if line.role == Role.SERVER)
    assert server.epsilon is not None
    names = [one.name for one in check_epsilons(statement)]
    assert {f"epsilon against {one}" for one in ("server", "sender", "server+sender")} <= set(names)
    lower = tuple(
        replace(one, epsilon=0.99 * server.epsilon) if one is server else one for one in statement.trust
    )
    failed = [one.name for one in check_epsilons(replace(statement, trust=lower)) if one.outcome == "fails"]
    assert failed == ["epsilon against server"]


def test_no_file_in_a_folder_of_an_archive_is_read_in_place_of_the_bundles(ran: Path, tmp_path: Path) -> None:
    """The last file named privacy.json was taken, also that of a folder which fedveil does not read."""
    path = bundle_run(ran, tmp_path / "it.zip")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    honest = files["privacy.json"]
    lowered = json.loads(honest)
    files["privacy.json"] = json.dumps(lowered | {"epsilon": lowered["epsilon"] / 2}).encode()
    for name in ("signatures/privacy.json", "z/privacy.json", "privacy.json"):
        with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "forged.zip", "w") as archive:
            warnings.simplefilter("ignore")  # of a name that is there twice
            for each, content in (*files.items(), (name, honest)):
                archive.writestr(each, content)
        code, text = verify(tmp_path / "forged.zip")
        assert (code, "DISAGREES" in text) == ((2, False) if name in files else (1, True))


def _nested(depth: int) -> str:
    return '{"type": "self_composed", "count": 1000, "event": ' * depth + "0" + "}" * depth


HOSTILE: dict[str, Callable[[dict[str, Any]], str]] = {
    "an epsilon that is a text": lambda one: json.dumps(one | {"epsilon": "0.1"}),
    "an epsilon that is a list": lambda one: json.dumps(one | {"epsilon": [0.1]}),
    "an event nested without end": lambda one: (
        json.dumps(one | {"event": 0})[:-1] + f', "event": {_nested(5000)}}}'
    ),
    "a count beyond every number": lambda one: json.dumps(
        one
        | {
            "trust": [
                one["trust"][0]
                | {"event": json.loads(_nested(150).replace("0}", '{"type": "grid", "loss": 1}}', 1))}
            ]
        }
    ),
    "no statement": lambda one: "[]",
}


@pytest.mark.parametrize("made", HOSTILE)
def test_hostile_statements_have_no_bound_and_no_traceback(made: str, ran: Path, tmp_path: Path) -> None:
    shutil.copy(ran / "ledger.jsonl", tmp_path)
    (tmp_path / "privacy.json").write_text(HOSTILE[made](json.loads((ran / "privacy.json").read_text())))
    code, text = verify(tmp_path)
    assert (code, text.count("\n")) == (2, 1)
    assert text.startswith("no bound: ")


def test_a_party_of_several_lines_prints_one(ran: Path, tmp_path: Path) -> None:
    shutil.copy(ran / "ledger.jsonl", tmp_path)
    statement = json.loads((ran / "privacy.json").read_text())
    statement["trust"][0]["role"] += " stated 0 bound 0 agrees\n\x1b[2Kserver"
    (tmp_path / "privacy.json").write_text(json.dumps(statement))
    code, text = verify(tmp_path)
    assert (code, text.count("\n"), "\x1b" in text) == (0, 1 + len(statement["trust"]), False)


def test_what_is_no_archive_and_what_is_no_charge_has_no_bound(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "it.zip").write_bytes(b"PK")
    assert verify(tmp_path / "it.zip")[0] == 2
    first = json.loads((ran / "ledger.jsonl").read_text().splitlines()[0])
    body = json.dumps({key: value for key, value in first.items() if key != "digest"} | {"kind": "refund"})
    digest = hashlib.sha256(body.encode()).hexdigest()
    (tmp_path / "l.jsonl").write_text(f'{body[:-1]}, "digest": "{digest}"}}\n')
    code, text = verify(tmp_path / "l.jsonl", "--delta", "1e-5")
    assert (code, "unknown kind" in text) == (2, True)


def test_nothing_agrees_at_another_delta(ran: Path) -> None:
    code, text = verify(ran, "--delta", "1e-9")
    assert (code, "agrees" in text, text.count("not compared")) == (0, False, text.count("\n"))


def test_a_damaged_ledger_disagrees(ran: Path, tmp_path: Path) -> None:
    lines = (ran / "ledger.jsonl").read_text().splitlines()
    for damaged in (lines[1:], lines[::-1], [lines[0].replace("5.0", "50.0", 1), *lines[1:]]):
        (tmp_path / "ledger.jsonl").write_text("\n".join(damaged) + "\n")
        assert verify(tmp_path / "ledger.jsonl", "--delta", "1e-5")[0] == 1

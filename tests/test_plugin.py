"""The example package, installed from outside the source tree: one member of every kind, from TOML and from Python."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from fedveil.errors import CompositionError, ConfigError, IntegrityError
from fedveil.federation.policy import Policy
from fedveil.privacy import events
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.events import GaussianEvent
from fedveil.privacy.ledger import parse_lines, read_entries
from fedveil.protocols.refusals import RefusalError
from fedveil.reference import entries
from fedveil.registry import KINDS
from fedveil.run.config.experiment import merge, parse
from fedveil.run.config.study import load_study
from fedveil.run.folder.documents import read_statement
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from tests.doc_examples import BLOCKS, PLUGIN, TRIED
from tests.plugins import forget, installing, metadata

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "plugin"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
DOCUMENT = tomllib.loads((EXAMPLE / "experiment.toml").read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the package by hand: its modules, and the metadata that an installer makes of its pyproject.toml."""
    folder = tmp_path_factory.mktemp("plugin")
    with installing(folder):
        site = folder / "site-packages"
        copytree(EXAMPLE / "src" / "fedveil_example", site / "fedveil_example")
        groups = PROJECT["entry-points"]
        metadata(site, PROJECT["name"], {one.removeprefix("fedveil."): groups[one] for one in groups})
        importlib.invalidate_caches()
        forget()
        yield


def experiment(**changes: Any) -> dict[str, Any]:
    return merge(DOCUMENT, changes)


def test_the_example_is_small_and_brings_one_of_every_kind(installed: None) -> None:
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 370
    # The accounting rule of the example is in the file of its sampler, whose name is the type of its event.
    # An executor is no part of an experiment.
    for kind in KINDS.keys() - {"accounting_rules", "executors"}:
        (one,) = [entry for entry in entries(kind) if entry.package == PROJECT["name"]]
        assert one.name in PROJECT["entry-points"][f"fedveil.{kind}"]


def test_the_pages_show_the_files_of_the_example() -> None:
    files = [path.read_text() for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    shown = [block for name, block in BLOCKS.items() if TRIED[name] == PLUGIN]
    assert len(shown) == 6
    for block in shown:
        assert any(block.text in text + "\n" for text in files), block.name


def test_it_runs_from_toml_and_its_state_survives_a_resume(installed: None, tmp_path: Path) -> None:
    (asked,) = load_study(str(EXAMPLE / "experiment.toml")).experiments
    assert parse(tomllib.loads(asked.to_toml()), "again") == asked
    prepared = prepare(asked)
    assert [type(stage).__module__.partition(".")[0] for stage in stages(prepared.method)] == 5 * [
        "fedveil_example"
    ]
    outcome = run(prepared, tmp_path, NullObserver(), transcript=True)
    assert outcome.statement.epsilon is not None
    assert "one user of each pair takes part in each round" in " ".join(outcome.statement.mechanisms)
    assert outcome.statement.epsilon < prepare_without_sampler()
    assert "messages are rounded to 8 binary digits" in " ".join(outcome.statement.mechanisms)
    named, version = PROJECT["name"], "0.1"
    told = [line for line in outcome.statement.uncovered if f"from the package {named}" in line]
    assert len(told) == len(KINDS.keys() - {"accounting_rules", "local_algorithms", "executors"})
    assert not any(version in line for line in told)  # silos that have another one sign the same statement
    environment = json.loads((outcome.folder / "environment.json").read_text())
    assert environment["packages"][named] == version
    assert (outcome.folder / "transcript.jsonl").read_text().count('"a vector in the open"') == 5 * 4
    assert resume(outcome.folder, NullObserver()).rounds == 5


def test_its_local_algorithm_runs_from_toml(installed: None, tmp_path: Path) -> None:
    method = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 2.0}
    local = {"name": "normalised", "least": 0.01, "learning_rate": 0.1}
    outcome = run(prepare(parse(experiment(method=method, local=local), "t")), tmp_path, NullObserver())
    told = " ".join(outcome.statement.uncovered)
    assert "the local algorithm normalised comes from the package fedveil-example" in told
    assert resume(outcome.folder, NullObserver()).rounds == 5


def prepare_without_sampler() -> float:
    """Return the epsilon of the example's five rounds if everyone took part."""
    plain = prepare(parse(experiment(sampler=None), "t")).guarantee
    return epsilon(plain.after_rounds(plain.event, 5), 1e-5)


def test_its_ledger_and_statement_are_read_where_the_package_is_not_loaded(
    installed: None, tmp_path: Path
) -> None:
    folder = run(prepare(parse(DOCUMENT, "t")), tmp_path, NullObserver()).folder
    lines = (folder / "ledger.jsonl").read_bytes()
    forget_event_type("one-of-two")
    with pytest.raises(IntegrityError, match="unknown event type 'one-of-two'"):
        parse_lines(folder / "ledger.jsonl", lines)  # lines of another party load no package
    assert len(read_entries(folder / "ledger.jsonl")) == 5
    forget_event_type("one-of-two")
    assert read_statement(folder / "privacy.json").event is not None


def forget_event_type(name: str) -> None:
    """Forget an event and the module that defines it, as a process that has not loaded it."""
    del events._TYPES[name]
    del sys.modules["fedveil_example.sampler"]
    forget()


def module(name: str) -> Any:
    return importlib.import_module(f"fedveil_example.{name}")


def stages(method: Any) -> tuple[Any, ...]:
    return method.channel, method.protection, method.denoiser, method.server, method.average


def test_it_runs_from_python(installed: None) -> None:
    method = module("method").weighted_sgd(clip=0.5, noise_multiplier=2.0)
    coarse = module("channel").Coarse(shares=method.channel, digits=4)
    assert method.channel.content is coarse.content
    server = module("optimizer").SignMomentum(learning_rate=0.5, rate=1.0)
    model, mean = torch.zeros(2), torch.tensor([3.0, -1.0], dtype=torch.float64)
    after, state = server.step(model, mean, server.init(model))
    assert after.tolist() == [0.5, -0.5]
    assert state["average"].tolist() == [3.0, -1.0]


def test_rounding_claims_what_the_shares_claim(installed: None) -> None:
    plain, coarse = (
        prepare(parse(experiment(channel=one, sampler=None), "t")).guarantee for one in (ADDITIVE, COARSE)
    )
    assert coarse.event == plain.event
    assert isinstance(coarse.event, GaussianEvent)
    assert [view.event for view in coarse.views] == [view.event for view in plain.views]


ADDITIVE: dict[str, Any] = {"name": "additive", "digits": None}
COARSE: dict[str, Any] = {"name": "coarse"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channel": {"digits": 0}}, r"^t: channel\.digits: must be >= 1, not 0$"),
        ({"channel": {"shares": 1}}, r"^t: channel\.shares: no such key; known here: digits, name$"),
        ({"method": {"clip": -1}}, r"^t: method\.clip: must be > 0, not -1$"),
        ({"method": {"denominator": "actual"}}, r"^t: method\.denominator: no such key; known here: clip, "),
        ({"server": {"denoiser": {"factor": 2.0}}}, r"^t: server\.denoiser\.factor: must be <= 1, not 2"),
        ({"server": {"optimizer": {"learning_rate": None}}}, r"^t: server\.optimizer\.learning_rate: is req"),
        ({"protection": {"seen": 1}}, r"^t: protection\.seen: no such key; known here: name$"),
        (
            {"data": {"name": "three-blobs"}},
            r"no data set 'three-blobs'; there are: .*two-blobs \(of fedveil-ex",
        ),
        (
            {
                "method": {"name": "fedavg", "clip": None, "noise_multiplier": None},
                "sampler": None,
                "local": {},
            },
            r"coarse rounds silos' shares of a noise, and this method has none",
        ),
        (
            {"channel": {"name": "lrsuq", "digits": None}},
            r"witnessed sums are those of silos that send numbers",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_the_keys_path(
    installed: None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(parse(experiment(**changes), "t"))


def test_a_stage_without_claims_is_refused(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module("channel").Coarse, "claims")
    with pytest.raises(CompositionError, match=r"Coarse, given as channel, does not define claims\(\)"):
        prepare(parse(DOCUMENT, "t"))


def test_a_silo_runs_it_only_if_its_policy_names_the_package(installed: None) -> None:
    policy = Policy(epsilon=1.0, clip=1.0)
    with pytest.raises(
        RefusalError, match="comes from the package fedveil-example; this silo allows: fedveil"
    ):
        policy.check_packages(DOCUMENT, {})
    policy.model_copy(update={"packages": ("fedveil-example",)}).check_packages(
        DOCUMENT, {"fedveil-example": "0.1"}
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not find_spec("hatchling"), reason="building a package here needs its backend: pip install hatchling"
)
def test_pip_installs_it_into_a_folder_of_its_own(tmp_path: Path) -> None:
    """As ``installed`` does it for the other tests, by pip itself, which builds the package first."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    copytree(EXAMPLE, tmp_path / "plugin")
    subprocess.run(
        [*command, "--no-build-isolation", "--target", str(site), str(tmp_path / "plugin")], check=True
    )
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from fedveil.registry import find\n"
        "print(find('channels', 'coarse').load().__name__)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert told.stdout.strip() == "Coarse"

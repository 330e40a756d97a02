"""The page docs/architecture.md against the source: files exist, and a record passes through the modules it names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import fedveil
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import prepare
from fedveil.run.simulation import SimulatedParties, play_round
from tests.federation_world import World, asked, population
from tests.source import parsed

ROOT = Path(__file__).parents[1]
SOURCE = Path(fedveil.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()

ASKED = {
    "name": "path",
    "rounds": 1,
    "data": {"name": "digits", "n_users": 6, "n_silos": 2},
    "model": {"name": "linear"},
    "local": {"learning_rate": 0.1},
    "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 5.0},
}


def test_every_file_and_package_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml))`", PAGE))
    packages = set(re.findall(r"`([a-z]+)/`", PAGE))
    assert len(named) > 20
    assert len(packages) > 10
    places = (SOURCE, ROOT, ROOT / "docs")
    assert {one for one in named if not any((place / one).is_file() for place in places)} == set()
    assert {one for one in packages if not any((place / one).is_dir() for place in places)} == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_what_a_page_names_of_a_file_is_in_it(page: Path) -> None:
    """`package/file.py` exists, and with (`Class.name`, ...) behind it defines them."""
    pattern = r"`((?:[a-z_]+/)+[a-z_]+\.py)`(?:\s*\(((?:`[\w.]+`(?:, )?)+)\))?"
    for file, names in re.findall(pattern, page.read_text()):
        place = SOURCE / file if (SOURCE / file).is_file() else ROOT / file
        defined = set(re.findall(r"^\s*(?:def |class )?(\w+)\b", place.read_text(), re.MULTILINE))
        assert {name.rpartition(".")[2] for name in re.findall(r"[\w.]+", names)} <= defined, file


def test_every_stop_of_the_code_tour_is_where_the_tour_says() -> None:
    stops = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "code-tour.md").read_text())
    assert len(stops) > 20
    defined = {file: {getattr(one, "name", "") for one in parsed(SOURCE / file).body} for file, _ in stops}
    assert [(file, name) for file, name in stops if name not in defined[file]] == []


def test_every_package_is_on_the_page() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert {one for one in packages if f"`{one}/`" not in PAGE} == set()


class Watch:
    """Notes every call that hands a record's part of the sum on, with the calls of the package that are open then."""

    def __init__(self) -> None:
        self.stacks: list[list[tuple[str, str]]] = []

    def __enter__(self) -> list[list[tuple[str, str]]]:
        sys.setprofile(self._note)
        return self.stacks

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _is_station(frame):
            self.stacks.append(_above(frame))


@pytest.fixture(scope="module")
def record_path() -> tuple[set[str], int]:
    """The modules that hand a record's part of the sum on, and the calls open around its training."""
    prepared = prepare(parse(ASKED, "test"))
    parties = SimulatedParties.in_the_open(prepared.setting)
    turn = RoundContext(
        setting=prepared.setting,
        model=prepared.task.initial(),
        round_number=1,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.insecure(1),
    )
    with Watch() as stacks:
        play_round(turn, parties)
    around = [len(stack) - 2 for stack in stacks if stack[-1][1].endswith("Trainer.sums")]
    return {module for stack in stacks for module, _ in stack}, max(
        around
    )  # but for the round and the trainer


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The same modules between institutions, whose messages are handed over without a transport."""
    world = World(tmp_path_factory.mktemp("between") / "run", asked(rounds=1), population(silos=2))
    with Watch() as stacks:
        world.play()
    return {module for stack in stacks for module, _ in stack}


def _module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


def _is_station(frame: FrameType) -> bool:
    """Training, the noise, a message, the sum, and the server's step."""
    module, name = _module(frame), frame.f_code.co_name
    if module is None:
        return False
    return (
        (module.startswith("training/") and name == "sums")
        or (module.startswith("methods/") and name == "send")
        or (module.startswith("protocols/") and name == "result")
        or (module == "training/server/optimizers.py" and name == "step")
        or (module == "federation/signed_message.py" and name == "seal")
    )


_BEGINS = ("play_round", "CoordinatorParty.receive", "SiloParty.receive")
"""What a part of a round begins with: where the run is opened, and silos are asked who is there, no record is."""


def _above(frame: FrameType) -> list[tuple[str, str]]:
    """The calls of the package from the round down to a frame."""
    found: list[tuple[str, str]] = []
    at: FrameType | None = frame
    while at is not None:
        if (module := _module(at)) is not None:
            found.append((module, at.f_code.co_qualname))
            if at.f_code.co_qualname in _BEGINS:
                return found[::-1]
        at = at.f_back
    return []


def test_a_record_passes_through_the_modules_that_the_page_names(record_path: tuple[set[str], int]) -> None:
    modules, wrappers = record_path
    stated = re.search(r"(\d+) modules and (\d+) wrappers", PAGE)
    assert stated is not None
    assert (len(modules), wrappers) == (int(stated[1]), int(stated[2])), sorted(modules)
    for module in modules:
        assert f"`{module}`" in PAGE, "name every module that a record passes through"


def test_between_institutions_a_record_passes_through_the_named_modules(between: set[str]) -> None:
    stated = re.search(
        r"another (\d+) modules and (\d+) of\s+transport: (\d+) hops.*?(?=\n\n)", PAGE, re.DOTALL
    )
    assert stated is not None
    transport = set(re.findall(r"`(federation/(?:hosts|transport)/[\w/]+\.py)`", stated[0]))
    assert (len(between), len(transport)) == (int(stated[1]), int(stated[2])), sorted(between)
    assert len(between) + len(transport) == int(stated[3])
    for module in between:
        assert f"`{module}`" in PAGE, "name every module that a record passes through"

"""Members by name: the built-in ones, those of installed packages, and what is refused of both."""

from __future__ import annotations

import pickle
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from fedveil.cli import lists
from fedveil.config_keys import REQUIRED, Count, Fraction, Share, check_ranges, composed_field, keys_of
from fedveil.data.catalogue import catalogue
from fedveil.errors import CompositionError, ConfigError
from fedveil.federation.audit.recorded_run import verify_run
from fedveil.federation.audit.run_record import signed_end
from fedveil.federation.policy import Policy
from fedveil.methods.method import Method, variant_of
from fedveil.methods.uldp import uldp_avg
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import SessionMessage, Terms
from fedveil.reference import entries, page
from fedveil.registry import BUILTINS, KINDS, Member, describe_names, find, names
from fedveil.run.config.choice import Choice, ChoiceField, own_keys
from fedveil.run.config.experiment import asked_for, parse
from fedveil.run.setup import prepare
from fedveil.training.steps import LocalSgd
from tests.federation_world import TESTING, World, asked, population
from tests.plugins import Install, installing

ROOT = Path(__file__).resolve().parents[1]
BASE: dict[str, Any] = {
    "name": "try",
    "rounds": 1,
    "data": {"name": "digits", "n_users": 20},
    "local": {"learning_rate": 0.1},
    "method": {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0},
}
SHARP = '''
from dataclasses import dataclass, replace
from fedveil.training.server.denoise import Denoiser
@dataclass(frozen=True, kw_only=True)
class Sharp(Denoiser):
    """Does nothing."""
    needs_noise_std = False
    def estimate(self, noisy, noise_std, shapes):
        return noisy
'''


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    with installing(tmp_path) as one:
        yield one


def denoised(name: str, **keys: Any) -> dict[str, Any]:
    return BASE | {"server": {"denoiser": {"name": name, **keys}}}


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_member_loads_and_says_what_it_does(kind: str) -> None:
    assert [one.name for one in entries(kind)][: len(BUILTINS[kind])] == list(names(kind))
    for one in entries(kind):
        assert len(one.summary) > 10, one.name
        assert all(key.meaning for key in one.keys), one.name


def test_every_member_is_written_and_read_back_equal() -> None:
    given = {"clip": 1.5, "noise_multiplier": 2.0, "group_size": 3, "smoothing": 0.5, "step": 0.25}
    given |= {"sample": 3}
    for kind in KINDS.keys() - {"data_sets", "executors"}:
        for name in names(kind):
            needed = {key.name for key in own_keys(find(kind, name).load()) if key.default is REQUIRED}
            choice = ChoiceField(kind).read({"name": name, **{key: given.get(key, 0.5) for key in needed}})
            assert ChoiceField(kind).read(choice.document()) == choice
            assert pickle.loads(pickle.dumps(choice)) == choice


def test_a_document_that_was_written_has_every_default() -> None:
    written = tomllib.loads(parse(BASE, "test").to_toml())
    assert parse(written, "again") == parse(BASE, "test")
    assert written["method"]["user_sampling_rate"] == 1.0
    assert written["protection"] == {"name": "none"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": {"denoiser": "laplacian"}}, r"^t: server\.denoiser: must be a table with a name"),
        ({"server": {"denoiser": {"smoothing": 1.0}}}, r"^t: server\.denoiser\.name: is required$"),
        (
            {"server": {"denoiser": {"nam": "laplacian", "smothing": 1.0}}},
            r"^t: server\.denoiser\.name: is required; "
            r"server\.denoiser\.nam: no such key in any denoiser of fedveil; did you mean 'name'\?; "
            r"server\.denoiser\.smothing: no such key in any denoiser of fedveil; did you mean 'smoothing'\?$",
        ),
        (
            {"method": {"name": None, "nam": "fedavg", "noise_multiplier": 1}},
            r"^t: method\.name: is required; method\.nam: no such key in any method of fedveil; "
            r"did you mean 'name'\?$",
        ),
        (
            {"server": {"denoiser": {"name": "laplacian", "smoothing": -1}}},
            r"^t: server\.denoiser\.smoothing: must be >= 0, not -1$",
        ),
        (
            {"server": {"denoiser": {"name": "none", "smoothing": 1}}},
            r"^t: server\.denoiser\.smoothing: no such key; known here: name; it belongs to name = 'laplacian'",
        ),
        (
            {"server": {"denoiser": {"name": "median"}}},
            r"server\.denoiser\.name: no denoiser 'median'; there are: none, by-rule, laplacian.* \(of fedveil\)$",
        ),
        (
            {"protection": {"name": "partial-encryption", "clip": "parts"}},
            r"^t: protection\.clip: no such key",
        ),
        (
            {"protection": {"name": "partial-encryption", "he_noise": 1.0}},
            r"^t: protection: he_noise buys no guarantee",
        ),
        ({"channel": {"name": "lrsuq", "lattice": "Z9"}}, r"^t: channel\.lattice: must be 'Z1'"),
        (
            {"method": {"name": "uldp-avg", "clip": 1e40, "noise_multiplier": 1}},
            r"^t: method\.clip: clip norm",
        ),
        ({"method": BASE["method"] | {"local": 3}}, r"^t: method\.local: no such key"),
    ],
)
def test_a_wrong_key_of_a_stage_is_named_by_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(BASE | changes, "t")


def test_ranges_hold_for_stages_built_in_python() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Stage:
        """One.

        Attributes:
            share: of something,
                in words.
        """

        share: Fraction = 0.5
        inside: Annotated[int, composed_field()] = 0

    (share, inside) = keys_of(Stage)
    assert (share.meaning, share.default, inside.filled) == ("of something, in words.", 0.5, True)
    check_ranges(Stage(share=1.0))
    for wrong in (1.02, 0.0, float("nan")):
        with pytest.raises(CompositionError, match=r"share = .*: a finite number > 0 and <= 1 is needed"):
            check_ranges(Stage(share=wrong))


def test_whole_numbers_of_stages_built_in_python_are_whole() -> None:
    """A group of 1.5 records would be accounted as such, where two are kept."""

    @dataclass(frozen=True, kw_only=True)
    class Stage:
        records: Count

    for right in (2, np.int64(2)):
        check_ranges(Stage(records=right))
    for wrong in (1.5, 2.0, np.float64(2.0), True):
        with pytest.raises(CompositionError, match=r"records = .*: a whole number >= 1 is needed"):
            check_ranges(Stage(records=wrong))  # type: ignore[arg-type]


def test_a_variant_has_the_keys_of_the_method_that_it_varies_and_its_own_before_what_has_a_default() -> None:
    @variant_of(uldp_avg)
    def falling(plain: Method, *, least: Share, noise_decay: Fraction = 0.5) -> Method:
        """Falls."""
        return replace(plain, name=f"falling to {least}", noise_decay=noise_decay)

    theirs, ours = list(keys_of(uldp_avg)), list(keys_of(falling))
    assert [key.name for key in ours] == [
        *(key.name for key in theirs if key.default is REQUIRED),
        *("least", "noise_decay"),
        *(key.name for key in theirs if key.default is not REQUIRED),
    ]
    assert [key for key in ours if key.name not in ("least", "noise_decay")] == theirs
    given = {"local": LocalSgd(learning_rate=0.1, epochs=1), "clip": 0.5, "noise_multiplier": 5.0}
    method = falling(**given, least=0.25)
    assert (method.name, method.noise_decay) == ("falling to 0.25", 0.5)
    assert replace(method, name="uldp-avg", noise_decay=1.0) == uldp_avg(**given)


def test_a_member_of_a_package_is_listed_without_its_code_and_used_by_name(install: Install) -> None:
    install("fv-sharp", {"denoisers": {"sharp": "fv_sharp:Sharp"}}, {"fv_sharp": SHARP})
    assert "sharp (of fv-sharp)" in describe_names("denoisers")
    assert "fv_sharp" not in sys.modules
    assert asked_for(denoised("sharp"))["server.denoiser.name"] == ("denoisers", "sharp")
    assert "fv_sharp" not in sys.modules
    denoiser = parse(denoised("sharp"), "t").server.denoiser
    assert denoiser == Choice("denoisers", "sharp")
    assert "fv_sharp" in sys.modules
    with pytest.raises(ConfigError, match=r"server\.denoiser\.blade: no such key; known here: name"):
        parse(denoised("sharp", blade=1), "t")


def test_a_name_that_two_packages_bring_is_refused_with_both(install: Install) -> None:
    install("fv-one", {"denoisers": {"sharp": "fv_one:Sharp"}}, {"fv_one": SHARP})
    install("fv-two", {"denoisers": {"sharp": "fv_two:Sharp"}}, {"fv_two": SHARP})
    install("fv-three", {"denoisers": {"laplacian": "fv_three:Sharp"}}, {"fv_three": SHARP})
    with pytest.raises(ConfigError, match=r"name: denoiser 'sharp' is brought by fv-one .* and fv-two"):
        parse(denoised("sharp"), "t")
    with pytest.raises(ConfigError, match=r"'laplacian' is brought by fedveil \(.*\) and fv-three"):
        parse(denoised("laplacian"), "t")
    assert not {"fv_one", "fv_two", "fv_three"} & set(sys.modules)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module_of_anybody", "ModuleNotFoundError: No module named"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("x = 1", "AttributeError"),
        ("raise ValueError('\\x1b[2Jgone')", r"ValueError: .\[2Jgone"),
    ],
)
def test_a_package_that_fails_to_import_is_named_and_breaks_nothing_else(
    install: Install, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    brought = {kind: {"broken": "fv_broken:Broken"} for kind in KINDS}
    install("fv-broken", brought, {"fv_broken": code})
    with pytest.raises(
        ConfigError, match=rf"denoiser 'broken' of the package fv-broken cannot be .*{message}"
    ):
        parse(denoised("broken"), "t")
    assert parse(denoised("laplacian"), "t").server.denoiser is not None
    assert "smoothing" in ChoiceField("denoisers").known_keys()
    assert {one.name: one for one in catalogue()}["broken"].package == "fv-broken"
    lists.methods_command(as_json=True)
    lists.stages_command(as_json=True)
    told = capsys.readouterr().out
    assert told.count("of the package fv-broken cannot be loaded") == len(KINDS) - 1
    assert "\x1b" not in told
    assert "fv-broken" not in page(), "the reference lists built-in members alone"


def test_a_silo_joins_no_run_that_another_version_of_a_package_was_composed_for(
    install: Install, tmp_path: Path
) -> None:
    """Nothing is charged; and what the run was composed with is in the terms that all parties sign."""
    install("fv-sharp", {"denoisers": {"sharp": "fv_sharp:Sharp"}}, {"fv_sharp": SHARP})
    policy = TESTING.model_copy(update={"packages": ("fv-sharp",)})
    secure = asked(rounds=1, server={"denoiser": {"name": "sharp"}}, privacy={"insecure_seed": None})
    world = World(tmp_path, secure, population(), policy)
    named = '"packages":{"fv-sharp":"0.1"},'
    for other in (
        "",
        '"packages":{"fv-sharp":"0.1.1"},',
        '"packages":{"fv-sharp":"0.1","more":"1"},',
        '"packages":7,',
    ):

        def lie(
            silo: int, parts: tuple[SessionMessage, ...], other: str = other
        ) -> tuple[SessionMessage, ...]:
            first, *rest = parts
            if silo != 1 or not isinstance(first, Terms):
                return parts
            assert named in first.experiment
            return replace(first, experiment=first.experiment.replace(named, other)), *rest

        world.lie = lie
        world.play()
        assert world.coordinator is not None
        assert world.coordinator.refused is Code.VERSION
        assert [one._ledger.charges for one in world.silos if one is not None] == [0, 0, 0]
        world.coordinator.close()
    world.lie = None
    world.play()
    found = verify_run(world.run_folder.path)
    assert found.holds
    assert len(signed_end(world.run_folder.path)) == 3
    with pytest.MonkeyPatch.context() as patched:  # whoever checks later may have another version
        patched.setattr(Member, "version", "0.2")
        assert verify_run(world.run_folder.path).holds
    world.close()


def test_a_silo_loads_a_package_only_if_its_policy_names_it(install: Install) -> None:
    kinds = {"denoisers": {"sharp": "fv_sharp:Sharp"}, "data_sets": {"odd": "fv_sharp:Sharp"}}
    install("fv-sharp", kinds, {"fv_sharp": SHARP})
    policy = Policy(epsilon=1.0, clip=1.0)
    odd = BASE | {"data": {"name": "odd", "n_users": 1}}
    for document, key in ((denoised("sharp"), "server.denoiser.name"), (odd, "data.name")):
        with pytest.raises(
            RefusalError, match=rf"{key} = .* comes from the package fv-sharp; this silo allows: fed"
        ):
            policy.check_packages(document, {})
    with pytest.raises(RefusalError, match="no method 'nobodys'"):
        policy.check_packages(BASE | {"method": {"name": "nobodys"}}, {})
    assert "fv_sharp" not in sys.modules
    policy.check_packages(BASE, {})
    policy.model_copy(update={"packages": ("fv-sharp",)}).check_packages(
        denoised("sharp"), {"fv-sharp": "0.1"}
    )
    assert "fv_sharp" not in sys.modules


def test_a_member_that_makes_no_method_or_protection_is_refused_by_name(install: Install) -> None:
    """Of the others every method asks for their duties: tests/test_refusals.py."""
    kinds = {kind: {"odd": "fv_odd:odd"} for kind in ("methods", "protections")}
    install("fv-odd", kinds, {"fv_odd": "def odd(): return 'a stage'"})
    odd = {key: value for key, value in BASE.items() if key != "local"} | {"method": {"name": "odd"}}
    for document, message in (
        (odd, "method 'odd' builds no method: str"),
        (BASE | {"protection": {"name": "odd"}}, "protection 'odd' makes no protection: str"),
    ):
        with pytest.raises(CompositionError, match=message):
            prepare(parse(document, "t"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("odd = 3", "denoiser 'odd' of the package fv-odd is no class or function"),
        ("def odd(*, name: str): ...", "a key of its own is called 'name', which is taken"),
        ("def odd(*, x: type(len)): ...", "denoiser 'odd': a key that no document can give"),
        ("def odd(*, x: 'Nowhere'): ...", "denoiser 'odd' of the package fv-odd is no class or function"),
    ],
)
def test_a_member_whose_keys_cannot_be_read_is_refused(install: Install, code: str, message: str) -> None:
    install("fv-odd", {"denoisers": {"odd": "fv_odd:odd"}}, {"fv_odd": code})
    with pytest.raises(ConfigError, match=message):
        parse(denoised("odd"), "t")
    assert [one.name for one in entries("denoisers")][-1] == "odd"  # the list of all members shows it


def test_what_composition_does_not_have_is_named(install: Install) -> None:
    code = "from fedveil.methods.keys import Silos\ndef wide(*, moon: Silos): ..."
    install("fv-wide", {"channels": {"wide": "fv_wide:wide"}}, {"fv_wide": code})
    choice = ChoiceField("channels").read({"name": "wide"})
    with pytest.raises(ConfigError, match=r"channel 'wide' needs 'moon'.*filled in here: method"):
        choice.build({"method": 1})


def test_kinds_are_listed_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    lists.stages_command("protections", as_json=True)
    told = capsys.readouterr().out
    assert '"private-weighting"' in told
    assert '"laplacian"' not in told
    with pytest.raises(ConfigError, match="no kind of stage 'methods'; there are: channels"):
        lists.stages_command("methods")


_: Callable[..., Any] = parse

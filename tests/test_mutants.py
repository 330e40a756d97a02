"""The list of changes that tests must notice is in step with the source; ``make mutants`` plays them."""

import builtins
import re
import symtable

import pytest

from tests.mutants import PAGE, ROOT, Mutant, read, tokens_of
from tests.mutants.player import HEAD, Result, rewritten, row_of, tried

MUTANTS = read()


def undefined_names(text: str) -> set[str]:
    """Return the names that a module uses and nobody defines: a change that fails for them is no change of meaning."""
    module = symtable.symtable(text, "module", "exec")
    defined = {name.get_name() for name in module.get_symbols() if name.is_assigned() or name.is_imported()}
    defined |= set(dir(builtins)) | {"__file__", "__name__", "__doc__", "__path__"}
    tables, used = [module], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {name.get_name() for name in table.get_symbols() if name.is_global() and name.is_referenced()}
    return used - defined


def test_every_change_finds_its_pattern_exactly_once() -> None:
    for mutant in sorted(MUTANTS, key=lambda mutant: mutant.file):
        text = (ROOT / "src" / "fedveil" / mutant.file).read_text(encoding="utf-8")
        assert not undefined_names(mutant.applied(text)), mutant.name
        pattern, replacement = tokens_of(mutant.pattern), tokens_of(mutant.replacement)
        assert [token[0] for token in pattern] != [token[0] for token in replacement], mutant.name


def test_every_change_has_a_name_and_tests_of_its_own_choice() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    for mutant in MUTANTS:
        assert mutant.tests
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (
                f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
                if name
                else (ROOT / file).is_file()
            )


def test_every_room_that_guards_a_guarantee_is_changed_somewhere() -> None:
    packages = {mutant.file.rpartition("/")[0] for mutant in MUTANTS}
    assert packages >= {
        "privacy",
        "crypto",
        "protocols",
        "quantization",
        "methods",
        "run",
        "federation",
        "training",
    }


def test_the_page_has_every_change_and_no_survivor() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.partition(HEAD)[2].splitlines()]
    assert [row[0].removeprefix("| ") for row in rows] == [mutant.name for mutant in MUTANTS]
    assert [row[1].strip("`") for row in rows] == [mutant.file for mutant in MUTANTS]
    assert "SURVIVED" not in page


SOURCE = """# größer
LIMITS = {"low": 1}


class Box:
    @property
    def size(self) -> int:
        return keep(self, 2)

    @size.setter
    def size(self, value: int) -> None:
        if value < 2:  # too small
            raise ValueError(
                "too small",
            )
        keep(self, 2)


def size(a):
    return keep(a, 2)
"""


def mutant(place: str, pattern: str, replacement: str = "pass") -> Mutant:
    """Return a change of a file of this name."""
    return Mutant(name="any", source=f"x.py{place}", pattern=pattern, replacement=replacement, tests=())


@pytest.mark.parametrize(
    ("place", "pattern", "replacement", "before", "after"),
    [
        ("::size", "keep(a, 2)", "a", "keep(a, 2)", "a"),
        ("::Box.size", "return keep(self, 2)", "return 1", "return keep(self, 2)", "return 1"),
        ("::LIMITS", '"low":1', '"low": 0', '"low": 1', '"low": 0'),
        ("", "class Box:", "class Other:", "class Box:", "class Other:"),
        (
            "::Box.size",
            'if value < 2:\n    raise ValueError("too small")',
            "if value < 1:\n    raise ValueError",
            'if value < 2:  # too small\n            raise ValueError(\n                "too small",\n            )',
            "if value < 1:\n            raise ValueError",
        ),
    ],
)
def test_a_change_is_made_where_it_says_in_any_layout(
    place: str, pattern: str, replacement: str, before: str, after: str
) -> None:
    assert SOURCE.count(before) == 1
    assert mutant(place, pattern, replacement).applied(SOURCE) == SOURCE.replace(before, after)


@pytest.mark.parametrize(
    ("place", "pattern", "times"),
    [
        ("::Box", "keep(self, 2)", 2),
        ("", "keep(self, 2)", 2),
        ("::size", "keep(self, 2)", 0),
        ("::keep", "keep", 0),
        ("::Box.size", "value <= 2", 0),
    ],
)
def test_a_change_that_does_not_find_its_pattern_once_is_an_error(
    place: str, pattern: str, times: int
) -> None:
    message = f"any: x.py{place} has {times} times, and not once: '{pattern}'"
    with pytest.raises(ValueError, match=re.escape(message)):
        mutant(place, pattern).applied(SOURCE)


def test_rows_are_made_anew_in_the_order_of_the_list() -> None:
    one, two = MUTANTS[:2]
    noticed, survived = (
        Result(code=1, failed="tests/test_a.py::b[c|d]", seconds=2.5),
        Result(code=0, failed="", seconds=9),
    )
    page = rewritten(
        f"Above.\n\n{HEAD}{row_of(two, survived)}\n| gone | `x` | `y` | 1 |\n",
        {one.name: row_of(one, noticed)},
        MUTANTS,
    )
    assert page.startswith(
        f"Above.\n\n{HEAD}| {one.name} | `{one.file}` | `test_a.py::b[c\\|d]` | 2 |\n| {two.name} |"
    )
    assert page.endswith("| **SURVIVED** | 9 |\n")


@pytest.mark.slow
def test_a_change_is_played_and_noticed_and_another_is_not() -> None:
    noticed = next(mutant for mutant in MUTANTS if mutant.name == "a fixed nonce")
    result = tried(noticed, noticed.tests)
    assert result.code == 1
    assert result.failed.startswith("tests/test_crypto_keys.py::")
    harmless = Mutant(
        name="none",
        source="crypto/key_agreement.py",
        pattern='"a sealed message does not authenticate: wrong key or altered"',
        replacement='"altered"',
        tests=(),
    )
    assert tried(harmless, ("tests/test_randomness.py",)).code == 0
    with pytest.raises(SystemExit, match="no answer"):
        tried(harmless, ("tests/no_such_file.py",))

"""The list of changes that tests must notice is in step with the source; ``make mutants`` plays them."""

import ast

import pytest

from tests.mutants import PAGE, ROOT, Mutant, read
from tests.mutants.player import HEAD, Result, rewritten, row_of, tried

MUTANTS = read()


def test_every_change_finds_its_line_exactly_once() -> None:
    for mutant in MUTANTS:
        changed = mutant.applied((ROOT / "src" / "fedveil" / mutant.file).read_text(encoding="utf-8"))
        ast.parse(changed)
        assert mutant.text != mutant.replacement, mutant.name


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
    rooms = {mutant.file.rpartition("/")[0] for mutant in MUTANTS}
    assert rooms >= {
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


@pytest.mark.parametrize("source", ["nothing here", "a line, and a line"])
def test_a_change_that_does_not_find_its_line_once_is_an_error(source: str) -> None:
    mutant = Mutant(name="any", file="x.py", text="a line", replacement="", tests=())
    with pytest.raises(ValueError, match=r"any: x\.py has \d times, and not once: 'a line'"):
        mutant.applied(source)


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
        name="none", file="crypto/aead.py", text="wrong key or altered", replacement="altered", tests=()
    )
    assert tried(harmless, ("tests/test_randomness.py",)).code == 0
    with pytest.raises(SystemExit, match="no answer"):
        tried(harmless, ("tests/no_such_file.py",))

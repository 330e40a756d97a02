"""The list of users between institutions: all silos have the one that the schema names, or there is no run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedveil.crypto.keys import IdentityKey
from fedveil.data.main_silos import read_salted
from fedveil.data.schema import Schema, read_schema
from fedveil.errors import DataError
from fedveil.federation.membership import Membership
from fedveil.federation.silo_data import (
    LocalPopulation,
    SiloFiles,
    load_public_test_table,
    load_silo_population,
)
from tests.list_of_users import SALT, write_list

SCHEMA = """
n_users = 4
user = "who"
[target]
kind = "label"
column = "y"
classes = ["0", "1"]
[features]
x = { kind = "number", lower = 0, upper = 1 }
"""
IDS = ("P-1", "Q,2", "R 3")


class Silos:
    """Two silos that hold records of P-1, each with a list of users of its own.

    Args:
        folder: where files are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keys = [IdentityKey.generate().public for _ in range(3)]
        self.membership = Membership(
            silos=("north", "south"), roster=tuple(keys[:2]), coordinator=keys[2], schema_digest=bytes(32)
        )
        (folder / "schema.toml").write_text(SCHEMA)
        (folder / "north.csv").write_text("who,x,y\nP-1,1,1\nR 3,0,0\n")
        (folder / "south.csv").write_text('who,x,y\n"Q,2",1,1\nP-1,0,0\n')
        self.agreed = write_list(folder / "users.txt", IDS)

    def schema(self, users: str | None) -> Schema:
        """The schema that names a list."""
        return read_schema(self.folder / "schema.toml").model_copy(update={"users": users})

    def share(self, number: int, users: str | None, listed: str | None) -> LocalPopulation:
        """What a silo reads by a schema that names a list, with a list of its own."""
        table = self.folder / f"{self.membership.silos[number]}.csv"
        path = None if listed is None else self.folder / listed
        return load_silo_population(self.schema(users), SiloFiles(table, path), self.membership, number)


@pytest.fixture
def silos(tmp_path: Path) -> Silos:
    return Silos(tmp_path)


def test_one_list_gives_an_id_one_number_in_all_silos_and_statements_name_it(silos: Silos) -> None:
    north, south = (silos.share(number, silos.agreed, "users.txt") for number in range(2))
    assert north.train.user.tolist() == [0, 2]
    assert south.train.user.tolist() == [1, 0]
    coordinator = load_public_test_table(silos.schema(silos.agreed), None, silos.membership).load_population()
    assert north.notes == south.notes == coordinator.notes
    assert any(f"one list of ids (sha256 {silos.agreed})" in note for note in north.notes)


def test_ids_that_are_numbers_need_no_list_and_statements_say_what_that_rests_on(silos: Silos) -> None:
    (silos.folder / "north.csv").write_text("who,x,y\n3,1,1\n0,0,0\n")
    share = silos.share(0, None, None)
    assert np.array_equal(share.train.user, [3, 0])
    assert any("a user's id is the user's number" in note and "nobody checks" in note for note in share.notes)


@pytest.mark.parametrize(
    ("named", "ids", "reason"),
    [
        (True, ("Q,2", "P-1", "R 3"), "a list of users with the sha256"),
        (True, (*IDS, "S"), "a list of users with the sha256"),
        (True, None, "name that file"),
        (False, IDS, "and the schema names none"),
    ],
    ids=["another order", "another version", "no list", "not asked for"],
)
def test_another_list_or_none_is_refused_without_an_id(
    silos: Silos, named: bool, ids: tuple[str, ...] | None, reason: str
) -> None:
    if ids is not None:
        write_list(silos.folder / "own.txt", ids)
    with pytest.raises(DataError, match=reason) as refused:
        silos.share(1, silos.agreed if named else None, None if ids is None else "own.txt")
    assert not any(one in str(refused.value) for one in IDS)


def test_lines_end_at_line_feeds_alone_and_no_line_has_another_mark_of_an_end(tmp_path: Path) -> None:
    """What programs take for a line's end apart would give the ids after it other numbers."""
    path = tmp_path / "users.txt"
    path.write_bytes(f"{SALT}\nA B\nÄ-1\n".encode())
    assert read_salted(path).lines == ("A B", "Ä-1")
    path.write_bytes(f"{SALT}\nA\nB".encode())
    assert read_salted(path).lines == ("A", "B")
    for mark in "\r\t\x00\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029":
        path.write_bytes(f"{SALT}\nA\nB{mark}C\n".encode())
        with pytest.raises(DataError, match="line 3 has a control character") as refused:
            read_salted(path)
        assert "B" not in str(refused.value).replace(str(path), "")
    for first in ("", "A", SALT[:-1], f"{SALT}\r"):
        path.write_bytes(f"{first}\nA\n".encode())
        with pytest.raises(DataError, match="line 1 is not 64 hexadecimal digits"):
            read_salted(path)

"""Ids that a person takes for one, and a program for two, are found before a run."""

import json
from pathlib import Path

import pytest

from fedveil.data.data_report import data_report
from fedveil.data.identities import near_duplicate_ids
from fedveil.data.schema import Schema

SAME = (
    ("a1", "a\u200b1"),
    ("a1", "\ufeffa1"),
    ("a1", "a\u00ad1"),
    ("a1", "a\u20601"),
    ("a1", "\u202aa1\u202c"),
    ("a1", "a\ufe0f1"),
    ("a-1", "a\u20101"),
    ("a-1", "a\u20111"),
    ("a-1", "a\u20121"),
    ("a-1", "a\u20131"),
    ("a-1", "a\u20141"),
    ("a-1", "a\u22121"),
    ("a 1", "a\u00a01"),
    ("a 1", "a\u20091"),
    ("O'Brien", "O\u2019Brien"),
    ("O'Brien", "O\u2018Brien"),
    ("O'Brien", "O\u02bcBrien"),
    ("O'Brien", "O\u00b4Brien"),
    ("O'Brien", "O`Brien"),
    ("O'Brien", "OBRIEN"),
    ("17", "'17"),
    ("17", "\u201917"),
    ("17", '"17"'),
    ("17", "\u201c17\u201d"),
    ("17", "\u0661\u0667"),
    ("1000", "1,000"),
    ("1000", "1'000"),
    ("1000", "1\u202f000"),
    ("1234567", "1,234,567.0"),
    ("1000", "1E+03"),
    ("1000", "1e3"),
    ("1200", "1.2E+03"),
    ("1200", "1,2E+03"),
    ("P-001", "p1"),
    ("P001", "P1"),
    ("0-1", "1"),
    ("A17", "\u041017"),  # a Cyrillic message
    ("caf\u00e9", "cafe\u0301"),
)
OTHER = (
    ("1.05", "1.5"),
    ("100", "10"),
    ("1E+03", "1E+04"),
    ("1,000", "1,001"),
    ("P10", "P1"),
    ("caf\u00e9", "cafe"),
    ("12E5", "12E6"),
    ("--", "__"),
    ("", "0"),
    ("a+", "a"),
)


@pytest.mark.parametrize(("first", "second"), SAME)
def test_ids_that_look_alike_are_found(first: str, second: str) -> None:
    assert near_duplicate_ids([first, "else", second, "b"]) == [{first, second}]


@pytest.mark.parametrize(("first", "second"), OTHER)
def test_ids_that_differ_are_left_alone(first: str, second: str) -> None:
    assert near_duplicate_ids([first, second]) == []


def test_a_look_at_tables_finds_them_and_names_none(tmp_path: Path) -> None:
    how = Schema.model_validate(
        {
            "n_users": 99,
            "user": "p",
            "target": {"kind": "label", "column": "y", "classes": ["0", "1"]},
            "features": {"x": {"kind": "number", "lower": 0, "upper": 98}},
        }
    )
    north, south = tmp_path / "north.csv", tmp_path / "south.csv"
    for path, ids in (
        (north, ["s3cret-1", "1000", "1.23457E+12"]),
        (south, ["s3cret\u20131", '"1,000"', "4"]),
    ):
        path.write_text("p,y,x\n" + "".join(f"{who},{i % 2},{i}\n" for i, who in enumerate(ids)))
    report = data_report(how, [north, south])
    found = [one.found for one in report.findings if one.bears_on == "guarantee"]
    assert len(found) == 2
    assert "4 ids differ only in how they are written" in found[0]
    assert "may belong to 2" in found[0]
    assert found[1] == "ids in exponent notation, as 1E+12, in which programs round large numbers: 1"
    assert "s3cret" not in json.dumps(report.to_json())

"""What a silo says when it refuses, and the experiment that it reads: codes and canonical text, and nothing else."""

from __future__ import annotations

import ast
import json
import re
import struct
import time
from pathlib import Path

import pytest

import fedveil
from fedveil.errors import BudgetError, ConfigError, OwnRecordsError, ProtocolError, RunFolderError
from fedveil.federation.silo import to_refusal
from fedveil.federation.terms import canonical, read_canonical
from fedveil.federation.transport.interface import LARGEST_EXPERIMENT
from fedveil.protocols.refusals import Code, Refusal, RefusalError
from fedveil.protocols.session_messages import Declined
from fedveil.run.config.experiment import parse
from tests.federation_world import asked

SOURCES = sorted((Path(fedveil.__file__).parent / "federation").rglob("*.py"))


def test_a_refusal_survives_its_bytes_and_has_a_sentence() -> None:
    assert len({code.number for code in Code}) == len(Code)
    for code in Code:
        why = Refusal(code, tuple(float(n) + 0.5 for n in range(len(code.names))))
        assert Declined.decode(Declined(why=why).encode()).why == why
        assert len(Declined(why=why).encode()) == 2 + 8 * len(code.names)
        assert "{" not in why.sentence
        assert why.sentence.isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",  # no such code
        b"\xff\x00",
        bytes([Code.CLIP.number, 0]),  # a number is missing
        bytes([Code.SHAPE.number, 1]) + bytes(8),  # one too many
        bytes([Code.CLIP.number, 1]) + struct.pack(">d", float("nan")),
        bytes([Code.CLIP.number, 1]) + struct.pack(">d", float("-inf")),
        bytes([Code.SHAPE.number, 0]) + b"[/x]\x1b]8;;\xe2\x80\xae",  # a text
        bytes([Code.CLIP.number, 255]) + bytes(8),
    ],
)
def test_what_is_no_refusal_is_none(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Declined.decode(data)


def test_every_code_is_used_and_every_refusal_gives_numbers_alone() -> None:
    """A sentence, a path or a name as one of a code's numbers would travel; ``detail`` does not."""
    used: set[str] = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "Code"
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "RefusalError"
            ):
                assert not any(
                    isinstance(inner, ast.JoinedStr) for given in node.args for inner in ast.walk(given)
                )
    assert used == {code.name for code in Code}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusalError(Code.CLIP, 0.5, detail="/secret/path of user 17"), Code.CLIP),
        (OwnRecordsError("user 17 has 3 records"), Code.OWN_RECORDS),
        (BudgetError("epsilon 0.99 of 1.0 is spent"), Code.ROUND_BUDGET),
        (RunFolderError("/home/silo/state/ledger.jsonl: damaged"), Code.STORAGE),
        (ConfigError("/home/silo/schema.toml: no such key"), Code.EXPERIMENT),
        (ProtocolError("/x \x1b[31m", silo=2), Code.PROTOCOL),
        (KeyError("user 17"), Code.OWN_RECORDS),
        (MemoryError(), Code.OWN_RECORDS),
    ],
)
def test_no_word_of_an_error_travels(error: Exception, code: Code) -> None:
    why = to_refusal(error)
    assert why.code is code
    sent = Declined(why=why).encode()
    assert not re.search(rb"[a-z/\x1b]{2}", sent)
    if not code.names:
        assert sent == bytes([code.number, 0])


def test_an_experiment_has_one_text() -> None:
    experiment = asked(method={"noise_multiplier": 0.1 + 0.2})
    text = canonical(experiment)
    assert parse(read_canonical(text), "again") == experiment
    assert text.isascii()
    document = json.loads(text)
    for other in (
        json.dumps(document),  # blanks
        json.dumps(dict(reversed(document.items())), separators=(",", ":")),
        text.replace("0.30000000000000004", "0.300000000000000044"),
        text.replace('"clip":0.5', '"clip":0.50'),
        text.replace('"learning_rate":0.1', '"learning_rate":1e-1'),
        text.replace('"try"', '"\\u0074ry"'),
        text[:-1] + ',"name":"try"}',  # a key that stands twice
        text + " ",
        "[]",
        "1",
        "null",
        text.replace("0.30000000000000004", "NaN"),
        text.replace("0.30000000000000004", "1e999"),
        text.replace('"rounds":4', f'"rounds":{2**53}'),
        experiment.to_toml(),
        text.replace('"try"', '"\\ud800"'),
    ):
        assert other != text
        with pytest.raises(ConfigError):
            read_canonical(other)


@pytest.mark.parametrize(
    "text",
    [
        '"' + "x" * LARGEST_EXPERIMENT + '"',
        "[" * 60_000,
        "[" * 9 + "]" * 9,
        "[" + "0," * 2000 + "0]",
        '{"a":' * 9 + "0" + "}" * 9,
        "9" * 60_000,
        "[" + "[]," * 15_000 + "[]]",
    ],
    ids=["long", "open", "deep", "many", "tables", "digits", "wide"],
)
def test_a_costly_experiment_is_refused_early(text: str) -> None:
    began = time.process_time()
    with pytest.raises((RefusalError, ConfigError)):
        read_canonical(text)
    assert time.process_time() - began < 1.0  # the limit of any message; these take milliseconds

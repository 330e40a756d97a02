"""Text from outside is data: what is shown of it moves no cursor, opens no link and turns no text round."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints
from xml.etree import ElementTree

import pytest
from rich.table import Table

from fedveil.console import LineObserver, Terminal, observer, rows_table, transposed_table
from fedveil.federation.terms import canonical
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.session_messages import PARTS, Declined, Finalize, Goodbye, Ready, RunPart
from fedveil.report.document import escape
from fedveil.report.drawing import Axis, Mark, Plot, Series, draw
from fedveil.sanitize import LONGEST, sanitize, strip_control_characters
from tests.federation_world import World, asked, population

HOSTILE = {
    "closing tag": "[/]",
    "unknown closing tag": "[/x]",
    "link": "[link=https://example.org]here[/link]",
    "terminal link": "\x1b]8;;https://example.org\x1b\\here\x1b]8;;\x1b\\",
    "eight-bit escape": "\x9b31mred",
    "override": "abc\u202edcba",
    "isolate": "abc\u2066dcba\u2069",
    "zero width": "a\u200bb\ufeff",
    "line separator": "a\u2028b\u2029c",
    "formula": "=cmd()|' /C calc'!A0",
    "line": "one\ntwo\r\x08\x07three",
    "markup": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "emoji code": ":warning:",
    "long": "x" * (1 << 20),
    "long escape": "\x1b[31m" * (1 << 18),
}
ALL = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())


def quiet(shown: str) -> bool:
    """Whether a text does nothing to a terminal but show."""
    return all(character.isprintable() or character == "\n" for character in shown)


def terminal(*, colour: bool) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(file=out, force_terminal=colour, color_system=None, width=100), out


@ALL
def test_a_foreign_text_is_one_quiet_line(text: str) -> None:
    shown = sanitize(text)
    assert len(shown) <= LONGEST
    assert shown.isprintable()
    assert sanitize(shown) == shown
    assert strip_control_characters(strip_control_characters(text)) == strip_control_characters(text)


def test_what_is_printable_stays() -> None:
    assert sanitize("Krankenhaus Zürich, 東京 (é)") == "Krankenhaus Zürich, 東京 (é)"
    assert strip_control_characters("two\nlines\tand more") == "two\nlines\tand more"
    assert sanitize("x" * LONGEST) == "x" * LONGEST
    assert sanitize("x" * (LONGEST + 1)).endswith("x...")


@ALL
@pytest.mark.parametrize("colour", [True, False])
def test_the_terminal_shows_any_text_as_it_stands(text: str, colour: bool) -> None:
    """As a line, in a table's cell, head and title: markup is shown, not read."""
    rows = [{"name": text[:300], text[:50]: 1.0}]
    table = Table(title=text[:300])
    table.add_column(text[:60])
    table.add_row(text[:300])
    for thing in (text[:5000], rows_table(rows, title=text[:300]), transposed_table(rows), table):
        console, out = terminal(colour=colour)
        console.print(thing)
        assert quiet(out.getvalue())
        if text.startswith(("[", ":")):
            assert text[:20].split()[0] in out.getvalue().replace("\n", "")


@ALL
def test_a_progress_bar_shows_any_text_as_it_stands(text: str, tmp_path: Path) -> None:
    console, out = terminal(colour=True)
    experiment = asked().model_copy(update={"name": text[:2000]})
    with observer(console, quiet=False) as shown:
        shown.on_run_start(tmp_path, experiment, 0)
        shown.on_round_end({"round": 1, "test": {text[:100]: 0.5}, "epsilon": 1.0, "seconds": 1.0})  # type: ignore[typeddict-item]
    bare = out.getvalue()
    for own in ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r"):
        bare = bare.replace(own, "")  # of the bar itself
    assert quiet(bare)
    console, out = terminal(colour=False)
    with LineObserver(console) as lines:
        lines.on_run_start(tmp_path, experiment, 0)
    assert quiet(out.getvalue())


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_beside_an_earlier_one_says_that_costs_add_up(finished: bool, tmp_path: Path) -> None:
    """Whoever repeats the command after a kill pays twice; the interrupted run could go on."""
    experiment = asked().model_copy(update={"name": "ward"})
    for name in ("ward", "ward-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiment.toml").touch()
    if finished:
        (tmp_path / "ward" / "privacy.json").touch()
    for colour in (False, True):
        console, out = terminal(colour=colour)
        with observer(console, quiet=False) as shown:
            shown.on_run_start(tmp_path / "ward", experiment, 0)
            assert "adds up" not in out.getvalue()
            shown.on_run_start(tmp_path / "ward-2", experiment, 0)
        said = " ".join(out.getvalue().split())
        assert "what both cost the same people adds up" in said
        assert ("fedveil resume" in said) is not finished


@ALL
def test_a_page_shows_any_text_as_it_stands(text: str) -> None:
    shown = escape(text[:5000])
    assert quiet(shown.replace("\t", " "))
    assert "<" not in shown


@ALL
def test_a_plot_shows_any_text_as_text(text: str) -> None:
    named = text[:5000]
    series = [
        Series(
            name=named,
            mark=mark,
            x=(0.0, 1.0),
            y=(1.0, 2.0),
            low=(0.5, 1.5),
            high=(1.5, 2.5),
            labels=(named, named),
        )
        for mark in get_args(Mark)
    ]
    axis = Axis(title=named, categories=(named, named))
    plot = Plot(title=named, alt=named, caption=named, x=axis, y=Axis(title=named), series=tuple(series))
    shown = draw(plot)
    assert quiet(shown.replace("\t", " ").replace("\n", " "))
    elements = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(shown).iter()}
    assert elements <= {"svg", "line", "text", "path", "circle", "title", "polygon", "rect"}


# --- messages -------------------------------------------------------------------------------------------------


def test_every_text_of_every_part_is_tried() -> None:
    """A new part with a text must be tried here."""
    texts = {
        (kind.__name__, field.name)
        for kind in PARTS.values()
        for field in fields(kind)  # type: ignore[arg-type]
        if "str" in str(field.type)
    }
    assert texts == {("Terms", "experiment"), ("Finalize", "statement"), ("RunPart", "name")}
    assert get_type_hints(Refusal) == {"code": Code, "numbers": tuple[float, ...]}


@ALL
def test_a_statement_of_the_coordinator_is_data_at_a_silo(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused in constant words, and nothing of it is signed or logged."""
    world = World(tmp_path, asked(), population())
    world.tell(world.terms(asked()))
    closing = Finalize(round=0, charges=0, line=bytes(32), statement=json.dumps({"notes": text[:3000]}))
    with caplog.at_level(logging.WARNING, "fedveil"):
        (part,) = world.tell(closing, Goodbye(), number=1)
    assert isinstance(part, Declined)
    assert part.why == Refusal(Code.STATEMENT)
    assert all(quiet(record.getMessage()) for record in caplog.records)
    world.close()


@ALL
def test_the_name_of_a_phase_is_data_at_a_silo(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training run has no releases beside it: whatever is named as one joins no session, and comes back nowhere."""
    world = World(tmp_path, asked(), population())
    with caplog.at_level(logging.WARNING, "fedveil"):
        (part,) = world.tell(world.terms(asked()), RunPart(name=text[:3000], released=()))
    assert isinstance(part, Ready) or (
        isinstance(part, Declined) and part.why.sentence == part.why.code.template
    )
    assert all(quiet(record.getMessage()) for record in caplog.records)
    world.close()


@ALL
def test_an_experiment_of_the_coordinator_is_data_at_a_silo(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a silo refuses of an experiment comes back, and stands in its log, inert."""
    world = World(tmp_path, asked(), population())
    quoted = json.dumps(text[:3000])
    with caplog.at_level(logging.WARNING, "fedveil"):
        for number, document in enumerate(
            (
                text[:3000],
                canonical(asked()).replace('"uldp-avg"', quoted),
                canonical(asked()).replace('"try"', quoted),
                canonical(asked()).replace('"data"', f'{quoted}:1,"data"'),
            )
        ):
            terms = replace(world.terms(asked()), experiment=document)
            (part,) = world.tell(terms, run=bytes([number] * 16))
            assert isinstance(part, Declined)
            assert part.why.sentence == part.why.code.template
    assert len(caplog.records) == 4
    assert all(quiet(record.getMessage()) for record in caplog.records)
    world.close()

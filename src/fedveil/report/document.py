"""A self-contained HTML document: text, tables and plots in one file that never touches the network.

Two walls stand between a hostile name in a run folder and the reader's browser. Every text is escaped by the template
engine where it enters the document, and a Content-Security-Policy in the document allows no request at all and no
script but the two that are shipped here, by their hash. The library that draws travels packed, and is unpacked by the
page.
"""

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as escaped

from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import replace_file, writing
from fedveil.privacy.statement import Statement
from fedveil.report.drawing import Plot, show, show_delta, show_epsilon
from fedveil.run.folder.documents import JsonValue
from fedveil.sanitize import strip_control_characters

_HERE: Final = Path(__file__).parent
EMPTY: Final = Markup()
"""No HTML at all."""
PRIVATE: Final = (
    "Seconds and bytes depend on who takes part and with how many records: no guarantee covers them"
)
"""Stands under every table that has them."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page: `body` is HTML made by the functions below, `lead` a plain sentence above it."""

    identifier: str
    title: str
    body: Markup
    lead: str = ""


def escape(text: object) -> Markup:
    """Text as HTML shows it as it stands, in elements and in quoted attributes."""
    return escaped(strip_control_characters(str(text)))


def join_parts(parts: Sequence[Markup]) -> Markup:
    """Parts of a page, one after the other."""
    return EMPTY.join(parts)


def paragraphs(texts: Sequence[str]) -> Markup:
    """One paragraph for each text."""
    return _part("paragraphs", texts)


def bullets(texts: Sequence[str]) -> Markup:
    """A list with one item for each text; nothing for none."""
    return _part("bullets", texts)


def notice(text: str, *, kind: str) -> Markup:
    """A highlighted remark; `kind` is "error", "warning" or "note"."""
    return _part("notice", text, kind)


def statement_claim(statement: Statement) -> Markup:
    """The claim in one line, and in the statement's own sentences."""
    guaranteed = statement.epsilon is not None
    if guaranteed and statement.has_large_delta:
        said = f"ε = {show_epsilon(statement.epsilon)}, δ = {show_delta(statement.delta)}"
        weak = f"No protection of any one {statement.unit}: δ is not below 1 / {statement.units}, at {said}"
        return _part("claim", weak, "", statement.sentences(), False)
    bound = f"ε = {show_epsilon(statement.epsilon)}, δ = {show_delta(statement.delta)}"
    readers = f"Against readers of the {statement.released}, each {statement.unit} is protected with"
    headline = readers if guaranteed else "No privacy guarantee"
    return _part("claim", headline, bound if guaranteed else "", statement.sentences(), guaranteed)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> Markup:
    """A table of texts; the first cell of each row is its heading. The keyboard can scroll it where it is wide."""
    return _part("table", header, rows, caption)


def parties(statement: Statement) -> Markup:
    """What each party sees, each with its own epsilon; nothing for none."""
    rows = [[one.party, one.sees, show_epsilon(one.epsilon)] for one in statement.trust]
    return (
        table(
            ["party", "sees", "ε against it"],
            rows,
            caption="Who sees what, and what is guaranteed against each",
        )
        if rows
        else EMPTY
    )


def fields(pairs: Sequence[tuple[str, JsonValue]]) -> Markup:
    """Named values of any JSON form, as a description list: lists as lists, objects nested, null as "none"."""
    return _part("fields", pairs)


def source(text: str) -> Markup:
    """A text file, as it stands."""
    return _part("source", text)


def collapsible(summary: str, body: Markup) -> Markup:
    """A part that opens on demand."""
    return _part("folded", summary, body)


def figures(plots: Sequence[Plot], *, wide: bool = False) -> Markup:
    """Plots, side by side where the page has room for two; `wide` plots have a row each."""
    return _part("figures", [(plot, _data(plot)) for plot in plots], wide)


def document(*, title: str, kicker: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page; what draws is in it once, where there is a plot."""
    drawn = any('<div class="plot"' in section.body for section in sections)
    program = _shipped("page.js")
    packed, library = _library()
    return (
        _engine()
        .get_template("page.html")
        .render(
            title=title,
            kicker=kicker,
            lead=lead,
            sections=sections,
            style=_shipped("style.css"),
            policy=_policy([library, program.encode()] if drawn else []),
            packed=packed if drawn else EMPTY,
            program=program,
        )
    )


def refuse_no_page(path: Path) -> None:
    """Refuse a file that is called as no page is.

    Raises:
        ConfigError: another suffix than a page's: the file may be a table or an experiment.
    """
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"{path}: a page is written as .html")


def write_document(path: Path, text: str) -> Path:
    """Write a page whole or not at all.

    Raises:
        ConfigError: another suffix than a page's: the file may be a table or an experiment.
        RunFolderError: the file cannot be written (a full disk, say); an older page stays as it was.
    """
    refuse_no_page(path)
    with writing(path, RunFolderError):
        replace_file(path, text.encode())
    return path


@cache
def _engine() -> Environment:
    engine = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else strip_control_characters(str(value)),
    )
    engine.tests["numeric"] = lambda text: text[:1].isdigit() or text[:1] in ("-", "∞", "±")
    engine.tests["empty"] = lambda value: isinstance(value, Mapping | list | tuple) and not value
    engine.filters["figure"] = show
    engine.filters["named"] = lambda value: [(key.replace("_", " "), item) for key, item in value.items()]
    return engine


def _part(name: str, *values: Any) -> Markup:
    """Return what a macro of the parts makes of values."""
    made: Markup = getattr(_engine().get_template("parts.html").module, name)(*values)
    return made


@cache
def _shipped(name: str) -> Markup:
    """Return a file of our own as it goes into the page."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))  # ours


@cache
def _library() -> tuple[Markup, bytes]:
    """Return the library that draws, as it travels, and as it runs."""
    packed = (_HERE / "plotly-basic.min.js.gz").read_bytes()
    return Markup(base64.b64encode(packed).decode()), gzip.decompress(packed)  # letters and digits


def _data(plot: Plot) -> Markup:
    """A plot's data as JSON, with no "<" that could end the element."""
    return Markup(plot.figure.to_json().replace("<", "\\u003c"))  # JSON in a script of data


def _policy(scripts: Sequence[bytes]) -> str:
    """Nothing is loaded; these scripts run and no other; plotly styles elements and draws images to save."""
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"

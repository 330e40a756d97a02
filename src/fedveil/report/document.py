"""Self-contained HTML document: text, tables and drawings in one file that makes no request and runs no script.

Two defences protect the reader's browser from a hostile name in a run folder. The template engine escapes every text
that enters the document. A Content-Security-Policy in the document forbids all requests, all scripts, and all styles
but the shipped style sheet, by its hash.
"""

import base64
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
from fedveil.report.drawing import Plot, draw, show, show_delta, show_epsilon
from fedveil.run.folder.documents import JsonValue
from fedveil.sanitize import strip_control_characters

_HERE: Final = Path(__file__).parent
EMPTY: Final = Markup()
"""Empty HTML."""
PRIVATE: Final = (
    "Seconds and bytes depend on who takes part and with how many records: no guarantee covers them"
)
"""Caption of every table with seconds or bytes."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Section of a page: heading, lead, remarks, plots, body.

    Attributes:
        identifier: anchor of the section.
        title: heading; empty for a section without one.
        body: HTML from the functions of this module.
        lead: plain sentence below the heading; empty if there is none.
        remarks: notices above the plots.
        plots: plots, two in a row if the page is wide enough.
        wide: whether each plot has a row of its own.
        private: whether the section shows private figures: it is neither printed nor exported.
        appendix: whether the section is collapsed on the screen and left out of print.
    """

    identifier: str
    title: str
    body: Markup = EMPTY
    lead: str = ""
    remarks: Markup = EMPTY
    plots: Sequence[Plot] = ()
    wide: bool = False
    private: bool = False
    appendix: bool = False


def escape(text: object) -> Markup:
    """Escape a text for HTML elements and quoted attributes, without its control characters."""
    return escaped(strip_control_characters(str(text)))


def join_parts(parts: Sequence[Markup]) -> Markup:
    """Concatenate parts of a page."""
    return EMPTY.join(parts)


def paragraphs(texts: Sequence[str]) -> Markup:
    """Return one paragraph for each text."""
    return render_part("paragraphs", texts)


def bullets(texts: Sequence[str]) -> Markup:
    """Return a list with one item for each text; empty HTML for no texts."""
    return render_part("bullets", texts)


def notice(text: str, *, kind: str) -> Markup:
    """Return a highlighted remark; `kind` is "error", "warning" or "note"."""
    return render_part("notice", text, kind)


def statement_claim(statement: Statement) -> Markup:
    """Return the privacy claim as a headline, with all sentences of the statement.

    A guarantee with delta >= 1 / |U| gets the headline "No protection", because it allows the release of one unit.
    """
    guaranteed = statement.epsilon is not None
    if guaranteed and statement.has_large_delta:
        guarantee = f"ε = {show_epsilon(statement.epsilon)}, δ = {show_delta(statement.delta)}"
        weak = (
            f"No protection of any one {statement.unit}: δ is not below 1 / {statement.units}, at {guarantee}"
        )
        return render_part("claim", weak, "", statement.sentences(), False)
    bound = f"ε = {show_epsilon(statement.epsilon)}, δ = {show_delta(statement.delta)}"
    readers = f"Against readers of the {statement.released}, each {statement.unit} is protected with"
    headline = readers if guaranteed else "No privacy guarantee"
    return render_part("claim", headline, bound if guaranteed else "", statement.sentences(), guaranteed)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> Markup:
    """Return a table of texts; the first cell of each row is its heading.

    A wide table can be scrolled by keyboard.
    """
    return render_part("table", header, rows, caption)


def parties(statement: Statement) -> Markup:
    """Return the table of the parties: the data that each sees, and epsilon against it; empty for none."""
    rows = [[line.party, line.sees, show_epsilon(line.epsilon)] for line in statement.trust]
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
    """Return named JSON values as a description list: lists as lists, objects nested, null as "none"."""
    return render_part("fields", pairs)


def source(text: str) -> Markup:
    """Return the unchanged content of a text file in a block."""
    return render_part("source", text)


def collapsible(summary: str, body: Markup, *, printed: bool = False) -> Markup:
    """Return a part that is collapsed until the reader opens it; in print it is open or absent."""
    return render_part("folded", summary, body, printed)


def document(*, title: str, kicker: str, lead: str, sections: Sequence[Section]) -> str:
    """Return the whole page as HTML text."""
    style = _shipped("style.css")
    return (
        _engine()
        .get_template("page.html")
        .render(title=title, kicker=kicker, lead=lead, sections=sections, style=style, policy=_policy(style))
    )


def check_page_suffix(path: Path) -> None:
    """Check that a path has the suffix of a page.

    A file with another suffix could be a table or an experiment, and would be overwritten.

    Raises:
        ConfigError: the suffix is neither .html nor .htm.
    """
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"{path}: a page is written as .html")


def write_document(path: Path, text: str) -> Path:
    """Write a page atomically.

    Raises:
        ConfigError: the suffix is neither .html nor .htm.
        RunFolderError: the file cannot be written (a full disk, for example); an older page stays unchanged.
    """
    check_page_suffix(path)
    with writing(path, RunFolderError):
        replace_file(path, text.encode())
    return path


@cache
def _engine() -> Environment:
    """Return the template engine, which escapes every value that is not `Markup`."""
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
    engine.filters["draw"] = draw
    engine.filters["named"] = lambda value: [(key.replace("_", " "), item) for key, item in value.items()]
    return engine


def render_part(name: str, *values: Any) -> Markup:
    """Return the HTML of a macro of the template parts.html for these values, which it escapes."""
    html: Markup = getattr(_engine().get_template("parts.html").module, name)(*values)
    return html


@cache
def _shipped(name: str) -> Markup:
    """Return a shipped file as trusted HTML."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))  # not escaped: part of this package


def _policy(style: str) -> str:
    """Return the Content-Security-Policy: no request, no script, and this style sheet alone, by its SHA-256."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'"

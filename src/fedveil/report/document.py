"""A self-contained HTML document: text, tables and plots in one file that never touches the network.

Two walls stand between a hostile name in a run folder and the reader's browser. Every text is escaped where
it enters the document, and a Content-Security-Policy in the document allows no request at all and no script
but the two that are shipped here, by their hash.
"""

import base64
import hashlib
import html
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import plotly.offline

from fedveil.engine.documents import JsonValue
from fedveil.errors import RunFolderError
from fedveil.foreign import inert
from fedveil.report.drawing import Plot, show


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page: `body` is HTML made by the functions below, `lead` a plain sentence above it."""

    identifier: str
    title: str
    body: str
    lead: str = ""


def escape(text: object) -> str:
    """Text as HTML shows it as it stands, in elements and in quoted attributes."""
    return html.escape(inert(str(text)), quote=True)


def paragraphs(texts: Sequence[str]) -> str:
    """One paragraph for each text."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def bullets(texts: Sequence[str]) -> str:
    """A list with one item for each text; nothing for none."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>" if texts else ""


def notice(text: str, *, kind: str) -> str:
    """A highlighted remark; `kind` is "error", "warning" or "note"."""
    return f'<p class="notice {kind}" role="note">{escape(text)}</p>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table of texts; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(_cell(cell) for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def fields(pairs: Sequence[tuple[str, JsonValue]]) -> str:
    """Named values of any JSON form, as a description list."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{value_html(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="fields">{rows}</dl>'


def value_html(value: JsonValue) -> str:
    """A JSON value for a reader: lists as lists, objects as nested fields, null as "none"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return escape(show(value))
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return fields([(key.replace("_", " "), item) for key, item in value.items()]) if value else "none"
    return "<ul>" + "".join(f"<li>{value_html(item)}</li>" for item in value) + "</ul>" if value else "none"


def source(text: str) -> str:
    """A text file, as it stands."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def folded(summary: str, body: str) -> str:
    """A part that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figures(plots: Sequence[Plot], *, wide: bool = False) -> str:
    """Plots, side by side where the page has room for two; `wide` plots have a row each."""
    return (
        f'<div class="figures{" wide" if wide else ""}">'
        + "".join(_figure(plot) for plot in plots)
        + "</div>"
    )


def document(*, title: str, kicker: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page; plotly's program is in it once, where there is a plot."""
    resources = files("fedveil.report")
    style = resources.joinpath("style.css").read_text(encoding="utf-8")
    drawn = any('<div class="plot"' in section.body for section in sections)
    programs = [
        plotly.offline.get_plotlyjs,
        lambda: resources.joinpath("page.js").read_text(encoding="utf-8"),
    ]
    scripts = [program() for program in programs] if drawn else []
    links = "".join(f'<li><a href="#{s.identifier}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(_section(section) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · fedveil</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="kicker">{escape(kicker)}</p>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>{body}</main>
<footer><p>Written by fedveil. This file is complete: it loads nothing from anywhere.</p></footer>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def write_document(path: Path, text: str) -> Path:
    """Write a page whole or not at all.

    Raises:
        RunFolderError: the file cannot be written (a full disk, say); an older page stays as it was.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise RunFolderError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def _policy(scripts: Sequence[str]) -> str:
    """Nothing is loaded; these scripts run and no other; plotly styles elements and draws images to save."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _section(section: Section) -> str:
    lead = f'<p class="section-lead">{escape(section.lead)}</p>' if section.lead else ""
    name = section.identifier
    title = f'<h2 id="{name}-title">{escape(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{title}{lead}{section.body}</section>'


def _figure(plot: Plot) -> str:
    """A plot's data stand beside it as JSON, with no "<" that could end the element."""
    data = plot.figure.to_json().replace("<", "\\u003c")
    pressed = "true" if plot.figure.layout.xaxis.type == "log" else "false"
    button = f'<button type="button" class="log-x" aria-pressed="{pressed}">logarithmic axis</button>'
    return (
        f'<figure><div class="figure-head"><h3>{escape(plot.title)}</h3>{button if plot.log_x else ""}</div>'
        f'<div class="plot" role="img" aria-label="{escape(plot.alt)}"></div>'
        f'<script type="application/json">{data}</script>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _cell(text: str) -> str:
    numeric = text[:1].isdigit() or text[:1] in ("-", "∞", "±")
    return f'<td class="number">{escape(text)}</td>' if numeric else f"<td>{escape(text)}</td>"

"""Generate the reference page of all registered members: names, keys, defaults and packages.

``python -m fedveil.reference`` prints the page docs/reference/stages.md; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from fedveil.config_keys import REQUIRED, Key, limits_of
from fedveil.errors import ConfigError
from fedveil.registry import KINDS, PACKAGE, Member, members
from fedveil.run.config.choice import own_keys
from fedveil.sanitize import sanitize

SECTIONS: Final = {
    "methods": ("[method]", "Who trains what, how far it is bounded, and who adds which noise."),
    "channels": ("[channel]", "How a silo's noisy sum, or a client's message, travels."),
    "protections": ("[protection]", "What hides a single silo's message from the server."),
    "denoisers": (
        "[server.denoiser]",
        "The server's estimate of the mean under its noise: post-processing, at no privacy cost.",
    ),
    "optimizers": ("[server.optimizer]", "What the server does with the mean: post-processing."),
    "averages": ("[server.average]", "Which model the run releases: post-processing of its models."),
    "local_algorithms": (
        "[local]",
        "The direction of a local step, named beside the keys of local training; without a name, plain gradient steps.",
    ),
    "samplers": (
        "[sampler]",
        "Which users take part in a round, where the method has no sampling of its own; a secret sample amplifies the "
        "guarantee.",
    ),
    "accounting_rules": (
        "ledger.jsonl",
        "What a release of an event costs, by the event's type; accountants compose releases by these rules.",
    ),
    "executors": (
        "--executor",
        "Whose workers play the runs of a sweep, of `reproduce` and of `bench price`: `--executor NAME:ADDRESS`.",
    ),
    "data_sets": ("[data]", "`data.name`; allocation and numbers are keys of `[data]` itself."),
}
"""For each kind: the experiment's table that names a member, and what the member decides."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Description of a member.

    Attributes:
        name: name of the member.
        package: the package that provides it.
        summary: its purpose in one line, or why it cannot be loaded.
        keys: its configuration keys.
    """

    name: str
    package: str
    summary: str
    keys: tuple[Key, ...]


def entries(kind: str) -> list[Entry]:
    """Describe every member of a kind; a member that cannot be loaded has the reason as its summary."""
    return [_entry(member) for member in members(kind)]


def summary(member: Any) -> str:
    """Return the first paragraph of a member's docstring, or the title of a data set."""
    titled = getattr(member, "title", None)
    text = titled if isinstance(titled, str) else (inspect.getdoc(member) or "").partition("\n\n")[0]
    return " ".join(text.split())


def page() -> str:
    """Return the whole page as Markdown."""
    return "\n".join(_page()) + "\n"


_WITHOUT_KEYS: Final = ("data_sets", "executors")
"""Kinds whose members an experiment does not configure."""


def _entry(member: Member) -> Entry:
    try:
        loaded = member.load()
        keys = own_keys(loaded) if member.kind not in _WITHOUT_KEYS else ()
        return Entry(name=member.name, package=member.package, summary=summary(loaded), keys=keys)
    except (
        ConfigError,
        TypeError,
        NameError,
        ValueError,
    ) as error:  # an object whose parameters cannot be read
        return Entry(name=member.name, package=member.package, summary=sanitize(str(error)), keys=())


def _page() -> Iterator[str]:
    yield "# Stages and methods: every name and its keys"
    yield ""
    yield (
        "This page is generated from what the stages declare: `python -m fedveil.reference`. An experiment names a "
        "member in the\n`name` of a table and gives its keys beside it; any other key is refused. An installed package "
        "may bring more of each\nkind ([how](../how-to/add-a-stage.md)): `fedveil stages` and `fedveil methods` "
        "list those as well. [Data sets](data-sets.md) have a page of their own."
    )
    for kind, (table, meaning) in SECTIONS.items():
        if kind == "data_sets":
            continue
        yield from ("", f"## {_title(kind)}", "", f"`{table}`: {meaning}", "")
        own_entries = [entry for entry in entries(kind) if entry.package == PACKAGE]
        yield from ("| name | what it does |", "|---|---|")
        yield from (f"| `{entry.name}` | {_cell(entry.summary)} |" for entry in own_entries)
        yield from _keys(own_entries, table.strip("[]"))


def _keys(kind_entries: list[Entry], table: str) -> Iterator[str]:
    """Yield the rows of a kind's keys; members that give a key the same meaning share a row."""
    rows: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for entry in kind_entries:
        for key in entry.keys:
            row = (_type(key), _default(key), _cell(key.meaning))
            rows.setdefault(key.name, {}).setdefault(row, []).append(entry.name)
    if not rows:
        return
    yield from ("", "| key | of | value | meaning |", "|---|---|---|---|")
    with_keys = [entry.name for entry in kind_entries if entry.keys]
    for name, variants in rows.items():
        last_meaning = ""
        for (kind_of_value, default, meaning), owners in variants.items():
            excluded = [other for other in with_keys if other not in owners]
            owner_text = ", ".join(f"`{owner}`" for owner in owners)
            if len(owners) > 1 and not excluded:
                owner_text = "all"
            elif excluded and len(owners) > 3 * len(excluded):
                owner_text = f"all with keys but {', '.join(f'`{other}`' for other in excluded)}"
            requirement = {"required": ", required", "none": ", optional"}.get(
                default, f", default {default}"
            )
            meant = "as above" if meaning == last_meaning else meaning
            yield f"| `{table}.{name}` | {owner_text} | {kind_of_value}{requirement} | {meant} |"
            last_meaning = meaning


def _title(kind: str) -> str:
    plural = KINDS[kind] + "s"
    return plural[0].upper() + plural[1:]


def _default(key: Key) -> str:
    if key.default is REQUIRED:
        return "required"
    if key.default is None:
        return "none"
    shown = str(key.default).lower() if isinstance(key.default, bool) else key.default
    return f'`"{shown}"`' if isinstance(key.default, str) else f"`{shown}`"


def _type(key: Key) -> str:
    """Return the accepted values of a key in words."""
    words = [f'`"{word}"`' for word in key.words]
    return ", ".join(dict.fromkeys([*_alternatives(key.type), *words])) + _range(key)


def _range(key: Key) -> str:
    limits = limits_of(key.type)
    return f", {' and '.join(limits)}" if limits and not key.words else ""


def _alternatives(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Annotated:
        yield from _alternatives(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for alternative in get_args(hint):
            yield from _alternatives(alternative)
    elif get_origin(hint) is Literal:
        yield from (f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in get_args(hint))
    elif is_dataclass(hint):
        yield "table"
    elif get_origin(hint) is tuple:
        yield "list"
    elif hint is not NoneType:
        yield _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


_NAMES: Final = {float: "number", int: "whole number", str: "text", bool: "true or false"}


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", re.sub(r"``([^`]+)``", r"`\1`", text)).strip()


if __name__ == "__main__":
    print(page(), end="")

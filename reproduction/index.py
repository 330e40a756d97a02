"""The index: every table and figure of the four papers, and every statement on convergence or distortion."""

from __future__ import annotations

from pathlib import Path

from fedveil.files import read_toml
from fedveil.validation import DocumentTable


class IndexItem(DocumentTable):
    """One item of a paper.

    Attributes:
        id: ``paper/item``; tables name it.
        title: what it shows.
        why: why it is not, or not wholly, made again.
        omitted: what it shows that no table here makes again, a sentence each, with the reason.
    """

    id: str
    title: str
    why: str = ""
    omitted: tuple[str, ...] = ()


def index_items() -> dict[str, list[IndexItem]]:
    """Return the items under the heading of their paper."""
    document = read_toml(_path())
    return {
        group["heading"]: [IndexItem.model_validate(item) for item in group["items"]]
        for group in document["groups"]
    }


def _path() -> Path:
    return Path(__file__).parent / "index.toml"

"""Lists of all users' ids, as silos share them."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path

SALT = "5e" * 32


def write_list(path: Path, users: Iterable[str]) -> str:
    """Write a list of users; return its digest."""
    path.write_text("\n".join((SALT, *users)) + "\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listed(schema: Path) -> Path:
    """Have a schema name a list of users p0, p1, ..., beside it; return the list's path."""
    path, text = schema.parent / "users.txt", schema.read_text()
    people = tomllib.loads(text)["n_users"]
    digest = write_list(path, (f"p{number}" for number in range(people)))
    if digest not in text:
        schema.write_text(f'users = "{digest}"\n{text}')
    return path

"""The limits that every party puts on what it reads, before it knows what it is."""

from typing import Final

LARGEST_LETTER: Final = 1 << 28
"""Bytes of a letter beyond which it is refused unread; a limit of the party may be lower."""

LARGEST_EXPERIMENT: Final = 1 << 16
"""Characters of an experiment beyond which a silo does not parse it."""

LARGEST_STATEMENT: Final = 1 << 22
"""Characters of a statement beyond which a silo does not read it, and signs nothing."""

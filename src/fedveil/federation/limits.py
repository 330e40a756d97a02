"""The limits that every party puts on what it reads, before it knows what it is."""

from typing import Final

LARGEST_LETTER: Final = 1 << 28
"""Bytes of a letter beyond which it is refused unread; a limit of the party may be lower."""

LARGEST_OPENING: Final = 1 << 22
"""Bytes of a letter that is of no session under way, and of what letters of one have beside model and protocol."""

BEGINNING: Final = 128
"""Bytes of a letter by which it is judged before the rest is read; its header is shorter."""

LARGEST_EXPERIMENT: Final = 1 << 16
"""Characters of an experiment beyond which a silo does not parse it."""

LARGEST_STATEMENT: Final = 1 << 20
"""Characters of a statement beyond which a silo does not read it, and signs nothing."""

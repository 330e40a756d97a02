"""Size limits that every party applies to input before it parses the input."""

from typing import Final

LARGEST_MESSAGE: Final = 1 << 28
"""Largest signed message in bytes; a longer one is refused unread. A policy may set a lower limit."""

LARGEST_OPENING: Final = 1 << 22
"""Largest message in bytes outside a current session.

Also the allowance for a message of a session in addition to the model and the protocol's messages.
"""

BEGINNING: Final = 128
"""Bytes of a message that decide whether the rest is read. The header of a message is shorter."""

LARGEST_EXPERIMENT: Final = 1 << 16
"""Largest experiment document, in characters, that a silo parses."""

LARGEST_STATEMENT: Final = 1 << 20
"""Largest privacy statement, in characters, that a silo reads and signs."""

"""List every message of a run: sender, recipient, size and purpose."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedveil.protocols.messages import SERVER, Envelope

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """Entry of one message.

    Attributes:
        round: round number, 0 in the setup.
        attempt: attempt number, from 0.
        sender: ``"server"``, or for example ``"silo 3"``.
        recipient: as ``sender``.
        purpose: content of the message in words.
        bytes: size of the message in bytes, header included.
    """

    round: int
    attempt: int
    sender: str
    recipient: str
    purpose: str
    bytes: int

    def to_json(self) -> dict[str, str | int]:
        """Return the line as one JSON object of the transcript."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


class Transcript:
    """Collector of one line per message; it does not keep the contents of messages."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._taken = 0

    @property
    def lines(self) -> tuple[Line, ...]:
        """Lines of all messages so far, in their order."""
        return tuple(self._lines)

    def record(self, data: bytes) -> None:
        """Add the line of a message.

        Raises:
            ProtocolError: the bytes are not a message of this version.
        """
        envelope = Envelope.decode(data)
        self._lines.append(
            Line(
                round=envelope.round_id.round,
                attempt=envelope.round_id.attempt,
                sender=_name(envelope.sender),
                recipient=_name(envelope.recipient),
                purpose=envelope.message.purpose,
                bytes=len(data),
            )
        )

    def take(self) -> tuple[Line, ...]:
        """Return the lines since the last call."""
        lines = tuple(self._lines[self._taken :])
        self._taken = len(self._lines)
        return lines

    def bytes_up(self, round_number: int) -> int:
        """Return the number of bytes that all silos sent to the server in a round, over all its attempts."""
        return sum(
            line.bytes for line in self._lines if line.round == round_number and line.recipient == "server"
        )

    def write(self, path: Path) -> None:
        """Write one JSON object per line."""
        with path.open("w", encoding="utf-8") as file:
            for line in self._lines:
                file.write(json.dumps(line.to_json()) + "\n")


def _name(number: int) -> str:
    return "server" if number == SERVER else f"silo {number}"

"""The ends of the silos' ledgers as others have heard of them, so that no ledger goes back unnoticed.

A head is the digest of a ledger's last line: 32 random-looking bytes, for every line holds the digest of a line with a
random number. It tells that a ledger has grown, and nothing of how much, for what, or for whom. Every silo signs its
own with each letter. The coordinator keeps them, and hands all of them to all silos with the next terms; a silo refuses
to go on if its ledger does not contain what is said of it, and keeps what is said of its peers.

Whoever has heard a silo's heads in one order notices when an earlier one comes again. Each start of a silo writes a
line, so a silo that went back shows a new head: the coordinator notices it, a peer's file shows it to an auditor only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.files import parse_json, read_content, reading, replace_file

HEADS: Final = "heads.json"
"""The file: of a coordinator in its folder, of a silo in its state folder."""

NONE: Final = bytes(32)
"""The head of a ledger without lines, or of one that nobody has heard of."""

_KEPT: Final = 1000
"""How many heads of one silo are remembered."""


class HeadsSeen:
    """The heads that were heard of every silo, in the order in which they were heard, on disk.

    Args:
        path: the file.

    Raises:
        RunFolderError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[str, list[str]] = {}
        if path.exists():
            with reading(path, RunFolderError):
                document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
                self._seen = {str(silo): [str(head) for head in heads] for silo, heads in document.items()}
                if any(
                    len(bytes.fromhex(head)) != len(NONE) for heads in self._seen.values() for head in heads
                ):
                    raise ValueError

    def last(self, silo: str) -> bytes:
        """Return the last head that was heard of a silo; zeros if none was."""
        return bytes.fromhex(self._seen[silo][-1]) if self._seen.get(silo) else NONE

    def hear(self, heads: dict[str, bytes]) -> None:
        """Note heads, durably; zeros are passed over.

        Raises:
            IntegrityError: one was heard before another of the same silo: its ledger has gone back. Nothing is noted.
            RunFolderError: the disk is full.
        """
        changed = False
        for silo, head in heads.items():
            seen = self._seen.get(silo, [])
            if head == NONE or head.hex() in seen[-1:]:
                continue
            if head.hex() in seen:
                raise IntegrityError(
                    f"silo {silo}: its ledger has gone back to where it was before: it ends with {head.hex()} again; "
                    "the silo must put back the ledger as it was last"
                )
            changed = True
        if changed:
            for silo, head in heads.items():
                if head != NONE and head.hex() not in self._seen.get(silo, [])[-1:]:
                    self._seen[silo] = [*self._seen.get(silo, []), head.hex()][-_KEPT:]
            try:
                replace_file(self._path, json.dumps(self._seen, indent=0).encode(), mode=0o600)
            except OSError as error:
                raise RunFolderError(f"{self._path}: cannot be written: {error.strerror}") from None

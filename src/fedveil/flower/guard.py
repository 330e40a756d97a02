"""The process at a silo that has the table and the keys: it answers letters on a local socket, and nothing else.

The carrier (:mod:`fedveil.flower.node`) speaks with the network. It gets no table and no identity key: it hands the
letter to the guard and carries the answer back. What is refused is refused here.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

from fedveil.federation.share import silo_share
from fedveil.federation.silo import SiloParty
from fedveil.files import sync_folder
from fedveil.flower.folders import SiloFolder
from fedveil.flower.relay import receive_frame, send_frame
from fedveil.flower.sockets import listen
from fedveil.foreign import quiet_log
from fedveil.protection.errors import ProtocolError

_QUESTION_SECONDS: Final = 60.0
_log = quiet_log("fedveil.silo")


def open_silo(folder: SiloFolder) -> SiloParty:
    """Read a silo's folder and table.

    Raises:
        FedveilError: whatever is wrong with keys, policy, schema or table.
    """
    settings, membership = folder.settings, folder.membership
    number = membership.number(settings.name)
    users = None if settings.users is None else folder / str(settings.users)
    share = silo_share(folder.schema, folder / str(settings.table), membership, number, users)
    state = folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    sync_folder(folder.path)
    return SiloParty(
        membership=membership,
        number=number,
        identity=folder.identity,
        policy=folder.policy,
        share=share,
        state=state,
    )


class Guard:
    """Serves one silo on a Unix socket that only its user can open.

    Args:
        party: the silo.
        path: of the socket; a stale one is replaced.
    """

    def __init__(self, party: SiloParty, path: Path) -> None:
        self._party = party
        self._socket = listen(path)

    def serve(self) -> None:
        """Answer one question after another, until :meth:`close`."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(_QUESTION_SECONDS)
                try:
                    self._answer(connection)
                except (OSError, ProtocolError) as error:
                    _log.warning("a question was not answered: %s", error)

    def close(self) -> None:
        """Stop serving and give the silo's ledger back."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._party.close()

    def _answer(self, connection: socket.socket) -> None:
        letter = receive_frame(connection)
        connection.settimeout(None)
        try:
            status, answer = 0, self._party.receive(letter)
        except ProtocolError as error:
            _log.warning("a letter was refused: %s", error)
            status, answer = 1, str(error).encode()
        except Exception:
            _log.exception("a letter could not be answered")
            status, answer = 1, b"the silo failed; its own log says where"
        connection.sendall(bytes([status]))
        send_frame(connection, answer)

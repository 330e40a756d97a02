"""Moving a silo to another host, and leaving a federation, so that no copy of the silo is served afterwards.

Claim: where a silo moved away or left, it is not served again: its membership, without which no command takes the
folder for a silo's, is gone before the other copy has one, and the keys that sign its messages go after it; keys that
wait for a membership (``silo rotate``) would be left behind, and are refused. What its users have spent stays with the
ledger, which moves with the silo, and is kept where it left: carried to its folder in another federation, it counts
there. A copy that somebody made before, and serves beside the other, is not prevented: it is seen in the next session,
as :mod:`~fedveil.federation.silo_ledger` says. Condition: the silo is not served while it moves, which is refused.
``tests/test_migration.py`` moves one between two parts of a run, serves both copies, and kills a move at every step.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Final

from fedveil.errors import ConfigError, IntegrityError
from fedveil.federation.audit.ledger_audit import export_ledger
from fedveil.federation.enrollment.joining import CLIENT, IDENTITY, NEXT, NODE
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.sockets import RunningFolder
from fedveil.federation.membership import CHARTER, MEMBERSHIP
from fedveil.federation.silo_ledger import LEDGER
from fedveil.files import replace_file, sync_folder

STATE: Final = "state"
_KEYS: Final = (IDENTITY, NODE)
_SETTINGS: Final = (CHARTER, "ca.crt", "schema.toml", "policy.toml", "silo.toml", CLIENT)


def migrate(home: SiloFolder, target: Path) -> tuple[str, ...]:
    """Move a silo into a new folder for another host; return the files that the operator must carry along.

    Its settings, keys, membership and ``state/`` are moved; its tables are not.

    Args:
        home: the silo's folder.
        target: made here; must not exist.

    Raises:
        BusyError: the silo is served.
        ConfigError: the target exists, or the silo's keys are being changed.
        OSError: the disk is full, say. As long as the folder has its membership, nothing has moved.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists already; a silo moves into a new folder")
    settings = home.settings
    with closing(RunningFolder(home.path)):
        _check_settled(home)
        membership = (home / MEMBERSHIP).read_bytes()
        ancestor = next((parent for parent in target.parents if parent.exists()), target.parent)
        target.mkdir(parents=True, mode=0o700)
        for name in (*_SETTINGS, *_KEYS):
            shutil.copy2(home / name, target / name)
        if (home / STATE).exists():
            shutil.copytree(home / STATE, target / STATE)
        _synced(target, ancestor)
        _retire(home, (*_KEYS, STATE))
        replace_file(target / MEMBERSHIP, membership)
    tables = (settings.table, settings.users, settings.main_silos)
    return tuple(str(path) for path in tables if path is not None)


def leave_federation(home: SiloFolder, export: Path) -> None:
    """Remove a silo from its federation on its own host: it is no longer served and repeats no contribution.

    Its ledger is written as a signed file first. The ledger itself, the messages that asked for its charges and models
    of its runs stay: users have spent what it says, and the silo's folder in another federation goes on with it.

    Args:
        home: the silo's folder.
        export: the file to write.

    Raises:
        BusyError: the silo is served.
        ConfigError: the file exists, or the silo's keys are being changed.
        IntegrityError: there was a ledger, and there is none.
        RunFolderError: the ledger is damaged, or the file cannot be written.
    """
    if export.exists():
        raise ConfigError(f"{export}: exists already; an exported ledger is never overwritten")
    with closing(RunningFolder(home.path)):
        _check_settled(home)
        if not (home / STATE / LEDGER).exists() and any(path.is_file() for path in (home / STATE).rglob("*")):
            raise IntegrityError(
                f"{home / STATE}: the ledger is missing, and the silo was served; restore it, or answer for it with "
                "'fedveil silo ledger adopt'"
            )
        if (home / STATE / LEDGER).exists():
            membership = home.membership
            export_ledger(
                home / STATE,
                export,
                identity=home.identity,
                membership=membership,
                number=membership.number(home.settings.name),
                delta=home.policy.delta,
            )
        _retire(home, (*_KEYS, f"{STATE}/answers"))


def _check_settled(home: SiloFolder) -> None:
    """Refuse a silo with next keys: a membership with them would let the silo be served without its ledger."""
    for stem in _KEYS:
        if (waiting := home / (stem + NEXT)).exists():
            raise ConfigError(
                f"{waiting}: the silo's keys are being changed; accept the membership that names the next ones "
                "('fedveil silo accept'), or delete the next keys if the founder has not admitted them"
            )


def _retire(home: SiloFolder, names: tuple[str, ...]) -> None:
    """Remove a silo's membership from its folder, then these files and folders."""
    (home / MEMBERSHIP).unlink()
    sync_folder(home.path)
    for name in names:
        path = home / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    sync_folder(home.path)


def _synced(folder: Path, within: Path) -> None:
    """Fsync a folder's content, and the new folders above it."""
    parents = [parent for parent in folder.parents if parent.is_relative_to(within)]
    for path in (*folder.rglob("*"), folder, *parents):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

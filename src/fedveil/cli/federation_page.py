"""Page of a federation, written at its coordinator: silos, runs, what they cost against each role, and refusals.

Claim: the page has no private number: no record count, and none of the times that depend on records. Its texts come
from files of the coordinator and from the process that serves it, and are escaped like those of every page. Condition:
the coordinator's folder holds what parties signed or the coordinator wrote. ``tests/test_federation_page.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedveil.errors import FedveilError
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.metrics_server import ask_party
from fedveil.federation.hosts.sockets import END
from fedveil.federation.hosts.status import party_status
from fedveil.files import parse_json, read_content
from fedveil.privacy.claims import Role
from fedveil.report.document import Section, document, fields, join_parts, notice, table, write_document
from fedveil.report.drawing import show_epsilon
from fedveil.run.config.release_document import KINDS
from fedveil.run.folder.documents import read_rows, read_statement

_SOON_DAYS = 30.0


def write_federation_page(home: CoordinatorFolder, path: Path) -> Path:
    """Write one self-contained page on the state of a federation; return its path.

    Raises:
        ConfigError: the path has not the suffix of a page, or the folder is not a coordinator's.
        RunFolderError: the page cannot be written.
    """
    answer = ask_party(home.path, "/connection")
    connection = None if answer is None else json.loads(answer[1])
    return write_document(path, federation_page(home, connection))


def federation_page(home: CoordinatorFolder, connection: dict[str, Any] | None) -> str:
    """Return the page as one HTML text.

    Args:
        home: the coordinator's folder.
        connection: what the served coordinator tells of its link and silos; None: no process serves it.
    """
    membership = home.membership
    runs = [_Run(path) for path in _run_folders(home)]
    sections = [
        Section(identifier="coordinator", title="Coordinator", body=_coordinator(home, connection)),
        Section(identifier="silos", title="Silos", body=_silos(membership.silos, connection)),
        Section(
            identifier="runs",
            title="Runs",
            lead="Each epsilon is that of one run; the command fedveil spent composes several over the same people.",
            body=_runs(runs),
        ),
        Section(identifier="refusals", title="Refusals and stops", body=_stops(runs)),
    ]
    return document(
        title=f"federation of {len(membership.silos)} silos",
        kicker="fedveil · state of a federation",
        lead=f"{len(runs)} runs on record, membership {membership.serial}.",
        sections=sections,
    )


def _run_folders(home: CoordinatorFolder) -> list[Path]:
    names = ("experiment.toml", *(kind.file for kind in KINDS))
    documents = [path for name in names for path in (home / "runs").glob(f"*/{name}")]
    # The document is written once, when the run is submitted; its folder changes until the run ends.
    return [
        path.parent for path in sorted(documents, key=lambda path: (path.stat().st_mtime, path.parent.name))
    ]


class _Run:
    """Row of the page for a run folder; the reason stands in it if the folder is damaged."""

    def __init__(self, folder: Path) -> None:
        self.name, self.rounds, self.epsilon = folder.name, "0", "–"
        self.parties = dict[str, str]()
        self.state, self.stop = "waits or is played", ""
        try:
            self._read(folder)
        except FedveilError as error:
            self.state, self.stop = "damaged", str(error)

    def _read(self, folder: Path) -> None:
        if (folder / "metrics.jsonl").exists() and (rows := read_rows(folder / "metrics.jsonl")):
            self.rounds = str(rows[-1]["round"])
        if (folder / END).exists():
            end = parse_json(read_content(folder / END, FedveilError), folder / END, FedveilError)
            assert isinstance(end, dict)
            self.stop = str(end.get("error") or end.get("stopped") or "")
            self.state = "stopped" if self.stop else "complete"
        if (folder / "privacy.json").exists():
            stated = read_statement(folder / "privacy.json")
            self.epsilon = show_epsilon(stated.epsilon)
            self.parties = {
                line.party: show_epsilon(line.epsilon)
                for line in stated.trust
                if line.role is not Role.READER
            }


def _coordinator(home: CoordinatorFolder, connection: dict[str, Any] | None) -> Markup:
    status = party_status(home.path, served=connection is not None)
    days, file = status["certificate_days"], status["expires_first"]
    parts = []
    if connection is None:
        parts.append(notice("No process serves this coordinator.", kind="warning"))
    elif "cause" in connection:
        parts.append(notice(str(connection["cause"]), kind="error"))
    if days < _SOON_DAYS:
        parts.append(notice(f"{file} runs out in {days:g} days; the founder seals again.", kind="warning"))
    shown = [
        ("served", "yes" if connection is not None else "no"),
        ("version", status["version"]),
        ("membership", f"serial {status['membership']}, valid until {status['valid_until']}"),
        ("fingerprint", status["fingerprint"]),
        ("days left", f"{days:g} ({file} runs out first)"),
    ]
    return join_parts([*parts, fields(shown)])


def _silos(names: tuple[str, ...], connection: dict[str, Any] | None) -> Markup:
    facts = connection or {}
    contacts, connected = facts.get("last_contact_seconds", {}), facts.get("connected", [])
    rows = []
    for name in names:
        ago = contacts.get(name)
        if connection is None or not facts.get("link"):
            state, cause = "unknown", "the coordinator or its link is not served"
        elif name in connected:
            state, cause = "connected", ""
        else:
            state = "absent"
            cause = "never connected since the link started" if ago is None else "has stopped asking"
        rows.append([name, state, "none" if ago is None else f"{ago:g} s ago", cause])
    return table(["silo", "state", "last contact", "cause"], rows, caption="Silos of the membership")


def _runs(runs: list[_Run]) -> Markup:
    if not runs:
        return notice("No run was submitted yet.", kind="note")
    rows = [[run.name, run.state, run.rounds, run.epsilon] for run in runs]
    header = ["run", "state", "rounds", "ε against readers of the results"]
    parts = [table(header, rows, caption="Runs of this coordinator, the oldest first")]
    party_rows = [[party, run.name, epsilon] for run in runs for party, epsilon in run.parties.items()]
    if party_rows:
        parts.append(
            table(
                ["party", "run", "ε against it"], party_rows, caption="Parties that see more than the results"
            )
        )
    return join_parts(parts)


def _stops(runs: list[_Run]) -> Markup:
    rows = [[run.name, run.stop] for run in runs if run.stop]
    if not rows:
        return notice("No run was refused or stopped.", kind="note")
    return table(["run", "why it ended"], rows, caption="Why runs ended before their last round")

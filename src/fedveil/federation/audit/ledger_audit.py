"""Export a silo's ledger for an auditor, and verify the export.

An export is one signed file with every line of the ledger, the coordinator's signed terms, and the resulting epsilon.

Claim: a valid export was signed with the silo's key, and its lines are one unbroken chain. Its epsilon is the cost of
the charges by every accountant that has a bound for them, so the auditor's total is the silo's. For every charge of
version 2, it contains the message with which the coordinator requested the charge, signed by the coordinator that the
line names. ``tests/test_federation_ledger.py`` changes every line and every field.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedveil.checks import Check, Unchecked, Verification, check_trusted, not_checkable, run_check
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.errors import CryptoError, FedveilError, IntegrityError, RunFolderError
from fedveil.federation.audit.run_record import RoundPlace
from fedveil.federation.membership import Membership
from fedveil.federation.policy import counted_sentence
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo import TERMS
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.files import LARGEST_FILE, parse_json, read_content, reading, replace_file, writing
from fedveil.privacy.events import Adjacency, all_of
from fedveil.privacy.ledger import Entry, Line, Note, now, parse_lines
from fedveil.privacy.statement import epsilons_by_accountant, show_epsilon
from fedveil.protocols.messages import SERVER
from fedveil.protocols.session_messages import Terms, single_message
from fedveil.sanitize import sanitize

_SIGNED_AS: Final = b"fedveil/2/ledger export"
NOT_CHECKABLE: Final = {
    "events": "that each charge is what its round really released",
    "other releases": "that nothing was charged after the export, and nothing else released from the same records",
    "missing lines": "what was charged in lines that an adoption names as missing",
}
"""Facts that no file can show, by the name of their row."""


def export_ledger(
    state: Path, target: Path, *, identity: IdentityKey, membership: Membership, number: int, delta: float
) -> Path:
    """Write a silo's ledger as one signed JSON file; the silo may be served meanwhile.

    Args:
        state: the silo's state folder.
        target: the file to write.
        identity: key of the silo.
        membership: the federation.
        number: number of the silo.
        delta: the delta at which epsilon is computed.

    Raises:
        RunFolderError: the ledger is missing or damaged, or the file cannot be written.
    """
    path = state / LEDGER
    content = read_content(path, RunFolderError, largest=LARGEST_FILE)
    lines, _, complete = parse_lines(path, content)
    messages = {
        origin: read_content(state / TERMS / f"{origin}.message", RunFolderError).hex()
        for origin in sorted({entry.origin.terms for entry in _charges(lines) if entry.origin is not None})
    }
    document = {
        "schema_version": 1,
        "silo": membership.silos[number],
        "number": number,
        "public": identity.public.raw.hex(),
        "coordinator": membership.coordinator.raw.hex(),
        "before": [revoked.identity.raw.hex() for revoked in membership.revoked],
        "membership": membership.digest.hex(),
        "time": now(),
        # Without a torn last line: a serving silo may be in the middle of a write.
        "lines": content[:complete].decode().splitlines(),
        "terms": messages,
        "delta": delta,
        "epsilon": _spent(lines, delta),
    }
    document["signature"] = identity.sign(_signed(document)).hex()
    with writing(target, RunFolderError):
        replace_file(target, (json.dumps(document, indent=1) + "\n").encode())
    return target


@dataclass(frozen=True)
class LedgerExport:
    """An exported ledger with a valid signature of the key in it, and one chain of lines.

    Attributes:
        document: the whole export.
        lines: lines of the ledger.
        digests: digests of the lines.
    """

    document: dict[str, Any]
    lines: tuple[Line, ...]
    digests: list[str]

    @classmethod
    def read(cls, path: Path) -> LedgerExport:
        """Read an export.

        Raises:
            FedveilError: the file is not an export, or was changed.
        """
        document = parse_json(read_content(path, IntegrityError, largest=LARGEST_FILE), path, IntegrityError)
        with reading(path, IntegrityError):
            _check_signature(path, document)
            lines, digests, _ = parse_lines(path, "".join(f"{line}\n" for line in document["lines"]).encode())
        return cls(document, lines, digests)

    @property
    def public(self) -> PublicIdentity:
        """Public key of the silo."""
        return PublicIdentity(bytes.fromhex(self.document["public"]))

    def rounds_of(self, run: str) -> list[RoundPlace]:
        """Return the charged rounds of all parts of a run, once for each charge."""
        return [round_place for round_place, _ in self._charged(run, self.lines)]

    def terms_of(self, run: str) -> set[str]:
        """Return the terms of a run's charges; "" for charges without terms."""
        return {
            "" if entry.origin is None else entry.origin.terms for _, entry in self._charged(run, self.lines)
        }

    def after_end(self, run: str) -> list[RoundPlace]:
        """Return the rounds of a run that were charged after the silo had signed its end."""
        for number, line in enumerate(self.lines):
            if isinstance(line, Note) and line.kind == "ended" and line.text.startswith(run):
                return [round_place for round_place, _ in self._charged(run, self.lines[number:])]
        return []

    def has_charge(self, run: str, place: RoundPlace, terms: str, head: str) -> bool:
        """Return whether a round was charged under these terms by the time the ledger had a head.

        Args:
            run: 16 bytes of the run, in hexadecimal.
            place: the round.
            terms: SHA-256 of the terms, in hexadecimal.
            head: the head that the silo signed, in hexadecimal.
        """
        if head not in self.digests:
            return False
        lines = self.lines[: self.digests.index(head) + 1]
        return (place, terms) in [
            (round_place, line.origin.terms)
            for round_place, line in self._charged(run, lines)
            if line.origin is not None
        ]

    def _charged(self, run: str, lines: Sequence[Line]) -> Iterator[tuple[RoundPlace, Entry]]:
        for line in _charges(lines):
            named, _, part = line.run.partition("/")
            if named == run:
                yield (part, line.round), line


def verify_ledger(path: Path, trusted: Sequence[str] = (), membership: Path | None = None) -> Verification:
    """Verify an exported ledger; a failure becomes a check that fails, never an error.

    Args:
        path: the file.
        trusted: public keys, 64 hexadecimal digits each; one of them must be the silo's.
        membership: membership file signed by the founder; it must contain the silo's and the coordinator's keys.

    Raises:
        ConfigError: a trusted key is malformed.
    """
    check_trusted(trusted)
    results: list[Check] = []
    try:
        export = LedgerExport.read(path)
    except FedveilError as error:
        results.append(Check(name="file", outcome="fails", detail=str(error)))
    else:
        document, lines = export.document, export.lines
        results.append(Check(name="file", outcome="holds", detail=f"{len(lines)} lines, one chain, signed"))
        checks = {
            "signature": lambda: _whose(document, trusted),
            "membership": lambda: _member(path, document, membership),
            "epsilon": lambda: _same_epsilon(path, document, lines),
            "counted": lambda: _counted(path, lines),
            "terms": lambda: _terms(path, document, lines),
            "adopted": lambda: _adopted(lines),
        }
        # The signature does not vouch for the content: the signer may have written any fields, so every check parses
        # defensively.
        results += [run_check(name, reading(path, IntegrityError)(check)) for name, check in checks.items()]
    return Verification(path=path, checks=(*results, *not_checkable(NOT_CHECKABLE)))


def _charges(lines: Sequence[Line]) -> list[Entry]:
    return [line for line in lines if isinstance(line, Entry)]


def _spent(lines: Sequence[Line], delta: float) -> dict[str, float | None]:
    """Return epsilon by every accountant that has a bound for all charges; None: no guarantee."""
    charged, adjacency = all_of(entry.event for entry in _charges(lines)), Adjacency.ADD_OR_REMOVE_ONE
    return dict(sorted(epsilons_by_accountant(charged, delta, adjacency)))


def _signed(document: dict[str, Any]) -> bytes:
    content = {key: value for key, value in document.items() if key != "signature"}
    return _SIGNED_AS + json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _check_signature(path: Path, document: dict[str, Any]) -> None:
    if document["schema_version"] != 1:
        raise IntegrityError(f"{path}: no export of a ledger that this fedveil reads")
    try:
        public = PublicIdentity(bytes.fromhex(document["public"]))
        public.verify(_signed(document), bytes.fromhex(document["signature"]))
    except CryptoError as error:
        raise IntegrityError(f"{path}: {error}: it was changed after it was written") from None


def _whose(document: dict[str, Any], trusted: Sequence[str]) -> str:
    public = str(document["public"])
    if trusted and public not in trusted:
        raise IntegrityError(f"signed by {public}, which is no trusted key")
    if not trusted:
        raise Unchecked(
            f"signed by {public}; the owner of that key was not checked: --trust names the keys you know"
        )
    return f"of the trusted key {public}"


def _member(path: Path, document: dict[str, Any], membership: Path | None) -> str:
    """Check that the silo, and the coordinator that requested the charges, belong to a federation."""
    silo, public, coordinator = (str(document[key]) for key in ("silo", "public", "coordinator"))
    if membership is None:
        raise Unchecked(
            f"whose the coordinator's key {coordinator[:16]}... is was not asked: --membership names them"
        )
    federation = Membership.read(membership)
    if silo not in federation.silos or federation.roster[federation.silos.index(silo)].raw.hex() != public:
        raise IntegrityError(f"{membership}: its silo '{sanitize(silo)}' has another key, or there is none")
    revoked = {revoked_key.identity.raw.hex() for revoked_key in federation.revoked}
    if federation.coordinator.raw.hex() != coordinator or not revoked.issuperset(document["before"]):
        raise IntegrityError(f"{path}: names another coordinator than {membership}")
    return f"silo and coordinator are those of serial {federation.serial} ({federation.fingerprint})"


def _same_epsilon(path: Path, document: dict[str, Any], lines: Sequence[Line]) -> str:
    delta, stated = float(document["delta"]), dict(document["epsilon"])
    if not 0 < delta < 1:
        raise IntegrityError(f"{path}: delta = {delta} is no probability")
    computed = _spent(lines, delta)
    # A stated epsilon above the computed one is accepted; 1e-9 covers rounding differences between machines.
    if computed.keys() != stated.keys() or any(
        (value is None) != (stated[name] is None) or (value is not None and value > stated[name] * (1 + 1e-9))
        for name, value in computed.items()
    ):
        raise IntegrityError(f"{path}: its charges cost another epsilon than it states")
    if not computed:
        raise Unchecked(f"no accountant has a bound for all of its charges at delta {delta:g}")
    shown = ", ".join(f"{show_epsilon(value)} by {name}" for name, value in computed.items())
    return f"{len(_charges(lines))} charges cost {shown} at delta {delta:g}, computed again"


def _counted(path: Path, lines: Sequence[Line]) -> str:
    """Return a sentence on what the charges count, according to the policy at the time of each charge."""
    views = Counter[tuple[str, str]]()
    view = ("what an earlier release counted", "")
    for line in lines:
        if isinstance(line, Entry):
            views[view] += 1
        elif line.kind == "policy":
            view = counted_sentence(parse_json(line.text, path, IntegrityError))
    summary = "; ".join(f"{n_charges} charges count {counted}" for (counted, _), n_charges in views.items())
    omitted = "; ".join(dict.fromkeys(omission for _, omission in views if omission))
    if omitted:
        raise Unchecked(f"{summary}. Epsilon here does not count {omitted}")
    return summary or "nothing was charged"


def _terms(path: Path, document: dict[str, Any], lines: Sequence[Line]) -> str:
    """Check every charge against the signed message that requested it."""
    proposals = set[str]()
    coordinators = {bytes.fromhex(key) for key in (document["coordinator"], *document["before"])}
    named = {hashlib.sha256(raw).hexdigest(): PublicIdentity(raw) for raw in coordinators}
    charges = _charges(lines)
    for entry in charges:
        origin = entry.origin
        # The digest of the terms covers membership and experiment: one message proves all charges under these terms.
        if origin is None or origin.terms in proposals:
            continue
        if origin.coordinator not in named:
            raise Unchecked(
                f"line {entry.index + 1} was charged for an earlier coordinator of the federation"
            )
        message = SignedMessage.open(
            bytes.fromhex(document["terms"][origin.terms]),
            sender=SERVER,
            identity=named[origin.coordinator],
            recipient=int(document["number"]),
            largest=LARGEST_MESSAGE,
        )
        if single_message(message.parts, Terms, SERVER).digest.hex() != origin.terms:
            raise IntegrityError(f"{path}: line {entry.index + 1} names other terms than its message has")
        proposals.add(origin.terms)
    silent = sum(entry.origin is None for entry in charges)
    sentence = f"{len(proposals)} proposals, each signed by the coordinator"
    return sentence + (f"; {silent} charges name none" if silent else "")


def _adopted(lines: Sequence[Line]) -> str:
    adopted = [line for line in lines if isinstance(line, Note) and line.kind == "adopted"]
    if adopted:
        raise Unchecked(
            f"lines are missing, and more was spent than the file states: adopted on {adopted[0].time} "
            f"({sanitize(adopted[0].text)})"
        )
    return "no line is known to be missing"

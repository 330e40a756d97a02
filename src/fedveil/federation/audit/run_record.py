"""Record of the parties' signatures, round by round and at the end, in the coordinator's run folder.

    terms.jsonl     one line for each version of the terms: membership and experiment, with digest T
    rounds.jsonl    one line for each round of any part: the silos' signatures of the round, and the coordinator's
                    signature of the whole line
    silo_signatures.json        written at the end: digests of statement, model and contents, signed by coordinator and
                                silos
    checkpoint/contents.json    digests of all files of the folder, with a random number; it is not published

    silo, a round:  Ed25519 of "fedveil/3/attested" | run 16 | T 32 | round 4 | X 32 | M 32 | R 32 | ledger head 32
                    | part
    silo, the end:  Ed25519 of "fedveil/3/statement" | run 16 | T 32 | round 4 | last line 32 | statement 32

The numbers above are lengths in bytes. A part is a release, which is one round (``prep/1``, ``eval/1``; ``1``, ``2``,
... in a document of releases), or the training, whose name is empty. X is a digest of the coordinator's whole request
to the silo (:mod:`~fedveil.federation.transcript_binding`). M is SHA-256 of the model at the start of the round; zeros
without a model, or if only the silos have it. R is the digest of all earlier releases
(:mod:`fedveil.statistics.result`). Each line holds the digest of the line before it, and the digest of its round's
result: the next model, or the release.

Claim: a party without any of the keys cannot change the data that a silo or the coordinator signed, nor remove or
insert a round (:mod:`~fedveil.federation.audit.recorded_run` checks, and states the limits for the coordinator itself).
The record depends on private records only through released models and numbers. The session name, which only silos
receive, enters X, so that nobody can test guesses of a request against X. The record holds no digest of a silo's
message, against which guesses of the message could be tested.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import CryptoError, ProtocolError, RunFolderError
from fedveil.federation.exchange import Answers
from fedveil.federation.membership import Membership
from fedveil.files import LARGEST_FILE, parse_json, read_content, reading, writing
from fedveil.line_log import LineLog, split_lines
from fedveil.protocols.session_messages import (
    Attestation,
    Declined,
    Finalize,
    GlobalModel,
    RunPart,
    SessionMessage,
    Terms,
    single_message,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.sanitize import quiet_log
from fedveil.statistics.result import digest_of_all, digest_of_release

_log = quiet_log("fedveil.coordinator")

STATE: Final = "federation.json"
"""File in the run folder with the run's identifier of 16 bytes."""

ROUNDS: Final = "rounds.jsonl"
AGREED: Final = "silo_signatures.json"
TERMS: Final = "terms.jsonl"
CONTENTS: Final = "checkpoint/contents.json"
"""File with the digests of all files, and a random number.

Some of these files hold private numbers (times, sampled users). ``silo_signatures.json`` publishes the digest of
CONTENTS. Without the random number, its readers could test guesses of the private numbers against that digest.
"""
MODEL: Final = "model.safetensors"
STATEMENT: Final = "privacy.json"
NOTHING: Final = bytes(32)
"""Digest of a missing object: the line before the first, or a model that only the silos have."""

MADE_LATER: Final = frozenset({AGREED, CONTENTS, "run_end.json", "report.html", "audit.json"})
"""Files that are written from signed data after the run is signed; no signature covers them."""
_TEMPORARY: Final = frozenset(
    Path(name).with_name(f".{Path(name).name}.tmp").as_posix() for name in MADE_LATER
)


def known_before(opening: Sequence[SessionMessage], run_part: RunPart | None) -> bytes:
    """Return M | R of a round: digests of its model and of the earlier releases.

    Args:
        opening: messages that begin the round.
        run_part: the part of the run, with the numbers released before it; None for the training of a run without
            other parts.
    """
    model = (
        hashlib.sha256(message.encode()).digest() for message in opening if isinstance(message, GlobalModel)
    )
    released = () if run_part is None else run_part.released
    return next(model, NOTHING) + digest_of_all(map(digest_of_release, released))


RoundPlace = tuple[str, int]
"""A round: the name of its part, and its number in the part."""


def round_attestation(
    run: bytes, terms: bytes, place: RoundPlace, context: bytes, model_and_releases: bytes, head: bytes
) -> bytes:
    """Return the bytes that a silo signs at the end of a round.

    Args:
        run: identifier of the run, 16 bytes.
        terms: T, 32 bytes.
        place: name of the part, and number of the round in it.
        context: X, 32 bytes.
        model_and_releases: M | R, 64 bytes.
        head: head of the silo's ledger, 32 bytes.
    """
    part, number = place
    signed = run + terms + struct.pack(">I", number) + context + model_and_releases + head
    return b"fedveil/3/attested" + signed + part.encode()


def final_attestation(run: bytes, terms: bytes, closing: Finalize) -> bytes:
    """Return the bytes that a silo signs at the end of a run."""
    statement = hashlib.sha256(closing.statement.encode()).digest()
    return b"fedveil/3/statement" + run + terms + struct.pack(">I", closing.round) + closing.line + statement


def coordinator_attestation(document: Mapping[str, Any]) -> bytes:
    """Return the bytes that the coordinator signs for a line of the record, or for the end of the run."""
    content = {key: value for key, value in document.items() if key != "signature"}
    # At the end the silos sign after the coordinator, one by one, so its signature cannot cover theirs.
    if "statement" in content:
        content.pop("silos", None)
    return b"fedveil/3/record" + canonical(content)


def canonical(document: Any) -> bytes:
    """Encode a document as JSON, without sorting its keys."""
    return json.dumps(document, allow_nan=False).encode()


def arrays_of(content: bytes, place: object) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file.

    Raises:
        RunFolderError: the content is not a safetensors file.
    """
    with reading(place, RunFolderError):
        try:
            tensors: dict[str, np.ndarray] = load_arrays(content)
        except SafetensorError:
            raise RunFolderError(f"{place} is damaged: no safetensors file") from None
    return tensors


def digests_of(tensors: bytes) -> dict[str, str]:
    """Return SHA-256 of every tensor of a model file, over dtype, shape and numbers.

    Raises:
        RunFolderError: the content is not a safetensors file.
    """
    return {
        name: hashlib.sha256(
            f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        ).hexdigest()
        for name, array in sorted(arrays_of(tensors, MODEL).items())
    }


@dataclass(frozen=True, kw_only=True)
class _RoundSignatures:
    """The silos' verified signatures of the round that is about to be released.

    Attributes:
        place: the round.
        context: X.
        model_and_releases: M | R.
        silos: number, ledger head and signature of each silo.
    """

    place: RoundPlace
    context: bytes
    model_and_releases: bytes
    silos: tuple[dict[str, Any], ...]


class RunRecord:
    """The coordinator's record of one run; implements :class:`~fedveil.run.journal.Witness`.

    Attributes:
        run: 16 bytes, unique to the run.

    Args:
        folder: the run folder, new or of an interrupted run.
        membership: the federation.
        identity: key of the coordinator.

    Raises:
        RunFolderError: the record is damaged.
    """

    def __init__(self, folder: RunFolder, membership: Membership, identity: IdentityKey) -> None:
        self.folder, self.run = folder, identify(folder)
        self.membership, self.identity = membership, identity
        self._log = LineLog(folder / ROUNDS)
        self._lines = self._log.read().complete
        self._terms = b""
        self._pending: _RoundSignatures | None = None
        self._agreed: dict[str, Any] = {}
        self._closing: Finalize | None = None

    def mend(self, done: int) -> None:
        """Remove the line of a round that was not released, and the incomplete line that a crash may leave.

        Args:
            done: number of released rounds of all parts.

        Raises:
            RunFolderError: lines of released rounds are missing.
        """
        if len(self._lines) < done:
            raise RunFolderError(
                f"{self.folder / ROUNDS}: {len(self._lines)} rounds, but {done} were released: put it back"
            )
        with writing(self._log.path, RunFolderError):
            if len(self._lines) > done:
                del self._lines[done:]
                self._log.replace(self._lines)
            self._log.mend()

    def propose(self, terms: Terms) -> None:
        """Persist the terms of a session, unless the file has them already."""
        self._terms, path = terms.digest, self.folder / TERMS
        before = read_content(path, RunFolderError, largest=LARGEST_FILE) if path.exists() else b""
        if terms.digest.hex() not in read_terms(before):
            document = {"membership": self.membership.to_toml(), "experiment": terms.experiment}
            self.folder.write(TERMS, before + canonical(document) + b"\n")

    def see(
        self, place: RoundPlace, request: tuple[bytes, bytes], answers: Answers, heads: Mapping[str, bytes]
    ) -> None:
        """Verify the silos' signatures that end a round, and hold them for :meth:`add`.

        Args:
            place: the round.
            request: X, and M | R.
            answers: last answers of the silos.
            heads: heads of their ledgers, by silo name.

        Raises:
            ProtocolError: a signature is not the silo's, or covers other data; names the silo.
        """
        silos, (context, model_and_releases) = [], request
        for silo, parts in answers.items():
            head = heads[self.membership.silos[silo]]
            signature = single_message(parts, Attestation, silo).signature
            self._check(
                silo,
                round_attestation(self.run, self._terms, place, context, model_and_releases, head),
                signature,
            )
            silos.append({"silo": silo, "head": head.hex(), "signature": signature.hex()})
        self._pending = _RoundSignatures(
            place=place, context=context, model_and_releases=model_and_releases, silos=tuple(silos)
        )

    def add(self, after: bytes, ledger: str) -> None:
        """Append the line of a round that is about to be released, durably.

        Args:
            after: digest of the resulting model, or of the released numbers. The line omits it if only the silos have
                the model.
            ledger: head of the run's ledger.
        """
        pending = self._pending
        assert pending is not None, "the silos sign a round before its line is added"
        self._pending = None
        part, number = pending.place
        model, released = pending.model_and_releases[:32], pending.model_and_releases[32:]
        line = {
            "schema_version": 1,
            "run": self.run.hex(),
            "terms": self._terms.hex(),
            "part": part,
            "round": number,
            "asked": pending.context.hex(),
            "model": model.hex(),
            "released": released.hex(),
            "next": (after if part or model != NOTHING else NOTHING).hex(),
            "ledger": ledger,
            "silos": list(pending.silos),
            "previous": self._last.hex(),
        }
        line |= {"signature": self._sign(line)}
        self.folder.append(ROUNDS, line)
        self._lines.append(canonical(line))

    def close(self, rounds: int, charges: int) -> list[SessionMessage]:
        """Sign the final files of the run; return the messages that ask the silos for their signatures.

        The result is empty if no session has begun in this process, so that there are no terms to sign.

        Args:
            rounds: number of complete training rounds.
            charges: number of charges of these rounds in the run's ledger.
        """
        if not self._terms:
            return []
        contents = canonical({"schema_version": 1, "hidden": os.urandom(32).hex(), "files": self._files()})
        self.folder.write(CONTENTS, contents)
        statement = read_content(self.folder / STATEMENT, RunFolderError)
        model = self.folder / MODEL
        self._agreed = {
            "schema_version": 1,
            "run": self.run.hex(),
            "terms": self._terms.hex(),
            "round": rounds,
            "charges": charges,
            "line": self._last.hex(),
            "statement": hashlib.sha256(statement).hexdigest(),
            "tensors": digests_of(read_content(model, RunFolderError, largest=LARGEST_FILE))
            if model.exists()
            else {},
            "contents": hashlib.sha256(contents).hexdigest(),
        }
        self._agreed["signature"] = self._sign(self._agreed)
        self._closing = Finalize(round=rounds, charges=charges, line=self._last, statement=statement.decode())
        self._agreed["silos"] = self._signed_before(self._closing)
        self._write()
        return [self._closing]

    def agree(self, silo: int, answer: Sequence[SessionMessage]) -> bool:
        """Add a silo's signature of the end if its last answer has a valid one; return whether it has.

        A refusal or an invalid signature is logged, and the run has ended all the same.
        """
        name = self.membership.silos[silo]
        closing = self._closing
        for part in answer:
            if isinstance(part, Declined):
                _log.warning(
                    "silo %s does not sign the statement: %s", name, part.why.describe(self.membership.silos)
                )
            if isinstance(part, Attestation) and closing is not None:
                try:
                    self._check(silo, final_attestation(self.run, self._terms, closing), part.signature)
                except ProtocolError as error:
                    _log.warning("silo %s: %s", name, error.reason)
                    return False
                other_entries = [entry for entry in self._agreed["silos"] if entry["silo"] != silo]
                entries = [*other_entries, {"silo": silo, "signature": part.signature.hex()}]
                self._agreed["silos"] = sorted(entries, key=lambda entry: int(entry["silo"]))
                self._write()
                return True
        return False

    def _signed_before(self, closing: Finalize) -> list[dict[str, Any]]:
        """Return the silos' signatures from an earlier session that are valid for this end of the run."""
        content, entries = final_attestation(self.run, self._terms, closing), []
        for entry in signed_end(self.folder.path):
            with suppress(ProtocolError):
                self._check(int(entry["silo"]), content, bytes.fromhex(entry["signature"]))
                entries.append(entry)
        return entries

    @property
    def _last(self) -> bytes:
        return hashlib.sha256(self._lines[-1]).digest() if self._lines else NOTHING

    def _files(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(content).hexdigest()
            for name, content in files_of(self.folder.path).items()
            # A write that was killed leaves its temporary file, which the next write of the same file replaces.
            if name not in MADE_LATER and name not in _TEMPORARY
        }

    def _write(self) -> None:
        self.folder.write(AGREED, canonical(self._agreed))

    def _sign(self, document: Mapping[str, Any]) -> str:
        return self.identity.sign(coordinator_attestation(document)).hex()

    def _check(self, silo: int, content: bytes, signature: bytes) -> None:
        try:
            self.membership.roster[silo].verify(content, signature)
        except CryptoError:
            raise ProtocolError("signs another text than it was asked to sign", silo=silo) from None


def identify(folder: RunFolder) -> bytes:
    """Return a run's identifier of 16 bytes from its folder; draw one at random if the folder is new.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / STATE
    if not path.exists():
        run = os.urandom(RUN_BYTES)
        folder.write_json(STATE, {"run": run.hex()})
        return run
    with reading(f"{path}, by which the silos know the run,", RunFolderError):
        run = bytes.fromhex(parse_json(read_content(path, RunFolderError), path, RunFolderError)["run"])
        if len(run) != RUN_BYTES:
            raise ValueError
        return run


def signed_end(folder: Path) -> list[dict[str, Any]]:
    """Return the silos' signatures of a run's end, each with the silo's number; empty before the end.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / AGREED
    if not path.exists():
        return []
    with reading(path, RunFolderError):
        return list(parse_json(read_content(path, RunFolderError), path, RunFolderError)["silos"])


def members_at_end(folder: Path) -> tuple[str, ...] | None:
    """Return the silos of the membership under which a run ended; None before the end.

    Raises:
        RunFolderError: a file is damaged.
    """
    path = folder / AGREED
    if not path.exists():
        return None
    with reading(path, RunFolderError):
        terms = parse_json(read_content(path, RunFolderError), path, RunFolderError)["terms"]
        membership, _ = read_terms(read_content(folder / TERMS, RunFolderError, largest=LARGEST_FILE))[terms]
    return membership.silos


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by relative path.

    Raises:
        RunFolderError: a file cannot be read, or is not a regular file.
    """
    return {
        path.relative_to(folder).as_posix(): read_content(path, RunFolderError, largest=LARGEST_FILE)
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def read_terms(content: bytes) -> dict[str, tuple[Membership, str]]:
    """Return the membership and the experiment of every line of ``terms.jsonl``, by T in hexadecimal.

    Raises:
        RunFolderError: a line is damaged; names the line.
    """
    terms = {}
    lines, torn = split_lines(content)
    for number, line in enumerate(lines, start=1):
        where = f"{TERMS}, line {number}"
        with reading(where, RunFolderError):
            document = parse_json(line, where, RunFolderError)
            membership = Membership.parse(str(document["membership"]), where)
            experiment = str(document["experiment"])
            if canonical({"membership": membership.to_toml(), "experiment": experiment}) != line:
                raise RunFolderError(f"{where}: not as it was written")
        terms[hashlib.sha256(membership.digest + experiment.encode()).hexdigest()] = membership, experiment
    if torn:
        raise RunFolderError(f"{TERMS}: its last line is torn")
    return terms

"""What the parties of a run sign of it, round by round and at its end, kept in the coordinator's run folder.

    terms.jsonl     one line for each terms that sessions were begun on: membership and experiment, with digest T
    rounds.jsonl    one line a round of any part: what every silo signed of it; the whole line signed by the coordinator
    silo_signatures.json     at the end: digests of statement, model and contents, signed by coordinator and silos
    checkpoint/contents.json    the digests of all files of the folder, with a random number: it stays in the folder

    silo, a round:  Ed25519 of "fedveil/3/attested" | run 16 | T 32 | round 4 | X 32 | M 32 | R 32 | ledger head 32
                    | part
    silo, the end:  Ed25519 of "fedveil/3/statement" | run 16 | T 32 | round 4 | last line 32 | statement 32

A part is a release (``prep/1``, ``eval/1``; ``1``, ``2``, ... of a document of releases), which is one round, or the
training, whose name is empty. X binds everything that the silo was asked
(:mod:`~fedveil.federation.transcript_binding`), M is SHA-256 of the round's model, zeros where there is none or the
silos alone have it; R of all that was released before it (:mod:`~fedveil.federation.audit.released_sums`). Each line
holds the digest of the one before it, and that of what its round ended with: the next model, or the release.

Claim: who has none of the keys cannot change what a silo or the coordinator signed, take a round out, or put one in
(:mod:`~fedveil.federation.audit.run_audit` looks, and says what the coordinator itself can). Nothing of it depends on a
record but through released models and numbers: the name of the session, which is told to silos alone, keeps X from
being tried out, and no digest of a silo's message is kept, with which guesses at it could be.
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

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import RunFolderError
from fedveil.federation.audit.released_sums import digest_of_all, digest_of_release
from fedveil.federation.exchange import Answers
from fedveil.federation.membership import Membership
from fedveil.files import LARGEST_FILE, parse_json, read_content, reading
from fedveil.protocols.errors import ProtocolError
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

_log = quiet_log("fedveil.coordinator")

ROUNDS: Final = "rounds.jsonl"
AGREED: Final = "silo_signatures.json"
TERMS: Final = "terms.jsonl"
CONTENTS: Final = "checkpoint/contents.json"
"""Digests of files with private numbers (times, who was drawn) could be tried out: the number in it hides them."""
MODEL: Final = "model.safetensors"
STATEMENT: Final = "privacy.json"
NOTHING: Final = bytes(32)
"""Stands for the digest of what is not there: a line before the first, a model that the silos alone have."""

MADE_LATER: Final = frozenset({AGREED, CONTENTS, "run_end.json", "report.html", "audit.json"})
"""Files of a run folder that are written once the run is signed, from what is signed: they are not."""


def known_before(told: Sequence[SessionMessage], phase: RunPart | None) -> bytes:
    """Return M and R of a round, by the letter that begins it and what the part that it is of began with."""
    model = (hashlib.sha256(part.encode()).digest() for part in told if isinstance(part, GlobalModel))
    released = () if phase is None else phase.released
    return next(model, NOTHING) + digest_of_all(map(digest_of_release, released))


RoundPlace = tuple[str, int]
"""A round by the name of its part and its number in it."""


def round_attestation(
    run: bytes, terms: bytes, place: RoundPlace, context: bytes, known: bytes, head: bytes
) -> bytes:
    """Return what a silo signs at the end of a round: T, X, M and R, and the end of its ledger."""
    part, number = place
    signed = run + terms + struct.pack(">I", number) + context + known + head
    return b"fedveil/3/attested" + signed + part.encode()


def final_attestation(run: bytes, terms: bytes, closing: Finalize) -> bytes:
    """Return what a silo signs at the end of a run."""
    told = hashlib.sha256(closing.statement.encode()).digest()
    return b"fedveil/3/statement" + run + terms + struct.pack(">I", closing.round) + closing.line + told


def coordinator_attestation(document: Mapping[str, Any]) -> bytes:
    """Return what the coordinator signs of a line, or of the end: all but signatures of the end's silos."""
    content = {key: value for key, value in document.items() if key != "signature"}
    if "statement" in content:
        content.pop("silos", None)
    return b"fedveil/3/record" + canonical(content)


def canonical(document: Any) -> bytes:
    """Return the text of a document, in the order of its keys."""
    return json.dumps(document, allow_nan=False).encode()


def arrays_of(content: bytes, place: object) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file.

    Raises:
        RunFolderError: it is none.
    """
    with reading(place, RunFolderError):
        try:
            found: dict[str, np.ndarray] = load_arrays(content)
        except SafetensorError:
            raise RunFolderError(f"{place} is damaged: no safetensors file") from None
    return found


def digests_of(tensors: bytes) -> dict[str, str]:
    """Return SHA-256 of every tensor of a model's file: its type, shape and numbers.

    Raises:
        RunFolderError: it is no safetensors file.
    """
    return {
        name: hashlib.sha256(
            f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        ).hexdigest()
        for name, array in sorted(arrays_of(tensors, MODEL).items())
    }


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What silos signed of the round that is about to be released.

    Attributes:
        place: of the round.
        context: X.
        known: M and R.
        silos: number, head of the ledger, and signature of each.
    """

    place: RoundPlace
    context: bytes
    known: bytes
    silos: tuple[dict[str, Any], ...]


class RunRecord:
    """The coordinator's record of one run.

    Args:
        folder: the run folder.
        run: 16 bytes that no other run has.
        membership: the federation.
        identity: the coordinator's key.

    Raises:
        RunFolderError: the record is damaged.
    """

    def __init__(self, folder: RunFolder, run: bytes, membership: Membership, identity: IdentityKey) -> None:
        self.folder, self.run = folder, run
        self.membership, self.identity = membership, identity
        self._lines: list[bytes] = []
        self._terms = b""
        self._seen: _Seen | None = None
        self._agreed: dict[str, Any] = {}
        self._closing: Finalize | None = None
        path = folder / ROUNDS
        if path.exists():
            self._lines = read_content(path, RunFolderError, largest=LARGEST_FILE).splitlines()

    def mend(self, done: int) -> None:
        """Leave out the line of a round that was not released, or that a crash tore.

        Args:
            done: rounds of all parts that were released.

        Raises:
            RunFolderError: lines of rounds that were released are missing.
        """
        if len(self._lines) < done:
            raise RunFolderError(
                f"{self.folder / ROUNDS}: {len(self._lines)} rounds, but {done} were released: put it back"
            )
        if len(self._lines) > done:
            del self._lines[done:]
            self.folder.write(ROUNDS, b"".join(line + b"\n" for line in self._lines))

    def propose(self, terms: Terms) -> None:
        """Keep the terms that a session is begun on."""
        self._terms, path = terms.digest, self.folder / TERMS
        before = read_content(path, RunFolderError, largest=LARGEST_FILE) if path.exists() else b""
        if terms.digest.hex() not in read_terms(before):
            document = {"membership": self.membership.to_toml(), "experiment": terms.experiment}
            self.folder.write(TERMS, before + canonical(document) + b"\n")

    def see(
        self, place: RoundPlace, asked: tuple[bytes, bytes], answers: Answers, heads: Mapping[str, bytes]
    ) -> None:
        """Take the signatures that end a round.

        Args:
            place: of the round.
            asked: X, and M with R.
            answers: what every silo answered last.
            heads: ends of their ledgers, by name.

        Raises:
            ProtocolError: one is not its silo's, or of something else; names the silo.
        """
        seen, (context, known) = [], asked
        for silo, parts in answers.items():
            head = heads[self.membership.silos[silo]]
            signature = single_message(parts, Attestation, silo).signature
            self._check(
                silo, round_attestation(self.run, self._terms, place, context, known, head), signature
            )
            seen.append({"silo": silo, "head": head.hex(), "signature": signature.hex()})
        self._seen = _Seen(place=place, context=context, known=known, silos=tuple(seen))

    def add(self, after: bytes, ledger: str) -> None:
        """Add the line of a round that is about to be released, durably.

        Args:
            after: digest of the model that it ends with, which is not told where the silos alone have it; or of what it
                released.
            ledger: head of the run's ledger.
        """
        seen = self._seen
        assert seen is not None
        self._seen = None
        part, number = seen.place
        model, released = seen.known[:32], seen.known[32:]
        line = {
            "schema_version": 1,
            "run": self.run.hex(),
            "terms": self._terms.hex(),
            "part": part,
            "round": number,
            "asked": seen.context.hex(),
            "model": model.hex(),
            "released": released.hex(),
            "next": (after if part or model != NOTHING else NOTHING).hex(),
            "ledger": ledger,
            "silos": list(seen.silos),
            "previous": self._last.hex(),
        }
        line |= {"signature": self._sign(line)}
        self.folder.append(ROUNDS, line)
        self._lines.append(canonical(line))

    def close(self, rounds: int, charges: int) -> list[SessionMessage]:
        """Sign what the run has left in its folder; return what the silos are asked to sign, nothing without terms.

        Args:
            rounds: complete ones of training.
            charges: of them, in the run's ledger.
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
        """Add a silo's signature of the end, if its answer to the last letter is one; return whether it is.

        The run has ended either way.
        """
        name = self.membership.silos[silo]
        closing = self._closing
        for part in answer:
            if isinstance(part, Declined):
                _log.warning("silo %s does not sign the statement: %s", name, part.why.sentence)
            if isinstance(part, Attestation) and closing is not None:
                try:
                    self._check(silo, final_attestation(self.run, self._terms, closing), part.signature)
                except ProtocolError as error:
                    _log.warning("silo %s: %s", name, error.reason)
                    return False
                others = [one for one in self._agreed["silos"] if one["silo"] != silo]
                found = [*others, {"silo": silo, "signature": part.signature.hex()}]
                self._agreed["silos"] = sorted(found, key=lambda one: int(one["silo"]))
                self._write()
                return True
        return False

    def _signed_before(self, closing: Finalize) -> list[dict[str, Any]]:
        """Return the silos' signatures that an earlier session has left of the same end."""
        content, found = final_attestation(self.run, self._terms, closing), []
        for one in signed_end(self.folder.path):
            with suppress(ProtocolError):
                self._check(int(one["silo"]), content, bytes.fromhex(one["signature"]))
                found.append(one)
        return found

    @property
    def _last(self) -> bytes:
        return hashlib.sha256(self._lines[-1]).digest() if self._lines else NOTHING

    def _files(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(content).hexdigest()
            for name, content in files_of(self.folder.path).items()
            if name not in MADE_LATER
        }

    def _write(self) -> None:
        self.folder.write(AGREED, canonical(self._agreed))

    def _sign(self, document: Mapping[str, Any]) -> str:
        return self.identity.sign(coordinator_attestation(document)).hex()

    def _check(self, silo: int, content: bytes, signature: bytes) -> None:
        try:
            self.membership.roster[silo].verify(content, signature)
        except CryptoError:
            raise ProtocolError("signs something else than what it was asked", silo=silo) from None


def signed_end(folder: Path) -> list[dict[str, Any]]:
    """Return the silos' signatures of the end of a run, each with the silo's number; none before it.

    Raises:
        RunFolderError: damaged.
    """
    path = folder / AGREED
    if not path.exists():
        return []
    with reading(path, RunFolderError):
        return list(parse_json(read_content(path, RunFolderError), path, RunFolderError)["silos"])


def members_at_end(folder: Path) -> tuple[str, ...] | None:
    """Return the silos of the membership under which a run ended; None before that.

    Raises:
        RunFolderError: damaged.
    """
    path = folder / AGREED
    if not path.exists():
        return None
    with reading(path, RunFolderError):
        terms = parse_json(read_content(path, RunFolderError), path, RunFolderError)["terms"]
        membership, _ = read_terms(read_content(folder / TERMS, RunFolderError, largest=LARGEST_FILE))[terms]
    return membership.silos


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their names in it.

    Raises:
        RunFolderError: one cannot be read, or is no plain file.
    """
    return {
        path.relative_to(folder).as_posix(): read_content(path, RunFolderError, largest=LARGEST_FILE)
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def read_terms(content: bytes) -> dict[str, tuple[Membership, str]]:
    """Return membership and experiment of every line of terms, by T in hexadecimal digits.

    Raises:
        RunFolderError: a line is none; names it.
    """
    found = {}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        place = f"{TERMS}, line {number}"
        with reading(place, RunFolderError):
            document = parse_json(line, place, RunFolderError)
            membership = Membership.parse(str(document["membership"]), place)
            experiment = str(document["experiment"])
            if canonical({"membership": membership.to_toml(), "experiment": experiment}) != line:
                raise RunFolderError(f"{place}: not as it was written")
        found[hashlib.sha256(membership.digest + experiment.encode()).hexdigest()] = membership, experiment
    if content and not content.endswith(b"\n"):
        raise RunFolderError(f"{TERMS}: its last line is torn")
    return found

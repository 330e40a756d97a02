"""What a bundle says of itself: the digests of its files, its manifest ``bundle.json``, and the signatures over both.

Claim: :func:`read_files` returns files with the bytes that were written, or raises an error that names the
    difference.

* ``SHA256SUMS`` lists the digest of every other file except the signatures; ``sha256sum --check`` reads it too.
* A zip archive must equal, byte for byte, the archive that :func:`write_files` makes of its files. So its headers hide
  nothing.
* The contents of a zip archive may not exceed its own length, whatever its headers say. So a small archive cannot
  exhaust memory.

Not claimed: protection against an attacker who can write the bundle, and with it another list of digests. Signatures
protect against this attacker. ``tests/test_bundle.py`` flips bits of every file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.data.column_checks import SEVERAL_TARGETS
from fedveil.data.records import Label, Task
from fedveil.errors import CryptoError, FedveilError
from fedveil.files import LARGEST_FILE, parse_json, read_content, reading, replace_file, writing
from fedveil.sanitize import sanitize
from fedveil.validation import DocumentTable, validate_document

# --- files of a bundle, in a folder or a zip archive, with digests of all bytes ---


class BundleError(FedveilError):
    """Error of a bundle that is missing, damaged, changed, or of another version; it names the file."""


SUMS: Final = "SHA256SUMS"
_NAME: Final = re.compile(r"(signatures/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LINE: Final = re.compile(r"([0-9a-f]{64})  (\S+)")
_MOST_FILES: Final = 1100  # a thousand silos may sign
_ENTRY: Final = b"PK\x01\x02"
"""Signature of a file entry in the central directory of a zip archive."""


def sums(files: Mapping[str, bytes]) -> bytes:
    """Return the content of ``SHA256SUMS``: one line per file except signatures, sorted by name."""
    lines = [
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n"
        for name in sorted(files)
        if name != SUMS and not name.startswith("signatures/")
    ]
    return "".join(lines).encode()


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a bundle: a zip archive if the path ends in ``.zip``, else a folder.

    Raises:
        BundleError: the path exists, or cannot be written.
    """
    if path.exists():
        raise BundleError(f"{path} exists already; choose another name")
    with writing(path, BundleError):
        if path.suffix == ".zip":
            replace_file(path, _zipped(files))
            return
        for name, content in files.items():
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, content)


def add_file(path: Path, name: str, content: bytes) -> None:
    """Add a file to a bundle.

    Raises:
        BundleError: the bundle is damaged, already has a file of this name, or cannot be written.
    """
    files = read_files(path)
    if name in files:
        raise BundleError(f"{path}: has {name} already")
    with writing(path, BundleError):
        if path.is_dir():
            (path / name).parent.mkdir(exist_ok=True)
            replace_file(path / name, content)
        else:
            replace_file(path, _zipped({**files, name: content}))


def read_files(path: Path) -> dict[str, bytes]:
    """Return the files of a bundle by name, after a check of every file against its digest.

    Raises:
        BundleError: the path is no bundle, or a file is missing, changed or not listed; the error names the file.
    """
    files = _from_folder(path) if path.is_dir() else _from_zip(path)
    if SUMS not in files:
        raise BundleError(f"{path}: no bundle: it has no {SUMS}")
    listed: dict[str, str] = {}
    with reading(f"{path}: {SUMS}", BundleError):
        lines = files[SUMS].decode("ascii").splitlines()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise BundleError(f"{path}: {SUMS}, line {number}: not a digest and a name")
        listed[match[2]] = match[1]
    for name in listed:
        if name not in files:
            raise BundleError(f"{path}: {sanitize(name)} is listed in {SUMS}, but missing")
    for name, content in files.items():
        if name == SUMS or name.startswith("signatures/"):
            continue
        if name not in listed:
            raise BundleError(f"{path}: {sanitize(name)} is not listed in {SUMS}: it was added or renamed")
        if hashlib.sha256(content).hexdigest() != listed[name]:
            raise BundleError(
                f"{path}: {name} has changed since the bundle was written: its digest is another"
            )
    # Every listed digest is right by now. Comparing the bytes also refuses another order, or a line twice.
    if files[SUMS] != sums(files):
        raise BundleError(f"{path}: {SUMS} is not as it was written")
    return files


def _from_folder(path: Path) -> dict[str, bytes]:
    names: list[str] = []
    with reading(path, BundleError):
        for root, _, inside in os.walk(path):
            names += [(Path(root) / name).relative_to(path).as_posix() for name in inside]
            if len(names) > _MOST_FILES:  # inside the loop: a huge folder is not listed to its end
                raise BundleError(f"{path}: more than {_MOST_FILES} files: no bundle")
    for name in names:
        _check_name(path, name)
    return {name: read_content(path / name, BundleError, largest=LARGEST_FILE) for name in sorted(names)}


def _from_zip(path: Path) -> dict[str, bytes]:
    content = read_content(path, BundleError, largest=LARGEST_FILE)
    if (
        content.count(_ENTRY) > _MOST_FILES
    ):  # counted before `zipfile` parses the entries into objects, which take many times their bytes
        raise BundleError(f"{path}: more than {_MOST_FILES} files: no bundle")
    try:
        with reading(path, BundleError), zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            # Stored entries are no longer than the archive. Overlapping entries could claim the same bytes many
            # times.
            if sum(entry.file_size for entry in entries) > len(content):
                raise BundleError(f"{path} is damaged, or no bundle: its files have more bytes than it has")
            for entry in entries:
                _check_name(path, entry.filename)
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise BundleError(f"{path}: {entry.filename} is compressed; a bundle's files are not")
            files = {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, RuntimeError) as error:  # RuntimeError: an entry is marked as encrypted
        raise BundleError(f"{path} is damaged, or no zip archive ({sanitize(str(error))})") from None
    if _zipped(files) != content:
        raise BundleError(
            f"{path} has changed since the bundle was written: the archive is not that of its files"
        )
    return files


def _check_name(path: Path, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BundleError(f"{path}: '{sanitize(name)}' is no file of a bundle")


def _zipped(files: Mapping[str, bytes]) -> bytes:
    """Return the unique archive of these files: uncompressed, sorted, independent of time and machine."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = (
                3,
                0o644 << 16,
            )  # 3: Unix; zipfile's default depends on the OS
            archive.writestr(entry, files[name])
    return stream.getvalue()


# --- manifest and signatures ---


# --- manifest ---

NAME: Final = "bundle.json"
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class ModelPart(DocumentTable):
    """The network: a shipped name, an import path, or ``session:NAME`` for a Python object."""

    name: str
    seed: int
    outputs: Annotated[int, Field(ge=1)]
    parameters: Annotated[int, Field(ge=1)]


class InputPart(DocumentTable):
    """Form of a record: shape, column names (None if none), and the affine map to the model's input.

    With ``schema_file``, the columns are encoded by that schema.
    """

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    columns: tuple[str, ...] | None
    factor: _Finite
    shift: _Finite
    schema_file: Literal["schema.toml"] | None


class LedgerPart(DocumentTable):
    """End of the run's ledger: number of charges, and digest of the last line."""

    count: Annotated[int, Field(ge=0)]
    digest: _Digest


class Reached(DocumentTable):
    """A test metric.

    A released metric has its 95 % interval for the population, with None for an open end.
    """

    estimate: _Finite | None
    low: _Finite | None = None
    high: _Finite | None = None


class Manifest(DocumentTable):
    """The manifest document.

    Attributes:
        fedveil: version of fedveil that wrote the bundle.
        run: name of the run.
        about: purpose and intended users of the model, in its maker's words.
        model: the network.
        input: form of a record.
        task: task of the model.
        classes: labels in the order of their numbers.
        targets: names of k labels or numbers to predict, in the order of the outputs; empty for any other task.
        rounds: number of completed rounds.
        test: origin of the metrics. "public": exact metrics of a public table, which no guarantee covers. "released":
            metrics of private records, released with noise within the stated epsilon. "private": the test records are
            private and nothing was released, so the bundle has no metrics.
        metrics: metrics after the last round.
        ledger: end of the run's ledger.
        experiment: the resolved experiment without the locations of its data.
    """

    schema_version: Literal[2] = 2
    fedveil: str
    run: str
    about: Annotated[str, Field(max_length=10_000)]
    model: ModelPart
    input: InputPart
    task: Task
    classes: tuple[Label, ...]
    targets: tuple[str, ...] = ()
    rounds: Annotated[int, Field(ge=0)]
    test: Literal["public", "released", "private"]
    metrics: dict[str, Reached]
    ledger: LedgerPart
    experiment: dict[str, Any]

    @field_validator("experiment")
    @classmethod
    def _data_are_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("data", {}), dict):
            raise ValueError("data: not a table of keys")
        return value

    @model_validator(mode="after")
    def _classes_fit(self) -> Self:
        labels, outputs = len(self.classes), self.model.outputs
        several = outputs if self.task in SEVERAL_TARGETS else 0
        if len(self.targets) != several or len(set(self.targets)) != several:
            raise ValueError(
                f"targets: {several} different names are needed, for {outputs} outputs of a {self.task}"
            )
        if self.task != "classification" and labels:
            raise ValueError(f"classes: a {self.task} has none")
        if self.task == "classification" and (
            labels < 2 or outputs not in ((1, 2) if labels == 2 else (labels,))
        ):
            raise ValueError(f"classes: {labels} of them, and the model has {outputs} outputs")
        return self

    def __repr__(self) -> str:
        return (
            f"Manifest(run='{self.run}', model='{self.model.name}', task='{self.task}', rounds={self.rounds})"
        )

    __str__ = __repr__

    def to_bytes(self) -> bytes:
        """Return the content of ``bundle.json``."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the content of ``bundle.json``.

        Raises:
            BundleError: the document has another version or is no manifest; the error names the key.
        """
        document = parse_json(content, NAME, BundleError)
        if isinstance(document, dict) and document.get("schema_version") != 2:
            raise BundleError(
                f"{NAME}: schema version {document.get('schema_version')!r}; this fedveil reads version 2"
            )
        return validate_document(cls, document, NAME, BundleError)


# --- signatures ---

# Domain separation: the same identity key also signs messages of a federation.
_PURPOSE: Final = b"fedveil bundle, version 1\n"


@dataclass(frozen=True)
class Signature:
    """A signer's public identity and its Ed25519 signature."""

    public: PublicIdentity
    raw: bytes

    def to_bytes(self) -> bytes:
        """Return the content of the signature file.

        The encoding is unique, so that a reader can compare bytes.
        """
        document = {"schema_version": 1, "public": self.public.raw.hex(), "signature": self.raw.hex()}
        return (json.dumps(document, indent=2) + "\n").encode()


def sign(path: Path, key: IdentityKey) -> Path:
    """Sign an intact bundle; return the name of the signature file.

    Raises:
        BundleError: the bundle is damaged, or this key has already signed it.
    """
    files = read_files(path)
    signature = Signature(key.public, key.sign(_PURPOSE + files[SUMS]))
    name = _name(key.public)
    add_file(path, name, signature.to_bytes())
    return Path(name)


def signatures(files: Mapping[str, bytes]) -> tuple[PublicIdentity, ...]:
    """Return the identities that signed a bundle, after verification of every signature.

    Raises:
        BundleError: a signature is damaged, or is not over these files; the error names it.
    """
    signers = []
    for name in sorted(files):
        if not name.startswith("signatures/"):
            continue
        with reading(name, BundleError):
            document = parse_json(files[name], name, BundleError)
            try:
                public = PublicIdentity(bytes.fromhex(document["public"]))
                signature = Signature(public, bytes.fromhex(document["signature"]))
                public.verify(_PURPOSE + files[SUMS], signature.raw)
            except CryptoError as error:
                raise BundleError(
                    f"{name}: {error}: the bundle was changed after it was signed, or the signature was"
                ) from None
            if signature.to_bytes() != files[name] or name != _name(public):
                raise BundleError(f"{name} is not as it was written")
        signers.append(public)
    return tuple(signers)


def _name(public: PublicIdentity) -> str:
    return f"signatures/{hashlib.sha256(public.raw).hexdigest()[:16]}.json"

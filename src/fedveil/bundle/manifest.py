"""Manifest of a bundle, ``bundle.json``, and its Ed25519 signatures over the digests of all its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedveil.bundle.archive import SUMS, BundleError, add_file, read_files
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.data.column_checks import SEVERAL_TARGETS
from fedveil.data.records import Label, Task
from fedveil.errors import CryptoError
from fedveil.files import parse_json, reading
from fedveil.validation import DocumentTable, validate_document

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
    made = Signature(key.public, key.sign(_PURPOSE + files[SUMS]))
    name = _name(key.public)
    add_file(path, name, made.to_bytes())
    return Path(name)


def signatures(files: Mapping[str, bytes]) -> tuple[PublicIdentity, ...]:
    """Return the identities that signed a bundle, after verification of every signature.

    Raises:
        BundleError: a signature is damaged, or is not over these files; the error names it.
    """
    found = []
    for name in sorted(files):
        if not name.startswith("signatures/"):
            continue
        with reading(name, BundleError):
            document = parse_json(files[name], name, BundleError)
            try:
                public = PublicIdentity(bytes.fromhex(document["public"]))
                made = Signature(public, bytes.fromhex(document["signature"]))
                public.verify(_PURPOSE + files[SUMS], made.raw)
            except CryptoError as error:
                raise BundleError(
                    f"{name}: {error}: the bundle was changed after it was signed, or the signature was"
                ) from None
            if made.to_bytes() != files[name] or name != _name(public):
                raise BundleError(f"{name} is not as it was written")
        found.append(public)
    return tuple(found)


def _name(public: PublicIdentity) -> str:
    return f"signatures/{hashlib.sha256(public.raw).hexdigest()[:16]}.json"

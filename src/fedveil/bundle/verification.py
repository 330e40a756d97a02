"""Verification of a bundle: bytes, signatures, ledger, and epsilon recomputed from recorded events.

Claim: a bundle that passes has these properties.

* The stated epsilon is not below the cost of the ledger's events, by every accountant that the statement names, at
the
  delta of its experiment. The bundle states no epsilon if the experiment fixes the seed of its noise.
* The ledger is one unbroken hash chain, and the manifest contains its end.
* The bytes of the bundle are those that each listed key signed.

Not claimed: the facts in :data:`NOT_CHECKABLE`, which no file can prove.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final

import fedveil
from fedveil.arguments import explain_arguments_as
from fedveil.bundle.bundle import Bundle, load_bundle
from fedveil.bundle.card import CARD, model_card
from fedveil.bundle.manifest import NAME, BundleError, read_files, signatures
from fedveil.checks import Check, Unchecked, Verification, check_trusted, not_checkable, run_check
from fedveil.errors import FedveilError
from fedveil.federation.audit.recorded_run import RecordedRun
from fedveil.files import as_path, reading
from fedveil.privacy.ledger import Head, read_entries, read_head
from fedveil.privacy.statement import check_epsilons, check_same_events, check_same_privacy
from fedveil.sanitize import sanitize

NOT_CHECKABLE: Final = {
    "noise": "that it was drawn as the statement says, by an unmodified program, on a machine that nobody else read",
    "training": "that the model results from these events, and the metrics from these test records",
    "events": "that each recorded event is what its round really released",
    "other parties": "that server and silos saw only the recorded events, and published figures",
    "second opinion": "epsilon by an independent program: `python verifier/verify.py PATH`, in the source repository",
    "wording": "the statement's words on mechanisms, data and reasons: figures are recomputed, words are not",
    "other releases": "what else was, or will be, released from the same records: other runs add to epsilon",
    "not covered": "whatever the statement lists as not covered",
}
"""Facts that no file can prove, by the name of their row in the result."""


@explain_arguments_as("verify")
def verify_bundle(
    path: str | Path, trusted: Sequence[str] = (), charter: str | Path | None = None
) -> Verification:
    """Check a bundle; a failure is a check with the outcome "fails", not an exception.

    Args:
        path: the folder, or the ``.zip``.
        trusted: public keys of 64 hexadecimal digits; each of them must have signed the bundle.
        charter: charter of the federation that trained the model; None: the signature on the membership is not
            compared with a charter.

    Returns:
        All checks with their outcomes, and the list of facts that cannot be checked.

    Raises:
        ConfigError: a trusted key is invalid, or an argument is no path.
    """
    path = as_path(path, "verify")
    charter = None if charter is None else as_path(charter, "verify: charter")
    check_trusted(trusted)
    checks: list[Check] = []
    try:
        files = read_files(path)
        bundle = load_bundle(path)
    except FedveilError as error:
        return Verification(
            path=path,
            checks=(Check(name="files", outcome="fails", detail=str(error)), *not_checkable(NOT_CHECKABLE)),
        )
    checks.append(Check(name="files", outcome="holds", detail=f"{len(files)} files, each with its digest"))
    # The readers of a ledger take a path, and a zip archive has none for its files.
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        ledger.write_bytes(files.get("ledger.jsonl", b""))
        checks.append(run_check("model", lambda: _model(bundle)))
        checks.append(run_check("card", lambda: _card(bundle, files)))
        checks.append(run_check("ledger", lambda: _chain(bundle, ledger)))
        checks.append(
            run_check("statement", lambda: check_same_events(bundle.statement, read_entries(ledger)))
        )
    # Without this check, a bundle could state a small epsilon at a larger delta than its experiment set.
    checks.append(run_check("experiment", lambda: _asked(bundle)))
    checks.extend(check_epsilons(bundle.statement))
    run = RecordedRun(files)
    if run.is_federated or charter is not None:
        checks.extend(run.check_signatures(charter, has_all_files=False))
    checks.append(run_check("signatures", lambda: _signed(files, trusted)))
    return Verification(path=path, checks=(*checks, *not_checkable(NOT_CHECKABLE)))


def _model(bundle: Bundle) -> str:
    """Check that all weights are finite."""
    tensors = bundle.tensors()
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise BundleError(f"tensor '{name}' has a NaN or an infinity")
    return f"{len(tensors)} tensors, all finite"


def _card(bundle: Bundle, files: dict[str, bytes]) -> str:
    """Check that the card is the page of this manifest and this statement, if the same version wrote it."""
    if bundle.manifest.fedveil != fedveil.__version__:
        raise Unchecked(f"version {bundle.manifest.fedveil} of fedveil wrote it, whose texts may differ")
    if files.get(CARD) != model_card(bundle.manifest, bundle.statement).encode():
        raise BundleError(f"{CARD} is not the page of this manifest and this statement")
    return "the page of this manifest and this statement"


def _chain(bundle: Bundle, ledger: Path) -> str:
    """Check that the ledger ends at the head in the manifest, and charges every round of the model."""
    recorded, head = bundle.manifest.ledger, read_head(ledger)
    if head != Head(count=recorded.count, digest=recorded.digest):
        raise BundleError(
            f"the ledger has {head.count} charges, and is not the one that ended after {recorded.count}"
        )
    # Charges of another run pay for none of this one's rounds; side releases have names of their own.
    charged = {entry.round for entry in read_entries(ledger) if entry.run == bundle.manifest.run}
    first = next(number for number in count(1) if number not in charged)  # the first round without a charge
    if first <= bundle.manifest.rounds:
        raise BundleError(
            f"{bundle.manifest.rounds} rounds made the model, and round {first} was not charged"
        )
    return f"{head.count} charges, one chain, ending where the manifest says, every round among them"


def _asked(bundle: Bundle) -> str:
    """Check the statement's |U|, delta, accountant and noise seed against the experiment and the schema."""
    statement, schema = bundle.statement, bundle.schema
    with reading(f"{NAME}: experiment", BundleError):
        privacy, data = (bundle.manifest.experiment[key] for key in ("privacy", "data"))
        users = data.get("n_users") if schema is None else schema.n_users
        if statement.units != users:
            raise BundleError(
                f"the statement counts {statement.units} users, and {sanitize(str(users))} are declared"
            )
        seed = privacy.get("insecure_seed")
        return check_same_privacy(
            statement, delta=privacy["delta"], accountant=privacy["accountant"], seed=seed
        )


def _signed(files: dict[str, bytes], trusted: Sequence[str]) -> str:
    """Check all signatures, and that every trusted key has signed."""
    signers = [public.raw.hex() for public in signatures(files)]
    missing = [key for key in trusted if key not in signers]
    if missing:
        raise BundleError(f"not signed by the trusted key {missing[0][:16]}...")
    if not signers:
        raise Unchecked(
            "the bundle has no signature: any party that could write the bundle could write another"
        )
    unknown = [key for key in signers if key not in trusted]
    summary = f"{len(signers)} valid"
    if unknown:
        summary += (
            f"; whose the key {unknown[0][:16]}... is was not asked: --trust names the keys that you know"
        )
    return summary

"""Verify a run folder: signatures, the chain of its record, and the statement from recorded events.

A run is an experiment, with or without side releases, or a document of releases.

Claim: without the coordinator's key, no byte of the files listed at the run's end can be changed unnoticed. Without
the keys of a quorum of silos and of the coordinator, no round of any part can be changed, inserted, or removed before
the last. If all silos have signed the end, the statement charges every round with a contribution of an honest silo,
and no honest silo has contributed since.

Released numbers are those of the record. Silos receive the numbers of every release but the last, and sign them with
the next round. The last release stands in the record's last line, and an honest silo signs one such line per run. The
meaning of the numbers follows from the signed terms and the agreed schema (:mod:`~.released_files`).

Not claimed: that the coordinator wrote the right numbers into the record first. It can omit the line of a training
round that it ended; it must state the charge of that round, which an exported ledger shows. It can write a last
release, or last model, that differs from the sum. Not claimed: that a silo trained honestly (:data:`NOT_CHECKABLE`);
the check shows which parties agreed to which data. Condition: the membership is the right one, which the founder's
signature shows to a reader with the charter. ``tests/test_run_audit.py`` and ``tests/test_parts_audit.py`` flip bytes
of every file.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fedveil.checks import Check, Unchecked, Verification, not_checkable, run_check
from fedveil.crypto.keys import PublicIdentity
from fedveil.errors import CryptoError, FedveilError, IntegrityError
from fedveil.federation.audit.ledger_audit import LedgerExport
from fedveil.federation.audit.released_files import FILES, RecordLine, check_releases, check_schema
from fedveil.federation.audit.run_record import (
    AGREED,
    CONTENTS,
    MADE_LATER,
    MODEL,
    NOTHING,
    ROUNDS,
    STATE,
    STATEMENT,
    TERMS,
    RoundPlace,
    arrays_of,
    canonical,
    coordinator_attestation,
    digests_of,
    files_of,
    final_attestation,
    read_terms,
    round_attestation,
)
from fedveil.federation.membership import Charter, Membership
from fedveil.federation.terms import (
    DOCUMENTS,
    EXPERIMENT,
    RunRules,
    parse_terms,
    public_text,
    without_trainer,
)
from fedveil.files import as_text, parse_json, parse_toml, reading
from fedveil.line_log import split_lines
from fedveil.privacy.ledger import Entry, parse_lines
from fedveil.privacy.statement import Statement, check_epsilons, check_same_events, check_same_privacy
from fedveil.protocols.session_messages import Finalize
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.documents import RoundRow, read_line
from fedveil.run.folder.run_folder import PREPROCESSED, SCHEMA
from fedveil.run.releases.side_releases import BESIDE
from fedveil.sanitize import sanitize

LEDGER: Final = "ledger.jsonl"
CHECKPOINT: Final = "checkpoint/state.safetensors"
METRICS: Final = "metrics.jsonl"
_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class _Line:
    """A line of the record with valid signatures.

    Attributes:
        content: its bytes.
        data: its parsed content.
    """

    content: bytes
    data: Mapping[str, Any]


class RecordedRun:
    """Files of a run, by name; a subset, such as the files of a bundle, is enough.

    Args:
        files: content of the files, by name.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._terms: dict[str, tuple[Membership, str]] = {}
        self._lines: list[_Line] = []
        self._unplayed = frozenset[RoundPlace]()

    # --- what any run has --------------------------------------------------------------------------------------

    @property
    def read_statement(self) -> Statement:
        """Statement of the run.

        Raises:
            FedveilError: the statement is missing or damaged.
        """
        return Statement.from_json(parse_json(self._file(STATEMENT), STATEMENT, IntegrityError), STATEMENT)

    @property
    def charges(self) -> tuple[Entry, ...]:
        """Charges of the run's ledger.

        Raises:
            FedveilError: the ledger is missing or damaged.
        """
        lines, _, complete = parse_lines(Path(LEDGER), self._file(LEDGER))
        if complete != len(self._file(LEDGER)):
            raise IntegrityError(f"{LEDGER}: its last line is torn")
        return tuple(line for line in lines if isinstance(line, Entry))

    def ledger(self) -> str:
        """Check that the ledger is one chain."""
        return f"{len(self.charges)} charges, one chain"

    def statement(self) -> str:
        """Check that the statement's events are those of the ledger."""
        if STATEMENT not in self._files:
            raise Unchecked("the run has not ended: it has no statement")
        return check_same_events(self.read_statement, self.charges)

    def released(self) -> str:
        """Check that the ledger charges every round and release whose result is in the folder of an unsigned run.

        A ledger and a statement that both lack a charge agree with each other.
        """
        document = self._document
        results = [(document.name, number) for number in range(1, self._last_round() + 1)]
        for name, prefix in FILES.items():
            if name in self._files:
                with reading(name, IntegrityError):
                    count = len(parse_json(self._files[name], name, IntegrityError)["releases"])
                numbers = range(1, count + 1)
                results += (
                    [(f"{document.name}/{prefix}{number}", BESIDE) for number in numbers]
                    if prefix
                    else [(document.name, number) for number in numbers]
                )
        charged = {(entry.run, entry.round) for entry in self.charges}
        if lost := [result for result in results if result not in charged]:
            run, number = lost[0]
            missing = f"round or release {number}" if number else f"release {sanitize(run)}"
            raise IntegrityError(f"{LEDGER}: does not charge {missing}, whose result is there")
        return f"{len(results)} rounds and releases, each charged"

    def _last_round(self) -> int:
        """Return the last training round that left metrics or a checkpoint; 0 without one."""
        rounds = [0]
        if METRICS in self._files:
            lines, _ = split_lines(self._files[METRICS])
            rounds += [read_line(line, METRICS, RoundRow)[0].round for line in lines]
        if CHECKPOINT in self._files:
            content = self._files[CHECKPOINT]
            with reading(CHECKPOINT, IntegrityError):  # 8 bytes of length, then the header
                header = content[8 : 8 + int.from_bytes(content[:8], "little")]
                rounds.append(int(parse_json(header, CHECKPOINT, IntegrityError)["__metadata__"]["round"]))
        return max(rounds)

    # --- what the parties of a federation signed -----------------------------------------------------------------

    @property
    def is_federated(self) -> bool:
        """Return whether the run belongs to a federation."""
        return bool({STATE, ROUNDS, AGREED} & self._files.keys())

    def check_signatures(self, charter: Path | None, *, has_all_files: bool) -> Sequence[Check]:
        """Check all signatures of the run.

        A run in one process has no signatures; with a charter, its check fails.

        Args:
            charter: charter of the federation; None: the founder's signature is not checked.
            has_all_files: whether all files of the run are present.
        """
        if not self.is_federated:
            sealed = charter is not None
            detail = "a run in one process: nobody signed it" + ", under no charter" * sealed
            return (Check(name="signatures", outcome="fails" if sealed else "unchecked", detail=detail),)
        checks = [
            run_check("membership", lambda: self._memberships(charter)),
            run_check("rounds", self._rounds),
            run_check("end", lambda: self._end(has_all_files)),
        ]
        if SCHEMA in self._files and PREPROCESSED not in self._files:
            checks.append(
                run_check("schema", lambda: check_schema(self._files[SCHEMA], self._terms.values()))
            )
        record = [self._record_line(line.data) for line in self._lines]
        if any(line.part for line in record) or self._files.keys() & FILES:
            checks.append(
                run_check(
                    "releases", lambda: check_releases(self._files, record, has_all_files=has_all_files)
                )
            )
        return checks

    def _record_line(self, data: Mapping[str, Any]) -> RecordLine:
        membership, experiment = self._terms_of(ROUNDS, data)
        return RecordLine(
            part=data["part"], digest=data["next"], membership=membership, experiment=experiment
        )

    def _memberships(self, charter: Path | None) -> str:
        self._terms = read_terms(self._file(TERMS))
        memberships = [membership for membership, _ in self._terms.values()]
        if not memberships:
            raise IntegrityError("the terms of the run are missing")
        words = ", ".join(
            f"serial {membership.serial} ({membership.fingerprint})" for membership in memberships
        )
        if charter is None:
            raise Unchecked(
                f"{words}; its seal was not checked: --charter names the charter that you received"
            )
        for membership in memberships:
            membership.check_seal(Charter.read(charter))
        return f"{words}, sealed by the charter's founder"

    def same_document(self) -> str:
        """Check that the document is the one that the statement describes and that the silos received."""
        name, document = self._place_of_document, self._document
        if STATEMENT in self._files:
            privacy, statement, users = document.privacy, self.read_statement, document.data.n_users
            check_same_privacy(
                statement, delta=privacy.delta, accountant=privacy.accountant, seed=privacy.insecure_seed
            )
            if document.data.table is None and statement.units != users:
                raise IntegrityError(
                    f"the statement counts {statement.units} users, and {users} are declared"
                )
        if not self.is_federated:
            raise Unchecked(f"{document.name}: no other party holds a copy of it")
        for membership, experiment in read_terms(self._file(TERMS)).values():
            if without_trainer(
                public_text(document, membership.silos, parse_terms(experiment)[1])
            ) != without_trainer(experiment):
                raise IntegrityError(f"{name}: not the document that the silos received")
        return f"{document.name}: the one that the silos were asked for"

    def _rounds(self) -> str:
        """Check every line of the record: format, chain, models, position, releases, charge, and signatures."""
        previous, model, trained, signatures = NOTHING, None, 0, 0
        parts, released, releases = set[str](), hashlib.sha256(), 0
        lines, torn = split_lines(self._files.get(ROUNDS, b""))
        if torn:
            raise IntegrityError(f"{ROUNDS}: its last line is torn")
        heads = parse_lines(Path(LEDGER), self._file(LEDGER))[1]
        # A round may have several charges; its line names the ledger head at the release, after the last of them.
        charged = {self._place(entry): heads[entry.index] for entry in self.charges}
        for number, line in enumerate(lines, start=1):
            where = f"{ROUNDS}, line {number}"
            with reading(where, IntegrityError):
                data = parse_json(line, where, IntegrityError)
                trained += data["part"] == ""
                due = trained if data["part"] == "" else 1
                if canonical(data) != line or (data["schema_version"], data["round"]) != (1, due):
                    raise IntegrityError(f"{where}: not as it was written")
                if bytes.fromhex(data["previous"]) != previous:
                    raise IntegrityError(f"{where}: does not continue the line before it")
                if model is not None and data["part"] == "" and data["model"] != model:
                    raise IntegrityError(
                        f"{where}: begins with another model than the round before it ended with"
                    )
                membership, experiment = self._terms_of(where, data)
                attendance = RunRules.from_terms(experiment, len(membership.silos))
                if fault := attendance.position_error(data["part"], parts, data["model"], model):
                    raise IntegrityError(f"{where}: {fault}")
                if data["released"] != (released.digest() if releases else NOTHING).hex():
                    raise IntegrityError(
                        f"{where}: the silos received other releases than the lines before it have"
                    )
                round_place = data["part"], due
                if charged.pop(round_place, None) != data["ledger"]:
                    raise IntegrityError(
                        f"{where}: {LEDGER} does not charge {_named(round_place)} as the line says"
                    )
                self._check_line(where, data)
                signatures += len(data["silos"])
                previous = hashlib.sha256(line).digest()
                # Releases leave the model unchanged: the next training round must continue from the last training
                # round.
                model = data["next"] if data["part"] == "" else model
                parts.add(data["part"].partition("/")[0])
                if data["part"]:
                    released.update(bytes.fromhex(data["next"]))
                    releases += 1
                self._lines.append(_Line(line, data))
        # Charges left over have no line: a training round that was not released, or a removed line of a release (see
        # _end).
        self._unplayed = frozenset(charged)
        return f"{len(self._lines)} rounds, one chain; {signatures} signatures of silos, and the coordinator's on each"

    def _check_line(self, where: str, data: Mapping[str, Any]) -> None:
        """Check the coordinator's signature and the silos' signatures of one line."""
        membership, experiment = self._terms_of(where, data)
        run, terms, context = (bytes.fromhex(data[key]) for key in ("run", "terms", "asked"))
        model_and_releases = bytes.fromhex(data["model"]) + bytes.fromhex(data["released"])
        if run.hex() != self._run():
            raise IntegrityError(f"{where}: of another run")
        _verify(
            f"{where}: the coordinator",
            membership.coordinator,
            coordinator_attestation(data),
            data["signature"],
        )
        if not _DIGEST.fullmatch(str(data.get("next"))):
            raise IntegrityError(f"{where}: the field next, which the coordinator signed, is no digest")
        numbers = [silo["silo"] for silo in data["silos"]]
        silos = len(membership.silos)
        if not numbers or numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < silos:
            raise IntegrityError(f"{where}: signed by no silo, twice by one, or by none of the {silos}")
        least = RunRules.from_terms(experiment, silos).quorum
        if len(numbers) < least:
            raise IntegrityError(f"{where}: signed by {len(numbers)} silos, and a round needs {least}")
        for silo in data["silos"]:
            name = membership.silos[silo["silo"]]
            head = bytes.fromhex(silo["head"])
            content = round_attestation(
                run, terms, (data["part"], data["round"]), context, model_and_releases, head
            )
            _verify(f"{where}: silo {name}", membership.roster[silo["silo"]], content, silo["signature"])

    def _end(self, has_all_files: bool) -> str:
        """Check the signed end of the run: record, statement, files and tensors, and the silos' signatures."""
        if AGREED not in self._files:
            raise Unchecked("no silo has signed a statement: the run has not ended, and can be resumed")
        content = self._files[AGREED]
        with reading(AGREED, IntegrityError):
            data = parse_json(content, AGREED, IntegrityError)
            if canonical(data) != content or data["schema_version"] != 1 or data["run"] != self._run():
                raise IntegrityError(f"{AGREED}: not as it was written, or of another run")
            membership, _ = self._terms_of(AGREED, data)
            _verify(
                f"{AGREED}: the coordinator",
                membership.coordinator,
                coordinator_attestation(data),
                data["signature"],
            )
            last = hashlib.sha256(self._lines[-1].content).hexdigest() if self._lines else NOTHING.hex()
            if (data["round"], data["line"]) != (len(self._trained), last):
                raise IntegrityError(f"{AGREED}: the record of rounds does not end where it says")
            if missing := sorted(part for part, _ in self._unplayed if part):
                raise IntegrityError(
                    f"{ROUNDS}: no line for release {sanitize(missing[0])}, which was charged"
                )
            if hashlib.sha256(self._file(STATEMENT)).hexdigest() != data["statement"]:
                raise IntegrityError(f"{STATEMENT}: not the statement that was signed")
            files = self._contents(data["contents"]) if has_all_files else frozenset[str]()
            self._same_tensors(data["tensors"])
            closing = Finalize(
                round=data["round"],
                charges=data["charges"],
                line=bytes.fromhex(data["line"]),
                statement=as_text(self._file(STATEMENT), STATEMENT, IntegrityError),
            )
            for silo in data["silos"]:
                name = membership.silos[silo["silo"]]
                attestation = final_attestation(
                    bytes.fromhex(data["run"]), bytes.fromhex(data["terms"]), closing
                )
                _verify(
                    f"{AGREED}: silo {name}", membership.roster[silo["silo"]], attestation, silo["signature"]
                )
            signed = {silo["silo"] for silo in data["silos"]}
            if not signed <= set(range(len(membership.silos))):
                raise IntegrityError(f"{AGREED}: signed by a silo that does not exist")
        if len(data["silos"]) != len(signed):
            raise IntegrityError(f"{AGREED}: signed twice by one silo")
        missing = [name for number, name in enumerate(membership.silos) if number not in signed]
        words = f"statement{' and model' if data['tensors'] else ''} signed by the coordinator"
        # Files written after the signature (reports, audits) are named in the result, because nobody signed them.
        unsigned = sorted(self._files.keys() - files - {AGREED, CONTENTS}) if has_all_files else []
        if has_all_files:
            words += f", with {len(files)} files"
        if missing:
            raise Unchecked(
                f"{words}; the statement not by {', '.join(missing)}: they were silent, or refused"
            )
        if unsigned:
            words += f"; made later, and signed by nobody: {', '.join(unsigned)}"
        return f"{words}; the statement by {len(signed)} silos, who computed it again and held it against their charges"

    def _contents(self, digest: str) -> frozenset[str]:
        """Check the files listed at the signature of the run, and return their names."""
        if hashlib.sha256(self._file(CONTENTS)).hexdigest() != digest:
            raise IntegrityError(f"{CONTENTS}: was changed after the run was signed")
        files = parse_json(self._file(CONTENTS), CONTENTS, IntegrityError)["files"]
        for name, listed in files.items():
            if hashlib.sha256(self._file(name)).hexdigest() != listed:
                raise IntegrityError(f"{name}: was changed after the run was signed")
        added = sorted(self._files.keys() - files.keys() - MADE_LATER)
        if added:
            raise IntegrityError(f"{added[0]}: was not there when the run was signed")
        return frozenset(files)

    def _same_tensors(self, tensors: Mapping[str, str]) -> None:
        digests = digests_of(self._files[MODEL]) if MODEL in self._files else {}
        for name in sorted(tensors.keys() | digests.keys()):
            if digests.get(name) != tensors.get(name):
                raise IntegrityError(f"{MODEL}: tensor '{name}' is not the one that was signed")

    def model(self) -> str:
        """Check that the checkpoint holds the model of the last training round."""
        if not self._trained:
            raise Unchecked("no round was signed")
        digest = self._trained[-1]["next"]
        if digest == NOTHING.hex():
            raise Unchecked("only the silos have the model")
        model = arrays_of(self._file(CHECKPOINT), CHECKPOINT).get("model")
        if model is None or hashlib.sha256(model.astype("<f4").tobytes()).hexdigest() != digest:
            raise IntegrityError(f"{CHECKPOINT}: not the model that round {len(self._trained)} ended with")
        return f"the checkpoint has the model that round {len(self._trained)} ended with"

    def in_ledger(self, path: Path) -> str:
        """Check that a silo's exported ledger charges the rounds that it signed, and no more of the run."""
        export = LedgerExport.read(path)
        rounds = 0
        for line in self._lines:
            round_place = line.data["part"], line.data["round"]
            membership, _ = self._terms_of(ROUNDS, line.data)
            for silo in line.data["silos"]:
                if membership.roster[silo["silo"]] != export.public:
                    continue
                if not export.has_charge(line.data["run"], round_place, line.data["terms"], silo["head"]):
                    raise IntegrityError(
                        f"{path}: does not charge {_named(round_place)} before the head that was signed"
                    )
                rounds += 1
        for membership, experiment in self._terms.values():
            owed = RunRules.from_terms(experiment, len(membership.silos)).required_charges(
                export.rounds_of(self._run())
            )
            # The coordinator's ledger lacks a charge of the silo: the run continued, or the coordinator hides a
            # contribution.
            if excess := owed - Counter(self._place(entry) for entry in self.charges):
                raise IntegrityError(
                    f"{path}: charges {_named(min(excess))} of this run more often than {LEDGER}: "
                    "the run continued, or hides contributions of this silo"
                )
        if export.terms_of(self._run()) - self._terms.keys():
            raise IntegrityError(f"{path}: has charges of this run under terms that {TERMS} does not have")
        if late := export.after_end(self._run()):
            raise IntegrityError(f"{path}: charges {_named(late[0])} after the end of this run was signed")
        if not rounds:
            raise IntegrityError(f"{path}: of a silo that signed no round of this run")
        return f"charges the {rounds} rounds that this silo signed, and no other of this run"

    @property
    def _trained(self) -> list[Mapping[str, Any]]:
        """Lines of the training rounds."""
        return [line.data for line in self._lines if line.data["part"] == ""]

    def _place(self, entry: Entry) -> RoundPlace:
        """Return the round of a charge; all terms of one run give the same."""
        for membership, experiment in self._terms.values():
            return RunRules.from_terms(experiment, len(membership.silos)).place(entry)
        raise IntegrityError(f"{TERMS}: the terms of the run are missing")

    # --- what is there ------------------------------------------------------------------------------------------

    @property
    def _place_of_document(self) -> str:
        return next((name for name in DOCUMENTS if name in self._files), EXPERIMENT)

    @cached_property
    def _document(self) -> Experiment | TableDocument:
        name = self._place_of_document
        text = as_text(self._file(name), name, IntegrityError)
        return DOCUMENTS[name](parse_toml(text, name, IntegrityError), name)

    def _file(self, name: str) -> bytes:
        if name not in self._files:
            raise IntegrityError(f"{name}: is missing")
        return self._files[name]

    def _run(self) -> str:
        if STATE in self._files:
            with reading(STATE, IntegrityError):
                return str(parse_json(self._files[STATE], STATE, IntegrityError)["run"])
        with reading(AGREED, IntegrityError):
            return str(parse_json(self._file(AGREED), AGREED, IntegrityError)["run"])

    def _terms_of(self, where: str, data: Mapping[str, Any]) -> tuple[Membership, str]:
        if data["terms"] not in self._terms:
            raise IntegrityError(f"{where}: the terms that it names are missing")
        return self._terms[data["terms"]]


def _named(round_place: RoundPlace) -> str:
    part, number = round_place
    return f"release {sanitize(part)}" if part else f"round {number}"


def _verify(signer: str, identity: PublicIdentity, content: bytes, signature: str) -> None:
    """Check a signature in hexadecimal."""
    raw = bytes.fromhex(signature)
    # bytes.fromhex accepts blanks and capitals: two spellings of one signature would be a changed byte unnoticed.
    if raw.hex() != signature:
        raise IntegrityError(f"{signer}: the signature is not as it was written")
    try:
        identity.verify(content, raw)
    except CryptoError:
        raise IntegrityError(f"{signer} did not sign this") from None


# --- verification of a run folder ---


NOT_CHECKABLE: Final = {
    "training": "that each silo trained as the method says, drew its noise, and sent what it signed for",
    "server's steps": "that each model is the server's step from the sums: the sums are not kept",
    "released numbers": "that they are the sums: no silo sees a sum; silos sign what they are told of earlier releases",
    "averages": "that an average of models that was evaluated is the average of the rounds' models",
    "events": "that each recorded event is what its round really released",
    "other parties": "that server and silos saw only the recorded events, and published figures",
    "second opinion": "epsilon by an independent program: `python verifier/verify.py PATH`, in the source repository",
    "after the end": "that a silo that signed the end of the run, but departs from the protocol, sent nothing since",
    "other releases": "what else was, or will be, released from the same records: other runs add to epsilon",
}
"""Facts that no file can show, by the name of their row."""


def verify_run(path: Path, charter: Path | None = None, ledgers: Sequence[Path] = ()) -> Verification:
    """Verify a run folder; a failure becomes a check that fails, never an error.

    Args:
        path: the folder.
        charter: charter of the federation, from a trusted source; None: the founder's signature is not checked.
        ledgers: ledgers exported by silos of the run.
    """
    checks: list[Check] = []
    try:
        # Read once: every check sees the same bytes, even if the folder changes meanwhile.
        files = files_of(path)
    except FedveilError as error:
        checks.append(Check(name="files", outcome="fails", detail=str(error)))
    else:
        run = RecordedRun(files)
        checks.append(run_check("experiment", run.same_document))
        checks.append(run_check("ledger", run.ledger))
        checks.append(run_check("statement", run.statement))
        checks.extend(epsilons(run))
        if not run.is_federated:  # between institutions the signed rounds name their charges
            checks.append(run_check("charges", run.released))
        checks.extend(run.check_signatures(charter, has_all_files=True))
        if EXPERIMENT in files:
            checks.append(run_check("model", run.model))
        checks.extend(
            run_check(f"ledger {ledger}", lambda ledger=ledger: run.in_ledger(ledger))  # type: ignore[misc]
            for ledger in ledgers
        )
    return Verification(path=path, checks=(*checks, *not_checkable(NOT_CHECKABLE)))


def epsilons(run: RecordedRun) -> Sequence[Check]:
    """Compute the epsilons of a run's statement again; empty if it has no readable statement."""
    try:
        return tuple(check_epsilons(run.read_statement))
    except FedveilError:  # the statement check reports it
        return ()

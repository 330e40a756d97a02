"""Opens the sessions of a run at the coordinator that is served on this host, submits it, and watches its folder."""

from __future__ import annotations

import json
import select
import shlex
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from fedveil.data.records import empty_groups
from fedveil.errors import BusyError, ConfigError, CoordinatorGoneError, ProtocolError, RunFolderError
from fedveil.federation.audit.released_files import DECLARED
from fedveil.federation.audit.run_record import RunRecord, members_at_end, signed_end
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.hosts.folders import CoordinatorFolder, schema_digest
from fedveil.federation.hosts.sockets import SOCKET, RunOutcome, address, receive_frame, send_frame
from fedveil.federation.ledger_heads import HEADS, SeenHeads
from fedveil.federation.proposal_review import check_deployable
from fedveil.federation.session_plan import SessionPlan
from fedveil.federation.silo_data import load_public_test_table
from fedveil.federation.silo_session.tasks import release_plan, training_plan
from fedveil.federation.terms import public_text
from fedveil.files import read_content, read_toml
from fedveil.protocols.session_messages import RunPart
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.config.release_document import KINDS, DeclaredTables, TableDocument, kind_in, read_releases
from fedveil.run.config.task_choice import beginning, complete_for_table
from fedveil.run.folder.documents import read_rows
from fedveil.run.folder.run_folder import SCHEMA, RunFolder
from fedveil.run.loop import EndingT, NullObserver, Observer, Part, RunParts
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.preprocessing import read_preprocessed
from fedveil.run.releases.release import ReleasePart
from fedveil.run.releases.requests import prepare_document
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.document import DocumentParts
from fedveil.run.steps.experiment import ExperimentParts
from fedveil.run.steps.training import TrainingPart

_LOOK_SECONDS: Final = 0.5
_LAST_WORD_SECONDS: Final = 10.0
_RUNS: Final = "runs"


def read_document(path: Path, home: CoordinatorFolder) -> Experiment | TableDocument:
    """Read what a federation can run: an experiment, or releases of statistics or of a regression.

    Raises:
        ConfigError: no tables, another schema, or, of an experiment, no public test table or a model that is left to
            be guessed.
    """
    content = read_toml(path)
    kind = kind_in(content)
    if kind is None:
        return _experiment(content, path, home)
    document = read_releases(path, kind)
    _check_schema(document, path, home)
    return document


def _experiment(content: dict[str, Any], path: Path, home: CoordinatorFolder) -> Experiment:
    completed, _ = complete_for_table(content, path.parent)
    experiment = parse(completed, str(path)).resolve_paths(path.parent)
    table = experiment.data.table
    if table is None:
        raise ConfigError(f"{path}: data.table: a federation trains on the silos' own tables")
    _check_schema(experiment, path, home)
    if table.test_file is None and experiment.evaluation is None:
        raise ConfigError(
            f"{path}: data.table.test_file: no party has all tables, so none can hold records out of them; give a "
            f"public test table, or "
            "[evaluation], for which every silo holds records of its own out"
        )
    if experiment.model.name is None or experiment.model.loss is None:
        raise ConfigError(
            f"{path}: model.name and model.loss: silos allow models and losses by name; give both"
        )
    with_digest, _ = beginning(experiment)
    return with_digest


def _check_schema(document: Experiment | TableDocument, path: Path, home: CoordinatorFolder) -> None:
    table = document.data.table
    assert table is not None
    if schema_digest(table.schema_file) != home.membership.schema_digest:
        raise ConfigError(f"{path}: data.table.schema_file: not the schema that the members agreed on")


def check_served(home: CoordinatorFolder) -> None:
    """Return if a coordinator is served from a folder, as far as its socket shows.

    Raises:
        BusyError: it is not.
    """
    if not (home / "run" / SOCKET).exists():
        raise _not_served(home)


def _not_served(home: CoordinatorFolder) -> BusyError:
    return BusyError(
        f"{home.path}: no coordinator is served; start `fedveil coordinator serve {shlex.quote(str(home.path))}`"
    )


def create_run(
    home: CoordinatorFolder, document: Experiment | TableDocument, parent: Path | None = None
) -> RunFolder:
    """Make the folder of a run of the coordinator's, with the schema that its numbers are read by.

    Args:
        home: the coordinator's folder.
        document: what is run.
        parent: where the folder is made; None: among the coordinator's runs.
    """
    folder = RunFolder.create(home / _RUNS if parent is None else parent, document)
    folder.write(DECLARED, read_content(home / SCHEMA, RunFolderError))
    return folder


def due_parts(home: CoordinatorFolder, path: Path) -> Iterator[CoordinatorParty[Any]]:
    """Yield the coordinator of every part of a run that is not made yet, each when the one before has ended.

    Of a run that lacks nothing but a silo's signature of its end, the last part has another session.

    Raises:
        FedveilError: whatever is wrong with the coordinator's folder, the document or the run folder.
    """
    if path.resolve().parent != (home / _RUNS).resolve():
        raise RunFolderError(
            f"{path}: a coordinator goes on with runs of its own folder {home / _RUNS} "
            "only: code that another folder names would run on the host of its keys"
        )
    yield from _due_parts(home, path)


@contextmanager
def policy_question(home: CoordinatorFolder, document: Path) -> Iterator[CoordinatorParty[Any]]:
    """Give the coordinator that only asks whether all silos' policies and budgets allow a document.

    It plays the first part of a run until all silos have answered its terms. No round begins, so that nobody is
    charged, and nothing is left of the run's folder.

    Args:
        home: the coordinator's folder.
        document: file of the experiment or of the releases.

    Raises:
        FedveilError: whatever is wrong with the coordinator's folder or the document.
    """
    with TemporaryDirectory(prefix="question-", dir=home / "run") as parent:
        folder = create_run(home, read_document(document, home), Path(parent))
        with closing(_due_parts(home, folder.path)) as parts, closing(next(parts)) as party:
            party.only_ask_policies()
            yield party


def _due_parts(home: CoordinatorFolder, path: Path) -> Generator[CoordinatorParty[Any]]:
    kind = next((kind for kind in KINDS if (path / kind.file).exists()), None)
    folder = RunFolder(path)
    record = RunRecord(folder, home.membership, home.identity)
    run: ExperimentParts | DocumentParts
    if kind is None:
        run = _experiment_parts(home, folder, record)
    else:
        declared = DeclaredTables(schema=home.schema, silos=home.membership.silos)
        prepared = prepare_document(read_releases(path / kind.file, kind), declared)
        run = DocumentParts(prepared, folder, witness=record)
    is_due = False
    try:
        for part in run.parts(again=_unsigned(home, folder)):
            is_due = True
            yield open_session(run, part, record, SeenHeads(home / HEADS, home.membership.charter))
    except Exception:  # the process continues, and must be able to open the folder again
        run.close()
        raise
    if not is_due:  # otherwise the last part closes the run when it ends
        run.close()


def _experiment_parts(home: CoordinatorFolder, folder: RunFolder, record: RunRecord) -> ExperimentParts:
    _, experiment = RunFolder.open(folder.path)

    def prepare_again(refined: Experiment) -> Prepared:
        return _prepared(home, folder, refined)

    return ExperimentParts(
        _prepared(home, folder, experiment), folder, NullObserver(), prepare=prepare_again, witness=record
    )


def _unsigned(home: CoordinatorFolder, folder: RunFolder) -> bool:
    """Return whether a silo is to be asked for its signature of a run's end: where it lacks one of its own silos'.

    Who has joined the federation since gave nothing to the run, and signs nothing of it.
    """
    members = members_at_end(folder.path)
    return members is None or (
        members == home.membership.silos and len(signed_end(folder.path)) < len(members)
    )


def _prepared(home: CoordinatorFolder, folder: RunFolder, experiment: Experiment) -> Prepared:
    table = experiment.data.table
    if table is None or (table.test_file is None and experiment.evaluation is None):
        raise RunFolderError(f"{folder.path}: not a run of a federation")
    own = load_public_test_table(home.schema, table.test_file, home.membership)
    preprocessed = read_preprocessed(folder.path)
    own = own if preprocessed is None else own.with_refined_schema(preprocessed.schema, preprocessed.clip)
    share = own.load_population()
    return prepare(experiment, FixedPopulation(share, declared=share.declared), trains=False)


class Submission:
    """A run that was submitted, until its end.

    Args:
        home: the coordinator's folder.
        run: the run folder; or the document of which silos are asked only whether they would take part.
        asks_policies: whether it is such a document.

    Raises:
        BusyError: no coordinator is served from this folder.
    """

    def __init__(self, home: CoordinatorFolder, run: Path, *, asks_policies: bool = False) -> None:
        key = "document" if asks_policies else "run"
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.connect(address(home / "run" / SOCKET))
            send_frame(self._connection, json.dumps({key: str(run.absolute())}).encode())
            self.before = int(json.loads(receive_frame(self._connection))["before"])
        except (OSError, ProtocolError) as error:
            self._connection.close()
            raise _not_served(home) from error

    def __enter__(self) -> Submission:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait no longer; the run goes on."""
        self._connection.close()

    def lasts(self, seconds: float) -> bool:
        """Wait for the end for so many seconds; return whether the run waits or is played still."""
        ended, _, _ = select.select([self._connection], [], [], seconds)
        return not ended

    def end(self) -> RunOutcome | None:
        """Return the outcome that the coordinator reports; None if it ended without a report.

        It says so where its disk is full too, and :data:`END` cannot be written.
        """
        try:
            self._connection.settimeout(_LAST_WORD_SECONDS)
            outcome = json.loads(receive_frame(self._connection))
        except (OSError, ProtocolError):
            return None
        return RunOutcome(error=outcome["error"], stopped=outcome["stopped"], silent=tuple(outcome["silent"]))


def resume_command(home: CoordinatorFolder) -> str:
    """Return the command that goes on with a run from any folder; the path of the run folder follows it."""
    return f"fedveil federation run --home {shlex.quote(str(home.path))} --resume"


def wait(again: str, path: Path, submission: Submission, look: Callable[[], None]) -> RunOutcome:
    """Wait until a run ends without an error; return how.

    Args:
        again: the command that goes on with it, which the run folder follows.
        path: the run folder, or the document.
        submission: submission of the run.
        look: called again and again, and once when it has ended.

    Raises:
        RunFolderError: the run ended with an error, or the coordinator's process is gone.
    """
    while submission.lasts(_LOOK_SECONDS):
        look()
    end = submission.end()
    look()
    if end is None:
        raise CoordinatorGoneError(
            f"{path}: the coordinator's process has ended; start it again and continue with "
            f"`{again} {shlex.quote(str(path))}`"
        )
    if end.error is not None:
        raise RunFolderError(f"{path}: the run ended: {end.error}")
    return end


def watch(
    again: str, folder: RunFolder, observer: Observer, experiment: Experiment, submission: Submission
) -> RunOutcome:
    """Tell the observer of every new line of metrics, until the run ends without an error; return how.

    Args:
        again: the command that goes on with it, which the run folder follows.
        folder: the run folder.
        observer: receives the progress of rounds.
        experiment: experiment of the run.
        submission: submission of the run.

    Raises:
        RunFolderError: as :func:`wait`.
    """
    n_shown = max(1, len(read_rows(folder / "metrics.jsonl")))
    observer.on_run_start(folder.path, experiment, n_shown - 1)

    def look() -> None:
        nonlocal n_shown
        rows = read_rows(folder / "metrics.jsonl")
        for row in rows[n_shown:]:
            observer.on_round_end(row)
        n_shown = max(n_shown, len(rows))

    return wait(again, folder.path, submission, look)


# --- sessions of a run's parts -------------------------------------------------------------------------------


def open_session(
    run: RunParts[EndingT],
    part: Part,
    record: RunRecord,
    heads: SeenHeads,
    party: type[CoordinatorParty[Any]] = CoordinatorParty,
) -> CoordinatorParty[EndingT]:
    """Return the coordinator's state machine for a part of a run.

    If that fails, the run's ledger is closed: the process continues, and must be able to open the folder again.

    Args:
        run: all parts of the run.
        part: the next part.
        record: record of the run; also the run's witness.
        heads: ledger heads of the silos, over all runs.
        party: class of the state machine.

    Raises:
        CompositionError: the method does not run between institutions.
        ProtocolError: a message of the protocol would be longer than any party reads.
        RunFolderError: the folder is damaged.
    """
    try:
        plan, offered = _plan(part), public_text(run.document, record.membership.silos)
        return party(run=run, part=part, plan=plan, offered=offered, record=record, heads=heads)
    except BaseException:
        run.close()
        raise


def _plan(part: Part) -> SessionPlan:
    """Return the plan of a part's session."""
    phase = RunPart(
        name=part.name, released=tuple((noisy_sum.std, noisy_sum.vector) for noisy_sum in part.before)
    )
    if isinstance(part, ReleasePart):
        return release_plan(part.planned, empty_groups(), part.privacy, phase, len(part.model))
    assert isinstance(part, TrainingPart)
    check_deployable(part.prepared)
    return training_plan(part.prepared, phase if part.prepared.side_releases else None)

"""Review of proposed terms by a silo, under its policy and against its own records.

    text ─► canonical JSON ─► packages in the policy ─► a document of one kind ─► policy ─► task of the silo

All refusals derive from the document and the policy, except one: if each client is one user, a silo also refuses a
document when its table has records of another user (:func:`check_own_client`).
"""

from __future__ import annotations

from typing import Any, Final

from fedveil.errors import CompositionError, OwnRecordsError, PrivacyError
from fedveil.federation.policy import Policy
from fedveil.federation.silo_data import HoldoutSpec, LocalPopulation, PartyTable
from fedveil.federation.silo_session.tasks import (
    SiloReleaseTask,
    SiloTask,
    SiloTasks,
    SiloTrainingTask,
    make_release_task,
)
from fedveil.federation.terms import parse_terms
from fedveil.methods.capabilities import ClientSender, count_dropouts
from fedveil.methods.weights import NOT_WHOLE
from fedveil.privacy.events import Adjacency
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import RunPart
from fedveil.run.config.experiment import Experiment, TrainerSection, parse
from fedveil.run.config.release_document import TableDocument, kind_in
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.requests import prepare_document, request_scope, side_release_scope
from fedveil.run.setup import Prepared, prepare
from fedveil.stage import redefined
from fedveil.validation import validate_document


def review_proposal(
    text: str, part: RunPart | None, policy: Policy, population: LocalPopulation, number: int
) -> SiloTask:
    """Check proposed terms and return the silo's task in the session.

    Args:
        text: the proposed document.
        part: the part of the run; None: the run is training without releases.
        policy: the silo's policy.
        population: the silo's population.
        number: number of the silo.

    Raises:
        RefusalError: the policy excludes a request, or the part does not fit the earlier releases.
        ConfigError: the document is invalid.
        OwnRecordsError: the records are not those of the users that the method needs.
    """
    document, packages = parse_terms(text)
    # Before any parsing by name: parsing a document loads the packages that it names, and so runs their code.
    policy.check_packages(document, packages)
    try:
        kind = kind_in(document)
        if kind is not None:
            return _make_document_task(kind, document, part, policy, population)
        experiment = parse(document, _ORIGIN)
        policy.check_request(experiment)
        if "preprocessing" in document or "evaluation" in document:
            return _make_part_task(experiment, part, policy, population)
        if part is not None:
            raise RefusalError(Code.SHAPE)
        return _make_training_task(experiment, policy, population, number)
    except (PrivacyError, ArithmeticError) as error:  # e.g. numbers too large or too small for the method
        raise RefusalError(Code.EXPERIMENT, detail=str(error)) from error


def _make_training_task(
    experiment: Experiment, policy: Policy, population: LocalPopulation, number: int
) -> SiloTrainingTask:
    prepared = _prepare_and_check(experiment, policy, population, number)
    return SiloTrainingTask(prepared, policy.event(prepared.guarantee), policy.round_seconds)


def _prepare_and_check(
    experiment: Experiment, policy: Policy, population: LocalPopulation, number: int
) -> Prepared:
    """Prepare an experiment over the silo's population and check it; common to every part of a run.

    Raises:
        MainSilosError: the silo's file of main silos differs from the run's file.
    """
    prepared = prepare(
        _without_coordinator_settings(experiment), FixedPopulation(population, declared=population.declared)
    )
    policy.check_method(prepared.method, prepared.task.dimension)
    prepared.method.weights.check_file(population.main_silos)
    check_deployable(prepared)
    check_own_client(prepared, number)
    return prepared


def _make_part_task(
    experiment: Experiment, part: RunPart | None, policy: Policy, population: LocalPopulation
) -> SiloTask:
    """Return a silo's task in one part of a run with releases in addition to its rounds."""
    if part is None:
        raise RefusalError(Code.SHAPE)
    if population.table is None:
        raise RefusalError(Code.EXPERIMENT, detail="releases are of tables, and this silo holds none")
    policy.check_scope(side_release_scope(experiment, population.table.declared))
    return SiloTasks(
        policy, population.table, lambda table: _prepare_over_table(experiment, policy, table)
    ).task_for(part)


def _prepare_over_table(experiment: Experiment, policy: Policy, table: PartyTable) -> Prepared:
    """Prepare an experiment over a silo's table; records are held out if the run releases their metrics."""
    table_section, holdout = experiment.data.table, None
    assert table_section is not None, "Experiment asks for it"
    if experiment.evaluation is not None:
        seed = experiment.seed if experiment.data.seed is None else experiment.data.seed
        holdout = HoldoutSpec(table_section.test_share, seed)
    assert table.silo is not None
    return _prepare_and_check(experiment, policy, table.load_population(holdout), table.silo)


def _make_document_task(
    kind: type[TableDocument],
    document: dict[str, Any],
    part: RunPart | None,
    policy: Policy,
    population: LocalPopulation,
) -> SiloReleaseTask:
    if part is None:
        raise RefusalError(Code.SHAPE)
    if population.table is None:
        raise RefusalError(Code.EXPERIMENT, detail="releases are of tables, and this silo holds none")
    request, declared = validate_document(kind, document, _ORIGIN), population.table.declared
    policy.check_protection(request.protection.name, request.privacy.insecure_seed)
    policy.check_scope(request_scope(request, declared))
    return make_release_task(prepare_document(request, declared), part, policy, population.table)


_ORIGIN: Final = "the coordinator's document"


def _without_coordinator_settings(experiment: Experiment) -> Experiment:
    """Return the experiment without the coordinator's own settings and file names.

    A silo reads no file that a document names. All other model settings stay, so that the signed experiment is the
    trained one. The server's step stays too: under partial encryption the silos make it.
    """
    coordinators = {"metrics": None, "initial": None, "initial_layers": None}
    return experiment.model_copy(
        update={
            "model": experiment.model.model_copy(update=coordinators),
            "trainer": TrainerSection(name=experiment.trainer.name, precision=experiment.trainer.precision),
        }
    )


# --- methods that can run between institutions, where each silo sends one message a round ---


def check_deployable(prepared: Prepared) -> None:
    """Check that the silos and the coordinator of a federation can run an experiment's method.

    Raises:
        CompositionError: the method needs one of these: DP-SGD inside the silos, messages whose scale or number is
            private, simulated dropout, or clients that are not silos.
    """
    method = prepared.method
    if method.contribution.per == "client":
        _check_clients(prepared)
    elif method.contribution.per == "record":
        raise CompositionError(
            f"{method.name}: DP-SGD keeps a number of records of each user over all silos, "
            "and between institutions no party knows these numbers: use fedavg, uldp-naive, uldp-sgd, "
            "uldp-sgd-w, uldp-avg or uldp-avg-w"
        )
    if method.weights.by_records and not method.weights.supports_user_totals:
        raise CompositionError(
            f"{method.name}: weights {method.weights.description}: between institutions {NOT_WHOLE}"
        )
    if method.weights.by_records and redefined(method.weights, "for_groups", "for_population"):
        raise CompositionError(
            f"{method.name}: {type(method.weights).__name__} defines for_groups(), and between institutions weights by "
            "records are computed from the silos' scores alone"
        )
    if redefined(method.sampler, "draw") and not method.draws:
        raise CompositionError(
            f"{method.name}: {type(method.sampler).__name__} defines draw(), "
            "and between institutions no user is sampled if the sampler declares that everyone takes part: set "
            "samples = True and a rate below 1"
        )
    if method.sampler.adjacency is Adjacency.REPLACE_ONE:
        unit = method.contribution.unit
        raise CompositionError(
            f"{method.name}: a sample without replacement is guaranteed against replacing a {unit}, and a silo's "
            f"ledger counts {unit}s that come or go; between institutions take Poisson sampling, or everyone"
        )
    if count_dropouts(method.channel) and method.protection.on_dropout != "recover":
        raise CompositionError(
            f'{method.name}: protection.on_dropout = "retry" with max_dropouts = {count_dropouts(method.channel)}: '
            'between institutions on_dropout = "recover" continues a round without silos; "end" waits for all of them'
        )
    if method.protection.dropout_rate:
        raise CompositionError(
            f"{method.name}: protection.dropout_rate drops silos in a simulation; between institutions real "
            "silos drop out: remove it"
        )
    if method.protection.divides and prepared.experiment.model.sha256 is not None:
        raise CompositionError(
            f"{method.name}: model.initial, model.sha256: "
            "under partial encryption the coordinator sends no model; silos begin with the model that the terms "
            "describe"
        )


def _check_clients(prepared: Prepared) -> None:
    """Refuse clients that are not silos, and settings that need facts about other silos' records."""
    method, population = prepared.method, prepared.population
    if population.n_users != population.n_silos:
        raise CompositionError(
            f"{method.name}: a client is a silo that holds one user; between {population.n_silos} institutions that "
            f"takes {population.n_silos} users, not {population.n_users}"
        )
    if method.calibrated_to == "nobody":
        raise CompositionError(
            f'{method.name}: calibration = "as-published" needs the records of the largest client, which no '
            "institution tells"
        )
    if isinstance(method.channel, ClientSender) and not method.channel.noise_known:
        raise CompositionError(
            f'{method.name}: scale = "norm" measures the noise in a private number; between institutions take "clip"'
        )


def check_own_client(prepared: Prepared, number: int) -> None:
    """Check that a silo holds the records of its own user only, where each client is one user.

    Args:
        prepared: the experiment as the silo holds it.
        number: number of the silo, and of the user whose records it holds.

    Raises:
        OwnRecordsError: the silo's table has a record of another user.
    """
    if prepared.method.contribution.per != "client":
        return
    if (prepared.population.train.user != number).any():
        raise OwnRecordsError(
            f"{prepared.method.name}: silo {number} stands for user {number}, and its table names another"
        )

"""What the terms of a run propose, read and judged by a silo: under its policy, and from its own records.

    text ─► canonical JSON ─► packages the policy names ─► a document of one kind ─► policy ─► what the silo would do

Everything is refused from the document and the policy, but records that are not those of whom the method needs.
"""

from __future__ import annotations

from typing import Any, Final

from fedveil.engine.experiments.experiment import Experiment, parse
from fedveil.engine.experiments.release_document import TableDocument, kind_in
from fedveil.engine.experiments.sections import TrainerSection
from fedveil.engine.populations import FixedPopulation
from fedveil.engine.releases.asks import beside_training_asked
from fedveil.engine.releases.kinds import asked_of, prepare_document
from fedveil.engine.setup import Prepared, prepare
from fedveil.errors import PrivacyError
from fedveil.federation.deployable import check_deployable, check_own_client
from fedveil.federation.document import asked_in
from fedveil.federation.errors import RefusalError
from fedveil.federation.own.parts import OwnParts
from fedveil.federation.own.release import OwnRelease, own_release
from fedveil.federation.own.training import OwnTraining
from fedveil.federation.own.work import OwnWork
from fedveil.federation.policy import Policy
from fedveil.federation.share import OwnTable, Share, Tested
from fedveil.protection.letter_parts import Phase
from fedveil.protection.refusals import Code
from fedveil.validation import validated


def own_work(text: str, phase: Phase | None, policy: Policy, share: Share, number: int) -> OwnWork:
    """Return what a silo would do in a session.

    Args:
        text: the document that is proposed.
        phase: which part of it; None: all of it, where it is training alone.
        policy: the silo's.
        share: the population as it holds it.
        number: the silo's own.

    Raises:
        RefusalError: what the policy does not allow, or what does not fit what was released before.
        ConfigError: a document that makes no sense.
        OwnRecordsError: records that are not those of whom the method needs.
    """
    document, packages = asked_in(text)
    policy.check_packages(document, packages)
    try:
        kind = kind_in(document)
        if kind is not None:
            return _released(kind, document, phase, policy, share)
        experiment = parse(document, _ORIGIN)
        policy.check_request(experiment)
        if "preprocessing" in document or "evaluation" in document:
            return _part(experiment, phase, policy, share)
        if phase is not None:
            raise RefusalError(Code.SHAPE)
        return _trained(experiment, policy, share, number)
    except (PrivacyError, ArithmeticError) as error:  # numbers too large or too small for the method, say
        raise RefusalError(Code.EXPERIMENT, detail=str(error)) from error


def _trained(experiment: Experiment, policy: Policy, share: Share, number: int) -> OwnTraining:
    prepared = _checked(experiment, policy, share, number)
    return OwnTraining(prepared, policy.event(prepared.guarantee), policy.round_seconds)


def _checked(experiment: Experiment, policy: Policy, share: Share, number: int) -> Prepared:
    """Return an experiment as the silo holds it, whose method its policy allows; every part of a run begins so.

    Raises:
        MainSilosError: the silo's file of main silos is not the one of the run.
    """
    prepared = prepare(_own(experiment), FixedPopulation(share, of=share.declared))
    policy.check_method(prepared.method, prepared.task.dimension)
    prepared.method.weights.check_file(share.main_silos)
    check_deployable(prepared)
    check_own_client(prepared, number)
    return prepared


def _part(experiment: Experiment, phase: Phase | None, policy: Policy, share: Share) -> OwnWork:
    """Return a silo's work in a part of a run that has releases beside its rounds."""
    if phase is None:
        raise RefusalError(Code.SHAPE)
    if share.table is None:
        raise RefusalError(Code.EXPERIMENT, detail="releases are of tables, and this silo holds none")
    policy.check_asked(beside_training_asked(experiment, share.table.declared))
    return OwnParts(policy, share.table, lambda table: _tested(experiment, policy, table)).work(phase)


def _tested(experiment: Experiment, policy: Policy, table: OwnTable) -> Prepared:
    """Return an experiment over a silo's own table, of which records are held out if their metrics are released."""
    own, tested = experiment.data.table, None
    assert own is not None, "Experiment asks for it"
    if experiment.evaluation is not None:
        seed = experiment.seed if experiment.data.seed is None else experiment.data.seed
        tested = Tested(own.test_share, seed)
    assert table.silo is not None
    return _checked(experiment, policy, table.share(tested), table.silo)


def _released(
    kind: type[TableDocument], document: dict[str, Any], phase: Phase | None, policy: Policy, share: Share
) -> OwnRelease:
    if phase is None:
        raise RefusalError(Code.SHAPE)
    if share.table is None:
        raise RefusalError(Code.EXPERIMENT, detail="releases are of tables, and this silo holds none")
    asked, of = validated(kind, document, _ORIGIN), share.table.declared
    policy.check_open(asked.protection.name, asked.privacy.insecure_seed)
    policy.check_asked(asked_of(asked, of))
    return own_release(prepare_document(asked, of), phase, policy, share.table)


_ORIGIN: Final = "the coordinator's document"


def _own(experiment: Experiment) -> Experiment:
    """Return the experiment without what concerns the coordinator alone, or names files: none is read here.

    All else of the model stays, so that what is signed is what is trained; and the server's step: under partial
    encryption the silos make it.
    """
    coordinators = {"metrics": None, "initial": None, "initial_layers": None}
    return experiment.model_copy(
        update={
            "model": experiment.model.model_copy(update=coordinators),
            "trainer": TrainerSection(name=experiment.trainer.name, precision=experiment.trainer.precision),
        }
    )

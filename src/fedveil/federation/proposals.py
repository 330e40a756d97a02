"""What the terms of a run propose, read and judged by a silo: under its policy, and from its own records.

    text ─► canonical JSON ─► packages the policy names ─► a document of one kind ─► policy ─► what the silo would do

Nothing of it is looked at in the order of what a silo holds: everything is refused from the document and the policy,
but records that are not those of whom the method needs.
"""

from __future__ import annotations

from fedveil.engine.experiment import Experiment, parse
from fedveil.engine.sections import ModelSection, TrainerSection
from fedveil.engine.setup import prepare
from fedveil.errors import PrivacyError
from fedveil.federation.deployable import check_deployable, check_own_client
from fedveil.federation.document import read_canonical
from fedveil.federation.errors import RefusalError
from fedveil.federation.own_training import OwnTraining
from fedveil.federation.own_work import OwnWork
from fedveil.federation.policy import Policy
from fedveil.federation.share import FixedPopulation
from fedveil.population.records import Population
from fedveil.protection.parts import Phase
from fedveil.protection.refusals import Code


def own_work(text: str, phase: Phase | None, policy: Policy, share: Population, number: int) -> OwnWork:
    """Return what a silo would do in a session.

    Args:
        text: the document that is proposed.
        phase: which part of it; None: training that does nothing else.
        policy: the silo's.
        share: the population as it holds it.
        number: the silo's own.

    Raises:
        RefusalError: what the policy does not allow, or what does not fit what was released before.
        ConfigError: a document that makes no sense.
        OwnRecordsError: records that are not those of whom the method needs.
    """
    document = read_canonical(text)
    policy.check_packages(document)
    experiment = parse(document, "the coordinator's experiment")
    policy.check_request(experiment)
    try:
        prepared = prepare(_own(experiment), FixedPopulation(share))
    except (PrivacyError, ArithmeticError) as error:  # numbers too large or too small for the method, say
        raise RefusalError(Code.EXPERIMENT, detail=str(error)) from error
    policy.check_method(prepared.method, prepared.task.dimension)
    check_deployable(prepared)
    check_own_client(prepared, number)
    return OwnTraining(prepared, number, policy.event(prepared.guarantee), policy.round_seconds, phase)


def _own(experiment: Experiment) -> Experiment:
    """Return the experiment without what concerns the coordinator alone, or names files: none is read here.

    The server's step stays: under partial encryption the silos make it.
    """
    return experiment.model_copy(
        update={
            "model": ModelSection(name=experiment.model.name, loss=experiment.model.loss),
            "trainer": TrainerSection(name=experiment.trainer.name, precision=experiment.trainer.precision),
        }
    )

"""Build the privacy statement of a run from its derived guarantee and the charges of its ledger."""

from __future__ import annotations

from fedveil.data.schema import OF_CLIENTS
from fedveil.privacy.claims import Reveals, Role
from fedveil.privacy.events import Event
from fedveil.privacy.statement import AsPublished, Statement, StatementBuilder
from fedveil.run.config.task_choice import describe_choice
from fedveil.run.folder.run_folder import finite
from fedveil.run.folder.shown import uncovered_outputs
from fedveil.run.releases.side_releases import SpentBudget
from fedveil.run.setup import Prepared
from fedveil.statistics.preprocessing import CLIP_QUANTILE


def state(prepared: Prepared, rounds: int, ledger: SpentBudget) -> Statement:
    """Return the privacy statement of a run with ``rounds`` complete rounds.

    Args:
        prepared: the experiment that ran.
        rounds: number of complete rounds.
        ledger: the charges: one per round, one more for every attempt that may have released its sum before silos
            vanished (a crash may have charged one more), and one per side release.
    """
    guarantee, privacy = prepared.guarantee, prepared.experiment.privacy
    run, side_releases = prepared.experiment.name, ledger.side_releases
    # Every charge beyond one per round counts as a further release of a round.
    again = ledger.charges - rounds

    def learned(role: Role) -> Event:
        return prepared.learned_event(role, rounds, side_releases, again)

    builder = StatementBuilder(
        unit=guarantee.unit,
        adjacency=guarantee.adjacency,
        delta=privacy.delta,
        accountant=prepared.accountant,
        units=prepared.population.n_users,
        secure=prepared.secure,
    )
    return builder.build(
        ledger.event,
        learned,
        [
            view.with_releases(other for release in side_releases for other in release.guarantee.views)
            for view in guarantee.views
        ],
        mechanisms=(
            *guarantee.mechanisms,
            f"{rounds} rounds of the above{_besides(again)}, under adaptive composition",
            *(
                line
                for release in dict.fromkeys(side_releases)
                for line in (
                    release.statement_sentence(run, side_releases.count(release)),
                    *release.guarantee.mechanisms,
                )
            ),
        ),
        randomness=_randomness(prepared),
        uncovered=(
            *prepared.uncovered,
            *(text for release in side_releases for text in release.guarantee.uncovered),
            *uncovered_outputs(
                exact_metrics=prepared.evaluation is None, is_federated=not prepared.population.complete
            ),
        ),
        notes=(*prepared.population.notes, *_refused(prepared), *_fitted(prepared), *_chosen(prepared)),
        as_published=tuple(
            AsPublished(name=claim.name, value=finite(claim.epsilon(rounds, privacy.delta)), gap=claim.gap)
            for claim in guarantee.published
            if rounds > 0
        ),
        released="models and statistics" if side_releases else "models",
    )


def _chosen(prepared: Prepared) -> tuple[str, ...]:
    """Return the sentence about the model that the rule of public facts takes; empty for another model."""
    choice = describe_choice(prepared.experiment, prepared.population)
    return () if choice is None else (f"The {choice}",)


def _besides(again: int) -> str:
    """Return the words about additional charges of rounds; empty for none."""
    if again == 1:
        return ", and 1 charged attempt that was repeated or not completed"
    return f", and {again} charged attempts that were repeated or not completed" if again else ""


def _randomness(prepared: Prepared) -> str:
    """Return the sentence on the source of noise and sampling."""
    if not prepared.secure:
        return "noise and samples were derived from a known seed, for reproduction only"
    if prepared.method.channel.content is Reveals.KEYED:
        return (
            "samples, and a fresh key for each message, were drawn from the operating system's cryptographic random "
            "number generator; the noise comes from a ChaCha20 stream under that key"
        )
    return (
        "noise and samples were drawn, by exact samplers, from the operating system's cryptographic random number "
        "generator"
    )


def _refused(prepared: Prepared) -> tuple[str, ...]:
    """Return the sentences on records that the method refuses, in addition to those of the population."""
    return (OF_CLIENTS,) if prepared.method.contribution.per == "client" else ()


def _fitted(prepared: Prepared) -> tuple[str, ...]:
    """Return the sentences on results that follow from side releases, naming each release."""
    sentences, run = [], prepared.experiment.name
    if prepared.preprocessing is not None:
        request, releases = prepared.preprocessing.request, prepared.preprocessing.releases
        if columns := ", ".join(dict.fromkeys((*request.numbers, *request.pool))):
            sentences.append(
                f"The scaling or encoding of {columns} was computed from the released numbers of "
                f"{releases[0].of_run(run)} alone"
            )
        if request.clip is not None:
            sentences.append(
                f"The clip bound comes from the release {releases[-1].of_run(run)}: it is the {CLIP_QUANTILE:g} "
                "quantile of the norms of the updates that start from the initial model"
            )
    if prepared.evaluation is not None:
        names = " and ".join(f"release {release.of_run(run)}" for release in prepared.evaluation.releases)
        sentences.append(f"The test metrics come from {names}: they carry noise, and epsilon covers them.")
    return tuple(sentences)

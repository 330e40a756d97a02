"""The privacy statement of a run, from the guarantee that was derived and the events that the ledger charged."""

from __future__ import annotations

from fedveil.engine.folder import finite
from fedveil.engine.setup import Prepared
from fedveil.engine.shown import uncovered
from fedveil.privacy.claims import Tells
from fedveil.privacy.events import Event, NoGuarantee, atoms
from fedveil.privacy.statement import AsPublished, Disclosure, Statement, epsilons_by_accountant


def state(prepared: Prepared, rounds: int, charges: int, spent: Event) -> Statement:
    """Return what a run of so many complete rounds guarantees.

    Args:
        prepared: the experiment that ran.
        rounds: complete rounds.
        charges: how often the ledger was charged: once a round, and again for every attempt that may have released
            its sum before silos vanished (a crash may have charged one more).
        spent: everything the ledger charged.
    """
    guarantee, privacy = prepared.guarantee, prepared.experiment.privacy
    delta = privacy.delta
    reasons = [event.reason for event in atoms(spent) if isinstance(event, NoGuarantee)]
    if not prepared.secure:
        reasons.append("the noise came from a known seed (privacy.insecure_seed), so anybody can subtract it")
    epsilon = None if reasons else prepared.epsilon_of(guarantee.event, charges)
    return Statement(
        unit=guarantee.unit,
        adjacency=guarantee.adjacency,
        epsilon=epsilon,
        delta=delta,
        accountant=prepared.accountant.name,
        epsilons=epsilons_by_accountant(
            spent,
            delta,
            guarantee.adjacency,
            loss=guarantee.grid_loss_after(charges, prepared.length),
        ),
        event=spent,
        units=prepared.population.n_users,
        mechanisms=(*guarantee.mechanisms, f"{rounds} rounds, composed adaptively"),
        trust=tuple(
            Disclosure(
                role=view.role,
                party=view.party,
                sees=view.sees,
                epsilon=_against(prepared, view.event, charges),
            )
            for view in guarantee.views
        ),
        randomness=_randomness(prepared),
        secure_randomness=prepared.secure,
        uncovered=(*prepared.uncovered, *uncovered()),
        notes=prepared.population.notes,
        as_published=tuple(
            AsPublished(name=claim.name, value=finite(claim.epsilon(rounds, delta)), gap=claim.gap)
            for claim in guarantee.published
            if rounds > 0
        ),
        reasons=tuple(reasons),
    )


def _randomness(prepared: Prepared) -> str:
    """Return where noise and sampling came from, in words."""
    if not prepared.secure:
        return "noise and sampling derived from a seed, for repetition only"
    if prepared.method.channel.content is Tells.KEYED:
        return (
            "sampling, and a key for every message, drawn from the operating system's cryptographic generator; noise "
            "from a ChaCha20 stream under that key"
        )
    return "noise and sampling drawn from the operating system's cryptographic generator by exact samplers"


def _against(prepared: Prepared, event: Event, charges: int) -> float | None:
    """Return the epsilon of all charges against one party; None if nothing is guaranteed."""
    return finite(prepared.epsilon_of(event, charges)) if prepared.secure else None

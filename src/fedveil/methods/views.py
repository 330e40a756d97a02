"""Who sees what of a round, besides those who read the models, and how much the noise protects against each."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.methods.method import Method
from fedveil.methods.protections import PrivateWeighting, Protection, SecureAggregation
from fedveil.privacy.events import Event, NoGuarantee
from fedveil.privacy.sampling import PoissonUsers


@dataclass(frozen=True, kw_only=True)
class View:
    """One party, what it sees, and the privacy event of one round against it."""

    party: str
    sees: str
    event: Event


def hiding(protection: Protection) -> tuple[str, ...]:
    """Say how the silos' messages are hidden, where they are."""
    if isinstance(protection, SecureAggregation):
        lacking = f", which may lack {protection.missing_silos} of them" if protection.missing_silos else ""
        return (f"secure aggregation: pairwise masks hide every silo's message in the sum{lacking}",)
    if not isinstance(protection, PrivateWeighting):
        return ()
    cipher = (
        f"Paillier, {protection.key_bits} bits" if protection.cipher == "paillier" else "ring-LWE, 128 bits"
    )
    drawn = "; users are drawn by oblivious transfer" if protection.private_sampling else ""
    return (
        f"private weighting ({cipher}): the weights n_su/N_u are computed under encryption, for at most "
        f"{protection.largest_count} records per user; the sum is rounded to its grid{drawn}",
    )


def _pooling(silos: int) -> str:
    """Name a coalition of silos."""
    return "one silo" if silos == 1 else f"{silos} silos that pool what they know"


def views_of_shares(
    method: Method, n_silos: int, coalition: int, *, to_server: Event, to_coalition: Event
) -> tuple[View, ...]:
    """Return who sees what where every silo adds its share of the noise.

    Under secure aggregation a server that knows some silos' messages learns the sum of the others, with the others'
    shares. Without it, a silo's message is no secret to begin with.
    """
    drawn = ", and who was sampled" if isinstance(method.sampler, PoissonUsers) else ""
    if isinstance(method.protection, PrivateWeighting):
        return _views_of_weighting(method, method.protection, coalition, drawn, to_server, to_coalition)
    silo = View(
        party=_pooling(coalition),
        sees="the models, its own records and its own share of the noise",
        event=to_coalition,
    )
    if not isinstance(method.protection, SecureAggregation):
        sees = f"every silo's own noisy sum (no protocol hides it in this run){drawn}"
        return View(party="the server", sees=sees, event=to_server), silo
    sees = f"masked messages, and of them only the sum over all silos{drawn}"
    others = f"the noisy sum over the {n_silos - coalition} other silos{drawn}"
    return (
        View(party="the server", sees=sees, event=to_server),
        silo,
        View(
            party="the server with one silo" if coalition == 1 else f"the server with {coalition} silos",
            sees=f"{others}; guaranteed to what a user holds there",
            event=to_coalition,
        ),
    )


def _views_of_weighting(
    method: Method,
    protection: PrivateWeighting,
    coalition: int,
    drawn: str,
    to_server: Event,
    to_coalition: Event,
) -> tuple[View, ...]:
    """Return who sees what under private weighting: no silo learns who was sampled, the server only if it draws.

    The seed of the blinds r_u is known to every silo; with it the server reads N_u off r_u N_u.
    """
    hidden = protection.private_sampling or not drawn
    reason = (
        "the seed of the blinds, which every silo has, shows a server the number of records of every user"
    )
    return (
        View(
            party="the server",
            sees="blinded counts and masked ciphertexts, and of them which users have a record anywhere, and only the "
            f"weighted sum over all silos{'' if hidden else drawn}",
            event=method.sampler.event(to_server) if hidden else to_server,
        ),
        View(
            party=_pooling(coalition),
            sees="the models, its own records and its own share of the noise, and encrypted weights; neither another "
            "silo's counts nor who was sampled",
            event=method.sampler.event(to_coalition),
        ),
        View(
            party="the server with one silo",
            sees="every user's number of records over all silos, and the noisy sum over the other silos: the protocol "
            "excludes it",
            event=NoGuarantee(reason=reason),
        ),
    )

"""What a composition guarantees: claims of its stages, folded over what its messages tell each party.

=====================  ===========================================================================================
stage                  what it answers
=====================  ===========================================================================================
contribution, weights  how far one unit moves the sum, and every message
channel                what its noise claims for a sum, a message, and a sum of which some shares are known
local (DP-SGD only)    the same, of the noise of every local step
protection             what is sent to whom; claims about parts of messages; the rounding of the sum
sampler                adjacency, and amplification for whoever does not learn who was drawn
denoiser, server       nothing but words: they read no record (post-processing)
=====================  ===========================================================================================

A line of the statement is the event of the least claim that covers what a party learns (:mod:`fedveil.privacy.claims`).
Readers of the models are a party like any other; theirs is the event that ledgers are charged.
"""

from __future__ import annotations

from typing import Final

from fedveil.methods.guarantee import Guarantee, PublicFacts, View
from fedveil.methods.method import Method
from fedveil.privacy.claims import Claim, Role, Tells, against, knowledge
from fedveil.stage import Moves, Source


def derive(method: Method, public: PublicFacts) -> Guarantee:
    """Return what one round of the method guarantees in this federation.

    Raises:
        PrivacyError: a public fact that the guarantee depends on is missing.
    """
    moves, source = moves_of(method, public), source_of(method)
    claims = claims_of(method, moves)
    sends, content = method.sends(), source.content
    readers = against(knowledge(Role.READER, sends, content), claims)
    known = {role: knowledge(role, sends, content) for role in method.parties}
    lines = {role: (what, against(what, claims)) for role, what in known.items()}
    uncovered = [
        text for stage in (source, method.weights, method.protection) for text in stage.uncovered(method)
    ]
    return Guarantee(
        adjacency=method.sampler.adjacency,
        event=readers.charged,
        unit=moves.unit,
        mechanisms=tuple(
            text
            for stage in (
                source,
                method,
                method.bound,
                method.sampler,
                method.protection,
                method.denoiser,
                method.server,
                method.average,
            )
            for text in stage.mechanisms(moves)
        ),
        views=tuple(
            View(
                role=role,
                party=_party(role, method, moves),
                sees=_sees(role, known, method, moves),
                event=claim.charged,
            )
            for role, (known, claim) in lines.items()
        ),
        uncovered=(*method.uncovered, *uncovered, *_not_covered(method, moves, lines)),
        published=tuple(
            figure
            for stage in (method.contribution, method.local, method.channel, method.protection)
            for figure in stage.published(method, public)
        ),
        grid_loss=method.protection.grid_loss(source.grid_loss(moves), moves),
        noise_decay=method.noise_decay,
        strengths=method.channel.strengths,
    )


def source_of(method: Method) -> Source:
    """Return the stage whose noise claims: the local steps where they have their own, otherwise the channel."""
    return method.local if method.local.own_noise else method.channel


def claims_of(method: Method, moves: Moves) -> tuple[Claim, ...]:
    """Return what one round claims, for each thing that may be known of it."""
    return method.sampler.over(method.protection.claims(source_of(method).claims(moves), moves))


def moves_of(method: Method, public: PublicFacts) -> Moves:
    """Return how far one unit moves the sum and the messages of a round."""
    moves = method.contribution.moves(method, public)
    return method.protection.moves(moves, method, public)


def sensitivity(method: Method, public: PublicFacts) -> float:
    """Return the l2 sensitivity of the sum over all silos to adding or removing one unit, in the unit of the update."""
    return moves_of(method, public).total


def _not_covered(
    method: Method, moves: Moves, lines: dict[Role, tuple[frozenset[Tells], Claim]]
) -> tuple[str, ...]:
    """Return what parties learn besides, named once with all who learn it."""
    who: dict[str, list[Role]] = {}
    for role, (_, claim) in lines.items():
        for but in claim.but:
            who.setdefault(but, []).append(role)
    return tuple(_learned(but, roles, method, moves) for but, roles in who.items())


# --- in words, for people alone: no code reads them -----------------------------------------------------------


def _party(role: Role, method: Method, moves: Moves) -> str:
    one = "client" if moves.unit == "client" else "silo"
    together = max(1, method.channel.colluding_silos)
    senders = f"one {one}" if together == 1 else f"{together} {one}s that pool what they know"
    if role == Role.SERVER | Role.SILO:
        return f"the server with {senders}"
    return {Role.SERVER: "the server", Role.READER: f"whoever reads the {method.released}"}.get(role, senders)


def _learned(but: str, roles: list[Role], method: Method, moves: Moves) -> str:
    several = len(roles) > 1 or (roles == [Role.SILO] and method.channel.colluding_silos > 1)
    parties = " and ".join(_party(role, method, moves) for role in roles)
    return f"{parties} {'learn' if several else 'learns'} {but}"


_BARE: Final = {Tells.OWN: "its own records", Tells.SUM: "the sum over all senders, without noise"}


def _knows(what: Tells, method: Method) -> str:
    if what is Tells.MODEL:
        return f"the {method.released}"
    if what in _BARE and source_of(method).content is Tells.EXACT:  # no sender adds noise
        return _BARE[what]
    return str(what.value)


def _sees(role: Role, known: frozenset[Tells], method: Method, moves: Moves) -> str:
    """Return what a party knows, in the order in which it is declared; for a sender, whose data its line is about."""
    seen = "; ".join(
        _knows(what, method) for what in Tells if what in known and (what is not Tells.DRAWN or method.draws)
    )
    others = "the other clients" if moves.unit == "client" else f"what a {moves.unit} holds in other silos"
    about = f"; this epsilon concerns {others}" if role & Role.SILO else ""
    return f"{seen or 'nothing'}{about}"

"""Derive a composition's guarantee from its stages' claims and its messages' readers.

=====================  ===========================================================================================
stage                  its part of the derivation
=====================  ===========================================================================================
contribution, weights  sensitivity of the sum, and of every message
channel                claims of its noise for a sum, a message, and a sum of which some shares are known
local (DP-SGD only)    the same, for the noise of every local step
protection             messages and their readers; claims about parts of messages; the rounding of the sum
sampler                adjacency, and amplification against parties that do not learn the sample
denoiser, server       sentences only: they read no record (post-processing)
=====================  ===========================================================================================

A line of the statement is the event of the least claim that covers a party's knowledge
(:mod:`fedveil.privacy.claims`). Readers of the models are a party like any other; their event is charged to ledgers.
"""

from __future__ import annotations

from typing import Final

from fedveil.methods.capabilities import count_colluding, round_strengths
from fedveil.methods.guarantee import Guarantee, PublicFacts, View
from fedveil.methods.method import Method, parties_of
from fedveil.privacy.claims import Claim, Reveals, Role, knowledge, least_covering_claim
from fedveil.stage import Sensitivity, Source


def derive(method: Method, public: PublicFacts) -> Guarantee:
    """Return the guarantee of one round of the method in this federation.

    Raises:
        PrivacyError: a public fact on which the guarantee depends is missing.
    """
    moves, source = compute_sensitivity(method, public), noise_source(method)
    claims = compute_claims(method, moves)
    sends, content = method.sends(), source.content
    # event(party) = the event of the least claim that covers knowledge(party). An undeclared field is covered by no
    # claim, so a missing declaration weakens the statement and never strengthens it.
    readers = least_covering_claim(knowledge(Role.READER, sends, content), claims)
    knowledge_by_role = {role: knowledge(role, sends, content) for role in parties_of(method)}
    lines = {
        role: (contents, least_covering_claim(contents, claims))
        for role, contents in knowledge_by_role.items()
    }
    uncovered = [
        text
        for stage in (source, method.weights, method.protection)
        for text in stage.uncovered_facts(method)
    ]
    return Guarantee(
        adjacency=method.sampler.adjacency,
        event=readers.charged_event,
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
                sees=_sees(role, contents, method, moves),
                event=claim.charged_event,
            )
            for role, (contents, claim) in lines.items()
        ),
        uncovered=(*method.uncovered_facts, *uncovered, *_not_covered(method, moves, lines)),
        published=tuple(
            figure
            for stage in (method.contribution, method.local, method.channel, method.protection)
            for figure in stage.published_figures(method, public)
        ),
        grid_loss=method.protection.grid_loss(source.grid_loss(moves), moves),
        dimension=public.dimension,
        noise_decay=method.noise_decay,
        strengths=round_strengths(method.channel),
    )


def noise_source(method: Method) -> Source:
    """Return the stage whose noise is claimed: local steps with their own noise, otherwise the channel."""
    return method.local if method.local.own_noise else method.channel


def compute_claims(method: Method, sensitivity: Sensitivity) -> tuple[Claim, ...]:
    """Return the claims of one round, one per set of knowledge."""
    # Amplification comes last: subsampling amplifies the whole round, including the protection's rounding.
    return method.sampler.amplify(
        method.protection.claims(noise_source(method).claims(sensitivity), sensitivity)
    )


def compute_sensitivity(method: Method, public: PublicFacts) -> Sensitivity:
    """Return the sensitivity of the sum and of the messages of a round to one unit."""
    moves = method.contribution.sensitivity(method, public)
    return method.protection.adjust_sensitivity(moves, method, public)


def sensitivity(method: Method, public: PublicFacts) -> float:
    """Return the l2 sensitivity of the sum to adding or removing one unit, in the unit of the update."""
    return compute_sensitivity(method, public).total


def _not_covered(
    method: Method, moves: Sensitivity, lines: dict[Role, tuple[frozenset[Reveals], Claim]]
) -> tuple[str, ...]:
    """Return sentences on knowledge that no claim covers, each once, with all parties that have it."""
    roles_by_content: dict[str, list[Role]] = {}
    for role, (_, claim) in lines.items():
        for content in claim.but:
            roles_by_content.setdefault(content, []).append(role)
    return tuple(_learned(content, roles, method, moves) for content, roles in roles_by_content.items())


# --- sentences for people; no code parses them ----------------------------------------------------------------


def _party(role: Role, method: Method, moves: Sensitivity) -> str:
    sender = "client" if moves.unit == "client" else "silo"
    together = max(1, count_colluding(method.channel))
    senders = f"one {sender}" if together == 1 else f"{together} {sender}s that pool what they know"
    if role == Role.SERVER | Role.SILO:
        return f"the server with {senders}"
    return {Role.SERVER: "the server", Role.READER: f"whoever reads the {method.released}"}.get(role, senders)


def _learned(content: str, roles: list[Role], method: Method, moves: Sensitivity) -> str:
    several = len(roles) > 1 or (roles == [Role.SILO] and count_colluding(method.channel) > 1)
    parties = " and ".join(_party(role, method, moves) for role in roles)
    return f"{parties} {'learn' if several else 'learns'} {content}"


_BARE: Final = {Reveals.OWN: "its own records", Reveals.SUM: "the sum over all senders, without noise"}


def _knows(content: Reveals, method: Method) -> str:
    if content is Reveals.MODEL:
        return f"the {method.released}"
    if content in _BARE and noise_source(method).content is Reveals.EXACT:  # no sender adds noise
        return _BARE[content]
    return str(content.value)


def _sees(role: Role, contents: frozenset[Reveals], method: Method, moves: Sensitivity) -> str:
    """Return a party's knowledge in declaration order; for a sender, add whose data its line is about."""
    visible = "; ".join(
        _knows(content, method)
        for content in Reveals
        if content in contents and (content is not Reveals.DRAWN or method.draws)
    )
    subject = "the other clients" if moves.unit == "client" else f"what a {moves.unit} holds in other silos"
    about = f"; this epsilon concerns {subject}" if role & Role.SILO else ""
    return f"{visible or 'nothing'}{about}"

"""What a protection answers for as a stage of a method: whom a statement names, what is sent, what it claims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

from fedveil.privacy.claims import Claim, Role, Sent
from fedveil.protection.parts import DrawnUsers, Model, OwnDraw, Task
from fedveil.stage import Moves, Stage

Sends: TypeAlias = tuple[Sent, ...]


class ProtectionStage(Stage):
    """What hides a sender's message, with the defaults of one that hides nothing.

    Attributes:
        parties: coalitions that a statement names, besides the server alone and one sender alone.
        weighs: whether weights by records are computed without showing counts.
    """

    parties: ClassVar[tuple[Role, ...]] = ()
    weighs: ClassVar[bool] = False

    def moves(self, moves: Moves, method: Any, public: Any) -> Moves:
        """Return how far one unit moves what is summed under the protection."""
        return moves

    def claims(self, claims: Iterable[Claim], moves: Moves) -> tuple[Claim, ...]:
        """Return what a round claims under the protection, given what the noise of its messages claims."""
        return tuple(claims)

    def grid_loss(self, loss: float, moves: Moves) -> float:
        """Return what the grid of the noise costs a coordinate, given what it costs without the protection."""
        return loss

    def sends(self, method: Any) -> Sends:
        """Return every message of the setup and of a round, and who reads it."""
        raise NotImplementedError


def plain_round(method: Any) -> Sends:
    """Return the model and the task of a round, and who takes part where some are drawn, as silos are told."""
    found = [Sent(Model, Role.SILO), Sent(Task, Role.SILO)]
    if method.sampler.rate < 1:
        found.append(Sent(OwnDraw if method.contribution.drawn_alone else DrawnUsers, Role.SILO))
    return tuple(found)

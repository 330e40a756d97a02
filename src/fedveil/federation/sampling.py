"""Sample of the users of a round, as the coordinator draws, keeps and discloses it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool

from fedveil.errors import RunFolderError
from fedveil.federation.session_plan import RoundStartState, SessionPlan
from fedveil.files import parse_json, read_content, reading
from fedveil.protocols.session_messages import (
    GlobalModel,
    RoundClip,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.rounds.round_context import draw_users

DRAWN: Final = "checkpoint/participants.json"
"""File in the run folder with the last sample."""

_SALT_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleDraw:
    """Sample of the users in one attempt at a round.

    Attributes:
        users: (|U|,) the sampled users; None if all users take part, or if no party knows the sample.
        commitment: SHA-256 of a random number and the sample. It shows that a repeated attempt has the same sample.
    """

    users: Bool[np.ndarray, " users"] | None = None
    commitment: bytes = b""

    def messages_for(self, silo: int, kinds: frozenset[type], start: RoundStartState) -> list[SessionMessage]:
        """Return the messages to a silo ahead of its task: sample (as far as disclosed), clip and model.

        Args:
            silo: number of the silo.
            kinds: kinds of messages that the method sends.
            start: state at the start of the round.
        """
        found: dict[type[SessionMessage], Callable[[], SessionMessage]] = {}
        if (users := self.users) is not None:
            found = {
                SamplingCommitment: lambda: SamplingCommitment(commitment=self.commitment),
                SampledFlag: lambda: SampledFlag(drawn=bool(users[silo])),
                SampledUsers: lambda: SampledUsers(users=users),
            }
        if (clip := start.clip) is not None:
            found[RoundClip] = lambda: RoundClip(length=clip)
        found[GlobalModel] = lambda: GlobalModel(values=start.model)
        return [build() for kind, build in found.items() if kind in kinds]


EVERYBODY = SampleDraw()


def draw_sample(folder: RunFolder, plan: SessionPlan, number: int, charge: int) -> SampleDraw:
    """Return the persisted sample of a round; draw and persist it if it is new.

    A charge that is amplified by sampling holds for one sample only: each charge has a sample of its own, and an
    attempt that is repeated under the same charge has the same sample.

    Args:
        folder: the run folder.
        plan: plan of the session.
        number: the round.
        charge: number of earlier charges of the round.

    Raises:
        RunFolderError: the file is damaged.
    """
    path, method = folder / DRAWN, plan.method
    if method.protection.draws_blindly or not method.draws:
        return EVERYBODY
    document = None
    if path.exists():
        document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
    with reading(path, RunFolderError):
        if document is None or (document["round"], document["attempt"]) != (number, charge):
            drawn = draw_users(method, plan.n_users, plan.privacy, number, charge)
            if drawn is None:
                return EVERYBODY
            # The salt hides the sample behind its commitment: without it, a silo could test guesses at the sample.
            bits, salt = np.packbits(drawn).tobytes().hex(), os.urandom(_SALT_BYTES).hex()
            document = {"round": number, "attempt": charge, "drawn": bits, "salt": salt}
            folder.write_json(DRAWN, document)
        packed, salted = bytes.fromhex(document["drawn"]), bytes.fromhex(document["salt"])
        if (len(packed), len(salted)) != (-(-plan.n_users // 8), _SALT_BYTES):
            raise ValueError
        drawn = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=plan.n_users).astype(np.bool_)
        return SampleDraw(users=drawn, commitment=hashlib.sha256(salted + packed).digest())

"""Under what a silo takes part, read before every session: a revocation or a stricter policy holds from then on."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.federation.membership import Membership
from fedveil.federation.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a silo's own files say now.

    Attributes:
        membership: the federation, as its founder sealed it.
        policy: what the silo takes part in.
    """

    membership: Membership
    policy: Policy

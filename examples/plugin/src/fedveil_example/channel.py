"""A channel: silos' shares of the noise, sent with fewer digits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedveil.keys import filled
from fedveil.methods.channels import Channel
from fedveil.methods.sending import Sender, Sending
from fedveil.privacy.claims import Claim, Tells
from fedveil.stage import Moves


@dataclass(frozen=True, kw_only=True)
class Coarse(Channel):
    """Rounds every silo's noisy sum to a few binary digits, which is post-processing of what the noise covers.

    Attributes:
        shares: the method's own channel, which adds the noise.
        digits: binary digits that are kept of every number.
    """

    shares: Annotated[Channel, filled()]
    digits: Annotated[int, Field(ge=1, le=52)] = 10

    @property
    def content(self) -> Tells:
        """What a message tells: one with its share of the noise."""
        return Tells.MESSAGE

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse what the shares refuse, and channels without shares: rounding makes nothing safer."""
        if not self.shares.whole:
            yield "coarse rounds silos' shares of a noise, and this method has none"
        yield from self.shares.refuses(method)

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim what the shares claim."""
        return self.shares.claims(moves)

    def grid_loss(self, moves: Moves) -> float:
        """Return what the grid of the shares costs."""
        return self.shares.grid_loss(moves)

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        """Return the noise and the rounding, in words."""
        return (*self.shares.mechanisms(moves), f"messages are rounded to {self.digits} binary digits")

    def send(self, total: np.ndarray, at: Sender) -> Sending:
        """Return the sum with its share of the noise, rounded."""
        mantissa, exponent = np.frexp(self.shares.send(total, at).numbers)
        return Sending(values=np.ldexp(np.rint(np.ldexp(mantissa, self.digits)), exponent - self.digits))

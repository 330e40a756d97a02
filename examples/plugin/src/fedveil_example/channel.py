"""A channel: silos' shares of the noise, sent with fewer digits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedveil.config_keys import composed_field
from fedveil.methods.capabilities import GridShares
from fedveil.methods.channels import Channel
from fedveil.methods.message_encoding import EncodedMessage, Sender
from fedveil.privacy.claims import Claim, Reveals
from fedveil.stage import Sensitivity


@dataclass(frozen=True, kw_only=True)
class Coarse(Channel):
    """Rounds every silo's noisy sum to a few binary digits, which is post-processing of what the noise covers.

    Attributes:
        shares: the method's own channel, which adds the noise.
        digits: binary digits that are kept of every number.
    """

    shares: Annotated[Channel, composed_field()]
    digits: Annotated[int, Field(ge=1, le=52)] = 10

    @property
    def content(self) -> Reveals:
        """What a message tells: one with its share of the noise."""
        return Reveals.MESSAGE

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse what the shares refuse, and channels without shares: rounding makes nothing safer."""
        if not isinstance(self.shares, GridShares):
            yield "coarse rounds silos' shares of a noise, and this method has none"
        yield from self.shares.refuses(method)

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim what the shares claim."""
        return self.shares.claims(sensitivity)

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        """Return what the grid of the shares costs."""
        return self.shares.grid_loss(sensitivity)

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return the noise and the rounding, in words."""
        return (*self.shares.mechanisms(sensitivity), f"messages are rounded to {self.digits} binary digits")

    def send(self, total: np.ndarray, sender: Sender) -> EncodedMessage:
        """Return the sum with its share of the noise, rounded."""
        mantissa, exponent = np.frexp(self.shares.send(total, sender).numbers)
        rounded = np.rint(np.ldexp(mantissa, self.digits))
        return EncodedMessage(values=np.ldexp(rounded, exponent - self.digits))

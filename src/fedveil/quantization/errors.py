"""What can go wrong in the channel room, all of it mendable by the caller or the sender's fault."""

from fedveil.errors import CompositionError, FedveilError


class ChannelError(FedveilError):
    """Base of the channel room's errors."""


class UnsupportedPairError(ChannelError, CompositionError):
    """A law and a lattice that cannot make a channel together; gives the reason."""


class UpdateError(ChannelError):
    """An update that must not be sent: not finite, too large for the noise, of the wrong shape."""


class StreamReuseError(ChannelError):
    """A shared stream was about to carry a second update, which would reveal the difference of the two."""


class MessageError(ChannelError):
    """Bytes that are no message of this version, or are truncated, altered or oversized."""


class ForeignStreamError(MessageError):
    """A well-formed message made with another shared stream: another key, run, client, round or attempt."""

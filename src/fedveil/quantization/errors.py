"""Define the errors of the noisy channel; the caller can correct them, or the sender caused them."""

from fedveil.errors import CompositionError, FedveilError


class ChannelError(FedveilError):
    """Base of the errors of the quantization package."""


class UnsupportedPairError(ChannelError, CompositionError):
    """Law and lattice that cannot form a channel together; the message gives the reason."""


class UpdateError(ChannelError):
    """Update that must not be sent: not finite, too large for the noise, or of the wrong shape."""


class StreamReuseError(ChannelError):
    """Second use of a shared stream, which would reveal the difference of two updates."""


class MessageError(ChannelError):
    """Bytes that are no message of this version, or are truncated, altered or oversized."""


class ForeignStreamError(MessageError):
    """Well-formed message made with another shared stream: another key, run, client, round or attempt."""

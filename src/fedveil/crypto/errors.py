"""The one error of this room."""

from fedveil.errors import FedveilError


class CryptoError(FedveilError):
    """A key, signature, ciphertext or key file that is not what it must be; never shows secret material."""

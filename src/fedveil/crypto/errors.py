"""Error of the cryptographic package."""

from fedveil.errors import FedveilError


class CryptoError(FedveilError):
    """Invalid key, signature, ciphertext or key file; the message never contains secret material."""

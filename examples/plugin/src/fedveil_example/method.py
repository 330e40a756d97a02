"""A method: a builder that recombines stages; its parameters are the keys of the table [method]."""

from dataclasses import replace

from fedveil.methods import Method
from fedveil.methods.keys import ClipNorm, Noise
from fedveil.methods.uldp import uldp_sgd
from fedveil.methods.weights import Weights


def weighted_sgd(*, clip: ClipNorm, noise_multiplier: Noise) -> Method:
    """Takes one clipped gradient per (silo, user), weighted by the user's records there."""
    plain = uldp_sgd(clip=clip, noise_multiplier=noise_multiplier)
    return replace(plain, name="weighted-sgd", weights=Weights.BY_RECORDS)

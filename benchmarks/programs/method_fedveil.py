from dataclasses import replace

from fedveil.methods import Method
from fedveil.methods.keys import ClipNorm, Local, Noise
from fedveil.methods.uldp import uldp_avg
from fedveil.methods.weights import Weights


def by_records(*, local: Local, clip: ClipNorm, noise_multiplier: Noise) -> Method:
    """Takes a clipped update per (silo, user), weighted by the user's records there."""
    plain = uldp_avg(local=local, clip=clip, noise_multiplier=noise_multiplier)
    return replace(plain, name="by-records", weights=Weights.BY_RECORDS)

"""Noise laws with exact samplers, one law per file; what a law must offer is :class:`NoiseLaw`."""

from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.discrete_laplace import DiscreteLaplace
from fedveil.privacy.noise.law import NoiseLaw, grid_for

__all__ = ["DiscreteGaussian", "DiscreteLaplace", "NoiseLaw", "grid_for"]

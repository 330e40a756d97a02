"""Sample noise exactly: one law per file, distributions on ``grid · Z``, symmetric about zero."""

from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.discrete_laplace import DiscreteLaplace
from fedveil.privacy.noise.law import grid_for

__all__ = ["DiscreteGaussian", "DiscreteLaplace", "grid_for"]

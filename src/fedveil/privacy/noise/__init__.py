"""Sample noise exactly: distributions on ``grid · Z``, symmetric about zero."""

from fedveil.privacy.noise.law import DiscreteGaussian, DiscreteLaplace, grid_for

__all__ = ["DiscreteGaussian", "DiscreteLaplace", "grid_for"]

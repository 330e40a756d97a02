"""Regression with intervals that hold under a noisy release: bounded designs, Newton steps, noise-aware covariances."""

"""Federated learning over data that nobody may pool, with one honest privacy statement per run."""

__version__ = "0.1.0"

"""Secure aggregation, with or without recovery: the server learns only the sum of the silos."""

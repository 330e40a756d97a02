"""Secure aggregation, with or without recovery of vanished silos: the server learns only the sum of the silos."""

"""Secure aggregation: the server learns the silos' sum and nothing else; with recovery of vanished silos or without."""

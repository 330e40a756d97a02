"""Founding of a federation, joining and moving silos, and the keys and certificates for it."""

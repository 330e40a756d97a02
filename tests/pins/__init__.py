"""Recorded bits and guarantees that a change must keep, or change under a name."""

"""Experiments, rounds, whole runs, and the run folders that they write."""

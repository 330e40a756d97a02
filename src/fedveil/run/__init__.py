"""Experiments (what is asked for), rounds, whole runs, and the run folders that they write."""

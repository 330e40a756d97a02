"""Experiments, rounds and runs: what is asked for, one round of it, whole runs, and what they leave behind."""

"""The parts of a run and their steps: rounds of training, and releases of statistics."""

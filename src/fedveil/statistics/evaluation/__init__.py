"""Test metrics from noisy sums: what is released of each kind of target, and the figures that follow."""

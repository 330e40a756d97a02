"""Discrete Gaussian noise of OpenDP 0.16, for ``benchmarks.statistics``.

Runs alone, in an interpreter that has it: ``python opendp_peer.py 3.73 24 200`` prints 200 noisy vectors of 24 zeros
with noise of standard deviation 3.73, as JSON. Imports nothing of fedveil.
"""

import json
import sys

import opendp.prelude as dp

STEPS = 2**18

dp.enable_features("contrib")
multiplier, length, repeats = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
central = dp.m.make_gaussian(*space, scale=multiplier * STEPS)
print(json.dumps([[value / STEPS for value in central([0] * length)] for _ in range(repeats)]))

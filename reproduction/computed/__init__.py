"""What is computed rather than trained: accounting, laws of smoothing and quantisation, and convergence bounds.

Each function takes a seed and yields cells with their values; where there is no chance it is called once, with seed 0.
"""

"""Statistics that count people over silos: fixed vectors, noisy sums, and figures decoded from them."""

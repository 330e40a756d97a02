"""Process the noisy mean on the server: denoisers, optimisers, averages (all are post-processing)."""

"""What the server does with a noisy mean: denoisers, optimisers, averages of models. All are post-processing."""

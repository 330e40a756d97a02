"""What the server does with a noisy mean: denoisers, optimisers and averages of models; post-processing, so free."""

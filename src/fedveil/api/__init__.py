"""What a Python program uses: choose a method, train a model over a population, and take what comes of it."""

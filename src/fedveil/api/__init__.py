"""Python interface: choose a method, train a model over a population, and use the result."""

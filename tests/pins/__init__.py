"""What the house must go on giving: recorded once, and changed by name alone."""

"""The coordinator at its host: the link, Flower's server behind two doors, and the party that plays the runs."""

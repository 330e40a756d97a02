"""A silo at its host: a guard that alone has its table and keys, and a carrier that alone speaks with the network."""

"""One round, simulated or in a federation: participants, contributions, and the server's step."""

"""One round, simulated or between institutions: participants, their contributions, and the server's step."""

"""One round, simulated or between institutions: who takes part, what is computed, and what is agreed on."""

"""One round, simulated or between institutions: who takes part, what each contributes, and the step from their sum."""

"""Private weighting (ULDP-FL, Protocol 1): weights n_{s,u} / N_u that no party learns."""

"""Private weighting (ULDP-FL, Protocol 1): a sum with weights n_{s,u} / N_u that no party learns."""

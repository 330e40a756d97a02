"""Signatures of a run's parties, and the verification of ledgers, statements and models against them."""

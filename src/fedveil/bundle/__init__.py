"""Bundles: a trained model with its input description, privacy statement, ledger and signatures."""

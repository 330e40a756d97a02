"""Privacy: bounds, noise, samplers, events, accountants, calibration, group privacy, ledger and statement."""

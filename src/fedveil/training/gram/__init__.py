"""The trainer of linear models: contributions live in the span of their own records."""

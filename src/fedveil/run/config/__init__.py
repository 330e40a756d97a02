"""Experiments, studies and documents of releases, read from TOML and composed into methods."""

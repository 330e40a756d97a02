"""Releases that are not training rounds: statistics, preprocessing, evaluation and inference."""

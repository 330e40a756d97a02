"""Releases that are no round of training: statistics, preprocessing, evaluation and inference, inside one budget."""

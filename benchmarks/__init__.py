"""Measurements behind the README: ``fedveil bench NAME`` runs ``benchmarks.NAME``. None of them is a test."""

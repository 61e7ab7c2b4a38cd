"""Detectors: pure functions and small states over host values. No torch here."""

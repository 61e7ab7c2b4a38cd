"""Pushes over OTLP."""

"""Tests of otel_train.parallel."""

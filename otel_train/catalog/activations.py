"""Activations, before (`pre`) and after (`post`) the activation module; measured on sampled rows (tokens, positions)."""

from otel_train.catalog.spec import SITE_LABELS, Reduction, gauge

LAYER_ACTIVATION_MEAN = gauge(
    "otel_train.layer.activation_mean", "Mean of the activation.", labels=SITE_LABELS, reduction=Reduction.MEAN
)
LAYER_ACTIVATION_STD = gauge(
    "otel_train.layer.activation_std",
    "Standard deviation of the activation.",
    labels=SITE_LABELS,
    reduction=Reduction.MEAN,
    note="Of the population (divided by n).",
)
LAYER_ACTIVATION_ABSMAX = gauge(
    "otel_train.layer.activation_absmax",
    "Largest absolute value of the activation.",
    labels=SITE_LABELS,
    reduction=Reduction.MAX,
    note="Of the sampled rows: a lower bound of the true one.",
)
LAYER_ACTIVATION_ZERO_RATIO = gauge(
    "otel_train.layer.activation_zero_ratio",
    "Share of elements that are exactly zero.",
    labels=SITE_LABELS,
    reduction=Reduction.MEAN,
    note="90 % and more is normal after ReLU in transformers; it is no sign of dead units.",
    source="The Lazy Neuron Phenomenon, arXiv:2210.06313.",
)
LAYER_ACTIVATION_DEAD_UNIT_RATIO = gauge(
    "otel_train.layer.activation_dead_unit_ratio",
    "Share of units that were never positive in the last 512 to 1,024 sampled rows.",
    labels=SITE_LABELS,
    reduction=Reduction.MEAN,
    note="`post` only, and only for activations that cut off negative values. No series before 512 rows were seen.",
)
LAYER_ACTIVATION_SATURATED_RATIO = gauge(
    "otel_train.layer.activation_saturated_ratio",
    "Share of elements in the flat part of the activation.",
    labels=SITE_LABELS,
    reduction=Reduction.MEAN,
    note="`post` only, and only for activations that saturate: |tanh| > 0.97, sigmoid outside 0.03 to 0.97, hard ones at ends.",
)

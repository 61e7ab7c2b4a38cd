"""Parameters: their size."""

from otel_train.catalog.spec import LAYER_LABELS, Reduction, gauge

PARAM_NORM = gauge(
    "otel_train.param_norm",
    "L2 norm of all trainable parameters.",
    reduction=Reduction.L2_NORM,
)
LAYER_PARAM_NORM = gauge(
    "otel_train.layer.param_norm",
    "L2 norm of the layer's parameters, before the step.",
    labels=LAYER_LABELS,
    reduction=Reduction.L2_NORM,
    note="Exact.",
)
LAYER_PARAMETERS = gauge(
    "otel_train.layer.parameters",
    "Number of elements of the layer's parameters.",
    unit="{element}",
    labels=LAYER_LABELS,
    reduction=Reduction.SUM,
)

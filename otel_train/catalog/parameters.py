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
REPLICA_DIVERGENCE = gauge(
    "otel_train.replica_divergence_ratio",
    "Largest relative difference between the norms of weights that are replicas of one another.",
    reduction=Reduction.MAX,
    note="Of the same sampled step. 0 as long as data-parallel ranks train the same model; no series without replicas.",
)
LOCAL_PARAM_NORM = gauge(
    "otel_train.local_param_norm",
    "L2 norm of the trainable parameters, or shards of them, that this rank holds.",
    note="With several ranks only. Equal on ranks that hold the same shards.",
)
LOCAL_LAYER_PARAM_NORM = gauge(
    "otel_train.local_layer.param_norm",
    "L2 norm of the layer's parameters that this rank holds, before the step.",
    labels=LAYER_LABELS,
    note='With `layers_on="all"`, and where ranks could not meet.',
)

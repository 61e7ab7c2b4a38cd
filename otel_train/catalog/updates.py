"""Updates: how much a step really changed the weights."""

from otel_train.catalog.spec import LAYER_LABELS, Reduction, gauge

USUAL_LOG10 = (-3.5, -2.5)
"""Where the log10 update ratio of a healthy layer usually is: 1e-3 within half a decade."""
TOLERATED_LOG10 = (-4.0, -2.0)
"""Outside of this the learning rate, or the layer, deserves a look: 1e-3 within a decade."""

UPDATE_RATIO = gauge(
    "otel_train.update_ratio",
    "Size of the last sampled update over the size of the parameters, over the whole model.",
    reduction=Reduction.L2_NORM,
)
LAYER_UPDATE_RATIO = gauge(
    "otel_train.layer.update_ratio",
    "RMS of the real change of the weights in one step, over the RMS of the weights before it.",
    labels=LAYER_LABELS,
    reduction=Reduction.L2_NORM,
    note="Measured, not computed: copied before the step, compared after it, so weight decay, clipping and any optimizer are in "
    "it. Usually near 1e-3. No series where the layer had no gradient, or only zeros as weights.",
    source="cs231n, 'Ratio of weights:updates'; the estimator is otel_train.sampling's.",
)
LAYER_CHANGED_RATIO = gauge(
    "otel_train.layer.changed_ratio",
    "Share of the layer's elements that the step changed.",
    labels=LAYER_LABELS,
    reduction=Reduction.MEAN,
    note="Falls in low-precision weights when updates are lost to rounding, and in embeddings with the batch's vocabulary.",
)
LAYER_RELATIVE_SPEED = gauge(
    "otel_train.layer.relative_speed",
    "Update ratio of the layer over that of the median layer.",
    labels=LAYER_LABELS,
    reduction=Reduction.SAME,
    note="The median is over matrices where there are any.",
)
LOCAL_LAYER_UPDATE_RATIO = gauge(
    "otel_train.local_layer.update_ratio",
    "Update ratio of the layer's parameters that this rank holds.",
    labels=LAYER_LABELS,
    note='With `layers_on="all"`, and where ranks could not meet.',
)

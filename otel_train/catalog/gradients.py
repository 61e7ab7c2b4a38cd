"""Gradients, as the optimizer uses them: accumulated, unscaled, clipped."""

from otel_train.catalog.spec import LAYER_LABELS, Reduction, counter, gauge, histogram

MAGNITUDE_BOUNDS = tuple(2.0**exponent for exponent in range(-40, 9, 2))
"""Every second power of two from 1e-12 to 256: 25 buckets and +Inf."""
VALUE_BOUNDS = (*(-bound for bound in reversed(MAGNITUDE_BOUNDS)), *MAGNITUDE_BOUNDS)
"""The same on both sides of zero, what is smaller in one bucket: 50 buckets and +Inf."""

GRAD_NORM = gauge(
    "otel_train.grad_norm",
    "L2 norm of the whole gradient.",
    labels=("stage",),
    reduction=Reduction.L2_NORM,
    note="`post_clip` as the optimizer uses it. `pre_clip` where it is known: `Monitor.clip_grad_norm_`, `observe(grad_norm=…)`.",
)
CLIPPED_STEPS = counter(
    "otel_train.clipped_steps",
    "Steps whose gradient was clipped by `Monitor.clip_grad_norm_`.",
    reduction=Reduction.SAME,
)
GRAD_NORM_SPIKES = counter(
    "otel_train.grad_norm_spikes",
    "Gradient norms over the mean of the last 128, in logarithms, by more than 6 standard deviations.",
    labels=("phase",),
    reduction=Reduction.SAME,
    note="Every step where the pre-clip norm is known, else on sampled steps; silent before 64 norms. Phases as for the loss.",
    source="OLMo-core: window 128, 6 sigma; of the logarithm, since norms are log-normal.",
)
LAYER_GRAD_NORM = gauge(
    "otel_train.layer.grad_norm",
    "L2 norm of the layer's gradient.",
    labels=LAYER_LABELS,
    reduction=Reduction.L2_NORM,
    note="Exact.",
)
LAYER_GRAD_MEAN = gauge(
    "otel_train.layer.grad_mean",
    "Mean of the gradient's elements.",
    labels=LAYER_LABELS,
    reduction=Reduction.MEAN,
    note="Exact.",
)
LAYER_GRAD_STD = gauge(
    "otel_train.layer.grad_std",
    "Standard deviation of the gradient's elements.",
    labels=LAYER_LABELS,
    reduction=Reduction.MEAN,
    note="Of the population (divided by n). Exact.",
)
LAYER_GRAD_MAGNITUDE = histogram(
    "otel_train.layer.grad_magnitude",
    "Gradient elements by absolute value.",
    MAGNITUDE_BOUNDS,
    exponential=True,
    labels=LAYER_LABELS,
    reduction=Reduction.SUM,
    note="Cumulative over sampled steps. Sampled elements stand for all of their tensor. One histogram a block by default; "
    "matrices and embeddings only. NaN is not counted here but in `otel_train_layer_nonfinite_total`.",
)
LAYER_GRAD_VALUE = histogram(
    "otel_train.layer.grad_value",
    "Gradient elements by value.",
    VALUE_BOUNDS,
    exponential=True,
    labels=LAYER_LABELS,
    reduction=Reduction.SUM,
    note="With `signed_histograms=True`. Of the elements that `otel_train_layer_grad_magnitude` counts. The text formats have no "
    "`_sum` and no `_count` of it: OpenMetrics forbids a sum where values can be below zero, since it is no counter.",
)
LOCAL_LAYER_GRAD_NORM = gauge(
    "otel_train.local_layer.grad_norm",
    "L2 norm of the gradient of the layer's parameters that this rank holds.",
    labels=LAYER_LABELS,
    note='With `layers_on="all"`, and where ranks could not meet. Of a partial gradient: of this rank\'s summand.',
)

"""The loss, and non-finite values wherever they turn up."""

from otel_train.catalog.spec import Reduction, counter, gauge

LOSS = gauge(
    "otel_train.loss",
    "Loss of the last step, averaged over its micro-batches.",
    reduction=Reduction.MEAN,
    note="Needs `observe(loss=…)`; of the last step that told one. NaN when the loss is NaN.",
)
LOSS_SMOOTHED = gauge(
    "otel_train.loss_smoothed",
    "Exponential average of the loss.",
    reduction=Reduction.MEAN,
    note="Decay 0.99 a step, bias-corrected. Non-finite losses do not enter it; while the loss is non-finite it is NaN.",
)
LOSS_SCALE = gauge(
    "otel_train.loss_scale",
    "Loss scale of mixed-precision training.",
    reduction=Reduction.SAME,
    note="Needs `observe(loss_scale=…)`, or a fused optimizer under a GradScaler.",
)
LOSS_SPIKES = counter(
    "otel_train.loss_spikes",
    "Steps whose loss stood over the mean of the last 128 by more than 6 standard deviations.",
    labels=("phase",),
    reduction=Reduction.SAME,
    note="Silent before 64 finite losses. `phase` is `warmup`, `peak` (the tenth of the run after it) or `main`.",
    source="OLMo-core SkipStepOptimizer: window 128, 6 sigma.",
)
NONFINITE = counter(
    "otel_train.nonfinite",
    "NaN and Inf values seen.",
    labels=("source",),
    reduction=Reduction.SUM,
    note="`source` is `loss` (every step), `gradient` or `parameter` (elements, on sampled steps), or `activation` "
    "(elements of the sampled rows).",
)
LAYER_NONFINITE = counter(
    "otel_train.layer.nonfinite",
    "NaN and Inf values seen in a layer.",
    labels=("layer", "depth", "source"),
    reduction=Reduction.SUM,
    note="As `otel_train_nonfinite_total`, by layer.",
)

"""The monitor itself: what it costs, what it covers, what failed."""

from otel_train.catalog.spec import Reduction, counter, gauge

MONITOR_SECONDS = counter(
    "otel_train.monitor.seconds",
    "Time that the monitor took.",
    unit="s",
    labels=("part",),
    note="Host clock in the training thread by part; `export`, `ranks` and `endpoint` are processor times of the monitor's own "
    "threads, `endpoint` with all that answering scrapes takes.",
)
MONITOR_ERRORS = counter(
    "otel_train.monitor.errors",
    "Failures inside the monitor; the training goes on.",
    labels=("part",),
    note="Each cause is logged once, by the logger `otel_train`.",
)
MONITORED_PARAMETERS = gauge(
    "otel_train.monitored_parameters",
    "Parameter elements whose gradient was read on the last sampled step.",
    unit="{element}",
    reduction=Reduction.SUM,
    note="Less than `otel_train_trainable_parameters`: some layer gets no gradient. Of several optimizers, each one's last sampled "
    "step counts. No series where `attach` was given no optimizer.",
)
TRAINABLE_PARAMETERS = gauge(
    "otel_train.trainable_parameters",
    "Parameter elements that require a gradient, tied ones once.",
    unit="{element}",
    reduction=Reduction.SUM,
)
LAYERS_WITHOUT_GRADIENT = gauge(
    "otel_train.layers_without_gradient",
    "Layers that require a gradient and had none at all on the last sampled step.",
    unit="{layer}",
    reduction=Reduction.SUM,
    note="As `otel_train_monitored_parameters`. Such a layer has no layer series. Frozen ones do not count; an expert that no "
    "token was routed to does, for a step. After 3 samples in a row the parameters are named by the logger `otel_train`.",
)
SILENT_ACTIVATION_MODULES = gauge(
    "otel_train.silent_activation_modules",
    "Activation modules that have shown no value since `attach`.",
    unit="{module}",
    reduction=Reduction.SUM,
    note="From the first sampled step on; no series where no module is watched. Their hooks never fired (unused, compiled before "
    "`attach`, not called by the model's own forward in training), or never saw a floating-point tensor. Named in the log after 3 "
    "samples.",
)
EVERY_N_STEPS = gauge(
    "otel_train.every_n_steps",
    "Steps between samples, as it is now.",
    reduction=Reduction.SAME,
    note="The setting `every_n_steps`, or more, times a power of two, while samples would cost more than `max_overhead`.",
)
PART_EVERY_N_STEPS = gauge(
    "otel_train.part.every_n_steps",
    "Steps between two measurements of a part, as it is now.",
    labels=("part",),
    reduction=Reduction.SAME,
    note="`gradients`, `histograms`, `updates`, `activations`, as far as they are on. More than `otel_train_every_n_steps` where "
    "the part alone would cost more than `max_overhead`.",
)
OVERHEAD = gauge(
    "otel_train.overhead_ratio",
    "Own seconds a second of training, at the pace that is in force.",
    note="What `max_overhead` limits: the typical cost of the last three samples, and of what every step costs, processor time of "
    "the monitor's threads included. What it came to over any time is `otel_train_monitor_seconds_total` by the sum of "
    "`otel_train_step_duration_seconds`. No series before the second step.",
)
DROPPED_SERIES = gauge(
    "otel_train.dropped_series",
    "Layer series that are not exported of their own because of `max_layers`.",
    reduction=Reduction.SAME,
)

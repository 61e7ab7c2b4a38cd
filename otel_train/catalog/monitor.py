"""The monitor itself: what it costs, what it covers, what failed."""

from otel_train.catalog.spec import Reduction, counter, gauge

MONITOR_SECONDS = counter(
    "otel_train.monitor.seconds",
    "Time that the monitor took.",
    unit="s",
    labels=("part",),
    note="Host clock in the training thread by part; `export` and `ranks` are processor times of the monitor's own threads.",
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
    note="Less than `otel_train_trainable_parameters`: some layer gets no gradient.",
)
TRAINABLE_PARAMETERS = gauge(
    "otel_train.trainable_parameters",
    "Parameter elements that require a gradient, tied ones once.",
    unit="{element}",
    reduction=Reduction.SUM,
)
EVERY_N_STEPS = gauge("otel_train.every_n_steps", "Steps between samples.", reduction=Reduction.SAME)
DROPPED_SERIES = gauge(
    "otel_train.dropped_series",
    "Layer series that are not exported of their own because of `max_layers`.",
    reduction=Reduction.SAME,
)

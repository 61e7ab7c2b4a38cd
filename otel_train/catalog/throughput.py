"""Time, tokens, FLOPs and memory."""

from otel_train.catalog.spec import Reduction, counter, gauge, histogram

STEP_DURATION = histogram(
    "otel_train.step.duration",
    "Time from one optimizer step to the next, phases other than training left out.",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0),
    unit="s",
)
FORWARD_SECONDS = counter(
    "otel_train.forward",
    "Time in the model's forward passes in training.",
    unit="s",
    note="Host clock, so on the CPU only: on an accelerator it would measure the launch. Not under whole-model torch.compile, "
    "and not where the model is spread over ranks: there a forward waits for the slowest of them, and tells no rank from another.",
)
DATA_WAIT_SECONDS = counter(
    "otel_train.data_wait",
    "Time waited for the next batch.",
    unit="s",
    note="Needs `Monitor.data(loader)`; 0 otherwise.",
)
TOKENS = counter(
    "otel_train.tokens",
    "Tokens trained on in this process.",
    unit="{token}",
    reduction=Reduction.SUM,
    note="As given to `observe(tokens=…)`.",
)
SAMPLES = counter(
    "otel_train.samples",
    "Samples trained on in this process.",
    unit="{sample}",
    reduction=Reduction.SUM,
    note="As given to `observe(samples=…)`.",
)
MODEL_FLOPS = counter(
    "otel_train.model_flops",
    "FLOPs that the model's training needs, recomputation not counted.",
    reduction=Reduction.SUM,
    note="A token needs 6 for each parameter in a matrix product, and 12 x attention width x sequence length for each attention "
    "layer (no causal halving); or `flops_per_token`.",
    source="PaLM, arXiv:2204.02311, appendix B; torchtitan's num_flops_per_token.",
)
TOKENS_PER_SECOND = gauge(
    "otel_train.tokens_per_second",
    "Tokens per second over the last steps, per replica.",
    reduction=Reduction.SUM,
    note="Over as many steps as there are between samples; phases other than training left out.",
)
MFU = gauge(
    "otel_train.mfu_ratio",
    "Model FLOPs utilization: FLOPs needed over FLOPs possible.",
    reduction=Reduction.MEAN,
    note="No series where the FLOPs of the model or the peak of the device are unknown.",
    source="PaLM, arXiv:2204.02311, appendix B.",
)
PEAK_FLOPS = gauge(
    "otel_train.peak_flops",
    "Peak FLOP/s of the device.",
    labels=("source",),
    note="`source` is `given` or `table` (dense bf16, no sparsity).",
)
MEMORY_ALLOCATED = gauge("otel_train.memory.allocated", "Accelerator memory held by tensors.", unit="By", note="Accelerators only.")
MEMORY_RESERVED = gauge(
    "otel_train.memory.reserved", "Accelerator memory held by the allocator.", unit="By", note="Accelerators only."
)
MEMORY_PEAK = gauge(
    "otel_train.memory.peak",
    "Largest accelerator memory held by tensors.",
    unit="By",
    note="Accelerators only. Since the process started or somebody reset the allocator's peak; we never do.",
)
ALLOCATOR_RETRIES = counter(
    "otel_train.memory.allocator_retries",
    "Times the allocator had to free its cache to serve a request.",
    note="Accelerators only.",
)

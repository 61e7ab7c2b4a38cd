"""What runs: identity, phase, position in the schedule, the optimizer's settings."""

from otel_train.catalog.spec import Reduction, counter, gauge

RUN_INFO = gauge(
    "otel_train.run_info",
    "What runs; always 1.",
    labels=("model", "world_size", "torch_version", "version", "update_mode", "precision"),
    reduction=Reduction.SAME,
    note="`update_mode` is `sampled`, `exact` or `off`; with `in 3 turns` where memory is bounded: a layer is measured in every "
    "third sample, and shows its last value in between. `precision` is the parameters' type, and autocast's where it was seen.",
)
DEVICE_INFO = gauge(
    "otel_train.device_info",
    "The device of this rank; always 1.",
    labels=("device", "uuid", "local_rank", "host"),
    note="Joins a rank with the series of GPU exporters such as DCGM. `uuid` is empty where the device has none.",
)
RUN_ACTIVE = gauge(
    "otel_train.run_active",
    "1 while training, 0 once the monitor is closed.",
    note="A process that is killed leaves no 0: that is what absence alerts look for.",
)
PHASE = gauge(
    "otel_train.phase",
    "The phase that the training loop is in; always 1.",
    labels=("phase",),
    note="`train`, or the name given to `Monitor.phase`.",
)
WORLD_SIZE = gauge("otel_train.world_size", "Number of ranks.", reduction=Reduction.SAME)
PLANNED_STEPS = gauge("otel_train.planned_steps", "Optimizer steps planned in all, where declared.", reduction=Reduction.SAME)
CONFIGURED_WARMUP_STEPS = gauge("otel_train.configured_warmup_steps", "Warmup steps, where declared.", reduction=Reduction.SAME)
STEP = gauge(
    "otel_train.step",
    "Global optimizer step.",
    reduction=Reduction.SAME,
    note="Goes on across restarts when the monitor's state is restored (`Monitor.load_state_dict`). Several optimizers make one "
    "step together, which is over when one steps again: a discriminator and a generator in turn are one step, and five steps of "
    "the discriminator for one of the generator are five.",
)
SAMPLED_STEP = gauge(
    "otel_train.sampled_step",
    "Global step that the layer gauges show.",
    reduction=Reduction.SAME,
    note="Of several optimizers in turn, those that were not measured in it show their own last sample, for as long as they go on "
    "stepping.",
)
TOKENS_SEEN = gauge(
    "otel_train.tokens_seen",
    "Tokens trained on so far.",
    unit="{token}",
    reduction=Reduction.SUM,
    note="Restored as `otel_train_step` is; on another number of ranks so that the sum over ranks goes on. No series until "
    "`observe(tokens=…)` is called.",
)
STEPS = counter("otel_train.steps", "Optimizer steps that happened, in this process.", reduction=Reduction.SAME)
MICRO_BATCHES = counter(
    "otel_train.micro_batches",
    "Forward passes of the model in training.",
    note="Counted by `observe` where it is called, else by the model's own forward passes.",
)
SKIPPED_STEPS = counter(
    "otel_train.skipped_steps",
    "Optimizer steps that the gradient scaler skipped.",
    reduction=Reduction.SAME,
    note="Seen through a fused optimizer's `found_inf`, or through a loss scale that fell between two calls of "
    "`observe(loss_scale=…)`. Where a scaler leaves out one of several optimizers, that counts here, and the step of the others as "
    "a step.",
)
RESUMES = counter("otel_train.resumes", "Times the monitor's state was restored.", reduction=Reduction.SAME)
LAST_STEP_TIMESTAMP = gauge(
    "otel_train.last_step.timestamp",
    "Unix time at which the last optimizer step ended.",
    unit="s",
)
LEARNING_RATE = gauge(
    "otel_train.learning_rate",
    "Learning rate of the last step of its optimizer.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
)
LEARNING_RATE_EXPECTED_RATIO = gauge(
    "otel_train.learning_rate_expected_ratio",
    "Learning rate over what a linear warmup as declared would give.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
    note="Only during a declared warmup (`warmup_steps`), and where the scheduler records the group's peak (`initial_lr`). "
    "Far from 1: the schedule is stepped too often or too seldom. Schedules that start from 0 are a step behind: 0.9 at step 10.",
)
LEARNING_RATE_SCHEDULE_RATIO = gauge(
    "otel_train.learning_rate_schedule_ratio",
    "Learning rate over the peak of its schedule.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
    note="The peak is what the scheduler records (`max_lr`, `initial_lr`), or the largest rate seen. No series while a rate that "
    "no scheduler declares still rises, since its peak is not known yet. Update ratios divided by it compare over a schedule.",
)
WEIGHT_DECAY = gauge(
    "otel_train.weight_decay",
    "Weight decay of the parameter group.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
)
OPTIMIZER_BETA1 = gauge(
    "otel_train.optimizer.beta1",
    "First-moment decay, or momentum, where the optimizer has it.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
)
OPTIMIZER_BETA2 = gauge(
    "otel_train.optimizer.beta2",
    "Second-moment decay, where the optimizer has it.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
)
OPTIMIZER_EPSILON = gauge(
    "otel_train.optimizer.epsilon",
    "Epsilon, where the optimizer has it.",
    labels=("optimizer", "param_group"),
    reduction=Reduction.SAME,
)

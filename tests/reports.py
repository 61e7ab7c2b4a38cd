"""Public reports about tools like this one, and what covers each; ``python -m tests.reports`` prints the table.

Numbers 1 to 85 are those of the project's research. A row cites tests as ``file::test``, relative to this folder, and rows of the
parity table by their names; what is not covered says why.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One report."""

    number: int
    where: str
    tests: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    """Of tests/parity/table.py."""
    why_not: str = ""
    """Why it, or a part of it, is not covered."""


_CLIP = "parity/test_clipping.py::test_every_norm_clips_as_torch_does_without_sharding"
_DEEPSPEED = "test_attach.py::test_a_refusal_says_what_was_expected_and_leaves_nothing_behind"
_COMPILE = "hooks/test_compile.py::test_a_monitor_adds_one_graph_no_break_and_changes_nothing"
_SCALED = "hooks/test_optimizers.py::test_a_grad_scalers_gradients_are_shown_unscaled_and_its_skipped_steps_counted"
_ACCUMULATED = "hooks/test_loops.py::test_accumulation_counts_tokens_by_micro_batch_and_time_by_step"
_JUMP = "assembly/test_state.py::test_a_rate_that_jumped_over_a_resume_shows_against_the_peak_of_before"
_BUDGET = "test_layers.py::test_above_max_layers_norms_go_first_and_then_layers_merge"
_NO_READ = "hooks/test_host_reads.py::test_a_sampled_step_runs_on_values_that_are_not_there"
_NO_GATHER = "test_architecture.py::test_no_hook_is_put_on_backward_and_no_gradient_is_gathered"
_BOUNDED = "hooks/test_bounded.py::test_a_sampled_step_makes_no_copy_of_a_large_layer"
_NO_GRADIENT = "assembly/test_coverage.py::test_a_model_without_any_gradient_is_monitored_to_zero_and_named"

REPORTS = (
    Report(1, "pytorch/pytorch #170862", (_CLIP,), ("FSDP2 2, clipped",)),
    Report(2, "pytorch/torchtitan #766", (), ("FSDP2 2", "FSDP2 2, every rank's own view")),
    Report(3, "radixark/miles_diffusion #35", ("hooks/test_distributed_modules.py::test_a_norm_that_ranks_have_still_to_add_up_is_refused",), ("FSDP2 2, clipped",)),
    Report(4, "pytorch/pytorch #149768", (_CLIP,), ("FSDP2 2, clipped", "TP 2, clipped")),
    Report(5, "ByteDance-Seed/VeOmni #184", (), ("HSDP 2 x 2, clipped", "HSDP 2 x 2")),
    Report(6, "baidu-baige/LoongForge #152", (_CLIP,), ("FSDP2 2, clipped",)),
    Report(7, "pytorch/pytorch #72548", ("parity/test_refusals.py::test_fsdp1_is_refused_on_every_rank",)),
    Report(8, "huggingface/accelerate #4219", (_CLIP,), ("FSDP2 of one block, clipped", "FSDP2 x TP 2 x 2, clipped")),
    Report(9, "NVIDIA/Megatron-LM #5916", ("parallel/test_layout.py::test_experts_of_one_name_are_parts_of_one_row",), ("experts, clipped", "FSDP2 x TP 2 x 2, clipped")),
    Report(10, "NVIDIA/Megatron-LM #2263", ("parallel/test_layout.py::test_experts_of_one_name_are_parts_of_one_row",), ("experts of each rank's own",)),
    Report(11, "NVIDIA/Megatron-LM #785", ("hooks/test_optimizers.py::test_parameter_groups_are_named_and_their_settings_exported",), ("experts of each rank's own",)),
    Report(12, "areal-project/AReaL #1497", ("parallel/test_exchange.py::test_a_rank_that_does_not_come_is_named_and_shards_are_not_shown_as_layers",), ("TP 2, clipped", "TP 2, sequence parallel, clipped")),
    Report(13, "modelscope/ms-swift #8341", (), ("DDP 2", "FSDP2 2", "HSDP 2 x 2", "FSDP2 2, adapters")),
    Report(14, "deepspeedai/DeepSpeed #7837", (_DEEPSPEED,), ("DDP 2", "FSDP2 2", "HSDP 2 x 2"), "DeepSpeed itself is refused; ours has one definition for every strategy"),
    Report(15, "deepspeedai/DeepSpeed #7255", (_NO_GRADIENT, "generate/test_alerts.py::test_it_fires_on"), ("one process", "DDP 2", "FSDP2 2")),
    Report(16, "pytorch/torchtune #2169", (), ("FSDP2 2", "FSDP2 4, attention")),
    Report(17, "wandb/wandb #9866", ("parity/test_torch_behaviour.py::test_p1_tensor_hooks_never_fire_under_fsdp2",), ("FSDP2 2",)),
    Report(18, "Lightning-AI/pytorch-lightning #17512", (_NO_GRADIENT,), ("FSDP2 2",)),
    Report(19, "wandb/wandb #1819", ("assembly/test_coverage.py::test_a_loop_that_goes_round_the_hooks_is_found", _DEEPSPEED)),
    Report(20, "wandb/wandb #1639", ("hooks/test_loops.py::test_each_of_two_optimizers_in_turn_is_sampled_whatever_the_cadence",)),
    Report(21, "wandb/wandb #2625", ("hooks/test_lifecycle.py::test_a_frozen_layer_has_no_series_and_one_that_is_thawed_gets_them", "assembly/test_coverage.py::test_parameters_that_are_thawed_later_join_the_coverage")),
    Report(22, "mosaicml/composer #3920", (), ("FSDP2 2", "FSDP2 4, uneven and empty shards")),
    Report(23, "mosaicml/composer #1501", (_DEEPSPEED,)),
    Report(24, "deepspeedai/DeepSpeed #7237", (_DEEPSPEED,)),
    Report(25, "deepspeedai/DeepSpeed #4555", (_NO_GATHER,), ("FSDP2 2",)),
    Report(26, "huggingface/transformers #11850", (_DEEPSPEED,)),
    Report(27, "bigscience-workshop/Megatron-DeepSpeed #149", ("hooks/test_gradients.py::test_gradients_of_every_layer_equal_naive_ones",), ("TP 2",)),
    Report(28, "swiss-ai/Megatron-LM #50", (_DEEPSPEED,), (), "Megatron's distributed optimizer steps shards of its own, which belong to no parameter of the model: refused as any optimizer without them"),
    Report(29, "pytorch/pytorch #117758", ("hooks/test_compile.py::test_attaching_after_the_first_compiled_call_is_said_once_with_what_to_do",)),
    Report(30, "pytorch/pytorch #117265", (_NO_GATHER,)),
    Report(31, "pytorch/pytorch #115750", (_NO_GATHER,)),
    Report(32, "pytorch/pytorch #173452", (_COMPILE,)),
    Report(33, "pytorch/pytorch #117584", (_COMPILE,), ("FSDP2 2, compiled blocks", "DDP 2, compiled blocks")),
    Report(34, "pytorch/pytorch #135410", (_COMPILE, _NO_READ)),
    Report(35, "pytorch/pytorch #142358", (_COMPILE,)),
    Report(36, "pytorch/pytorch #111966", (_COMPILE,)),
    Report(37, "wandb/wandb #10221", (_COMPILE, _NO_READ)),
    Report(38, "pytorch/pytorch #81296", ("hooks/test_lifecycle.py::test_tied_weights_are_measured_once", "hooks/test_checkpointing.py::test_what_is_recomputed_is_what_it_was_and_counts_once"), ("FSDP2 2, tied",)),
    Report(39, "allenai/OLMo-core #720", ("hooks/test_checkpointing.py::test_what_is_recomputed_is_what_it_was_and_counts_once",), ("FSDP2 2, checkpointing",)),
    Report(40, "wandb/wandb #9092", (_SCALED,), ("DDP 2, GradScaler", "FSDP2 2, GradScaler, fused")),
    Report(41, "wandb/wandb #4369", (_SCALED,), ("DDP 2, GradScaler, fused",)),
    Report(42, "Lightning-AI/pytorch-lightning #9205, #4151, #11407", (_SCALED,), ("DDP 2, GradScaler, unscaled and clipped",)),
    Report(43, "pytorch/pytorch #67590", ("hooks/test_precision.py::test_a_skipped_step_is_not_blamed_on_another", "hooks/test_precision.py::test_a_skipped_step_has_no_update_ratio_and_no_layer_looks_stalled")),
    Report(44, "wandb/wandb #10100", ("hooks/test_gradients.py::test_accumulated_gradients_are_read_once_and_whole",), ("DDP 2, no_sync", "FSDP2 2, accumulation")),
    Report(45, "Lightning-AI/pytorch-lightning #5405", (_ACCUMULATED,)),
    Report(46, "Lightning-AI/pytorch-lightning #19461", (_ACCUMULATED,)),
    Report(47, "Lightning-AI/pytorch-lightning #20346", (_ACCUMULATED,)),
    Report(48, "wandb/wandb #2258", ("assembly/test_state.py::test_a_resume_that_repeats_steps_follows_the_users_step",)),
    Report(49, "pytorch/torchtitan #4298", ("test_monitor.py::test_a_phase_is_a_label_and_its_time_is_no_step_time", "test_monitor.py::test_steps_made_in_another_phase_do_not_shorten_the_step_after_it")),
    Report(50, "pytorch/torchtitan #4232", ("test_config.py::test_a_bad_value_says_what_was_expected_and_what_came",)),
    Report(51, "wandb/wandb #2268", ("hooks/test_pace.py::test_a_slow_hook_costs_less_than_1_percent_after_100_steps", "test_budget.py::test_a_costly_sample_stretches_the_cadence_at_once_as_far_as_is_needed", "bench/test_bench.py::test_a_sampled_step_stays_cheap")),
    Report(52, "wandb/wandb #3701", ("hooks/test_bounded.py::test_what_goes_to_the_host_does_not_grow_with_the_layers",)),
    Report(53, "facebookresearch/fairchem #747", (_BUDGET, "test_layers.py::test_vectors_have_series_only_on_request")),
    Report(54, "huggingface/transformers #27233", ("hooks/test_bounded.py::test_what_goes_to_the_host_does_not_grow_with_the_layers",)),
    Report(55, "wandb/wandb #2644", ("hooks/test_bounded.py::test_memory_does_not_grow_with_steps",)),
    Report(56, "wandb/wandb #2460", (_BOUNDED,)),
    Report(57, "THUDM/slime #451", (_BOUNDED, _NO_GATHER)),
    Report(58, "ISEEKYAN/Megatron-LM #186", (_BOUNDED,)),
    Report(59, "NVIDIA/Megatron-LM #7076", (_NO_READ, "test_architecture.py::test_only_the_readout_waits_for_the_device")),
    Report(60, "pytorch/torchtune #522", (_NO_READ, "test_readout.py::test_peeking_at_a_device_gives_nothing_and_reads_nothing")),
    Report(61, "pytorch/torchtitan #735", (_NO_GATHER, "bench/test_bench.py::test_a_sampled_step_stays_cheap"), ("FSDP2 2",)),
    Report(62, "wandb/wandb #7423", ("parity/test_ranks.py::test_a_rank_that_is_late_delays_nobody_and_is_waited_for_again_later", "parity/test_ranks.py::test_a_rank_that_dies_is_named_by_the_living")),
    Report(63, "Lightning-AI/pytorch-lightning #19106", ("parity/test_ranks.py::test_another_layout_on_one_rank_is_said_by_all", "parity/test_ranks.py::test_a_stage_that_skips_a_step_alone_hangs_nobody_and_spoils_no_value")),
    Report(64, "wandb/wandb #955, #800", ("hooks/test_nonfinite.py::test_a_loss_that_turns_non_finite_is_counted_everywhere_and_stops_nothing",)),
    Report(65, "wandb/wandb #2930", ("stats/test_gradients.py::test_a_constant_gradient_has_no_deviation", "stats/test_gradients.py::test_magnitudes_are_counted_as_a_plain_loop_does")),
    Report(66, "open-telemetry/opentelemetry-python #5330", ("assembly/test_assembly.py::test_values_that_are_not_finite_are_shown_and_counted", "sinks/otlp/test_message.py::test_the_next_snapshot_has_its_own_numbers_in_the_message_that_is_kept")),
    Report(67, "open-telemetry/opentelemetry-python #5637", ("sinks/otlp/test_pusher.py::test_a_snapshot_goes_out_again_while_no_newer_one_comes",)),
    Report(68, "open-telemetry/opentelemetry-python-contrib #2074", why_not="no reader of the SDK's pushes: one thread, which takes no lock that the training takes"),
    Report(69, "open-telemetry/opentelemetry-python #3461", ("sinks/otlp/test_pusher.py::test_what_could_not_be_taken_arrives_afterwards_in_order",)),
    Report(70, "open-telemetry/opentelemetry-python #2767, #3402, #4994", ("e2e/test_processes.py::test_a_forked_child_neither_serves_nor_counts",)),
    Report(71, "prometheus/client_python #367", ("test_attach.py::test_attaching_again_keeps_the_port_each_time",), (), "its multiprocess mode is not used: a port for each rank"),
    Report(72, "prometheus/client_python #275", (), (), "as above: no files to go stale"),
    Report(73, "ai-dynamo/nixl #1920", ("test_attach.py::test_attaching_again_keeps_the_port_each_time", "test_attach.py::test_a_taken_port_falls_back_to_a_free_one_and_is_said"), (), "a file for discovery (sd_file) is not built yet"),
    Report(74, "NVIDIA/Megatron-LM #1371", ("test_attach.py::test_a_taken_port_falls_back_to_a_free_one_and_is_said",)),
    Report(75, "ray-project/ray #65029", (_BUDGET,)),
    Report(76, "ray-project/ray #52846", ("test_layers.py::test_blocks_as_layers_have_one_series_a_kind",), ("FSDP2 2, layers are blocks",)),
    Report(77, "prometheus/pushgateway #19, #117", ("e2e/test_prometheus.py::test_the_end_of_the_run_is_stored", "e2e/test_alerts.py::test_a_killed_training_is_absent_and_not_stalled")),
    Report(78, "karpathy/nanoGPT #464 and others", ("stats/test_throughput.py::test_unknown_devices_and_slices_have_none", "stats/test_throughput.py::test_known_devices_have_their_peak")),
    Report(79, "huggingface/accelerate #2926", ("hooks/test_loops.py::test_a_schedule_that_is_stepped_too_often_shows_in_the_expected_ratio",)),
    Report(80, "huggingface/accelerate #662", ("hooks/test_loops.py::test_a_schedule_that_is_stepped_too_often_shows_in_the_expected_ratio",)),
    Report(81, "huggingface/diffusers #8312", (_JUMP,), (), "shown by the schedule ratio; an alert on jumps is not built yet"),
    Report(82, "huggingface/transformers #26827", ("hooks/test_loops.py::test_a_schedule_that_is_stepped_too_often_shows_in_the_expected_ratio",), (), "shown by the learning rate; an alert on an early 0 is not built yet"),
    Report(83, "Lightning-AI/pytorch-lightning #4655", ("hooks/test_loops.py::test_a_schedule_that_does_not_go_on_after_a_resume_shows_at_the_first_step", "assembly/test_state.py::test_a_scheduler_that_was_not_resumed_with_the_step_shows_at_once")),
    Report(84, "facebookresearch/ParlAI #1812", (_JUMP,), (), "as 81"),
    Report(85, "mosaicml/llm-foundry #194, facebookresearch/DPR #99", ("hooks/test_loops.py::test_a_schedule_that_does_not_go_on_after_a_resume_shows_at_the_first_step",), (), "as 81"),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    for report in REPORTS:
        covered = [*report.tests, *(f"parity: {row}" for row in report.rows)]
        said = "; ".join(covered) or "not ours"
        print(f"{report.number} | {report.where} | {said}" + (f" | {report.why_not}" if report.why_not else ""))  # noqa: T201


if __name__ == "__main__":
    main()

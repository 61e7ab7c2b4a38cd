"""Settings: names, environment, checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from otel_train.config import (
    MonitorConfig,
    Rank,
    is_disabled,
    make_config,
    rank_from_environment,
    run_name,
    settings_from_environment,
)
from otel_train.errors import ConfigError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"every_n_steps": 0}, "every_n_steps: expected an integer of at least 1, got 0"),
    ({"every_n_steps": True}, "every_n_steps: expected an integer"),
    ({"every_n_steps": 2.5}, "every_n_steps: expected an integer"),
    ({"max_overhead": 0}, "max_overhead: expected a positive number up to 1 or None, got 0"),
    ({"max_overhead": 1.5}, "max_overhead: expected a positive number up to 1 or None, got 1.5"),
    ({"max_layers": -1}, "max_layers: expected an integer"),
    ({"port": 70000}, "port: expected a port from 0 to 65535"),
    ({"port": -1}, "port: expected an integer of at least 0"),
    ({"host": ""}, "host: expected a non-empty string"),
    ({"run": ""}, "run: expected a non-empty string or None"),
    ({"layers": "modul"}, "layers: expected 'module', 'block', 'parameter' or a callable, got 'modul'"),
    ({"kinds": ("matrix", "bias")}, "kinds: expected one or more of"),
    ({"kinds": ()}, "kinds: expected one or more of"),
    ({"activations": 3}, "activations: expected True, False or patterns"),
    ({"activations": ()}, "activations: expected True, False or patterns"),
    ({"histograms": True}, "histograms: expected 'block', 'layer' or 'off'"),
    ({"signed_histograms": "yes"}, "signed_histograms: expected True or False, got 'yes'"),
    ({"signed_histograms": True, "histograms": "off"}, "signed_histograms: expected False where histograms are 'off', got True"),
    ({"updates": "all"}, "updates: expected 'sampled', 'exact' or 'off'"),
    ({"planned_steps": 0}, "planned_steps: expected an integer of at least 1 or None"),
    ({"warmup_steps": -1}, "warmup_steps: expected an integer of at least 0 or None"),
    ({"peak_flops": 0}, "peak_flops: expected a positive number"),
    ({"flops_per_token": float("nan")}, "flops_per_token: expected a positive number"),
    ({"labels": {"9": "x"}}, "labels: expected a mapping"),
    ({"labels": {"team": 3}}, "labels: expected a mapping"),
    ({"labels": {"layer": "x"}}, "labels: 'layer' is a label of otel-train or Prometheus itself"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[str(settings) for settings, _ in BAD])
def test_a_bad_value_says_what_was_expected_and_what_came(settings: dict[str, Any], message: str) -> None:
    """A subclass of ValueError, in one line."""
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as caught:
        make_config(None, settings, {})
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_an_unknown_setting_names_the_one_that_was_meant() -> None:
    """Or lists them all."""
    with pytest.raises(ConfigError, match="unknown setting 'every_n_step'; did you mean 'every_n_steps'"):
        make_config(None, {"every_n_step": 5}, {})
    with pytest.raises(ConfigError, match="settings are: run, every_n_steps"):
        make_config(None, {"zzz": 5}, {})


def test_a_keyword_wins_over_the_environment_and_that_over_the_default() -> None:
    """And config= is taken as it is."""
    environ = {"OTEL_TRAIN_EVERY_N_STEPS": "7", "OTEL_TRAIN_PORT": "1234"}
    assert make_config(None, {"port": 99}, environ) == MonitorConfig(every_n_steps=7, port=99)
    assert make_config(MonitorConfig(every_n_steps=3), {"port": 99}, environ) == MonitorConfig(every_n_steps=3, port=99)


def test_every_setting_can_come_from_the_environment() -> None:
    """One variable a field, read into the field's type."""
    texts = {
        "run": "r", "every_n_steps": "5", "host": "::1", "port": "0", "layers": "block", "max_layers": "9",
        "kinds": "matrix, vector",
        "activations": "blocks.*.act,head", "histograms": "layer", "signed_histograms": "1", "updates": "exact", "planned_steps": "100", "warmup_steps": "none",
        "flops_per_token": "6e6", "peak_flops": "1e12", "labels": "team=a,user=b", "handle_sigterm": "yes",
        "layers_on": "all", "rank_timeout": "2.5", "update_memory_mb": "128", "max_overhead": "0.05",
    }  # fmt: skip
    assert set(texts) == {entry.name for entry in dataclasses.fields(MonitorConfig)}
    found = make_config(None, {}, {f"OTEL_TRAIN_{name.upper()}": text for name, text in texts.items()})
    assert found == MonitorConfig(
        run="r", every_n_steps=5, host="::1", port=0, layers="block", max_layers=9, kinds=("matrix", "vector"),
        activations=("blocks.*.act", "head"), histograms="layer", signed_histograms=True, updates="exact", planned_steps=100, warmup_steps=None,
        flops_per_token=6e6, peak_flops=1e12, labels={"team": "a", "user": "b"}, handle_sigterm=True,
        layers_on="all", rank_timeout=2.5, update_memory_mb=128.0, max_overhead=0.05,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "text"),
    [("EVERY_N_STEPS", "often"), ("HANDLE_SIGTERM", "maybe"), ("LABELS", "team"), ("PEAK_FLOPS", "fast"), ("PORT", "http")],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, text: str) -> None:
    """With what it holds."""
    with pytest.raises(ConfigError, match=f"OTEL_TRAIN_{variable}: expected .*, got '{text}'"):
        settings_from_environment({f"OTEL_TRAIN_{variable}": text})


def test_opentelemetry_variables_are_honoured() -> None:
    """Ours win over them."""
    otel = {"OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1", "OTEL_EXPORTER_PROMETHEUS_PORT": "8000"}
    assert settings_from_environment(otel) == {"host": "127.0.0.1", "port": 8000}
    assert settings_from_environment({**otel, "OTEL_TRAIN_PORT": "8001"})["port"] == 8001
    assert is_disabled({"OTEL_SDK_DISABLED": "TRUE"})
    assert not is_disabled({"OTEL_SDK_DISABLED": "1"})


def test_ranks_come_from_torchrun() -> None:
    """A single process without it, or with nonsense."""
    assert rank_from_environment({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) == Rank(3, 1, 4)
    assert rank_from_environment({"RANK": "x"}) == Rank(0, 0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_ID": "42"}, "42"),
        ({"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "2"}, "42-2"),
        ({"TORCHELASTIC_RUN_ID": "my run"}, "my-run"),
    ],
)
def test_the_run_is_named_by_its_launcher(environ: dict[str, str], expected: str) -> None:
    """Unless a name is given."""
    assert run_name(MonitorConfig(), environ) == expected
    assert run_name(MonitorConfig(run="mine"), environ) == "mine"


def test_a_made_up_name_differs_from_run_to_run() -> None:
    """And `none`, which torchelastic says for no name, is none."""
    names = {run_name(MonitorConfig(), {"TORCHELASTIC_RUN_ID": "none"}) for _ in range(20)}
    assert len(names) > 1
    assert "none" not in names


def test_names_that_are_not_utf8_are_made_printable() -> None:
    """Bytes of the environment become lone surrogates in Python, which would fail every scrape."""
    assert run_name(MonitorConfig(), {"SLURM_JOB_ID": "caf\udce9"}) == "caf?"
    assert run_name(MonitorConfig(run="\udce9"), {}) == "?"
    assert MonitorConfig(labels={"team": "\udce9"}).labels == {"team": "?"}


def test_an_empty_variable_is_as_good_as_none() -> None:
    """As the OpenTelemetry specification has it."""
    assert settings_from_environment({"OTEL_EXPORTER_PROMETHEUS_PORT": "", "OTEL_TRAIN_RUN": ""}) == {}

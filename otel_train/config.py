"""MonitorConfig: every setting, its environment variable, its check. The only reader of environment variables."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from otel_train import naming
from otel_train.catalog import BASE_LABELS, CATALOG
from otel_train.errors import ConfigError

KINDS = ("matrix", "embedding", "norm", "vector")
"""Kinds of layers; vectors (biases) have series only on request."""

_RESERVED_LABELS = frozenset(
    {"job", "instance", "le", *BASE_LABELS, *(label for spec in CATALOG.values() for label in spec.labels)}
)
_NONE_WORDS = ("", "none")


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise ValueError("true or false")
    return words[text.strip().lower()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _activations(text: str) -> bool | tuple[str, ...]:
    try:
        return _boolean(text)
    except ValueError:
        return _words(text)


def _pairs(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in _words(text)]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("name=value,name=value")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.strip().lower() in _NONE_WORDS else parse(text)


def _reads(parse: Callable[[str], Any], *also: str) -> dict[str, Any]:
    """Say how a setting's environment variable is read, and which other variables set it too."""
    return {"parse": parse, "also": also}


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """The settings of a monitor.

    Each field is a keyword of ``attach`` and an environment variable ``OTEL_TRAIN_<NAME>``; a keyword wins over ``config=``, and
    where no ``config=`` is given the environment wins over the default.

    Raises:
        ConfigError: A value is not what the field expects.
    """

    run: str | None = field(default=None, metadata=_reads(_optional(str)))
    """Name of the run, the label ``run``. Default: Slurm's job id, torchelastic's run id, else made up."""
    every_n_steps: int = field(default=10, metadata=_reads(int))
    """Steps between samples. The first step is sampled too."""
    max_overhead: float | None = field(default=0.01, metadata=_reads(_optional(float)))
    """Most own seconds a second of training. Above it costly parts, then all samples, come less often. None: no limit."""
    host: str = field(default="localhost", metadata=_reads(str, "OTEL_EXPORTER_PROMETHEUS_HOST"))
    """Address that the endpoint listens on; loopback by default. IPv6 addresses without brackets."""
    port: int | None = field(default=9464, metadata=_reads(_optional(int), "OTEL_EXPORTER_PROMETHEUS_PORT"))
    """Port of the endpoint, plus the local rank; a taken port falls back to a free one. 0: any free one; None: no endpoint."""
    layers: Literal["module", "block", "parameter"] | Callable[[str], str | None] = field(default="module", metadata=_reads(str))
    """What a layer is: a module, a block, a parameter, or what a callable makes of a parameter's name (None: leave it out)."""
    max_layers: int = field(default=512, metadata=_reads(int))
    """Most layers with series of their own: above it norms are dropped first, then layers merge to blocks."""
    kinds: tuple[str, ...] = field(default=("matrix", "embedding", "norm"), metadata=_reads(_words))
    """Kinds of parameters with series: matrix, embedding, norm, vector."""
    activations: bool | tuple[str, ...] = field(default=True, metadata=_reads(_activations))
    """True: every activation module; False: none; patterns (``blocks.*.act``): the modules whose path matches."""
    histograms: Literal["block", "layer", "off"] = field(default="block", metadata=_reads(str))
    """Gradient magnitude histograms: one a block, one a layer, or none."""
    signed_histograms: bool = field(default=False, metadata=_reads(_boolean))
    """Histograms of gradients by signed value too, of the same elements."""
    layers_on: Literal["owner", "all"] = field(default="owner", metadata=_reads(str))
    """Which ranks export layers: each layer's owner, reduced over the ranks, or every rank its own shards as well."""
    rank_timeout: float = field(default=30.0, metadata=_reads(float))
    """Seconds that ``attach`` waits for other ranks, and, in the monitor's own thread, a sampled step's values for theirs."""
    updates: Literal["sampled", "exact", "off"] = field(default="sampled", metadata=_reads(str))
    """How the change of the weights is measured: on samples, on every element (one copy of the weights), or not."""
    update_memory_mb: float | None = field(default=None, metadata=_reads(_optional(float)))
    """MiB that copies of weights may take: above it layers are measured in turns, one part of them a sample. Default: as much as
    ``exact`` needs; of ``sampled`` 64, or a hundredth of weights and gradients where that is more."""
    planned_steps: int | None = field(default=None, metadata=_reads(_optional(int)))
    """Optimizer steps that the run is planned for."""
    warmup_steps: int | None = field(default=None, metadata=_reads(_optional(int)))
    """Steps of the learning rate's warmup."""
    flops_per_token: float | None = field(default=None, metadata=_reads(_optional(float)))
    """FLOPs that training needs for a token, for models whose FLOPs cannot be derived from their shapes."""
    peak_flops: float | None = field(default=None, metadata=_reads(_optional(float)))
    """Peak FLOP/s of the device, for devices that the table does not know."""
    labels: Mapping[str, str] = field(default_factory=dict, metadata=_reads(_pairs))
    """Constant labels of every series, such as a team."""
    handle_sigterm: bool = field(default=False, metadata=_reads(_boolean))
    """End the run as inactive on SIGTERM, then go on to whatever handled the signal before."""

    def __post_init__(self) -> None:
        """Check every value; each message says what was expected and what came."""
        for name in ("kinds", "activations"):
            value = getattr(self, name)
            if isinstance(value, str):  # one pattern, or one kind, without the parentheses
                object.__setattr__(self, name, (value,))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in ("every_n_steps", "max_layers"):
            self._check_integer(name, least=1)
        for name in ("planned_steps", "warmup_steps"):
            self._check_integer(name, least=1 if name == "planned_steps" else 0, optional=True)
        for name in ("flops_per_token", "peak_flops", "update_memory_mb"):
            self._check_positive(name)
        self._check_positive("max_overhead", most=1.0)
        self._check_positive("rank_timeout", optional=False)
        self._check_choice("layers_on", ("owner", "all"))
        self._check_port()
        self._check_text("host")
        self._check_text("run", optional=True)
        self._check_choice("histograms", ("block", "layer", "off"))
        self._check_signed_histograms()
        self._check_choice("updates", ("sampled", "exact", "off"))
        if not callable(self.layers):
            self._check_choice("layers", ("module", "block", "parameter"), "a callable")
        self._check_kinds()
        self._check_activations()
        self._check_labels()

    def _refuse(self, name: str, expected: str) -> None:
        raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def _check_integer(self, name: str, *, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(name, f"an integer of at least {least}" + (" or None" if optional else ""))

    def _check_positive(self, name: str, *, optional: bool = True, most: float = math.inf) -> None:
        value = getattr(self, name)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (optional and value is None) and not (numeric and 0 < value <= most and value < math.inf):
            limit = "" if most == math.inf else f" up to {most:g}"
            self._refuse(name, f"a positive number{limit}" + (" or None" if optional else ""))

    def _check_port(self) -> None:
        self._check_integer("port", least=0, optional=True)
        if self.port is not None and self.port > 65535:
            self._refuse("port", "a port from 0 to 65535 or None")

    def _check_text(self, name: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if not (optional and value is None) and not (isinstance(value, str) and value):
            self._refuse(name, "a non-empty string" + (" or None" if optional else ""))

    def _check_choice(self, name: str, choices: tuple[str, ...], also: str = "") -> None:
        if getattr(self, name) not in choices:
            words = [repr(choice) for choice in choices] + ([also] if also else [])
            self._refuse(name, ", ".join(words[:-1]) + " or " + words[-1])

    def _check_signed_histograms(self) -> None:
        value: object = self.signed_histograms
        if not isinstance(value, bool):
            self._refuse("signed_histograms", "True or False")
        if value and self.histograms == "off":
            self._refuse("signed_histograms", "False where histograms are 'off'")

    def _check_kinds(self) -> None:
        if type(self.kinds) is not tuple or not self.kinds or any(kind not in KINDS for kind in self.kinds):
            self._refuse("kinds", "one or more of " + ", ".join(repr(kind) for kind in KINDS))

    def _check_activations(self) -> None:
        value = self.activations
        patterns = isinstance(value, tuple) and value and all(isinstance(pattern, str) for pattern in value)
        if not isinstance(value, bool) and not patterns:
            self._refuse("activations", "True, False or patterns of module paths")

    def _check_labels(self) -> None:
        given: object = self.labels
        pairs = dict(given) if isinstance(given, Mapping) else {"": ""}
        if not all(type(name) is type(value) is str and naming.is_label_name(name) for name, value in pairs.items()):
            self._refuse("labels", "a mapping of Prometheus label names to strings")
        taken = _RESERVED_LABELS.intersection(pairs)
        if taken:
            raise ConfigError(f"labels: {min(taken)!r} is a label of otel-train or Prometheus itself; choose another name")
        object.__setattr__(self, "labels", {name: _printable(value) for name, value in pairs.items()})


def settings_from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the settings that environment variables give.

    Raises:
        ConfigError: A variable's text cannot be read as its setting.
    """
    settings: dict[str, Any] = {}
    for entry in dataclasses.fields(MonitorConfig):
        for variable in (f"OTEL_TRAIN_{entry.name.upper()}", *entry.metadata["also"]):
            if environ.get(variable):  # an empty one is as good as none, as OpenTelemetry has it
                settings[entry.name] = _read(variable, environ[variable], entry.metadata["parse"])
                break
    return settings


def _read(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError:
        kind = {int: "an integer", float: "a number", _boolean: "true or false", _pairs: "name=value,name=value"}
        raise ConfigError(f"{variable}: expected {kind.get(parse, 'a number or none')}, got {text!r}") from None


def make_config(
    config: MonitorConfig | None, settings: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> MonitorConfig:
    """Combine ``config=``, keywords and the environment.

    Raises:
        ConfigError: A keyword names no setting, or a value is not what its setting expects.
    """
    names = [entry.name for entry in dataclasses.fields(MonitorConfig)]
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "settings are: " + ", ".join(names)
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    if config is None:
        return MonitorConfig(**{**settings_from_environment(environ), **settings})
    if not isinstance(config, MonitorConfig):
        raise ConfigError(f"config: expected a MonitorConfig, got {type(config).__name__}")
    return dataclasses.replace(config, **settings)


@dataclass(frozen=True, slots=True)
class Rank:
    """Where this process stands among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def rank_from_environment(environ: Mapping[str, str] = os.environ) -> Rank:
    """Read torchrun's RANK, LOCAL_RANK and WORLD_SIZE; a single process without them."""

    def number(name: str, default: int) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else default

    return Rank(number("RANK", 0), number("LOCAL_RANK", 0), max(1, number("WORLD_SIZE", 1)))


def is_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether OTEL_SDK_DISABLED switches monitoring off, as the OpenTelemetry specification has it."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def run_name(config: MonitorConfig, environ: Mapping[str, str] = os.environ) -> str:
    """Return the run's name: given, from Slurm, from torchelastic, or made up from the time and a random part.

    The random part comes from the operating system: the user's random streams do not move.
    """
    return _printable(_run_name(config, environ))


def _printable(text: str) -> str:
    """Replace what is no Unicode: bytes of the environment that are not UTF-8 become lone surrogates, which no sink can write."""
    return text.encode("utf-8", "replace").decode()


def _run_name(config: MonitorConfig, environ: Mapping[str, str]) -> str:
    if config.run is not None:
        return config.run
    job = environ.get("SLURM_JOB_ID")
    if job:
        restarts = environ.get("SLURM_RESTART_COUNT", "0")
        return job if restarts in ("", "0") else f"{job}-{restarts}"
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    if elastic and elastic != "none":
        return re.sub(r"\s+", "-", elastic)
    return time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:4]

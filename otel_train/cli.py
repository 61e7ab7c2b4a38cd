"""The command line: ``otel-train``.

Exit codes: 0 fine, 1 the thing asked about is wrong (a generated file differs), 2 bad usage or input with one line on stderr.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from otel_train import assets
from otel_train._version import __version__
from otel_train.assets import TRAINING_ADDRESS
from otel_train.errors import ConfigError, OtelTrainError

SCENARIOS = ("healthy", "lr-too-high", "lr-too-low", "frozen-layer", "nan-loss")
"""Names of the demo's scenarios, the default first; said here so that --help need not wait for torch."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line; argparse would print the usage too."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except OtelTrainError as error:
        print(f"otel-train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="otel-train", description="See inside a PyTorch training, on a Prometheus endpoint.")
    parser.add_argument("--version", action="version", version=f"otel-train {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_stack(commands)
    _add_assets(commands)
    _add_generate(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser("demo", help="train a small GPT on the standard library's source, and look inside")
    demo.add_argument("--steps", type=_positive, default=300, help="optimizer steps (default 300, under two minutes on 2 cores)")
    demo.add_argument("--port", type=_port, help="port of the page and of /metrics (default 9464; 0: any free one)")
    demo.add_argument("--every-n-steps", type=_positive, metavar="N", help="steps between samples (default 10)")
    demo.add_argument("--hold", action="store_true", help="go on serving the last values until Ctrl-C")
    demo.add_argument("--scenario", choices=SCENARIOS, default=SCENARIOS[0], help=f"how to train: {', '.join(SCENARIOS)}")
    demo.add_argument("--stack", action="store_true", help="watch it with a local Prometheus and Alertmanager, and say alerts")
    demo.set_defaults(run=_demo)


def _add_stack(commands: argparse._SubParsersAction[_Parser]) -> None:
    stack = commands.add_parser("stack", help="run Prometheus and Alertmanager here with the shipped rules, and say alerts")
    stack.add_argument(
        "--target", action="append", type=_address, metavar="HOST:PORT", help=f"a training's endpoint (default {TRAINING_ADDRESS})"
    )
    stack.add_argument(
        "--time-base", choices=("standard", "demo"), default="standard", help="clocks of the rules: of long runs, or of the demo"
    )
    stack.add_argument("--data", type=Path, metavar="DIR", help="keep configurations, data and logs there (default: deleted)")
    stack.set_defaults(run=_stack)


def _add_assets(commands: argparse._SubParsersAction[_Parser]) -> None:
    files = commands.add_parser("assets", help="write the shipped dashboards, rules, configurations and runbooks into a folder")
    files.add_argument("folder", type=Path, metavar="DIR", help="made where it is not there; files of the same name are replaced")
    files.add_argument("--runbooks", type=_url, metavar="URL", help="where your copy of the runbooks is served; alerts link to it")
    files.set_defaults(run=_assets)


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    generate = commands.add_parser("generate", help="write the files that follow from the catalog (for developers)")
    generate.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs, and show how")
    generate.set_defaults(run=_generate)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", host) or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s\"'{}#\\]+", text):
        raise argparse.ArgumentTypeError(f"expected an address such as https://wiki.example/runbooks, got {text!r}")
    return text.rstrip("/")


def _demo(options: argparse.Namespace) -> int:
    from otel_train.demo import DemoOptions, run_demo  # noqa: PLC0415  # imports torch, which --help need not wait for

    _end_on_signals()
    as_expected = run_demo(
        DemoOptions(options.steps, options.port, options.every_n_steps, options.hold, options.scenario, stack=options.stack)
    )
    return 0 if as_expected else 1


def _stack(options: argparse.Namespace) -> int:
    from otel_train.stack import StackOptions, run_stack  # noqa: PLC0415  # other commands need no servers

    _end_on_signals()
    run_stack(StackOptions(tuple(options.target or [TRAINING_ADDRESS]), options.time_base, options.data))
    return 0


def _end_on_signals() -> None:
    """Leave by way of the ``with`` blocks, which stop what was started, when ended or when the terminal is closed."""
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _assets(options: argparse.Namespace) -> int:
    written = assets.write(options.folder, {assets.RUNBOOKS: options.runbooks} if options.runbooks else None)
    print(f"wrote {len(written)} files into {options.folder}; start with {options.folder / 'deploy' / 'compose.yaml'}")
    return 0


def _generate(options: argparse.Namespace) -> int:
    from otel_train import generate  # noqa: PLC0415  # for developers only

    root = Path.cwd()
    if not (root / "otel_train" / "catalog").is_dir():
        raise ConfigError(f"generate: expected to be run in a checkout of otel-train, got {root}; change to its root")
    if not options.check:
        for path in generate.write(root):
            print(f"wrote {path}")
        return 0
    differences = generate.check(root)
    print("\n".join(differences) if differences else f"{len(generate.ARTIFACTS)} generated files are up to date")
    return 1 if differences else 0

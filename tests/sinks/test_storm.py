"""A storm of scrapes does not slow a training down."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median, quantiles

import pytest
import torch

import otel_train
from otel_train.demo.model import GPT
from otel_train.sinks.endpoint import Endpoint
from otel_train.sinks.prometheus import PrometheusSink
from otel_train.sinks.throttle import Throttle
from tests.sinks.test_exposition import many_series

CLIENT = """
import http.client, sys
port, keep, encoding = int(sys.argv[1]), sys.argv[2] == "keep", sys.argv[3]
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
while True:
    try:
        connection.request("GET", "/metrics", headers={"Accept-Encoding": encoding})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        keep_this = False
    else:
        keep_this = keep
    if not keep_this:
        connection.close()
"""
CLIENTS = (("keep", "gzip"), ("keep", "identity"), ("anew", "gzip"), ("anew", "identity"))
TURN_SECONDS = 0.4
"""Between two switches of the storm: some steps and, at its pace, some requests."""
ROUNDS = 50


@contextlib.contextmanager
def _storm(port: int) -> Iterator[Callable[[bool], None]]:
    """Start the clients and give a switch that stops them and lets them go on."""
    clients = [subprocess.Popen([sys.executable, "-c", CLIENT, str(port), *how]) for how in CLIENTS]

    def switch(on: bool) -> None:  # noqa: FBT001  # a switch
        for client in clients:
            os.kill(client.pid, signal.SIGCONT if on else signal.SIGSTOP)

    try:
        yield switch
    finally:
        for client in clients:
            client.kill()
            client.wait(10)


@contextlib.contextmanager
def _training() -> Iterator[tuple[Endpoint, Callable[[], float]]]:
    """Give the endpoint of a GPT in training, and a turn of it, which returns the seconds a step.

    It leaves a core: torch's threads wait for each other, so that on all of them whatever else runs makes steps differ by far more.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randint(256, (2, model.context))

    def turn() -> float:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < TURN_SECONDS:
            model(inputs, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        return (time.perf_counter() - began) / steps

    with otel_train.attach(model, optimizer, run="storm", port=0) as monitor:
        turn()
        assert monitor._endpoint is not None
        yield monitor._endpoint, turn


def _save_nothing_up(throttle: Throttle) -> None:
    """Spend what a pause has saved up, so that the storm is served as one that never pauses."""
    throttle._next = max(throttle._next, time.monotonic() + throttle._burst * throttle._interval)


def _standard_error(values: list[float]) -> float:
    """Return the standard error of the median, from the middle half of the values."""
    low, _, high = quantiles(values, n=4)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(values))


def test_a_storm_is_served_in_two_percent_of_a_core() -> None:
    """Processor time of the endpoint and of its clients, which sleep while they wait: that can be told on a busy machine, too."""
    sink = PrometheusSink()
    sink.publish(many_series(5_000))
    failures: list[BaseException] = []
    endpoint = Endpoint(sink, "localhost", 0, failures.append)
    try:
        with _storm(endpoint.port):
            time.sleep(3)  # past the burst that anybody may have
            began, before = time.monotonic(), endpoint.cpu_seconds
            time.sleep(4)
            assert 0 < (endpoint.cpu_seconds - before) / (time.monotonic() - began) < 0.02
    finally:
        endpoint.close()
    assert failures == []


@pytest.mark.slow
def test_a_storm_slows_a_step_by_at_most_two_percent() -> None:
    """Four clients as fast as they can, on and off by turns, and what the machine itself does between two turns without them."""
    with _training() as (endpoint, turn), _storm(endpoint.port) as switch:
        time.sleep(3)  # past the burst that anybody may have
        turns = []
        for number in range(2 * ROUNDS + 1):
            _save_nothing_up(endpoint._server.hasty)
            switch(number % 2 == 1)
            turns.append(turn())
    off, on = turns[::2], turns[1::2]
    slowdown = median(during / ((before + after) / 2) for (before, after), during in zip(pairwise(off), on, strict=True))
    error = _standard_error([after / before for before, after in pairwise(off)])
    assert slowdown <= 1.02 + 2 * error, f"{slowdown:.3f} ± {error:.3f} of a step of {1e3 * median(off):.1f} ms"

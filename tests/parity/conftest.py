"""Pools of ranks for the session, and the table at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parity.harness import Ranks, ranks

_TABLE = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two ranks."""
    with ranks(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four ranks."""
    with ranks(4) as pool:
        yield pool


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return what adds a line to the table at the end."""
    return request.config.stash.setdefault(_TABLE, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of the rows that ran."""
    rows = config.stash.get(_TABLE, [])
    if rows:
        terminalreporter.section("parity: sharded against unsharded")
        for row in rows:
            terminalreporter.write_line(row)

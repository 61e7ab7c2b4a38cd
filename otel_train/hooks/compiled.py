"""Hooks and torch.compile: those that are no part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def keep_out_of_graphs(function: Callable[..., Any]) -> None:
    """Let a hook of the root module, and what it calls, stay plain Python where torch would compile it by itself.

    So it is around a model after ``model.compile()``. Where a compiled function calls the model, the hook is part of its graph all
    the same. torch has this for its own use only; where it is missing, micro-batches of such models are not counted.
    """
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001  # torch._dynamo itself takes a second to import
    code = getattr(function, "__code__", None)
    if code is not None and hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP  # noqa: SLF001
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))  # noqa: SLF001

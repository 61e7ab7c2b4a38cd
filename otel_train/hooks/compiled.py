"""Hooks that come too late: a graph that was compiled before them runs without them, and torch does not say so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from torch import nn

_LOG = logging.getLogger("otel_train")

_WHAT_TO_DO = (
    "a graph compiled before attach ignores its hooks: attach before the first compiled call, or call torch._dynamo.reset() now"
)


class SilentSites:
    """Says once, after a sampled step, that activation hooks never fire where they should.

    Sites in compiled modules of one class share a graph: if one of them fires, the others were merely not called.

    Args:
        model: The root module.
        sites: The modules with activation hooks.
    """

    def __init__(self, model: nn.Module, sites: Sequence[nn.Module]) -> None:
        numbers = {id(site): i for i, site in enumerate(sites)}
        self._compiled: dict[str, set[int]] = {}
        for module in _compiled_modules(model):
            inside = {numbers[id(m)] for m in module.modules() if id(m) in numbers}
            if inside:
                self._compiled.setdefault(type(module).__name__, set()).update(inside)
        self._looks = 0
        self._done = not sites

    def look(self, fired: Sequence[bool], *, ran: bool) -> None:
        """Take which sites fired in a sampled step; called in the monitor's own thread.

        Args:
            fired: One a site.
            ran: Whether a sampled forward of the root module has been seen.
        """
        self._looks += 1
        # without a forward the step may have been under way when we came: the next one tells
        if self._done or not (ran or self._looks > 1):
            return
        self._done = True
        silent = [name for name, inside in self._compiled.items() if not any(fired[i] for i in inside)]
        if silent:
            _LOG.warning(
                "no activation hook inside of the compiled %s fired in a sampled step, so its activations have no series: %s",
                " and ".join(silent), _WHAT_TO_DO,
            )  # fmt: skip
        elif not any(fired):
            _LOG.warning(
                "no activation hook fired in a sampled step, so activations have no series. If the model is compiled, %s. "
                "If not, the loop calls %s",
                _WHAT_TO_DO, "no activation module" if ran else "another module than the attached one, or calls it in eval mode",
            )  # fmt: skip


def _compiled_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that are compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    for module in model.modules():
        inner = getattr(module, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            yield inner
        elif getattr(module, "_compiled_call_impl", None) is not None:
            yield module

"""Parameters of one shape, measured together: arithmetic is batched over them, only reads go tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from otel_train.layers import MonitoredParameter
from otel_train.readout import peek
from otel_train.records import ParameterReading, ParameterSums, Signs
from otel_train.sampling import Draw, Plan, Sampler, wide_dtype
from otel_train.shards import is_partial, local, local_gradient
from otel_train.stats import gradients, parameters, updates
from otel_train.stats.sums import count_nonfinite, flat, wide_sums


class ShapeGroup:
    """Measures parameters of one shape, type and device in one optimizer step.

    Args:
        members: The parameters; each has a gradient. Of sharded ones this rank's shard is measured.
        plan: What is read of each.
        sampler: Draws the elements, where not all are read.
        turn: The update is measured in this one of so many samples; None: in none.
        last: What each parameter's last turn showed (``turns.Progress.last``).
    """

    def __init__(
        self,
        members: Sequence[MonitoredParameter],
        plan: Plan,
        sampler: Sampler,
        *,
        turn: tuple[int, int] | None,
        last: dict[str, tuple[updates.UpdateEstimate, float]],
    ) -> None:
        self._members, self._plan, self._sampler = members, plan, sampler
        self._turn = turn
        self._measures = False  # the update, in this sample
        self._last = last
        self._draw: Draw | None = None  # of the sample under way
        self._counts_magnitudes = any(member.histogram is not None for member in members)
        self._counts_signs = any(member.signed for member in members)
        self._reader: updates.SampledReader | None = None
        self._copies: list[torch.Tensor] = []
        self._row_norms: torch.Tensor | None = None
        self._samples: torch.Tensor | None = None  # of the gradients, for the histogram
        self._results: dict[str, torch.Tensor] = {}
        self._deferred = False  # whether non-finite elements are counted a sample later
        # Members whose sums were not finite when last read out; where the host cannot peek, they are counted a sample later.
        self._suspects = {"gradient": set[int](), "weight": set[int]()}

    def _weights(self) -> list[torch.Tensor]:
        return [local(member.tensor) for member in self._members]

    def read_gradients(self, scale: torch.Tensor | None, *, histogram: bool) -> None:
        """Sum up the gradients.

        Args:
            scale: The gradients are this many times too large (a fused optimizer under a GradScaler), () or None.
            histogram: Whether ``count_magnitudes`` follows.
        """
        grads = [local_gradient(member.tensor) for member in self._members]
        histogram = histogram and self._counts_magnitudes
        read = gradients.read_gradients(grads, self._plan, self._sampler.draw(self._plan), histogram=histogram)
        sums, self._row_norms = read.pairs, read.row_norms
        self._results["gradient_nonfinite"] = self._settle(grads, sums, "gradient")
        inverse = None if scale is None else scale.to(sums.dtype).reshape(()).reciprocal()
        self._results["gradient"] = sums if inverse is None else sums * torch.stack([inverse, inverse.square()])
        if self._is_partial():
            wide = torch.stack([flat(grad) for grad in grads]).to(wide_dtype(sums.device))
            self._results["partial"] = wide if inverse is None else wide * inverse
        self._samples = read.samples if read.samples is None or inverse is None else read.samples * inverse.float()

    def count_magnitudes(self) -> None:
        """Count the sampled magnitudes of the gradients, and their signs if asked for."""
        samples, self._samples = self._samples, None
        if samples is not None:
            self._results["magnitudes"] = gradients.magnitudes(samples)
        if samples is not None and self._counts_signs:
            self._results["signs"] = gradients.signs(samples)

    def _is_partial(self) -> bool:
        return is_partial(self._members[0].tensor.grad)

    def read_before(self, sample: int) -> None:
        """Take the weights' norms, and copy what the update is measured on; after this step's gradients are there.

        Args:
            sample: Its number, which tells whose turn it is.
        """
        weights = self._weights()
        self._measures = self._turn is not None and sample % self._turn[1] == self._turn[0]
        if self._measures and self._plan.whole:
            self._copies = updates.read_whole(weights)
            sums = parameters.square_sums_of_copies(self._copies)
        else:
            sums = parameters.weight_square_sums(weights)
        self._results["weight"] = sums = sums.unsqueeze(1)
        self._results["weight_nonfinite"] = self._settle(weights, sums, "weight")
        if self._measures and not self._plan.whole:
            self._draw = self._sampler.draw(self._plan)  # the same after the step, in which an optimizer within may go on to others
            self._reader = self._reader or updates.SampledReader(weights, self._plan)
            self._reader.choose_rows(self._row_norms, self._draw)
            self._reader.read(weights, self._draw, after=False)

    def read_after(self) -> None:
        """Compare the weights with what was copied before the step."""
        if not self._measures:
            return
        if self._reader is not None and self._draw is not None:
            self._reader.read(self._weights(), self._draw, after=True)
            self._results["update"] = self._reader.sums()
        else:
            self._results["update"] = updates.whole_sums(self._copies, self._weights())
        self._let_go()

    def forget(self) -> None:
        """Let go of what a sample has left behind whose step did not come to its end."""
        self._results = {}
        self._let_go()

    def _let_go(self) -> None:
        self._copies, self._draw = [], None
        if self._turn != (0, 1):
            self._reader = None  # the next turn needs the memory

    def _settle(self, tensors: Sequence[torch.Tensor], sums: torch.Tensor, what: str) -> torch.Tensor:
        """Count non-finite elements, exactly, of the tensors whose sums are not finite: counting all of them costs 8 % of a step.

        Sums that are not finite though every element is are made again in fp64, where the host can see that.

        Args:
            tensors: n tensors.
            sums: (n, 2) sums and sums of squares, or (n, 1) sums of squares; mended in place.
            what: ``gradient`` or ``weight``.

        Returns:
            (n,) int64.
        """
        known = peek(sums)
        self._deferred = known is None
        suspects = self._suspects[what]
        if known is not None:
            suspects = {i // sums.shape[1] for i, value in enumerate(known) if not math.isfinite(value)}
        counts = torch.zeros(len(tensors), dtype=torch.int64, device=sums.device)
        for i in tuple(suspects):  # the monitor's thread adds to them
            counts[i] = count_nonfinite(tensors[i])
            if peek(counts[i]) == [0.0]:
                sums[i] = wide_sums(tensors[i])[-sums.shape[1] :]
        return counts

    def take(self) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[ParameterReading]]]:
        """Return what to read out, and the host function that turns the numbers into readings."""
        names = list(self._results)
        tensors = [self._results[name] for name in names]
        self._results, self._row_norms = {}, None

        def decode(numbers: Sequence[Sequence[float]]) -> list[ParameterReading]:
            return self._decode(dict(zip(names, numbers, strict=True)))

        return tensors, decode

    def _decode(self, numbers: dict[str, Sequence[float]]) -> list[ParameterReading]:
        rows = {name: _split(values, len(self._members)) for name, values in numbers.items()}
        return [
            ParameterReading(
                member.layer, member.histogram, self._sums(i, {name: row[i] for name, row in rows.items()}), member.name
            )
            for i, member in enumerate(self._members)
        ]

    def _sums(self, index: int, row: dict[str, Sequence[float]]) -> ParameterSums:
        total, squared = row["gradient"]
        update = self._update(self._members[index].name, row.get("update"), row["weight"][0])
        magnitudes, signs = self._standing_for_all(row.get("magnitudes")), self._standing_for_all(row.get("signs"))
        return ParameterSums(
            elements=self._plan.elements,
            gradient=total,
            gradient_squared=squared,
            weight_squared=row["weight"][0],
            nonfinite_gradients=self._nonfinite(index, "gradient", total, row["gradient_nonfinite"][0]),
            nonfinite_weights=self._nonfinite(index, "weight", row["weight"][0], row["weight_nonfinite"][0]),
            update_squared=update.update_squared if update else None,
            changed=update.changed if update else None,
            update_relative_error=update.relative_error if update else 0.0,
            magnitudes=magnitudes and magnitudes[: gradients.BINS],
            magnitude_sum=magnitudes[gradients.BINS] if magnitudes else 0.0,
            signs=Signs.of(signs) if signs else None,
            partial_gradient=tuple(row["partial"]) if "partial" in row else None,
        )

    def _update(self, name: str, sums: Sequence[float] | None, weight_squared: float) -> updates.UpdateEstimate | None:
        """Return what was measured; where it was not this group's turn, what gives the ratio that its last one showed."""
        if sums is not None:
            estimate = updates.estimate_whole if self._plan.whole else updates.estimate_sampled
            self._last[name] = estimate(self._plan, sums), weight_squared
        last, then = self._last.get(name, (None, 0.0))
        if sums is not None or last is None or not then:
            return last
        return dataclasses.replace(last, update_squared=last.update_squared * weight_squared / then)

    def _standing_for_all(self, row: Sequence[float] | None) -> tuple[float, ...] | None:
        """Return counts and sums of the sampled elements as if of all of the tensor."""
        if row is None:
            return None
        factor = self._plan.elements / self._plan.magnitudes if self._plan.magnitudes else 0.0
        return tuple(number * factor for number in row)

    def _nonfinite(self, index: int, what: str, total: float, counted: float) -> int:
        suspects = self._suspects[what]
        (suspects.discard if math.isfinite(total) else suspects.add)(index)
        # Seen for the first time where the host could not peek: at least one.
        least = 1 if self._deferred and not math.isfinite(total) else 0
        return max(int(counted), least)


def _split(values: Sequence[float], parts: int) -> list[Sequence[float]]:
    size = len(values) // parts
    return [values[i * size : (i + 1) * size] for i in range(parts)]

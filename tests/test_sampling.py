"""What is read of a tensor, and that over samples it is everything."""

from __future__ import annotations

import math

import pytest
import torch

from otel_train.sampling import MAGNITUDES, WHOLE, Draw, Plan, Sampler, plan, wide_dtype, work_dtype

CPU = torch.device("cpu")
SAMPLED = [
    ((1280, 40), False),
    ((300, 400), False),
    ((50_000,), False),
    ((131, 257), False),
    ((6000, 32), True),
    ((320, 3, 5, 7), False),
]
sampled = pytest.mark.parametrize(("shape", "embedding"), SAMPLED, ids=str)


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (1,), (WHOLE,), (32, 64)], ids=str)
def test_small_tensors_are_read_whole(shape: tuple[int, ...], *, embedding: bool) -> None:
    """Up to WHOLE elements nothing is drawn."""
    chosen = plan(shape, embedding=embedding)
    assert chosen.whole
    assert chosen.elements == math.prod(shape)
    assert chosen.rows >= 1
    assert chosen.rows * chosen.columns == chosen.elements


@pytest.mark.parametrize("embedding", [False, True])
def test_exact_reads_everything(*, embedding: bool) -> None:
    """Whatever the size; but the histogram is of samples all the same, since its elements are copied."""
    chosen = plan((50_000, 768), embedding=embedding, exact=True)
    assert chosen.whole
    assert chosen.magnitudes == MAGNITUDES
    lines = Sampler(CPU).draw(chosen).magnitude_lines
    assert lines is not None
    assert len(set(lines.tolist())) == MAGNITUDES


@pytest.mark.parametrize(
    "shape", [(WHOLE + 1,), (1056, 33), (300, 400), (4096, 4096), (50_257, 768), (131, 257), (14, 11, 13, 17)], ids=str
)
@pytest.mark.parametrize("embedding", [False, True])
def test_a_plan_reads_a_bounded_share(shape: tuple[int, ...], *, embedding: bool) -> None:
    """At least about 8,192 elements, at most a fourth and 16,384; lines fit in rows, and are shared out among the phases."""
    chosen = plan(shape, embedding=embedding)
    drawn = chosen.lines * chosen.width
    assert chosen.elements == math.prod(shape)
    assert chosen.elements % chosen.width == 0
    assert drawn <= min(16384, chosen.elements // 4)
    assert chosen.columns % chosen.width == 0
    assert drawn > 8192 - 8 * chosen.phases
    assert chosen.lines % chosen.phases == 0
    assert chosen.lines // chosen.phases * chosen.width <= 4096
    assert chosen.rows * chosen.columns == chosen.elements
    assert chosen.top <= min(256, shape[0] // 16)
    assert (chosen.top > 0) == (len(shape) > 1 and shape[0] >= 16)
    if not embedding and shape[0] < 4096:
        assert chosen.top * chosen.columns <= 16384


@sampled
def test_one_line_is_drawn_of_each_stratum(shape: tuple[int, ...], *, embedding: bool) -> None:
    """In order, inside the tensor, and none twice in a stratum."""
    chosen = plan(shape, embedding=embedding)
    sampler, total = Sampler(CPU), chosen.elements // chosen.width
    for _ in range(5):
        lines = sampler.draw(chosen).lines.tolist()
        assert len(lines) == chosen.lines
        for i, line in enumerate(lines):
            assert math.floor(i * total / chosen.lines) <= line <= math.floor((i + 1) * total / chosen.lines)
            assert 0 <= line < total
        sampler.advance()


@sampled
def test_rows_of_lines_are_those_that_they_lie_in(shape: tuple[int, ...], *, embedding: bool) -> None:
    """Where rows are read exactly, each line knows its row."""
    chosen = plan(shape, embedding=embedding)
    draw = Sampler(CPU).draw(chosen)
    assert (draw.line_rows is None) == (chosen.top == 0)
    if draw.line_rows is not None:
        assert draw.line_rows.tolist() == [line * chosen.width // chosen.columns for line in draw.lines.tolist()]


@sampled
def test_every_line_is_drawn_in_the_end(shape: tuple[int, ...], *, embedding: bool) -> None:
    """No fixed subset: after four times as many samples as a stratum has lines, all were read."""
    chosen = plan(shape, embedding=embedding)
    sampler, total = Sampler(CPU), chosen.elements // chosen.width
    seen = torch.zeros(total, dtype=torch.bool)
    for _ in range(4 * math.ceil(total / chosen.lines)):
        seen[sampler.draw(chosen).lines] = True
        sampler.advance()
    assert seen.all()


@sampled
def test_every_line_is_drawn_equally_often(shape: tuple[int, ...], *, embedding: bool) -> None:
    """Over many samples the times that a line is drawn differ by a few, not by a factor."""
    chosen = plan(shape, embedding=embedding)
    sampler, total, samples = Sampler(CPU), chosen.elements // chosen.width, 600
    times = torch.zeros(total, dtype=torch.float64)
    for _ in range(samples):
        times.index_add_(0, sampler.draw(chosen).lines, torch.ones(chosen.lines, dtype=torch.float64))
        sampler.advance()
    expected = samples * chosen.lines / total
    assert times.sum().item() == samples * chosen.lines
    assert (times - expected).abs().max().item() <= 4


def test_the_first_draw_reaches_every_line_with_equal_probability() -> None:
    """Over seeds, each line of a tensor is drawn as often as any other, within 6 standard errors."""
    chosen, draws = plan((512, 72), embedding=False), 800
    total = chosen.elements // chosen.width
    times = torch.zeros(total, dtype=torch.float64)
    for seed in range(draws):
        times.index_add_(0, Sampler(CPU, seed).draw(chosen).lines, torch.ones(chosen.lines, dtype=torch.float64))
    expected = draws * chosen.lines / total
    assert (times - expected).abs().max().item() <= 6 * math.sqrt(expected)


def test_phases_take_turns_at_the_histogram() -> None:
    """The magnitude lines of a sample are one of the interleaved parts of its lines, another one each time."""
    chosen = plan((600, 600), embedding=False)
    assert chosen.phases > 1
    sampler, phases = Sampler(CPU), []
    for _ in range(2 * chosen.phases):
        draw = sampler.draw(chosen)
        assert draw.magnitude_lines is not None
        lines, part = draw.lines.tolist(), draw.magnitude_lines.tolist()
        matching = [phase for phase in range(chosen.phases) if lines[phase :: chosen.phases] == part]
        assert len(matching) == 1
        phases += matching
        sampler.advance()
    assert sorted(phases[: chosen.phases]) == list(range(chosen.phases))
    assert phases[chosen.phases :] == phases[: chosen.phases]


def test_draws_of_a_sample_are_shared_and_do_not_move() -> None:
    """One plan, one draw; an earlier draw keeps its lines when the sampler goes on."""
    sampler, chosen = Sampler(CPU), plan((300, 400), embedding=False)
    first = sampler.draw(chosen)
    assert sampler.draw(plan((300, 400), embedding=False)) is first
    lines = first.lines.tolist()
    sampler.advance()
    second = sampler.draw(chosen)
    assert isinstance(second, Draw)
    assert first.lines.tolist() == lines
    assert second.lines.tolist() != lines


def test_drawing_leaves_the_users_random_numbers_alone() -> None:
    """The sampler owns its stream, and equal seeds draw equal lines."""
    state, chosen = torch.get_rng_state(), plan((300, 400), embedding=False)
    one, two, other = Sampler(CPU, 3), Sampler(CPU, 3), Sampler(CPU, 4)
    one.advance()
    two.advance()
    other.advance()
    assert torch.equal(one.draw(chosen).lines, two.draw(chosen).lines)
    assert not torch.equal(one.draw(chosen).lines, other.draw(chosen).lines)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_huge_tensor_is_numbered_exactly() -> None:
    """More lines than fp32 can count: odd and even ones are drawn alike."""
    chosen = Plan(elements=2**34, rows=1, width=1, lines=16384)
    lines = Sampler(CPU).draw(chosen).lines
    assert 0.4 < lines.remainder(2).double().mean().item() < 0.6
    assert lines.max().item() < 2**34
    assert lines.max().item() > 2**34 - 2 * 2**20


def test_totals_are_fp64_where_the_device_has_it() -> None:
    """MPS has none."""
    assert wide_dtype(CPU) is wide_dtype(torch.device("cuda")) is torch.float64
    assert wide_dtype(torch.device("mps")) is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_elements_are_worked_on_in_fp32_or_better(dtype: torch.dtype) -> None:
    """fp64 stays fp64."""
    assert work_dtype(torch.empty(0, dtype=dtype)) is (torch.float64 if dtype is torch.float64 else torch.float32)

"""Rules of the architecture that import contracts cannot say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "otel_train"
HOST_READS = {
    "item", "tolist", "cpu", "numpy", "bincount", "masked_select", "nonzero", "argwhere", "unique", "is_nonzero", "equal", "allclose",
    "synchronize",
}  # fmt: skip
CONVERSIONS = {"bool", "float", "int"}
ON_HOST = {
    "bool(few and own.is_replicate() and (gradient.reduce_op in {'sum', 'avg'}))",
    "bool(gradient == own or gradient.is_replicate())",
    "bool(left_out)",
    "bool(self.stepped)",
    "bool(step.samples)",
    "float('-inf')",
    "float(loss_scale)",
    "float(max_norm)",
    "float(module.max_val)",
    "float(module.min_val)",
    "float(norm_type)",
    "float(rows.numel())",
    "float(stats[key])",
    "float(value)",
    "int(counted)",
    "int(module.embed_dim)",
    "int(sum(numbers.get(name, ())))",
    "int(units)",
}
"""Conversions in the device arm of what is no tensor of a device: each was looked at. Of a tensor they would wait as ``item`` does."""
DEVICE_ARM = sorted(
    path
    for pattern in (
        "stats/*.py",
        "hooks/*.py",
        "sampling.py",
        "layers.py",
        "device.py",
        "shards.py",
        "parallel/clip.py",
        "monitor.py",
        "detect/*.py",
        "assembly/*.py",
    )
    for path in PACKAGE.glob(pattern)
)


def host_reads(source: str) -> list[str]:
    """Return calls of methods that make the host wait for the device."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"{ast.unparse(f)} (line {f.lineno})" for f in calls if isinstance(f, ast.Attribute) and f.attr in HOST_READS]


def conversions(source: str) -> set[str]:
    """Return what is made a number of the host: calls of ``float`` and the like, and copies ``to`` the CPU."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    numbers = {ast.unparse(c) for c in calls if isinstance(c.func, ast.Name) and c.func.id in CONVERSIONS}
    copies = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in {"to", "type", "copy_"}]
    return numbers | {ast.unparse(c) for c in copies if any("cpu" in ast.unparse(given) for given in (*c.args, *c.keywords))}


@pytest.mark.parametrize("path", DEVICE_ARM, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_readout_reads_device_values(path: Path) -> None:
    """A host read in the training thread waits for the device."""
    assert host_reads(path.read_text()) == []


def test_the_device_arm_makes_numbers_of_host_values_only() -> None:
    """``float(tensor)`` reads the device; what is converted is on the host already; the list names nothing else."""
    arm = [path for path in DEVICE_ARM if path.parent.name not in {"assembly", "detect"}]  # which see no tensors
    assert set().union(*(conversions(path.read_text()) for path in arm)) == ON_HOST


def test_a_planted_host_read_is_found() -> None:
    """The checks above can fail."""
    assert conversions("def f(x):\n    return float(x.sum()), x.to('cpu'), x.to(device='cpu'), x.to(y), x.float()") == {
        "float(x.sum())", "x.to('cpu')", "x.to(device='cpu')",
    }  # fmt: skip
    assert host_reads("def f(x):\n    return x.sum().item()") == ["x.sum().item (line 2)"]
    assert host_reads((PACKAGE / "readout.py").read_text()) != []


def test_functions_and_files_stay_short() -> None:
    """Functions of up to 60 lines, files of up to 500: past that a newcomer cannot hold them."""
    long_functions, long_files = [], []
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        if source.count("\n") > 500:
            long_files.append(path.name)
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        long_functions += [f"{path.name}:{f.name}" for f in functions if (f.end_lineno or 0) - f.lineno > 60]
    assert long_functions == []
    assert long_files == []


def test_every_metric_of_the_catalog_has_a_producer() -> None:
    """Each spec is named by the code that makes its samples."""
    from otel_train.catalog import FAMILIES
    from otel_train.catalog.spec import MetricSpec

    source = "\n".join(path.read_text() for path in sorted((PACKAGE / "assembly").glob("*.py")))
    names = [name for family in FAMILIES for name, value in vars(family).items() if isinstance(value, MetricSpec)]
    assert [name for name in names if f".{name}" not in source] == []


def test_no_hook_is_put_on_backward_and_no_gradient_is_gathered() -> None:
    """Backward hooks are dropped or wrong in compiled graphs (pytorch/pytorch #117265, #115750); gathering ran out of memory (slime #451)."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [name for name, source in sources.items() if "register_full_backward" in source or "register_hook(" in source] == []
    gathering = {name for name, source in sources.items() if ".full_tensor()" in source}
    assert gathering == {"parallel/clip.py"}, "a norm, which is one number"

"""Rules of the architecture that import contracts cannot say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "otel_train"
WAITING = {
    "item", "tolist", "cpu", "numpy", "is_nonzero", "equal", "allclose", "synchronize",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount", "histc",
    "tensor", "as_tensor", "asarray", "from_numpy", "new_tensor",
}  # fmt: skip
"""Methods that wait for the device: they read a value of it, make a result as large as its values say, or copy to it from the host."""
CONVERSIONS = {"bool", "float", "int"}
MAY_WAIT = {
    "readout.py": "asks, and the monitor's own thread waits; peeks on the CPU",
    "parallel/combine.py": "numbers of the host, in the thread of the ranks",
    "parallel/describe.py": "a mesh lies on the host",
    "parallel/exchange.py": "numbers of the host, in the thread of the ranks",
}
ON_HOST = {
    "device.py": {"float(stats[key])"},
    "hooks/pending.py": {"bool(left_out)", "bool(self.stepped)", "float(value)", "int(sum(numbers.get(name, ())))"},
    "hooks/recorder.py": {"bool(step.samples)", "float(loss_scale)", "float(max_norm)", "float(value)"},
    "hooks/shape_group.py": {"int(counted)"},
    "hooks/site_meter.py": {"int(seen)"},
    "layers.py": {"float('-inf')", "float(module.max_val)", "float(module.min_val)"},
    "monitor.py": {"float(norm_type)"},
    "parallel/board.py": {"bool(self._store.check(list(keys)))", "int(self._store.add(key, 1))"},
    "parallel/clip.py": {"float(norm_type)"},
    "shards.py": {
        "bool(few and own.is_replicate() and (gradient.reduce_op in {'sum', 'avg'}))",
        "bool(gradient == own or gradient.is_replicate())",
    },
    "stats/throughput.py": {"int(module.embed_dim)"},
}
"""Conversions of what is no tensor of a device, each looked at: of such a tensor they would wait as ``item`` does."""


def sources() -> dict[str, str]:
    """Return the package's files."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def sees_tensors(name: str, source: str) -> bool:
    """Return whether a file is of the device arm: it imports torch, and is no training of the demo."""
    modules = {node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names}
    return "torch" in {module.partition(".")[0] for module in modules} and not name.startswith("demo/")


def calls(source: str) -> list[ast.Call]:
    """Return the calls in a source."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def waits(source: str) -> list[str]:
    """Return calls of methods that make the host wait for the device."""
    functions = [call.func for call in calls(source)]
    return [f"{ast.unparse(f)} (line {f.lineno})" for f in functions if isinstance(f, ast.Attribute) and f.attr in WAITING]


def conversions(source: str) -> set[str]:
    """Return what is made a number of the host: calls of ``float`` and the like, and copies ``to`` the CPU."""
    numbers = {ast.unparse(c) for c in calls(source) if isinstance(c.func, ast.Name) and c.func.id in CONVERSIONS}
    copies = [c for c in calls(source) if isinstance(c.func, ast.Attribute) and c.func.attr in {"to", "type", "copy_"}]
    return numbers | {ast.unparse(c) for c in copies if any("cpu" in ast.unparse(given) for given in (*c.args, *c.keywords))}


def test_only_the_readout_waits_for_the_device() -> None:
    """In the training thread nothing does; the list of those that may names no others."""
    assert {name: found for name, source in sources().items() if (found := waits(source)) and name not in MAY_WAIT} == {}
    assert [name for name in MAY_WAIT if not waits(sources()[name])] == []


def test_the_device_arm_makes_numbers_of_host_values_only() -> None:
    """``float(tensor)`` reads the device; what is converted is on the host already; the list names nothing else."""
    arm = {name: source for name, source in sources().items() if sees_tensors(name, source) and name not in MAY_WAIT}
    assert {name: found for name, source in arm.items() if (found := conversions(source))} == ON_HOST


@pytest.mark.parametrize(
    "read",
    [
        "x.sum().item()",
        "x.tolist()",
        "x.cpu()",
        "x.numpy()",
        "x.nonzero()",
        "torch.tensor([1.0], device=x.device)",
        "event.synchronize()",
    ],
)
def test_a_planted_wait_is_found(read: str) -> None:
    """The first check above can fail."""
    assert waits(f"def f(x):\n    return {read}") == [f"{read.rpartition('(')[0]} (line 2)"]


@pytest.mark.parametrize(
    "read", ["float(x.sum())", "int(x)", "bool(x.any())", "x.to('cpu')", "x.to(device='cpu')", "x.type('torch.cpu')"]
)
def test_a_planted_conversion_is_found(read: str) -> None:
    """The second one too; other conversions between types are none."""
    assert conversions(f"def f(x):\n    return {read}, x.to(y), x.float(), x.to(device)") == {read}


def test_the_device_arm_is_what_imports_torch() -> None:
    """A new file is looked at without being named."""
    arm = {name for name, source in sources().items() if sees_tensors(name, source)}
    assert {"hooks/recorder.py", "stats/gradients.py", "sampling.py", "shards.py", "monitor.py", "facts.py"} <= arm
    assert not {name for name in arm if name.startswith(("assembly/", "sinks/", "catalog/", "detect/"))}


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

    files = [*(PACKAGE / "assembly").glob("*.py"), *(PACKAGE / "sinks").glob("*/*.py")]
    source = "\n".join(path.read_text() for path in sorted(files))
    names = [name for family in FAMILIES for name, value in vars(family).items() if isinstance(value, MetricSpec)]
    assert [name for name in names if f".{name}" not in source] == []


def test_no_hook_is_put_on_backward_and_no_gradient_is_gathered() -> None:
    """Backward hooks are dropped or wrong in compiled graphs (pytorch/pytorch #117265, #115750); gathering ran out of memory (slime #451)."""
    assert [name for name, source in sources().items() if "register_full_backward" in source or "register_hook(" in source] == []
    gathering = {name for name, source in sources().items() if ".full_tensor()" in source}
    assert gathering == {"parallel/clip.py"}, "a norm, which is one number"

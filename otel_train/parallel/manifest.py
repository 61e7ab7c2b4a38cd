"""What a rank tells the others when it attaches: which parts of which parameters it holds. Frozen; travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter, and the part of it that one rank holds."""

    name: str
    layer: tuple[str, str, str] | None
    """Layer, kind and parameter group of its series; None without series."""
    kind: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    part: tuple[int, ...]
    """Where this rank's part begins, and its shape."""
    mark: str
    """Fingerprint of the part's values: replicas have the same."""
    constant: bool
    """All values are equal (norms that were just made), so that the fingerprint tells nothing."""
    mates: int = -1
    """Index of the ranks that share it by declaration, in Manifest.groups; -1: nobody declared any."""
    by: str = "values"
    """What declares replicas: ``mesh`` (of its mates those with the same part), ``group`` (all mates), ``values``."""

    @property
    def elements(self) -> int:
        """Elements of the whole parameter."""
        return _product(self.shape)

    @property
    def part_elements(self) -> int:
        """Elements of this rank's part."""
        return _product(self.part)

    @property
    def region(self) -> tuple[tuple[int, ...], ...]:
        """What two ranks have in common that hold the same part."""
        return (self.shape, self.offset, self.part)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that the plan of a run needs to know of one rank."""

    rank: int
    places: tuple[Place, ...]
    groups: tuple[tuple[int, ...], ...]
    sites: tuple[tuple[str, str], ...]
    """Layer and site of each measured activation."""
    depths: int
    """Number of depths that its layers use."""
    settings: tuple[tuple[str, str], ...]
    """Settings that must be the same on all ranks."""
    stage: int | None
    """Coordinate in the pipeline, where a mesh tells it."""
    tensor_parallel: tuple[tuple[int, int], ...]
    """Coordinate and size of each dimension of the mesh whose ranks work on the same tokens, the pipeline's left out."""
    flops: tuple[int, int] | None
    """Matrix parameters and attention width; None where they are not known."""

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))


def loads(text: str) -> Manifest:
    """Read a manifest back."""
    fields: dict[str, Any] = json.loads(text)
    places = tuple(Place(**{name: _frozen(value) for name, value in place.items()}) for place in fields.pop("places"))
    return Manifest(places=places, **{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value

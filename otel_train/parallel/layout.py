"""Who holds, contributes and exports what: a pure function of all ranks' manifests.

A value that ranks hold in parts is the sum of what its *contributors* hold: of ranks that hold the same part of a parameter
(replicas) only the lowest contributes, so nothing counts twice, whatever the mesh looks like: replicated dimensions, 1-D parameters
of a sub-mesh, data parallelism without a mesh. Replicas are ranks that a mesh or a group declares to be, or that hold equal values.

Ranks that share no parameter are *stages* of a pipeline: their layers may have equal names and follow one another in depth.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from otel_train.parallel.manifest import Manifest, Place

_SAME_MODEL = 0.5
"""Ranks whose models differ are stages of a pipeline, unless more than this share of parameters are replicas of each other:
then somebody built another model on one rank. Tied embeddings on the first and the last stage are one parameter of many."""


class LayoutError(Exception):
    """The ranks' models do not fit together; the message says which rank's, and what to do."""


class SettingsError(Exception):
    """Ranks have different settings; the message says which."""


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter of this rank in the table of all."""

    index: int
    contributes: bool
    exports: bool
    whole: bool
    """This rank holds all of it."""
    elements: int
    """Of all its parts; different tensors of one name (experts) are parts of one row."""
    region: int
    """Which of the parts this rank holds."""
    adds: bool
    """Whether this rank's summand counts, should the gradient be partial."""


@dataclass(frozen=True, slots=True)
class Table:
    """What is the same for all ranks."""

    world: int
    contributors: tuple[int, ...]
    """How many ranks contribute to each row."""
    regions: tuple[tuple[int, ...], ...]
    """Elements of each part, of rows whose gradient may be partial; else empty."""
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    """Kind and rows of each layer of the run."""
    sites: int
    replica_sets: int
    owned_apart: bool
    """Some parameters that no mesh spreads differ between ranks (experts), so that no rank's plain tensors are all there are."""

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank needs to know to take part."""

    table: Table
    rows: dict[str, Row]
    """By the parameter's name."""
    sites: dict[str, tuple[int, bool]]
    """Row of each activation site, and whether this rank exports it; by ``site_key``."""
    replicas: tuple[tuple[int, tuple[str, ...]], ...]
    """Sets of replicas that this rank is in, and the parameters that they share."""
    depth: int
    """Depths of the stages before."""
    leads_run: bool
    """It exports the values of the whole run."""
    leads_replica: bool
    """It counts tokens and FLOPs for all ranks that work on the same tokens."""
    replica_ranks: int
    """Ranks that work on the same tokens."""
    flops: tuple[int, int] | None
    """Matrix parameters and attention width of the whole model."""
    spans_stages: bool
    replicated: bool
    """Every parameter is declared to be whole on each rank, so that one rank's values are the run's."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole model."""
        return not self.spans_stages and all(row.whole for row in self.rows.values())

    def dumps(self) -> str:
        """Return it as JSON, without the table, which is the same for all ranks."""
        fields = asdict(self)
        fields.pop("table")
        return json.dumps(fields, separators=(",", ":"))


def site_key(layer: str, site: str) -> str:
    """Return the name of an activation site."""
    return f"{layer}\n{site}"


def loads(text: str, table_text: str) -> Layout:
    """Read a layout back."""
    fields: dict[str, Any] = json.loads(text)
    table = Table(**{name: _frozen(value) for name, value in json.loads(table_text).items()})
    rows = {name: Row(**row) for name, row in fields.pop("rows").items()}
    return Layout(table=table, rows=rows, **{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def layouts(manifests: Sequence[Manifest]) -> list[Layout]:
    """Plan a run.

    Args:
        manifests: One a rank, in their order.

    Returns:
        One layout a rank, in the same order.

    Raises:
        SettingsError: Settings differ.
        LayoutError: Models differ that should not.
    """
    _check_settings(manifests)
    stages = find_stages(manifests)
    return _Planner(manifests, stages).layouts()


def alone(manifest: Manifest) -> Layout:
    """Plan for a rank that met no other: what it holds in whole is its own to export, unless a lower rank is said to share it."""
    layout = _Planner([manifest], [[manifest.rank]]).layouts()[0]
    first = min((min(ranks) for ranks in manifest.groups), default=manifest.rank)
    lowest = {p.name: min(manifest.groups[p.mates]) if p.mates >= 0 else first for p in manifest.places}
    rows = {n: replace(row, exports=row.whole and lowest[n] == manifest.rank) for n, row in layout.rows.items()}
    return replace(layout, rows=rows, leads_run=manifest.rank == 0)


def _check_settings(manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for other in manifests[1:]:
        for (name, value), (_, here) in zip(first.settings, other.settings, strict=True):
            if value != here:
                raise SettingsError(
                    f"expected the same settings on all ranks, but {name} is {value} on rank {first.rank} and {here} on rank "
                    f"{other.rank}; give every rank the same"
                )


class _Sets:
    """Disjoint sets, joined by their members."""

    def __init__(self, members: Iterable[Any]) -> None:
        self._parent: dict[Any, Any] = {member: member for member in members}

    def find(self, member: Any) -> Any:
        while self._parent[member] != member:
            member = self._parent[member]
        return member

    def join(self, one: Any, other: Any) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._parent[high] = low

    def all(self) -> list[list[Any]]:
        sets: dict[Any, list[Any]] = {}
        for member in sorted(self._parent):
            sets.setdefault(self.find(member), []).append(member)
        return list(sets.values())


def find_stages(manifests: Sequence[Manifest]) -> list[list[int]]:
    """Group ranks into the stages of a pipeline, in the order of the pipeline; one where there is none.

    Raises:
        LayoutError: Ranks that share parameters have different models.
    """
    if all(manifest.stage is not None for manifest in manifests):
        coordinates = sorted({manifest.stage or 0 for manifest in manifests})
        return [[m.rank for m in manifests if m.stage == coordinate] for coordinate in coordinates]
    by_rank = {manifest.rank: manifest for manifest in manifests}
    sets = _Sets(by_rank)
    for manifest in manifests:
        for mate in {rank for ranks in manifest.groups for rank in ranks}:
            if mate in by_rank:
                _check_same_model(manifest, by_rank[mate])
                sets.join(manifest.rank, mate)
    representatives: list[Manifest] = []
    for ranks in sets.all():
        for rank in ranks:
            _join_replicas(by_rank[rank], representatives, sets)
        representatives += [by_rank[rank] for rank in ranks]
    return sets.all()


def _join_replicas(manifest: Manifest, others: Sequence[Manifest], sets: _Sets) -> None:
    """Join a rank to those that hold equal values of parameters that nobody declared to be shared."""
    for other in others:
        if sets.find(other.rank) == sets.find(manifest.rank):
            continue
        same, fewer = _replicated(manifest, other)
        if [p.name for p in manifest.places] == [p.name for p in other.places]:
            if same:
                sets.join(manifest.rank, other.rank)
        elif fewer and same / fewer > _SAME_MODEL:
            _check_same_model(manifest, other)


def _replicated(one: Manifest, other: Manifest) -> tuple[int, int]:
    """Return how many parameters have equal values, and how many the smaller of both models has whose values tell anything."""
    telling = [{p.name: p for p in m.places if not p.constant and p.part_elements} for m in (one, other)]
    pairs = [(p, telling[1][name]) for name, p in telling[0].items() if name in telling[1]]
    return sum(p.region == q.region and p.mark == q.mark for p, q in pairs), min(map(len, telling))


def _check_same_model(one: Manifest, other: Manifest) -> None:
    low, high = sorted((one, other), key=lambda manifest: manifest.rank)
    names = [{place.name: place.shape for place in manifest.places} for manifest in (low, high)]
    for name in dict.fromkeys([*names[0], *names[1]]):
        if names[0].get(name) != names[1].get(name):
            here, there = (f"of shape {shape}" if (shape := known.get(name)) is not None else "missing" for known in names)
            raise LayoutError(
                f"expected the same parameters on ranks {low.rank} and {high.rank}, which share some, but {name!r} is {here} on "
                f"rank {low.rank} and {there} on rank {high.rank}; build the same model on both, or tell a pipeline by mesh="
            )


class _Planner:
    """Numbers rows and finds contributors, owners and replicas."""

    def __init__(self, manifests: Sequence[Manifest], stages: Sequence[Sequence[int]]) -> None:
        self._manifests, self._stages = manifests, stages
        self._by_rank = {manifest.rank: manifest for manifest in manifests}
        self._stage_of = {rank: i for i, ranks in enumerate(self._stages) for rank in ranks}
        self._rows: dict[tuple[int, str], int] = {}
        self._holders: list[list[int]] = []
        self._classes: list[list[list[int]]] = []
        self._regions: list[list[tuple[tuple[int, ...], ...]]] = []
        self._places = {(m.rank, place.name): place for m in manifests for place in m.places}
        for manifest in manifests:
            for place in manifest.places:
                self._add(manifest.rank, place)
        for (_, name), index in self._rows.items():
            self._classes.append(self._replicas(name, self._holders[index]))

    def _add(self, rank: int, place: Place) -> None:
        key = (self._stage_of[rank], place.name)
        if key not in self._rows:
            self._rows[key] = len(self._rows)
            self._holders.append([])
            self._regions.append([])
        index = self._rows[key]
        self._holders[index].append(rank)
        if place.region not in self._regions[index]:
            self._regions[index].append(place.region)

    def _replicas(self, name: str, ranks: list[int]) -> list[list[int]]:
        """Group the ranks that hold a parameter by what they hold of it."""
        sets = _Sets(ranks)
        declared: dict[Hashable, int] = {}
        equal: dict[Hashable, int] = {}
        for rank in ranks:
            place = self._places[rank, name]
            mates = self._by_rank[rank].groups[place.mates] if place.mates >= 0 else ()
            if place.by != "values":
                sets.join(rank, declared.setdefault((mates, place.region if place.by == "mesh" else ()), rank))
            if place.by != "only":
                sets.join(rank, equal.setdefault((place.region, place.mark), rank))
        return sets.all()

    def layouts(self) -> list[Layout]:
        replica_sets = self._replica_sets()
        sites, owners = self._sites()
        table = self._table(len(sites), len(replica_sets))
        return [self._layout(manifest, table, replica_sets, sites, owners) for manifest in self._manifests]

    def _table(self, sites: int, replica_sets: int) -> Table:
        layers: defaultdict[tuple[int, tuple[str, str, str]], list[int]] = defaultdict(list)
        for (stage, name), index in self._rows.items():
            layer = self._places[self._holders[index][0], name].layer
            if layer is not None:
                layers[stage, layer].append(index)
        return Table(
            world=len(self._manifests),
            contributors=tuple(map(len, self._classes)),
            regions=tuple(self._parts(index) for index in range(len(self._regions))),
            layers=tuple((layer[1], tuple(rows)) for (_, layer), rows in layers.items()),
            sites=sites,
            replica_sets=replica_sets,
            owned_apart=any(self._is_owned_apart(name, index) for (_, name), index in self._rows.items()),
        )

    def _is_owned_apart(self, name: str, index: int) -> bool:
        return len(self._classes[index]) > 1 and self._places[self._holders[index][0], name].by != "mesh"

    def _parts(self, index: int) -> tuple[int, ...]:
        """Return the sizes of a row's parts, if several ranks of a mesh share one: else no gradient can be partial."""
        shared = any(len(ranks) > 1 for ranks in self._classes[index])
        return tuple(_elements(region) for region in self._regions[index]) if shared else ()

    def _replica_sets(self) -> dict[tuple[int, ...], int]:
        """Number the sets of ranks that hold the same part of some parameter."""
        found = {tuple(ranks) for classes in self._classes for ranks in classes if len(ranks) > 1}
        return {ranks: i for i, ranks in enumerate(sorted(found))}

    def _sites(self) -> tuple[dict[tuple[int, str], int], dict[int, int]]:
        rows: dict[tuple[int, str], int] = {}
        owners: dict[int, int] = {}
        for manifest in self._manifests:
            for layer, site in manifest.sites:
                row = rows.setdefault((self._stage_of[manifest.rank], site_key(layer, site)), len(rows))
                owners.setdefault(row, manifest.rank)
        return rows, owners

    def _layout(
        self,
        manifest: Manifest,
        table: Table,
        replica_sets: dict[tuple[int, ...], int],
        sites: dict[tuple[int, str], int],
        owners: dict[int, int],
    ) -> Layout:
        rank, stage = manifest.rank, self._stage_of[manifest.rank]
        shared: defaultdict[int, list[str]] = defaultdict(list)
        for place in manifest.places:
            ranks = self._class_of(self._rows[stage, place.name], rank)
            if len(ranks) > 1:
                shared[replica_sets[tuple(ranks)]].append(place.name)
        own_sites = [sites[stage, site_key(*pair)] for pair in manifest.sites]
        size = 1
        for _, ranks_of in manifest.tensor_parallel:
            size *= ranks_of
        return Layout(
            table=table,
            rows={place.name: self._row(manifest, place) for place in manifest.places},
            sites={site_key(*pair): (row, owners[row] == rank) for pair, row in zip(manifest.sites, own_sites, strict=True)},
            replicas=tuple((number, tuple(names)) for number, names in shared.items()),
            depth=sum(max(self._by_rank[r].depths for r in ranks) for ranks in self._stages[:stage]),
            leads_run=rank == self._manifests[0].rank,
            leads_replica=stage == 0 and all(coordinate == 0 for coordinate, _ in manifest.tensor_parallel),
            replica_ranks=len(self._stages) * size,
            flops=self._flops(),
            spans_stages=len(self._stages) > 1,
            replicated=all(place.by == "group" for place in manifest.places),
        )

    def _class_of(self, index: int, rank: int) -> list[int]:
        return next(ranks for ranks in self._classes[index] if rank in ranks)

    def _row(self, manifest: Manifest, place: Place) -> Row:
        index = self._rows[self._stage_of[manifest.rank], place.name]
        first = min(self._class_of(index, manifest.rank))
        mates = manifest.groups[place.mates] if place.mates >= 0 else ()
        return Row(
            index=index,
            contributes=first == manifest.rank,
            exports=min(self._holders[index]) == manifest.rank,
            whole=place.part_elements == place.elements and len(self._classes[index]) == 1,
            elements=sum(self._places[ranks[0], place.name].part_elements for ranks in self._classes[index]),
            region=self._regions[index].index(place.region),
            adds=first == manifest.rank or (place.by == "mesh" and first in mates),
        )

    def _flops(self) -> tuple[int, int] | None:
        """Add up the model over its stages; without any attention it is not known what the model needs."""
        stages = [self._by_rank[ranks[0]].flops for ranks in self._stages]
        if any(flops is None for flops in stages):
            return None
        matrices, widths = (sum(flops[i] for flops in stages if flops is not None) for i in (0, 1))
        return (matrices, widths) if widths else None


def _elements(region: tuple[tuple[int, ...], ...]) -> int:
    total = 1
    for size in region[2]:
        total *= size
    return total

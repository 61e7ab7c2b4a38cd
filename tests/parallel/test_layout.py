"""Who holds, contributes and exports what, planned from the manifests of made-up ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from otel_train.parallel.layout import LayoutError, SettingsError, alone, find_stages, layouts, loads
from otel_train.parallel.manifest import Manifest, Place
from otel_train.parallel.manifest import loads as load_manifest


def place(name: str, shape: tuple[int, ...] = (4, 4), **more: object) -> Place:
    """Return a parameter that is whole on its rank."""
    known = {"offset": (0,) * len(shape), "part": shape, "mark": name, "constant": False}
    return Place(name=name, layer=(name, "matrix", "0"), kind="matrix", shape=shape, **{**known, **more})  # type: ignore[arg-type]


def manifest(rank: int, *places: Place, groups: tuple[tuple[int, ...], ...] = (), **more: object) -> Manifest:
    """Return the manifest of a rank without activation sites."""
    known = {"sites": (("act", "post"),), "depths": len(places), "settings": (("every_n_steps", "10"),), "stage": None}
    facts = {"tensor_parallel": (), "flops": None, **known, **more}
    return Manifest(rank=rank, places=places, groups=groups, **facts)  # type: ignore[arg-type]


def shard(name: str, index: int, of: int, **more: object) -> Place:
    """Return a part of rows of an 8 x 4 matrix on a mesh."""
    rows = 8 // of
    part = {"offset": (index * rows, 0), "part": (rows, 4), "mark": f"{name} {index}", "mates": 0, "by": "mesh"}
    return place(name, (8, 4), **{**part, **more})


def test_of_replicas_only_the_lowest_rank_contributes_and_exports() -> None:
    """DistributedDataParallel declares them; 4 ranks, one contributor."""
    group = ((0, 1, 2, 3),)
    planned = layouts([manifest(rank, place("w", mates=0, by="group"), groups=group) for rank in range(4)])
    assert [p.rows["w"].contributes for p in planned] == [True, False, False, False]
    assert [p.rows["w"].exports for p in planned] == [True, False, False, False]
    assert planned[0].table.contributors == (1,)
    assert planned[3].replicas == ((0, ("w",)),)
    assert [p.leads_replica for p in planned] == [True] * 4, "each rank has tokens of its own"
    assert all(p.replicated and not p.spans_stages and p.replica_ranks == 1 for p in planned)


def test_shards_all_contribute_and_the_lowest_rank_exports() -> None:
    """The elements of a row are those of all its parts."""
    planned = layouts([manifest(rank, shard("w", rank, 2), groups=((0, 1),)) for rank in range(2)])
    assert [p.rows["w"].contributes for p in planned] == [True, True]
    assert [p.rows["w"].exports for p in planned] == [True, False]
    assert [p.rows["w"].elements for p in planned] == [32, 32]
    assert not any(p.rows["w"].whole for p in planned)
    assert planned[0].table.contributors == (2,)
    assert planned[0].table.replica_sets == 0


def test_hybrid_shards_contribute_once_a_part() -> None:
    """2 replicas x 2 shards on one mesh."""
    planned = layouts([manifest(rank, shard("w", rank % 2, 2), groups=((0, 1, 2, 3),)) for rank in range(4)])
    assert [p.rows["w"].contributes for p in planned] == [True, True, False, False]
    assert [p.replicas for p in planned] == [((0, ("w",)),), ((1, ("w",)),), ((0, ("w",)),), ((1, ("w",)),)]


def test_a_parameter_of_a_sub_mesh_is_a_replica_on_the_dimension_that_its_mesh_does_not_show() -> None:
    """A norm on the data dimension of a 2 x 2 mesh, which tensor parallelism replicates; a matrix on both dimensions."""
    ranks = []
    for rank in range(4):
        data, tensor = divmod(rank, 2)
        norm = shard("norm", data, 2, mates=0)
        matrix = shard("w", rank, 4, mates=1)
        ranks.append(manifest(rank, norm, matrix, groups=((tensor, 2 + tensor), (0, 1, 2, 3)), tensor_parallel=((tensor, 2),)))
    planned = layouts(ranks)
    assert [p.rows["norm"].contributes for p in planned] == [True, False, True, False]
    assert all(p.rows["w"].contributes for p in planned)
    assert [p.leads_replica for p in planned] == [True, False, True, False]
    assert all(p.replica_ranks == 2 for p in planned)
    assert planned[0].table.contributors == (2, 4)


def test_a_summand_of_a_partial_gradient_counts_on_the_mesh_of_the_contributor_only() -> None:
    """Two meshes hold replicas: one of them adds up the gradient."""
    ranks = [manifest(rank, place("norm", mates=0, by="mesh"), groups=((rank // 2 * 2, rank // 2 * 2 + 1),)) for rank in range(4)]
    ranks = [replace(m, places=(m.places[0], place("w", mates=-1, by="values"))) for m in ranks]
    planned = layouts(ranks)
    assert [p.rows["norm"].adds for p in planned] == [True, True, False, False]
    assert planned[0].table.regions == ((16,), (16,))


def test_stages_follow_one_another_and_may_repeat_names() -> None:
    """Ranks that share nothing: rows, depths and owners of their own, and one norm over all."""
    planned = layouts(
        [manifest(0, place("w", mark="a"), place("v", mark="b")), manifest(1, place("w", mark="c"), place("v", mark="d"))]
    )
    assert [p.rows["w"].index for p in planned] == [0, 2]
    assert all(p.rows["w"].exports and p.rows["w"].contributes and p.rows["w"].whole for p in planned)
    assert [p.depth for p in planned] == [0, 2]
    assert [p.leads_run for p in planned] == [True, False]
    assert [p.leads_replica for p in planned] == [True, False], "tokens count on the first stage"
    assert all(p.spans_stages and p.replica_ranks == 2 for p in planned)
    assert [p.sites["act\npost"] for p in planned] == [(0, True), (1, True)]


def test_equal_constants_do_not_make_replicas_of_stages() -> None:
    """Norms are all ones everywhere; matrices tell."""
    ones = place("norm", mark="1", constant=True)
    assert find_stages([manifest(0, ones, place("w", mark="a")), manifest(1, ones, place("w", mark="b"))]) == [[0], [1]]
    assert find_stages([manifest(0, ones, place("w", mark="a")), manifest(1, ones, place("w", mark="a"))]) == [[0, 1]]


def test_a_mesh_tells_stages_apart_whatever_the_values_are() -> None:
    """Stages made from one seed look like replicas."""
    assert find_stages([manifest(rank, place("w"), stage=rank % 2) for rank in range(4)]) == [[0, 2], [1, 3]]


def test_tied_embeddings_of_the_first_and_last_stage_do_not_join_them() -> None:
    """One equal parameter of many is no other layout of the same model."""
    first = manifest(0, place("embed"), *(place(f"a{i}") for i in range(3)))
    assert find_stages([first, manifest(1, *(place(f"b{i}") for i in range(3)), place("embed"))]) == [[0], [1]]


def test_experts_of_one_name_are_parts_of_one_row() -> None:
    """Equal names and different values on ranks that share the rest; ``groups=`` says so even where the values are equal."""
    cases = [("values", -1, ("e0", "e1")), ("only", 0, ("same", "same"))]
    for by, mates, marks in cases:
        ranks = [
            manifest(
                rank,
                place("dense"),
                place("expert", mark=marks[rank], mates=mates, by=by),
                groups=((rank,),),
            )
            for rank in range(2)
        ]
        planned = layouts(ranks)
        assert [p.rows["expert"].contributes for p in planned] == [True, True]
        assert [p.rows["expert"].exports for p in planned] == [True, False]
        assert planned[0].rows["expert"].elements == 32
        assert [p.rows["dense"].contributes for p in planned] == [True, False]
        assert planned[0].table.owned_apart
        assert not planned[0].rows["expert"].whole


def test_another_model_on_one_rank_is_one_sentence_that_names_the_difference() -> None:
    """Declared mates must hold the same parameters; so must ranks that hold the same values of most of them."""
    with pytest.raises(LayoutError, match="on ranks 0 and 1, which share some, but 'extra' is missing on rank 0 and of shape"):
        layouts([manifest(r, place("w", mates=0, by="group"), *[place("extra")] * r, groups=((0, 1),)) for r in range(2)])
    with pytest.raises(LayoutError, match="'w' is of shape"):
        layouts([manifest(r, replace(shard("w", r, 2), shape=(8 + r, 4)), groups=((0, 1),)) for r in range(2)])
    with pytest.raises(LayoutError, match="'extra' is missing on rank 0"):
        layouts([manifest(0, place("a"), place("b")), manifest(1, place("a"), place("b"), place("extra"))])


def test_other_settings_on_one_rank_are_one_sentence() -> None:
    """With both values."""
    with pytest.raises(SettingsError, match="every_n_steps is 10 on rank 0 and 5 on rank 1"):
        layouts([manifest(0, place("w")), manifest(1, place("w"), settings=(("every_n_steps", "5"),))])


def test_flops_add_up_over_stages_and_are_unknown_without_attention() -> None:
    """Each stage has a part of the matrices; one of them may have no attention."""
    stages = [manifest(0, place("a"), flops=(100, 8)), manifest(1, place("b"), flops=(50, 0))]
    assert layouts(stages)[1].flops == (150, 8)
    assert layouts([replace(m, flops=(10, 0)) for m in stages])[0].flops is None
    assert layouts([stages[0], replace(stages[1], flops=None)])[0].flops is None


def test_a_rank_alone_exports_what_it_holds_in_whole_and_no_shard() -> None:
    """A lower rank that is declared to hold the same exports it instead."""
    mixed = manifest(1, shard("w", 1, 2), place("v"), groups=((1, 2),))
    found = alone(mixed)
    assert {name: row.exports for name, row in found.rows.items()} == {"w": False, "v": True}
    assert not alone(manifest(1, place("w", mates=0, by="group"), groups=((0, 1),))).rows["w"].exports
    assert not found.leads_run


def test_manifests_and_layouts_travel_as_text() -> None:
    """What is read back is equal to what was written."""
    ranks = [manifest(rank, shard("w", rank, 2), groups=((0, 1),), flops=(3, 4)) for rank in range(2)]
    assert [load_manifest(m.dumps()) for m in ranks] == ranks
    for planned in layouts(ranks):
        assert loads(planned.dumps(), planned.table.dumps()) == planned

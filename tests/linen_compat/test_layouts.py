"""Where each layout keeps each layer: against MaxText's trees and against counting one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maxtext_data import parameter_trees

from linen_compat.formats._names import OUTSIDE, of_layer
from linen_compat.formats._orbax.layouts import (
    FORMATS,
    NNX,
    PIPELINED,
    SCANNED,
    UNSCANNED,
    TreeLayout,
    find_layout,
)
from linen_compat.formats._streams import ArraySpec, Mismatch
from nnx_pipeline import InputError

TREES = parameter_trees()
LAYOUTS = {
    "unscanned": TreeLayout(UNSCANNED, 4),
    "scanned": TreeLayout(SCANNED, 4),
    "pipelined (stage 2, 2 layers per stage, 1 repeat)": TreeLayout(PIPELINED, 4, 2, 1),
    "circular (stage 2, 2 repeats, 1 layer per stage)": TreeLayout(PIPELINED, 4, 2, 2),
}


def shapes_in(layout):
    apart = TREES["unscanned"]
    shapes = {names.nnx: apart[names.linen] for names in OUTSIDE}
    shapes |= {n.nnx: apart[f"decoder/layers_0/{n.linen}"] for n in of_layer(4)}
    arrays = {path: ArraySpec(shape, np.dtype(np.float32)) for path, shape in shapes.items()}
    return {leaf: spec.shape for leaf, spec in layout.leaves(arrays).items()}


@pytest.mark.parametrize("name", TREES)
def test_trees_are_those_of_maxtext(name):
    layout = LAYOUTS[name]
    assert shapes_in(layout) == TREES[name]
    assert find_layout(TREES[name]) == layout


@st.composite
def layouts(draw, num_layers=st.sampled_from([1, 2, 4, 6, 8, 12])):
    layers = draw(num_layers)
    kind = draw(st.sampled_from(FORMATS))
    if kind in (UNSCANNED, SCANNED):
        return TreeLayout(kind, layers)
    stages = draw(st.sampled_from([n for n in range(1, layers + 1) if layers % n == 0]))
    left = layers // stages
    repeats = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
    return TreeLayout(kind, layers, stages, repeats)


def store(layout, layers, names):
    """The arrays of a layout, each layer put into its slot."""
    tree = {}
    for number, layer in enumerate(layers):
        slot = layout.slot(names, number)
        shape = layout.stacked(names, layer.shape)
        tree.setdefault(slot.leaf, np.full(shape, np.nan, np.float32))[slot.index] = layer
    return tree


def counted(layout, layers, names):
    """The same by stacking layers in the order in which they are passed."""
    if layout.format == UNSCANNED:
        return {f"decoder/layers_{n}/{names.linen}": layer for n, layer in enumerate(layers)}
    if layout.format == SCANNED:
        return {f"decoder/layers/{names.linen}": np.stack(layers, axis=1)}
    each = len(layers) // (layout.stages * layout.repeats)
    rows, rest = [], list(layers)
    for _ in range(layout.repeats):
        rows.append([[rest.pop(0) for _ in range(each)] for _ in range(layout.stages)])
    whole = np.array(rows)  # [repeats, stages, layers per stage, ...]
    if layout.format == NNX:
        return {"pipeline/layers/" + names.nnx.replace(".", "/"): whole}
    whole = whole if layout.repeats > 1 else whole[0]
    places = [np.take(whole, j, axis=whole.ndim - 4) for j in range(each)]
    base = "decoder/pipeline_module/layers"
    if each == 1:
        return {f"{base}/{names.linen}": places[0]}
    return {f"{base}/layers_{j}/{names.linen}": place for j, place in enumerate(places)}


@settings(max_examples=60)
@given(data=st.data())
def test_any_layout_to_any_other_and_back_to_the_bit(data):
    first = data.draw(layouts())
    second = data.draw(layouts(st.just(first.num_layers)))
    names = data.draw(st.sampled_from([n for n in of_layer(4) if "feed_forward.gate" in n.nnx]))
    drawn = np.random.default_rng(first.num_layers).normal(size=(first.num_layers, 2, 3, 5))
    layers = list(drawn.astype(np.float32))

    tree = store(first, layers, names)
    slots = [first.slot(names, n) for n in range(first.num_layers)]
    moved = store(second, [tree[slot.leaf][slot.index] for slot in slots], names)
    for layout, found in ((first, tree), (second, moved)):
        expected = counted(layout, layers, names)
        assert set(found) == set(expected)
        for leaf, array in expected.items():
            np.testing.assert_array_equal(found[leaf], array)
    slots = [second.slot(names, n) for n in range(first.num_layers)]
    back = store(first, [moved[slot.leaf][slot.index] for slot in slots], names)
    for leaf, array in tree.items():
        np.testing.assert_array_equal(back[leaf], array)


@settings(max_examples=40)
@given(layout=layouts())
def test_a_tree_tells_its_layout_and_layers_of_an_array_come_together(layout):
    assert find_layout(shapes_in(layout)) == layout
    names = of_layer(4)[0]
    leaves = [layout.slot(names, layer).leaf for layer in layout.order(names)]
    changes = sum(a != b for a, b in itertools.pairwise(leaves))
    assert sorted(layout.order(names)) == list(range(layout.num_layers))
    assert changes == len(set(leaves)) - 1


def test_one_array_of_another_shape_does_not_change_the_layout():
    tree = dict(TREES["scanned"])
    tree["decoder/layers/self_attention/query/kernel"] = (32, 9, 4, 8)
    assert find_layout(tree) == TreeLayout(SCANNED, 4)


PIPED = TREES["pipelined (stage 2, 2 layers per stage, 1 repeat)"]
KERNEL = "self_attention/query/kernel"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "no layers of MaxText's decoder"),
        ({"decoder/blocks/kernel": (3,)}, "checkpoint of another model"),
        ({**PIPED, "decoder/layers_4/x": (3,)}, "decoder/layers_4/x is a layer outside"),
        ({**PIPED, "decoder/layers/x": (3,)}, "decoder/layers/x is a layer outside"),
        ({"decoder/layers_outside_pipeline/x": (3,)}, "outside the pipeline"),
        (
            {f"decoder/pipeline_module/layers/{KERNEL}": (2, 2, 2, 32, 4, 8)},
            "scan_layers_per_stage",
        ),
        ({f"decoder/pipeline_module/layers/layers/{KERNEL}": (2, 2, 32, 4, 8)}, "scan_layers_per"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tree, message):
    with pytest.raises(Mismatch, match=message):
        find_layout(tree, "there")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PIPELINED, 4, 3, 1), "4 layers do not split into 3 stages × 1 repeat"),
        ((PIPELINED, 4, 2, 4), "do not split into 2 stages × 4 repeats"),
        ((SCANNED, 4, 2, 1), "leave them out for maxtext:scanned"),
        (("maxtext:scan", 4), "did you mean 'maxtext:scanned'"),
        ((NNX, 0), "num_layers=0, .* each of them must be 1 or more"),
    ],
)
def test_numbers_that_do_not_fit(arguments, message):
    with pytest.raises(InputError, match=message):
        TreeLayout(*arguments)

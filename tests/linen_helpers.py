"""Parameters of NNX models under their Linen names, and comparing to the bit."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from helpers import arrays_by_path
from jax.sharding import NamedSharding

from linen_compat import logical_axis_rules
from linen_compat.formats._names import Names, of_model
from linen_compat.formats._shapes import model_arrays
from nnx_pipeline import Layout, Mixtral


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a/b": x}` as `{"a": {"b": x}}`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = leaf
    return tree


def at(module: Any, path: str) -> Any:
    """The array of the variable at a dotted path."""
    for name in path.split("."):
        module = getattr(module, name)
    return module.get_value()


def part_of(module: nnx.Module, names: Iterable[Names], nnx_part: str, linen_part: str) -> Any:
    """`params` of a part of a layer, such as `attention` and `self_attention`."""
    pairs = [(n.nnx, n.linen) for n in names if n.nnx.startswith(nnx_part)]
    return nested(
        {
            linen.removeprefix(linen_part).removeprefix("/"): at(
                module, path.removeprefix(nnx_part).removeprefix(".")
            )
            for path, linen in pairs
        }
    )


def dense_layers(model: Mixtral, layer_layout: str, names: Names) -> dict[str, Any]:
    """One parameter of the layers before the pipeline, below `decoder`."""
    stacked = at(model, names.nnx)
    if layer_layout == "unscanned":
        return {f"dense_layers_{i}/{names.linen}": layer for i, layer in enumerate(stacked)}
    return {f"dense_layers/{names.linen}": jnp.moveaxis(stacked, 0, 1)}


def stage_of_layers(stacked: Any, path: str) -> dict[str, Any]:
    """`[repeats, stages, layers per stage, …]` as MaxText's `pipeline_module/layers` has it."""
    value = stacked[0] if stacked.shape[0] == 1 else stacked
    axis = 1 if stacked.shape[0] == 1 else 2
    if stacked.shape[2] == 1:
        return {f"layers/{path}": jnp.squeeze(value, axis)}
    layers = range(stacked.shape[2])
    return {f"layers/layers_{j}/{path}": jnp.take(value, j, axis) for j in layers}


def layers_apart(stacked: Any, path: str) -> dict[str, Any]:
    layers = stacked.reshape(-1, *stacked.shape[3:])
    return {f"layers_{i}/{path}": layer for i, layer in enumerate(layers)}


def layers_second(stacked: Any, path: str) -> dict[str, Any]:
    return {f"layers/{path}": jnp.moveaxis(stacked.reshape(-1, *stacked.shape[3:]), 0, 1)}


def in_pipeline(stacked: Any, path: str) -> dict[str, Any]:
    found = stage_of_layers(stacked, path)
    return {f"pipeline_module/{name}": value for name, value in found.items()}


LAYOUTS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "unscanned": layers_apart,
    "scanned": layers_second,
    "pipelined": in_pipeline,
}


def as_linen(model: Mixtral, layer_layout: str) -> dict[str, Any]:
    """`params` of `linen_compat.Transformer` with the arrays of a model (or of its gradients)."""
    outside, of_layers = of_model(model_arrays(model.config.model))
    flat = {names.linen: at(model, names.nnx) for names in outside}
    for names in of_layers:
        if names.is_early:
            found = dense_layers(model, layer_layout, names)
        else:
            found = LAYOUTS[layer_layout](at(model.pipeline.layers, names.nnx), names.linen)
            if names.group != "layers" and layer_layout != "pipelined":
                found = {f"moe_{path}": value for path, value in found.items()}
        flat |= {f"decoder/{path}": value for path, value in found.items()}
    return nested(flat)


def put_on(params: Any, abstract: Any, mesh: jax.sharding.Mesh, layout: Layout = Layout()) -> Any:
    """Unboxed parameters placed as the boxes of `abstract` say by the package's rules."""
    specs = nn.get_partition_spec(abstract)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, logical_axis_rules(mesh, layout))
    assert jax.tree.structure(params) == jax.tree.structure(shardings, is_leaf=_is_sharding)
    return jax.tree.map(jax.device_put, jax.tree.map(np.asarray, params), shardings)


def _is_sharding(leaf: Any) -> bool:
    return isinstance(leaf, NamedSharding)


def assert_same_bits(actual: Any, expected: Any, *, zero: str | None = None) -> None:
    """The same arrays under the same paths, dtypes included; none of them all zeros.

    - `zero`: the end of the paths whose arrays are all zeros.
    """
    actual, expected = arrays_by_path(actual), arrays_by_path(expected)
    assert sorted(actual) == sorted(expected)
    for path, reference in expected.items():
        a, b = np.asarray(actual[path]), np.asarray(reference)
        assert a.dtype == b.dtype, path
        is_zero = zero is not None and path.endswith(zero)
        assert np.any(b.astype(np.float32)) != is_zero, f"the reference of {path} is all zeros"
        np.testing.assert_array_equal(a, b, err_msg=path)

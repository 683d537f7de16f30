"""Checks of a pipeline's arrays and stage function, made while the pipeline is traced."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.metrics import of_visit
from nnx_pipeline.pipeline.schedule import Schedule
from nnx_pipeline.pipeline.stage.apply import ApplyStage
from nnx_pipeline.sharding import mesh_sizes


def check_arrays(params: PyTree, activations: PyTree, inputs: PyTree, schedule: Schedule) -> None:
    """Raises InputError unless arrays and mesh have the sizes that the schedule needs.

    - `params`: must be `[repeats, stages, …]`, at least one array.
    - `activations`: must be floating `[microbatches, …]`; None if another function makes them.
    - `inputs`: must be `[microbatches, …]`.
    - `schedule`: gives the numbers of repeats, stages and microbatches.
    """
    want = (schedule.repeats, schedule.stages)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.shape(leaf)[:2] != want:
            raise InputError(
                f"parameter {jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its first "
                f"axes must be (repeats, stages) = {want}, as the schedule says"
            )
    if not jax.tree.leaves(params):
        raise InputError("the stages have no parameters; give params with at least one array")
    for leaf in jax.tree.leaves((activations, inputs)):
        if jnp.shape(leaf)[:1] != (schedule.microbatches,):
            raise InputError(
                f"an input has shape {jnp.shape(leaf)}; its first axis must be the "
                f"{schedule.microbatches} microbatches of the schedule"
            )
    for leaf in jax.tree.leaves(activations):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise InputError(
                f"the activations hold {_type(leaf)}, and activations must be floating-point; pass "
                "other arrays as side inputs, which every stage reads"
            )
    on_mesh = mesh_sizes().get("stage", schedule.stages)
    if on_mesh not in (1, schedule.stages):
        raise InputError(
            f"the schedule has {schedule.stages} stages and the mesh stage={on_mesh}; make them "
            "equal"
        )


def checked(apply_stage: ApplyStage) -> ApplyStage:
    """The stage function with checks that raise InputError for what a pipeline cannot support.

    That is: activations of another shape or dtype than it was given, metrics that do not say how
    they combine (see `metrics`), and a change of its parameters, which would be lost after the
    visit. It returns metrics as `Sum`, `Mean` and `Max` only, in float32 or wider.
    """

    @functools.wraps(apply_stage)
    def apply(params: PyTree, x: PyTree, side: PyTree) -> tuple[PyTree, PyTree]:
        with unchanged(params):
            result = apply_stage(params, x, side)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(
                f"the function of a stage returned {type(result).__name__}; it must return a pair, "
                "activations and metrics, such as (x, {})"
            )
        returned, metrics = result
        types = jax.tree.map(_type, x), jax.tree.map(_type, returned)
        if types[0] != types[1]:
            raise InputError(
                f"the function of a stage was given activations {types[0]} and returned "
                f"{types[1]}; both must be the same, as the next stage gets them"
            )
        return returned, of_visit(metrics)

    return apply


@contextlib.contextmanager
def unchanged(tree: PyTree) -> Iterator[None]:
    """A context that raises InputError if an array of the tree was replaced, added or removed.

    It detects running statistics, counters of random numbers and values that a module sows.
    """
    before = _arrays(tree)
    yield
    after = _arrays(tree)
    changed = [name for name, leaf in after.items() if before.get(name) is not leaf]
    changed += [name for name in before if name not in after]
    if changed:
        raise InputError(
            f"a stage changed {changed[0]} of its parameters, and in a pipeline that would be lost "
            "between microbatches; return it as a metric, or for random numbers pass a key as a "
            "side input"
        )


def check_no_sharing(layer: nnx.Module) -> None:
    """Raises InputError if a layer holds one variable in two places.

    In a pipeline they would become two variables, each with a gradient of its own.
    """
    places: dict[int, str] = {}
    found = jax.tree_util.tree_leaves_with_path(
        layer, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for path, leaf in found:
        first = places.setdefault(id(leaf), jax.tree_util.keystr(path))
        if first != jax.tree_util.keystr(path):
            raise InputError(
                f"a layer has one variable in two places, {first} and "
                f"{jax.tree_util.keystr(path)}, which a pipeline would turn into two variables "
                "with separate gradients; keep it in one place and use that twice"
            )


def _arrays(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _type(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"

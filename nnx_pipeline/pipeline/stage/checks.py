"""What a pipeline asks of its arrays and of the function of a stage, checked while it is traced."""

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
from nnx_pipeline.pipeline.stages import ApplyStage
from nnx_pipeline.sharding import mesh_sizes


def check_arrays(params: PyTree, activations: PyTree, inputs: PyTree, schedule: Schedule) -> None:
    """Raises InputError unless arrays and mesh have the sizes of the schedule.

    params: `[repeats, stages, …]`. activations: floating `[microbatches, …]`, None where a first
    stage makes them. inputs: `[microbatches, …]`.
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
                f"the activations hold {_type(leaf)}, and what goes from stage to stage must be "
                "floating; give the rest as side inputs, which every stage reads"
            )
    on_mesh = mesh_sizes().get("stage", schedule.stages)
    if on_mesh not in (1, schedule.stages):
        raise InputError(
            f"the schedule has {schedule.stages} stages and the mesh stage={on_mesh}; make them "
            "equal"
        )


def checked(apply_stage: ApplyStage) -> ApplyStage:
    """The same function, which raises InputError for what a pipeline would get wrong.

    That is: activations of another shape or dtype than it was given, metrics that do not say what
    they are together (see `metrics`), and a change of its parameters, which would be lost with the
    visit. Its metrics are then `Sum`, `Mean` and `Max` alone, in float32 or wider.
    """

    @functools.wraps(apply_stage)
    def apply(params: PyTree, x: PyTree, side: PyTree) -> tuple[PyTree, PyTree]:
        with unchanged(params):
            result = apply_stage(params, x, side)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(
                f"the function of a stage gave {type(result).__name__}; it must give a pair, "
                "activations and metrics, such as (x, {})"
            )
        given, metrics = result
        types = jax.tree.map(_type, x), jax.tree.map(_type, given)
        if types[0] != types[1]:
            raise InputError(
                f"the function of a stage was given activations {types[0]} and gave {types[1]}; "
                "both must be the same, as the next stage gets them"
            )
        return given, of_visit(metrics)

    return apply


@contextlib.contextmanager
def unchanged(tree: PyTree) -> Iterator[None]:
    """Raises InputError if an array of the tree is another one, or more or fewer, after the block.

    So it finds running statistics, counters of random numbers and what a module sows.
    """
    before = _arrays(tree)
    yield
    after = _arrays(tree)
    changed = [name for name, leaf in after.items() if before.get(name) is not leaf]
    changed += [name for name in before if name not in after]
    if changed:
        raise InputError(
            f"a stage changed {changed[0]} of its parameters, and in a pipeline that would be lost "
            "between microbatches; return it as a metric, or for random numbers hand a key in "
            "beside the activations"
        )


def check_no_sharing(layer: nnx.Module) -> None:
    """Raises InputError for a variable that a layer has in two places, which would come apart."""
    places: dict[int, str] = {}
    found = jax.tree_util.tree_leaves_with_path(
        layer, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for path, leaf in found:
        first = places.setdefault(id(leaf), jax.tree_util.keystr(path))
        if first != jax.tree_util.keystr(path):
            raise InputError(
                f"a layer has one variable in two places, {first} and "
                f"{jax.tree_util.keystr(path)}, which would be two in a pipeline, with gradients "
                "of their own; give it one place and call that twice"
            )


def _arrays(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _type(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"

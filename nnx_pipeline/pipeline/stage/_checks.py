"""Checks of a pipeline's arrays and stage function, made while the pipeline is traced."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, Var
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.pipeline.metrics import of_visit
from nnx_pipeline.pipeline.schedule import Schedule
from nnx_pipeline.pipeline.stage import state as states
from nnx_pipeline.pipeline.stage._sums import WithSums
from nnx_pipeline.pipeline.stage.apply import ApplyMoving, ApplyStage, Moving
from nnx_pipeline.sharding.layout import is_variable, mesh_sizes


def check_shapes(params: PyTree, activations: PyTree, inputs: PyTree, schedule: Schedule) -> None:
    """Raises InputError unless arrays and mesh have the sizes that the schedule needs."""
    check_stacked(params, "parameter", schedule)
    if not jax.tree.leaves(params):
        raise InputError("the stages have no parameters; give params with at least one array")
    for leaf in jax.tree.leaves((activations, inputs)):
        if jnp.shape(leaf)[:1] != (schedule.microbatches,):
            raise InputError(
                f"an input has shape {jnp.shape(leaf)}; its first axis must be the "
                f"{counted(schedule.microbatches, 'microbatch')} of the schedule"
            )
    for leaf in jax.tree.leaves(activations):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise InputError(
                f"the activations hold {states.type_of(leaf)}, and activations must be "
                "floating-point; pass other arrays as side inputs, which every stage reads"
            )
    on_mesh = mesh_sizes().get("stage", schedule.stages)
    if on_mesh not in (1, schedule.stages):
        raise InputError(
            f"the schedule has {counted(schedule.stages, 'stage')} and the mesh stage={on_mesh}; "
            "make them equal"
        )


def check_stacked(tree: PyTree, what: str, schedule: Schedule) -> None:
    """Raises InputError unless arrays begin with repeats and stages."""
    want = (schedule.repeats, schedule.stages)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.shape(leaf)[:2] != want:
            name = f"{what} {jax.tree_util.keystr(path)}".strip()
            raise InputError(
                f"{name} has shape {jnp.shape(leaf)}; its first axes must be (repeats, stages) = "
                f"{want}, as the schedule says"
            )


def checked(apply_stage: ApplyStage, *, has_state: bool = False) -> ApplyMoving:
    """The stage function as the loops call it, with metrics combined and checks.

    Of parameters `WithSums` it gives the accumulators beside the metrics.
    """

    @functools.wraps(apply_stage)
    def apply(params: PyTree, moving: Moving, side: PyTree) -> tuple[Moving, PyTree]:
        x, state = moving[0], states.without_gradient(moving[1])
        args = (x, side, state) if has_state else (x, side)
        before, rule = arrays_of(params), f"the function of a stage is called with {1 + len(args)}"
        with call_explained(apply_stage, (params, *args), {}, f"{rule} arguments"):
            result: Sequence[PyTree] = apply_stage(params, *args)
        if isinstance(params, WithSums):
            *result, sums = result
        check_unchanged(before, params, lambda params: apply_stage(params, *args))
        if has_state:
            *result, written = _unpacked(
                result,
                3,
                "the function of a stage with a state",
                "activations, metrics and the state, such as (x, None, state)",
            )
            states.check_written(state, written)
            state = states.without_gradient(written)
        returned, metrics = check_passed_on(result, x, "the function of a stage", "stage")
        metrics = of_visit(metrics)
        return (returned, state), (metrics, sums) if isinstance(params, WithSums) else metrics

    return apply


def _unpacked(result: PyTree, number: int, who: str, wanted: str) -> PyTree:
    if not isinstance(result, (tuple, list)) or len(result) != number:
        text = f"{len(result)} values" if isinstance(result, (tuple, list)) else _words(result)
        raise InputError(f"{who} returned {text}; it must return {wanted}")
    return result


def check_passed_on(result: PyTree, x: PyTree, who: str, following: str) -> tuple[PyTree, PyTree]:
    """The activations and metrics that a stage or a layer returned."""
    pair = "a pair, activations and metrics, such as (x, None)"
    returned, metrics = _unpacked(result, 2, who, pair)
    if not states.alike(x, returned):
        before, after = states.types_of(x), states.types_of(returned)
        raise InputError(
            f"{who} was given activations {before} and returned {after}; both "
            f"must be the same, as the next {following} gets them"
        )
    return returned, metrics


def checked_entry(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    @functools.wraps(function)
    def apply(*args: PyTree) -> PyTree:
        x = function(*args)
        for leaf in jax.tree.leaves(x) or [None]:
            if not _is_floating(leaf):
                raise InputError(
                    f"`enter` returned {_words(leaf)}; it must return the activations of a "
                    "microbatch, floating-point arrays"
                )
        return x

    return apply


def checked_exit(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function with an InputError unless it returns one float32 number."""

    # Losses of microbatches add up in float32; one in bfloat16 would have lost digits before.
    @functools.wraps(function)
    def apply(*args: PyTree) -> Array:
        loss = function(*args)
        if not _is_floating(loss) or jnp.shape(loss) or loss.dtype != jnp.float32:
            text = jax.tree.map(_words, loss) if loss is not None else loss
            raise InputError(
                f"`leave` returned {text}; it must return the loss of a microbatch and nothing "
                "else, a float32 scalar (cast before taking the mean, as by x.astype('float32')); "
                "other values can be metrics of a layer"
            )
        return loss

    return apply


def check_unchanged(
    before: dict[str, Array],
    tree: PyTree,
    function: Callable[[PyTree], object],
    but: Callable[[object], bool] | None = None,
) -> None:
    """Refuses a function that replaced, added or removed an array of a tree, `but` state."""
    # Flax's `nnx.jit` and `nnx.remat` replace every array of a module by what their program gives
    # out. The function is then traced once more, to see whether that is what went in.
    after = arrays_of(tree, but)
    changed = [name for name, leaf in after.items() if before.get(name) is not leaf]
    changed += [name for name in before if name not in after]
    if changed and (before.keys() != after.keys() or not _is_passed_on(function, tree, but)):
        raise InputError(
            f"a stage changed {changed[0]} of its parameters, and in a pipeline that would be lost "
            "between microbatches; a layer of a pipeline module may keep what it writes in a "
            "variable of state (nnx.BatchStat, nnx.Cache, nnx.RngCount or LayerState), a function "
            "WithState; or return it as a metric"
        )


def _is_passed_on(
    function: Callable[[PyTree], object], tree: PyTree, but: Callable[[object], bool] | None
) -> bool:
    """Whether the arrays that a tree has after a call are those that it had before."""
    fixed = arrays_of(tree, but).keys()
    named = jax.tree_util.tree_leaves_with_path(tree)
    structure = jax.tree.structure(tree)

    def again(leaves: list[Array]) -> list[Array]:
        copy = jax.tree.unflatten(structure, leaves)
        function(copy)
        return [*arrays_of(copy, but).values()]

    jaxpr = jax.make_jaxpr(again)([leaf for _, leaf in named]).jaxpr
    went_in = [
        var
        for (path, _), var in zip(named, jaxpr.invars, strict=True)
        if jax.tree_util.keystr(path) in fixed
    ]
    return [_origin(jaxpr, var) for var in jaxpr.outvars] == went_in


def _origin(jaxpr: Jaxpr, var: object) -> Var | None:
    """The input of a jaxpr that a variable is, perhaps through calls; None for any other value."""
    if not isinstance(var, Var):
        return None
    if var in jaxpr.invars:
        return var
    made = next((equation for equation in jaxpr.eqns if var in equation.outvars), None)
    if made is None or made.primitive.name not in ("jit", "pjit", "checkpoint", "remat2"):
        return None
    inner = made.params["jaxpr"]
    inner = getattr(inner, "jaxpr", inner)
    origin = _origin(inner, inner.outvars[made.outvars.index(var)])
    return None if origin is None else _origin(jaxpr, made.invars[inner.invars.index(origin)])


_IN_A_VARIABLE = "hold it in an nnx.Param, or in an nnx.Variable if it is not trained"


def check_no_sharing(layer: nnx.Module, another: nnx.Module) -> None:
    others = {id(leaf) for _, leaf in _variables(another)}
    for path, leaf in _variables(layer):
        if id(leaf) in others:
            raise InputError(
                f"all layers hold one and the same variable, {jax.tree_util.keystr(path)}, which a "
                "pipeline would turn into one for each layer; make it inside of the layer, or give "
                "its value to the layers as a side input, Shared(…)"
            )


def check_same(layer: nnx.Module, another: nnx.Module) -> None:
    """Raises InputError if a function made two layers that differ in more than their values."""
    # It is called once for all layers of a kind, so that all would be like the first one.
    left, right = (
        {jax.tree_util.keystr(path): _words(leaf) for path, leaf in _variables(each)}
        | plain_attributes(each)
        for each in (layer, another)
    )
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            raise InputError(
                f"the function that makes a layer gave one with {name}={left.get(name, 'nothing')} "
                f"and then one with {right.get(name, 'nothing')}, but all layers are made by one "
                "call; give a list with a function for each kind of layer, or let the layer's call "
                "take `place`"
            )


def check_attributes(before: dict[str, str], layer: PyTree) -> None:
    """Raises InputError if a call changed a plain attribute, which would be lost."""
    for name, value in plain_attributes(layer).items():
        if before.get(name) != value:
            raise InputError(
                f"a call of a layer set {name} to {value}, and JAX traces one call for all layers "
                "and microbatches; keep what changes in a variable of state, such as a LayerState"
            )


def plain_attributes(layer: PyTree) -> dict[str, str]:
    """The attributes of a layer and its modules that are numbers, texts or None."""
    if not isinstance(layer, nnx.Module):
        return {}
    return {
        ".".join(["", *map(str, path), name]): repr(value)
        for path, module in nnx.iter_modules(layer)
        for name, value in vars(module).items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def check_layer_variables(layer: nnx.Module) -> None:
    """Refuses a variable in two places, which would become two, and an array in none."""
    for path, module in nnx.iter_modules(layer):
        for attribute, value in vars(module).items():
            # While JAX traces, Flax does not take such an array as a part of the tree.
            if isinstance(value, jax.Array):
                parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
                name = f"{''.join(parts)}.{attribute}"
                raise InputError(
                    f"a layer holds {_words(value)} in {name}, which is in no variable; "
                    f"{_IN_A_VARIABLE}"
                )
    places: dict[int, str] = {}
    for path, leaf in _variables(layer):
        name = jax.tree_util.keystr(path)
        if not is_variable(leaf):
            raise InputError(
                f"a layer holds {_words(leaf)} in {name}, which is in no variable; {_IN_A_VARIABLE}"
            )
        first = places.setdefault(id(leaf), name)
        if first != name:
            raise InputError(
                f"a layer has one variable in two places, {first} and {name}, which a pipeline "
                "would turn into two variables with separate gradients; keep it in one place and "
                "use that twice"
            )


@contextlib.contextmanager
def call_explained(
    function: Callable[..., object], args: tuple[PyTree, ...], kwargs: dict[str, PyTree], rule: str
) -> Iterator[None]:
    """Raises InputError if a call failed because the function does not take its arguments."""
    try:
        yield
    except TypeError as error:
        while isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        if not callable(function):
            text = type(function).__name__
            raise InputError(f"{rule}, and is of type {text}; give a function") from error
        signature = _signature(function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as why:
            raise InputError(
                f"{rule}, and its arguments are {signature}: {why}; make them agree"
            ) from error
        raise


def _signature(function: Callable[..., object]) -> inspect.Signature:
    if not isinstance(function, type):
        return inspect.signature(function)
    # That of a class of Flax is of its metaclass, which takes anything.
    signature = inspect.signature(function.__init__)  # type: ignore[misc]
    return signature.replace(parameters=[*signature.parameters.values()][1:])


def _variables(layer: nnx.Module) -> list[tuple[PyTree, PyTree]]:
    return jax.tree_util.tree_leaves_with_path(layer, is_leaf=is_variable)


def arrays_of(tree: PyTree, but: Callable[[object], bool] | None = None) -> dict[str, Array]:
    """The leaves of a tree by their paths, without those in a node that `but` is true of."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=but)
    nodes = [(path, leaf) for path, leaf in leaves if but is None or not but(leaf)]
    return {
        jax.tree_util.keystr(at + path): leaf
        for at, node in nodes
        for path, leaf in jax.tree_util.tree_leaves_with_path(node)
    }


def _is_floating(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _words(leaf: PyTree) -> str:
    return states.type_of(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__

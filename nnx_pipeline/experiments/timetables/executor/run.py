"""Runs a model by any timetable of forward and backward visits."""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from nnx_pipeline.experiments.timetables.executor._loop import TimetableFunctions, TimetableLoop
from nnx_pipeline.experiments.timetables.executor._plan import (
    EndsOn,
    forward_only,
    make_timetable_plan,
)
from nnx_pipeline.lab.errors import InputError, counted, of_type, one_of
from nnx_pipeline.pipeline import _entry as entry
from nnx_pipeline.pipeline._timetable.actions import Actions
from nnx_pipeline.pipeline.contract import Inputs, ModelFunctions, Weights
from nnx_pipeline.pipeline.one_f_one_b._state import LoopWeights
from nnx_pipeline.pipeline.one_f_one_b.run import (
    Total,
    by_loop,
    check_bundles,
    checked_lift,
    computes_in_float16,
    lifted,
    metric_weights_of,
    without_lift,
)
from nnx_pipeline.pipeline.options import Accumulation, LoopOptions
from nnx_pipeline.pipeline.stage._checks import checked, checked_entry, checked_exit
from nnx_pipeline.pipeline.stage._hoist import Function, hoist
from nnx_pipeline.pipeline.stage.apply import ApplyStage
from nnx_pipeline.pipeline.stage.state import WithState
from nnx_pipeline.sharding.layout import is_explicit, mesh_sizes


def run_timetable(
    functions: ModelFunctions,
    weights: Weights,
    inputs: Inputs,
    *,
    actions: Actions,
    ends_on: EndsOn = "all",
    options: LoopOptions = LoopOptions(),
) -> Total:
    """The loss of a model whose stages do what a timetable says; its gradients come with it.

    This is an experiment, which no config reaches. It has run on CPU devices only: on no TPU or
    GPU, where ranks would wait in different branches.

    It computes what `run_one_f_one_b` does. There all stages make a forward and a backward visit at
    each tick. Here each rank takes a branch for what its row of the timetable says. So a rank does
    nothing while it idles, and the functions of the stages may differ.

    Ranks exchange activations with their neighbours after every step, so that a step takes as long
    as the longest action of any rank. Steps in which some ranks go forward and others back cost all
    of them a backward visit: by the estimates of the compilers such timetables take longer than
    `run_one_f_one_b`, although with 1f1b each rank computes less. And W computes again what I has
    computed on its way to the gradient of the input.

    - `functions`: as for `run_one_f_one_b`; stages may have different functions.
    - `inputs`: as for `run_one_f_one_b`, but without gradients: those of weights alone are given.
    - `weights`: as for `run_one_f_one_b`, but those of the stages are `[chunks, ranks, …]`: chunk c
      of rank r belongs to the c-th of the stages that the timetable places on rank r.
    - `actions`: the timetable, see `make_timetable` and `read_csv`. It places consecutive stages on
      the same rank or on neighbours in the ring of ranks, and as many on each. Without backward
      actions it can give no gradients.
    - `ends_on`: with `all`, `enter` and `leave` run on all devices, in the ticks in which a
      microbatch enters or leaves, as in the other loops. With `own` the rank of the first stage
      runs `enter` and that of the last one `leave`, with weights and gradients that are whole over
      `stage`, while other ranks go on.
    - `options`: `remat`, `saved_in_stage`, `bubble_fill` and `accumulate.grad_dtype`; the others
      must be as they are by default.

    The mesh must be one of auto axes with as many stages as the timetable has ranks. Weights may be
    sharded over other axes than `stage`, and branches gather them.

    Returns the loss, and its two parts, which have no gradient. Raises InputError for a mesh of
    explicit axes, for arrays, options or a timetable that do not fit, where a gradient of an input
    is asked for, and where `run_one_f_one_b` would.
    """
    of_type("actions", actions, Actions)
    check_bundles(functions, weights, inputs, options)
    stages, function_of = _functions_of(functions.apply_stage, actions)
    _check(actions, weights, inputs, options)
    one_of("ends_on", ends_on, ("all", "own"))
    plans = (
        make_timetable_plan(actions, function_of, ends_on),
        make_timetable_plan(forward_only(actions), function_of, ends_on),
    )
    weights = weights.placed()
    inputs = entry.place_on_every_stage(inputs)
    lift = checked_lift(functions.lift)
    metric_weights = metric_weights_of(functions, lift)
    how = options.accumulate

    def make_loop(loop_functions: TimetableFunctions) -> TimetableLoop:
        return TimetableLoop(
            loop_functions,
            plans,
            metric_weights,
            actions.stages * actions.microbatches,
            ends_on,
            None if how is None else how.grad_dtype,
            options.bubble_fill,
        )

    checkpoint = functools.partial(
        options.remat.checkpoint, also=options.saved_in_stage, in_scan=True
    )
    checked_functions: tuple[Function, ...] = (
        checked_entry(functions.enter),
        lifted(checked_exit(functions.leave), lift),
        *map(checked, stages),
    )

    def call(*looks: Function) -> None:
        make_loop(TimetableFunctions(looks[0], looks[2:], looks[1])).visit_once(weights, inputs)

    hoisted, captured, traced = hoist(checked_functions, call)
    loop = dataclasses.replace(
        make_loop(TimetableFunctions(hoisted[0], tuple(map(checkpoint, hoisted[2:])), hoisted[1])),
        unlifted=lift is None and any(map(computes_in_float16, traced)),
    )
    # The stages have a list for each of their functions.
    all_weights = LoopWeights.of(weights, captured[0], captured[2:], captured[1])
    total, _ = by_loop(loop, all_weights, inputs, None)
    return without_lift(total, lift)


def _functions_of(
    apply_stage: ApplyStage | Sequence[ApplyStage], actions: Actions
) -> tuple[list[ApplyStage], list[int]]:
    every = [apply_stage] * actions.stages if callable(apply_stage) else [*apply_stage]
    if not all(map(callable, every)) or not every:
        raise InputError(
            "apply_stage is neither a function nor a list of functions; give one for all stages, "
            "or one for each"
        )
    different = list(dict.fromkeys(every))
    return different, [different.index(function) for function in every]


def _check(actions: Actions, weights: Weights, inputs: Inputs, options: LoopOptions) -> None:
    """Raises InputError unless arrays, mesh and options fit the timetable."""
    if isinstance(weights.stages, WithState):
        raise InputError(
            "run_timetable was given layers WithState, and has no state; use run_one_f_one_b"
        )
    if is_explicit():
        raise InputError(
            "run_timetable needs a mesh of auto axes, because in explicit mode a shard_map over "
            "stages would gather all weights; make the mesh with sharding='auto'"
        )
    ranks = actions.ranks
    on_mesh = mesh_sizes().get("stage", 1)
    if on_mesh != ranks:
        raise InputError(
            f"the timetable has {counted(ranks, 'rank')} and the mesh stage={on_mesh}; make them "
            "equal"
        )
    chunks = actions.stages // ranks
    for leaf in jax.tree.leaves(weights.stages) or [None]:
        shape = None if leaf is None else jax.numpy.shape(leaf)
        if shape is None or shape[:2] != (chunks, ranks):
            raise InputError(
                f"a parameter of the stages has shape {shape}; its first axes must be (chunks, "
                f"ranks) = {(chunks, ranks)}, as the timetable says"
            )
    for leaf in jax.tree.leaves(inputs):
        if jax.numpy.shape(leaf)[:1] != (actions.microbatches,):
            raise InputError(
                f"an input has shape {jax.numpy.shape(leaf)}; its first axis must be the "
                f"{counted(actions.microbatches, 'microbatch')} of the timetable"
            )
    # Field by field: `bubble_fill`, which is read, may be NaN, and NaN is not equal to itself.
    defaults, how = LoopOptions(), options.accumulate or Accumulation()
    unread = [
        options.shift_by != defaults.shift_by,
        options.cast_at_use != defaults.cast_at_use,
        how != Accumulation(grad_dtype=how.grad_dtype),
    ]
    if any(unread):
        raise InputError(
            "run_timetable gathers weights at their use and sends by ppermute; leave shift_by, "
            "cast_at_use and accumulate.fsdp_gather as they are by default"
        )
    if options.remat.offloaded:
        raise InputError(
            f"remat offloads {options.remat.offloaded} to the host, but a timetable keeps values "
            "in device memory only; save those names or leave them out"
        )

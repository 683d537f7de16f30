"""The visits of all stages at a tick, forward and backward, as both loops make them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline._exchange import over_stage, rows
from nnx_pipeline.pipeline.gather import FsdpGather
from nnx_pipeline.pipeline.stage import _repeats as repeats
from nnx_pipeline.pipeline.stage import apply as stages
from nnx_pipeline.pipeline.stage._sums import ReadWithSums, WithSums
from nnx_pipeline.pipeline.stage._vjp import backward_from, forward_keeping, only
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.stage.state import At


class Reads(NamedTuple):
    """What the visits of a tick read besides activations and state."""

    weights: PyTree  # of each stage in its repeat, [stages, …]
    side: PyTree  # of each stage's microbatch, [stages, …]
    captured: list[Array]  # what the stage function closes over, whole on every stage


@dataclass(frozen=True)
class Visit:
    """The visits of all stages at one tick.

    `apply` takes (`Reads`, moving) to (moving, metrics), where moving is activations and the state
    of the layers; if `by_stage`, of one stage, with residuals of its own. `needed` says whether the
    gradient of each parameter is asked for; None for all of them. If `sums_in_layers`, weights are
    `WithSums`.
    """

    apply: Callable[[Reads, Moving], tuple[Moving, PyTree]]
    by_stage: bool
    grad_dtype: jax.typing.DTypeLike | None
    fsdp_gather: FsdpGather
    needed: PyTree = None
    sums_in_layers: bool = False

    def run(self, reads: Reads, x: Moving, *, keep: bool) -> tuple[tuple[Moving, PyTree], PyTree]:
        """Outputs and metrics `[stages, …]`, and residuals, None unless `keep`."""
        # `x` are the input of every stage and the state of its layers, `[stages, …]`.
        if not self.by_stage:
            done, residuals = forward_keeping(self.apply, reads, x)
            return _without_sums(done, reads), residuals if keep else None

        def run_stage(local: tuple[PyTree, PyTree], x: Moving, _: None) -> tuple[PyTree, PyTree]:
            all_reads = Reads(*local, reads.captured)
            if keep:
                return forward_keeping(self.apply, all_reads, x)
            return self.apply(all_reads, x), None

        done, residuals = stages.map_stages(run_stage)(reads[:2], x, None)
        return _without_sums(done, reads), residuals

    def back(
        self, residuals: PyTree, reads: Reads, d_y: PyTree, d_metrics: PyTree, *, state: PyTree
    ) -> tuple[Reads, PyTree]:
        """The cotangents of what the visits read, and of their input; None for integers."""
        # If `by_stage`, each stage has its own for what the stage function closes over. `state`, a
        # tree like the state of a visit, has no gradient. The cotangent of weights `WithSums` are
        # those with the gradient of the visit added.
        if isinstance(reads.weights, WithSums):
            d_metrics = d_metrics, reads.weights.sums
        d_out = (d_y, jax.tree.map(lambda _: None, state)), d_metrics
        if not self.by_stage:
            d_reads, (d_x, _) = backward_from(residuals, reads, d_out)
            return d_reads, d_x

        def back_stage(
            residuals: PyTree, local: tuple[PyTree, PyTree], d_out: PyTree
        ) -> tuple[PyTree, PyTree]:
            return backward_from(residuals, Reads(*local, reads.captured), d_out)

        d_reads, (d_x, _) = stages.map_stages(back_stage)(residuals, reads[:2], d_out)
        return d_reads, d_x

    def zeros(self, params: PyTree) -> PyTree:
        """Accumulators; layers that add to them themselves have those of all parameters."""
        zeros = self.fsdp_gather.zeros(params, self.grad_dtype)
        return repeats.split_repeats(zeros if self.sums_in_layers else self.only(zeros))

    def add(self, totals: PyTree, d_weights: PyTree, params: PyTree, repeat: Array) -> PyTree:
        """Adds the gradients `[stages, …]` of one visit, at the repeat that each stage was at."""
        if isinstance(d_weights, WithSums):
            return d_weights.sums
        d_weights = self.fsdp_gather.of_visit(self.only(d_weights), params)
        return repeats.add_at_repeat(totals, d_weights, over_stage(repeat))

    def total(self, totals: PyTree, params: PyTree) -> PyTree:
        return self.fsdp_gather.scatter_gradients(self.only(repeats.join_repeats(totals)), params)

    def only(self, gradients: PyTree) -> PyTree:
        return gradients if self.needed is None else only(self.needed, gradients)


def _without_sums(done: tuple[Moving, PyTree], reads: Reads) -> tuple[Moving, PyTree]:
    if not isinstance(reads.weights, WithSums):
        return done
    y, (metrics, _) = done
    return y, metrics


def weights_of(split: PyTree, repeat: Array) -> PyTree:
    """The parameters of each stage for the repeat that it is at, `[stages, …]`."""
    repeat = over_stage(repeat)
    if isinstance(split, ReadWithSums):
        return WithSums(repeats.select(split.split, repeat), split.sums, repeat)
    return repeats.select(split, repeat)


def side_of(side: PyTree, microbatch: Array) -> PyTree:
    """The side inputs of the microbatch that each stage works on, `[stages, …]`."""
    return jax.tree.map(lambda leaf: rows(leaf, over_stage(microbatch)), side)


def visits_at(repeat: Array, microbatch: Array, active: Array, microbatches: int) -> At:
    """Which visits a tick makes, from rows `[stages]` of a timetable."""
    row = repeat * microbatches + microbatch
    return At(over_stage(repeat), over_stage(row), over_stage(active))

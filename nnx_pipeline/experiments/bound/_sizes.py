"""The sizes on one device of what a training step works on, from its config and a mesh alone."""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxtyping import PyTree

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.ops._attention import BLOCK, WHOLE
from nnx_pipeline.ops._experts import group_size
from nnx_pipeline.ops._loss import make_plan
from nnx_pipeline.pipeline.schedule import Schedule, make_schedule
from nnx_pipeline.sharding.layout import Layout, Variable, is_variable
from nnx_pipeline.train import Batch, TrainState, abstract_batch, abstract_state

FULL_WIDTH = 4  # bytes of a float32
GATHERED = (
    "embed",
    "embed_of_vocab",
    "embed_of_expert",
    "latent",
)  # logical axes over which a product needs a weight whole


@dataclass(frozen=True)
class Sizes:
    """A training step on a mesh whose sizes alone are known; made by `on_mesh`.

    - `config`: of the step.
    - `mesh`: the size of each mesh axis.
    - `state`, `batch`: the shapes, dtypes and shardings of its arguments.
    """

    config: Config
    mesh: MeshConfig
    state: TrainState
    batch: Batch

    @property
    def layout(self) -> Layout:
        """Where activations and weights lie while the layers run."""
        return self.state.model.layout

    @property
    def optimizer_layout(self) -> Layout:
        """Where the optimizer's state lies, and with it the gradients that it reads."""
        return self.layout.zero1(self.state.model.zero1)

    @property
    def in_loop(self) -> bool:
        """Whether microbatches go through the layers one by one."""
        return self.config.pipeline.loops_on(self.mesh.stage)

    @property
    def gathers_first(self) -> bool:
        """Whether a loop gathers weights before the ticks that use them; ZeRO-1's from shards."""
        sharded = self.mesh.fsdp > 1 or bool(self.state.model.zero1)
        return self.config.pipeline.gathers_before_use and self.in_loop and sharded

    @property
    def microbatches(self) -> int:
        """How many microbatches a loop works on; 1 where the whole batch goes through at once."""
        return self.config.pipeline.microbatches_on(self.mesh.stage) if self.in_loop else 1

    @property
    def layers(self) -> int:
        """The layers of one visit: of a stage, or of the model where there are no stages."""
        return self.config.layers_per_stage(self.mesh.stage)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The timetable of the loop."""
        pipeline = self.config.pipeline
        return make_schedule(
            pipeline.schedule,
            stages=self.mesh.stage,
            microbatches=self.microbatches,
            repeats=pipeline.num_repeats,
            delay=pipeline.forwarding_delay,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one number of an activation."""
        return jnp.dtype(self.config.model.dtype).itemsize

    @property
    def param_itemsize(self) -> int:
        """Bytes of one number of a stored weight."""
        return jnp.dtype(self.config.model.param_dtype).itemsize

    @property
    def grad_itemsize(self) -> int:
        """Bytes of one number of a gradient that the optimizer reads."""
        dtype = self.config.train.grad_dtype or self.config.model.param_dtype
        return jnp.dtype(dtype).itemsize

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch on a device."""
        devices = self.layout.size("copy") * self.layout.size("batch")
        return self.config.train.global_batch // self.microbatches // devices

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on a device."""
        return self.sequences * self.config.train.sequence_length

    @property
    def expert_tokens(self) -> int:
        """Tokens that a device sends through its experts: of all devices along `expert`."""
        return self.tokens * self.layout.size("batch") // self.layout.size("batch_beside_experts")

    @property
    def stream(self) -> int:
        """Bytes of the activations of one microbatch between two layers."""
        return self.tokens * self.config.model.embed_dim * self.itemsize

    @property
    def heads(self) -> int:
        """Query heads of a device."""
        return self.config.model.num_heads // self.layout.size("heads")

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a device."""
        return self.config.model.num_kv_heads // self.layout.size("kv_heads")

    @property
    def block(self) -> int:
        """Queries of a sequence that are attended at a time."""
        length = self.config.train.sequence_length
        return min(
            length, self.config.model.attention_block or (length if length <= WHOLE else BLOCK)
        )

    @property
    def local_experts(self) -> int:
        """Experts of a device; 1 for a dense MLP."""
        return self.config.model.num_experts // self.layout.size("expert")

    @property
    def group(self) -> int:
        """Experts of a device that one product computes; 1 for a dense MLP."""
        model = self.config.model
        if model.num_experts == 1:
            return 1
        kernel = (model.num_experts, model.embed_dim, model.mlp_dim)
        return model.expert_group or group_size(self.expert_tokens, kernel, self.layout)

    @property
    def hidden(self) -> int:
        """Bytes of one array of hidden units: of a dense MLP, or of one group of experts."""
        width = self.group * self.config.model.mlp_dim // self.layout.size("mlp")
        return self.expert_tokens * width * self.itemsize

    @functools.cached_property
    def head(self) -> "Head":
        """What the loss works on at a time."""
        model, train = self.config.model, self.config.train
        batches = self.state.model.pipeline.batches
        one_by_one = self.config.pipeline.schedule == "1f1b"
        axes = batches.axes[1:] if one_by_one else batches.axes
        sequences = train.global_batch // (self.microbatches if one_by_one else 1)
        chunks = train.loss_chunks_of(self.microbatches) if one_by_one else train.loss_chunks
        shape = (sequences, train.sequence_length, model.embed_dim)
        plan = make_plan(shape, model.vocab_size, axes, chunks, self.optimizer_layout)
        shards = self.mesh.product(*plan.tokens)
        spread = shards * self.mesh.product(*plan.shared)
        tokens = sequences * train.sequence_length
        return Head(
            chunk_tokens=tokens // shards // chunks,
            device_tokens=tokens // spread,
            columns=plan.padded // self.mesh.product(*plan.vocab),
            is_moved=bool(plan.gathered or plan.turned),
            tokens_move=bool(plan.shared),
        )

    def numbers(self, tree: PyTree, layout: Layout) -> int:
        """How many numbers of some weights a device holds in a layout."""
        return sum(self._of(leaf, layout) for leaf in _variables(tree))

    def gathered_bytes(self, tree: PyTree) -> int:
        """Bytes of some weights in the dtype of activations, whole along the residual stream."""
        return self.itemsize * sum(
            self._of(leaf, self.layout, whole=GATHERED) for leaf in _variables(tree)
        )

    @property
    def largest_kernel(self) -> int:
        """Bytes of the largest weight that one product gathers; 0 where none is gathered."""
        return max(map(self._gathered_at_once, _variables(self.state.model.pipeline.layers)))

    def _gathered_at_once(self, variable: Variable) -> int:
        """Bytes of the part of a stacked weight that a single product reads."""
        names = variable.get_metadata("logical_axes")
        if not any(self.layout.axes(name) for name in names if name in GATHERED):
            return 0
        shape: tuple[int, ...] = variable.get_value().shape
        repeats, _, layers, *_ = shape
        size = self._of(variable, self.layout, whole=GATHERED) // (repeats * layers)
        return size * self.itemsize * self.group // (self.local_experts if "expert" in names else 1)

    def _of(self, variable: Variable, layout: Layout, whole: tuple[str, ...] = ()) -> int:
        shape: tuple[int, ...] = variable.get_value().shape
        names = variable.get_metadata("logical_axes")
        spread = (layout.size(name) for name in names if name and name not in whole)
        return math.prod(shape) // math.prod(spread)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the cross-entropy works on at a time, per device.

    - `chunk_tokens`: tokens whose logits exist at a time.
    - `device_tokens`: tokens whose gradient a device keeps, of all chunks.
    - `columns`: its columns of the vocabulary.
    - `is_moved`: whether the head's kernel is gathered or exchanged before it is used.
    - `tokens_move`: whether the tokens of other devices are gathered.
    """

    chunk_tokens: int
    device_tokens: int
    columns: int
    is_moved: bool
    tokens_move: bool


def bytes_of(tree: PyTree) -> int:
    """Bytes on one device of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@contextlib.contextmanager
def on_mesh(config: Config, mesh: MeshConfig, backend: str) -> Iterator[Sizes]:
    """The sizes of a step; to be read inside the context, where the mesh is the ambient one.

    - `config`: of the step.
    - `mesh`: the size of each mesh axis; no device is needed.
    - `backend`: JAX's name of the devices' platform, see `mesh.ambient_platform`.

    Raises InputError when the two do not fit together.
    """
    config.check_mesh(mesh)
    sizes = mesh.sizes()
    kinds = (AxisType.Explicit,) * len(sizes)
    device = AbstractDevice(backend, None, platform=backend)
    grid: Any = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(grid):
        state, batch = abstract_state(config, grid), abstract_batch(config, grid)
        yield Sizes(config, mesh, state, batch)


def _variables(tree: PyTree) -> list[Variable]:
    return list(filter(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))

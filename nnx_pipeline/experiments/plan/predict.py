"""Predicts memory and time of a layout by a few sums, to order thousands of layouts.

The prediction decides nothing but the order in which layouts are compiled. It is here as a whole:

- compute: the products of a layer for the tokens of a device, forward, twice backward, and what
  `remat` computes again; over the peak times `PRODUCTS`, `GROUPED` for grouped experts, or
  `KERNEL_EFFICIENCY` of a kernel. Dense experts compute all experts. Plain attention computes the
  whole square of scores, and moves it `SQUARES` times through the memory.
- memory traffic: `PASSES_OF_STREAM` times the stream of a layer, weights once for each visit and
  pass, and state and gradients once for the optimizer.
- bubble: of the schedule, on the layers.
- collectives: weights gathered and their gradients summed over `fsdp`, gradients summed over
  `data`, activations over `tensor`, tokens to experts over `expert`, and the stream between stages;
  bytes over the links of a group, and the latency of each. Those of weights run beside the compute,
  but for the share of them that is exposed, and what is longer than the compute.
- memory: state, gradients, saved residuals by schedule and `remat`, cast and gathered weights, the
  logits of a chunk and the arrays of one layer, with `HOLES`.

`least_bytes` is another thing: what any program of a layout holds, the state and, where their norm
is needed before the first update, all gradients. A layout whose least does not fit never fits.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from nnx_pipeline.config._remat import HIDDEN, OUT, QUERY_KEY_VALUE, remat_of
from nnx_pipeline.config.config import Config
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.experiments.plan.layouts import Layout
from nnx_pipeline.lab._timing.cost import KERNEL_EFFICIENCY
from nnx_pipeline.lab._timing.devices import Device
from nnx_pipeline.lab._timing.precision import ProductPrecision, product_rate
from nnx_pipeline.ops._attention import BLOCK
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward, make_schedule
from nnx_pipeline.train._useful import HLO_DTYPES, PASSES, flops_of_layer, head_flops
from nnx_pipeline.train.step import bytes_of_parameter

PRODUCTS = 0.8  # of the peak
SQUARES = 8  # times that plain attention moves its scores, in all passes
PASSES_OF_STREAM = 40  # times that a layer moves its stream, in all passes
# Of the collectives of weights, where the compute is longer: on a TPU without settings the compiler
# leaves them beside little compute, on GPUs its scheduler hides them (benchmarks/results/plan.md).
EXPOSED_ON_TPU, EXPOSED_ON_GPU = 1.0, 0.1
GROUPED = 0.5  # of the peak, for products of grouped experts
# Of the rate of the memory, at which a TPU writes zeros and copies by the compiler's estimate.
FILLED, COPIED = 0.1, 0.18
KERNELS = 7  # weights of a layer, each gathered by itself
VALUES_OF_HIDDEN = 6  # arrays as large as the hidden units that remat=none keeps
HOLES = 1.1
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
BATCH_BYTES = 12  # of a token: tokens, targets and weights


class Predicted(NamedTuple):
    """Seconds of a step, its parts, and the bytes of a device."""

    seconds: float
    bytes: float
    least_bytes: float
    bubble_share: float
    waits: float


class _Loop(NamedTuple):
    """What a schedule says of a loop over microbatches."""

    bubble_share: float
    ticks: int
    kept_visits: int  # visits whose residuals are kept at once


@functools.cache
def _loop_of(schedule: str, stages: int, microbatches: int, repeats: int) -> _Loop:
    made = make_schedule(schedule, stages=stages, microbatches=microbatches, repeats=repeats)
    kept = made.ring_slots if isinstance(made, OneForwardOneBackward) else made.ticks
    return _Loop(made.bubble_share, made.ticks, kept)


@dataclass(frozen=True)
class Links:
    """The rates of collectives by the size of a group, without the place of each device.

    - `side`: devices along one dimension of a torus; of GPUs, those of a host.
    """

    device: Device
    side: int

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # one or two of them live as long as a plan
    def rate(self, members: int) -> float:
        device = self.device
        if not device.dimensions:
            crosses = members > self.side and device.network is not None
            return float(device.network or device.link) if crosses else device.link
        used = min(device.dimensions, max(1, math.ceil(math.log(members, max(2, self.side)))))
        ways = 2 if self.side % device.closes_at == 0 else 1
        return device.link / device.cores * ways * used

    def takes(self, size: float, members: int, number: float = 1.0) -> float:
        """Seconds in which each of `members` receives `size` bytes in `number` collectives."""
        if members < 2:
            return 0.0
        hops = members - 1
        if self.device.dimensions:
            hops = min(hops, self.device.dimensions * self.side)
        return size * (members - 1) / members / self.rate(members) + (
            number * hops * self.device.launch
        )

    def gathers(self, size: float, members: int, number: float, *, in_steps: bool) -> float:
        """As `takes`, for weights, with what a gather over a whole torus takes more.

        - `in_steps`: whether it is `gather_in_steps`, which says what the compiler does without.
        """
        if self.device.dimensions < 3 or members <= self.side**2:
            return self.takes(size, members, number)
        if in_steps:  # most of it over two of the three dimensions
            return 1.5 * self.takes(size, members, number) + size / COPIED / self.device.memory
        return self.takes(2 * size, members, number) + size / FILLED / self.device.memory


class Predictor:
    """Predicts the layouts of one config on one kind of device; see above.

    - `config`: of the preset, with what the user sets.
    - `device`, `links`: what computes.
    """

    def __init__(self, config: Config, device: Device, links: Links) -> None:
        self.model, self.train, self.device, self.links = config.model, config.train, device, links
        self.unrolled = config.pipeline.unrolled_layers
        model, train = self.model, self.train
        dtype = HLO_DTYPES[model.dtype]
        self.peak = product_rate(device, ProductPrecision((dtype, dtype))) or device.flops["bf16"]
        self.item, self.stored = ITEMSIZE[model.dtype], ITEMSIZE[model.param_dtype]
        self.copies = bytes_of_parameter(config) / self.stored - 1  # of the optimizer
        self.graded = ITEMSIZE[train.grad_dtype or model.param_dtype]
        total = count_parameters(model).total
        self.outside = (1 if model.tied_embeddings else 2) * model.vocab_size * model.embed_dim
        self.in_layers = total - self.outside
        self.of_experts = (
            model.num_pipeline_layers * model.num_experts * 3 * (model.embed_dim * model.mlp_dim)
        )
        self.tokens = train.global_batch * train.sequence_length
        self.flops = flops_of_layer(model, train.sequence_length)
        self.head = head_flops(model)

    def predict(self, layout: Layout) -> Predicted:
        mesh, loop = layout.mesh, self._loop(layout)
        tokens = self.tokens / (mesh.data * mesh.fsdp * mesh.expert)
        layers = self.model.num_layers / mesh.stage
        compute = tokens * layers * self._layer_seconds(layout)
        compute = max(compute, self._weight_reads(layout)) / (1 - loop.bubble_share)
        head = self.tokens * (PASSES + 1) * self.head / mesh.num_devices / self.peak / PRODUCTS
        weights = self._weight_collectives(layout)
        exposed = EXPOSED_ON_TPU if self.device.dimensions else EXPOSED_ON_GPU
        waits = exposed * weights + max(0.0, (1 - exposed) * weights - compute)
        waits += self._activation_collectives(layout, tokens, layers, loop)
        least = self._least(layout)
        optimizer = 2 * least / self.device.memory
        return Predicted(
            seconds=compute + head + waits + optimizer,
            bytes=least + HOLES * self._heap(layout, tokens, loop),
            least_bytes=least,
            bubble_share=loop.bubble_share,
            waits=waits,
        )

    def _loop(self, layout: Layout) -> _Loop:
        if layout.mesh.stage == 1 and layout.microbatches == 1:
            return _Loop(0.0, 1, 1)
        return _loop_of(layout.schedule, layout.mesh.stage, layout.microbatches, layout.repeats)

    def _layer_seconds(self, layout: Layout) -> float:
        """Of one token and one layer, all passes, on a device."""
        model, flops, remat = self.model, self.flops, remat_of(layout.remat)
        tensor, device = layout.mesh.tensor, self.device
        every = remat.saved is None
        saved = remat.saved or ()
        hidden = self._expert_rows(layout)
        feed_forward = flops.feed_forward * hidden
        projected, fed = float(PASSES), float(PASSES)  # passes of each
        if not every:
            projected += 0.6 * (QUERY_KEY_VALUE[0] not in saved) + 0.4 * (OUT not in saved)
            fed += 2 / 3 * (HIDDEN[0] not in saved)
        rate = GROUPED if layout.experts == "grouped" else PRODUCTS
        seconds = flops.projections * projected / PRODUCTS + feed_forward * fed / rate
        seconds /= tensor * self.peak
        passes, length = PASSES + (0 if every else 1), self.train.sequence_length
        if layout.attention == "flash":
            seconds += passes * flops.scores / tensor / (self.peak * KERNEL_EFFICIENCY)
        else:  # all pairs, in float32
            seconds += 2 * passes * flops.scores / tensor / (self.peak * PRODUCTS)
            moved = SQUARES * length * model.num_heads / tensor * 4
            seconds += moved / device.memory
        width = PASSES_OF_STREAM * model.embed_dim / (1 if tensor == 1 else 1.5)
        width += 6 * passes * self._hidden(layout) / tensor
        return seconds + width * self.item / device.memory

    def _expert_rows(self, layout: Layout) -> float:
        """How many rows of experts are computed for each that a token needs."""
        model = self.model
        if model.num_experts == 1 or layout.experts == "grouped":
            return 1.0
        if layout.experts == "capacity":
            return model.capacity_factor or 1.25
        return model.num_experts / model.num_experts_per_token

    def _stage_weights(self, layout: Layout) -> float:
        """Numbers of the weights of a stage that a device works with, whole along `fsdp`."""
        mesh = layout.mesh
        plain = (self.in_layers - self.of_experts) / (mesh.stage * mesh.tensor)
        return plain + self.of_experts / (mesh.stage * mesh.tensor * mesh.expert)

    def _weight_reads(self, layout: Layout) -> float:
        """Seconds in which the products read weights, in three passes of each microbatch."""
        passes = 4 * layout.microbatches
        return passes * self._stage_weights(layout) * self.item / self.device.memory

    def _weight_collectives(self, layout: Layout) -> float:
        mesh, links = layout.mesh, self.links
        weights = self._stage_weights(layout) * self.item
        visits = layout.microbatches
        gathers = {"use": 2 * visits, "step": 1, "prefetch": 2}[layout.gather]
        sums = {"use": visits, "step": visits, "prefetch": 1}[layout.gather]
        shards = mesh.fsdp * (mesh.data if layout.zero1 and layout.gather != "use" else 1)
        number = KERNELS * self.model.num_layers / mesh.stage
        in_steps = layout.experts in ("grouped", "capacity") and shards == mesh.num_devices
        seconds = links.gathers(gathers * weights, shards, gathers * number, in_steps=in_steps)
        seconds += links.takes(2 * sums * weights, mesh.fsdp, sums * number)  # in float32
        local = self._local(layout, shards=mesh.fsdp) * self.graded
        seconds += links.takes(2 * local, mesh.data, KERNELS)
        ends = self.outside / (mesh.tensor * mesh.stage) * self.item
        return seconds + links.takes(3 * ends, mesh.fsdp * mesh.expert, 3)

    def _activation_collectives(
        self, layout: Layout, tokens: float, layers: float, loop: _Loop
    ) -> float:
        mesh, links = layout.mesh, self.links
        stream, visits = tokens * self.model.embed_dim * self.item, layers * layout.microbatches
        again = 0 if layout.remat in ("minimal", "none") else 1
        passes = 4 + again
        seconds = links.takes(passes * layers * 2 * stream, mesh.tensor, passes * visits)
        if self.model.num_experts > 1:
            rows = self.model.num_experts_per_token if layout.experts == "grouped" else mesh.expert
            moved = (4 + 2 * again) * layers * rows * stream
            seconds += links.takes(moved, mesh.expert, (4 + 2 * again) * visits)
        if mesh.stage > 1:
            sent = 2 * loop.ticks * stream / layout.microbatches
            seconds += sent / self.links.rate(2) + 2 * loop.ticks * self.device.launch
        return seconds / (1 - loop.bubble_share if mesh.stage > 1 else 1)

    def _local(self, layout: Layout, *, shards: int) -> float:
        """Numbers of the weights that a device stores."""
        mesh = layout.mesh
        return (self.in_layers + self.outside) / (mesh.stage * shards * mesh.tensor * mesh.expert)

    def _least(self, layout: Layout) -> float:
        mesh = layout.mesh
        local = self._local(layout, shards=mesh.fsdp)
        parts = mesh.data if layout.zero1 else 1
        state = local * self.stored * (1 + self.copies / parts)
        state += BATCH_BYTES * self.tokens / mesh.num_devices
        needs_norm = self.train.clip_norm is not None
        return state + (local * self.graded / parts if needs_norm else 0.0)

    def _heap(self, layout: Layout, tokens: float, loop: _Loop) -> float:
        """What a device is expected to hold beside the state and the shards of gradients."""
        model, mesh = self.model, layout.mesh
        in_loop = mesh.stage > 1 or layout.microbatches > 1
        visit = tokens / layout.microbatches
        layers = model.num_layers / (mesh.stage * layout.repeats)
        kept = visit * layers * loop.kept_visits * self.item
        size = kept * (model.embed_dim + self._saved_width(layout))
        weights, local = self._stage_weights(layout), self._local(layout, shards=mesh.fsdp)
        if layout.zero1:
            size += local * self.graded * (1 - 1 / mesh.data)
        if layout.gather == "use":
            # A loop over layers casts the weights of each where it reads them, others all at once.
            in_scan = layers > self.unrolled if in_loop else layers > 1
            size += 0.0 if in_scan or self.item == self.stored else local * self.item
            size += 3 * weights / (model.num_layers / mesh.stage) * self.item
        else:
            parts = min(1.0, 2 / layout.repeats) if layout.gather == "prefetch" else 1.0
            size += weights * self.item * (parts + parts)
        chunks = max(1, self.train.loss_chunks // (layout.microbatches if in_loop else 1))
        logits = visit / chunks * model.vocab_size / mesh.tensor * (4 + self.item)
        return size + max(logits, self._one_layer(layout, visit))

    def _saved_width(self, layout: Layout) -> float:
        """Numbers that a layer keeps of a token beside its input."""
        model, remat, tensor = self.model, remat_of(layout.remat), layout.mesh.tensor
        heads = model.num_heads * model.head_dim
        keys = 2 * model.num_kv_heads * model.head_dim
        hidden = self._hidden(layout)
        if remat.saved is None:
            scores = (
                0 if layout.attention == "flash" else (model.num_heads * self.train.sequence_length)
            )
            rows = self._rows(layout) * model.embed_dim
            width = 2 * heads + keys + VALUES_OF_HIDDEN * hidden + 1.5 * scores
            return 6 * model.embed_dim + 2 * rows + width / tensor
        width = (heads + keys) / tensor if QUERY_KEY_VALUE[0] in remat.saved else 0.0
        width += model.embed_dim if OUT in remat.saved else 0.0
        return width + (2 * hidden / tensor if HIDDEN[0] in remat.saved else 0.0)

    def _hidden(self, layout: Layout) -> float:
        """Hidden units in a device's memory for each of its tokens."""
        return self._rows(layout) * self.model.mlp_dim

    def _rows(self, layout: Layout) -> float:
        """Rows of experts in a device's memory for each of its tokens. Grouped experts on several
        devices have room for the rows of all tokens, as a router may send them all to one."""
        rows = self._expert_rows(layout) * self.model.num_experts_per_token
        return rows * (layout.mesh.expert if layout.experts == "grouped" else 1)

    def _one_layer(self, layout: Layout, tokens: float) -> float:
        """What the backward pass of one layer works on."""
        model, train, tensor = self.model, self.train, layout.mesh.tensor
        # Dense experts are computed one at a time.
        hidden = model.mlp_dim if layout.experts == "dense" else self._hidden(layout)
        rows = self._rows(layout) if layout.experts == "grouped" else 1
        feed_forward = tokens * (4 * hidden / tensor + 3 * rows * model.embed_dim) * self.item
        if layout.attention == "flash":
            scores = 0.0
        else:
            block = min(BLOCK, train.sequence_length)
            square = block * train.sequence_length * model.num_heads / tensor
            scores = 3 * tokens / train.sequence_length * square * 4
        heads = 6 * tokens * model.num_heads * model.head_dim / tensor * self.item
        return max(feed_forward, heads + scores)

"""What the heap of a training step must hold at each moment that can be its peak."""

from nnx_pipeline.experiments.bound._sizes import FULL_WIDTH, Sizes
from nnx_pipeline.lab.attribution._floor import Moment, Term
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline.schedule import CircularSchedule, OneForwardOneBackward

ACTIVATION, SAVED, CARRIED = "activation", "saved residual", "scan carry"
TOTALS, GRADIENT, GATHERED = "gradient accumulator", "gradient", "gathered weight"
LOGITS, MOVED = "logits", "collective buffer"

LOSS, OPTIMIZER = "loss", "optimizer"
OF_ATTENTION = "backward pass of attention"
FEED_FORWARD = "backward pass of the feed-forward block"


def moments(sizes: Sizes) -> tuple[Moment, ...]:
    """The loss, the backward pass of attention and of the feed-forward block, and the optimizer.

    - `sizes`: of the step.

    The result of a matrix product counts where a later product reads it. An operation on single
    numbers costs nothing, and may write over what it reads: so the cotangents of scores and of
    hidden units take the place of these. A loop holds what all its layers keep until it ends, and
    its gradients from its first tick, so that every layer has the same peak.
    """
    if sizes.config.pipeline.schedule == "1f1b":
        always = [*_gathered(sizes), *_ring(sizes), *_accumulators(sizes, embedding=True)]
        loss, backward = [*always, *_arrived(sizes)], always
    else:
        stored = [*_gathered(sizes), *_saved(sizes)]
        loss = [*stored, *_results(sizes)]
        backward = [*stored, *_cotangents(sizes), *_accumulators(sizes, embedding=False)]
    block = [*backward, *_kernels(sizes), *_projections(sizes)]
    terms = {
        LOSS: [*loss, *_loss(sizes)],
        OF_ATTENTION: [*block, *_attention(sizes)],
        FEED_FORWARD: [*block, *_feed_forward(sizes)],
        OPTIMIZER: _gradients(sizes),
    }
    return tuple(
        Moment(name=name, terms=tuple(row for row in rows if row.bytes))
        for name, rows in terms.items()
    )


def term(name: str, size: int, role: str, formula: str) -> Term:
    """One row of a moment."""
    return Term(name=name, bytes=size, formula=formula, role=role)


def _gathered(sizes: Sizes) -> list[Term]:
    """The weights that are gathered once per step."""
    if not sizes.gathers_first:
        return []
    size = sizes.gathered_bytes(sizes.state.model.pipeline.layers)
    formula = "all weights of the stage, whole along fsdp and data, × bytes of dtype"
    return [term("gathered weights", size, GATHERED, formula)]


def _kernels(sizes: Sizes) -> list[Term]:
    """The weight that one product of the backward pass reads, and its gradient."""
    size = sizes.largest_kernel
    terms = [term("gradient of one kernel", size, GRADIENT, "as large as the gathered kernel")]
    if not sizes.config.pipeline.gathers_before_use:
        formula = "largest kernel of a layer (of one group of experts), whole, × bytes of dtype"
        terms.append(term("gathered kernel", size, GATHERED, formula))
    return terms


def _saved(sizes: Sizes) -> list[Term]:
    """The inputs of layers that the circular schedule keeps from the forward pass."""
    if not sizes.in_loop:
        count, per = sizes.layers, counted(sizes.layers, "layer")
    else:
        ticks = sizes.schedule.ticks
        count, per = (
            ticks * sizes.layers,
            f"{ticks} ticks × {counted(sizes.layers, 'layer')} of a visit",
        )
    formula = f"{per} × tokens × embed × bytes of dtype"
    return [term("saved inputs of layers", count * sizes.stream, SAVED, formula)]


def _ring(sizes: Sizes) -> list[Term]:
    """What 1F1B keeps of the visits that have no backward visit yet, and what travels."""
    assert isinstance(sizes.schedule, OneForwardOneBackward), "the other schedule has no ring"
    slots = sizes.schedule.ring_slots
    size = slots * sizes.layers * sizes.stream
    visits = f"{counted(slots, 'visit')} × {counted(sizes.layers, 'layer')}"
    formula = f"{visits} × tokens × embed × bytes of dtype"
    output = "tokens × embed × bytes of dtype"
    return [
        term("saved inputs of layers", size, SAVED, formula),
        term("outputs of the stages", sizes.stream, CARRIED, output),
    ]


def _arrived(sizes: Sizes) -> list[Term]:
    """The cotangents that 1F1B sends between stages, while the loss is computed."""
    if sizes.mesh.stage == 1:
        return []
    name, formula = "cotangents between stages", "tokens × embed × bytes of dtype"
    return [term(name, sizes.stream, CARRIED, formula)]


def _results(sizes: Sizes) -> list[Term]:
    """The outputs of the layers, which the final norm differentiates after the loss."""
    count = sizes.microbatches // sizes.mesh.stage
    formula = f"{counted(count, 'microbatch')} × tokens × embed × bytes of dtype"
    return [term("outputs of the layers", count * sizes.stream, SAVED, formula)]


def _cotangents(sizes: Sizes) -> list[Term]:
    """The buffers of the circular loop's backward pass, which are as large as the forward ones."""
    if not sizes.in_loop:
        return []
    schedule = sizes.schedule
    assert isinstance(schedule, CircularSchedule), "1F1B has no stream"
    count = schedule.stream_slots + schedule.queue_slots
    formula = f"{counted(count, 'microbatch')} (stream and queue) × tokens × embed × bytes of dtype"
    return [term("cotangents between stages", count * sizes.stream, CARRIED, formula)]


def _accumulators(sizes: Sizes, *, embedding: bool) -> list[Term]:
    """The gradients that add up, from the first backward visit to the last.

    - `embedding`: whether embedding and final norm have their gradients by then, beside the head.
    """
    model, config = sizes.state.model, sizes.config
    adds_up = config.pipeline.accumulates and sizes.in_loop
    width = sizes.grad_itemsize if adds_up else sizes.param_itemsize
    as_shards = sizes.gathers_first or not sizes.in_loop
    layout = sizes.optimizer_layout if as_shards else sizes.layout
    layers = width * sizes.numbers(model.pipeline.layers, layout)
    # A tied table has a gradient from either use until both are there.
    head = model.embedding if model.head is None else model.head
    whole = [head, model.embedding, model.norm] if embedding else [head]
    outside = sizes.grad_itemsize * sizes.numbers(whole, sizes.optimizer_layout)
    dtype = "grad_dtype" if adds_up else "param_dtype"
    of = "embedding, norm and head" if embedding else "head"
    return [
        term("gradients of the layers", layers, TOTALS, f"weights of the stage × bytes of {dtype}"),
        term(f"gradient of {of}", outside, TOTALS, "their weights × bytes of grad_dtype"),
    ]


def _gradients(sizes: Sizes) -> list[Term]:
    """The gradients of all weights, which the global norm reads before the first update."""
    size = sizes.grad_itemsize * sizes.numbers(sizes.state.model, sizes.optimizer_layout)
    formula = "all weights, sharded as the moments, × bytes of grad_dtype"
    return [term("gradients of all weights", size, GRADIENT, formula)]


def _loss(sizes: Sizes) -> list[Term]:
    """What one chunk of the cross-entropy reads and writes, and the gradients that it adds to."""
    head, embed, width = sizes.head, sizes.config.model.embed_dim, sizes.itemsize
    columns = embed * head.columns
    gathered = head.chunk_tokens * embed * width if head.tokens_move else 0
    kernel = columns * width if head.is_moved else 0
    return [
        term(
            "logits of one chunk",
            head.chunk_tokens * head.columns * width,
            LOGITS,
            f"{head.chunk_tokens} tokens × {head.columns} columns × bytes of dtype",
        ),
        term("tokens of one chunk", gathered, MOVED, "tokens × embed × dtype"),
        term("head of these columns", kernel, GATHERED, "embed × columns × bytes of dtype"),
        term("its gradient", columns * FULL_WIDTH, TOTALS, "embed × columns × 4 bytes"),
        term(
            "gradient of the outputs",
            head.device_tokens * embed * width,
            SAVED,
            f"{head.device_tokens} tokens × embed × bytes of dtype",
        ),
    ]


def _projections(sizes: Sizes) -> list[Term]:
    """What attention has computed again, until its own backward pass is over."""
    model = sizes.config.model
    heads = 2 * sizes.heads + 2 * sizes.kv_heads  # query and result, key and value
    size = sizes.tokens * heads * model.head_dim * sizes.itemsize
    normaliser = sizes.tokens * sizes.heads * FULL_WIDTH
    formula = "tokens × (2 · heads + 2 · kv heads) × head_dim × bytes of dtype"
    return [
        term("query, key, value, result", size, ACTIVATION, formula),
        term("softmax denominators", normaliser, ACTIVATION, "tokens × heads × 4 bytes"),
        term("cotangent of the layer", sizes.stream, ACTIVATION, "tokens × embed × dtype"),
    ]


def _attention(sizes: Sizes) -> list[Term]:
    """The scores of one block of queries, and the cotangent of what the heads give."""
    length, head_dim = sizes.config.train.sequence_length, sizes.config.model.head_dim
    scores = sizes.sequences * sizes.heads * sizes.block * length * sizes.itemsize
    result = sizes.tokens * sizes.heads * head_dim * sizes.itemsize
    formula = f"sequences × heads × {sizes.block} queries × {length} keys × bytes of dtype"
    return [
        term("scores of one block", scores, ACTIVATION, formula),
        term("cotangent of the result", result, ACTIVATION, "tokens × heads × head_dim × dtype"),
    ]


def _feed_forward(sizes: Sizes) -> list[Term]:
    """Both halves of the hidden units, computed again, which their cotangents replace."""
    of = "mlp" if sizes.config.model.num_experts == 1 else f"{counted(sizes.group, 'expert')} × mlp"
    formula = f"2 (gate and up) × tokens × {of} × bytes of dtype"
    terms = [
        term("hidden units", 2 * sizes.hidden, ACTIVATION, formula),
        term("stream after attention", sizes.stream, ACTIVATION, "tokens × embed × dtype"),
    ]
    wide = sizes.expert_tokens * sizes.config.model.embed_dim * sizes.itemsize
    if sizes.local_experts > sizes.group:
        what = "tokens of the experts × embed × bytes of dtype, added up over groups"
        terms.append(term("cotangent of the groups", wide, CARRIED, what))
    if sizes.expert_tokens > sizes.tokens:
        what = "tokens of all devices along expert × embed × bytes of dtype, and their cotangent"
        terms.append(term("tokens of the experts", 2 * wide, MOVED, what))
    return terms

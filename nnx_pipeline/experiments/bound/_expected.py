"""What the TPU compiler is expected to hold at each moment, which is more than a program must.

Each row has a reason, and was seen in the buffers of programs that are not those on the page of
`benchmarks/floor.py` (libtpu 0.0.42.1). The figures that follow from no config are constants here.
"""

from nnx_pipeline.experiments.bound._moments import (
    ACTIVATION,
    CARRIED,
    FEED_FORWARD,
    GRADIENT,
    LOGITS,
    LOSS,
    MOVED,
    OF_ATTENTION,
    OPTIMIZER,
    TOTALS,
    term,
)
from nnx_pipeline.experiments.bound._sizes import Sizes
from nnx_pipeline.lab.attribution._floor import Moment, Term
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline.stage._repeats import SEPARATE_REPEATS

# An array is not moved once it is placed, so that there are holes between arrays: medians of the
# programs that were looked at, as shares of their arrays. There are more where the operations of
# each layer are written out, which gives more arrays, and few where arrays come and go that are too
# large for the on-chip memory: they are placed first, and the others find room around them.
HOLES, HOLES_WRITTEN_OUT, HOLES_WITH_LARGE = 0.1, 0.2, 0.02
# Every tuple (the state of a loop, what an asynchronous copy gives) has a table of pointers. The
# tables stand above all arrays, from the first operation to the last.
_TABLE = 16 * 2**10  # bytes
TABLES, TABLES_PER_LAYER = 140, 105  # of a step, and more for each layer that is written out
# What lives within one iteration may be on-chip. What a loop carries was seen in the heap.
IN_LOOP = (ACTIVATION, LOGITS, MOVED, GRADIENT)
OF_CHUNK = "its gradient"
HIDDEN, D_HIDDEN = "hidden units", "cotangents of hidden units"
PAIRS = (HIDDEN, D_HIDDEN, "tokens of the experts")  # rows of two arrays


def expected(sizes: Sizes, moments: tuple[Moment, ...], on_chip: int) -> tuple[Moment, ...]:
    """What the heap is expected to hold at each moment; the last rows are of no array.

    - `sizes`: of the step.
    - `moments`: what the heap must hold at each of them.
    - `on_chip`: the bytes that the compiler gives to arrays in the on-chip memory of the device.
    """
    visit = [*_casts(sizes), *_gradients_of_a_visit(sizes), *_in_flight(sizes)]
    more = {
        LOSS: [*_casts(sizes), *_logits_again(sizes), *_inputs_of_a_visit(sizes)],
        OF_ATTENTION: [*visit, *_scores_again(sizes)],
        FEED_FORWARD: [*visit, *_hidden_again(sizes)],
        OPTIMIZER: [],
    }
    filled = []
    for moment in moments:
        rows = [*_persistent(sizes, moment), *more[moment.name]]
        rows += _on_chip(rows, on_chip)
        rows += _no_arrays(sizes, rows, on_chip)
        filled.append(Moment(name=moment.name, terms=tuple(row for row in rows if row.bytes)))
    return tuple(filled)


def _persistent(sizes: Sizes, moment: Moment) -> list[Term]:
    """The rows of the floor, without accumulators where there is one visit to add up.

    A loop of one turn is no loop to the compiler: what the visit computes is the gradient.
    """
    is_single = sizes.in_loop and sizes.microbatches * sizes.config.pipeline.num_repeats == 1
    if moment.name == OPTIMIZER or not is_single:
        return list(moment.terms)
    return [row for row in moment.terms if row.role != TOTALS or row.name == OF_CHUNK]


def _casts(sizes: Sizes) -> list[Term]:
    """Stored weights in the dtype of products, all cast before the loop that uses them."""
    model = sizes.config.model
    if sizes.gathers_first:
        return []  # each is cast as it is gathered
    if model.dtype == model.param_dtype:
        return []
    size = sizes.itemsize * sizes.numbers(sizes.state.model.pipeline.layers, sizes.layout)
    formula = "weights of the stage × bytes of dtype, cast once before the loop"
    return [term("cast weights", size, "parameter cast", formula)]


def _logits_again(sizes: Sizes) -> list[Term]:
    """The gradient of the logits, written beside them for the two products that read it."""
    size = sizes.head.chunk_tokens * sizes.head.columns * sizes.itemsize
    formula = "as the logits, in place of which it could be written"
    return [term("gradient of the logits", size, LOGITS, formula)]


def _inputs_of_a_visit(sizes: Sizes) -> list[Term]:
    """Of several layers written out, 1F1B puts the inputs into its ring when all are computed."""
    if not _written_out(sizes) or sizes.config.pipeline.schedule != "1f1b" or sizes.layers == 1:
        return []
    formula = f"{counted(sizes.layers, 'layer')} × tokens × embed × bytes of dtype"
    return [term("inputs of one visit", sizes.layers * sizes.stream, ACTIVATION, formula)]


def _gradients_of_a_visit(sizes: Sizes) -> list[Term]:
    """The gradients of a layer, besides the accumulators; of all layers of a stage where a scan
    stacks them."""
    if not sizes.in_loop:
        return []
    layers, repeats = sizes.state.model.pipeline.layers, sizes.config.pipeline.num_repeats
    stored = sizes.itemsize * sizes.numbers(layers, sizes.layout)
    size = (sizes.gathered_bytes(layers) if sizes.gathers_first else stored) // repeats
    what = "as they are gathered" if sizes.gathers_first else "as they are sharded"
    # Of one visit they are the gradients of the step.
    several = sizes.microbatches * repeats > 1
    adds = several and repeats <= SEPARATE_REPEATS and not sizes.gathers_first
    number = 1 if _written_out(sizes) or adds else sizes.layers
    formula = f"weights of {counted(number, 'layer')}, {what}, × bytes of dtype"
    return [term("gradients of one visit", size * number // sizes.layers, TOTALS, formula)]


def _in_flight(sizes: Sizes) -> list[Term]:
    """What a tick sends and receives, and what it selects from that and its input."""
    if sizes.mesh.stage == 1:
        return []
    formula = "3 (sent, received, selected) × tokens × embed × bytes of dtype"
    return [term("in flight between stages", 3 * sizes.stream, CARRIED, formula)]


def _scores_again(sizes: Sizes) -> list[Term]:
    """The cotangent of the scores of a block, beside what the softmax made of them."""
    length = sizes.config.train.sequence_length
    size = sizes.sequences * sizes.heads * sizes.block * length * sizes.itemsize
    formula = "as the scores, in place of which it could be written"
    return [term("cotangent of the scores", size, ACTIVATION, formula)]


def _hidden_again(sizes: Sizes) -> list[Term]:
    """The cotangents of gate and up, which two products each read after they are complete."""
    formula = "as both hidden units, in place of which they could be written"
    return [term(D_HIDDEN, 2 * sizes.hidden, ACTIVATION, formula)]


def _on_chip(rows: list[Term], limit: int) -> list[Term]:
    """What is on-chip instead: arrays that live within a turn of a loop, except the largest.

    The largest is what a product writes and the next fusion reads; it was seen in the heap, and
    what that fusion writes on-chip, if it fits.
    """
    rows = sorted((row for row in rows if row.role in IN_LOOP), key=lambda row: row.bytes)
    size = min(int(limit / (1 + HOLES)), sum(_fitting(row, limit) for row in rows[:-1]))
    formula = f"arrays of one turn of a loop but the largest, up to {limit // 2**20} MiB with holes"
    return [term("on-chip instead", -size, "other memory space", formula)]


def _fitting(row: Term, limit: int) -> int:
    """The bytes of those arrays of a row that are not too large for the on-chip memory."""
    return row.bytes if row.bytes <= (2 * limit if row.name in PAIRS else limit) else 0


def _no_arrays(sizes: Sizes, rows: list[Term], on_chip: int) -> list[Term]:
    """What the heap is larger than its arrays."""
    arrays = sum(row.bytes for row in rows)
    out = sizes.layers if _written_out(sizes) else 0
    share = HOLES_WRITTEN_OUT if out else HOLES
    if any(row.role in IN_LOOP and not _fitting(row, on_chip) for row in rows if row.bytes > 0):
        share = HOLES_WITH_LARGE
    tables = TABLES + TABLES_PER_LAYER * out
    per = f"({TABLES} + {TABLES_PER_LAYER} × {counted(out, 'layer')} written out)"
    return [
        term("holes", int(share * arrays), "fragmentation", f"{share:.0%} of the arrays"),
        term("tables of tuples", tables * _TABLE, "fragmentation", f"{per} × {_TABLE} bytes"),
    ]


def _written_out(sizes: Sizes) -> bool:
    """Whether a tick has the operations of each layer, instead of a loop over them."""
    return sizes.in_loop and sizes.layers <= sizes.config.pipeline.unrolled_layers

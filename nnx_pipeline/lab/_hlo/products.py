"""Counts the floating-point operations of one instruction: 2·m·n·k of a matrix product. A product
is a dot, a convolution (the TPU compiler writes every product as one), a library call whose
attributes say what it multiplies, or a kernel written by hand, by what it states."""

import dataclasses
import math
import re
from typing import NamedTuple

from nnx_pipeline.lab._hlo.module import Computation, Instruction, Shape
from nnx_pipeline.lab._hlo.opcodes import PRODUCTS, is_known, plain

# Library calls that are no product, though two or more of their operands may look like matrices.
_NO_PRODUCT = re.compile(
    r"AllocateBuffer|AsyncCollective|ConcatBitcast|MoveTo|Sharding|SPMD|TriangularSolve|"
    r"__cub\$|blas_|lapack_|"
    r"X64Combine|X64Split|annotate_device_placement|cu_threefry2x32|cusolver|xla_ffi_python|xla_python"
)
# Kernels written by hand in Pallas, Mosaic or Triton: they may multiply any operand, even by
# itself, so that a single operand is enough.
_HAND_WRITTEN = re.compile(r"tpu_custom_call|mosaic|triton")
# Inside a text quotes are escaped, by backslashes or, in an attribute of MLIR, as \22.
_OWN_COST = re.compile(r'(flops|bytes_accessed)(?:\\22|\\*")\s*:\s*(?:\\22|\\*")?(\d+)')
# What is said of a kernel where it is called: a frontend attribute that bears its name.
_SAID_OF_IT = re.compile(r'(\w+)="flops=(\d+) bytes_accessed=(\d+)"')
# Where input, kernel and output of the forward convolution are: operand 0 or 1, or the result (-1).
_CUDNN_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, -1),
    "__cudnn$convForwardGraph": (0, 1, -1),
    "__cudnn$convBiasActivationForward": (0, 1, -1),
    "__cudnn$convBackwardFilter": (0, -1, 1),
    "__cudnn$convBackwardInput": (-1, 1, 0),
}
# Matrix products of scores in cuDNN's attention: scores and results; the scores again, the gradient
# of the weights, and those of queries, keys and values.
_CUDNN_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


def flops_of(computation: Computation, instruction: Instruction) -> int | str:
    """Operations of one instruction, 0 if it multiplies no matrices, or why they are not known."""
    if not is_known(instruction.opcode):
        matrices = _matrices(computation, instruction)
        return "an opcode that is not known, and two matrices" if matrices >= 2 else 0
    opcode = plain(instruction.opcode)
    if opcode not in (*PRODUCTS, "custom-call") or instruction.opcode.endswith(
        ("-update", "-done")
    ):
        return 0
    if instruction.opcode.endswith("-start"):  # its result holds the operands, then the product
        read = sum(len(shapes) for shapes in computation.operand_shapes(instruction))
        made = instruction.shapes[read:]
        instruction = dataclasses.replace(instruction, opcode=opcode, shapes=made)
    if opcode == "custom-call":
        return _library_flops(computation, instruction)
    lhs, rhs, *_ = (shapes[0] for shapes in computation.operand_shapes(instruction))
    result = instruction.shapes[0]
    if opcode == "convolution":
        return _convolution_flops(lhs, rhs, result, instruction)
    contracting = instruction.integers("lhs_contracting_dims")
    ragged = instruction.integers("lhs_ragged_dims")
    # A ragged contracted dimension is divided among the groups, and the result has one matrix per
    # group: all groups together take the operations of one dense product.
    groups = result.dims[0] if ragged and set(ragged) <= set(contracting) else 1
    return _product_flops(lhs, result, contracting) // groups


def _product_flops(lhs: Shape, result: Shape, contracting: tuple[int, ...]) -> int:
    flops = _per_pair(result) * result.elements
    for dimension in contracting:
        flops *= lhs.dims[dimension]
    return flops


def _per_pair(result: Shape) -> int:
    # A complex product and sum take four times the operations.
    return 8 if result.dtype in ("c64", "c128") else 2


def _convolution_flops(
    lhs: Shape, kernel: Shape, result: Shape, instruction: Instruction
) -> int | str:
    """2 · batch · output features · features read per output · kernel positions on real elements.
    The sizes of the result and the kernel already account for feature and batch groups."""
    text = instruction.attributes.get("dim_labels", "")
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", text)
    if labels is None:
        return f"a convolution with dim_labels={text}"
    of_lhs, of_kernel, of_result = labels.groups()
    flops = _per_pair(result) * result.dims[of_result.index("b")]
    flops *= result.dims[of_result.index("f")]
    flops *= kernel.dims[of_kernel.index("i")]

    window = instruction.window

    def field(name: str, at: int, default: int = 1) -> int:
        written = window.get(name)  # of a padding, `low_high`, the low one counts
        return int(written.split("x")[at].partition("_")[0]) if written else default

    for at in range(len(of_result) - 2):
        flops *= _real_positions(
            lhs.dims[of_lhs.index(str(at))],
            kernel.dims[of_kernel.index(str(at))],
            result.dims[of_result.index(str(at))],
            _Window(
                stride=field("stride", at),
                pad_low=field("pad", at, 0),
                lhs_dilate=field("lhs_dilate", at),
                rhs_dilate=field("rhs_dilate", at),
            ),
        )
    return flops


class _Window(NamedTuple):
    stride: int
    pad_low: int
    lhs_dilate: int
    rhs_dilate: int


def _real_positions(lhs: int, kernel: int, result: int, window: _Window) -> int:
    """Counts the pairs (output, kernel position) of one dimension that read an element: output `o`
    and position `k` read `o·stride + k·rhs_dilate - pad_low` of the input, whose elements are
    `lhs_dilate` apart; others are padding or gaps. Reversing the kernel changes no count."""
    stride, pad_low, lhs_dilate, rhs_dilate = window
    count = 0
    last = (lhs - 1) * lhs_dilate
    for position in range(kernel):
        offset = position * rhs_dilate - pad_low
        first_output = max(0, -(offset // stride))  # the first that reads no position below 0
        last_output = min(result - 1, (last - offset) // stride)
        # Outputs that read an element are a fixed distance apart, at most lhs_dilate: the first of
        # them is among the first lhs_dilate outputs, and the others need no search.
        meets = [
            output
            for output in range(first_output, min(first_output + lhs_dilate, last_output + 1))
            if (output * stride + offset) % lhs_dilate == 0
        ]
        distance = lhs_dilate // math.gcd(stride, lhs_dilate)
        count += (last_output - meets[0]) // distance + 1 if meets else 0
    return count


def _library_flops(computation: Computation, call: Instruction) -> int | str:
    """Operations of a library call, 0 if it is no product, or why they are not known."""
    target = call.target
    operands = [shapes[0] for shapes in computation.operand_shapes(call) if shapes]
    flops: int | str | None = None
    if target.startswith("__cublas$"):
        flops = _cublas_flops(operands[0], call)
    elif target == "__onednn$matmul":
        transposed = re.search(r"transpose_a\W+true", call.config)
        contracting = len(operands[0].dims) - (2 if transposed else 1)
        flops = _product_flops(operands[0], call.shapes[0], (contracting,))
    elif target in _CUDNN_CONVOLUTIONS:
        arrays = [*operands[:2], call.shapes[0]]
        lhs, kernel, result = (arrays[place] for place in _CUDNN_CONVOLUTIONS[target])
        flops = _convolution_flops(lhs, kernel, result, call)
    elif target in _CUDNN_ATTENTION:
        flops = _cudnn_attention_flops(operands[:2], call, _CUDNN_ATTENTION[target])
    elif "ragged_dot_tiling" in call.attributes.get("frontend_attributes", ""):
        flops = _tpu_ragged_dot_flops(operands, call)
    elif is_hand_written(call):
        flops = stated_cost(call).get("flops", "a kernel written by hand that states no operations")
    elif _matrices(computation, call) < 2 or _NO_PRODUCT.match(target):
        return 0
    return "a library call that does not say what it multiplies" if flops is None else flops


def is_hand_written(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel written by hand, in Pallas, Mosaic or Triton. The TPU
    compiler's own kernel that counts the rows of a grouped product is none."""
    if instruction.op_name.endswith("ragged-dot-metadata"):
        return False
    return bool(_HAND_WRITTEN.search(instruction.target))


def stated_cost(kernel: Instruction) -> dict[str, int]:
    """What a kernel written by hand says of its own cost: `flops` and `bytes_accessed`, if it does,
    on a TPU by its `cost_estimate`, for NVIDIA in its `metadata`. A caller's
    `set_xla_metadata(NAME="flops=1 bytes_accessed=2")` wins for kernels whose name begins with
    NAME.
    """
    for name, *digits in _SAID_OF_IT.findall(kernel.attributes.get("frontend_attributes", "")):
        if kernel.name.startswith(name):
            return dict(zip(("flops", "bytes_accessed"), map(int, digits), strict=True))
    return {name: int(digits) for name, digits in _OWN_COST.findall(kernel.config)}


def _matrices(computation: Computation, instruction: Instruction) -> int:
    arrays = (shapes[0] for shapes in computation.operand_shapes(instruction) if shapes)
    return sum(len(shape.dims) >= 2 for shape in arrays)


def _cublas_flops(lhs: Shape, call: Instruction) -> int | None:
    """Operations of a cuBLAS call; None for a ragged one or without contracting dimensions."""
    contracting = re.search(r"lhs_contracting_dimensions\W+\[([^\]]*)\]", call.config)
    if contracting is None or "ragged" in call.config:
        return None
    dims = tuple(int(digits) for digits in re.findall(r"\d+", contracting[1]))
    return _product_flops(lhs, call.shapes[0], dims)


def _cudnn_attention_flops(read: list[Shape], call: Instruction, products: int) -> int | None:
    """Operations of cuDNN's attention for the pairs of a query and a key that it may read: of
    queries and keys (`read`: `[batch, sequence, heads, head_dim]`) so many products of all scores.
    None for a mask other than none, or a causal one of one sequence, with a window or without."""
    mask = re.search(r"mask_type\W+(\w+)", call.config)
    window = re.search(r"sliding_window_length\W+(\d+)", call.config)
    if mask is None or any(len(shape.dims) != 4 for shape in read):
        return None
    batch, queries, heads, head_dim = read[0].dims
    keys, width = read[1].dims[1], int(window[1]) if window else 0
    if mask[1] == "NO_MASK" and not width:
        pairs = queries * keys
    elif mask[1] == "CAUSAL" and queries == keys:
        width = min(width or keys, keys)
        pairs = width * (width + 1) // 2 + (queries - width) * width
    else:
        return None
    return 2 * products * batch * heads * pairs * head_dim


def _tpu_ragged_dot_flops(operands: list[Shape], call: Instruction) -> int | None:
    """Operations of the TPU compiler's grouped product: [m, k] by [groups, k, n] gives [m, n]. The
    gradient of its weights is [m, k] by [m, n], which gives [groups, k, n]."""
    lhs, rhs = operands[-2:]
    result = call.shapes[0]
    if (len(lhs.dims), len(rhs.dims), len(result.dims)) not in ((2, 3, 2), (2, 2, 3)):
        return None
    return 2 * lhs.elements * result.dims[-1]

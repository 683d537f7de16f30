"""Figures of a compiled program that its compiler does not give: what runs how often per step.

XLA's own cost analysis counts the body of a loop once and knows nothing of library calls. Here
everything is multiplied by the trip counts of the loops around it. All figures are per device and
per call of the program (one step of a train step); None means that a figure cannot be known from
the text, for instance because it stands in a loop whose end depends on data.
"""

from __future__ import annotations

import math
import re

from nnx_pipeline.lab.hlo import Computation, Instruction, Module, Shape
from nnx_pipeline.lab.hlo_loops import PASSES_ON, executions

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# Library calls that multiply no two matrices, although two or more of their operands may look so.
_NO_PRODUCT = re.compile(
    r"AllocateBuffer|AsyncCollective|MoveTo|Sharding|SPMD|TriangularSolve|__cub\$|blas_|lapack_|"
    r"annotate_device_placement|cu_threefry2x32|cusolver|xla_ffi_python|xla_python"
)
# Where input, kernel and output of the forward convolution stand: operand 0, operand 1 or result.
_CUDNN_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, -1),
    "__cudnn$convForwardGraph": (0, 1, -1),
    "__cudnn$convBiasActivationForward": (0, 1, -1),
    "__cudnn$convBackwardFilter": (0, -1, 1),
    "__cudnn$convBackwardInput": (-1, 1, 0),
}


def matmul_flops(module: Module) -> int | None:
    """Floating-point operations per device and step: 2·m·n·k of every matrix product, summed.

    Products inside fusions, loops and library calls are counted, convolutions by the kernel
    positions that meet a real element (the TPU compiler writes every product as a convolution). A
    product with a vector that the compiler turned into multiply and add is no matrix product any
    more. A grouped product that the compiler expanded densely counts as what it became.

    None: a product stands in a loop of unknown length, or in a library call or hand-written kernel
    that the text does not describe.
    """
    total = 0
    for name, times in executions(module).items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            flops = _flops(computation, instruction)
            if flops is None or (flops and times is None):
                return None
            total += flops * (times or 0)
    return total


def _flops(computation: Computation, instruction: Instruction) -> int | None:
    """Operations of one instruction: 0 if it multiplies no matrices, None if that is unknown."""
    if instruction.opcode == "custom-call":
        return _library_flops(computation, instruction)
    if instruction.opcode not in ("dot", "scaled-dot", "ragged-dot", "convolution"):
        return 0
    lhs, rhs, *_ = (shapes[0] for shapes in computation.operand_shapes(instruction))
    result = instruction.shapes[0]
    if instruction.opcode == "convolution":
        return _convolution_flops(lhs, rhs, result, instruction)
    contracting = instruction.integers("lhs_contracting_dims")
    ragged = instruction.integers("lhs_ragged_dims")
    # A ragged contracted dimension is shared out among the groups, and the result has one matrix
    # per group: all groups together do the work of one whole product.
    groups = result.dims[0] if ragged and set(ragged) <= set(contracting) else 1
    return _product_flops(lhs, result, contracting) // groups


def _product_flops(lhs: Shape, result: Shape, contracting: tuple[int, ...]) -> int:
    flops = 2 * result.elements
    for dimension in contracting:
        flops *= lhs.dims[dimension]
    return flops


def _convolution_flops(lhs: Shape, kernel: Shape, result: Shape, instruction: Instruction) -> int:
    """2 · batch · output features · features read per output · kernel positions on real elements.

    The sizes of result and kernel hold what feature and batch groups leave of each.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])
    assert labels is not None, f"cannot read dim_labels of convolution {instruction.name}"
    of_lhs, of_kernel, of_result = labels.groups()
    flops = 2 * result.dims[of_result.index("b")] * result.dims[of_result.index("f")]
    flops *= kernel.dims[of_kernel.index("i")]
    window = instruction.window
    for dimension in range(len(of_result) - 2):
        label = str(dimension)

        def field(name: str, default: str, dimension: int = dimension) -> str:
            return window[name].split("x")[dimension] if name in window else default

        flops *= _real_positions(
            lhs.dims[of_lhs.index(label)],
            kernel.dims[of_kernel.index(label)],
            result.dims[of_result.index(label)],
            stride=int(field("stride", "1")),
            pad_low=int(field("pad", "0_0").split("_")[0]),
            lhs_dilate=int(field("lhs_dilate", "1")),
            rhs_dilate=int(field("rhs_dilate", "1")),
        )
    return flops


def _real_positions(
    lhs: int,
    kernel: int,
    result: int,
    *,
    stride: int,
    pad_low: int,
    lhs_dilate: int,
    rhs_dilate: int,
) -> int:
    """Pairs (output, kernel position) of one dimension that read neither padding nor a gap.

    That output `o` reads at kernel position `k` the place `o·stride + k·rhs_dilate - pad_low` of
    the input, whose elements stand `lhs_dilate` apart. (Reversing the kernel changes no count.)
    """
    count = 0
    last = (lhs - 1) * lhs_dilate
    for position in range(kernel):
        offset = position * rhs_dilate - pad_low
        first_output = max(0, -(offset // stride))  # the first whose place is not below 0
        last_output = min(result - 1, (last - offset) // stride)
        # Outputs that meet an element follow each other at a fixed distance below lhs_dilate.
        meets = [
            output
            for output in range(first_output, min(first_output + lhs_dilate, last_output + 1))
            if (output * stride + offset) % lhs_dilate == 0
        ]
        distance = lhs_dilate // math.gcd(stride, lhs_dilate)
        count += (last_output - meets[0]) // distance + 1 if meets else 0
    return count


def _library_flops(computation: Computation, call: Instruction) -> int | None:
    """Operations of a library call or hand-written kernel: 0 if harmless, None if unreadable."""
    target = call.attributes.get("custom_call_target", "").strip('"')
    operands = [shapes[0] for shapes in computation.operand_shapes(call) if shapes]
    if target.startswith("__cublas$"):
        return _cublas_flops(operands[0], call)
    if target == "__onednn$matmul":
        transposed = re.search(r"transpose_a\W+true", call.attributes.get("backend_config", ""))
        contracting = len(operands[0].dims) - (2 if transposed else 1)
        return _product_flops(operands[0], call.shapes[0], (contracting,))
    if target in _CUDNN_CONVOLUTIONS:
        arrays = [*operands[:2], call.shapes[0]]
        lhs, kernel, result = (arrays[place] for place in _CUDNN_CONVOLUTIONS[target])
        return _convolution_flops(lhs, kernel, result, call)
    if "ragged_dot_tiling" in call.attributes.get("frontend_attributes", ""):
        return _tpu_ragged_dot_flops(operands, call)
    matrices = sum(len(shape.dims) >= 2 for shape in operands)
    return 0 if matrices < 2 or _NO_PRODUCT.match(target) else None


def _cublas_flops(lhs: Shape, call: Instruction) -> int | None:
    config = call.attributes.get("backend_config", "")
    contracting = re.search(r"lhs_contracting_dimensions\W+\[([^\]]*)\]", config)
    if contracting is None or "ragged" in config:
        return None
    dims = tuple(int(digits) for digits in re.findall(r"\d+", contracting.group(1)))
    return _product_flops(lhs, call.shapes[0], dims)


def _tpu_ragged_dot_flops(operands: list[Shape], call: Instruction) -> int | None:
    """The TPU compiler's own grouped product: [m, k] by [groups, k, n] gives [m, n].

    The gradient of the weights is [m, k] by [m, n], which gives [groups, k, n].
    """
    lhs, rhs = operands[-2:]
    result = call.shapes[0]
    if (len(lhs.dims), len(rhs.dims), len(result.dims)) not in ((2, 3, 2), (2, 2, 3)):
        return None
    return 2 * lhs.elements * result.dims[-1]


# ---- collectives -----------------------------------------------------------------------------


def collective_counts(module: Module) -> dict[str, dict[str, int | None]]:
    """For each kind of collective: `ops` in the program, `executed` and `bytes` per step.

    `bytes` are those of the results, per device: the gathered array of an all-gather, the piece
    that a reduce-scatter leaves. A start and its done count once, by the done. A fusion of the
    TPU compiler around an all-reduce and a slice of it is a reduce-scatter; an all-reduce whose
    result is stored whole and sliced later is an all-reduce. `ragged-all-to-all` counts as
    all-to-all; collective-broadcast and send/recv are left out. `executed` and `bytes` are None
    where one stands in a loop of unknown length.
    """
    counts: dict[str, dict[str, int | None]] = {
        kind: {"ops": 0, "executed": 0, "bytes": 0} for kind in COLLECTIVES
    }
    fused = {
        callee
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for callee in instruction.called()
    }
    steps_seen: set[tuple[str, str]] = set()
    for name, times in executions(module).items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            kind, size = _collective(computation, instruction, in_fusion=name in fused)
            if kind and not _is_repeated_step(instruction, steps_seen):
                _add(counts[kind], times, size)
    return counts


def _add(count: dict[str, int | None], times: int | None, size: int) -> None:
    for field, per_run in (("executed", 1), ("bytes", size)):
        before = count[field]
        count[field] = None if before is None or times is None else before + times * per_run
    count["ops"] = (count["ops"] or 0) + 1


def _collective(
    computation: Computation, instruction: Instruction, *, in_fusion: bool
) -> tuple[str, int]:
    """Kind and result bytes of a collective; ("", 0) for any other instruction and for a start."""
    kind = instruction.opcode.removesuffix("-done").removeprefix("ragged-")
    if kind not in COLLECTIVES:
        return "", 0
    if kind == "all-reduce" and in_fusion:
        pieces = _slices(computation, instruction)
        if pieces:
            return "reduce-scatter", sum(piece.result_bytes for piece in pieces)
    return kind, instruction.result_bytes


def _slices(computation: Computation, instruction: Instruction) -> list[Instruction] | None:
    """The dynamic slices that are all that is used of a result, None if more of it is used."""
    users = computation.users[instruction.name]
    found: list[Instruction] = []
    for user in users:
        if user.opcode == "dynamic-slice":
            found.append(user)
        elif user.opcode in (*PASSES_ON, "get-tuple-element", "transpose", "convert"):
            behind = _slices(computation, user)
            if behind is None:
                return None
            found += behind
        else:
            return None
    return found if users else None


def _is_repeated_step(instruction: Instruction, seen: set[tuple[str, str]]) -> bool:
    """Whether this is a further piece of a collective that was counted already.

    The TPU compiler may run one collective beside other work in several fusions (start, steps,
    done). Each holds a copy of it, with the same chain and channel.
    """
    chain = re.search(r'chain_id="(\d+)"', instruction.attributes.get("frontend_attributes", ""))
    if chain is None:
        return False
    key = (chain.group(1), instruction.attributes.get("channel_id", ""))
    repeated = key in seen
    seen.add(key)
    return repeated

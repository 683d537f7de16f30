"""What is read from optimized HLO text: hand-written snippets, and programs really compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_texts import matmul_flops
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline.lab._hlo import cost as hlo_cost
from nnx_pipeline.lab._hlo import loops as hlo_loops
from nnx_pipeline.lab._hlo import module as hlo
from nnx_pipeline.lab._hlo.loops import branch_shares
from nnx_pipeline.lab.compile import _compiler as heap
from nnx_pipeline.lab.compile import _gpus

# ---- snippets --------------------------------------------------------------------------------


def module_of(entry: str, *computations: str) -> hlo.Module:
    """A module from the lines of its entry and whole further computations."""
    text = "HloModule test\n\n" + "\n\n".join(computations)
    return hlo.parse(f"{text}\n\nENTRY %main (p: s32[]) -> s32[] {{\n{entry}\n}}\n")


def only(module: hlo.Module, name: str) -> hlo.Instruction:
    return module.computations[module.entry].instructions[name]


def counts_of(module: hlo.Module) -> dict[str, tuple[int | None, ...]]:
    """(ops, executed, bytes) of the collectives that the module has."""
    counts = hlo_cost.collective_counts(module)
    assert set(counts) == set(hlo_cost.COLLECTIVES)
    return {kind: tuple(count.values()) for kind, count in counts.items() if count["ops"]}


SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}"""


def test_parses_layouts_tuples_comments_and_quoted_text() -> None:
    module = hlo.parse(
        """HloModule jit_step, is_scheduled=true

FileNames
1 "/src/model {a}.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


ENTRY %main.1_spmd (p: bf16[2,3]) -> (bf16[2,3], s32[]) {
  %p = bf16[2,3]{1,0:T(8,128)(2,1)S(1)SC(0:128)} parameter(0), sharding={devices=[2,1]<=[2]}
  %c = s32[]{:T(128)} constant(-5)
  %d = f32[<=8]{0} custom-call(%p, /*index=1*/%c), custom_call_target="x \\"y\\"(", \
metadata={op_name="jit(f)/\\"quoted\\", (" source_file="a.py" source_line=7}, \
backend_config={"a":{"b":"}, c=("},"n":["1"]}
  ROOT %t = (bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/s32[]{:T(128)}) tuple(%p, %c), \
metadata={op_name="out" stack_frame_id=1}
}
"""
    )
    entry = module.computations[module.entry]
    assert (module.name, module.entry, entry.root) == ("jit_step", "main.1_spmd", "t")
    assert only(module, "p").shapes == (hlo.Shape("bf16", (2, 3)),)
    assert only(module, "c").literal == "-5"
    call = only(module, "d")
    assert call.operands == ("p", "c")
    assert call.shapes == (hlo.Shape("f32", (8,)),)
    assert (call.op_name, *call.frames[0][:2]) == ('jit(f)/"quoted", (', "a.py", 7)
    assert call.attributes["backend_config"] == '{"a":{"b":"}, c=("},"n":["1"]}'
    root = only(module, "t")
    assert root.shapes == (hlo.Shape("bf16", (2, 3)), hlo.Shape("s32", ()))
    assert root.result_bytes == 16
    assert root.frames[0][:2] == ("/src/model {a}.py", 12)


def test_operands_may_carry_types_or_no_percent_sign() -> None:
    plain = module_of(
        "  p = f32[4,8]{1,0} parameter(0)\n"
        "  ROOT d = f32[4,4]{1,0} dot(f32[4,8]{1,0} %p, p), lhs_contracting_dims={1}"
    )
    assert only(plain, "d").operands == ("p", "p")
    assert matmul_flops(plain) == 2 * 4 * 4 * 8


def test_text_without_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no ENTRY.*compiled\.as_text"):
        hlo.parse("module @jit_f {\n}")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("pred", 3), ("s4", 2), ("bf16", 6), ("f8e4m3fn", 3), ("c64", 24), ("f4e2m1fn", 2)],
)
def test_bytes_of_three_elements(dtype: str, size: int) -> None:
    assert hlo.Shape(dtype, (3,)).bytes == size


# ---- how often -------------------------------------------------------------------------------

LOOP_BODY = """%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %s = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,4]{{1,0}} get-tuple-element(%s), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %dot = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%next, %dot)
}}"""
LOOP_CONDITION = """%condition (s: (s32[], f32[4,4])) -> pred[] {{
  %s = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant({limit})
  ROOT %more = pred[] compare(%i, %limit), direction={direction}
}}"""
LOOP = """  %p = f32[4,4]{{1,0}} parameter(0)
  %start = s32[] constant({start})
  %copy = s32[] copy(%start)
  %init = (s32[], f32[4,4]{{1,0}}) tuple(%copy, %p)
  ROOT %loop = (s32[], f32[4,4]{{1,0}}) while(%init), condition=%condition, body=%body"""


@pytest.mark.parametrize(
    ("start", "step", "direction", "limit", "trips"),
    [
        (0, 1, "LT", 7, 7),
        (3, 2, "LE", 7, 3),
        (13, -2, "GT", 2, 6),
        (13, -2, "GE", 3, 6),
        (0, 4, "NE", 12, 3),
        (9, 1, "LT", 7, 0),
        (0, 0, "LT", 7, None),
        (0, 1, "BELOW", 7, None),  # a direction that is not known
    ],
)
def test_trip_count_from_the_condition(
    start: int, step: int, direction: str, limit: int, trips: int | None
) -> None:
    module = module_of(
        LOOP.format(start=start),
        LOOP_BODY.format(step=step),
        LOOP_CONDITION.format(limit=limit, direction=direction),
    )
    assert hlo_loops.executions(module)["body"] == trips
    assert matmul_flops(module) == (None if trips is None else trips * 2 * 4 * 4 * 4)


def test_trip_count_when_the_compare_sits_in_a_fusion_and_the_limit_in_the_state() -> None:
    module = module_of(
        """  %zero = u32[] constant(0)
  %six = u32[] constant(6)
  %init = (u32[], u32[]) tuple(%zero, %six)
  ROOT %loop = (u32[], u32[]) while(%init), condition=%condition, body=%body""",
        """%compared (a: u32[], b: u32[]) -> pred[] {
  %a = u32[] parameter(0)
  %b = u32[] parameter(1)
  ROOT %more = pred[] compare(%b, %a), direction=GT
}""",
        """%condition (s: (u32[], u32[])) -> pred[] {
  %s = (u32[], u32[]) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %n = u32[] get-tuple-element(%s), index=1
  ROOT %fusion = pred[] fusion(%i, %n), kind=kLoop, calls=%compared
}""",
        """%body (s: (u32[], u32[])) -> (u32[], u32[]) {
  %s = (u32[], u32[]) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %n = u32[] get-tuple-element(%s), index=1
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  ROOT %t = (u32[], u32[]) tuple(%next, %n)
}""",
    )
    assert hlo_loops.executions(module) == {"main": 1, "condition": 4, "compared": 4, "body": 3}


def nested_loops(start: str) -> hlo.Module:
    """Five trips around a loop that begins at `start`, an instruction of the outer body."""
    return module_of(
        """  %p = f32[4,4]{1,0} parameter(0)
  %two = s32[] constant(2)
  %init = (s32[], f32[4,4]{1,0}) tuple(%two, %p)
  ROOT %loop = (s32[], f32[4,4]{1,0}) while(%init), condition=%outer_condition, \
body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}""",
        LOOP_BODY.format(step=1),
        LOOP_CONDITION.format(limit=6, direction="LT"),
        """%outer_condition (s: (s32[], f32[4,4])) -> pred[] {
  %s = (s32[], f32[4,4]{1,0}) parameter(0)
  ROOT %more = pred[] custom-call(%s), custom_call_target="unreadable"
}""",
        f"""%outer_body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %s = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %kept = s32[] get-tuple-element(%s), index=0
  %x = f32[4,4]{{1,0}} get-tuple-element(%s), index=1
  %unknown = s32[] custom-call(%x), custom_call_target="unreadable"
  %init = (s32[], f32[4,4]{{1,0}}) tuple({start}, %x)
  %loop = (s32[], f32[4,4]{{1,0}}) while(%init), condition=%condition, body=%body
  %y = f32[4,4]{{1,0}} get-tuple-element(%loop), index=1
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%kept, %y)
}}""",
    )


def test_nested_loops_multiply() -> None:
    module = nested_loops("%kept")  # the inner loop counts from 2 to 6, handed through the outer
    assert hlo_loops.executions(module)["body"] == 5 * 4
    assert matmul_flops(module) == 5 * 4 * 128


def test_a_loop_of_unknown_length_gives_none() -> None:
    module = nested_loops("%unknown")
    assert hlo_loops.executions(module)["outer_body"] == 5
    assert hlo_loops.executions(module)["body"] is None
    assert matmul_flops(module) is None


def test_a_loop_in_a_branch_starts_with_what_the_branch_is_given() -> None:
    module = module_of(
        """  %which = pred[] parameter(0)
  %p = f32[4,4]{1,0} parameter(1)
  %three = s32[] constant(3)
  %state = (s32[], f32[4,4]{1,0}) tuple(%three, %p)
  ROOT %c = f32[4,4]{1,0} conditional(%which, %p, %state), true_computation=%skip, \
false_computation=%run""",
        LOOP_BODY.format(step=1),
        LOOP_CONDITION.format(limit=5, direction="LT"),
        """%skip (x: f32[4,4]) -> f32[4,4] {
  ROOT %x = f32[4,4]{1,0} parameter(0)
}""",
        """%run (s: (s32[], f32[4,4])) -> f32[4,4] {
  %s = (s32[], f32[4,4]{1,0}) parameter(0)
  %loop = (s32[], f32[4,4]{1,0}) while(%s), condition=%condition, body=%body
  ROOT %y = f32[4,4]{1,0} get-tuple-element(%loop), index=1
}""",
    )
    assert hlo_loops.executions(module)["body"] == 2


def test_trip_count_in_an_old_quoted_backend_config() -> None:
    loop = LOOP.format(start=0) + ', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"9\\"}}"'
    module = module_of(
        loop, LOOP_BODY.format(step=0), LOOP_CONDITION.format(limit=1, direction="LT")
    )
    assert hlo_loops.executions(module)["body"] == 9


def test_branches_count_once_each_and_reducers_not_at_all() -> None:
    branch = """%{name} (x: f32[4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0)
  ROOT %d = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}
}}"""
    module = module_of(
        """  %x = f32[4,4]{1,0} parameter(0)
  %which = s32[] parameter(1)
  %zero = f32[] constant(0)
  %r = f32[4]{0} reduce(%x, %zero), dimensions={0}, to_apply=%sum
  ROOT %c = f32[4,4]{1,0} conditional(%which, %x, %x), branch_computations={%one, %two}""",
        SUM,
        branch.format(name="one"),
        branch.format(name="two"),
        branch.format(name="never_called"),
    )
    runs = hlo_loops.executions(module)
    assert runs == {"main": 1, "one": 1, "two": 1}
    assert matmul_flops(module) == 2 * 128
    told = "the matrix products count every branch of 1 conditional"
    assert hlo_cost.branch_notes(module, runs, branch_shares(module)) == (told,)


def test_parts_of_complex_numbers_on_a_tpu_are_no_product() -> None:
    module = module_of(
        "  %x = f32[4,4] parameter(0)\n"
        '  ROOT %c = c64[4,4] custom-call(%x, %x), custom_call_target="X64Combine"'
    )
    assert matmul_flops(module) == 0


# ---- matrix products -------------------------------------------------------------------------


def product(lhs: str, rhs: str, line: str) -> int | None:
    """Operations of one instruction on operands %l and %r of the given types."""
    return matmul_flops(
        module_of(f"  %l = {lhs} parameter(0)\n  %r = {rhs} parameter(1)\n  ROOT %o = {line}")
    )


def test_batched_dot() -> None:
    line = (
        "f32[6,5,7] dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    assert product("f32[6,5,3]", "f32[6,3,7]", line) == 2 * 6 * 5 * 7 * 3


@pytest.mark.parametrize(
    ("lhs", "kernel", "result", "attributes", "flops"),
    [
        # A plain product as the TPU compiler writes it.
        ("[5,3]", "[3,7]", "[5,7]", "dim_labels=bf_io->bf", 2 * 5 * 3 * 7),
        # Batched by the window trick: each output meets one kernel position.
        (
            "[4,16,8,32]",
            "[4,24,8,32]",
            "[4,8,16,24]",
            "window={size=4x8 stride=3x7 lhs_dilate=4x8}, dim_labels=0b1f_0o1i->01bf",
            2 * 4 * 8 * 16 * 24 * 32,
        ),
        # Contraction over a spatial dimension.
        ("[2,5,3]", "[2,3,7]", "[5,7,1]", "window={size=2}, dim_labels=0bf_0io->bf0", 2 * 2 * 105),
        # Full overlap with a reversed kernel: of 3 outputs by 2 positions 4 are real (2+1+1).
        (
            "[5,3,2]",
            "[2,7,3]",
            "[5,3,7]",
            "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            2 * 5 * 7 * 3 * 4,
        ),
        # An ordinary 3x3 over 4x4, padded: per dimension 4 outputs by 3 positions less 2.
        (
            "[1,4,4,8]",
            "[3,3,8,16]",
            "[1,4,4,16]",
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 16 * 8 * 10 * 10,
        ),
        # The same in four groups of two features.
        (
            "[1,4,4,8]",
            "[3,3,2,16]",
            "[1,4,4,16]",
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, feature_group_count=4",
            2 * 16 * 2 * 10 * 10,
        ),
        # Batch groups: 8 images in 4 groups leave 2 in the result.
        (
            "[8,5,3]",
            "[2,3,12]",
            "[2,4,12]",
            "window={size=2}, dim_labels=b0f_0io->b0f, batch_group_count=4",
            2 * 2 * 12 * 3 * (4 * 2),
        ),
        # Stride 2, dilated kernel, negative padding: outputs 0..2 read 1+2o and 1+2o+2 of 8.
        (
            "[1,8,1]",
            "[2,1,1]",
            "[1,3,1]",
            "window={size=2 stride=2 pad=-1_0 rhs_dilate=2}, dim_labels=b0f_0io->b0f",
            2 * 6,
        ),
    ],
)
def test_convolution(lhs: str, kernel: str, result: str, attributes: str, flops: int) -> None:
    line = f"f32{result} convolution(%l, %r), {attributes}"
    assert product(f"f32{lhs}", f"f32{kernel}", line) == flops


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas(target: str) -> None:
    line = (
        "(bf16[6,5,7]{2,1,0}, s8[4194304]{0}) custom-call(%l, %r), "
        f'custom_call_target="{target}", '
        'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],'
        '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}'
    )
    assert product("bf16[6,3,5]", "bf16[6,3,7]", line) == 2 * 6 * 5 * 7 * 3


@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_a_product_of_complex_numbers_takes_four_times_as_much(dtype: str) -> None:
    """Four products of real numbers and two sums, and two more for the sum of the products."""
    line = f"{dtype}[5,7] dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    assert product(f"{dtype}[5,3]", f"{dtype}[3,7]", line) == 8 * 5 * 7 * 3
    line = f"{dtype}[2,4,5] convolution(%l, %r), window={{size=1}}, dim_labels=b0f_0io->b0f"
    assert product(f"{dtype}[2,4,3]", f"{dtype}[1,3,5]", line) == 8 * 2 * 4 * 5 * 3


def test_onednn() -> None:
    line = 'f32[5,7] custom-call(%l, %r), custom_call_target="__onednn$matmul"'
    assert product("f32[5,3]", "f32[3,7]", line) == 2 * 5 * 7 * 3
    transposed = line + ', backend_config={"onednn_matmul_config":{"transpose_a":true}}'
    assert product("f32[3,5]", "f32[3,7]", transposed) == 2 * 5 * 7 * 3


@pytest.mark.parametrize(
    ("target", "lhs", "rhs", "result"),
    [
        ("__cudnn$convForward", "[2,8,8,3]", "[5,3,3,3]", "[2,6,6,5]"),
        ("__cudnn$convBackwardFilter", "[2,8,8,3]", "[2,6,6,5]", "[5,3,3,3]"),
        ("__cudnn$convBackwardInput", "[2,6,6,5]", "[5,3,3,3]", "[2,8,8,3]"),
    ],
)
def test_cudnn_convolution(target: str, lhs: str, rhs: str, result: str) -> None:
    line = (
        f"(f32{result}, u8[0]) custom-call(%l, %r), window={{size=3x3}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="{target}"'
    )
    assert product(f"f32{lhs}", f"f32{rhs}", line) == 2 * (2 * 6 * 6 * 5) * (3 * 3 * 3)


def test_ragged_dot() -> None:
    groups = "  %g = s32[4] parameter(2)\n"
    rows = module_of(
        "  %l = f32[32,8] parameter(0)\n  %r = f32[4,8,16] parameter(1)\n" + groups
        + "  ROOT %o = f32[32,16] ragged-dot(%l, %r, %g), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}"
    )  # fmt: skip
    contracted = module_of(
        "  %l = f32[32,8] parameter(0)\n  %r = f32[32,16] parameter(1)\n" + groups
        + "  ROOT %o = f32[4,8,16] ragged-dot(%l, %r, %g), lhs_contracting_dims={0}, "
        "rhs_contracting_dims={0}, lhs_ragged_dims={0}"
    )  # fmt: skip
    assert matmul_flops(rows) == 2 * 32 * 16 * 8
    assert matmul_flops(contracted) == 2 * 32 * 16 * 8


def test_ragged_dot_kernel_of_the_tpu_compiler() -> None:
    line = (
        'bf16[{}] custom-call(%l, %r), custom_call_target="tpu_custom_call", '
        'frontend_attributes={{ragged_dot_tiling="8,8,8"}}'
    )
    assert product("bf16[32,8]", "bf16[4,8,16]", line.format("32,16")) == 2 * 32 * 16 * 8
    assert product("bf16[32,8]", "bf16[32,16]", line.format("4,8,16")) == 2 * 32 * 16 * 8
    assert product("bf16[4,8]", "bf16[8,16]", line.format("4,16")) is None


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [
        ("CAUSAL", 0, sum(range(1, 9))),
        ("CAUSAL", 3, 1 + 2 + 6 * 3),
        ("CAUSAL", 20, sum(range(1, 9))),
        ("NO_MASK", 0, 64),
        ("NO_MASK", 3, None),
        ("PADDING_CAUSAL", 0, None),
    ],
)
def test_cudnn_attention(mask: str, window: int, pairs: int | None) -> None:
    """Two sequences of 8 tokens, with 6 query heads that read 2 key heads of width 4."""
    for target, products in (("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)):
        line = (
            f'bf16[2,6,8,4] custom-call(%l, %r), custom_call_target="__cudnn${target}", '
            'backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 1.0, '
            f'"mask_type": "{mask}", "sliding_window_length": {window}}}}}'
        )
        found = product("bf16[2,8,6,4]", "bf16[2,8,2,4]", line)
        assert found == (pairs and 2 * products * 2 * 6 * 4 * pairs)


@pytest.mark.parametrize(
    ("target", "flops"),
    [
        ("tpu_custom_call", None),
        ("__gpu$xla.gpu.triton", None),
        ("__cudnn$fmhaSoftmax", None),
        ("__cublas$lt$matmul", None),  # without dimension numbers
        ("AsyncCollectiveDone", 0),
        ("ConcatBitcast", 0),
        ("xla_ffi_python_cpu_callback", 0),
    ],
)
def test_a_library_call_that_cannot_be_read_is_not_dropped(target: str, flops: int | None) -> None:
    line = f'f32[4,4] custom-call(%l, %r), custom_call_target="{target}"'
    assert product("f32[4,4]", "f32[4,4]", line) == flops


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("tpu_custom_call", '{"custom_call_config":{"cost_estimate":{"flops":"640"}}}'),
        ("__gpu$xla.gpu.triton", r'{serialized_metadata = "{\22flops\22: \22640\22}"}'),
        ("__gpu$xla.gpu.triton", r'{serialized_metadata = "{\"flops\": \"640\"}"}'),
    ],
)
def test_a_kernel_counts_with_the_operations_that_it_states(target: str, config: str) -> None:
    line = f'f32[4,4] custom-call(%l), custom_call_target="{target}", backend_config={config}'
    assert product("f32[4,4]", "f32[4,4]", line) == 640


def test_a_library_call_with_one_matrix_multiplies_none() -> None:
    line = '(f32[4,2], s32[4,2]) custom-call(%l, %r), custom_call_target="anything"'
    assert product("f32[4,8]", "s32[4]", line) == 0


# ---- collectives -----------------------------------------------------------------------------


def test_start_and_done_count_once_with_the_result() -> None:
    module = module_of(
        """  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[2,4]{1,0} parameter(1)
  %ags = ((f32[8,4]{1,0}, f32[2,4]{1,0}), (f32[64,4]{1,0}, f32[16,4]{1,0})) \
all-gather-start(%p, %q), dimensions={0}
  %agd = (f32[64,4]{1,0}, f32[16,4]{1,0}) all-gather-done(%ags)
  %cps = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]{:S(2)}, u32[]) collective-permute-start(%p)
  %cpd = f32[8,4]{1,0} collective-permute-done(%cps)
  %ars = f32[8,4]{1,0} all-reduce-start(%p), to_apply=%sum
  %ard = f32[8,4]{1,0} all-reduce-done(%ars)
  %rss = ((f32[8,4]{1,0}), f32[1,4]{1,0}) reduce-scatter-start(%p), to_apply=%sum
  %rsd = f32[1,4]{1,0} reduce-scatter-done(%rss)
  %ras = ((f32[8,4]{1,0}, f32[8,4]{1,0}), f32[8,4]{1,0}) ragged-all-to-all-start(%p, %p)
  ROOT %rad = f32[8,4]{1,0} ragged-all-to-all-done(%ras)""",
        SUM,
    )
    assert counts_of(module) == {
        "all-gather": (1, 1, 4 * (64 * 4 + 16 * 4)),
        "collective-permute": (1, 1, 128),
        "all-reduce": (1, 1, 128),
        "reduce-scatter": (1, 1, 16),
        "all-to-all": (1, 1, 128),
    }


def test_async_wrapper_variadic_and_what_is_left_out() -> None:
    module = module_of(
        """  %p = f32[8,4]{1,0} parameter(0)
  %as = ((f32[8,4]{1,0}), f32[8,4]{1,0}, u32[]) async-start(%p), calls=%wrapped
  %ad = f32[8,4]{1,0} async-done(%as)
  %ar = (f32[8,4]{1,0}, bf16[2]{0}) all-reduce(%p, %p), to_apply=%sum
  %cb = f32[8,4]{1,0} collective-broadcast(%p)
  ROOT %a2a = (f32[4,4]{1,0}, f32[4,4]{1,0}) all-to-all(%p, %p)""",
        SUM,
        """%wrapped (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  ROOT %a2a = f32[8,4]{1,0} all-to-all(%x), dimensions={0}
}""",
    )
    assert counts_of(module) == {"all-to-all": (2, 2, 256), "all-reduce": (1, 1, 132)}


REDUCE_AND_SLICE = """%all-reduce-scatter (x: bf16[8,4]) -> {type} {{
  %x = bf16[8,4]{{1,0:T(8,128)(2,1)}} parameter(0)
  %ar = bf16[8,4]{{1,0:T(8,128)(2,1)}} all-reduce(%x), to_apply=%sum
  %zero = u32[] constant(0)
  %b = bf16[8,4]{{1,0}} bitcast(%ar)
  %piece = bf16[2,4]{{1,0}} dynamic-slice(%b, %zero, %zero), dynamic_slice_sizes={{2,4}}
  ROOT %out = {type} {root}
}}"""


def test_a_tpu_fusion_around_an_all_reduce_is_a_reduce_scatter() -> None:
    entry = "  %p = bf16[8,4] parameter(0)\n  ROOT %f = {} fusion(%p), calls=%all-reduce-scatter"
    scattered = REDUCE_AND_SLICE.format(type="f32[2,4]{1,0}", root="convert(%piece)")
    module = module_of(entry.format("f32[2,4]{1,0}"), SUM, scattered)
    assert counts_of(module) == {"reduce-scatter": (1, 1, 16)}
    both = "(bf16[2,4]{1,0}, bf16[8,4]{1,0})"
    whole = REDUCE_AND_SLICE.format(type=both, root="tuple(%piece, %ar)")
    module = module_of(entry.format(both), SUM, whole)
    assert counts_of(module) == {"all-reduce": (1, 1, 64)}


def test_one_collective_spread_over_several_tpu_fusions_counts_once() -> None:
    piece = """%{name} (x: f32[2]) -> f32[8] {{
  %x = f32[2] parameter(0)
  ROOT %ag = f32[8] all-gather(%x), channel_id={channel}, frontend_attributes={{chain_id="0"}}
}}"""
    fusions = [f"  %{name} = f32[8] fusion(%p), calls=%{name}_step" for name in ("a", "b", "c")]
    module = module_of(
        "  %p = f32[2] parameter(0)\n" + "\n".join(fusions),
        piece.format(name="a_step", channel=4),
        piece.format(name="b_step", channel=4),
        piece.format(name="c_step", channel=5),
    )
    assert counts_of(module) == {"all-gather": (2, 2, 64)}


def test_collectives_in_loops() -> None:
    body = LOOP_BODY.format(step=1).replace(
        "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "all-reduce(%x)"
    )
    condition = LOOP_CONDITION.format(limit=7, direction="LT")
    module = module_of(LOOP.format(start=0), body, condition)
    assert counts_of(module) == {"all-reduce": (1, 7, 7 * 64)}
    endless = module_of(LOOP.format(start=0), body.replace("constant(1)", "constant(0)"), condition)
    assert counts_of(endless) == {"all-reduce": (1, None, None)}
    assert matmul_flops(endless) == 0  # no product in it, so its length does not matter


# ---- heap ------------------------------------------------------------------------------------


def test_heap_is_the_device_memory_among_the_temporary_allocations() -> None:
    text = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 add @0> (size=512,offset=0): f32[]
allocation 1: size 64, output shape is |f32[16]|, maybe-live-out:
allocation 2: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}:
allocation 3: size 1000, preallocated-temp:
 value: <13 preallocated-temp @0> (size=512,offset=16384): s32[]
allocation 4: size 4, color 2, preallocated-temp:
allocation 5: size 8704, color 10, preallocated-temp:
"""
    assert heap.heap_bytes(text) == 1000
    assert heap.heap_bytes("BufferAssignment:\nallocation 0: size 4, constant:\n") == 0
    assert heap.heap_bytes("") is None
    assert heap.heap_bytes(None) is None


# ---- compiled programs -----------------------------------------------------------------------

Program = Callable[..., jax.Array]


@pytest.fixture(scope="module", params=["cpu", "tpu", "cuda"])
def platform(request: pytest.FixtureRequest) -> str:
    if request.param == "tpu":
        pytest.importorskip("libtpu", reason="needs libtpu, the TPU compiler: pip install jax[tpu]")
    if request.param == "cuda" and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs the NVIDIA compiler: pip install jax-cuda13-plugin nvidia-cuda-nvcc")
    return request.param


@pytest.fixture(scope="module")
def devices(platform: str) -> np.ndarray:
    """Eight devices of the platform, of which only those of the CPU exist."""
    if platform == "cpu":
        return np.array(jax.devices("cpu")[:8])
    if platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2")
    else:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_gpus.description("cuda", "h100"), topology="1x1x8"
        )
    return np.array(topology.devices)


def compiled(function: Program, mesh: Mesh, *arguments: tuple[tuple[int, ...], P]) -> hlo.Module:
    """The compiled module of a function of float32 arrays given as (global shape, spec)."""
    abstract = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in arguments
    ]
    return hlo.parse(jax.jit(function).lower(*abstract).compile().as_text() or "")


def scan_of_matmuls(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0]


def test_flops_of_compiled_products(devices: np.ndarray) -> None:
    mesh = Mesh(devices, ("x",))
    matmul = compiled(jnp.matmul, mesh, ((64, 128), P()), ((128, 256), P()))
    assert matmul_flops(matmul) == 2 * 64 * 128 * 256
    batched = compiled(
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        mesh, ((2, 64, 4, 32), P()), ((2, 64, 4, 32), P()),
    )  # fmt: skip
    assert matmul_flops(batched) == 2 * (2 * 4) * 64 * 64 * 32
    sharded = compiled(jnp.matmul, mesh, ((64, 128), P("x")), ((128, 256), P()))
    assert matmul_flops(sharded) == 2 * 8 * 128 * 256


def test_flops_of_a_compiled_scan_and_its_gradient(devices: np.ndarray) -> None:
    mesh = Mesh(devices, ("x",))
    shapes = ((64, 128), P()), ((7, 128, 128), P())
    assert matmul_flops(compiled(scan_of_matmuls, mesh, *shapes)) == 7 * 2 * 64 * 128**2
    both = jax.grad(lambda x, w: scan_of_matmuls(x, w).sum(), argnums=(0, 1))
    assert matmul_flops(compiled(both, mesh, *shapes)) == 3 * 7 * 2 * 64 * 128**2


def test_flops_of_compiled_nested_and_endless_loops(devices: np.ndarray) -> None:
    mesh = Mesh(devices, ("x",))

    def nested(x: jax.Array, w: jax.Array) -> jax.Array:
        inner = lambda i, c: jax.lax.fori_loop(2, 5, lambda j, d: jnp.tanh(d @ w), c)  # noqa: E731
        return jax.lax.fori_loop(0, 4, inner, x)

    def down(x: jax.Array, w: jax.Array) -> jax.Array:
        step = lambda s: (s[0] - 2, jnp.tanh(s[1] @ w))  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] >= 2, step, (13, x))[1]

    def until_small(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] > 1, lambda y: jnp.tanh(y @ w), x)

    shapes = ((64, 64), P()), ((64, 64), P())
    assert matmul_flops(compiled(nested, mesh, *shapes)) == 4 * 3 * 2 * 64**3
    assert matmul_flops(compiled(down, mesh, *shapes)) == 6 * 2 * 64**3
    assert matmul_flops(compiled(until_small, mesh, *shapes)) is None


# Each collective over pairs of devices, on a local [64, 128] of float32, and its result bytes.
# (Smaller pieces the TPU compiler does not scatter: it reduces whole and slices.)
COLLECTIVE_PROGRAMS: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {
    "all-gather": (lambda x: jax.lax.all_gather(x, "x", tiled=True)[:64], 128 * 128 * 4),
    "all-reduce": (lambda x: jax.lax.psum(x, "x"), 64 * 128 * 4),
    "reduce-scatter": (
        lambda x: jnp.tile(jax.lax.psum_scatter(x, "x", tiled=True), (2, 1)),
        32 * 128 * 4,
    ),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), 64 * 128 * 4),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]),
        64 * 128 * 4,
    ),
}


@pytest.mark.parametrize("kind", COLLECTIVE_PROGRAMS)
def test_compiled_collectives_in_a_loop(devices: np.ndarray, kind: str) -> None:
    mesh = Mesh(devices.reshape(4, 2), ("other", "x"))
    operation, size = COLLECTIVE_PROGRAMS[kind]

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda i, c: jnp.sin(operation(c)), x)

    spec = P(("other", "x"))
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    module = compiled(function, mesh, ((8 * 64, 128), spec))
    assert counts_of(module) == {kind: (1, 5, 5 * size)}


def test_compiled_fsdp_gradient(platform: str, devices: np.ndarray) -> None:
    """Weights gathered forward and backward, gradients scattered, once per layer."""
    mesh = Mesh(devices.reshape(2, 4), ("data", "fsdp"))
    specs = P("fsdp"), P(None, "fsdp")

    def gradient(x: jax.Array, weights: jax.Array) -> jax.Array:
        grad = jax.grad(lambda w: scan_of_matmuls(x, w).sum())(weights)
        return jax.lax.with_sharding_constraint(grad, NamedSharding(mesh, specs[1]))

    module = compiled(gradient, mesh, ((256, 128), specs[0]), ((3, 128, 128), specs[1]))
    assert matmul_flops(module) == 3 * 3 * 2 * 64 * 128 * 128
    whole = 128 * 128 * 4
    gathered = whole // 2 if platform == "tpu" else whole  # as bfloat16, which it multiplies in
    expected: dict[str, tuple[int, int, int]] = {"all-gather": (2, 6, 6 * gathered)}
    if platform == "cpu":  # that compiler reduces whole and slices afterwards
        expected["all-reduce"] = (1, 3, 3 * whole)
    else:
        expected["reduce-scatter"] = (1, 3, 3 * whole // 4)
    assert counts_of(module) == expected


def test_compiled_metadata_names_this_file(devices: np.ndarray) -> None:
    module = compiled(jnp.matmul, Mesh(devices, ("x",)), ((64, 128), P()), ((128, 256), P()))
    instructions = [i for c in module.computations.values() for i in c.instructions.values()]
    product = next(i for i in instructions if i.opcode in ("dot", "convolution"))
    assert "dot_general" in (product.op_name or "")
    assert product.frames[0][0] == __file__


def test_heap_of_compiled_programs(platform: str, devices: np.ndarray) -> None:
    mesh = Mesh(devices, ("x",))
    replicated = NamedSharding(mesh, P())
    shapes = [(64, 128), (7, 128, 128)]
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=replicated) for s in shapes]
    gradient = jax.grad(lambda x, w: scan_of_matmuls(x, w).sum(), argnums=(0, 1))
    program, text = heap.compile_with_dump(jax.jit(gradient).lower(*arguments))
    assert text is not None
    assert text.startswith("BufferAssignment:")
    assert "HloLiveRange" in text
    size = heap.heap_bytes(text)
    assert size is not None
    memory = program.memory_analysis()
    assert memory is not None
    # What is saved for the backward pass, 7 activations, is in it at least.
    assert size >= 7 * 64 * 128 * 4
    if platform != "tpu":
        assert size == memory.temp_size_in_bytes


def test_heap_adds_the_options_it_is_given(devices: np.ndarray) -> None:
    sharding = NamedSharding(Mesh(devices, ("x",)), P())
    lowered = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    with pytest.raises(Exception, match="no_such_option"):
        heap.compile_with_dump(lowered, {"no_such_option": True})

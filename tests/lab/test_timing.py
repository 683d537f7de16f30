"""Estimated time: every rule on a program that can be summed by hand, and real compilers once."""

import base64
import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import missing, new_model, packed_batch, run_fresh, small_config, user_environment
from hlo_texts import matmul_flops

from nnx_pipeline import MeshConfig, lab
from nnx_pipeline.lab._hlo.loops import executions
from nnx_pipeline.lab._hlo.module import Instruction, parse
from nnx_pipeline.lab._report.view.figures import basis_of, estimated
from nnx_pipeline.lab._timing.cost import KERNEL_EFFICIENCY
from nnx_pipeline.lab._timing.devices import DEVICES, Device, device_of, device_seen_as
from nnx_pipeline.lab._timing.estimate import Estimate
from nnx_pipeline.lab._timing.groups import groups_of, pairs_of
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab._timing.precision import ProductPrecision, product_rate
from nnx_pipeline.lab._timing.result import KEYS, Time
from nnx_pipeline.lab.compile._cache import restored
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.train import loss_of
from nnx_pipeline.train._useful import bubble_share, flops_per_token, useful_flops

# A device on which sums are easy: 1 cycle and 1 byte on a link are 1 s each.
SIMPLE = Device(
    flops={"bf16": 1000.0},
    memory=100.0,
    link=1.0,
    dimensions=1,
    closes_at=4,
    clock=1.0,
    host=40.0,
    launch=0.0,
)
LINE = Links(SIMPLE, (2,), ((0,), (1,)))


def cycles(number: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def estimate(text: str, links: Links = LINE) -> Estimate:
    module = parse(text)
    return Estimate(module, executions(module), links)


# ---- compute ----------------------------------------------------------------------------------

LOOP = f"""HloModule loop

%fused (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %n = f32[4]{{0}} negate(%p)
}}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %s = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %y = f32[4]{{0}} fusion(%x), kind=kLoop, calls=%fused, {cycles(7)}
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%next, %y)
}}

%cond (s: (s32[], f32[4])) -> pred[] {{
  %s = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{{0}}) tuple(%zero, %x)
  %loop = (s32[], f32[4]{{0}}) while(%start), condition=%cond, body=%body
  %y = f32[4]{{0}} get-tuple-element(%loop), index=1
  ROOT %z = f32[4]{{0}} fusion(%y), kind=kLoop, calls=%fused, {cycles(3)}
}}
"""


def test_cycles_are_multiplied_by_trips() -> None:
    time = estimate(LOOP).time
    assert (time.basis, time.compute_seconds, time.launches) == ("cycles", 5 * 7 + 3, 6)
    assert (time.step_seconds, time.range_seconds) == (38, (38, 38))
    assert (time.collective_seconds, time.exposed_seconds) == (0, 0)
    assert (time.mfu, time.bubble_share) == (None, None)
    assert sum(row.seconds for row in time.rows) == time.known_seconds == 38


def test_work_of_another_core_runs_beside() -> None:
    """The TPU compiler hands scatters to another core; they carry 2⁶³ − 1 in place of cycles."""
    text = f"""HloModule m

%fused (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %n = f32[4]{{0}} negate(%p)
}}

%called (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %f = f32[4]{{0}} fusion(%p), kind=kCustom, calls=%fused, {cycles(2**63 - 1)}
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %s = ((f32[4]{{0}}), f32[4]{{0}}) call-start(%x), to_apply=%called
  %y = f32[4]{{0}} fusion(%x), kind=kLoop, calls=%fused, {cycles(6)}
  ROOT %d = f32[4]{{0}} call-done(%s)
}}
"""
    found = estimate(text)
    time = found.time
    assert (time.step_seconds, time.launches) == (6, 1)
    assert sum(row.seconds for row in time.rows) == time.known_seconds
    assert ([one.name for one in found.bounds], time.is_partial) == (["s"], True)


def test_work_of_another_core_takes_the_bytes_of_what_it_does() -> None:
    """A scatter there reads 200 bytes and writes them in place, of 4000: 4 s at 100 bytes/s."""
    text = f"""HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%called (t: f32[100,10], i: s32[5,1], u: f32[5,10]) -> f32[100,10] {{
  %t = f32[100,10]{{1,0}} parameter(0)
  %i = s32[5,1]{{1,0}} parameter(1)
  %u = f32[5,10]{{1,0}} parameter(2)
  ROOT %w = f32[100,10]{{1,0}} scatter(%t, %i, %u), update_window_dims={{1}}, to_apply=%sum
}}

ENTRY %main (t: f32[100,10], i: s32[5,1], u: f32[5,10]) -> f32[100,10] {{
  %t = f32[100,10]{{1,0}} parameter(0)
  %i = s32[5,1]{{1,0}} parameter(1)
  %u = f32[5,10]{{1,0}} parameter(2)
  %s = ((f32[100,10], s32[5,1], f32[5,10]), f32[100,10]{{1,0}}) call-start(%t, %i, %u)
    , to_apply=%called
  %n = f32[5,10]{{1,0}} negate(%u), {cycles(1)}
  ROOT %d = f32[100,10]{{1,0}} call-done(%s)
}}
""".replace("\n    , to", ", to")
    time = estimate(text).time
    assert (time.compute_seconds, time.memory_wait_seconds, time.step_seconds) == (1, 3, 4)
    assert time.is_partial


def test_a_scatter_in_place_takes_what_it_writes() -> None:
    """The table of 40 kB is not read and written; 5000 bytes are read and 5000 written."""
    text = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused (t: f32[1000,10], i: s32[125], u: f32[125,10]) -> f32[1000,10] {
  %t = f32[1000,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  %u = f32[125,10]{1,0} parameter(2)
  ROOT %w = f32[1000,10]{1,0} scatter(%t, %i, %u), update_window_dims={1}, to_apply=%sum
}

ENTRY %main (t: f32[1000,10], i: s32[125], u: f32[125,10]) -> f32[1000,10] {
  %t = f32[1000,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  %u = f32[125,10]{1,0} parameter(2)
  ROOT %f = f32[1000,10]{1,0} fusion(%t, %i, %u), kind=kCustom, calls=%fused
}
"""
    found = estimate(text)
    assert found.time.compute_seconds == (2 * 5000 + 500) / 100  # with the indices
    assert [one.name for one in found.bounds] == ["f"]


def test_what_has_no_estimate_takes_its_bytes() -> None:
    """A sort of 8000 bytes reads and writes them at 100 bytes/s; scalars take nothing."""
    text = """HloModule m

%order (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: f32[2000]) -> f32[2000] {
  %x = f32[2000]{0} parameter(0)
  %c = s32[] constant(1)
  %d = s32[] add(%c, %c)
  ROOT %s = f32[2000]{0} sort(%x), dimensions={0}, to_apply=%order
}
"""
    found = estimate(text)
    time = found.time
    assert (time.compute_seconds, time.launches) == (2 * 8000 / 100, 1)
    (bound,) = found.bounds
    assert (bound.name, bound.what, bound.executed) == ("s", "sort", 1)
    assert (bound.figures, found.unread) == (("time_bound",), ())
    assert (time.is_partial, time.is_lower_bound) == (True, False)
    assert time.to_json()["is_partial"] is True
    assert estimate(LOOP).time.is_partial is False


def test_the_compilers_own_count_of_rows_is_no_kernel_written_by_hand() -> None:
    text = kernel('{"custom_call_config":{"body":"TUzv"}}').replace("[50,10]", "[5]")
    text = text.replace("{1,0}", "{0}")
    assert [one.name for one in estimate(text).unread] == ["k"]
    own = text.replace(
        '_call",', '_call", metadata={op_name="jit(f)/while/body/ragged-dot-metadata"},'
    )
    found = estimate(own)
    assert (found.unread, found.bounds, found.time.step_seconds) == ((), (), 0)


def kernel(config: str) -> str:
    return f"""HloModule m

ENTRY %main (x: bf16[50,10]) -> bf16[50,10] {{
  %x = bf16[50,10]{{1,0}} parameter(0)
  ROOT %k = bf16[50,10]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call",
    backend_config={config}
}}
"""


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        ('"flops":"6500000","bytes_accessed":"5000"', 6_500_000 / (KERNEL_EFFICIENCY * 1000)),
        ('"flops":"65","bytes_accessed":"5000"', 50.0),
        ('"flops":"65"', 2 * 1000 / 100),  # its operand and its result
    ],
)
def test_a_kernel_takes_what_it_states(stated: str, seconds: float) -> None:
    text = kernel(f'{{"custom_call_config":{{"cost_estimate":{{{stated}}}}}}}')
    found = estimate(text)
    assert found.time.compute_seconds == pytest.approx(seconds)
    assert found.time.rows[0].kind == "kernels"
    assert found.unread == ()


def pallas(body: str, *dtypes: str) -> str:
    """A kernel of 6.5e6 operations with this program, which reads arrays of these dtypes."""
    told = f'"body":"{base64.b64encode(body.encode()).decode()}",' * bool(body)
    config = f'{{"custom_call_config":{{{told}"cost_estimate":{{"flops":"6500000"}}}}}}'
    names = ", ".join(f"%x{at}" for at in range(len(dtypes)))
    read = "\n".join(
        f"  %x{at} = {dtype}{{1,0}} parameter({at})" for at, dtype in enumerate(dtypes)
    )
    return f"""HloModule m

ENTRY %main () -> f32[50,10] {{
{read}
  ROOT %k = f32[50,10]{{1,0}} custom-call({names}), custom_call_target="tpu_custom_call",
    backend_config={config}
}}
"""


def matmul(dtype: str, precision: str) -> str:
    """A product as the TPU compiler writes it in the text of its own `ragged_dot`."""
    at = f"vector<128x1024x{dtype}>"
    precise = f"precision = #tpu.contract_precision<{precision}>"
    return f"    %19 = tpu.matmul %16, %18, %cst {{{precise}}} : {at}, {at}, vector<1x1xf32> -> …\n"


@pytest.mark.parametrize(
    ("body", "dtypes", "passes"),
    [
        (matmul("f32", "fp32"), ("f32[50,10]", "f32[10,10]"), 6),
        (matmul("f32", "bf16"), ("f32[50,10]", "f32[10,10]"), 1),
        (matmul("bf16", "bf16"), ("bf16[50,10]", "bf16[10,10]"), 1),
        (matmul("i8", "bf16"), ("s8[50,10]", "s8[10,10]", "s32[9]"), 0.5),
        # Two products of one text: each says what it is.
        (matmul("f32", "fp32") + matmul("f32", "fp32"), ("bf16[50,10]", "f32[10,10]"), 6),
        # MLIR's binary form, in which only the names can be read.
        ("MLïR#tpu.contract_precision<fp32>\0tpu.matmul", ("f32[50,10]", "f32[10,10]"), 6),
        ("MLïR\0tpu.matmul", ("f32[50,10]", "bf16[10,10]"), 1),
        ("MLïR\0tpu.matmul", ("s8[50,10]", "s8[10,10]", "f32[10]"), 0.5),
        ("MLïR#tpu.contract_precision<fp32>\0tpu.matmul", ("bf16[50,10]", "bf16[10,10]"), 1),
        ("", ("bf16[50,10]", "bf16[10,10]"), 1),
    ],
)
def test_a_kernel_takes_its_precision(body: str, dtypes: tuple[str, ...], passes: float) -> None:
    """`ragged_dot` and Pallas on a TPU: six passes for float32 at `highest`."""
    device = dataclasses.replace(SIMPLE, flops={"bf16": 1000.0, "s8": 2000.0})
    found = estimate(pallas(body, *dtypes), Links(device, (2,), ((0,), (1,))))
    assert found.time.compute_seconds == pytest.approx(6500 * passes / KERNEL_EFFICIENCY)
    assert found.time.hfu == pytest.approx(KERNEL_EFFICIENCY)
    assert (found.bounds, found.time.is_lower_bound) == ((), False)


@pytest.mark.parametrize(
    ("unit", "dtypes", "filled"),
    [
        (10, ("bf16[50,10]", "bf16[10,20]"), 1),
        (20, ("bf16[50,10]", "bf16[50,10]", "s32[50]"), 0.5),
        (16, ("bf16[50,24]", "bf16[50,24]", "bf16[50,16]"), 64 / 80),  # as of latent attention
        (20, ("bf16[50,10]", "bf16[50,40]"), 50 / 60),
        (20, ("bf16[50,40]", "f32[10,10]"), 1),  # too small to be multiplied by the first
        (20, ("bf16[50,40]", "f32[25,10]"), 50 / 60),
    ],
)
def test_a_kernel_fills_its_share_of_a_unit(
    unit: int, dtypes: tuple[str, ...], filled: float
) -> None:
    """The operations at the peak stay what they are."""
    device = dataclasses.replace(SIMPLE, unit=unit)
    text = pallas(matmul("bf16", "bf16"), *dtypes)
    found = estimate(text, Links(device, (2,), ((0,), (1,))))
    assert found.time.compute_seconds == pytest.approx(6500 / KERNEL_EFFICIENCY / filled)
    assert found.time.hfu == pytest.approx(KERNEL_EFFICIENCY * filled)


def test_units_of_every_tpu() -> None:
    """Attention of 128 numbers a head fills half of a unit of the newer ones."""
    units = {target: device.unit for (kind, target), device in DEVICES.items() if kind == "tpu"}
    assert units == {"v5p": 128, "v5e": 128, "v6e": 256, "tpu7x": 256}


@pytest.mark.parametrize(
    ("body", "dtypes"),
    [
        ("", ("f32[50,10]", "f32[10,10]")),
        ("", ("f32[50,10]", "bf16[10,10]")),
        ("MLïR#tpu.contract_precision<fp32>\0#tpu.contract_precision<bf16>", ("f32[50,10]",)),
        ("MLïR#tpu.contract_precision<fp32>", ("f32[50,10]", "bf16[10,10]")),
        ("MLïR#tpu.contract_precision<fp8>", ("f32[50,10]", "f32[10,10]")),
        (matmul("f32", "fp32") + matmul("f32", "bf16"), ("f32[50,10]", "f32[10,10]")),
    ],
)
def test_a_kernel_of_unknown_precision_counts_at_least(body: str, dtypes: tuple[str, ...]) -> None:
    """No more than one pass at the peak is certain, and no part of the peak is known."""
    found = estimate(pallas(body, *dtypes))
    assert (found.time.compute_seconds, found.time.hfu) == (6500, None)
    (bound,) = found.bounds
    assert (bound.name, bound.figures, found.time.is_partial) == ("k", ("time_bound",), True)
    assert "precision of its products is not known" in bound.reason


def test_a_kernel_that_states_nothing_is_named() -> None:
    """Nor is 2⁶⁴ − 1 a number of cycles."""
    found = estimate(kernel('{"window_config":{"estimated_cycles":"18446744073709551615"}}'))
    (unread,) = found.unread
    assert (unread.figures, unread.what) == (("time",), "tpu_custom_call")
    assert "states no operations" in unread.reason
    time = found.time
    assert (time.known_seconds, time.compute_seconds, time.step_seconds) == (0, None, None)
    assert (time.range_seconds, time.hfu, time.of_model(1.0, 0.0, "").mfu) == (None, None, None)


def test_a_roofline() -> None:
    """2·64·32·16 operations at 1000/s are more than all bytes at 200/s; of a slice, the slice."""
    text = """HloModule m

%sliced (p: bf16[9,64,32], i: s32[]) -> bf16[1,64,32] {
  %p = bf16[9,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = bf16[1,64,32]{2,1,0} dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={1,64,32}
}

ENTRY %main (x: bf16[64,32], y: bf16[32,16], w: bf16[9,64,32], i: s32[]) -> bf16[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %y = bf16[32,16]{1,0} parameter(1)
  %w = bf16[9,64,32]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %s = bf16[1,64,32]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%sliced
  ROOT %d = bf16[64,16]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    gpu = dataclasses.replace(SIMPLE, clock=None, dimensions=0, memory=200.0)
    time = estimate(text, Links(gpu, (1,), ((0,),))).time
    product, sliced = 2 * 64 * 32 * 16 / 1000, (2 * 64 * 32 * 2 + 4) / 200
    assert time.basis == "roofline"
    assert {row.kind: row.seconds for row in time.rows} == {"products": product, "moves": sliced}
    assert time.hfu == pytest.approx(product / (product + sliced))


def test_the_workspace_of_a_library_is_not_moved() -> None:
    """cuBLAS returns its workspace behind the result; 600 bytes are read and made without it."""
    text = """HloModule m

ENTRY %main (x: bf16[10,10]) -> bf16[10,10] {
  %x = bf16[10,10]{1,0} parameter(0)
  %c = (bf16[10,10]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm",
    backend_config={"gemm_backend_config":{"dot_dimension_numbers":{
    "lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %y = bf16[10,10]{1,0} get-tuple-element(%c), index=0
}
"""
    gpu = dataclasses.replace(SIMPLE, clock=None, dimensions=0, memory=1.0)
    (row,) = estimate(text, Links(gpu, (1,), ((0,),))).time.rows
    assert (row.seconds, row.kind) == (600, "products")


def test_rows_have_line_and_pass() -> None:
    paths = ("jvp()/mul", "transpose(jvp())/mul", "transpose(jvp())/rematted_computation/mul")
    lines = "\n".join(
        f"  %n{number} = f32[4]{{0}} negate(%x), "
        f'metadata={{op_name="jit(step)/{path}" source_file="/own/a.py" source_line={number}}}, '
        f"{cycles(10 - number)}"
        for number, path in enumerate(paths)
    )
    text = (
        "HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
        f"{lines}\n}}\n"
    )
    rows = [(row.source, row.pass_name, row.seconds) for row in estimate(text).time.rows]
    assert rows == [
        ("/own/a.py:0", "forward", 10),
        ("/own/a.py:1", "backward", 9),
        ("/own/a.py:2", "recomputed", 8),
    ]


def test_rows_of_work_without_a_line_have_that_of_its_value() -> None:
    """Copies in a loop of the backward pass, and of what a jitted function was first called for."""
    body, loop = "jit(step)/jvp()/while/body", "jit(step)/transpose(jvp())/while"
    named, at = f'metadata={{op_name="{loop}"}}', 'source_file="/own/a.py" source_line='
    text = f"""HloModule m

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %n = f32[4]{{0}} negate(%x), metadata={{op_name="{loop}/body/neg" {at}3}}, {cycles(3)}
  %c = f32[4]{{0}} copy(%n), {cycles(2)}
  ROOT %t = (s32[], f32[4]) tuple(%next, %c)
}}

%less (s.1: (s32[], f32[4])) -> pred[] {{
  %s.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %four = s32[] constant(4)
  ROOT %less.1 = pred[] compare(%i.1, %four), direction=LT
}}

ENTRY %main (x: f32[4]) -> (s32[], f32[4]) {{
  %x.1 = f32[4]{{0}} parameter(0)
  %sin = f32[4]{{0}} sine(%x.1), metadata={{op_name="jit(step)/sin" {at}7}}, {cycles(9)}
  %w = f32[4]{{0}} copy(%sin), metadata={{op_name="{body}/jit(where)/select" {at}1}}, {cycles(5)}
  %zero = s32[] constant(0)
  %begin = (s32[], f32[4]) tuple(%zero, %w)
  ROOT %l = (s32[], f32[4]) while(%begin), condition=%less, body=%body, {named}
}}
"""
    rows = [(row.source, row.pass_name, row.seconds) for row in estimate(text).time.rows]
    assert sorted(row for row in rows if row[2]) == [
        ("/own/a.py:3", "backward", 4 * 2),
        ("/own/a.py:3", "backward", 4 * 3),
        ("/own/a.py:7", "forward", 5),
        ("/own/a.py:7", "forward", 9),
    ]


def multiplied(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def three_times(x: jax.Array, w: jax.Array) -> jax.Array:
    x = multiplied(x, w)
    x = multiplied(x.T, w)
    return multiplied(x[::-1], w)


def test_rows_of_a_helper_have_its_callers() -> None:
    size = jax.ShapeDtypeStruct((512, 512), "float32")
    gpu = Links(DEVICES["cuda", "h100"], (1,), ((0,),))
    time = estimate(lab.measure(three_times, size, size).hlo, gpu).time
    here, helper = three_times.__code__, multiplied.__code__.co_firstlineno + 1
    products = [row for row in time.rows if row.kind == "products"]
    assert {row.source for row in products} == {f"{__file__}:{helper}"}
    assert sorted(filter(None, (row.caller for row in products))) == [
        f"{__file__}:{here.co_firstlineno + turn}" for turn in (1, 2, 3)
    ]


# ---- what overlaps ----------------------------------------------------------------------------


def permute(beside: int) -> str:
    """A permutation of 40 bytes, 40 s on the link, beside so many cycles of compute."""
    return f"""HloModule m

ENTRY %main (x: f32[10]) -> f32[10] {{
  %x = f32[10]{{0}} parameter(0)
  %s = (f32[10]{{0}}, f32[10]{{0}}, u32[], u32[]) collective-permute-start(%x),
    source_target_pairs={{{{0,1}}}}
  %n = f32[10]{{0}} negate(%x), {cycles(beside)}
  %d = f32[10]{{0}} collective-permute-done(%s)
  ROOT %a = f32[10]{{0}} add(%n, %d), {cycles(5)}
}}
"""


@pytest.mark.parametrize(("beside", "exposed"), [(15, 25), (60, 0)])
def test_a_start_runs_beside_what_stands_before_its_done(beside: int, exposed: int) -> None:
    time = estimate(permute(beside)).time
    assert (time.compute_seconds, time.collective_seconds) == (beside + 5, 40)
    assert (time.exposed_seconds, time.step_seconds) == (exposed, beside + 5 + exposed)
    assert time.range_seconds == (max(beside + 5, 40), beside + 5 + 40)
    assert time.launches == 2


def test_one_instruction_stops_the_compute() -> None:
    """All-gather of 40 bytes over two devices: each receives 20."""
    text = f"""HloModule m

ENTRY %main (x: f32[5]) -> f32[10] {{
  %x = f32[5]{{0}} parameter(0)
  %n = f32[5]{{0}} negate(%x), {cycles(3)}
  ROOT %g = f32[10]{{0}} all-gather(%n), dimensions={{0}}, replica_groups={{{{0,1}}}}
}}
"""
    time = estimate(text).time
    assert (time.collective_seconds, time.exposed_seconds, time.step_seconds) == (20, 20, 23)


def chained(parts: int) -> str:
    """One collective that the TPU compiler spread over fusions of 4 cycles each."""
    fused = "\n".join(
        f"""%part{part} (p: f32[5]) -> f32[10] {{
  %p = f32[5]{{0}} parameter(0)
  ROOT %g = f32[10]{{0}} all-gather(%p), channel_id=1, dimensions={{0}},
    replica_groups={{{{0,1}}}}, frontend_attributes={{chain_id="1"}}
}}
"""
        for part in range(parts)
    )
    run = "\n".join(
        f"  %f{part} = f32[10]{{0}} fusion(%x), kind=kCustom, calls=%part{part}, {cycles(4)}"
        for part in range(parts)
    )
    return (
        f"HloModule m\n\n{fused}\nENTRY %main (x: f32[5]) -> f32[10] {{\n"
        f"  %x = f32[5]{{0}} parameter(0)\n{run}\n}}\n"
    )


def test_a_chain_of_fusions_is_one_collective() -> None:
    """20 s on the link, of which the three fusions that carry it hide 4 s each."""
    time = estimate(chained(3)).time
    assert (time.compute_seconds, time.collective_seconds, time.exposed_seconds) == (12, 20, 8)


def test_every_collective_of_a_fusion_counts() -> None:
    one = """  %g{name} = f32[10]{{0}} all-gather(%p), dimensions={{0}}, replica_groups={{{{0,1}}}}
"""
    text = (
        "HloModule m\n\n%both (p: f32[5]) -> (f32[10], f32[10]) {\n  %p = f32[5]{0} parameter(0)\n"
        + one.format(name="a")
        + one.format(name="b")
        + """  ROOT %t = (f32[10]{0}, f32[10]{0}) tuple(%ga, %gb)
}

ENTRY %main (x: f32[5]) -> (f32[10], f32[10]) {
  %x = f32[5]{0} parameter(0)
  ROOT %f = (f32[10]{0}, f32[10]{0}) fusion(%x), kind=kCustom, calls=%both
}
"""
    )
    assert estimate(text).time.collective_seconds == 20 + 20


def test_a_branch_counts_once() -> None:
    branch = """%{name} (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %n = f32[4]{{0}} negate(%p), {cycles}
}}
"""
    text = (
        "HloModule m\n\n"
        + branch.format(name="short", cycles=cycles(2))
        + branch.format(name="long", cycles=cycles(9))
        + """ENTRY %main (x: f32[4], c: pred[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = pred[] parameter(1)
  ROOT %y = f32[4]{0} conditional(%c, %x, %x), true_computation=%long, false_computation=%short
}
"""
    )
    found = estimate(text)
    time = found.time
    assert (time.compute_seconds, time.launches) == (9, 1)
    assert sum(row.seconds for row in time.rows) == 9
    assert found.notes == (
        "the estimated time takes the longest branch of 1 conditional, and less where another runs",
    )
    # Of branches that take the same nothing is to be said.
    assert estimate(text.replace('"9"', '"2"')).notes == estimate(LOOP).notes == ()


@pytest.mark.parametrize(("clock", "words"), [(1.0, "cycles"), (None, "longest branches")])
def test_the_longest_branch_is_no_lower_bound(clock: float | None, words: str) -> None:
    """Another branch may run and take less: neither a table nor a sentence may say ≥."""
    large = "f32[5000]{0}"
    text = f"""HloModule m

%long (p: f32[5000]) -> f32[5000] {{
  %p = {large} parameter(0)
  ROOT %s = {large} negate(%p)
}}

%short (q: f32[5000]) -> f32[5000] {{
  ROOT %q = {large} parameter(0)
}}

ENTRY %main (x: f32[5000], c: pred[]) -> f32[5000] {{
  %x = {large} parameter(0)
  %c = pred[] parameter(1)
  ROOT %y = {large} conditional(%c, %x, %x), true_computation=%long, false_computation=%short
}}
"""
    found = estimate(text, Links(dataclasses.replace(SIMPLE, clock=clock), (2,), ((0,), (1,))))
    time = found.time
    assert (time.compute_seconds, len(found.notes)) == (400, 1)
    assert (time.is_lower_bound, time.is_partial, time.is_open) == (False, False, True)
    assert not {*"≥≳"} & {*estimated(time, "step_seconds")}
    assert words in basis_of(time)


def test_products_of_one_branch_count() -> None:
    """Both branches multiply, and one of them runs: HFU is what that one takes at the peak."""
    branch = """%{name} (p: bf16[10,10]) -> bf16[10,10] {{
  %p = bf16[10,10]{{1,0}} parameter(0)
  ROOT %d = bf16[10,10]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}},
    rhs_contracting_dims={{0}}, {cycles}
}}
"""
    text = (
        "HloModule m\n\n"
        + branch.format(name="short", cycles=cycles(2))
        + branch.format(name="long", cycles=cycles(4))
        + """ENTRY %main (x: bf16[10,10], c: pred[]) -> bf16[10,10] {
  %x = bf16[10,10]{1,0} parameter(0)
  %c = pred[] parameter(1)
  ROOT %y = bf16[10,10]{1,0} conditional(%c, %x, %x), true_computation=%long,
    false_computation=%short
}
"""
    )
    assert estimate(text).time.hfu == 2 * 10**3 / 1000 / 4


def twice(trips: str) -> str:
    """The body of `LOOP` in two loops; the second ends as said."""
    second = LOOP.replace("%five = s32[] constant(5)", trips).partition("%cond")[2]
    condition = "%cond2" + second.partition("ENTRY")[0]
    text = LOOP.replace("ENTRY", f"{condition}ENTRY")
    return text.replace(
        "  %y = f32[4]{0} get-tuple-element(%loop), index=1\n  ROOT",
        "  %again = (s32[], f32[4]{0}) tuple(%zero, %x)\n"
        "  %loop2 = (s32[], f32[4]{0}) while(%again), condition=%cond2, body=%body\n"
        "  %y = f32[4]{0} get-tuple-element(%loop2), index=1\n  ROOT",
    )


@pytest.mark.parametrize(("trips", "seconds"), [(3, (5 + 3) * 7 + 3), (0, 5 * 7 + 3)])
def test_each_loop_has_its_own_trips(trips: int, seconds: int) -> None:
    time = estimate(twice(f"%five = s32[] constant({trips})")).time
    assert time.compute_seconds == sum(row.seconds for row in time.rows) == seconds


def test_a_loop_of_unknown_length() -> None:
    text = LOOP.replace(
        "%five = s32[] constant(5)", '%five = s32[] custom-call(), custom_call_target="when"'
    )
    found = estimate(text)
    assert {(one.name, one.executed) for one in found.unread} == {("y", None)}
    time = found.time
    assert (time.compute_seconds, time.step_seconds, time.launches) == (None, None, None)
    assert time.known_seconds == sum(row.seconds for row in time.rows) == 3


# ---- what nothing is known of -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("send(%x, %t), channel_id=1", "a transfer of a kind that is not counted"),
        ("collective-broadcast(%x), replica_groups={{0,1}}", "a transfer of a kind"),
        ("frobnicate(%x)", "an opcode that is not known"),
    ],
)
def test_what_is_not_known_is_named(line: str, reason: str) -> None:
    text = (
        "HloModule m\n\nENTRY %main (x: f32[2000]) -> f32[2000] {\n"
        "  %x = f32[2000]{0} parameter(0)\n  %t = token[] after-all()\n"
        f"  ROOT %s = f32[2000]{{0}} {line}\n}}\n"
    )
    found = estimate(text)
    (unread,) = found.unread
    assert (unread.name, reason in unread.reason) == ("s", True)
    assert found.time.step_seconds is None


def moved(space: int, beside: int) -> str:
    """4000 bytes that are brought to another memory, 40 s, beside so many cycles of compute."""
    return f"""HloModule m

ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %s = (f32[1000]{{0:S({space})}}, f32[1000]{{0}}, u32[]) copy-start(%x)
  %n = f32[1000]{{0}} negate(%x), {cycles(beside)}
  %d = f32[1000]{{0:S({space})}} copy-done(%s)
  ROOT %a = f32[1000]{{0}} add(%n, %n), {cycles(5)}
}}
"""


@pytest.mark.parametrize(("beside", "waits"), [(15, 25), (60, 0)])
def test_a_transfer_to_the_chip_takes_the_memory(beside: int, waits: int) -> None:
    time = estimate(moved(1, beside)).time
    assert (time.compute_seconds, time.memory_wait_seconds) == (beside + 5, waits)
    assert time.step_seconds == beside + 5 + waits


@pytest.mark.parametrize(("beside", "waits"), [(15, 85), (160, 0)])
def test_a_transfer_to_the_host_takes_the_way_there(beside: int, waits: int) -> None:
    time = estimate(moved(5, beside)).time  # 4000 bytes at 40 bytes per second
    assert (time.compute_seconds, time.memory_wait_seconds) == (beside + 5, waits)
    assert time.host_seconds == 100
    assert time.step_seconds == beside + 5 + waits


HOST_RING = f"""HloModule m

ENTRY %main (x: f32[1000], i: s32[]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[8000]{{0:S(5)}} custom-call(), custom_call_target="AllocateBuffer"
  %u = ((f32[8000]{{0:S(5)}}, f32[1000]{{0}}, s32[]), f32[8000]{{0:S(5)}}, u32[])
    dynamic-update-slice-start(%r, %x, %i)
  %n = f32[1000]{{0}} negate(%x), {cycles(30)}
  %w = f32[8000]{{0:S(5)}} dynamic-update-slice-done(%u)
  %s = ((f32[8000]{{0:S(5)}}, s32[]), f32[1000]{{0}}, u32[]) dynamic-slice-start(%w, %i)
  %d = f32[1000]{{0}} dynamic-slice-done(%s)
  ROOT %a = f32[1000]{{0}} add(%n, %d), {cycles(5)}
}}
""".replace("\n    dynamic", " dynamic")


def test_of_a_ring_on_the_host_only_the_slot_that_is_used_moves() -> None:
    time = estimate(HOST_RING).time
    assert time.host_seconds == 200  # one slot there and one back, not 8 of them
    assert time.memory_wait_seconds == 100 - 30 + 100
    assert (time.compute_seconds, time.step_seconds) == (35, 205)


def test_a_fusion_may_be_a_transfer_to_the_host_or_from_it() -> None:
    """So NVIDIA's compiler writes them, and turns the array before or after the transfer."""
    text = f"""HloModule m

%send (r: f32[8,10,100], x: f32[100,10], i: s32[]) -> f32[8,10,100] {{
  %r = f32[8,10,100]{{2,1,0:S(5)}} parameter(0)
  %x = f32[100,10]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %t = f32[10,100]{{1,0}} transpose(%x), dimensions={{1,0}}
  %b = f32[1,10,100]{{2,1,0}} bitcast(%t)
  ROOT %u = f32[8,10,100]{{2,1,0:S(5)}} dynamic-update-slice(%r, %b, %i, %i, %i)
}}

%fetch (r: f32[8,10,100], i: s32[]) -> f32[1,10,100] {{
  %r = f32[8,10,100]{{2,1,0:S(5)}} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,10,100]{{2,1,0}} dynamic-slice(%r, %i, %i, %i), dynamic_slice_sizes={{1,10,100}}
  ROOT %c = f32[1,10,100]{{1,2,0}} copy(%s)
}}

ENTRY %main (x: f32[100,10], i: s32[]) -> f32[1,10,100] {{
  %x = f32[100,10]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[8,10,100]{{2,1,0:S(5)}} custom-call(), custom_call_target="AllocateBuffer"
  %s = ((f32[8,10,100]{{2,1,0:S(5)}}), f32[8,10,100]{{2,1,0:S(5)}}, u32[]) fusion-start(%r, %x, %i)
    , kind=kCustom, calls=%send
  %n = f32[100,10]{{1,0}} negate(%x), {cycles(30)}
  %d = f32[8,10,100]{{2,1,0:S(5)}} fusion-done(%s)
  %g = ((f32[8,10,100]{{2,1,0:S(5)}}, s32[]), f32[1,10,100]{{1,2,0}}, u32[]) fusion-start(%d, %i)
    , kind=kCustom, calls=%fetch
  ROOT %f = f32[1,10,100]{{1,2,0}} fusion-done(%g)
}}
""".replace("\n    , kind", ", kind")
    time = estimate(text).time
    assert (time.host_seconds, time.memory_wait_seconds) == (200, 170)
    assert (time.compute_seconds, time.step_seconds) == (30, 200)


def test_work_in_the_memory_of_the_host_is_not_known() -> None:
    text = """HloModule m

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0:S(5)} parameter(0)
  ROOT %n = f32[1000]{0:S(5)} negate(%x)
}
"""
    found = estimate(text)
    assert {one.reason for one in found.unread} == {"work in the memory of the host"}
    assert found.time.step_seconds is None


def test_two_streams_of_a_gpu_take_no_less_time() -> None:
    text = """HloModule m

%wrapped (p: bf16[10,10]) -> bf16[10,10] {
  %p = bf16[10,10]{1,0} parameter(0)
  ROOT %d = bf16[10,10]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[10,10]) -> bf16[10,10] {
  %x = bf16[10,10]{1,0} parameter(0)
  %s = ((bf16[10,10]{1,0}), bf16[10,10]{1,0}) async-start(%x), calls=%wrapped
  ROOT %d = bf16[10,10]{1,0} async-done(%s)
}
"""
    gpu = dataclasses.replace(SIMPLE, clock=None, dimensions=0, memory=10_000.0)
    time = estimate(text, Links(gpu, (1,), ((0,),))).time
    assert (time.compute_seconds, time.launches, time.hfu) == (2.0, 1, 1.0)


def test_a_collective_of_a_gpu_is_no_launch() -> None:
    """What an all-reduce applies to each element is no instruction of its own."""
    text = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  %s = f32[10]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%sum
  %k = (f32[10]{0}, f32[10]{0}, u32[]) copy-start(%x)
  %l = f32[10]{0} copy-done(%k)
  ROOT %d = f32[10]{0} all-reduce-done(%s)
}
"""
    gpu = dataclasses.replace(SIMPLE, clock=None, dimensions=0)
    time = estimate(text, Links(gpu, (2,), ((0,), (1,)))).time
    assert (time.launches, time.collective_seconds) == (1, 40)  # the copy is one
    assert time.compute_seconds == 2 * 40 / 100


def test_a_dtype_whose_rate_is_not_known() -> None:
    text = """HloModule m

ENTRY %main (x: s64[10,10]) -> s64[10,10] {
  %x = s64[10,10]{1,0} parameter(0)
  ROOT %d = s64[10,10]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    found = estimate(text, Links(DEVICES["cuda", "h100"], (1,), ((0,),)))
    assert [one.reason for one in found.unread] == ["a product of s64, whose rate is not known"]
    assert (found.time.step_seconds, found.time.hfu) == (None, None)


H100 = DEVICES["cuda", "h100"]
HIGH, HIGHEST = ("high", "high"), ("highest", "highest")


@pytest.mark.parametrize(
    ("device", "asked", "tera"),
    [
        # What XLA's own kernel of each executes stands in its PTX (JAX 0.10.2): `mma` with tf32 for
        # float32 at the default alone, `fma.rn.f32` at `high` and `highest`.
        ("h100", ProductPrecision(("f32", "f32")), 495),
        ("h100", ProductPrecision(("f32", "f32"), HIGH), 67),
        ("h100", ProductPrecision(("f32", "f32"), ("default", "high")), 67),
        ("h100", ProductPrecision(("f32", "f32"), HIGHEST), 67),
        ("h100", ProductPrecision(("f32", "f32"), HIGH, in_library=True), 495),
        ("h100", ProductPrecision(("f32", "f32"), HIGHEST, in_library=True), 67),
        ("h100", ProductPrecision(("f32", "f32"), algorithm="dot_f32_f32_f32"), 67),
        ("h100", ProductPrecision(("f32", "f32"), algorithm="dot_tf32_tf32_f32"), 495),
        ("h100", ProductPrecision(("f32", "f32"), algorithm="dot_tf32_tf32_f32_x3"), 495 / 3),
        ("h100", ProductPrecision(("f32", "f32"), algorithm="dot_bf16_bf16_f32"), 989),
        ("h100", ProductPrecision(("f32", "f32"), algorithm="dot_bf16_bf16_f32_x6"), 989 / 6),
        ("h100", ProductPrecision(("bf16", "bf16"), HIGHEST), 989),
        ("h100", ProductPrecision(("f16", "f16"), algorithm="dot_f16_f16_f32"), 989),
        ("h100", ProductPrecision(("bf16", "f32")), 495),
        ("h100", ProductPrecision(("s8", "s8")), 1979),
        ("h100", ProductPrecision(("s32", "s32")), 33.5),
        ("h100", ProductPrecision(("f8e4m3fn", "f8e5m2"), algorithm="dot_any_f8_any_f8_f32"), 1979),
        ("h100", ProductPrecision(("f64", "f64"), algorithm="dot_f64_f64_f64"), 67),
        ("h100", ProductPrecision(("c64", "c64"), in_library=True), 495),
        ("h100", ProductPrecision(("c64", "c64"), HIGHEST, in_library=True), 67),
        ("h100", ProductPrecision(("c128", "c128"), in_library=True), 67),
        # The cycles of libtpu 0.0.42.1 for 4096³ are so many times those of bf16.
        ("v5p", ProductPrecision(("f32", "f32")), 459),
        ("v5p", ProductPrecision(("f32", "f32"), HIGH), 459 / 3),
        ("v5p", ProductPrecision(("f32", "f32"), HIGHEST), 459 / 6),
        ("v5p", ProductPrecision(("f32", "f32"), ("highest", "default")), 459 / 3),
        ("v5p", ProductPrecision(("bf16", "bf16"), HIGHEST), 459),
        ("v5p", ProductPrecision(("s8", "s8")), 918),
        ("v5p", ProductPrecision(("u8", "s4")), 918),
        ("v5p", ProductPrecision(("f8e5m2", "f8e5m2")), 918),
        ("v5p", ProductPrecision(("f8e4m3fn", "f8e4m3fn")), 459),
        ("v5p", ProductPrecision(("s16", "s16")), 459 / 4),
        ("v5p", ProductPrecision(("s32", "s32")), 459 / 10),
    ],
)
def test_the_rate_follows_what_a_product_asks_for(
    device: str, asked: ProductPrecision, tera: float
) -> None:
    kind = "cuda" if device == "h100" else "tpu"
    assert product_rate(DEVICES[kind, device], asked) == pytest.approx(tera * 1e12)


GEMM = """custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config={
    "gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],
    "rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["P","P"],
    "algorithm":"A"}}}"""
DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("product", "milliseconds"),
    [
        (DOT, 2 * 4096**3 / 495e9),
        (f"{DOT}, operand_precision={{highest,highest}}", 2 * 4096**3 / 67e9),  # 2.05
        (f"{DOT}, operand_precision={{high,high}}", 2 * 4096**3 / 67e9),
        (f"{DOT}, algorithm=dot_bf16_bf16_f32_x3", 3 * 2 * 4096**3 / 989e9),
        (GEMM.replace('"P"', '"HIGHEST"').replace('"A"', '"ALG_UNSET"'), 2 * 4096**3 / 67e9),
        (GEMM.replace('"P"', '"HIGH"').replace('"A"', '"ALG_UNSET"'), 2 * 4096**3 / 495e9),
        (
            GEMM.replace('"P"', '"DEFAULT"').replace('"A"', '"ALG_DOT_TF32_TF32_F32_X3"'),
            3 * 2 * 4096**3 / 495e9,
        ),
    ],
)
def test_a_product_of_a_gpu_takes_its_precision(product: str, milliseconds: float) -> None:
    text = (
        "HloModule m\n\nENTRY %main (x: f32[4096,4096]) -> f32[4096,4096] {\n"
        "  %x = f32[4096,4096]{1,0} parameter(0)\n"
        f"  ROOT %d = f32[4096,4096]{{1,0}} {product}\n}}\n"
    )
    time = estimate(text, Links(H100, (1,), ((0,),))).time
    assert 1e3 * (time.compute_seconds or 0) == pytest.approx(milliseconds)
    assert (time.is_lower_bound, time.hfu) == (True, pytest.approx(1.0))


def test_one_collective_after_the_other() -> None:
    """The loop's own collective waits until the links have sent what was started before it."""
    text = f"""HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%called (p: f32[10]) -> f32[10] {{
  %p = f32[10]{{0}} parameter(0)
  ROOT %r = f32[10]{{0}} all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%sum
}}

ENTRY %main (x: f32[10]) -> f32[10] {{
  %x = f32[10]{{0}} parameter(0)
  %s = (f32[10]{{0}}, f32[10]{{0}}) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}
  %c = f32[10]{{0}} call(%x), to_apply=%called
  %d = f32[10]{{0}} collective-permute-done(%s)
  ROOT %a = f32[10]{{0}} add(%c, %d), {cycles(5)}
}}
"""
    time = estimate(text).time
    assert (time.collective_seconds, time.exposed_seconds, time.step_seconds) == (80, 80, 85)
    assert time.range_seconds == (80, 85)


# ---- links ------------------------------------------------------------------------------------

MB = 10**6
V5P = DEVICES["tpu", "v5p"]
CUBE = tuple((x, y, z) for x in range(4) for y in range(4) for z in range(4))  # z is the fastest
RING, PAIRS = ((0, 1, 2, 3),), ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        # A closed line of four sends both ways: 3/4 of 8 MB at 200 GB/s, and three devices on.
        ("all-gather", RING, 6 * MB / 200e9 + 3e-6),
        ("all-reduce", RING, 12 * MB / 200e9 + 6e-6),
        ("reduce-scatter", RING, 24 * MB / 200e9 + 3e-6),
        # Of an all-to-all half crosses the middle: 4 devices × 8 MB / 2, over 2 × 2 links.
        ("all-to-all", RING, 4 * MB / 100e9 + 3e-6),
        ("all-to-all", (tuple(range(16)),), 4 * MB / 100e9 + 6e-6),
        ("all-to-all", (tuple(range(64)),), 4 * MB / 100e9 + 9e-6),
        # Every other device: two groups share each link.
        ("all-gather", PAIRS, 4 * MB / 100e9 + 1e-6),
        # A whole plane: two closed lines at a time, six devices on.
        ("all-gather", (tuple(range(16)),), 7.5 * MB / 400e9 + 6e-6),
        ("all-gather", ((5,),), 0.0),
        # Each to the next one, and the last round the corner to the first: one link each.
        ("collective-permute", ((0, 1), (1, 2), (2, 3), (3, 0)), 8 * MB / 100e9 + 1e-6),
        # Two pairs meet on the link from 1 to 2.
        ("collective-permute", ((0, 2), (1, 3)), 16 * MB / 100e9 + 2e-6),
        ("collective-permute", ((0, 0),), 0.0),
    ],
)
def test_collectives_on_a_torus(kind: str, groups: Any, seconds: float) -> None:
    found = Links(V5P, (4, 4, 4), CUBE).seconds(kind, 8 * MB, groups)
    assert found == pytest.approx(seconds, rel=1e-12)


def test_a_line_with_ends_sends_one_way() -> None:
    two = Links(V5P, (2, 2, 2), ((0, 0, 0), (1, 0, 0)))
    assert two.seconds("all-gather", 8 * MB, ((0, 1),)) == pytest.approx(4 * MB / 100e9 + 1e-6)
    four = Links(DEVICES["tpu", "v5e"], (4, 1), tuple((x, 0) for x in range(4)))
    across = four.seconds("all-to-all", 8 * MB, ((0, 1, 2, 3),))
    assert across == pytest.approx(8 * MB / 50e9 + 3e-6)  # 2 × 2 parts of 2 MB over the middle


def test_a_switch_joins_all_alike() -> None:
    device = DEVICES["cuda", "h100"]
    links = Links(device, (8,), tuple((number,) for number in range(8)))
    gathered = links.seconds("all-gather", 8 * MB, ((0, 2, 4, 6),))
    assert gathered == pytest.approx(6 * MB / 450e9 + 3 * device.launch)
    moved = links.seconds("collective-permute", 8 * MB, ((0, 7), (7, 0)))
    assert moved == pytest.approx(8 * MB / 450e9 + device.launch)


def collective(attributes: dict[str, str]) -> Instruction:
    return Instruction("c", "all-gather", (), (), "", attributes)


@pytest.mark.parametrize(
    ("text", "order", "groups"),
    [
        ("{{0,2},{1,3}}", "", ((0, 2), (1, 3))),
        ("{}", "", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", "", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", "", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", "", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", "", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b','a'}", "", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2]", "([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", "", None),  # a part of an axis
        ("all of them", "", None),
        ("{{0,1},{x}}", "", None),
        ("[3,2]<=[4]", "", None),
    ],
)
def test_groups_of_every_spelling(text: str, order: str, groups: Any) -> None:
    beside = {"device_ids": order} if order else {}
    assert groups_of(collective({"replica_groups": text, **beside}), 4) == groups


def test_pairs() -> None:
    found = pairs_of(collective({"source_target_pairs": "{{0,1},{1,0}}"}))
    assert found == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    "what",
    [
        "all-gather(%x), dimensions={0}, replica_groups=@new",
        "all-gather(%x), dimensions={0}, replica_groups={{0,9}}",
        "collective-permute(%x), source_target_pairs=@new",
    ],
)
def test_groups_that_cannot_be_read_are_named(what: str) -> None:
    text = (
        "HloModule m\n\nENTRY %main (x: f32[5]) -> f32[10] {\n  %x = f32[5]{0} parameter(0)\n"
        f"  ROOT %g = f32[10]{{0}} {what}\n}}\n"
    )
    found = estimate(text)
    (unread,) = found.unread
    assert (unread.name, unread.figures) == ("g", ("time",))
    assert (found.time.compute_seconds, found.time.collective_seconds) == (0, None)
    assert found.time.step_seconds is None
    assert "over devices or links that are not known" in unread.reason


# ---- the model's own figures ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["v5p", "v5e", "v6e", "tpu7x"])
def test_a_tpu_is_known_by_the_name_that_it_gives_itself(target: str) -> None:
    grid = "2x2x1" if target in ("v5p", "tpu7x") else "2x2"
    (device, *_) = Platform.parse(f"tpu:{target}:{grid}").devices(1)
    assert device_seen_as(device.device_kind) is DEVICES["tpu", target]


def test_other_devices_are_known_by_whole_names_alone() -> None:
    assert device_seen_as("NVIDIA H100 80GB HBM3") is DEVICES["cuda", "h100"]
    assert device_seen_as("NVIDIA H100 PCIe") is None
    assert device_seen_as("cpu") is None


def test_useful_operations_are_those_of_a_dense_model_without_remat() -> None:
    """Counted by the compiler for one device, but for two things that attention adds.

    Half of its products are masked, and its derivative computes the scores again.
    """
    config = small_config(
        model={"num_experts": 1, "num_experts_per_token": 1}, pipeline={"remat": "none"}
    )
    model, batch = new_model(config), jax.tree.map(jnp.asarray, packed_batch(config))
    compiled = jax.jit(jax.grad(lambda model: loss_of(model, batch)[0])).lower(model).compile()
    sizes, train = config.model, config.train
    tokens = train.global_batch * train.sequence_length
    scores = 2 * 2 * train.sequence_length * sizes.num_heads * sizes.head_dim
    masked = 3 * tokens * sizes.num_layers * scores / 2
    again = tokens * sizes.num_layers * scores / 2
    one = MeshConfig()
    assert matmul_flops(parse(compiled.as_text())) == useful_flops(config, one) + masked + again
    assert useful_flops(config, MeshConfig(fsdp=2)) == useful_flops(config, one) / 2


def test_a_token_needs_the_keys_of_its_window() -> None:
    """Half of the sequence on average; of 8 tokens with a window of 2 about 1.75 of 4."""
    model = small_config().model
    causal, whole, narrow = (
        flops_per_token(dataclasses.replace(model, sliding_window=window), 8)
        for window in (None, 8, 2)
    )
    assert causal == whole
    of_a_key = model.num_layers * 2 * 2 * model.num_heads * model.head_dim
    assert causal - narrow == of_a_key * (4 - 1.75)


def test_a_token_needs_the_experts_that_it_is_sent_to() -> None:
    config = small_config(model={"num_experts": 4, "num_experts_per_token": 2})
    more = dataclasses.replace(config.model, num_experts_per_token=3)
    expert = config.model.num_layers * 3 * 2 * config.model.embed_dim * config.model.mlp_dim
    assert flops_per_token(more, 8) - flops_per_token(config.model, 8) == expert


def test_the_share_of_bubbles() -> None:
    config = small_config(pipeline={"num_microbatches": 8})
    assert bubble_share(config, MeshConfig()) == 0
    assert bubble_share(config, MeshConfig(stage=4)) == 3 / 11


# ---- measurements -----------------------------------------------------------------------------

SAMPLE = Time(
    basis="cycles",
    known_seconds=1.0,
    compute_seconds=1.0,
    collective_seconds=2.0,
    exposed_seconds=1.0,
    memory_wait_seconds=0.0,
    host_seconds=0.0,
    step_seconds=2.0,
    range_seconds=(2.0, 3.0),
    hfu=0.5,
    launches=7,
    peak_flops=100.0,
    rows=estimate(LOOP).time.rows,
)


def test_time_is_kept_and_told() -> None:
    time = SAMPLE.of_model(useful_flops=50.0, bubble_share=0.25, program="")
    assert (time.mfu, time.bubble_share) == (50 / (2 * 100), 0.25)
    assert restored(Time, json.loads(json.dumps(dataclasses.asdict(time)))) == time
    told = time.to_json()
    assert tuple(told)[: len(KEYS)] == KEYS
    assert (told["basis"], told["range_seconds"]) == ("cycles", [2.0, 3.0])
    assert json.loads(json.dumps(told)) == told


def test_nothing_is_known_of_a_cpu() -> None:
    assert device_of("cpu", "") is None
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = lab.measure(lambda x: x @ x, x)
    assert found.time is None
    assert found.to_json()["time"] == dict.fromkeys(KEYS)
    kept = json.loads(json.dumps(found.to_cache()))
    assert Measurement.from_cache(kept, "then").time is None


MEASURED = """
import json, jax, jax.numpy as jnp
from nnx_pipeline import lab
x, w = (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16) for _ in range(2))
found = lab.measure(lambda x, w: x @ w, x, w, platform={platform!r})
print(json.dumps(found.to_json()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "compiler", "least"),
    [
        ("tpu:v5p:2x2x1", "libtpu", 0.8),
        ("tpu:v5e:2x2", "libtpu", 0.8),
        ("tpu:v6e:2x2", "libtpu", 0.65),
        ("tpu:tpu7x:2x2x1", "libtpu", 0.8),
        ("cuda:h100:8", "jax_cuda13_plugin", 0.75),
        ("cuda:a100-80gb:8", "jax_cuda13_plugin", 0.99),
    ],
)
def test_a_large_product_comes_near_the_peak(platform: str, compiler: str, least: float) -> None:
    """The clocks and peaks of the table fit what the compilers say."""
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    done = run_fresh(MEASURED.format(platform=platform), environment=user_environment())
    assert done.code == 0, done.err
    time = done.json["time"]
    assert least < time["hfu"] <= 1.0
    assert time["known_seconds"] == time["compute_seconds"] == time["step_seconds"]
    assert math.isclose(
        time["step_seconds"] * time["hfu"],
        2 * 8192**3 / DEVICES[tuple(platform.split(":")[:2])].flops["bf16"],
        rel_tol=1e-6,
    )


PRECISE = """
import json, jax, jax.numpy as jnp
from nnx_pipeline import lab
x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
asked = {asked!r}
found = lab.measure(lambda x, w: jnp.matmul(x, w, precision=asked), x, x, platform={platform!r})
print(json.dumps(found.to_json()["time"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "compiler", "asked", "least", "at_peak"),
    [
        ("tpu:v5p:2x2x1", "libtpu", "high", 0.9, 3 * 2 * 4096**3 / 459e12),
        ("tpu:v5p:2x2x1", "libtpu", "highest", 0.9, 6 * 2 * 4096**3 / 459e12),
        # In TF32 XLA measured 403 TFLOP/s, of 495.
        ("cuda:h100:1", "jax_cuda13_plugin", "default", 0.8, 2 * 4096**3 / 495e12),
        ("cuda:h100:1", "jax_cuda13_plugin", "highest", 0.9, 2 * 4096**3 / 67e12),
    ],
)
def test_a_precise_product_comes_near_its_peak(
    platform: str, compiler: str, asked: str, least: float, at_peak: float
) -> None:
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    program = PRECISE.format(platform=platform, asked=asked)
    done = run_fresh(program, environment=user_environment())
    assert done.code == 0, done.err
    time = done.json
    assert least < time["hfu"] <= 1.0
    assert time["step_seconds"] * time["hfu"] == pytest.approx(at_peak)

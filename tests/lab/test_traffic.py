"""The bytes that an instruction moves at the least, each case a sum by hand."""

import dataclasses

import pytest
from test_timing import LINE, SIMPLE, estimate, kernel

from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab._timing.devices import DEVICES
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab._timing.traffic import Traffic

SUM = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
# Updates of 5000 bytes and indices of 500, in a fusion of a fusion.
NESTED = (
    SUM
    + """
%inner (t: f32[ROWS,10], i: s32[125], u: f32[125,10]) -> f32[ROWS,10] {
  %t = f32[ROWS,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  %u = f32[125,10]{1,0} parameter(2)
  ROOT %w = f32[ROWS,10]{1,0} scatter(%t, %i, %u), update_window_dims={1}, to_apply=%sum
}

%outer (t: f32[ROWS,10], i: s32[125], u: f32[125,10]) -> f32[ROWS,10] {
  %t = f32[ROWS,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  %u = f32[125,10]{1,0} parameter(2)
  %s = f32[ROWS,10]{1,0} bitcast(%t)
  ROOT %f = f32[ROWS,10]{1,0} fusion(%s, %i, %u), kind=kCustom, calls=%inner
}

ENTRY %main (t: f32[ROWS,10], i: s32[125], u: f32[125,10]) -> f32[ROWS,10] {
  %t = f32[ROWS,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  %u = f32[125,10]{1,0} parameter(2)
  ROOT %g = f32[ROWS,10]{1,0} fusion(%t, %i, %u), kind=kCustom, calls=%outer
}
"""
)
GATHER = """HloModule m

%fused (t: f32[ROWS,10], i: s32[125]) -> f32[125,10] {
  %t = f32[ROWS,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  %n = f32[ROWS,10]{1,0} negate(%t)
  ROOT %g = f32[125,10]{1,0} gather(%n, %i), offset_dims={1}, slice_sizes={1,10}
}

ENTRY %main (t: f32[ROWS,10], i: s32[125]) -> f32[125,10] {
  %t = f32[ROWS,10]{1,0} parameter(0)
  %i = s32[125]{0} parameter(1)
  ROOT %f = f32[125,10]{1,0} fusion(%t, %i), kind=kCustom, calls=%fused
}
"""


def bytes_of(text: str) -> int:
    module = parse(text)
    entry = module.computations[module.entry]
    return Traffic(module).of(entry, entry.instructions[entry.root])


@pytest.mark.parametrize(("rows", "size"), [(1000, 5000 + 500 + 5000), (3, 5000 + 500 + 120)])
def test_a_scatter_in_a_fusion_of_a_fusion(rows: int, size: int) -> None:
    """It writes what it updates, and no more than its table has, whatever that is wrapped in."""
    assert bytes_of(NESTED.replace("ROWS", str(rows))) == size


@pytest.mark.parametrize(("rows", "size"), [(1000, 5000 + 500 + 5000), (3, 120 + 500 + 5000)])
def test_a_gather_reads_a_small_table_once(rows: int, size: int) -> None:
    """The rows of a large table are read one by one, also behind what is made of each element."""
    text = GATHER.replace("ROWS", str(rows))
    assert bytes_of(text) == size
    alone = text.replace("fusion(%t, %i), kind=kCustom, calls=%fused", "gather(%t, %i)")
    assert bytes_of(alone) == size - 500


def test_an_array_that_a_fusion_makes_is_written_whole() -> None:
    text = NESTED.replace("bitcast(%t)", "negate(%t)").replace("ROWS", "1000")
    assert bytes_of(text) == 40_000 + 500 + 5000 + 40_000


@pytest.mark.parametrize(("place", "size"), [("", 16_000), ("S(1)", 0)])
def test_what_lies_on_the_chip_takes_no_memory(place: str, size: int) -> None:
    """A sort of it is a bound still, since nothing says how long it takes."""
    text = (
        SUM
        + f"""
ENTRY %main (x: f32[2000]) -> f32[2000] {{
  %x = f32[2000]{{0:T(1024){place}}} parameter(0)
  ROOT %s = f32[2000]{{0:T(1024){place}}} sort(%x), dimensions={{0}}, to_apply=%sum
}}
"""
    )
    found = estimate(text)
    assert (found.time.compute_seconds, found.time.is_partial) == (size / 100, True)
    assert [one.name for one in found.bounds] == ["s"]
    # On a GPU S(1) is memory of the device too.
    gpu = Links(dataclasses.replace(SIMPLE, clock=None), LINE.shape, LINE.places)
    assert estimate(text, gpu).time.compute_seconds == 160


@pytest.mark.parametrize(("dtype", "rate"), [("bf16", 989e12), ("f8e4m3fn", 1979e12)])
def test_a_roofline_holds_of_a_kernel_too(dtype: str, rate: float) -> None:
    """A kernel may be better than most, and multiply what it reads at the rate of its dtype."""
    text = kernel('{"cost_estimate":{"flops":"989000000000","bytes_accessed":"5"}}')
    found = estimate(text.replace("bf16", dtype), Links(DEVICES["cuda", "h100"], (1,), ((0,),)))
    assert found.time.compute_seconds == pytest.approx(989e9 / rate)
    assert (found.time.is_lower_bound, found.time.hfu) == (True, pytest.approx(1.0))

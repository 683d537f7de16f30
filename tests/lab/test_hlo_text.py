"""Reading HLO text by its brackets: over lines, with what is not understood named or refused."""

from collections.abc import Iterator

import pytest
from hlo_texts import SPLASH, Printer, matmul_flops, with_line_breaks

from nnx_pipeline.lab._hlo import cost as hlo_cost
from nnx_pipeline.lab._hlo import loops as hlo_loops
from nnx_pipeline.lab._hlo import module as hlo
from nnx_pipeline.lab._hlo.cost import Unread, unknown_opcodes
from nnx_pipeline.lab._hlo.dataflow import Flow
from nnx_pipeline.lab.attribution._origins import Origins
from nnx_pipeline.lab.attribution._roles import Roles
from nnx_pipeline.lab.compile._figures import read_program


def program(*lines: str, before: str = "") -> str:
    """A program of one computation, which begins in the fourth line, behind others."""
    return "\n".join(["HloModule m", "", before, "ENTRY %main {", *lines, "}", ""])


def entry(text: str) -> hlo.Computation:
    module = hlo.parse(text)
    return module.computations[module.entry]


P = "  %p = f32[4,4]{1,0} parameter(0)"
CALL = '  %k = f32[4,4] custom-call(%p, %p), custom_call_target="tpu_custom_call"'


# ---- what ends an instruction ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frontend_attributes", '{kernel_metadata={\n"xprof_metadata":"{\\"q\\": 1}"\n}}'),
        ("backend_config", '{"a":\n{"b":["}","{"]},\n"c":"\\\\"}'),
        ("backend_config", '"{\\"n\\":\n\\"1\\"}"'),
        ("replica_groups", "[4,2]<=[8]T(1,0)"),
        ("replica_groups", "mesh['axis_0'=4,'axis_1'=2] {'axis_1'}"),
        ("replica_groups", "{{0,1},\n{2,3}}"),
        ("device_ids", "([4,2]T(1,0)) {'axis_0'}"),
        ("window", "{size=3x3\npad=1_1x1_1}"),
        ("called_computations", "{%main,\n/*index=1*/%main}"),
        ("output_to_operand_aliasing", "{{0}: (1, {}), {1}: (2, {})}"),
        ("sharding", "{devices=[1,4,1,16]<=[64] metadata={op_name=\"a}\"}}"),
        ("schedule", "SCHEDULE_EARLIEST"),
    ],
)  # fmt: skip
def test_an_attribute_ends_where_its_brackets_close(key: str, value: str) -> None:
    lines = P, f'{CALL}, {key}={value}, metadata={{op_name="k"}}', "  ROOT %r = f32[4,4] tanh(%k)"
    found = entry(program(*lines))
    assert list(found.instructions) == ["p", "k", "r"]
    assert found.root == "r"
    kernel = found.instructions["k"]
    assert kernel.attributes[key] == value
    assert (kernel.op_name, kernel.operands) == ("k", ("p", "p"))


@pytest.mark.parametrize(
    "literal",
    [
        "{ { 1, 2 },\n  { 3, 4 } }",
        "{...}",
        "{ /*i0=0*/ {1}, /*}*/\n/*i0=1*/ {2} }",
        "(1, -inf)",
        '"}"',
    ],
)
def test_a_literal_may_span_lines(literal: str) -> None:
    found = entry(program(f"  %c = f32[2,2] constant({literal})", "  ROOT %t = f32[2,2] tanh(%c)"))
    assert found.instructions["c"].literal == literal
    assert found.root == "t"


def test_types_operands_and_header_may_span_lines() -> None:
    text = """HloModule jit_f, entry_computation_layout={(f32[2]{0},
  s32[])->(f32[2]{0},
  s32[])}, num_partitions=8

ENTRY main.1 (a: (f32[2],
    s32[])) -> (f32[2], s32[]) {
  a = (f32[2]{0},
    /*index=1*/s32[]) parameter(
    0)
  ROOT r = f32[2]{0} custom-call(a, /*index=1*/
    (f32[2], s32[]) %a), custom_call_target="x",
    metadata={op_name="r"
      source_file="/m.py" source_line=3}
}, execution_thread="main"
"""
    found = entry(text)
    assert hlo.parse(text).name == "jit_f"
    assert found.instructions["a"].shapes == (hlo.Shape("f32", (2,)), hlo.Shape("s32", ()))
    result = found.instructions["r"]
    assert result.operands == ("a", "a")
    assert (result.op_name, *result.frames[0][:2]) == ("r", "/m.py", 3)


def test_an_operand_may_be_an_element_of_a_tuple() -> None:
    """As libtpu 0.0.50 prints a program that it has not compiled to its end."""
    state = "(s32[], (f32[2,3]{1,0}, bf16[4]{0}), /*index=2*/f32[8]{0:T(256)S(5)})"
    lines = (
        f"  %p = {state} parameter(0)",
        "  %c = f32[8] fusion(%p#2, /*index=1*/%p#0, %p#2), kind=kLoop, calls=%main",
        f"  ROOT %r = {state} tuple(%p#0, %p#1, %c)",
    )
    found = entry(program(*lines))
    assert list(found.instructions) == ["p", "p#2", "p#0", "c", "p#1", "r"]
    shapes = {name: one.shapes for name, one in found.instructions.items() if "#" in name}
    assert shapes == {
        "p#2": (hlo.Shape("f32", (8,)),),
        "p#0": (hlo.Shape("s32", ()),),
        "p#1": (hlo.Shape("f32", (2, 3)), hlo.Shape("bf16", (4,))),
    }
    elements = [one for one in found.instructions.values() if "#" in one.name]
    assert {(one.opcode, one.operands) for one in elements} == {("get-tuple-element", ("p",))}
    assert [one.integers("index") for one in elements] == [(2,), (0,), (1,)]
    assert [one.in_host_memory for one in elements] == [True, False, False]
    assert found.instructions["c"].operands == ("p#2", "p#0", "p#2")


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_is_read_as_it_was_printed(seed: int) -> None:
    """White space, line breaks and comments stand wherever brackets are open."""
    printed = Printer(seed).program()
    module = hlo.parse(printed.text)
    assert {name: one.root for name, one in module.computations.items()} == printed.roots
    assert module.entry == "c.0"
    found = {
        name: instruction
        for computation in module.computations.values()
        for name, instruction in computation.instructions.items()
    }
    assert list(found) == list(printed.operands)
    for name, instruction in found.items():
        assert [(one.dtype, one.dims) for one in instruction.shapes] == printed.shapes[name]
        assert instruction.operands == printed.operands[name]
        assert instruction.attributes == printed.attributes[name]


# ---- what is not understood ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("  %x = f32[4] add(%p, %p", "line 6 .*another kind closes in line 7"),
        ("  %x = f32[4] add(%p, %p}", "line 6 .*another kind closes in line 6"),
        ("  %x = f32[4] add(%p, %p))", "line 6 .*closes nothing"),
        ('  %x = f32[4] add(%p, %p), metadata={op_name="a}', "line 6 .*never closed"),
        ('  %x = f32[4] add(%p, %p), name="a', "line 6 .*never closed"),
        ("  %x = f32[4] add(%p, %p), metadata={} /* a", "line 6 .*never closed"),
        ("  %x = f32[4] add(%p, %p) dimensions={0}", "line 6 .*other than a comma"),
        ("  %x = f32[4] add(%p, %p), fast", "line 6 .*'fast' has no value"),
        ("  %x = f32[4] add(%p, %p), a=1, a=2", "line 6 .*'a' has no value, or a second"),
        ("  %x = f32[4] add(%p, %p), {}=1", "line 6 .*names no attribute"),
        ("  %x = f32[4] add(%p, %q)", "line 6 .*x reads or calls 'q', not there"),
        ("  %x = f32[4] add(%p, %p#0)", "line 6 .*x reads or calls 'p#0', not there"),
        ("  %t = (f32[4], s32[]) tuple(%p, %p)\n  %x = f32[4] add(%t#0, %t#2)",
         "line 7 .*x reads or calls 't#2', not there"),
        ("  %x = f32[4] fusion(%p), calls=%f", "line 6 .*x reads or calls 'f', not there"),
        ("  %x = f32[4] fusion(%p)", "line 6 .*the fusion x has no calls"),
        ("  %x = f32[4] while(%p), body=%main", "line 6 .*the while x has no condition"),
        ("  %x = f32[4] conditional(%p)", "line 6 .*no true_computation and no false"),
        ("  %x = f32[4] get-tuple-element(%p)", "line 6 .*has no index"),
        ("  %x = f32[4] get-tuple-element(%p), index=a", "line 6 .*index of x is no number"),
        ("  %x = f32[4] parameter(first)", "line 6 .*the parameter x has no number"),
        ("  %x = f32[?] add(%p, %p)", "line 6 .*no size that is a number"),
        ("  %x = f32[4] %p", "line 6 .*no opcode in the instruction x"),
        ("  %x = add(%p, %p)", "line 6 .*not a type"),
        ("  %p = f32[4] add(%p, %p)", "line 6 .*a second instruction of the name p"),
        ("  x: f32[4]", "line 6 .*neither an instruction nor the end"),
        ("}\nwhat is this", "line 7 .*not the beginning of a computation"),
        ("}\n%other -> f32[] {", "line 7 .*not the beginning of a computation"),
        ("}\n%other (a: f32[]) {", "line 7 .*no result type of a computation"),
        ("}\n%f {\n  %x = f32[] iota()\n}\n%f {\n  %x = f32[] iota()", "line 10 .*a second"),
        ("}\n%other {", "line 7 .*has no instruction"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_an_error_with_its_line(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){says}"):
        hlo.parse(program(P, line))


def test_a_computation_that_never_ends() -> None:
    with pytest.raises(ValueError, match=r"line 4 .*computation main never ends"):
        hlo.parse(program(P).rstrip().removesuffix("}"))


def test_a_text_that_cannot_be_read_gives_no_figures_and_says_why() -> None:
    read = read_program(program(P, "  what is this"), None, 0)
    assert (read.flops, read.known_flops, read.attribution) == (None, None, None)
    assert set(read.collectives) == set(hlo_cost.COLLECTIVES)
    assert {value for count in read.collectives.values() for value in count.values()} == {None}
    (one,) = read.unread
    assert (one.what, one.figures) == ("the program", ("flops", "collectives", "buffers", "time"))
    assert "line 6 of the HLO text" in one.reason
    assert "what is this" in one.reason


def test_a_buffer_assignment_that_cannot_be_read_is_named() -> None:
    buffers = "allocation 0: size 64, preallocated-temp:\n value: a @0 of 64 bytes\n"
    read = read_program(program(P), buffers, 64)
    assert (read.flops, read.attribution) == (0, None)
    (one,) = read.unread
    assert (one.what, one.figures) == ("the buffer assignment", ("buffers", "account"))
    assert "line 2 " in one.reason
    assert read_program(program(P), None, 64).unread == ()


# ---- what no figure can read -----------------------------------------------------------------


def unread_of(*lines: str, before: str = "") -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Figures that leave an instruction out, and how often it runs, by its name."""
    read = read_program(program(P, *lines, before=before), None, 0)
    return {one.name: (one.figures, one.executed) for one in read.unread}


DOT = "f32[4,4] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
INNER = f"%inner {{\n{P}\n  ROOT %d = {DOT}\n}}"
SENDING = "%inner {\n  %p = f32[4,4] parameter(0)\n  ROOT %d = f32[4,4] all-reduce(%p)\n}"


def test_a_kernel_is_named_and_the_other_products_are_known() -> None:
    """Also with a single matrix, which it may multiply by itself."""
    kernel = '  %k = f32[4,4] custom-call(%p), custom_call_target="tpu_custom_call"'
    read = read_program(program(P, kernel, f"  ROOT %o = {DOT}"), None, 0)
    assert (read.flops, read.known_flops) == (None, 128)
    assert read.unread == (
        Unread(
            name="k",
            what="tpu_custom_call",
            figures=("flops",),
            executed=1,
            reason="a kernel written by hand that states no operations",
        ),
    )


def test_a_kernel_that_sends_is_missing_in_the_collectives_too() -> None:
    config = '"custom_call_config":{"body":"","has_communication":true,"collective_id":3}'
    both = {"k": (("flops", "collectives"), 1)}
    assert unread_of(f"{CALL}, backend_config={{{config}}}") == both


BUFFERS, FLOPS, SENT = (("buffers",), 1), (("flops",), None), (("collectives",), 1)
LIBRARY = 'custom-call(%p), custom_call_target="a", called_computations={%inner}'


@pytest.mark.parametrize(
    ("line", "before", "expected"),
    [
        ("f32[4,4] sigmoid(%p)", "", {"x": BUFFERS}),
        ("f32[4,4] matmul(%p, %p)", "", {"x": (("flops", "buffers"), 1)}),
        ("f32[4,4] spread(%p), channel_id=1", "", {"x": (("collectives", "buffers"), 1)}),
        ("f32[4,4] scan(%p), to_apply=%inner", INNER, {"d": FLOPS, "x": BUFFERS}),
        ("f32[4,4] scan(%p), each=%inner", INNER, {"d": FLOPS, "x": BUFFERS}),
        ("f32[4,4] tanh(%p), each=%inner", SENDING, {"d": (("collectives",), None)}),
        ("f32[4,4] tanh(%p), helper=%inner", INNER, {"d": FLOPS}),
        (f"f32[4,4] {LIBRARY}", INNER, {"d": FLOPS}),
        ("f32[4,4] collective-broadcast(%p), channel_id=1", "", {"x": SENT}),
        ("(f32[4,4], u32[]) send(%p), channel_id=1", "", {"x": SENT}),
        ("(f32[4,4], u32[]) send(%p), channel_id=1, is_host_transfer=true", "", {}),
        ("f32[4,4] scatter(%p, %p), to_apply=%inner, channel_id=1", INNER, {}),
    ],
)
def test_each_figure_names_what_it_cannot_read(
    line: str, before: str, expected: dict[str, tuple[tuple[str, ...], int | None]]
) -> None:
    assert unread_of(f"  ROOT %x = {line}", before=before) == expected


def test_a_product_in_an_endless_loop_is_named() -> None:
    body = INNER.replace("%inner", "%body")
    condition = "%condition {\n  %p = f32[4,4] parameter(0)\n  ROOT %m = pred[] is-finite(%p)\n}"
    loop = "  ROOT %w = f32[4,4] while(%p), condition=%condition, body=%body"
    assert unread_of(loop, before=f"{body}\n{condition}") == {"d": (("flops",), None)}


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("dot", "(%p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
        ("fusion", "(%p), calls=%inner"),
        ("call", '(%p), async_execution_thread="sparsecore", to_apply=%inner'),
        ("async", "(%p), calls=%inner"),
    ],
)
def test_an_asynchronous_product_counts_once(kind: str, call: str) -> None:
    if kind == "dot":
        call = call.replace("%p", "%p, %p")
    operands = "(f32[4,4], f32[4,4])" if kind == "dot" else "(f32[4,4])"
    lines = (
        f"  %x = ({operands}, f32[4,4], u32[]) {kind}-start{call}",
        f"  %u = ({operands}, f32[4,4], u32[]) {kind}-update(%x)",
        f"  ROOT %y = f32[4,4] {kind}-done(%u)",
    )
    assert matmul_flops(hlo.parse(program(P, *lines, before=INNER))) == 128


def test_values_are_followed_through_an_asynchronous_call() -> None:
    lines = (
        "  %q = f32[4,4] parameter(0)",
        "  %x = ((f32[4,4]), f32[4,4], u32[]) call-start(%q), to_apply=%inner",
        "  ROOT %y = f32[4,4] call-done(%x)",
    )
    flow = Flow(hlo.parse(program(*lines, before=INNER)))
    assert flow.lineage(("y", ()))[-1].name == "d"
    assert flow.lineage(("x", (0, 0)))[-1].name == "q"
    assert ("y", ()) in [handed for _, handed in flow.readers(("x", (1,)))]
    assert ("x", (1,)) in [handed for _, handed in flow.readers(("d", ()))]


# ---- a program with JAX's splash attention ---------------------------------------------------


def test_splash_attention_in_a_scanned_layer() -> None:
    """Three layers on 8 devices: four products and a mean over the batch around the kernel."""
    module = hlo.parse(SPLASH)
    runs = hlo_loops.executions(module)
    assert (runs["wide.region_0.3_spmd.sunk"], runs["wide.region_2.4_spmd"]) == (3, 4)
    read = read_program(SPLASH, None, 0)
    assert (read.flops, read.known_flops) == (None, 3 * 4 * 2 * 256**3)
    assert read.collectives["all-reduce"] == {
        "ops": 2,
        "executed": 4,
        "bytes": 4 * (3 * 256**2 + 1),
    }
    names = [(one.name, one.executed, one.figures) for one in read.unread]
    assert names == [("splash_mha_fwd_no_residuals.1", 3, ("flops",))]


def test_what_the_caller_of_a_kernel_says_of_it() -> None:
    """The attribute that bears the kernel's name counts, and that of another kernel does not."""
    said = 'frontend_attributes={splash_mha_dq="flops=5 bytes_accessed=6",'
    said += 'splash_mha_fwd="flops=1000 bytes_accessed=20",'
    lines = [
        line.replace("frontend_attributes={", said) if "tpu_custom_call" in line else line
        for line in SPLASH.splitlines()
    ]
    read = read_program("\n".join(lines), None, 0)
    assert (read.flops, read.unread) == (3 * (4 * 2 * 256**3 + 1000), ())


def test_lines_and_roles_behind_the_kernel() -> None:
    flow = Flow(hlo.parse(SPLASH))
    origins = Origins(flow)
    roles = Roles(flow, origins)
    lines = {"fusion.52": 15, "all-reduce.3": 16, "multiply_reduce_fusion": 17}
    assert {name: origins.of((name, ())).source for name in lines} == {
        name: f"/home/me/model.py:{line}" for name, line in lines.items()
    }
    shape = hlo.Shape("bf16", (1, 256, 256))
    assert roles.of(("get-tuple-element.121", ()), shape) == "parameter copy"
    assert roles.of(("wide.param.0", (1,)), shape) == "scan carry"


def test_line_breaks_change_nothing() -> None:
    broken = with_line_breaks(SPLASH)
    assert broken.count("\n") > 3 * SPLASH.count("\n")
    assert read_program(broken, None, 0) == read_program(SPLASH, None, 0)
    assert list(lines_of(broken)) == list(lines_of(SPLASH))


def lines_of(text: str) -> Iterator[tuple[str, str, str | None]]:
    flow = Flow(hlo.parse(text))
    origins = Origins(flow)
    for name in flow.instructions:
        found = origins.of((name, ()))
        yield name, found.operation, found.source


def test_no_opcode_of_a_real_program_is_unknown() -> None:
    module = hlo.parse(SPLASH)
    assert unknown_opcodes(module, hlo_loops.executions(module)) == ()


# ---- fingerprints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("model.py", "other.py", True),
        ("jit(step)/while/body/closed_call/tanh", "jit(step)/{a}/tanh", True),
        ("stack_frame_id=21", "stack_frame_id=3", True),
        ('\\"block_q\\": 128', '\\"block_q\\": 64', False),
        ("dynamic_slice_sizes={1,256,256}", "dynamic_slice_sizes={1,256,255}", False),
    ],
)
def test_the_fingerprint_is_that_of_the_instructions(old: str, new: str, same: bool) -> None:
    """Those of all lines of an instruction, and nothing of where it comes from."""
    assert old in SPLASH
    assert (hlo.fingerprint(SPLASH.replace(old, new)) == hlo.fingerprint(SPLASH)) == same


def test_the_fingerprint_of_a_text_without_percent_signs() -> None:
    plain = SPLASH.replace("%", "")
    assert hlo.fingerprint(plain) != hlo.fingerprint(plain.replace("tanh(", "sine("))

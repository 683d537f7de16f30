"""Values followed through a program's text to the line that asked for them, and their role."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx_pipeline
from nnx_pipeline import lab
from nnx_pipeline.lab._hlo import module as hlo
from nnx_pipeline.lab._hlo.dataflow import Flow, Value, collective
from nnx_pipeline.lab._hlo.module import Instruction, Shape
from nnx_pipeline.lab._tracing.installed import in_program
from nnx_pipeline.lab._tracing.jaxpr import called_from_one_line
from nnx_pipeline.lab.attribution._origins import Origins, source_of
from nnx_pipeline.lab.attribution._roles import Roles
from nnx_pipeline.lab.lint import lint

# A loop that stacks sin(w x) in `rows`, hands `kept` on as it is, and sums into `total`.
SHARDING = Path(nnx_pipeline.__file__).with_name("sharding") / "layout.py"
TEXT = """HloModule jit_f

FileNames
1 "/home/me/model.py"
2 "/venv/lib/python3.11/site-packages/optax/update.py"
3 "SHARDING"

FunctionNames
1 "loss"
2 "apply"
3 "Model.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=1 function_name_id=3 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=2 function_name_id=2 line=30 end_line=30 column=1 end_column=2}
4 {file_name_id=3 function_name_id=2 line=40 end_line=40 column=1 end_column=2}
5 {file_name_id=1 function_name_id=3 line=50 end_line=50 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=3}
5 {file_location_id=5 parent_frame_id=2}

%sine (a: f32[8,4]) -> f32[1,8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %sin = f32[8,4]{1,0} sine(%a), metadata={op_name="jit(f)/jvp()/while/body/sin" stack_frame_id=5}
  ROOT %flat = f32[1,8,4]{2,1,0} bitcast(%sin)
}

%body (s: (s32[], f32[3,8,4], f32[8,4], f32[8,4])) -> (s32[], f32[3,8,4], f32[8,4], f32[8,4]) {
  %s = (s32[], f32[3,8,4], f32[8,4], f32[8,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %rows = f32[3,8,4]{2,1,0} get-tuple-element(%s), index=1
  %kept = f32[8,4]{1,0} get-tuple-element(%s), index=2
  %total = f32[8,4]{1,0} get-tuple-element(%s), index=3
  %row = f32[1,8,4]{2,1,0} fusion(%kept), kind=kLoop, calls=%sine
  %new = f32[3,8,4]{2,1,0} dynamic-update-slice(%rows, %row, %i, %i, %i), \
metadata={op_name="jit(f)/jvp()/while/body/dynamic_update_slice" stack_frame_id=2}
  %sum = f32[8,4]{1,0} add(%total, %kept), \
metadata={op_name="jit(f)/transpose(jvp())/while/body/add_any" stack_frame_id=3}
  ROOT %out = (s32[], f32[3,8,4], f32[8,4], f32[8,4]) tuple(%i, %new, %kept, %sum)
}

%cond (s: (s32[], f32[3,8,4], f32[8,4], f32[8,4])) -> pred[] {
  %s.1 = (s32[], f32[3,8,4], f32[8,4], f32[8,4]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (w: f32[8,4]) -> f32[3,8,4] {
  %w = f32[8,4]{1,0} parameter(0), metadata={op_name="model.w"}
  %zero = s32[] constant(0)
  %empty = f32[3,8,4]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %copy = f32[8,4]{1,0} copy(%w)
  %half = bf16[8,4]{1,0} convert(%w)
  %gather = bf16[16,4]{1,0} all-gather(%half), dimensions={0}, \
metadata={op_name="jit(f)/reshard" stack_frame_id=4}
  %where = f32[8,4]{1,0} select(%w, %w, %w), \
metadata={op_name="jit(f)/jit(_where)/select_n" stack_frame_id=2}
  %own = f32[8,4]{1,0} negate(%w), metadata={op_name="jit(f)/jit(loss)/neg" stack_frame_id=1}
  %start = (s32[], f32[3,8,4], f32[8,4], f32[8,4]) tuple(%zero, %empty, %copy, %where)
  %loop = (s32[], f32[3,8,4], f32[8,4], f32[8,4]) while(%start), condition=%cond, body=%body, \
metadata={op_name="jit(f)/jvp()/while" stack_frame_id=2}
  %result = f32[3,8,4]{2,1,0} get-tuple-element(%loop), index=1
  ROOT %back = f32[3,8,4]{2,1,0} negate(%result), \
metadata={op_name="jit(f)/transpose(jvp())/neg" stack_frame_id=1}
}
"""
TEXT = TEXT.replace('"SHARDING"', f'"{SHARDING}"')
FLOW = Flow(hlo.parse(TEXT))
ORIGINS = Origins(FLOW)


def line(name: str, *index: int) -> str | None:
    source = ORIGINS.of((name, index)).source
    return source.removeprefix("/home/me/model.py:") if source else None


def summed_once(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, axis=0) @ x  # the only call


def summed_twice_in_a_line(x: jax.Array) -> jax.Array:
    return jnp.cumsum(jnp.cumsum(x, axis=0) @ x, axis=1) + jnp.flip(x)


def two_that_share(x: jax.Array) -> jax.Array:
    spread = jnp.var(x, where=x > 0)
    return spread + jnp.std(x, where=x > 0)


def test_functions_that_one_line_calls() -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")

    def twice(x: jax.Array) -> jax.Array:
        y = jnp.cumsum(x)
        return jnp.cumsum(y) + jax.grad(lambda y: jnp.linalg.norm(y))(y)

    assert "cumsum" in called_from_one_line(jax.make_jaxpr(summed_once)(x))
    assert "cumsum" in called_from_one_line(jax.make_jaxpr(summed_twice_in_a_line)(x)), (
        "of one line"
    )
    found = called_from_one_line(jax.make_jaxpr(jax.jit(twice))(x))
    assert "norm" in found, "its backward pass is of the same line"
    assert "twice" in found
    shared = called_from_one_line(jax.make_jaxpr(lambda x: two_that_share(x))(x))
    assert shared == {"_std"}, "it calls the other one, and both call jnp.where"
    assert "cumsum" not in found


def test_the_line_of_the_only_call() -> None:
    """As well where JAX itself jits the function: nobody else's line can be meant."""
    size = jax.ShapeDtypeStruct((512, 512), "float32")
    found = lab.measure(summed_once, size).attribution
    assert found
    held = [row for row in found.buffers if row.bytes >= 512 * 512 * 4]
    number = summed_once.__code__.co_firstlineno + 1
    assert {row.source for row in held} == {f"{__file__}:{number}"}
    assert any("cumsum" in row.operation for row in held)


def test_frames_are_innermost_first() -> None:
    frames = FLOW.instructions["sum"].frames
    assert [(number, name) for _, number, name in frames] == [(20, "Model.__call__"), (10, "loss")]
    assert FLOW.instructions["own"].frames == (("/home/me/model.py", 10, "loss"),)


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)  # a helper


def three_times(x: jax.Array, w: jax.Array) -> jax.Array:
    x = convolved(x, w)
    x = convolved(x.T, w)
    return convolved(x[::-1], w)


def test_a_helper_shows_its_caller() -> None:
    size = jax.ShapeDtypeStruct((512, 512), "float32")
    module = hlo.parse(lab.measure(three_times, size, size).hlo)
    flow = Flow(module)
    origins = Origins(flow)
    found = [origins.of((name, ())) for name, item in flow.instructions.items() if item.frames]
    helper = f"{__file__}:{convolved.__code__.co_firstlineno + 1}"
    first = three_times.__code__.co_firstlineno
    callers = {origin.caller for origin in found if origin.source == helper}
    assert callers == {f"{__file__}:{first + turn}" for turn in (1, 2, 3)}
    assert {origin.caller for origin in found if origin.source != helper} <= {None}


def test_a_captured_array_has_no_line_of_the_tool() -> None:
    """What reads it is the user's."""

    def captured(x: jax.Array) -> jax.Array:
        return x @ np.ones((512, 512), "float32")

    found = lab.measure(captured, jax.ShapeDtypeStruct((64, 512), "float32")).attribution
    assert found
    held = {row.source for row in found.buffers if row.shape == "f32[512,512]"}
    assert held == {f"{__file__}:{captured.__code__.co_firstlineno + 1}"}


@pytest.mark.parametrize(
    ("user", "line"),
    [
        ("/home/me/model.py", "/home/me/model.py:10"),
        ("/venv/lib/python3.11/site-packages/mine/model.py", "mine/model.py:20"),
    ],
)
def test_a_framework_is_known_by_where_it_is_installed(user: str, line: str) -> None:
    """A program that is itself an installed package has the lines of that package."""
    text = TEXT.replace("optax", "equinox").replace("jit_f", "jit_loss")
    inner = "/venv/lib/python3.11/site-packages/mine/model.py"
    text = text.replace(f'3 "{SHARDING}"', f'3 "{user}"')
    text = text.replace('1 "/home/me/model.py"', f'1 "{inner}"')
    flow = Flow(
        hlo.parse(
            text.replace("file_name_id=1 function_name_id=1", "file_name_id=3 function_name_id=1")
        )
    )
    assert (source_of(flow.instructions["sum"]) or "").endswith(line)


@pytest.mark.parametrize(
    "file", ["<stdin>", "<string>", "<python-input-0>", "<ipython-input-1-0123abcd>"]
)
def test_code_that_is_typed_is_the_users(file: str) -> None:
    """At a prompt, in a cell and after `python -c` there is no file, and there are lines."""
    code = """
def product(x):
    return x @ x
"""
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, file, "exec"), made)
    found = lab.measure(made["product"], jax.ShapeDtypeStruct((256, 256), "float32"))
    module = hlo.parse(found.hlo)
    entry = module.computations[module.entry].instructions.values()
    assert {source_of(one) for one in entry} - {None} == {f"{file}:3"}
    narrow, row = (jax.ShapeDtypeStruct((1024, n), t) for n, t in ((1024, "bfloat16"), (1, "f4")))
    exec(compile("def add(x, row):\n    return x + row", file, "exec"), made)
    with jax.numpy_dtype_promotion("standard"):
        (finding,) = lint(made["add"], narrow, row)
    assert str(finding.location) == f"{file}:2 (add)"


def test_methods_that_python_makes_are_not_the_users() -> None:
    user, made = ("/home/u/m.py", 3, "f"), ("<string>", 4, "Layer.__init__")
    others = [("<frozen runpy>", 88, "_run_code"), ("<__array_function__ internals>", 2, "dot")]
    assert in_program([made, *others, user]) == (user,)


def test_frames_of_frameworks_and_helpers_are_passed_over() -> None:
    assert source_of(FLOW.instructions["sum"]) == "/home/me/model.py:20"
    assert source_of(FLOW.instructions["gather"]) == "/home/me/model.py:20"
    assert source_of(FLOW.instructions["w"]) is None
    users = hlo.parse(TEXT.replace(str(SHARDING), "/home/me/sharding.py"))
    gather = users.computations[users.entry].instructions["gather"]
    assert source_of(gather) == "/home/me/sharding.py:40", "a file of that name is not ours"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (("loop", (1,)), "50"),  # what the body writes, not the line of the loop
        (("s", (1,)), "50"),
        (("new", ()), "50"),
        (("result", ()), "50"),
        (("row", ()), "50"),
        (("empty", ()), "50"),  # from the loop that fills it
        (("copy", ()), "50"),  # from what reads it first
        (("loop", (2,)), "50"),
        (("own", ()), "10"),  # a frame inside of the jitted function
        (("where", ()), "20"),  # of another call, and still all that is known
        (("back", ()), "10"),
    ],
)
def test_lines(value: Value, expected: str) -> None:
    assert line(value[0], *value[1]) == expected


def test_a_value_that_the_text_does_not_print() -> None:
    origin = ORIGINS.of(("param_0.7", ()))
    assert (origin.instruction, origin.operation, origin.source) == (None, "", None)
    assert Roles(FLOW, ORIGINS).of(("param_0.7", ()), Shape("f32", (8, 4))) == "other"


def test_a_copy_of_an_argument_bears_its_name() -> None:
    assert ORIGINS.of(("copy", ())).operation == "model.w"
    assert ORIGINS.of(("loop", (2,))).operation == "model.w"
    assert ORIGINS.of(("gather", ())).operation == "model.w"
    assert ORIGINS.of(("own", ())).operation == "jit(f)/jit(loss)/neg"


def test_where_a_loop_gets_its_state() -> None:
    assert FLOW.sources(("loop", (1,))) == [("out", (1,)), ("start", (1,))]
    assert FLOW.sources(("loop", (2,))) == [("start", (2,))]  # the body hands it on unchanged
    assert [item.name for item in FLOW.lineage(("s", (2,)))] == ["s", "start", "copy", "w"]


def test_who_reads_a_value() -> None:
    found = [value for _, value in FLOW.readers(("start", (3,)))]
    assert found == [("loop", (3,)), ("s", (3,)), ("s.1", (3,))]
    assert [reader.name for reader, _ in FLOW.readers(("s", (3,)))] == ["total"]
    behind = [value for _, value in FLOW.readers(("out", (1,)))]
    assert behind == [("loop", (1,)), ("s", (1,))]


@pytest.mark.parametrize(
    ("value", "shape", "role"),
    [
        (("loop", (1,)), Shape("f32", (3, 8, 4)), "saved residual"),
        (("empty", ()), Shape("f32", (3, 8, 4)), "saved residual"),
        (("loop", (3,)), Shape("f32", (8, 4)), "gradient accumulator"),
        (("loop", (2,)), Shape("f32", (8, 4)), "parameter copy"),
        (("copy", ()), Shape("f32", (8, 4)), "parameter copy"),
        (("half", ()), Shape("bf16", (8, 4)), "parameter cast"),
        (("gather", ()), Shape("bf16", (16, 4)), "gathered weight"),
        (("loop", (0,)), Shape("s32", ()), "other"),
        (("loop", ()), None, "other"),
    ],
)
def test_roles(value: Value, shape: Shape | None, role: str) -> None:
    assert Roles(FLOW, ORIGINS).of(value, shape) == role


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("all-gather", "all-gather"),
        ("all-gather-start", "all-gather"),
        ("collective-permute-done", "collective-permute"),
        ("copy-start", None),
        ("add", None),
    ],
)
def test_collectives(opcode: str, expected: str | None) -> None:
    assert collective(Instruction("c", opcode, (), (), "", {})) == expected


@pytest.mark.parametrize(
    ("name", "width", "has_logits"),
    [
        ("params['lm_head']", 40, True),
        ("model.embedding.embedding.value", 40, True),
        ("model.position_embedding", 40, False),
        ("attention.heads", 40, False),
        ("params['lm_head']", 8, False),
    ],
)
def test_the_vocabulary_is_known_by_the_name_of_an_argument(
    name: str, width: int, has_logits: bool
) -> None:
    """And by no other parameter that has an axis of that size."""
    over = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = f"""HloModule jit_g

ENTRY %main (x: f32[6,8], w: f32[8,{width}]) -> f32[6,{width}] {{
  %x = f32[6,8]{{1,0}} parameter(0), metadata={{op_name="x"}}
  %w = f32[8,{width}]{{1,0}} parameter(1), metadata={{op_name="{name}"}}
  ROOT %y = f32[6,{width}]{{1,0}} dot(%x, %w), {over}
}}
"""
    flow = Flow(hlo.parse(text))
    role = Roles(flow, Origins(flow)).of(("y", ()), Shape("f32", (6, width)))
    assert role == ("logits" if has_logits else "activation")

"""Programs in other people's styles, from the command line, beside the figures of JAX by hand."""

import functools
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import other_styles as styles
import pytest
from helpers import Run, missing, optax_promotion
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import InputError, lab
from nnx_pipeline.lab._tracing.calls import Call, Keywords
from nnx_pipeline.lab.compile._arguments import arguments_of, parse_argument
from nnx_pipeline.lab.compile._places import mesh_on
from nnx_pipeline.lab.lint import lint
from nnx_pipeline.lab.mesh import AXES, Axes, make_mesh

X = styles.X
BIAS = jax.ShapeDtypeStruct((styles.ROWS, styles.ROWS), "float32")
TEXT = "f32[16,32]"  # of X


def of_equinox(function: Any, donate: tuple[int, ...]) -> Any:
    """Without the number that `equinox.filter_jit` adds to the results of every function."""
    arrays, static = equinox.partition(styles.equinox_concrete(), equinox.is_array)

    def step(*arrays: Any) -> Any:
        return equinox.filter(function(*equinox.combine(arrays, static)), equinox.is_array)

    return jax.jit(step, donate_argnums=donate).lower(*arrays)


def inputs(name: str) -> tuple[str, str]:
    return "--inputs", f"other_styles:{name}"


def arguments(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--arg", text))


jitted = jax.jit(styles.nnx_step, static_argnums=0)
PROGRAMS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "equinox": (
        "equinox_step",
        inputs("equinox_abstract"),
        lambda: of_equinox(styles.equinox_step, ()),
    ),
    "equinox, concrete": (
        "equinox_step",
        inputs("equinox_concrete"),
        lambda: of_equinox(styles.equinox_step, ()),
    ),
    "equinox, donated": (
        "equinox_donating",
        inputs("equinox_abstract"),
        lambda: of_equinox(styles.equinox_step, (0, 1, 2)),
    ),
    "linen": (
        "linen_step",
        inputs("linen_in_order"),
        lambda: styles.linen_step.lower(*styles.linen_in_order()),
    ),
    "linen, by name": (
        "linen_step",
        inputs("linen_by_name"),
        lambda: styles.linen_step.lower(*styles.linen_in_order()),
    ),
    "linen, both": (
        "linen_step",
        inputs("linen_both"),
        lambda: styles.linen_step.lower(*styles.linen_in_order()),
    ),
    "nnx, split": ("nnx_step", inputs("nnx_inputs"), lambda: jitted.lower(*styles.nnx_inputs())),
    "nnx, donated": (
        "nnx_jitted",
        inputs("nnx_inputs"),
        lambda: styles.nnx_jitted.lower(*styles.nnx_inputs()),
    ),
    "haiku": (
        "haiku_step",
        inputs("haiku_inputs"),
        lambda: jax.jit(styles.haiku_step).lower(*styles.haiku_inputs()),
    ),
    "haiku, raw key": (
        "haiku_step",
        inputs("haiku_raw"),
        lambda: jax.jit(styles.haiku_step).lower(*styles.haiku_raw()),
    ),
    "optax": (
        "optax_step",
        inputs("optax_inputs"),
        lambda: jax.jit(styles.optax_step).lower(*styles.optax_inputs()),
    ),
    "keywords": (
        "attention",
        arguments(TEXT, "heads=4", "causal=true", TEXT, "bias=f32[16,16]"),
        lambda: jax.jit(functools.partial(styles.attention, heads=4, causal=True)).lower(
            X, X, bias=BIAS
        ),
    ),
    "keywords, jitted": (
        "attention_jitted",
        arguments("heads=4", TEXT, f"k={TEXT}", "causal=True"),
        lambda: styles.attention_jitted.lower(X, X, heads=4, causal=True),
    ),
    "weak number": (
        "scaled_jitted",
        arguments("bf16[16,32]", "by=2.0"),
        lambda: styles.scaled_jitted.lower(jax.ShapeDtypeStruct(X.shape, "bfloat16"), by=2.0),
    ),
    "settings": (
        "configured",
        inputs("configured_inputs"),
        lambda: jax.jit(styles.configured, static_argnums=0).lower(*styles.configured_inputs()),
    ),
    "key": (
        "sampled",
        arguments("key<fry>[]", TEXT),
        lambda: jax.jit(styles.sampled).lower(jax.eval_shape(lambda: jax.random.key(0)), X),
    ),
    "raw key": (
        "sampled",
        arguments(f"x={TEXT}", "key=u32[2]"),
        lambda: jax.jit(styles.sampled).lower(jax.random.PRNGKey(0), X),
    ),
}


def bytes_of(lowered: jax.stages.Lowered) -> dict[str, int]:
    found: Any = lowered.compile().memory_analysis()
    kinds = ("argument", "output", "alias", "temp")
    return {f"{kind}_bytes": getattr(found, f"{kind}_size_in_bytes") for kind in kinds}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_the_figures_are_those_of_jax_by_hand(run: Run, program: str) -> None:
    name, words, by_hand = PROGRAMS[program]
    ended = run("measure", f"other_styles:{name}", *words, "--platform", "cpu", "--json", "-")
    assert ended.code == 0, ended.err
    with optax_promotion():
        expected = bytes_of(by_hand())
    assert {kind: ended.json["memory"][kind] for kind in expected} == expected
    is_donated = program.endswith("donated") or program.startswith("linen")
    assert (ended.json["memory"]["alias_bytes"] > 0) == is_donated


SHARDED = arguments("f32[16@dp,32]", "f32[32,32@tp]", "w2=f32[32@tp,32]")


def sharded_by_hand(devices: np.ndarray) -> jax.stages.Lowered:
    mesh = Mesh(devices, ("dp", "tp"))
    shapes = (X.shape, (32, 32), (32, 32))
    specs = (P("dp"), P(None, "tp"), P("tp"))
    given = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        return styles.by_hand_sharded.lower(*given)


def test_a_mesh_with_names_of_its_own(run: Run) -> None:
    expected = bytes_of(sharded_by_hand(np.array(jax.devices()).reshape(4, 2)))
    for mesh in ("dp=4,tp=2", "explicit:dp=4,tp=2"):
        words = ("other_styles:by_hand_sharded", *SHARDED, "--mesh", mesh, "--platform", "cpu")
        ended = run("measure", *words, "--json", "-")
        assert ended.code == 0, ended.err
        assert {kind: ended.json["memory"][kind] for kind in expected} == expected
        assert ended.json["mesh"] == {"dp": 4, "tp": 2}
    assert f"on {mesh}" in run("memory", *words).out
    assert f"on {mesh}: no findings" in run("lint", *words[:-2]).out


@pytest.mark.slow
@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_a_mesh_with_names_of_its_own_on_a_tpu(run: Run) -> None:
    platform = lab.Platform.parse("tpu:v5e:2x2")
    placed = make_mesh(Axes.parse("dp=2,tp=2"), platform.devices(1), sharding="auto").devices
    words = (*SHARDED, "--mesh", "dp=2,tp=2", "--platform", str(platform), "--json", "-")
    ended = run("measure", "other_styles:by_hand_sharded", *words)
    expected = bytes_of(sharded_by_hand(placed))
    assert {kind: ended.json["memory"][kind] for kind in expected} == expected


def test_the_axes_of_a_text() -> None:
    assert Axes.parse("tp=2,dp=4").sizes() == {"tp": 2, "dp": 4}
    assert Axes.parse("fsdp=2, data=4").sizes() == {
        "fsdp": 2,
        "data": 4,
        **{axis: 1 for axis in AXES if axis not in ("fsdp", "data")},
    }
    assert Axes.parse("").num_devices == 1
    mesh = mesh_on("explicit:dp=2,tp=4", jax.devices())
    assert mesh is not None
    assert (mesh.axis_names, {*mesh.axis_types}) == (("dp", "tp"), {AxisType.Explicit})
    for text in ("dp=4,tp=2", "explicit:dp=4,tp=2"):
        assert str(Axes.parse(text)) == text
    found = Axes.parse("dp=4,tp=2", dcn="dp=2")
    assert str(found) == "dp=4,tp=2 with dcn dp=2"
    assert lab.measure(jnp.tanh, X, mesh="dp=4,tp=2").mesh == {"dp": 4, "tp": 2}


@pytest.mark.parametrize(
    ("mesh", "dcn", "message"),
    [
        ("dp:4", "", "'dp:4' is no name of an axis; write dp=4,tp=2"),
        ("dp=4,,tp=2", "", "'' is no name of an axis"),
        ("dp=4,dp=2", "", "names dp twice"),
        ("dp=0", "", "write dp=N with a whole number"),
        ("dp=4,tp=2", "dq=2", "dcn dq=2: the mesh has no axis 'dq'; choose one of: dp, tp"),
        ("dp=4,tp=2", "dp=3", "mesh axis dp=4 does not divide into dcn dp=3 parts"),
    ],
)
def test_axes_that_cannot_be(mesh: str, dcn: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Axes.parse(mesh, dcn=dcn)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.with_sharding_constraint(x, P("tp")),
        lambda x: jax.lax.psum(x, "tp"),
        lambda x: jax.shard_map(lambda x: x, in_specs=P("tp"), out_specs=P("tp"))(x),
    ],
)
def test_an_axis_that_the_mesh_lacks_is_named(function: Any) -> None:
    """The words of JAX that these are known by may change."""
    for use in (lab.measure, lint):
        mesh: Any = "dp=8" if use is lab.measure else AbstractMesh((8,), ("dp",))
        with pytest.raises(InputError, match=r"names an axis that the mesh lacks.*the mesh has dp"):
            use(function, X, mesh=mesh)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *(("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("pred", "bool")),
        *(("s8", "int8"), ("i8", "int8"), ("s32", "int32"), ("u8", "uint8"), ("c64", "complex64")),
        *(("f8_e4m3fn", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2"), ("bool", "bool")),
        *(("float8_e4m3fn", "float8_e4m3fn"), ("uint32", "uint32"), ("s4", "int4")),
        *(("key<fry>", "key<fry>"), ("key<rbg>", "key<rbg>"), ("key<urbg>", "key<urbg>")),
    ],
)
def test_dtypes_as_jax_prints_them(text: str, dtype: str) -> None:
    made = parse_argument(f"{text}[2, 3]", None)
    assert (made.shape, str(made.dtype)) == ((2, 3), dtype)
    assert parse_argument(f"{text}[]", None).shape == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("f33[2]",), "there is no dtype 'f33'; did you mean 'f32'?"),
        (("f4[2]",), "there is no dtype 'f4'"),
        (("key<fy>[]",), "there is no dtype 'key<fy>'; did you mean 'key<fry>'?"),
        (("i64[2]",), "JAX turns int64 into int32"),
        (("mode=relu",), "argument 'mode=relu' is not an array.*, or a value .* '\"relu\"'"),
        (("n=4", "n=5"), "--arg n=5 names n again; give it once"),
        (("n=" + "(" * 5000,), "is not an array; write"),
        (("n=f32",), "is not an array; write for example"),
    ],
)
def test_arguments_that_cannot_be(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        arguments_of(None, texts, None)


def test_values_of_python() -> None:
    texts = ("4", "a=true", "b=None", 'c="x=1"', "d=(1, 2.5)", "e = -1e-3", "f=f32[2]")
    four, named = arguments_of(None, texts, None)
    assert four == 4
    array = named.pop("f")  # type: ignore[attr-defined]
    assert array.shape == (2,)
    assert named == {"a": True, "b": None, "c": "x=1", "d": (1, 2.5), "e": -1e-3}


@pytest.mark.parametrize("jit", [lambda function: function, jax.jit])
def test_a_wrong_name_has_the_nearest_one(jit: Any) -> None:
    for use in (lab.measure, lint):
        with pytest.raises(InputError, match=r"scaled has no parameter 'byy'; did you mean 'by'"):
            use(jit(styles.scaled), X, Keywords({"byy": X}))
    with pytest.raises(InputError, match="multiple values for argument 'x'"):
        lab.measure(jit(styles.scaled), X, Keywords({"x": X, "by": 2.0}))


def test_what_is_given_by_name_is_said() -> None:
    given = Keywords({"heads": 4, "k": X})
    for function in (styles.attention, styles.attention_jitted):
        config = lab.measure(function, X, given).config
        assert config["bound"] == {"heads": 4}
        assert config["arguments"].count("float32[16,32]") == 2
        assert config["function"] == "other_styles:attention"


def test_a_dict_is_of_names_where_the_function_has_these(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(parameters: Any, *, batch: Any = None) -> Any:
        return parameters

    def of(made: Any) -> tuple[Any, ...]:
        monkeypatch.setattr(styles, "optax_inputs", lambda: made)
        call = Call.of(apply, arguments_of("other_styles:optax_inputs", (), None))
        return call.arguments, call.keywords

    assert of({"parameters": X, "batch": X}) == ((), {"parameters": X, "batch": X})
    assert of(((X,), {"batch": X})) == ((X,), {"batch": X})
    assert of({"w": X}) == (({"w": X},), {})
    with pytest.raises(InputError, match=r"has no parameter 'bach'; did you mean 'batch'"):
        of(((X,), {"bach": X}))


def test_a_number_in_order_is_traced_and_one_by_name_is_not() -> None:
    def repeated(x: Any, n: int) -> Any:
        return functools.reduce(lambda x, _: jnp.tanh(x), range(n), x)

    assert lab.measure(repeated, X, Keywords({"n": 3})).memory.argument_bytes == 4 * X.size
    with pytest.raises(InputError, match=r"numbers in order are traced .*; give it by name"):
        lab.measure(repeated, X, 3)


class Switched(equinox.Module):
    weight: Any
    is_on: bool = True
    name: str = "relu"

    def __call__(self, x: Any) -> Any:
        return getattr(jax.nn, self.name)(x @ self.weight) if self.is_on else x


def test_numbers_of_an_equinox_module_are_settings_and_those_beside_it_are_not() -> None:
    model = Switched(jax.ShapeDtypeStruct((32, 32), "float32"))
    result = lab.measure(lambda model, x, by: model(x) * by, model, X, 2.0)
    assert result.config["arguments"] == ["float32[32,32]", "float32[16,32]", "float32[]"]
    assert lint(lambda model, x: model(x), model, X) == []


def test_an_array_in_place_of_a_reference() -> None:
    with pytest.raises(InputError, match=r"an argument holds a .*, which can change; give an arr"):
        lab.measure(lambda x: x, jax.new_ref(jnp.ones(3)))


def test_the_table_of_memory_from_python(run: Run) -> None:
    table = lab.memory(styles.configured, *styles.configured_inputs(), top=3)
    assert sum(row.bytes for row in table.rows) == table.measurement.memory.heap_bytes
    words = ("other_styles:configured", *inputs("configured_inputs"), "--top", "3")
    shown = run("memory", *words, "--platform", "cpu").out
    assert str(table).splitlines()[1:] == shown.splitlines()[1 : len(str(table).splitlines())]
    assert str(table).startswith("other_styles:configured on one device, cpu (jax ")
    assert table._repr_html_().startswith("<pre>other_styles:configured on one device")

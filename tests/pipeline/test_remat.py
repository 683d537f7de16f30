"""What each remat policy keeps from tick to backward tick, read off the traced program."""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import (
    assert_close,
    carries,
    equations,
    mesh_of,
    model_on_mesh,
    new_model,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)

from nnx_pipeline import Config, InputError, MeshConfig, Mixtral, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.config._remat import (
    FULL,
    HIDDEN,
    ITERATION_INPUT,
    LAYER_INPUT,
    LAYER_METRICS,
    OUT,
    POLICIES,
    QUERY_KEY_VALUE,
    Remat,
    remat_of,
    spelled_out,
)
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab.compile._packages import MissingCompiler
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.pipeline.schedule import make_schedule
from nnx_pipeline.pipeline.stage.layers import LayerSequence
from nnx_pipeline.train import Batch, abstract_batch, loss_and_gradients

pytestmark = pytest.mark.jax_alone

STAGES, MICROBATCHES = 4, 8
NAMES = (ITERATION_INPUT, LAYER_INPUT, *QUERY_KEY_VALUE, OUT, *HIDDEN)
ON_HOST, ON_DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
NAMING = [name for name in POLICIES if name != "none"]
OFFLOADING = ("inputs_offloaded", "minimal_offloaded")

# Shape, dtype and memory of the arrays that a tick keeps, each with how often it does.
Kept = Counter[tuple[tuple[int, ...], str, jax.memory.Space]]

each_mode = pytest.mark.parametrize("mode", ["explicit", "auto"])


def config_of(
    policy: str,
    mode: str,
    *,
    layers: int,
    repeats: int = 1,
    group: int | None = None,
    **pipeline: Any,
) -> Config:
    """Four stages of `layers` each; sizes that differ, so that a shape says what an array is.

    group: how many of the three experts are computed at once; None for all.
    """
    return small_config(
        model={
            "num_layers": STAGES * repeats * layers,
            "embed_dim": 24,
            "mlp_dim": 20,
            "num_experts": 3,
            "expert_group": group,
            "dtype": "bfloat16",
        },
        pipeline={
            "num_microbatches": MICROBATCHES,
            "num_repeats": repeats,
            "remat": policy,
            "sharding": mode,
            **pipeline,
        },
        train={"global_batch": 2 * MICROBATCHES, "sequence_length": 10},
    )


def loss_of(model: Mixtral, batch: Batch) -> jax.Array:
    """A scalar that depends on every hidden state, each with its own weight."""
    hidden, router = model.hidden(
        batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids
    )
    hidden = hidden.astype(jnp.float32)
    return jnp.sum(hidden**2 * jnp.linspace(-1.0, 1.0, hidden.shape[-1])) + router.load_balance


def gradient_program(config: Config, mesh: str = "stage=4,fsdp=2") -> Any:
    """The jaxpr of the model's gradient; nothing is computed."""
    grid = mesh_of(mesh, config.pipeline.sharding)
    with jax.set_mesh(grid):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        return jax.make_jaxpr(jax.grad(loss_of))(model, abstract_batch(config, grid))


def forward_loop(program: Any, turns: int) -> Any:
    """The scan over ticks (or, without a pipeline, over layers) of the forward pass."""
    (loop,) = (
        equation
        for equation in equations(program)
        if equation.primitive.name == "scan"
        and equation.params["length"] == turns
        and not equation.params["reverse"]
    )
    return loop


def kept_by(loop: Any) -> Kept:
    """What a loop stacks for the backward pass, but for the rows of indices and masks.

    Those are integers and booleans, at most one number per stage. What a loop carries comes out of
    it as it comes out of its body; what it stacks has one axis more.
    """
    turns, inside = loop.params["length"], loop.params["jaxpr"].jaxpr.outvars
    stacked = [
        outer.aval
        for outer, inner in zip(loop.outvars, inside, strict=True)
        if outer.aval.ndim > inner.aval.ndim
    ]
    assert all(array.shape[0] == turns for array in stacked)
    return Counter(
        (array.shape[1:], str(array.dtype), array.memory_space)
        for array in stacked
        if jnp.issubdtype(array.dtype, jnp.floating) or math.prod(array.shape[1:]) > STAGES
    )


def size(kept: Kept) -> int:
    """Bytes per tick."""
    return sum(
        count * math.prod(shape) * jnp.dtype(dtype).itemsize
        for (shape, dtype, _), count in kept.items()
    )


def shapes_of(
    config: Config, lead: tuple[int, ...] = (STAGES,), sequences: int = 2
) -> dict[str, tuple[int, ...]]:
    """The array of each name for one microbatch of all stages, from the config alone.

    lead: the axis of stages, if any. Hidden units have an axis of the experts of a group, and two
    that are 1 here: the owners of experts and the parts of the hidden axis. If there are several
    groups, a loop over them stacks the hidden units.
    """
    model, batch = config.model, (sequences, config.train.sequence_length)
    into, grouped = (*lead, *batch, model.embed_dim), (model.num_kv_heads, model.head_dim)
    group = model.expert_group or model.num_experts
    steps = (model.num_experts // group,) if group < model.num_experts else ()
    hidden = (*steps, *lead, 1, 1, *batch, group, model.mlp_dim)
    heads = [(model.num_heads, model.head_dim), grouped, grouped]
    return {
        ITERATION_INPUT: into,
        LAYER_INPUT: into,
        **{name: (*lead, *batch, *last) for name, last in zip(QUERY_KEY_VALUE, heads, strict=True)},
        OUT: into,
        **dict.fromkeys(HIDDEN, hidden),
        # Choices and probability of each expert, and three numbers.
        LAYER_METRICS: (*lead, 1, 4, model.num_experts),
    }


def each_layer(layers: int, *, offloads: bool = False) -> tuple[tuple[int, ...], int]:
    """How a stage keeps an array of each layer: the axis of layers, if any, and how many arrays.

    Up to four layers are in no loop, and any number if some of what they compute is offloaded. Each
    then has arrays of its own.
    """
    return ((), layers) if layers <= 4 or offloads else ((layers,), 1)


def expected(config: Config, on_device: tuple[str, ...], on_host: tuple[str, ...]) -> Kept:
    """What a tick is to keep: the input of the stage or of its layers, and the named values."""
    layers = config.layers_per_stage(STAGES)
    shapes, dtype = shapes_of(config), config.model.dtype
    if LAYER_INPUT in on_host:
        kept: Kept = Counter()  # the input of the stage is that of its first layer
    elif layers > 1 and config.pipeline.save_decoder_layer_input:
        on_device = (LAYER_INPUT, *on_device)  # the first of them is the input of the stage
        kept = Counter()
    else:
        kept = Counter([(shapes[ITERATION_INPUT], dtype, ON_DEVICE)])
    named = [(shapes[name], dtype, ON_DEVICE) for name in on_device]
    named += [(shapes[name], dtype, ON_HOST) for name in on_host]
    named += [(shapes[LAYER_METRICS], "float32", ON_DEVICE)]
    axis, number = each_layer(layers, offloads=bool(on_host))
    for shape, of, where in named:
        kept[(*axis, *shape), of, where] += number
    # The metrics of every visit, which a tick gives out: four numbers and the load of each expert.
    kept[(STAGES, 4 + config.model.num_experts), "float32", ON_DEVICE] += 1
    return kept


# Written out here, so that a change in POLICIES is seen: (names on the device, names on the host).
PROMISED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "save_out_proj": (("out_proj",), ()),
    "save_qkv_proj": (("query_proj", "key_proj", "value_proj"), ()),
    "save_dot_except_mlp": (("query_proj", "key_proj", "value_proj", "out_proj"), ()),
    "minimal": (("query_proj", "key_proj", "value_proj", "out_proj", "mlp_gate", "mlp_up"), ()),
    "inputs_offloaded": ((), ("decoder_layer_input",)),
    "qkv_proj_offloaded": ((), ("query_proj", "key_proj", "value_proj")),
    "minimal_offloaded": (
        ("mlp_gate", "mlp_up"),
        ("query_proj", "key_proj", "value_proj", "out_proj"),
    ),
}

# Policies that a config names value by value.
SPELLED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "keep:key_proj+mlp_up": (("key_proj", "mlp_up"), ()),
    "keep:out_proj/offload:value_proj": (("out_proj",), ("value_proj",)),
    "offload:decoder_layer_input+mlp_gate/keep:query_proj": (
        ("query_proj",),
        ("decoder_layer_input", "mlp_gate"),
    ),
}


@pytest.mark.slow(but=12)
@pytest.mark.parametrize(
    ("policy", "mode", "layers", "repeats", "layer_inputs", "group"),
    [
        *((policy, "explicit", 2, 1, True, None) for policy in SPELLED),
        *((policy, "explicit", 2, 1, True, None) for policy in NAMING),
        *((policy, "explicit", 1, 2, True, None) for policy in ("full", *OFFLOADING)),
        *(("save_out_proj", "explicit", layers, 1, False, None) for layers in (2, 5)),
        *(("minimal_offloaded", "explicit", layers, 1, False, None) for layers in (2, 5)),
        *((policy, "auto", 2, 1, True, None) for policy in ("minimal", "qkv_proj_offloaded")),
        *(("minimal", "explicit", layers, 1, True, None) for layers in (4, 5)),
        ("full", "explicit", 1, 3, True, None),
        *((policy, "explicit", 2, 1, True, 1) for policy in ("full", "minimal_offloaded")),
        *((policy, "auto", 5, 1, True, 1) for policy in ("full", "minimal")),
    ],
)
def test_a_tick_keeps_what_the_policy_names_and_nothing_else(
    policy: str, mode: str, layers: int, repeats: int, layer_inputs: bool, group: int | None
) -> None:
    config = config_of(
        policy,
        mode,
        layers=layers,
        repeats=repeats,
        group=group,
        save_decoder_layer_input=layer_inputs,
    )
    ticks = MICROBATCHES * repeats + STAGES - 1
    kept = kept_by(forward_loop(gradient_program(config), ticks))
    assert kept == expected(config, *(PROMISED | SPELLED)[policy])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
@pytest.mark.parametrize("policy", SPELLED)
def test_a_policy_of_names_computes_what_the_layers_do_one_after_the_other(
    policy: str, schedule: str
) -> None:
    base = small_config(model={"num_experts": 2}, pipeline={"num_microbatches": 4})
    source, batch = new_model(base), packed_batch(base)

    def computed(config: Config, mesh: str) -> Any:
        grid = mesh_of(mesh, "explicit")
        model = model_on_mesh(source, config, grid)
        with jax.set_mesh(grid):
            (loss, _), gradients = jax.jit(loss_and_gradients)(model, batch)
        return jax.tree.map(jax.device_get, (loss, gradients))

    want = computed(base, "")
    config = replace(base, "pipeline", remat=policy, schedule=schedule)
    loss, gradients = computed(config, "stage=2,fsdp=2")
    assert_close(loss, want[0], 1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (gradients, want[1])), strict=True):
        assert_close(found.reshape(wanted.shape), wanted, 1e-4)


@pytest.mark.parametrize("policy", [*POLICIES, *SPELLED])
def test_a_policy_survives_its_spelling(policy: str) -> None:
    assert remat_of(spelled_out(remat_of(policy))) == remat_of(policy)
    assert spelled_out(remat_of(policy)) == policy or policy.startswith("offload:")


def test_every_policy_is_spelled_out() -> None:
    assert [*PROMISED, "none"] == [*POLICIES]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("mode", "layers"), [("explicit", 2), ("auto", 2), ("explicit", 5)])
def test_none_keeps_what_every_other_policy_computes_again(mode: str, layers: int) -> None:
    """What the derivative of attention reads is there, and more than under `minimal` in all.

    Attention computes its scores again, so that even `none` does not keep them.
    """

    def kept(policy: str) -> Kept:
        config = config_of(policy, mode, layers=layers)
        return kept_by(forward_loop(gradient_program(config), MICROBATCHES + STAGES - 1))

    length, kv_heads, per_group, head_dim = 10, 2, 2, 4
    axis, number = each_layer(layers)
    heads = (*axis, STAGES, 2, length, kv_heads, per_group, head_dim)
    normaliser = (*axis, STAGES, 2, kv_heads, length, per_group, 1)
    everything, minimal = kept("none"), kept("minimal")
    assert everything[heads, "bfloat16", ON_DEVICE] == 2 * number  # scaled query and result
    assert everything[normaliser, "float32", ON_DEVICE] == number
    assert not any(shape in (heads, normaliser) for shape, _, _ in minimal)
    assert not any(shape.count(length) > 1 for shape, _, _ in everything)
    assert size(everything) > 2 * size(minimal)


@pytest.mark.parametrize(("layers", "group"), [(2, None), (5, 1)])
@each_mode
def test_names_survive_the_stages(mode: str, layers: int, group: int | None) -> None:
    """Under vmap over stages every name still marks its array, with the stages in front.

    Elsewhere a policy was seen to save nothing because its names were gone by then.
    """
    config = config_of("full", mode, layers=layers, group=group)
    shapes = shapes_of(config)
    shapes |= {name: shapes[name][-7:] for name in HIDDEN}  # of one group
    grid = mesh_of("stage=4,fsdp=2", mode)
    with jax.set_mesh(grid):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        program = jax.make_jaxpr(loss_of)(model, abstract_batch(config, grid))
    seen = Counter(
        (equation.params["name"], equation.outvars[0].aval.shape)
        for equation in equations(program)
        if equation.primitive.name == "name"
    )
    _, number = each_layer(layers)  # of times that a layer is written out
    want = Counter({(name, shapes[name]): number for name in NAMES})
    want[ITERATION_INPUT, shapes[ITERATION_INPUT]] = 1  # once for the stage
    want[LAYER_METRICS, shapes[LAYER_METRICS]] = number
    assert seen == want


@pytest.mark.parametrize(
    ("policy", "group"),
    [("full", None), ("minimal", None), ("minimal", 1), *((one, None) for one in OFFLOADING)],
)
def test_without_a_pipeline_a_layer_keeps_the_same(policy: str, group: int | None) -> None:
    """The loop over layers keeps a layer's input and what the policy names."""
    config = config_of(policy, "explicit", layers=1, group=group)
    config = replace(config, "pipeline", num_microbatches=None)
    kept = kept_by(forward_loop(gradient_program(config, "fsdp=2"), config.model.num_layers))
    shapes = shapes_of(config, (), sequences=config.train.global_batch)
    on_device, on_host = PROMISED[policy]
    inputs = () if LAYER_INPUT in on_host else (LAYER_INPUT,)
    want = [(shapes[name], "bfloat16", ON_DEVICE) for name in inputs + on_device]
    want += [(shapes[LAYER_METRICS], "float32", ON_DEVICE)]  # the loop's result beside x
    assert kept == Counter(want + [(shapes[name], "bfloat16", ON_HOST) for name in on_host])


@pytest.mark.parametrize("policy", [name for name, (_, host) in PROMISED.items() if host])
def test_what_is_offloaded_goes_to_the_host_once(policy: str) -> None:
    """One transfer per name and layer: the backward pass fetches, it does not send again."""
    program = gradient_program(config_of(policy, "explicit", layers=2))
    values = 2 * len(PROMISED[policy][1])
    sent = [
        equation.outvars[0].aval.memory_space
        for equation in equations(program)
        if equation.primitive.name == "device_put"
    ]
    assert sent.count(ON_HOST) == values
    assert sent.count(ON_DEVICE) >= values


@each_mode
def test_1f1b_keeps_what_is_offloaded_in_rings_on_the_host(mode: str) -> None:
    """In both loops over ticks that write them (draining only reads), and nothing else is there."""
    config = config_of("qkv_proj_offloaded", mode, layers=2, schedule="1f1b")
    grid = mesh_of("stage=4,fsdp=2", mode)
    with jax.set_mesh(grid):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        program = jax.make_jaxpr(loss_and_gradients)(model, abstract_batch(config, grid))
    slots = make_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES).ring_slots
    shapes = shapes_of(config)
    rings = Counter((STAGES, slots, *shapes[name][1:]) for name in QUERY_KEY_VALUE * 2)  # layers
    found = []
    for equation in equations(program):
        if equation.primitive.name == "scan":
            host = (one for one in carries(equation) if one.aval.memory_space == ON_HOST)
            found += [Counter(one.aval.shape for one in host)]
    assert [one for one in found if one] == 2 * [rings]  # filling and steady state


@pytest.mark.slow
def test_1f1b_offloads_for_a_tpu() -> None:
    """The compiler carries the rings in host memory; what that saves is in `microbatch_growth`."""
    asked = {"pipeline.schedule": "1f1b", "pipeline.remat": "qkv_proj_offloaded"}
    config = apply_overrides(preset("tiny"), asked)
    try:
        with optax_promotion():
            memory = measure_step(
                config, MeshConfig.parse("stage=4,fsdp=2"), Platform.parse("tpu:v5p:2x2x2")
            ).memory
    except MissingCompiler as error:
        pytest.skip(str(error))
    assert memory.host_temp_bytes
    assert memory.host_temp_bytes > 0


# test_option_pairs.py has the other policies, each with every other option.
CASES = [(policy, "explicit") for policy in PROMISED if policy.startswith("save_")]
CASES += [("minimal_offloaded", "auto"), ("inputs_offloaded", "explicit")]


@pytest.fixture(scope="module")
def results() -> Any:
    """A function from policy and mode to loss and gradients, which keeps those of `full`."""
    known: dict[tuple[str, str], Any] = {}
    base = small_config(model={"num_experts": 2}, pipeline={"num_microbatches": 4})
    source, batch = new_model(base), packed_batch(base)

    def compute(policy: str, mode: str) -> Any:
        if (policy, mode) not in known:
            config = replace(base, "pipeline", remat=policy, sharding=mode)
            mesh = mesh_of("stage=2,fsdp=2", mode)
            model = model_on_mesh(source, config, mesh)
            with jax.set_mesh(mesh):
                result = jax.jit(jax.value_and_grad(loss_of))(model, batch)
            known[policy, mode] = jax.tree.map(jax.device_get, result)
        return known[policy, mode]

    return compute


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "mode"), CASES)
def test_no_policy_changes_a_value(results: Any, policy: str, mode: str) -> None:
    """Loss and gradients are those of `full`. The CPU compiler runs offloaded programs, too."""
    (loss, gradients), (want, want_gradients) = results(policy, mode), results("full", mode)
    assert_close(loss, want, 1e-5)
    assert_close(gradients, want_gradients, 1e-4)


def test_also_saved_gives_way_to_offloaded() -> None:
    """A name that a checkpoint saves besides goes to the host where the policy says so."""

    def function(x: jax.Array) -> jax.Array:
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.sin(x), LAYER_INPUT))

    def spaces(remat: Remat) -> set[Any]:
        kept = remat.checkpoint(function, also=(LAYER_INPUT,))
        program = jax.make_jaxpr(jax.grad(kept))(jnp.ones(()))
        put = [e for e in equations(program) if e.primitive.name == "device_put"]
        return {equation.outvars[0].aval.memory_space for equation in put}

    assert ON_HOST not in spaces(Remat())
    assert ON_HOST in spaces(Remat(offloaded=(LAYER_INPUT,)))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            None,
            r"saved=None keeps everything .* contradicts offloaded=\('out_proj',\); name what to "
            "save",
        ),
        (("out_proj", "mlp_up"), r"both name \['out_proj'\]; keep each name in one of them"),
    ],
)
def test_a_policy_that_contradicts_itself(saved: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Remat(saved, offloaded=("out_proj",))


def test_policies_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES["full"].saved = None  # type: ignore[misc]


@each_mode
def test_the_gradient_of_a_layer_is_complete_before_that_of_the_one_below(mode: str) -> None:
    """One barrier per layer of a stage holds its cotangent together with all its gradients."""
    config = config_of("full", mode, layers=3)
    arrays = len(jax.tree.leaves(new_model(config).pipeline.layers))
    barriers = [
        equation
        for equation in equations(gradient_program(config))
        if equation.primitive.name == "optimization_barrier" and len(equation.invars) == arrays + 1
    ]
    assert len(barriers) == 3


def test_one_layer_in_a_scan_is_computed_again() -> None:
    """A scan over one layer is no loop to XLA, so that a barrier must keep both passes apart."""

    def jaxpr_of(number: int) -> str:
        sequence = LayerSequence(number, 1, FULL, in_ticks=False, most_unrolled=1)

        def run(weights: jax.Array, x: jax.Array) -> jax.Array:
            y, _ = sequence(lambda x, weight: (jnp.sin(weight * x), None), (weights,), x)
            return jnp.sum(y)

        return str(jax.make_jaxpr(jax.grad(run))(jnp.ones(number), jnp.ones(3)))

    assert "prevent_cse=True" in jaxpr_of(1)
    assert "prevent_cse=False" in jaxpr_of(2)

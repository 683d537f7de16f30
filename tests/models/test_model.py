"""Mixtral on meshes against Mixtral on one device, and that one against plain formulas."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from helpers import (
    arrays_by_path,
    assert_close,
    assert_same_placement,
    equations,
    mesh_of,
    model_on_mesh,
    new_model,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import linen_compat
from nnx_pipeline import Config, InputError, Mixtral
from nnx_pipeline.config._remat import LAYER_INPUT, OUT, QUERY_KEY_VALUE
from nnx_pipeline.pipeline.stage import _repeats as repeats
from nnx_pipeline.train import Batch, abstract_state, jit_train_step, loss_of, make_state
from nnx_pipeline.train.step import batch_sharding

pytestmark = pytest.mark.numbers

SPARSE = small_config(
    train={"load_balance_weight": 0.1, "global_batch": 16}, pipeline={"num_microbatches": 4}
)
DENSE = small_config(
    train={"global_batch": 16},
    model={"num_experts": 1, "num_experts_per_token": 1, "num_kv_heads": 4},
    pipeline={"num_microbatches": 4},
)


class Case(NamedTuple):
    """Where and how a model runs that must equal the one on one device."""

    mesh: str
    repeats: int = 1
    mode: str = "explicit"
    shift: str = "ppermute"
    dense: bool = False
    packed: bool = True
    remat: str = "full"
    delay: int = 1
    schedule: str = "circular"
    backward: str | None = None
    gather: str = "use"
    group: int | None = None
    unrolled: int = 4
    groups: int = 1

    @property
    def config(self) -> Config:
        return replace(
            replace(DENSE if self.dense else SPARSE, "model", expert_group=self.group),
            "pipeline",
            num_repeats=self.repeats,
            sharding=self.mode,
            shift=self.shift,
            remat=self.remat,
            forwarding_delay=self.delay,
            schedule=self.schedule,
            backward=self.backward,
            fsdp_gather=self.gather,
            unrolled_layers=self.unrolled,
            remat_groups=self.groups,
        )


# What test_option_pairs.py does not have: logits, placements, meshes with tensor and expert, dense
# layers, no pipeline, rows of one document.
PIPELINED = [
    Case("stage=4,fsdp=2"),
    Case("stage=2,fsdp=2,tensor=2", repeats=2, shift="slice", mode="auto", group=1),
    Case("stage=2,fsdp=2,expert=2", gather="prefetch", repeats=2, delay=2, packed=False, group=1),
    Case("stage=2,fsdp=2", remat="keep:query_proj@1+mlp_up@2", groups=2, unrolled=1),
]
UNPIPELINED = [
    Case("fsdp=2,tensor=2,expert=2", mode="auto", group=2),
    # A pipeline of one stage, with the options that the same config has on several.
    Case("data=2,fsdp=2", schedule="1f1b", gather="step"),
    Case("", repeats=2, delay=2, shift="slice", backward="accumulate", mode="auto"),
    Case("fsdp=2", repeats=2, gather="prefetch"),
]
DENSELY = [
    Case("stage=2,fsdp=2,tensor=2", repeats=2, mode="auto", dense=True),
]


class Results(NamedTuple):
    """What a model computes of a batch, and its weights to compare placements with."""

    loss: Any
    parts: Any
    gradients: Any
    logits: Any
    model: Any


@jax.jit
def evaluate(model: Mixtral, batch: Batch) -> tuple[Any, ...]:
    (loss, parts), gradients = jax.value_and_grad(loss_of, has_aux=True)(model, batch)
    logits = model(batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids)
    return loss, parts, gradients, logits


def batch_of(case: Case) -> Batch:
    batch = packed_batch(case.config)
    if case.packed:
        return batch
    return Batch(tokens=batch.tokens, targets=batch.targets, weights=batch.weights)


@functools.cache
def source(dense: bool, layers: int = 4) -> Mixtral:
    """The weights of every model here, on one device; scales away from one, as after training."""
    config = replace(DENSE if dense else SPARSE, "model", num_layers=layers)
    model = new_model(replace(config, "pipeline", num_microbatches=None))

    def shake(path: Any, leaf: jax.Array) -> jax.Array:
        if "scale" not in jax.tree_util.keystr(path):
            return leaf
        return leaf + 0.1 * jax.random.normal(jax.random.key(leaf.ndim), leaf.shape)

    return jax.tree_util.tree_map_with_path(shake, model)


def loss_of_parts(model: Mixtral, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """As `loss_of`, one microbatch after the other by a plain loop, in no pipeline at all."""
    count, weights = 4, batch.weights / (jnp.sum(batch.weights) + 1e-8)
    arrays = (batch.tokens, batch.targets, weights, batch.positions, batch.segment_ids)
    entropies, reported = [], []
    for part in range(count):
        rows = len(batch.tokens) // count
        cut = [None if x is None else x[part * rows :][:rows] for x in arrays]
        _, (entropy, router) = model.loss(*cut[:3], positions=cut[3], segment_ids=cut[4])
        entropies.append(entropy)
        reported.append(router)
    entropy = sum(entropies)
    router = jax.tree.map(lambda *each: sum(each) / count, *reported)
    train = model.config.train
    routers = train.load_balance_weight * router.load_balance
    routers += train.router_z_loss_weight * router.z_loss
    return entropy + routers, (entropy, router)


@jax.jit
def evaluate_in_parts(model: Mixtral, batch: Batch) -> tuple[Any, ...]:
    """As `evaluate`, by `loss_of_parts`."""
    (loss, parts), gradients = jax.value_and_grad(loss_of_parts, has_aux=True)(model, batch)
    logits = model(batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids)
    return loss, parts, gradients, logits


@functools.cache
def alone(dense: bool, packed: bool) -> Results:
    model = source(dense)
    batch = jax.tree.map(jnp.asarray, batch_of(Case("", dense=dense, packed=packed)))
    return Results(*evaluate_in_parts(model, batch), model)


@functools.cache
def on_mesh(case: Case) -> Results:
    mesh = mesh_of(case.mesh, case.mode)
    model = model_on_mesh(source(case.dense), case.config, mesh)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch_of(case), batch_sharding(mesh, model.layout))
        return Results(*evaluate(model, batch), model)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("case", [*PIPELINED, *UNPIPELINED, *DENSELY], ids=str)
def test_equals_one_device(case: Case) -> None:
    """Loss, its parts, gradients and logits; gradients lie where their parameters lie."""
    got, want = on_mesh(case), alone(case.dense, case.packed)
    assert_close((got.loss, got.parts, got.logits), (want.loss, want.parts, want.logits), 1e-5)
    assert_close(got.gradients, want.gradients, 1e-4)
    assert_same_placement(got.gradients, got.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("stage=2,fsdp=2", repeats=2, mode="auto"),
        Case("stage=2,fsdp=2", schedule="1f1b"),
    ],
    ids=str,
)
def test_second_derivatives(case: Case) -> None:
    """The Hessian of the loss times a vector: forward over reverse, and reverse over reverse.

    With one layer per visit: these programs take long to compile.
    """
    layers = 2 * case.repeats

    def twice_back(model: Mixtral, batch: Batch) -> Mixtral:
        vector = jax.tree.leaves(jax.tree.map(jnp.cos, model))

        def along(model: Mixtral) -> jax.Array:
            gradient = jax.tree.leaves(jax.grad(lambda model: loss_of(model, batch)[0])(model))
            pairs = zip(gradient, vector, strict=True)
            return sum(jnp.sum(one * other) for one, other in pairs)

        return jax.grad(along)(model)

    def both(model: Mixtral, batch: Batch) -> tuple[Mixtral, Mixtral]:
        return hessian_times_cosines(loss_of, model, batch), twice_back(model, batch)

    mesh = mesh_of(case.mesh, case.mode)
    config = replace(case.config, "model", num_layers=layers)
    model = model_on_mesh(source(dense=False, layers=layers), config, mesh)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch_of(case), batch_sharding(mesh, model.layout))
        found = jax.jit(both)(model, batch)
    for got in found:
        assert_close(got, hessian_alone(layers), 1e-4)


def hessian_times_cosines(loss: Any, model: Mixtral, batch: Batch) -> Mixtral:
    """The Hessian of a loss times the cosine of each parameter, forward over reverse."""
    gradient = jax.grad(lambda model: loss(model, batch)[0])
    return jax.jvp(gradient, (model,), (jax.tree.map(jnp.cos, model),))[1]


@functools.cache
def hessian_alone(layers: int) -> Mixtral:
    """The same on one device, in no pipeline."""
    batch = jax.tree.map(jnp.asarray, packed_batch(SPARSE))
    product = jax.jit(functools.partial(hessian_times_cosines, loss_of_parts))
    return product(source(dense=False, layers=layers), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("stage=2,fsdp=2", repeats=2, gather="step", unrolled=1),
        Case("stage=2,fsdp=2", repeats=2, schedule="1f1b", unrolled=1),
    ],
    ids=str,
)
def test_stacked_layers_and_repeats_give_the_same_numbers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stages of many layers, and more repeats, have them."""
    monkeypatch.setattr(repeats, "SEPARATE_REPEATS", 0)
    mesh, want = mesh_of(case.mesh), alone(dense=False, packed=True)
    model = model_on_mesh(source(dense=False), case.config, mesh)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch_of(case), batch_sharding(mesh, model.layout))
        program = jax.make_jaxpr(evaluate.__wrapped__)(model, batch)
        loss, _, gradients, _ = jax.jit(evaluate.__wrapped__)(model, batch)
    scans = [each.params["length"] for each in equations(program) if each.primitive.name == "scan"]
    assert case.repeats == 2 or 2 in scans  # one over the two layers of a stage
    assert_close(loss, want.loss, 1e-5)
    assert_close(gradients, want.gradients, 1e-4)


SCANNED = [
    Case("stage=2,fsdp=2", unrolled=1),
    Case("stage=2,data=2", unrolled=1, backward="accumulate"),
    Case("stage=2,fsdp=2", unrolled=1, schedule="1f1b"),
    Case("stage=2,fsdp=2", unrolled=1, repeats=2),
]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", SCANNED, ids=str)
def test_a_loop_over_layers_adds_their_gradients_in_place(case: Case) -> None:
    """Of three layers per stage: no loop hands out a stack of the gradients of all."""
    layers, mesh = 6 * case.repeats, mesh_of(case.mesh)
    config, whole = replace(case.config, "model", num_layers=layers), source(False, layers)
    model = model_on_mesh(whole, config, mesh)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch_of(case), batch_sharding(mesh, model.layout))
        traced = evaluate.trace(model, batch)
        loss, _, gradients, _ = traced.lower().compile()(model, batch)
    want, _, of_whole, _ = evaluate_in_parts(whole, jax.tree.map(jnp.asarray, batch_of(case)))
    assert_close(loss, want, 1e-5)
    assert_close(gradients, of_whole, 1e-4)
    scans = [each for each in equations(traced.jaxpr) if each.primitive.name == "scan"]
    over_layers = [each for each in scans if each.params["length"] == 3]
    outs = [each.outvars[each.params["num_carry"] :] for each in over_layers]
    stacked = {out.aval.shape for each in outs for out in each}
    weights = {(3, 2, *leaf.shape[3:]) for leaf in jax.tree.leaves(model.pipeline.layers)}
    assert over_layers
    assert not stacked & {shape for shape in weights if len(shape) > 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in PIPELINED if case.mode == "auto" and case.packed], ids=str
)
def test_explicit_and_auto_give_the_same_numbers(case: Case) -> None:
    explicit, auto = on_mesh(case._replace(mode="explicit")), on_mesh(case)
    assert_close(explicit.loss, auto.loss, 1e-6)
    assert_close(explicit.logits, auto.logits, 1e-5)
    assert_close(explicit.gradients, auto.gradients, 1e-5)


def test_load_balance_counts_in_the_loss() -> None:
    entropy, router = alone(dense=False, packed=True).parts
    assert float(alone(dense=False, packed=True).loss) == pytest.approx(
        float(entropy) + 0.1 * float(router.load_balance), rel=1e-6
    )
    assert float(router.load_balance) > SPARSE.model.num_experts_per_token


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("schedule", "kind"), [("circular", "nnx"), ("1f1b", "linen")])
def test_microbatches_are_given_where_the_loss_depends_on_them(schedule: str, kind: str) -> None:
    """Else the mesh alone would decide what the load balance is: here of 1 or of 4 microbatches."""
    config = replace(SPARSE, "pipeline", num_microbatches=None, schedule=schedule)
    batch = jax.tree.map(jnp.asarray, batch_of(Case("")))

    def traced(config: Config, mesh: str) -> None:
        with jax.set_mesh(mesh_of(mesh)):
            if kind == "nnx":
                jax.eval_shape(lambda: loss_of(Mixtral(config, rngs=nnx.Rngs(0)), batch))
                return
            linen = linen_compat.Transformer(config, layer_layout="pipelined")
            variables = jax.eval_shape(linen.init, jax.random.key(0), batch.tokens)
            arrays = (batch.tokens, batch.targets, batch.weights)
            jax.eval_shape(lambda v: linen.apply(v, *arrays, method="loss"), variables)

    with pytest.raises(InputError, match=r"set pipeline\.num_microbatches=4, on every mesh"):
        traced(config, "stage=4")
    for works, mesh in (
        (config, ""),
        (replace(config, "pipeline", num_microbatches=4), "stage=4"),
        (replace(config, "train", load_balance_weight=0.0), "stage=4"),
    ):
        traced(works, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "save_qkv_proj"])
def test_remat_changes_nothing(remat: str) -> None:
    config = replace(SPARSE, "pipeline", remat=remat)
    plain = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
    plain = jax.tree.unflatten(jax.tree.structure(plain), jax.tree.leaves(source(dense=False)))
    loss, _, gradients, _ = evaluate(plain, jax.tree.map(jnp.asarray, batch_of(Case(""))))
    want = alone(dense=False, packed=True)
    assert_close(loss, want.loss, 1e-6)
    assert_close(gradients, want.gradients, 1e-5)


def matrix_products(config: Config) -> int:
    """Products in the program of a gradient, recomputed ones included."""
    model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
    batch = jax.tree.map(jnp.asarray, batch_of(Case("")))
    gradient = jax.grad(lambda model: loss_of(model, batch)[0])
    jaxpr = jax.make_jaxpr(gradient)(model)
    return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr))


@pytest.mark.slow
def test_remat_policies_recompute_less_and_less() -> None:
    """Every policy that keeps more computes fewer products again."""
    names = ("full", "save_out_proj", "save_dot_except_mlp", "minimal", "none")
    counts = [matrix_products(replace(SPARSE, "pipeline", remat=name)) for name in names]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "loop",
    [
        {"num_microbatches": 1},
        {"num_microbatches": 4},
        {"num_microbatches": 4, "unrolled_layers": 1},
    ],
)
def test_a_group_of_layers_has_a_policy_of_its_own(loop: dict[str, int]) -> None:
    """What is kept in one layer of two spares half of the products."""

    def products(remat: str) -> int:
        return matrix_products(replace(SPARSE, "pipeline", remat=remat, remat_groups=2, **loop))

    names = (*QUERY_KEY_VALUE, OUT)
    of_one, of_other, of_all = (
        "keep:" + "+".join(f"{name}{at}" for name in names) for at in ("@1", "@2", "")
    )
    none = products("full")
    assert none - products(of_one) == none - products(of_other) == (none - products(of_all)) / 2 > 0
    assert products(f"{of_one}+{of_other[5:]}") == products(of_all)


def test_one_device_runs_microbatches_one_by_one() -> None:
    """Scores are those of one microbatch at a time."""
    tokens = packed_batch(SPARSE).tokens

    def scores(microbatches: int | None) -> int:
        config = replace(SPARSE, "pipeline", num_microbatches=microbatches)
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        found = equations(jax.make_jaxpr(lambda model, tokens: model(tokens))(model, tokens))
        return max(one.outvars[0].aval.size for one in found if one.primitive.name == "exp")

    assert scores(None) == scores(1) == 4 * scores(4)


@pytest.mark.parametrize("layers", [1, 2, 4, 10])
def test_layer_inputs_are_kept_or_not(layers: int) -> None:
    """Of each tick the input of the stage is kept, and if asked that of each layer of it.

    Up to 4 layers of a stage are unrolled and have an array each; more have one in common.
    """
    mesh, ticks = mesh_of("stage=2"), 5

    def kept(save: bool) -> list[tuple[int, ...]]:
        config = replace(SPARSE, "pipeline", save_decoder_layer_input=save)
        config = replace(config, "model", num_layers=2 * layers)
        with jax.set_mesh(mesh):
            model = abstract_state(config, mesh).model
            batch = jax.tree.map(jnp.asarray, batch_of(Case("")))
            jaxpr = jax.make_jaxpr(jax.grad(lambda model: loss_of(model, batch)[0]))(model)
        shapes = [
            variable.aval.shape
            for equation in equations(jaxpr)
            if equation.primitive.name == "scan"
            for variable in equation.outvars
        ]
        return [shape for shape in shapes if shape[:1] == (ticks,) and shape[-4:] == (2, 4, 8, 16)]

    each = (ticks, 2, 4, 8, 16)
    assert kept(True) == ([each] * layers if layers <= 4 else [(ticks, layers, 2, 4, 8, 16)])
    assert kept(False) == [each]


# ---- shardings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["dense", "grouped", "capacity"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_loop_over_layers_casts_weights_where_it_reads_them(layers: int, experts: str) -> None:
    """A compiler would cast those of all layers before the loop, and hold the copies through it."""
    config = replace(SPARSE, "model", dtype="bfloat16", num_layers=layers, experts=experts)
    config = replace(config, "pipeline", num_microbatches=None)
    model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
    tokens = packed_batch(config).tokens
    found = equations(jax.make_jaxpr(lambda model, tokens: model(tokens))(model, tokens))
    rounded = sum(one.primitive.name == "reduce_precision" for one in found)
    # Query, key, value and out, gate, up and down; router and norms are small.
    assert rounded == (7 if layers > 1 else 0)


@functools.cache
def stepped(mesh_text: str, mode: str) -> tuple[Any, Any, Any]:
    """A fresh state's arrays as numpy, its abstract twin, and the state after one step."""
    config = replace(SPARSE, "pipeline", sharding=mode)
    mesh = mesh_of(mesh_text, mode)
    with jax.set_mesh(mesh):
        state = make_state(config, mesh)
        before = jax.tree.map(np.asarray, state.model)
        twin = abstract_state(config, mesh)
        assert_same_placement(state, twin)
        batch = jax.device_put(batch_of(Case("")), batch_sharding(mesh, state.model.layout))
        with optax_promotion():
            after, _ = jit_train_step(state, mesh)(state, batch)
    return before, twin, after


MESHES = [("stage=4,fsdp=2", "explicit"), ("stage=2,tensor=2,expert=2", "auto")]

each_mesh = pytest.mark.parametrize(("mesh", "mode"), MESHES)


@pytest.mark.slow
@each_mesh
def test_a_step_keeps_every_array_in_its_place(mesh: str, mode: str) -> None:
    """Parameters and both moments of the optimizer."""
    _, twin, after = stepped(mesh, mode)
    assert_same_placement(after, twin)
    weights = arrays_by_path(after.model)
    moments = arrays_by_path(after.optimizer)
    for path, leaf in weights.items():
        of_leaf = [moments[name] for name in moments if f"/{name}".endswith(f"u/{path}")]
        assert len(of_leaf) == 2, path
        for moment in of_leaf:
            assert moment.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), path


@pytest.mark.slow
def test_where_the_weights_lie() -> None:
    """Embedding and head are spread over the stages too; every layer lies on its stage."""
    _, _, after = stepped(*MESHES[0])
    layers = after.model.pipeline.layers
    attention, experts = layers.attention, layers.feed_forward
    want = {
        "embedding": (after.model.embedding.embedding, P("stage", "fsdp")),
        "head": (after.model.head, P("fsdp", "stage")),
        "query": (attention.query, P(None, "stage", None, "fsdp", None, None)),
        "out": (attention.out, P(None, "stage", None, None, None, "fsdp")),
        "gate": (experts.gate, P(None, "stage", None, None, "fsdp", None)),
        "down": (experts.down, P(None, "stage", None, None, None, "fsdp")),
        "router": (experts.router, P(None, "stage", None, "fsdp", None)),
        "norm": (layers.attention_norm.scale, P(None, "stage", None, None)),
        "last norm": (after.model.norm.scale, P(None)),
    }
    mesh = mesh_of(MESHES[0][0])
    for name, (variable, spec) in want.items():
        array = variable.get_value()
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), (
            f"{name}: {array.sharding.spec}"
        )


@pytest.mark.slow
@each_mesh
def test_initial_values_do_not_depend_on_the_mesh(mesh: str, mode: str) -> None:
    before, _, _ = stepped(mesh, mode)
    assert_close(before, new_model(SPARSE), 1e-6)


@pytest.mark.parametrize(
    ("mesh", "experts", "layers", "repeats", "spec"),
    [
        ("stage=4,fsdp=2", 4, 4, 1, P("stage", "fsdp", None, None)),
        ("stage=2,fsdp=2,tensor=2", 4, 4, 2, P("stage", "fsdp", None, None)),
        ("stage=2,fsdp=2,tensor=2", 1, 4, 2, P("stage", "fsdp", None, None)),
        ("data=2,stage=2,expert=2", 4, 4, 1, P("stage", ("data", "expert"), None, None)),
        ("data=2,stage=2,expert=2", 4, 10, 1, P("stage", ("data", "expert"), None, None)),
        ("fsdp=4,tensor=2", 1, 4, 1, P("fsdp", None, None)),
        ("data=2,expert=2", 4, 4, 1, P(("data", "expert"), None, None)),
    ],
)
def test_the_types_show_each_layers_output(
    mesh: str, experts: int, layers: int, repeats: int, spec: P
) -> None:
    """In explicit mode every layer hands on activations of the intended spec.

    Scans over ticks or over the layers of a stage carry them, and every layer gets them: layers in
    a scan in one place of the program, layers that are unrolled in one place each.
    """
    config = replace(SPARSE, "train", load_balance_weight=0.0)
    config = replace(config, "model", num_experts=experts, num_experts_per_token=min(experts, 2))
    config = replace(config, "model", num_layers=layers)
    grid = mesh_of(mesh)
    microbatches = 4 if grid.shape["stage"] > 1 else None
    config = replace(config, "pipeline", num_repeats=repeats, num_microbatches=microbatches)
    with jax.set_mesh(grid):
        model = abstract_state(config, grid).model
        tokens = jax.ShapeDtypeStruct(
            (16, 8), jnp.int32, sharding=batch_sharding(grid, model.layout)
        )
        jaxpr = jax.make_jaxpr(lambda model, tokens: model.hidden(tokens)[0])(model, tokens)
    stages = grid.shape["stage"]
    shape = (stages, 4, 8, 16) if stages > 1 else (16, 8, 16)
    carried, entering = [], []
    for equation in equations(jaxpr):
        specs = [
            without_tail(variable.aval.sharding.spec)
            for variable in equation.outvars
            if variable.aval.shape == shape
        ]
        if equation.primitive.name == "scan":
            carried += specs
        elif equation.params.get("name") == LAYER_INPUT:
            entering += specs
    of_a_stage = config.layers_per_stage(stages)
    unrolled = stages > 1 and of_a_stage <= 4
    loops = (stages > 1) + (not unrolled)  # over ticks, over layers
    assert len(carried) >= loops
    assert entering == [without_tail(spec)] * (of_a_stage if unrolled else 1)
    assert set(carried) == {without_tail(spec)}
    last = jaxpr.jaxpr.outvars[0].aval
    whole = ("stage", *spec[1:]) if stages > 1 else spec
    assert without_tail(last.sharding.spec) == without_tail(P(*whole))


def without_tail(spec: P) -> tuple[Any, ...]:
    """A spec without what says nothing at its end."""
    entries = [entry or None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


# ---- the formula -------------------------------------------------------------------------------


def plainly(model: Mixtral, tokens: Any, positions: Any, segments: Any) -> jax.Array:
    """The logits by formulas that do not come from the package."""
    side = plain_model.Side(positions, segments)
    return plain_model.logits(plain_model.weights_of(model), tokens, side, model.config.model)


@pytest.mark.parametrize("dense", [False, True])
def test_logits_equal_plain_formulas(dense: bool) -> None:
    batch = batch_of(Case("", dense=dense))
    want = plainly(source(dense), batch.tokens, batch.positions, batch.segment_ids)
    assert_close(alone(dense, packed=True).logits, want, 1e-5)


@pytest.mark.slow
def test_other_numbers_in_the_formula() -> None:
    """Attention scale, rotary base and epsilon reach the formula."""
    config = small_config(
        model={"attention_scale": 0.5, "rope_theta": 50.0, "norm_epsilon": 0.1, "num_layers": 2}
    )
    model, batch = new_model(config), packed_batch(config)
    logits = jax.jit(lambda model, batch: model(batch.tokens))(model, batch)
    positions = np.broadcast_to(np.arange(8), batch.tokens.shape)
    assert_close(logits, plainly(model, batch.tokens, positions, np.ones((8, 8))), 1e-5)


def test_cross_entropy_and_weights() -> None:
    """Σ weights · entropy / (Σ weights + 1e-8), from the logits."""
    results, batch = alone(dense=False, packed=True), batch_of(Case(""))
    logits = np.asarray(results.logits, np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    entropy = (largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True)))[..., 0]
    entropy -= np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    want = np.sum(entropy * batch.weights) / (np.sum(batch.weights) + 1e-8)
    assert float(results.parts[0]) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_of_a_new_model_is_near_that_of_guessing(tied: bool) -> None:
    config = small_config(model={"tied_embeddings": tied, "embed_dim": 64, "vocab_size": 96})
    model = Mixtral(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(8 * 16).reshape(8, 16) % 96
    loss, _ = jax.jit(Mixtral.loss)(model, tokens, tokens[::-1], jnp.full((8, 16), 1 / 128))
    assert abs(float(loss) - math.log(96)) < 1


def test_a_batch_without_any_target_costs_nothing() -> None:
    batch = batch_of(Case(""))
    batch = Batch(tokens=batch.tokens, targets=batch.targets, weights=0 * batch.weights)
    model = source(dense=True)
    loss, gradients = jax.jit(jax.value_and_grad(lambda m, b: loss_of(m, b)[0]))(model, batch)
    assert float(loss) == 0.0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradients))


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """Packed in one row, two documents get the logits that each gets alone."""
    tokens = np.random.default_rng(3).integers(32, size=(8, 8), dtype=np.int32)
    segments = np.repeat([[1, 1, 1, 2, 2, 2, 2, 2]], 8, axis=0).astype(np.int32)
    positions = np.repeat([[0, 1, 2, 0, 1, 2, 3, 4]], 8, axis=0).astype(np.int32)
    apply = jax.jit(lambda model, tokens, **side: model(tokens, **side))
    model = source(dense=False)
    packed = apply(model, tokens, positions=positions, segment_ids=segments)
    second = np.concatenate([tokens[:, 3:], tokens[:, :3]], axis=1)
    assert_close(packed[:, :3], apply(model, tokens)[:, :3], 1e-5)
    assert_close(packed[:, 3:], apply(model, second)[:, :5], 1e-5)


@pytest.mark.slow
def test_scale_offset_shifts_the_stored_scales() -> None:
    """A model whose scales are stored around zero computes what one around one does."""
    model = source(dense=False)
    shifted = new_model(replace(SPARSE, "model", norm_scale_offset=1.0))

    def shift(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf - 1.0 if "scale" in jax.tree_util.keystr(path) else leaf

    leaves = jax.tree.leaves(jax.tree_util.tree_map_with_path(shift, model))
    shifted = jax.tree.unflatten(jax.tree.structure(shifted), leaves)
    batch = batch_of(Case(""))
    logits = jax.jit(lambda m, b: m(b.tokens, positions=b.positions, segment_ids=b.segment_ids))(
        shifted, batch
    )
    assert_close(logits, alone(dense=False, packed=True).logits, 1e-5)


# ---- dtypes and input errors -------------------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_activations() -> None:
    """No dtype mixes silently; hidden states are bfloat16, gradients keep the weights' float32."""
    case = Case("stage=2,fsdp=2", repeats=2)
    config = replace(case.config, "model", dtype="bfloat16")
    mesh = mesh_of(case.mesh)
    model = model_on_mesh(source(dense=False), config, mesh)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch_of(case), batch_sharding(mesh, model.layout))
        loss, _, gradients, logits = evaluate(model, batch)
        hidden = jax.eval_shape(lambda model: model.hidden(batch.tokens)[0], model)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    assert float(loss) == pytest.approx(float(alone(dense=False, packed=True).loss), rel=2e-2)


@pytest.mark.slow
def test_everything_in_half_precision() -> None:
    config = small_config(model={"dtype": "float16", "param_dtype": "float16", "num_layers": 1})
    loss, _, gradients, _ = evaluate(new_model(config), packed_batch(config))
    assert np.isfinite(loss)
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float16
        assert np.all(np.isfinite(leaf))


TIED, GATHER = {"tied_embeddings": True}, {"embedding": "gather"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes", "shards"),
    [
        (Case("stage=2,fsdp=2,tensor=2"), {"vocab_size": 37}, 8),
        (Case("stage=2,tensor=2", schedule="1f1b"), {"vocab_size": 37}, 4),
        (Case("stage=2,fsdp=2", mode="auto", schedule="1f1b"), {"vocab_size": 37}, 4),
        (Case("stage=2,tensor=2", mode="auto"), {"vocab_size": 65, **TIED, **GATHER}, 4),
        (Case("stage=4,tensor=2", mode="auto"), {"vocab_size": 38}, 8),
        (Case("tensor=2"), {"vocab_size": 37, **GATHER}, 2),
        # The width does not split over both either.
        (Case("stage=4,tensor=2"), {"vocab_size": 38, "embed_dim": 18}, 2),
        (Case("stage=2,tensor=2"), {"vocab_size": 37, "embed_dim": 17}, 1),
        (Case("stage=4,tensor=2"), {"vocab_size": 36, "embed_dim": 18}, 4),
    ],
    ids=str,
)
def test_a_vocabulary_of_any_size(case: Case, sizes: dict[str, Any], shards: int) -> None:
    """Loss, gradients and logits of the true vocabulary, and the devices that share its table."""
    config, vocab = replace(case.config, "model", **sizes), sizes["vocab_size"]
    alone = replace(SPARSE, "model", **sizes)
    source = new_model(replace(alone, "pipeline", num_microbatches=None))
    batch, mesh = packed_batch(config), mesh_of(case.mesh, case.mode)
    want = evaluate_in_parts(source, jax.tree.map(jnp.asarray, batch))
    model = model_on_mesh(source, config, mesh)
    with jax.set_mesh(mesh):
        for array in (model.embedding.embedding, *(() if model.head is None else (model.head,))):
            assert sorted(array.shape) == sorted((vocab, config.model.embed_dim))
            assert array.addressable_shards[0].data.nbytes * shards == array.nbytes
        found = evaluate(model, jax.device_put(batch, batch_sharding(mesh, model.layout)))
    assert found[3].shape[-1] == vocab
    assert_close((found[0], found[1], found[3]), (want[0], want[1], want[3]), 1e-5)
    assert_close(found[2], want[2], 1e-4)
    assert_same_placement(found[2], model)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32")],
)
def test_small_weights_lose_no_gradients(dtype: str, stored: str, schedule: str) -> None:
    """As in large batches, against a plain model in float64, with a loss scale and without.

    1F1B, which computes gradients before it knows the scale, has batches as large as that too.
    """
    sizes = {"num_experts": 1, "num_experts_per_token": 1, "num_layers": 2}
    config = small_config(model=sizes, pipeline={"num_microbatches": 4, "schedule": schedule})
    source = new_model(replace(config, "pipeline", num_microbatches=None))
    # Values that both dtypes have, so that only products and sums are rounded.
    source = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype), source)
    # With one target for all tokens their gradients add up.
    whole = packed_batch(config)
    batch = whole = dataclasses.replace(whole, targets=np.full_like(whole.targets, 5))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: x.astype(np.float64), plain_model.weights_of(source))
        of_one = dataclasses.replace(batch, weights=batch.weights.astype(np.float64))
        gradient = jax.grad(plain_model.loss, has_aux=True)
        want = jax.tree.map(np.asarray, gradient(wide, of_one, config, microbatches=1)[0])
    mesh, count = mesh_of("stage=2,fsdp=2"), float(np.sum(batch.weights))
    model = jax.tree.map(lambda x: x.astype(stored), source)
    model = model_on_mesh(model, replace(config, "model", dtype=dtype, param_dtype=stored), mesh)

    @jax.jit
    def of(model: Mixtral, batch: Batch, tokens: Any, scale: Any) -> Any:
        def loss(model: Mixtral) -> Any:
            arrays = (batch.tokens, batch.targets, batch.weights / tokens)
            side = {"positions": batch.positions, "segment_ids": batch.segment_ids}
            return scale * model.loss(*arrays, **side)[0]

        return jax.grad(loss)(model)

    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, batch_sharding(mesh, model.layout))
        for tokens in (2.0**6, 2.0**12, 2.0**18):
            for scale in (1.0, tokens):
                if scale == 1.0 and (schedule, dtype) == ("circular", "float16"):
                    continue  # the layers compute with what the user scales
                if scale == 1.0 and stored == "float16":
                    continue  # as small gradients as these have no place in the result itself
                found = plain_model.weights_of(of(model, batch, tokens, scale))
                for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
                    apart = np.asarray(one, np.float64) * (tokens / scale / count) - exact
                    error = 3 * float(jnp.finfo(dtype).eps)
                    assert np.linalg.norm(apart) < error * np.linalg.norm(exact)
        of_large = (schedule, dtype, stored) == ("1f1b", "float16", "float32")
        for copies in (2**6, 2**12) if of_large else ():
            many = jax.tree.map(lambda x, n=copies: np.tile(x, (n, 1)), whole)
            many = jax.device_put(many, batch_sharding(mesh, model.layout))
            found = plain_model.weights_of(of(model, many, count * copies, 1.0))
            for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
                error = 6 * float(jnp.finfo(dtype).eps)  # sums of many are rounded more often
                apart = np.asarray(one, np.float64) - exact
                assert np.linalg.norm(apart) < error * np.linalg.norm(exact)


def test_a_model_of_another_mesh_is_refused() -> None:
    with jax.set_mesh(mesh_of("stage=4")):
        model = jax.eval_shape(lambda: Mixtral(SPARSE, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros((8, 8), jnp.int32)
    with jax.set_mesh(mesh_of("stage=2")), pytest.raises(InputError, match="same mesh"):
        jax.eval_shape(lambda model: model(tokens), model)


def test_a_batch_that_does_not_split_is_refused() -> None:
    with jax.set_mesh(mesh_of("stage=4")):
        model = jax.eval_shape(lambda: Mixtral(SPARSE, rngs=nnx.Rngs(0)))
        with pytest.raises(InputError, match=r"a batch of 6 .* does not split into 4 microbatches"):
            jax.eval_shape(lambda model: model(jnp.zeros((6, 8), jnp.int32)), model)


def test_another_sequence_length_than_configured() -> None:
    """The config's sequence length is that of training; a call may have any."""
    tokens = jnp.zeros((8, 5), jnp.int32)
    assert jax.eval_shape(lambda m: m(tokens), source(dense=False)).shape == (8, 5, 32)


INTS, FLOATS = jnp.zeros((8, 12), jnp.int32), jnp.zeros((8, 12))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(FLOATS), r"`tokens` of a model is float32\[8, 12\].*tokens.astype\('int32'\)"),
        (lambda m: m(INTS[0]), r"int32\[12\] and must be integers \[batch, seq\].*tokens\[None\]"),
        (lambda m: m([[1, 2]]), r"`tokens` of a model is list .*; give an array"),
        (lambda m: m.hidden(FLOATS), r"`tokens` of a model is float32"),
        (lambda m: m(INTS, positions=FLOATS), r"`positions` .* float32.*positions.astype"),
        (
            lambda m: m(INTS, segment_ids=INTS[:, :8]),
            r"`segment_ids` .* integers \[8, 12\], one for",
        ),
        (lambda m: m(INTS, at=INTS), r"`at` .* must be integers \[8\], one for each sequence"),
        (lambda m: m.loss(INTS, INTS[:, :8], FLOATS), r"`targets` .* int32\[8, 8\] .* \[8, 12\]"),
        (lambda m: m.loss(INTS, FLOATS, FLOATS), r"`targets` .* float32.*targets.astype"),
        (
            lambda m: m.loss(INTS, INTS, FLOATS[:, 0]),
            r"`weights` .* float32\[8\] and must be floats",
        ),
        (lambda m: m.loss(INTS, INTS, INTS), r"`weights` .* floats .*weights.astype\('float32'\)"),
        (
            lambda m: loss_of(m, Batch(tokens=INTS, targets=INTS, weights=FLOATS[:, :8])),
            r"`weights` .* float32\[8, 8\] .* \[8, 12\], one for each token",
        ),
    ],
)
def test_what_is_no_batch_of_a_model_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        jax.eval_shape(call, source(dense=False))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_a_loss_whose_pieces_do_not_divide_the_sequence_is_refused(schedule: str) -> None:
    """It counts the tokens that it is given, and not those of the config."""
    config = replace(replace(SPARSE, "train", loss_chunks=4), "pipeline", schedule=schedule)
    model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))

    def loss(length: int) -> Any:
        ids = jnp.zeros((16, length), jnp.int32)
        return jax.eval_shape(lambda m: m.loss(ids, ids, jnp.zeros(ids.shape))[0], model)

    assert loss(12).shape == ()
    with pytest.raises(InputError, match=r"=13 does not split into loss_chunks=4 .* 12 or 16"):
        loss(13)

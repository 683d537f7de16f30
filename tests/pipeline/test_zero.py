"""The optimizer's state spread over `data`: the same training, and no gradient summed whole."""

import functools
import math
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    arrays_by_path,
    assert_close,
    equations,
    fresh_model,
    fresh_state,
    mesh_of,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)

from nnx_pipeline import Config, InputError, Layout
from nnx_pipeline.lab._hlo.loops import executions
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab.mesh import spec_axes
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step, loss_of
from nnx_pipeline.train.step import batch_sharding, train_step

pytestmark = pytest.mark.numbers

# The large epsilon keeps gradients near zero from deciding the sign of a whole update.
TRAIN = {"global_batch": 16, "learning_rate": 1e-2, "adam_eps": 1e-3, "load_balance_weight": 0.1}
CASES = [
    ("data=4,fsdp=2", "explicit", {}),
    ("data=2,stage=2,fsdp=2", "explicit", {"num_repeats": 2}),
    ("data=2,stage=2,fsdp=2", "auto", {"fsdp_gather": "step", "schedule": "1f1b"}),
    ("data=2,stage=2,expert=2", "explicit", {"backward": "accumulate"}),
    ("data=2,stage=2,expert=2", "explicit", {"fsdp_gather": "prefetch", "num_repeats": 2}),
]
each_case = pytest.mark.parametrize(
    ("mesh", "mode", "pipeline"), CASES, ids=lambda value: str(value).replace(" ", "")
)


def config_of(mode: str, pipeline: dict[str, Any], *, sharded: bool = True) -> Config:
    # The widths are such that a weight is above the limit of `largest` below, and a bias of experts
    # has no axis that is spread over `data`.
    return small_config(
        model={
            "vocab_size": 64,
            "embed_dim": 32,
            "router_score": "sigmoid",
            "router_bias": True,
            "router_bias_in_weights": True,
        },
        pipeline={"sharding": mode, "num_microbatches": 2, **pipeline},
        train={**TRAIN, "shard_optimizer_over_data": sharded},
    )


@functools.cache
def compiled(mesh: str, mode: str, pipeline: tuple[tuple[str, Any], ...], sharded: bool) -> Any:
    """A training step, for the tests that run it and for those that read its program."""
    config, on = config_of(mode, dict(pipeline), sharded=sharded), mesh_of(mesh, mode)
    with jax.set_mesh(on), optax_promotion():
        state, batch = abstract_state(config, on), batch_on(on, config)
        return jit_train_step(state, on).lower(state, batch).compile()


def batch_on(mesh: jax.sharding.Mesh, config: Config) -> Any:
    return jax.device_put(packed_batch(config), batch_sharding(mesh, Layout()))


def trained(case: tuple[str, str, dict[str, Any]], *, sharded: bool) -> tuple[Any, Any]:
    """The state after three steps, and every metric on the way."""
    mesh, mode, pipeline = case
    config, on, found = config_of(mode, pipeline, sharded=sharded), mesh_of(mesh, mode), []
    step = compiled(mesh, mode, tuple(pipeline.items()), sharded)
    state, batch = fresh_state(config, on), batch_on(on, config)
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(metrics)
    return state, found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("mesh", "mode", "pipeline"), CASES[::2], ids=str)
def test_training_is_the_same(mesh: str, mode: str, pipeline: dict[str, Any]) -> None:
    state, metrics = trained((mesh, mode, pipeline), sharded=True)
    want, want_metrics = trained((mesh, mode, pipeline), sharded=False)
    assert_close(metrics, want_metrics, 1e-5)
    assert_close(state.model, want.model, 1e-5)
    assert_close(state.optimizer, want.optimizer, 1e-4)


@each_case
def test_a_device_holds_its_part_of_the_state(
    mesh: str, mode: str, pipeline: dict[str, Any]
) -> None:
    """Parameters are where they are without the option, and moments take 1/data of their bytes."""
    on = mesh_of(mesh, mode)
    with jax.set_mesh(on):
        state = abstract_state(config_of(mode, pipeline), on)
        plain = abstract_state(config_of(mode, pipeline, sharded=False), on)
    for path, leaf in arrays_by_path(state.model).items():
        assert leaf.sharding == arrays_by_path(plain.model)[path].sharding
    for path, leaf in arrays_by_path(state.optimizer).items():
        if leaf.ndim and "router_bias" not in path:
            assert "data" in spec_axes(leaf.sharding.spec), path
            whole = arrays_by_path(plain.optimizer)[path]
            assert per_device(leaf) * on.shape["data"] == per_device(whole)


def per_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


@functools.cache
def program(mesh: str, mode: str, pipeline: tuple[tuple[str, Any], ...], sharded: bool) -> Any:
    return parse(compiled(mesh, mode, pipeline, sharded).as_text())


class OverData(NamedTuple):
    """What a collective over `data` gives: its largest array, and how often it runs."""

    elements: int
    axes: int
    times: int


def over_data(module: Any, opcode: str, data: int) -> list[OverData]:
    """All collectives of one kind whose groups have devices that differ along `data`."""
    return [
        OverData(
            max(shape.elements for shape in instruction.shapes),
            max(len(shape.dims) for shape in instruction.shapes),
            times,
        )
        for name, times in executions(module).items()
        for instruction in module.computations[name].instructions.values()
        if instruction.opcode == opcode and crosses(instruction, 8 // data)
    ]


def largest(module: Any, opcode: str, data: int) -> int:
    """Elements of the largest array that a collective of one kind over `data` gives."""
    return max((one.elements for one in over_data(module, opcode, data)), default=0)


def crosses(collective: Any, beside: int) -> bool:
    """Whether devices that differ along `data`, the first axis of the mesh, are in one group."""
    return any(len({device // beside for device in row}) > 1 for row in groups_of(collective))


def groups_of(collective: Any) -> list[list[int]]:
    """XLA writes groups as a list, as a reshaped and transposed range, or by axes of a mesh."""
    text = collective.attributes["replica_groups"]
    if text.startswith("{"):
        return [[int(i) for i in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):
        shape, _, devices = text.partition("<=")
        return arranged(devices).reshape(*integers(shape)).tolist()
    text += collective.attributes.get("device_ids", "")
    names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", text), strict=True)
    sizes = tuple(map(int, sizes))
    order = re.search(r"\((\[.*\].*)\)", text)
    devices = arranged(order.group(1)) if order else np.arange(math.prod(sizes))
    inside = [names.index(axis) for axis in re.findall(r"'(\w+)'(?!=)", text)]
    outside = [axis for axis in range(len(sizes)) if axis not in inside]
    devices = devices.reshape(sizes).transpose(outside + inside)
    return devices.reshape(-1, math.prod(sizes[axis] for axis in inside)).tolist()


def arranged(text: str) -> np.ndarray:
    """Device numbers of a text such as `[2,4]T(1,0)`."""
    shape, _, order = text.partition("T")
    devices = np.arange(math.prod(integers(shape))).reshape(integers(shape))
    return devices.transpose(integers(order)) if order else devices


def integers(text: str) -> list[int]:
    return [int(i) for i in re.findall(r"\d+", text)]


@pytest.mark.slow(but=1)
@each_case
def test_no_gradient_is_summed_whole(mesh: str, mode: str, pipeline: dict[str, Any]) -> None:
    """The compiled step has no all-reduce as large as the smallest weight matrix.

    What is left are losses, the router's means and the scale of the last norm.
    """
    module, data = program(mesh, mode, tuple(pipeline.items()), True), mesh_of(mesh).shape["data"]
    smallest = 32 * 2 * 4 // 2  # a key projection of one layer
    assert largest(module, "all-reduce", data) < smallest
    assert largest(module, "reduce-scatter", data) >= smallest // data


@pytest.mark.slow
def test_without_the_option_it_is() -> None:
    """Then whole gradients are summed over `data`, so that the test above can fail."""
    plain = program(*CASES[0][:2], (), False)
    assert largest(plain, "all-reduce", 4) >= 64 * 32 // 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mesh", "mode", "pipeline"), CASES[2:], ids=lambda value: str(value).replace(" ", "")
)
def test_a_loop_that_adds_up_gradients_sums_them_over_data_once(
    mesh: str, mode: str, pipeline: dict[str, Any]
) -> None:
    """Without the option too: each device adds up its own, and the sum is made after the ticks."""
    module, data = program(mesh, mode, tuple(pipeline.items()), False), mesh_of(mesh).shape["data"]
    # What routers report is averaged over the copies at each visit: 32 numbers, as many as a norm
    # has, so that the kernels have to show it.
    found = over_data(module, "all-reduce", data)
    of_layers = [one for one in found if one.axes > 4 and one.elements > 32]
    assert {one.times for one in of_layers} == {1}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("case", "once"), [(CASES[2], False), (CASES[3], True)], ids=str)
def test_shards_add_up_where_weights_are_gathered(case: Any, once: bool) -> None:
    """Each visit's gradient is then scattered over `data`; elsewhere the sum of all visits is."""
    mesh, mode, pipeline = case
    module, data = program(mesh, mode, tuple(pipeline.items()), True), mesh_of(mesh).shape["data"]
    found = over_data(module, "reduce-scatter", data)
    times = {one.times for one in found if one.elements >= 32 * 2 * 4 // 4}
    assert times == {1} if once else max(times) > 1, times


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("pipeline", [{}, {"schedule": "1f1b"}], ids=str)
def test_gradients_travel_in_their_dtype(pipeline: dict[str, Any]) -> None:
    config = replace(config_of("explicit", pipeline), "train", grad_dtype="bfloat16")
    mesh = mesh_of("data=2,stage=2,fsdp=2")
    with jax.set_mesh(mesh), optax_promotion():
        state = abstract_state(config, mesh)
        jaxpr = jax.make_jaxpr(train_step)(state, abstract_batch(config, mesh))
    over_data = [
        str(equation.outvars[0].aval.dtype)
        for equation in equations(jaxpr)
        if equation.primitive.name == "reduce_scatter" and "data" in equation.params["axis_name"]
        if equation.outvars[0].aval.ndim > 3  # of layers
    ]
    assert set(over_data) == {"bfloat16"}


@pytest.mark.slow
def test_the_gradient_of_the_parameters_themselves() -> None:
    """Where nobody gives shards of the parameters, the model is what it is without the option."""
    on, found = mesh_of("data=2,stage=2,fsdp=2"), []
    for sharded in (True, False):
        config = config_of("explicit", {"fsdp_gather": "step"}, sharded=sharded)
        with jax.set_mesh(on):
            model = fresh_model(config, on)
            batch = jax.tree.map(jnp.asarray, packed_batch(config))

            @jax.jit
            def evaluate(model: Any, batch: Any) -> Any:
                gradients = jax.value_and_grad(lambda model: loss_of(model, batch)[0])(model)
                return gradients, model(batch.tokens, segment_ids=batch.segment_ids)

            found.append(evaluate(model, batch))
    assert_close(found[0], found[1], 1e-5)


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("data=2,stage=2,fsdp=2", {}),
        ("data=2,stage=2,fsdp=2", {"fsdp_gather": "step"}),
        ("data=4,fsdp=2", {}),
    ],
    ids=str,
)
def test_the_gradient_of_parameters_beside_their_shards_is_refused(
    mesh: str, pipeline: dict[str, Any]
) -> None:
    """It goes to the shards, and would be zero."""
    config, on = config_of("explicit", pipeline), mesh_of(mesh)
    with jax.set_mesh(on):
        model, batch = abstract_state(config, on).model, abstract_batch(config, on)

        def loss(model: Any, shards: Any) -> Any:
            return loss_of(model, batch_of_ones(batch), shards=shards)[0]

        with pytest.raises(InputError, match="both the parameters and their shards"):
            jax.eval_shape(jax.grad(loss), model, jax.eval_shape(lambda m: m.shards(), model))


def batch_of_ones(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), batch)


@pytest.mark.slow
def test_one_device_along_data_changes_nothing() -> None:
    on = mesh_of("stage=2,fsdp=2")
    texts = []
    for sharded in (True, False):
        config = config_of("explicit", {}, sharded=sharded)
        with jax.set_mesh(on), optax_promotion():
            state = abstract_state(config, on)
            lowered = jit_train_step(state, on).lower(state, abstract_batch(config, on))
            texts.append(lowered.as_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", [[0, 2], [1, 3]]),
        ("mesh['data'=2,'fsdp'=2] {'data'}", [[0, 2], [1, 3]]),
        ("mesh['data'=2,'fsdp'=2] {'fsdp'}", [[0, 1], [2, 3]]),
        ("mesh['data'=2,'stage'=1,'fsdp'=2] {'fsdp','data'}", [[0, 2, 1, 3]]),
    ],
)
def test_groups_are_read_in_every_form(text: str, groups: list[list[int]]) -> None:
    attributes = {"replica_groups": text}
    assert groups_of(SimpleNamespace(attributes=attributes)) == groups

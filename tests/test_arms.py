"""The arms of the experiments: their programs differ, and what they compute does not."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from helpers import assert_close, mesh_of, optax_promotion, replace, small_config

from nnx_pipeline import Config, MeshConfig
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.arms import Program
from nnx_pipeline.lab.experiments import EXPERIMENTS, choose
from nnx_pipeline.lab.hlo import fingerprint
from nnx_pipeline.modules import Parts
from nnx_pipeline.pipeline import ticks
from nnx_pipeline.pipeline.loop_parts import LoopParts, scan_ticks
from nnx_pipeline.pipeline.stages import over_stages, select_repeat
from nnx_pipeline.sharding import Layout, constrain
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step, loss_of, make_state
from nnx_pipeline.train.data import learnable_batches

MESH = "stage=2,fsdp=2"
# Rows of the source documents about memory. S2.6 goes with S2.4a, S2.10a to c are S1.1 to S1.3;
# S2.12 has four arms and a command of its own, `linen-compat overhead`.
CLAIMED = {
    *("S1.1", "S1.2", "S1.3", "S2.1", "S2.4a", "S2.4b", "S2.5", "S2.7", "S2.8", "S2.9a", "S2.9b"),
    *("S2.10d", "S2.10e", "S2.11", "S2.13a", "S2.13b", "S3.1", "S3.2", "S3.3", "S3.4"),
    *("S4.1", "S4.2", "S4.3", "MaxText"),
}
# Arms whose program is the same by nature: nnx.vmap takes modules apart and puts metadata on while
# it traces, and nothing of that is left in what goes to the compiler.
# A cast to the dtype that an array has is left out by JAX. The flag of Flax is about variables with
# shardings in its own metadata, which the variables of this package do not have.
SAME_PROGRAM = {"stage-vmap", "stage-metadata", "hidden-cast", "gradient-cast", "shard-variable"}
RUNNABLE = [name for name, experiment in EXPERIMENTS.items() if not experiment.later]
EXCHANGED = [
    name
    for name, experiment in EXPERIMENTS.items()
    for arm in (experiment.a, experiment.b)
    if (arm.parts, arm.layout) != (Parts(), Layout())
]


def small() -> Config:
    return small_config(pipeline={"num_microbatches": 4})


def mesh_for(name: str) -> str:
    return "data=2,stage=2" if "data" in EXPERIMENTS[name].needs else MESH


def programs(name: str, config: Config, mesh: str = MESH) -> tuple[Program, Program]:
    return EXPERIMENTS[name].programs(config, MeshConfig.parse(mesh))


@functools.cache
def lowered(program: Program, mesh_name: str = MESH) -> str:
    """The training step as it goes to the compiler."""
    config, parts, layout, segment_ids, _ = program
    mesh = mesh_of(mesh_name, config.pipeline.sharding)
    with jax.set_mesh(mesh), optax_promotion():
        state = abstract_state(config, mesh, layout=layout, parts=parts)
        batch = abstract_batch(config, mesh, layout=layout, segment_ids=segment_ids)
        return jit_train_step(state, mesh).lower(state, batch).as_text()


@functools.cache
def loss_and_gradients(program: Program) -> Any:
    config, parts, layout, segment_ids, _ = program
    mesh = mesh_of(MESH, config.pipeline.sharding)
    with jax.set_mesh(mesh):
        model = make_state(config, mesh, parts=parts, layout=layout).model
        batch = next(learnable_batches(config, mesh, layout=layout, segment_ids=segment_ids))
        (loss, _), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(model, batch)
        return jax.tree.map(np.asarray, [loss, *jax.tree.leaves(gradients)])


def test_every_claim_has_an_experiment() -> None:
    assert {experiment.claim for experiment in EXPERIMENTS.values()} == {*CLAIMED, "S5", "design"}


def test_what_comes_later_is_listed_and_not_run() -> None:
    later = {name for name in EXPERIMENTS if name not in RUNNABLE}
    assert {EXPERIMENTS[name].claim for name in later} == {"S2.9a", "S3.4"}
    for name in later:
        with pytest.raises(InputError, match="group by group, which this version does not have"):
            programs(name, small())


def test_the_short_set_is_short() -> None:
    assert 4 <= len(choose([])) <= 6
    assert [one.name for one in choose(["all"])] == list(EXPERIMENTS)
    assert [one.name for one in choose(["delay", "ticks", "delay"])] == ["delay", "ticks"]


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_arms_are_two_programs(name: str) -> None:
    mesh = mesh_for(name)
    config = small()
    if name == "expert-sum":  # in float32 its arms are the same
        config = replace(config, "model", dtype="bfloat16")
    a, b = programs(name, config, mesh)
    assert a != b
    assert (lowered(a, mesh) == lowered(b, mesh)) == (name in SAME_PROGRAM)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGED)
def test_the_arms_compute_the_same(name: str) -> None:
    a, b = programs(name, small())
    assert_close(loss_and_gradients(a), loss_and_gradients(b), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ticks", "repeats", "repeat-select", "constraints"])
def test_pieces_of_the_loop_with_the_accumulating_backward_pass(name: str) -> None:
    pipeline = {"num_microbatches": 4, "num_repeats": 2, "backward": "accumulate"}
    a, b = programs(name, small_config(pipeline=pipeline))
    assert lowered(a) != lowered(b)
    assert_close(loss_and_gradients(a), loss_and_gradients(b), 1e-5)


def test_defaults_are_the_ways_of_the_loop_itself() -> None:
    loop = LoopParts(select=select_repeat, receive=ticks.receive, walk=scan_ticks, is_scan=True)
    assert Parts() == Parts(over_stages=over_stages, constrain=constrain, loop=loop)


def test_what_both_arms_need_is_brought_along() -> None:
    config = small()
    assert {p.config.pipeline.num_repeats for p in programs("repeats", config)} == {2}
    assert {p.config.pipeline.num_microbatches for p in programs("delay", config)} == {4}
    free = replace(config, "pipeline", num_microbatches=None)
    assert {p.config.pipeline.num_microbatches for p in programs("delay", free)} == {4}
    repeated = replace(config, "pipeline", num_repeats=2)
    for name in ("schedule", "layer-input"):
        assert {p.config.pipeline.num_repeats for p in programs(name, repeated)} == {1}


@pytest.mark.parametrize(
    ("name", "mesh", "pipeline", "message"),
    [
        ("ticks", "fsdp=2", {}, "give the mesh a stage axis"),
        ("weights-per-step", "stage=2", {}, "give the mesh a fsdp axis"),
        ("layer-input", "stage=4", {}, "give the model 8 layers or more"),
        ("constraints", MESH, {"schedule": "1f1b"}, "leave the schedule at circular"),
        ("delay", MESH, {"num_microbatches": 2}, "choose 4 or more"),
        ("schedule", MESH, {"forwarding_delay": 2}, "forwarding_delay"),
    ],
)
def test_where_an_experiment_says_nothing(
    name: str, mesh: str, pipeline: dict[str, Any], message: str
) -> None:
    config = replace(small(), "pipeline", **pipeline)
    with pytest.raises(InputError, match=message):
        programs(name, config, mesh)


def test_programs_are_compared_without_their_source() -> None:
    first = (
        'HloModule jit_f, is_scheduled=true\n\nFileNames\n1 "a.py"\n\n'
        "ENTRY %main (p: f32[2]) -> f32[2] {\n  %p = f32[2] parameter(0)\n"
        '  ROOT %s = f32[2] sine(%p), metadata={op_name="f" source_line=3 stack_frame_id=7}\n}\n'
    )
    moved = first.replace("a.py", "b.py").replace("source_line=3 stack_frame_id=7", "")
    assert fingerprint(first) == fingerprint(moved)
    assert fingerprint(first) != fingerprint(first.replace("sine", "cosine"))

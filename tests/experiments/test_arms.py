"""The arms of the experiments: their programs differ, and what they compute does not."""

import dataclasses
import functools
import importlib
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from helpers import mesh_of, optax_promotion, replace, small_config

from linen_compat._cli import main as linen_compat_cli
from nnx_pipeline import Config, MeshConfig
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.experiments import _programs as of_programs
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._claim_table import CLAIM_TABLE
from nnx_pipeline.experiments._claims import OWN, SETUPS, select_by
from nnx_pipeline.experiments._layer_variants import (
    GRADIENT_LEFT,
    MASK_ARRAY,
    experts_by,
    summed_in_float32,
    summed_in_model_dtype,
)
from nnx_pipeline.experiments._registry import ELSEWHERE, EXPERIMENTS, choose
from nnx_pipeline.experiments._replaced import replaced
from nnx_pipeline.lab.comparison._numerics import Values, compare_values
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.ops._attention import allowed
from nnx_pipeline.ops._experts import DenseExperts
from nnx_pipeline.pipeline.stage.apply import select_repeat

pytestmark = pytest.mark.numbers

MESH = "stage=2,fsdp=2"
# Rows of the source documents about memory. S2.6 goes with S2.4a, S2.10a to c are S1.1 to S1.3;
# S2.12 has four arms and a command of its own.
CLAIMED = {
    *("S1.1", "S1.2", "S1.3", "S2.1", "S2.4a", "S2.4b", "S2.5", "S2.7", "S2.8", "S2.9a", "S2.9b"),
    *("S2.10d", "S2.10e", "S2.11", "S2.13a", "S2.13b", "S3.1", "S3.2", "S3.3", "S3.4"),
    *("S4.1", "S4.2", "S4.3", "MaxText"),
}


def small(**model: Any) -> Config:
    return small_config(model=model, pipeline={"num_microbatches": 4}, train={"global_batch": 16})


def mesh_for(name: str) -> str:
    needs = EXPERIMENTS[name].needs
    if "data" in needs:
        return "data=2,stage=2"
    return "stage=2,fsdp=2,expert=2" if "expert" in needs else MESH


def programs(name: str, config: Config, mesh: str = MESH) -> tuple[Program, Program]:
    return EXPERIMENTS[name].programs(config, MeshConfig.parse(mesh), sized=False)


def smallest(name: str) -> tuple[Program, Program]:
    """The arms with a layer per stage, where these are two programs, or else with two."""
    mesh = mesh_for(name)
    try:
        return programs(name, small(num_layers=2), mesh)
    except InputError:
        return programs(name, small(), mesh)


@functools.cache
def lowered(program: Program, mesh_name: str = MESH) -> str:
    """The program as it goes to the compiler."""
    mesh = mesh_of(mesh_name, program.config.pipeline.sharding)
    with jax.set_mesh(mesh), optax_promotion():
        return of_programs.lower(program).as_text()


@functools.cache
def numbers(program: Program, mesh: str = MESH) -> Values:
    return of_programs.numbers(program, MeshConfig.parse(mesh), jax.devices("cpu"))


def test_every_claim_has_an_experiment() -> None:
    assert {experiment.claim for experiment in EXPERIMENTS.values()} == {*CLAIMED, "S5", "design"}


def test_the_short_set_is_short() -> None:
    assert 1 <= len(choose([])) <= 2  # a minute on two cores
    assert [one.name for one in choose(["all"])] == list(EXPERIMENTS)
    assert [one.name for one in choose(["delay", "ticks", "delay"])] == ["delay", "ticks"]


def test_claims_that_another_command_measures() -> None:
    assert not set(ELSEWHERE) & {experiment.claim for experiment in EXPERIMENTS.values()}
    for command, _ in ELSEWHERE.values():
        tool, name = command.split()
        assert tool == "linen-compat"
        assert name in linen_compat_cli.commands.commands


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_arms_are_two_programs(name: str) -> None:
    """Before any compiler sees them, unless the experiment says why they are not."""
    mesh, config = mesh_for(name), small()
    if name == "expert-tiles":  # no tile has more rows than there are
        config = replace(config, "train", sequence_length=32)
    a, b = programs(name, config, mesh)
    assert a != b
    same = lowered(a, mesh) == lowered(b, mesh)
    assert same == bool(EXPERIMENTS[name].same_program)


def count(text: str, program: Program, mesh: str = MESH) -> int:
    return lowered(program, mesh).count(text)


@pytest.mark.parametrize("name", ["hidden-cast", "gradient-cast", "expert-sum"])
def test_a_cast_is_in_the_program(name: str) -> None:
    a, b = programs(name, small())
    assert count("stablehlo.convert", a) > count("stablehlo.convert", b)


@pytest.mark.parametrize("name", ["constraints", "trivial-specs", "shard-variable"])
def test_constraints_are_in_the_program(name: str) -> None:
    a, b = programs(name, small())
    assert a.config.pipeline.sharding == b.config.pipeline.sharding == "auto"
    assert count("sharding_constraint", a) > count("sharding_constraint", b)


def test_auto_mode_leaves_the_inside_of_a_layer_to_the_compiler() -> None:
    a, _ = programs("sharding-mode", small())
    said = count("sharding_constraint", a._replace(under=None))
    unsaid = count("sharding_constraint", a)
    assert 0 < unsaid < said / 3


@pytest.mark.slow
def test_what_is_said_to_matter_is_there() -> None:
    """The arrays that the claims are about, which only arm a has."""
    a, b = programs("segment-mask", small())
    mask = "tensor<2x4x8x8xi32>"  # [stages, sequences of a microbatch, seq, seq]
    assert "optimization_barrier" in lowered(a)
    assert mask in lowered(a)
    assert mask not in lowered(b)
    a, b = programs("norm-scale", small())
    assert count("dot_general", a) + count("stablehlo.add", a) > count("dot_general", b) + count(
        "stablehlo.add", b
    )
    for program in programs("expert-sum", small()):  # [stages, tokens …, chosen, embed]
        assert "x4x8x2x16xbf16>" in lowered(program)


@pytest.mark.slow
def test_parameters_are_created_and_nothing_else() -> None:
    for program in programs("shard-variable", small()):
        assert "dot_general" not in lowered(program)
        parameters = jax.tree.leaves(numbers(program))
        assert (
            sum(array.size for array in parameters) == count_parameters(program.config.model).total
        )


@pytest.mark.slow
def test_tracing_is_measured() -> None:
    """One program either way, and what the host held while it traced is known of both arms."""
    a, b = programs("stage-metadata", small(num_layers=2))
    with optax_promotion():
        first, second = (
            of_programs.prepare(program, MeshConfig.parse(MESH), Platform("cpu"))()
            for program in (a, b)
        )
    assert first.fingerprint == second.fingerprint
    assert first.memory == second.memory
    assert first.trace_host_bytes > 0
    assert second.trace_host_bytes > 0


def options_alone(name: str) -> bool:
    """Whether the arms differ in their configs only, which test_option_pairs.py has."""
    a, b = programs(name, small(), mesh_for(name))
    return a._replace(config=b.config) == b


OF_OWN_PARTS = [name for name in EXPERIMENTS if not options_alone(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OWN_PARTS)
def test_the_arms_compute_the_same(name: str) -> None:
    mesh = mesh_for(name)
    values = [numbers(program, mesh) for program in smallest(name)]
    found = compare_values(*values, EXPERIMENTS[name].tolerance)
    assert found.within_tolerance, f"{found.worst}: {found.worst_relative}"
    assert not found.all_zero


@pytest.mark.slow
def test_the_sum_over_chosen_experts_is_that_over_all() -> None:
    """Both arms of `expert-sum` go another way than the model's own."""
    plain = Program(small(num_layers=2))
    for mix_of in (summed_in_float32, summed_in_model_dtype):
        other = plain._replace(replaced=experts_by(mix_of))
        found = compare_values(numbers(other), numbers(plain), 2e-6)
        assert found.within_tolerance, f"{found.worst}: {found.worst_relative}"


def broken(array: np.ndarray) -> dict[str, np.ndarray]:
    """The array as a wrong arm might compute it, where that is another array."""
    layer = array.copy()
    layer.reshape(-1)[np.argmax(np.abs(array))] *= 0.9
    ways = {
        "zero": 0 * array,
        "half more": 1.5 * array,
        "the other sign": -array,
        "one value off": layer,
        "not a number": np.nan * array,
    }
    if array.ndim > 1 and array.shape[-1] == array.shape[-2]:
        ways["transposed"] = np.swapaxes(array, -1, -2)
    for axis in range(array.ndim):  # layers, experts or heads that have changed places
        ways[f"rolled along {axis}"] = np.roll(array, 1, axis)
    constant = {name for name in ways if name.startswith(("rolled", "transposed"))}
    return {
        name: wrong
        for name, wrong in ways.items()
        if name not in constant or not np.allclose(wrong, array, rtol=0, atol=np.ptp(array) / 50)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OWN_PARTS)
def test_an_arm_that_is_wrong_in_one_array_fails(name: str) -> None:
    """Every array in turn: the loss and all gradients, or the parameters that were created."""
    experiment, mesh = EXPERIMENTS[name], mesh_for(name)
    right = numbers(smallest(name)[1], mesh)
    assert len(right) > 10
    assert compare_values(right, right, experiment.tolerance).within_tolerance
    for leaf, array in right.items():
        assert np.any(array), f"{leaf} is zero, and so an arm without it would pass"
        for way, wrong in broken(np.asarray(array, np.float64)).items():
            found = compare_values(right, {**right, leaf: wrong}, experiment.tolerance)
            assert not found.within_tolerance, f"{leaf}, {way}"
            assert found.worst == leaf


def without_the_last_choice(x: Any, choice: tuple[Any, Any], *rest: Any, **options: Any) -> Any:
    """Drops one expert of each token."""
    weights, chosen = choice
    return DenseExperts()(x, (weights.at[..., -1].set(0), chosen), *rest, **options)


def first_repeat_only(params: Any, repeat: Any) -> Any:
    return select_repeat(params, 0 * repeat)


def all_may_read(*spans_and_window: Any) -> Any:
    return allowed(*spans_and_window) | True


def through_bfloat16(x: Any, dtype: Any) -> Any:
    return x.astype("bfloat16").astype(x.dtype)


BROKEN = {
    "expert-sum": experts_by(lambda config: without_the_last_choice),
    "repeat-select": select_by(first_repeat_only),
    "segment-mask": tuple(dataclasses.replace(one, by=all_may_read) for one in MASK_ARRAY),
    "gradient-cast": tuple(dataclasses.replace(one, by=through_bfloat16) for one in GRADIENT_LEFT),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_program_that_is_wrong_fails(name: str) -> None:
    right = smallest(name)[1]
    if name == "gradient-cast":  # gradients in bfloat16 lose nothing
        right = right._replace(config=replace(small(num_layers=2), "train", grad_dtype="float32"))
    found = compare_values(
        numbers(right), numbers(right._replace(replaced=BROKEN[name])), EXPERIMENTS[name].tolerance
    )
    assert not found.within_tolerance
    assert found.worst_relative > 10 * EXPERIMENTS[name].tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repeat-select"])
def test_pieces_of_the_loop_with_the_accumulating_backward_pass(name: str) -> None:
    pipeline = {"num_microbatches": 4, "num_repeats": 2, "backward": "accumulate"}
    a, b = programs(name, small_config(pipeline=pipeline))
    assert lowered(a) != lowered(b)
    assert compare_values(numbers(a), numbers(b), EXPERIMENTS[name].tolerance).within_tolerance


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
        ("constraints", MESH, {"schedule": "1f1b"}, "set pipeline.schedule=circular"),
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


@pytest.mark.parametrize("attention", ["flash", "auto"])
def test_a_kernel_with_a_mask_of_its_own_is_no_arm_of_another_mask(attention: str) -> None:
    with pytest.raises(InputError, match=r"one of its own; set model\.attention=chunked"):
        programs("segment-mask", small(attention=attention))


def test_what_is_replaced_comes_back() -> None:
    (scale,) = EXPERIMENTS["norm-scale"].a.replaced
    module = importlib.import_module(scale.module)
    before = getattr(module, scale.name)
    with replaced([scale]):
        assert getattr(module, scale.name) is scale.by
    assert getattr(module, scale.name) is before
    missing = [scale, dataclasses.replace(scale, name="no_such_function")]
    with pytest.raises(AttributeError, match="no_such_function"):
        replaced(missing).__enter__()
    assert getattr(module, scale.name) is before


def test_what_the_table_names_is_there() -> None:
    arms = [row[key] for row in CLAIM_TABLE.values() for key in "ab"]
    assert {key for arm in arms for key in arm} <= {"label", "own", "model", "pipeline", "train"}
    assert {arm.get("own", "") for arm in arms} == set(OWN)
    assert {row.get("setup", "") for row in CLAIM_TABLE.values()} == set(SETUPS)


@pytest.mark.parametrize("module", ["config.presets", "experiments._claim_table"])
def test_a_table_is_read_without_jax(module: str) -> None:
    """Shells ask for the names at each TAB."""
    script = f"""
import sys
import nnx_pipeline.{module}
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)

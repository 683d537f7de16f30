"""1F1B as a program: how many ticks it has, and what grows with the number of microbatches."""

from typing import Any

import jax
import pytest
from flax import nnx
from helpers import carries, equations, mesh_of, small_config

from nnx_pipeline import Mixtral
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.train import abstract_batch, loss_of

pytestmark = pytest.mark.jax_alone

MESH, STAGES, SEQUENCES = "stage=4,fsdp=2", 4, 2
WIDTHS = {"vocab_size": 64, "embed_dim": 48, "num_layers": STAGES}  # found in no other size


def program(
    microbatches: int, *, mode: str = "explicit", grad: bool = True, repeats: int = 1
) -> Any:
    """The jaxpr of the loss, with or without its gradient."""
    config = small_config(
        model={**WIDTHS, "num_layers": STAGES * repeats},
        pipeline={
            "schedule": "1f1b",
            "num_microbatches": microbatches,
            "num_repeats": repeats,
            "sharding": mode,
        },
        train={"global_batch": SEQUENCES * microbatches},
    )
    mesh = mesh_of(MESH, mode)
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        batch = abstract_batch(config, mesh)

        def loss(model: Mixtral, batch: Any) -> Any:
            return loss_of(model, batch)[0]

        return jax.make_jaxpr(jax.value_and_grad(loss) if grad else loss)(model, batch)


def loops_over_ticks(jaxpr: Any) -> list[Any]:
    """Scans that carry the ring or the activations of all stages, in order."""
    return [
        equation
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan"
        and any(shape[:1] == (STAGES,) and shape[-1:] == (48,) for shape in carried(equation))
    ]


def carried(scan: Any) -> list[tuple[int, ...]]:
    """Shapes that a scan carries from tick to tick."""
    return [variable.aval.shape for variable in carries(scan)]


@pytest.mark.parametrize("microbatches", [4, 12])
def test_every_microbatch_takes_one_tick(microbatches: int) -> None:
    """Ticks = microbatches + 2 · (stages - 1), in three loops: warm-up, steady, drain."""
    loops = loops_over_ticks(program(microbatches))
    lengths = [loop.params["length"] for loop in loops]
    assert lengths == [STAGES - 1, microbatches, STAGES - 1]


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_nothing_that_is_kept_grows_with_the_microbatches(mode: str) -> None:
    few, many = (loops_over_ticks(program(microbatches, mode=mode)) for microbatches in (8, 24))
    for a, b in zip(few, many, strict=True):
        assert carried(a) == carried(b)
        for loop in (a, b):  # and no loop stacks what it computes
            assert len(loop.outvars) == len(carried(loop))


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_the_head_is_spread_over_its_columns_once(mode: str) -> None:
    """No tick exchanges the shards of the head's kernel, [48, 64], or those of its gradient.

    A device stores 24 rows of 16 columns of it, and computes the logits of 8 columns.
    """
    sent = {
        one.invars[0].aval.shape
        for loop in loops_over_ticks(program(8, mode=mode))
        for one in equations(loop.params["jaxpr"].jaxpr)
        if one.primitive.name == "all_to_all"
    }
    assert sent, "the rows of the embedding are sent at each tick"
    assert not sent & {(24, 16), (48, 8)}


def test_the_ring_has_two_slots_less_one_per_stage() -> None:
    """Inputs of stages, [stages, slots, microbatch, seq, embed], and nothing else of that kind."""
    (steady,) = (loop for loop in loops_over_ticks(program(16)) if loop.params["length"] == 16)
    rings = [shape for shape in carried(steady) if shape[2:] == (SEQUENCES, 8, 48)]
    assert rings == [(STAGES, 2 * STAGES - 1, SEQUENCES, 8, 48)]


def test_interleaved_ticks_and_ring() -> None:
    """Ticks = microbatches · repeats + stages · (repeats + 1) - 2, in the same three loops."""
    loops = loops_over_ticks(program(8, repeats=2))
    lengths = [loop.params["length"] for loop in loops]
    turn = 2 * STAGES - 1
    assert lengths == [turn, 8 * 2 + STAGES - 1 - turn, turn]
    rings = [shape for shape in carried(loops[1]) if shape[2:] == (SEQUENCES, 8, 48)]
    assert rings == [(STAGES, STAGES * (2 + 1) - 1, SEQUENCES, 8, 48)]


def test_parts_of_the_loss_have_no_gradient_and_say_so() -> None:
    config = small_config(
        model=WIDTHS,
        pipeline={"schedule": "1f1b", "num_microbatches": 4},
        train={"global_batch": 8},
    )
    mesh = mesh_of(MESH)
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        batch = abstract_batch(config, mesh)

        def entropy(model: Mixtral, batch: Any) -> Any:
            return model.loss(batch.tokens, batch.targets, batch.weights)[1][0]

        with pytest.raises(InputError, match="the gradient of a part of its loss"):
            jax.make_jaxpr(jax.grad(entropy))(model, batch)


def test_the_loss_alone_runs_forward_only() -> None:
    """No ring and no backward pass; ticks = microbatches + stages - 1."""
    loops = loops_over_ticks(program(8, grad=False))
    assert sum(loop.params["length"] for loop in loops) == 8 + STAGES - 1
    assert not [shape for loop in loops for shape in carried(loop) if len(shape) == 5]


@pytest.mark.parametrize(
    ("schedule", "mesh_text"), [("1f1b", MESH), ("circular", MESH), ("circular", "fsdp=2")]
)
def test_gradients_of_the_weights_of_targets_are_refused(schedule: str, mesh_text: str) -> None:
    """The loss has none of them; zeros in their place would be wrong."""
    config = small_config(
        model=WIDTHS,
        pipeline={"schedule": schedule, "num_microbatches": 4},
        train={"global_batch": 8},
    )
    mesh = mesh_of(mesh_text)
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        batch = abstract_batch(config, mesh)

        def loss(weights: jax.Array, model: Mixtral, batch: Any) -> Any:
            return model.loss(batch.tokens, batch.targets, weights)[0]

        with pytest.raises(InputError, match="the weights of its targets"):
            jax.make_jaxpr(jax.grad(loss))(batch.weights, model, batch)
        jax.make_jaxpr(jax.grad(loss, 1))(batch.weights, model, batch)

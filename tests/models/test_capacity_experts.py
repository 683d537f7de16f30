"""Experts that take a limited number of choices, beside plain sums and counts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_mixtures import EMBED, EXPERTS, kernels_of, kernels_on_mesh, put, summed, with_gradients
from flax import nnx
from helpers import assert_close, float_rows, mesh_of, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_pipeline import InputError, Layout, MeshConfig, RoutedMoE, lab
from nnx_pipeline.config._remat import FULL
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.ops._capacity import (
    CapacityExperts,
    Slots,
    assign_slots,
    capacity_of,
    from_slots,
    to_slots,
)
from nnx_pipeline.pipeline.stage.apply import map_stages

pytestmark = pytest.mark.jax_alone

BATCH, SEQ = 8, 5
# The two experts of each token: all evenly, two of them alone, and one that every token chooses.
BEST = {
    "even": lambda token, choice: (token + choice) % EXPERTS,
    "two": lambda token, choice: (token + choice) % 2,
    "one": lambda token, choice: (2 + choice * (1 + token % 3)) % EXPERTS,
}


def chosen_of(best: str) -> jax.Array:
    return jnp.fromfunction(BEST[best], (BATCH * SEQ, 2), dtype="int32").reshape(BATCH, SEQ, 2)


def kept_by_hand(experts: Any, capacity: int) -> np.ndarray:
    """Which choices are kept: first choices of all tokens, then all second ones, by a loop."""
    kept = np.zeros(experts.shape, bool)
    for sequence, of_sequence in enumerate(np.asarray(experts)):
        left = [capacity] * EXPERTS
        for choice in range(experts.shape[2]):
            for token, expert in enumerate(of_sequence[:, choice]):
                kept[sequence, token, choice] = left[expert] > 0
                left[expert] -= 1
    return kept


def limited(x: Any, weights: Any, kernels: Any, chosen: Any, *, factor: float) -> jax.Array:
    mix = CapacityExperts(factor)
    return mix(x, (weights, chosen), kernels, layout=Layout(), remat=FULL).output


def tokens_of() -> tuple[jax.Array, jax.Array]:
    """Tokens, and the weights of their choices."""
    return float_rows(BATCH, SEQ, EMBED), float_rows(BATCH, SEQ, 2, seed=1)


# ---- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "chosen", "experts", "factor", "capacity"),
    [
        (4096, 2, 8, 1.25, 1280),
        (10, 1, 1, 1.1, 10),  # no more than there are tokens
        (10, 1, 2, 1.1, 6),
        (100, 1, 10, 1.1, 11),  # 11.000000000000002 in binary
        (4, 1, 256, 1.0, 1),
    ],
)
def test_capacity(length: int, chosen: int, experts: int, factor: float, capacity: int) -> None:
    assert capacity_of(length, chosen, experts, factor) == capacity


@pytest.mark.slow
@settings(max_examples=25)
@given(
    best=st.lists(st.permutations(range(EXPERTS)), min_size=12, max_size=12),
    chosen=st.sampled_from([1, 3]),
    capacity=st.sampled_from([1, 4]),
)
def test_slots_against_a_loop(best: list[list[int]], chosen: int, capacity: int) -> None:
    experts = jnp.array(best, jnp.int32).reshape(2, 6, EXPERTS)[..., :chosen]
    slots = assign_slots(experts, EXPERTS, capacity)
    kept = kept_by_hand(experts, capacity)
    np.testing.assert_array_equal(slots.places < EXPERTS * capacity, kept)
    assert_close(slots.dropped, 1 - kept.mean(axis=(1, 2)), 1e-6)
    # Each kept choice lies in a slot of its expert, and the slot says so; all others are empty.
    found = np.full((2, EXPERTS, capacity), 6 * chosen)
    for sequence, token, choice in zip(*np.nonzero(kept), strict=True):
        expert, slot = divmod(int(slots.places[sequence, token, choice]), capacity)
        assert expert == experts[sequence, token, choice]
        found[sequence, expert, slot] = choice * 6 + token
    np.testing.assert_array_equal(slots.choices, found)


def test_first_choices_come_before_second_ones() -> None:
    """Expert 1 is the second choice of the first two tokens and the first one of the others."""
    experts = jnp.array([[[0, 1], [0, 1], [1, 2], [1, 3]]])
    slots = assign_slots(experts, EXPERTS, 3)
    assert slots.choices[0].tolist() == [[0, 1, 8], [2, 3, 4], [6, 8, 8], [7, 8, 8]]
    assert slots.places[0].tolist() == [[0, 5], [1, 12], [3, 6], [4, 9]]
    assert slots.dropped.tolist() == [1 / 8]


@pytest.mark.slow
def test_slots_go_back_to_their_tokens() -> None:
    """`from_slots` is the transpose of `to_slots`, and leaves nothing of dropped choices."""
    x, experts = tokens_of()[0], chosen_of("one")
    slots = Slots(*assign_slots(experts, EXPERTS, 2))
    rows = to_slots(x, slots)
    assert rows.shape == (EXPERTS, BATCH, 2, EMBED)
    kept = kept_by_hand(experts, 2).sum(axis=2)
    assert_close(from_slots(rows, slots), x * kept[..., None].astype(np.float32), 1e-6)


# ---- the mixture ---------------------------------------------------------------------------------

ENOUGH, LITTLE = 2.0, 0.7  # 5 of 5 tokens, and 2 where an even share is 2.5


MESHES = ("data=2,expert=4", "fsdp=2,tensor=2,expert=2")
ON_MESH = [(*case, mesh) for case in (("two", LITTLE), ("one", ENOUGH)) for mesh in MESHES]


def of_kept(x: Any, weights: Any, kernels: Any, chosen: Any, *, factor: float) -> jax.Array:
    """A plain sum in which the choices that are dropped have weight 0."""
    kept = kept_by_hand(chosen, capacity_of(SEQ, chosen.shape[2], EXPERTS, factor))
    assert kept.all() == (factor == ENOUGH)
    return summed(x, jnp.where(kept, weights, 0), kernels, chosen)


@pytest.mark.parametrize(("best", "factor"), [(b, f) for b in BEST for f in (ENOUGH, LITTLE)])
def test_against_a_sum_over_experts(best: str, factor: float) -> None:
    given, chosen = (*tokens_of(), kernels_of()), chosen_of(best)
    wanted = with_gradients(functools.partial(of_kept, chosen=chosen, factor=factor), *given)
    found = with_gradients(functools.partial(limited, chosen=chosen, factor=factor), *given)
    assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize(("best", "factor", "mesh"), ON_MESH)
def test_on_a_mesh_as_on_one_device(best: str, factor: float, mesh: str, mode: str) -> None:
    """The mesh changes neither which choices are dropped nor any value."""
    (x, weights), chosen = tokens_of(), chosen_of(best)
    mix = functools.partial(of_kept, chosen=chosen, factor=factor)
    wanted = with_gradients(mix, x, weights, kernels_of())
    with jax.set_mesh(mesh_of(mesh, mode)):
        tokens, kernels = Layout().spec("batch", None, None), kernels_on_mesh()
        mix = functools.partial(limited, chosen=put(chosen, tokens), factor=factor)
        step = jax.jit(functools.partial(with_gradients, mix))
        found = step(put(x, tokens), put(weights, tokens), kernels)
        assert_close(found, wanted, 1e-5)
        assert found[1][2].gate.sharding.is_equivalent_to(kernels.gate.sharding, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_mapped_over_stages(mode: str) -> None:
    """Each stage has its own kernels and tokens, and sends nothing to others."""
    shape, mix = (2, BATCH // 2, SEQ), functools.partial(limited, factor=LITTLE)
    chosen = chosen_of("two").reshape(*shape, 2)
    x, weights = (each.reshape(*shape, -1) for each in tokens_of())
    wanted = []
    for stage in range(2):
        own = functools.partial(of_kept, chosen=chosen[stage], factor=LITTLE)
        kernels = type(kernels_of())(*(leaf[stage] for leaf in kernels_of(2)))
        wanted.append(with_gradients(own, x[stage], weights[stage], kernels))
    with jax.set_mesh(mesh_of("stage=2,fsdp=2,expert=2", mode)):
        tokens = Layout().spec("stage", "batch", None, None)
        args = put(x, tokens), put(weights, tokens), kernels_on_mesh("stage"), put(chosen, tokens)

        def both(x: Any, weights: Any, kernels: Any, chosen: Any) -> Any:
            of_stages = functools.partial(map_stages(mix), chosen=chosen)
            return with_gradients(of_stages, x, weights, kernels)

        compiled = jax.jit(both).lower(*args).compile()
        assert_close(compiled(*args), jax.tree.map(lambda *each: jnp.stack(each), *wanted), 1e-5)
        # Stages are the slowest axis of the mesh: devices 0 to 3, and 4 to 7.
        assert "{0,4}" not in compiled.as_text()
        assert "{0,1,2,3,4,5,6,7}" not in compiled.as_text()


@pytest.mark.slow
def test_a_layer_reports_what_it_drops() -> None:
    """By the count of a loop over what its router chooses."""
    config = small_config(model={"experts": "capacity", "capacity_factor": 0.6}).model
    layer, x = RoutedMoE(config, rngs=nnx.Rngs(0)), float_rows(3, 9, config.embed_dim)
    usage = layer(x)[1]
    chosen = jnp.argsort(-(x @ layer.router[...]), axis=-1)[..., :2]
    kept = kept_by_hand(chosen, capacity_of(9, 2, EXPERTS, 0.6))
    assert 0 < kept.mean() < 1
    assert_close(usage.dropped, 1 - kept.mean(axis=(1, 2)), 1e-6)


# ---- what is sent --------------------------------------------------------------------------------

BYTES = 4  # of float32


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_bytes_of_a_layer(mode: str) -> None:
    """Tokens, weights and results go forward; the cotangents of all three come back."""
    x, weights = tokens_of()
    with jax.set_mesh(mesh_of("fsdp=2,expert=2", mode)):
        tokens = Layout().spec("batch", None, None)
        mix = functools.partial(limited, chosen=put(chosen_of("two"), tokens), factor=LITTLE)
        step = functools.partial(with_gradients, mix)
        args = put(x, tokens), put(weights, tokens), kernels_on_mesh()
        found = lab.measure(step, *args, mesh=jax.sharding.get_mesh())
    slots = EXPERTS * capacity_of(SEQ, 2, EXPERTS, LITTLE) * BATCH // 4
    assert found.collectives["all-to-all"] == {
        "ops": 6,
        "executed": 6,
        "bytes": 2 * slots * (2 * EMBED + 1) * BYTES,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "sends"), [("none", (4, 2)), ("full", (5, 3))])
def test_bytes_of_a_step(remat: str, sends: tuple[int, int]) -> None:
    """By the formula of `CapacityExperts`, at every tick of a pipeline, with bubbles.

    More room in the experts sends so much more; what else an all-to-all does in a step, outside the
    experts, drops out of the difference.

    - `sends`: how often rows and how often weights are sent.
    """
    microbatches, stages, embed = 2, 2, 16

    def bytes_with(factor: float) -> int:
        config = small_config(
            model={"experts": "capacity", "capacity_factor": factor, "num_layers": stages},
            pipeline={"num_microbatches": microbatches, "remat": remat},
        )
        mesh, platform = MeshConfig(stage=stages, expert=2), Platform.parse("cpu")
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            return measure_step(config, mesh, platform).collectives["all-to-all"]["bytes"]

    sequences = 8 // microbatches // 2
    more = EXPERTS * sequences * (capacity_of(8, 2, 4, 2.0) - capacity_of(8, 2, 4, 1.25))
    ticks = microbatches + stages - 1
    rows, weights = sends
    expected = ticks * more * (rows * embed + weights) * BYTES
    assert bytes_with(2.0) - bytes_with(1.25) == expected


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [False, True])
def test_second_derivatives_are_refused(forward: bool) -> None:
    x, weights = tokens_of()

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.sin(limited(x, weights, kernels_of(), chosen_of("two"), factor=ENOUGH)))

    def again(x: Any) -> Any:
        if forward:
            return jax.jvp(jax.grad(loss), (x,), (x,))
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) * x))(x)

    refusal = r"capacity experts have first .* set model\.experts='dense' for second derivatives"
    with pytest.raises(InputError, match=refusal):
        jax.eval_shape(again, x)


def test_devices_with_the_same_tokens_are_refused() -> None:
    """Sums over them would count each token several times."""
    layout = Layout(batch=("data", "fsdp"), embed=("fsdp",))
    choice = tokens_of()[1], chosen_of("two")
    with (
        jax.set_mesh(mesh_of("expert=2,fsdp=2")),
        pytest.raises(InputError, match=r"along which capacity experts need other tokens"),
    ):
        CapacityExperts(1.0)(tokens_of()[0], choice, kernels_of(), layout=layout, remat=FULL)

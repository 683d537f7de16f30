"""What travels per step in each way to gather weights, counted on programs of two real compilers.

The collectives outside the layers (embedding, head, loss) are the same in every mode, so that the
differences between modes are those of the weights alone, and exact.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import missing, small_config, user_environment

from nnx_pipeline import Config, MeshConfig
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab.attribution._floor import live_bytes
from nnx_pipeline.lab.compile.platform import Platform

pytestmark = pytest.mark.slow

STAGES, FSDP, MICROBATCHES = 2, 2, 4
EMBED, HEAD_DIM, HEADS, KV_HEADS, EXPERTS = 512, 64, 4, 2, 4
# Elements of one layer's weights that are spread over fsdp: attention, router, experts.
WEIGHTS = 2 * EMBED * HEAD_DIM * (HEADS + KV_HEADS) + EMBED * EXPERTS + 3 * EXPERTS * EMBED**2
BFLOAT16, FLOAT32 = 2, 4
GATHERED = BFLOAT16 * WEIGHTS  # bytes of one layer as it is gathered

CASES: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "use": (3, {}, None),
    "accumulate": (3, {"backward": "accumulate"}, None),
    "step": (3, {"fsdp_gather": "step"}, None),
    "prefetch": (3, {"fsdp_gather": "prefetch"}, None),
    "prefetch in bfloat16": (3, {"fsdp_gather": "prefetch"}, "bfloat16"),
    "prefetch of 2": (2, {"fsdp_gather": "prefetch"}, None),
    "use of 2": (2, {}, None),
    "prefetch of 4": (4, {"fsdp_gather": "prefetch"}, None),
    "use of 4": (4, {}, None),
}
EVERYWHERE = ("use", "step", "prefetch", "use of 2")


def config_of(name: str) -> Config:
    """One layer per visit, so that layers = repeats · stages."""
    repeats, pipeline, grad_dtype = CASES[name]
    sizes = {"vocab_size": 256, "embed_dim": EMBED, "mlp_dim": EMBED, "head_dim": HEAD_DIM}
    return small_config(
        model={**sizes, "num_layers": STAGES * repeats, "dtype": "bfloat16"},
        pipeline={"num_microbatches": MICROBATCHES, "num_repeats": repeats, **pipeline},
        train={"global_batch": 16, "sequence_length": 128, "grad_dtype": grad_dtype},
    )


def measure(platform: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """The compiler's figures for these cases."""
    mesh = MeshConfig(stage=STAGES, fsdp=FSDP)
    for name in names:
        found = measure_step(config_of(name), mesh, Platform.parse(platform))
        sizes = {kind: counted["bytes"] for kind, counted in found.collectives.items()}
        gathered = found.attribution.by_role().get("gathered weight", 0)
        live = live_bytes(found.attribution)
        yield {"name": name, "live": live, "gathered": gathered, **sizes}


@functools.cache
def figures(platform: str) -> dict[str, dict[str, Any]]:
    """All cases, in a process of their own: libtpu is loaded once per process and for good."""
    names = [*CASES] if platform.startswith("tpu") else [*EVERYWHERE]
    program = (
        "import json, sys; from test_collectives import measure\n"
        f"for found in measure({platform!r}, {names!r}): print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=user_environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(params=["tpu:v5p:2x2x1", "cuda:h100:4"])
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    compiler = "libtpu" if request.param.startswith("tpu") else "jax_cuda13_plugin"
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    return figures(request.param)


def ticks(repeats: int) -> int:
    return MICROBATCHES * repeats + STAGES - 1


def gathers(found: dict[str, Any], name: str, than: str) -> Any:
    """How many layers' weights more are gathered per step in one case than in another."""
    more = (found[name]["all-gather"] - found[than]["all-gather"]) / GATHERED
    return pytest.approx(more, abs=1e-3)  # of a tick, some hundred bytes of choices are


def scattered(found: dict[str, Any], name: str, than: str) -> float:
    """How many bytes more come back by reduce-scatter in one case than in another."""
    return found[name]["reduce-scatter"] - found[than]["reduce-scatter"]


PART, SMALL = WEIGHTS // FSDP, 2 * EMBED * EXPERTS * FLOAT32  # arrays too small to be scattered


def test_weights_are_gathered_as_often_as_the_mode_says(measured: dict[str, Any]) -> None:
    """At use per tick and pass; per step once per repeat, with a window once in each pass."""
    # `use`: 2 per tick, forward and where the backward pass computes the visit again.
    assert gathers(measured, "use", than="step") == 2 * ticks(3) - 3
    assert gathers(measured, "use", than="use of 2") == 2 * (ticks(3) - ticks(2))
    assert gathers(measured, "prefetch", than="step") == 2 * 3 - 3


def test_gradients_come_back_by_reduce_scatter(measured: dict[str, Any]) -> None:
    """At every tick, in the dtype of activations; of `prefetch` once per repeat, in that of sums.

    Weights that are gathered once per step have the gradient of each visit summed at once, and so
    send as much as weights that are gathered at use. The rest is that of embedding and head, and of
    arrays too small for the compiler to scatter.
    """
    at_use = scattered(measured, "use", than="use of 2")
    assert at_use == pytest.approx((ticks(3) - ticks(2)) * BFLOAT16 * PART, rel=2e-3)
    assert scattered(measured, "step", than="use") == 0
    per_tick, per_repeat = ticks(3) * BFLOAT16 * PART, 3 * FLOAT32 * PART
    once = scattered(measured, "step", than="prefetch")
    assert once == pytest.approx(per_tick - per_repeat, abs=3 * SMALL)
    assert measured["prefetch"]["reduce-scatter"] > per_repeat - 3 * SMALL
    for name in measured:
        assert measured[name]["all-reduce"] < BFLOAT16 * PART / 10, name


def test_every_mode_hands_the_same_activations_on(measured: dict[str, Any]) -> None:
    """Per tick and pass three microbatches move: on, in the queue for the next repeat, in the
    stream of inputs and outputs. The window has ticks whose queue is known to be empty."""
    microbatch = 16 // MICROBATCHES // FSDP * 128 * EMBED * BFLOAT16
    use, fewer = (measured[name]["collective-permute"] for name in ("use", "use of 2"))
    assert use - fewer == 2 * 3 * (ticks(3) - ticks(2)) * microbatch
    assert measured["step"]["collective-permute"] == use
    assert measured["prefetch"]["collective-permute"] <= use


@pytest.fixture
def on_tpu() -> dict[str, dict[str, Any]]:
    """The cases that one compiler is enough for are among these."""
    if missing("libtpu"):
        pytest.skip("libtpu is not installed")
    return figures("tpu:v5p:2x2x1")


def test_the_hand_written_backward_pass_sends_the_same(on_tpu: dict[str, Any]) -> None:
    kinds = on_tpu["use"].keys() - {"name", "live", "gathered"}
    assert {k: on_tpu["use"][k] for k in kinds} == {k: on_tpu["accumulate"][k] for k in kinds}


def test_gradients_of_bfloat16_come_back_as_such(on_tpu: dict[str, Any]) -> None:
    """The sums of `prefetch`; a visit's gradient has the dtype of activations in any case."""
    narrower = scattered(on_tpu, "prefetch", than="prefetch in bfloat16")
    assert narrower == pytest.approx(3 * (FLOAT32 - BFLOAT16) * PART, abs=3 * SMALL)
    assert gathers(on_tpu, "prefetch in bfloat16", than="prefetch") == 0


def test_the_window_holds_two_repeats_at_most(on_tpu: dict[str, Any]) -> None:
    """What `prefetch` holds beside `use` is at most two repeats' weights and their gradients.

    What counts is the arrays at the peak. The heap also has holes, and tables of the tuples that
    loops carry: with libtpu 0.0.50 and two repeats, these tables take 8.3 MB. The same compiler has
    25.2 MB of copies of parameters and moments there, which the older one does not make.

    With the number of repeats it grows by the shards of their weights in the dtype of activations,
    which the compiler casts before the loop over repeats, and by less than one whole kernel of the
    experts: by nothing that is gathered. (`use` holds no such shards: it casts them at each tick.)
    """
    beside = [
        on_tpu[f"prefetch{of}"]["live"] - on_tpu[f"use{of}"]["live"]
        for of in (" of 2", "", " of 4")
    ]
    assert max(beside) <= 2 * (BFLOAT16 + FLOAT32) * WEIGHTS
    assert beside[2] - beside[1] < BFLOAT16 * (PART + EXPERTS * EMBED**2)
    # Where most memory is in use, one repeat is there, however many there are.
    assert [on_tpu[f"prefetch{of}"]["gathered"] for of in ("", " of 4")] == [GATHERED] * 2
    # Two repeats fit into the window and stay; of the third, one more gradient comes back.
    assert gathers(on_tpu, "use of 2", than="prefetch of 2") == 2 * ticks(2) - 2
    once = scattered(on_tpu, "prefetch", than="prefetch of 2")
    assert once == pytest.approx(FLOAT32 * PART, abs=SMALL)

"""`fit --over remat`: the fastest program within a limit, what to write, and what is refused."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import Run

from nnx_pipeline import lab
from nnx_pipeline.lab._report.kept import kept_view, nothing_fits
from nnx_pipeline.lab._report.output import as_text
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.cheapest import Point, Search
from nnx_pipeline.lab.search.choices import Choice, Kind, Space
from nnx_pipeline.lab.search.effort import Effort, Spent
from nnx_pipeline.lab.search.kept import Kept, find_fastest
from nnx_pipeline.lab.search.over import MemoryLimit

OWN = """
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

def layer(x, w):
    return x + jnp.tanh(checkpoint_name(x @ w, "inner")) @ w.T

def loss(w, x):
    return jnp.sum(jax.checkpoint(layer)(jax.checkpoint(layer)(x, w), w) ** 2)

step = jax.grad(loss)

def forward(w, x):
    return layer(x, w)

def plain(w, x):
    return jax.grad(lambda w: jnp.sum(layer(x, w)))(w)

def unnamed(w, x):
    return jax.grad(lambda w: jnp.sum(jax.checkpoint(jnp.tanh)(x @ w)))(w)

def inputs():
    return jax.ShapeDtypeStruct((256, 1024), "float32"), jax.ShapeDtypeStruct((512, 256), "float32")
"""
TPU = ("--platform", "tpu:v5p:2x2x1")
FIT = ("fit", "own.py:step", "--inputs", "own.py:inputs", "--over", "remat")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


REFUSED = {
    "own.py:step --inputs own.py:inputs --platform cpu": "needs the time of a step, of which "
    "nothing is known on cpu; choose a platform that has one: ",
    "own.py:step --inputs own.py:inputs --platform tpu:v5p:2x2x1 --limit many": "is no limit",
    "own.py:step --inputs own.py:inputs --platform cuda:h100:1 --gemm both": "write --gemm triton",
    "tiny --set pipeline.remat=full --platform tpu:v5p:2x2x1": "--set pipeline.remat=full has no "
    "effect beside --over remat",
    "tiny --set pipeline.save_decoder_layer_input=false --platform tpu:v5p:2x2x1": "has no effect",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_one_line(run: Run, words: str) -> None:
    done = run("fit", *words.split(), "--over", "remat")
    assert done.code == 2, done.out
    assert REFUSED[words] in done.err.splitlines()[-1]
    assert (done.out, "Traceback" in done.err) == ("", False)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("forward", "has no backward pass"),
        ("plain", "calls no jax.checkpoint, and has no loop that stores less with one"),
        ("unnamed", "names no value that its jax.checkpoint computes again"),
    ],
)
@pytest.mark.slow
def test_nothing_to_choose(run: Run, function: str, said: str) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    done = run("fit", f"own.py:{function}", *FIT[2:], *TPU)
    assert done.code == 2, done.out
    assert said in done.err.splitlines()[-1]


@pytest.mark.slow
def test_the_fastest_within_a_limit(run: Run) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    # From one line, which is part of what a program is known by.
    first, again, none = (
        run(*FIT, *TPU, *more)
        for more in (("--json", "found.json"), ("--json", "-"), ("--limit", "2MB"))
    )
    assert first.code == 0, first.err
    assert "4 compiles at most; how long one takes is not known yet" in first.err
    assert max(map(len, first.out.splitlines())) <= 80
    assert "save_and_offload_only_these_names(" in first.out or "everything is kept" in first.out
    found = again.json
    assert "the last such took" in again.err
    assert (found["choices"], found["compiles"]) == (4, 0)
    known = [one for one in found["compiled"] if one["step_seconds"]]
    assert len(known) == 4
    assert {one["fates"]["inner"] for one in known} == {
        *("recompute", "keep", "offload", "everything")
    }
    assert found["fastest"]["step_seconds"] == min(one["step_seconds"] for one in known)
    assert [one["step_seconds"] for one in found["frontier"]] == sorted(
        (one["step_seconds"] for one in found["frontier"]), reverse=True
    )
    assert none.code == 1
    assert re.search(
        r"the limit of [\d.]+ MB is below all 4 choices that were compiled: .* needs [\d.]+, "
        r"[\d.]+ MB more",
        none.err.splitlines()[-1],
    )


def compiled() -> Measurement:
    """Of 4,000 bytes of arguments; by a compiler that says nothing of the time."""
    return lab.measure(jnp.tanh, jax.ShapeDtypeStruct((1000,), "float32"), platform="cpu")


def searched(limit: int, *names: str) -> Kept:
    space = Space(tuple(map(Kind, names)))
    most = MemoryLimit(bytes=limit, share=None, device_bytes=None)
    kept = Kept(space, most, "cpu", paste=" ".join)
    kept.search = Search(space, lambda choice: Point(choice))
    return kept


def test_only_options_that_it_has_are_named() -> None:
    kept = searched(10**6, "inner")
    kept.search.points = [Point(kept.space.least, 8_000, 1e-3)]
    kept.results = {kept.space.least: dataclasses.replace(compiled(), measured="2026-11-30")}
    shown = as_text(kept_view("", kept))
    assert "1 of them taken from earlier runs" in shown
    assert "--fresh" not in shown


def test_a_limit_below_the_arguments_takes_one_compile() -> None:
    kept = searched(3_000, "one", "two", "three")
    effort = Effort(what="", most=0)
    with pytest.raises(InputError, match=r"0\.003 MB is below the arguments, 0\.004 MB"):
        find_fastest(kept, lambda choice: compiled(), effort)
    assert effort.tried == 1


def test_it_says_why_it_ended() -> None:
    kept = searched(10**6, "one", "two", "three")
    left = [*range(4)]

    def step(choice: Choice) -> Point:
        if not left:
            raise Spent("no compile is left")
        return Point(choice, 8_000, 1e-3 * left.pop())

    kept.search = Search(kept.space, step)
    kept.results = dict.fromkeys(kept.space.listed(), compiled())
    assert "the search is not finished" in as_text(kept_view("", kept))
    kept.search.run([10**6])
    assert "all 4 compiles that it announced are used up: a choice" in as_text(kept_view("", kept))
    left += range(8)
    kept.search.run([10**6])
    assert "used up" not in as_text(kept_view("", kept))


def test_a_limit_that_is_just_below_is_shown_so() -> None:
    kept = searched(10**6, "inner")
    kept.search.points = [Point(kept.space.least, 1_010_000, 1e-3)]
    assert "the limit of 1.00 MB is below" in nothing_fits(kept)
    assert "everything computed again needs 1.01, 0.01 MB more" in nothing_fits(kept)

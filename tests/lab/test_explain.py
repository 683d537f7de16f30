"""Texts that others pasted, and dumps that others made, are explained without a compiler."""

import json
import os
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import Run, missing

from nnx_pipeline import lab
from nnx_pipeline.lab._hlo.buffers import read_buffers
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab.compile._compiler import _PERSISTENT_CACHE
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.explain import Explanation, explain
from nnx_pipeline.lab.explain._cures import cures_of
from nnx_pipeline.lab.explain._gains import Placed
from nnx_pipeline.lab.explain._texts import bytes_of, cleaned
from nnx_pipeline.lab.explain.explanation import explain_text

TEXTS = Path(__file__).parents[1] / "data" / "explain"
GIB, MIB = 2**30, 2**20
# What each text says, in bytes, and words of the cure that it is about.
SAID: dict[str, tuple[dict[str, float], str]] = {
    "tpu_v3_short": ({"needed": 21.95 * GIB, "device has": 15.48 * GIB, "arguments": 0}, ""),
    "tpu_v4_scores": ({"needed": 63.8 * GIB, "heap": 63.79 * GIB}, "never holds all scores"),
    "tpu_v3_arguments": ({"arguments": 15.9 * GIB, "heap": 14.31 * GIB}, "one layer at a time"),
    "tpu_padding": ({"needed": 41.74 * GIB, "device has": 16 * GIB}, "another shape"),
    "tpu_no_first_line": ({}, "another shape"),
    "tpu_v5e_new": ({"needed": 128.19 * GIB, "device has": 15.75 * GIB}, ""),
    "tpu_at_run_time": ({"asked for": 31.06 * MIB, "largest free block": 30.56 * MIB}, ""),
    "tpu_device_buffer": ({"asked for": 15.65 * GIB, "free": 11.08 * GIB}, ""),
    "tpu_reserve": ({"asked for": 3.95 * GIB, "device has": 8 * GIB, "in use": 6.08 * GIB}, ""),
    "tpu_vmem": ({"on-chip memory needed": 32.42 * MIB}, ""),
    "tpu_e0101": ({"asked for": 29.49 * GIB, "free": 147.64 * MIB}, ""),
    "tpu_e1000_sparse_core": ({"TensorCore": 34.82 * GIB, "SparseCore": 174.1 * GIB}, ""),
    "gpu_eager": ({"asked for": 6 * MIB, "arguments": 6 * MIB, "heap": 0}, "fewer rows"),
    "gpu_ray": ({"asked for": 4110417920, "heap": 3.83 * GIB}, "narrower dtype"),
    "gpu_scores": ({"asked for": 29995136112}, "never holds all scores"),
    "gpu_rematerialization": ({"asked for": 95.4 * GIB}, ""),
    "gpu_request": ({"asked for": 256 * MIB}, ""),
    "host": ({"asked for": 12.5 * GIB}, ""),
}


def text_of(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text("utf-8")


def cure_of(found: Explanation, words: str) -> Any:
    return next(one for one in found.cures if words in one.what)


def test_every_text_is_tried() -> None:
    assert set(SAID) == {path.stem for path in TEXTS.glob("*.txt")}


@pytest.mark.parametrize("name", SAID)
def test_a_text_has_its_figures_and_its_cure(name: str) -> None:
    sizes, words = SAID[name]
    found = explain(TEXTS / f"{name}.txt")
    assert found.main is not None
    # The texts have two decimals.
    for what, size in sizes.items():
        assert found.main.sizes[what] == pytest.approx(size, rel=1e-3)
    if words:
        assert cure_of(found, words).gain_bytes is None, "a text has no places, and so no gain"
    assert found.notes == ()


def test_rows_have_shape_line_and_padding() -> None:
    row, second = explain(TEXTS / "tpu_v4_scores.txt").main.buffers[:2]  # type: ignore[union-attr]
    assert (row.shape, row.bytes) == ("f32[32,4096,4096]", 2 * GIB)
    assert row.source == second.source == "src/easydel/modules/attention_module.py:1059"
    padding, array = explain(TEXTS / "tpu_padding.txt").main.buffers  # type: ignore[union-attr]
    assert (padding.role, padding.bytes, array.bytes) == ("padding", 31 * GIB, GIB)


def test_where_it_happened_is_said() -> None:
    when = {name: explain(TEXTS / f"{name}.txt").main.when for name in SAID}  # type: ignore[union-attr]
    assert when["tpu_v3_short"] == when["tpu_vmem"] == "compile"
    assert when["tpu_device_buffer"] == when["gpu_ray"] == "run"
    assert when["host"] == "host"


def test_messages_of_several_processes_count_once() -> None:
    (message,) = explain(TEXTS / "tpu_device_buffer.txt").messages
    assert message.times == 2


@pytest.mark.parametrize(
    "prefix",
    [
        "2025-05-13 09:18:45.074199: W external/xla/xla/service/a.cc:3021] ",
        "W0000 00:00:1756998431.440298    5182 hlo_rematerialization.cc:3183] ",
        "\x1b[36m(train_fn pid=489, ip=10.0.0.1)\x1b[0m ",
        "[rank12]: ",
        "[default3]:",
        "[1,0]<stderr>:",
        "2024-01-02T03:04:05.678Z stderr F ",
        "> ",
    ],
)
def test_what_logs_put_before_a_line_is_taken_off(prefix: str) -> None:
    assert cleaned(f"{prefix}Total hbm usage >= 1.00G:") == ["Total hbm usage >= 1.00G:"]
    text = "\n".join(prefix + line for line in text_of("tpu_v4_scores").splitlines())
    plain, found = explain_text(text_of("tpu_v4_scores")).main, explain_text(text).main
    assert plain is not None
    assert found is not None
    assert (found.sizes, found.buffers) == (plain.sizes, plain.buffers)


def test_a_message_that_python_printed_in_quotation_marks_is_read() -> None:
    text = repr(RuntimeError(text_of("tpu_padding").partition("\n")[2].replace('"', "'")))
    found = explain_text(text).main
    assert found is not None
    assert found.sizes["heap"] == pytest.approx(41.19 * GIB)


def test_a_text_is_read_wherever_it_is_cut() -> None:
    text = text_of("tpu_v4_scores")
    for end in range(0, len(text), 97):
        cut = text[:end] + "\n… 1,203 lines left out …\n" + text[end + 200 :]
        try:
            explain_text(cut)
        except InputError:
            assert "Used 63.80G" not in cut


def test_sizes_are_in_units_of_1024() -> None:
    printed = ("19.32G", "528.00M", "4.0K", "0B", "6.00MiB", "2147483648 bytes", "384")
    found = [bytes_of(text) for text in printed]
    sizes = [19.32 * GIB, 528 * MIB, 4096, 0, 6 * MIB, 2 * GIB, 384]
    assert found == list(map(round, sizes))


@pytest.mark.parametrize("kind", ["empty", "garbage", "words", "one long line", "zeros"])
def test_what_is_not_known_ends_with_one_line(kind: str, run: Run, tmp_path: Path) -> None:
    content = {
        "empty": b"",
        "garbage": random.Random(0).randbytes(300_000),
        "words": b"RESOURCE_EXHAUSTED: something new\n",
        "one long line": b"Size: " * 400_000,
        "zeros": bytes(1_000_000),
    }[kind]
    file = tmp_path / "file"
    file.write_bytes(content)
    ended = run("explain", file)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
    assert "Traceback" not in ended.err
    if kind == "words":
        assert "line 1 is not understood: RESOURCE_EXHAUSTED: something new" in ended.err


def test_a_line_that_is_not_understood_is_named(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "error.log"
    file.write_text(text_of("tpu_v3_short") + "\nRESOURCE_EXHAUSTED: in words of its own\n")
    ended = run("explain", file)
    assert ended.code == 0, ended.err
    assert "is not understood: RESOURCE_EXHAUSTED: in words of its own" in " ".join(
        ended.out.split()
    )


@pytest.mark.parametrize("what", ["folder", "pipe", "missing"])
def test_what_cannot_be_read_is_said(what: str, run: Run, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "folder":
        place.mkdir()
        os.mkfifo(place / "a.txt")  # to open it would wait
    elif what == "pipe":
        os.mkfifo(place)
    ended = run("explain", place)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1


def test_a_text_without_buffers_has_no_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ended = run("explain", TEXTS / "host.txt", "--html", page)
    assert ended.code == 2
    assert "lists no buffers" in ended.err
    assert not page.exists()


def test_page_chart_and_json_of_a_text(run: Run, tmp_path: Path) -> None:
    page, chart = tmp_path / "page.html", tmp_path / "chart.svg"
    words = ("--html", page, "--chart", chart, "--json", "-")
    ended = run("explain", TEXTS / "tpu_v4_scores.txt", *words)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["program"]["buffers"]["buffers"][0]["shape"] == "f32[32,4096,4096]"
    assert found["cures"][0]["gain_bytes"] is None
    assert "attention_module.py:1059" in page.read_text()
    assert "a flash attention kernel" in page.read_text()
    assert chart.read_text().startswith("<?xml")


def dumped(function: Any, folder: Path, *shapes: Any, donated: tuple[int, ...] = ()) -> Path:
    lowered = jax.jit(function, donate_argnums=donated).lower(*shapes)
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    with _PERSISTENT_CACHE.off():  # a program that comes from there is not dumped
        lowered.compile(compiler_options=options)
    return folder


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w - 0.1 * (x.T @ jnp.tanh(x @ w)), jnp.tanh(x @ w).sum()


SHAPES = (jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((512, 256), "float32"))


def test_a_dump_has_the_tables_of_memory(run: Run, tmp_path: Path) -> None:
    dumped(lambda x: x + 1, tmp_path, jax.ShapeDtypeStruct((4,), "float32"))
    dumped(step, tmp_path, *SHAPES)
    found = explain(tmp_path)
    assert found.program is not None
    assert found.program.attribution is not None
    assert found.program.memory.argument_bytes == (256 + 512) * 256 * 4
    assert [name for name, _ in found.others] == ["jit__lambda"]
    assert any(
        row.source and "test_explain.py" in row.source for row in found.program.attribution.buffers
    )
    assert all(cure.gain_bytes is None for cure in found.cures), "CPU figures mislead"
    ended = run("explain", tmp_path)
    assert ended.code == 0, ended.err
    assert "the account: what must fit" in ended.out
    assert "other modules" in ended.out


def test_a_file_of_a_dump_is_read_with_those_beside_it(tmp_path: Path) -> None:
    dumped(step, tmp_path, *SHAPES)
    whole = explain(tmp_path).program
    assert whole is not None
    for path in tmp_path.glob("*cpu_after_optimizations*.txt"):
        if path.stem.endswith(("optimizations", "-buffer-assignment")):
            found = explain(path).program
            assert found is not None
            assert found.memory == whole.memory


def test_a_program_alone_has_no_heap(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "program.txt"
    file.write_text(jax.jit(step, donate_argnums=0).lower(*SHAPES).compile().as_text() or "")
    found = explain(file)
    assert found.program is not None
    memory = found.program.memory
    assert (memory.argument_bytes, memory.alias_bytes) == ((256 + 512) * 256 * 4, 256 * 256 * 4)
    assert (memory.heap_bytes, memory.account_bytes) == (None, None)
    assert all(cure.gain_bytes is None for cure in found.cures)
    ended = run("explain", file)
    assert "the heap is not known" in " ".join(ended.out.split())


def test_live_ranges_that_are_not_there_are_said(tmp_path: Path) -> None:
    dumped(step, tmp_path, *SHAPES)
    for path in tmp_path.glob("*-live-range.txt"):
        path.unlink()
    found = explain(tmp_path)
    assert found.program is not None
    assert found.program.attribution is None
    assert found.program.memory.account_bytes is not None
    assert "no live ranges" in found.notes[0]


@pytest.mark.slow
@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_a_dump_of_a_tpu_promises_no_more_than_comes(tmp_path: Path) -> None:
    """`benchmarks/explain.py` has more programs, and GPUs."""
    place = jax.sharding.SingleDeviceSharding(Platform.parse("tpu:v5e:2x2").devices(1)[0])

    def layers(w: Any, x: Any, remat: bool) -> Any:
        def body(x: Any, w: Any) -> Any:
            return x + jax.nn.gelu(x @ w) @ w.T, None

        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, w)[0].sum()

    shapes = [
        jax.ShapeDtypeStruct(dims, "float32", sharding=place)
        for dims in ((8, 256, 1024), (4096, 256))
    ]
    found = [
        explain(dumped(jax.grad(lambda w, x, r=remat: layers(w, x, r)), tmp_path / name, *shapes))
        for name, remat in (("as it is", False), ("cured", True))
    ]
    before, after = (one.program.memory.account_bytes for one in found)  # type: ignore[union-attr]
    assert found[0].program.platform == "tpu:v5e:2x2x1"  # type: ignore[union-attr]
    assert found[0].program.exceeds_device_memory is False  # type: ignore[union-attr]
    gain = cure_of(found[0], "jax.checkpoint around").gain_bytes
    assert before is not None
    assert after is not None
    assert 0 < gain <= before - after


def test_the_rows_of_an_array_are_not_the_steps_of_a_scan() -> None:
    """A scan of 4 steps writes into an array of 64 rows, which the backward pass reads."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def step(rows: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            new = jnp.tanh(rows[at] @ w)[None]
            return jax.lax.dynamic_update_slice(rows, new, (at, 0)), None

        return (jnp.sin(jax.lax.scan(step, x, jnp.arange(4))[0] @ w) ** 2).sum()

    shapes = (jax.ShapeDtypeStruct(dims, "float32") for dims in ((512, 512), (64, 512)))
    measured = lab.measure(jax.grad(loss), *shapes)
    assert measured.attribution
    assert measured.buffer_assignment
    rows = measured.attribution.buffers
    assert "f32[64,512]" in {row.shape for row in rows if row.role == "saved residual"}
    buffers = read_buffers(measured.buffer_assignment)
    cures = cures_of(rows, Placed(parse(measured.hlo), buffers, measured.hlo))
    (scan,) = [cure.why for cure in cures if "stacked by a scan" in cure.why]
    assert "of 4 steps, the largest f32[4,512]" in scan


def test_the_page_shows_what_the_command_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the page, in their order, are lines of the output."""
    monkeypatch.setenv("COLUMNS", "80")
    page = Path(__file__).parents[2].joinpath("docs", "explain.md").read_text(encoding="utf-8")
    shown = [line.rstrip() for line in page.split("```text\n")[1].split("```")[0].splitlines()]
    ended = run("explain", str(TEXTS / "tpu_v4_scores.txt"))
    printed = (line.rstrip() for line in ended.out.splitlines())
    assert [line for line in shown if line not in printed] == []
    assert len(shown) > 15

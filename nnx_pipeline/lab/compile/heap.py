"""The device-memory heap of a compiled program, from the compiler's own buffer assignment.

Every XLA compiler (TPU, NVIDIA, CPU) can write down where it puts each value: one route for all,
and without hardware. What it says is per device.

How the heap relates to `memory_analysis().temp_size_in_bytes`, measured on 78 small programs per
compiler (products, scans and their gradients, every collective, fsdp layers):

* NVIDIA (H100 target) and CPU, JAX 0.10.2: equal to the byte in every program.
* TPU (v5p), JAX 0.10.2 with libtpu 0.0.42.1: they differ nearly everywhere, in both directions.
  temp was 0 where the heap had up to 49 184 bytes, and 1.0 to 3.0 times the heap elsewhere
  (84 867 040 against 67 600 384 bytes for a gradient of four fsdp layers). Whether a program fits
  is decided by the heap and what else `account` counts, not by temp.
* JAX 0.12.0 (libtpu 0.0.50.1; 52 of the programs on TPU, 51 on CPU): the same on both.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from nnx_pipeline.ending import cleared_away

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_COLOR = re.compile(r", color (\d+)")


def compile_with_dump(
    lowered: jax.stages.Lowered,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> tuple[jax.stages.Compiled, str | None]:
    """The compiled program and the text of its buffer assignment, None if none was written.

    The text is two documents of the compiler one after the other: `BufferAssignment:` holds every
    allocation (size, colour, kind) and the values in it (name, colour, size, offset, shape);
    `HloLiveRange` holds the order of the instructions and from which to which of them each value
    lives. The colour is the memory space: 0 is device memory, on TPU 1 is the on-chip memory.

    JAX's persistent compilation cache is left out: a program from there has no text.
    """
    with (
        tempfile.TemporaryDirectory(prefix="xla-dump-") as folder,
        cleared_away(functools.partial(shutil.rmtree, folder, ignore_errors=True)),
        _without_persistent_cache(),
    ):
        dump: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options={**(compiler_options or {}), **dump})
        return compiled, _main_module_text(Path(folder))


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """Compiles what is compiled here, wherever the process keeps its programs otherwise."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    # JAX asks once per process whether there is a cache; resetting it makes it ask again.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _main_module_text(folder: Path) -> str | None:
    """Buffer assignment and live ranges of the largest program in the dump.

    A compiler may compile small helpers on the way, such as constants that it folds.
    """
    assignments = sorted(
        folder.glob("*buffer-assignment.txt"), key=lambda path: path.stat().st_size
    )
    if not assignments:
        return None
    main = assignments[-1]
    live_range = main.with_name(main.name.replace("buffer-assignment.txt", "live-range.txt"))
    parts = [main, live_range] if live_range.exists() else [main]
    return "\n".join(part.read_text(encoding="utf-8", errors="replace") for part in parts)


def heap_bytes(buffer_assignment: str | None) -> int | None:
    """Bytes per device of the heap in device memory: what is neither argument, result nor constant.

    That is every allocation `preallocated-temp` of colour 0; on-chip memory, semaphores and host
    memory have other colours. 0 is a program that needs none. None: the text holds no allocations.
    """
    allocations = _ALLOCATION.findall(buffer_assignment or "")
    if not allocations:
        return None
    return sum(
        int(size)
        for size, description in allocations
        if "preallocated-temp" in description and _color(description) == 0
    )


def _color(description: str) -> int:
    """Memory space of an allocation; colour 0 is not printed."""
    color = _COLOR.search(description)
    return int(color.group(1)) if color else 0

"""Compiles a program, and reads its heap in device memory from the compiler's buffer assignment.

Every XLA compiler (TPU, NVIDIA, CPU) can write down where it places each value, so one method
serves all of them and needs no hardware. All figures are per device.

How the heap relates to `memory_analysis().temp_size_in_bytes`, measured on 78 small programs per
compiler (products, scans and their gradients, every collective, fsdp layers):

* NVIDIA (H100 target) and CPU, JAX 0.10.2: equal to the byte in every program.
* TPU (v5p), JAX 0.10.2 with libtpu 0.0.42.1: they differ in nearly every program, in both
  directions. temp was 0 where the heap had up to 49 184 bytes, and 1.0 to 3.0 times the heap
  elsewhere (84 867 040 against 67 600 384 bytes for a gradient of four fsdp layers). Whether a
  program fits is decided by the account (`attribution.account`), not by temp.
* JAX 0.12.0 (libtpu 0.0.50.1; 52 of the programs on TPU, 51 on CPU): the same holds on both.
"""

import contextlib
import functools
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import BYTES, InputError

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_ELSEWHERE = re.compile(r", color [1-9]")  # of another memory; colour 0 is not printed
ASSIGNMENT = "-buffer-assignment.txt"
# With these words the TPU compiler refuses what does not fit, when it has placed every buffer. Of
# its on-chip memory it says the same with another name, and then a kernel is at fault.
_TOO_LARGE = re.compile(r"Ran out of memory (on HBM|in memory space hbm).*?(?=\.\s|\.?$)", re.S)
_USED = re.compile(r"(?:[Uu]sed |HLO temporaries \()(\d+\.?\d*)([KMGT])")

# What the compilers say of a setting before they do anything (JAX 0.10 to 0.12).
_UNKNOWN = re.compile(r"No such compile option: '(?P<name>.*?)'")
_REFUSED = (
    re.compile(r"While setting option (?P<name>\w+), '.*' is (?P<why>not a valid \w+ value)"),
    re.compile(r"Failed to parse '.*' into flag (?P<name>\w+): *(?P<why>.*)"),
)


@dataclass(frozen=True)
class TooLarge:
    """A program that its compiler refused because it does not fit on a device."""

    hlo: str  # the program as it would have been
    error: jax.errors.JaxRuntimeError

    @property
    def reason(self) -> str:
        said = " ".join(str(self.error).split())
        found = _TOO_LARGE.search(said)
        return found.group() if found else said


def is_too_large(error: BaseException) -> bool:
    """Whether a compiler refuses a program because it does not fit on a device."""
    return isinstance(error, jax.errors.JaxRuntimeError) and bool(_TOO_LARGE.search(str(error)))


def bytes_needed(error: BaseException) -> int | None:
    """What such a program needs, as far as the compiler says: `Used 19.32G of 15.48G hbm`."""
    found = _USED.search(str(error)) if is_too_large(error) else None
    return round(float(found[1]) * BYTES[f"{found[2]}iB"]) if found else None


def own_options(lowered: jax.stages.Lowered) -> str:
    """The compiler options of the function's own `jax.jit`, which are not in a program's text."""
    # JAX has no public name for them, and adds them when it compiles.
    return repr(lowered._lowering._compiler_options_kvs)  # type: ignore[attr-defined]


def compile_with_dump(
    lowered: jax.stages.Lowered,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> tuple[jax.stages.Compiled | TooLarge, str | None]:
    """Compiles a program and returns it with its buffer assignment, None if none was written.

    That is two documents of the compiler: `BufferAssignment:` with every allocation (size, memory
    space as colour, kind) and the values in it, and `HloLiveRange` with the order of the
    instructions and where in it each value lives. A program that the TPU compiler refuses as too
    large is a `TooLarge`, every other error is raised. JAX's persistent cache is bypassed: it has
    no such text.
    """
    with (
        tempfile.TemporaryDirectory(prefix="xla-dump-") as folder,
        cleared_away(functools.partial(shutil.rmtree, folder, ignore_errors=True)),
        _PERSISTENT_CACHE.off(),
    ):
        dump: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options={**(compiler_options or {}), **dump})
        except jax.errors.JaxRuntimeError as error:
            hlo, text = _main_module(Path(folder))
            if not is_too_large(error) or not hlo or not text:
                raise
            return TooLarge(hlo, error), text
        return compiled, _main_module(Path(folder))[1]


class _PersistentCache:
    """JAX's persistent compilation cache, off as long as any thread needs it off. The option is one
    for the whole process: a thread that restored what it had found would leave the cache off for
    good, if another one had switched it off before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users, self._enabled = 0, True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, users: int) -> None:
        with self._lock:
            if not self._users:
                self._enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
            self._users += users
            jax.config.update("jax_enable_compilation_cache", self._enabled and not self._users)
            # JAX asks once per process whether there is a cache; this makes it ask again.
            compilation_cache.reset_cache()


_PERSISTENT_CACHE = _PersistentCache()


def _main_module(folder: Path) -> tuple[str | None, str | None]:
    """The largest program in the dump: its own text, and its buffer assignment and live ranges. The
    compiler also compiles helper programs, such as those for constants that it folds."""
    assignments = sorted(folder.glob(f"*{ASSIGNMENT}"), key=lambda path: path.stat().st_size)
    if not assignments:
        return None, None
    return read_dumped(assignments[-1])


def read_dumped(assignment: Path) -> tuple[str | None, str]:
    """The program of a dumped module, None where its text is not there, and its buffer assignment
    and live ranges.

    - `assignment`: the file of the buffer assignment; the others stand beside it.
    """

    def read_beside(ending: str) -> str | None:
        path = assignment.with_name(assignment.name.removesuffix(ASSIGNMENT) + ending)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None

    parts = read_beside(ASSIGNMENT), read_beside("-live-range.txt")
    return read_beside(".txt"), "\n".join(part for part in parts if part is not None)


def heap_bytes(buffer_assignment: str | None) -> int | None:
    """Bytes per device of the heap: every allocation `preallocated-temp` of colour 0 in the text
    that `compile_with_dump` returns. None means that the text holds no allocations."""
    allocations = _ALLOCATION.findall(buffer_assignment or "")
    if not allocations:
        return None
    return sum(
        int(size)
        for size, description in allocations
        if "preallocated-temp" in description and not _ELSEWHERE.search(description)
    )


class Accepted(NamedTuple):
    compiled: jax.stages.Compiled | TooLarge
    buffer_assignment: str | None  # see `compile_with_dump`
    applied: dict[str, bool | str]  # what the user set
    left_out: tuple[str, ...]  # settings of a set that the compiler does not take


def compile_with_settings(lowered: jax.stages.Lowered, platform: Platform) -> Accepted:
    """Compiles with the settings of a platform. One of a named set that this compiler does not take
    is left out: sets are made for other versions and TPUs. Raises InputError for one that the user
    gave."""
    settings = {one.name: one for one in platform.xla}
    options, left_out = dict(platform.compiler_options), []
    while True:
        try:
            compiled, text = compile_with_dump(lowered, options)
            break
        except jax.errors.JaxRuntimeError as error:
            name, why = _refused(str(error), platform)
            setting = settings.get(name)
            if setting is None:
                raise
            if not setting.of_set:
                raise InputError(f"compiler setting {setting}: {why}") from error
            del options[name], settings[name]
            left_out.append(f"{setting} of {setting.of_set}")
    applied = {name: one.value for name, one in settings.items()}
    # The compiler names them in an order that differs from process to process.
    return Accepted(compiled, text, applied, tuple(sorted(left_out)))


def _refused(message: str, platform: Platform) -> tuple[str, str]:
    """The name of the setting that an error of a compiler is about, and what is wrong with it; the
    name is "" where the error is about something else."""
    if found := _UNKNOWN.search(message):
        why = f"the compiler for {platform} does not know it; correct the name or leave it out"
        return found["name"], why
    for pattern in _REFUSED:
        if found := pattern.search(message):
            said = found["why"].strip().rstrip(".") or "a value that it cannot read"
            return found["name"], f"the compiler for {platform} says: {said}; give another value"
    return "", ""

"""Measures and compares user functions, whether they use NNX, Linen or neither."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh

from nnx_pipeline.lab._tracing.calls import (
    Call,
    Input,
    Traced,
    jaxpr_of,
    trace,
    traced_afresh,
)
from nnx_pipeline.lab._tracing.nnx_state import name_of, without_repeats, without_static
from nnx_pipeline.lab.comparison.outcome import Outcome, Question, compare_measurements
from nnx_pipeline.lab.compile._functions import abstract_arguments, called_with, check_sizes
from nnx_pipeline.lab.compile._lowering import lowered_for_other_devices
from nnx_pipeline.lab.compile._places import AnyMesh, memory_kind, mesh_on
from nnx_pipeline.lab.compile.measure import Clock, Measurement, Progress, lower_traced
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, described
from nnx_pipeline.lab.mesh import Axes, entry_axes

if TYPE_CHECKING:
    from nnx_pipeline.lab.search.largest import Largest


class _Target(NamedTuple):
    platform: Platform
    mesh: Mesh | None
    device: jax.Device


def measure(
    function: Callable[..., object],
    *arguments: object,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
    progress: Progress = lambda text: None,
) -> Measurement:
    """Compiles a function for a platform and measures what it costs; nothing is computed.

    - `function`: a function jitted by `jax.jit`, `nnx.jit` or another library, whose donations and
      output shardings count, or a plain function. NNX state that a plain function changes in place
      is among the results of the program, as with `nnx.jit`. The function is always traced anew.
    - `arguments`: pytrees of arrays or `jax.ShapeDtypeStruct`, sharded by
      `jax.sharding.NamedSharding` over the axes of `mesh`. A leaf without a sharding is whole on
      every device, and one of the memory kind `pinned_host` is in host memory.
    - `mesh`: a JAX mesh of any devices, which those of the platform replace, or a text such as
      `dp=2,tp=4` (axes in auto mode) or `explicit:dp=2,tp=4`; None for a program on one device.
      Constraints in the function must name axes (`P("dp")`) rather than a mesh of their own.
    - `platform`: what to compile for, such as `tpu:v5p:2x2x2`, or with settings of the compiler
      `Platform.parse("tpu:v5p:2x2x2", "xla_tpu_scoped_vmem_limit_kib=65536")`.
    - `progress`: called with a text when a phase begins.

    Raises InputError when these do not fit together, and what the compiler raises.
    """
    return _measured(function, arguments, _target(mesh, platform), Clock(progress))[0]


def _measured(
    function: Callable[..., object], arguments: tuple[object, ...], target: _Target, clock: Clock
) -> tuple[Measurement, Traced]:
    check_sizes(arguments)
    with _on_target(Call.of(function, arguments), target) as call:
        with called_with(call), clock("trace", f"tracing {name_of(function)}"):
            traced = trace(call)
        with lowered_for_other_devices(name_of(function), traced.program.jaxpr):
            lowered = lower_traced(
                traced.program,
                target.platform,
                clock,
                dict(target.mesh.shape) if target.mesh is not None else {},
                {
                    "function": name_of(function),
                    "arguments": _shapes(call.given),
                    **({"bound": call.settings} if call.settings else {}),
                },
            )
        result = lowered.measure()
    placement = _placement_notes(call.given, target.platform, target.mesh)
    notes = [*traced.notes, *result.notes, *placement]
    return dataclasses.replace(result, notes=tuple(notes)), traced


@contextlib.contextmanager
def _on_target(call: Call, target: _Target) -> Iterator[Call]:
    """A context to trace a call in, afresh, with shapes on the devices of the target."""
    _, mesh, device = target
    abstract, keywords = abstract_arguments(call.given, mesh, device)
    call = dataclasses.replace(call, arguments=abstract, keywords=keywords)
    with jax.set_mesh(mesh) if mesh is not None else _alone_on(device, call.given), traced_afresh():
        yield call


@contextlib.contextmanager
def _alone_on(device: jax.Device, arguments: object) -> Iterator[None]:
    """A context without a mesh, in which JAX says what kind of device a program is traced for."""
    alone = Mesh(np.array([device]), ("device",))
    # Memory that a device does not list, as on the topology of a GPU, is lowered on a mesh alone.
    if not device.addressable_memories() and any(map(memory_kind, jax.tree.leaves(arguments))):
        with jax.set_mesh(alone):
            yield
        return
    kind = alone.abstract_mesh.abstract_device
    with (
        jax.default_device(None),
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)),
    ):
        yield


def traced_call(
    function: Callable[..., object],
    *arguments: object,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
) -> tuple[Call, ClosedJaxpr, list[Input]]:
    """Traces a function as `measure` does: the call, its jaxpr, and the arrays that it takes."""
    check_sizes(arguments)
    whole = Call.of(function, arguments)
    with _on_target(whole, _target(mesh, platform)) as call, called_with(call):
        return call, *jaxpr_of(call)


def compare(
    function_a: Callable[..., object],
    function_b: Callable[..., object],
    *arguments: object,
    mesh: AnyMesh = None,
    platform: Platform | str | tuple[Platform | str, Platform | str] = "cpu",
    labels: tuple[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Outcome:
    """Measures two functions of the same arguments and compares their memory.

    - `function_a`, `function_b`, `arguments`, `mesh`, `progress`: as for `measure`.
    - `platform`: as for `measure`, or one for each function: the same platform with different
      settings of the compiler. With one function given twice, it is these that are compared.
    - `labels`: what the two are called; None for `module:function` of each.

    The verdict is `holds` where the account of the second (`Memory.account_bytes`) is smaller, see
    `Outcome.verdict_by`. If a function cannot be traced or compiled, the note says why, and the
    other one's figures are given. Results that differ in shape, dtype or place are a warning in the
    note. The numbers that the functions compute are not compared.

    Raises InputError as `measure` does.
    """
    targets = tuple(map(_platform, platform if isinstance(platform, tuple) else (platform,) * 2))
    if len(targets) != 2 or str(targets[0]) != str(targets[1]):
        raise InputError(
            f"platform=({', '.join(map(str, targets))}): both functions are compiled for the same "
            "platform; give it once, or twice with different settings"
        )
    first = _target(mesh, targets[0])
    results: list[Measurement | str] = []
    traced: list[Traced] = []
    for function, target in zip((function_a, function_b), targets, strict=True):
        try:
            measured, call = _measured(
                function, arguments, first._replace(platform=target), Clock(progress)
            )
            results.append(measured)
            traced.append(call)
        except InputError:
            raise
        except Exception as error:  # a function may break any compiler in any way
            results.append(described(error, most=200))
    what = "two functions" if function_a is not function_b else "compiler settings"
    arms = labels or (name_of(function_a), name_of(function_b))
    question = Question(name="compare", claim="", difference=what, labels=arms, judged_by="account")
    outcome = compare_measurements(question, results[0], results[1])
    notes = [*_different_results(traced), outcome.note]
    return dataclasses.replace(outcome, note="; ".join(filter(None, notes)))


def fit_largest(
    function: Callable[..., object],
    inputs: Callable[..., object],
    over: str,
    *,
    mesh: AnyMesh = None,
    platform: Platform | str,
    limit: str = "100%",
) -> "Largest":
    """Finds the largest number with which a function fits on a device, by compiles.

    - `function`, `mesh`, `platform`: as for `measure`.
    - `inputs`: takes the number by its name, and returns the tuple of arguments.
    - `over`: the name and its values, such as `batch=1..512`, or `batch=8..512:8` for multiples.
    - `limit`: a share of the memory of a device, or bytes such as `76GB`.

    Raises InputError for these, and where a value cannot be used.
    """
    from nnx_pipeline.lab.search.effort import Effort
    from nnx_pipeline.lab.search.largest import Largest, NotUsable, find_largest
    from nnx_pipeline.lab.search.over import MemoryLimit, Over

    target = _platform(platform)
    values = Over.parse(over)
    found = Largest(values, MemoryLimit.parse(limit, target), str(target))

    def make(value: int) -> Measurement:
        given = inputs(**{values.name: value})
        arguments = given if isinstance(given, tuple) else (given,)
        return measure(function, *arguments, mesh=mesh, platform=target)

    try:
        find_largest(found, make, Effort(what=f"{values.name}, {target}", most=0))
    except NotUsable as error:
        raise InputError(f"{values.at(error.value)} cannot be used: {error}") from error
    return found


def _target(mesh: AnyMesh, platform: Platform | str) -> _Target:
    target = _platform(platform)
    needed = Axes.parse(mesh) if isinstance(mesh, str) else mesh
    size = getattr(needed, "num_devices", None) or getattr(needed, "size", None) or 1
    devices = target.devices(size if target.kind == "cpu" else 1)
    return _Target(target, mesh_on(needed, devices), devices[0])


def _platform(platform: Platform | str) -> Platform:
    if isinstance(platform, str):
        return Platform.parse(platform)
    if not isinstance(platform, Platform):
        raise InputError(
            f"platform={platform!r} is no platform; give a text such as 'tpu:v5p:2x2x2', or a "
            "Platform"
        )
    return platform


def _different_results(traced: Sequence[Traced]) -> list[str]:
    if len(traced) < 2:
        return []
    one, other = traced
    kinds = [("returned", one.results, other.results)]
    if one.changed is not None and other.changed is not None:
        kinds.append(("changed in place", one.changed, other.changed))
    notes = []
    for kind, before, after in kinds:
        places = [place for place in {**before, **after} if before.get(place) != after.get(place)]
        shown = [
            f"{place or 'the result'} is {before.get(place, 'missing')} and "
            f"{after.get(place, 'missing')}"
            for place in places[:3]
        ]
        more = [f"{len(places) - 3} more"] if len(places) > 3 else []
        if places:
            notes.append(f"warning: what is {kind} differs: {', '.join([*shown, *more])}")
    return notes


def _placement_notes(arguments: object, platform: Platform, mesh: Mesh | None) -> list[str]:
    """What is seldom meant: arguments in host memory on the CPU, or all whole on a mesh."""
    notes, leaves = [], jax.tree.leaves(arguments)
    on_host = [leaf for leaf in leaves if memory_kind(leaf)]
    if on_host and platform.kind == "cpu":
        notes.append(
            f"arguments in {memory_kind(on_host[0])} (here {len(on_host)}) count as device memory: "
            "the CPU compiler knows no other"
        )
    shardings = [leaf.sharding for leaf in leaves if hasattr(leaf, "sharding")]
    is_split = any(any(getattr(sharding, "spec", ())) for sharding in shardings)
    if mesh is not None and mesh.size > 1 and shardings and not is_split:
        notes.append(
            f"no argument is sharded: each of the {mesh.size} devices holds all of the arguments "
            "whole"
        )
    return notes


def _shapes(arguments: object) -> list[str]:
    """As `--arg` takes them, such as `float32[8@data,128]`."""
    traced = without_static(without_repeats(arguments)[0], numbers=True)
    return [_shape(leaf) for leaf in jax.tree.leaves(traced)]


def _shape(leaf: object) -> str:
    dtype = jax.typeof(leaf).str_short(short_dtypes=False).partition("[")[0]
    entries = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    axes = map("+".join, map(entry_axes, entries))
    dims = zip_longest(map(str, jax.typeof(leaf).shape), axes, fillvalue="")
    return f"{dtype}[{','.join('@'.join(filter(None, dim)) for dim in dims)}]"

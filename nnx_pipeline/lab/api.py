"""Measure and compare people's own functions, NNX or Linen or neither."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.arms import Arm, Experiment
from nnx_pipeline.lab.compare import Outcome, compare_measurements
from nnx_pipeline.lab.compile import Clock, Measurement, Progress, measure_traced
from nnx_pipeline.lab.functions import (
    AnyMesh,
    abstract,
    called_with,
    check_arrays,
    memory_kind,
    mesh_on,
)
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.nnx_state import name_of, without_repeats
from nnx_pipeline.tracing import Call, Traced, trace, traced_afresh


def measure(
    function: Callable[..., Any],
    *arguments: Any,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
    progress: Progress = lambda text: None,
) -> Measurement:
    """Compiles a function for a platform and reads off what it costs; nothing is computed.

    function: jitted by `jax.jit`, `nnx.jit` or another library (what it donates and its output
    shardings count), or not: then NNX state that it changes in place is among the results, as
    `nnx.jit` has it. It is traced afresh. arguments: pytrees of arrays or `jax.ShapeDtypeStruct`,
    spread by `jax.sharding.NamedSharding` over the axes of `mesh`; what has no sharding is whole on
    every device, and what names the memory kind `pinned_host` is in host memory. mesh: a JAX mesh
    of any devices, whose place those of the platform take, or a text such as `data=2,fsdp=4` (axes
    in auto mode); without one the program is for one device. Constraints in the function must name
    axes (`P("data")`) rather than a mesh of their own.

    Raises InputError when these do not fit together, and what the compiler raises.
    """
    target, grid, device = _place(mesh, platform)
    return _measured(function, arguments, grid, (target, device), Clock(progress))[0]


def _measured(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    mesh: Mesh | None,
    target: tuple[Platform, Any],
    clock: Clock,
) -> tuple[Measurement, Traced]:
    """The measurement of one call on a platform and its first device, and what was traced."""
    platform, device = target
    check_arrays(arguments)
    call = Call.of(function, arguments)
    given, keywords = abstract(call.given, mesh, device, static=call.static)
    call = dataclasses.replace(call, arguments=given, keywords=keywords)
    with jax.set_mesh(mesh) if mesh is not None else jax.default_device(None), traced_afresh():
        with called_with(function, arguments), clock("trace", f"tracing {name_of(function)}"):
            traced = trace(call)
        result = measure_traced(
            traced.program,
            platform,
            clock,
            dict(mesh.shape) if mesh is not None else {},
            {"function": name_of(function), "arguments": _shapes(given)},
        )
    notes = [*traced.notes, *result.notes, *_host_notes(given, platform)]
    return dataclasses.replace(result, notes=tuple(notes)), traced


def compare(
    function_a: Callable[..., Any],
    function_b: Callable[..., Any],
    *arguments: Any,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
    labels: tuple[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Outcome:
    """Measures two functions of the same arguments; see `measure`.

    labels: what the two are called, `module:function` of each where that is not given.

    The verdict is `holds` where the account of the second (`Memory.account_bytes`) is smaller. What
    one of them raises when it is traced or compiled stands in the note, beside the other one's
    figures; input errors that concern both are raised. Results of other shapes, dtypes or places
    are a warning in the note. The numbers that they compute are not compared.
    """
    target, grid, device = _place(mesh, platform)
    results: list[Measurement | str] = []
    traced: list[Traced] = []
    for function in (function_a, function_b):
        try:
            measured, call = _measured(function, arguments, grid, (target, device), Clock(progress))
            results.append(measured)
            traced.append(call)
        except InputError:
            raise
        except Exception as error:  # a function may break any compiler in any way
            lines = str(error).strip().splitlines() or [""]
            results.append(f"{type(error).__name__}: {lines[0][:200]}")
    labels = labels or (name_of(function_a), name_of(function_b))
    arms = [Arm(label=label) for label in labels]
    experiment = Experiment(
        name="compare",
        claim="",
        difference="two functions",
        a=arms[0],
        b=arms[1],
        judged_by="account",
    )
    outcome = compare_measurements(experiment, results[0], results[1])
    notes = [outcome.note, *_different_results(traced)]
    notes += [
        f"{arm.label}: {note}"
        for arm, result in zip(arms, results, strict=True)
        if not isinstance(result, str)
        for note in result.notes
    ]
    return dataclasses.replace(outcome, note="; ".join(filter(None, notes)))


def _place(mesh: AnyMesh, platform: Platform | str) -> tuple[Platform, Mesh | None, Any]:
    """The platform, the mesh on its devices, and the first of them."""
    target = Platform.parse(platform) if isinstance(platform, str) else platform
    needed = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    size = getattr(needed, "num_devices", None) or getattr(needed, "size", None) or 1
    devices = target.devices(size if target.kind == "cpu" else 1)
    return target, mesh_on(needed, devices), devices[0]


def _different_results(traced: Sequence[Traced]) -> list[str]:
    """What the two functions give that is not of one shape and dtype at one place."""
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


def _host_notes(arguments: Any, platform: Platform) -> list[str]:
    """The CPU compiler counts arguments in host memory with the others."""
    on_host = [leaf for leaf in jax.tree.leaves(arguments) if memory_kind(leaf)]
    if not on_host or platform.kind != "cpu":
        return []
    return [
        f"{len(on_host)} arguments in {memory_kind(on_host[0])} count as memory of the device: the "
        "CPU compiler knows no other"
    ]


def _shapes(arguments: Any) -> list[str]:
    """Dtype and shape of each array and number, in order."""
    return [
        jax.typeof(leaf).str_short(short_dtypes=False)
        for leaf in jax.tree.leaves(without_repeats(arguments)[0])
        if hasattr(leaf, "shape") or isinstance(leaf, bool | int | float | complex)
    ]

"""Measure and compare people's own functions, NNX or Linen or neither."""

from collections.abc import Callable
from typing import Any

import jax

from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.arms import Arm, Experiment
from nnx_pipeline.lab.compare import Outcome, compare_measurements
from nnx_pipeline.lab.compile import Clock, Measurement, Progress, measure_traced
from nnx_pipeline.lab.functions import AnyMesh, abstract, check_call, mesh_on, name_of
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig


def measure(
    function: Callable[..., Any],
    *arguments: Any,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
    progress: Progress = lambda text: None,
) -> Measurement:
    """Compiles a function for a platform and reads off what it costs; nothing is computed.

    function: jitted (its donated arguments and output shardings count) or not. arguments: pytrees
    of arrays or `jax.ShapeDtypeStruct`, spread by `jax.sharding.NamedSharding` over the axes of
    `mesh`; what has no sharding is whole on every device. mesh: a JAX mesh of any devices, whose
    place those of the platform take, or a text such as `data=2,fsdp=4` (axes in auto mode); without
    one the program is for one device. Constraints in the function must name axes (`P("data")`)
    rather than a mesh of their own.

    Raises InputError when these do not fit together, and what the compiler raises.
    """
    if isinstance(platform, str):
        platform = Platform.parse(platform)
    needed = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    size = getattr(needed, "num_devices", None) or getattr(needed, "size", None) or 1
    devices = platform.devices(size if platform.kind == "cpu" else 1)
    grid = mesh_on(needed, devices)
    check_call(function, arguments)
    placed = abstract(arguments, grid, devices[0])
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    clock = Clock(progress)
    with jax.set_mesh(grid) if grid is not None else jax.default_device(None):
        with clock("trace", f"tracing {name_of(function)}"):
            traced = jitted.trace(*placed)
        return measure_traced(
            traced,
            platform,
            clock,
            dict(grid.shape) if grid is not None else {},
            {"function": name_of(function), "arguments": _shapes(placed)},
        )


def compare(
    function_a: Callable[..., Any],
    function_b: Callable[..., Any],
    *arguments: Any,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
    progress: Progress = lambda text: None,
) -> Outcome:
    """Measures two functions of the same arguments; see `measure`.

    The verdict is `holds` where the account of the second (`Memory.account_bytes`) is smaller. What
    one of them raises when it is traced or compiled stands in the note, beside the other one's
    figures; input errors that concern both are raised. The numbers that they compute are not
    compared.
    """
    results: list[Measurement | str] = []
    for function in (function_a, function_b):
        try:
            results.append(
                measure(function, *arguments, mesh=mesh, platform=platform, progress=progress)
            )
        except InputError:
            raise
        except Exception as error:  # a function may break any compiler in any way
            lines = str(error).strip().splitlines() or [""]
            results.append(f"{type(error).__name__}: {lines[0][:200]}")
    arms = [Arm(label=name_of(function)) for function in (function_a, function_b)]
    experiment = Experiment(
        name="compare",
        claim="",
        difference="two functions",
        a=arms[0],
        b=arms[1],
        judged_by="account",
    )
    return compare_measurements(experiment, results[0], results[1])


def _shapes(arguments: tuple[Any, ...]) -> list[str]:
    """Dtype and shape of each array, in order."""
    return [jax.typeof(leaf).str_short(short_dtypes=False) for leaf in jax.tree.leaves(arguments)]

"""What the fixture `compile_memory` is. It imports JAX, so only the fixture imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from nnx_pipeline import budgets
from nnx_pipeline.budgets import Key
from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.assertions import CompiledMemory, MemoryExceeded
from nnx_pipeline.lab.compile import Measurement, measure_step
from nnx_pipeline.lab.functions import AnyMesh
from nnx_pipeline.lab.own import measure
from nnx_pipeline.lab.platform import MissingCompiler, Platform
from nnx_pipeline.mesh import MeshConfig

if TYPE_CHECKING:
    from nnx_pipeline.pytest_plugin import Results, SessionBudgets


class CompileMemory:
    """Compiles within a test. See the fixture."""

    def __init__(self, test: str, session: SessionBudgets, results: Results) -> None:
        self._test, self._session, self._results = test, session, results

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        mesh: AnyMesh = None,
        platform: Platform | str = "cpu",
    ) -> CompiledMemory:
        """`lab.measure(function, *args, …)` with assertions.

        args: a tuple of pytrees of arrays or `jax.ShapeDtypeStruct`. Raises InputError when these
        do not fit together; skips the test where the compiler is not installed.
        """
        __tracebackhide__ = True
        if type(args) is not tuple:
            raise InputError(
                f"args= is a {type(args).__name__}; give a tuple of the arguments, such as (x,)"
            )
        return self._measured(lambda: measure(function, *args, mesh=mesh, platform=platform))

    def step(
        self, config: Config, mesh: MeshConfig | str, platform: Platform | str = "cpu"
    ) -> CompiledMemory:
        """The same of one training step of this package: forward, backward and optimizer."""
        __tracebackhide__ = True
        grid = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
        target = Platform.parse(platform) if isinstance(platform, str) else platform
        return self._measured(lambda: measure_step(config, grid, target))

    def _measured(self, measured: Callable[[], Measurement]) -> CompiledMemory:
        __tracebackhide__ = True
        try:
            result = CompiledMemory(measured(), self._compare)
        except MissingCompiler as error:
            pytest.skip(f"{error}, or pip install 'nnx-pipeline[{error.extra}]'")
        except InputError as error:
            raise error.with_traceback(None) from error.__cause__
        self._results.descriptions.append(result.description())
        return result

    def _compare(self, result: CompiledMemory, name: str, tolerance: float | None) -> None:
        """See `CompiledMemory.within_budget`."""
        __tracebackhide__ = True
        measurement, session = result.measurement, self._session
        compiler = budgets.compiler_of(measurement.platform, measurement.versions)
        key = Key(self._test, name, measurement.platform, compiler)
        figures = {figure: getattr(result, figure) for figure in budgets.FIGURES}
        given = {figure: value for figure, value in figures.items() if value is not None}
        if self._results.asked.setdefault(key, given) != given:
            raise InputError(f"{key} has two budgets; give each within_budget(name)")
        if session.update:
            return
        budget = session.budgets.get(key)
        if budget is None:
            _not_recorded(key, budgets.same_elsewhere(session.budgets, key))
            return
        share = session.tolerance if tolerance is None else tolerance
        exceeded = budgets.above(figures, budget, share)
        if exceeded:
            cure = f"If that is intended: pytest --update-memory-budgets '{self._test}'"
            raise MemoryExceeded(
                "\n".join([*map(str, exceeded), "", result.description(), "", cure])
            )
        self._results.hints += [
            f"{key}: {change}; pytest --update-memory-budgets lowers it"
            for change in budgets.below(figures, budget, share)
        ]


def _not_recorded(key: Key, others: list[str]) -> None:
    """Skips where the compiler is another one than that of the budgets; fails without any."""
    __tracebackhide__ = True
    cure = f"record one: pytest --update-memory-budgets '{key.test}'"
    if others:
        recorded = "; ".join(others)
        pytest.skip(f"{key} has a budget for {recorded}, and this is {key.compiler}; {cure}")
    pytest.fail(f"{key} has no budget in {budgets.FILE}; {cure}", pytrace=False)

"""The object that the fixture `compile_memory` returns; it imports JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest

from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab.api import measure
from nnx_pipeline.lab.compile._packages import MissingCompiler
from nnx_pipeline.lab.compile._places import AnyMesh
from nnx_pipeline.lab.compile._settings import written
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.lab.pytest_plugin import _budgets as budgets
from nnx_pipeline.lab.pytest_plugin._budgets import Key
from nnx_pipeline.lab.pytest_plugin.assertions import CompiledMemory, MemoryExceeded

if TYPE_CHECKING:
    from nnx_pipeline.lab.pytest_plugin._budgets import Results, SessionBudgets


class CompileMemory:
    """Compiles functions and training steps in a test; see the fixture `compile_memory`."""

    def __init__(self, test: str, session: SessionBudgets, results: Results) -> None:
        self._test, self._session, self._results = test, session, results
        self._marked = [
            replace(one, platform=str(Platform.parse(one.platform)) if one.platform else "")
            for one in results.unused
        ]
        results.unused = self._marked.copy()
        self._platform = next((one.platform for one in self._marked if one.platform), "")

    def __call__(
        self,
        function: Callable[..., object],
        args: tuple[object, ...] = (),
        *,
        mesh: AnyMesh = None,
        platform: Platform | str | None = None,
    ) -> CompiledMemory:
        """Compiles a function as `lab.measure` does, and returns figures with assertions on them.

        - `function`: the function, jitted or not.
        - `args`: a tuple of pytrees of arrays or `jax.ShapeDtypeStruct`.
        - `mesh`: a JAX mesh of any devices, or a text such as `data=2,fsdp=4`; None for one device.
        - `platform`: what to compile for, such as `tpu:v5p:2x2x2`; None for that of the marker
          `memory_budget`, or else `cpu`.

        Raises InputError when these do not fit together, and MemoryExceeded for a program that the
        compiler refuses as too large; skips the test where the compiler is not installed.
        """
        __tracebackhide__ = True
        if type(args) is not tuple:
            raise InputError(
                f"args= is a {type(args).__name__}; give a tuple of the arguments, such as (x,)"
            )
        target = self._target(platform)
        return self._measured(lambda: measure(function, *args, mesh=mesh, platform=target))

    def step(
        self, config: object, mesh: MeshConfig | str, platform: Platform | str | None = None
    ) -> CompiledMemory:
        """Compiles one training step of a model with a config: forward, backward and optimizer.

        - `config`: an `nnx_pipeline.Config`: the model, the pipeline and the training.
        - `mesh`: sizes of the mesh axes, also as text such as `stage=4,fsdp=2`.

        The platform, what is raised and what is skipped are as for a call of this object.
        """
        __tracebackhide__ = True
        grid = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
        target = self._target(platform)
        return self._measured(lambda: presets().measure_step(config, grid, target))

    def _target(self, platform: Platform | str | None) -> Platform:
        named = platform or self._platform or "cpu"
        return Platform.parse(named) if isinstance(named, str) else named

    def _measured(self, measured: Callable[[], Measurement]) -> CompiledMemory:
        __tracebackhide__ = True
        try:
            result = CompiledMemory(measured(), self._compare)
        except MissingCompiler as error:
            self._skip(str(error))
        except InputError as error:
            # The message says what the test gave wrong; the frames inside this package do not help.
            raise error.with_traceback(None) from error.__cause__
        self._results.descriptions.append(result.description())
        if result.measurement.is_refused:  # a note of the description says so
            raise MemoryExceeded(f"does not fit on a device\n{result.description()}")
        for marked in self._marked:
            if marked.platform in ("", result.measurement.platform):
                self._results.unused = [one for one in self._results.unused if one != marked]
                result.assert_at_most(**marked.limits)
        return result

    def _skip(self, why: str) -> NoReturn:
        __tracebackhide__ = True
        if self._session.strict:
            pytest.fail(f"{why} (not skipped, by --memory-strict)", pytrace=False)
        pytest.skip(why)

    def _compare(self, result: CompiledMemory, name: str, tolerance: float | None) -> None:
        __tracebackhide__ = True
        measurement, session = result.measurement, self._session
        compiler = budgets.compiler_of(measurement.platform, measurement.versions)
        # With other settings a program has other figures, and so a budget of its own.
        settings = f" with {written(measurement.xla)}" if measurement.xla else ""
        key = Key(self._test, name, f"{measurement.platform}{settings}", compiler)
        figures = budgets.figures_of(result)
        known = {figure: value for figure, value in figures.items() if value is not None}
        # To ask twice with the same figures is no contradiction.
        if self._results.requested.setdefault(key, known) != known:
            raise InputError(f"{key} has two different budgets; name each by within_budget(name)")
        if session.update:
            return
        budget = session.budgets.get(key)
        if budget is None and session.baseline:
            self._results.hints.append(f"{key}: {session.baseline} has no figures of it")
            return
        if budget is None:
            cure = f"record one: pytest --update-memory-budgets '{key.test}'"
            if others := "; ".join(budgets.same_elsewhere(session.budgets, key)):
                self._skip(f"{key} has a budget for {others}, and this is {compiler}; {cure}")
            pytest.fail(f"{key} has no budget in {budgets.FILE}; {cure}", pytrace=False)
        share = session.tolerance if tolerance is None else tolerance
        exceeded = budgets.above(figures, budget, share)
        if exceeded:
            cure = f"If that is intended: pytest --update-memory-budgets '{self._test}'"
            if session.baseline:
                cure = f"The budget is what {session.baseline} needs."
            short = budgets.in_short(
                {it.figure: (it.measured, it.budget) for it in exceeded},
                session.baseline or "budget",
            )
            described = result.description([change.figure for change in exceeded])
            raise MemoryExceeded("\n".join([short, *map(str, exceeded), "", described, "", cure]))
        self._results.hints += [
            f"{key}: {change}, which is that of {session.baseline}"
            if session.baseline
            else f"{key}: {change}; pytest --update-memory-budgets lowers it"
            for change in budgets.below(figures, budget, share)
        ]

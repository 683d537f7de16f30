"""What the command `fit` does."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress, shown_if_interrupted
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._report.largest import largest_view, verdict
from nnx_pipeline.lab._report.output import emit_json, json_files, show
from nnx_pipeline.lab.api import measure, traced_call
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, described, kind_of, nearest
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.lab.search.effort import Effort
from nnx_pipeline.lab.search.largest import Largest, NotUsable, find_largest
from nnx_pipeline.lab.search.over import MemoryLimit, Over

_PATIENCE = 10.0  # seconds in which values are looked through for a step


@dataclass(frozen=True)
class Asked:
    """What is compiled with which values of a number."""

    subject: Subject
    over: Over
    platform: Platform

    def config_at(self, value: int, mesh: MeshConfig) -> Any:
        """The config of the preset with the value; raises InputError where it cannot have it."""
        assignments = (*self.subject.assignments, self.over.at(value))
        config = presets().config_of(self.subject.name, assignments, mesh)
        presets().check(config, mesh)
        return config

    def arguments_at(self, value: int) -> tuple[Mesh | None, tuple[object, ...]]:
        """The mesh, and what the function of `--inputs` returns for the value."""
        subject, numbers = self.subject, {self.over.name: value}
        try:
            return subject.inputs.on(subject.mesh, self.platform, numbers)
        except InputError:
            raise
        except Exception as error:  # the function of a user may raise anything
            raise InputError(f"{subject.inputs.inputs} raised {described(error)}") from error

    def check(self) -> None:
        """Raises InputError where a function is not found, where the lowest value cannot be used,
        where the highest cannot and a step is seen, and for a function of `--inputs` that does not
        take the number or makes nothing of it."""
        ends = [*dict.fromkeys((self.over.values[0], self.over.values[-1]))]
        self._check_name()
        if self.subject.config is None:
            find_function(self.subject.name)
        kinds = [self._kind_of_end(value) for value in ends]
        if len(kinds) == 2 and kinds[0] == kinds[1]:
            raise InputError(
                f"--over {self.over}: {self.subject.inputs.inputs} returns the same arguments for "
                f"{self.over.at(ends[0])} and {self.over.at(ends[1])}; give a number on which "
                "their shapes depend"
            )

    def _check_name(self) -> None:
        inputs, name = self.subject.inputs.inputs, self.over.name
        if self.subject.config is not None:
            if twice := [
                one for one in self.subject.assignments if one.partition("=")[0].strip() == name
            ]:
                raise InputError(f"--over {self.over} and --set {twice[0]}: leave one of them out")
            if name not in (fields := presets().fields()):
                raise InputError(
                    f"--over {self.over}: there is no config field {name!r}; "
                    f"{nearest(name, fields)}"
                )
            return
        if inputs is None:
            raise InputError(
                f"--over {self.over} needs --inputs MODULE:FUNCTION, a function that takes "
                f"{name} and returns the arguments"
            )
        function = find_function(inputs)
        try:
            given = inspect.signature(function).parameters
        except ValueError:
            return  # it has no signature that Python knows
        takes_any = any(one.kind is one.VAR_KEYWORD for one in given.values())
        if name not in given and not takes_any:
            cure = (
                nearest(name, given) if given else f"write def {inputs.rpartition(':')[2]}({name}):"
            )
            raise InputError(f"--over {self.over}: {inputs} takes no {name!r}; {cure}")

    def _kind_of_end(self, value: int) -> object:
        """As `_kind`; None for a highest value that the search passes over."""
        try:
            return self._kind(value)
        except InputError as error:
            steps = self.steps()
            if steps is None and value != self.over.values[0]:
                return None
            raise InputError(self.refusal(value, str(error), steps)) from error

    def _kind(self, value: int) -> object:
        """What differs between values that make other programs; raises InputError."""
        if isinstance(mesh := self.subject.mesh, MeshConfig):
            return self.config_at(value, mesh)
        leaves, tree = jax.tree.flatten(self.arguments_at(value)[1])
        return tree, [kind_of(one) if hasattr(one, "shape") else repr(one) for one in leaves]

    def refusal(self, value: int, why: str, steps: Over | None) -> str:
        cure = f"; write --over {steps}" if steps else ""
        return f"{self.over.at(value)} cannot be used: {why}{cure}"

    def steps(self) -> Over | None:
        """The values that can be used, where they are in steps."""
        until = time.monotonic() + _PATIENCE

        def is_usable(other: int) -> bool:
            if time.monotonic() > until:
                raise StopIteration
            return self._is_traced(other)

        return self.over.in_steps(is_usable)

    def _is_traced(self, value: int) -> bool:
        try:
            if isinstance(mesh := self.subject.mesh, MeshConfig):
                self.config_at(value, mesh)
            else:
                grid, arguments = self.arguments_at(value)
                function = find_function(self.subject.name)
                traced_call(function, *arguments, mesh=grid, platform=self.platform)
        except Exception:  # as of the function of a user
            return False
        return True

    def measure(self, value: int) -> Measurement:
        if isinstance(mesh := self.subject.mesh, MeshConfig):
            return presets().measure_step(self.config_at(value, mesh), mesh, self.platform)
        grid, arguments = self.arguments_at(value)
        function = find_function(self.subject.name)
        return measure(function, *arguments, mesh=grid, platform=self.platform)


def run_fit(asked: Asked, limit: MemoryLimit, json_path: str | None) -> None:
    """Searches, shows each value that was compiled, and raises Failed where none fits."""
    subject, over, platform = asked.subject, asked.over, asked.platform
    title = f"{subject.name} on {subject.mesh}, {platform}: MB per device"
    found = Largest(over, limit, str(platform))
    what = " ".join([*subject.words(), str(subject.mesh), str(platform)])
    stopped: NotUsable | None = None
    with progress() as say, compiler_errors():
        say(f"checking {over}")
        asked.check()
        effort = Effort(what=what, most=0, cache=Cache.of_user(), say=say)
        if effort.cache.folder is not None:
            ending.add_note(ending.GOES_ON)
        with shown_if_interrupted(
            lambda: largest_view(title, found),
            json_path,
            lambda: json_files(json_path, found.to_json),
        ) as draw:
            try:
                find_largest(found, asked.measure, effort, draw)
            except NotUsable as error:
                stopped = error
    if any(one.fits is not None for one in found.rows):
        show(largest_view(title, found), json_path=json_path)
        emit_json(json_path, found.to_json())
    if stopped:
        line = asked.refusal(stopped.value, str(stopped), asked.steps())
        raise InputError(line) if isinstance(stopped.__cause__, InputError) else Failed(line)
    if found.value is None:
        raise Failed(verdict(found))

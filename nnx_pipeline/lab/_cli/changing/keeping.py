"""What `fit --over remat` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._cli.changing.policies import change_of, to_paste
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress, shown_if_interrupted
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._report.kept import kept_view, nothing_fits
from nnx_pipeline.lab._report.output import emit_json, json_files, show
from nnx_pipeline.lab._timing.devices import DEVICES, device_of
from nnx_pipeline.lab.api import measure, traced_call
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.lint.tries import space_of
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.lab.search.choices import Choice, Space
from nnx_pipeline.lab.search.effort import Effort
from nnx_pipeline.lab.search.kept import Kept, find_fastest
from nnx_pipeline.lab.search.over import MemoryLimit

_FIELDS = ("pipeline.remat", "pipeline.save_decoder_layer_input")


class Choosable(NamedTuple):
    """What there is to choose, how a choice is compiled, and how it is written."""

    space: Space
    make: Callable[[Choice], Measurement]
    paste: Callable[[Choice], str]


def _check(subject: Subject, platform: Platform) -> None:
    """Raises InputError where a search has no figures to go by, or no say."""
    if device_of(platform.kind, platform.target) is None:
        known = sorted({f"{kind}:{target}" for kind, target in DEVICES})
        raise InputError(
            f"--over remat needs the time of a step, of which nothing is known on {platform}; "
            f"choose a platform that has one: {', '.join(known)}"
        )
    for text in subject.assignments:
        if text.partition("=")[0].strip() in _FIELDS:
            raise InputError(
                f"--set {text} has no effect beside --over remat, which chooses it; leave out one "
                "of the two"
            )


def run_remat(subject: Subject, platform: Platform, limit: str, json_path: str | None) -> None:
    """Searches, shows the frontier and what to write, and raises Failed where nothing fits."""
    _check(subject, platform)
    most = MemoryLimit.parse(limit, platform)
    title = f"{subject.title()}, {platform}: MB per device"
    what = " ".join([*subject.words(), str(subject.mesh), str(platform), "remat"])
    with progress() as say, compiler_errors():
        say("looking for what can be kept")
        chosen = of_preset(subject, platform) if subject.config else of_function(subject, platform)
        kept = Kept(chosen.space, most, str(platform), chosen.paste)
        effort = Effort(what=what, most=0, cache=Cache.of_user(), say=say)
        if effort.cache.folder is not None:
            ending.add_note(ending.GOES_ON)
        with shown_if_interrupted(
            lambda: kept_view(title, kept),
            json_path,
            lambda: json_files(json_path, kept.to_json),
        ) as draw:
            find_fastest(kept, chosen.make, effort, draw)
    show(kept_view(title, kept), json_path=json_path)
    emit_json(json_path, kept.to_json())
    if kept.fastest is None:
        raise Failed(nothing_fits(kept))


def of_preset(subject: Subject, platform: Platform) -> Choosable:
    offered, mesh = presets(), subject.mesh
    assert isinstance(mesh, MeshConfig), "that of a preset"
    space = offered.remat_space(subject.config, mesh, offloads=platform.kind != "cpu")

    def settings(choice: Choice) -> list[str]:
        return offered.remat_settings(subject.config, space, choice)

    def make(choice: Choice) -> Measurement:
        assignments = (*subject.assignments, *settings(choice))
        config = offered.config_of(subject.name, assignments, mesh)
        return offered.measure_step(config, mesh, platform)

    return Choosable(space, make, lambda choice: _flags(settings(choice)))


def _flags(settings: list[str]) -> str:
    return "\n".join(f"--set {text}" for text in settings)


def of_function(subject: Subject, platform: Platform) -> Choosable:
    grid, arguments = subject.inputs.on(subject.mesh, platform)
    function = find_function(subject.name)
    space, watched = space_of(
        lambda: traced_call(function, *arguments, mesh=grid, platform=platform),
        offloads=platform.kind != "cpu",
    )

    def make(choice: Choice) -> Measurement:
        with change_of(space, choice).applied():
            return measure(function, *arguments, mesh=grid, platform=platform)

    calls = [*watched.checkpoints]
    return Choosable(space, make, lambda choice: to_paste(space, choice, calls))

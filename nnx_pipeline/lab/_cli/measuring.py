"""What the commands `measure`, `memory` and `compare` do."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType

from nnx_pipeline.lab._cli.outputs import ComparisonOutputs, MemoryOutputs, Outputs, Written
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import GivenArguments, Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Costing, TwoArms
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.output import as_text, emit_json, show
from nnx_pipeline.lab._report.trials import trials_remarks, trials_view
from nnx_pipeline.lab._report.view import words
from nnx_pipeline.lab._report.view.figures import in_place_of_report
from nnx_pipeline.lab.api import compare, measure
from nnx_pipeline.lab.attribution._result import ADVICE, Attribution
from nnx_pipeline.lab.comparison.changes import AS_IT_IS, Change, setting_changes, together
from nnx_pipeline.lab.comparison.trials import Trial, Trials
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile._places import mesh_on
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, counted, described
from nnx_pipeline.lab.explain.explanation import promised
from nnx_pipeline.lab.lint.tries import changes_of
from nnx_pipeline.lab.mesh import MeshConfig


def measured(subject: Subject, platforms: Sequence[Platform]) -> list[Measurement]:
    """The figures for each platform; these differ in the kind of matrix products alone."""
    with progress() as say, compiler_errors():
        if isinstance(subject.mesh, MeshConfig):
            step = presets().measure_step
            return [step(subject.config, subject.mesh, one, progress=say) for one in platforms]
        grid, arguments = subject.inputs.on(subject.mesh, platforms[0])
        function = find_function(subject.name)
        return [
            measure(function, *arguments, mesh=grid, platform=one, progress=say)
            for one in platforms
        ]


def run_measure(
    subject: Subject, platforms: Sequence[Platform], costing: Costing, written: Written
) -> None:
    results = [costing.of(result) for result in measured(subject, platforms)]
    advice = ADVICE if subject.config is None else presets().ADVICE
    title = subject.title()
    quiet = written.to_standard_output
    report.show_measurements(title, results, json_path=quiet, advice=advice)
    own = report.with_other_gemm([result.to_json() for result in results])
    written.emit(own, [(title, result) for result in results])
    written.say_words(words.MEMORY, words.TIME)
    if written.hlo_path:
        write_text(written.hlo_path, results[0].hlo)


def run_platforms(
    subject: Subject, platforms: Sequence[Platform], costing: Costing, outputs: Outputs
) -> None:
    from nnx_pipeline.lab._report.platforms_table import Row, platforms_view

    # What does not go with the mesh is said before minutes of work. AMD's plugin must be there when
    # JAX starts, every other one may start it, and the devices here start it for good.
    for one in sorted(platforms, key=lambda one: (one.kind == "local", one.kind != "rocm")):
        try:
            mesh_on(subject.mesh, one.devices(subject.mesh.num_devices))
        except InputError as error:
            raise InputError(f"--platform {one}: {error}") from error
    rows: list[Row] = []
    refused: list[InputError] = []
    for platform in platforms:
        try:
            (result,) = measured(subject, [platform])
        except (Failed, InputError) as error:
            rows.append((str(platform), str(error)))
            refused += [error] if isinstance(error, InputError) else []
        else:
            rows.append((str(platform), costing.of(result)))
    if len(refused) == len(rows):
        raise refused[0]
    show(platforms_view(subject.title(), rows), json_path=outputs.json_path)
    outputs.say_words(words.MEMORY, words.TIME)
    results = [
        {"platform": name, "error": found} if isinstance(found, str) else found.to_json()
        for name, found in rows
    ]
    emit_json(outputs.json_path, {"schema": 1, "platforms": results})
    if failed := [name for name, found in rows if isinstance(found, str)]:
        raise Failed(f"failed: {', '.join(failed)}; the lines below the table say why")


def run_memory(
    subject: Subject, platforms: Sequence[Platform], outputs: MemoryOutputs, most: int
) -> None:
    results, title = measured(subject, platforms), subject.title()
    attributions = [_with_buffers(result) for result in results]
    lines = [in_place_of_report(results[0], other) for other in results[1:]]
    for result, line in zip(results, [None, *lines], strict=True):
        # A second program with the same memory is one line rather than the same table again.
        if line is not None:
            show(line, json_path=outputs.json_path)
            continue
        show(report.memory_report(title, result, top=most), json_path=outputs.json_path)
    outputs.say_words(words.BUFFERS, words.MEMORY, words.TIME)
    rows = [
        {
            **result.to_json(),
            "buffers": attribution.to_json(),
            "time_by_line": result.time and [dataclasses.asdict(row) for row in result.time.rows],
        }
        for result, attribution in zip(results, attributions, strict=True)
    ]
    emit_json(outputs.json_path, report.with_other_gemm(rows))
    shown = results if None in lines else results[:1]
    outputs.write_measurement(title, shown, most)
    outputs.write_profile(title, results[0])


def run_tries(subject: Subject, platform: Platform, outputs: MemoryOutputs, most: int) -> None:
    """Compiles the function as it is, then with each change, and shows what these gain and cost."""
    title = f"{subject.title()}, {platform}: per device"
    with progress() as say, compiler_errors():
        grid, arguments = subject.inputs.on(subject.mesh, platform)
        function = find_function(subject.name)
        say("tracing: what can be changed")
        changes, left_out = changes_of(function, *arguments, mesh=grid, platform=platform)

        def compiled(change: Change) -> Measurement:
            with change.applied():
                changed, target = change.of(function), change.on(platform)
                return measure(changed, *arguments, mesh=grid, platform=target)

        say(f"compiling for {platform}")
        base = compiled(AS_IT_IS)
        trials = Trials(base=base, left_out=left_out, promised=promised(base))
        changes += setting_changes(trials.base, platform)
        _try_all(trials, changes, compiled, say, functools.partial(trials_view, title))
    show(trials_view(title, trials), json_path=outputs.json_path)
    outputs.say_words(words.CHANGES, words.MEMORY, words.TIME)
    buffers = trials.base.attribution
    emit_json(
        outputs.json_path,
        {
            **trials.base.to_json(),
            "buffers": buffers and buffers.to_json(),
            **trials.to_json(),
        },
    )
    outputs.write_measurement(title, [trials.base], most, trials_remarks(trials))
    outputs.write_profile(title, trials.base)


def _try_all(
    trials: Trials,
    changes: Sequence[Change],
    compiled: Callable[[Change], Measurement],
    say: Progress,
    view: Callable[[Trials], RenderableType],
) -> None:
    """Tries each change, and the best ones together; a run that is interrupted prints the table of
    those before."""
    first = trials.base.seconds["trace"] + trials.base.seconds["compile"]
    total = len(changes) + (len({change.kinds for change in changes}) > 1)
    say(f"up to {counted(total, 'compile')} to come; the first took {first:,.0f} s")
    # Drawn now, since another thread prints it, which may import nothing.
    shown = as_text(view(trials))
    with cleared_away(lambda: os.write(1, f"{shown}\n".encode())):
        for number, change in enumerate(itertools.chain(changes, _last(trials)), 1):
            say(f"{number} of {total}: {change.name}")
            trials.waiting = total - number
            try:
                trials.tried.append(Trial(change=change, result=compiled(change)))
            except Exception as error:  # a change may break any function in any way
                trials.tried.append(Trial(change=change, error=described(error, most=200)))
            shown = as_text(view(trials))
    trials.waiting = 0


def _last(trials: Trials) -> Iterator[Change]:
    """The best changes together, once all others are tried; nothing for one alone."""
    if len(best := trials.best()) > 1:
        yield together(best)


def _with_buffers(result: Measurement) -> Attribution:
    try:
        return report.buffers_of(result)
    except InputError as error:  # nothing that was given on the command line is wrong
        raise Failed(str(error)) from error


def run_compare(
    names: tuple[str, str],
    inputs: GivenArguments,
    target: TwoArms,
    pairs: Sequence[tuple[Platform, Platform]],
    outputs: ComparisonOutputs,
) -> None:
    with progress() as say, compiler_errors():
        grid, arguments = inputs.on(target.axes, pairs[0][0])
        one, other = (
            f"{name}, {option}" if option else name
            for name, option in zip(names, target.options, strict=True)
        )
        arms = functools.partial(compare, *map(find_function, names), *arguments, mesh=grid)
        outcomes = [[arms(platform=pair, labels=(one, other), progress=say)] for pair in pairs]
    title = f"{names[0]} and {names[1]} on {target.axes}, {target.platform}: per device"
    outputs.report(title, outcomes, target.platform)
    if failed := [outcome.note for (outcome,) in outcomes if outcome.failed]:
        # Both kinds of matrix products may fail for the same reason, which is then given once.
        raise Failed("; ".join(dict.fromkeys(failed)))
    outputs.fail_if_worse(outcomes)

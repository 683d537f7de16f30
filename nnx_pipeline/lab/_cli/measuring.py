"""What the commands `measure`, `memory` and `compare` do."""

import dataclasses
import functools
import os
from collections.abc import Sequence

from nnx_pipeline.lab._cli.outputs import ComparisonOutputs, MemoryOutputs, Outputs, Written
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import GivenArguments, Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Costing, TwoArms
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.columns import texts
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.view import words
from nnx_pipeline.lab._report.view.figures import in_place_of_report
from nnx_pipeline.lab._report.view.remarks import Kept
from nnx_pipeline.lab._tracing.jaxpr import place_of
from nnx_pipeline.lab.api import compare, measure
from nnx_pipeline.lab.attribution._result import ADVICE, Attribution
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile._places import mesh_on
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig

WORTH, SMALLEST = 0.01, 10**6  # of the account, and bytes: donations of less are not named


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
    kept = _kept_arguments(subject, results[0])
    if kept:
        show(*texts([kept.remark]), json_path=outputs.json_path)
    outputs.say_words(words.BUFFERS, words.MEMORY, words.TIME)
    rows = [
        {
            **result.to_json(),
            "buffers": attribution.to_json(),
            "not_donated": kept and dataclasses.asdict(kept),
            "time_by_line": result.time and [dataclasses.asdict(row) for row in result.time.rows],
        }
        for result, attribution in zip(results, attributions, strict=True)
    ]
    emit_json(outputs.json_path, report.with_other_gemm(rows))
    shown = results if None in lines else results[:1]
    outputs.write_measurement(title, shown, most)
    outputs.write_profile(title, results[0])


def _kept_arguments(subject: Subject, result: Measurement) -> Kept | None:
    """What a function could donate, if that is worth a line."""
    memory = result.memory
    if subject.config is not None or memory.output_bytes - memory.alias_bytes < SMALLEST:
        return None
    from nnx_pipeline.lab.explain.explanation import donations_of, root_of

    given, gain = donations_of(result)
    if gain < WORTH * result.needed_bytes:
        return None
    place = place_of(find_function(subject.name))
    source = f"{os.path.basename(place.file)}:{place.line}"
    names = dict.fromkeys(root_of(one.name) for one in given)
    return Kept(tuple(names), len(given), gain, place.function, source)


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

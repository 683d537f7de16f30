"""What the commands `measure`, `memory` and `compare` do."""

import dataclasses
import functools
from collections.abc import Sequence

from nnx_pipeline.lab._cli.outputs import Outputs, Written
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import GivenArguments, Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Costing, TwoArms
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.program_tables import memory_view, times_view
from nnx_pipeline.lab._report.view import words
from nnx_pipeline.lab._report.view.figures import compiler, products_by, same_memory
from nnx_pipeline.lab._report.view.remarks import FIGURES, unread_lines
from nnx_pipeline.lab.api import compare, measure
from nnx_pipeline.lab.attribution._result import ADVICE, Attribution
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile._places import mesh_on
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig


def measured(
    subject: Subject, mesh: MeshConfig, platforms: Sequence[Platform]
) -> list[Measurement]:
    """The figures for each platform; these differ in the kind of matrix products alone."""
    with progress() as say, compiler_errors():
        if subject.config is not None:
            step = presets().measure_step
            return [step(subject.config, mesh, one, progress=say) for one in platforms]
        grid, arguments = subject.inputs.on(mesh, platforms[0])
        function = find_function(subject.name)
        return [
            measure(function, *arguments, mesh=grid, platform=one, progress=say)
            for one in platforms
        ]


def run_measure(
    subject: Subject,
    mesh: MeshConfig,
    platforms: Sequence[Platform],
    costing: Costing,
    written: Written,
) -> None:
    results = [costing.of(result) for result in measured(subject, mesh, platforms)]
    advice = ADVICE if subject.config is None else presets().ADVICE
    title = subject.title(mesh)
    report.show_measurements(title, results, json_path=written.json_path, advice=advice)
    written.say_words(words.MEMORY, words.TIME)
    if written.hlo_path:
        write_text(written.hlo_path, results[0].hlo)


def run_platforms(
    subject: Subject,
    mesh: MeshConfig,
    platforms: Sequence[Platform],
    costing: Costing,
    outputs: Outputs,
) -> None:
    from nnx_pipeline.lab._report.platforms_table import Row, platforms_view

    # What does not go with the mesh is said before minutes of work. AMD's plugin must be there when
    # JAX starts, and every other one may start it.
    for one in sorted(platforms, key=lambda one: one.kind != "rocm"):
        mesh_on(mesh, one.devices(mesh.num_devices))
    rows: list[Row] = []
    refused: list[InputError] = []
    for platform in platforms:
        try:
            (result,) = measured(subject, mesh, [platform])
        except (Failed, InputError) as error:
            rows.append((str(platform), str(error)))
            refused += [error] if isinstance(error, InputError) else []
        else:
            rows.append((str(platform), costing.of(result)))
    if len(refused) == len(rows):
        raise refused[0]
    show(platforms_view(subject.title(mesh), rows), json_path=outputs.json_path)
    outputs.say_words(words.MEMORY, words.TIME)
    results = [
        {"platform": name, "error": found} if isinstance(found, str) else found.to_json()
        for name, found in rows
    ]
    emit_json(outputs.json_path, {"schema": 1, "platforms": results})
    if failed := [name for name, found in rows if isinstance(found, str)]:
        raise Failed(f"failed: {', '.join(failed)}; the lines below the table say why")


def run_memory(
    subject: Subject, mesh: MeshConfig, platforms: Sequence[Platform], outputs: Outputs, most: int
) -> None:
    results, title = measured(subject, mesh, platforms), subject.title(mesh)
    attributions = [_with_buffers(result) for result in results]
    differ = len({result.memory for result in results}) > 1
    for result, attribution in zip(results, attributions, strict=True):
        # A second program with the same memory is one line rather than the same table again.
        if result is not results[0] and not differ:
            show(same_memory(result.platform), json_path=outputs.json_path)
            continue
        by = f", matrix products by {products_by(result)}" if result.gemm else ""
        named = f"{title}, {compiler(result)}{by}"
        show(memory_view(named, attribution, top=most), json_path=outputs.json_path)
        show(report.account_view(result), json_path=outputs.json_path)
        if result.time or result.unread:
            show(times_view(result, top=most), json_path=outputs.json_path)
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
    shown = results if differ else results[:1]
    outputs.write_measurement(title, shown, most)


def _with_buffers(result: Measurement) -> Attribution:
    if result.attribution is None:
        if unread := [line for line in unread_lines([result]) if FIGURES["buffers"] in line]:
            raise Failed(unread[0])
        raise Failed(
            f"{result.platform} gave no buffer assignment; a program from JAX's persistent "
            "compilation cache has none: unset jax_compilation_cache_dir"
        )
    return result.attribution


def run_compare(
    names: tuple[str, str],
    inputs: GivenArguments,
    target: TwoArms,
    pairs: Sequence[tuple[Platform, Platform]],
    outputs: Outputs,
) -> None:
    with progress() as say, compiler_errors():
        grid, arguments = inputs.on(target.mesh_config, pairs[0][0])
        one, other = (
            f"{name}, {option}" if option else name
            for name, option in zip(names, target.options, strict=True)
        )
        arms = functools.partial(compare, *map(find_function, names), *arguments, mesh=grid)
        outcomes = [[arms(platform=pair, labels=(one, other), progress=say)] for pair in pairs]
    title = f"{names[0]} and {names[1]} on {target.mesh_config}, {target.platform}: per device"
    report.show_outcomes(title, outcomes, target.platform, json_path=outputs.json_path)
    outputs.say_words(words.MEMORY, words.TIME, words.VERDICTS, words.BUFFERS)
    outputs.write_outcomes(title, outcomes)
    if failed := [outcome.note for (outcome,) in outcomes if outcome.failed]:
        # Both kinds of matrix products may fail for the same reason, which is then given once.
        raise Failed("; ".join(dict.fromkeys(failed)))

"""What `memory --try` does; apart from the others, which need less."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnx_pipeline.lab._cli.outputs import MemoryOutputs
from nnx_pipeline.lab._cli.progress import progress, shown_if_interrupted
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import compiler_errors
from nnx_pipeline.lab._files import Lasting
from nnx_pipeline.lab._report.output import emit_json, json_files, show
from nnx_pipeline.lab._report.trials import trials_remarks, trials_view
from nnx_pipeline.lab._report.view import words
from nnx_pipeline.lab.api import measure, traced_call
from nnx_pipeline.lab.comparison.changes import AS_IT_IS, Change, setting_changes, together
from nnx_pipeline.lab.comparison.trials import Trial, Trials
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import counted, described
from nnx_pipeline.lab.explain.explanation import promised
from nnx_pipeline.lab.lint.tries import changes_of


def run_tries(subject: Subject, platform: Platform, outputs: MemoryOutputs, most: int) -> None:
    """Compiles the function as it is, then with each change, and shows what these gain and cost."""
    title = f"{subject.title()}, {platform}: per device"
    with progress() as say, compiler_errors():
        grid, arguments = subject.inputs.on(subject.mesh, platform)
        function = find_function(subject.name)
        say("tracing: what can be changed")
        changes, left_out = changes_of(
            lambda: traced_call(function, *arguments, mesh=grid, platform=platform)
        )

        def compiled(change: Change) -> Measurement:
            with change.applied():
                changed, target = change.of(function), change.on(platform)
                return measure(changed, *arguments, mesh=grid, platform=target)

        say(f"compiling for {platform}")
        base = compiled(AS_IT_IS)
        trials = Trials(base=base, left_out=left_out, promised=promised(base))
        changes += setting_changes(base, platform)
        path, buffers = outputs.json_path, base.attribution

        def document() -> dict[str, Any]:
            listed = {"buffers": buffers and buffers.to_json()}
            return {**base.to_json(), **listed, **trials.to_json()}

        with shown_if_interrupted(
            lambda: trials_view(title, trials),
            outputs.to_standard_output,
            lambda: json_files(path, document),
        ) as draw:
            _try_all(trials, changes, compiled, say, draw)
    show(trials_view(title, trials), json_path=path)
    outputs.say_words(words.CHANGES, words.MEMORY, words.TIME)
    emit_json(path, document())
    outputs.write_measurement(title, [base], most, trials_remarks(trials, gains=True))
    outputs.write_profile(title, base)


def _try_all(
    trials: Trials,
    changes: Sequence[Change],
    compiled: Callable[[Change], Measurement],
    say: Progress,
    draw: Callable[[], None],
) -> None:
    """Tries each change, and the best ones together."""
    first = trials.base.seconds["trace"] + trials.base.seconds["compile"]
    total = trials.waiting = len(changes) + (len({change.kinds for change in changes}) > 1)
    say(Lasting(f"up to {counted(total, 'compile')} to come; the first took {first:,.0f} s"))
    draw()
    for number, change in enumerate(itertools.chain(changes, _last(trials)), 1):
        say(f"{number} of {total}: {change.name}")
        try:
            trials.tried.append(Trial(change=change, result=compiled(change)))
        except Exception as error:  # a change may break any function in any way
            trials.tried.append(Trial(change=change, error=described(error, most=200)))
        trials.waiting = total - number
        draw()
    trials.waiting = 0


def _last(trials: Trials) -> Iterator[Change]:
    """The best changes together, once all others are tried; nothing for one alone."""
    if len(best := trials.best()) > 1:
        yield together(best)

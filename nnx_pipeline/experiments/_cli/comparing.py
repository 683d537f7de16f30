"""What `compare` does with presets and experiments."""

import dataclasses
from collections.abc import Sequence

from nnx_pipeline.config._overrides import parse_overrides
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.experiments._cli.listing import list_experiments
from nnx_pipeline.experiments._cli.sweep import run_sweep
from nnx_pipeline.experiments._registry import choose
from nnx_pipeline.experiments._run import compare_steps, run_experiments
from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._cli.options import check_alone, chosen_config, is_given
from nnx_pipeline.lab._cli.outputs import ComparisonOutputs
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Chosen, Measuring, TwoArms
from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.errors import InputError

MODEL, MESH = "mixtral-small", "stage=4,fsdp=2"  # where none is named


def run_comparison(
    names: Sequence[str],
    chosen: Chosen,
    target: TwoArms,
    measuring: Measuring,
    outputs: ComparisonOutputs,
) -> None:
    """Compares the programs of experiments, of a sweep, of two settings or of two presets.

    - `names`: presets first, one at most beside experiments.

    Raises InputError for what does not go together, and Failed where a program does not compile.
    """
    if measuring.listed:
        check_alone("listed", "json_path")
        list_experiments(outputs.json_path)
        return
    models = [name for name in names if name in PRESETS]
    experiments = [name for name in names if name not in PRESETS]
    if chosen.model is not None:
        models.append(chosen.model)
    _check(models, experiments, target, measuring)
    choose(experiments)  # a name that is not known is said before anything begins
    if not is_given("mesh"):
        target = dataclasses.replace(target, mesh=MESH)
    target = target.settled()
    cache = Cache.of_user(fresh=measuring.fresh)
    if cache.folder is not None:
        ending.add_note(ending.GOES_ON)
    steps = [Chosen(model, chosen.assignments) for model in models or (MODEL,)]
    if measuring.sweeps:
        run_sweep(experiments, measuring.sweeps, steps[0], target, cache, outputs)
    elif len(steps) > 1 or any(target.options):
        _compare_steps(steps, target, cache, outputs)
    else:
        _run_experiments(experiments, steps[0], target, cache, outputs)


def _check(
    models: Sequence[str], experiments: Sequence[str], target: TwoArms, measuring: Measuring
) -> None:
    """Raises InputError where one thing that differs would come on top of another."""
    option = next(filter(None, target.options), "")
    several = f"{models[0]} and {models[1]}" if len(models) > 1 else ""
    if option and experiments:
        raise InputError(
            f"{option} cannot be combined with {experiments[0]}, whose arms differ in one thing "
            "already; leave out the name to compare a training step with and without the setting, "
            "or give it to both arms by --xla"
        )
    if option and measuring.sweeps:
        raise InputError(f"{option} cannot be combined with --sweep; use --xla instead")
    if len(models) > 2 or (several and (option or experiments or measuring.sweeps)):
        extra = models[2:] or [*filter(None, (option,)), *experiments, "--sweep"]
        raise InputError(
            f"{several} are two presets to compare; leave out {extra[0]}, or one of the presets"
        )


def _compare_steps(
    steps: Sequence[Chosen], target: TwoArms, cache: Cache, outputs: ComparisonOutputs
) -> None:
    """Compares the steps of two presets, or one step with two settings."""
    a, b = chosen_config(steps[0]), chosen_config(steps[-1])
    mesh, pairs = target.mesh_config, target.pairs()
    labels = target.labels if len(steps) == 1 else (str(steps[0].model), str(steps[1].model))
    with progress() as say, compiler_errors():
        outcomes = [
            [compare_steps((a, b), mesh, pair, labels, cache=cache, progress=say)] for pair in pairs
        ]
    heading = presets().title(str(steps[0].model), a, mesh)
    if len(steps) > 1:
        heading = f"training steps of {' and '.join(labels)} on {mesh}"
    _report(heading, outcomes, target, outputs)


def _run_experiments(
    names: Sequence[str], chosen: Chosen, target: TwoArms, cache: Cache, outputs: ComparisonOutputs
) -> None:
    experiments, config, mesh = choose(names), chosen_config(chosen), target.mesh_config
    overrides = parse_overrides(chosen.assignments)
    with progress() as say, compiler_errors():
        outcomes = [
            run_experiments(
                experiments, config, mesh, platform, overrides=overrides, cache=cache, progress=say
            )
            for platform, _ in target.pairs()
        ]
    _report(presets().title(str(chosen.model), config, mesh), outcomes, target, outputs)


def _report(
    what: str, results: Sequence[Sequence[Outcome]], target: TwoArms, outputs: ComparisonOutputs
) -> None:
    """Shows and writes the outcomes; raises Failed if one of them failed."""
    heading = f"{what}; {target.platform}, per device"
    outputs.report(heading, results, target.platform)
    failed = [outcome.question.name for row in results for outcome in row if outcome.failed]
    if failed:
        # With both kinds of matrix products an experiment may fail twice; it is named once.
        raise Failed(f"failed: {', '.join(dict.fromkeys(failed))}; the notes say why")
    outputs.fail_if_worse(results)

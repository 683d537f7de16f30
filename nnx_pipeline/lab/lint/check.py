"""Traces a function and applies the rules to its jaxpr; nothing is computed or compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from nnx_pipeline.lab._tracing.calls import Call, jaxpr_of, jit_for, traced_afresh
from nnx_pipeline.lab._tracing.jaxpr import place_of
from nnx_pipeline.lab.compile._functions import called_with, check_sizes
from nnx_pipeline.lab.compile._places import check_places
from nnx_pipeline.lab.lint import _rules_activations as activations
from nnx_pipeline.lab.lint import _rules_arrays as arrays
from nnx_pipeline.lab.lint import _rules_donation as donation
from nnx_pipeline.lab.lint import _rules_gathers as gathers
from nnx_pipeline.lab.lint import _rules_one_hot as one_hot
from nnx_pipeline.lab.lint._facts import LintedProgram, Waste
from nnx_pipeline.lab.lint._parameters import parameters_of
from nnx_pipeline.lab.lint._rules_loops import gradients_per_microbatch, parameters_in_loops
from nnx_pipeline.lab.lint._rules_remat import remat_policies
from nnx_pipeline.lab.lint._rules_states import states_stored
from nnx_pipeline.lab.lint.finding import Finding, Limits, Severity


class LintRule(NamedTuple):
    """A rule, how severe its findings are, and its smallest size: a field of `Limits`, so often,
    and at least this share of what the function is given."""

    find: Callable[[LintedProgram, float], Iterator[Waste]]
    severity: Severity = "warning"
    limit: str = "large"
    times: int = 1
    share: float = 0.0


def _meant(find: Callable[[LintedProgram, float], Iterator[Waste]]) -> LintRule:
    """A rule about what models make on purpose, such as scores and logits: for larger sizes."""
    return LintRule(find, times=32, share=0.05)


RULES = {
    "not-donated": LintRule(donation.not_donated),
    "donation-lost": LintRule(donation.donations_lost),
    "cache-rebuilt": LintRule(donation.caches_rebuilt),
    "residuals-stacked": _meant(activations.residuals_stacked),
    "scores-stored": _meant(activations.scores_stored),
    "logits-stored": _meant(activations.logits_stored),
    "states-stored": _meant(states_stored),
    "dispatch-stored": _meant(one_hot.dispatch_stored),
    "layers-gathered": LintRule(gathers.stacks_gathered),
    "gathered-twice": LintRule(gathers.gathered_twice),
    "replicated-parameter": LintRule(gathers.replicated_parameters),
    "captured-constant": LintRule(arrays.captured_constants, times=4),
    "parameter-in-loop": LintRule(parameters_in_loops),
    "gradient-per-microbatch": LintRule(gradients_per_microbatch),
    "remat-policy": LintRule(remat_policies),
    "cast-before-loop": LintRule(arrays.casts_before_loops, times=32),
    "hidden-upcast": LintRule(arrays.hidden_upcasts),
    "one-hot": LintRule(one_hot.one_hot_arrays, limit="one_hot"),
    "trivial-constraint": LintRule(arrays.trivial_constraints, "advice"),
}


def lint(
    function: Callable[..., object],
    *arguments: object,
    mesh: Mesh | AbstractMesh | None = None,
    parameters: object = None,
    limits: Limits = Limits(),
) -> list[Finding]:
    """Finds what costs memory without need in a function, largest first.

    - `function`: jitted or not, see `lab.measure`. It is traced afresh. To have the backward pass
      checked, give a function that contains it, such as a training step.
    - `arguments`: pytrees of arrays or of `jax.ShapeDtypeStruct`, with a sharding where it matters.
    - `mesh`: the mesh under which the function is traced, which needs no devices.
    - `parameters`: the part of the arguments, as the same objects, whose arrays are the parameters.
      Without it they are the `nnx.Param`s of all arguments, or, if there are no NNX variables, the
      floating-point arrays of those arguments that a program with a backward pass multiplies by and
      returns in their shapes; if there are none of these, of the first argument.
    - `limits`: the sizes in bytes below which nothing is reported.

    Raises InputError for arguments that are no arrays, or not sharded over this mesh.
    """
    check_sizes(arguments)
    if mesh is not None:
        check_places(arguments, mesh)
    call = Call.of(function, arguments)
    with _under(mesh), traced_afresh(), called_with(call):
        traced, inputs = jaxpr_of(call)
    program = LintedProgram(
        traced,
        frozenset(),
        inputs,
        place_of(call.function),
        jit_for(call),
        dict(mesh.shape) if mesh is not None else {},
    )
    if parameters is None:
        program.parameters = parameters_of(program, call.given)
    else:
        wanted = set(map(id, jax.tree.leaves(parameters)))
        program.parameters = frozenset(n for n, one in enumerate(inputs) if id(one.leaf) in wanted)
    return check_program(program, limits)


def _under(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager[object]:
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def check_program(program: LintedProgram, limits: Limits) -> list[Finding]:
    """The findings of all rules, largest first; of one rule and line only the largest."""
    by_line: dict[object, list[Finding]] = {}
    for name, rule in RULES.items():
        smallest = rule.times * getattr(limits, rule.limit)
        smallest = max(smallest, rule.share * program.given_bytes)
        for location, size, what, cure in rule.find(program, smallest):
            finding = Finding(
                rule=name,
                severity=rule.severity,
                location=location,
                bytes=size.bytes,
                per_device=size.per_device,
                what=what,
                cure=cure,
            )
            by_line.setdefault((name, location), []).append(finding)
    merged = [
        dataclasses.replace(max(same, key=lambda finding: finding.bytes), times=len(same))
        for same in by_line.values()
    ]
    return sorted(merged, key=lambda finding: (-finding.bytes, finding.rule, finding.location))
